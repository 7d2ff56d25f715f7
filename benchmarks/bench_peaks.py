"""How right are the peaks? Real trace within 1% of the GPU's allocator, fake within 2%, without a GPU within 5%.

On a GPU, each workload runs in a process of its own: plain steps under torch's own counter, a real trace, a fake one.
The fake trace measures kernels once per signature. Elsewhere, the same steps are predicted for the H200 and compared
with the figures that were measured there. ``--kernels FILE`` writes the bytes that the kernels allocated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import RESULTS, Row, arguments, read, record
from lowtide import profile, zoo
from lowtide.profiling.kernels import kernel_key, measure
from lowtide.tracing import trace
from lowtide.tracing.op_calls import Call

BF16 = {"autocast": "bfloat16"}
WORKLOADS: dict[str, dict[str, Any]] = {
    "ResNet-50, batch 64": {"name": "resnet50", "batch": 64},
    "ResNeXt-101, batch 64": {"name": "resnext101", "batch": 64},
    "WRN-28-2, batch 100": {"name": "wrn28-2", "batch": 100},
    "UNet, batch 4": {"name": "unet", "batch": 4},
    "GPT-2 medium, batch 16 x 1024, bf16 autocast": {"name": "gpt2-medium", "batch": 16, "seq": 1024, **BF16},
    "RoBERTa-base, batch 128 x 128": {"name": "roberta-base", "batch": 128, "seq": 128},
    "LSTM, batch 20 x 35": {"name": "lstm", "batch": 20, "seq": 35},
    "ResNet-50, batch 256, bf16 channels-last": {"name": "resnet50", "batch": 256, "channels_last": True, **BF16},
}
RULES = "the same by rules alone, as for kernels never measured"
LIMITS = {"real trace": 0.01, "fake trace, kernels measured": 0.02, "predicted without a GPU": 0.05}
PLAIN = "torch's allocator"


def main(kernels: str = "", case: str = "", out: str = "") -> None:
    if case:
        Path(out).write_text(json.dumps(_measure_case(case)))
        return
    if torch.cuda.is_available():
        rows: list[Row] = []
        workspaces: dict[str, int] = {}
        for case in WORKLOADS:
            result = _in_a_process(case)
            workspaces.update(result["kernels"])
            rows += _rows(case, result["peaks"])
        record("peaks", rows, device="cuda")
        if kernels:
            data = {
                "hardware": torch.cuda.get_device_name(),
                "torch": str(torch.__version__),
                "kernels": workspaces,
            }
            Path(kernels).write_text(json.dumps(data, indent=0))
    else:
        measured = _measured()
        rows = []
        for case, options in WORKLOADS.items():
            if case not in measured:
                continue
            peaks = {PLAIN: measured[case]}
            peaks["predicted without a GPU"] = profile(_workload(options, "meta"), device="h200").peak_bytes
            with mock.patch("lowtide.profiling.kernels._shipped", return_value={}):
                peaks[RULES] = profile(_workload(options, "meta"), device="h200").peak_bytes
            rows += [row for row in _rows(case, peaks) if row.subject != PLAIN]
        record("peaks", rows)
    _complain([row for row in rows if row.metric == "error" and abs(row.value) > 100 * LIMITS.get(row.subject, 1)])


def _in_a_process(case: str) -> dict[str, Any]:
    """One workload alone: what libraries keep for it is not kept for the next."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        subprocess.run([sys.executable, "-m", "benchmarks.bench_peaks", "--case", case, "--out", str(out)], check=True)
        return json.loads(out.read_text())


def _measure_case(case: str) -> dict[str, Any]:
    work = _workload(WORKLOADS[case], "cuda")
    assert work.optimizer is not None
    for _ in range(3):  # the last of them is steady: state and library workspaces exist
        work.optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        work.compute_loss().backward()
        work.optimizer.step()
    torch.cuda.synchronize()
    plain = torch.cuda.max_memory_allocated()
    work.optimizer.zero_grad(set_to_none=True)
    calls: dict[str, Call] = {}
    real = trace(work)
    trace(work, fake=True, calls=calls)
    alone = {key: call for key, call in calls.items() if call.runs_alone}
    kernels = measure(alone, torch.device("cuda"), "cuda")
    fake = profile(work, fake=True)
    assert all(kernel_key(key) in kernels for key in alone if "convolution" in key)
    return {
        "peaks": {PLAIN: plain, "real trace": real.peak_bytes, "fake trace, kernels measured": fake.peak_bytes},
        "kernels": kernels,
    }


def _workload(options: dict[str, Any], device: str) -> Any:
    options = dict(options)
    if "autocast" in options:
        options["autocast"] = getattr(torch, options["autocast"])
    return zoo.workload(options.pop("name"), device=device, **options)


def _rows(case: str, peaks: dict[str, int]) -> list[Row]:
    rows: list[Row] = []
    for subject, peak in peaks.items():
        rows.append(Row.of(case, subject, "allocated peak", [peak], "B"))
        if subject != PLAIN:
            rows.append(Row.of(case, subject, "error", [100 * (peak / peaks[PLAIN] - 1)], "%"))
    return rows


def _measured() -> dict[str, int]:
    path = RESULTS / "peaks.csv"
    if not path.exists():
        return {}
    return {
        row["case"]: int(float(row["value"]))
        for row in read(path)
        if row["subject"] == PLAIN and row["metric"] == "allocated peak"
    }


def _complain(rows: list[Row]) -> None:
    if rows:
        raise SystemExit("\n".join(f"{row.case}, {row.subject}: {row.value:+.2f}% is too far off" for row in rows))


if __name__ == "__main__":
    main(
        **arguments(
            __doc__,
            case={"default": "", "help": "measure one workload only, and write the figures to --out"},
            out={"default": "", "help": "the file for them"},
            kernels={"default": "", "help": "write what the kernels allocated to this file"},
        )
    )
