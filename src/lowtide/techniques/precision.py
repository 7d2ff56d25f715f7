"""Lower precision, as a technique: autocast to 16 bits, with loss scaling for float16; weights in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.compat.tensors import version_of
from lowtide.errors import PlanError
from lowtide.optim.rounding import ROUNDINGS, How, round_updates
from lowtide.optim.scaling import LossScale
from lowtide.profiling.profile import Profile
from lowtide.techniques.microbatch.loss import in_pieces
from lowtide.techniques.technique import (
    Check,
    Config,
    Fidelity,
    Interval,
    Kind,
    Option,
    Price,
    Technique,
    loss_for_peaks,
    whole_step,
)
from lowtide.tracing.compiled import is_compiled
from lowtide.tracing.graph import Graph
from lowtide.undo import Applied, Undo
from lowtide.workload import Workload, autocast

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MATRIX_OPS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product")  # run in 16 bits by autocast


@dataclass(frozen=True)
class PrecisionConfig(Config):
    """The dtype of autocast; with ``weights`` parameters are bfloat16 too, and steps are rounded as ``rounding`` says.

    bfloat16 weights have no float32 copy. Biases and norms, which are small, stay in float32.
    """

    autocast: str
    weights: bool = False
    rounding: How | Literal[""] = ""  # "" where weights stay; stochastic where they do not

    def __post_init__(self) -> None:
        self.require_one_of("autocast", _DTYPES)
        self.require("weights", bool)
        self.require_one_of("rounding", ("", *ROUNDINGS))


class Precision(Technique):
    """The step in 16 bits.

    float16 gradients are scaled on their way and right where they arrive (``lowtide.optim.LossScale``).
    """

    name = "precision"
    kind: Kind = "step"
    config: type[Config] = PrecisionConfig
    needs = "matrix products or convolutions in float32"

    def options(self, profile: Profile) -> list[Option]:
        """Autocast to both dtypes, and weights in bfloat16 rounded in both ways."""
        if not any(True for _ in _halved(profile.graph)):
            return []
        configs = [PrecisionConfig(dtype) for dtype in _DTYPES]
        configs += [PrecisionConfig("bfloat16", weights=True, rounding=how) for how in ROUNDINGS]
        return [Option(self.name, ("",), config) for config in configs]

    def price(self, option: Option, profile: Profile) -> Price:
        """Halve what products save; with ``weights`` halve parameters and gradients, else add 16-bit copies."""
        graph, end, has_weights = profile.graph, len(profile.graph.ops), option.config_as(PrecisionConfig).weights
        removed = list(_halved(graph))
        added: list[Interval] = []
        backward = graph.phase_starts().get("backward", end)
        for storage in graph.on_device:
            if storage.dtype != "float32" or storage.category not in ("parameter", "gradient"):
                continue
            half = Interval(storage.bytes // 2, storage.birth, storage.death, f"{storage.label} in 16 bits")
            if has_weights:
                removed.append(half)
            elif storage.category == "parameter":
                added.append(replace(half, death=max(backward, 1), why=f"a 16-bit copy of {storage.label}"))
        return Price(Fidelity.CHANGED, added=tuple(added), removed=tuple(removed))

    def inside(self, work: Workload, option: Option) -> Workload:
        """The loss under autocast. Scales of gradients and lower weights stay outside."""
        return replace(work, autocast=_DTYPES[option.config_as(PrecisionConfig).autocast])

    def around(self, option: Option, profile: Profile) -> Price:
        """Nothing: the step inside has the lower weights and copies already."""
        return Price(Fidelity.CHANGED)

    def apply(self, work: Workload, options: Sequence[Option]) -> Applied:
        """Another autocast; for float16 another loss, for weights the model and the optimizer in place."""
        config = whole_step(options).config_as(PrecisionConfig)
        dtype = _DTYPES[config.autocast]
        if isinstance(work.loss, LowerLoss):
            raise PlanError("The step already runs in lower precision", hint="Call undo() of the first one.")
        with Undo() as undo:
            scale = None
            if dtype is torch.float16:
                scale = LossScale()
                undo.add(scale.remove)
                if work.optimizer is not None:
                    undo.add(scale.guard(work.optimizer))
            if config.weights:
                if work.optimizer is not None:  # first, so that it is undone last: states then follow the weights
                    undo.add(round_updates(work.optimizer, config.rounding or "stochastic"))
                undo.add(lower_weights(work.model))
            loss = LowerLoss(work.loss, work.device.type, dtype, scale)
            return Applied(replace(work, loss=loss, autocast=dtype), undo.keep())

    def check(self, option: Option) -> Check:
        """Other numbers; with ``weights`` the state dict has other dtypes."""
        return Check(Fidelity.CHANGED, same_state_dict=not option.config_as(PrecisionConfig).weights)


class LowerLoss:
    """A loss that runs in lower precision, its gradients scaled on their way where that is float16."""

    def __init__(
        self, loss: Callable[[nn.Module, Any], Tensor], device: str, dtype: torch.dtype, scale: LossScale | None
    ) -> None:
        self.__wrapped__ = loss
        self.device = device
        self.dtype = dtype
        self.scale = scale

    def for_peaks(self) -> LowerLoss:
        """The same around the wrapped loss's own."""
        return LowerLoss(loss_for_peaks(self.__wrapped__), self.device, self.dtype, self.scale)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        pieces = in_pieces(self.__wrapped__)
        if self.scale is not None and pieces is not None:  # they have gradients before the whole's scale comes back
            pieces.scale = torch.tensor(self.scale.value)
        # Here too: whoever calls the loss alone has bfloat16 weights as well. A planned loss has its own autocast.
        with autocast(self.device, None if is_compiled(self.__wrapped__) else self.dtype):
            loss = self.__wrapped__(model, batch)
        return self.scale.scale(loss, model) if self.scale is not None and loss.requires_grad else loss


def lower_weights(model: nn.Module) -> Undo:
    """Make float32 matrices and kernels bfloat16 in place; vectors, such as biases and norms, stay. Run it in autocast.

    Parameters stay the objects that optimizers hold. The undo makes them float32 again. Values that were not trained in
    between are what they were, bit for bit: a copy stays on the host for that.
    """
    lowered = [p for p in dict.fromkeys(model.parameters()) if p.dtype == torch.float32 and p.ndim > 1]
    before = {p: p.detach().to("cpu", copy=True) for p in lowered}
    gradients = {p: p.grad for p in lowered}
    for parameter in lowered:
        _cast(parameter, torch.bfloat16)
    now = {p: (p.grad, 0 if p.grad is None else version_of(p.grad)) for p in lowered}

    def restore() -> None:
        for parameter, original in before.items():
            original = original.to(parameter.device)
            untouched = parameter.detach() == original.bfloat16()
            gradient, version = now[parameter]
            is_same = parameter.grad is gradient and (gradient is None or version_of(gradient) == version)
            _cast(parameter, torch.float32)
            with torch.no_grad():
                parameter.copy_(torch.where(untouched, original, parameter))
            if is_same:
                parameter.grad = gradients[parameter]

    return Undo(restore)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def _halved(graph: Graph) -> Iterator[Interval]:
    """Activations that matrix products save in float32, once for each storage."""
    storages = {
        saved.storage
        for saved in graph.saved
        if saved.category == "activation"
        and saved.dtype == "float32"
        and any(name in saved.needed_by for name in _MATRIX_OPS)
    }
    for storage in graph.on_device:
        if storage.id in storages:
            yield Interval(storage.bytes // 2, storage.birth, storage.death, f"{storage.label} in 16 bits")
