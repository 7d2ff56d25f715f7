"""A step on fake tensors is the user's own: the same model object, optimizer and sharing of storages."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lowtide import Workload
from lowtide.compat.autograd import gradient_hooks
from lowtide.compat.fake import FakeTensor, FakeTensorMode
from lowtide.optim import step_in_backward, store_gradients
from lowtide.tracing.fake.workload import fake_workload
from tests.soak import in_soak
from tests.tracing.comparing import assert_fake_is_real
from tests.tracing.layers import loss

OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("RAdam", {}),
    ("Rprop", {}),
]


def optimized(name, options, *, steps=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    batch = (torch.randn(6, 4),)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return Workload(model, loss, batch, optimizer)


@pytest.mark.parametrize("foreach", [True, *in_soak([False])])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_a_fake_optimizer_steps_like_the_real_one(name, options, foreach):
    assert_fake_is_real(optimized(name, {**options, "foreach": foreach}))


@pytest.mark.parametrize(("name", "options"), [*OPTIMIZERS[2::3], *in_soak(OPTIMIZERS)])
def test_a_fake_optimizer_goes_on_from_the_real_step_count(name, options):
    assert_fake_is_real(optimized(name, options, steps=7))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fake_fused_optimizer_steps_like_the_real_one(name):
    assert_fake_is_real(optimized(name, {"lr": 0.1, "fused": True}))


@pytest.mark.parametrize("steps", [7, *in_soak([0])])
@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Adafactor"])
def test_optimizers_that_compute_with_scalars_differ_in_those_alone(name, steps):
    assert_fake_is_real(optimized(name, {}, steps=steps), arguments=False)


def test_tied_weights_stay_tied_and_the_model_is_restored():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    work = Workload(model, loss, [torch.ones(2, 4)[:1]], torch.optim.SGD(model.parameters()))
    with fake_workload(work, FakeTensorMode(), torch.device("cpu")) as fake:
        assert fake.model is model
        assert model[1].weight is model[0].weight is fake.optimizer.param_groups[0]["params"][0]
        assert all(isinstance(p, FakeTensor) for p in model.parameters())
        assert fake.batch[0].untyped_storage().nbytes() == 2 * 4 * 4
    assert all(left is right for left, right in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("act", [step_in_backward, store_gradients])
def test_fake_parameters_and_their_optimizer_are_freed(act):
    model = nn.Linear(4, 4)
    work = Workload(model, loss, torch.randn(3, 4), torch.optim.SGD(model.parameters(), lr=0.1))
    with act(work.optimizer):
        with fake_workload(work, FakeTensorMode(), torch.device("cpu")) as fake:
            held = [weakref.ref(fake.optimizer), *map(weakref.ref, fake.model.parameters())]
            assert all(gradient_hooks(p) for p in fake.model.parameters())
        del fake
        gc.collect()
        assert [each() for each in held] == [None] * 3
        assert all(gradient_hooks(p) for p in model.parameters())
