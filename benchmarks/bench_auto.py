"""Does ``lowtide.plan`` take the fastest plan? Every technique and engine that fits a budget, beside its choice.

    PYTHONPATH=src:. python -m benchmarks.bench_auto [--device cpu|cuda] [--only NAME] [--results DIR]

For each model and budget, the best plan of each technique and of the graph engine is timed. It takes turns with the
plain step and with the plan that ``lowtide.plan`` chooses. Ratios are of medians over the rounds, to the fastest plan.
Models are the zoo's and, where installed, those of transformers and torchvision, with random weights.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import lowtide
from benchmarks.harness import RESULTS, Row, arguments, default_device, record
from benchmarks.steps import seconds_of
from lowtide import Workload, zoo
from lowtide.errors import BudgetError
from lowtide.planning.baseline import baseline_profile
from lowtide.planning.budget import plans
from lowtide.planning.candidate import Permission
from lowtide.planning.plan import Plan
from lowtide.zoo.batches import classification_loss

STEPS, ROUNDS = 2, 9
SHARES = {"cpu": ("60%", "40%"), "cuda": ("60%",)}


def main(*, device: str = "cpu", only: str = "", results: Path = RESULTS) -> None:
    for case, make in CASES[device].items():
        if only not in case:
            continue
        for share in SHARES[device]:
            try:
                rows = compare_plans(f"{case}, {share}", make(device), share)
            except ImportError as error:
                print(f"{case} is skipped: {error}")
                break
            except BudgetError as error:
                print(f"{case}, {share} is refused: {error}")
                continue
            record("auto", rows, device=device, results=results)
            gc.collect()


def compare_plans(case: str, work: Workload, share: str) -> list[Row]:
    """Rows for the plain step, each technique's best plan and the plan that ``lowtide.plan`` takes."""
    baseline = baseline_profile(work, fake=False, device=None)
    start = time.perf_counter()
    chosen = lowtide.plan(work, share, profile=baseline, compile=False)
    planning = time.perf_counter() - start
    rivals = {
        _name(plan): plan for plan in plans(work, share, baseline, permitted=Permission(), most=20, close=math.inf)
    }
    rivals.pop(_name(chosen), None)
    steps = {"plain step": None, f"lowtide.plan: {_name(chosen)}": chosen, **rivals}
    times = _times(work, steps)
    plain, *planned = (median(times[name]) for name in steps)
    rows: list[Row] = []
    for name, plan in steps.items():
        rows.append(Row.of(case, name, "time", times[name], "s"))
        if plan is not None:
            rows.append(Row.of(case, name, "to the plain step", [median(times[name]) / plain], "x"))
            rows.append(Row.of(case, name, "predicted", [plan.seconds / plan.baseline.seconds], "x"))
            rows.append(Row.of(case, name, "to the fastest", [median(times[name]) / min(planned)], "x"))
    rows.append(Row.of(case, f"lowtide.plan: {_name(chosen)}", "planning", [planning], "s"))
    print("\n".join(chosen.notes))
    return rows


def _times(work: Workload, plans: dict[str, Plan | None]) -> dict[str, list[float]]:
    """Seconds of whole steps under each plan, in turns, each after one step that warms up."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    with ExitStack() as stack:
        programs = {  # applied once, since each would be captured again; they leave the modules alone
            name: stack.enter_context(lowtide.apply(plan, work))
            for name, plan in plans.items()
            if plan is not None and plan.program is not None
        }
        for _ in range(ROUNDS):
            for name, plan in plans.items():
                with ExitStack() as turn:
                    applied = programs.get(name) or (plan and turn.enter_context(lowtide.apply(plan, work)))
                    planned = applied.work if applied else work
                    seconds_of(planned, 1)
                    times[name].append(seconds_of(planned, STEPS))
    return times


def _name(plan: Plan) -> str:
    return ", ".join(str(option) for option in plan.options) or f"{plan.engine} engine"


# -- models --------------------------------------------------------------------------------------------


def _zoo(name: str, **options: Any) -> Callable[[str], Workload]:
    return lambda device: zoo.workload(name, device=device, **options)


def _transformers(
    kind: str, batch: Callable[[], dict[str, Any]], autocast: Any = None, **config: Any
) -> Callable[[str], Workload]:
    def make(device: str) -> Workload:
        import transformers

        torch.manual_seed(0)
        model_type, _, config_type = kind.partition(":")
        settings = getattr(transformers, config_type)(**config)
        model: nn.Module = getattr(transformers, model_type)(settings).to(device).train()
        inputs = {name: value.to(device) for name, value in batch().items()}
        optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
        return Workload(model, lambda model, batch: model(**batch).loss, inputs, optimizer, autocast)

    return make


def _tokens(samples: int, length: int, *, vocab: int = 512, labels: int | None = None) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        ids = torch.randint(3, vocab, (samples, length))
        return {"input_ids": ids, "labels": ids[:, :labels].contiguous()}

    return make


def _images(samples: int, size: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(samples, 3, size, size), "labels": torch.randint(0, 10, (samples,))}


def _torchvision(name: str, samples: int) -> Callable[[str], Workload]:
    def make(device: str) -> Workload:
        import torchvision

        torch.manual_seed(0)
        model = getattr(torchvision.models, name)().to(device)
        batch = torch.randn(samples, 3, 224, 224, device=device), torch.randint(0, 1000, (samples,), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
        return Workload(model, classification_loss, batch, optimizer, torch.bfloat16)

    return make


_SMALL = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
_HALF = torch.bfloat16
CASES: dict[str, dict[str, Callable[[str], Workload]]] = {
    "cpu": {
        "ResNet-18": _zoo("resnet18", batch=64, image=96),
        "UNet": _zoo("unet", batch=2, image=320),
        "GPT-2": _zoo("gpt2", batch=8, seq=128, layers=6, width=128, heads=4, vocab=512),
        "RoBERTa": _zoo("roberta-base", batch=8, seq=128, layers=6, width=128, heads=4, vocab=512),
        "transformers Llama": _transformers(
            "LlamaForCausalLM:LlamaConfig", _tokens(8, 128), **_SMALL, intermediate_size=344, num_key_value_heads=2
        ),
        "transformers BERT": _transformers(
            "BertForMaskedLM:BertConfig", _tokens(8, 128), **_SMALL, intermediate_size=512
        ),
        "transformers T5": _transformers(
            "T5ForConditionalGeneration:T5Config",
            _tokens(8, 128, labels=64),
            vocab_size=512,
            d_model=128,
            decoder_start_token_id=0,
            d_kv=32,
            d_ff=512,
            num_layers=4,
            num_heads=4,
        ),
        "transformers ViT": _transformers(
            "ViTForImageClassification:ViTConfig",
            _images(16, 64),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
            num_labels=10,
        ),
        "transformers Mamba": _transformers(
            "MambaForCausalLM:MambaConfig",
            _tokens(4, 32),
            vocab_size=512,
            hidden_size=64,
            state_size=8,
            num_hidden_layers=2,
        ),
    },
    "cuda": {
        "transformers Llama, 8 x 1024, batch 8 x 512, bf16": _transformers(
            "LlamaForCausalLM:LlamaConfig",
            _tokens(8, 512, vocab=32000),
            _HALF,
            vocab_size=32000,
            hidden_size=1024,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=8,
            intermediate_size=2816,
        ),
        "transformers BERT-base, batch 32 x 128, bf16": _transformers(
            "BertForMaskedLM:BertConfig", _tokens(32, 128, vocab=30522), _HALF
        ),
        "transformers GPT-2, batch 8 x 512, bf16": _transformers(
            "GPT2LMHeadModel:GPT2Config", _tokens(8, 512, vocab=50257), _HALF
        ),
        "torchvision ViT-B/16, batch 32, bf16": _torchvision("vit_b_16", 32),
    },
}

if __name__ == "__main__":
    main(**arguments(__doc__, "device", "only", "results", device={"default": default_device()}))
