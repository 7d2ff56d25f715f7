"""Run commands of the command line, and a module with a workload for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typer.testing import CliRunner

from lowtide.cli.commands import app

ROOT = Path(__file__).resolve().parents[2]


DEEP = """
import torch
from torch import nn
from lowtide import Workload

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x))

def loss(model, batch):
    return model(batch).square().mean()

def workload(depth: int = 4, batch: int = 512, optimizer: bool = True):
    torch.manual_seed(0)
    print("building")
    model = nn.Sequential(*(Block() for _ in range(depth)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer else None
    return Workload(model, loss, torch.randn(batch, 32), sgd)

def wrong():
    raise ValueError("first line\\nsecond line")
"""


def lowtide(*arguments: str, code: int = 0) -> Any:
    """Run a command; returns its output, with the exit code checked."""
    result = CliRunner().invoke(app, list(arguments))
    unexpected = result.exception if not isinstance(result.exception, SystemExit) else None
    assert unexpected is None, unexpected
    assert result.exit_code == code, result.output
    return SimpleNamespace(out=result.stdout, err=result.stderr, json=lambda: json.loads(result.stdout))
