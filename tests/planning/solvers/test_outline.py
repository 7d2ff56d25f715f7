"""Outlines name the modules and the heavy ops of a part."""

from __future__ import annotations

from lowtide.planning.solvers.outline import outline
from lowtide.tracing.capture.loss import capture_joint

from ..steps import chain


def test_an_outline_names_modules_and_heavy_ops() -> None:
    joint = capture_joint(chain(2))
    text = outline(joint.forward)
    assert text.startswith("0.layers.0")
    assert "addmm" in text
