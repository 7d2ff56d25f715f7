"""Steps of one parameter at a time, most of them in backward: a plain step's bits, and gradients never all alive."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lowtide.optim as lo
from lowtide import LowtideError
from lowtide.optim import hooks
from lowtide.optim.in_backward import is_stepped_in_backward
from tests.optim.training import BATCHES, OPTIMIZERS, WAYS, equal, make, train


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["in backward", "cpu"])
def test_the_same_bits_as_a_plain_step(name, way):
    expected, state = [], []
    for use in (WAYS["plain"], WAYS[way]):
        model = make()
        optimizer = OPTIMIZERS[name](model.parameters())
        use(optimizer)
        expected.append(train(model, optimizer, BATCHES[:5]))
        state.append(optimizer.state_dict())
    assert equal(*expected)
    assert state[0]["param_groups"] == state[1]["param_groups"]
    for number, held in state[0]["state"].items():
        torch.testing.assert_close(state[1]["state"][number], held, rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        hidden = checkpoint(lambda t: torch.tanh(self.mix(self.embed(t))), x, use_reentrant=False)
        return F.cross_entropy(F.linear(hidden, self.embed.weight), x)


def test_tied_weights_under_a_checkpoint_step_once_in_backward():
    x = torch.arange(20)
    results = []
    for use in (WAYS["plain"], WAYS["in backward"]):
        model = Tied()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        use(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
        assert all(state["step"] == 3 for state in optimizer.state.values())
    assert equal(*results)


def test_gradients_are_never_all_alive_in_backward():
    model = make()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    alive = []

    def count(_):
        alive.append(sum(p.grad is not None for p in model.parameters()))

    handles = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
    with lo.step_in_backward(optimizer):
        train(model, optimizer, BATCHES[:1])
    assert max(alive) == 1
    for handle in handles:
        handle.remove()
    model(BATCHES[0]).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_scheduler_and_the_groups_of_the_users_optimizer_go_on():
    results = []
    for use in (WAYS["plain"], WAYS["in backward"]):
        model = make()
        layers = list(model.children())
        optimizer = torch.optim.SGD(
            [{"params": layers[0].parameters(), "lr": 0.1}, {"params": layers[2].parameters()}], lr=0.01, momentum=0.9
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        use(optimizer)
        for x in BATCHES[:4]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
        results.append([p.detach() for p in model.parameters()])
    assert equal(*results)


@pytest.mark.parametrize("first", ["8bit", "in backward"])
def test_8bit_states_and_steps_in_backward_work_together_in_either_order(first):
    results = []
    for both in (False, True):
        model = make()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        order = ["8bit", "in backward"] if first == "8bit" else ["in backward", "8bit"]
        undos = [WAYS[way](optimizer) for way in (order if both else ["8bit"])]
        results.append(train(model, optimizer, BATCHES[:4]))
        for undo in reversed(undos):
            undo()
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.state[model[0].weight]["step"] == 4
    assert equal(*results)


def test_rounding_and_steps_in_backward_work_together():
    results = []
    for ways in (["stochastic"], ["in backward", "stochastic"], ["stochastic", "in backward"]):
        model = make(torch.bfloat16)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        for way in ways:
            WAYS[way](optimizer)
        results.append(train(model, optimizer, BATCHES[:3]))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda optimizer: lo.store_gradients(optimizer, "8bit"), "Stored gradients wait for the step"),
        (lambda optimizer: lo.scale_rates(optimizer, 4, warmup_steps=2), "Scaled rates act while the optimizer steps"),
        (lambda optimizer: lo.LossScale().guard(optimizer), "A scaled loss looks at the gradients"),
    ],
    ids=["stored gradients", "scaled rates", "a scaled loss"],
)
def test_what_needs_the_step_refuses_steps_in_backward(before, reason):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with before(optimizer):
        with pytest.raises(LowtideError, match=reason):
            lo.step_in_backward(optimizer)
        assert not is_stepped_in_backward(weight)
    lo.step_in_backward(optimizer)()


def clip_with_norm(parameters, largest):
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, largest, norm)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, clip_with_norm])
@pytest.mark.parametrize("act", [lo.step_in_backward, lo.store_gradients])
def test_clipping_is_refused_where_gradients_are_gone(act, clip):
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def is_clipped(module: nn.Module) -> bool:
        clip(module.parameters(), 1e-3)
        return all(p.grad is not None and bool((p.grad.abs() <= 1e-3).all()) for p in module.parameters())

    with act(optimizer):
        (model(torch.ones(2, 4)) + other(torch.ones(2, 4))).sum().backward()
        for parameters in (model.parameters(), [*model.parameters(), *other.parameters()]):
            with pytest.raises(LowtideError, match=r"\(4, 4\) .* no gradient to clip"):
                clip(parameters, 1e-3)
        assert is_clipped(other)
    model(torch.ones(2, 4)).sum().backward()
    assert is_clipped(model)


def test_torchs_clipping_is_restored_by_the_last_undo():
    functions = (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_)

    def watched() -> list[bool]:
        return [f.__wrapped__ not in [cell.cell_contents for cell in f.__closure__] for f in functions]

    for left_by_another_test in list(hooks._refusals):
        hooks._end_refusal(left_by_another_test)
    assert not any(watched())
    for _ in range(2):
        first = lo.step_in_backward(torch.optim.SGD(nn.Linear(2, 2).parameters()))
        second = lo.store_gradients(torch.optim.SGD(nn.Linear(2, 2).parameters()))
        assert all(watched())
        first()
        first()
        assert all(watched())
        second()
        assert not any(watched())


def test_clipping_nothing_still_warns_while_it_is_watched():
    with (
        lo.step_in_backward(torch.optim.SGD(nn.Linear(2, 2).parameters())),
        pytest.warns(UserWarning, match="empty generator"),
    ):
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_is_told_that_steps_are_over(unscales):
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    undo = lo.step_in_backward(optimizer)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(LowtideError, match="GradScaler cannot unscale"):
        scaler.step(optimizer)
    undo()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)  # as without
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def test_a_closure_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5)
    with lo.step_in_backward(optimizer), pytest.raises(LowtideError, match="closure"):
        optimizer.step(lambda: 0.0)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("act", [lo.step_in_backward, lo.store_gradients])
def test_ddp_is_refused_before_anything_is_stepped(act, one_process):
    """It adds gradients up over processes after the hooks of parameters."""
    model = nn.Linear(4, 4)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    undo = act(early)
    wrapped = DistributedDataParallel(model)
    before = model.weight.detach().clone()
    with pytest.raises(LowtideError, match="DistributedDataParallel adds"):
        wrapped(torch.randn(2, 4)).sum().backward()
    assert torch.equal(model.weight, before)
    undo()
    with pytest.raises(LowtideError, match=r"DistributedDataParallel adds.*fully_shard"):
        act(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    others = nn.Linear(4, 4)
    act(torch.optim.SGD(others.parameters(), lr=0.1))
    others(torch.randn(2, 4)).sum().backward()
