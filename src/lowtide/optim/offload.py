"""Optimizer states on the host: fetched a parameter at a time, the next while this one is stepped."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lowtide.optim.hooks import StepPart, part_of, take_part
from lowtide.optim.one_parameter import SingleStep, refuse_joint_step
from lowtide.optim.state_dict import as_saved, keeps_parameter_dtype, load_exactly
from lowtide.undo import Undo

_Fetched = tuple[Tensor, dict[str, Tensor], Any]


def offload_state(optimizer: torch.optim.Optimizer) -> Undo:
    """Keep an optimizer's states in memory of the host; the step is the optimizer's own, on the device, bit for bit.

    On a GPU the memory is pinned, and copies run beside the steps on a stream of their own. The states of two
    parameters are on the device at a time. Scalars, such as step counts, stay where they are. ``state_dict()`` waits
    for the copies; to read ``optimizer.state`` itself after a step, synchronise first. A loaded state goes to the host
    without passing through the device.
    """
    refuse_joint_step(optimizer)
    part = _OffloadedStep(optimizer)
    undo = take_part(optimizer, part)
    undo.add(load_exactly(optimizer, part.receive))
    undo.add(optimizer.register_state_dict_pre_hook(part.wait).remove)
    for parameter, state in optimizer.state.items():
        part.offload(parameter, state, {})

    def restore() -> None:
        part.wait()
        undo()
        for parameter, state in optimizer.state.items():
            state.update({key: value.to(parameter.device) for key, value in _large(state).items()})

    return Undo(restore)


def is_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(part_of(optimizer), _OffloadedStep)


class _OffloadedStep(StepPart):
    """Steps every parameter with its state fetched before and offloaded after."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._streams: dict[torch.device, Any] = {}

    def __str__(self) -> str:
        return "states on the host"

    def run(self, single: SingleStep, parameters: list[Tensor]) -> None:
        states = single.optimizer.state
        coming = deque(parameters)
        ahead: deque[_Fetched] = deque()
        while coming or ahead:
            while coming and len(ahead) < 2:
                parameter = coming.popleft()
                ahead.append(self._fetch(parameter, states[parameter]))
            parameter, host, arrived = ahead.popleft()
            if arrived is not None:
                torch.cuda.current_stream(parameter.device).wait_event(arrived)
            single(parameter)
            self.offload(parameter, states[parameter], host)
        for device, stream in self._streams.items():  # the next step reads what these copies write
            torch.cuda.current_stream(device).wait_stream(stream)

    def wait(self, _: object = None) -> None:
        """Wait for pending copies to the host."""
        for stream in self._streams.values():
            stream.synchronize()

    def receive(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """Convert a saved state: on the host, in the dtypes in which the optimizer keeps states."""
        large = _large(state)
        received = as_saved(parameter, {key: value for key, value in state.items() if key not in large}, group)
        casts = keeps_parameter_dtype(self.single.optimizer) and parameter.is_floating_point()
        for key, value in large.items():
            dtype = parameter.dtype if casts and value.is_floating_point() else value.dtype
            received[key] = self._place(parameter, value, dtype).copy_(value)
        return {key: received[key] for key in state}

    def _fetch(self, parameter: Tensor, state: dict[str, Any]) -> _Fetched:
        """Start to copy a state to the device: the places on the host, and what to wait for."""
        host = _large(state)
        stream = self._stream(parameter)
        if stream is None:
            state.update({key: value.to(parameter.device) for key, value in host.items()})
            return parameter, host, None
        with torch.cuda.stream(stream):
            for key, value in host.items():
                state[key] = value.to(parameter.device, non_blocking=True)
                state[key].record_stream(torch.cuda.current_stream(parameter.device))
            arrived = torch.cuda.Event()
            arrived.record()
        return parameter, host, arrived

    def offload(self, parameter: Tensor, state: dict[str, Any], host: dict[str, Tensor]) -> None:
        """Offload a state to the host, into its place there if it has one."""
        if parameter.device.type == "cpu":
            return
        stream = self._stream(parameter)
        for key, value in _large(state).items():
            if value.device.type == "cpu":
                continue
            place = host.get(key)
            if place is None:
                place = self._place(parameter, value, value.dtype)
            if stream is None:
                place.copy_(value)
            else:
                stream.wait_stream(torch.cuda.current_stream(parameter.device))
                with torch.cuda.stream(stream):
                    place.copy_(value, non_blocking=True)
                value.record_stream(stream)
            state[key] = place

    def _place(self, parameter: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the host for a state."""
        return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=self._stream(parameter) is not None)

    def _stream(self, parameter: Tensor) -> Any:
        """Return the stream of copies; None where nothing runs on a GPU."""
        device = parameter.device
        if device.type != "cuda" or not torch.cuda.is_available() or type(parameter).__name__ == "FakeTensor":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _large(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0}
