"""States that take less, on an optimizer that is there: in 8 bits, in 4, and as they were again."""

import copy
import sys

import pytest
import torch
from torch import nn

import lowtide
import lowtide.optim as lo
from lowtide.errors import MissingExtra
from lowtide.profiling import profile
from tests.optim.training import BATCHES, OPTIMIZERS, equal, make, resumes, started, train
from tests.refusals import refused


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_8bit_states_take_two_bytes_and_small_ones_stay(kind):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    plain = make()
    expected = train(plain, kind(plain.parameters(), lr=1e-2, weight_decay=0.1), BATCHES[:3])
    undo = lo.lower_state(optimizer, "8bit")
    actual = train(model, optimizer, BATCHES[:3])
    assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(actual, expected, strict=True) if b.norm() > 1e-2)
    weight, bias = optimizer.state[model[0].weight], optimizer.state[model[0].bias]
    values = 64 * 96
    saved = [value for value in weight.values() if torch.is_tensor(value) and value.ndim > 0]
    assert sum(value.nbytes for value in saved) == 2 * values + 2 * 4 * values // 256
    assert bias["exp_avg"].dtype == torch.float32
    undo()
    assert type(optimizer) is kind
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (96, 64)
    train(model, optimizer, BATCHES[:1])


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_8bit_states_that_were_not_stepped_come_back_bit_for_bit(name):
    pytest.importorskip("bitsandbytes" if name == "SGD" else "torch")
    model, optimizer = started(name)
    train(model, optimizer, BATCHES[:2])
    before, attributes = copy.deepcopy(optimizer.state_dict()), set(vars(optimizer))
    lo.lower_state(optimizer, "8bit")()
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert set(vars(optimizer)) == attributes
    for number, held in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in held.items())


def test_a_scheduler_made_before_8bit_states_does_not_bypass_them():
    model, optimizer = started()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with lo.lower_state(optimizer, "8bit"):
        train(model, optimizer, BATCHES[:1])
        assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 5e-3
    train(model, optimizer, BATCHES[:1])
    scheduler.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model[0].weight]["step"] == 2


def test_what_cannot_be_lowered_says_so():
    weight = nn.Parameter(torch.ones(3))
    for optimizer, state, named in (
        (torch.optim.RMSprop([weight]), "8bit", "RMSprop"),
        (torch.optim.AdamW([weight]), "3bit", "'3bit'"),
    ):
        with refused(named):
            lo.lower_state(optimizer, state)
    optimizer = torch.optim.AdamW([weight])
    with lo.step_in_backward(optimizer), refused("stepped in backward", "undo()"):
        lo.step_in_backward(optimizer)
    with lo.lower_state(optimizer, "cpu"), refused("host", "stochastic"):
        lo.round_updates(optimizer)


@pytest.mark.parametrize("state", ["8bit", "cpu"])
def test_a_closure_is_refused_while_states_are_lowered(state):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with lo.lower_state(optimizer, state), refused("closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step(lambda: 0.0)


def test_4bit_states_name_the_extra_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    optimizer = OPTIMIZERS["AdamW"](make().parameters())
    with pytest.raises(MissingExtra):
        lo.lower_state(optimizer, "4bit")
    assert type(optimizer) is torch.optim.AdamW


def test_4bit_states_are_torchaos():
    torchao = pytest.importorskip("torchao")
    model, other = make(), make()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    theirs = torchao.optim.AdamW4bit(other.parameters(), lr=1e-2)
    with lo.lower_state(optimizer, "4bit"):
        actual = train(model, optimizer, BATCHES[:4])
        assert optimizer.state[model[0].weight]["exp_avg"].codes.nbytes == 64 * 96 // 2
        with torch.compiler.set_stance("force_eager"):
            assert equal(actual, train(other, theirs, BATCHES[:4]))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(model, optimizer, BATCHES[:1])


def test_states_that_are_there_are_put_into_4_bits():
    pytest.importorskip("torchao")
    model, optimizer = started()
    train(model, optimizer, BATCHES[:1])
    plain = copy.deepcopy(optimizer.state_dict()["state"])
    with lo.lower_state(optimizer, "4bit"):
        for number, p in enumerate(model.parameters()):
            for key, farthest in (("exp_avg", 0.1126), ("exp_avg_sq", 0.0626)):  # to the nearest of torchao's levels
                lowered, expected = optimizer.state[p][key], plain[number][key]
                if type(lowered) is torch.Tensor:
                    assert torch.equal(lowered, expected)
                    continue
                largest = expected.reshape(-1, 128).abs().amax(1, keepdim=True)
                error = (lowered.dequantize() - expected).reshape(-1, 128).abs()
                assert (error <= farthest * largest).all()
        train(model, optimizer, BATCHES[1:3])
        assert optimizer.state[model[0].weight]["step"] == 3


def test_4bit_states_are_on_the_host_in_neither_order():
    pytest.importorskip("torchao")
    for first, second in (("4bit", "cpu"), ("cpu", "4bit")):
        optimizer = OPTIMIZERS["AdamW"](make().parameters())
        with lo.lower_state(optimizer, first), refused("4 bits", "host"):
            lo.lower_state(optimizer, second)
        assert type(optimizer) is torch.optim.AdamW


def test_a_prediction_leaves_torchaos_tables_to_real_steps():
    pytest.importorskip("torchao")
    from torchao.optim import subclass_4bit

    def lowered_table():
        model = make()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        work = lowtide.Workload(model, lambda m, b: m(b).square().mean(), BATCHES[0], optimizer)
        with lo.lower_state(optimizer, "4bit"):
            profile(work, fake=True)
            train(model, optimizer, BATCHES[:1])
            return optimizer.state[model[0].weight]["exp_avg"].qmap

    expected = torch.tensor(subclass_4bit.create_dynamic_map(True, 3, 4))
    subclass_4bit.get_qmap_signed.cache_clear()
    subclass_4bit.get_qmap_unsigned.cache_clear()
    assert torch.equal(lowered_table(), expected)


def test_a_group_that_was_added_while_states_are_lowered_is_a_plain_one_after_undo():
    model, other = make(), make()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    reference = torch.optim.AdamW(other[0].parameters(), lr=1e-2)
    undo = lo.lower_state(optimizer, "8bit")
    for each, layers in ((optimizer, model), (reference, other)):
        each.add_param_group({"params": list(layers[2].parameters()), "lr": 1e-3})
    train(model, optimizer, BATCHES[:1])
    undo()
    assert [set(group) for group in optimizer.param_groups] == [set(group) for group in reference.param_groups]
    assert optimizer.param_groups[1]["lr"] == 1e-3
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.float32
    train(model, optimizer, BATCHES[:1])
    assert optimizer.state[model[2].weight]["step"] == 2


def test_an_undo_before_a_step_keeps_what_was_loaded():
    model, optimizer = started()
    train(model, optimizer, BATCHES[:1])
    undo = lo.lower_state(optimizer, "8bit")
    other = make()
    further = OPTIMIZERS["AdamW"](other.parameters())
    train(other, further, BATCHES[:3])
    optimizer.load_state_dict(further.state_dict())
    undo()
    assert optimizer.state[model[0].weight]["step"] == 3


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_amsgrad_of_one_group_is_refused(kind):
    model = make()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "amsgrad": True}]
    optimizer = torch.optim.AdamW(groups)
    with refused("amsgrad"):
        lo.lower_state(optimizer, kind)
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("saved_in", ["4bit", "plain"])
def test_4bit_states_resume_bit_for_bit_and_take_plain_ones(saved_in):
    pytest.importorskip("torchao")

    def lowered():
        model, optimizer = started()
        lo.lower_state(optimizer, "4bit")
        return model, optimizer

    if saved_in == "4bit":
        assert resumes(lowered, weights_only=False)  # torchao's tensors are classes of its own
    else:
        assert resumes(lowered, saver=started, then=lambda optimizer: lo.lower_state(optimizer, "4bit"))
