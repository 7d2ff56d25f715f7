"""For mkdocstrings: the ``>>>`` examples of docstrings as code blocks, which Markdown would take for quotations."""

import re
from typing import Any

import griffe

# An example: from a line with >>> to the next blank line, or to the end.
_EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fence every example while the docstrings are collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", obj.docstring.value)
