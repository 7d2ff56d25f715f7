"""Microbatch: a batch in pieces gives the gradients of the whole batch, and everybody else sees one loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import lowtide
from lowtide import Workload, zoo
from lowtide.errors import LowtideError, WorkloadError
from lowtide.nn import BatchRenormAct2d
from lowtide.planning.prediction import estimate_peak
from lowtide.techniques import Fidelity, techniques
from lowtide.techniques.sqrt import checkpoint_segments

from ..ranks import on_two_ranks

Outcome = dict[str, Tensor]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp(samples: int = 7, *, loss: Callable[[nn.Module, Any], Tensor] = cross_entropy) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return Workload(model, loss, (torch.randn(samples, 5).double(), torch.randint(3, (samples,))))


def step(work: Workload) -> Outcome:
    """What a step from a fixed seed leaves; buffers are put back."""
    buffers = {name: value.clone() for name, value in work.model.named_buffers()}
    torch.manual_seed(1)
    work.model.zero_grad()
    loss = work.compute_loss()
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"{name}.grad": p.grad.clone() for name, p in work.model.named_parameters() if p.grad is not None}
    for name, value in work.model.named_buffers():
        found[name] = value.clone()
        value.copy_(buffers[name])
    work.model.zero_grad()
    return found


def assert_same(found: Outcome, expected: Outcome, rtol: float = 1e-12) -> None:
    """In the norm of each tensor; what is 0 but for rounding is measured by the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(value.double().norm()) for name, value in expected.items() if name.endswith(".grad"))
    for name, value in expected.items():
        error = float((found[name].double() - value.double()).norm())
        assert error <= rtol * max(float(value.double().norm()), largest * 1e-3), name


def without_randomness(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            vars(module)["dropout"] = 0.0
    return model


def in_float64(work: Workload) -> Workload:
    batch = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, work.batch)
    return replace(work, model=work.model.double(), batch=batch, optimizer=None)


# -- the same gradients --------------------------------------------------------------------------------

NAMES = ["lenet", "resnet18", "resnet18-1d", "resnext50", "wrn28-2", "densenet121", "unet", "gpt2", "roberta-base"]


@pytest.mark.parametrize("name", [*NAMES, "lstm"])
def test_gradients_of_the_zoo_equal_the_full_batchs_in_float64(name: str) -> None:
    work = in_float64(zoo.small(name, batch=5))
    without_randomness(work.model)
    for module in work.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # as when it is frozen: the rest of the model is the same model without it
    expected = step(work)
    for size in (1, 2):
        assert_same(step(lowtide.microbatch(work, size)), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_an_uneven_last_piece_counts_what_it_has(size: int) -> None:
    work = mlp(7)
    assert_same(step(lowtide.microbatch(work, size)), step(work))


def test_pieces_run_one_after_the_other_with_the_samples_they_should_have() -> None:
    seen: list[list[int]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[2].tolist())
        return cross_entropy(model, batch)

    work = mlp(7, loss=loss)
    work = replace(work, batch=(*work.batch, torch.arange(7)))
    lowtide.microbatch(work, 3, reduction="mean").compute_loss()
    assert seen == [[0, 1, 2], [3, 4, 5], [6]]


@dataclass
class Sentences:
    ids: Tensor
    labels: Tensor
    name: str = ""


pytree.register_dataclass(Sentences, drop_field_names=["name"])


def test_batches_are_any_pytree_and_what_is_no_tensor_passes_through() -> None:
    work = mlp(6)
    x, y = work.batch
    scale = torch.tensor(2.0, dtype=torch.float64)  # no samples in it
    model = work.model

    def nested(model: nn.Module, batch: Any) -> Tensor:
        assert batch["what"] == "train"
        return batch["scale"] * cross_entropy(model, batch["pair"][0])

    batch = {"pair": [(x, y)], "what": "train", "scale": scale}
    expected = step(replace(work, loss=nested, batch=batch))
    assert_same(step(lowtide.microbatch(replace(work, loss=nested, batch=batch), 4)), expected)
    found = replace(work, loss=lambda m, b: cross_entropy(m, (b.ids, b.labels)), batch=Sentences(x, y))
    assert_same(step(lowtide.microbatch(found, 4)), step(work))
    alone = Workload(model, lambda m, x: m(x).square().mean(), x)
    assert_same(step(lowtide.microbatch(alone, 4)), step(alone))


def test_a_batch_whose_tensors_do_not_agree_is_refused_until_split_says_which() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    work = mlp(6, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=b[2]))
    work = replace(work, batch=(*work.batch, weights))
    with pytest.raises(WorkloadError, match=r"\[0\] has 6, \[1\] has 6, \[2\] has 3.*split"):
        lowtide.microbatch(work, 2)
    with pytest.raises(WorkloadError, match="no tensor with samples"):
        lowtide.microbatch(work, 2, split=("x",))
    assert_same(step(lowtide.microbatch(work, 4, split=(0, 1))), step(work))


# -- reductions ----------------------------------------------------------------------------------------

IGNORED = torch.tensor([1, -100, -100, 2, 0, -100, 1, 2])


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
    mask = (batch[1] >= 0).double()
    return (each * mask).sum() / mask.sum()


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T * 3, torch.arange(len(z)))


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "mean of cross entropy": cross_entropy,
    "sum of cross entropy": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
    "mean of squares": lambda m, b: m(b[0]).square().mean(),
    "sum of squares": lambda m, b: m(b[0]).square().sum(),
    "half a cross entropy": lambda m, b: cross_entropy(m, b) / 2,
    "label smoothing": lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
    "a shape of one": lambda m, b: F.cross_entropy(m(b[0]), b[1]).reshape(1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_reductions_are_found(name: str) -> None:
    work = mlp(7, loss=LOSSES[name])
    assert_same(step(lowtide.microbatch(work, 3)), step(work))


@pytest.mark.parametrize("name", ["mean of cross entropy", "sum of cross entropy", "label smoothing"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ignored_targets_do_not_count(name: str, size: int) -> None:
    """Also where a whole piece is ignored: its mean is 0 / 0."""
    work = mlp(8, loss=LOSSES[name])
    work = replace(work, batch=(work.batch[0], IGNORED))
    assert_same(step(lowtide.microbatch(work, size, reduction="sum" if "sum" in name else "mean")), step(work))


def test_class_weights_count() -> None:
    weight = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
    work = mlp(8, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight))
    assert_same(step(lowtide.microbatch(work, 3)), step(work))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_weight_counts_what_only_the_caller_knows(as_tensor: bool) -> None:
    work = mlp(8, loss=masked_mean)
    work = replace(work, batch=(work.batch[0], IGNORED))

    def count(batch: Any) -> Any:
        found = (batch[1] >= 0).sum()
        return found if as_tensor else int(found)

    for size in (1, 3):  # by one, some pieces count nothing
        assert_same(step(lowtide.microbatch(work, size, weight=count)), step(work))
    with pytest.raises(WorkloadError, match=r"neither of them.*weight="):
        lowtide.microbatch(work, 3).compute_loss()


def test_a_loss_whose_samples_see_each_other_is_refused() -> None:
    with pytest.raises(WorkloadError, match="samples see each other"):
        lowtide.microbatch(mlp(7, loss=info_nce), 3).compute_loss()


def test_a_loss_that_draws_random_numbers_must_say_its_reduction() -> None:
    work = mlp(7, loss=lambda m, b: (m(b[0]) - torch.randn(len(b[0]), 3)).square().mean())
    with pytest.raises(WorkloadError, match="draws random numbers"):
        lowtide.microbatch(work, 3).compute_loss()
    lowtide.microbatch(work, 3, reduction="mean").compute_loss().backward()


def test_trying_the_reduction_leaves_nothing_behind() -> None:
    work = mlp(7)
    model = nn.Sequential(nn.BatchNorm1d(5), *work.model, nn.Dropout(0.5)).double()
    work = replace(work, model=model)
    given, tried = (lowtide.microbatch(work, 4, reduction=r) for r in ("mean", "auto"))
    expected, found = step(given), step(tried)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# -- one loss to everybody else ------------------------------------------------------------------------


def test_only_one_piece_of_activations_lives() -> None:
    work = zoo.small("gpt2", batch=8, layers=4, optimizer="none")
    plain = lowtide.profile(without(work))
    quarter = lowtide.profile(lowtide.microbatch(without(work), 2))
    gradients = sum(p.nbytes for p in work.model.parameters())
    activations = plain.storage_peak_bytes - plain.static_bytes
    assert quarter.storage_peak_bytes - quarter.static_bytes <= activations / 4 + 1.5 * gradients


def without(work: Workload) -> Workload:
    without_randomness(work.model)
    return work


def test_gradients_add_up_over_steps_and_scale_with_the_loss() -> None:
    work = mlp()
    pieces = lowtide.microbatch(work, 3)
    for each in (work, pieces):
        each.model.zero_grad()
        for factor in (0.25, 3.0):
            (factor * each.compute_loss()).backward()
        if each is work:
            expected = [p.grad.clone() for p in work.model.parameters() if p.grad is not None]
    found = [p.grad for p in work.model.parameters()]
    for new, old in zip(found, expected, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-15)


def test_hooks_run_once_with_the_gradient_of_the_whole() -> None:
    work = mlp()
    parameter = work.model[0].weight
    seen: list[Tensor] = []
    parameter.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
    after: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    expected = step(work)
    found = step(lowtide.microbatch(work, 2))
    assert_same(found, expected)
    assert len(seen) == len(after) == 2
    assert len(parameter._backward_hooks) == 1
    assert not any(p._backward_hooks for p in work.model[2].parameters())
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(after[1], 2 * seen[1], rtol=1e-12, atol=1e-15)


def test_an_optimizer_in_backward_steps_once() -> None:
    plain, pieces = mlp(), mlp()
    for work in (plain, pieces):
        for parameter in work.model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)

            def update(_: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        (work if work is plain else lowtide.microbatch(work, 3)).compute_loss().backward()
    for new, old in zip(pieces.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-15)
        assert new.grad is None


class Awkward(nn.Module):
    """A tied weight, a frozen one, one that is never used, one that one gradient goes to twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.second(self.first(x).tanh())).tanh()) + (self.a + self.b)


def test_tied_frozen_unused_and_shared_gradients_are_as_plain() -> None:
    torch.manual_seed(0)
    work = replace(mlp(), model=Awkward().double())
    found = step(lowtide.microbatch(work, 2))
    assert_same(found, step(work))
    assert "unused.weight.grad" not in found
    assert "frozen.weight.grad" not in found
    work.model.a.grad = work.model.b.grad = None
    lowtide.microbatch(work, 2).compute_loss().backward()
    assert work.model.a.grad.data_ptr() != work.model.b.grad.data_ptr()


def test_gradients_of_the_batch_and_of_tensors_beside_the_model() -> None:
    plain = mlp()
    temperature = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(5, dtype=torch.float64)
    x = plain.batch[0].requires_grad_()
    doubled = x * 2  # has a graph of its own
    work = replace(
        plain,
        loss=lambda m, b: F.cross_entropy(temperature * m(b["x"] + b["shift"]), b["y"]),
        batch={"x": doubled, "y": plain.batch[1], "shift": shift.requires_grad_()},
    )
    leaves = (x, shift, temperature)
    torch.autograd.backward(work.compute_loss(), retain_graph=True)
    expected = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    lowtide.microbatch(work, 3, split=("x", "y")).compute_loss().backward()
    for leaf, old in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, old, rtol=1e-12, atol=1e-15)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_stay_sparse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    work = Workload(model, cross_entropy, (torch.randint(50, (7, 3)), torch.randint(3, (7,))))
    work.compute_loss().backward()
    expected = model[0].weight.grad
    model.zero_grad()
    lowtide.microbatch(work, 3).compute_loss().backward()
    found = model[0].weight.grad
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-15)


def test_a_loss_that_takes_gradients_itself_is_as_plain() -> None:
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        # One that is linear in the samples: the gradient by the input, sample by sample.
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss + slope.square().sum(1).mean()

    work = mlp(6, loss=penalised)
    assert_same(step(lowtide.microbatch(work, 4)), step(work))


def test_small_batches_and_no_grad_run_as_they_are() -> None:
    work = mlp(4)
    pieces = lowtide.microbatch(work, 4)
    expected, found = step(work), step(pieces)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad():
        value = lowtide.microbatch(work, 2).loss(work.model, work.batch)
        assert torch.equal(value, work.loss(work.model, work.batch))
        assert not value.requires_grad


def test_backward_runs_once_and_gives_no_gradients_of_gradients() -> None:
    work = lowtide.microbatch(mlp(), 3)
    loss = work.compute_loss()
    loss.backward(retain_graph=True)
    with pytest.raises(LowtideError, match="runs once"):
        loss.backward()
    with pytest.raises(LowtideError, match="Gradients of gradients"):
        torch.autograd.grad(work.compute_loss(), work.model[0].weight, create_graph=True)


def test_what_cannot_be_is_refused() -> None:
    work = mlp()
    for size in (0, -1, 2.0, True):
        with pytest.raises(LowtideError, match="not a number of samples"):
            lowtide.microbatch(work, size)
    with pytest.raises(LowtideError, match="Unknown reduction"):
        lowtide.microbatch(work, 2, reduction="median")
    with pytest.raises(LowtideError, match="already computed in pieces"):
        lowtide.microbatch(lowtide.microbatch(work, 4), 2)
    with pytest.raises(WorkloadError, match="not a scalar"):
        lowtide.microbatch(mlp(loss=lambda m, b: m(b[0])), 2, reduction="mean").compute_loss()
    for parameter in work.model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(WorkloadError, match="no graph"):
        lowtide.microbatch(work, 2, reduction="mean").compute_loss()


# -- precision -----------------------------------------------------------------------------------------


def test_gradients_that_float16_would_lose_are_kept_by_the_loss_scale() -> None:
    """As GradScaler has it: the scale comes back through the loss; from the second step on, pieces run at it."""
    torch.manual_seed(0)
    model = nn.Linear(64, 1, bias=False)
    batch = torch.rand(8, 64)
    work = Workload(model, lambda m, x: 1e-8 * m(x).float().mean(), batch, autocast=torch.float16)
    pieces = lowtide.microbatch(work, 2)
    exact = 1e-8 * batch.mean(0)
    for _ in range(2):
        model.zero_grad()
        (2.0**16 * pieces.compute_loss()).backward()
    torch.testing.assert_close(model.weight.grad[0] / 2**16, exact, rtol=5e-3, atol=0)


def test_an_overflow_shows_and_goes_away_with_the_scale() -> None:
    model = nn.Linear(64, 1, bias=False)
    work = Workload(model, lambda m, x: m(x).float().mean(), torch.rand(8, 64), autocast=torch.float16)
    pieces = lowtide.microbatch(work, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=10**6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(12):
        optimizer.zero_grad()
        scaler.scale(pieces.compute_loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert 1 < scaler.get_scale() < 2.0**20
    assert model.weight.grad.isfinite().all()


def test_autocast_rounds_as_plain_does() -> None:
    torch.manual_seed(0)
    work = zoo.small("gpt2", batch=6, autocast=torch.bfloat16)
    without_randomness(work.model)
    exact = step(in_float64(replace(work, autocast=None)))
    work.model.float()
    plain, found = step(work), step(lowtide.microbatch(work, 2))
    errors = [
        sum(float((each[name].double() - value).norm() ** 2) for name, value in exact.items() if "grad" in name)
        for each in (plain, found)
    ]
    assert errors[1] <= 1.5**2 * errors[0]


# -- batch norm ----------------------------------------------------------------------------------------


def normed(*layers: nn.Module, samples: int = 7) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 4 * 4, 5)).double()
    x = torch.randn(samples, 3, 4, 4).double() + torch.arange(samples).double()[:, None, None, None]
    return Workload(model, cross_entropy, (x, torch.randint(5, (samples,))))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchRenormAct2d])
def test_running_statistics_move_once_as_by_the_full_batch(momentum: float | None, norm: type[nn.Module]) -> None:
    """Of a first layer, whose input is the batch itself: mean and variance, between pieces too, are exact."""
    work = normed(norm(3, momentum=momentum))
    expected, found = step(work), step(lowtide.microbatch(work, 3))
    for name in ("0.running_mean", "0.running_var"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)
    assert found["0.num_batches_tracked"] == 1


def test_a_layer_that_runs_twice_moves_twice() -> None:
    norm = nn.BatchNorm2d(3)
    work = normed(norm, nn.Identity(), norm)
    before = step(work)
    found = step(lowtide.microbatch(work, 3))
    assert found["0.num_batches_tracked"] == before["0.num_batches_tracked"] == 2


def test_instance_norm_is_as_of_the_full_batch() -> None:
    work = normed(nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    assert_same(step(lowtide.microbatch(work, 3)), step(work))


def test_the_model_is_as_it_was_even_after_an_error() -> None:
    work = normed(nn.BatchNorm2d(3))
    norm = work.model[0]

    def fails(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 1:
            raise ValueError("at the last piece")
        return cross_entropy(model, batch)

    attributes, buffers = dict(vars(norm)), dict(norm._buffers)
    for exact in (False, True):
        with pytest.raises(ValueError, match="at the last piece"):
            lowtide.microbatch(replace(work, loss=fails), 3, reduction="mean", exact=exact).compute_loss()
        assert {k: v for k, v in vars(norm).items() if k != "training"} == {
            k: v for k, v in attributes.items() if k != "training"
        }
        assert all(norm._buffers[name] is buffer for name, buffer in buffers.items())
        assert not norm._forward_hooks
        assert not norm._forward_pre_hooks


@pytest.mark.parametrize("converted", [False, True])
def test_exact_gives_the_loss_and_the_statistics_of_the_full_batch(converted: bool) -> None:
    work = in_float64(zoo.small("resnet18", batch=8))
    expected = step(work)
    if converted:
        lowtide.convert(work.model)
    found = step(lowtide.microbatch(work, 3, exact=True))
    pieces = step(lowtide.microbatch(work, 3))
    names = ["loss", *(name for name, _ in work.model.named_buffers())]
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)
    assert abs(pieces["loss"] - expected["loss"]) > 1e-3  # without, it is another loss

    def error(outcome: Outcome) -> float:
        wrong = [outcome[name] - value for name, value in expected.items() if name.endswith(".grad")]
        return float(torch.stack([each.norm() for each in wrong]).norm())

    assert error(found) < 0.7 * error(pieces)


def test_exact_is_exact_without_batch_norm_and_where_a_layer_keeps_no_statistics() -> None:
    work = mlp()
    assert_same(step(lowtide.microbatch(work, 3, exact=True)), step(work))
    untracked = normed(nn.BatchNorm2d(3, track_running_stats=False))
    found = step(lowtide.microbatch(untracked, 3, exact=True))
    torch.testing.assert_close(found["loss"], step(untracked)["loss"], rtol=1e-12, atol=0)
    assert untracked.model[0].running_mean is None


def test_exact_refuses_what_it_does_not_know() -> None:
    with pytest.raises(LowtideError, match="cannot normalise a piece"):
        lowtide.microbatch(normed(BatchRenormAct2d(3)), 3, exact=True).compute_loss()


# -- with the other techniques -------------------------------------------------------------------------


def test_converted_batch_norms_give_what_plain_ones_give_in_pieces() -> None:
    """As a loop that accumulates gives it, by plain PyTorch."""
    work = in_float64(zoo.small("resnet50", batch=6))
    x, y = work.batch
    by_hand: Outcome = {}
    for i in (0, 3):
        part = step(replace(work, batch=(x[i : i + 3], y[i : i + 3])))
        for name, value in part.items():
            if name.endswith(".grad"):
                by_hand[name] = by_hand.get(name, 0) + value / 2
    assert_same({n: v for n, v in step(lowtide.microbatch(work, 3)).items() if n in by_hand}, by_hand)
    plain = step(lowtide.microbatch(work, 3))
    for joins in (1, 2):
        with lowtide.convert(work.model, joins=joins):
            assert_same(step(lowtide.microbatch(work, 3)), plain, rtol=1e-9)


def test_recomputed_segments_inside_pieces_change_nothing() -> None:
    work = in_float64(zoo.small("wrn28-2", batch=6))
    expected = step(lowtide.microbatch(work, 2))
    with checkpoint_segments(work.model.stages[0]):
        found = step(lowtide.microbatch(work, 2))
        assert lowtide.profile(lowtide.microbatch(work, 2)).peak_bytes < lowtide.profile(work).peak_bytes
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_inside_the_loss_moves_statistics_as_often_as_in_the_full_batch() -> None:
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    work = normed(nn.BatchNorm2d(3))
    around = replace(work, loss=lambda m, b: checkpoint(cross_entropy, m, b, use_reentrant=False))
    with set_checkpoint_early_stop(False):  # or else a batch norm behind the last saved tensor runs but once
        expected, found = step(around), step(lowtide.microbatch(around, 3))
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)


def _ddp_reduces_once(rank: int) -> None:
    work = mlp(8)
    x, y = (part[4 * rank : 4 * rank + 4] for part in work.batch)
    expected = step(work)
    model = DistributedDataParallel(work.model)
    pieces = lowtide.microbatch(replace(work, model=model, batch=(x, y)), 3)
    for _ in range(2):
        found = step(pieces)
        for name, value in expected.items():
            if name.endswith(".grad"):
                torch.testing.assert_close(found[f"module.{name}"], value, rtol=1e-12, atol=1e-15)


test_on_two_ranks = on_two_ranks(_ddp_reduces_once)


# -- the technique -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fidelity"),
    [
        (lambda: zoo.small("gpt2", batch=4), Fidelity.UNBIASED),
        (lambda: without(zoo.small("gpt2", batch=4)), Fidelity.ROUNDOFF),
        (lambda: zoo.small("wrn28-2", batch=4), Fidelity.CHANGED),
    ],
)
def test_fidelity_is_of_this_model(make: Callable[[], Workload], fidelity: Fidelity) -> None:
    technique = techniques()["microbatch"]
    plain = lowtide.profile(make(), fake=True)
    options = technique.options(plain)
    assert [option.knob("size") for option in options] == [2, 1]
    assert {technique.check(option).fidelity for option in options} == {fidelity}
    assert {technique.price(option, plain).fidelity for option in options} == {fidelity}


def test_estimates_are_near_what_a_trace_gives() -> None:
    technique = techniques()["microbatch"]
    work = without(zoo.small("gpt2", batch=8, layers=4, width=128, seq=64))
    plain = lowtide.profile(work)
    for option in technique.options(plain)[:2]:
        estimate = estimate_peak(plain.graph, [technique.price(option, plain)])
        with technique.apply(work, [option]) as applied:
            assert estimate == pytest.approx(lowtide.profile(applied.work).peak_bytes, rel=0.05)


def test_the_planner_takes_it_where_it_is_the_fastest_that_fits() -> None:
    work = without(zoo.small("gpt2", batch=8, layers=2, width=128, seq=64, optimizer="sgd"))
    plan = lowtide.plan(work, "75%", engine="eager")
    assert plan.options[0].technique == "microbatch"
    assert plan.fidelity is Fidelity.ROUNDOFF
    found = lowtide.verify(work, plan)
    assert found.results_agree, found
    assert found.peak_bytes <= plan.budget_bytes
    with lowtide.apply(plan, work) as planned:
        first = planned(work.batch)
        assert first.isfinite()
        assert planned.loss(work.batch).requires_grad


def test_a_predicted_step_on_a_gpu_that_is_not_here_has_pieces_too() -> None:
    work = without(zoo.small("gpt2", batch=8, device="meta"))
    plain = lowtide.profile(work, device="h200")
    pieces = lowtide.profile(lowtide.microbatch(work, 2), device="h200")
    assert pieces.storage_peak_bytes < plain.storage_peak_bytes


def test_with_dropout_a_step_is_another_draw_of_the_same_distribution() -> None:
    """The gradient of a linear layer behind dropout: its mean and its variance over the draws are known."""
    torch.manual_seed(0)
    samples, width, p, draws = 6, 64, 0.5, 2000
    x = torch.randn(samples, width, dtype=torch.float64)
    model = nn.Sequential(nn.Dropout(p), nn.Linear(width, 1, bias=False)).double()
    work = lowtide.microbatch(Workload(model, lambda m, x: m(x).mean(), x), 4)
    found: list[Tensor] = []
    for _ in range(draws):
        model.zero_grad()
        work.compute_loss().backward()
        found.append(model[1].weight.grad[0])
    drawn = torch.stack(found)
    variance = p / (1 - p) * x.square().sum(0) / samples**2
    error = (variance.sum() / draws).sqrt()
    assert (drawn.mean(0) - x.mean(0)).norm() <= 3 * error
    assert float(drawn.var(0).sum()) == pytest.approx(float(variance.sum()), rel=0.1)
