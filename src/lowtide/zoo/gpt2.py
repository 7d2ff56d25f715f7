"""GPT-2 (Radford et al., 2019): a decoder-only transformer with tied embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.zoo.batches import check_heads, check_length


class GPT2(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab). The defaults are GPT-2 small.

    | name | layers | width | heads | parameters |
    |---|---|---|---|---|
    | gpt2 | 12 | 768 | 12 | 124,439,808 |
    | gpt2-medium | 24 | 1024 | 16 | 354,823,168 |
    | gpt2-large | 36 | 1280 | 20 | 774,030,080 |
    | gpt2-xl | 48 | 1600 | 25 | 1,557,611,200 |

    ``block_size`` is the longest sequence it takes. The head shares the embedding's weight.
    """

    def __init__(
        self,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocab: int = 50257,
        block_size: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.block_size = block_size
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(block_size, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        _init(self, layers)

    def forward(self, ids: Tensor) -> Tensor:
        check_length(ids, self.block_size)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.blocks(self.drop(x))
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and MLP, each normalised first and added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Causal self-attention through ``F.scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class MLP(nn.Module):
    """Four times wider, GELU in its tanh form, and back."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.out(self.act(self.wide(x))))


def _init(model: GPT2, layers: int) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            # Every block adds to the stream twice: smaller steps keep its variance from growing with depth.
            adds_to_stream = name.endswith("out.weight")
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds_to_stream else 0.02)
