"""Looking at a step changes nothing within the line that docs/peaks.md draws, and restoring survives its own errors."""

import copy
import os
import signal
import sys
import weakref
from collections import OrderedDict, deque
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.errors import RestoreError
from lowtide.tracing import snapshot as module
from lowtide.tracing import trace
from lowtide.tracing.snapshot import Restoring, unchanged
from lowtide.tracing.step_state import walk
from tests.models import squares
from tests.refusals import warned
from tests.soak import count
from tests.tracing.comparing import assert_same, snapshot

STRIDE = count(5, soak=1)  # of the lines at which errors are injected


def workload():
    """With state of all kinds: a buffer, gradients, optimizer states, a batch that is written to."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3)
    work = Workload(model, squares, torch.randn(4, 3), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
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
        name = frame.f_code.co_qualname
        if frame.f_code.co_filename != module.__file__ or name.startswith(("unchanged", "Restoring", "_interrupts")):
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
            with unchanged(work):
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
    chosen = lowtide.plan(work, "90%", profile=plain, engine="eager", allow="microbatch")
    calls = {
        "profile": lambda: lowtide.profile(work),
        "fake profile": lambda: lowtide.profile(work, fake=True),
        "plan": lambda: lowtide.plan(work, "90%", profile=plain, engine="eager", allow="microbatch"),
        "verify": lambda: lowtide.verify(work, chosen),
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
    with pytest.raises(RestoreError) as error:
        lowtide.profile(work)
    assert "weight" in str(error.value)
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


# -- what models, losses and batches do to themselves ------------------------------------------------------


class Rebinding(nn.Module):
    """Rebinds a buffer, registers another on the way, and keeps a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.log = []

    def forward(self, x):
        self.count = self.count + 1
        if "seen" not in self._buffers:
            self.register_buffer("seen", torch.ones(4, device=x.device))
        self.log.append(x.shape)
        return self.linear(x) * self.seen


WAYS = [{}, {"fake": True}, {"fake": True, "device": "h200"}]


@pytest.mark.parametrize("how", WAYS, ids=["real", "fake", "h200"])
def test_buffers_that_a_model_rebinds_or_registers_are_as_before(how):
    work = Workload(Rebinding(), squares, torch.randn(3, 4))
    before = snapshot(work)
    trace(work, **how)
    assert_same(before, snapshot(work))
    assert work.model.log == []
    assert "seen" not in work.model.state_dict()


@pytest.mark.parametrize("how", WAYS[:2], ids=["real", "fake"])
def test_a_batch_that_requires_gradients_gets_none(how):
    batch = torch.randn(3, 4, requires_grad=True)
    trace(Workload(nn.Linear(4, 4), squares, batch), **how)
    assert batch.grad is None


@pytest.mark.parametrize("how", WAYS[:2], ids=["real", "fake"])
def test_a_loss_may_take_its_batch_apart(how):
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}
    work = Workload(nn.Linear(4, 4), lambda model, b: (model(b.pop("x")) - b.pop("y")).square().mean(), batch)
    trace(work, **how)
    assert list(batch) == ["x", "y"]


def test_a_fused_optimizer_counts_no_versions_and_is_undone_all_the_same():
    model = nn.Linear(4, 4)
    work = Workload(model, squares, torch.randn(3, 4), torch.optim.AdamW(model.parameters(), fused=True))
    for _ in range(2):  # without a state, and with one
        before = snapshot(work)
        trace(work)
        assert_same(before, snapshot(work))
        work.compute_loss().backward()
        work.optimizer.step()


class ThroughData(torch.optim.Optimizer):
    """As many published optimizers: its writes are not counted."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


def test_what_is_written_through_data_is_restored():
    model = nn.Linear(4, 4)

    def loss(model, x):
        model.weight.data.clamp_(-0.1, 0.1)
        return model(x).square().mean()

    before = copy.deepcopy(model.state_dict())
    work = Workload(model, loss, torch.randn(8, 4), ThroughData(model.parameters()))
    trace(work)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Keeping(nn.Module):
    """A linear layer that keeps something beside it."""

    def __init__(self, kept, keep):
        super().__init__()
        self.linear, self.kept, self.keep = nn.Linear(4, 4), kept, keep

    def forward(self, x):
        x = self.linear(x)
        self.keep(self, x.detach())
        return x


class Guarded(OrderedDict):
    """As some libraries' outputs are."""

    def clear(self):
        raise TypeError("cannot be cleared")

    def update(self, *args, **kwargs):
        raise TypeError("cannot be updated")


class Odd:
    """An object that has no answer."""

    __slots__ = ("__weakref__",)

    def __getattr__(self, name):
        raise KeyError(name)


def rebind(model, x):
    """Give tensors other data, which no version counts."""
    model.kept["average"].data = model.kept["average"].data * 0.9 + 1
    model.kept["sizes"].data = torch.ones(8)


def hard_to_copy():
    with torch.inference_mode():
        fixed = torch.ones(3)
    gone = weakref.proxy(Odd())
    return [Odd(), gone, fixed, torch.empty(3, device="meta"), torch.ones(4, 4).to_mkldnn(), torch.eye(3).to_sparse()]


KEEPING = {
    "written in place": (lambda: torch.zeros(1).expand(4), lambda model, x: model.kept.data[0].add_(1)),
    "other data": (lambda: {"average": torch.zeros(3), "sizes": torch.zeros(4)}, rebind),
    "guarded": (lambda: Guarded(last=None), lambda model, x: model.kept.__setitem__("last", x)),
    "nested": (lambda: {"a": [set(), (deque(maxlen=1),)]}, lambda model, x: model.kept["a"][1][0].append(x)),
    "long": (lambda: [0] * 2000, lambda model, x: model.kept.append(x)),
    "hard to copy": (hard_to_copy, lambda model, x: model.kept.pop()),
}


@pytest.mark.parametrize("how", WAYS[:2], ids=["real", "fake"])
@pytest.mark.parametrize("name", KEEPING)
def test_tensors_in_attributes_and_containers_are_restored(name, how):
    make, keep = KEEPING[name]
    model = Keeping(make(), keep)
    before = [repr(each) if type(each) is not weakref.ProxyType else None for each in walk([model.kept])]
    trace(Workload(model, squares, torch.randn(3, 4)), **how)
    after = [repr(each) if type(each) is not weakref.ProxyType else None for each in walk([model.kept])]
    assert before == after


class Store:
    features = None


@pytest.mark.parametrize("fake", [False, True])
def test_a_tensor_that_an_object_keeps_is_warned_about(fake):
    model = Keeping(Store(), lambda model, x: setattr(model.kept, "features", x))
    with warned("addmm [3, 4]") as caught:
        trace(Workload(model, squares, torch.randn(3, 4)), fake=fake)
    assert ("fake" in str(caught[0].message)) == fake


def test_a_parameter_with_other_data_is_the_steps_own():
    class Rebinding(torch.optim.SGD):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - parameter.grad

    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    trace(Workload(model, squares, torch.randn(3, 4), Rebinding(model.parameters())))  # without a warning
    assert torch.equal(model.weight, before)


@cache
def table(length):
    return torch.arange(length, dtype=torch.float32).cos()


def test_a_cached_table_is_no_matter_for_a_warning():
    trace(Workload(nn.Linear(4, 4), lambda model, x: (model(x) * table(4)).mean(), torch.randn(3, 4)))
    assert table.cache_info().currsize == 1


def test_the_gradient_of_a_parameter_that_nothing_names_is_warned_about():
    hidden = [[nn.Parameter(torch.ones(4))]]
    work = Workload(nn.Linear(4, 4), lambda model, x: hidden_loss(model, x), torch.randn(3, 4))

    def hidden_loss(model, x):
        return (model(x) * hidden[0][0]).mean()

    with warned("sum [1, 4]"):
        trace(work)
