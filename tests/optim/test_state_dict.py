"""State dicts of optimizers: a resumed run continues bit for bit."""

import pytest
import torch

from tests.optim.training import WAYS, resumes, started


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
    assert resumes(lambda: started(name, way, dtype=dtype))
