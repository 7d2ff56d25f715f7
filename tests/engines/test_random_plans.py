"""Random models, budgets, permissions and engines: every plan keeps its bytes and its class, or is refused."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide import Workload, apply, plan, profile, verify
from lowtide.errors import BudgetError
from lowtide.planning.search import Engine
from lowtide.techniques.technique import Fidelity
from tests.models import Call, Then, standardized

from ..soak import SOAK
from ..tracing.allocator import allocated_peak
from .counting import assert_equal, plain_results, results
from .planned import IN_BACKWARD, plain_loss

SEED = int(os.environ.get("LOWTIDE_SOAK_SEED", "0"))  # several runs, each of its own examples
EXAMPLES = int(os.environ.get("LOWTIDE_SOAK_EXAMPLES", "300" if SOAK else "2"))
WIDTH, LENGTH = 16, 12


def attend(m: Any, x: Tensor) -> Tensor:
    """Attention by hand, as many models have it."""
    q, k, v = m.inner(x).chunk(3, dim=-1)
    return x + torch.bmm((q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1), v)


def gate(m: Any, x: Tensor) -> Tensor:
    """A product of two halves, with a transposed view between."""
    left, right = m.inner(x).chunk(2, dim=-1)
    return (left * right.sigmoid()).transpose(1, 2).contiguous().transpose(1, 2) * 0.5 + x


def convolution() -> Call:
    """Batch norm and an activation in place, over the positions of a sequence."""
    layers = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)
    return Call(lambda m, x: m.layers(x.transpose(1, 2)).transpose(1, 2), layers=nn.Sequential(*layers))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "attention": lambda: Call(attend, inner=nn.Linear(WIDTH, 3 * WIDTH)),
    "gated": lambda: Call(gate, inner=nn.Linear(WIDTH, 2 * WIDTH)),
    "convolution": convolution,
    "pooled": lambda: Then(standardized),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.SiLU()),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True),
}
LOSSES: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]] = {
    "squares": lambda model, batch: model(batch[0]).square().mean(),
    "classes": lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    "masked": lambda model, batch: (
        (model(batch[0]).square().mean(-1) * (batch[1] > 3)).sum() / (batch[1] > 3).sum().clamp(min=1)
    ),
}


def test_any_plan_keeps_its_bytes_and_its_class_or_is_refused() -> None:
    plans_found.clear()
    check_random_plans()
    assert len(plans_found) >= EXAMPLES // 6, "most were refused: this tests little"
    print(Counter(plans_found))


plans_found: list[str] = []  # techniques, or the engine


@seed(SEED)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    blocks=st.lists(st.sampled_from(list(BLOCKS)), min_size=2, max_size=8),
    loss=st.sampled_from(list(LOSSES)),
    samples=st.integers(8, 32),
    share=st.integers(50, 99),
    half=st.booleans(),
    padded=st.booleans(),
    allow=st.sampled_from(["bitwise", "roundoff", "unbiased", "approximate", "changed"]),
    engine=st.sampled_from(["auto", "eager", "graph"]),
    momentum=st.booleans(),
)
def check_random_plans(
    blocks: list[str],
    loss: str,
    samples: int,
    share: int,
    half: bool,
    padded: bool,
    allow: str,
    engine: Engine,
    momentum: bool,
) -> None:
    torch.manual_seed(samples + SEED)
    model = nn.Sequential(*(BLOCKS[block]() for block in blocks))
    if not list(model.parameters()):
        return
    batch = random_batch(samples, padded=padded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * momentum)
    work = Workload(model, LOSSES[loss], batch, optimizer, torch.bfloat16 if half else None)
    before = profile(work)
    budget = before.static_bytes + (before.peak_bytes - before.static_bytes) * share // 100
    try:
        forbid = IN_BACKWARD if samples % 2 else ()
        chosen = plan(work, budget, profile=before, engine=engine, allow=allow, forbid=forbid)
    except BudgetError:
        return
    plans_found.append(", ".join(option.technique for option in chosen.options) or chosen.engine)
    assert chosen.peak_bytes <= budget
    assert chosen.fidelity <= Fidelity(allow)
    later = replace(work, batch=random_batch(samples, padded=True))
    with warnings.catch_warnings():
        if chosen.fidelity is Fidelity.CHANGED:
            warnings.simplefilter("ignore", RuntimeWarning)  # a batch that microbatches do not split evenly
        for each in (work, later):
            checked = verify(each, chosen)
            assert checked.ok, str(checked)
    uses_gradients = any(option.technique == IN_BACKWARD for option in chosen.options)  # verified above
    is_bitwise = chosen.fidelity is Fidelity.BITWISE and not uses_gradients
    expected = [*plain_results(work), *results(later, plain_loss(work))] if is_bitwise else []
    with apply(chosen, work) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # gradients that the loop below leaves between steps
        if is_bitwise:
            assert_equal([*results(work, step.loss), *results(later, step.loss)], expected)
        work.model.zero_grad()
        assert step.profile().storage_peak_bytes == chosen.storage_peak_bytes
        assert allocated_peak(work.model, lambda _, batch: step._loss(batch), work.batch, work.optimizer) <= budget
    torch._dynamo.reset()


def random_batch(samples: int, *, padded: bool) -> tuple[Tensor, Tensor]:
    """Inputs and classes; the loss "masked" ignores classes up to 3, which only padded batches hold."""
    return torch.randn(samples, LENGTH, WIDTH), torch.randint(0 if padded else 4, WIDTH, (samples, LENGTH))
