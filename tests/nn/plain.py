"""Batch norm + activation by torch's own layers: what every test of ``lowtide.nn`` compares with."""

import copy

import torch
from torch import nn

from lowtide.compat.autograd import top_saved_hooks
from lowtide.nn import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from tests.soak import in_soak

LAYERS = {1: BatchNormAct1d, 2: BatchNormAct2d, 3: BatchNormAct3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

INVERTIBLE = {
    "identity": nn.Identity,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "elu": lambda: nn.ELU(0.8),
    "celu": lambda: nn.CELU(1.3),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
}
FOLDING = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "hardswish": nn.Hardswish,
    "prelu": nn.PReLU,
    "mish": nn.Mish,  # one that lowtide has no formula for
}
ACTIVATIONS = {**INVERTIBLE, **FOLDING}

CHECKPOINTS = ("checkpoint", "checkpoint_xhat")
IN_PLACE = ("inplace", "inplace2")
# On a CPU "auto" is "checkpoint", and "inplace2" differs from "inplace" on no device.
ONE_BUFFER = (*CHECKPOINTS, "inplace", *in_soak(("inplace2", "auto")))

# Every activation with the strategies that keep x and z, and every strategy; under ``make soak`` all pairs.
POSSIBLE = [
    *(("checkpoint", name) for name in ACTIVATIONS),
    *(("inplace", name) for name in INVERTIBLE),
    *(("checkpoint_xhat", name) for name in ("silu", "prelu", *in_soak(ACTIVATIONS))),
    *(("inplace2", name) for name in ("elu", *in_soak(INVERTIBLE))),
    *(("standard", name) for name in ("relu", *in_soak(ACTIVATIONS))),
    ("auto", "leaky_relu"),
]


class Plain(nn.Module):
    """φ(batch_norm(x) + residual)."""

    def __init__(self, norm, activation):
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, x, residual=None):
        y = self.norm(x)
        return self.activation(y if residual is None else y + residual)


def pair(strategy, activation="leaky_relu", *, dims=2, channels=4, seed=0, **options):
    """A layer of lowtide's and one of torch's with the same random parameters and statistics, in training mode."""
    torch.manual_seed(seed)
    norm = NORMS[dims](channels, **options)
    act = nn.PReLU(channels) if activation == "prelu" else ACTIVATIONS[activation]()
    with torch.no_grad():
        if norm.affine:
            norm.weight.copy_(torch.rand(channels) + 0.5)
            norm.weight[::3] *= -1
            norm.bias.normal_(std=0.3)
        if norm.track_running_stats:
            norm.running_mean.normal_()
            norm.running_var.copy_(torch.rand(channels) + 0.5)
    layer = LAYERS[dims](channels, copy.deepcopy(act), strategy, **options)
    layer.load_state_dict(norm.state_dict(), strict=activation != "prelu")
    return layer, Plain(norm, act)


def networks(strategy, activation="leaky_relu", **options):
    """conv-bn-act-conv with a layer of lowtide's, and with torch's."""
    first, last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    layers = pair(strategy, activation, **options)
    return [nn.Sequential(copy.deepcopy(first), m, copy.deepcopy(last)).double() for m in layers]


def batch(seed=3):
    """An input for ``networks``."""
    return torch.randn(5, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(model, x, gradient, *others):
    """The output, then the gradients of the inputs and of the parameters."""
    inputs = [t.detach().requires_grad_() for t in (x, *others)]
    out = model(*inputs)
    out.backward(gradient)
    return [out.detach(), *(t.grad for t in inputs), *(p.grad for p in ordered(model))]


def gradients(net, x, around=lambda net, x: net(x), backward=lambda out: out.square().sum().backward()):
    """The gradients of an input and of the parameters; ``around`` calls the network, ``backward`` reads its output."""
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    backward(around(net, leaf))
    return [leaf.grad, *(p.grad for p in net.parameters())]


def hooks_now():
    """The saved-tensor hooks on top."""
    return top_saved_hooks(True)


def ordered(model):
    """Parameters in one order, whoever owns them: weight, bias, slopes."""
    named = {name.rpartition("norm.")[2]: p for name, p in model.named_parameters()}
    return [named[name] for name in ("weight", "bias", "activation.weight") if name in named]


def assert_same(run, ours, plain, **tolerance):
    """Compare results of ``run`` on lowtide's model and on torch's."""
    torch.testing.assert_close(run(ours), run(plain), **tolerance)


def assert_same_step(layer, plain, x, gradient, *others, **tolerance):
    """Output and gradients are those of plain torch, dtypes and layouts too."""
    for ours, torchs in zip(step(layer, x, gradient, *others), step(plain, x, gradient, *others), strict=True):
        if torchs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, torchs, check_stride=torchs.dim() > 1, **tolerance)
    assert_same_statistics(layer, plain.norm)


def assert_same_statistics(layer, norm):
    for name, expected in norm.named_buffers():
        torch.testing.assert_close(getattr(layer, name), expected)
