"""Loops as people write them, with a planned loss: the bits of plain PyTorch, or an error that says why not."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload, apply, plan
from lowtide.errors import LowtideError
from tests.models import layers, squares
from tests.refusals import refused, warned

from .counting import Counter
from .planned import Loss, Ready, planned

# Once for a step, and these tests share theirs; the budget is near the smallest.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients of .* exist before the step")


def test_hooks_of_parameters_see_and_change_gradients(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        seen: dict[str, Tensor] = {}

        def halve(gradient: Tensor, name: str) -> Tensor:
            assert name not in seen
            seen[name] = gradient.clone()
            return gradient / 2

        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        hooks = [p.register_hook(partial(halve, name=n)) for n, p in trained]
        value = loss(ready.work.batch)
        value.backward()
        for hook in hooks:
            hook.remove()
        assert len(seen) == len(trained)
        return [value.detach(), *(seen[n] for n, _ in trained)]

    ready.compare(loop)


def in_backward(loss: Loss, model: nn.Module, data: list[Tensor]) -> list[Tensor]:
    def update(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters() if p.requires_grad]
    losses = []
    for batch in data:
        value = loss(batch)
        value.backward()
        losses.append(value.detach())
    for hook in hooks:
        hook.remove()
    assert all(p.grad is None for p in model.parameters())
    return losses


def test_an_optimizer_that_steps_in_backward_steps_as_in_plain_pytorch(ready: Ready) -> None:
    ready.compare(lambda loss, model: in_backward(loss, model, ready.batches(3)))


def test_gradients_accumulate_over_microbatches(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            for batch in ready.batches(4):
                (loss(batch) / 4).backward()
            optimizer.step()
        return []

    ready.compare(loop)


def test_two_losses_go_backward_together(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        first, second = ready.batches(2)
        (loss(first) + 2 * loss(second)).backward()
        return []

    # Autograd adds up four gradients of what is tied, in its order: a planned loss has added up two of them before.
    ready.compare(loop, close=["1.linear.weight", "1.linear.bias"])


def test_clipping_and_a_scheduler(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        norms = []
        for batch in ready.batches(3):
            optimizer.zero_grad()
            loss(batch).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            scheduler.step()
        return norms

    ready.compare(loop)


def test_a_gradient_scaler_leaves_an_overflow_out(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i, batch in enumerate(ready.batches(3)):
            optimizer.zero_grad()
            scaler.scale(loss(batch) * (float("inf") if i == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 2.0**10
        return []

    ready.compare(loop)


def test_autograd_grad_of_all_and_of_some_parameters(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        trained = [p for p in model.parameters() if p.requires_grad]
        tensors: list[Tensor] = []
        for some in (trained, trained[:1], trained[-2:]):
            tensors += torch.autograd.grad(loss(ready.work.batch), some)
        assert all(p.grad is None for p in trained)
        return tensors

    ready.compare(loop)


def test_evaluation_without_gradients_then_training_again(ready: Ready) -> None:
    def loop(loss: Loss, model: nn.Module) -> list[Tensor]:
        found = []
        for mode in (True, False, True):
            model.train(mode)
            value = loss(ready.work.batch)
            value.backward()
            with torch.no_grad():
                found += [value.detach(), loss(ready.work.batch), loss(ready.work.batch[:5])]
            with torch.inference_mode():
                found.append(loss(ready.work.batch).clone())
        assert not any(value.requires_grad for value in found)
        return found

    with warned("planned anew"):  # evaluated, and then backward
        ready.compare(loop)


def test_only_what_is_trained_has_gradients(ready: Ready) -> None:
    model = ready.work.model
    ready.step.loss(ready.work.batch).backward()
    with_gradients = {n for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert with_gradients == {n for n, p in model.named_parameters() if p.requires_grad}


def test_the_loss_is_freed_with_all_it_kept_where_no_backward_runs(ready: Ready) -> None:
    with Counter() as counter:
        value = ready.step.loss(ready.work.batch)
        assert counter.bytes > ready.work.batch.nbytes
        del value
        assert counter.bytes == 0


def test_a_model_is_let_go_with_its_planned_step() -> None:
    model = layers(4, 16)
    work = Workload(model, squares, torch.randn(256, 16))
    step = apply(plan(work, "75%", engine="graph"), work)
    step(work.batch)
    left = weakref.ref(model)
    del model, work, step
    gc.collect()
    assert left() is None


# -- gradients leave early -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide() -> Ready:
    """Gradients weigh nearly what is kept for backward; if they weighed more, no budget would make an op run again."""
    model = layers(8, 64)
    work = Workload(model, squares, torch.randn(80, 64))
    return planned(work)


def test_gradients_that_are_used_at_once_are_never_all_alive(wide: Ready) -> None:
    whole = sum(p.nbytes for p in wide.work.model.parameters())
    wide.step.loss(wide.work.batch).backward()
    wide.work.model.zero_grad()
    value = wide.step.loss(wide.work.batch)
    with Counter() as counter:
        in_backward(lambda _: value, wide.work.model, [wide.work.batch])
    above = counter.peak_bytes - 4 * wide.work.batch.nbytes  # values and their gradients, while one stage runs
    assert above < whole / 2


def test_accumulation_holds_no_second_set_of_gradients(wide: Ready) -> None:
    whole = sum(p.nbytes for p in wide.work.model.parameters())
    wide.step.loss(wide.work.batch).backward()
    with warned("Gradients"):  # the budget is for one set
        value = wide.step.loss(wide.work.batch)
    with Counter() as counter:
        value.backward()
    wide.work.model.zero_grad()
    assert counter.peak_bytes - 4 * wide.work.batch.nbytes < whole / 2
    del value


# -- refusals --------------------------------------------------------------------------------------------


def test_a_second_backward_pass_is_refused(ready: Ready) -> None:
    value = ready.step.loss(ready.work.batch)
    value.backward(retain_graph=True)
    with refused("once", kind=LowtideError):
        value.backward()
    ready.work.model.zero_grad()


def test_gradients_of_gradients_are_refused(ready: Ready) -> None:
    parameter = next(ready.work.model.parameters())
    with refused("create_graph", kind=LowtideError):
        torch.autograd.grad(ready.step.loss(ready.work.batch), parameter, create_graph=True)


@pytest.mark.parametrize("name", ["1.linear.weight", "2.mix", "3.norm.weight", "3.mix"])
def test_a_parameter_written_to_before_backward_is_autograds_error(ready: Ready, name: str) -> None:
    twin = copy.deepcopy(ready.work.model)
    losses: dict[nn.Module, Loss] = {twin: lambda batch: squares(twin, batch), ready.work.model: ready.step.loss}
    for model, loss in losses.items():
        value = loss(ready.work.batch)
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        with refused("inplace", kind=RuntimeError):
            value.backward()
    ready.work.model.zero_grad()
    ready.work.model.load_state_dict(ready.start)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_loss_written_to_before_backward_is_as_in_plain_pytorch(is_kept: bool) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        value = squares(model, x)
        return value.sqrt() if is_kept else value  # whose backward reads its result

    model = layers(4, 16)
    work = Workload(model, loss_of, torch.randn(256, 16))
    found: list[list[Tensor]] = []
    with apply(plan(work, "75%", engine="graph"), work) as step:
        for loss in (step.loss, lambda batch: work.compute_loss(batch=batch)):
            model.zero_grad()
            value = loss(work.batch)
            value /= 4
            if is_kept:
                with refused("inplace", kind=RuntimeError):
                    value.backward()
            else:
                value.backward()
                found.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert is_kept or all(map(torch.equal, *found))
