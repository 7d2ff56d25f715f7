"""Steps are timed in turns, and the first of each does not count."""

import time

import torch
from torch import nn

from lowtide import Workload
from lowtide.profiling.timing import best_seconds, has_ranks


def test_steps_are_timed_in_turns_after_a_first_that_warms_up():
    order = []

    def step(name, seconds):
        def loss(model, x):
            order.append(name)
            time.sleep(seconds if order.count(name) > 1 else 0.2)
            return model(x).mean()

        return Workload(nn.Linear(2, 2), loss, torch.ones(1, 2))

    fast, slow = best_seconds(step("fast", 0.01), step("slow", 0.04))
    assert 0.01 <= fast < 0.04 <= slow < 0.2
    assert order[:4] == ["fast", "slow", "fast", "slow"]
    assert order.count("fast") == order.count("slow")


def test_one_process_has_no_ranks():
    assert not has_ranks()
