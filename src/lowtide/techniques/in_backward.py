"""What techniques share that act on gradients inside the backward pass: when each is complete, and where it is not."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.errors import PlanError
from lowtide.tracing.graph import Graph


def completed_gradients(graph: Graph) -> dict[int, int]:
    """The storages of gradients, each with the op of the backward pass that completes it."""
    wanted = {storage.id for storage in graph.on_device if storage.category == "gradient"}
    complete = {id: graph.storages[id].birth for id in wanted}
    for op in graph.ops:
        if op.phase == "backward":
            for value in (*op.inputs, *op.outputs):
                if value.storage in wanted:
                    complete[value.storage] = max(complete[value.storage], op.index)
    return complete


def refuse_ddp(model: nn.Module) -> None:
    """Refuse a model that DDP wraps: it adds gradients up over processes only after the parameters' own hooks."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise PlanError(
                "DistributedDataParallel reduces a gradient after it would be used or packed in backward",
                where=name or type(module).__name__,
                hint="Use FSDP2 (fully_shard), which reduces before, or leave gradients until the step.",
            )
