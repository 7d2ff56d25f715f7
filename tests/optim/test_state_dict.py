"""What is saved and loaded: a resumed run goes on bit for bit."""

import io

import pytest
import torch

from tests.optim.training import BATCHES, OPTIMIZERS, WAYS, equal, make, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("AdamW", way) for way in WAYS),
        *(("SGD", way) for way in ("in backward", "stochastic", "kahan", "8bit gradients")),
        ("AdamW8bit", "plain"),
        ("AdamW8bit stochastic", "plain"),
        ("AdamW8bit stochastic", "in backward"),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(name, way, dtype):
    def start():
        model = make(dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        WAYS[way](optimizer)
        return model, optimizer

    model, optimizer = start()
    train(model, optimizer, BATCHES[:4])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, BATCHES[4:8])
    file.seek(0)
    saved = torch.load(file)
    model, optimizer = start()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert equal(train(model, optimizer, BATCHES[4:8]), expected)
