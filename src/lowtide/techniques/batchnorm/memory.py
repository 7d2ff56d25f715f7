"""The bytes of the step that a converted model is part of, predicted before and after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lowtide.errors import TraceError, WorkloadError
from lowtide.profiling import Profile, profile
from lowtide.sizes import format_size
from lowtide.workload import Workload


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a step saves for its backward pass, and its allocated peak, before and after a conversion.

    >>> print(Memory(3 * 2**20, 2**20, 8 * 2**20, 6 * 2**20))
    saved for backward  3.00 MiB before, 1.00 MiB after
    allocated peak      8.00 MiB before, 6.00 MiB after
    """

    saved_bytes_before: int
    saved_bytes_after: int
    peak_bytes_before: int
    peak_bytes_after: int

    @classmethod
    def of(cls, before: Profile, after: Profile) -> Memory:
        """The figures of two profiles of one step."""
        return cls(before.saved_bytes, after.saved_bytes, before.peak_bytes, after.peak_bytes)

    def __str__(self) -> str:
        rows = (
            ("saved for backward", self.saved_bytes_before, self.saved_bytes_after),
            ("allocated peak", self.peak_bytes_before, self.peak_bytes_after),
        )
        return "\n".join(f"{name:18}  {format_size(a)} before, {format_size(b)} after" for name, a, b in rows)


def predict(work: Workload, model: nn.Module) -> Profile:
    """The step that a model is part of, without running it."""
    if not any(part is model for part in work.model.modules()):
        raise WorkloadError(
            f"The model to be converted, a {type(model).__name__}, is not in the step, whose model is "
            f"a {type(work.model).__name__}",
            hint="Write convert(work.model, work=work).",
        )
    try:
        return profile(work, fake=True)
    except TraceError as error:
        raise TraceError(
            "The bytes of this step cannot be predicted: it does not run on fake tensors",
            hint="Leave out work=, and compare two profiles of real steps: lowtide.profile(work).",
        ) from error
