"""An LSTM language model (Zaremba et al., 2014)."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """Token ids (batch, tokens) to logits (batch, tokens, vocab), from a zero state each time.

    The defaults are the paper's medium model for Penn Treebank: 19,780,400 parameters, head not tied to the
    embedding. ``tied=True`` shares the weight: 13,280,400.
    """

    def __init__(
        self,
        *,
        layers: int = 2,
        width: int = 650,
        vocab: int = 10_000,
        dropout: float = 0.5,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.drop = nn.Dropout(dropout)
        # nn.LSTM drops out between its layers only: with one layer it warns.
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.head = nn.Linear(width, vocab)
        if tied:
            self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.05, 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.drop(self.tokens(ids)))
        return self.head(self.drop(x))
