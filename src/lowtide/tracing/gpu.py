"""Predicting a GPU's step."""
from __future__ import annotations
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
import torch
@dataclass
class PredictedGpu:
    backward: Any = torch.autograd.backward
    @contextmanager
    def emulated(self):
        yield
def predicted_gpu(name): return PredictedGpu()
