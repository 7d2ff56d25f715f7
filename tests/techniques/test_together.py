"""Two techniques at once: they work together, or refuse with a reason and leave the model as it was."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.steps import plain_step
from torch import Tensor, nn

from lowtide import Workload
from lowtide.errors import LowtideError
from lowtide.planning import apply_options, predict
from lowtide.profiling import Profile, profile
from lowtide.techniques import Check, Fidelity, Option, techniques
from tests.contract.outcomes import Outcome, assert_agree, assert_restored, run, snapshot
from tests.soak import SOAK, in_soak

NAMES = list(techniques())

# Pairs that declare a conflict; and those of which the second finds its place taken, with what the error names.
CONFLICTS = {frozenset((name, other)): (name, other) for name in NAMES for other in techniques()[name].conflicts}
TAKEN = {
    frozenset(("batchnorm", "fewbit")): ("ReLU",),
    frozenset(("randomized", "chunked_loss")): ("(1)",),
    frozenset(("precision", "stored_gradients")): ("already done",),
}
REFUSED = CONFLICTS | TAKEN


class Block(nn.Module):
    """Something for everybody: a batch norm with its ReLU, and linear layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.mlp(self.norm(x))


def workload() -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*(Block(32) for _ in range(3))), nn.Linear(32, 400, bias=False))
        batch = torch.randn(96, 32), torch.randint(400, (96,))
        batch[1][:40:3] = -100  # ignored: they do not count, in no piece and in no chunk
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, optimizer, name="together")


@pytest.fixture(scope="module")
def plain() -> Profile:
    return profile(workload())


def middle(name: str, plain: Profile) -> Option:
    options = list(techniques()[name].options(plain))
    assert options, f"{name} has nothing to offer here"
    return options[len(options) // 2]


ONCE = list(itertools.combinations(NAMES, 2))
# The order matters where one takes the other's place.
ORDERS = [*ONCE, *(pair[::-1] for pair in ONCE if SOAK or frozenset(pair) in TAKEN)]


def untrained(results: Outcome) -> Outcome:
    """Results without parameters after the step: Adam makes a whole step of a gradient that is rounding alone."""
    return {name: value for name, value in results.items() if not name.endswith(", trained")}


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_two_work_together_or_refuse_with_a_reason(first: str, second: str, plain: Profile) -> None:
    work = workload()
    before = snapshot(work.model)
    expected = run(work)
    both = [middle(first, plain), middle(second, plain)]
    checks = [techniques()[option.technique].check(option) for option in both]
    promised = Check(
        max(check.fidelity for check in checks),
        rtol=max(check.rtol for check in checks) + 1e-5,
        atol=max(check.atol for check in checks) + 1e-5,  # a bias before a batch norm has a gradient of rounding alone
        leaves_gradients=all(check.leaves_gradients for check in checks),
    )
    named = REFUSED.get(frozenset((first, second)))
    if named is not None:
        with pytest.raises(LowtideError) as refusal:
            apply_options(work, both)
        assert all(name in str(refusal.value) for name in named)
    else:
        with apply_options(work, both) as applied:
            actual = run(applied.work)
        if promised.fidelity is Fidelity.BITWISE:
            assert_agree(actual, expected, promised)
        elif promised.fidelity is Fidelity.ROUNDOFF:
            assert_agree(untrained(actual), untrained(expected), promised)
        assert all(value.isfinite().all() for name, value in actual.items() if name != "generator")
    assert_restored(work.model, before)
    assert_agree(run(work), expected, Check.EXACT)


ON_THE_STEP = [name for name, technique in techniques().items() if technique.kind == "step"]
BOTH = [pair for pair in ORDERS if set(pair) <= set(ON_THE_STEP) and frozenset(pair) not in REFUSED]


@pytest.mark.parametrize(("first", "second"), BOTH)
def test_training_goes_on_where_two_were_undone(first: str, second: str, plain: Profile) -> None:
    work = workload()
    with apply_options(work, [middle(first, plain), middle(second, plain)]) as applied:
        plain_step(applied.work)
    before = [parameter.clone() for parameter in work.model.parameters()]
    assert plain_step(work).isfinite()
    assert not all(map(torch.equal, before, work.model.parameters()))


def test_the_page_of_methods_says_which_refuse() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results" / "methods.md").read_text()
    rows = page.partition("## Two at once")[2].partition("## ")[0].splitlines()
    cells = [[re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:3]] for row in rows if row.startswith("| `")]
    assert {frozenset((one, other)) for (one,), others in cells for other in others} == set(REFUSED)


# Those that the documents put side by side have to work, not to refuse.
PAIRS = [
    ("chunked_loss", "optimal"),
    ("optimizer_state", "optimizer_in_backward"),
    *in_soak([("fewbit", "randomized"), ("chunked_loss", "sqrt"), ("microbatch", "batchnorm")]),
]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_pairs_of_the_documents_save_more_together(names: tuple[str, str], plain: Profile) -> None:
    work = workload()
    options = [middle(name, plain) for name in names]
    alone = [predict(work, [option], plain) for option in options]
    together = predict(work, options, plain)
    measure = "static_bytes" if "optimizer_state" in names else "storage_peak_bytes"
    assert getattr(together, measure) <= min(getattr(each, measure) for each in alone)
    with apply_options(replace(work), options) as applied:
        assert profile(applied.work).storage_peak_bytes == together.storage_peak_bytes
