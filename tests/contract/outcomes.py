"""Results of steps, and whether two of them agree: tensors as a check promises, models bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide.nn.batchnorm import _BatchNormAct
from lowtide.techniques import Check, Fidelity
from lowtide.workload import Workload

Outcome = dict[str, Tensor]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def run(work: Workload, *, steps: int = 1) -> Outcome:
    """Training steps from a fixed seed, and what they left; the model and the optimizer are put back after."""
    actual: Outcome = {}
    with restored(work), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for i in range(steps):
            work.model.zero_grad()
            loss = work.compute_loss()
            loss.backward()
            actual[f"loss {i}"] = loss.detach()
            actual |= {f"{n}.grad": p.grad.clone() for n, p in work.model.named_parameters() if p.grad is not None}
            if work.optimizer is not None:
                work.optimizer.step()
        actual |= {f"{name}, trained": p.detach().clone() for name, p in work.model.named_parameters()}
        actual |= {name: buffer.clone() for name, buffer in work.model.named_buffers()}
        work.model.zero_grad()
        if work.device.type == "cuda":
            actual["generator of the GPU"] = torch.cuda.get_rng_state()
        return actual | {"generator": torch.get_rng_state()}


def gradients(work: Workload) -> Tensor:
    """All gradients of one step as one vector, from the generator as it is; buffers may move."""
    work.model.zero_grad()
    work.compute_loss().backward()
    return torch.cat([p.grad.flatten() for p in work.model.parameters() if p.grad is not None])


def distance(actual: Outcome, exact: Outcome) -> float:
    """The norm of the error of all gradients."""
    names = [name for name in exact if name.endswith(".grad")]
    return float(torch.stack([(actual[name].double() - exact[name]).norm() for name in names]).norm())


def statistics_of_layers(model: nn.Module, outcome: Outcome) -> Outcome:
    """The part of an outcome that lowtide's batch norm layers hold as running statistics."""
    layers = [path for path, module in model.named_modules() if isinstance(module, _BatchNormAct)]
    names = {f"{path}.{name}".removeprefix(".") for path in layers for name in STATISTICS}
    return {name: value for name, value in outcome.items() if name in names}


def redrawn(batch: Any, seed: int) -> Any:
    """The batch with other numbers; labels stay."""
    generator = torch.Generator().manual_seed(seed)
    return pytree.tree_map_only(
        Tensor, lambda t: torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() else t, batch
    )


def in_float64(work: Workload) -> Workload:
    model = copy.deepcopy(work.model).double()
    for module in model.modules():
        vars(module).pop("forward", None)
    batch = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, work.batch)
    return replace(work, model=model, batch=batch, optimizer=None, autocast=None)


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def run_or_error(work: Workload) -> Outcome | Exception:
    try:
        return run(work)
    except Exception as error:
        return error


def assert_agree(actual: Outcome, expected: Outcome, check: Check) -> None:
    """Results as a check promises. Random ones only where they are exact: before the first gradient."""
    if not check.leaves_gradients:
        expected = {name: value for name, value in expected.items() if not name.endswith(".grad")}
    assert actual.keys() == expected.keys()
    exact = check.fidelity <= Fidelity.ROUNDOFF
    if check.fidelity is Fidelity.ROUNDOFF and not check.rtol:
        check = replace(check, rtol=1.3e-6, atol=1e-5)  # as torch.testing.assert_close has them for float32
    for name, value in expected.items():
        if name.startswith("generator") and not exact:
            continue
        new, old = actual[name].double(), value.double()
        # An empty batch has a mean of nan, with and without.
        assert torch.equal(new.isnan(), old.isnan()), name
        if check.fidelity is Fidelity.CHANGED:
            continue
        assert actual[name].dtype == value.dtype, name
        if check.fidelity is Fidelity.UNBIASED and name.endswith((".grad", ", trained")):
            continue
        new, old = new.nan_to_num(123.0), old.nan_to_num(123.0)
        if check.fidelity is Fidelity.BITWISE:
            assert torch.equal(new, old), name
        else:
            assert (new - old).norm() <= check.atol + check.rtol * old.norm(), name


@dataclass(frozen=True)
class Snapshot:
    """A model as it is: its tree, its attributes, its tensors by identity and by value."""

    tree: list[tuple[str, type]]
    attributes: list[dict[str, Any]]
    inner: list[tuple[dict[str, Any], dict[str, Any]]]
    hooks: list[int]
    values: dict[str, Tensor]


def snapshot(model: nn.Module) -> Snapshot:
    return Snapshot(
        tree=[(name, type(module)) for name, module in model.named_modules()],
        attributes=[dict(module.__dict__) for module in model.modules()],
        inner=[(dict(module._parameters), dict(module._buffers)) for module in model.modules()],
        hooks=[len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        values={name: value.clone() for name, value in model.state_dict().items()},
    )


def assert_restored(model: nn.Module, before: Snapshot) -> None:
    after = snapshot(model)
    assert after.tree == before.tree
    assert after.hooks == before.hooks
    for new, old in zip(after.attributes, before.attributes, strict=True):
        assert list(new) == list(old)
        assert all(new[key] is old[key] for key in old)
    for new, old in zip(after.inner, before.inner, strict=True):
        assert all(x.keys() == y.keys() and all(x[k] is y[k] for k in y) for x, y in zip(new, old, strict=True))
    assert all(torch.equal(after.values[name], value) for name, value in before.values.items())


@contextmanager
def restored(work: Workload) -> Iterator[None]:
    """Restore parameters, buffers and the optimizer's state."""
    before = {name: value.clone() for name, value in work.model.state_dict().items()}
    state = None if work.optimizer is None else copy.deepcopy(work.optimizer.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in work.model.state_dict().items():
                value.copy_(before[name])
        if work.optimizer is not None and state is not None:
            work.optimizer.load_state_dict(state)
