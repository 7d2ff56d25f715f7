"""Small steps around one layer or function each: what real and fake traces are compared on."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Call, Then

CHANNELS_LAST = torch.channels_last


class Of(nn.Module):
    """A function of parameters with these shapes, and of the batch."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.inputs = nn.ParameterList(nn.Parameter(torch.rand(shape) / 2 + 0.25) for shape in shapes)

    def forward(self, *batch):
        return self.function(*self.inputs, *batch)


class On(nn.Module):
    """A layer on an input that needs a gradient."""

    def __init__(self, layer, *shape):
        super().__init__()
        self.layer = layer
        self.input = nn.Parameter(torch.randn(shape))

    def forward(self, *batch):
        return self.layer(self.input, *batch)


class Float32(nn.Module):
    """Stays float32 when the model around it becomes bfloat16, as norms do in mixed precision."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def _apply(self, fn, recurse=True):
        return self

    def forward(self, x):
        return self.layer(x)


def beside(layer):
    """A layer's output and its input in one image: the gradient of each is a window on the image's."""
    return Call(lambda m, x: torch.cat([m.a(x), x], -1).sin(), a=layer)


def recomputed(layer):
    return Call(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=layer)


def self_attention(weights, **options):
    return Call(lambda m, x: m.a(x, x, x, need_weights=weights), a=nn.MultiheadAttention(8, 2, **options))


def frozen(layer, width):
    """A layer whose forward pass builds no graph, before one that does."""

    def run(m, x):
        with torch.no_grad():
            out = m.layer(x)
        return m.head(out[0] if isinstance(out, tuple) else out)

    return Call(run, layer=layer, head=nn.Linear(width, 2))


def loss(model, batch):
    """The sum of everything that needs a gradient."""
    out = model(*batch)
    total = 0
    for tensor in out if isinstance(out, tuple | list) else [out]:
        for part in tensor if isinstance(tensor, tuple) else [tensor]:
            if part is not None and part.requires_grad:
                total = total + (part.abs() if part.is_complex() else part).float().sum()
    return total


def mean_loss(model, batch):
    return model(batch).float().mean()


transposed = Then(lambda x: x.transpose(1, 2))
channels_last = Then(lambda x: x.contiguous(memory_format=CHANNELS_LAST))


def on(shape, make, *arguments, **options):
    """How to make a layer on an input of this shape."""
    return lambda: On(make(*arguments, **options), *shape)


def of(function, *shapes):
    """How to make a function of parameters with these shapes."""
    return lambda: Of(function, *shapes)


def of_image(function):
    """A loss of a channels-last image."""
    return of(lambda x, target: function(x.contiguous(memory_format=CHANNELS_LAST), target), (2, 4, 3, 3))


def images(*layers):
    """Layers on a channels-last image."""
    return On(nn.Sequential(channels_last, *layers), 2, 4, 6, 6)


def tokens(*layers):
    """Layers on a sequence that comes transposed."""
    return On(nn.Sequential(transposed, *layers), 3, 4, 8)


def integers(*shape, below=4):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


def mask(*shape):
    return integers(*shape, below=2).bool()


def attend(**options):
    def function(q, k, v, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, **options)

    return function


def set_items(x, y):
    x = x.clone()
    x[1] = y
    x[2:, 0] = 0
    return x


CONVOLUTIONS = {
    "": {},
    " strided": {"stride": 2, "padding": 1, "bias": False},
    " grouped": {"groups": 2},
    " depthwise": {"groups": 4, "out_channels": 8},
    " dilated": {"dilation": 2, "kernel_size": 2},
}


def convolutions():
    for dims, size in ((1, (9,)), (2, (9, 8)), (3, (5, 6, 7))):
        for name in (f"Conv{dims}d", f"ConvTranspose{dims}d"):
            for what, options in CONVOLUTIONS.items():
                settings = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
                yield f"{name}{what}", on((2, 4, *size), getattr(nn, name), **settings)
            yield f"{name} alone", on((4, *size), getattr(nn, name), 4, 6, 3)
    for mode in ("reflect", "replicate", "circular"):
        yield f"Conv2d {mode}", lambda mode=mode: On(nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode), 2, 4, 9, 8)
        yield f"Conv2d {mode} cl", lambda mode=mode: images(nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode))
    yield "Conv2d cl", lambda: images(nn.Conv2d(4, 6, 3).to(memory_format=CHANNELS_LAST), nn.BatchNorm2d(6), nn.ReLU())


def with_mixed(name, shape, make, *arguments, **options):
    """A norm, and a float32 norm in a model that may be in bfloat16."""
    yield name, on(shape, make, *arguments, **options)
    yield f"{name} mixed", lambda: On(Float32(make(*arguments, **options)), *shape)


def norms():
    for dims, size in ((1, ()), (1, (7,)), (2, (4, 5)), (3, (4, 2, 5))):
        make = getattr(nn, f"BatchNorm{dims}d")
        name = f"BatchNorm{dims}d{list(size)}"
        for option in ({}, {"affine": False}, {"track_running_stats": False}):
            yield from with_mixed(f"{name} {option}", (5, 6, *size), make, 6, **option)
        yield from with_mixed(f"{name} eval", (5, 6, *size), lambda make=make: make(6).eval())
    for shape in (8, (4, 8)):
        for option in ({}, {"elementwise_affine": False}, {"bias": False}):
            yield from with_mixed(f"LayerNorm {shape} {option}", (3, 4, 8), nn.LayerNorm, shape, **option)
        yield from with_mixed(f"RMSNorm {shape}", (3, 4, 8), nn.RMSNorm, shape)
    for size in ((), (4,), (4, 3)):
        yield from with_mixed(f"GroupNorm {size}", (2, 8, *size), nn.GroupNorm, 4, 8)
        yield f"GroupNorm {size} plain", on((2, 8, *size), nn.GroupNorm, 4, 8, affine=False)
    yield "InstanceNorm2d", lambda: On(nn.InstanceNorm2d(6), 3, 6, 4, 5)
    yield "InstanceNorm2d tracked", lambda: On(nn.InstanceNorm2d(6, affine=True, track_running_stats=True), 3, 6, 4, 5)
    yield "LocalResponseNorm", lambda: On(nn.LocalResponseNorm(3), 2, 6, 4, 4)
    yield "weight norm", lambda: On(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), 3, 4)
    yield "spectral norm", lambda: On(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), 3, 4)
    yield "BatchNorm1d of a transposed", lambda: tokens(nn.BatchNorm1d(8), nn.ReLU(), transposed, nn.Linear(8, 2))
    yield "LayerNorm of a transposed", lambda: tokens(nn.LayerNorm(4), transposed, nn.Linear(8, 2))
    yield "GroupNorm of a transposed", lambda: tokens(nn.GroupNorm(2, 8), transposed, nn.Linear(8, 2))
    yield "GroupNorm beside its input", lambda: On(beside(nn.GroupNorm(2, 4)), 2, 4, 5, 6)
    yield "GroupNorm cl", lambda: images(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1))
    yield "GroupNorm cl mixed", lambda: images(Float32(nn.GroupNorm(2, 4)), nn.Conv2d(4, 4, 1))


def activations():
    names = (
        "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
        "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign",
        "Tanh", "Tanhshrink",
    )  # fmt: skip
    for name in names:
        make = getattr(nn, name)
        yield name, lambda make=make: On(make(), 3, 4, 6)
        yield f"{name} of a transposed", lambda make=make: tokens(make(), transposed, nn.Linear(8, 2))
        yield f"{name} cl", lambda make=make: images(make(), nn.Flatten(), Then(Tensor.contiguous))
    yield "PReLU of channels", lambda: On(nn.PReLU(4), 3, 4, 6)
    yield "ReLU in place", lambda: On(nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True)), 3, 6)
    for name in ("Dropout", "AlphaDropout", "Dropout1d", "FeatureAlphaDropout"):
        make = getattr(nn, name)
        yield name, lambda make=make: On(make(0.3), 2, 3, 4)
    yield "Dropout2d", lambda: On(nn.Dropout2d(0.3), 2, 3, 4, 4)
    yield "Dropout of a transposed", lambda: tokens(nn.Dropout(0.3), transposed, nn.Linear(8, 2))
    yield "Dropout cl", lambda: images(nn.Dropout(0.3), nn.Conv2d(4, 2, 1))
    for name in ("softmax", "log_softmax"):
        function = getattr(F, name)
        yield name, lambda f=function: Of(lambda x: f(x, -1), (3, 5))
        yield f"{name} of a transposed", lambda f=function: tokens(Then(lambda x: f(x, 1)), nn.Linear(4, 2))
    yield "gumbel_softmax", lambda: Of(lambda x: F.gumbel_softmax(x, hard=True), (3, 5))


def pooling():
    for dims, size in ((1, (9,)), (2, (9, 8)), (3, (6, 7, 8))):
        for name, arguments in (
            ("MaxPool", (2,)), ("MaxPool", (3, 2, 1)), ("AvgPool", (3, 2, 1)), ("AdaptiveAvgPool", (3,)),
            ("AdaptiveAvgPool", (1,)), ("AdaptiveMaxPool", (3,)), ("LPPool", (2, 2)),
        ):  # fmt: skip
            yield f"{name}{dims}d {arguments}", on((2, 3, *size), getattr(nn, f"{name}{dims}d"), *arguments)
    for layer in (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(3)):
        yield f"{layer} cl", lambda layer=layer: images(layer, nn.Conv2d(4, 2, 1))
    yield "FractionalMaxPool2d", lambda: On(nn.FractionalMaxPool2d(2, output_size=4), 2, 3, 9, 9)
    yield "FractionalMaxPool3d", lambda: On(nn.FractionalMaxPool3d(2, output_size=3), 2, 3, 7, 7, 7)
    unpool = Then(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2))
    yield "max_unpool2d", lambda: On(unpool, 2, 3, 8, 8)
    yield "max_unpool2d cl", lambda: images(unpool, nn.Conv2d(4, 2, 1))


def embeddings():
    yield "Embedding", lambda: nn.Embedding(9, 5), integers(3, 4)
    yield "Embedding padded", lambda: nn.Embedding(9, 5, padding_idx=0), integers(3, 4)
    yield "Embedding by frequency", lambda: nn.Embedding(9, 5, scale_grad_by_freq=True), integers(3, 4)
    yield "Embedding sparse", lambda: nn.Embedding(9, 5, sparse=True), integers(3, 4)
    sparse = partial(nn.Embedding, 9, 5, sparse=True)
    yield "Embedding sparse below", lambda: nn.Sequential(sparse(), nn.Linear(5, 3)), integers(3, 4)
    for mode in ("sum", "mean", "max"):
        bag, offsets = partial(nn.EmbeddingBag, 9, 5, mode=mode), torch.tensor([0, 3, 7])
        yield f"EmbeddingBag {mode}", bag, integers(3, 4)
        yield f"EmbeddingBag {mode} padded", partial(bag, padding_idx=0), integers(3, 4)
        yield f"EmbeddingBag {mode} by offsets", partial(bag, include_last_offset=True), integers(7), offsets
        yield f"EmbeddingBag {mode} frozen", lambda bag=bag: frozen(bag(), 5), integers(3, 4)
    yield "EmbeddingBag sparse sum", lambda: nn.EmbeddingBag(9, 5, mode="sum", sparse=True), integers(3, 4)
    yield "EmbeddingBag sparse mean", lambda: nn.EmbeddingBag(9, 5, mode="mean", sparse=True), integers(3, 4)


def recurrent():
    every = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    for option in (
        {}, {"batch_first": True}, {"bidirectional": True}, {"bias": False}, {"num_layers": 2, "dropout": 0.3}, every
    ):  # fmt: skip
        yield f"LSTM {option}", lambda o=option: On(nn.LSTM(5, 6, **o), 4, 3, 5)
    yield "LSTM alone", lambda: On(nn.LSTM(5, 6), 4, 5)
    yield "LSTM last state", lambda: On(nn.Sequential(nn.LSTM(5, 6), Then(lambda out: out[1])), 4, 3, 5)
    yield "LSTM frozen", lambda: frozen(nn.LSTM(5, 6), 6), torch.ones(4, 3, 5)
    yield "LSTM recomputed", lambda: On(recomputed(nn.LSTM(5, 6)), 4, 3, 5)
    yield "LSTM projected", lambda: On(nn.LSTM(5, 6, proj_size=3), 4, 3, 5)
    for make in (nn.GRU, nn.RNN):
        yield make.__name__, lambda make=make: On(make(5, 6), 3, 2, 5)
        yield f"{make.__name__} {every}", lambda make=make: On(make(5, 6, **every), 2, 3, 5)
    for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        yield cell.__name__, lambda cell=cell: On(cell(5, 6), 4, 5)


def attention():
    for option in ({}, {"dropout": 0.1}, {"bias": False}, {"batch_first": True}, {"add_zero_attn": True}, {"kdim": 8}):
        for weights in (False, True):
            yield f"attention {option} {weights}", lambda w=weights, o=option: On(self_attention(w, **o), 5, 2, 8)
    qkv = [(2, 3, 5, 8)] * 3
    for option in ({}, {"is_causal": True}, {"dropout_p": 0.2}, {"is_causal": True, "dropout_p": 0.2}):
        yield f"sdpa {option}", lambda o=option: Of(attend(**o), *qkv)
    yield "sdpa bool mask", lambda: Of(attend(), *qkv), mask(5, 5)
    yield "sdpa float mask", lambda: Of(attend(), *qkv), torch.ones(5, 5)
    yield "sdpa mask with gradient", lambda: Of(attend(), *qkv, (5, 5))
    yield "sdpa mask and dropout", lambda: Of(attend(dropout_p=0.1), *qkv), mask(5, 5)
    yield "sdpa cross", lambda: Of(attend(), (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    yield "sdpa grouped", lambda: Of(attend(enable_gqa=True), (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))
    yield "encoder layer", lambda: On(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, 5, 8)
    yield (
        "decoder layer",
        lambda: On(Call(lambda m, x: m.a(x, x), a=nn.TransformerDecoderLayer(8, 2, 16, norm_first=True)), 5, 2, 8),
    )


def losses():
    targets = torch.ones(3, 5)
    for reduction in ("mean", "none"):
        for name in (
            "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss",
            "binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss",
            "multilabel_soft_margin_loss",
        ):  # fmt: skip
            function = partial(getattr(F, name), reduction=reduction)
            yield f"{name} {reduction}", of(function, (3, 5)), targets
            yield f"{name} {reduction} cl", of_image(function), torch.ones(2, 4, 3, 3)
        for smoothing in (0.0, 0.1):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            function = partial(F.cross_entropy, **options)
            yield f"cross_entropy {options}", of(function, (3, 5)), integers(3)
            yield f"cross_entropy {options} cl", of_image(function), integers(2, 3, 3)
    yield "kl_div", lambda: Of(lambda x, t: F.kl_div(x.log_softmax(1), t, reduction="batchmean"), (3, 5)), targets
    yield "mse_loss broadcast", lambda: Of(lambda x, t: F.mse_loss(x, t.expand(3, 5)), (3, 5)), torch.ones(3, 1)
    yield "triplet_margin_loss", lambda: Of(F.triplet_margin_loss, (3, 5), (3, 5), (3, 5))
    yield "cosine_embedding_loss", lambda: Of(F.cosine_embedding_loss, (3, 5), (3, 5)), torch.ones(3)


def images_and_signals():
    for mode, shape in (
        ("nearest", (2, 3, 5)), ("linear", (2, 3, 5)), ("nearest", (2, 3, 5, 4)), ("bilinear", (2, 3, 5, 4)),
        ("bicubic", (2, 3, 5, 4)), ("area", (2, 3, 5, 4)), ("trilinear", (2, 3, 5, 4, 3)),
    ):  # fmt: skip
        yield f"interpolate {mode} {shape}", of(partial(F.interpolate, scale_factor=2, mode=mode), shape)
    for mode in ("bilinear", "nearest", "bicubic"):
        function = partial(F.grid_sample, mode=mode, align_corners=False)
        yield f"grid_sample {mode}", of(function, (2, 3, 5, 5), (2, 4, 4, 2))
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield f"pad {mode} 1", lambda m=mode: Of(lambda x: F.pad(x, (1, 2), m), (2, 3, 5))
        yield f"pad {mode} 2", lambda m=mode: images(Then(lambda x: F.pad(x, (1, 2, 1, 1), m)), nn.Conv2d(4, 2, 1))
        yield f"pad {mode} 3", lambda m=mode: Of(lambda x: F.pad(x, (1, 2, 1, 1, 1, 1), m), (2, 3, 5, 4, 3))
    yield "unfold", lambda: On(nn.Unfold(3), 2, 3, 6, 6)
    yield "unfold to less", lambda: On(nn.Unfold(1, stride=3), 2, 3, 6, 6)
    yield "fold", lambda: On(nn.Fold((6, 6), 3), 2, 27, 16)
    yield "pixel_shuffle", lambda: images(nn.PixelShuffle(2))
    yield "channel_shuffle", lambda: images(nn.ChannelShuffle(2), nn.Conv2d(4, 2, 1))
    for name in ("fft", "rfft", "fft2", "rfft2", "rfftn", "irfft"):
        function = getattr(torch.fft, name)
        yield name, lambda f=function: Of(f, (3, 4, 6))
    yield "rfft of rows", lambda: Of(lambda x: torch.fft.rfft(x, dim=0), (4, 3))
    yield "stft", lambda: Of(lambda x: torch.stft(x, 8, window=torch.ones(8), return_complex=True), (2, 32))
    yield "complex product", lambda: Of(lambda x, y: torch.complex(x, y) @ torch.complex(y, x).mH, (4, 4), (4, 4))
    yield "polar", lambda: Of(lambda x: torch.view_as_real(torch.view_as_complex(x) ** 2).flatten(1), (4, 4, 2))


def algebra():
    yield "einsum", lambda: Of(lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k), (2, 3, 4, 5), (2, 6, 4, 5))
    yield "bmm", lambda: Of(torch.bmm, (2, 3, 4), (2, 4, 5))
    yield "baddbmm", lambda: Of(torch.baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5))
    yield "bilinear", lambda: Of(F.bilinear, (3, 4), (3, 5), (6, 4, 5), (6,))
    yield "cdist", lambda: Of(torch.cdist, (2, 4, 3), (2, 5, 3))
    yield "cumsum", lambda: Of(lambda x: x.cumsum(1), (3, 5))
    yield "logcumsumexp", lambda: Of(lambda x: x.logcumsumexp(1), (3, 5))
    yield "sort", lambda: Of(lambda x: x.sort(dim=0)[0], (3, 5))
    yield "topk", lambda: Of(lambda x: x.topk(2)[0], (3, 5))
    yield "median", lambda: Of(lambda x: x.median(1)[0], (3, 5))
    yield "norm", lambda: Of(F.normalize, (3, 5))
    for name in ("add", "sub", "mul", "div", "pow", "maximum", "xlogy", "copysign", "remainder", "atan2"):
        f = getattr(torch, name)
        yield f"{name} of a transposed", lambda f=f: Of(lambda x, y: f(x, y.T), (3, 5), (5, 3))
        yield f"{name} broadcast", lambda f=f: Of(f, (3, 1), (5,))
    yield "power of two", lambda: tokens(Then(lambda x: 2.0**x), transposed, nn.Linear(8, 2))
    yield "clamp", lambda: Of(torch.clamp, (3, 5), (5,), (5,))
    yield "solve", lambda: Of(lambda x: torch.linalg.solve(x @ x.mT + 3 * torch.eye(4), x), (4, 4))
    yield "svd", lambda: Of(lambda x: torch.linalg.svd(x, full_matrices=False), (4, 3))


def indexing():
    yield "index_select", lambda: Of(lambda x, i: x.index_select(0, i), (5, 4)), integers(3)
    yield "gather", lambda: Of(lambda x, i: x.gather(1, i), (3, 5)), integers(3, 2)
    yield "scatter", lambda: Of(lambda x, y, i: x.scatter(1, i, y), (3, 5), (3, 2)), integers(3, 2)
    yield "scatter_add", lambda: Of(lambda x, y, i: x.scatter_add(1, i, y), (3, 5), (3, 2)), integers(3, 2)
    yield "scatter_reduce", of(lambda x, y, i: x.scatter_reduce(1, i, y, "amax"), (3, 5), (3, 2)), integers(3, 2)
    yield "index", lambda: Of(lambda x, i: x[i], (5, 4)), integers(3)
    yield "index of the second", lambda: Of(lambda x, i: x[:, i], (5, 4, 3)), integers(3)
    yield "index_put", lambda: Of(lambda x, y, i: x.index_put((i,), y, accumulate=True), (5, 4), (3, 4)), integers(3)
    yield "index_add", lambda: Of(lambda x, y, i: x.index_add(0, i, y), (5, 4), (3, 4)), integers(3)
    yield "items set", lambda: Of(set_items, (5, 4), (4,))
    yield "masked_fill", lambda: Of(lambda x, m: x.masked_fill(m, 0.0), (3, 5)), mask(3, 5)
    yield "where", lambda: Of(lambda x, y, m: torch.where(m, x, y), (3, 5), (3, 5)), mask(3, 5)
    yield "cat", lambda: Of(lambda x, y: torch.cat([x, y], 1), (3, 4), (3, 2))
    yield "cat cl", lambda: images(Then(lambda x: torch.cat([x, x * 2], 1)), nn.Conv2d(8, 2, 1))
    yield "stack", lambda: Of(lambda x, y: torch.stack([x, y], 1), (3, 4), (3, 4))
    yield "split", lambda: Of(lambda x: [part * 2 for part in x.split(2)], (5, 4))
    yield "repeat_interleave", lambda: Of(lambda x: x.repeat_interleave(2, 0), (3, 5))
    yield "roll", lambda: Of(lambda x: x.roll((1, 1), (0, 1)), (3, 4))
    yield "tril", lambda: Of(torch.tril, (4, 4))


GROUPS = (
    convolutions, norms, activations, pooling, embeddings, recurrent, attention, losses, images_and_signals, algebra,
    indexing,
)  # fmt: skip


def steps(*groups):
    """Name -> how to make the model, and the batch."""
    return {name: (make, batch) for group in groups for name, make, *batch in group()}


# The CPU has no kernel for this in bfloat16.
FLOAT32 = {"LocalResponseNorm"}
