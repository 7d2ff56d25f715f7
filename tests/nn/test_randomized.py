"""RandomizedLinear: what is exact is exact, the rest is right on average, and little is kept."""

import copy
import gc
import pickle
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import LowtideError
from lowtide.kernels.reference.randomized import KINDS
from lowtide.nn import RandomizedLinear
from lowtide.nn.randomized import _latest
from tests.nn.raising import raises

from ..soak import count, in_soak
from .variance import variance

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DRAWS = count(600, soak=2_000)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pair(features=(16, 8), *, bias=True, dtype=torch.float32, **how):
    plain = nn.Linear(*features, bias=bias, device=DEVICE, dtype=dtype)
    return plain, RandomizedLinear.from_linear(plain, **how)


def run(layer, x, gradient):
    """The output, and the gradients of the input, the bias and the weight."""
    y = layer(x)
    inputs = [t for t in (x, layer.bias, layer.weight) if t is not None]
    return y, *torch.autograd.grad(y, inputs, gradient)


def saved(y):
    """The tensors that a node saves: the weight, the sketch, the seed."""
    return y.grad_fn.saved_tensors


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(40, 16), (5, 9, 16), (2, 3, 7, 16)]
CASES = [
    *((kind, kind != "rows", (5, 9, 16), torch.float32) for kind in KINDS),
    *(("rademacher", True, shape, dtype) for shape, dtype in zip(SHAPES, DTYPES[1:], strict=True)),
    *in_soak(product(KINDS, (True, False), SHAPES, DTYPES)),
]


@pytest.mark.parametrize(("kind", "bias", "shape", "dtype"), CASES, ids=str)
def test_output_and_other_gradients_are_those_of_linear_bit_for_bit(kind, bias, shape, dtype):
    plain, layer = pair(bias=bias, dtype=dtype, sketch=kind)
    x = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
    gradient = torch.randn(*shape[:-1], 8, device=DEVICE, dtype=dtype)
    expected, actual = run(plain, x, gradient), run(layer, x, gradient)
    assert all(torch.equal(a, b) for a, b in zip(actual[:-1], expected[:-1], strict=True))
    assert actual[-1].dtype == expected[-1].dtype
    assert actual[-1].shape == expected[-1].shape
    assert not torch.equal(actual[-1], expected[-1])


@pytest.mark.parametrize("kind", ["rademacher", *in_soak(kind for kind in KINDS if kind != "rademacher")])
def test_the_weights_gradient_is_right_on_average_with_the_variance_of_theory(kind):
    plain, layer = pair((3, 4), sketch=kind, block=24)
    x, gradient = torch.randn(48, 3, device=DEVICE), torch.randn(48, 4, device=DEVICE)
    gradient += 0.5 * x[:, :1]
    expected = run(plain, x.requires_grad_(), gradient)[-1].double()
    drawn = torch.stack([torch.autograd.grad(layer(x), layer.weight, gradient)[0] for _ in range(DRAWS)]).double()
    theory = variance(kind, x.detach().cpu(), gradient.cpu(), layer.sketch)
    assert (drawn.mean(0) - expected).norm() < 3 * (theory / DRAWS) ** 0.5
    assert float((drawn - expected).square().sum((1, 2)).mean()) == pytest.approx(theory, rel=0.1)


@pytest.mark.parametrize(("rows", "ratio", "expected"), [(1000, 0.2, 200), (33, 0.1, 3), (2, 0.1, 1)])
def test_it_keeps_a_sketch_and_a_seed_and_not_its_input(rows, ratio, expected):
    _, layer = pair(ratio=ratio)
    x = torch.randn(rows, 16, device=DEVICE, requires_grad=True)
    weight, sketch, seed = saved(layer(x))
    assert weight is layer.weight
    assert sketch.shape == (expected, 16)
    assert sketch.untyped_storage().nbytes() == expected * 16 * 4
    assert seed.nbytes == 8


def test_an_input_without_gradient_has_no_weight_stored():
    _, layer = pair()
    assert saved(layer(torch.randn(20, 16, device=DEVICE)))[0] is None


def test_every_step_has_a_new_sketch_and_the_generator_tells_it():
    _, layer = pair()
    x, gradient = torch.randn(50, 16, device=DEVICE), torch.randn(50, 8, device=DEVICE)

    def step():
        return torch.autograd.grad(layer(x.clone()), layer.weight, gradient)[0]

    state = torch.cuda.get_rng_state() if GPU else torch.get_rng_state()
    first = [step() for _ in range(3)]
    (torch.cuda.set_rng_state if GPU else torch.set_rng_state)(state)
    again = [step() for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("mode", ["eval", "no_grad", "frozen"])
def test_where_nothing_is_kept_it_is_plain(mode):
    plain, layer = pair()
    x = torch.randn(30, 16, device=DEVICE, requires_grad=True)
    layer.train(mode != "eval")
    layer.weight.requires_grad_(mode != "frozen")
    with torch.set_grad_enabled(mode != "no_grad"):
        y = layer(x)
        assert torch.equal(y, plain(x))
    if mode == "eval":
        expected = torch.autograd.grad(plain(x).sum(), plain.weight)
        assert torch.equal(torch.autograd.grad(y.sum(), layer.weight)[0], expected[0])


class Heads(nn.Module):
    """Three layers that read one tensor, with dropout around them."""

    def __init__(self, **how):
        super().__init__()
        self.heads = nn.ModuleList(RandomizedLinear(16, 16, device=DEVICE, **how) for _ in range(3))

    def forward(self, x):
        x = F.dropout(x * 2, 0.5)
        q, k, v = (head(x) for head in self.heads)
        return F.dropout(q * k + v, 0.5)


def test_layers_that_read_the_same_input_share_a_sketch():
    heads = [RandomizedLinear(16, 8, device=DEVICE) for _ in range(3)]
    x = torch.randn(40, 16, device=DEVICE)
    first, second, third = (saved(head(x)) for head in heads)
    assert first[1].data_ptr() == second[1].data_ptr() == third[1].data_ptr()
    assert torch.equal(first[2], third[2])


@pytest.mark.parametrize("change", ["written", "other", "other ratio", "view"])
def test_what_is_not_the_same_is_not_shared(change):
    first, second = RandomizedLinear(16, 8, device=DEVICE), RandomizedLinear(16, 8, device=DEVICE)
    x = torch.randn(40, 16, device=DEVICE)
    _, sketch, _ = saved(first(x))
    if change == "written":
        x.mul_(2)
    elif change == "other":
        x = x.clone()
    elif change == "view":
        x = x.flip(0)
    else:
        second = RandomizedLinear(16, 8, device=DEVICE, ratio=0.4)
    _, other, _ = saved(second(x))
    assert other.data_ptr() != sketch.data_ptr()


@pytest.mark.parametrize("end", ["input dies", "backward"])
def test_a_shared_sketch_is_not_held_for_long(end):
    layer = RandomizedLinear(16, 8, device=DEVICE)
    x = torch.randn(40, 16, device=DEVICE)
    y = layer(x)
    assert _latest.of_thread._stored is not None
    if end == "backward":
        y.sum().backward()
    else:
        del x, y
        gc.collect()
    assert _latest.of_thread._stored is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_forward_replays_the_sketch_and_dropout(kind, reentrant):
    model = Heads(sketch=kind)
    x = torch.randn(64, 16, device=DEVICE, requires_grad=True)
    actual = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        y = checkpoint(model, x, use_reentrant=reentrant) if recomputed else model(x)
        y = checkpoint(model, y, use_reentrant=reentrant) if recomputed else model(y)
        x.grad = None
        model.zero_grad()
        y.square().sum().backward()
        actual.append([x.grad, *(p.grad for p in model.parameters()), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


def test_a_sketch_is_not_shared_across_the_border_of_a_checkpoint():
    """There the first run would find one and the second run would not."""
    layer = RandomizedLinear(16, 16, device=DEVICE)
    x = torch.randn(40, 16, device=DEVICE, requires_grad=True)

    def inside(x):
        return F.dropout(layer(x), 0.5)

    actual = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        outside = layer(x)
        y = checkpoint(inside, x, use_reentrant=False) if recomputed else inside(x)
        actual.append(torch.autograd.grad((outside * y).sum(), x)[0])
    assert torch.equal(*actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_that_of_linear(dtype):
    plain, layer = pair()
    x, gradient = torch.randn(60, 16, device=DEVICE, requires_grad=True), torch.randn(60, 8, device=DEVICE).to(dtype)
    with torch.autocast(DEVICE, dtype):
        expected, y = run(plain, x, gradient), layer(x)
        sketch = saved(y)[1]
        actual = run(layer, x, gradient)
    assert sketch.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(actual[:-1], expected[:-1], strict=True))
    assert actual[-1].dtype == torch.float32


def test_a_weight_that_a_plain_layer_shares_under_autocast_has_both_gradients():
    """Autocast caches casts of weights: one without gradient would take the other layer's."""
    plain, layer = pair()
    x = torch.randn(60, 16, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        both = layer(x).sum() + plain(x).sum()
    both.backward()
    with torch.autocast(DEVICE, torch.bfloat16):
        alone = torch.autograd.grad(plain(x).sum(), plain.weight)[0]
    assert (plain.weight.grad - alone).norm() > 0.1 * alone.norm()


def test_state_dict_copies_and_pickles_are_those_of_linear():
    plain, layer = pair(sketch="rows", ratio=0.3, block=None)
    fresh = RandomizedLinear(16, 8)
    fresh.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    for built in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert built.sketch == layer.sketch
        assert torch.equal(built.weight, layer.weight)
        assert built.weight is not layer.weight
    assert repr(layer) == (
        "RandomizedLinear(in_features=16, out_features=8, bias=True, ratio=0.3, sketch='rows', block=None)"
    )


@pytest.mark.parametrize(
    ("shape", "ratio"), [((0, 16), 0.2), ((3, 0, 16), 0.2), ((16,), 0.2), ((1, 16), 0.2), ((7, 16), 1.0)], ids=str
)
def test_few_rows_and_a_ratio_of_one_are_plain(shape, ratio):
    plain, layer = pair(ratio=ratio)
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(plain(x).sum(), [x, plain.weight])
    assert all(map(torch.equal, torch.autograd.grad(layer(x).sum(), [x, layer.weight]), expected))


@pytest.mark.parametrize(
    "x", [torch.randn(9, 15), torch.randn(9, 16).double(), torch.tensor(1.0)], ids=["width", "dtype", "scalar"]
)
def test_errors_are_those_of_linear(x):
    plain, layer = pair()
    with pytest.raises(RuntimeError) as expected:
        plain(x.to(DEVICE))
    with pytest.raises(RuntimeError) as actual:
        layer(x.to(DEVICE))
    assert str(actual.value) == str(expected.value)


def test_an_activation_in_place_may_follow():
    _, layer = pair()
    y = F.relu_(layer(torch.randn(30, 16, device=DEVICE, requires_grad=True)))
    y.sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_a_write_through_data_between_layers_that_share_an_input_is_seen():
    torch.manual_seed(0)
    layers = [RandomizedLinear(16, 4, ratio=0.5, sketch="rows", device=DEVICE) for _ in range(2)]
    for _ in range(4):
        actual = []
        for scale in (lambda h: h.data.mul_(3), lambda h: h.mul_(3)):
            torch.manual_seed(1)
            h = torch.randn(40, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
            y = layers[0](h)
            scale(h)
            (y.sum() + layers[1](h).sum()).backward()
            actual.append(layers[1].weight.grad.clone())
            layers[1].weight.grad = None
        assert torch.equal(*actual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("large", ["x", "dy"])
def test_float16_sketches_of_large_values_do_not_overflow(kind, large):
    torch.manual_seed(0)
    layer = RandomizedLinear(16, 4, ratio=0.1, sketch=kind, device=DEVICE)
    x, dy = (2 + torch.rand(1024, features, device=DEVICE) for features in (16, 4))
    x, dy = (x * 1e4, dy * 1e-4) if large == "x" else (x * 1e-4, dy * 1e4)
    actual = []
    for dtype in (torch.float16, torch.float64):
        built = copy.deepcopy(layer).to(dtype)
        torch.manual_seed(1)  # the same S for both
        built(x.half().to(dtype)).backward(dy.half().to(dtype))
        actual.append(built.weight.grad.double())
    torch.testing.assert_close(*actual, rtol=1e-2, atol=1e-2 * float(actual[1].abs().max()))


def test_transforms_of_functions_have_the_plain_gradient():
    plain, layer = pair()
    x = torch.randn(30, 16, device=DEVICE)

    def loss(model, weight):
        return torch.func.functional_call(model, {"weight": weight}, (x,)).square().sum()

    actual, expected = (torch.func.grad(lambda w, m=m: loss(m, w))(plain.weight.detach()) for m in (layer, plain))
    assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks, after a break
def test_a_compiled_model_breaks_its_graph_and_is_right():
    _, layer = pair()
    model = nn.Sequential(nn.GELU(), layer, nn.GELU())
    x = torch.randn(30, 16, device=DEVICE, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(model(x).sum(), [x, layer.weight])
    torch.manual_seed(1)
    actual = torch.autograd.grad(torch.compile(model, backend="eager")(x).sum(), [x, layer.weight])
    torch.testing.assert_close(actual, expected)


def test_what_is_no_linear_is_refused():
    with raises(LowtideError, "Conv1d"):
        RandomizedLinear.from_linear(nn.Conv1d(3, 3, 1))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_does_not_wait_for_the_gpu():
    layer = RandomizedLinear(64, 64, device="cuda")
    x = torch.randn(512, 64, device="cuda", requires_grad=True)
    for _ in range(2):  # the first two calls look for writes through .data
        layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
