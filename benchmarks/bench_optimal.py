"""How much longer does a step take in a share of its memory, by optimal schedules and by √n segments?

Predicted for an H200, on any machine: peaks are estimated from prices, seconds modelled by the roofline. For each share
the fastest option of the technique that fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Row, arguments, record
from lowtide import profile, zoo
from lowtide.planning import estimate_peak
from lowtide.techniques import techniques

CASES: dict[str, dict[str, Any]] = {
    "ResNet-50, batch 128": {"name": "resnet50", "batch": 128},
    "DenseNet-121, batch 64": {"name": "densenet121", "batch": 64},
    "U-Net, batch 8": {"name": "unet", "batch": 8},
    "GPT-2 medium, batch 8 x 1024": {"name": "gpt2-medium", "batch": 8, "seq": 1024},
}
NAMES = {"sqrt": "√n segments", "optimal": "optimal"}
SHARES = (0.8, 0.6, 0.4, 0.25)


def main(*, results: Path = RESULTS) -> None:
    record(
        "optimal",
        [row for case, options in CASES.items() for row in rows_of(case, options)],
        device="cpu",
        results=results,
    )


def rows_of(case: str, options: dict[str, Any]) -> list[Row]:
    plain = profile(zoo.workload(device="meta", **options), device="h200")
    rows = [Row.of(case, "plain step", "smallest peak", [plain.peak_bytes], "B")]
    rows.append(Row.of(case, "plain step", "step", [plain.seconds], "s"))
    for name, subject in NAMES.items():
        technique = techniques()[name]
        prices = [technique.price(option, plain) for option in technique.options(plain)]
        estimates = [(estimate_peak(plain.graph, [price]), price.seconds) for price in prices]
        rows.append(Row.of(case, subject, "smallest peak", [min(estimates)[0]], "B"))
        for share in SHARES:
            fits = [seconds for peak, seconds in estimates if peak <= share * plain.peak_bytes]
            if fits:
                rows.append(Row.of(case, subject, f"in {share:.0%}", [1 + min(fits) / plain.seconds], "x"))
    return rows


if __name__ == "__main__":
    main(**arguments(__doc__, "results"))
