"""Shared by the commands: options, exit codes, and how an error is shown."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback as traceback_module
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from lowtide.errors import LowtideError
from lowtide.registry import BUILT_IN
from lowtide.version import __version__

app = typer.Typer(
    help="Name a memory budget. Get the fastest training step that fits it, with the same gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A function that returns a Workload, as train.py:workload or package.module:function; "
        "or a model by name, as zoo:gpt2-medium, torchvision:resnet50 or transformers:gpt2.",
    ),
]
Fake = Annotated[bool, typer.Option("--fake", help="Predict: nothing is allocated or computed.")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, or a GPU of the device table to predict for, such as h200. Default: the model's."),
]
Here = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the model's.")]
Budget = Annotated[str, typer.Option(help="The peak of a whole step: 6GiB, 800MB, 60% of the plain step's, or device.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Allow more than bitwise and roundoff: a fidelity class or a technique. Repeatable."),
]
Forbid = Annotated[list[str] | None, typer.Option(help="Leave a technique out. Repeatable.")]
_ENGINES = ", ".join(f"{engine.summary} ({name})" for name, engine in BUILT_IN["engine"].items())
Engine = Annotated[
    str,
    typer.Option(
        metavar=f"[auto|{'|'.join(BUILT_IN['engine'])}]",
        help=f"What may run the step: {_ENGINES}, or the fastest (auto).",
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Let the graph engine compile regions, which draw dropout masks of their own. "
        "By default on a GPU, where it is faster.",
    ),
]
Html = Annotated[Path | None, typer.Option(help="Write a report: one HTML file that works offline.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised, too.")]


class TargetOptions(TypedDict, total=False):
    """Options of a TARGET: a command that loads one ends in ``**settings: Unpack[TargetOptions]``."""

    batch: Annotated[int | None, typer.Option(min=1, help="Batch size.")]
    seq: Annotated[int | None, typer.Option(min=1, help="Sequence length.")]
    image: Annotated[int | None, typer.Option(min=1, help="Pixels per side.")]
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam, adamw or none, for a model by name.")]
    autocast: Annotated[str | None, typer.Option(help="Run the loss under autocast: bf16 or fp16.")]
    arg: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Passed on to TARGET. Repeatable.")]


@dataclass(frozen=True)
class Outcome:
    """Result of a command, for ``--json``, and its exit code: 0, or 1 for a broken promise."""

    data: Any
    code: int = 0


def command(function: Callable[..., Outcome]) -> Callable[..., None]:
    """Register a command: errors become one paragraph and exit code 2, ``--json`` keeps stdout clean."""

    @functools.wraps(function)
    def run(*, as_json: bool, traceback: bool, **options: Any) -> None:
        try:
            with _plain_warnings(), redirect_stdout(sys.stderr) if as_json else nullcontext():
                outcome = function(as_json=as_json, **options)
        except typer.Exit:
            raise
        except Exception as error:
            if traceback or os.environ.get("LOWTIDE_DEBUG"):
                traceback_module.print_exc()
            _complain(error)
            raise typer.Exit(2) from None
        if as_json:
            typer.echo(json.dumps(outcome.data, allow_nan=False))
        raise typer.Exit(outcome.code)

    vars(run)["__signature__"] = _signature(function)
    return app.command()(run)


def _signature(function: Callable[..., Outcome]) -> Signature:
    """Signature for typer: a command's own options, its target's if it has one, and the options of every command."""
    parameters = signature(function, eval_str=True).parameters.values()
    own = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "as_json"]
    hints = (
        get_type_hints(TargetOptions, include_extras=True) if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
    )
    shared = [(name, None, hint) for name, hint in hints.items()]
    shared += [("as_json", False, AsJson), ("traceback", False, Traceback)]
    return Signature([*own, *(Parameter(n, Parameter.KEYWORD_ONLY, default=d, annotation=a) for n, d, a in shared)])


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"lowtide {__version__}")
        raise typer.Exit


@contextmanager
def working(what: str) -> Generator[None]:
    """A spinner on a terminal while something takes long."""
    with Console(stderr=True).status(f"{what} ..."):
        yield


@contextmanager
def _plain_warnings() -> Generator[None]:
    """Show the text of a warning, without the line that raised it."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _tell("warning", str(message), "bold yellow")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _complain(error: Exception) -> None:
    text = " ".join(str(error).split())
    if not isinstance(error, LowtideError):
        from lowtide.loading.targets import raised_at

        where = f" ({place})" if (place := raised_at(error)) else ""
        text = f"{type(error).__name__}: {text.rstrip('.')}{where}. Add --traceback to see all of it."
    _tell("error", text, "bold red")


def _tell(kind: str, text: str, style: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text.assemble((f"{kind}: ", style), text), highlight=False)
