"""What techniques share that act on gradients inside the backward pass: when each is complete."""

from __future__ import annotations

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
