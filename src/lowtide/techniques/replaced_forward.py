"""Give one module another ``forward``, without touching its class, its parameters or its ``state_dict``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.errors import LowtideError, PlanError
from lowtide.techniques.technique import Option
from lowtide.undo import Applied, Undo

if TYPE_CHECKING:
    from lowtide.workload import Workload


class Forward:
    """A replaced forward: subclass it and write ``__call__``; ``self.plain(...)`` is the forward as it was.

    ``copy.deepcopy`` and ``pickle`` of the module give a copy that is changed in the same way and runs its own
    parameters. ``del copy.forward`` makes the copy plain.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward as it was: the class's, or one that somebody else put on this module before."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Tell whether a module runs the forward of this class, neither overridden nor replaced."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


def replace_forward(forward: Forward, *, path: str = "", instead_of: type[nn.Module] | None = None) -> Undo:
    """Replace the forward of its module until the undo is called.

    A forward that calls ``plain`` can lie on top of others. If it replaces ``plain``, ``instead_of`` names the class
    that the module must run as. The same kind of forward twice is refused, and an undo under another forward.
    """
    module = forward.module
    if type(forward.replaced) is type(forward) or (instead_of is not None and forward.replaced is not None):
        raise LowtideError(
            f"{type(module).__name__} already runs {type(forward.replaced).__name__}",
            where=path,
            hint="Call its undo() first, or leave this module out of one of the two.",
        )
    if instead_of is not None and not runs_as(module, instead_of):
        raise PlanError(
            f"{type(module).__name__} does not run as a nn.{instead_of.__name__}",
            where=path,
            hint="Leave this module out. A plan for it is of another model.",
        )
    module.forward = forward

    def restore() -> None:
        if module.__dict__.get("forward") is not forward:
            raise LowtideError(
                f"{type(module).__name__}.forward was replaced again after {type(forward).__name__}",
                where=path,
                hint="Undo in the reverse order of applying.",
            )
        if forward.replaced is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = forward.replaced

    return Undo(restore)


def apply_at_sites(
    work: Workload, options: Sequence[Option], change: Callable[[nn.Module, str, Option], Undo]
) -> Applied:
    """Change the module at each site of the options; the model is untouched if one cannot be changed."""
    with Undo() as undo:
        for option in options:
            for path in option.site:
                undo.add(change(module_at(work.model, path), path, option))
        return Applied(work, undo.keep())


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module that a plan names."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise PlanError(f"The model has no module {path!r}", hint="The plan is of another model.") from None
