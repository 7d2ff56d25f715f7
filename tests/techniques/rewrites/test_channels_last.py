"""Convolutions in half precision run channels-last: plain PyTorch's results, and each tensor converted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import lowtide
from lowtide import Workload, zoo
from lowtide.engines.lowering import compiled
from lowtide.engines.lowering.compiled import CompiledLowering
from lowtide.techniques.rewrites import channels_last
from lowtide.techniques.rewrites.channels_last import lay_channels_last
from lowtide.tracing.capture.joint import Joint
from tests.models import Call, Then, squares
from tests.soak import in_soak

from ...engines.lowered import LoweredStep, convolutions, interpreted

CHANNELS = 6
aten: Any = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}  # how many inputs have channels
CONVERSIONS = (aten.clone.default, aten._to_copy.default)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def conv(ins: int = CHANNELS, outs: int = CHANNELS, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(ins, outs, size, padding=size // 2, **options)


def work_of(model: nn.Module, dtype: torch.dtype = torch.float64, **options: Any) -> Workload:
    torch.manual_seed(0)
    x = torch.randn(4, CHANNELS, 8, 8, dtype=dtype, requires_grad=True)
    return Workload(model.to(dtype), squares, x, **options)


def half(model: nn.Module) -> Workload:
    """Float32 parameters, of which autocast has copies in bfloat16."""
    return work_of(model, torch.float32, autocast=torch.bfloat16)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert convolutions in float64, whose results differ from plain PyTorch's by less than a wrong one's."""
    monkeypatch.setattr(channels_last, "_TYPES", (torch.float64,))


def agrees(step: LoweredStep) -> None:
    for program in step.programs.values():
        torch.testing.assert_close(step.results(program), step.plain())


def lies_right(step: LoweredStep) -> None:
    """All that convolutions read is channels-last, each value was converted once, and outputs have their strides."""
    nodes = step.joint.module.graph.nodes
    read = [value for node in nodes for value in node.args[: CONVOLUTIONS.get(node.target, 0)]]
    assert read
    assert all(each.meta["val"].is_contiguous(memory_format=FORMATS[each.meta["val"].dim()]) for each in read)
    formats = (torch.channels_last, torch.channels_last_3d)
    copies = [node for node in nodes if node.target in CONVERSIONS and node.kwargs.get("memory_format") in formats]
    assert set(Counter(node.args[0] for node in copies).values()) <= {1}
    assert step.rewritten == len(copies)
    assert strides(step.joint) == strides(step.capture.graph.joint)


def strides(joint: Joint) -> list[tuple[int, ...]]:
    """Strides of losses, new values of buffers, and gradients."""
    nodes = [*joint.outputs, *joint.gradients]
    return [node.meta["val"].stride() for node in nodes if isinstance(node, fx.Node)]


def attends(model: Any, x: Tensor) -> Tensor:
    query, key, value = model.all(x).flatten(2).view(4, 3, 2, CHANNELS, 64).transpose(3, 4).unbind(1)
    mixed = F.scaled_dot_product_attention(query, key, value)
    return model.last(mixed.transpose(2, 3).reshape(4, 2 * CHANNELS, 8, 8))


def patches(model: Any, x: Tensor) -> Tensor:
    tokens = model.patch(x).flatten(2).transpose(1, 2)
    return model.last(model.attention(tokens, tokens, tokens, need_weights=False)[0])


def windows(model: Any, x: Tensor) -> Tensor:
    parts = model.one(x).view(4, CHANNELS, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5)
    return model.two(parts.reshape(16, CHANNELS, 4, 4))


def reads_strides(model: Any, x: Tensor) -> Tensor:
    return model.one(model.one(x).relu().as_strided((4, CHANNELS, 4, 4), (CHANNELS * 64, 64, 8, 1)))


def squeezes(model: Any, x: Tensor) -> Tensor:
    y = model.one(x)
    return y * torch.sigmoid(model.two(y.mean((2, 3), keepdim=True)))


class Remembers(nn.Module):
    """A buffer and an attribute that the step sets, both of what a convolution returns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.last = nn.Buffer(torch.zeros(CHANNELS, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.last.copy_(y.detach()[0])
        return self.conv(y * self.last)


NETS: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: Call(
        lambda m, x: m.last(F.relu(m.norms[1](m.two(F.relu(m.norms[0](m.one(x))))) + x).mean((2, 3))),
        one=conv(), two=conv(), norms=nn.ModuleList([nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)]),
        last=nn.Linear(CHANNELS, 5),
    ),
    "pools": lambda: nn.Sequential(
        conv(), nn.MaxPool2d(3, 2, 1), conv(), nn.AvgPool2d(2), conv(), nn.AdaptiveMaxPool2d(2), conv(),
        nn.AdaptiveAvgPool2d(1),
    ),
    "flattened": lambda: nn.Sequential(conv(), nn.ReLU(), nn.Flatten(), nn.Linear(CHANNELS * 64, 5)),
    "windows": lambda: Call(windows, one=conv(), two=conv()),
    "pixel shuffle": lambda: nn.Sequential(
        conv(CHANNELS, 8), nn.PixelShuffle(2), conv(2, 4), nn.PixelUnshuffle(2), conv(16, 2)
    ),
    "transposed": lambda: nn.Sequential(
        conv(), nn.ConvTranspose2d(CHANNELS, 4, 2, 2), nn.GELU(), nn.ConvTranspose2d(4, 4, 3, groups=4), conv(4, 4)
    ),
    "interpolated": lambda: nn.Sequential(
        conv(), nn.Upsample(scale_factor=2), conv(), nn.Upsample(scale_factor=2, mode="bilinear"), conv()
    ),
    "depthwise": lambda: nn.Sequential(conv(groups=CHANNELS), nn.ReLU6(), conv(size=1), nn.Hardswish()),
    "squeezed": lambda: Call(squeezes, one=conv(), two=conv(size=1)),
    "permuted": lambda: nn.Sequential(
        conv(size=7, groups=CHANNELS), Then(lambda x: x.permute(0, 2, 3, 1)), nn.LayerNorm(CHANNELS),
        Then(lambda x: x.permute(0, 3, 1, 2)), conv(),
    ),
    "norms": lambda: nn.Sequential(
        conv(), nn.GroupNorm(2, CHANNELS), nn.SiLU(), conv(),
        nn.InstanceNorm2d(CHANNELS, affine=True), conv(), nn.LayerNorm([8, 8]),
    ),
    "padded": lambda: nn.Sequential(conv(), nn.ReflectionPad2d(1), conv(), nn.ZeroPad2d(2), nn.PReLU(CHANNELS), conv()),
    "joined": lambda: Call(lambda m, x: m.c(torch.cat([m.a(x), m.b(x), x], 1)), a=conv(), b=conv(), c=conv(18, 3)),
    "mixed": lambda: Call(lambda m, x: (x + m.a(x)) + m.b(torch.cat([x.flip(0), m.a(x)], 1)), a=conv(), b=conv(12)),
    "one twice": lambda: Call(lambda m, x: m.a(F.relu(m.a(x))) + m.a(x).flip(0).roll(1, 2), a=conv()),
    "patches": lambda: Call(
        patches, patch=nn.Conv2d(CHANNELS, 8, 2, 2), last=nn.Linear(8, 3),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    "attention": lambda: Call(attends, all=conv(CHANNELS, 6 * CHANNELS), last=conv(2 * CHANNELS, 3)),
    "draws": lambda: nn.Sequential(
        conv(), nn.Dropout2d(0.3), nn.RReLU(), conv(), Then(lambda x: x + torch.rand_like(x))
    ),
    "strides": lambda: Call(reads_strides, one=conv()),
    "constant": lambda: Call(lambda m, x: m.a(m.a(x) * torch.tensor([[1.0], [2.0]], dtype=x.dtype)[0]), a=conv()),
    "state": Remembers,
}  # fmt: skip


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", NETS)
def test_results_are_plain_pytorchs(name: str) -> None:
    torch.manual_seed(0)
    step = LoweredStep(work_of(NETS[name]()), lay_channels_last)
    lies_right(step)
    agrees(step)


@pytest.mark.usefixtures("exact")
def test_volumes_have_a_layout_of_their_own() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 4, 3))
    step = LoweredStep(Workload(model.double(), squares, torch.randn(2, 2, 5, 5, 5).double()), lay_channels_last)
    lies_right(step)
    agrees(step)


@pytest.mark.parametrize("name", ["resnet18", *in_soak(["resnext101", "unet", "densenet121"])])
def test_models_of_the_zoo_run_channels_last_under_autocast(name: str) -> None:
    step = LoweredStep(zoo.small(name, autocast=torch.bfloat16), lay_channels_last)
    lies_right(step)
    copies = step.joint.module.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert not [node for node in copies if node.args[0].target is aten._to_copy.default]  # casts write the layout


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["unet", *in_soak(["resnet18", "densenet121"])])
def test_models_of_the_zoo_compute_what_plain_pytorch_does(name: str) -> None:
    work = zoo.small(name, optimizer="none")
    x, target = work.batch
    labels = target.double() if target.is_floating_point() else target
    step = LoweredStep(Workload(work.model.double(), work.loss, (x.double(), labels)), lay_channels_last)
    assert step.rewritten > 10
    torch.testing.assert_close(step.results(step.programs["everything"]), step.plain())


def test_forward_and_backward_keep_one_copy_of_an_input() -> None:
    step = LoweredStep(half(nn.Sequential(conv(), nn.Softmax(1), conv())), lay_channels_last)
    graph = step.joint.module.graph
    forward = graph.find_nodes(op="call_function", target=aten.convolution.default)
    backward = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert {node.args[:2] for node in forward} == {node.args[1:3] for node in backward}
    softmax = graph.find_nodes(op="call_function", target=aten._softmax.default)[0]
    assert {user.target for user in softmax.users} <= {aten.clone.default, aten.detach.default, aten._to_copy.default}


# -- what is left alone ----------------------------------------------------------------------------------


def channels_last_work() -> Workload:
    model = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU()).bfloat16()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]: not in torch's stub
    x = torch.randn(4, CHANNELS, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    return Workload(model, lambda m, x: m(x).mean(), x)


LEFT: dict[str, Callable[[], Workload]] = {
    "float32": lambda: work_of(nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS), conv()), torch.float32),
    "mostly grouped": lambda: half(nn.Sequential(conv(groups=2), nn.ReLU(), conv(groups=3), nn.ReLU(), conv(size=1))),
    "no convolution": lambda: half(nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 64, 2))),
    "signals": lambda: half(nn.Sequential(nn.Flatten(2), nn.Conv1d(CHANNELS, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3))),
    "channels last": channels_last_work,
}


@pytest.mark.parametrize("name", LEFT)
def test_other_graphs_stay_as_they_are(name: str) -> None:
    step = LoweredStep(LEFT[name](), lay_channels_last)
    assert step.rewritten == 0
    assert step.joint.digest == LoweredStep(step.work, lambda _: 0).joint.digest


# -- compiled --------------------------------------------------------------------------------------------


def test_regions_hand_on_channels_last_values(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Tensor] = []

    def collect(module: fx.GraphModule, inputs: Any) -> Any:
        (outcome,) = module.graph.find_nodes(op="output")
        handed.extend(node.meta["val"] for node in outcome.args[0])
        return interpreted(module, inputs)

    monkeypatch.setattr(compiled, "compile_graph", collect)
    work = convolutions()
    step = LoweredStep(replace(work, autocast=torch.bfloat16))
    assert step.joint.rewrites["batchnorm"] == 6  # which takes channels-last inputs
    step.results(step.programs["smallest"], CompiledLowering())
    images = [value for value in handed if value.dim() == 4 and value.shape[-1] == 8]
    assert len(images) > 4
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in images)


def test_compiled_plans_in_bfloat16_fit_and_agree() -> None:
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (conv(), nn.GELU())]
    work = half(nn.Sequential(*layers))
    plain = lowtide.profile(work)
    for budget in ("80%", *in_soak(["95%"])):
        chosen = lowtide.plan(work, budget, profile=plain, engine="graph", compile=True, tune=False)
        assert chosen.program is not None
        assert any("channels_last" in why for why in chosen.program.why)
        assert lowtide.verify(work, chosen).results_agree
