"""A scope is open for one outermost forward, whatever happens in it, and other owners of saved tensors come first."""

import copy
import gc
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.compat.modules import GLOBAL_HOOKS
from lowtide.nn import BatchNormAct2d, keep_one_buffer
from lowtide.nn.rebuild import scope
from tests.nn.plain import ONE_BUFFER, assert_same, batch, gradients, hooks_now, networks, pair

# -- hooks on all modules --------------------------------------------------------------------------------


def test_a_layer_that_dies_while_another_model_is_compiled_takes_no_hooks_with_it():
    layers = [BatchNormAct2d(4)]

    def backend(graph, inputs):
        layers.clear()
        gc.collect()
        return graph.forward

    x = torch.ones(1, 2)
    plain = nn.Linear(2, 2)
    assert torch.equal(torch.compile(plain, backend=backend)(x), plain(x))  # Dynamo guards hooks that it has seen


def test_hooks_on_all_modules_live_as_long_as_layers_do():
    gc.collect()
    nn.Identity()(1)  # hooks of earlier layers go
    before, filters = [dict(hooks) for hooks in GLOBAL_HOOKS], list(warnings.filters)
    layers = [BatchNormAct2d(4), BatchNormAct2d(4)]
    layers.append(copy.deepcopy(layers[0]))
    during = [len(hooks) for hooks in GLOBAL_HOOKS]
    while layers:
        assert [len(hooks) for hooks in GLOBAL_HOOKS] == during
        layers.pop()
        gc.collect()
    nn.Identity()(1)  # the next forward removes them
    assert [dict(hooks) for hooks in GLOBAL_HOOKS] == before
    assert warnings.filters == filters
    assert before != during


def test_models_without_such_a_layer_see_no_hooks():
    layer, seen = BatchNormAct2d(4), []
    other = nn.Sequential(nn.Conv2d(4, 4, 1))
    other[0].register_forward_hook(lambda *args: seen.append(hooks_now()))
    other(batch().float())
    other.append(layer)
    other(batch().float())
    assert seen[0] is None
    assert seen[1] is not None, "a layer that joins a model later is seen"


def test_a_scope_by_hand_works_inside_a_model_without_such_a_layer():
    layer, plain = pair("checkpoint")

    class ByHand(nn.Module):
        def forward(self, x, norm, weight):
            with keep_one_buffer():
                assert scope.replaces
                return nn.functional.conv2d(norm(x), weight)

    def run(norm):
        x, weight = batch().float().requires_grad_(), torch.ones(4, 4, 1, 1, requires_grad=True)
        norm.zero_grad()
        ByHand()(x, norm, weight).square().sum().backward()
        return x.grad, weight.grad

    assert_same(run, layer, plain)
    assert not scope.is_open


def test_without_gradients_no_scope_is_opened():
    ours, plain = networks("checkpoint")
    seen = []
    ours[0].register_forward_hook(lambda *args: seen.append(hooks_now()))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(ours(batch()), plain(batch()))
    assert seen == [None, None]


# -- interruptions -------------------------------------------------------------------------------------


class Stop(nn.Module):
    """Raises once, in the middle of a forward."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return x


class Retry(nn.Module):
    """A model that goes on by itself."""

    def __init__(self, inner, error):
        super().__init__()
        self.inner, self.error = inner, error

    def forward(self, x):
        try:
            return self.inner(x)
        except self.error:
            return self.inner(x)


def interrupted(model):
    with pytest.raises(KeyboardInterrupt):
        nn.Sequential(*model, Stop(KeyboardInterrupt()))(batch())


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_forward_that_is_interrupted_leaves_the_next_one_right(strategy, error):
    ours, plain = networks(strategy)
    expected = gradients(plain, batch())
    stopping = nn.Sequential(ours[0], ours[1], Stop(error()), ours[2])
    with pytest.raises(error):
        stopping(batch())
    if error is ValueError:
        assert hooks_now() is None
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in stopping.modules())
    torch.testing.assert_close(gradients(stopping, batch()), expected)
    stopping[2].error = error()
    torch.testing.assert_close(gradients(Retry(stopping, error), batch()), expected)
    torch.testing.assert_close(gradients(stopping, batch()), expected)
    assert hooks_now() is None
    assert not scope.is_open


def test_between_an_interrupted_forward_and_the_next_other_steps_are_right():
    ours, _ = networks("checkpoint")
    interrupted(ours)
    weight = torch.randn(4, 4, requires_grad=True)  # no module is called, so no scope is closed
    (weight @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, weight.detach().sum(1).expand(4, 4) + weight.detach().sum(0)[:, None])
    ours(batch())
    assert hooks_now() is None
    assert not scope.is_open


def test_a_checkpoint_after_an_interruption_leaves_later_steps_right():
    ours, plain = networks("checkpoint")
    interrupted(ours)
    expected = gradients(plain, batch())
    for call in (partial(checkpoint, use_reentrant=False), nn.Module.__call__, nn.Module.__call__):
        torch.testing.assert_close(gradients(ours, batch(), call), expected)
    assert hooks_now() is None


def test_the_step_after_an_interruption_keeps_one_buffer():
    ours, _ = networks("checkpoint")
    interrupted(ours)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        ours(batch().requires_grad_())
    assert saved.count(batch().shape) == 2  # the input and the first convolution's result, but not z


# -- scopes by hand, and several models ------------------------------------------------------------------


def test_a_scope_by_hand_closes_when_interrupted():
    ours, _ = networks("checkpoint")
    with keep_one_buffer():
        interrupted(ours)
    assert not scope.is_open
    assert hooks_now() is None


def test_scopes_by_hand_nest():
    ours, plain = networks("checkpoint")
    with keep_one_buffer(), keep_one_buffer():
        outer = hooks_now()
        z = ours(batch())
        assert hooks_now() == outer
    assert hooks_now() is None
    z.square().sum().backward()
    torch.testing.assert_close([p.grad for p in ours.parameters()], gradients(plain, batch())[1:])


def test_several_forwards_in_a_scope_by_hand_give_torchs_gradients():
    def run(net):
        with keep_one_buffer():
            loss = net(batch()).square().sum() + net(net(batch(4))).square().sum()
        loss.backward()
        return [p.grad for p in net.parameters()]

    assert_same(run, *networks("checkpoint"))


def test_models_in_a_row_give_torchs_gradients():
    """The second does not read what the first rebuilt: the first's scope is closed."""
    ours, plain = zip(networks("checkpoint"), networks("checkpoint_xhat", seed=1), strict=True)

    def run(models):
        return gradients(nn.Sequential(models[0][:2], models[1]), batch(), lambda net, x: net[1](net[0](x)))

    assert_same(run, ours, plain)


def test_a_penalty_on_gradients_through_a_scope_gives_torchs_gradients():
    def run(net):
        leaves = list(net.parameters())
        first = torch.autograd.grad(net(batch()).square().sum(), leaves, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        return [p.grad for p in leaves]

    assert_same(run, *networks("checkpoint", "silu"))


# -- threads and checkpoints -----------------------------------------------------------------------------


def test_threads_have_scopes_of_their_own():
    expected, results, errors = {}, {}, []
    start = threading.Barrier(4)

    def work(i, net):
        try:
            start.wait()
            for _ in range(5):
                results[i] = gradients(net, batch(i))
        except Exception as error:
            errors.append(error)

    pairs = {i: networks(s, seed=i) for i, s in enumerate(("checkpoint", "checkpoint_xhat", "inplace", "checkpoint"))}
    for i, (_, plain) in pairs.items():
        expected[i] = gradients(plain, batch(i))
    threads = [threading.Thread(target=work, args=(i, ours)) for i, (ours, _) in pairs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    torch.testing.assert_close(results, expected)


def test_backward_may_run_in_another_thread():
    ours, plain = networks("checkpoint")
    loss = ours(batch()).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close([p.grad for p in ours.parameters()], gradients(plain, batch())[1:])


class Checkpointed(nn.Module):
    def __init__(self, net, reentrant):
        super().__init__()
        self.block, self.rest, self.reentrant = nn.Sequential(*net[:2]), net[2], reentrant

    def forward(self, x):
        return self.rest(checkpoint(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strategy", ONE_BUFFER)
def test_a_users_checkpoint_in_or_around_the_model_gives_torchs_gradients(strategy, reentrant):
    ours, plain = networks(strategy)
    expected = gradients(plain, batch())
    torch.testing.assert_close(gradients(Checkpointed(ours, reentrant), batch()), expected)
    torch.testing.assert_close(gradients(ours, batch(), partial(checkpoint, use_reentrant=reentrant)), expected)
    assert hooks_now() is None
