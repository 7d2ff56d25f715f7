"""A scope is open for one outermost forward, whatever happens in it, and other owners of saved tensors come first."""

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.nn import BatchNormAct2d, keep_one_buffer
from lowtide.nn.rebuild import scope
from tests.nn.plain import ONE_BUFFER, Plain, pair

SHAPE = (5, 4, 6, 6)


def hooks_now():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def batch(seed=3):
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def networks(strategy, activation="leaky_relu", **options):
    """conv-bn-act-conv with a layer of lowtide's, and with torch's."""
    layer, plain = pair(strategy, activation, **options)
    first, last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    return [nn.Sequential(copy.deepcopy(first), m, copy.deepcopy(last)).double() for m in (layer, plain)]


def gradients(net, x, call=lambda net, x: net(x)):
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    call(net, leaf).square().sum().backward()
    return [leaf.grad, *(p.grad.clone() for p in net.parameters())]


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


@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("caught", ["outside", "inside"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_forward_that_is_interrupted_leaves_the_next_one_right(strategy, error, caught):
    ours, plain = networks(strategy)
    expected = gradients(plain, batch())
    stopping = nn.Sequential(ours[0], ours[1], Stop(error()), ours[2])
    with pytest.raises(error):
        stopping(batch())
    if error is ValueError:
        assert hooks_now() is None
    if caught == "inside":  # a model that goes on by itself
        stopping[2].error = error()

        class Retry(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = stopping

            def forward(self, x):
                try:
                    return self.inner(x)
                except error:
                    return self.inner(x)

        torch.testing.assert_close(gradients(Retry(), batch()), expected)
    torch.testing.assert_close(gradients(stopping, batch()), expected)
    assert hooks_now() is None


def test_between_an_interrupted_forward_and_the_next_other_steps_are_right():
    ours, _ = networks("checkpoint")
    stopping = nn.Sequential(*ours, Stop(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        stopping(batch())
    weight = torch.randn(4, 4, requires_grad=True)  # no module is called, so no scope is closed
    (weight @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, weight.detach().sum(1).expand(4, 4) + weight.detach().sum(0)[:, None])
    ours(batch())
    assert hooks_now() is None
    assert not scope.is_open


def test_a_scope_by_hand_closes_when_interrupted():
    ours, _ = networks("checkpoint")
    stopping = nn.Sequential(*ours, Stop(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), keep_one_buffer():
        stopping(batch())
    assert not scope.is_open
    assert hooks_now() is None


def test_scopes_by_hand_nest():
    ours, plain = networks("checkpoint")
    with keep_one_buffer(), keep_one_buffer():
        outer = hooks_now()
        found = ours(batch())
        assert hooks_now() == outer
    assert hooks_now() is None
    found.square().sum().backward()
    torch.testing.assert_close([p.grad for p in ours.parameters()], gradients(plain, batch())[1:])


def test_several_forwards_in_a_scope_by_hand_give_torchs_gradients():
    ours, plain = networks("checkpoint")
    found = []
    for net in (ours, plain):
        with keep_one_buffer():
            loss = net(batch()).square().sum() + net(net(batch(4))).square().sum()
        loss.backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found)


def test_models_in_a_row_give_torchs_gradients():
    """The second reads what the first rebuilt no more: its scope is closed."""
    pairs = networks("checkpoint"), networks("checkpoint_xhat", seed=1)
    found = [gradients(nn.Sequential(first[:2], second), batch(), lambda net, x: net[1](net[0](x)))
             for first, second in zip(*pairs, strict=True)]  # fmt: skip
    torch.testing.assert_close(*found)


def test_without_gradients_no_scope_is_opened():
    ours, plain = networks("checkpoint")
    seen = []
    handle = ours[0].register_forward_hook(lambda *args: seen.append(hooks_now()))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(ours(batch()), plain(batch()))
    handle.remove()
    assert seen == [None, None]


def test_models_without_such_a_layer_see_no_hooks():
    layer = BatchNormAct2d(4)
    seen = []
    other = nn.Sequential(nn.Conv2d(4, 4, 1))
    other[0].register_forward_hook(lambda *args: seen.append(hooks_now()))
    other(torch.randn(SHAPE))
    other.append(layer)
    other(torch.randn(SHAPE))
    assert seen[0] is None
    assert seen[1] is not None, "a layer that joins a model later is seen"


def test_threads_have_scopes_of_their_own():
    expected, found, errors = {}, {}, []
    start = threading.Barrier(4)

    def work(i, net):
        try:
            start.wait()
            for _ in range(5):
                found[i] = gradients(net, batch(i))
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
    torch.testing.assert_close(found, expected)


def test_backward_may_run_in_another_thread():
    ours, plain = networks("checkpoint")
    loss = ours(batch()).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close([p.grad for p in ours.parameters()], gradients(plain, batch())[1:])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strategy", ONE_BUFFER)
@pytest.mark.parametrize("inside", [True, False], ids=["in the model", "around the model"])
def test_a_users_checkpoint_gives_torchs_gradients(strategy, reentrant, inside):
    ours, plain = networks(strategy)

    class Checkpointed(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.block = nn.Sequential(*net[:2])
            self.rest = net[2]

        def forward(self, x):
            return self.rest(checkpoint(self.block, x, use_reentrant=reentrant))

    expected = gradients(plain, batch())
    if inside:
        torch.testing.assert_close(gradients(Checkpointed(ours), batch()), expected)
    else:
        call = partial(checkpoint, use_reentrant=reentrant)
        torch.testing.assert_close(gradients(ours, batch(), call), expected)
    assert hooks_now() is None


def test_a_layer_of_a_plain_function_needs_no_scope():
    layer, plain = pair("checkpoint")
    weight = torch.randn(4, 4, 1, 1, dtype=torch.float64)
    found = []
    for net in (layer.double(), plain.double()):
        leaf = weight.clone().requires_grad_()
        z = net(nn.functional.conv2d(batch(), leaf))
        nn.functional.conv2d(z, leaf).square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)
    assert isinstance(plain, Plain)


def interrupted(model):
    stopping = nn.Sequential(*model, Stop(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        stopping(batch())


def test_a_checkpoint_after_an_interruption_leaves_later_steps_right():
    ours, plain = networks("checkpoint")
    interrupted(ours)
    expected = gradients(plain, batch())
    inside = partial(checkpoint, use_reentrant=False)
    torch.testing.assert_close(gradients(ours, batch(), inside), expected)
    for _ in range(2):
        torch.testing.assert_close(gradients(ours, batch()), expected)
    assert hooks_now() is None


def test_the_step_after_an_interruption_keeps_one_buffer():
    ours, _ = networks("checkpoint")
    interrupted(ours)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        ours(batch().requires_grad_())
    assert kept.count(batch().shape) == 2  # the input and the first convolution's result, but not z


def test_no_hook_stays_on_a_module_whose_forward_failed():
    ours, _ = networks("checkpoint")
    failing = nn.Sequential(*ours, Stop(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        failing(batch())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in failing.modules())
    assert not scope.is_open


def test_a_graph_that_is_dropped_inside_a_forward_is_let_go():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv2d(4, 4, 1), BatchNormAct2d(4)

        def forward(self, x):
            for _ in range(5):
                x = self.act(self.conv(x)).detach()
                self.records = len(scope.records)
            return self.conv(x)

    model = Stages()
    model(torch.randn(2, 4, 3, 3))
    assert model.records <= 1


def test_a_negative_view_is_not_taken_for_the_output():
    ours, plain = pair("checkpoint", "silu")
    weight = torch.randn(5, 4, 6, 3)
    for layer in (ours, plain):
        layer.zero_grad()
    found = []
    for layer in (ours, plain):
        leaf, factor = batch().float().requires_grad_(), weight.clone().requires_grad_()
        with keep_one_buffer():
            z = layer(leaf).view(5, 4, 6, 3, 2)
            out = torch.view_as_complex(z).conj().imag * factor
        out.sum().backward()
        found.append((leaf.grad, factor.grad))
    torch.testing.assert_close(*found)


def test_another_storage_at_the_same_address_is_not_the_output():
    ours, _ = pair("checkpoint", "relu")
    weight = torch.ones(SHAPE, requires_grad=True)
    with keep_one_buffer():
        z = ours(batch().float().requires_grad_())
        same = torch.from_numpy(z.detach().numpy())  # counts its own versions
        same.mul_(3)
        out = same * weight
        expected = same.clone()
    out.sum().backward()
    torch.testing.assert_close(weight.grad, expected)
