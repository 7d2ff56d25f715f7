"""One colour per category, the same in the terminal, in figures and in HTML.

The hues are Okabe and Ito's (2008), told apart under the common colour-vision deficiencies; yellow is
darkened so that it also shows on white.
"""

from __future__ import annotations

from lowtide.tracing.graph import Category, Phase

# Static bytes lie at the bottom, so that a step rises from a flat floor.
STACK: tuple[Category, ...] = (
    "parameter",
    "optimizer state",
    "buffer",
    "input",
    "gradient",
    "activation",
    "temporary",
    "workspace",
)

COLORS: dict[Category, str] = {
    "parameter": "#0072b2",
    "optimizer state": "#56b4e9",
    "buffer": "#8a8f98",
    "input": "#d8c33c",
    "gradient": "#e69f00",
    "activation": "#d55e00",
    "temporary": "#cc79a7",
    "workspace": "#009e73",
}

PHASE_COLORS: dict[Phase, str] = {"forward": "#3f8fc4", "backward": "#c8713a", "optimizer": "#7d7ab8"}

RUNS = ("#8a8f98", "#0072b2", "#d55e00", "#009e73", "#cc79a7")  # several steps over each other, the plain one first
RECOMPUTED = "#7b4bb3"  # recomputed in the backward pass
OVER = "#d0342c"  # above the limit
HEAT = ("#e3f1fa", "#0b4a75")  # least and most memory of a sweep


def heat(fraction: float) -> str:
    """The colour of a sweep's cell, from 0 (least memory) to 1 (most).

    >>> heat(0.0), heat(1.0)
    ('#e3f1fa', '#0b4a75')
    """
    low, high = (tuple(bytes.fromhex(color[1:])) for color in HEAT)
    return "#" + bytes(round(a + (b - a) * fraction) for a, b in zip(low, high, strict=True)).hex()


def ink(fraction: float) -> str:
    """Text colour that is readable on ``heat(fraction)``."""
    return "#ffffff" if fraction > 0.65 else "#10212e"
