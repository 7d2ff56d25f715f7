"""Plans for torchvision's and transformers' models: are they small, and as fast as what users have? Needs a GPU.

    PYTHONPATH=src:. python -m benchmarks.bench_outside [--only NAME] [--jobs N] [--results DIR]

Each model trains in bf16 autocast with random weights. Budgets are 60% and 40% of the plain step's peak, everything
included, and the smallest that works. Peers are PyTorch eager and `torch.compile` of the whole model, each also with
every block checkpointed, and `torch.compile` with CUDA graphs. Steps are timed as launched from Python, and peaks are
by torch's own counter, with what CUDA graphs hold.

Models of transformers run without a cache of keys and values, as in training with checkpoints. Peers that fail leave
tensors behind, so they come last.

Models run side by side, each alone while it is timed. So seconds of planning and building are upper bounds.
"""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench_compiled import GRAPHS, checkpointed, compiled
from benchmarks.harness import RESULTS, Row, arguments, record, skip
from benchmarks.quiet import quiet, quiet_tuning, run_jobs
from benchmarks.steps import plain_step, timed_steps
from lowtide import Workload, apply, plan, verify
from lowtide.errors import BudgetError
from lowtide.planning.baseline import baseline_profile
from lowtide.planning.plan import Plan
from lowtide.profiling import Profile
from lowtide.tracing.capture.loss import sharing_captures

Built = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]
SKIPPED = os.environ.get("OUTSIDE_SKIP", "")  # "peers", "verify", or both
BUDGETS = tuple(os.environ.get("OUTSIDE_BUDGETS", "60%,40%,smallest").split(","))


def main(*, only: str = "", job: str = "", jobs: int = 6, results: Path = RESULTS) -> None:
    if not torch.cuda.is_available():
        skip("it measures a GPU's memory and time")
    if job:
        measure_model(job, results)
        return
    chosen = [name for name in MODELS if only in name]
    commands = [["-m", "benchmarks.bench_outside", "--job", name, "--results", str(results)] for name in chosen]
    failed = [name for name, code in zip(chosen, run_jobs(commands, jobs), strict=True) if code]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def measure_model(name: str, results: Path, device: str = "cuda") -> None:
    torch.manual_seed(0)
    model, loss, batch = MODELS[name]()
    model, batch = model.to(device).train(), _to(batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    work = Workload(model, loss, batch, optimizer, torch.bfloat16, name)
    failed: list[str] = []

    def note(subject: str, *rows: tuple[str, float | list[float], str]) -> None:
        made = [Row.of(name, subject, m, v if isinstance(v, list) else [v], unit) for m, v, unit in rows]
        record("outside", made, device=device, results=results)

    def measured(subject: str, step: Workload, *more: tuple[str, float | list[float], str]) -> tuple[float, int]:
        start = time.perf_counter()
        for _ in range(3):
            plain_step(step)
        torch.cuda.synchronize()
        building = time.perf_counter() - start
        with quiet():
            seconds, peak = timed(step)
        middle = sorted(seconds)[len(seconds) // 2]
        ratio = [each / (plain or middle) for each in seconds]
        note(
            subject,
            ("step", seconds, "s"),
            ("times eager", ratio, "x"),
            ("peak", peak, "B"),
            ("first three steps", building, "s"),
            *more,
        )
        return middle, peak

    plain = 0.0
    plain, _ = measured("PyTorch eager", work)
    start = time.perf_counter()
    with quiet():
        profile = baseline_profile(work, fake=False, device=None)
    note("lowtide", ("profiling", time.perf_counter() - start, "s"), ("plain peak", profile.peak_bytes, "B"))
    plans: list[Plan] = []
    for budget in BUDGETS:
        try:
            with sharing_captures(work):  # as ``lowtide.fit`` does
                chosen = _measure_budget(work, profile, budget, note, measured)
            plans += [] if chosen is None else [chosen]
        except Exception:
            failed.append(f"{budget}: {traceback.format_exc()}")
        gc.collect()
        torch.cuda.empty_cache()
    if "peers" not in SKIPPED:
        for subject, around, run in (
            ("PyTorch eager, every block checkpointed", checkpointed(model), lambda: work),
            ("torch.compile", nullcontext(), lambda: compiled(work)),
            ("torch.compile, CUDA graphs", nullcontext(), lambda: compiled(work, GRAPHS)),
            ("torch.compile, every block checkpointed", checkpointed(model), lambda: compiled(work)),
        ):
            try:
                with around:
                    measured(subject, run())
            except Exception as error:  # a peer that cannot run this model is worth a line
                print(f"{name}, {subject}: {type(error).__name__} {str(error).splitlines()[:1]}", flush=True)
            torch._dynamo.reset()
    for chosen in plans if "verify" not in SKIPPED else ():  # last: rows are recorded by then
        checked = verify(work, chosen)
        failed += [] if checked.results_agree else [f"{chosen.budget_bytes}: {checked}"]
    if failed:
        raise SystemExit("\n".join(f"{name}, {each}" for each in failed))


def _measure_budget(
    work: Workload, profile: Profile, budget: str, note: Callable[..., None], measured: Callable[..., tuple[float, int]]
) -> Plan | None:
    """Plan and measure; None if the budget is refused."""
    subject = f"lowtide, {budget}"
    start = time.perf_counter()
    try:
        chosen = planned(work, profile, budget)
    except BudgetError as error:
        smallest = error.smallest_bytes
        note(subject, ("refused; smallest", smallest or math.nan, "B"))
        print(error, flush=True)
        return None
    planning = time.perf_counter() - start
    print(f"{work.name} {budget}: {chosen}", flush=True)
    with apply(chosen, work) as step:
        middle, peak = measured(
            subject,
            step.work,
            ("peak, predicted", chosen.peak_bytes, "B"),
            ("step, predicted", chosen.seconds, "s"),
            ("planning", planning, "s"),
            ("budget", chosen.budget_bytes, "B"),
        )
    share = peak / chosen.budget_bytes
    print(f"{work.name} {budget}: {middle * 1e3:.1f} ms, peak {share:.3f} of the budget", flush=True)
    if peak > chosen.budget_bytes:
        raise RuntimeError(f"{peak} bytes of {chosen.budget_bytes}")
    return chosen


def planned(work: Workload, profile: Profile, budget: str) -> Plan:
    """A plan; the smallest is what the refusal of one byte names."""
    with quiet_tuning():
        if budget != "smallest":
            return plan(work, budget, profile=profile, compile="auto")
        try:
            return plan(work, 1, profile=profile, compile="auto")
        except BudgetError as error:
            smallest = error.smallest_bytes
        assert smallest is not None
        return plan(work, smallest, profile=profile, compile="auto")


def timed(step: Workload) -> tuple[list[float], int]:
    """Seconds of a dozen steps, and their peak."""
    assert step.optimizer is not None
    step.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    plain_step(step)
    return timed_steps(step)


def _to(batch: Any, device: str) -> Any:
    if isinstance(batch, dict):
        return {key: value.to(device) for key, value in batch.items()}
    return tuple(value.to(device) for value in batch)


# -- models ----------------------------------------------------------------------------------------------


def _classifier(name: str, batch: int, size: int = 224, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        from torchvision import models

        images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
        return models.get_model(name, weights=None, **options), _cross_entropy, (images, labels)

    return build


def _segmentation() -> Built:
    from torchvision import models

    model = models.get_model("deeplabv3_resnet50", weights=None, weights_backbone=None)
    return model, _cross_entropy, (torch.randn(8, 3, 384, 384), torch.randint(0, 21, (8, 384, 384)))


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out["out"] if isinstance(out, dict) else out, batch[1])


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _words(kind: str, config: str, batch: int, length: int, words: int, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        model = getattr(transformers, kind)(getattr(transformers, config)(use_cache=False, **options))
        ids = torch.randint(5, words, (batch, length))
        return model, _own_loss, {"input_ids": ids, "labels": ids.clone()}

    return build


def _vit() -> Built:
    import transformers

    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    return model, _own_loss, {"pixel_values": torch.randn(64, 3, 224, 224), "labels": torch.randint(0, 1000, (64,))}


def _whisper() -> Built:
    import transformers

    config = transformers.WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, use_cache=False,
    )  # fmt: skip
    batch = {"input_features": torch.randn(8, 80, 3000), "labels": torch.randint(5, 50000, (8, 128))}
    return transformers.WhisperForConditionalGeneration(config), _own_loss, batch


MODELS: dict[str, Callable[[], Built]] = {
    "torchvision ResNet-50, batch 64": _classifier("resnet50", 64),
    "torchvision DenseNet-121, batch 32": _classifier("densenet121", 32),
    "torchvision MobileNetV3-large, batch 128": _classifier("mobilenet_v3_large", 128),
    "torchvision Swin-T, batch 64": _classifier("swin_t", 64),
    "torchvision ViT-B/16, batch 64": _classifier("vit_b_16", 64),
    "torchvision DeepLabV3, batch 8 x 384": _segmentation,
    "transformers GPT-2, batch 8 x 1024": _words("GPT2LMHeadModel", "GPT2Config", 8, 1024, 50257),
    "transformers BERT-base, batch 16 x 512": _words("BertForMaskedLM", "BertConfig", 16, 512, 30000),
    "transformers T5-small, batch 16 x 512": _words(
        "T5ForConditionalGeneration", "T5Config", 16, 512, 32000, decoder_start_token_id=0
    ),
    "transformers Llama, 8 layers of 1024, batch 8 x 1024": _words(
        "LlamaForCausalLM", "LlamaConfig", 8, 1024, 32000,
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
    ),
    "transformers ViT-base, batch 64": _vit,
    "transformers Whisper-base, batch 8": _whisper,
}  # fmt: skip


if __name__ == "__main__":
    job = {"help": "measure this model alone"}
    jobs = {"type": int, "default": 6, "help": "models that run at a time"}
    main(**arguments(__doc__, "only", "results", job=job, jobs=jobs))
