"""Shared by tests of ``nn.compressed``: activations, and outer hooks that list the tensors they get."""

import torch


class Saved:
    def __init__(self):
        self.seen = []

    def __enter__(self):
        def pack(tensor):
            self.seen.append((tensor.dtype, tuple(tensor.shape)))
            return tensor.detach()

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self.hooks.__exit__(*exception)

    @property
    def codes(self):
        return [shape for dtype, shape in self.seen if dtype is torch.uint8]


def activation(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype, requires_grad=True) * 1
