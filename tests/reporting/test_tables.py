import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowtide.reporting.tables import (
    buckets,
    grid,
    holders,
    phase_runs,
    saved_changes,
    saved_rows,
    workspace_rows,
)

MIB = 2**20


def test_a_storage_saved_twice_is_one_row(profile):
    rows = [row for row in saved_rows(profile) if row.category == "activation"]
    assert len(rows) == 4
    assert sum(row.bytes for row in rows) == profile.saved_bytes == 256 * MIB
    assert rows[0].needed_by == ("aten.threshold_backward.default", "aten.convolution_backward.default")


def test_workspaces_are_grouped_by_signature(profile):
    rows = workspace_rows(profile)
    assert [(row.name, row.bytes, row.calls) for row in rows] == [
        ("aten.convolution_backward.default", 64 * MIB, 4),
        ("aten.convolution.default", 2 * MIB, 1),  # the first block reads the smaller batch
        ("aten.convolution.default", 2 * MIB, 3),
    ]


def test_holders_count_what_is_alive_at_the_peak(profile):
    held = holders(profile, 100)
    assert sum(row.bytes for row in held) == sum(s.bytes for s in profile.alive_at_peak)
    assert held[0].bytes == max(row.bytes for row in held)


def test_phases_follow_each_other(profile):
    assert [(run.phase, run.start, run.end) for run in phase_runs(profile.graph)] == [
        ("forward", 0, 8),
        ("backward", 8, 16),
        ("optimizer", 16, 20),
    ]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=200), st.integers(1, 60))
def test_buckets_never_lose_the_peak(live, count):
    chosen = buckets(np.array(live), count)
    assert len(chosen) == count
    assert chosen == sorted(chosen)
    assert max(live[op] for op in chosen) == max(live)


def test_recomputation_shows_as_modules_that_keep_less(profile, planned):
    rows = saved_changes(profile.compare(planned))
    assert [(path, old, new) for path, _, old, new in rows] == [(f"{i}.relu", 64 * MIB, 0) for i in range(3)]


def test_a_sweep_is_laid_out_by_its_axes(sweep):
    layout = grid(sweep)
    assert (layout.row_axis, layout.column_axis, layout.unit) == ("batch", "seq", "GB")
    assert [[cell.peak_bytes // 10**9 for cell in row] for row in layout.cells] == [[1, 2], [3, 4], [5, 6]]
    assert layout.over(6 * 10**9)
    assert not layout.over(5 * 10**9)
    assert layout.share(10**9) == 0
    assert layout.share(5 * 10**9) == 1
