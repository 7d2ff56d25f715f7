from __future__ import annotations

import pytest
import torch

from lowtide import zoo

from .counting import build, count


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameters_are_as_many_as_in_transformers(name: str, published: int):
    assert count(build(name)) == published


def test_gpt2_reads_no_later_token_and_shares_its_embedding():
    model = zoo.small("gpt2").model.eval()
    ids = torch.arange(16).reshape(1, 16)
    changed = ids.clone()
    changed[0, 10:] = 200
    torch.testing.assert_close(model(ids)[:, :10], model(changed)[:, :10])
    assert model.head.weight is model.tokens.weight
