"""Why a stage runs again: keeping it would not have fitted."""

from __future__ import annotations

import random

from lowtide.chains import Chain, OptimalSchedules, Schedule, explain, keep_all

from .samples import peak, random_chain


def test_explain_says_what_keeping_would_have_taken():
    chain = Chain([0.001] * 3, [1] * 3, [10, 10, 10, 10], [40, 40, 40])
    choices = explain(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1"))
    assert [choice.runs for choice in choices] == [2, 2, 1]
    assert [choice.kept for choice in choices] == [False, False, True]
    assert [choice.seconds_again for choice in choices] == [0.001, 0.001, 0]
    # At B2 there are value 0, what stages 1 and 2 saved, and two gradients: 110. At B3 value 0, value 2, what stage 3
    # saved and two gradients, 80: with what stage 1 saves 120; with what stage 2 saves beside value 2 and value 1 120.
    assert [choice.peak_bytes_if_kept for choice in choices] == [120, 120, 110]
    why = "Runs 1 more time, 1.00 ms: keeping its 40 B too would peak at 120 B, over 110 B"
    assert choices[0].why(budget_bytes=110) == why
    assert choices[2].why(budget_bytes=110) == "Its 40 B are kept"


def test_what_the_optimum_runs_again_would_not_have_fitted():
    rng = random.Random(7)
    for _ in range(200):
        chain = random_chain(rng, rng.randint(2, 12))
        planner = OptimalSchedules(chain)
        budget = rng.randint(planner.smallest_bytes, peak(chain, keep_all(chain)))
        for choice in explain(chain, planner.schedule(budget)):
            if choice.kept or chain.forward_seconds[choice.stage] == 0:
                assert choice.runs >= 1
            else:
                assert choice.peak_bytes_if_kept > budget
