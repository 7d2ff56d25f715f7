"""The command line's door: ``lowtide``, or ``python -m lowtide``. ``commands`` has the commands."""

from __future__ import annotations

import sys

from lowtide.errors import MissingExtra


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        import rich
        import typer
    except ModuleNotFoundError as error:
        print(f"error: {MissingExtra(error.name or 'typer', extra='cli')}", file=sys.stderr)
        raise SystemExit(2) from None
    del rich, typer
    from lowtide.cli.commands import app

    app(prog_name="lowtide")
