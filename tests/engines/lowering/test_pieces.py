"""Pieces of the backward pass end with gradients, and hand on what later ones read."""

from __future__ import annotations

from lowtide import zoo
from lowtide.engines.lowering.ops import OpsLowering
from lowtide.planning.programs.strategies import plain
from lowtide.tracing.capture.loss import capture_joint


def test_pieces_complete_each_gradient_once_and_hand_on_what_later_ones_read() -> None:
    joint = capture_joint(zoo.small("lenet"))
    lowered = OpsLowering().lower(joint, plain(joint))
    pieces = lowered.pieces
    assert len(pieces) > 1
    assert all(piece.inputs for piece in pieces)
    completed = [place for piece in pieces for place in piece.inputs]
    assert sorted(completed) == [place for place, each in enumerate(joint.gradients) if each is not None]
    held = set(lowered.kept)
    for piece in pieces:
        assert {value for value, _ in piece.cells} <= held
        held -= {value for value, is_last in piece.cells if is_last}
        held |= set(piece.results)
    assert not held
