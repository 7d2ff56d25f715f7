"""√n recomputation against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.profiling import profile
from lowtide.techniques import Check
from lowtide.techniques.sqrt import Sqrt, checkpoint_segments
from lowtide.workload import Workload

from ..contract.outcomes import assert_agree, run
from ..contract.workloads import chain


def saved(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps of a forward pass beside parameters and the input; plain torch."""
    mine = {t.untyped_storage()._cdata for t in (*model.parameters(), x)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x).sum()
    loss.backward()
    return sum(size for storage, size in sizes.items() if storage not in mine)


def test_sqrt_segments_keep_about_two_sqrt_n_blocks() -> None:
    """With n equal blocks in √n segments, √n inputs stay; the plain step keeps something of every block."""
    x = torch.randn(2, 4, 8, 8)
    for depth in (9, 25):
        model = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(depth)))
        assert saved(model, x) == depth * x.nbytes
        with checkpoint_segments(model):
            assert saved(model, x) == (depth**0.5 - 1) * x.nbytes  # all segments' inputs but the batch itself


@settings(max_examples=15, deadline=None)
@given(depth=st.integers(2, 7), data=st.data())
def test_any_segmentation_is_bitwise(depth: int, data: st.DataObject) -> None:
    segments = data.draw(st.integers(1, depth), "segments")
    levels = data.draw(st.integers(1, 2), "levels")
    kept = data.draw(st.integers(0, segments - 1), "kept")
    work = chain(depth)
    expected = run(work, steps=2)
    with checkpoint_segments(work.model, segments, levels=levels, kept=kept):
        assert_agree(run(work, steps=2), expected, Check.EXACT)


def test_segments_are_balanced_and_in_order() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    with checkpoint_segments(model, 3):
        assert model.forward.tree == ((0, 1, 2), (3, 4, 5, 6), (7, 8, 9))
    with checkpoint_segments(model, 3, kept=1):
        assert model.forward.order == ((0, 1, 2), (3, 4, 5, 6), 7, 8, 9)
    with checkpoint_segments(model, 2, levels=2):
        assert model.forward.tree == (((0, 1), (2, 3, 4)), ((5, 6), (7, 8, 9)))


@pytest.mark.parametrize("bad", [{"segments": 0}, {"segments": 5}, {"levels": 3}, {"segments": 2, "kept": 2}])
def test_knobs_that_do_not_fit_are_refused(bad: dict[str, int]) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    with pytest.raises(LowtideError) as refusal:
        checkpoint_segments(model, **bad)
    assert all(f"{name}={value}" in str(refusal.value) for name, value in bad.items())
    assert "forward" not in model.__dict__


def test_a_compiled_model_is_bitwise_too_and_runs_its_segments_eagerly() -> None:
    work = chain(4)
    expected = run(work)
    with checkpoint_segments(work.model, 2):
        compiled = torch.compile(work.model, backend="eager")
        actual = run(replace(work, loss=lambda m, x: work.loss(compiled, x)))
    torch.compiler.reset()
    assert_agree(actual, expected, Check.EXACT)


# -- as a technique ------------------------------------------------------------------------------------


def test_options_reach_from_one_segment_to_one_per_block() -> None:
    work = chain(9)
    options = Sqrt().options(profile(work, fake=True))
    counts = {option.config.segments for option in options}
    assert counts == set(range(1, 10))
    assert {option.config.levels for option in options} == {1, 2}
    trees = {option.config.trees for option in options}
    assert (((0, 1, 2), (3, 4, 5), (6, 7, 8)),) in trees
    assert len(trees) == len(options)


def test_a_deep_model_has_no_flood_of_options() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(49)))
    options = Sqrt().options(profile(Workload(model, lambda m, x: m(x).sum(), torch.randn(3, 2)), fake=True))
    assert len(options) < 200
    assert {1, 7, 49} <= {option.config.segments for option in options}
