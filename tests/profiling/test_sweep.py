"""Peaks over a grid, and the largest batch that fits."""

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.errors import BudgetError, WorkloadError
from lowtide.profiling import max_batch, profile, sweep
from tests.refusals import refused


def linear(batch, seq=1):
    with torch.device("meta"):
        return Workload(nn.Linear(64, 64), lambda model, x: model(x).mean(), torch.empty(batch, seq, 64))


def test_each_cell_is_the_profile_of_its_point():
    grid = sweep(linear, batch=[2, 4, 8], seq=[16, 32])
    assert [cell.point for cell in grid.cells[:2]] == [{"batch": 2, "seq": 16}, {"batch": 2, "seq": 32}]
    for cell in grid.cells:
        assert cell.peak_bytes == profile(linear(**cell.point), fake=True).peak_bytes


def test_a_large_grid_is_worked_out_from_a_few_traces_exactly():
    grid = sweep(linear, batch=[2, 3, 5, 8, 13], seq=[16, 32, 48, 100])
    assert grid.traced == 10  # three values of each axis, and one point to prove it
    for cell in grid.cells:
        profiled = profile(linear(**cell.point), fake=True)
        assert (cell.peak_bytes, cell.saved_bytes) == (profiled.peak_bytes, profiled.saved_bytes)


def test_a_grid_whose_graph_changes_with_the_size_is_traced_point_by_point():
    def odd(batch):
        with torch.device("meta"):
            layers = [nn.Linear(8, 8) for _ in range(1 + batch % 2)]
            return Workload(nn.Sequential(*layers), lambda model, x: model(x).mean(), torch.empty(batch, 8))

    grid = sweep(odd, batch=[1, 2, 3, 4, 5, 6, 7])
    assert grid.traced == 7
    assert [cell.peak_bytes for cell in grid.cells] == [
        profile(odd(**cell.point), fake=True).peak_bytes for cell in grid.cells
    ]


def test_progress_is_told_after_each_cell():
    seen = []
    sweep(linear, batch=[1, 2, 3], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_limit_is_read_as_people_write_it():
    grid = sweep(linear, batch=[1, 1000], limit="100KB")
    assert grid.limit_bytes == 100_000
    assert [cell["fits"] for cell in grid.to_json()["cells"]] == [True, False]


@pytest.mark.parametrize("axes", [{}, {"batch": []}, {"a": [1], "b": [1], "c": [1]}])
def test_a_sweep_without_one_or_two_axes_says_what_to_write(axes):
    with refused("axes", "batch=", kind=WorkloadError):
        sweep(linear, **axes)


def test_the_largest_batch_fits_and_the_next_does_not():
    limit = 200_000
    best = max_batch(linear, limit)
    assert profile(linear(best), fake=True).peak_bytes <= limit
    assert profile(linear(best + 1), fake=True).peak_bytes > limit


def test_a_limit_below_one_sample_says_what_it_needs():
    with pytest.raises(BudgetError) as error:
        max_batch(linear, "1KB")
    assert "batch of 1" in str(error.value)
    assert error.value.smallest_bytes == profile(linear(1), fake=True).peak_bytes


def test_the_gpt2_activations_of_the_document_cross_16_gb_where_it_says():
    """The heat map of the slides: 8 x 512 is far below a V100's 16 GB, 64 x 1024 far above."""

    def make(batch, seq):
        return zoo.workload("gpt2", batch=batch, seq=seq, device="meta")

    grid = sweep(make, device="v100", limit="16GB", batch=[8, 64], seq=[1024])
    fits = {tuple(cell.point.values()): cell.saved_bytes <= grid.limit_bytes for cell in grid.cells}
    assert fits[(8, 1024)]
    assert not fits[(64, 1024)]
