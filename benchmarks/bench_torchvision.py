"""Does ``lowtide.convert`` leave torchvision's networks what they are, and save what it says? Needs a GPU.

Each network runs a forward and a backward pass as it is, converted, and in float64, from the same parameters on the
same batch. An error is the norm of the difference from float64 over the norm. lowtide's must be at most twice PyTorch's
own. "kept for backward" is the bytes that stay allocated after the forward pass, "peak above static" the peak without
static bytes. The predicted bytes are those that ``convert`` reports, without running.
After ``undo()`` classes, ``state_dict`` and output are the original's bit for bit.

    PYTHONPATH=src:. python -m benchmarks.bench_torchvision [--only NAME] [--results DIR]
"""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench_block import memory
from benchmarks.harness import RESULTS, Row, arguments, record, skip, torchvision_models
from benchmarks.steps import relative_error
from lowtide import Workload, convert

# The shape of the batch, and what is not the builder's default.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "resnet50": ((16, 3, 224, 224), {}),
    "resnext101_32x8d": ((16, 3, 224, 224), {}),
    "densenet121": ((16, 3, 224, 224), {}),
    "mobilenet_v3_large": ((16, 3, 224, 224), {}),
    "deeplabv3_resnet50": ((8, 3, 256, 256), {"weights_backbone": None}),
    "r3d_18": ((8, 3, 8, 112, 112), {}),
}
PLAIN, OURS = "PyTorch eager", "lowtide.convert"


def main(*, only: str = "", results: Path = RESULTS) -> None:
    if not torch.cuda.is_available():
        skip("it measures a GPU's memory")
    models = torchvision_models()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    failed: list[str] = []
    for name, (shape, options) in CASES.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        model = models.get_model(name, weights=None, **options)
        try:
            rows = measure(f"{name}, {'x'.join(map(str, shape))}", model, torch.randn(shape), "cuda")
            record("torchvision", rows, device="cuda", results=results)
        except SystemExit as error:  # the other networks are worth knowing too
            failed.append(str(error))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit("\n".join(failed))


def measure(case: str, model: nn.Module, images: Tensor, device: str) -> list[Row]:
    """The rows of one model; SystemExit where results differ. The model is converted, and given back."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model, images = model.to(device).train(), images.to(device)
    labels = make_labels(model, images)
    exact = Step(copy.deepcopy(model).double(), images.double(), labels).results()
    plain, ours = Step(copy.deepcopy(model), images, labels), Step(model, images, labels)
    theirs = plain.results()

    done = convert(model, work=ours.work)
    predicted = done.memory
    assert predicted is not None
    rows = compare_errors(case, theirs.errors(exact), ours.results().errors(exact))
    del exact

    used = {PLAIN: memory(plain.forward, plain.backward, device), OURS: memory(ours.forward, ours.backward, device)}
    for subject, taken in used.items():
        rows.append(Row.of(case, subject, "kept for backward", [taken.kept_bytes], "B"))
        rows.append(Row.of(case, subject, "peak above static", [taken.peak_bytes], "B"))
    saved = {
        "saved": (used[PLAIN].kept_bytes - used[OURS].kept_bytes, used[PLAIN].peak_bytes - used[OURS].peak_bytes),
        "saved, predicted": (
            predicted.saved_bytes_before - predicted.saved_bytes_after,
            predicted.peak_bytes_before - predicted.peak_bytes_after,
        ),
    }
    for subject, (kept, peak) in saved.items():
        rows.append(Row.of(case, subject, "kept for backward", [kept], "B"))
        rows.append(Row.of(case, subject, "peak above static", [peak], "B"))
    rows.append(Row.of(case, OURS, "batch norms converted", [len(done.changed)], ""))
    rows.append(Row.of(case, OURS, "batch norms left", [len(done.left)], ""))

    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done.undo()
    check_undone(case, ours, plain, trained, theirs.output[""])
    return rows


def compare_errors(case: str, theirs: dict[str, float], ours: dict[str, float]) -> list[Row]:
    """Both as rows; SystemExit where lowtide's are more than twice PyTorch's, and more than some roundings."""
    for kind, error in ours.items():
        if not error <= max(2 * theirs[kind], _SOME_ROUNDINGS):
            raise SystemExit(f"{case}: the {kind} is {error:.1e}, PyTorch's {theirs[kind]:.1e}")
    return [
        Row.of(case, subject, kind, [float(f"{error:.1e}")], "")
        for subject, errors in ((PLAIN, theirs), (OURS, ours))
        for kind, error in errors.items()
    ]


_SOME_ROUNDINGS = 1e-5  # of float32, through a deep network


class Step:
    """A forward and a backward pass of a model on a batch."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model, self.images, self.labels = model, images, labels
        self.work = Workload(model, loss, (images, labels))

    def forward(self) -> Tensor:
        return loss(self.model, (self.images, self.labels))

    def backward(self, value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, list(self.model.parameters()))

    def results(self) -> Results:
        out = logits(self.model, self.images)
        gradients = self.backward(F.cross_entropy(out, self.labels))
        names = (name for name, _ in self.model.named_parameters())
        return Results(
            {"": out.detach()},
            dict(zip(names, gradients, strict=True)),
            {name: buffer.clone() for name, buffer in self.model.named_buffers()},
        )


@dataclass(frozen=True)
class Results:
    """Results of a step, by name."""

    output: dict[str, Tensor]
    gradient: dict[str, Tensor]
    statistics: dict[str, Tensor]

    def errors(self, exact: Results) -> dict[str, float]:
        """Norms of differences over norms."""
        return {
            "output error": max(_errors(self.output, exact.output)),
            "gradient error": relative_error(self.gradient.values(), exact.gradient.values()),
            "worst gradient's error": max(_errors(self.gradient, exact.gradient)),
            "worst statistic's error": max(_errors(self.statistics, exact.statistics)),
        }


def _errors(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> list[float]:
    """Errors of the tensors that are not nearly 0: a bias before a batch norm has no gradient but rounding."""
    norms = {name: float(tensor.double().norm()) for name, tensor in exact.items()}
    least = 1e-4 * max(norms.values())
    return [float((actual[name].double() - exact[name]).norm()) / norm for name, norm in norms.items() if norm > least]


def logits(model: nn.Module, images: Tensor) -> Tensor:
    out = model(images)
    return out["out"] if isinstance(out, dict) else out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(logits(model, images), labels)


def make_labels(model: nn.Module, images: Tensor) -> Tensor:
    """A class for each image, or for each of its pixels. The model's statistics stay as they were."""
    with torch.no_grad():
        shape = logits(model.eval(), images).shape
    model.train()
    return torch.randint(shape[1], (shape[0], *shape[2:]), device=images.device)


def check_undone(case: str, ours: Step, plain: Step, trained: dict[str, Tensor], output: Tensor) -> None:
    """The original's classes, its keys with the values that they had by then, and its output, bit for bit."""
    kinds, original = ([(name, type(part)) for name, part in m.named_modules()] for m in (ours.model, plain.model))
    state = ours.model.state_dict()
    same = {
        "classes": kinds == original,
        "keys": list(state) == list(plain.model.state_dict()),
        "forwards": not any("forward" in vars(part) for part in ours.model.modules()),
        "state_dict": all(torch.equal(tensor, trained[name]) for name, tensor in state.items()),
        "output": torch.equal(logits(ours.model, ours.images), output),
    }
    if not all(same.values()):
        raise SystemExit(
            f"{case}: undo did not give back the {[what for what, is_same in same.items() if not is_same]}"
        )


if __name__ == "__main__":
    main(**arguments(__doc__, "only", "results"))
