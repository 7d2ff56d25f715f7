"""Blocks of a model, such as ``layers.3``: the modules by which compiled code is cut, and that programs treat alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from torch import fx

from lowtide.tracing.capture.joint import Joint, is_item, module_of, viewed

_OPS = 8  # of forward that make a numbered module a block


def blocks_of(joint: Joint) -> Callable[[fx.Node], str]:
    """Return a function from an op to its block: its innermost numbered module that runs enough ops, or ""."""
    sizes: Counter[str] = Counter()
    for node in joint.forward:
        if viewed(node) is None and not is_item(node):
            sizes.update(_numbered(module_of(node)))
    return lambda node: next((path for path in _numbered(module_of(node)) if sizes[path] >= _OPS), "")


def _numbered(path: str) -> list[str]:
    """Prefixes of a module's path that end in a number, the longest first.

    >>> _numbered("model.layers.3.mlp.fc1")
    ['model.layers.3.mlp.fc1', 'model.layers.3']
    """
    parts = path.split(".")
    prefixes = (".".join(parts[: length + 1]) for length in reversed(range(len(parts))))
    return [prefix for prefix in prefixes if re.search(r"\d$", prefix)]
