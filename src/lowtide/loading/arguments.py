"""Arguments of the command line: settings of a workload, and ``--arg key=value`` for a function."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from lowtide.errors import WorkloadError

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


class TargetSettings(TypedDict, total=False):
    """Settings of a workload on the command line. None, or absent, leaves them to the target."""

    batch: int | None
    seq: int | None
    image: int | None
    optimizer: str | None
    device: str | None  # where to build it: "cpu", "cuda", or "meta" to spend no memory
    autocast: str | None  # bf16 or fp16


def parse_pairs(pairs: list[str], *, option: str) -> dict[str, str]:
    """Read ``key=value`` texts.

    >>> parse_pairs(["layers=4", "name=a=b"], option="--arg")
    {'layers': '4', 'name': 'a=b'}
    """
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise WorkloadError(f"{option} {pair!r} is not a pair", hint=f"Write {option} key=value.")
        if key in parsed:
            raise WorkloadError(f"{option} {key} is given twice", hint="Keep one of them.")
        parsed[key] = value
    return parsed


def guess(args: Mapping[str, str]) -> dict[str, Any]:
    """Read texts as Python writes them: numbers, truths, tuples; anything else stays text.

    >>> guess({"layers": "4", "dropout": "0.1", "tied": "true", "blocks": "2,3", "act": "gelu"})
    {'layers': 4, 'dropout': 0.1, 'tied': True, 'blocks': (2, 3), 'act': 'gelu'}
    """
    return {key: _literal(text) for key, text in args.items()}


def bind(
    function: Callable[..., Any], args: Mapping[str, str], settings: Mapping[str, Any], *, where: str
) -> dict[str, Any]:
    """Build the keyword arguments of a call: ``args`` converted as annotated, ``settings`` as they are.

    Raises for arguments that the function does not take, and for missing ones.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in (*args, *settings):
        if key not in named and not takes_all:
            raise WorkloadError(
                f"{where} takes no {key!r}",
                hint=f"It takes {', '.join(named) or 'no arguments'}. Add the parameter: def "
                f"{function.__name__}({', '.join([*named, key])}).",
            )
    both = sorted(set(args) & set(settings))
    if both:
        raise WorkloadError(f"{both[0]} is given twice", where=where, hint=f"Leave out --arg {both[0]}.")
    kinds = _kinds(function, named)
    called = {key: _convert(key, text, kinds.get(key, str), where) for key, text in args.items()} | dict(settings)
    missing = [k for k, p in named.items() if p.default is p.empty and k not in called]
    if missing:
        options = [f"--{key} N" if key in ("batch", "seq", "image") else f"--arg {key}=..." for key in missing]
        raise WorkloadError(f"{where} needs {' and '.join(missing)}", hint=f"Add {' '.join(options)}.")
    return called


def _kinds(function: Callable[..., Any], named: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # an annotation that only a type checker can read
        hints = {}
    kinds: dict[str, Any] = {}
    for key, parameter in named.items():
        if key in hints:
            kinds[key] = hints[key]
        elif parameter.default is not parameter.empty and parameter.default is not None:
            kinds[key] = type(parameter.default)
    return kinds


def _convert(key: str, text: str, kind: Any, where: str) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        if text.lower() == "none" and len(kinds) < len(typing.get_args(kind)):
            return None
        kind = kinds[0] if len(kinds) == 1 else str
    if kind is bool and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    elif kind is not bool:
        return text
    raise WorkloadError(f"--arg {key}={text} is not {_ARTICLE[kind]}", where=where)


_ARTICLE = {int: "a whole number", float: "a number", bool: "true or false"}


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
