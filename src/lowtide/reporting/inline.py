"""A chart inside a page: an SVG that takes the page's colours, light or dark."""

from __future__ import annotations

import re
from typing import Any

from lowtide.errors import MissingExtra

# What the figures are drawn in, and what the page's style calls it.
_COLORS = {
    "#000": "--text",
    "#202124": "--text",
    "#333": "--text",
    "#444": "--muted",
    "#5f6368": "--muted",
    "#666": "--muted",
    "#9aa0a6": "--line",
    "#e6e8eb": "--grid",
}


def inline(chart: Any) -> str:
    """A figure as SVG for a page; it grows and shrinks with the page.

    >>> import altair
    >>> svg = inline(altair.Chart(altair.InlineData(values=[{"x": 1}])).mark_point().encode(x="x:Q"))
    >>> svg.startswith("<svg class"), "white" in svg
    (True, False)
    """
    try:
        import vl_convert
    except ImportError:
        raise MissingExtra("vl-convert-python", extra="report") from None
    svg = vl_convert.vegalite_to_svg(chart.properties(background="transparent").to_json())
    svg = re.sub(r'(fill|stroke)="(#[0-9a-f]{3,6}|black)"', _themed, svg[svg.index("<svg") :])
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg class="figure" viewBox="\1">', svg, count=1)


def _themed(match: re.Match[str]) -> str:
    what, color = match.groups()
    name = _COLORS.get("#000" if color in ("black", "#000000") else color)
    return f'{what}="var({name})"' if name else match[0]
