"""Optimizers that take less memory: what a step does, against torch's own, and that a resumed run goes on as it was."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide.optim as lo
from lowtide.errors import LowtideError
from lowtide.optim.gradients import pack, unpack


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)


BATCHES = [torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) for i in range(12)]
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "AdamW8bit": lambda ps: lo.AdamW8bit(ps, lr=1e-2),
    "AdamW8bit stochastic": lambda ps: lo.AdamW8bit(ps, lr=1e-2, rounding="stochastic"),
}
WAYS = {
    "plain": lambda o: None,
    "in backward": lo.step_in_backward,
    "cpu": lambda o: lo.lower_state(o, "cpu"),
    "stochastic": lambda o: lo.round_updates(o, "stochastic"),
    "kahan": lambda o: lo.round_updates(o, "kahan"),
    "16bit gradients": lambda o: lo.store_gradients(o, "16bit"),
    "8bit gradients": lambda o: lo.store_gradients(o, "8bit"),
    "8bit": lambda o: lo.lower_state(o, "8bit"),
}


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- the same bits -----------------------------------------------------------------------------------------


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
        assert held.keys() == state[1]["state"][number].keys()
        assert all(
            torch.equal(value, state[1]["state"][number][key]) for key, value in held.items() if value is not None
        )


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


def test_a_scheduler_made_before_8bit_states_does_not_bypass_them():
    model = make()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with lo.lower_state(optimizer, "8bit"):
        train(model, optimizer, BATCHES[:1])
        assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 5e-3
    train(model, optimizer, BATCHES[:1])
    scheduler.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model[0].weight]["step"] == 2


# -- 8-bit states ------------------------------------------------------------------------------------------


def test_8bit_states_follow_torchs_adamw():
    model, other = make(), make()
    train(model, OPTIMIZERS["AdamW"](model.parameters()), BATCHES)
    train(other, OPTIMIZERS["AdamW8bit"](other.parameters()), BATCHES)
    start = make()
    for p, q, s in zip(model.parameters(), other.parameters(), start.parameters(), strict=True):
        assert (p - q).norm() < 0.05 * (p - s).norm()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_8bit_states_take_two_bytes_and_small_ones_stay(kind):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    plain = make()
    expected = train(plain, kind(plain.parameters(), lr=1e-2, weight_decay=0.1), BATCHES[:3])
    undo = lo.lower_state(optimizer, "8bit")
    found = train(model, optimizer, BATCHES[:3])
    assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(found, expected, strict=True) if b.norm() > 1e-2)
    weight, bias = optimizer.state[model[0].weight], optimizer.state[model[0].bias]
    values = 64 * 96
    assert sum(value.nbytes for key, value in weight.items() if key != "step") == 2 * values + 2 * 4 * values // 256
    assert bias["exp_avg"].dtype == torch.float32
    undo()
    assert type(optimizer) is kind
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (96, 64)
    train(model, optimizer, BATCHES[:1])


def test_8bit_states_that_were_not_stepped_come_back_bit_for_bit():
    model = make()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, BATCHES[:2])
    before = copy.deepcopy(optimizer.state_dict())
    lo.lower_state(optimizer, "8bit")()
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, held in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in held.items())


def test_channels_last_and_odd_parameters_step_as_contiguous_ones():
    torch.manual_seed(0)
    values = torch.randn(16, 24, 3, 5)
    gradient = torch.randn_like(values)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(values.clone(memory_format=layout))
        optimizer = lo.AdamW8bit([p], lr=0.1)
        for _ in range(3):
            p.grad = gradient.clone()
            optimizer.step()
        results.append(p.detach())
    assert results[1].is_contiguous(memory_format=torch.channels_last)
    # Other values share a block, so the codes differ a little; another order would be another step.
    assert (results[0] - results[1]).norm() < 0.02 * (results[0] - values).norm()
    gap = nn.Parameter(torch.randn(128, 128)[:, ::2])
    gap.grad = torch.randn(128, 64)
    before = gap.detach().clone()
    lo.AdamW8bit([gap], lr=0.1).step()
    assert ((gap - before).abs() > 0.05).all()


def test_what_cannot_be_lowered_says_so():
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(LowtideError, match="RMSprop has no states in 8bit"):
        lo.lower_state(torch.optim.RMSprop([weight]), "8bit")
    with pytest.raises(LowtideError, match="no optimizer state '3bit'"):
        lo.lower_state(torch.optim.AdamW([weight]), "3bit")
    optimizer = torch.optim.AdamW([weight])
    with lo.step_in_backward(optimizer), pytest.raises(LowtideError, match="already"):
        lo.step_in_backward(optimizer)
    with lo.lower_state(optimizer, "cpu"), pytest.raises(LowtideError, match="states on the host"):
        lo.round_updates(optimizer)
    with pytest.raises(LowtideError, match="closure"), lo.lower_state(optimizer, "cpu"):
        optimizer.step(lambda: weight.sum())


def test_4bit_states_are_torchaos_or_name_the_extra():
    model = make()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, BATCHES[:1])
    try:
        import torchao  # noqa: F401
    except ImportError:
        with pytest.raises(LowtideError, match=r"lowtide\[optim\]"):
            lo.lower_state(optimizer, "4bit")
        return
    other = make()
    expected = train(other, OPTIMIZERS["AdamW"](other.parameters()), BATCHES[:4])
    with lo.lower_state(optimizer, "4bit"):
        found = train(model, optimizer, BATCHES[1:4])
        codes = optimizer.state[model[0].weight]["exp_avg"].codes
        assert codes.nbytes == 64 * 96 // 2
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)
    assert all((a - b).norm() < 0.1 * b.norm() for a, b in zip(found, expected, strict=True) if b.norm() > 1e-1)
    train(model, optimizer, BATCHES[:1])


# -- 8-bit states with the others (two techniques at once) -------------------------------------------------


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


# -- saved and resumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("AdamW", way) for way in WAYS),
        *(("SGD", way) for way in ("in backward", "stochastic", "kahan", "8bit gradients")),
        ("AdamW8bit", "plain"),
        ("AdamW8bit stochastic", "plain"),
        ("AdamW8bit stochastic", "in backward"),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(name, way, dtype):
    def start():
        model = make(dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        WAYS[way](optimizer)
        return model, optimizer

    model, optimizer = start()
    train(model, optimizer, BATCHES[:4])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, BATCHES[4:8])
    file.seek(0)
    saved = torch.load(file)
    model, optimizer = start()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert equal(train(model, optimizer, BATCHES[4:8]), expected)


# -- rounding ----------------------------------------------------------------------------------------------


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([1.001, -3.003, 1e-20, 0.0, 123.4])
    draws = 4000
    found = lo.round_stochastically(x.repeat(draws, 1), seed=3).double()
    low, high = found.min(0).values, found.max(0).values
    share = (x.double() - low) / (high - low).clamp(min=1e-300)
    variance = share * (1 - share) * (high - low) ** 2
    assert ((found.mean(0) - x.double()).abs() <= 3 * (variance / draws).sqrt()).all()
    moved = variance > 0
    assert (found.var(0)[moved] / variance[moved] - 1).abs().max() < 0.1
    # Nothing between a value and its neighbours in bfloat16.
    assert torch.equal(
        torch.nextafter(low.bfloat16(), torch.full_like(low, torch.inf).bfloat16()).double()[moved], high[moved]
    )


def test_stochastic_rounding_keeps_what_is_not_finite():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38])
    found = lo.round_stochastically(x, seed=0)
    assert found[:2].tolist() == [torch.inf, -torch.inf]
    assert found[2].isnan()


@pytest.mark.parametrize("how", ["stochastic", "kahan"])
def test_bfloat16_weights_follow_float32_where_rounding_to_nearest_stalls(how):
    def run(dtype, way):
        weight = nn.Parameter(torch.ones(2000, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        if way:
            lo.round_updates(optimizer, way)
        for _ in range(300):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        return weight.detach().float()

    exact = run(torch.float32, None)
    assert run(torch.bfloat16, None).eq(1).all()  # 1 - 1e-4 rounds to 1
    found = run(torch.bfloat16, how)
    if how == "stochastic":
        assert abs(found.mean() - exact.mean()) < 1e-3
    else:
        assert (found - exact).abs().max() < 2**-9 + 1e-4


def test_rounding_keeps_states_in_float32_and_leaves_float32_weights_alone():
    model = make()
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data.bfloat16()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    twin = copy.deepcopy(model)
    plain = OPTIMIZERS["AdamW"](twin.parameters())
    for p in twin.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    with lo.round_updates(optimizer):
        optimizer.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(model[2].weight, twin[2].weight)


# -- stored gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["16bit", "8bit"])
def test_stored_gradients_are_right_on_average_and_small(bits):
    torch.manual_seed(0)
    gradient = torch.randn(300)
    draws = torch.stack([unpack(pack(gradient, bits, seed=seed), gradient) for seed in range(2000)]).double()
    error = draws.std(0) / 2000**0.5
    # Each of 300 means lies within 3 standard errors but about one in 400.
    beyond = (draws.mean(0) - gradient.double()).abs() > 3 * error + 1e-9
    assert beyond.sum() <= 5
    codes, scale = pack(gradient, bits, seed=0)
    assert codes.nbytes == 300 * (2 if bits == "16bit" else 1)
    assert scale is None or scale.nbytes == 8


@pytest.mark.parametrize("bits", ["16bit", "8bit"])
def test_stored_gradients_are_summed_over_backwards(bits):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = [p.detach().clone() for p in model.parameters()]
    for x in BATCHES[:4]:
        model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    with lo.store_gradients(optimizer, bits):
        for x in BATCHES[:4]:
            model(x).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    for before, p, gradient in zip(start, model.parameters(), expected, strict=True):
        assert (before - p - gradient).norm() < (0.01 if bits == "16bit" else 0.1) * gradient.norm()


# -- larger batches ----------------------------------------------------------------------------------------


def test_the_rate_rises_to_its_multiple():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lo.scale_batch(optimizer, 16, warmup_steps=10, rule="sqrt")
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.1)
    assert rates[5] == pytest.approx(0.25)
    assert rates[10:] == pytest.approx([0.4, 0.4])
    again = lo.scale_batch(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 16, warmup_steps=10, rule="sqrt")
    again.load_state_dict(scheduler.state_dict())
    assert again.state_dict()["last_epoch"] == scheduler.state_dict()["last_epoch"]


@pytest.mark.parametrize("make_optimizer", [lo.lars, lo.lamb])
def test_lars_and_lamb_are_bitsandbytes_or_name_the_extra(make_optimizer):
    weight = nn.Parameter(torch.ones(8, 8))
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(LowtideError, match=r"lowtide\[optim\]"):
            make_optimizer([weight], lr=0.1)
        return
    optimizer = make_optimizer([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert (weight < 1).all()
