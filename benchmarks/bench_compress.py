"""What do compressed activations save, what do they cost, and does a model still learn? Beside what people use instead.

Steps: the plain one, torch's ``save_on_cpu``, √n recomputation, and lowtide in 8, 4 and 2 bits. Figures: allocated
peak, bytes saved for backward, seconds, and the error of the gradients. Quality: LeNet on scikit-learn's digits, test
accuracy over three seeds. On a GPU also the kernels alone, as a share of their floor: every byte once over the
bandwidth of a copy.

    PYTHONPATH=src:. python -m benchmarks.bench_compress [--results DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_time import copy_bandwidth, replayed, timed
from benchmarks.harness import RESULTS, Row, arguments, compare, default_device, record
from benchmarks.steps import Way, outcome, plain_step, relative_error, under
from lowtide import Workload, profile, zoo
from lowtide.kernels.compress import Draws, compress, decompress
from lowtide.nn import compressed
from lowtide.planning.prediction import apply_options
from lowtide.profiling.profile import Profile
from lowtide.techniques.compress import Compress
from lowtide.techniques.sqrt import Sqrt
from lowtide.zoo.lenet import LeNet

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "GPT-2, 4 blocks of width 128, batch 4 x 128": {
            "name": "gpt2", "layers": 4, "width": 128, "heads": 4, "vocab": 512, "batch": 4, "seq": 128
        },
        "WRN-28-2, batch 4": {"name": "wrn28-2", "batch": 4},
    },
    "cuda": {
        "GPT-2 medium, 6 blocks, batch 8 x 1024, bf16 autocast": {
            "name": "gpt2-medium", "layers": 6, "batch": 8, "seq": 1024, "autocast": torch.bfloat16
        },
        "WRN-28-2, batch 100": {"name": "wrn28-2", "batch": 100},
    },
}  # fmt: skip
SIZE = 16 * 1024 * 4096


def main(*, results: Path = RESULTS) -> None:
    device = default_device()
    torch.set_num_threads(1)
    if device == "cuda":
        record("compress_kernels", kernels(), device=device, results=results)
    for case, options in CASES[device].items():
        work = zoo.workload(device=device, optimizer="sgd", **options)
        record("compress", steps(case, work, device, 9 if device == "cuda" else 3), device=device, results=results)
    record("compress_quality", quality(), results=results)


def steps(case: str, work: Workload, device: str, repeats: int) -> list[Row]:
    plain = profile(work)
    technique = Compress()
    options = {bits: o for o in technique.options(plain) for bits in (8, 4, 2) if set(_bits(o)) == {bits}}
    ways: dict[str, Way] = {
        "plain step": nullcontext,
        "torch save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"),
        "lowtide, √n recomputation": lambda: apply_options(work, [_root(plain)]),
    }
    for bits, option in options.items():
        ways[f"lowtide, {bits} bits"] = lambda option=option: apply_options(work, [option])
    expected = outcome(work)
    rows: list[Row] = []
    for subject, way in ways.items():
        with way():
            result = outcome(work)
            if subject != "torch save_on_cpu":  # on a CPU it copies there what is there; a trace does not follow it
                traced = profile(work)
                rows.append(Row.of(case, subject, "allocated peak", [traced.peak_bytes], "B"))
                rows.append(Row.of(case, subject, "saved for backward", [traced.saved_bytes], "B"))
        if not torch.equal(result["loss"], expected["loss"]):
            raise SystemExit(f"{case}, {subject}: another loss than the plain step's")
        rows.append(Row.of(case, subject, "gradient error", [100 * _error(result, expected)], "%"))
    contenders = {subject: under(way, partial(plain_step, work)) for subject, way in ways.items()}
    return rows + compare(case, contenders, check=lambda: None, repeats=repeats, warmup=1, device=device)


def kernels() -> list[Row]:
    """The GPU's time of each kernel over its floor, and as launched."""
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SIZE, device="cuda").to(dtype)
        for bits in (8, 4, 2):
            draws = Draws(0)
            stored = compress(x, draws, bits=bits)
            back = decompress(stored, SIZE, dtype, bits=bits)
            # A group of normal numbers is some 6 wide, and stochastic rounding has a deviation of √(1/6) steps at most.
            if float((back.float() - x.float()).norm() / x.float().norm()) > 6 / 6**0.5 / (2**bits - 2):
                raise SystemExit(f"{bits} bits, {dtype}: values do not come back")
            floor = (x.nbytes + stored.nbytes) / bandwidth
            case = f"16x1024x4096 {str(dtype)[6:]}, {bits} bits"
            runs: dict[str, Callable[[], object]] = {
                "compress": lambda bits=bits, draws=draws, x=x: compress(x, draws, bits=bits),
                "decompress": lambda bits=bits, stored=stored, dtype=dtype: decompress(stored, SIZE, dtype, bits=bits),
            }
            for name, run in runs.items():
                rows.append(Row.of(case, name, "time / floor", [t / floor for t in replayed(run)], "x"))
                rows.append(Row.of(case, name, "as launched / floor", [t / floor for t in timed(run)], "x"))
    return rows


def quality(seeds: int = 3, epochs: int = 15) -> list[Row]:
    """LeNet on the 1,797 digits of scikit-learn, on a CPU."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        print("skipped: the quality table needs scikit-learn")
        return []
    digits = cast(Any, load_digits())
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, size=28)
    labels = torch.tensor(digits.target)
    rows: list[Row] = []
    for bits in (0, 8, 4, 2):
        accuracies = [100 * _accuracy(images, labels, bits, seed, epochs) for seed in range(seeds)]
        subject = f"lowtide, {bits} bits" if bits else "plain"
        rows.append(
            Row.of(f"LeNet on digits, {epochs} epochs, {seeds} seeds", subject, "test accuracy", accuracies, "%")
        )
    return rows


def _accuracy(images: Tensor, labels: Tensor, bits: int, seed: int, epochs: int) -> float:
    torch.manual_seed(seed)
    order = torch.randperm(len(labels))
    train, test = order[:1437], order[1437:]
    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            with compressed(bits) if bits else nullcontext():
                loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(images[test]).argmax(1) == labels[test]).float().mean())


def _error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error of all gradients as one vector."""
    names = [name for name in expected if name.endswith(".grad")]
    return relative_error((actual[name] for name in names), (expected[name] for name in names))


def _bits(option: Any) -> tuple[int, ...]:
    return option.config.bits


def _root(plain: Profile) -> Any:
    """√n segments, one level, none kept."""
    options = [o for o in Sqrt().options(plain) if o.config.levels == 1 and o.config.kept == 0]
    blocks = max(o.config.segments for o in options)
    return min(options, key=lambda o: abs(o.config.segments - blocks**0.5))


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
