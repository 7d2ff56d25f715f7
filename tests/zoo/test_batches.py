from __future__ import annotations

import pickle

import pytest
import torch

from lowtide import zoo
from lowtide.errors import WorkloadError
from lowtide.zoo.batches import classification_loss, next_token_loss
from tests.refusals import refused


def test_next_token_targets_are_the_ids_one_step_later():
    ids, target = zoo.small("gpt2").batch
    assert torch.equal(ids[:, 1:], target[:, :-1])
    assert ids.untyped_storage().nbytes() == ids.nbytes


def test_losses_can_be_pickled():
    for loss in (classification_loss, next_token_loss):
        assert pickle.loads(pickle.dumps(loss)) is loss


@pytest.mark.parametrize("name", ["gpt2", "roberta-base"])
def test_block_size_follows_a_longer_sequence(name: str):
    work = zoo.small(name, seq=1100, device="meta")
    assert work.compute_loss().shape == ()
    with refused("1101", "1100", kind=WorkloadError):
        work.model(torch.zeros(1, 1101, dtype=torch.long, device="meta"))
