"""Seconds where nothing ran: the larger of operations over rate and bytes over bandwidth."""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.profiling.devices import Device, find_device
from lowtide.tracing.call_sites import short_name
from lowtide.tracing.graph import Graph, Op


def model_seconds(graph: Graph) -> tuple[Op, ...]:
    """The ops with modelled seconds where none were measured."""
    device = find_device(graph.device)
    return tuple(replace(op, seconds=op_seconds(op, device)) if math.isnan(op.seconds) else op for op in graph.ops)


def op_seconds(op: Op, device: Device) -> float:
    """The roofline of one op on a device. Making a tensor without writing to it launches nothing."""
    if "empty" in op.name:
        return 0.0
    moved = sum(v.bytes for v in op.inputs) + sum(v.bytes for v in op.outputs)
    dtype = next((v.dtype for v in op.inputs if v.dtype in device.rates), "float32")
    return device.launch_seconds + max(moved / device.bandwidth, operations(op) / device.rates[dtype])


def operations(op: Op) -> float:
    """Floating-point operations of matrix products, convolutions and attention; 0 for the rest, which move bytes."""
    name = short_name(op.name)
    shapes = [v.shape for v in op.inputs[: -1 if op.name.endswith("out") else None]]  # which is written, not read
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = shapes[-2:]
        return 2.0 * math.prod(a) * b[-1]
    if name == "convolution":
        return 2.0 * math.prod(op.outputs[0].shape) * math.prod(shapes[1][1:])
    if name == "convolution_backward":
        grad, _, weight = shapes[:3]
        gradients = sum(len(v.shape) > 1 for v in op.outputs)  # of the input and the weight: a convolution each
        return 2.0 * math.prod(grad) * math.prod(weight[1:]) * gradients
    if "attention" in name or name.startswith(("_flash_attention", "_efficient_attention")):
        backward = "backward" in name
        query, key = (shapes[1], shapes[2]) if backward else (shapes[0], shapes[1])
        if len(query) == 4:
            return (10.0 if backward else 4.0) * math.prod(query) * key[-2]
    return 0.0
