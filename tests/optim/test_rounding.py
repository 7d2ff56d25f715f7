"""16-bit weights without a float32 copy: rounding that loses nothing, and states as they should be."""

import copy

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide import Workload
from lowtide.techniques import Option, techniques
from lowtide.techniques.precision import PrecisionConfig
from tests.optim.training import BATCHES, OPTIMIZERS, equal, make, resumes, started, train
from tests.soak import in_soak


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([1.001, -3.003, 1e-20, 0.0, 123.4])
    draws = 4000
    actual = lo.round_stochastically(x.repeat(draws, 1), seed=3).double()
    low, high = actual.min(0).values, actual.max(0).values
    share = (x.double() - low) / (high - low).clamp(min=1e-300)
    variance = share * (1 - share) * (high - low) ** 2
    assert ((actual.mean(0) - x.double()).abs() <= 3 * (variance / draws).sqrt()).all()
    moved = variance > 0
    assert (actual.var(0)[moved] / variance[moved] - 1).abs().max() < 0.1
    # Nothing between a value and its neighbours in bfloat16.
    assert torch.equal(
        torch.nextafter(low.bfloat16(), torch.full_like(low, torch.inf).bfloat16()).double()[moved], high[moved]
    )


def test_stochastic_rounding_keeps_what_is_not_finite():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38])
    actual = lo.round_stochastically(x, seed=0)
    assert actual[:2].tolist() == [torch.inf, -torch.inf]
    assert actual[2].isnan()


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
    actual = run(torch.bfloat16, how)
    if how == "stochastic":
        assert abs(actual.mean() - exact.mean()) < 1e-3
    else:
        assert (actual - exact).abs().max() < 2**-9 + 1e-4


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


def plain_keys_and_dtypes(model, optimizer):
    return [{key: getattr(v, "dtype", None) for key, v in optimizer.state[p].items()} for p in model.parameters()]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("how", ["stochastic", "kahan"])
def test_undo_leaves_states_as_a_plain_step_has_them(name, how):
    model, other = make(torch.bfloat16), make(torch.bfloat16)
    optimizer, plain = (OPTIMIZERS[name](m.parameters()) for m in (model, other))
    train(other, plain, BATCHES[:2])
    with lo.round_updates(optimizer, how):
        train(model, optimizer, BATCHES[:1])
    train(model, optimizer, BATCHES[:1])
    assert plain_keys_and_dtypes(model, optimizer) == plain_keys_and_dtypes(other, plain)


def test_8bit_states_keep_their_dtypes_through_an_undo():
    model = make(torch.bfloat16)
    optimizer = OPTIMIZERS["AdamW8bit"](model.parameters())
    with lo.round_updates(optimizer):
        train(model, optimizer, BATCHES[:2])
    held = optimizer.state[model[0].weight]
    assert (held["exp_avg"].dtype, held["exp_avg_scale"].dtype) == (torch.int8, torch.float32)
    assert optimizer.state[model[0].bias]["exp_avg"].dtype == torch.float32
    train(model, optimizer, BATCHES[:1])


def test_an_undo_without_a_step_gives_states_back_bit_for_bit():
    model, optimizer = started(dtype=torch.bfloat16)
    train(model, optimizer, BATCHES[:2])
    before = copy.deepcopy(optimizer.state_dict()["state"])
    lo.round_updates(optimizer)()
    after = optimizer.state_dict()["state"]
    for number, held in before.items():
        assert held.keys() == after[number].keys()
        assert all(torch.equal(after[number][key], value) for key, value in held.items())
    empty = torch.optim.SGD(model.parameters(), lr=0.1)
    with lo.round_updates(empty):
        train(model, empty, BATCHES[:1])
    assert not empty.state


@pytest.mark.parametrize("how", ["stochastic", "kahan"])
def test_a_state_that_was_saved_without_rounding_is_loaded(how):
    def plain():
        return started(dtype=torch.bfloat16)

    def rounded():
        return started("AdamW", how, dtype=torch.bfloat16)

    assert resumes(rounded, saver=plain, then=lambda optimizer: lo.round_updates(optimizer, how))


def lion(parameters):
    return pytest.importorskip("bitsandbytes").optim.Lion(parameters, lr=1e-2)


LOWERED = {
    "8bit": (OPTIMIZERS["AdamW"], "8bit"),
    "4bit": (OPTIMIZERS["AdamW"], "4bit"),
    "SGD by bitsandbytes": (OPTIMIZERS["SGD"], "8bit"),
    "Lion of bitsandbytes": (lion, "8bit"),
}


@pytest.mark.parametrize(
    ("first", "how"), [("lowered", "stochastic"), ("rounded", "kahan"), *in_soak([("lowered", "kahan")])]
)
@pytest.mark.parametrize("name", LOWERED)
def test_lowered_states_with_rounded_updates_resume_bit_for_bit(name, first, how):
    pytest.importorskip("torchao" if name == "4bit" else "bitsandbytes" if "bitsandbytes" in name else "torch")
    optimizer_of, kind = LOWERED[name]

    def start():
        model = make(torch.bfloat16)  # it has matrices and biases, of which some stay in float32
        model[2].float()
        model[2].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        model[3].register_forward_hook(lambda _, inputs, output: output.bfloat16())
        optimizer = optimizer_of(model.parameters())
        ways = [lambda: lo.lower_state(optimizer, kind), lambda: lo.round_updates(optimizer, how)]
        for way in ways if first == "lowered" else ways[::-1]:
            way()
        return model, optimizer

    assert resumes(start, weights_only=False)


def test_8bit_states_come_and_go_without_what_was_rounded_away_being_lost():
    model, optimizer = started(dtype=torch.bfloat16)

    def retained():
        return [optimizer.state[p]["rounded_away"] for p in model.parameters()]

    with lo.round_updates(optimizer, "kahan"):
        train(model, optimizer, BATCHES[:1])
        before = retained()
        with lo.lower_state(optimizer, "8bit"):
            assert equal(retained(), before)
            train(model, optimizer, BATCHES[:1])
            before = retained()
        assert equal(retained(), before)
        train(model, optimizer, BATCHES[:1])
        assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_a_state_that_was_saved_with_rounding_is_loaded_by_a_plain_optimizer():
    model, optimizer = started(dtype=torch.bfloat16)
    lo.round_updates(optimizer, "kahan")
    train(model, optimizer, BATCHES[:2])
    saved = optimizer.state_dict()
    plain = OPTIMIZERS["AdamW"](model.parameters())
    plain.load_state_dict(saved)
    assert plain.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_the_technique_gives_float32_weights_with_float32_states_back(rounding):
    model, optimizer = started()
    train(model, optimizer, BATCHES[:1])
    before = model[0].weight.detach().clone()
    work = Workload(model, lambda m, x: m(x).float().square().mean(), BATCHES[0], optimizer)
    config = PrecisionConfig("bfloat16", weights=True, rounding=rounding)
    with techniques()["precision"].apply(work, [Option("precision", ("",), config)]) as applied:
        optimizer.zero_grad()
        applied.work.compute_loss().backward()
        optimizer.step()
        weight, state = model[0].weight, optimizer.state[model[0].weight]
        assert weight.dtype == torch.bfloat16
        moved = weight != before.bfloat16()
        whole = (weight.float() + state.get("rounded_away", 0)).detach()
        moment = state["exp_avg"].clone()
    assert torch.equal(optimizer.state[weight]["exp_avg"], moment)  # float32 all the way
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert moved.any()
    assert torch.equal(weight[moved], whole[moved])  # what Kahan kept is not lost
    train(model, optimizer, BATCHES[:1])
