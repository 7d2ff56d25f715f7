"""Be a leaf to ``torch.fx.symbolic_trace``, as torch's own layers are."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from lowtide.errors import TraceError


def is_symbolic(*values: Any) -> bool:
    """Whether ``torch.fx`` traces: an argument is one of its proxies."""
    return any(isinstance(value, fx.Proxy) for value in values)


def leaf(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Record a call of the module in the graph that ``torch.fx`` makes.

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
