"""Restoring survives errors and interrupts of its own, or names what it could not restore."""

import os
import signal
import sys

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.errors import RestoreError
from lowtide.tracing.snapshot import unchanged
from lowtide.tracing.snapshot.restoring import Restoring
from tests.soak import count
from tests.tracing.comparing import assert_same, snapshot

STRIDE = count(5, soak=1)  # of the lines at which errors are injected


def mean(model, x):
    return model(x).square().mean()


def workload():
    """With state of all kinds: a buffer, gradients, optimizer states, a batch that is written to."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3)
    work = Workload(model, mean, torch.randn(4, 3), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    run(work)
    return work


def run(work):
    work.compute_loss().backward()
    work.optimizer.step()
    work.batch.mul_(1.5)


class FailsOnce:
    """Raises an error at one of the lines that restore state, once it is armed."""

    def __init__(self, error, line):
        self.error, self.left, self.armed = error, line, False

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename != unchanged.__file__ or frame.f_code.co_name == "unchanged":
            return None
        if event == "line" and self.armed:
            self.left -= 1
            if self.left == 0:
                self.armed = False
                raise self.error
        return self


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_at_any_line_of_restoring_leaves_nothing_changed(error):
    line, raised = 0, set()
    work = workload()
    before = snapshot(work)
    while True:
        line += STRIDE
        failing = FailsOnce(error, line)
        try:
            with unchanged.unchanged(work):
                run(work)
                sys.settrace(failing)
                failing.armed = True
        except BaseException as found:
            raised.add(type(found))
        finally:
            sys.settrace(None)
        assert_same(before, snapshot(work))
        if failing.left > 0:  # there are no more lines
            break
    assert line > 50
    assert raised == ({KeyboardInterrupt} if isinstance(error, KeyboardInterrupt) else set())


@pytest.mark.parametrize("call", ["profile", "fake profile", "plan", "verify"])
def test_copies_that_fail_once_while_restoring_leave_nothing_changed(call, monkeypatch):
    work = workload()
    plain = lowtide.profile(work)
    found = lowtide.plan(work, "90%", profile=plain, engine="eager", allow="microbatch")
    calls = {
        "profile": lambda: lowtide.profile(work),
        "fake profile": lambda: lowtide.profile(work, fake=True),
        "plan": lambda: lowtide.plan(work, "90%", profile=plain, engine="eager", allow="microbatch"),
        "verify": lambda: lowtide.verify(work, found),
    }
    before = snapshot(work)
    copy, count = Tensor.copy_, 0

    def failing(self, *args, **kwargs):
        nonlocal count
        if sys._getframe(1).f_code.co_name == "restore":
            count += 1
            if count % 2:
                raise RuntimeError("injected")
        return copy(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "copy_", failing)
    calls[call]()
    assert (count > 0) == (call != "fake profile")
    assert_same(before, snapshot(work))


def test_state_that_cannot_be_restored_is_named_and_the_rest_is_restored(monkeypatch):
    work = workload()
    before = snapshot(work)
    copy, weight = Tensor.copy_, work.model.weight
    values = weight.detach().clone()

    def failing(self, *args, **kwargs):
        if self.data_ptr() == weight.data_ptr() and sys._getframe(1).f_code.co_name == "restore":
            raise RuntimeError("injected")
        return copy(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "copy_", failing)
    with pytest.raises(RestoreError, match=r": weight \(RuntimeError: injected\).*checkpoint"):
        lowtide.profile(work)
    monkeypatch.undo()
    weight.data.copy_(values)
    after = snapshot(work)
    for each in (before, after):  # writing counts
        each["values"]["weight"] = each["values"]["weight"][2]
    assert_same(before, after)


def test_an_interrupt_waits_until_all_is_restored():
    restored = []
    both = Restoring()
    both.add("second", restored.append, "second")
    both.add("first", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        both.close()
    assert restored == ["second"]
