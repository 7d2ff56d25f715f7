"""A profile as the compact JSON that the HTML page draws.

``Profile.to_json()`` is the form for people and programs. This one is several times smaller: columns instead of
objects, every text once, the timeline as differences. Only ``templates/report.js`` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowtide.profiling.profile import Profile
from lowtide.reporting.palette import COLORS, PHASE_COLORS, STACK
from lowtide.reporting.tables import saved_rows
from lowtide.tracing.graph import PHASES


def embed(profiles: list[Profile]) -> str:
    """Write the page's data, safe inside a ``<script>`` element whatever the names in it."""
    data = {
        "categories": [{"name": c, "color": COLORS[c]} for c in STACK],
        "phases": [{"name": p, "color": PHASE_COLORS[p]} for p in PHASES],
        "profiles": [pack(profile) for profile in profiles],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack(profile: Profile) -> dict[str, Any]:
    """Pack one profile. Numbers in the columns of names, modules and sources are places in ``strings``."""
    graph, strings = profile.graph, _Strings()
    storages = sorted(graph.on_device, key=lambda s: s.bytes, reverse=True)
    modules, saved = profile.by_module, saved_rows(profile)
    return {
        "name": profile.name,
        "peak_op": profile.peak_op,
        "peak_bytes": profile.peak_bytes,
        "live": [np.diff(profile.timeline.by_category[c], prepend=0).tolist() for c in STACK],
        "ops": {
            **strings.columns(graph.ops, "name", "module", "source"),
            "phase": [PHASES.index(op.phase) for op in graph.ops],
            "recompute": [int(op.recompute) for op in graph.ops],
            "seconds": [_seconds(op.seconds) for op in graph.ops],
            "workspace": [op.workspace_bytes for op in graph.ops],
        },
        "storages": {
            "bytes": [s.bytes for s in storages],
            "category": [STACK.index(s.category) for s in storages],
            "birth": [s.birth for s in storages],
            "death": [s.death for s in storages],
            **strings.columns(storages, "label", "module"),
        },
        "modules": {
            **strings.columns(modules, "path", "type"),
            "parameters": [m.total.parameter_bytes for m in modules],
            "saved": [m.total.saved_bytes for m in modules],
            "peak": [m.total.peak_bytes for m in modules],
            "seconds": [_seconds(m.total.seconds) for m in modules],
        },
        "saved": {
            "bytes": [row.bytes for row in saved],
            "category": [STACK.index(row.category) for row in saved],
            "shape": [list(row.shape) for row in saved],
            **strings.columns(saved, "dtype", "made_by", "made_in", "source"),
            "needed_by": [[strings(op) for op in row.needed_by] for row in saved],
            "needed_in": [[strings(module) for module in row.needed_in] for row in saved],
        },
        "strings": list(strings.places),
    }


class _Strings:
    """Each text once, known by its place."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))

    def columns(self, rows: Sequence[object], *names: str) -> dict[str, list[int]]:
        return {name: [self(getattr(row, name)) for row in rows] for name in names}


def _seconds(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(f"{seconds:.3g}")
