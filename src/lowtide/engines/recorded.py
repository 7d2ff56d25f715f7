"""A program's passes as CUDA graphs: each is recorded once, then launched as a whole, without Python in between.

Kernels, addresses and order are those of the program, so results and random numbers are too. A recording's memory is a
pool of its own, which it holds between steps.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lowtide.compat.dispatch import active_modes, without_autocast
from lowtide.compat.tensors import storage_holders, storage_id
from lowtide.engines.autograd import Runner, check_backward
from lowtide.engines.cuda_graphs import GraphRecorder
from lowtide.planning.lowering import Lowered
from lowtide.planning.programs.program import Kind, Program, simulate
from lowtide.profiling.timing import has_ranks
from lowtide.tracing.capture.host import needs_host
from lowtide.tracing.capture.joint import Joint
from lowtide.workload import Workload

NOT_LAUNCHED = "The step is no longer launched as CUDA graphs"  # how a warning begins
_SLACK = 1.02  # of a pool beside what it holds, from which others are tried
_BLOCKS = (1.0, 1.03, 1.06, 0.0)  # that they start with, in shares of what they are to hold
_FEWEST_LAUNCHES = 20  # of a recording: each takes as long as some steps
_MOST_SHORT = 2  # recordings in a row with fewer
_MOST_OPEN = 8  # steps in a row that run as they are, since an earlier loss waits for its backward pass
_KINDS = (Kind.COMPUTE, Kind.RECOMPUTE, Kind.FREE, Kind.RETURN_GRAD)  # without copies to the host


class RecordedRunners:
    """The recorded runners of a planned step: those of the planned batch, which ``key`` names. One has a recording."""

    def __init__(self, work: Workload, key: Any) -> None:
        self.key = key
        self._model = weakref.ref(work.model)
        self._runners: weakref.WeakSet[RecordedRunner] = weakref.WeakSet()

    def runner(self, joint: Joint, program: Program, lowered: Lowered, mutated: Sequence[int]) -> RecordedRunner:
        """A runner that is recorded."""
        runner = RecordedRunner(joint, program, lowered, mutated, self)
        self._runners.add(runner)
        return runner

    def pause(self, besides: RecordedRunner | None = None) -> None:
        """Free the recordings' memory, since something else is about to run."""
        for each in self._runners:
            if each is not besides:
                each.pause()

    def release(self) -> None:
        """Free the recordings, and record nothing more."""
        for each in self._runners:
            each.release()

    def lasting(self) -> set[int]:
        """Addresses of the model's tensors, which stay where they are between steps."""
        model = self._model()
        return set() if model is None else {each.data_ptr() for each in (*model.parameters(), *model.buffers())}


class RecordedRunner(Runner):
    """Runs the first step as it is, records the second one, and launches the recording from then on.

    Steps run as they are where launching would overwrite values or gradients that somebody still holds. Inputs are
    copied to the recording's own, but for tensors that stay where they are between steps.
    """

    recorder: type[GraphRecorder] = GraphRecorder

    def __init__(
        self, joint: Joint, program: Program, lowered: Lowered, mutated: Sequence[int], together: RecordedRunners
    ) -> None:
        super().__init__(joint, program, lowered, mutated)
        self._together = together
        self._recording: _RecordedPasses | None = None
        self._is_warm = False
        self._program_bytes = simulate(program).peak_bytes
        self._block_bytes: int | None = None  # that the recording's pool starts with: the best of those tried
        self._launches = self._short = self._waits = 0
        self._is_stopped = False
        self._obstacle = ""  # why nothing is recorded
        if has_ranks():
            self._obstacle = "other processes take part"
        elif any(each.kind not in _KINDS or each.value.is_state for each in (*program.forward, *program.backward)):
            self._obstacle = "it copies values to the host, or draws random numbers again"
        elif needs_host(joint.module.graph, self.recorder.device_type):
            self._obstacle = "it computes on the host"

    def __call__(self, *inputs: Any) -> tuple[Tensor]:
        self._together.pause(besides=self)
        if not self._is_ready(inputs) or self._recording is None:
            return super().__call__(*inputs)
        self._launches += 1
        return (self._recording.forward(inputs),)

    def finished(self) -> None:
        self._is_warm = True  # kernels were chosen and built

    def pause(self) -> None:
        """Free the recording and its memory. The next step records anew, unless that was due too often."""
        if self._recording is None:
            return
        self._free()
        self._short = self._short + 1 if self._launches < _FEWEST_LAUNCHES else 0
        if self._short >= _MOST_SHORT:
            self._stop("something else ran the model, or its parameters moved, twice within a few steps")

    def release(self) -> None:
        """Free the recording, and record nothing more."""
        self._free()
        self._is_stopped = True

    def _is_ready(self, inputs: Sequence[Any]) -> bool:
        """Tell whether there is a recording that can be launched now, and make one if it is due."""
        if self._is_stopped or active_modes() or not self._is_warm:
            return False
        if self._obstacle:
            self._stop(self._obstacle)
        elif self.recorder.is_recording():  # the user's own graph
            return False
        elif self._recording is not None and self._recording.is_open:
            self._waits += 1
            if self._waits >= _MOST_OPEN:
                self._stop("an earlier loss is kept, and its backward pass does not run")
            return False
        elif self._recording is not None and not self._recording.free_gradients(inputs):
            self._stop("gradients of an earlier step are still in use")
        elif self._recording is not None and self._recording.has_moved(inputs):
            self.pause()
        self._waits = 0
        if self._recording is None and not self._is_stopped:
            self._record(inputs)
        return self._recording is not None

    def _record(self, inputs: Sequence[Any]) -> None:
        obstacle = ""
        if len({each.device if isinstance(each, Tensor) else None for each in inputs}) > 1:
            obstacle = "its inputs are on several devices"
        else:
            try:
                self._record_smallest(inputs)
            except Exception as error:
                obstacle = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        if obstacle:  # the error is gone by now, and with it what it held
            self._stop(obstacle)
        self._launches = 0

    def _record_smallest(self, inputs: Sequence[Any]) -> None:
        """Record both passes, with the first block that makes their pool the smallest."""
        if self._block_bytes is not None:
            self._record_once(inputs, self._block_bytes)
            return
        held, peak = self._record_once(inputs, self._program_bytes)
        tried = {self._program_bytes: held}
        for share in _BLOCKS:
            if min(tried.values()) <= peak * _SLACK:
                break
            with suppress(torch.OutOfMemoryError):  # where a larger pool does not fit, a smaller one may
                tried[int(peak * share)], _ = self._record_once(inputs, int(peak * share))
        self._block_bytes = min(tried, key=lambda block: tried[block])
        if self._recording is None or self._block_bytes != list(tried)[-1]:
            self._record_once(inputs, self._block_bytes)

    def _record_once(self, inputs: Sequence[Any], block_bytes: int) -> tuple[int, int]:
        """Record both passes. Returns the bytes of their pool, and the most that were allocated in it at a time."""
        self._free()
        with torch.no_grad(), without_autocast():
            own = _OwnInputs(inputs, self.written, self._together.lasting())
            recorder = self.recorder(inputs[0].device, block_bytes)
            self._recording = _RecordedPasses(self, own, recorder)
        return recorder.finish()

    def _free(self) -> None:
        restore = None if self._recording is None else self._recording.set_gradients_aside()
        self._recording = None
        self.recorder.free()
        if restore is not None:
            restore()

    def _stop(self, why: str) -> None:
        self.release()
        warnings.warn(f"{NOT_LAUNCHED}, so it may be slower: {why}", RuntimeWarning, stacklevel=2)


class _OwnInputs:
    """The inputs of a recording: tensors that stay where they are, or that it writes to, and copies of others."""

    def __init__(self, inputs: Sequence[Tensor], written: Sequence[int], lasting: set[int]) -> None:
        stays = {place for place, each in enumerate(inputs) if each.data_ptr() in lasting}
        self._stay = sorted(stays.union(written))
        self._addresses = [inputs[place].data_ptr() for place in self._stay]
        self._copies: list[tuple[int, Tensor]] = []
        self.tensors = list(inputs)  # until both passes are recorded
        for place in set(range(len(inputs))).difference(self._stay):
            given = inputs[place]
            span = _span(given)
            self._copies.append((place, torch.empty_like(span)))
            self.tensors[place] = self._copies[-1][1].as_strided(given.shape, given.stride())
        self.take(inputs)

    def have_moved(self, inputs: Sequence[Tensor]) -> bool:
        """Tell whether a tensor that is read in its place is at another one."""
        return [inputs[place].data_ptr() for place in self._stay] != self._addresses

    def take(self, inputs: Sequence[Tensor]) -> None:
        """Copy the values of those that do not stay."""
        for place, copy in self._copies:
            copy.copy_(_span(inputs[place]))


def _span(tensor: Tensor) -> Tensor:
    """The memory that a tensor covers, as one dimension: code relies on strides, which other copies lose."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0,), (1,))


class _RecordedPasses:
    """Both passes of a step, recorded over the same memory."""

    def __init__(self, runner: Runner, inputs: _OwnInputs, recorder: GraphRecorder) -> None:
        self._inputs, self._written = inputs, runner.written
        own, inputs.tensors = inputs.tensors, []
        self._launch_forward, (self._loss, cells) = recorder.record(runner.run_forward, list(own))
        self._tangent = torch.empty_like(self._loss)
        names, values = list(cells), list(cells.values())
        del cells

        def backward(values: list[Any]) -> list[tuple[int, Tensor | None]]:
            cells = dict(zip(names, values, strict=True))
            values.clear()
            return list(runner.run_backward(own, cells, self._tangent))

        self._launch_backward, gradients = recorder.record(backward, values)
        self._read = sorted({place for piece in runner.pieces for place in (*piece.inputs_read, *piece.inputs_seen)})
        self._places = [place for place, _ in gradients]
        self._gradients: list[Tensor | None] = [gradient for _, gradient in gradients]
        # Autograd would make one memory the gradient of two parameters, which optimizers then write to.
        ids = [None if each is None else storage_id(each.untyped_storage()) for each in self._gradients]
        memory = Counter([*ids, *(storage_id(each.untyped_storage()) for each in (*own, self._tangent))])
        self._is_alone = [memory[each] == 1 for each in ids]
        self._holders = [0 if each is None else storage_holders(each) for each in self._gradients]
        self._open: weakref.ref[_LaunchedPass] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a loss whose backward pass has not run, and whose saved values would be overwritten."""
        launch = None if self._open is None else self._open()
        return launch is not None and not launch.is_done

    def has_moved(self, inputs: Sequence[Tensor]) -> bool:
        """Tell whether a tensor that was recorded in its place is at another one."""
        return self._inputs.have_moved(inputs)

    def free_gradients(self, inputs: Sequence[Tensor]) -> bool:
        """Copy gradients that accumulate out of the recording's memory; False if something else holds one."""
        for place, gradient, more in self._held():
            held = inputs[place].grad if inputs[place].is_leaf else None
            if more > 1 or held is None or storage_id(held.untyped_storage()) != storage_id(gradient.untyped_storage()):
                return False
            held.data = held.detach().clone()
        return True

    def set_gradients_aside(self) -> Callable[[], None]:
        """Copy gradients that somebody holds to the host. Returns what gives them memory of their own, with its values.

        All who hold one share its storage. In between, it has no memory, so that the pool can be freed.
        """
        aside: list[tuple[torch.UntypedStorage, Tensor]] = []
        for _, gradient, _ in self._held():
            storage = gradient.untyped_storage()
            aside.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            storage.resize_(0)

        def restore() -> None:
            for storage, values in aside:
                storage.resize_(values.numel())
                _bytes_of(storage).copy_(values)

        return restore

    def _held(self) -> Iterable[tuple[int, Tensor, int]]:
        """Gradients that others hold: of which input, and by how many."""
        for place, gradient, holders in zip(self._places, self._gradients, self._holders, strict=True):
            if gradient is not None and (more := storage_holders(gradient) - holders) > 0:
                yield place, gradient, more

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Launch the forward pass. Returns the loss, whose backward pass launches the other."""
        read, trained = [inputs[place] for place in self._read], [inputs[place] for place in self._places]
        with torch.no_grad():
            self._inputs.take(inputs)
            self._launch_forward()
            if self._written:
                increment_version([inputs[place] for place in self._written])
            launch = _LaunchedPass(self, self._loss.clone(), [each.data_ptr() for each in read])
        self._open = weakref.ref(launch)
        return _RecordedNode.apply(launch, read, *trained)

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Launch the backward pass. Gradients are the recording's own tensors: see ``free_gradients``."""
        self._tangent.copy_(gradient)
        self._launch_backward()
        return [
            None if each is None else each.detach() if is_alone else each.clone()
            for each, is_alone in zip(self._gradients, self._is_alone, strict=True)
        ]


class _LaunchedPass:
    """A forward pass that was launched, and whether its backward pass was."""

    def __init__(self, recording: _RecordedPasses, loss: Tensor, addresses: list[int]) -> None:
        self.recording, self.loss, self.addresses = recording, loss, addresses
        self.is_done = False


class _RecordedNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: _LaunchedPass, read: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.launch = launch
        ctx.save_for_backward(*read)  # autograd then says if one was written to since
        loss = launch.loss
        del launch.loss
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        launch: _LaunchedPass = ctx.launch
        check_backward(launch.is_done)
        if [each.data_ptr() for each in ctx.saved_tensors] != launch.addresses:
            raise RuntimeError(
                "one of the variables needed for gradient computation is at another address than in the forward pass"
            )
        launch.is_done = True
        recording = launch.recording
        del launch.recording  # a loss that is held does not hold it
        return None, None, *recording.backward(gradients[0])


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
