"""A stage is recomputed where keeping it would not have fitted."""

from __future__ import annotations

import random

from lowtide.chains import Chain, OptimalSchedules, Schedule, explain, keep_all

from ..soak import count
from .samples import peak, random_chain


def test_explain_gives_the_peak_of_keeping():
    chain = Chain([0.001] * 3, [1] * 3, [10, 10, 10, 10], [40, 40, 40])
    choices = explain(chain, Schedule.parse("F1c, F2n, F3e, B3, F1e, F2e, B2, B1"))
    assert [choice.runs for choice in choices] == [2, 2, 1]
    assert [choice.kept for choice in choices] == [False, False, True]
    assert [choice.seconds_again for choice in choices] == [0.001, 0.001, 0]
    # At B2 value 0, the saved values of stages 1 and 2, and two gradients are live: 110. At B3 value 0, value 2, the
    # saved values of stage 3 and two gradients: 80. Those of stage 1 add 40; those of stage 2, and value 1, add 40.
    assert [choice.peak_bytes_if_kept for choice in choices] == [120, 120, 110]
    assert all(part in choices[0].why(budget_bytes=110) for part in ("1.00 ms", "40 B", "120 B, over 110 B"))


def test_stages_that_the_optimum_recomputes_would_not_have_fitted():
    rng = random.Random(7)
    for _ in range(count(100, soak=400)):
        chain = random_chain(rng, rng.randint(2, 12))
        planner = OptimalSchedules(chain)
        budget = rng.randint(planner.smallest_bytes, peak(chain, keep_all(chain)))
        for choice in explain(chain, planner.schedule(budget)):
            if choice.kept or chain.forward_seconds[choice.stage] == 0:
                assert choice.runs >= 1
            else:
                assert choice.peak_bytes_if_kept > budget
