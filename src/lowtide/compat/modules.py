"""Modules: the dictionaries they hold their tensors, children and hooks in, and base classes without public names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lowtide.compat.versions import TRIED

if TYPE_CHECKING:
    from torch.nn.modules import batchnorm, conv, dropout, instancenorm

    BatchNormBase = batchnorm._BatchNorm
    LazyNormBase = batchnorm._LazyNormBase
    NormBase = batchnorm._NormBase
    ConvBase = conv._ConvNd
    DropoutBase = dropout._DropoutNd
    InstanceNormBase = instancenorm._InstanceNorm
else:
    BatchNormBase = TRIED.find("torch.nn.modules.batchnorm:_BatchNorm")
    """The base of torch's batch norms."""

    NormBase = TRIED.find("torch.nn.modules.batchnorm:_NormBase")
    """The base of layers with running statistics: batch and instance norms."""

    LazyNormBase = TRIED.find("torch.nn.modules.batchnorm:_LazyNormBase")
    """The base of norms that learn their number of channels from the first batch."""

    InstanceNormBase = TRIED.find("torch.nn.modules.instancenorm:_InstanceNorm")
    """The base of torch's instance norms."""

    ConvBase = TRIED.find("torch.nn.modules.conv:_ConvNd")
    """The base of torch's convolutions."""

    DropoutBase = TRIED.find("torch.nn.modules.dropout:_DropoutNd")
    """The base of torch's dropouts."""

own_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""Return a module's own dictionary of parameters, those that are None too."""

own_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""Return a module's own dictionary of buffers, those that are None too."""

own_children: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
"""Return a module's own dictionary of children, those that are None too."""

forward_pre_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
"""Return a module's own dictionary of hooks before its forward."""

CALL: Any = TRIED.find("torch.nn:Module._call_impl.__code__")
"""The code in which a module calls its forward between its hooks."""

_KINDS = ("forward_pre", "forward", "backward_pre", "backward")
GLOBAL_HOOKS: list[dict[int, Any]] = [TRIED.find(f"torch.nn.modules.module:_global_{kind}_hooks") for kind in _KINDS]
"""The dictionaries of hooks on all modules. Dynamo does not look whether there is one."""

_active_ddp_module: Any = TRIED.find("torch.nn.parallel:DistributedDataParallel._get_active_ddp_module")

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which ``module.compile()`` leaves a compiled forward."""


class TellsOfLoading(nn.Module):
    """A module that is told when its tensors were loaded from a state dict."""

    def after_loading(self) -> None:
        """Do what loaded values need."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.after_loading()


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, its dictionaries of buffers and hooks too, without parameters and children."""
    return {name: value for name, value in vars(module).items() if name not in ("_parameters", "_modules")}


@TRIED
def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks around a module's forward and backward."""
    return [hook for kind in _KINDS for hook in getattr(module, f"_{kind}_hooks").values()]


@TRIED
def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Tell whether a state dict holds a buffer."""
    return buffer not in module._non_persistent_buffers_set


def runs_compiled(module: nn.Module) -> bool:
    """Tell whether a call of a module runs compiled code."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def check_input(norm: Any, input: Tensor) -> None:
    """Raise where a norm does not take tensors of such a shape, as torch does."""
    norm._check_input_dim(input)


def in_ddp_forward() -> bool:
    """Tell whether the forward of a ``DistributedDataParallel`` runs."""
    return _active_ddp_module() is not None


@TRIED
def flat_weights(module: nn.RNNBase) -> list[Any]:
    """Return the list in which a recurrent layer holds its weights a second time."""
    held: Any = module._flat_weights
    return held


def set_flat_weights(module: nn.RNNBase, weights: list[Any]) -> None:
    """Replace the second list of a recurrent layer's weights, without the layer's ``__setattr__``."""
    module.__dict__["_flat_weights"] = weights
