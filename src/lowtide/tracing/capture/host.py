"""Whether a captured step needs the host for more than constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy.default, torch.ops.aten.copy_.default)


def needs_host(graph: fx.Graph, device_type: str) -> bool:
    """Tell whether a step reads, draws or copies values on the host: a CUDA graph would repeat the recorded ones.

    Numbers that are constants may be there, and what is computed of constants alone.
    """

    def on_host(node: fx.Node) -> list[Tensor]:
        return [each for each in _tensors(node.meta.get("val")) if each.device.type != device_type]

    for node in graph.nodes:
        given = [each for source in node.all_input_nodes for each in on_host(source)]
        if on_host(node):
            from_device = any(_tensors(each.meta.get("val")) and not on_host(each) for each in node.all_input_nodes)
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if node.op == "placeholder" or from_device or draws:
                return True
        elif any(each.dim() for each in given) or (given and node.target in _COPIES):
            return True  # a number alone is an argument of a kernel
    return False


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value that may be a list of some."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, Tensor)]
