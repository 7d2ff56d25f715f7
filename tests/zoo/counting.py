"""Models without memory, their parameters, and the tensors that a forward pass saves."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from lowtide import zoo
from lowtide.workload import Workload


def build(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return zoo.model(name, **options)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def saved_by_part(work: Workload) -> dict[str, list[Tensor]]:
    """Tensors that forward saves, one per storage, without parameters and buffers, by part of the model.

    A part is a module path of at most two names. Tensors of the loss belong to the last part that ran.
    """
    owned = {t.untyped_storage()._cdata for t in (*work.model.parameters(), *work.model.buffers())}
    saved: dict[str, list[Tensor]] = defaultdict(list)
    part = ""

    def pack(tensor: Tensor) -> Tensor:
        # The list below holds every tensor seen, so no storage dies and its address is not used again.
        if (storage := tensor.untyped_storage()._cdata) not in owned:
            owned.add(storage)
            saved[part].append(tensor)
        return tensor

    def entered(name: str):
        def hook(_module: nn.Module, _args: object) -> None:
            nonlocal part
            part = name

        return hook

    for name, module in work.model.named_modules():
        module.register_forward_pre_hook(entered(".".join(name.split(".")[:2])))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work.compute_loss()
    return saved


def total_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
