"""Loss scaling: gradients arrive in their own size, whichever losses they are of."""

import copy
import io
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from lowtide import Workload, microbatch
from lowtide.errors import LowtideError
from lowtide.optim import LossScale, lower_state, step_in_backward, store_gradients
from lowtide.techniques import Option, techniques
from tests.optim.training import BATCHES, equal, make


def made(optimizer=torch.optim.SGD):
    weight = nn.Parameter(torch.zeros(4))
    return weight, optimizer([weight], lr=1.0)


def test_a_step_with_overflown_gradients_is_left_out_also_with_states_on_the_host():
    weight, optimizer = made(torch.optim.AdamW)
    lower_state(optimizer, "cpu")
    scale = LossScale()
    scale.guard(optimizer)
    weight.grad = torch.full((4,), float("inf"))
    optimizer.step()
    assert torch.equal(weight, torch.zeros(4))
    assert scale.value == 2.0**15


@pytest.mark.parametrize("other", [step_in_backward, store_gradients])
def test_a_scale_and_what_leaves_no_gradients_refuse_each_other(other):
    _, optimizer = made()
    with LossScale().guard(optimizer), pytest.raises(LowtideError, match="scaled loss"):
        other(optimizer)
    with other(optimizer), pytest.raises(LowtideError, match="scaled loss"):
        LossScale().guard(optimizer)
    LossScale().guard(optimizer)


# -- whose gradients are scaled ----------------------------------------------------------------------------


def model_and_losses():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    first, second = torch.randn(2, 8, 16)
    return model, lambda: model(first).square().mean(), lambda: model(second).exp().mean()


def gradients_of(model, backward):
    model.zero_grad()
    backward()
    return [p.grad.clone() for p in model.parameters()]


def test_an_unscaled_loss_between_keeps_its_gradients():
    model, main, other = model_and_losses()
    scale = LossScale()  # a power of two: scaling in float32 changes no bit

    def both(around):
        around(main()).backward()
        other().backward()
        around(main()).backward()

    expected = gradients_of(model, lambda: both(lambda loss: loss))
    found = gradients_of(model, lambda: both(lambda loss: scale.scale(loss, model)))
    assert equal(found, expected)


def test_two_scaled_losses_made_at_different_scales_have_backward_passes_of_their_own():
    model, main, other = model_and_losses()
    scale = LossScale()

    def separately():
        first = scale.scale(main(), model)
        scale.value /= 8  # as a step would that overflowed
        second = scale.scale(other(), model)
        first.backward()
        second.backward()

    expected = gradients_of(model, lambda: (main().backward(), other().backward()))
    assert equal(gradients_of(model, separately), expected)


def test_a_penalty_is_scaled_with_the_loss_or_by_itself():
    model, main, _ = model_and_losses()
    scale = LossScale()

    def penalty():
        return 0.1 * sum(p.square().sum() for p in model.parameters())

    expected = gradients_of(model, lambda: (main() + penalty()).backward())
    assert equal(gradients_of(model, lambda: scale.scale(main() + penalty(), model).backward()), expected)
    apart = gradients_of(model, lambda: (scale.scale(main(), model) + scale.scale(penalty(), model)).backward())
    assert equal(apart, expected)
    alone = gradients_of(model, lambda: (scale.scale(main(), model).backward(), penalty().backward()))
    for mine, plain in zip(alone, expected, strict=True):  # summed in another order
        torch.testing.assert_close(mine, plain)


def test_a_share_of_a_scaled_loss_and_gradients_taken_by_hand_are_right():
    model, main, _ = model_and_losses()
    scale = LossScale()
    expected = gradients_of(model, lambda: (main() / 4).backward())
    assert equal(gradients_of(model, lambda: (scale.scale(main(), model) / 4).backward()), expected)
    found = torch.autograd.grad(scale.scale(main(), model) / 4, list(model.parameters()))
    assert equal(found, expected)


def test_a_backward_pass_that_fails_leaves_no_scale_behind():
    model, main, other = model_and_losses()
    scale = LossScale()
    expected = gradients_of(model, lambda: other().backward())

    def fail(gradient):
        raise ValueError("stopped")

    output = main()
    output.register_hook(fail)
    with pytest.raises(ValueError, match="stopped"):
        scale.scale(output, model).backward()
    assert equal(gradients_of(model, lambda: other().backward()), expected)


def test_a_backward_pass_inside_of_a_scaled_one_is_scaled_with_it():
    model, _, _ = model_and_losses()
    scale, x = LossScale(), torch.randn(8, 16, requires_grad=True)

    def loss():  # a reentrant checkpoint runs backward inside of backward
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).square().mean()

    expected = gradients_of(model, lambda: loss().backward())
    assert equal(gradients_of(model, lambda: scale.scale(loss(), model).backward()), expected)


def test_pieces_of_a_batch_are_scaled_each_by_itself():
    """By the microbatch's own sums, which are given to the parameters in a backward pass that has no scale."""
    model = nn.Linear(16, 4)
    scale = LossScale()
    work = Workload(model, lambda m, x: scale.scale(m(x).square().mean(), m), torch.randn(8, 16))
    plain = replace(work, loss=lambda m, x: m(x).square().mean())
    expected = gradients_of(model, lambda: microbatch(plain, 2).compute_loss().backward())
    assert equal(gradients_of(model, lambda: microbatch(work, 2).compute_loss().backward()), expected)


# -- saved and resumed -------------------------------------------------------------------------------------


def test_the_scale_is_saved_and_loaded_with_the_optimizer():
    weight, optimizer = made(torch.optim.AdamW)
    scale = LossScale(initial=2.0**10, growth_interval=3)
    with scale.guard(optimizer):
        for value in (float("inf"), 1.0, 1.0):
            weight.grad = torch.full((4,), value)
            optimizer.step()
        assert scale.state_dict() == {"value": 2.0**9, "good_steps": 2}
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert "loss_scale" not in optimizer.state_dict()["param_groups"][0]

    again, other = LossScale(growth_interval=3), made(torch.optim.AdamW)[1]
    with again.guard(other):
        other.load_state_dict(saved)
        assert again.state_dict() == scale.state_dict()
        assert "loss_scale" not in other.param_groups[0]
    plain = made(torch.optim.AdamW)[1]
    before = LossScale()
    with before.guard(plain):
        plain.load_state_dict(made(torch.optim.AdamW)[1].state_dict())  # saved without a scale
        assert before.state_dict() == LossScale().state_dict()


def test_a_float16_run_of_the_technique_resumes_bit_for_bit():
    def start():
        model = make()
        work = Workload(
            model, lambda m, x: m(x).float().square().mean(), BATCHES[0], torch.optim.AdamW(model.parameters())
        )
        option = Option("precision", ("",), (("autocast", "float16"),))
        return model, techniques()["precision"].apply(work, [option]).work

    def steps(work, batches):
        for x in batches:
            work.optimizer.zero_grad()
            work.compute_loss(batch=x).backward()
            work.optimizer.step()
        return [p.detach().clone() for p in work.model.parameters()]

    model, work = start()
    work.loss.scale.growth_interval = 3
    steps(work, [BATCHES[0], BATCHES[1] * 1e8, *BATCHES[2:4]])  # one of them overflows
    saved = copy.deepcopy((model.state_dict(), work.optimizer.state_dict()))
    assert work.loss.scale.state_dict() == {"value": 2.0**15, "good_steps": 2}
    expected, scale = steps(work, BATCHES[4:8]), work.loss.scale.state_dict()
    model, work = start()
    work.loss.scale.growth_interval = 3
    model.load_state_dict(saved[0])
    work.optimizer.load_state_dict(saved[1])
    assert equal(steps(work, BATCHES[4:8]), expected)
    assert work.loss.scale.state_dict() == scale
