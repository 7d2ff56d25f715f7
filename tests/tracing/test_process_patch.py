"""A change to the whole process lasts from the first who needs it to the last."""

import pytest

from lowtide.tracing.process_patch import ProcessPatch


def test_a_change_is_made_once_and_restored_by_the_last():
    events = []

    def change():
        events.append("change")
        return lambda: events.append("restore")

    patch = ProcessPatch(change)
    with patch:
        with pytest.raises(ValueError, match="inside"), patch:
            raise ValueError("inside")
        assert events == ["change"]
    assert events == ["change", "restore"]
    with patch:
        assert events == ["change", "restore", "change"]


def test_a_change_that_fails_is_tried_again():
    attempts = []

    def change():
        attempts.append(1)
        raise RuntimeError("on purpose")

    patch = ProcessPatch(change)
    for _ in range(2):
        with pytest.raises(RuntimeError), patch:
            pass
    assert len(attempts) == 2
