from __future__ import annotations

import torch
import torch.nn.functional as F

from lowtide.zoo.roberta import Attention

from .counting import build, count


def test_parameters_are_as_many_as_in_transformers():
    assert count(build("roberta-base")) == 124_647_170


def test_attention_is_scaled_dot_product_attention():
    torch.manual_seed(0)
    attention = Attention(width=32, heads=4, dropout=0.1).eval()
    x = torch.randn(2, 5, 32)
    q, k, v = (f(x).view(2, 5, 4, 8).transpose(1, 2) for f in (attention.query, attention.key, attention.value))
    expected = attention.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)
