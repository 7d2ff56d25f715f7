"""Converted models beside plain ones: what tests of conversions share."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lowtide import zoo
from lowtide.techniques.batchnorm import Conversion, convert
from lowtide.techniques.batchnorm.convert import Fused

CNNS = [name for name in zoo.names() if name.startswith(("lenet", "res", "wrn", "dense", "unet"))]
SHALLOW = [name for name in CNNS if "101" not in name and "152" not in name]


def results(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The outputs, the gradients and the buffers of a step in training mode, and the outputs of one in evaluation."""
    torch.manual_seed(0)
    actual: dict[str, Tensor] = {}
    inputs = pytree.tree_map(lambda x: x.clone().requires_grad_(), list(inputs))
    model.train()
    model.zero_grad()
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.stack([(out * torch.sin(torch.arange(out.numel()).view_as(out))).sum() for out in outputs]).sum().backward()
    actual.update({f"output {i}": out for i, out in enumerate(outputs)})
    actual.update({f"input {i}": x.grad for i, x in enumerate(pytree.tree_leaves(inputs)) if x.grad is not None})
    actual.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    actual.update(dict(model.named_buffers()))
    model.eval()
    with torch.no_grad():
        outputs = model(*inputs)
    actual.update(
        {f"evaluated {i}": out for i, out in enumerate(outputs if isinstance(outputs, tuple) else (outputs,))}
    )
    model.train()
    return {name: tensor.detach().clone() for name, tensor in actual.items()}


def assert_converts(model: nn.Module, *inputs: Any, fused: int, left: int = 0, **options: Any) -> Conversion:
    """Convert, and compare with the plain model in all that a training step and an evaluation give."""
    torch.manual_seed(1)
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and norm.affine:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    model = model.double()
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    conversion = convert(model, **options)
    assert (len(conversion.changed), len(conversion.left)) == (fused, left), str(conversion)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    wanted, actual = results(plain, inputs), results(model, inputs)
    assert list(actual) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(actual[name], wanted[name], msg=lambda text, name=name: f"{name}: {text}")
    forwards = [vars(module).get("forward") for module in model.modules()]
    learned = [getattr(f, name) for f in forwards if isinstance(f, Fused) for name in f._names.values()]
    assert None not in learned
    return conversion


def calls(model: nn.Module, kind: type[nn.Module], run: Callable[[], object]) -> int:
    """How often modules of a kind are called."""
    count = 0

    def note(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += isinstance(module, kind) and "forward" not in vars(module)

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        run()
    finally:
        hook.remove()
    return count


RESIDUALS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a parameter": lambda self, x: self.bias,
    "of each channel": lambda self, x: self.embed(x.mean((2, 3)))[:, :, None, None],
    "an integer": lambda self, x: x.size(0),
    "of another dtype": lambda self, x: x.float(),
    "larger than x": lambda self, x: torch.stack([x, x]),
}


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, out: None)
    return module


def snapshot(model: nn.Module) -> list[Any]:
    modules = [(path, id(m), type(m), m.__dict__.get("forward"), m.training) for path, m in model.named_modules()]
    return [modules, [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]]


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))
