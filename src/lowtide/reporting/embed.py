"""A profile as the compact JSON that the HTML page draws.

``Profile.to_json()`` is the form for people and programs; this one is several times smaller: columns, not
objects, every text once, the timeline as differences. Its only reader is ``templates/report.js``.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from lowtide.profiling.profile import Profile
from lowtide.reporting.palette import COLORS, PHASE_COLORS, STACK
from lowtide.reporting.tables import SavedRow, saved_rows
from lowtide.tracing.graph import PHASES

Columns = dict[str, list[Any]]


def embed(profiles: list[Profile]) -> str:
    """The page's data, safe inside a ``<script>`` element whatever the names in it."""
    data = {
        "categories": [{"name": c, "color": COLORS[c]} for c in STACK],
        "phases": [{"name": p, "color": PHASE_COLORS[p]} for p in PHASES],
        "profiles": [pack(profile) for profile in profiles],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack(profile: Profile) -> dict[str, Any]:
    """One profile; numbers in the columns of names, modules and sources are places in ``strings``."""
    graph, strings = profile.graph, _Strings()
    storages = sorted(graph.on_device, key=lambda s: s.bytes, reverse=True)
    return {
        "name": profile.name,
        "peak_op": profile.peak_op,
        "peak_bytes": profile.peak_bytes,
        "live": [_differences(profile.timeline.by_category[c]) for c in STACK],
        "ops": {
            "name": [strings(op.name) for op in graph.ops],
            "module": [strings(op.module) for op in graph.ops],
            "source": [strings(op.source) for op in graph.ops],
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
            "label": [strings(s.label) for s in storages],
            "module": [strings(s.module) for s in storages],
        },
        "modules": {
            "path": [strings(m.path) for m in profile.by_module],
            "type": [strings(m.type) for m in profile.by_module],
            "parameters": [m.total.parameter_bytes for m in profile.by_module],
            "saved": [m.total.saved_bytes for m in profile.by_module],
            "peak": [m.total.peak_bytes for m in profile.by_module],
            "seconds": [_seconds(m.total.seconds) for m in profile.by_module],
        },
        "saved": _saved(saved_rows(profile), strings),
        "strings": strings.all,
    }


def _saved(rows: list[SavedRow], strings: _Strings) -> Columns:
    return {
        "bytes": [row.bytes for row in rows],
        "category": [STACK.index(row.category) for row in rows],
        "shape": [list(row.shape) for row in rows],
        "dtype": [strings(row.dtype) for row in rows],
        "made_by": [strings(row.made_by) for row in rows],
        "made_in": [strings(row.made_in) for row in rows],
        "needed_by": [[strings(op) for op in row.needed_by] for row in rows],
        "needed_in": [[strings(module) for module in row.needed_in] for row in rows],
        "source": [strings(row.source) for row in rows],
    }


class _Strings:
    """Each text once, known by its place."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))

    @property
    def all(self) -> list[str]:
        return list(self.places)


def _differences(live: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
    return np.diff(live, prepend=0).tolist()


def _seconds(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(f"{seconds:.3g}")
