"""Does planning by liveness save memory over depth, and what time does it cost to recompute cheap results and segments?

Bytes of results in a step, without parameters and their gradients, by the strategies of Chen et al. (2016). They come
from AOTAutograd's joint graph; nothing is measured. At one depth of each network the step also runs: its gradients must
be the plain step's, bit for bit, before it is timed. One thread computes: several that wait for each other on a busy
machine measure the machine. The curves go to docs/images/liveness.svg; --draw draws the rows so far.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.drawing import color_by, say_drawn, side_by_side
from benchmarks.harness import RESULTS, ROOT, Row, arguments, compare, read, record
from lowtide import Workload, zoo
from lowtide.engines.graph import planned_loss
from lowtide.planning.programs.program import Program
from lowtide.planning.programs.strategies import (
    StrategyBytes,
    compare_strategies,
    plain,
    sqrt_without_cheap,
    without_cheap,
)
from lowtide.reporting.charts import alt, chart_of
from lowtide.reporting.figures import save_figure
from lowtide.tracing.capture.joint import Joint
from lowtide.tracing.capture.loss import capture_joint

NAME, OVER_DEPTH = "liveness", "liveness_depth"
PLAIN = "plain PyTorch"
PLANNERS: dict[str, Callable[[Joint], Program]] = {
    "in place and sharing": plain,
    "+ cheap results again": without_cheap,
    "+ √n segments": sqrt_without_cheap,
}
COLORS = {
    "none": "#8a8f98",
    "in place": "#cc79a7",
    "sharing": "#56b4e9",
    "in place and sharing": "#0072b2",
    "+ cheap results again": "#e69f00",
    "+ √n segments": "#d55e00",
    "growth with √n, from its first point": "#444444",
}


class Unrolled(nn.Module):
    """An LSTM of linear layers, one step after the other: as many inputs as steps, one state out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        state = inputs[0].new_zeros(len(inputs[0]), 2 * self.width)
        for x in inputs:
            hidden, cell = state[:, : self.width], state[:, self.width :]
            both = torch.cat([x, hidden], 1)
            i, f, o, g = (gate(both) for gate in self.gates)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            state = torch.cat([torch.sigmoid(o) * torch.tanh(cell), cell], 1)
        return state


def mlp(layers: int) -> Workload:
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(256, 256), nn.GELU())))
    return Workload(model, _squares, torch.randn(1024, 256))


def resnet(depth: int) -> Workload:
    return zoo.workload("wrn28-2", depth=depth, batch=8)


def lstm(steps: int) -> Workload:
    return Workload(Unrolled(256), _squares, [torch.randn(128, 256) for _ in range(steps)])


def _squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


# How to call a network of some depth, the depths, and the one that also runs.
NETWORKS: dict[str, tuple[Callable[[int], Workload], str, list[int], int]] = {
    "MLP": (mlp, "layers of width 256 with GELU, batch 1024", [8, 16, 32, 64, 128], 32),
    "ResNet": (resnet, "layers (WRN-depth-2), batch 8", [10, 16, 28, 52, 100], 28),
    "LSTM": (lstm, "steps of width 256, batch 128", [4, 8, 16, 32, 64], 16),
}


def main(repeats: int = 15, draw: bool = False) -> None:
    if not draw:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        depths: list[Row] = []
        steps: list[Row] = []
        for network, (make, what, over, timed) in NETWORKS.items():
            for depth in over:
                work = make(depth)
                case = f"{network}, {depth} {what}"
                usages = compare_strategies(capture_joint(work))
                depths += [Row.of(case, usage.strategy, "bytes", [usage.bytes], "B") for usage in usages]
                if depth == timed:
                    steps += [row for usage in usages for row in rows_of(case, usage)]
                    steps += time_steps(case, work, repeats)
        record(OVER_DEPTH, depths)
        record(NAME, steps)
    say_drawn(lambda: draw_curves(RESULTS / f"{OVER_DEPTH}.csv", ROOT / "docs" / "images" / "liveness.svg"))


def rows_of(case: str, usage: StrategyBytes) -> list[Row]:
    rows = [Row.of(case, usage.strategy, "bytes", [usage.bytes], "B")]
    if usage.strategy not in ("none", "in place"):
        rows += [
            Row.of(case, usage.strategy, "alive at once", [usage.live_bytes], "B"),
            Row.of(case, usage.strategy, "by tags", [usage.tagged_bytes], "B"),
            Row.of(case, usage.strategy, "by a pool", [usage.pooled_bytes], "B"),
            Row.of(case, usage.strategy, "pool lost to gaps", [100 * usage.fragmentation], "%"),
            Row.of(case, usage.strategy, "ops again", [usage.recomputed], ""),
        ]
    return rows


def time_steps(case: str, work: Workload, repeats: int) -> list[Row]:
    """Steps on the graph engine beside the plain one."""
    ways: dict[str, Callable[[Any], Tensor]] = {PLAIN: lambda batch: work.compute_loss(batch=batch)}
    for subject, planner in PLANNERS.items():
        ways[subject] = planned_loss(work, planner)

    def check() -> None:
        expected = gradients(work, ways[PLAIN])
        for subject, loss in ways.items():
            if not all(map(torch.equal, gradients(work, loss), expected)):
                raise SystemExit(f"{case}, {subject}: gradients are not the plain step's")

    def run(loss: Callable[[Any], Tensor]) -> Callable[[], None]:
        def step() -> None:
            work.model.zero_grad()
            loss(work.batch).backward()

        return step

    return compare(case, {subject: run(loss) for subject, loss in ways.items()}, check=check, repeats=repeats)


def gradients(work: Workload, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    """The gradients of a step from the same state each time."""
    start = copy.deepcopy(work.model.state_dict())
    work.model.zero_grad()
    loss(work.batch).backward()
    work.model.load_state_dict(start)
    return [p.grad for p in work.model.parameters() if p.grad is not None]


def draw_curves(rows: Path, path: Path) -> Path:
    """Bytes over depth, a panel for each network, both in powers of two: what grows with a power is a line."""
    latest = {(row["case"], row["subject"]): float(row["value"]) / 2**20 for row in read(rows)}
    panels: list[Any] = []
    for network, (_, what, _, _) in NETWORKS.items():
        points = [
            {"depth": int(case.split()[1]), "strategy": strategy, "size": size}
            for (case, strategy), size in latest.items()
            if case.startswith(f"{network}, ") and case.endswith(what)
        ]
        panels.append(_panel(chart_of(points + _law(points)), f"{network}: {what}", points))
    subtitle = "One arena with static offsets; parameters and their gradients are apart. Bytes by the joint graph."
    chart = side_by_side(panels, "Results of a step, by how memory is planned", subtitle)
    return save_figure(chart.configure_legend(labelFontSize=12), path)


def _law(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points of √n segments if they grew with the root of the depth alone."""
    own = sorted((p for p in points if p["strategy"] == "+ √n segments"), key=lambda point: point["depth"])
    first = own[0]
    name = list(COLORS)[-1]
    return [{**p, "strategy": name, "size": first["size"] * math.sqrt(p["depth"] / first["depth"])} for p in own]


def _panel(lines: Any, title: str, points: list[dict[str, Any]]) -> Any:
    depths = sorted({point["depth"] for point in points})
    name, what = title.split(": ")
    encoded = lines.encode(
        x=alt.X(
            "depth:Q",
            title=what,
            scale=alt.Scale(type="log", base=2, domain=[depths[0], depths[-1]], nice=False),
            axis=alt.Axis(values=depths),
        ),
        y=alt.Y("size:Q", title="MiB", scale=alt.Scale(type="log", base=2), axis=alt.Axis(format="~g", tickCount=8)),
        color=color_by("strategy", COLORS, columns=4, columnPadding=48),
    )
    law = f"datum.strategy == '{list(COLORS)[-1]}'"
    solid = encoded.transform_filter(f"!({law})").mark_line(point=True)
    # Sharing alone is nearly as good as both: a broad line below a narrow one.
    solid = solid.encode(strokeWidth=alt.condition("datum.strategy == 'sharing'", alt.value(7), alt.value(2)))
    dashed = encoded.transform_filter(law).mark_line(strokeDash=[4, 4], strokeWidth=1.4)
    return alt.layer(solid, dashed).properties(
        width=270, height=300, title=alt.TitleParams(name, anchor="start", fontSize=12, fontWeight=600)
    )


if __name__ == "__main__":
    main(**arguments(__doc__, "draw"))
