"""Dropout masks from seeds: the right share is kept, and neither seeds nor neighbours show in them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowtide.kernels import dropout_mask as module
from lowtide.kernels.dropout_mask import decomposed, dropout_mask, is_kept

COUNT = 1 << 16


def seed_of(*words: int) -> Tensor:
    return torch.tensor(words, dtype=torch.int32)


def seeds(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31 - 1, (count, 2), dtype=torch.int32, generator=generator)


def correlation(one: Tensor, other: Tensor) -> float:
    """In standard deviations of independent masks, whose correlations are normal."""
    return float(torch.corrcoef(torch.stack([one, other]).float())[0, 1]) * math.sqrt(one.numel())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_that_of_independent_draws(p: float) -> None:
    deviation = math.sqrt(p * (1 - p) / COUNT)
    off = torch.stack([dropout_mask(seed, [COUNT], p).float().mean() - (1 - p) for seed in seeds(64)]) / deviation
    assert off.abs().max() < 4.5
    assert 0.7 < off.std() < 1.3
    assert off.mean().abs() < 4 / math.sqrt(64)


def test_drawn_seeds_and_close_first_words_give_unrelated_masks() -> None:
    close = [seed_of(word, 77) for word in (0, 1, 2, 1024, -(2**31))]
    masks = [dropout_mask(seed, [COUNT], 0.3) for seed in (*close, *seeds(12))]
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            assert abs(correlation(mask, other)) < 5


@pytest.mark.parametrize("step", [1, 2, 3, 16, 64, 256, 1000, 4096])
def test_neighbours_and_rows_are_unrelated(step: int) -> None:
    for seed in (seed_of(0, 0), *seeds(4)):
        mask = dropout_mask(seed, [COUNT], 0.3)
        assert abs(correlation(mask[:-step], mask[step:])) < 5


def test_each_word_of_the_seed_shows() -> None:
    masks = [dropout_mask(seed_of(*words), [1000], 0.5) for words in ((3, 5), (4, 5), (3, 6), (5, 3))]
    assert len({tuple(mask.tolist()) for mask in masks}) == 4
    assert torch.equal(masks[0], dropout_mask(seed_of(3, 5), [1000], 0.5))


@pytest.mark.parametrize("size", [[7], [3, 5, 2], [1, 1], []])
def test_taken_apart_it_is_the_same_mask(size: list[int]) -> None:
    for seed in seeds(3):
        mask = dropout_mask(seed, size, 0.4)
        assert (mask.shape, mask.dtype) == (torch.Size(size), torch.bool)
        assert torch.equal(mask, decomposed(seed, size, 0.4))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = seed_of(11, -7)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert torch.equal(dropout_mask(seed, [3, 67], 0.4), decomposed(seed, [3, 67], 0.4))


def test_an_element_depends_on_its_place_alone() -> None:
    seed, places = seed_of(11, -7), torch.tensor([5, 0, 199], dtype=torch.int32)
    assert torch.equal(is_kept(places, seed, 0.4), dropout_mask(seed, [200], 0.4)[places])


@pytest.mark.parametrize("size", [[0], [4, 0, 3]])
def test_empty_sizes_give_empty_masks(size: list[int]) -> None:
    for mask in (dropout_mask(seed_of(1, 2), size, 0.5), decomposed(seed_of(1, 2), size, 0.5)):
        assert (mask.shape, mask.dtype) == (torch.Size(size), torch.bool)


def test_nothing_or_everything_is_dropped_at_the_edges() -> None:
    seed = seed_of(9, 9)
    assert dropout_mask(seed, [COUNT], 0.0).all()
    assert not dropout_mask(seed, [COUNT], 1.0).any()
    assert not dropout_mask(seed, [COUNT], 1e-9).logical_not().any()
    assert dropout_mask(seed, [COUNT], 1e-3).logical_not().any()


def test_the_op_is_known_to_fake_tensors_and_changes_nothing() -> None:
    torch.library.opcheck(torch.ops.lowtide.dropout_mask.default, (seed_of(1, 2), [4, 3], 0.5))
