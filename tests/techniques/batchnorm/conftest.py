from __future__ import annotations

import gc

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True, scope="module")
def _no_layers_left():
    """While a layer lives there are global hooks on modules, of which ``torch.compile`` warns the tests that follow."""
    yield
    gc.collect()
    nn.Identity()(torch.zeros(1))  # the hooks go with the first forward that finds no layer
