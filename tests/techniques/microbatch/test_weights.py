"""How much each piece counts: means and sums are told apart, and what a mean leaves out does not count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import Workload
from lowtide.errors import WorkloadError

from .steps import IGNORED, assert_same, cross_entropy, masked_mean, mlp, names, step

pytestmark = pytest.mark.filterwarnings("ignore:The model has batch norms in training:UserWarning")


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "mean of cross entropy": cross_entropy,
    "sum of cross entropy": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
    "mean of squares": lambda m, b: m(b[0]).square().mean(),
    "sum of squares": lambda m, b: m(b[0]).square().sum(),
    "half a cross entropy": lambda m, b: cross_entropy(m, b) / 2,
    "label smoothing": lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
    "a shape of one": lambda m, b: F.cross_entropy(m(b[0]), b[1]).reshape(1),
    "class weights": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.tensor([1.0, 5.0, 0.5]).double()),
    "compiled": torch.compile(cross_entropy, backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_reductions_are_found(name: str) -> None:
    work = mlp(7, loss=LOSSES[name])
    assert_same(step(lowtide.microbatch(work, 3)), step(work))


@pytest.mark.parametrize("name", ["mean of cross entropy", "sum of cross entropy", "label smoothing"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ignored_targets_do_not_count(name: str, size: int) -> None:
    """Also where a whole piece is ignored: its mean is 0 / 0."""
    work = mlp(8, loss=LOSSES[name], targets=IGNORED)
    assert_same(step(lowtide.microbatch(work, size, reduction="sum" if "sum" in name else "mean")), step(work))


MIXED: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "a penalty on outputs": lambda m, b: cross_entropy(m, b) + m(b[0]).square().mean(),
    "two cross entropies": lambda m, b: cross_entropy(m, b) + F.cross_entropy(2 * m(b[0]), b[1]),
    "class weights and a penalty": lambda m, b: (
        F.cross_entropy(m(b[0]), b[1], weight=torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64))
        + m(b[0]).square().mean()
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_mean_over_what_counts_beside_something_else_is_refused_where_not_all_counts(name: str) -> None:
    work = mlp(8, loss=MIXED[name])
    ignoring = replace(work, batch=(work.batch[0], IGNORED))
    with names(pytest.raises(WorkloadError), "weight="):
        lowtide.microbatch(ignoring, 3).compute_loss()
    if "class weights" not in name:
        pieces = lowtide.microbatch(work, 3)
        assert_same(step(pieces), step(work))
        with names(pytest.raises(WorkloadError), "weight=", "targets"):
            pieces.compute_loss(batch=ignoring.batch)


@pytest.mark.parametrize(
    ("targets", "size"),
    [(torch.tensor([1, 0, 2, 1, 2, -100, -100, -100]), 2), (IGNORED, 3)],
    ids=["at the end", "scattered"],
)
def test_padding_that_a_mean_leaves_out_shows_in_the_trial(targets: Tensor, size: int) -> None:
    work = mlp(8, loss=masked_mean, targets=targets)
    with names(pytest.raises(WorkloadError), "weight=", "neither"):
        lowtide.microbatch(work, size).compute_loss()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_weight_counts_what_only_the_caller_knows(as_tensor: bool) -> None:
    work = mlp(8, loss=masked_mean, targets=IGNORED)

    def count(batch: Any) -> Any:
        counted = (batch[1] >= 0).sum()
        return counted if as_tensor else int(counted)

    for size in (1, 3):  # by one, some pieces count nothing
        assert_same(step(lowtide.microbatch(work, size, weight=count)), step(work))


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T * 3, torch.arange(len(z)))


def test_a_loss_whose_samples_see_each_other_is_refused() -> None:
    with names(pytest.raises(WorkloadError), "samples see each other"):
        lowtide.microbatch(mlp(7, loss=info_nce), 3).compute_loss()


def test_a_loss_that_draws_random_numbers_must_say_its_reduction() -> None:
    work = mlp(7, loss=lambda m, b: (m(b[0]) - torch.randn(len(b[0]), 3)).square().mean())
    with names(pytest.raises(WorkloadError), "random", "reduction="):
        lowtide.microbatch(work, 3).compute_loss()
    lowtide.microbatch(work, 3, reduction="mean").compute_loss().backward()


# -- losses that tell nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0.0, torch.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_first_loss_of_zero_or_infinity_is_no_mean_for_good(reduction: str, first: float) -> None:
    factor = torch.tensor(first)
    work = mlp(8, loss=lambda m, b: getattr((factor * m(b[0])).square(), reduction)())
    pieces = lowtide.microbatch(work, 3)
    with names(pytest.raises(WorkloadError), "0, not finite", "reduction="):
        pieces.compute_loss()
    factor.fill_(1.0)
    assert_same(step(pieces), step(work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mean", "sum"])
def test_losses_that_cancel_are_told_apart(name: str, dtype: torch.dtype) -> None:
    """As a policy's first step: advantages add up to 0 in each half of the batch, and gradients do not."""
    work = mlp(16)
    model = work.model.to(dtype)
    advantages = torch.randn(16, dtype=dtype)
    advantages = torch.cat([half - half.mean() for half in advantages.chunk(2)])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        log = model(batch[0]).log_softmax(1)[:, 0]
        return getattr((log - log.detach()).exp() * batch[1], name)()

    work = Workload(model, loss, (work.batch[0].to(dtype), advantages))
    actual, expected = step(lowtide.microbatch(work, 8)), step(work)
    assert abs(expected.pop("loss")) < 1e-5
    actual.pop("loss")
    assert_same(actual, expected, rtol=1e-12 if dtype is torch.float64 else 1e-5)


def test_samples_that_count_nothing_do_not_hide_a_mean() -> None:
    work = mlp(8)
    targets = torch.full((8,), -100)
    targets[3:6] = torch.tensor([1, 0, 2])  # the trial would see samples 0 and 4
    targets[4] = -100
    work = replace(work, batch=(work.batch[0], targets))
    assert_same(step(lowtide.microbatch(work, 1)), step(work))


def test_trying_the_reduction_leaves_nothing_behind() -> None:
    work = mlp(7)
    model = nn.Sequential(nn.BatchNorm1d(5), *work.model, nn.Dropout(0.5)).double()
    work = replace(work, model=model)
    expected, actual = (step(lowtide.microbatch(work, 4, reduction=each)) for each in ("mean", "auto"))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def focal(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return (1 - torch.exp(-loss)) ** 2 * loss


@pytest.mark.parametrize("ignored", [slice(0, 0), slice(0, 4), slice(4, 8)])
def test_a_function_of_a_mean_is_refused_also_where_half_of_the_batch_is_ignored(ignored: slice) -> None:
    work = mlp(8, loss=focal)
    work.batch[1][ignored] = -100
    with names(pytest.raises(WorkloadError), "neither"):
        lowtide.microbatch(work, 3).compute_loss()


def test_a_trial_in_which_one_sample_counts_says_so() -> None:
    work = mlp(8)
    work.batch[1][1:] = -100
    with names(pytest.raises(WorkloadError), "ignored", "reduction="):
        lowtide.microbatch(work, 3).compute_loss()
    assert_same(step(lowtide.microbatch(work, 3, reduction="mean")), step(work))


def test_a_norm_without_parameters_and_statistics_has_the_models_dtype_in_the_trial() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    model = nn.Sequential(norm, nn.Linear(4, 3)).double()
    work = Workload(model, cross_entropy, (torch.randn(6, 4).double(), torch.randint(3, (6,))))
    assert lowtide.microbatch(work, 3).compute_loss().dtype == torch.float64
    assert norm.running_mean is None


def test_a_scripted_model_can_be_tried() -> None:
    torch.manual_seed(0)
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double())
    work = Workload(model, cross_entropy, (torch.randn(6, 4).double(), torch.randint(3, (6,))))
    assert_same(step(lowtide.microbatch(work, 3)), step(work))
