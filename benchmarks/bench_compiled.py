"""At equal peaks, is a planned step as fast as `torch.compile` with checkpoints by hand? Needs a GPU.

    PYTHONPATH=src:. python -m benchmarks.bench_compiled [--only NAME] [--jobs N] [--results DIR] [--draw]

Peaks are bytes above what stays between steps (parameters, buffers, optimizer state), by torch's own counter, with what
CUDA graphs hold. Seconds are of whole steps as launched from Python: zero_grad, loss, backward, optimizer. Peers
compile loss and model as one function: as it is, with CUDA graphs, with torch's activation memory budget, and with
checkpoints by hand (selective, of every second block, of every block). Where the loss ends in a large linear layer,
some compute it in chunks, too. A plan is made for the peak of each peer, and for other budgets.

Each case runs in jobs, side by side on the host and alone while one is timed. Each job times `torch.compile` for its
own ratios. Plans are verified last: what they measured is recorded by then.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.bench_budgets import _blocks as block_lists
from benchmarks.drawing import color_by, say_drawn
from benchmarks.harness import RESULTS, ROOT, Row, arguments, read, record, skip
from benchmarks.quiet import quiet, quiet_tuning, run_jobs
from benchmarks.steps import plain_step, timed_steps
from lowtide import Workload, apply, plan, verify, zoo
from lowtide.errors import BudgetError
from lowtide.planning.baseline import baseline_profile
from lowtide.planning.plan import Plan
from lowtide.reporting.charts import FONT, alt, chart_of
from lowtide.reporting.figures import save_figure
from lowtide.tracing.capture.loss import sharing_captures
from lowtide.tracing.step_state import static_bytes
from lowtide.workload import autocast

GIB = 2**30
DRAWING = ROOT / "docs" / "images" / "compiled.svg"
_HEAVY = ("mm", "addmm", "bmm", "convolution", "attention")


@dataclass(frozen=True)
class Peer:
    """A way to run the compiled step."""

    name: str
    every: int = 0  # which blocks are checkpointed: every second, say
    selective: bool = False
    budget: float = 1.0  # torch's activation memory budget, as a share
    mode: str | None = None
    in_chunks: bool = False  # the loss

    @contextmanager
    def around(self, model: nn.Module) -> Generator[None]:
        with functorch_config.patch(activation_memory_budget=self.budget), ExitStack() as stack:
            if self.selective or self.every:
                stack.enter_context(checkpointed(model, _saves_heavy if self.selective else None, max(1, self.every)))
            yield


WHOLE = Peer("torch.compile")
GRAPHS = Peer("torch.compile, CUDA graphs", mode="reduce-overhead")
PEERS = [
    WHOLE,
    GRAPHS,
    Peer("torch.compile, selective checkpointed", selective=True),
    Peer("torch.compile, memory budget 0.5", budget=0.5),
    Peer("torch.compile, memory budget 0.2", budget=0.2),
    Peer("torch.compile, every second block checkpointed", every=2),
    Peer("torch.compile, every block checkpointed", every=1),
]
CHUNKED = [
    Peer("torch.compile, loss in chunks", in_chunks=True),
    Peer("torch.compile, selective checkpointed, loss in chunks", selective=True, in_chunks=True),
    Peer("torch.compile, every second block checkpointed, loss in chunks", every=2, in_chunks=True),
    Peer("torch.compile, every block checkpointed, loss in chunks", every=1, in_chunks=True),
]


@dataclass(frozen=True)
class Case:
    options: dict[str, Any]  # of ``zoo.workload``
    budgets: Sequence[float]  # in GiB above what stays
    peers: Sequence[Peer] = tuple(PEERS)


CASES = {
    "GPT-2 medium, 50304 words, batch 16 x 1024, bf16, dropout": Case(
        {"name": "gpt2-medium", "batch": 16, "seq": 1024, "vocab": 50304},
        (14.7, 12.8, 10.0, 8.0, 6.0, 4.2, 3.3, 2.5, 2.0, 1.6),
        (*PEERS, *CHUNKED),
    ),
    "ResNeXt-101, batch 64, bf16 NHWC": Case(
        {"name": "resnext101", "batch": 64, "channels_last": True}, (5.1, 4.2, 1.7)
    ),
    "ResNet-50, batch 256, bf16": Case({"name": "resnet50", "batch": 256}, ()),
    "UNet, batch 16 x 256, bf16": Case({"name": "unet", "batch": 16, "size": 256}, ()),
    "RoBERTa-base, batch 32 x 512, bf16": Case({"name": "roberta-base", "batch": 32, "seq": 512}, ()),
    "LSTM, batch 64 x 256, bf16": Case({"name": "lstm", "batch": 64, "seq": 256}, ()),
}


def main(*, only: str = "", job: str = "", jobs: int = 4, draw: bool = False, results: Path = RESULTS) -> None:
    if draw:
        say_drawn(lambda: draw_steps(results / "compiled.csv", DRAWING))
        return
    if not torch.cuda.is_available():
        skip("it measures a GPU's memory and time")
    if job:
        case, peers, budgets = json.loads(job)
        measure_case(case, workload(CASES[case].options), peers, budgets, results)
        return
    commands: list[list[str]] = []
    for name, case in CASES.items():
        if only in name:
            halves = [(case.peers[::2], case.budgets[::2]), (case.peers[1::2], case.budgets[1::2])]
            for peers, budgets in halves:
                each = json.dumps([name, [peer.name for peer in peers], list(budgets)])
                commands.append(["-m", "benchmarks.bench_compiled", "--job", each, "--results", str(results)])
    if any(run_jobs(commands, jobs)):
        raise SystemExit("A job failed")


def workload(options: dict[str, Any], device: str = "cuda") -> Workload:
    work = zoo.workload(device=device, autocast=torch.bfloat16, **options)
    optimizer = work.optimizer
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer = torch.optim.AdamW(work.model.parameters(), fused=True)
    return Workload(work.model, work.loss, work.batch, optimizer, work.autocast, work.name)


def measure_case(case: str, work: Workload, peers: Sequence[str], budgets: Sequence[float], results: Path) -> None:
    """Measure some peers, then plans at their peaks and at more budgets."""
    note = partial(record, "compiled", device=work.device.type, results=results)
    plain_step(work)  # which makes the optimizer's state
    with quiet():
        profile = baseline_profile(work, fake=False, device=None)
    measuring = Measuring(case, static_bytes(work), note)
    failed: list[str] = []
    measuring("PyTorch eager", work)
    _, measuring.whole = measuring(WHOLE.name, compiled(work, WHOLE))
    peaks: list[int] = []
    for peer in (each for each in CASES[case].peers if each.name in peers and each is not WHOLE):
        try:
            with peer.around(work.model):
                peak, _ = measuring(peer.name, compiled(work, peer))
            peaks.append(peak)
        except Exception as error:  # a peer that cannot run this step is worth a line
            print(f"{case}, {peer.name}: {type(error).__name__} {str(error).splitlines()[:1]}", flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    plans: list[Plan] = []
    for above in (*(int(each * GIB) for each in budgets), *peaks):
        name, start = f"lowtide, {above / GIB:.2f} GiB", time.perf_counter()
        try:
            with sharing_captures(work):  # as ``lowtide.fit`` does
                with quiet_tuning():
                    chosen = plan(work, profile.static_bytes + above, profile=profile)
                planning = time.perf_counter() - start
                with apply(chosen, work) as step:
                    peak, _ = measuring(
                        name,
                        step.work,
                        ("peak, predicted", chosen.peak_bytes - profile.static_bytes, "B"),
                        ("step, predicted", chosen.seconds, "s"),
                        ("planning", planning, "s"),
                    )
        except BudgetError as error:
            print(f"{case}, {name}: {error}", flush=True)
            continue
        print(f"{case}, {name}: {chosen}", flush=True)
        plans.append(chosen)
        failed += [f"{name}: {peak / GIB:.2f} GiB"] if peak > above else []
    for chosen in plans:
        checked = verify(work, chosen)
        failed += [] if checked.results_agree else [f"{chosen.budget_bytes} bytes: {checked}"]
    if failed:
        raise SystemExit("\n".join(f"{case}, {each}" for each in failed))


@dataclass
class Measuring:
    """Measures steps of a case, and records seconds, peaks above static, and ratios to ``torch.compile``."""

    case: str
    static: int
    note: Callable[[Sequence[Row]], object]
    whole: float | None = None  # seconds of ``torch.compile``

    def __call__(self, name: str, work: Workload, *more: tuple[str, float, str]) -> tuple[int, float]:
        """Peak above static, and median seconds."""
        start = time.perf_counter()
        for _ in range(3):
            plain_step(work)
        _wait()
        building = time.perf_counter() - start
        assert work.optimizer is not None
        work.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        with quiet():
            times, peak = timed_steps(work)
        work.optimizer.zero_grad(set_to_none=True)
        figures: list[tuple[str, float | list[float], str]] = [
            ("step", times, "s"),
            ("peak above static", peak - self.static, "B"),
            ("first three steps", building, "s"),
            *more,
        ]
        if self.whole is not None:
            figures.append(("times torch.compile", [each / self.whole for each in times], "x"))
        values = [(what, value if isinstance(value, list) else [value], unit) for what, value, unit in figures]
        rows = [Row.of(self.case, name, *each) for each in values]
        self.note(rows)
        return peak - self.static, rows[0].value


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compiled(work: Workload, peer: Peer = WHOLE) -> Workload:
    """The step with loss and model as one compiled function."""
    torch._dynamo.reset()
    loss = _in_chunks if peer.in_chunks else work.loss
    run = torch.compile(lambda batch: loss(work.model, batch), dynamic=False, mode=peer.mode)

    def planned(model: nn.Module, batch: Any) -> Any:
        with autocast(work.device.type, work.autocast):
            if peer.mode is not None:
                torch.compiler.cudagraph_mark_step_begin()
            return run(batch)

    return Workload(work.model, planned, work.batch, work.optimizer, None, work.name)


def _in_chunks(model: nn.Module, batch: tuple[Tensor, Tensor], chunks: int = 16) -> Tensor:
    """The language model's loss as people write it for less memory: checkpointed, some rows at a time."""
    ids, target = batch
    head: Any = model.head
    with mock.patch.object(head, "forward", lambda x: x):
        hidden = model(ids).flatten(0, 1)

    def summed(rows: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, head.weight), target, reduction="sum")

    parts = zip(hidden.chunk(chunks), target.flatten().chunk(chunks), strict=True)
    total = torch.stack([checkpoint(summed, *each, use_reentrant=False) for each in parts])
    return total.sum() / target.numel()


def _saves_heavy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    heavy = any(part in str(op) for part in _HEAVY)
    return CheckpointPolicy.MUST_SAVE if heavy else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def checkpointed(
    model: nn.Module, policy: Callable[..., CheckpointPolicy] | None = None, every: int = 1
) -> Generator[None]:
    contexts = {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    with ExitStack() as stack:
        for _, _, blocks in block_lists(model):
            for block in blocks[::every]:
                run = partial(checkpoint, block.forward, use_reentrant=False, **contexts)
                stack.enter_context(mock.patch.object(block, "forward", run))
        yield


def draw_steps(rows: Path, path: Path) -> Path:
    """Seconds as a multiple of ``torch.compile``'s over the measured peak: plans as a line, peers as points."""
    latest = {(row["case"], row["subject"], row["metric"]): float(row["value"]) for row in read(rows)}
    points = [
        {
            "case": case,
            "how": "lowtide.plan" if subject.startswith("lowtide") else subject,
            "peak": latest[case, subject, "peak above static"] / GIB,
            "ratio": ratio,
        }
        for (case, subject, metric), ratio in latest.items()
        if metric == "times torch.compile"
    ]
    names = dict.fromkeys(point["how"] for point in points)
    colors = dict(zip(sorted(names, key=lambda name: name != "lowtide.plan"), _COLORS, strict=False))

    def panel(case: str) -> Any:
        own = [point for point in points if point["case"] == case]
        shared = {
            "x": alt.X("peak:Q", title="peak above static, GiB", scale=alt.Scale(zero=False, padding=20)),
            "y": alt.Y("ratio:Q", title="step, times torch.compile's", scale=alt.Scale(zero=False, padding=20)),
            "color": color_by("how", colors, columns=2),
        }
        line = chart_of([p for p in own if p["how"] == "lowtide.plan"]).mark_line(point=True, strokeWidth=2)
        marks = chart_of([p for p in own if p["how"] != "lowtide.plan"]).mark_point(size=90, filled=True)
        layers = alt.layer(line.encode(**shared), marks.encode(**shared))
        return layers.properties(width=400, height=300, title=alt.TitleParams(case, anchor="start", fontSize=12))

    cases = dict.fromkeys(point["case"] for point in points)
    chart = alt.concat(*map(panel, cases), columns=2, background="white", padding=16)
    return save_figure(chart.configure(font=FONT).configure_view(stroke=None), path)


_COLORS = ("#0b6e8f", "#222222", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#999999", "#1f9e89")

if __name__ == "__main__":
    job = {"default": "", "help": "one job, as JSON: the case, names of peers, budgets"}
    jobs = {"type": int, "default": 4, "help": "jobs that run at a time"}
    main(**arguments(__doc__, "only", "draw", "results", job=job, jobs=jobs))
