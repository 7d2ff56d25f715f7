"""``lowtide demo``: a residual network learns real digits four times: plain, and the same under three budgets."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import engines, zoo
from lowtide.errors import MissingExtra
from lowtide.planning.baseline import baseline_profile
from lowtide.profiling import profile
from lowtide.reporting import Overlay, progress, report, show
from lowtide.sizes import format_size
from lowtide.workload import Workload
from lowtide.zoo.batches import classification_loss

if TYPE_CHECKING:
    from rich.console import Console

BUDGETS = ("80%", "60%", "45%")  # of the plain step's peak
DEPTH = 28  # layers of the residual network
BATCH = 64
IMAGE = 16  # the digits are 8 pixels wide; each pixel becomes four
STEPS = 40  # nearly twice over the digits
TEST_IMAGES = 297

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Training:
    """One training: plain, where there is no budget, or planned."""

    name: str
    losses: list[float]
    accuracy: float
    seconds: float  # of a step, measured
    peak_bytes: int  # measured
    budget_bytes: int | None
    predicted_bytes: int | None
    predicted_seconds: float
    equal: bool = True  # losses, parameters and buffers to the plain training's, bit for bit

    @property
    def within(self) -> bool:
        """Tell whether the measured peak is within the budget."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Demo:
    """The trainings, the plain one first. ``ok``: all equal it, and stay within their budgets."""

    runs: list[Training]
    report: str

    @property
    def ok(self) -> bool:
        return all(run.equal and run.within for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON-ready data."""
        return {"ok": self.ok, **asdict(self)}


def run(folder: Path, console: Console, *, steps: int = STEPS) -> Demo:
    """Profile, plan, train all four ways, compare, and write ``report.html`` into ``folder``."""
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
        model = zoo.model("wrn28-2", depth=DEPTH, widen=1, channels=1)
    start = workload(copy.deepcopy(model), batches[0], f"WRN-{DEPTH}-1 on digits")

    console.print(f"[bold]1. Where the memory goes[/]: a plain step of a residual network of {DEPTH} layers\n")
    before = baseline_profile(start, fake=False, device=None)
    show(before, console)

    console.print(f"\n[bold]2. Three plans[/]: {', '.join(BUDGETS)} of that peak\n")
    # On the graph engine, which promises the plain step's bits here. The loss is captured once for all three.
    plans = [engines.plan(start, budget, profile=before, engine="graph", tune=False) for budget in BUDGETS]
    console.print(plans[-1].explain(), highlight=False, markup=False, soft_wrap=True)

    console.print(f"\n[bold]3. Training[/] {len(batches)} steps on {len(batches[0][1])} digits each, four times\n")
    plain = workload(model, batches[0], "plain")
    first = copy.deepcopy(model.state_dict())
    losses, seconds = train("plain", lambda batch: plain_step(plain, batch), batches)
    profiles = [profile(plain)]
    right, peak = accuracy(model, test), profiles[0].peak_bytes
    runs = [Training("plain", losses.tolist(), right, seconds, peak, None, None, before.seconds)]
    trained = copy.deepcopy(model.state_dict())
    for budget, plan in zip(BUDGETS, plans, strict=True):
        model.load_state_dict(first)
        planned = workload(model, batches[0], budget)
        with engines.apply(plan, planned) as step:
            own_losses, seconds = train(f"within {budget}", step, batches)
            profiles.append(step.profile())
        equal = torch.equal(losses, own_losses) and _same_state(trained, model.state_dict())
        promised = (plan.budget_bytes, plan.peak_bytes, plan.seconds)
        right, peak = accuracy(model, test), profiles[-1].peak_bytes
        runs.append(Training(budget, own_losses.tolist(), right, seconds, peak, *promised, equal))

    path = folder / "report.html"
    result = Demo(runs, str(path))
    budgets = tuple(run.budget_bytes for run in runs)
    rows = tuple(_row(run) for run in runs)
    report(Overlay("One training, three budgets", tuple(profiles), budgets, COLUMNS, rows, _verdict(result)), path)
    _show(result, console)
    return result


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
    """The step that all trainings take."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Workload(model, classification_loss, batch, optimizer, name=name)


def plain_step(work: Workload, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A step as people write it without lowtide."""
    assert work.optimizer is not None
    work.optimizer.zero_grad()
    loss = work.loss(work.model, batch)
    loss.backward()
    work.optimizer.step()
    return loss.detach()


def train(name: str, step: Callable[[Any], Tensor], batches: Batches) -> tuple[Tensor, float]:
    """Return the losses of all steps, and the median seconds of one; the first step captures the graph."""
    losses: list[Tensor] = []
    seconds: list[float] = []
    with progress(f"Training, {name}", len(batches)) as advance:
        for batch in batches:
            start = time.perf_counter()
            losses.append(step(batch))
            seconds.append(time.perf_counter() - start)
            advance()
    return torch.stack(losses), statistics.median(seconds)


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """The share of the test set that is classified correctly."""
    images, targets = test
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == targets).float().mean()
    model.train()
    return float(right)


def _same_state(plain: dict[str, Tensor], planned: dict[str, Tensor]) -> bool:
    """Parameters and batch-norm statistics, bit for bit."""
    return plain.keys() == planned.keys() and all(torch.equal(plain[key], planned[key]) for key in plain)


COLUMNS = (
    *("training", "budget", "peak predicted", "peak measured"),
    *("step predicted", "step measured", "last loss", "read right"),
)


def _row(run: Training) -> tuple[str, ...]:
    sizes = (run.budget_bytes, run.predicted_bytes, run.peak_bytes)
    times = (run.predicted_seconds, run.seconds)
    return (
        run.name,
        *("" if size is None else format_size(size) for size in sizes),
        *(f"{seconds * 1e3:.0f} ms" for seconds in times),
        f"{run.losses[-1]:.9f}",
        f"{run.accuracy:.1%}",
    )


def _verdict(result: Demo) -> tuple[str, str]:
    count = len(result.runs[0].losses)
    equal = "equal bit for bit" if all(run.equal for run in result.runs) else "NOT EQUAL: a promise was broken"
    within = "within their budgets" if all(run.within for run in result.runs) else "OVER THE BUDGET"
    return (
        f"The losses of all {count} steps, the parameters and the batch-norm statistics are {equal}.",
        f"The peaks are {within}.",
    )


def _show(result: Demo, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(COLUMNS):
        table.add_column(column.replace(" ", "\n"), justify="right" if i else "left", no_wrap=True)
    for run in result.runs:
        table.add_row(*_row(run))
    console.print("[bold]4. The result[/]\n")
    console.print(table, highlight=False)
    console.print()
    for line in _verdict(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"The four timelines over each other: {result.report}", soft_wrap=True, highlight=False)
