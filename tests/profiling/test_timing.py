"""Steps are timed in turns, and the first of each does not count."""

import time

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.profiling.timing import RunMeter, best_seconds, has_ranks, measured_peak


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


def test_the_measured_peak_is_of_the_whole_step_alone():
    model = nn.Linear(64, 64, bias=False)
    held = torch.ones(2**16)  # of the process, not of the step
    optimizer = torch.optim.Adam(model.parameters())
    work = Workload(model, lambda model, x: model(x).square().sum(), torch.ones(1000, 64), optimizer)
    batch, weight = 1000 * 64 * 4, 64 * 64 * 4
    static = batch + 3 * weight + 4  # with Adam's moments and its count of steps
    peak = measured_peak(work)
    assert peak is not None
    # The product, its square, and gradients of both at the most.
    assert static + 2 * batch <= peak <= static + 4 * batch + weight
    assert held.sum() == 2**16


def test_a_run_is_timed_and_a_cpu_has_no_peak():
    with RunMeter(torch.device("cpu")) as run:
        time.sleep(0.02)
    assert 0.02 <= run.seconds < 1
    assert run.peak_bytes == 0


@pytest.mark.gpu
def test_the_peak_of_a_run_is_that_of_the_allocator():
    device = torch.device("cuda")
    before = torch.cuda.memory_allocated()
    with RunMeter(device) as run:
        torch.ones(2**20, device=device)
    assert run.peak_bytes - before == 2**22
    with RunMeter(device) as run:
        pass
    assert run.peak_bytes == before


def test_one_process_has_no_ranks():
    assert not has_ranks()
