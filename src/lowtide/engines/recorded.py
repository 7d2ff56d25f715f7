"""A program's passes as CUDA graphs: each is recorded once, then launched as a whole, without Python in between.

Kernels, addresses and order are those of the program, so results and random numbers are too. A recording's memory is a
pool of its own, which it holds between steps.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lowtide.compat.cuda import clear_matmul_workspaces
from lowtide.compat.dispatch import active_modes, without_autocast
from lowtide.compat.tensors import storage_holders, storage_id
from lowtide.engines.autograd import Runner, check_backward
from lowtide.planning.lowering import Lowered
from lowtide.planning.programs.program import Program
from lowtide.profiling.timing import has_ranks
from lowtide.tracing.capture.joint import Joint
from lowtide.workload import Workload

_SLACK = 1.02  # of a pool beside what it holds, from which others are tried
_BLOCKS = (1.0, 1.03, 1.06)  # that they start with, in shares of what they are to hold
_FEWEST_REPLAYS = 20  # between recordings: each takes as long as some steps


class GraphRecorder:
    """Records calls into CUDA graphs that share one pool of memory.

    The pool starts with one block of ``block_bytes``, which the allocator splits. Without it, the pool grows by blocks
    of the sizes that are asked for, which do not fit the next ones.
    """

    def __init__(self, block_bytes: int = 0) -> None:
        self._block_bytes = block_bytes
        self._pool = torch.cuda.graph_pool_handle()
        clear_matmul_workspaces()  # the graphs get one in their pool
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def sizes(self) -> tuple[int, int]:
        """The bytes of the pool, and the most that were allocated at a time.

        The counter of the peak starts anew, since what was allocated while recording is part of the pool.
        """
        segments = [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] == self._pool]
        peak = torch.cuda.max_memory_allocated() - self._before
        torch.cuda.reset_peak_memory_stats()
        return sum(each["total_size"] for each in segments), peak

    @staticmethod
    def takes(tensors: Sequence[Any]) -> bool:
        """Tell whether inputs can be recorded: a number, or a tensor on the host, would stay that of the recording."""
        return not has_ranks() and all(isinstance(each, Tensor) and each.is_cuda for each in tensors)

    def record(self, code: Callable[[list[Any]], Any], arguments: list[Any]) -> tuple[Callable[[], None], Any]:
        """Record a call, which may empty the list of its arguments. Returns what launches it, and its results.

        Nothing runs before the first launch.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            if self._block_bytes:
                torch.empty(self._block_bytes, dtype=torch.uint8, device="cuda")  # and freed at once
                self._block_bytes = 0
            results = code(arguments)
        return graph.replay, results

    @staticmethod
    def free() -> None:
        """Give back the memory of graphs that are gone."""
        clear_matmul_workspaces()  # those that were made while recording lie in its pool
        torch.cuda.empty_cache()


class Recorded:
    """The recorded runners of a planned step: those of the planned batch, which ``key`` names."""

    def __init__(self, work: Workload, key: Any) -> None:
        self.key = key
        self._model = weakref.ref(work.model)
        self._runners: weakref.WeakSet[RecordedRunner] = weakref.WeakSet()

    def runner(self, joint: Joint, program: Program, lowered: Lowered, mutated: Sequence[int]) -> RecordedRunner:
        """A runner that is recorded."""
        runner = RecordedRunner(joint, program, lowered, mutated, self._lasting)
        self._runners.add(runner)
        return runner

    def pause(self) -> None:
        """Free the recordings' memory, since something else is about to run."""
        for each in self._runners:
            each.pause()

    def _lasting(self) -> set[int]:
        """Addresses of the model's tensors, which stay where they are between steps."""
        model = self._model()
        return set() if model is None else {each.data_ptr() for each in (*model.parameters(), *model.buffers())}


class RecordedRunner(Runner):
    """Runs the first step as it is, records the second one, and launches the recording from then on.

    Steps run as they are where launching would overwrite values or gradients that somebody still holds. ``lasting``
    gives the addresses of tensors that stay where they are between steps; other inputs are copied to the recording's.
    """

    recorder: type[GraphRecorder] = GraphRecorder

    def __init__(
        self, joint: Joint, program: Program, lowered: Lowered, mutated: Sequence[int], lasting: Callable[[], set[int]]
    ) -> None:
        super().__init__(joint, program, lowered, mutated)
        self._lasting = lasting
        self._recording: _RecordedPasses | None = None
        self._is_warm = self._is_stopped = False
        self._block_bytes: int | None = None  # that the recording's pool starts with
        self.replays = _FEWEST_REPLAYS  # of the last recording

    def __call__(self, *inputs: Any) -> tuple[Tensor]:
        recording = self._ready(inputs)
        if recording is None:
            return super().__call__(*inputs)
        self.replays += 1
        return (recording.forward(inputs),)

    def pause(self) -> None:
        """Free the recording and its memory. The next step records anew, unless that is due too often."""
        if self._recording is not None:
            self._free()
            self._is_stopped = self.replays < _FEWEST_REPLAYS

    def _ready(self, inputs: Sequence[Any]) -> _RecordedPasses | None:
        """The recording, if it can be launched now."""
        if self._is_stopped or active_modes():
            return None
        if not self._is_warm:  # kernels are chosen and built in the first step
            self._is_warm = True
            return None
        if self._recording is not None:  # no name here holds it, so that it can be freed
            if self._recording.is_open:
                return None  # an earlier loss, whose backward pass may still come
            if not self._recording.free_gradients(inputs):
                self._stop("Gradients of an earlier step are still in use")
            elif self._recording.has_moved(inputs):
                self.pause()
        if self._recording is None and not self._is_stopped:
            self._record(inputs)
        return self._recording

    def _record(self, inputs: Sequence[Any]) -> None:
        if not self.recorder.takes(inputs):
            self._stop("It has inputs on the host, or other processes take part")
            return
        try:
            self._record_smallest(inputs)
            self.replays = 0
        except RuntimeError as error:
            self._stop(next(iter(str(error).splitlines()), type(error).__name__))

    def _record_smallest(self, inputs: Sequence[Any]) -> None:
        """Record both passes, with the first block that makes their pool the smallest."""
        if self._block_bytes is not None:
            self._record_once(inputs, self._block_bytes)
            return
        held, peak = self._record_once(inputs, 0)
        tried = {0: held}
        for share in _BLOCKS if held > peak * _SLACK else ():
            block = int(peak * share)
            tried[block], _ = self._record_once(inputs, block)
        self._block_bytes = min(tried, key=lambda block: tried[block])
        if self._block_bytes != list(tried)[-1]:
            self._record_once(inputs, self._block_bytes)

    def _record_once(self, inputs: Sequence[Any], block_bytes: int) -> tuple[int, int]:
        """Record both passes. Returns the bytes of their pool, and the most that were allocated in it at a time."""
        self._free()
        recorder = self.recorder(block_bytes)
        with torch.no_grad(), without_autocast():
            self._recording = _RecordedPasses(self, inputs, self._lasting(), recorder)
        return recorder.sizes()

    def _free(self) -> None:
        self._recording = None
        self.recorder.free()

    def _stop(self, why: str) -> None:
        self._free()
        self._is_stopped = True
        warnings.warn(
            f"The step is no longer launched as CUDA graphs, so it may be slower: {why}", RuntimeWarning, stacklevel=2
        )


class _RecordedPasses:
    """Both passes of a step, recorded over the same memory."""

    def __init__(self, runner: Runner, inputs: Sequence[Tensor], lasting: set[int], recorder: GraphRecorder) -> None:
        self._written = runner.written
        stays = {place for place, each in enumerate(inputs) if each.data_ptr() in lasting}
        self._fixed = sorted(stays.union(self._written))
        self._addresses = [inputs[place].data_ptr() for place in self._fixed]
        copied = set(range(len(inputs))).difference(self._fixed)
        self._copies = [(place, inputs[place].clone()) for place in copied]
        own = list(inputs)
        for place, copy in self._copies:
            own[place] = copy
        self._launch_forward, (self._loss, cells) = recorder.record(runner.run_forward, list(own))
        self._tangent = torch.empty_like(self._loss)
        names, values = list(cells), list(cells.values())
        del cells

        def backward(values: list[Any]) -> list[tuple[int, Tensor | None]]:
            cells = dict(zip(names, values, strict=True))
            values.clear()
            return list(runner.run_backward(own, cells, self._tangent))

        self._launch_backward, gradients = recorder.record(backward, values)
        self.read = sorted({place for piece in runner.pieces for place in (*piece.inputs_read, *piece.inputs_seen)})
        self.places = [place for place, _ in gradients]
        self._gradients: list[Tensor | None] = [gradient for _, gradient in gradients]
        # Autograd would make one tensor the gradient of two parameters, which optimizers then write to.
        memory = Counter(storage_id(each.untyped_storage()) for each in self._gradients if each is not None)
        memory.update(storage_id(each.untyped_storage()) for each in (*own, self._tangent))
        self._own = [each is not None and memory[storage_id(each.untyped_storage())] == 1 for each in self._gradients]
        self._holders = [0 if each is None else storage_holders(each) for each in self._gradients]
        self._flight: weakref.ref[_Flight] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a loss whose backward pass has not run, and whose saved values would be overwritten."""
        flight = None if self._flight is None else self._flight()
        return flight is not None and not flight.is_done

    def has_moved(self, inputs: Sequence[Tensor]) -> bool:
        """Tell whether a tensor that was recorded in its place is at another one."""
        return [inputs[place].data_ptr() for place in self._fixed] != self._addresses

    def free_gradients(self, inputs: Sequence[Tensor]) -> bool:
        """Copy gradients that accumulate out of the recording's memory; False if something else holds one."""
        for place, gradient, holders in zip(self.places, self._gradients, self._holders, strict=True):
            if gradient is None or (more := storage_holders(gradient) - holders) <= 0:
                continue
            held = inputs[place].grad if inputs[place].is_leaf else None
            if more > 1 or held is None or held.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr():
                return False
            held.data = held.detach().clone()
        return True

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Launch the forward pass. Returns the loss, whose backward pass launches the other."""
        with torch.no_grad():
            for place, copy in self._copies:
                copy.copy_(inputs[place])
            self._launch_forward()
            if self._written:
                increment_version([inputs[place] for place in self._written])
            flight = _Flight(self, self._loss.clone())
        self._flight = weakref.ref(flight)
        read, trained = [inputs[place] for place in self.read], [inputs[place] for place in self.places]
        return _RecordedNode.apply(flight, read, *trained)

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Launch the backward pass. Gradients are the recording's own tensors: see ``free_gradients``."""
        self._tangent.copy_(gradient)
        self._launch_backward()
        return [
            None if each is None else each.detach() if is_own else each.clone()
            for each, is_own in zip(self._gradients, self._own, strict=True)
        ]


class _Flight:
    """A forward pass that was launched, and whether its backward pass was."""

    def __init__(self, recording: _RecordedPasses, loss: Tensor) -> None:
        self.recording, self.loss, self.is_done = recording, loss, False


class _RecordedNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, read: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(*read)  # autograd then says if one was written to since
        loss = flight.loss
        del flight.loss
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flight: _Flight = ctx.flight
        check_backward(flight.is_done)
        _ = ctx.saved_tensors
        flight.is_done = True
        recording = flight.recording
        del flight.recording  # a loss that is held does not hold it
        return None, None, *recording.backward(gradients[0])
