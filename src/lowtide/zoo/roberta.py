"""RoBERTa-base (Liu et al., 2019) with a classification head, attention written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lowtide.zoo.batches import check_heads, check_length


class Roberta(nn.Module):
    """Token ids (batch, tokens) to logits (batch, classes), read from the first token.

    The defaults are RoBERTa-base: 124,647,170 parameters, those of transformers' classifier with two labels.
    Every id is read as a token: there is no padding mask. ``block_size`` is the longest sequence it takes.
    Attention is matmul, softmax, dropout, matmul, so its scores are kept, as in "eager" attention.
    """

    def __init__(
        self,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocab: int = 50265,
        block_size: int = 512,
        classes: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.block_size = block_size
        self.embedding = Embedding(vocab, block_size, width, dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.head = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, classes),
        )
        self.apply(initialise)

    def forward(self, ids: Tensor) -> Tensor:
        check_length(ids, self.block_size)
        x = self.blocks(self.embedding(ids))
        return self.head(x[:, 0])


class Embedding(nn.Module):
    """Words, positions and the one segment that RoBERTa has, summed and normalised."""

    first_position = 2  # RoBERTa counts positions from its padding id + 1

    def __init__(self, vocab: int, block_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(self.first_position + block_size, width)
        self.segments = nn.Embedding(1, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device) + self.first_position
        x = self.words(ids) + self.segments(torch.zeros_like(ids)) + self.positions(positions)
        return self.drop(self.norm(x))


class Block(nn.Module):
    """Attention and MLP, each added to the stream and normalised after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


class Attention(nn.Module):
    """Self-attention over the whole sequence, one operation at a time; a mask is added to the scores."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.score_drop = nn.Dropout(dropout)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        depth = width // self.heads
        q, k, v = (
            linear(x).view(batch, length, self.heads, depth).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(depth)
        if mask is not None:
            scores = scores + mask
        weights = self.score_drop(scores.softmax(dim=-1))
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width)
        return self.drop(self.out(mixed))


def initialise(module: nn.Module) -> None:
    """Weights of one module as BERT and RoBERTa draw them."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
