"""A captured GPT-2 with its smallest program."""

from __future__ import annotations

import pytest

from lowtide import zoo
from lowtide.engines import graph

from ...engines.counting import Planner


@pytest.fixture(scope="module")
def smallest() -> Planner:
    """A captured GPT-2 with its program."""
    planner = Planner("smallest")
    work = zoo.small("gpt2")
    graph.planned_loss(work, planner)(work.batch)
    return planner
