"""Features that use private names, each with the versions of torch and Python on which its names were seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from operator import attrgetter
from traceback import walk_tb
from typing import Any, NoReturn, TypeVar

import torch

from lowtide.errors import LowtideError, TraceError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_RAISE: Any = object()


@dataclass(frozen=True)
class Feature:
    """A use of private names, and the first and last versions on which they were seen.

    Outside of this range a feature is off, since it could silently be wrong. A ``loud`` one is tried there: a change of
    its names raises an error by itself.
    """

    name: str
    error: type[LowtideError] = LowtideError
    loud: bool = False
    torch: tuple[str, str] = ("2.11", "2.13")
    python: tuple[str, str] = ("3.11", "3.12")

    @property
    def is_off(self) -> bool:
        """Tell whether this torch or this Python is outside of the range, and a change could go unnoticed."""
        return not self.loud and not (
            _is_between(torch.__version__, self.torch) and _is_between(_python_version(), self.python)
        )

    def find(self, path: str, default: Any = _RAISE) -> Any:
        """Return the object at a path, such as ``torch._C:_functorch.is_batchedtensor``.

        Where there is none, return the default, or else a stand-in that raises this feature's error when it is used.
        """
        module, _, attributes = path.partition(":")
        try:
            return attrgetter(attributes)(import_module(module))
        except (ImportError, AttributeError):
            return _StandIn(path, (), {"feature": self, "path": path}) if default is _RAISE else default

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function: raise this feature's error where the feature is off or a private name is missing."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                raise self.off()
            try:
                return function(*args, **kwargs)
            except (ImportError, AttributeError) as error:
                if not _is_lookup(error):
                    raise
                raise self.off(str(error)) from error

        decorated: Any = call
        return decorated

    def off(self, why: str = "") -> LowtideError:
        """Return the error that says that this feature is off."""
        return self.error(
            f"This is off with torch {torch.__version__} and Python {_python_version()}: {self.name} uses internals"
            f" of torch that it may not have{why and f' ({why})'}",
            hint=f"Install torch {' to '.join(self.torch)} with Python {' to '.join(self.python)}. "
            "The rest of lowtide works.",
        )


TRIED = Feature("lowtide", loud=True)
"""Names that fail loudly, or whose absence is seen. They are tried on every version."""

CAPTURE = Feature("capturing graphs", error=TraceError)
"""Graphs of Dynamo and AOTAutograd, and the code that runs them."""


class _StandIn(type):
    """A class in place of a missing object. It can be bound, compared and subclassed; any other use raises."""

    feature: Feature
    path: str

    def _raise(cls, *_: Any, **__: Any) -> NoReturn:
        raise cls.feature.off(f"{cls.path} is missing")

    _use: Any = _raise
    __call__ = __instancecheck__ = __subclasscheck__ = __iter__ = __len__ = __getitem__ = _use

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions about a class
            raise AttributeError(name)
        cls._raise()


def _is_lookup(error: Exception) -> bool:
    """Tell whether a decorated function, or one beside it, lacks a name. What it calls may fail in the same way."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)][1:]  # without the decorator's own
    own = [place for place, code in enumerate(codes) if code.co_filename == codes[0].co_filename]
    inner = codes[own[-1] + 1 :][:1] if own else codes
    return all(code.co_name in ("__getattr__", "import_module") for code in inner)


@cache  # asked at each call of a private name
def _is_between(version: str, seen: tuple[str, str]) -> bool:
    first, last = map(_numbers, seen)
    return first <= _numbers(version) <= last


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _python_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"
