"""``lowtide demo``: a residual network learns real digits twice: plain, and the same in half the memory."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import engines, planning, zoo
from lowtide.errors import MissingExtra
from lowtide.profiling import profile
from lowtide.reporting import progress, report, show
from lowtide.sizes import format_size
from lowtide.workload import Workload
from lowtide.zoo.batches import classification_loss

if TYPE_CHECKING:
    from rich.console import Console

BUDGET = "55%"  # of the plain step's peak
BATCH = 64
IMAGE = 16  # the digits are 8 pixels wide; each pixel becomes four
STEPS = 46  # twice over the digits
TEST_IMAGES = 297

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Demo:
    """What the demo found. ``ok``: losses and final states are equal, and the peak is within the budget."""

    plain_losses: list[float]
    planned_losses: list[float]
    equal: bool
    plain_accuracy: float
    planned_accuracy: float
    plain_seconds: float  # per step
    planned_seconds: float
    plain_peak_bytes: int
    planned_peak_bytes: int
    budget_bytes: int
    report: str

    @property
    def ok(self) -> bool:
        """Whether both promises were kept."""
        return self.equal and self.planned_peak_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON-ready data."""
        return {"ok": self.ok, **asdict(self)}


def run(folder: Path, console: Console, *, steps: int = STEPS) -> Demo:
    """Profile, plan, train both ways, compare, and write ``report.html`` into ``folder``."""
    threads = torch.get_num_threads()
    # The tensors are small: a second thread gains little here, and costs a lot where the machine is busy.
    torch.set_num_threads(1)
    try:
        return _run(folder, console, steps)
    finally:
        torch.set_num_threads(threads)


def _run(folder: Path, console: Console, steps: int) -> Demo:
    batches, test = load_digits_as_batches()
    batches = list(itertools.islice(itertools.cycle(batches), steps))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        plain_model = zoo.model("wrn28-2", widen=1, channels=1)
    planned_model = copy.deepcopy(plain_model)
    plain = workload(plain_model, batches[0], "WRN-28-1 on digits")
    planned = workload(planned_model, batches[0], "WRN-28-1 on digits, planned")

    console.print("[bold]1. Where the memory goes[/]: a plain step of a residual network of 28 layers\n")
    before = profile(plain)
    show(before, console)

    console.print(f"\n[bold]2. A plan[/] for {BUDGET} of that peak\n")
    plan = planning.plan(planned, BUDGET)
    console.print(plan.explain(), highlight=False, markup=False)

    console.print(f"\n[bold]3. Training[/] {len(batches)} steps on {len(batches[0][1])} digits each, both ways\n")
    plain_losses, plain_seconds = train("plain", lambda batch: plain_step(plain, batch), batches)
    step = engines.apply(plan, planned)
    planned_losses, planned_seconds = train("planned", step, batches)
    before, after = profile(plain), step.profile()  # the plain one again: a first step warms up
    step.undo()
    equal = torch.equal(plain_losses, planned_losses) and _same_state(plain_model, planned_model)

    path = folder / "report.html"
    folder.mkdir(parents=True, exist_ok=True)
    report(before.compare(after), path)
    found = Demo(
        plain_losses.tolist(),
        planned_losses.tolist(),
        equal,
        accuracy(plain_model, test),
        accuracy(planned_model, test),
        plain_seconds,
        planned_seconds,
        before.peak_bytes,
        after.peak_bytes,
        plan.budget_bytes,
        str(path),
    )
    _show(found, console)
    return found


def load_digits_as_batches() -> tuple[Batches, tuple[Tensor, Tensor]]:
    """scikit-learn's 1,797 handwritten digits: batches to train on, and a test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("scikit-learn", extra="demo") from None
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    images = images.repeat_interleave(IMAGE // 8, 2).repeat_interleave(IMAGE // 8, 3)
    targets = torch.tensor(labels, dtype=torch.int64)[order]
    test = images[:TEST_IMAGES], targets[:TEST_IMAGES]
    images, targets = images[TEST_IMAGES:], targets[TEST_IMAGES:]
    starts = range(0, len(targets) - BATCH + 1, BATCH)
    return [(images[i : i + BATCH].clone(), targets[i : i + BATCH].clone()) for i in starts], test


def workload(model: nn.Module, batch: tuple[Tensor, Tensor], name: str) -> Workload:
    """The step that both trainings take."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Workload(model, classification_loss, batch, optimizer, name=name)


def plain_step(work: Workload, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What people write without lowtide."""
    assert work.optimizer is not None
    work.optimizer.zero_grad()
    loss = work.loss(work.model, batch)
    loss.backward()
    work.optimizer.step()
    return loss.detach()


def train(name: str, step: Callable[[Any], Tensor], batches: Batches) -> tuple[Tensor, float]:
    """The losses of all steps, and the seconds of one."""
    losses: list[Tensor] = []
    start = time.perf_counter()
    with progress(f"Training, {name}", len(batches)) as advance:
        for batch in batches:
            losses.append(step(batch))
            advance()
    return torch.stack(losses), (time.perf_counter() - start) / len(batches)


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """The share of the test set that is read right."""
    images, targets = test
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == targets).float().mean()
    model.train()
    return float(right)


def _same_state(plain: nn.Module, planned: nn.Module) -> bool:
    """Parameters and batch-norm statistics, bit for bit."""
    left, right = plain.state_dict(), planned.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def _show(found: Demo, console: Console) -> None:
    from rich.table import Table

    losses = list(zip(found.plain_losses, found.planned_losses, strict=True))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("step", "plain loss", "planned loss", ""):
        table.add_column(column, justify="right")
    for i in sorted({*range(0, len(losses), max(1, len(losses) // 6)), len(losses) - 1}):
        plain, planned = losses[i]
        table.add_row(str(i + 1), f"{plain:.9f}", f"{planned:.9f}", "equal" if plain == planned else "DIFFERENT")
    console.print(table)

    result = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("", "plain", "planned"):
        result.add_column(column, justify="right" if column else "left")
    peaks = format_size(found.plain_peak_bytes), format_size(found.planned_peak_bytes)
    result.add_row("measured peak", *peaks, f"budget {format_size(found.budget_bytes)}", style="bold")
    result.add_row("seconds per step", f"{found.plain_seconds:.3f}", f"{found.planned_seconds:.3f}")
    result.add_row("digits read right", f"{found.plain_accuracy:.1%}", f"{found.planned_accuracy:.1%}")
    console.print("\n[bold]4. The result[/]\n")
    console.print(result)
    equal = "equal bit for bit" if found.equal else "NOT EQUAL: a promise was broken"
    within = "within the budget" if found.planned_peak_bytes <= found.budget_bytes else "OVER THE BUDGET"
    console.print(f"\nLosses, parameters and batch-norm statistics are {equal}; the peak is {within}.")
    console.print(f"Both timelines: {found.report}", soft_wrap=True, highlight=False)
