"""Losses and gradients of rows against float64: the kernel in Triton (interpreted on a CPU) and the reference."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from lowtide.kernels import chunked_loss as chooser
from lowtide.kernels.reference import chunked_loss as reference
from lowtide.kernels.reference.chunked_loss import Rules
from tests.kernels.devices import DEVICE, TOLERANCE, assert_near
from tests.soak import in_soak

triton = pytest.importorskip("triton")
from lowtide.kernels.triton import chunked_loss as kernels  # noqa: E402

ROWS = {"triton": kernels.rows_, "reference": reference.rows_}


def make(classes, dtype=torch.float32, *, rows=6, padding=3):
    torch.manual_seed(classes)
    whole = (torch.randn(rows, classes + padding) * 3).to(dtype).to(DEVICE)
    target = torch.randint(classes, (rows,))
    target[1] = -100
    return whole[:, :classes], target.to(DEVICE)


def rules_of(classes, *, smoothing=0.0, weighted=False, cap=0.0):
    weight = torch.rand(classes, device=DEVICE) if weighted else None
    return Rules(-100, smoothing, weight, None if weight is None else weight.sum(), cap)


def expected(logits, target, rules, scale):
    """By float64 autograd: the losses of rows, and the gradient of the logits."""
    z = logits.double().detach().requires_grad_()
    weight = None if rules.weight is None else rules.weight.double()
    used = rules.cap * (z / rules.cap).tanh() if rules.cap else z
    loss = F.cross_entropy(used, target, weight, reduction="none", label_smoothing=rules.smoothing)
    gradient = torch.autograd.grad(loss, z, scale.to(z).expand(len(z)))[0]
    return loss.detach(), gradient


@pytest.mark.parametrize("rows_", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("smoothing", "weighted", "classes"),
    [
        *((smoothing, weighted, 7) for smoothing in (0.0, 0.1) for weighted in (False, True)),
        *((0.1, True, classes) for classes in (2, 4096, 4099, 9000)),
        *in_soak(product((0.0, 0.1), (False, True), (2, 4096, 4099, 9000))),
    ],
)
def test_losses_and_gradients_are_those_of_float64(rows_, smoothing, weighted, classes):
    logits, target = make(classes)
    rules = rules_of(classes, smoothing=smoothing, weighted=weighted)
    for scale in (torch.tensor(0.3, device=DEVICE), torch.rand(len(logits), device=DEVICE)):
        loss, gradient = expected(logits, target, rules, scale)
        mine, losses = logits.clone(), torch.empty(len(logits), device=DEVICE)
        rows_(mine, target, losses, rules, scale)
        assert_near(losses, loss, 2e-6)
        assert_near(mine, gradient, 2e-6)
        assert not mine[1].any()


def apart(target):
    return torch.stack([target, target + 1], dim=1)[:, 0]


def half_infinite(classes=9000):
    logits, target = make(classes)
    logits[:, : classes // 2] = float("-inf")
    return logits, target.where(target < 0, classes - 1000)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("rows_", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("cap", [2.0, *in_soak([50.0])])
@pytest.mark.parametrize("classes", [7, 4099, *in_soak([9000])])
def test_a_cap_acts_on_logits_and_on_their_gradient(rows_, cap, classes):
    logits, target = make(classes)
    rules, scale = rules_of(classes, smoothing=0.1, weighted=True, cap=cap), torch.tensor(0.3, device=DEVICE)
    loss, gradient = expected(logits, target, rules, scale)
    padding = -classes % 64
    whole = torch.full((len(logits), classes + padding), float("nan"), device=DEVICE)
    whole[:, :classes] = logits
    losses = torch.empty(len(logits), device=DEVICE)
    rows_(whole, target, losses, rules, scale, padding)
    assert_near(losses, loss, 2e-6)
    assert_near(whole[:, :classes], gradient, 2e-6)
    assert not whole[:, classes:].any()
    rows_(logits, target, losses, rules, None)
    assert_near(losses, loss, 2e-6)


GIVEN = {
    **{str(dtype): lambda dtype=dtype: make(1000, dtype) for dtype in TOLERANCE},
    "targets that lie apart": lambda: (make(10)[0], apart(make(10)[1])),
    "a block of minus infinity": half_infinite,
}


@pytest.mark.parametrize("rows_", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", GIVEN)
def test_any_logits_give_losses_and_gradients_rounded_once(rows_, name):
    logits, target = GIVEN[name]()
    scale = torch.tensor(1.0, device=DEVICE)
    loss, gradient = expected(logits, target, Rules(), scale)
    losses = torch.empty(len(logits), device=DEVICE)
    rows_(logits.clone(), target, losses, Rules(), None)
    assert_near(losses, loss, 2e-6)
    rows_(logits, target, losses, Rules(), scale)
    assert_near(losses, loss, 2e-6)
    assert_near(logits, gradient, TOLERANCE[logits.dtype])


@pytest.mark.parametrize("rows_", ROWS.values(), ids=ROWS)
def test_what_lies_between_rows_is_not_touched(rows_):
    whole = torch.full((4, 16), 7.0, device=DEVICE)
    target = torch.tensor([0, -100, 9, 3], device=DEVICE)
    rows_(whole[:, :10], target, torch.empty(4, device=DEVICE), Rules(), torch.tensor(1.0, device=DEVICE))
    assert (whole[:, 10:] == 7).all()


@pytest.mark.parametrize("rows_", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("smoothing", [0.1, *in_soak([0.0])])
@pytest.mark.parametrize("classes", [2, 64, 4099, *in_soak((10, 4095, 5000))])
def test_padding_counts_for_nothing_and_has_no_gradient(rows_, smoothing, classes):
    logits, target = make(classes)
    target[2] = classes - 1
    rules, scale = rules_of(classes, smoothing=smoothing, weighted=True), torch.tensor(0.3, device=DEVICE)
    loss, gradient = expected(logits, target, rules, scale)
    padding = -classes % 64
    for content in (1e4, float("nan"), float("inf")):
        whole = torch.full((len(logits), classes + padding), content, device=DEVICE)
        whole[:, :classes] = logits
        losses = torch.empty(len(logits), device=DEVICE)
        rows_(whole, target, losses, rules, scale, padding)
        assert_near(losses, loss, 2e-6)
        assert_near(whole[:, :classes], gradient, 2e-6)
        assert not whole[:, classes:].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("rows_", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_show_in_the_row_and_nowhere_else(rows_, value):
    logits, target = make(5000)
    logits[2, 17] = value
    losses = torch.empty(len(logits), device=DEVICE)
    rows_(logits, target, losses, Rules(), torch.tensor(1.0, device=DEVICE))
    assert losses.isnan().nonzero().flatten().tolist() == [2]
    assert logits.isnan().any(1).nonzero().flatten().tolist() == [2]
    assert logits[2].isnan().all()


def test_a_target_that_is_no_class_gives_nan_in_triton_and_torchs_error_on_a_cpu():
    logits, target = make(5000)
    target[3] = 5000
    losses = torch.empty(len(logits), device=DEVICE)
    kernels.rows_(logits, target, losses, Rules(), torch.tensor(1.0, device=DEVICE))
    assert losses.isnan().nonzero().flatten().tolist() == [3]
    assert logits[3].isnan().all()
    logits, target = torch.randn(3, 5), torch.tensor([1, 5, 2])
    with pytest.raises(IndexError) as plain:
        F.cross_entropy(logits, target)
    with pytest.raises(IndexError) as mine:
        chooser.rows_(logits, target, torch.empty(3), Rules())
    assert str(mine.value) == str(plain.value)


@pytest.mark.parametrize("dtype", [torch.float64, *TOLERANCE], ids=str)
def test_sums_over_chunks_are_32_bits_wide(dtype):
    torch.manual_seed(0)
    parts = [(torch.randn(40, 9), torch.randn(40, 5)) for _ in range(20)]
    parts = [(a.to(DEVICE, dtype), b.to(DEVICE, dtype)) for a, b in parts]
    total = None
    for a, b in parts:
        total = chooser.add_product(total, a.t(), b)
    exact = sum(a.double().t() @ b.double() for a, b in parts)
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    assert_near(total, exact, {torch.float64: 1e-14}.get(dtype) or TOLERANCE[dtype] / 3)


@pytest.mark.parametrize("shape", [(7,), (7, 3)], ids=str)
def test_parameters_are_padded_with_zeros_and_are_themselves_where_nothing_is_to_do(shape):
    parameter = torch.randn(shape)
    assert chooser.padded(parameter, 0, torch.float32) is parameter
    built = chooser.padded(parameter, 2, torch.bfloat16)
    assert torch.equal(built[:7], parameter.bfloat16())
    assert built.shape == (9, *shape[1:])
    assert not built[7:].any()
