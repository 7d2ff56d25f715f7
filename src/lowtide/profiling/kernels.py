"""Workspaces of kernels by op signature: measured here, looked up, or modelled.

A fake step runs nothing. Its kernels' own allocations come from the first of three places that knows them:

- measurements of this machine (``measure=True``), stored on disk;
- measurements that lowtide ships for the H200;
- a rule for the two kinds of kernels that matter, convolutions and recurrent layers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from lowtide.profiling.devices import find_device
from lowtide.profiling.profile import Source
from lowtide.profiling.timing import RunMeter
from lowtide.tracing.call_sites import short_name
from lowtide.tracing.graph import Graph, Op, Storage, TensorView
from lowtide.tracing.meter import CudaMeter, measure_cpu_call
from lowtide.tracing.op_calls import Call

_Measured = TypeVar("_Measured")

_SHIPPED = "h200.json"
_HOPPER = ("NVIDIA H200", "NVIDIA H100")  # one chip: their libraries choose alike
_CUBLAS_BYTES = 32 * 2**20  # per thread that multiplies matrices, on Hopper; torch's default


class Workspaces:
    """Bytes that kernels allocate inside themselves, by signature: as ``seen`` in a step, else as a table has them.

    Of several sizes that were seen, the largest counts: a budget is a promise.
    """

    def __init__(self, graph: Graph, *, seen: Iterable[tuple[str, int]] = (), from_table: bool = True) -> None:
        self._device, self._hardware = torch.device(graph.tensor_device), graph.device
        self._seen: dict[str, int] = {}
        for key, size in seen:
            self._seen[key] = max(size, self._seen.get(key, 0))
        self._table = known_kernels(graph.device) if from_table else {}

    def measure(self, calls: Mapping[str, Call]) -> None:
        """Run the calls alone, by signature, of which nothing is known yet."""
        fresh = {key: call for key, call in calls.items() if call.runs_alone and self.get(key) is None}
        if fresh:
            self._table = {**self._table, **measure(fresh, self._device, self._hardware)}

    def get(self, signature: str, *alike: str) -> int | None:
        """The bytes of a signature, else those seen under a similar key; None where nothing is known."""
        similar = (self._seen.get(key) for key in alike)
        sizes = (self._seen.get(signature), self._table.get(kernel_key(signature)), *similar)
        return next((size for size in sizes if size is not None), None)


def with_workspaces(graph: Graph, calls: Mapping[str, Call] | None = None) -> tuple[Graph, Source]:
    """A fake graph with its kernels' own allocations, and where they come from.

    ``calls`` are the calls to measure on this machine, by signature, where nothing is known of them yet.
    """
    known = Workspaces(graph)
    known.measure(calls or {})
    measured = [known.get(op.signature) for op in graph.ops]
    source: Source = "measured" if any(size is not None for size in measured) else "none"
    ops: list[Op] = []
    for op, size in zip(graph.ops, measured, strict=True):
        if size is None:
            size = 0 if graph.device == "cpu" else modelled_workspace(op)
            source = "modelled" if size else source
        ops.append(replace(op, workspace_bytes=size))
    graph = _with_library(replace(graph, ops=tuple(ops)))
    return graph, "modelled" if source == "none" and graph.device != "cpu" else source


def measure(calls: Mapping[str, Call], device: torch.device, hardware: str) -> dict[str, int]:
    """Run each call once, alone, and keep the bytes that it allocated above its outputs, by key.

    Ops that cannot run alone are left out. Sizes of lowtide's own ops, which its next version may change, are not
    stored on disk.
    """
    sizes = _alone(calls, device, _workspace_of)
    stored = {kernel_key(key): size for key, size in sizes.items() if calls[key].function.namespace != "lowtide"}
    _remember(find_device(hardware).name, stored)
    return {kernel_key(key): size for key, size in sizes.items()}


def seconds_alone(calls: Mapping[str, Call], device: torch.device) -> dict[str, float]:
    """Time each call alone, by its key in ``calls``. Ops that cannot run alone are left out."""
    return _alone(calls, device, _seconds_of)


def _alone(
    calls: Mapping[str, Call], device: torch.device, look: Callable[[Callable[[], object], torch.device], _Measured]
) -> dict[str, _Measured]:
    """Measure each call that runs, on random values. Generators are restored."""
    if not calls or (device.type == "cuda" and not torch.cuda.is_available()):
        return {}
    measured: dict[str, _Measured] = {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        for key, call in calls.items():
            with suppress(RuntimeError, TypeError, ValueError, IndexError):
                args, kwargs = call.tensors(device)
                measured[key] = look(partial(call.function, *args, **kwargs), device)
    return measured


def _workspace_of(run: Callable[[], object], device: torch.device) -> int:
    if device.type == "cpu":
        return measure_cpu_call(run)
    run()  # the first call may load the kernel and fill library caches
    before = torch.cuda.memory_allocated(device)
    with RunMeter(device) as meter:
        out = run()
    after = torch.cuda.memory_allocated(device)
    del out
    return meter.peak_bytes - max(before, after)


def _seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time the fastest of three calls, after one that may load the kernel. On a GPU without the host, as in a step."""
    calls = 4
    if device.type == "cuda":
        meter = CudaMeter(device)
        for _ in range(calls):
            with meter.op():
                run()
        torch.cuda.synchronize(device)
        return min(meter.readings(np.zeros(calls, np.int64), 0).seconds[1:])
    times: list[float] = []
    for _ in range(calls):
        with RunMeter(device) as timed:
            run()
        times.append(timed.seconds)
    return min(times)


def modelled_workspace(op: Op) -> int:
    """Bytes that an unmeasured kernel needs on a GPU.

    cuDNN's tensor-core convolutions work on channels-last data. Contiguous tensors are copied into that layout: the
    workspace holds the input, the weight and the output once more. Recurrent layers hold their weights twice more, and
    their sequences once.
    """
    name = short_name(op.name)
    if name == "convolution" and not _channels_last(op.inputs[0]):
        return sum(v.bytes for v in (*op.inputs[:2], op.outputs[0]))
    if name == "convolution_backward" and not _channels_last(op.inputs[1]):
        return sum(v.bytes for v in op.inputs[:3])
    if name in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return sum(v.bytes * (2 if len(v.shape) == 2 else 1) for v in op.inputs if len(v.shape) in (2, 3))
    return 0


def _with_library(graph: Graph) -> Graph:
    """CuBLAS keeps a workspace for each thread that uses it; the backward pass runs on its own thread."""
    if graph.tensor_device == "cpu":
        return graph
    products = {op.phase == "backward" for op in graph.ops if short_name(op.name).endswith("mm")}
    if not products:
        return graph
    label = "cuBLAS workspaces"
    size = _CUBLAS_BYTES * len(products)
    held = Storage(len(graph.storages), size, "cuda", "uint8", "workspace", 0, len(graph.ops), label, "", "")
    return replace(graph, storages=(*graph.storages, held))


# -- measurements --------------------------------------------------------------------------------------


def kernel_key(signature: str) -> str:
    """A short name for a signature."""
    return hashlib.sha256(signature.encode()).hexdigest()[:16]


def known_kernels(device: str) -> dict[str, int]:
    """Measurements for a device: those that lowtide ships and, over them, those made on this machine."""
    hardware = find_device(device).name
    return {**_shipped(hardware), **_read(_cache_file(hardware))}


def _shipped(hardware: str) -> dict[str, int]:
    file = resources.files("lowtide.profiling") / "data" / _SHIPPED
    if hardware not in _HOPPER or not file.is_file():
        return {}
    return _kernels(json.loads(file.read_text()))


def _read(path: Path) -> dict[str, int]:
    try:
        return _kernels(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # no cache, or one that something else wrote: measuring again mends it


def _kernels(data: dict[str, dict[str, int]]) -> dict[str, int]:
    return {key: int(size) for key, size in data["kernels"].items()}


def _remember(hardware: str, sizes: Mapping[str, int]) -> None:
    path = _cache_file(hardware)
    data = {"hardware": hardware, "kernels": {**_read(path), **sizes}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(data))
        draft.replace(path)
    except OSError:
        return  # a read-only home: the measurements serve this once


def _cache_file(hardware: str) -> Path:
    folder = os.environ.get("LOWTIDE_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "lowtide")
    version = str(torch.__version__).split("+")[0]
    if hardware == find_device("cpu").name:  # whose kernels have buffers for each thread, by their instructions
        hardware += f" {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    return Path(folder) / f"kernels-{hardware.lower().replace(' ', '-')}-torch-{version}.json"


def _channels_last(value: TensorView) -> bool:
    return len(value.stride) > 2 and value.stride[1] == 1 and value.shape[1] > 1
