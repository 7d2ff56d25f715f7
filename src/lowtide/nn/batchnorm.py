"""Batch norm and its activation as one layer that keeps one buffer for backward."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lowtide.compat.autograd import in_backward
from lowtide.compat.modules import (
    BatchNormBase,
    TellsOfLoading,
    check_input,
    is_persistent,
    own_buffers,
    own_parameters,
)
from lowtide.errors import LowtideError, TraceError
from lowtide.kernels.activations import Activation
from lowtide.nn.functional import batch_norm_act
from lowtide.nn.hidden_writes import CheckedCalls
from lowtide.nn.scopes import watch
from lowtide.nn.strategies import InverseGuard, Strategy, resolve


class _BatchNormAct(TellsOfLoading, BatchNormBase):
    """Shared by the layers of all dimensions. To ``state_dict`` it is a plain batch norm.

    With a residual, the layer is the end of a residual block: z = φ(batch_norm(x) + residual). There z is recomputed
    from x and the residual, itself perhaps the recomputed z of the block before. ``rebuild_joins=False`` keeps this z.
    """

    plain: ClassVar[type[BatchNormBase]]  # the class of torch.nn with the same dimensions

    def __init__(
        self,
        num_features: int,
        activation: str | nn.Module | Activation | None = "relu",
        strategy: Strategy = "auto",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        rebuild_joins: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)
        act = Activation.of(activation)
        if act.module is not None:
            # A child: its parameters are in the state_dict.
            self.activation = act.module.to(device, dtype) if isinstance(activation, str) else act.module
        self._set(act, strategy, process_group, rebuild_joins)

    @classmethod
    def from_batch_norm(
        cls,
        norm: BatchNormBase,
        activation: str | nn.Module | Activation | None,
        strategy: Strategy = "auto",
        *,
        rebuild_joins: bool = True,
    ) -> Self:
        """Make a layer that shares the parameters, buffers and mode of a batch norm, and refers to the activation.

        The activation does not become a child, so the ``state_dict`` of the model around stays as it is.
        """
        if not isinstance(norm, cls.plain):
            raise LowtideError(f"{cls.__name__} is made from a {cls.plain.__name__}, not from a {type(norm).__name__}")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.num_features, layer.eps, layer.momentum = norm.num_features, norm.eps, norm.momentum
        layer.affine, layer.track_running_stats = norm.affine, norm.track_running_stats
        for name, parameter in own_parameters(norm).items():
            layer.register_parameter(name, parameter)
        for name, buffer in own_buffers(norm).items():
            layer.register_buffer(name, buffer, persistent=is_persistent(norm, name))
        layer.training = norm.training
        layer._set(Activation.of(activation), strategy, getattr(norm, "process_group", None), rebuild_joins)
        return layer

    def _set(self, activation: Activation, strategy: Strategy, process_group: Any, rebuild_joins: bool) -> None:
        resolve(strategy, activation, where=type(self).__name__)
        self._act = activation
        self.strategy: Strategy = strategy
        self.process_group = process_group
        self.rebuild_joins = rebuild_joins
        self._begin()

    def _begin(self) -> None:
        """Start without a history of earlier steps."""
        self.calls, self.guard = CheckedCalls(), InverseGuard()
        watch(self)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """φ(batch_norm(input) + residual). Without a residual, φ(batch_norm(input))."""
        if is_symbolic(input):
            return leaf(self, input) if residual is None else leaf(self, input, residual)
        return self._run(input, residual, self._act, self.strategy)

    def batch_norm(self, input: Tensor) -> Tensor:
        """The batch norm alone, as torch runs it."""
        return self._run(input, None, Activation("identity"), "standard")

    def _run(self, input: Tensor, residual: Tensor | None, activation: Activation, strategy: Strategy) -> Tensor:
        check_input(self, input)
        mean, var = self.running_mean, self.running_var
        momentum: Any = self.momentum
        batches = self.num_batches_tracked if self.training and self.track_running_stats else None
        if momentum is None:
            momentum = 0.0
            if batches is not None and not in_backward():
                batches.add_(1)
                # A compiler does not know the value: there a tensor.
                momentum = batches.double().reciprocal() if torch.compiler.is_compiling() else 1.0 / float(batches)
                batches = None
        training = self.training or (mean is None and var is None)
        tracked = not self.training or self.track_running_stats
        return batch_norm_act(
            input,
            self.weight,
            self.bias,
            mean if tracked else None,
            var if tracked else None,
            batches,
            activation=activation,
            strategy=strategy,
            training=training,
            momentum=momentum,
            eps=self.eps,
            residual=residual,
            rebuild=residual is None or self.rebuild_joins,
            group=self._group() if self.training else None,
            layer=self,
        )

    def _group(self) -> Any:
        """Return the process group of the statistics; None for this process alone."""
        return self.process_group

    def extra_repr(self) -> str:
        return f"{self.num_features}, {self._act}, strategy={self.strategy!r}, eps={self.eps}, momentum={self.momentum}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def after_loading(self) -> None:
        self.guard.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.process_group)] = self.process_group  # cannot be copied, and is shared
        layer = memo[id(self)] = type(self).__new__(type(self))
        layer.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return layer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("calls", "guard")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()


class BatchNormAct1d(_BatchNormAct, nn.BatchNorm1d):
    """φ(BatchNorm1d(x)) with one buffer kept."""

    plain = nn.BatchNorm1d


class BatchNormAct2d(_BatchNormAct, nn.BatchNorm2d):
    """φ(BatchNorm2d(x)) with one buffer kept.

    >>> layer = BatchNormAct2d(8, "leaky_relu")
    >>> layer(torch.randn(4, 8, 5, 5)).shape, list(layer.state_dict()) == list(nn.BatchNorm2d(8).state_dict())
    (torch.Size([4, 8, 5, 5]), True)
    """

    plain = nn.BatchNorm2d


class BatchNormAct3d(_BatchNormAct, nn.BatchNorm3d):
    """φ(BatchNorm3d(x)) with one buffer kept."""

    plain = nn.BatchNorm3d


class SyncBatchNormAct(_BatchNormAct, nn.SyncBatchNorm):
    """φ(SyncBatchNorm(x)) with one buffer kept, for any number of dimensions; ``lowtide.convert`` uses it.

    No process group means all processes. Outside of training, or in a single process, the statistics are those of a
    plain batch norm. Unlike torch's, it runs on a CPU too.
    """

    plain = nn.SyncBatchNorm

    def _group(self) -> Any:
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.process_group in (None, "world") else self.process_group
        return group if dist.get_world_size(group) > 1 else None


# -- torch.fx ----------------------------------------------------------------------------------------------


def is_symbolic(*values: Any) -> bool:
    """Tell whether an argument is a proxy of ``torch.fx``."""
    return any(isinstance(value, fx.Proxy) for value in values)


def leaf(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Record a call of the module in the graph of ``torch.fx``, as torch does for its own layers.

    Refused where the root's forward was replaced: ``torch.fx`` reads the class's, which activates once more.
    """
    tracer: Any = next(value.tracer for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy))
    if "forward" in vars(tracer.root):
        raise TraceError(
            "torch.fx traces the forward of the model's class, and lowtide.convert replaced it",
            where=type(tracer.root).__name__,
            hint="Trace nn.Sequential(model), or trace the model before it is converted.",
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
