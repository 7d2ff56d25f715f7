"""Stored gradients: right on average with the variance of theory, small in between, and nothing lost or left behind."""

import copy

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide.optim.gradients import COUNT, PIECES, pack, packed_bytes, unpack
from tests.optim.training import BATCHES, make
from tests.refusals import refused
from tests.soak import count

DRAWS = count(500, soak=2000)

BATCH = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))


def built(optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    return model, optimizer(model.parameters(), lr=0.1)


@pytest.mark.parametrize("bits", ["16bit", "8bit"])
def test_a_step_is_right_on_average_and_its_variance_is_that_of_rounding(bits):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(600))
    gradient = torch.randn(600).exp() * torch.randn(600).sign()
    draws = []
    for seed in range(DRAWS):
        with torch.no_grad():
            weight.zero_()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with lo.store_gradients(optimizer, bits, seed=seed):
            (weight * gradient).sum().backward()
            optimizer.step()
        draws.append(-weight.detach().clone())
    drawn, exact = torch.stack(draws).double(), gradient.double()
    # Between the two nearest values a and b, x falls on b with probability (x - a)/(b - a): variance (x - a)(b - x).
    if bits == "16bit":
        low = (gradient.view(torch.int32) & -65536).view(torch.float32).double()
        high = (((gradient.view(torch.int32) >> 16) + 1) << 16).view(torch.float32).double()
    else:
        scale = torch.cat([part.abs().amax().expand(len(part)) for part in exact.split(256)])
        share = exact / scale * 127
        low, high = share.floor() * scale / 127, (share.floor() + 1) * scale / 127
    variance = float(((exact - low) * (high - exact)).abs().sum())
    error = drawn.var(0).sum().sqrt() / DRAWS**0.5
    assert (drawn.mean(0) - exact).norm() <= 3 * error
    assert float(drawn.var(0).sum()) == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("bits", ["16bit", "8bit"])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 5000])
def test_bytes_are_as_said(bits, size):
    codes, scale = pack(torch.randn(size), bits, seed=0)
    assert codes.nbytes == size * (2 if bits == "16bit" else 1)
    assert codes.nbytes + (0 if scale is None else scale.nbytes) == packed_bytes(size, bits)
    assert unpack((codes, scale), torch.empty(size)).shape == (size,)


@pytest.mark.parametrize("bits", ["16bit", "8bit"])
@pytest.mark.parametrize("onto", [False, True])
def test_a_piece_at_a_time_is_as_near_as_all_at_once(bits, onto, monkeypatch):
    monkeypatch.setitem(PIECES, "cpu", 512)
    torch.manual_seed(0)
    first, second = torch.randn(3, 700), torch.randn(3, 700)
    held = pack(first, bits, seed=1) if onto else None
    total = (unpack(held, first) if held else 0) + second
    actual = unpack(pack(second, bits, seed=2, onto=held), second)
    step = 2**-7 * total.abs() if bits == "16bit" else total.abs().max() / 127
    assert ((actual - total).abs() <= step * 1.0001).all()  # a rounding's own roundoff
    assert (actual != total).any()
    off = (actual - total).view(-1)
    assert not torch.equal(off[:512] > 0, off[512:1024] > 0)  # each piece has bits of its own


def test_the_undo_puts_what_waits_into_grad():
    model, optimizer = built()
    model(BATCH).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    with lo.store_gradients(optimizer):
        model(BATCH).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2**-7, atol=0)  # the step of bfloat16


def test_a_refusal_leaves_the_optimizer_as_it_was():
    model, optimizer = built()
    before = copy.deepcopy(optimizer.state_dict())
    with lo.round_updates(optimizer):
        with refused("stochastic", "16bit"):
            lo.store_gradients(optimizer)
        model(BATCH).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    assert optimizer.state_dict() == before
    assert "zero_grad" not in vars(optimizer)


@pytest.mark.parametrize(
    ("parameter", "kind", "named"),
    [(torch.ones(2, dtype=torch.complex64), torch.optim.SGD, "complex"), (torch.ones(2), torch.optim.LBFGS, "LBFGS")],
    ids=["complex", "LBFGS"],
)
def test_what_cannot_be_stored_is_refused(parameter, kind, named):
    with refused(named):
        lo.store_gradients(kind([nn.Parameter(parameter)], lr=0.1))


def test_a_sparse_gradient_says_what_to_do_and_is_not_lost():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    with lo.store_gradients(optimizer):
        with refused("sparse=False"):
            table(torch.tensor([1, 2])).sum().backward()
        assert table.weight.grad is not None


def test_undo_after_a_state_was_loaded_leaves_no_count():
    model, optimizer = built(torch.optim.AdamW)
    with lo.store_gradients(optimizer, "8bit"):
        model(BATCH).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert COUNT not in optimizer.param_groups[0]


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


def one_weight(optimizer=torch.optim.SGD):
    weight = nn.Parameter(torch.zeros(4))
    return weight, optimizer([weight], lr=1.0)


def test_zero_grad_lets_go_of_stored_gradients():
    weight, optimizer = one_weight()
    with lo.store_gradients(optimizer):
        (weight * 100).sum().backward()
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert torch.equal(weight, -torch.ones(4))
    assert "zero_grad" not in vars(optimizer)


def test_a_state_that_was_saved_without_stored_gradients_is_loaded_with_them():
    weight, optimizer = one_weight()
    saved = optimizer.state_dict()
    with lo.store_gradients(optimizer):
        optimizer.load_state_dict(saved)
        weight.sum().backward()
        optimizer.step()
    assert torch.equal(weight, -torch.ones(4))
