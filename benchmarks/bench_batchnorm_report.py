"""Does batch norm that recomputes save memory, and what does it cost? The experiments of the report.

"Lowering Memory in the Batch Normalization Layer to Try to Speed Up Training" (Eng, 2024) trains two networks by Adam
at 1e-3. LeNet learns MNIST for 10 epochs of batches of 64, a 1-D ResNet Speech Commands for one of batches of 32. Each
has PyTorch's BatchNorm1d, or a layer of its own without and with recomputation. The median of three runs counts. Its
own layer without recomputation keeps the normalised data beside the input. PyTorch's does not, and lowtide's "standard"
is PyTorch's. So a layer like the report's stands beside them.

All variants start a run from the same parameters and see the same batches. Before anything is timed, gradients over the
first steps are set beside PyTorch's, in float32 and in float64. Rows are appended after every round of runs. Needs a
folder with both data sets. The loss curves go to docs/images/batchnorm_report_losses.svg where altair is installed;
--draw draws the rows so far, and trains nothing.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.batchnorm_variants import VARIANTS, Convert
from benchmarks.data import COMMANDS, Samples, mnist, speech_commands
from benchmarks.drawing import color_by, say_drawn, side_by_side
from benchmarks.harness import RESULTS, ROOT, Row, arguments, default_device, read, record, results_of, skip
from lowtide import LowtideError, Workload, profile, zoo
from lowtide.reporting.charts import alt, chart_of
from lowtide.reporting.figures import save_figure
from lowtide.zoo.batches import classification_loss

NAME = "batchnorm_report"
LIMIT_ERROR = 5  # times PyTorch's own: a ReLU near zero falls to either side by rounding, and then it shows
POINTS = 40  # of a loss curve
FIGURE = ROOT / "docs" / "images" / f"{NAME}_losses.svg"


@dataclass(frozen=True)
class Experiment:
    """A model, its data on the device, and how long to train."""

    case: str
    build: Callable[[], nn.Module]
    train: Samples
    test: Samples
    batch: int
    epochs: int


@dataclass(frozen=True)
class Run:
    """Results of one training run."""

    epoch_seconds: float
    peak_bytes: float | None  # above the data set; None where the device does not count
    losses: list[float]
    accuracy: float


def main(
    data: str | None = None,
    device: str | None = None,
    epochs: int | None = None,
    runs: int = 3,
    quick: bool = False,
    draw: bool = False,
    results: Path | None = None,
) -> None:
    if draw:
        say_drawn(lambda: draw_curves(results or RESULTS, FIGURE))
        return
    device = device or default_device()
    results = results_of(results, quick=quick)
    if device == "cpu":
        torch.set_num_threads(1)  # several that wait for each other on a busy machine measure the machine
    for load in (_resnet_1d, _lenet):  # the short and telling one first
        try:
            experiment = load(data, device, epochs, quick)
        except LowtideError as error:
            skip(str(error))
        measure(experiment, device, 1 if quick else runs, results)
    if results == RESULTS:
        say_drawn(lambda: draw_curves(RESULTS, FIGURE))


def _lenet(data: str | None, device: str, epochs: int | None, quick: bool) -> Experiment:
    train, test = (_part(part, 640 if quick else None, device) for part in mnist(data))
    count = epochs or (1 if quick else 10)
    case = f"LeNet on MNIST, batch 64, {_count(count, 'epoch')}"
    return Experiment(case, lambda: zoo.model("lenet"), train, test, 64, count)


def _resnet_1d(data: str | None, device: str, epochs: int | None, quick: bool) -> Experiment:
    train, _, test = speech_commands(data)
    train, test = (_part(part, 64 if quick else None, device) for part in (train, test))
    options: dict[str, Any] = {"classes": len(COMMANDS), "width": 16 if quick else 64}
    # The report could run one epoch only; more epochs are for LeNet.
    case = f"1-D ResNet-18 on {len(train.labels):,} Speech Commands, batch 32, 1 epoch"
    return Experiment(case, lambda: zoo.model("resnet18-1d", **options), train, test, 32, 1)


def _part(samples: Samples, limit: int | None, device: str) -> Samples:
    # Mixed before it is cut: the files may be sorted by class.
    order = torch.randperm(len(samples.labels), generator=torch.Generator().manual_seed(0))[:limit]
    inputs, labels = samples if limit is None else (samples.inputs[order], samples.labels[order])
    return Samples(inputs.to(device), labels.to(device))


# -- Measuring -----------------------------------------------------------------------------------------


def measure(experiment: Experiment, device: str, runs: int, results: Path) -> None:
    case = experiment.case
    print(f"{case}: {len(experiment.train.labels):,} training samples, on {device}", flush=True)
    differences = gradient_differences(experiment, device)
    _, usual = differences["PyTorch"]
    exact: list[Row] = []
    for subject, (difference, error) in differences.items():
        print(f"  {subject}: gradients {difference:.1e} from PyTorch's, {error:.1e} from float64's", flush=True)
        if error > LIMIT_ERROR * usual:
            raise SystemExit(f"{case}, {subject}: {error / usual:.1f} times PyTorch's rounding error of a gradient")
        exact.append(Row.of(case, subject, "gradient, from PyTorch's", [float(f"{difference:.1e}")], ""))
        exact.append(Row.of(case, subject, "gradient, from float64's", [float(f"{error:.1e}")], ""))
    for subject, convert in VARIANTS.items():
        traced = profile(_workload(experiment, convert, device))
        exact.append(Row.of(case, subject, "saved for backward", [traced.saved_bytes], "B"))
        if device != "cuda":
            exact.append(Row.of(case, subject, "allocated peak", [traced.peak_bytes], "B"))
    done: dict[str, list[Run]] = {subject: [] for subject in VARIANTS}
    for number in range(runs):
        for subject, convert in VARIANTS.items():
            run = train(experiment, convert, device, seed=number)
            done[subject].append(run)
            print(
                f"  run {number + 1} of {runs}, {subject}: {run.epoch_seconds:.2f} s an epoch, "
                f"last loss {run.losses[-1]:.4f}, test accuracy {run.accuracy:.2f}%",
                flush=True,
            )
        record(NAME, [*exact, *_rows(case, done)], device=device, results=results)
    with contextlib.redirect_stdout(io.StringIO()):  # hundreds of lines
        path = record(f"{NAME}_losses", _curves(experiment, done), device=device, results=results)
    print(f"loss curves appended to {path}\n", flush=True)


def gradient_differences(experiment: Experiment, device: str, steps: int = 3) -> dict[str, tuple[float, float]]:
    """How far each variant's gradients are from PyTorch's, and from PyTorch's in float64, over the first steps.

    The largest difference over all parameters, relative to that gradient's largest entry. PyTorch trains, and the
    others start each step from its parameters: Adam would blow up rounding otherwise. A bias right before a batch norm
    is left out: its gradient is zero, and its error is rounding.
    """
    torch.manual_seed(0)
    plain = experiment.build().to(device)
    exact = copy.deepcopy(plain).double()
    models = {subject: convert(copy.deepcopy(plain)).to(device) for subject, convert in VARIANTS.items()}
    optimizer = _adam(plain)
    void = _biases_before_norms(plain)
    differences = dict.fromkeys(VARIANTS, (0.0, 0.0))
    order = torch.arange(len(experiment.train.labels))[: steps * experiment.batch]
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for inputs, labels in _batches(experiment, order):
            for model in (exact, *models.values()):
                for mine, theirs in zip(_tensors(model), _tensors(plain), strict=True):
                    mine.detach().copy_(theirs.detach())
            for model in (plain, exact, *models.values()):
                model.zero_grad(set_to_none=True)
                F.cross_entropy(model(inputs.double() if model is exact else inputs), labels).backward()
            for subject, model in models.items():
                for mine, theirs, wanted in zip(*(m.parameters() for m in (model, plain, exact)), strict=True):
                    if id(theirs) not in void:
                        difference, error = differences[subject]
                        difference = max(difference, _relative(mine.grad, theirs.grad))
                        differences[subject] = difference, max(error, _relative(mine.grad, wanted.grad))
            optimizer.step()
    return differences


def _relative(mine: Tensor | None, other: Tensor | None) -> float:
    assert mine is not None
    assert other is not None
    return float((mine - other).abs().max() / other.abs().max())


def _biases_before_norms(model: nn.Module) -> set[int]:
    chains = [list(module) for module in model.modules() if isinstance(module, nn.Sequential)]
    pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]
    return {id(first.bias) for first, second in pairs if isinstance(second, nn.BatchNorm1d | nn.BatchNorm2d)}


def train(experiment: Experiment, convert: Convert, device: str, seed: int) -> Run:
    gc.collect()
    held = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    torch.manual_seed(seed)
    model = convert(experiment.build()).to(device)
    optimizer = _adam(model)
    order = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    start = time.perf_counter()
    for _ in range(experiment.epochs):
        for inputs, labels in _batches(experiment, torch.randperm(len(experiment.train.labels), generator=order)):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    values = torch.stack(losses).tolist()  # waits for the device
    seconds = (time.perf_counter() - start) / experiment.epochs
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else None
    return Run(seconds, peak, values, _accuracy(model, experiment.test))


def _batches(experiment: Experiment, order: Tensor) -> Any:
    inputs, labels = experiment.train
    for chosen in order.to(labels.device).split(experiment.batch):
        yield inputs[chosen], labels[chosen]


@torch.no_grad()
def _accuracy(model: nn.Module, test: Samples) -> float:
    model.eval()
    parts = zip(test.inputs.split(500), test.labels.split(500), strict=True)
    right = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in parts)
    return 100 * right / len(test.labels)


def _workload(experiment: Experiment, convert: Convert, device: str) -> Workload:
    torch.manual_seed(0)
    model = convert(experiment.build()).to(device)
    first = slice(experiment.batch)
    batch = (experiment.train.inputs[first].clone(), experiment.train.labels[first].clone())
    return Workload(model, classification_loss, batch, _adam(model))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _rows(case: str, done: dict[str, list[Run]]) -> list[Row]:
    rows: list[Row] = []
    for subject, runs in done.items():
        base = [run.epoch_seconds for run in next(iter(done.values()))]
        times = [run.epoch_seconds for run in runs]
        rows.append(Row.of(case, subject, "epoch", times, "s"))
        rows.append(Row.of(case, subject, "epoch ratio", [a / b for a, b in zip(times, base, strict=True)], "x"))
        if peaks := [run.peak_bytes for run in runs if run.peak_bytes is not None]:
            rows.append(Row.of(case, subject, "allocated peak", peaks, "B"))
        rows.append(Row.of(case, subject, "test accuracy", [run.accuracy for run in runs], "%"))
    return rows


def _curves(experiment: Experiment, done: dict[str, list[Run]]) -> list[Row]:
    """The mean loss of every so many steps: its median and quartiles over the runs."""
    rows: list[Row] = []
    for subject, runs in done.items():
        steps = len(runs[0].losses)
        every = max(1, steps // POINTS)
        for end in range(every, steps + 1, every):
            means = [sum(run.losses[end - every : end]) / every for run in runs]
            rows.append(Row.of(f"{experiment.case}, step {end}", subject, "loss", means, ""))
    return rows


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


# -- Drawing -------------------------------------------------------------------------------------------

COLORS = dict(zip(VARIANTS, ("#8a8f98", "#e69f00", "#009e73", "#0072b2"), strict=True))


def draw_curves(results: Path, path: Path) -> Path:
    """The loss curves of the latest rows, a panel for each experiment."""
    panels = [_panel(chart_of(points), title) for title, points in _points(results).items()]
    subtitle = "Median over the runs; each point is the mean of some steps."
    return save_figure(side_by_side(panels, "Training loss", subtitle), path)


def _panel(points: Any, title: str) -> Any:
    lines = points.mark_line(strokeWidth=1.8).encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=8)),
        # A logarithm, since LeNet's falls to a thirtieth.
        y=alt.Y(
            "loss:Q", title="loss (log scale)", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(tickCount=5)
        ),
        color=color_by("variant", COLORS, columns=1),
    )
    heading = alt.TitleParams(title, anchor="start", fontSize=11, fontWeight=500)
    return lines.properties(width=400, height=280, title=heading)


def _points(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The points of each experiment on each device, by the latest rows."""
    path = results / f"{NAME}_losses.csv"
    if not path.exists():
        raise SystemExit(f"{path} is missing: train first")
    latest = {(row["hardware"], row["case"], row["subject"]): row for row in read(path)}
    points: dict[str, list[dict[str, Any]]] = {}
    for (hardware, case, variant), row in latest.items():
        experiment, _, step = case.rpartition(", step ")
        point = {"step": int(step), "loss": float(row["value"]), "variant": variant}
        points.setdefault(f"{experiment} ({hardware})", []).append(point)
    return points


if __name__ == "__main__":
    own = {"epochs": {"help": "of LeNet; 10 in the report"}, "runs": {"default": 3}, "results": {"default": None}}
    main(**arguments(__doc__, "data", "device", "quick", "draw", **own))
