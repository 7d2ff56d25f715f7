"""The search: options are traced once, and those that fail are left out with the reason."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.engines import plan
from lowtide.engines.eager import EagerEngine
from lowtide.errors import BudgetError
from lowtide.planning import search as search_module
from lowtide.planning.candidate import Permission
from lowtide.planning.search import Search
from lowtide.profiling import Profile, profile
from lowtide.sizes import parse_size
from lowtide.techniques import Applied, Fidelity, Option, Price, register
from lowtide.techniques.registry import techniques
from lowtide.techniques.technique import Interval
from tests.models import squares
from tests.refusals import refused

from ..contract.outcomes import assert_restored, snapshot
from .steps import Loose, chain, tanh_layers


def test_an_option_is_traced_once_for_a_profile(plain: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    work = chain()
    chosen = plan(work, "60%", profile=plain, engine="eager", tune=False)
    traced = []
    monkeypatch.setattr(EagerEngine, "predict", lambda *args, **_: traced.append(args))
    assert plan(work, "60%", profile=plain, engine="eager", tune=False).peak_bytes == chosen.peak_bytes
    assert not traced


def test_few_options_are_traced_beside_the_fastest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    work = chain()
    plain = profile(work)
    budget = int(0.6 * plain.peak_bytes)
    search = Search(work, plain, "auto", budget, Permission())
    traced = Counter[str]()
    monkeypatch.setattr(search, "_expand", lambda *_, **__: False)
    monkeypatch.setattr(search, "_unmeasured", set())
    monkeypatch.setattr(search, "_unstudied", set())
    monkeypatch.setattr(search, "_trace", lambda candidate: traced.update([candidate.technique]))
    program = next(c for c in search.candidates if c.is_program and c.estimate <= 0.9 * budget)
    options = [candidate for candidate in search.candidates if candidate.technique]
    assert max(Counter(candidate.technique for candidate in options).values()) > search_module._TRACED_RIVALS
    free = Price(Fidelity.BITWISE)  # an estimate of no bytes is worth a trace
    search.candidates = [program, *(replace(each, estimate=-place, price=free) for place, each in enumerate(options))]
    (rival,) = search.contenders(budget, Permission(), most=3)
    assert rival.candidate.is_program
    assert max(traced.values()) == search_module._TRACED_RIVALS


def test_a_compiled_program_is_among_the_rivals_however_slow_it_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = chain()
    plain = profile(work)
    budget = int(0.6 * plain.peak_bytes)
    search = Search(work, plain, "auto", budget, Permission(), compile=None)
    slow = replace(Price(Fidelity.ROUNDOFF), compute_seconds=0.5 * plain.seconds)
    given = [replace(c, price=slow) if c.compiles else c for c in search.candidates]
    search.candidates = sorted(given, key=lambda candidate: candidate.order)
    rivals = search.contenders(budget, Permission(), most=3, close=math.inf)
    assert [rival.candidate.compiles for rival in rivals].count(True) == 1
    assert not rivals[0].candidate.compiles
    (fastest,) = search.contenders(budget, Permission())
    assert fastest.candidate.key == rivals[0].candidate.key


def seen_together(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean(0).square().sum()


def test_a_technique_that_the_loss_does_not_allow_is_found_out_before_the_first_step() -> None:
    work = tanh_layers(seen_together)
    before = snapshot(work.model)
    with pytest.raises(BudgetError) as caught:
        plan(work, 1, allow="microbatch", tune=False)
    assert str(caught.value).count("microbatch") == 1  # not once for every size
    assert_restored(work.model, before)


def test_where_the_smallest_estimates_cannot_be_used_others_are_looked_at() -> None:
    def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return (y + tangent).square().mean()

    work = tanh_layers(forward_mode)
    chosen = plan(work, "75%", allow="bitwise", tune=False)  # checkpoints do not go with forward-mode derivatives
    assert chosen.engine == "graph"
    assert chosen.peak_bytes <= chosen.budget_bytes


def test_what_fails_in_a_prediction_is_noted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    mixing = torch.randn(96, 96)
    work = Workload(nn.Linear(24, 24), lambda m, x: (mixing @ m(x)).square().mean(), torch.randn(96, 24))
    with refused("microbatch", kind=BudgetError):
        plan(work, 1, allow="microbatch", tune=False)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_option_that_fails_is_left_out_and_noted(plain: Profile) -> None:
    class Tempting(Loose):
        def price(self, option, profile):
            everything = Interval(profile.peak_bytes, 0, len(profile.graph.ops), "all")
            return Price(Fidelity.BITWISE, removed=(everything,))

    with register(Tempting(name="tempting", fails=True)):
        chosen = plan(chain(), "60%", profile=plain, engine="eager", tune=False)
    assert "tempting" not in [option.technique for option in chosen.options]
    assert any("tempting" in note and "this one never works" in note for note in chosen.notes)


class Failing(Loose):
    """Offers an option for each block, and fails with a number of its own."""

    def options(self, profile: Profile) -> list[Option]:
        return [Option(self.name, (path,)) for path in ("0", "1", "2")]

    def price(self, option: Option, profile: Profile) -> Price:
        return Price(Fidelity.BITWISE)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        (option,) = options
        raise RuntimeError(f"block {option.site[0]} fails")


def test_options_that_fail_alike_are_noted_once(plain: Profile) -> None:
    with register(Failing(name="failing")):
        search = Search(chain(), plain, "eager", plain.peak_bytes // 2, Permission())
        tried = [each for each in search.candidates if each.technique == "failing"]
        assert [search.exact(each) for each in tried] == [None, None, None]
    assert [note for note in search.notes if "failing" in note] == ["failing on 0 was left out: block 0 fails"]


def in_fours(model: nn.Module, x: Tensor) -> Tensor:
    """Samples see each other in groups of four."""
    return torch.cat([(part - part.mean(0)).square() for part in model(x).split(4)]).mean()


def test_whether_a_loss_can_be_split_is_asked_of_each_size() -> None:
    work = tanh_layers(in_fours)
    chosen = plan(work, "50%", engine="eager", allow="microbatch", tune=False)
    assert [choice.option.technique for choice in chosen.choices] == ["microbatch"]
    with pytest.raises(BudgetError) as caught:
        plan(work, 1, engine="eager", allow="microbatch", tune=False)
    assert "microbatch" in str(caught.value)
    assert (caught.value.smallest_bytes or 0) <= chosen.peak_bytes


def test_a_plan_says_what_more_bytes_and_a_permission_would_buy(plain: Profile) -> None:
    chosen = plan(chain(), "60%", profile=plain, tune=False)
    larger, allowing = chosen.notes[1:3]
    size = re.search(r"[\d.]+ \w*B\b", larger)
    assert size is not None
    named = plan(chain(), parse_size(size[0].replace(" ", "")) + 1024, profile=plain, tune=False)  # which is rounded
    assert named.seconds < chosen.seconds
    (technique,) = (name for name in techniques() if name in allowing)
    assert any(fidelity in allowing for fidelity in Fidelity if fidelity > Fidelity.ROUNDOFF)
    without = plan(chain(), "60%", profile=plain, forbid=technique, tune=False)
    assert not any(technique in note for note in without.notes)


def test_a_plan_says_why_the_graph_engine_is_not_used() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() < 1e9 else -x)

    model = Branching(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    work = Workload(model, squares, torch.randn(64, 16))
    chosen = plan(work, "80%", allow="microbatch", tune=False)
    assert chosen.engine == "eager"
    assert any("graph engine is not used" in note and "Data-dependent" in note for note in chosen.notes)
    assert "graph engine is not used" in chosen.explain()
