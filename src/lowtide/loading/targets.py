"""Workloads from the command line: ``train.py:workload``, ``package.module:function``, ``zoo:gpt2-medium``.

A target is a place and a name. The place is a file, a module, or one of ``NAMED``. The name is a model, or a function
that returns a ``Workload``. ``make_loader`` builds it in several sizes.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

import torch

from lowtide import zoo
from lowtide.errors import LowtideError, WorkloadError
from lowtide.loading import installed
from lowtide.loading.arguments import TargetSettings, bind, guess
from lowtide.tracing.call_sites import is_library
from lowtide.workload import Workload, place_of

NAMED: dict[str, Callable[..., Workload]] = {
    "zoo": zoo.workload,
    "torchvision": installed.torchvision,
    "timm": installed.timm,
    "transformers": installed.transformers,
}
DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}

Build = Callable[[Mapping[str, str], dict[str, Any], "str | None"], Workload]


def load(target: str, args: Mapping[str, str] | None = None, **settings: Unpack[TargetSettings]) -> Workload:
    """Build the workload that a target names.

    A function gets ``args``, converted as its annotations and defaults say, and the settings. It needs parameters of
    the same names. A named model gets the settings, and ``args`` as options.

    >>> load("zoo:lenet", batch=2, device="meta").name
    'lenet'
    """
    return make_loader(target, args, **settings)()


def make_loader(
    target: str, args: Mapping[str, str] | None = None, **settings: Unpack[TargetSettings]
) -> Callable[..., Workload]:
    """Find a target, and return a function that builds it, as ``sweep`` takes it: ``make(batch=8, seq=512)``."""
    build = _find(target)
    autocast = settings.pop("autocast", None)
    if autocast is not None and autocast not in DTYPES:
        raise WorkloadError(f"Cannot autocast to {autocast!r}", hint=f"Choose one of {', '.join(DTYPES)}.")
    device = settings.pop("device", None)

    def make(**axes: Any) -> Workload:
        known = {k: v for k, v in {**settings, **axes}.items() if v is not None and k in TargetSettings.__annotations__}
        others = {k: str(v) for k, v in axes.items() if k not in known}
        work = build({**(args or {}), **others}, known, device)
        return replace(work, autocast=DTYPES[autocast]) if autocast else work

    return make


def _find(target: str) -> Build:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise _half_a_target(place or name)
    if place in NAMED:
        return _named(NAMED[place], name)
    is_file = place.endswith(".py") or "/" in place or Path(place).is_file()
    folder, module = _load_file(Path(place)) if is_file else _load_module(place, target)
    function = getattr(module, name, None)
    if not callable(function) or isinstance(function, type):
        raise _no_function(place, name, module, function)
    return _user(function, target, folder)


def _named(builder: Callable[..., Workload], name: str) -> Build:
    def build(args: Mapping[str, str], sizes: dict[str, Any], device: str | None) -> Workload:
        return builder(name, device=device or "cpu", **sizes, **guess(args))

    return build


def _user(function: Callable[..., Any], target: str, folder: Path) -> Build:
    def build(args: Mapping[str, str], sizes: dict[str, Any], device: str | None) -> Workload:
        settings = dict(sizes)
        if device is not None and "device" in inspect.signature(function).parameters:
            settings["device"] = device
        called = bind(function, args, settings, where=target)
        hint = "It was called with device='meta', which holds no values." if device == "meta" else ""
        with _importable(folder), _said_plainly(f"{target} failed", hint=hint if "device" in settings else ""):
            work = function(**called)
        if not isinstance(work, Workload):
            raise WorkloadError(
                f"{target} returned {type(work).__name__}, not a Workload",
                where=place_of(function),
                hint="End it with: return lowtide.Workload(model, loss, batch, optimizer).",
            )
        return work if work.name else replace(work, name=target)

    return build


def _load_file(path: Path) -> tuple[Path, ModuleType]:
    path = path.expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(path.stem, [p.stem for p in path.parent.glob("*.py")], n=1)
        hint = f"Did you mean {path.with_stem(near[0])}?" if near else f"The current folder is {Path.cwd()}."
        raise WorkloadError(f"There is no file {path}", hint=hint)
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"_lowtide_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} is not a Python file", hint="Write path/to/train.py:function.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name.
    sys.modules[spec.name] = module
    with _importable(path.parent), _said_plainly(f"{path.name} could not be imported"):
        spec.loader.exec_module(module)
    return path.parent, module


def _load_module(place: str, target: str) -> tuple[Path, ModuleType]:
    with _importable(Path.cwd()):
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise WorkloadError(
                f"There is no module {place!r} to load {target} from",
                hint="Write path/to/train.py:function, package.module:function, "
                + " or ".join(f"{name}:model" for name in NAMED)
                + ".",
            )
        with _said_plainly(f"{place} could not be imported"):
            return Path.cwd(), importlib.import_module(place)


@contextmanager
def _importable(folder: Path) -> Generator[None]:
    """Let a user's file import its neighbours, as ``python train.py`` would."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _said_plainly(what: str, *, hint: str = "") -> Generator[None]:
    """Turn an error in the user's code into one line that says which, and where it was raised."""
    try:
        yield
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit):
            hint = "It ended the program: put the training under if __name__ == '__main__'."
        elif "relative import" in str(error):
            hint = "The file is part of a package: write package.module:function instead."
        where = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else raised_at(error)
        raise WorkloadError(f"{what}: {type(error).__name__}: {error}", where=where, hint=hint) from error


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's own code that an error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_foreign(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_foreign(filename: str) -> bool:
    """Tell whether a frame is not the user's: the import system's, an installed package's, or ours."""
    paths = sysconfig.get_paths()
    return is_library(filename) or filename.startswith(("<", paths["stdlib"], paths["purelib"], paths["platlib"]))


def _half_a_target(target: str) -> WorkloadError:
    if target in zoo.names():
        return WorkloadError(f"{target} needs its place", hint=f"Write zoo:{target}.")
    path = Path(target)
    if path.is_file():
        names = re.findall(r"^def (\w+)", path.read_text(errors="replace"), re.MULTILINE)
        name = "workload" if "workload" in names or not names else names[-1]
        return WorkloadError(
            f"{target} names no function",
            hint=f"Write {target}:{name}." + (f" It has {', '.join(names)}." if len(names) > 1 else ""),
        )
    return WorkloadError(
        f"{target!r} is not a workload",
        hint="Write path/to/train.py:function or zoo:model, as in zoo:resnet50.",
    )


def _no_function(place: str, name: str, module: ModuleType, value: object) -> WorkloadError:
    if value is not None:
        return WorkloadError(
            f"{name} in {place} is {value!r}, not a function that returns a Workload",
            hint=f"Write def workload(): return lowtide.Workload(...), and {place}:workload here.",
        )
    functions = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    return WorkloadError(
        f"{place} has no function {name!r}",
        hint=f"It has {', '.join(functions)}."
        if functions
        else f"Add def {name}(): return lowtide.Workload(model, loss, batch, optimizer).",
    )
