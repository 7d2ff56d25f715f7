"""Few-bit activations: torch's forward, a few bits kept, and the slopes of a table backward."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import LowtideError
from lowtide.kernels.activations import CURVES, GATES
from lowtide.nn import FewBit, fewbit
from lowtide.nn.fewbit import book_for, few_bit
from lowtide.nn.fewbit_tables import BITS, Uniform, table_of
from tests.nn.raising import raises
from tests.soak import in_soak

NAMED = [cls for cls in vars(fewbit).values() if isinstance(cls, type) and issubclass(cls, fewbit._NamedActivation)][1:]
ARGUMENTS = {"Threshold": (0.3, 7.0), "Hardtanh": (-0.3, 0.7), "LeakyReLU": (0.2,), "Softshrink": (0.3,)}
STRAIGHT_NAMES = {"ReLU", "LeakyReLU", "Hardtanh", "ReLU6", "Hardsigmoid", "Hardshrink", "Softshrink", "Threshold"}
SMOOTH = [cls for cls in NAMED if cls.__name__ not in STRAIGHT_NAMES]
STRAIGHT = [cls for cls in NAMED if cls.__name__ in STRAIGHT_NAMES]
DTYPES = [torch.float32, torch.bfloat16, *in_soak((torch.float64, torch.float16))]


def pair(cls, **kwargs):
    arguments = ARGUMENTS.get(cls.__name__, ())
    return cls(*arguments, **kwargs), getattr(nn, cls.__name__)(*arguments)


def gradient(module, x, dy):
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(leaf * 1)  # not a leaf: it may be written over
    return torch.autograd.grad(y, leaf, dy)[0]


def test_there_is_a_module_for_each():
    assert len(SMOOTH) == len(CURVES) == 13
    assert len(STRAIGHT) == len(GATES) == 8
    assert all(issubclass(cls, getattr(nn, cls.__name__)) for cls in NAMED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_forward_is_torchs_and_the_bytes_are_few(cls, dtype):
    module, plain = pair(cls)
    x = torch.randn(7, 11).mul(3).to(dtype).requires_grad_()
    y = module(x)
    assert torch.equal(y, plain(x))
    (codes,) = y.grad_fn.saved_tensors
    assert codes.untyped_storage().nbytes() == math.ceil(module.bits * 77 / 8)
    assert torch.autograd.grad(y, x, torch.ones_like(y))[0].dtype is dtype


@pytest.mark.parametrize("bits", [1, 3, *in_soak(bits for bits in BITS if bits not in (1, 3))])
@pytest.mark.parametrize("cls", SMOOTH, ids=lambda cls: cls.__name__)
def test_gradients_have_the_tables_error(cls, bits):
    torch.manual_seed(0)
    x = torch.randn(100_000)
    module, plain = pair(cls, bits=bits)
    ones = torch.ones_like(x)
    error = gradient(module, x, ones) - gradient(plain, x, ones)
    assert float(error.square().mean().sqrt()) == pytest.approx(table_of(module.book.activation, bits).rmse, rel=0.05)


@pytest.mark.parametrize("cls", STRAIGHT, ids=lambda cls: cls.__name__)
def test_straight_ones_have_torchs_gradient(cls):
    module, plain = pair(cls)
    x, dy = torch.randn(2, 120)
    assert torch.equal(gradient(module, x, dy), gradient(plain, x, dy))


@pytest.mark.parametrize("cls", [c for c in NAMED if hasattr(pair(c)[1], "inplace")], ids=lambda cls: cls.__name__)
def test_in_place(cls):
    module, _ = pair(cls)
    over, plain = pair(cls)
    over.inplace = plain.inplace = True
    x, dy = torch.randn(2, 5, 6)
    leaf = x.clone().requires_grad_()
    y = leaf * 1
    assert over(y) is y
    assert torch.equal(y, plain(x.clone()))
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], gradient(module, x, dy))
    for forbidden in (leaf, leaf[1:], (leaf * 1).unbind(0)[0]):
        with raises(RuntimeError, "place"):
            over(forbidden)
    assert torch.equal(leaf, x)
    columns = (leaf * 1)[:, ::2]  # neither dense nor its own base
    over(columns)
    assert torch.equal(torch.autograd.grad(columns, leaf, dy[:, ::2])[0][:, ::2], gradient(module, x, dy)[:, ::2])


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2),
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "every other": lambda t: t[:, :, ::2],
    "expanded": lambda t: t[:, :1].expand(-1, 4, -1, -1),
    "offset": lambda t: t[1:],
    "no dimensions": lambda t: t[0, 0, 0, 0],
    "odd": lambda t: t[:1, :1, :, :3],
}


@pytest.mark.parametrize("kind", [fewbit.GELU, fewbit.ReLU])
@pytest.mark.parametrize("of_gradient", ["transposed", *in_soak(("plain", "expanded"))])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_values(layout, of_gradient, kind):
    x = LAYOUTS[layout](torch.randn(3, 4, 5, 6))
    dy = torch.randn(x.shape)
    if of_gradient == "transposed" and dy.dim() > 1:
        dy = torch.randn(x.transpose(0, 1).shape).transpose(0, 1)
    elif of_gradient == "expanded":
        dy = torch.ones(()).expand(x.shape)
    module = kind()
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    assert y.stride() == getattr(nn, kind.__name__)()(x).stride()
    actual = torch.autograd.grad(y, leaf, dy)[0]
    assert torch.equal(actual, gradient(module, x.contiguous(), dy.contiguous()))


def test_nothing_is_kept_where_nothing_is_needed():
    module = fewbit.GELU()
    assert module(torch.randn(3)).grad_fn is None
    with torch.no_grad():
        assert module(torch.randn(3, requires_grad=True)).grad_fn is None
    empty = torch.randn(0, 4, requires_grad=True)
    assert torch.autograd.grad(module(empty).sum(), empty)[0].shape == (0, 4)


def test_any_module_name_or_function():
    x = torch.randn(100, requires_grad=True)
    for activation in (nn.GELU(), "gelu", F.gelu):
        layer = FewBit(activation, bits=2)
        assert torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], gradient(fewbit.GELU(bits=2), x, torch.ones(100)))
    own = FewBit(lambda x: x * torch.sigmoid(1.702 * x), bits=8)
    (actual,) = torch.autograd.grad(own(x).sum(), x)
    torch.testing.assert_close(actual, own.book.activation.slope(x), rtol=0, atol=0.02)  # 8 bits: near
    assert FewBit(nn.SiLU(inplace=True)).inplace
    assert FewBit(nn.ReLU(), bits=5).bits == 1


def test_what_cannot_be_is_refused():
    for bits in (0, 9, 2.5):
        with raises(LowtideError, f"bits={bits}"):
            fewbit.GELU(bits=bits)
    with raises(LowtideError, "beta"):
        fewbit.GELU(density="beta")
    mixes = (nn.Softmax(-1), nn.GLU(), nn.Dropout(0.5), lambda x: x / x.norm(), lambda x: x.sum(), torch.softmax)
    not_finite = (torch.log, torch.sqrt)
    for wrong in (nn.PReLU(), "softmax", nn.ReLU, 3, *mixes, *not_finite):
        with pytest.raises(LowtideError):
            FewBit(wrong)


def test_calibration_chooses_slopes_for_the_inputs():
    x = torch.randn(20_000) * 0.2 + 1
    module, other = fewbit.SiLU(), FewBit("silu")
    expected = gradient(nn.SiLU(), x, torch.ones_like(x))
    before = gradient(module, x, torch.ones_like(x))
    module.calibrate(x)
    other.calibrate(x)
    after = gradient(module, x, torch.ones_like(x))
    assert torch.equal(after, gradient(other, x, torch.ones_like(x)))
    assert float((after - expected).norm()) < 0.4 * float((before - expected).norm())


@pytest.mark.parametrize("make", [fewbit.SiLU, lambda **how: FewBit("silu", **how)], ids=["SiLU", "FewBit"])
def test_a_calibration_is_saved_and_restored_by_its_density(make, tmp_path):
    x, dy = torch.randn(500) * 0.2 + 1, torch.ones(500)
    module, other, third = make(), make(), make()
    module.calibrate(x)
    torch.save({"model": module.state_dict(), "density": module.density}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt")
    assert not saved["model"]
    assert not torch.equal(gradient(other, x, dy), gradient(module, x, dy))
    other.calibrate(saved["density"])
    for same in (other, make(density=saved["density"])):
        assert torch.equal(gradient(same, x, dy), gradient(module, x, dy))
    assert third.density == "normal"
    third.calibrate(Uniform())
    assert third.density == Uniform()
    third.calibrate("normal")
    assert torch.equal(gradient(third, x, dy), gradient(make(), x, dy))


def test_copies_pickles_and_state_dicts():
    module = nn.Sequential(nn.Linear(4, 4), fewbit.ELU(0.5, bits=2), FewBit("mish"))
    assert list(module.state_dict()) == ["0.weight", "0.bias"]
    x, dy = torch.randn(3, 4), torch.randn(3, 4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(gradient(other, x, dy), gradient(module, x, dy))
    module[1].alpha = 2.0
    assert torch.equal(module[1](x.clone().requires_grad_()), F.elu(x, 2.0))


def test_gradients_of_gradients():
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: few_bit(t, book_for("leaky_relu")) * t, x)


@pytest.mark.parametrize("name", ["gelu", "relu"])
@pytest.mark.parametrize("layout", [torch.clone, torch.t], ids=["as it is", "transposed"])
def test_batched_gradients_are_those_one_by_one(name, layout):
    x, module = torch.randn(3, 5), FewBit(name)

    def changed(x):
        return layout(module(x))

    expected = torch.autograd.functional.jacobian(changed, x)
    assert torch.equal(torch.autograd.functional.jacobian(changed, x, vectorize=True), expected)
    leaf = x.clone().requires_grad_()
    dy = torch.stack([torch.randn_like(layout(x)), torch.full_like(layout(x), math.inf)])
    y = changed(leaf)
    (actual,) = torch.autograd.grad(y, leaf, dy, retain_graph=True, is_grads_batched=True)
    mapped = torch.func.vmap(lambda one: torch.autograd.grad(y, leaf, one, retain_graph=True)[0])(dy)
    torch.testing.assert_close(mapped, actual, rtol=0, atol=0, equal_nan=True)
    for mine, one in zip(actual, dy, strict=True):
        torch.testing.assert_close(
            mine, torch.autograd.grad(y, leaf, one, retain_graph=True)[0], rtol=0, atol=0, equal_nan=True
        )


def test_checkpoints_autocast_and_hooks_around_it():
    model = nn.Sequential(nn.Linear(8, 8), fewbit.GELU(), nn.Linear(8, 8), fewbit.Softplus())
    x, dy = torch.randn(4, 8), torch.randn(4, 8)
    expected = gradient(model, x, dy)
    assert torch.equal(gradient(lambda t: checkpoint(model, t, use_reentrant=False), x, dy), expected)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(gradient(model, x, dy), expected)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradient(model, x, dy.bfloat16())
        assert model(x).dtype is nn.Sequential(model[0], nn.GELU(), model[2], nn.Softplus())(x).dtype
    torch.testing.assert_close(actual, expected, rtol=0.2, atol=0.1)  # a boundary may be crossed by rounding


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(inplace):
    def make(kind):
        return nn.Sequential(nn.Linear(8, 8), kind(inplace=inplace), nn.Linear(8, 8), kind())

    ours, theirs = make(fewbit.SiLU), make(nn.SiLU)
    theirs.load_state_dict(ours.state_dict())
    x, dy = torch.randn(5, 8), torch.randn(5, 8)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), theirs(x))
    leaf = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(compiled(leaf), leaf, dy)[0], gradient(ours, x, dy))


def test_transforms_and_forward_mode_run_torchs_ops():
    module, x = fewbit.GELU(), torch.randn(5)
    assert torch.equal(torch.func.grad(lambda t: module(t).sum())(x), torch.func.grad(lambda t: F.gelu(t).sum())(x))
    actual = torch.func.jvp(module, (x,), (torch.ones(5),))[1]
    assert torch.equal(actual, torch.func.jvp(F.gelu, (x,), (torch.ones(5),))[1])
