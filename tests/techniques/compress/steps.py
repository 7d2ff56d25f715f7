"""The step that tests of compressed activations share."""

import torch

from lowtide import Workload, zoo


def gpt2() -> Workload:
    torch.manual_seed(0)
    return zoo.workload("gpt2", layers=2, width=64, heads=2, vocab=64, batch=4, seq=32)
