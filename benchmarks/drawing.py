"""Parts that figures of benchmarks share: colours by name, panels under one title, a word where altair is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import MissingExtra
from lowtide.reporting.charts import FONT, alt


def say_drawn(draw: Callable[[], Path]) -> None:
    """Draw, and print the path; without altair, print what to install."""
    try:
        print(f"drawn to {draw()}")
    except MissingExtra as missing:
        print(missing)


def color_by(field: str, colors: Mapping[str, str], **legend: Any) -> Any:
    """Colour by name, in the given order, with a legend below."""
    return alt.Color(
        f"{field}:N",
        title=None,
        scale=alt.Scale(domain=list(colors), range=list(colors.values())),
        legend=alt.Legend(orient="bottom", labelLimit=320, **legend),  # the browser's font may be wider than ours
    )


def side_by_side(panels: Iterable[Any], title: str, subtitle: str) -> Any:
    """Put panels in a row under one title."""
    heading = alt.TitleParams(title, subtitle=subtitle, anchor="start", subtitleColor="#666", offset=14)
    chart = alt.hconcat(*panels, title=heading, background="white", padding=16)
    return chart.configure(font=FONT).configure_view(stroke=None).configure_axis(gridColor="#e6e8eb")
