"""``nn.SyncBatchNorm`` converted: a plain batch norm alone; on two ranks with uneven batches, one process on all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.nn.batchnorm import SyncBatchNormAct
from lowtide.techniques.batchnorm import convert
from lowtide.techniques.batchnorm.technique import BatchNorm
from tests.nn.test_synchronised import UNEVEN, counted, same, summed
from tests.ranks import on_two_ranks
from tests.techniques.batchnorm.converting import RESIDUALS, assert_converts, results, snapshot
from tests.techniques.batchnorm.models import (
    Decoder,
    EndsElsewhere,
    PreActivation,
    ResNetBlock,
    Shifted,
    build,
    conv,
    image,
)


def synchronised(model: nn.Module, group: Any = None) -> Any:
    """The same model and parameters, with ``nn.SyncBatchNorm`` for each batch norm."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)


def all_converted() -> nn.Sequential:
    """A model of which nothing is left: torch's own layer would refuse a CPU."""
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.PReLU(), ResNetBlock(), EndsElsewhere(), PreActivation())


def layers(model: nn.Module) -> int:
    return sum(isinstance(module, SyncBatchNormAct) for module in model.modules())


# -- one process -----------------------------------------------------------------------------------------


def test_in_all_places_where_a_batch_norm_is_converted() -> None:
    model = synchronised(build())
    conversion = assert_converts(model, image(), fused=9, left=1)
    assert conversion.left[0].why == "no activation follows; nothing to save"
    assert layers(model) == 9


@pytest.mark.parametrize("dims", range(5))
def test_inputs_of_any_number_of_dimensions(dims: int) -> None:
    model = nn.Sequential(nn.SyncBatchNorm(4), nn.SiLU())
    assert_converts(model, image(dims=dims, side=3), fused=1)
    with pytest.raises(ValueError, match="1D"):
        model(torch.randn(4).double())


def test_it_is_still_a_synchronised_batch_norm_to_those_who_look_for_one() -> None:
    model = synchronised(build())
    before = [path for path, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    convert(model)
    assert [path for path, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)] == before


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_in_a_world_of_one_it_is_a_plain_batch_norm() -> None:
    plain = all_converted().double()
    model = synchronised(copy.deepcopy(plain))
    convert(model)
    x = image()
    wanted = results(plain, [x])
    with counted() as collectives:
        actual = results(model, [x])
    assert not collectives
    torch.testing.assert_close(actual, wanted)
    with pytest.raises(ValueError, match="1, 4, 1, 1"):
        model[1](torch.randn(1, 4, 1, 1).double())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at it
def test_it_can_be_compiled() -> None:
    model, x = nn.Sequential(conv(), nn.SyncBatchNorm(4), nn.ReLU(), conv()), image().float()
    convert(model)
    wanted = copy.deepcopy(model)(x)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), wanted)
    torch.compiler.reset()


def test_a_plan_offers_the_same_as_for_plain_batch_norms() -> None:
    def work(model: nn.Module) -> lowtide.Workload:
        return lowtide.Workload(model, lambda model, x: model(x).square().sum(), image().float())

    def model() -> nn.Sequential:
        return nn.Sequential(conv(), *(ResNetBlock() for _ in range(4)), conv())

    offered = BatchNorm().options(lowtide.profile(work(synchronised(model()))))
    assert offered == BatchNorm().options(lowtide.profile(work(model())))
    assert len(offered) == 3
    applied = work(synchronised(model()))
    with BatchNorm().apply(applied, offered[:1]):
        assert layers(applied.model) == 8


# -- two ranks -------------------------------------------------------------------------------------------


def equals_one_process(rank: int, plain: nn.Module, group: Any = None, **options: Any) -> None:
    """Two steps of a converted model on each rank's part, and of plain batch norms on the whole."""
    plain.double()
    model = synchronised(copy.deepcopy(plain), group)
    assert convert(model, **options).left == ()
    assert list(model.state_dict()) == list(plain.state_dict())
    steps = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, plain)]
    for _ in range(2):
        whole: Any = torch.randn(sum(UNEVEN), 4, 6, 5, dtype=torch.float64)
        x = whole.split(UNEVEN)[rank].clone().requires_grad_()
        whole.requires_grad_()
        out, expected = model(x), plain(whole)
        out.square().sum().backward()
        expected.square().sum().backward()
        same(out, expected.split(UNEVEN)[rank])
        same(x.grad, whole.grad.split(UNEVEN)[rank])
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad = summed(mine.grad)
            same(mine.grad, theirs.grad)
        for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            same(mine, theirs)
        for step in steps:
            step.step()
            step.zero_grad()
    x = image()
    same(model.eval()(x), plain.eval()(x))


def the_world_is_the_default_and_a_group_may_be_given(rank: int) -> None:
    for group in (None, dist.new_group([0, 1])):
        equals_one_process(rank, all_converted(), group)


def joins_that_are_rebuilt(rank: int) -> None:
    equals_one_process(rank, build(), joins=2)


def strategies_that_keep_something_else(rank: int) -> None:
    equals_one_process(rank, nn.Sequential(conv(), nn.BatchNorm2d(4), nn.SiLU(), conv()), strategy="checkpoint_xhat")
    equals_one_process(rank, nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ELU(), conv()), strategy="inplace")


def a_group_of_one_and_one_of_others_are_plain_batch_norms(rank: int) -> None:
    """As with torch's own, a process that is not in the group keeps to its own batch."""
    alone = [dist.new_group([r]) for r in (0, 1)]
    for group in alone:
        plain = all_converted().double()
        model = synchronised(copy.deepcopy(plain), group)
        convert(model)
        x = image()[rank:]
        wanted = results(plain, [x])
        with counted() as collectives:
            actual = results(model, [x])
        assert not collectives
        torch.testing.assert_close(actual, wanted)


def one_collective_for_each_layer_forward_and_backward(rank: int) -> None:
    model = synchronised(PreActivation())
    convert(model)
    x = torch.randn(UNEVEN[rank], 4, 6, 6)
    with counted() as forward:
        out = model(x)
    with counted() as backward:
        out.sum().backward()
    assert (len(forward), len(backward)) == (2, 2), (forward, backward)


def evaluation_is_of_this_process_alone(rank: int) -> None:
    """With running statistics, and without, where it is the batch's own."""
    for options in ({}, {"track_running_stats": False}):
        plain = nn.Sequential(nn.BatchNorm2d(4, **options), nn.ReLU()).double().eval()
        model = synchronised(copy.deepcopy(plain))
        assert convert(model).changed
        x = torch.randn(UNEVEN[rank], 4, 3, 2, dtype=torch.float64)
        with counted() as collectives:
            actual = model(x)
        assert not collectives
        same(actual, plain(x))


def batch_norms_that_run_as_they_were_written_are_the_groups(rank: int) -> None:
    """In a call that is not as it was at the conversion, and at a residual that is no map like x."""
    plain = Decoder()
    whole = torch.randn(sum(UNEVEN), 4, 6, 6, dtype=torch.float64)
    x = whole.split(UNEVEN)[rank]
    plain(x.float())
    model = synchronised(copy.deepcopy(plain.double()))
    convert(model)
    with pytest.warns(UserWarning, match="bn"):
        actual = model(x, normal=False)
    same(actual, plain(whole, normal=False).split(UNEVEN)[rank])
    same(model.bn.running_var, plain.bn.running_var)

    plain = Shifted(RESIDUALS["of another dtype"]).double()
    model = synchronised(copy.deepcopy(plain))
    assert convert(model).changed[0].join
    same(model(x.float().double()), plain(whole.float().double()).split(UNEVEN)[rank])


def undo_gives_torchs_own_back(rank: int) -> None:
    """Which refuse a CPU."""
    model = synchronised(all_converted())
    before = snapshot(model)
    with convert(model):
        model(image().float()).sum().backward()
    assert snapshot(model) == before
    with pytest.raises(ValueError, match="GPU"):
        model(image().float())


def copies_keep_the_group(rank: int) -> None:
    x = torch.randn(UNEVEN[rank], 4, 6, 6)
    for group in (None, dist.new_group([0, 1])):
        model = synchronised(all_converted(), group)
        convert(model)
        twin = copy.deepcopy(model)
        assert twin[1].process_group is group
        assert torch.equal(twin(x), model(x))


test_on_two_ranks = on_two_ranks(
    the_world_is_the_default_and_a_group_may_be_given,
    joins_that_are_rebuilt,
    strategies_that_keep_something_else,
    a_group_of_one_and_one_of_others_are_plain_batch_norms,
    one_collective_for_each_layer_forward_and_backward,
    evaluation_is_of_this_process_alone,
    batch_norms_that_run_as_they_were_written_are_the_groups,
    undo_gives_torchs_own_back,
    copies_keep_the_group,
)
