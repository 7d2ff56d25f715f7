"""Models whose graphs have no cut vertices: skips, branches, loops and shared tensors, in any depth and width.

Each calls its blocks through ``run``, so that a benchmark can checkpoint them by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import Workload
from lowtide.planning.solvers.runs import Ops


class Block(nn.Module):
    """A feed-forward block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.wide(self.norm(x))))


class Shape(nn.Module):
    """Blocks in two lists, for the children to connect."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.second = (nn.ModuleList(Block(width) for _ in range(depth)) for _ in range(2))
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.run: Callable[..., Any] = lambda block, *values: block(*values)


class GlobalSkip(Shape):
    """The last layer reads the first value too."""

    def forward(self, x: Tensor) -> Tensor:
        start = h = torch.tanh(x)
        for block in (*self.first, *self.second):
            h = self.run(block, h)
        return h * start


class SkipsEverywhere(Shape):
    """Every layer reads the first value."""

    def forward(self, x: Tensor) -> Tensor:
        start = h = torch.tanh(x)
        for block in (*self.first, *self.second):
            h = self.run(lambda h, block=block: block(h + start), h)
        return h


class EncoderDecoder(Shape):
    """Every layer of the second half reads the first half's result."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.first:
            h = self.run(block, h)
        y = x.flip(0)
        for block, join in zip(self.second, self.joins, strict=True):
            y = self.run(lambda y, h, block=block, join=join: block(join(torch.cat([y, h], -1))), y, h)
        return y


class FlatU(Shape):
    """Skips from each layer of the first half to its twin in the second, all of one size."""

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.first:
            x = self.run(block, x)
            skips.append(x)
        for block, join in zip(self.second, self.joins, strict=True):
            x = self.run(lambda x, s, block=block, join=join: block(join(torch.cat([x, s], -1))), x, skips.pop())
        return x


class Towers(Shape):
    """Two networks side by side, and their product."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, x.flip(0)
        for left, right in zip(self.first, self.second, strict=True):
            a, b = self.run(left, a), self.run(right, b)
        return a * b


class SharedTable(Shape):
    """All layers read one table of angles."""

    def forward(self, x: Tensor) -> Tensor:
        table = (x.detach()[:, :1] + torch.arange(self.width, dtype=x.dtype)).cos()
        for block in (*self.first, *self.second):
            x = self.run(lambda x, block=block: block(x * table), x)
        return x


class DenseBlock(Shape):
    """Every layer reads the results of all before it, with batch norms."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__(0, width)
        widths = [width + layer * width // 2 for layer in range(2 * depth)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(each), nn.ReLU(), nn.Linear(each, width // 2)) for each in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer in self.layers:
            values.append(self.run(lambda *values, layer=layer: layer(torch.cat(values, -1)), *values))
        return torch.cat(values, -1)


class NestedU(Shape):
    """UNet++: a triangle of nodes, each of which reads all before it in its row and one of the row below."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__(0, width)
        self.depth = depth
        self.cells = nn.ModuleDict(
            {
                f"{row} {column}": nn.Sequential(
                    nn.Linear(width * (column + 1), width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)
                )
                for row in range(depth)
                for column in range(depth - row)
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        values: dict[tuple[int, int], Tensor] = {}
        for column in range(self.depth):
            for row in range(self.depth - column):
                if column:
                    read = [*(values[row, before] for before in range(column)), values[row + 1, column - 1]]
                else:
                    read = [values[row - 1, 0] if row else x]
                cell = self.cells[f"{row} {column}"]
                values[row, column] = self.run(lambda *read, cell=cell: F.relu(cell(torch.cat(read, -1))), *read)
        return values[0, self.depth - 1]


class Loop(Shape):
    """An LSTM as a Python loop over eight steps for each unit of depth."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__(0, width)
        self.steps = 8 * depth
        self.gates, self.out = nn.Linear(2 * width, 4 * width), nn.Linear(width, width)

    def cell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        i, f, g, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, c, self.out(h)

    def forward(self, x: Tensor) -> Tensor:
        inputs = x.view(self.steps, -1, self.width)
        h = c = torch.zeros_like(inputs[0])
        outputs: list[Tensor] = []
        for value in inputs:
            h, c, out = self.run(self.cell, value, h, c)
            outputs.append(out)
        return torch.stack(outputs)


SHAPES: dict[str, type[Shape]] = {
    "global skip": GlobalSkip,
    "skips into every layer": SkipsEverywhere,
    "encoder-decoder": EncoderDecoder,
    "flat U": FlatU,
    "two towers": Towers,
    "shared table": SharedTable,
    "dense block": DenseBlock,
    "UNet++": NestedU,
    "LSTM loop": Loop,
}


def work_of(name: str, *, depth: int, width: int, rows: int) -> Workload:
    """A step of one of the shapes."""
    torch.manual_seed(0)
    model = SHAPES[name](depth, width)
    return Workload(model, lambda model, x: model(x).square().mean(), torch.randn(rows, width), name=name)


def layers(size: int) -> Ops:
    """About as many ops: blocks of five with residuals, some of which read the first value, and their backward."""
    forward = size // 2
    reads: list[tuple[int, ...]] = []
    for op in range(forward):
        before = [op - 1] if op else []
        before += [op - 5] if op % 5 == 4 and op > 5 else []
        before += [0] if op % 50 == 49 else []
        reads.append(tuple(dict.fromkeys(before)))
    for op in reversed(range(forward)):
        gradient = [2 * forward - 2 - op] if op < forward - 1 else []
        reads.append(tuple(dict.fromkeys((op, *reads[op], *gradient))))
    sizes, seconds = (4000, 16000, 16000, 4000, 4000), (1.0, 4.0, 0.5, 4.0, 0.3)
    return Ops(
        reads=tuple(reads),
        makes=tuple((op,) for op in range(2 * forward)),
        bytes=(*(sizes[op % 5] for op in range(forward)), *(sizes[op % 5] for op in reversed(range(forward)))),
        seconds=(
            *(seconds[op % 5] for op in range(forward)),
            *(2 * seconds[op % 5] for op in reversed(range(forward))),
        ),
        backward=forward,
        repeatable=frozenset(range(forward)),
    )
