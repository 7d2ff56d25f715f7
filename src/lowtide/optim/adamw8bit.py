"""AdamW with its states in 8 bits: 2.03 bytes a parameter instead of 8, one launch for all parameters on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowtide.compat.fake import FakeTensor
from lowtide.compat.operators import foreach_add_
from lowtide.errors import LowtideError
from lowtide.kernels import adamw8bit as kernels
from lowtide.kernels.adamw8bit import Entry
from lowtide.kernels.fewbit import is_dense
from lowtide.kernels.reference.adamw8bit import BLOCK, Hyper, Moments, decode, encode
from lowtide.optim.one_parameter import FIRST
from lowtide.optim.rounding import step_seed, with_notes
from lowtide.optim.state_dict import load_exactly, loads_exactly, saved_parameters

Rounding = Literal["nearest", "stochastic"]

LEAST = 4096  # values of a parameter below which its states stay in float32, as in other 8-bit optimizers
ORDER = "order"  # in a parameter's state: how its memory was ordered, which is how its moments are
_KEYS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


class AdamW8bit(torch.optim.Optimizer):
    """torch's AdamW with both moments in 8 bits, a float32 scale for each 256 values; parameters of any float dtype.

    Parameters with less than ``LEAST`` values keep float32 moments. ``rounding="stochastic"`` rounds bfloat16 weights
    up or down at random, right on average, so that they need no float32 copy. States resume bit for bit. A state of
    torch's Adam or AdamW loads too, and is encoded.

    >>> weight = torch.nn.Parameter(torch.ones(64, 64))
    >>> optimizer = AdamW8bit([weight], lr=0.1)
    >>> weight.grad = torch.ones(64, 64)
    >>> optimizer.step()
    >>> optimizer.state[weight]["exp_avg"].dtype, round(weight[0, 0].item(), 3)
    (torch.int8, 0.899)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise LowtideError(f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay} are out of range")
        if rounding not in ("nearest", "stochastic"):
            raise LowtideError(f"rounding={rounding!r} is not known", hint='Pass "nearest" or "stochastic".')
        defaults: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay, "rounding": rounding, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        next_first = 0
        for group in self.param_groups:
            first = group.get(FIRST, next_first)
            next_first = first + len(group["params"])
            rounds = group["rounding"] == "stochastic"
            stepped = [(n, p, self._state(p)) for n, p in enumerate(group["params"], first) if p.grad is not None]
            if stepped:
                counts = [state["step"] for _, _, state in stepped]
                foreach_add_(counts, torch.tensor(1.0))
            for count, number, members in _runs(stepped, of_neighbours=rounds):
                # The kernels add a parameter's place in the run: its noise does not depend on the others.
                seed = step_seed(group["seed"], count) % 2**30 + number
                self._step(number, members, _hyper(group, count), seed if rounds else None)
        return loss

    def _step(self, number: int, members: list[_Member], hyper: Hyper, seed: int | None) -> None:
        """Step parameters that have come as far. While nothing has moved, the last launches are repeated.

        Hundreds of parameters take longer to look at than to step. ``number`` is the first one's.
        """
        places = _places(members)
        known: dict[int, _Last] = vars(self).setdefault("_last", {})
        last = known.get(number)
        if places is not None and last is not None and last.places == places:
            kernels.launch(last.launches, hyper, seed=seed)
            return
        written: list[tuple[Tensor, Tensor]] = []
        entries: list[Entry] = []
        has_moved = False
        for p, state in members:
            has_moved |= _reorder(p, state)
            values, copied = flat(p)
            written += [(p, copied)] if copied is not None else []
            moments = Moments(*(state.get(key) for key in _KEYS))  # pyright: ignore[reportArgumentType]
            entries.append(Entry(values, _gradient(p), moments))
        launches = kernels.step(entries, hyper, seed=seed)
        for parameter, result in written:
            parameter.copy_(result.view(parameter.shape))
        places = _places(members) if has_moved else places
        if places is not None and launches is not None:
            known[number] = _Last(places, launches, [state["exp_avg"] for _, state in members])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group, as torch has it; amsgrad is refused."""
        _refuse_amsgrad(param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume: codes stay codes, and moments of torch's Adam or AdamW are encoded.

        Another optimizer's state is refused, and then nothing is changed.
        """
        groups, states = list(state_dict["param_groups"]), dict(state_dict["state"])
        for index, (group, saved) in enumerate(zip(self.param_groups, groups, strict=False)):
            _refuse_amsgrad(saved)
            groups[index] = {**{key: group[key] for key in self.defaults if key in group}, **saved}
        for p, number, _ in saved_parameters(self, state_dict):
            if states.get(number):
                states[number] = _in_8bit(p, states[number])
        with nullcontext() if loads_exactly(self) else load_exactly(self):
            super().load_state_dict({**state_dict, "param_groups": groups, "state": states})
        vars(self).pop("_last", None)
        for state in self.state.values():  # a fused AdamW counts on the device, where reading it would wait
            if "step" in state:
                state["step"] = state["step"].cpu()

    def _state(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if p.is_complex() or (p.grad is not None and p.grad.layout is not torch.strided):
            layout = "" if p.grad is None else f" with a gradient of {p.grad.layout}"
            raise LowtideError(
                f"AdamW8bit has no step for a parameter of {p.dtype}{layout}",
                hint="Make the layer's gradients dense: sparse=False.",
            )
        if not state:
            moments = empty_moments(p)
            state.update(step=torch.zeros((), dtype=torch.float32), **_named(moments, p))
        return state


_Member = tuple[Tensor, dict[str, Any]]  # a parameter and its state


def _runs(
    stepped: list[tuple[int, Tensor, dict[str, Any]]], *, of_neighbours: bool
) -> list[tuple[int, int, list[_Member]]]:
    """Parameters that have come as far, with their step count and the number of the first of them.

    ``of_neighbours``: only those whose numbers follow each other.
    """
    runs: dict[tuple[int, int], list[tuple[int, _Member]]] = {}
    placed: dict[int, int] = {}
    for number, p, state in stepped:
        count = count_of(state["step"])
        place = placed[count] = placed.get(count, -1) + 1
        runs.setdefault((count, number - place if of_neighbours else 0), []).append((number, (p, state)))
    return [(count, run[0][0], [member for _, member in run]) for (count, _), run in runs.items()]


class _Last(NamedTuple):
    """The launches of the last step, and where all tensors were. Moments are held: none can take their place."""

    places: tuple[Any, ...]
    launches: Any
    moments: list[Tensor]


def _places(members: list[_Member]) -> tuple[Any, ...] | None:
    """Return the addresses of parameters, gradients and moments; None if some are fake or need a copy."""
    places: list[Any] = []
    for p, state in members:
        gradient = p.grad
        assert gradient is not None
        if isinstance(p, FakeTensor) or not (p.is_contiguous() and gradient.is_contiguous()):
            return None
        first, second = state["exp_avg"], state["exp_avg_sq"]
        places += (p.data_ptr(), gradient.data_ptr(), gradient.dtype, id(first), first.data_ptr(), second.data_ptr())
    return tuple(places)


def empty_moments(p: Tensor) -> Moments:
    """Moments of a parameter before its first step."""
    if p.numel() < LEAST:
        return Moments(*(torch.zeros(p.numel(), dtype=torch.float32, device=p.device) for _ in range(2)))
    blocks = -(-p.numel() // BLOCK)
    codes = (torch.zeros(p.numel(), dtype=dtype, device=p.device) for dtype in (torch.int8, torch.uint8))
    return Moments(*codes, *(torch.zeros(blocks, dtype=torch.float32, device=p.device) for _ in range(2)))


def lowered(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's AdamW for one parameter, in 8 bits."""
    return {"step": torch.tensor(float(state["step"])), **_coded(p, state["exp_avg"], state["exp_avg_sq"])}


def _coded(p: Tensor, first: Tensor, second: Tensor) -> dict[str, Any]:
    """Moments of the parameter's shape, as its state keeps them."""
    flats = [flat(_like(p, torch.float32).copy_(moment))[0] for moment in (first, second)]
    if p.numel() < LEAST:
        return _named(Moments(*flats), p)
    pairs = [encode(value, codes) for value, codes in zip(flats, (torch.int8, torch.uint8), strict=True)]
    return _named(Moments(pairs[0][0].clone(), pairs[1][0].clone(), pairs[0][1], pairs[1][1]), p)


def _reorder(p: Tensor, state: dict[str, Any]) -> bool:
    """Put moments into the order of the parameter's memory, where it has another format than when they were made."""
    order = _order(p)
    if state.setdefault(ORDER, order) == order:  # older versions noted none
        return False
    state.update(_coded(p, *(_whole(p, state, key) for key in _KEYS[:2])))
    return True


def _whole(p: Tensor, state: dict[str, Any], key: str) -> Tensor:
    """A moment in float32, in the parameter's shape."""
    scale = state.get(f"{key}_scale")
    values = state[key] if scale is None else decode(state[key], scale)
    dims: list[int] = []
    order = state.get(ORDER, _order(p))
    while order:
        order, dim = divmod(order, 100)
        dims.insert(0, dim - 1)
    ordered = values.view([p.shape[dim] for dim in dims])
    return ordered.permute([dims.index(dim) for dim in sorted(dims)]).reshape(p.shape)


def _order(p: Tensor) -> int:
    """The order of dimensions in ``flat``, two digits for each, the outermost first: 1030402 for channels_last.

    Dimensions of size 1 are left out, since their strides say nothing. An int, which every kind of checkpoint can save.
    """
    return _order_of(p.shape, p.stride() if not p.is_contiguous() and is_dense(p) else None)


@lru_cache(maxsize=4096)
def _order_of(shape: torch.Size, strides: tuple[int, ...] | None) -> int:
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    if strides is not None:
        dims.sort(key=lambda dim: strides[dim], reverse=True)
    return sum((dim + 1) * 100**place for place, dim in enumerate(reversed(dims)))


def _in_8bit(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state of AdamW8bit unchanged, or torch's in 8 bits."""
    moments = [state.get(key) for key in _KEYS[:2]]
    if "step" not in state or "max_exp_avg_sq" in state or any(m is None or m.numel() != p.numel() for m in moments):
        raise LowtideError(
            f"The saved state of a parameter of {tuple(p.shape)} is not that of Adam or AdamW for it",
            where=", ".join(state),
            hint="Load what AdamW8bit or torch's Adam or AdamW saved, without amsgrad.",
        )
    is_ours = ORDER in state or "exp_avg_scale" in state or (p.ndim != 1 and state["exp_avg"].ndim == 1)
    return {ORDER: _order(p), **state} if is_ours else with_notes(lowered(p, state), state)


def _refuse_amsgrad(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise LowtideError("There is no amsgrad with states in 8 bits", hint="Leave amsgrad out.")


def raised(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's AdamW again, from one in 8 bits."""
    moments = {key: _like(p, p.dtype).copy_(_whole(p, state, key)) for key in _KEYS[:2]}
    return {"step": state["step"].clone(), **moments}


def count_of(step: Tensor) -> int:
    """A step count. A fake one, which holds any number, counts as 1."""
    return max(1, int(step.item()))


def flat(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """All values as one row, in the order of memory; and the copy, where there are gaps between them."""
    if tensor.is_contiguous():
        return tensor.view(-1), None
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,)), None
    copied = tensor.contiguous().view(-1)
    return copied, copied


def _like(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory that ``flat`` shows in the order in which it shows the parameter's."""
    layout = torch.preserve_format if is_dense(p) else torch.contiguous_format
    return torch.empty_like(p, dtype=dtype, memory_format=layout)


def _gradient(p: Tensor) -> Tensor:
    """Flat, in the parameter's own order of memory."""
    gradient = p.grad
    assert gradient is not None
    if gradient.is_contiguous() and p.is_contiguous():
        return gradient.view(-1)
    if gradient.stride() != p.stride():
        gradient = _like(p, gradient.dtype).copy_(gradient)
    return flat(gradient)[0]


def _named(moments: Moments, p: Tensor) -> dict[str, Any]:
    return {ORDER: _order(p), **{key: value for key, value in zip(_KEYS, moments, strict=True) if value is not None}}


def _hyper(group: dict[str, Any], count: int) -> Hyper:
    return Hyper(
        float(group["lr"]),
        *map(float, group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=count,
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
    )
