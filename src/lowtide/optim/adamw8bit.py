"""AdamW with its states in 8 bits: 2.03 bytes a parameter instead of 8, one launch for all parameters on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import ParamsT

from lowtide.errors import LowtideError
from lowtide.kernels import adamw8bit as kernels
from lowtide.kernels.adamw8bit import Entry
from lowtide.kernels.reference.adamw8bit import BLOCK, Hyper, Moments, decode, encode
from lowtide.optim.exact import put_back
from lowtide.optim.single import PLAIN_STATES

Rounding = Literal["nearest", "stochastic"]

LEAST = 4096  # values of a parameter below which its states stay in float32, as in other 8-bit optimizers
_KEYS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


class AdamW8bit(torch.optim.Optimizer):
    """torch's AdamW with both moments in 8 bits, a float32 scale for each 256 values; parameters of any float dtype.

    Parameters with less than ``LEAST`` values keep float32 moments. ``rounding="stochastic"`` rounds bfloat16 weights
    up or down at random, right on average, so that they need no float32 copy. Saved and resumed bit for bit.

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
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
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
        vars(self).pop(PLAIN_STATES, None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            ready: dict[int, list[tuple[Tensor, dict[str, Any]]]] = {}
            found = [(p, self._state(p)) for p in group["params"] if p.grad is not None]
            if found:
                counts = [state["step"] for _, state in found]
                torch._foreach_add_(counts, torch.tensor(1.0))  # pyright: ignore[reportPrivateImportUsage]
            for p, state in found:
                ready.setdefault(count_of(state["step"]), []).append((p, state))
            for count, members in ready.items():
                seed = (group["seed"] * 2654435761 + number * 40503 + count * 97003) % 2**30
                self._step(number, members, _hyper(group, count), seed if group["rounding"] == "stochastic" else None)
        return loss

    def _step(self, number: int, members: list[tuple[Tensor, dict[str, Any]]], hyper: Hyper, seed: int | None) -> None:
        """Step parameters of a group that have come as far. While nothing has moved, the last launches are repeated.

        Hundreds of parameters take longer to look at than to step.
        """
        places = _places(members)
        known: dict[int, _Last] = vars(self).setdefault("_last", {})
        last = known.get(number)
        if places is not None and last is not None and last.places == places:
            kernels.launch(last.launches, hyper, seed=seed)
            return
        written: list[tuple[Tensor, Tensor]] = []
        entries: list[Entry] = []
        for p, state in members:
            values, copied = flat(p)
            written += [(p, copied)] if copied is not None else []
            moments = Moments(*(state.get(key) for key in _KEYS))  # pyright: ignore[reportArgumentType]
            entries.append(Entry(values, _gradient(p), moments))
        launches = kernels.step(entries, hyper, seed=seed)
        for parameter, result in written:
            parameter.copy_(result.view(parameter.shape))
        if places is not None and launches is not None:
            known[number] = _Last(places, launches, [state["exp_avg"] for _, state in members])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume: codes stay codes."""
        vars(self).pop(PLAIN_STATES, None)
        vars(self).pop("_last", None)
        super().load_state_dict(state_dict)
        put_back(self, state_dict)

    def _state(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            if p.is_complex() or (p.grad is not None and p.grad.is_sparse):
                raise LowtideError(f"AdamW8bit has no step for a parameter of {p.dtype} with this gradient")
            moments = empty_moments(p)
            state.update(step=torch.zeros((), dtype=torch.float32), **_named(moments))
        return state


class _Last(NamedTuple):
    """The launches of the last step, and where all tensors were. Moments are held: none can take their place."""

    places: tuple[Any, ...]
    launches: Any
    moments: list[Tensor]


def _places(members: list[tuple[Tensor, dict[str, Any]]]) -> tuple[Any, ...] | None:
    """Where parameters, gradients and moments are; None where some are fake, or would have to be copied."""
    found: list[Any] = []
    for p, state in members:
        gradient = p.grad
        assert gradient is not None
        if isinstance(p, FakeTensor) or not (p.is_contiguous() and gradient.is_contiguous()):
            return None
        first, second = state["exp_avg"], state["exp_avg_sq"]
        found += (p.data_ptr(), gradient.data_ptr(), gradient.dtype, id(first), first.data_ptr(), second.data_ptr())
    return tuple(found)


def empty_moments(p: Tensor) -> Moments:
    """Moments of a parameter before its first step."""
    if p.numel() < LEAST:
        return Moments(*(torch.zeros(p.numel(), dtype=torch.float32, device=p.device) for _ in range(2)))
    blocks = -(-p.numel() // BLOCK)
    codes = (torch.zeros(p.numel(), dtype=dtype, device=p.device) for dtype in (torch.int8, torch.uint8))
    return Moments(*codes, *(torch.zeros(blocks, dtype=torch.float32, device=p.device) for _ in range(2)))


def lowered(p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's AdamW for one parameter, in 8 bits; nothing where there is none yet."""
    if "exp_avg" not in state:
        return {}
    flats = [flat(_like(p, torch.float32).copy_(state[key]))[0] for key in _KEYS[:2]]
    if p.numel() >= LEAST:
        pairs = [encode(value, codes) for value, codes in zip(flats, (torch.int8, torch.uint8), strict=True)]
        moments = Moments(pairs[0][0].clone(), pairs[1][0].clone(), pairs[0][1], pairs[1][1])
    else:
        moments = Moments(*flats)
    return {"step": torch.tensor(float(state["step"])), **_named(moments)}


def raised(p: Tensor, state: dict[str, Any], *, fused: bool) -> dict[str, Any]:
    """The state of torch's AdamW again, from one in 8 bits."""
    if "exp_avg" not in state:
        return {}
    found: dict[str, Any] = {"step": state["step"].to(p.device) if fused else state["step"].clone()}
    for key in _KEYS[:2]:
        scale = state.get(f"{key}_scale")
        values = state[key] if scale is None else decode(state[key], scale)
        whole = _like(p, p.dtype)
        dense, copied = flat(whole)
        dense.copy_(values)
        found[key] = whole if copied is None else dense.view(p.shape)
    return found


def count_of(step: Tensor) -> int:
    """A step count. A fake one, which holds any number, counts as 1."""
    return max(1, int(step.item()))


def flat(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """All values as one row, in the order of memory; and the copy, where there are gaps between them."""
    if tensor.is_contiguous():
        return tensor.view(-1), None
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,)), None
    copied = tensor.contiguous().view(-1)
    return copied, copied


def _like(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory that ``flat`` shows in the order in which it shows the parameter's."""
    layout = torch.preserve_format if _is_dense(p) else torch.contiguous_format
    return torch.empty_like(p, dtype=dtype, memory_format=layout)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _gradient(p: Tensor) -> Tensor:
    """Flat, in the parameter's own order of memory."""
    gradient = p.grad
    assert gradient is not None
    if gradient.is_contiguous() and p.is_contiguous():
        return gradient.view(-1)
    if gradient.stride() != p.stride():
        gradient = _like(p, gradient.dtype).copy_(gradient)
    return flat(gradient)[0]


def _named(moments: Moments) -> dict[str, Tensor]:
    return {key: value for key, value in zip(_KEYS, moments, strict=True) if value is not None}


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
