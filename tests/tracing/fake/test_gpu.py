"""Predicting a GPU's step: the ops are CUDA's, the process is left as it was; on a GPU, the figures agree."""

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import Workload, convert, zoo
from lowtide.errors import TraceError
from lowtide.nn import BatchNormAct2d
from lowtide.tracing import trace
from lowtide.tracing.fake.gpu import cufft_order, emulated_gpu
from lowtide.tracing.fake.kernels import SUBSTITUTES
from tests.soak import in_soak


def loss(model, batch):
    return model(batch).float().mean()


def names(graph, phase):
    return {op.name.split(".")[1] for op in graph.ops if op.phase == phase}


def test_dropout_keeps_a_byte_mask_as_on_cuda():
    work = Workload(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), loss, torch.randn(8, 64))
    graph = trace(work, fake=True, device="h200")
    masks = [s for s in graph.saved if s.needed_by == "aten.native_dropout.default"]
    assert [(s.dtype, s.shape) for s in masks] == [("bool", (8, 64))]


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_would(dtype, masked, kernel):
    mask = torch.zeros(16, 16, dtype=dtype) if masked else None

    class Attention(nn.Linear):
        def forward(self, x):
            heads = super().forward(x).view(2, 16, 4, 16).transpose(1, 2).to(dtype)
            where = None if mask is None else mask.to(x.device)
            return F.scaled_dot_product_attention(heads, heads, heads, where, is_causal=not masked)

    graph = trace(Workload(Attention(64, 64), loss, torch.randn(2, 16, 64)), fake=True, device="cuda")
    assert kernel in names(graph, "forward")
    assert f"{kernel}_backward" in names(graph, "backward")


def test_multihead_attention_reaches_the_same_kernel():
    class Attend(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x, need_weights=False)[0]

    work = Workload(Attend(64, 4, batch_first=True), loss, torch.randn(2, 16, 64))
    graph = trace(work, fake=True, device="h200")
    assert "_scaled_dot_product_efficient_attention" in names(graph, "forward")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.RNN])
def test_recurrent_layers_are_cudnns(layer):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = layer(16, 32, num_layers=2, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0][:, -1]

    graph = trace(Workload(Last(), loss, torch.randn(4, 10, 16)), fake=True, device="h200")
    assert "_cudnn_rnn" in names(graph, "forward")
    assert "_cudnn_rnn_backward" in names(graph, "backward")


def test_autocast_follows_cudas_lists():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    work = Workload(model, loss, torch.randn(8, 64), autocast=torch.bfloat16)
    norm = next(op for op in trace(work, fake=True, device="h200").ops if "layer_norm" in op.name)
    assert norm.inputs[0].dtype == "float32"  # CPU autocast would leave it in bfloat16


def test_batch_norm_layers_are_the_launches_of_their_kernels():
    """The bytes are those of x, dz and dx: backward makes nothing else of their size."""
    pytest.importorskip("triton")
    model = nn.Sequential(nn.Conv2d(3, 8, 1), BatchNormAct2d(8, "silu"), nn.Conv2d(8, 8, 1))
    graph = trace(Workload(model, loss, torch.randn(64, 3, 32, 32)), fake=True, device="h200")
    launches = [op for op in graph.ops if op.name.startswith("triton.")]
    assert [op.name for op in launches] == [
        "triton.measure", "triton.normalize", "triton.normalize", "triton.reduce", "triton.apply"
    ]  # fmt: skip
    full = 4 * 64 * 8 * 32 * 32
    assert [sum(v.bytes == full for v in op.inputs) for op in launches] == [1, 2, 2, 2, 4]  # without residual, dy is dz
    born = [s for s in graph.storages if s.bytes == full and launches[2].index < s.birth <= launches[-1].index]
    assert len(born) == 2  # the gradient that the convolution gives, and dx


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "wrn28-2", "unet", "densenet121"])
def test_a_converted_models_fake_step_is_the_real_one_on_the_gpu(name):
    work = zoo.small(name, device="cuda")
    with convert(work.model):
        work.compute_loss().backward()  # the kernels' scratch is there from here on
        real, fake = trace(work), trace(work, fake=True)
    assert fake.storage_peak_bytes == real.storage_peak_bytes
    ours = [[op.name for op in graph.ops if op.name.startswith("triton.")] for graph in (real, fake)]
    assert ours[0] == ours[1] != []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the op runs")
def test_an_op_that_only_a_gpu_could_answer_is_named():
    class Factors(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.geqrf(x)[1].sum()

    with pytest.raises(TraceError) as error:
        trace(Workload(Factors(4, 4), loss, torch.randn(4, 4)), fake=True, device="h200")
    assert "aten.geqrf" in str(error.value)


STATISTICS = [
    (torch.float32, torch.float32),
    (torch.float32, None),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, None),
    (torch.float64, torch.float64),
]


def update_stats(call, dtype, held, device):
    running = (None, None) if held is None else [torch.ones(4, dtype=held, device=device) for _ in range(2)]
    found = call(torch.ones(2, 4, 5, 3, dtype=dtype, device=device), *running, 0.1)
    return [(t.dtype, t.shape, t.stride(), t.device.type, t.untyped_storage().nbytes()) for t in found]


def predicted_stats(dtype, held):
    op = torch.ops.aten.batch_norm_update_stats.default
    with emulated_gpu(), FakeTensorMode(allow_fallback_kernels=False):
        return update_stats(SUBSTITUTES[op], dtype, held, "cuda")


@pytest.mark.parametrize(("dtype", "held"), STATISTICS)
def test_statistics_of_16_bits_are_float32_on_cuda(dtype, held):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert predicted_stats(dtype, held) == [(wide, (4,), (1,), "cuda", 4 * wide.itemsize)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "held"), STATISTICS)
def test_the_predicted_statistics_are_the_gpus(dtype, held):
    op = torch.ops.aten.batch_norm_update_stats
    assert predicted_stats(dtype, held) == update_stats(op, dtype, held, "cuda")


def test_the_process_is_left_without_a_cuda_guard():
    trace(zoo.small("lenet"), fake=True, device="h200")
    if torch.cuda.is_available():
        pytest.skip("this build has CUDA's own guard")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")


def test_emulation_ends_even_when_the_step_fails():
    with pytest.raises(ZeroDivisionError), emulated_gpu():
        raise ZeroDivisionError
    trace(zoo.small("lenet"), fake=True, device="h200")


@pytest.mark.parametrize("name", ["gpt2", "lstm", *in_soak(["resnet18", "unet"])])
def test_a_prediction_allocates_nothing_on_any_device(name):
    graph = trace(zoo.small(name, device="meta"), device="h200")
    assert graph.storage_peak_bytes > 0
    assert {s.device for s in graph.storages} <= {"cuda", "cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "wrn28-2", "unet", "gpt2", "roberta-base", "lstm"])
def test_the_fake_storage_peak_is_the_real_one_on_the_gpu(name):
    work = zoo.small(name, device="cuda")
    real, fake = trace(work), trace(work, fake=True)
    assert fake.storage_peak_bytes == pytest.approx(real.storage_peak_bytes, rel=0.005 if name == "lstm" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "wrn28-2", "unet", "gpt2", "roberta-base", "lstm"])
def test_the_allocated_peak_is_the_allocators_on_the_gpu(name):
    work = zoo.small(name, device="cuda")

    def step():
        work.model.zero_grad(set_to_none=True)
        work.compute_loss().backward()
        work.optimizer.step()

    for _ in range(2):
        step()
    work.model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    step()
    plain = torch.cuda.max_memory_allocated()
    work.model.zero_grad(set_to_none=True)
    traced = trace(work)
    assert traced.peak_bytes + traced.other_bytes == pytest.approx(plain, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_tracing_changes_nothing_on_the_gpu(name):
    work = zoo.small(name, device="cuda")
    work.compute_loss().backward()
    work.optimizer.step()
    before = {key: value.clone() for key, value in work.model.state_dict().items()}
    gradients = [p.grad.clone() for p in work.model.parameters()]
    generator = torch.cuda.get_rng_state()
    trace(work)
    trace(work, fake=True)
    assert all(torch.equal(value, before[key]) for key, value in work.model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(work.model.parameters(), gradients, strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), generator)


def test_a_compilation_that_failed_elsewhere_changes_no_op():
    """Dynamo goes on evaluating Python's frames after it failed, and calls then hold their arguments once more."""
    work = zoo.small("gpt2", device="meta")
    before = trace(work, fake=True, device="h200")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: x + 1 if x.sum() > 0 else x, backend="eager", fullgraph=True)(torch.ones(2))
    after = trace(work, fake=True, device="h200")
    assert [op.name for op in after.ops] == [op.name for op in before.ops]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its own order of dimensions is wrong on a GPU")
@pytest.mark.parametrize("dims", [p for n in (1, 2, 3, 4) for p in permutations(range(4), n)], ids=str)
def test_real_ffts_order_their_dimensions_as_torchs_newer_kernel_does(dims, monkeypatch):
    monkeypatch.setattr("torch._meta_registrations.device_hint", lambda _: "cuda")
    for x in (torch.empty(4, 3, 5, 6, device="meta"), torch.empty(6, 5, 3, 4, device="meta").permute(3, 2, 1, 0)):
        for onesided in (True, False):
            out = torch.ops.aten._fft_r2c.default(x, list(dims), 0, onesided)
            order = cufft_order(x.stride(), dims, onesided=onesided)
            sizes = [out.shape[dim] for dim in order]
            assert [out.stride(dim) for dim in order] == list(torch.empty(sizes, device="meta").stride())
