"""Linear + cross entropy in chunks: plain PyTorch's results, and errors no larger than plain PyTorch's."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import Workload, profile
from lowtide.errors import LowtideError
from lowtide.kernels import chunked_loss as kernels
from lowtide.nn import LinearCrossEntropy, linear_cross_entropy
from tests.nn.raising import raises
from tests.soak import in_soak

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REDUCTIONS = ["mean", "sum", "none"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = (False, True)


def make(dtype=torch.float32, *, rows=37, features=16, classes=53, device="cpu", seed=0):
    torch.manual_seed(seed)
    shapes = ((rows, features), (classes, features), (classes,))
    x, w, b = (torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_() for shape in shapes)
    target = torch.randint(classes, (rows,))
    target[::7] = -100
    return x, w, b, target.to(device)


def plain(x, w, target, b=None, *, class_weight=None, **options):
    return F.cross_entropy(F.linear(x, w, b), target, class_weight, **options)


def outcome(function, x, w, b, target, *, factor=1.0, autocast=None, **options):
    """The loss and the gradients of input, weight and bias."""
    with torch.autocast(x.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = function(x, w, target, b, **options)
    inputs = [t for t in (x, w, b) if t is not None]
    seed = torch.linspace(0.5, 2, loss.numel(), device=x.device).to(loss.dtype) if loss.dim() else None
    seed = torch.full_like(loss, factor) if seed is None else seed * factor
    return [loss.detach(), *torch.autograd.grad(loss, inputs, seed)]


def distance(actual, exact):
    return sum(float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("reduction", "smoothing", "weighted"),
    [("mean", 0.1, True), ("sum", 0.0, False), ("none", 0.1, False), *in_soak(product(REDUCTIONS, (0.0, 0.1), BOTH))],
)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [*((dtype, None) for dtype in DTYPES), *((torch.float32, dtype) for dtype in DTYPES[1:])],
    ids=str,
)
def test_the_error_against_float64_is_at_most_one_and_a_half_times_pytorchs(
    device, reduction, smoothing, weighted, dtype, autocast
):
    mine = theirs = 0.0
    for seed in range(3):
        x, w, b, target = make(dtype, device=device, seed=seed)
        class_weight = torch.rand(53, device=device).to(dtype) if weighted else None
        options = {"reduction": reduction, "label_smoothing": smoothing, "class_weight": class_weight}
        wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
        double = {**options, "class_weight": None if class_weight is None else class_weight.double()}
        exact = outcome(plain, *wide, target, factor=3.7, **double)
        expected = outcome(plain, x, w, b, target, factor=3.7, autocast=autocast, **options)
        actual = outcome(linear_cross_entropy, x, w, b, target, factor=3.7, autocast=autocast, chunk=8, **options)
        assert [t.dtype for t in actual] == [t.dtype for t in expected]
        assert [t.shape for t in actual] == [t.shape for t in expected]
        mine, theirs = mine + distance(actual, exact), theirs + distance(expected, exact)
    assert mine <= 1.5 * theirs


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.2, *in_soak([0.0])])
@pytest.mark.parametrize("chunk", [None, 5, *in_soak((1, 12))])
def test_gradients_pass_gradcheck(reduction, smoothing, chunk):
    x, w, b, target = make(torch.float64, rows=12, features=3, classes=5)
    class_weight = torch.rand(5, dtype=torch.float64)

    def run(x, w, b):
        return linear_cross_entropy(
            x, w, target, b, class_weight=class_weight, reduction=reduction, label_smoothing=smoothing, chunk=chunk
        )

    assert torch.autograd.gradcheck(run, (x, w, b))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_that_is_all_ignored_or_empty_is_as_in_torch(reduction, smoothing):
    for rows in (6, 0):
        x, w, b, target = make(rows=rows)
        target[:] = -100
        options = {"reduction": reduction, "label_smoothing": smoothing}
        actual = outcome(linear_cross_entropy, x, w, b, target, **options)
        for mine, value in zip(actual, outcome(plain, x, w, b, target, **options), strict=True):
            assert torch.equal(mine.nan_to_num(5.0), value.nan_to_num(5.0))


@pytest.mark.parametrize("frozen", ["x", "w", "b", "xw", "wb", "xb", "xwb"])
def test_gradients_are_computed_where_they_are_wanted(frozen):
    x, w, b, target = make()
    for name, tensor in zip("xwb", (x, w, b), strict=True):
        tensor.requires_grad_(name not in frozen)
    wanted = [t for t in (x, w, b) if t.requires_grad]
    loss = linear_cross_entropy(x, w, target, b, chunk=8)
    torch.testing.assert_close(loss, plain(x, w, target, b))
    assert loss.requires_grad == bool(wanted)
    if wanted:
        expected = torch.autograd.grad(plain(x, w, target, b), wanted)
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected)


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    x, w, b, target = make()
    loss = linear_cross_entropy(x, w, target, b, chunk=8)
    passes = [
        torch.autograd.grad(loss, (x, w, b), torch.tensor(2.0), retain_graph=more) for more in (True, True, False)
    ]
    assert all(torch.equal(one, again) and torch.equal(one, last) for one, again, last in zip(*passes, strict=True))


def test_scaled_losses_of_float16_neither_overflow_nor_vanish():
    x, w, _, target = make(rows=256, classes=2000)
    exact = outcome(plain, *(t.detach().double().requires_grad_() for t in (x, w)), None, target, factor=2.0**16)
    actual = outcome(linear_cross_entropy, x, w, None, target, factor=2.0**16, autocast=torch.float16, chunk=64)
    expected = outcome(plain, x, w, None, target, factor=2.0**16, autocast=torch.float16)
    assert all(t.isfinite().all() for t in actual)
    assert distance(actual, exact) <= 1.5 * distance(expected, exact)
    # Small gradients survive without a loss scale, which plain PyTorch needs.
    actual = outcome(linear_cross_entropy, x, w, None, target, autocast=torch.float16, chunk=64)
    assert distance([t * 2.0**16 for t in actual[1:]], exact[1:]) <= 1.5 * distance(expected[1:], exact[1:])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padded_classes_change_nothing_and_none_of_them_is_seen(reduction, monkeypatch):
    monkeypatch.setattr(kernels, "padding", lambda classes, device: -classes % 64)
    x, w, b, target = make(torch.float64)
    with torch.no_grad():
        x[3] = float("inf")
    target[3] = -100  # a row that does not count, whatever it holds
    options = {"reduction": reduction, "label_smoothing": 0.1}
    for bias in (b, None):
        actual = outcome(linear_cross_entropy, x, w, bias, target, chunk=5, **options)
        torch.testing.assert_close(actual, outcome(plain, x, w, bias, target, **options), equal_nan=True)
    with raises(IndexError, "60"):
        linear_cross_entropy(x, w, torch.full_like(target, 60))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_checkpoint_around_it_changes_nothing(reduction):
    x, w, b, target = make()
    expected = outcome(linear_cross_entropy, x, w, b, target, chunk=8, reduction=reduction)

    def again(*args, **options):
        return checkpoint(linear_cross_entropy, *args, use_reentrant=False, **options)

    actual = outcome(again, x, w, b, target, chunk=8, reduction=reduction)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_rows_may_have_any_number_of_dimensions_and_any_strides():
    torch.manual_seed(0)
    w = torch.randn(7, 16, requires_grad=True)
    for x in (torch.randn(2, 3, 5, 16), torch.randn(16, 6).t(), torch.randn(6, 32)[:, ::2], torch.randn(16)):
        target = torch.randint(7, x.shape[:-1])
        actual = linear_cross_entropy(x, w.t().contiguous().t(), target, chunk=4, reduction="none")
        expected = plain(x.reshape(-1, 16), w, target.flatten(), reduction="none").view(target.shape)
        torch.testing.assert_close(actual, expected)


def test_what_it_cannot_do_is_refused_with_a_reason():
    x, w, _, target = make()
    with raises(LowtideError, "probabilities"):
        linear_cross_entropy(x, w, torch.rand(37, 53))
    with raises(LowtideError, "[37]", "[5]"):
        linear_cross_entropy(x, w, target[:5])
    with raises(LowtideError, "median"):
        linear_cross_entropy(x, w, target, reduction="median")
    for chunk in (0, 2.5):
        with raises(LowtideError, str(chunk)):
            linear_cross_entropy(x, w, target, chunk=chunk)
    for wrong, named in (
        ({"reduction": "median"}, "'median'"),
        ({"chunk": 0}, "chunk of 0"),
        ({"label_smoothing": 3}, "=3"),
    ):
        with raises(LowtideError, named):
            LinearCrossEntropy(4, 5, **wrong)
    with raises(IndexError, "60"):
        linear_cross_entropy(x, w, target.masked_fill(target == target[1], 60))
    with raises(RuntimeError, "37x9"):
        linear_cross_entropy(x[:, :9], w, target)


def test_transforms_of_torch_func_run_plain_pytorch():
    x, w, b, target = (t.detach() for t in make())
    actual = torch.func.grad(lambda x: linear_cross_entropy(x, w, target, b))(x)
    torch.testing.assert_close(actual, torch.func.grad(lambda x: plain(x, w, target, b))(x))
    _, tangent = torch.func.jvp(lambda x: linear_cross_entropy(x, w, target, b), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(
        tangent, torch.func.jvp(lambda x: plain(x, w, target, b), (x,), (torch.ones_like(x),))[1]
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks, after a break
def test_a_compiled_model_gives_the_same():
    torch._dynamo.reset()
    layer = LinearCrossEntropy(16, 53, chunk=8)
    x, _, _, target = make()
    compiled = torch.compile(lambda x, t: layer(x.relu(), t) * 2, backend="eager")
    torch.testing.assert_close(compiled(x, target), layer(x.relu(), target) * 2)


def test_the_layer_is_a_linear_one_to_its_owners():
    linear = nn.Linear(16, 53).eval()
    layer = LinearCrossEntropy.from_linear(linear, ignore_index=3, label_smoothing=0.1, reduction="sum", chunk=8)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert list(layer.state_dict()) == list(linear.state_dict())
    assert not layer.training
    x, _, _, target = make()
    target = target.clamp(min=0)
    expected = F.cross_entropy(linear(x), target, ignore_index=3, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(layer(x, target), expected)
    assert torch.equal(layer.logits(x), linear(x))
    assert LinearCrossEntropy.from_linear(nn.Linear(4, 5, bias=False)).bias is None


def test_nothing_as_large_as_the_logits_is_ever_there():
    torch.manual_seed(0)
    head = nn.Linear(8, 1000, bias=False)
    batch = torch.randn(500, 8), torch.randint(1000, (500,))

    def run(model, batch):
        return linear_cross_entropy(batch[0], model.weight, batch[1], chunk=20)

    traced = profile(Workload(head, run, batch))
    logits = 500 * 1000 * 4
    plain = profile(Workload(head, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch))
    assert plain.storage_peak_bytes - plain.static_bytes >= 3 * logits
    assert max(s.bytes for s in traced.graph.storages) == 20 * 1000 * 4
    assert [saved.bytes for saved in traced.saved] == [1000 * 8 * 4]  # the weight's gradient; the input wants none
    assert traced.storage_peak_bytes - traced.static_bytes < logits / 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_many_rows_do_not_overflow(device, dtype):
    x = torch.full((128, 8), 4.0, dtype=dtype, device=device).requires_grad_()
    w = torch.zeros(10, 8, dtype=dtype, device=device).requires_grad_()
    target = torch.zeros(128, dtype=torch.int64, device=device)
    torch.testing.assert_close(*(outcome(f, x, w, None, target) for f in (linear_cross_entropy, plain)))


def test_a_grad_scalers_step_through_the_layer_moves_by_the_true_gradient():
    head, x, target = LinearCrossEntropy(8, 10, bias=False), torch.full((128, 8), 4.0), torch.zeros(128).long()
    nn.init.zeros_(head.weight)
    optimizer, scaler = torch.optim.SGD(head.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**13)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head(x, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    # 0.1 * 4 * (1 - 1/10): ten equal logits; float16 rounds probabilities
    torch.testing.assert_close(head.weight[0], torch.full((8,), 0.36), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heavy", [1.0, 300.0])
def test_float16_gradients_fit_whatever_weights_there_are(device, heavy):
    torch.manual_seed(0)
    x, w = ((torch.randn(n, 8, device=device) * size).half().requires_grad_() for n, size in ((64, 1e-3), (10, 300)))
    options = {"class_weight": torch.full((10,), heavy, dtype=torch.float16, device=device)}
    target = torch.randint(10, (64,), device=device)
    actual, expected = (outcome(f, x, w, None, target, **options) for f in (linear_cross_entropy, plain))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = outcome(plain, *wide, None, target, class_weight=options["class_weight"].double())
    assert distance(actual, exact) <= 1.5 * distance(expected, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_float16_with_all_targets_ignored_has_gradients_of_0(device):
    x, w = (torch.randn(n, 8, device=device).half().requires_grad_() for n in (4, 16))
    loss = linear_cross_entropy(x, w, torch.full((4,), -100, device=device))
    loss.backward()
    assert loss.isnan()
    assert not x.grad.any()
    assert not w.grad.any()
