"""The bytes that ``convert`` reports: right by torch.profiler's count; a step that is not the model's is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.errors import TraceError, WorkloadError
from lowtide.nn import BatchNormAct2d
from lowtide.techniques.batchnorm import Memory, convert
from lowtide.workload import Workload
from tests.models import squares
from tests.refusals import refused
from tests.soak import in_soak
from tests.tracing.allocator import allocated_peak, kept_bytes

LOSS_BYTES = 4


def chain(side: int = 16) -> Workload:
    """Ops that allocate nothing inside themselves: the allocated peak is that of the tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.BatchNorm2d(8), nn.SiLU())))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Workload(model, squares, torch.randn(16, 8, side, side), optimizer)


def held_by_layers(model: nn.Module) -> int:
    """Each layer holds the mean and 1/σ of its channels in float32."""
    return sum(2 * 4 * layer.num_features for layer in model.modules() if isinstance(layer, BatchNormAct2d))


def kept(work: Workload) -> int:
    return kept_bytes(work.model, work.loss, work.batch)


def memory(work: Workload, joins: int = 1) -> Memory:
    actual = convert(work.model, joins=joins, work=work).memory
    assert actual is not None
    return actual


@pytest.mark.parametrize(("name", "joins"), [("wrn28-2", 2), *in_soak([("resnet18", 1), ("resnet18", 4), ("unet", 1)])])
def test_saved_bytes_are_what_the_forward_pass_leaves_allocated(name: str, joins: int) -> None:
    work = zoo.small(name)
    plain = kept(work)
    actual = memory(work, joins)
    assert actual.saved_bytes_before == plain - LOSS_BYTES
    assert actual.saved_bytes_after == kept(work) - LOSS_BYTES - held_by_layers(work.model)
    assert actual.saved_bytes_after < actual.saved_bytes_before


@pytest.mark.parametrize("side", [16, 48])  # a batch in one piece, and in several
def test_the_peak_is_the_allocators(side: int) -> None:
    work = chain(side)
    plain = allocated_peak(work.model, work.loss, work.batch, work.optimizer)
    actual = memory(work)
    converted = allocated_peak(work.model, work.loss, work.batch, work.optimizer)
    assert (actual.peak_bytes_before, actual.peak_bytes_after) == (plain, converted)
    assert converted < plain


def test_the_report_has_the_bytes_of_a_step_where_one_is_given() -> None:
    work = chain()
    with convert(work.model, work=work) as done:
        assert str(done).endswith(
            "the step, as predicted\n"
            "  saved for backward  1.50 MiB before, 768 KiB after\n"
            "  allocated peak      2.13 MiB before, 1.38 MiB after"
        )
    with convert(work.model) as done:
        assert done.memory is None
        assert "as predicted" not in str(done)


def test_a_part_of_the_steps_model_may_be_converted_alone() -> None:
    work = chain()
    whole = nn.Sequential(work.model, chain().model)
    step = Workload(whole, work.loss, work.batch)
    actual = convert(whole[1], work=step).memory
    assert actual is not None
    full = work.batch.nbytes
    assert actual.saved_bytes_before - actual.saved_bytes_after == pytest.approx(6 * full, abs=held_by_layers(whole))


def assert_plain(model: nn.Module) -> None:
    assert {type(layer) for layer in model} == {nn.BatchNorm2d, nn.SiLU}
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_step_of_another_model_is_refused_and_nothing_is_changed() -> None:
    model = chain().model
    with refused("convert(work.model, work=work)", kind=WorkloadError):
        convert(model, work=chain())
    assert_plain(model)


def by_values(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum() * float(x.sum())


def of_plain_layers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if type(model.get_submodule("0")) is not nn.BatchNorm2d:
        raise KeyboardInterrupt
    return model(x).sum()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (by_values, refused("work=", "lowtide.profile(work)", kind=TraceError)),
        (of_plain_layers, pytest.raises(KeyboardInterrupt)),
    ],
    ids=["prediction", "conversion"],
)
def test_a_step_that_cannot_be_predicted_or_converted_leaves_the_model_as_it_was(loss, expected) -> None:
    work = chain()
    with expected:
        convert(work.model, work=Workload(work.model, loss, work.batch))
    assert_plain(work.model)
