"""A made-up step with known bytes: a chain of convolution and ReLU blocks with Adam."""

import math
from collections.abc import Callable

import pytest

from lowtide.profiling.profile import Outside, Profile
from lowtide.profiling.sweep import Sweep, SweepPoint
from lowtide.tracing.graph import Category, Graph, Op, Phase, Saved, Storage, TensorView

MIB = 2**20


class Tape:
    """Appends ops and storages; a storage's death is set when it is freed."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: dict[int, dict[str, object]] = {}
        self.saved: list[Saved] = []
        self.modules: list[tuple[str, str]] = []

    def make(self, size: int, category: Category, label: str, module: str, *, birth: int | None = None) -> TensorView:
        storage = len(self.storages)
        self.storages[storage] = {
            "id": storage, "bytes": size, "device": "cuda", "dtype": "float32", "category": category,
            "label": label, "module": module, "source": "", "death": None,
            "birth": len(self.ops) if birth is None else birth,
        }  # fmt: skip
        return TensorView(storage, (size // 4,), (1,), "float32")

    def run(
        self, name: str, phase: Phase, module: str, inputs: list[TensorView], outputs: list[TensorView], **extra: object
    ) -> None:
        fields = {"arguments": "", "recompute": False, "seconds": math.nan, "workspace_bytes": 0}
        self.ops.append(
            Op(
                index=len(self.ops), name=name, phase=phase, module=module, source="/home/me/net/model.py:42",
                inputs=tuple(inputs), outputs=tuple(outputs), **(fields | extra),
            )
        )  # fmt: skip

    def keep(self, value: TensorView, made_by: str, made_in: str, needed_by: str, needed_in: str) -> None:
        category = self.storages[value.storage]["category"]
        self.saved.append(
            Saved(
                value.storage, value.shape, value.dtype, value.shape[0] * 4, category,
                made_by, made_in, needed_by, needed_in, "/home/me/net/model.py:42",
            )
        )  # fmt: skip

    def free(self, value: TensorView) -> None:
        self.storages[value.storage]["death"] = len(self.ops)

    def graph(self, **extra: object) -> Graph:
        for fields in self.storages.values():
            if fields["death"] is None:
                fields["death"] = len(self.ops)
        storages = tuple(Storage(**fields) for fields in self.storages.values())
        return Graph(tuple(self.ops), storages, tuple(self.saved), tuple(self.modules), "h200", **extra)


def build_profile(
    *,
    name: str = "chain",
    blocks: int = 4,
    root: str = "",
    size: int = 64 * MIB,
    timed: bool = True,
    fake: bool = True,
    keep_relu: bool = True,
    outside: Outside | None = None,
    notes: tuple[str, ...] = ("Seconds come from the roofline.",),
) -> Profile:
    """A block: 8 MiB of weights, a convolution's output that is freed, a ReLU's of ``size`` that is kept."""
    tape = Tape()
    tape.modules.append(("", "Chain"))
    prefix = f"{root}." if root else ""
    if root:
        tape.modules.append((root, "Sequential"))
    weights = []
    for i in range(blocks):
        paths = {"": "Block", ".conv": "Conv2d", ".relu": "ReLU"}
        tape.modules += [(f"{prefix}{i}{path}", kind) for path, kind in paths.items()]
        weights.append(tape.make(8 * MIB, "parameter", f"{prefix}{i}.conv.weight", f"{prefix}{i}.conv", birth=0))
        tape.make(16 * MIB, "optimizer state", f"{prefix}{i}.conv.weight exp_avg", f"{prefix}{i}.conv", birth=0)
    x = first = tape.make(4 * MIB, "input", "batch", "", birth=0)
    cost = {"seconds": 1e-3} if timed else {}
    outputs = []
    for i in range(blocks):
        conv, relu = f"{prefix}{i}.conv", f"{prefix}{i}.relu"
        y = tape.make(size, "temporary", "convolution", conv)
        tape.run("aten.convolution.default", "forward", conv, [x, weights[i]], [y], workspace_bytes=2 * MIB, **cost)
        z = tape.make(size, "activation", "relu", relu)
        tape.run("aten.relu.default", "forward", relu, [y], [z], **cost)
        tape.free(y)
        if keep_relu or i == blocks - 1:
            tape.keep(z, "aten.relu.default", relu, "aten.threshold_backward.default", relu)
            tape.keep(z, "aten.relu.default", relu, "aten.convolution_backward.default", f"{prefix}{i + 1}.conv")
            outputs.append(z)
        if not keep_relu and i > 0:
            tape.free(x)
        tape.keep(weights[i], "", conv, "aten.convolution_backward.default", conv)
        x = z
    gradients = []
    for i in reversed(range(blocks)):
        conv, relu = f"{prefix}{i}.conv", f"{prefix}{i}.relu"
        if not keep_relu and i < blocks - 1:
            z = tape.make(size, "activation", "relu", relu)
            tape.run("aten.relu.default", "backward", relu, [first], [z], recompute=True, **cost)
            outputs.append(z)
        z = outputs.pop()
        dy = tape.make(size, "temporary", "threshold_backward", relu)
        tape.run("aten.threshold_backward.default", "backward", relu, [z], [dy], **cost)
        tape.free(z)
        gradients.append(tape.make(8 * MIB, "gradient", f"{conv}.weight.grad", conv))
        tape.run(
            "aten.convolution_backward.default", "backward", conv, [dy, weights[i]], [gradients[-1]],
            workspace_bytes=64 * MIB, **cost,
        )  # fmt: skip
        tape.free(dy)
    for i in range(blocks):
        tape.run("aten._fused_adam_.default", "optimizer", "", [weights[i], gradients[-1 - i]], [], **cost)
    return Profile(
        name=name,
        graph=tape.graph(fake=fake, notes=notes),
        hardware="NVIDIA H200",
        seconds_source="modelled" if timed else "none",
        workspace_source="measured",
        versions={"torch": "2.13.0"},
        outside=outside,
    )


@pytest.fixture
def make_profile() -> Callable[..., Profile]:
    """Build a step with known bytes."""
    return build_profile


@pytest.fixture
def profile() -> Profile:
    """Four blocks: 428 MiB allocated at the peak (the last block's convolution backward), 420 in storages."""
    return build_profile()


@pytest.fixture
def planned() -> Profile:
    """The same step, which recomputes every activation but the last."""
    return build_profile(name="planned", keep_relu=False)


@pytest.fixture
def sweep() -> Sweep:
    """Six points, peaks of 1 to 6 GB, of which one is above the limit."""
    points = [{"batch": b, "seq": s} for b in (1, 2, 3) for s in (128, 256)]
    cells = tuple(
        SweepPoint(point, (i + 1) * 10**9, i * 10**9, i * 5 * 10**8, {"parameter": 10**9, "activation": i * 10**9})
        for i, point in enumerate(points)
    )
    return Sweep("gpt", "NVIDIA H200", {"batch": (1, 2, 3), "seq": (128, 256)}, cells, 6, 5_500_000_000)
