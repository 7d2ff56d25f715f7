"""The kernels against slopes looked up one by one: Triton's interpreted on a CPU, compiled on a GPU."""

import math
from itertools import product

import pytest
import torch

from lowtide.kernels import fewbit as chooser
from lowtide.kernels.activations import CURVES, GATES, Activation
from lowtide.kernels.reference import fewbit as reference
from lowtide.nn.fewbit import book_for
from tests.kernels.devices import DEVICE, GPU
from tests.soak import each_value, in_soak

try:
    from lowtide.kernels.triton import fewbit as fast
except ImportError:
    fast = None

KERNELS = [
    pytest.param(reference, id="reference"),
    pytest.param(fast, id="triton", marks=pytest.mark.skipif(fast is None, reason="needs triton")),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [2 * 2048 + 5, *in_soak((1, 7, 8, 9, 4096))]
GATES_WITH_NUMBERS = [
    *(Activation.pointwise(name) for name in GATES),
    Activation("leaky_relu", (0.3,)),
    Activation("leaky_relu", (-0.3,)),
    Activation("hardtanh", (-0.3, 0.7)),
    Activation("softshrink", (0.3,)),
    Activation("hardshrink", (0.3,)),
    Activation("threshold", (0.3, 7.0)),
]


def looked_up(x, book):
    """The slope of every input, one at a time."""
    wide = [float(v) for v in torch.tensor(book.boundaries, dtype=torch.float32)]
    actual = []
    for value in x.double().tolist():
        code = len(wide) if math.isnan(value) else sum(value >= boundary for boundary in wide)
        actual.append(float(torch.tensor(book.levels[code], dtype=torch.float32)))
    return torch.tensor(actual, dtype=torch.float64, device=x.device)


def make(size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, size, generator=generator).to(dtype).to(DEVICE)
    return x.clone(), dy.clone()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_input_gets_its_slope(kernels, size, bits):
    book = book_for("gelu", bits)
    x, dy = make(size)
    codes = kernels.encode(x, book)
    assert codes.dtype is torch.uint8
    assert codes.nbytes == math.ceil(bits * size / 8)
    expected = dy.double() * looked_up(x, book)
    torch.testing.assert_close(kernels.decode(dy, codes, book), expected.float(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, DTYPES[i % 3]) for i, name in enumerate(CURVES)), *in_soak(product(CURVES, DTYPES))],
    ids=str,
)
def test_every_curve_in_every_dtype(kernels, name, dtype):
    book = book_for(name, 3)
    x, dy = make(503, dtype)
    dx = kernels.decode(dy, kernels.encode(x, book), book)
    assert dx.dtype is dtype
    # One rounding to float32, one to the dtype.
    assert_same(dx, (dy.float() * looked_up(x, book).float()).to(dtype), kernels)


def test_double_precision_is_kept():
    book = book_for("silu", 4)
    x, dy = (t.double() for t in make(100))
    dx = reference.decode(dy, reference.encode(x, book), book)
    assert torch.equal(dx, dy * looked_up(x, book))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_boundaries_themselves_infinities_and_nan(kernels, bits):
    book = book_for("gelu", bits)
    at = torch.tensor(book.boundaries, dtype=torch.float32)
    far = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    x = torch.cat([at, torch.nextafter(at, torch.tensor(-math.inf)), far]).to(DEVICE)
    dx = kernels.decode(torch.ones_like(x), kernels.encode(x, book), book)
    assert torch.equal(dx.double(), looked_up(x, book))


@pytest.mark.skipif(fast is None, reason="needs triton")
@pytest.mark.parametrize(("bits", "size"), each_value(range(1, 9), (5, 4099)))
def test_both_pack_alike(bits, size):
    book = book_for("tanh", bits)
    x, _ = make(size)
    assert torch.equal(fast.encode(x, book), reference.encode(x, book))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("curve", "dtype"), each_value(GATES_WITH_NUMBERS, DTYPES), ids=str)
def test_a_gate_has_torchs_own_gradient(kernels, curve, dtype):
    book = book_for(curve)
    ends = torch.tensor([0.0, -0.0, 1, -1, 3, -3, 6, 0.5, -0.5, 0.3, -0.3, 0.7, math.inf, -math.inf])
    x = torch.cat([torch.randn(500), ends]).to(dtype).to(DEVICE)
    dy = torch.randn(x.shape).to(dtype).to(DEVICE)
    dy[::50] = math.inf
    dy[1::50] = math.nan
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(curve(leaf), leaf, dy)
    codes = kernels.encode(x, book) if kernels is reference or dtype is torch.float32 else chosen(x, book)
    dx = kernels.decode(dy, codes, book)
    assert_same(dx, expected, kernels)


def assert_same(actual, expected, kernels):
    """Bit for bit. Triton's interpreter cuts bfloat16 off where a GPU rounds it: there, to one unit."""
    if kernels is fast and not GPU and actual.dtype is torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0, equal_nan=True)
    else:
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))


def chosen(x, book):
    """By Triton's kernel, with the ends of the gate as the chooser finds torch's to be."""
    if GPU:
        return chooser._encode_gate(x, book, fast)
    actual = [fast.encode(x, book, rounded=rounded) for rounded in (False, True)]  # all 65,536 take long to interpret
    return next(codes for codes in actual if torch.equal(codes, reference.encode(x, book)))


@pytest.mark.skipif(fast is None, reason="needs triton")
@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "tanh"])
def test_the_activation_and_its_codes_in_one_pass(name):
    book = book_for(name, 3)
    x, _ = make(3000)
    for way in fast.activations(book.activation):
        y, codes = fast.forward(x, book, way)
        torch.testing.assert_close(y.double(), book.activation(x.double()), rtol=2e-6, atol=1e-6)
        assert torch.equal(codes, fast.encode(x, book))


@pytest.mark.skipif(fast is None, reason="needs triton")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_one_pass_is_used_only_if_all_inputs_agree(dtype, monkeypatch):
    monkeypatch.setattr(chooser, "_proofs", {})
    x = torch.zeros(1, dtype=dtype, device=DEVICE)
    book = book_for("gelu", 3)

    class Kernels:
        wrong = ()
        activations = staticmethod(lambda curve: (1, 2))

        @staticmethod
        def forward(x, book, way):
            y = book.activation(x)
            if way in Kernels.wrong:
                y.view(torch.int16)[0x3F80] += 1  # one result of 65,536, by one bit
            return y, None

    for Kernels.wrong, expected in (((), 1), ((1,), 2), ((1, 2), None)):
        monkeypatch.setattr(chooser, "_proofs", {})
        assert chooser._with_torchs_bits(book, x, Kernels) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "gelu"])
def test_on_a_gpu_one_pass_has_torchs_bits(name, dtype):
    x = torch.zeros(1, dtype=dtype, device="cuda")
    assert chooser._with_torchs_bits(book_for(name, 3), x, fast) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_the_forward_pass_is_torchs(name, dtype):
    x = torch.randn(100_003, device="cuda").mul_(4).to(dtype)
    book = book_for(name, 3)
    y, codes = chooser.forward(x, book)
    assert torch.equal(y, book.activation(x))
    assert torch.equal(codes.cpu(), reference.encode(x.cpu(), book))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("curve", GATES_WITH_NUMBERS, ids=repr)
def test_on_a_gpu_all_inputs_of_a_gate_get_torchs_gradient(curve, dtype):
    x = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype).requires_grad_()
    book = book_for(curve)
    dy = torch.randn(x.shape, device="cuda").to(dtype)
    (expected,) = torch.autograd.grad(curve(x), x, dy)
    assert torch.equal(chooser.decode(dy, chooser.encode(x.detach(), book), book), expected)


@pytest.mark.gpu
@pytest.mark.soak
def test_on_a_gpu_more_than_2_to_the_31_elements():
    book = book_for("gelu", 3)
    x = torch.zeros(2**31 + 13, dtype=torch.bfloat16, device="cuda")
    x[-5:] = 3.0
    codes = fast.encode(x, book)
    dx = fast.decode(torch.ones_like(x), codes, book)
    assert torch.equal(dx[-5:].float().cpu(), torch.full((5,), book.levels[-1]).bfloat16().float())
    assert bool((dx[:-5] == dx[0]).all())
