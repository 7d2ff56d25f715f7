"""Batch norms become statistics and an elementwise op: plain PyTorch's results, and fewer bytes to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import Workload
from lowtide.kernels.batchnorm_ops import ACTIVATION, STATISTICS
from lowtide.planning.programs.program import simulate
from lowtide.planning.solvers.solver import Problem, solutions
from lowtide.techniques.rewrites.batchnorm import split_batch_norms
from lowtide.tracing.capture.joint import bytes_of
from lowtide.tracing.capture.loss import capture_loss
from tests.models import Call, Then, squares

from ...engines.lowered import LoweredStep

CHANNELS = 6
Act = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Convolution, batch norm and activation, twice; the second takes the input of the first too."""

    def __init__(self, act: Act, norm: Callable[..., nn.Module] = nn.BatchNorm2d, **options: Any) -> None:
        super().__init__()
        self.act = act
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(norm(CHANNELS, **options) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norms[0](self.convs[0](x)))
        y = self.act(self.norms[1](self.convs[1](x)))
        return self.act(self.norms[2](self.convs[2](y)) + x)


def work_of(model: nn.Module, *, dtype: torch.dtype = torch.float32, nhwc: bool = False, **options: Any) -> Workload:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.normal_(module.weight)  # of either sign
            nn.init.normal_(module.bias)
    x = torch.randn(4, CHANNELS, 8, 8, dtype=dtype)
    layout = torch.channels_last if nhwc else torch.contiguous_format
    model = model.to(dtype).to(memory_format=layout)
    return Workload(model, squares, x.to(memory_format=layout), **options)


def split(work: Workload) -> LoweredStep:
    return LoweredStep(work, split_batch_norms)


def agrees(step: LoweredStep) -> None:
    for program in step.programs.values():
        torch.testing.assert_close(step.results(program), step.plain())


def activations(step: LoweredStep) -> list[tuple[str, bool]]:
    """Activations of the elementwise ops, and whether each takes a residual."""
    nodes = step.joint.module.graph.find_nodes(op="call_function", target=ACTIVATION)
    return [(node.args[6], node.args[5] is not None) for node in nodes]


FUSED: dict[str, tuple[Act, str]] = {
    "relu": (F.relu, "relu"),
    "relu in place": (lambda y: F.relu(y, inplace=True), "relu"),
    "leaky relu": (lambda y: F.leaky_relu(y, 0.2), "leaky_relu"),
    "elu": (lambda y: F.elu(y, 0.7), "elu"),
    "elu in place": (lambda y: F.elu(y, 0.7, inplace=True), "elu"),
    "celu": (lambda y: F.celu(y, 0.5), "celu"),
    "silu": (F.silu, "silu"),
    "gelu": (F.gelu, "gelu"),
    "gelu by tanh": (lambda y: F.gelu(y, approximate="tanh"), "gelu"),
    "hardswish": (F.hardswish, "hardswish"),
    "tanh": (torch.tanh, "tanh"),
    "sigmoid": (torch.sigmoid, "sigmoid"),
    "softplus": (lambda y: F.softplus(y, 2.0, 10.0), "softplus"),
}
ALONE: dict[str, Act] = {
    "selu": F.selu,
    "relu6": F.relu6,
    "mish": F.mish,
    "falling elu": lambda y: F.elu(y, -0.5),
    "by hand": lambda y: y * torch.sigmoid(1.702 * y),
}


def layers(acts: list[Act]) -> nn.Sequential:
    """A batch norm and an activation each, one after another."""
    return nn.Sequential(*(nn.Sequential(nn.BatchNorm2d(CHANNELS), Then(act), Then(lambda x: x * 1.0)) for act in acts))


def test_an_activation_behind_is_fused() -> None:
    step = split(work_of(layers([act for act, _ in FUSED.values()])))
    assert step.rewritten == len(FUSED)
    assert [known for known, _ in activations(step) if known != "identity"] == [known for _, known in FUSED.values()]
    agrees(step)


def test_other_activations_stay_ops_of_their_own() -> None:
    step = split(work_of(layers(list(ALONE.values()))))
    assert step.rewritten == len(ALONE)
    assert {known for known, _ in activations(step)} == {"identity"}
    agrees(step)


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_a_residual_is_fused_with_the_activation_behind_it(name: str) -> None:
    act, known = FUSED[name]
    step = split(work_of(Net(act)))
    assert step.rewritten == 3
    assert activations(step).count((known, False)) == 2
    assert activations(step).count((known, True)) == 1
    agrees(step)


SETTINGS: dict[str, Callable[[], Workload]] = {
    "float64": lambda: work_of(Net(F.silu), dtype=torch.float64),
    "channels last": lambda: work_of(Net(F.relu), nhwc=True),
    "no statistics": lambda: work_of(Net(F.relu, track_running_stats=False)),
    "no weight": lambda: work_of(Net(F.gelu, affine=False)),
    "another momentum": lambda: work_of(Net(F.relu, momentum=0.7, eps=0.1)),
    "frozen weights": lambda: work_of(frozen(Net(F.relu))),
    "autocast": lambda: work_of(Net(F.silu), autocast=torch.bfloat16),
}


def frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norms" not in name)
    return model


@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_plain_pytorchs(name: str) -> None:
    step = split(SETTINGS[name]())
    assert step.rewritten == 3
    agrees(step)


DIMENSIONS = [(nn.BatchNorm1d, (16, 4)), (nn.BatchNorm1d, (4, 4, 9)), (nn.BatchNorm3d, (2, 4, 3, 3, 3))]


@pytest.mark.parametrize(("norm", "shape"), DIMENSIONS, ids=str)
def test_batch_norms_of_other_dimensions(norm: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    step = split(Workload(nn.Sequential(norm(4), nn.SiLU(), norm(4)), squares, torch.randn(shape)))
    assert step.rewritten == 2
    agrees(step)


def test_statistics_are_updated_once_whatever_is_recomputed() -> None:
    work = work_of(Net(F.relu))
    step = split(work)
    counted = [name for name, _ in work.model.named_buffers() if name.endswith("num_batches_tracked")]
    assert len(counted) == 3
    again = {each.value.op for each in step.programs["smallest"].backward if str(each.kind) == "recompute"}
    assert again & {node.name for node in step.joint.module.graph.nodes if node.target in (STATISTICS, ACTIVATION)}
    agrees(step)  # buffers are among the results


class Readers(nn.Module):
    """Results of batch norms that other ops read too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.BatchNorm2d(CHANNELS), how
        self.scale = nn.Parameter(torch.ones(1, CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        y = self.norm(x)
        return {
            "result read twice": lambda: F.relu(y) + y,
            "sum read twice": lambda: F.relu(s := y + x) * s,
            "added to itself": lambda: F.relu(y + y),
            "broadcast residual": lambda: F.silu(y + self.scale),
            "weighted residual": lambda: F.relu(torch.add(y, x, alpha=2.0)),
            "residual first": lambda: F.gelu(x + y),
            "residual alone": lambda: y + x,
            "mask by hand": lambda: y * (y > 0),
            "returned as it is": lambda: y,
        }[self.how]()


FOLLOWING: dict[str, list[tuple[str, bool]]] = {
    "result read twice": [("identity", False)],
    "sum read twice": [("identity", True)],
    "added to itself": [("identity", False)],
    "broadcast residual": [("identity", False)],
    "weighted residual": [("identity", False)],
    "residual first": [("gelu", True), ("identity", True)],
    "residual alone": [("identity", True)],
    "mask by hand": [("identity", False)],
    "returned as it is": [("identity", False)],
}


@pytest.mark.parametrize("how", FOLLOWING)
def test_only_what_alone_follows_is_fused(how: str) -> None:
    step = split(work_of(Readers(how)))
    assert sorted(activations(step)) == sorted(FOLLOWING[how])
    agrees(step)


def test_two_batch_norms_may_join() -> None:
    one, two = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
    step = split(work_of(Call(lambda m, x: F.relu(m.one(x) + m.two(x.flip(0))), one=one, two=two)))
    assert step.rewritten == 2
    assert ("relu", True) in activations(step)
    agrees(step)


# -- bytes and seconds -----------------------------------------------------------------------------------


def test_the_plain_order_keeps_no_input_of_an_activation() -> None:
    """A silu keeps its input, which is computed from that of the batch norm."""
    work = work_of(Net(F.silu))
    plain = solutions(Problem(capture_loss(work).graph.joint, bytes_of))[0]
    split_ = split(work).solutions[0]
    assert simulate(split_.program).peak_bytes < simulate(plain.program).peak_bytes


def test_recomputing_an_activation_needs_no_statistics() -> None:
    """With statistics as expensive as convolutions, programs of half the size recompute elementwise ops alone."""
    step = split(work_of(Net(F.relu)))
    whole = simulate(step.solutions[0].program).peak_bytes

    def seconds(node: Any) -> float:
        return 1.0 if node.target is ACTIVATION else 1000.0

    cheap = [each for each in solutions(Problem(step.joint, seconds)) if 0 < each.seconds < 10]
    assert cheap
    assert min(simulate(each.program).peak_bytes for each in cheap) < whole


# -- what is left alone ----------------------------------------------------------------------------------


LEFT: dict[str, Callable[[], Workload]] = {
    "evaluation": lambda: work_of(Net(F.relu).eval()),
    "statistics in half precision": lambda: work_of(Net(F.relu), dtype=torch.bfloat16),
    "no batch norm": lambda: work_of(nn.Sequential(nn.Conv2d(CHANNELS, 2, 1), nn.GroupNorm(1, 2), nn.ReLU())),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_norms_are_left_alone(name: str) -> None:
    step = split(LEFT[name]())
    assert step.rewritten == 0
    agrees(step)


def test_a_batch_norm_whose_running_statistics_the_model_reads_stays_whole() -> None:
    """Statistics that run again move none."""

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.norms[1].running_mean.sum()

    step = split(work_of(Reads(F.tanh)))
    assert len(step.joint.module.graph.find_nodes(op="call_function", target=STATISTICS)) == 2
    agrees(step)
