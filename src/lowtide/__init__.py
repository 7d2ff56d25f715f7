"""lowtide: name a memory budget, get the fastest PyTorch training step that fits it, with the same gradients.

    work = lowtide.Workload(model, loss, batch, optimizer)
    print(lowtide.profile(work))                   # where the memory goes
    plan = lowtide.plan(work, budget="6GiB")       # the fastest step that fits
    step = lowtide.apply(plan, work)               # step(batch) trains; step.undo() restores the model
    lowtide.convert(model)                         # batch norm + activation in one buffer, without a plan

Nothing is imported until one of these names is used: not torch, and nothing that starts CUDA.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lowtide.version import __version__

if TYPE_CHECKING:
    from lowtide import nn, optim, zoo
    from lowtide.engines import apply, fit, plan, verify
    from lowtide.errors import LowtideError
    from lowtide.profiling import profile, sweep
    from lowtide.reporting import report
    from lowtide.techniques.batchnorm import convert
    from lowtide.techniques.microbatch import microbatch
    from lowtide.workload import Workload

__all__ = [
    "LowtideError",
    "Workload",
    "__version__",
    "apply",
    "convert",
    "fit",
    "microbatch",
    "nn",
    "optim",
    "plan",
    "profile",
    "report",
    "sweep",
    "verify",
    "zoo",
]

_HOMES = {
    "LowtideError": "errors",
    "Workload": "workload",
    "apply": "engines",
    "convert": "techniques.batchnorm",
    "fit": "engines",
    "microbatch": "techniques.microbatch",
    "plan": "engines",
    "profile": "profiling",
    "report": "reporting",
    "sweep": "profiling",
    "verify": "engines",
}
_MODULES = ("nn", "optim", "zoo")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"lowtide.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value = getattr(import_module(f"lowtide.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
