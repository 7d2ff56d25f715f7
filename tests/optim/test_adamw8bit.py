"""AdamW with 8-bit states as an optimizer of its own."""

import copy

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from tests.optim.training import BATCHES, OPTIMIZERS, equal, make, train
from tests.refusals import refused


def test_8bit_states_follow_torchs_adamw():
    model, other = make(), make()
    train(model, OPTIMIZERS["AdamW"](model.parameters()), BATCHES)
    train(other, OPTIMIZERS["AdamW8bit"](other.parameters()), BATCHES)
    start = make()
    for p, q, s in zip(model.parameters(), other.parameters(), start.parameters(), strict=True):
        assert (p - q).norm() < 0.05 * (p - s).norm()


@pytest.mark.parametrize(("outlier", "rest"), [(1.0, 1e-5), (10.0, 1e-5), (100.0, 1e-4)])
@pytest.mark.parametrize("once", [False, True])
def test_small_values_in_a_block_with_an_outlier_move_no_farther_than_torchs(outlier, rest, once):
    moved = []
    for kind in (torch.optim.AdamW, lo.AdamW8bit):
        weight = nn.Parameter(torch.zeros(64, 128))
        optimizer = kind([weight], lr=1e-3, weight_decay=0.0)
        for i in range(30):
            generator = torch.Generator().manual_seed(i)
            weight.grad = torch.randn(64, 128, generator=generator) * rest
            if i == 0 or not once:
                weight.grad.view(-1)[::256] = torch.randn(32, generator=generator) * outlier
            optimizer.step()
        moved.append(float(weight.detach().abs().max()))
    # A second moment has one code between 1 and 1.5 times the smallest level: its root is at most 1.5 ** 2 too small.
    assert moved[1] < moved[0] * (1.5**2 if once else 1.1)


def test_a_parameter_with_gaps_in_another_order_is_stepped_as_a_dense_one():
    torch.manual_seed(0)
    wide = torch.randn(80, 100).t()[:64]
    assert not wide.is_contiguous()
    odd, plain = nn.Parameter(wide), nn.Parameter(wide.contiguous())
    gradient = torch.randn(64, 80)
    for weight in (odd, plain):
        weight.grad = gradient.clone()
        lo.AdamW8bit([weight], lr=0.1).step()
    assert torch.equal(odd, plain)


# -- another memory format ---------------------------------------------------------------------------------

LAYOUTS = [(torch.contiguous_format, torch.channels_last), (torch.channels_last, torch.contiguous_format)]


def kernels_of(layout, kind):
    """Parameters with codes and with float32 moments, and their optimizer."""
    torch.manual_seed(0)
    shapes = ((16, 24, 3, 5), (8, 16, 3, 3), (16, 1, 16, 17))
    weights = [nn.Parameter(torch.randn(shape).to(memory_format=layout)) for shape in shapes]
    return weights, kind(weights, lr=1e-2)


def resumed(layout, values, saved):
    """Parameters in a layout and their optimizer, with saved values and a saved state."""
    weights, optimizer = kernels_of(layout, lo.AdamW8bit)
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
    optimizer.load_state_dict(copy.deepcopy(saved))
    return weights, optimizer


def step_kernels(weights, optimizer, start, end):
    for i in range(start, end):
        for n, weight in enumerate(weights):
            generator = torch.Generator().manual_seed(10 * (i % 2) + n)
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = torch.empty_like(weight).copy_(gradient)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def assert_as_torchs(actual):
    """Compare twelve steps with torch's; other values share a block, so codes differ a little."""
    start, _ = kernels_of(torch.contiguous_format, torch.optim.AdamW)
    expected = step_kernels(*kernels_of(torch.contiguous_format, torch.optim.AdamW), 0, 12)
    for mine, plain, first in zip(actual, expected, start, strict=True):
        assert (mine - plain).norm() < 0.02 * (plain - first).norm()
    torch.testing.assert_close(actual[1], expected[1])  # its moments are in float32


@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_moments_follow_a_parameter_into_another_memory_format(before, after):
    weights, optimizer = kernels_of(before, lo.AdamW8bit)
    step_kernels(weights, optimizer, 0, 6)
    for weight in weights:
        weight.data = weight.data.to(memory_format=after)
    assert_as_torchs(step_kernels(weights, optimizer, 6, 12))


@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_a_run_is_resumed_in_another_memory_format(before, after):
    weights, optimizer = kernels_of(before, lo.AdamW8bit)
    values = step_kernels(weights, optimizer, 0, 6)
    assert_as_torchs(step_kernels(*resumed(after, values, optimizer.state_dict()), 6, 12))


@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_an_undo_in_another_memory_format_gives_each_value_its_moment(before, after):
    weights, optimizer = kernels_of(before, torch.optim.AdamW)
    step_kernels(weights, optimizer, 0, 2)
    undo = lo.lower_state(optimizer, "8bit")
    step_kernels(weights, optimizer, 2, 4)
    for weight in weights:
        weight.data = weight.data.to(memory_format=after)
    undo()
    twins, plain = kernels_of(after, torch.optim.AdamW)
    step_kernels(twins, plain, 0, 4)
    for weight, twin in zip(weights, twins, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            expected = plain.state[twin][key]
            assert (optimizer.state[weight][key] - expected).norm() < 0.05 * expected.norm()


def test_a_state_saved_without_its_order_has_that_of_the_parameter():
    weights, optimizer = kernels_of(torch.channels_last, lo.AdamW8bit)
    values = step_kernels(weights, optimizer, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["order"]  # as older versions saved it
    expected = step_kernels(weights, optimizer, 2, 4)
    assert equal(step_kernels(*resumed(torch.channels_last, values, saved), 2, 4), expected)


def test_channels_last_parameters_are_stepped_where_they_are(monkeypatch):
    from lowtide.kernels import adamw8bit as kernels

    weights, optimizer = kernels_of(torch.channels_last, lo.AdamW8bit)
    step_kernels(weights, optimizer, 0, 1)
    seen = []
    monkeypatch.setattr(kernels, "step", lambda entries, *a, **k: seen.extend(entries))
    moments = [optimizer.state[weight]["exp_avg"] for weight in weights]
    step_kernels(weights, optimizer, 1, 2)
    for entry, weight, moment in zip(seen, weights, moments, strict=True):
        assert entry.parameter.data_ptr() == weight.data_ptr()
        assert entry.gradient.data_ptr() == weight.grad.data_ptr()
        assert entry.moments.exp_avg is moment


def test_moments_that_are_moved_in_place_are_found_again(monkeypatch):
    pytest.importorskip("triton")
    from lowtide.kernels import adamw8bit as kernels

    monkeypatch.setattr(kernels, "_fits", lambda entry: True)
    weight = nn.Parameter(torch.zeros(4096, device="cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = lo.AdamW8bit([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = optimizer.state[weight]["exp_avg"]
    old = moments.clone()
    held = moments.data
    moments.data = moments.data.clone()
    weight.grad.mul_(-3)
    optimizer.step()
    assert not torch.equal(moments, old)
    assert torch.equal(held, old)


# -- noise of each parameter's own -------------------------------------------------------------------------


def twins(count, **settings):
    """Parameters that are alike and get the same gradients, of which rounding to nearest would see nothing."""
    weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(count)]
    groups = [{"params": weights[:1]}, {"params": weights[1:]}] if count > 1 else weights
    return weights, lo.AdamW8bit(groups, lr=1e-3, weight_decay=0.0, rounding="stochastic", **settings)


def test_each_parameter_has_noise_of_its_own_in_backward_too():
    results = []
    for in_backward in (False, True):
        weights, optimizer = twins(3)
        if in_backward:
            lo.step_in_backward(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            sum(w.float().sum() for w in weights).backward()
            optimizer.step()
        assert not torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[1], weights[2])
        results.append([w.detach() for w in weights])
    assert equal(*results)


def test_a_parameters_noise_does_not_depend_on_who_is_stepped_with_it():
    results = []
    for trained in ((0, 1, 2, 3), (0, 2, 3), (3,)):
        weights, optimizer = twins(4)
        for i in trained:
            weights[i].grad = torch.ones_like(weights[i])
        optimizer.step()
        results.append(weights[3].detach())
    assert equal(results[1:], results[:1] * 2)


# -- states of torch's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lowers", [False, True])
def test_a_state_that_torch_saved_is_loaded_as_a_lowered_one_would_go_on(dtype, lowers):
    def plain():
        model = make(dtype)
        return model, OPTIMIZERS["AdamW"](model.parameters())

    def other():
        model, optimizer = plain()
        if lowers:
            lo.lower_state(optimizer, "8bit")
            return model, optimizer
        return model, lo.AdamW8bit(model.parameters(), lr=1.0)  # the rate is loaded too

    model, optimizer = plain()
    train(model, optimizer, BATCHES[:4])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    lo.lower_state(optimizer, "8bit")
    expected = train(model, optimizer, BATCHES[4:8])

    model, optimizer = other()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
    assert equal(train(model, optimizer, BATCHES[4:8]), expected)


@pytest.mark.parametrize(
    ("make_optimizer", "named"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), "momentum_buffer"),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), "amsgrad"),
    ],
    ids=["SGD", "amsgrad"],
)
def test_a_state_of_another_optimizer_is_refused_and_nothing_is_changed(make_optimizer, named):
    model = make()
    stranger = make_optimizer(model.parameters())
    train(model, stranger, BATCHES[:1])
    optimizer = OPTIMIZERS["AdamW8bit"](model.parameters())
    train(model, optimizer, BATCHES[:1])
    before = copy.deepcopy(optimizer.state_dict())
    with refused(named):
        optimizer.load_state_dict(stranger.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, held in before["state"].items():
        actual = after["state"][number]
        assert actual.pop("order") == held.pop("order")
        assert all(torch.equal(actual[key], value) for key, value in held.items())


def test_amsgrad_is_refused_for_a_group_too():
    model = make()
    optimizer = OPTIMIZERS["AdamW8bit"](model[0].parameters())
    with refused("amsgrad"):
        optimizer.add_param_group({"params": list(model[2].parameters()), "amsgrad": True})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_after_a_dense_one_is_refused():
    weight = torch.nn.Parameter(torch.ones(100, 64))
    optimizer = lo.AdamW8bit([weight])
    weight.grad = torch.ones(100, 64)
    optimizer.step()
    weight.grad = torch.ones(100, 64).to_sparse()
    with refused("sparse=False"):
        optimizer.step()
