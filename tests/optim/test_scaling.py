"""Loss scaling: gradients arrive in their own size, whichever losses they are of."""

import copy
import io
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from lowtide import Workload, microbatch
from lowtide.optim import LossScale, lower_state, scale_rates, step_in_backward, store_gradients
from lowtide.techniques import Option, techniques
from lowtide.techniques.precision import PrecisionConfig
from tests.optim.training import BATCHES, equal, make
from tests.refusals import refused


def built(optimizer=torch.optim.SGD):
    weight = nn.Parameter(torch.zeros(4))
    return weight, optimizer([weight], lr=1.0)


def test_a_step_with_overflown_gradients_is_left_out_also_with_states_on_the_host():
    weight, optimizer = built(torch.optim.AdamW)
    lower_state(optimizer, "cpu")
    scale = LossScale()
    scale.guard(optimizer)
    weight.grad = torch.full((4,), float("inf"))
    optimizer.step()
    assert torch.equal(weight, torch.zeros(4))
    assert scale.value == 2.0**15


@pytest.mark.parametrize(
    "gradient",
    [
        torch.full((10_000,), 700.0, dtype=torch.float16),
        torch.full((4,), 1e20),
        torch.full((4,), 1e300, dtype=torch.float64),
        torch.ones(0),
    ],
    ids=["float16", "float32", "float64", "empty"],
)
def test_gradients_that_are_finite_are_stepped_however_large_their_norm_is(gradient):
    weight, other = nn.Parameter(torch.zeros_like(gradient)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight, other], lr=0.5)
    scale = LossScale()
    scale.guard(optimizer)
    weight.grad, other.grad = gradient.clone(), torch.ones(2)
    optimizer.step()
    assert torch.equal(weight, -0.5 * gradient)
    assert scale.state_dict() == {"value": 2.0**16, "good_steps": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_value_that_is_not_finite_leaves_the_step_out(dtype, value):
    weight, other = nn.Parameter(torch.zeros(1000, dtype=dtype)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([other, weight], lr=0.5)
    scale = LossScale()
    scale.guard(optimizer)
    weight.grad, other.grad = torch.ones(1000, dtype=dtype), torch.ones(2)
    weight.grad[500] = value
    optimizer.step()
    assert not weight.any()
    assert not other.any()
    assert scale.value == 2.0**15


# -- several optimizers ------------------------------------------------------------------------------------


def scales_over(iterations, step):
    """The scale after each iteration, for the losses' factors of two optimizers."""
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1e-3) for weight in weights]
    model = nn.ParameterList(weights)
    return step(
        model, optimizers, [lambda f=f: [w.sum() * x for w, x in zip(weights, f, strict=True)] for f in iterations]
    )


def with_grad_scaler(model, optimizers, iterations):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    actual = []
    for losses in iterations:
        model.zero_grad()
        scaler.scale(sum(losses())).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        actual.append(scaler.get_scale())
    return actual, [p.detach() for p in model.parameters()]


def with_loss_scale(model, optimizers, iterations):
    scale = LossScale(initial=16.0, growth_interval=2)
    for optimizer in optimizers:
        scale.guard(optimizer)
    actual = []
    for losses in iterations:
        model.zero_grad()
        scale.scale(sum(losses()), model).backward()
        for optimizer in optimizers:
            optimizer.step()
        actual.append(scale.value)
    return actual, [p.detach() for p in model.parameters()]


def test_one_scale_of_two_optimizers_changes_once_an_iteration_as_grad_scalers():
    big = float("inf")
    iterations = [(1, 1), (1, 1), (big, big), (1, 1), (1, big), (big, 1), (1, 1), (1, big), (1, 1), (1, 1)]
    expected, weights = scales_over(iterations, with_grad_scaler)
    actual, mine = scales_over(iterations, with_loss_scale)
    assert actual == expected
    assert min(expected) < 16 < max(expected)
    assert equal(mine, weights)


@pytest.mark.parametrize("other", [step_in_backward, store_gradients])
def test_a_scale_and_what_leaves_no_gradients_refuse_each_other(other):
    _, optimizer = built()
    with LossScale().guard(optimizer), refused("scaled loss"):
        other(optimizer)
    with other(optimizer), refused("scaled loss", "bfloat16"):
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
    actual = gradients_of(model, lambda: both(lambda loss: scale.scale(loss, model)))
    assert equal(actual, expected)


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
    actual = torch.autograd.grad(scale.scale(main(), model) / 4, list(model.parameters()))
    assert equal(actual, expected)


def test_a_backward_pass_that_fails_leaves_no_scale_behind():
    model, main, other = model_and_losses()
    scale = LossScale()
    expected = gradients_of(model, lambda: other().backward())

    def fail(gradient):
        raise ZeroDivisionError

    output = main()
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
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
    weight, optimizer = built(torch.optim.AdamW)
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

    again, other = LossScale(growth_interval=3), built(torch.optim.AdamW)[1]
    with again.guard(other):
        other.load_state_dict(saved)
        assert again.state_dict() == scale.state_dict()
        assert "loss_scale" not in other.param_groups[0]
    plain = built(torch.optim.AdamW)[1]
    before = LossScale()
    with before.guard(plain):
        plain.load_state_dict(built(torch.optim.AdamW)[1].state_dict())  # saved without a scale
        assert before.state_dict() == LossScale().state_dict()


def test_a_float16_run_of_the_technique_resumes_bit_for_bit():
    def start():
        model = make()
        work = Workload(
            model, lambda m, x: m(x).float().square().mean(), BATCHES[0], torch.optim.AdamW(model.parameters())
        )
        option = Option("precision", ("",), PrecisionConfig("float16"))
        work = techniques()["precision"].apply(work, [option]).work
        work.loss.scale.growth_interval = 3
        return model, work

    def steps(work, batches):
        for x in batches:
            work.optimizer.zero_grad()
            work.compute_loss(batch=x).backward()
            work.optimizer.step()
        return [p.detach().clone() for p in work.model.parameters()]

    model, work = start()
    steps(work, [BATCHES[0], BATCHES[1] * 1e8, *BATCHES[2:4]])  # one of them overflows
    saved = copy.deepcopy((model.state_dict(), work.optimizer.state_dict()))
    assert work.loss.scale.state_dict() == {"value": 2.0**15, "good_steps": 2}
    expected, scale = steps(work, BATCHES[4:8]), work.loss.scale.state_dict()
    model, work = start()
    model.load_state_dict(saved[0])
    work.optimizer.load_state_dict(saved[1])
    assert equal(steps(work, BATCHES[4:8]), expected)
    assert work.loss.scale.state_dict() == scale


def test_the_scale_is_loaded_with_states_by_bitsandbytes_too():
    pytest.importorskip("bitsandbytes")

    def start():
        weight = nn.Parameter(torch.ones(64, 64))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        lower_state(optimizer, "8bit")
        scale = LossScale()
        scale.guard(optimizer)
        return weight, optimizer, scale

    weight, optimizer, scale = start()
    for value in (1.0, float("inf")):
        weight.grad = torch.full((64, 64), value)
        optimizer.step()
    twin, other, again = start()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.state_dict() == scale.state_dict() == {"value": 2.0**15, "good_steps": 0}
    assert "loss_scale" not in other.param_groups[0]
    assert torch.equal(other.state[twin]["state1"], optimizer.state[weight]["state1"])


WAYS = {
    "8bit": lambda optimizer: lower_state(optimizer, "8bit"),
    "cpu": lambda optimizer: lower_state(optimizer, "cpu"),
    "rates": lambda optimizer: scale_rates(optimizer, 4, warmup_steps=0),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("overflows", [False, True])
def test_fused_optimizers_are_unscaled_by_torchs_scaler_and_leave_out_overflown_steps(way, overflows):
    """Fused, torch hands its scale to the optimizer's own step, which is then another one's."""
    actual = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        undo = way(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for i in range(4):
            x = torch.randn(8, 64) * (torch.inf if overflows and i == 2 else 1)
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        actual.append(model.weight.detach().clone())
        undo()
        assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused
    assert actual[1].isfinite().all()
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-4, atol=1e-5)
