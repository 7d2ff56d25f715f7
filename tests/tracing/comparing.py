"""Everything that a trace promises to leave alone, as comparable values."""

import random

import numpy as np
import torch

from lowtide.tracing import trace


def snapshot(work):
    """Values, gradients, buffers, optimizer state, generators; and the objects that hold them."""
    optimizer = work.optimizer
    return {
        "values": {name: (id(t), t._version, t.clone()) for name, t in work.model.state_dict(keep_vars=True).items()},
        "gradients": {
            name: (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in work.model.named_parameters()
        },
        "attributes": {
            name: {key: id(value) for key, value in module.__dict__.items()}
            for name, module in work.model.named_modules()
        },
        "state": None if optimizer is None else _copy(optimizer.state_dict()),
        "generators": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "batch": [t.clone() for t in work.tensors()],
    }


def assert_same(before, after, path=""):
    """Bit for bit."""
    assert type(before) is type(after), path
    if isinstance(before, torch.Tensor):
        assert torch.equal(before, after), path
    elif isinstance(before, dict):
        assert before.keys() == after.keys(), path
        for key in before:
            assert_same(before[key], after[key], f"{path}/{key}")
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(after), path
        for index, (left, right) in enumerate(zip(before, after, strict=True)):
            assert_same(left, right, f"{path}/{index}")
    else:
        assert before == after, path


def _copy(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def view(graph, arguments=True):
    """All that a trace says but for what is measured, and for the strides of single elements, which mean nothing."""
    return (
        [
            (
                op.name, op.phase, op.module, op.arguments if arguments else "", op.recompute,
                [(v.storage, v.dtype, strides(v)) for v in (*op.inputs, *op.outputs)],
            )
            for op in graph.ops
        ],
        [
            (s.bytes, s.device, s.dtype, s.category, s.birth, s.death, s.label, s.module)
            for s in graph.storages
            if s.category != "workspace"
        ],
        graph.saved,
        graph.storage_peak_bytes,
    )  # fmt: skip


def strides(tensor):
    return [(size, stride if size > 1 else 0) for size, stride in zip(tensor.shape, tensor.stride, strict=True)]


def assert_fake_is_real(work, **options):
    real, fake = (view(trace(work, fake=fake), **options) for fake in (False, True))
    assert real == fake
