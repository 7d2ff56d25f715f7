"""A step of AdamW with 8-bit states: the code, the reference, and the kernel in Triton against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowtide.kernels import adamw8bit as chooser
from lowtide.kernels.adamw8bit import Entry
from lowtide.kernels.reference import adamw8bit as reference
from lowtide.kernels.reference.adamw8bit import Hyper, Moments
from lowtide.optim.adamw8bit import AdamW8bit, empty_moments
from tests.kernels.devices import DEVICE

HYPER = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, 1)


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    from lowtide.kernels.triton import adamw8bit

    return adamw8bit


def test_every_code_comes_back_and_the_largest_value_is_exact():
    for dtype, codes in ((torch.int8, torch.arange(-127, 128)), (torch.uint8, torch.arange(256))):
        code, scale = codes.to(dtype), torch.full((1,), 0.3)
        values = reference.decode(code, scale)
        assert values.abs().max() == scale.item()
        again, scale_again = reference.encode(values, dtype)
        assert torch.equal(again, code)
        assert torch.equal(scale_again, scale)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1000), st.floats(1e-12, 1e6), st.integers(0, 2**20))
def test_the_error_is_at_most_half_a_code(count, size, seed):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * size
    for dtype, value in ((torch.int8, x), (torch.uint8, x * x)):
        code, scale = reference.encode(value, dtype)
        levels = reference.levels(dtype)
        largest = torch.stack([block.abs().max() for block in value.split(reference.BLOCK)])
        assert torch.equal(scale, largest)
        root = (
            value.abs().double() / scale.repeat_interleave(reference.BLOCK)[:count].clamp(min=1e-45).double()
        ) ** 0.25
        exact = root * levels
        if dtype == torch.uint8:
            exact = torch.where(value > 0, exact.clamp(min=1), exact)  # code 0 is for 0 alone
        assert (exact - code.abs().double()).abs().max() < 0.5 + 1e-4
        assert torch.equal(code.sign(), torch.where(code == 0, 0, value.sign()).to(dtype))


def test_a_step_with_float32_states_is_torchs():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(500))
    mine, moments = p.detach().clone(), Moments(torch.zeros(500), torch.zeros(500))
    optimizer = torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1)
    for count in range(1, 20):
        p.grad = torch.randn(500)
        optimizer.step()
        reference.step(mine, p.grad, moments, HYPER._replace(step=count))
    torch.testing.assert_close(mine, p.detach())


def entries(dtype=torch.float32, sizes=(4100, 300, 8195), gradients=None):
    torch.manual_seed(0)
    built = []
    for size in sizes:
        p = torch.randn(size).to(dtype)
        p[size // 3 : size // 2] = 0
        built.append(Entry(p, torch.randn(size).to(gradients or dtype), empty_moments(p)))
    return built


def on(device, built):
    def to(t):
        return None if t is None else t.clone().to(device)

    return [Entry(to(e.parameter), to(e.gradient), Moments(*map(to, e.moments))) for e in built]


def decoded(moments):
    if moments.exp_avg_scale is None:
        return moments.exp_avg, moments.exp_avg_sq
    return (
        reference.decode(moments.exp_avg, moments.exp_avg_scale),
        reference.decode(moments.exp_avg_sq, moments.exp_avg_sq_scale),
    )


@pytest.mark.parametrize(
    ("dtype", "decoupled"), [(torch.float32, False), (torch.float16, True), (torch.bfloat16, True)]
)
def test_the_kernel_is_the_reference(kernels, dtype, decoupled):
    expected = on(DEVICE, entries(dtype))
    # One unit of the dtype: Triton's interpreter cuts bfloat16 off where torch rounds.
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for count in (1, 2, 3):
        hyper = HYPER._replace(step=count, decoupled=decoupled, maximize=count == 2)
        actual = on(DEVICE, expected)
        kernels.step(actual, hyper)
        for entry in expected:
            reference.step(*entry, hyper)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine.parameter, theirs.parameter, rtol=tolerance, atol=1e-5)
            for m, t in zip(decoded(mine.moments), decoded(theirs.moments), strict=True):
                # A value at the edge of two codes may fall to either: one step of the code, of very few.
                off = (m - t).abs() > 1e-6 * t.abs().max()
                assert off.float().mean() < 2e-3
                assert (m - t).abs().max() <= 0.04 * t.abs().max()


def test_the_kernel_and_the_reference_give_code_0_to_second_moments_that_are_0_alone(kernels):
    gradient = torch.randn(5000, device=DEVICE) * 1e-7
    gradient[::256] = 1.0
    gradient[100:200] = 0.0
    actual = []
    for step in (lambda entry: kernels.step([entry], HYPER), lambda entry: reference.step(*entry, HYPER)):
        p = torch.zeros(5000, device=DEVICE)
        moments = empty_moments(p)
        step(Entry(p, gradient.clone(), moments))
        actual.append(moments.exp_avg_sq)
    assert torch.equal(*actual)
    assert torch.equal(actual[0] == 0, gradient == 0)


def test_tensors_that_do_not_begin_at_16_bytes(kernels):
    p = torch.randn(5001, device=DEVICE)[1:]
    entry = Entry(p, torch.randn(5000, device=DEVICE), empty_moments(p))
    other = Entry(p.clone(), entry.gradient, empty_moments(p))
    kernels.step([entry], HYPER)
    reference.step(*other, HYPER)
    torch.testing.assert_close(entry.parameter, other.parameter)


def test_the_kernel_rounds_stochastically_and_repeats_by_its_seed(kernels):
    runs = []
    for seed in (1, 1, 2):
        p = torch.ones(8192, dtype=torch.bfloat16, device=DEVICE)
        entry = Entry(p, torch.ones_like(p), empty_moments(p))
        kernels.step([entry], Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, 1), seed=seed)
        runs.append(p.float())
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert runs[0].unique().tolist() == [0.99609375, 1.0]  # round to nearest would give 1 alone
    share = 1e-3 / 2**-8
    error = (share * (1 - share) / 8192) ** 0.5 * 2**-8
    assert abs(runs[0].mean().item() - (1 - 1e-3)) < 4 * error


def test_nan_and_infinity_reach_the_parameters_as_in_torch():
    for value in (float("nan"), float("inf")):
        p = torch.ones(5000)
        gradient = torch.ones(5000)
        gradient[7] = value
        reference.step(p, gradient, empty_moments(p), HYPER)
        assert p[7].isnan()
        assert p[1000:].isfinite().all()


def test_launches_are_repeated_until_something_moves(kernels, monkeypatch):
    """By the kernel, also without a GPU: the steps of the reference, prepared as seldom as can be."""
    prepared = []
    monkeypatch.setattr(kernels, "_prepare", lambda *a, inner=kernels._prepare: prepared.append(a) or inner(*a))
    weights = [nn.Parameter(torch.randn(4096, device=DEVICE)) for _ in range(2)]
    twins = [nn.Parameter(w.detach().clone()) for w in weights]
    mine, other = AdamW8bit(weights, lr=1e-2), AdamW8bit(twins, lr=1e-2)

    def step(moves):
        for w, t in zip(weights, twins, strict=True):
            gradient = torch.randn(4096, device=DEVICE)
            if w.grad is None or moves:
                w.grad = gradient.clone()
            else:
                w.grad.copy_(gradient)
            t.grad = gradient
        with monkeypatch.context() as patch:
            patch.setattr(chooser, "_fits", lambda entry: True)
            mine.step()
            patch.setattr(chooser, "_fits", lambda entry: False)
            other.step()

    held = []
    for moves, count in ((False, 1), (False, 1), (True, 2), (False, 2)):
        held += [w.grad for w in weights]  # so that the next ones are elsewhere
        step(moves)
        assert len(prepared) == count
    mine.load_state_dict(mine.state_dict())
    step(False)
    assert len(prepared) == 3
    for w, t in zip(weights, twins, strict=True):
        torch.testing.assert_close(w, t, rtol=1e-4, atol=1e-4)
