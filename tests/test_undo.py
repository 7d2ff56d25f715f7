"""Undo: actions run once, last first, also after errors."""

import pytest

from lowtide.undo import Undo


def test_undo_takes_back_in_reverse_order_and_only_once() -> None:
    done: list[int] = []
    undo = Undo(lambda: done.append(1), lambda: done.append(2))
    undo.add(lambda: done.append(3))
    undo()
    undo()
    assert done == [3, 2, 1]


def test_undo_takes_back_the_rest_when_one_action_fails() -> None:
    done: list[int] = []

    def fail() -> None:
        raise KeyError

    undo = Undo(lambda: done.append(1), fail, lambda: done.append(3))
    with pytest.raises(KeyError):
        undo()
    assert done == [3, 1]


def test_a_failed_apply_takes_back_what_it_had_done() -> None:
    done: list[int] = []

    def apply(fail: bool) -> Undo:
        with Undo() as undo:
            undo.add(lambda: done.append(1))
            if fail:
                raise KeyError
            return undo.keep()

    with pytest.raises(KeyError):
        apply(fail=True)
    assert done == [1]
    undo = apply(fail=False)
    assert done == [1]
    undo()
    assert done == [1, 1]
