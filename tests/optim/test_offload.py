"""States on the host: a plain step's bits, and a home on the host whatever is saved, loaded or undone."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide.optim as lo
from lowtide.optim.hooks import part_of
from tests.optim.training import BATCHES, OPTIMIZERS, equal, make, started, train


def moments(optimizer):
    return [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim > 0]


def test_what_is_loaded_goes_to_the_host():
    """On fake tensors of a GPU, which need none."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = [nn.Parameter(torch.zeros(8, 8, device="cuda")) for _ in range(2)]
        plain = torch.optim.AdamW(weights, foreach=False)
        for weight in weights:
            state = {key: torch.zeros(8, 8, device="cuda") for key in ("exp_avg", "exp_avg_sq")}
            plain.state[weight] = {"step": torch.tensor(1.0), **state}
        saved = plain.state_dict()
        optimizer = torch.optim.AdamW(weights, foreach=False)
        with lo.lower_state(optimizer, "cpu"):
            optimizer.load_state_dict(saved)
            assert len(moments(optimizer)) == 4
            assert all(value.device.type == "cpu" for value in moments(optimizer))
        assert all(value.device.type == "cuda" for value in moments(optimizer))
        assert all(value.device.type == "cuda" for value in moments(plain))


class Recorded:
    """Stands for a stream with copies that are not over."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


def test_a_state_dict_and_an_undo_wait_for_the_copies():
    model, optimizer = started()
    undo = lo.lower_state(optimizer, "cpu")
    train(model, optimizer, BATCHES[:1])
    stream = part_of(optimizer)._streams[torch.device("cuda", 0)] = Recorded()
    optimizer.state_dict()
    assert stream.waited == 1
    undo()
    assert stream.waited == 2
    optimizer.state_dict()
    assert stream.waited == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_in_another_dtype_is_loaded_as_torch_loads_it(dtype):
    """A state of float32 weights is loaded for bfloat16 ones as by a plain optimizer."""
    model, saver = started()
    train(model, saver, BATCHES[:2])
    results = []
    for lowers in (False, True):
        other = make(dtype)
        optimizer = OPTIMIZERS["AdamW"](other.parameters())
        if lowers:
            lo.lower_state(optimizer, "cpu")
        optimizer.load_state_dict(copy.deepcopy(saver.state_dict()))
        results.append(train(other, optimizer, BATCHES[2:4]))
    assert equal(*results)


def test_8bit_states_on_the_host_load_what_torch_saved():
    model, saver = started()
    train(model, saver, BATCHES[:2])
    saved = copy.deepcopy((model.state_dict(), saver.state_dict()))
    results = []
    for on_host in (False, True):
        model = make()
        model.load_state_dict(saved[0])
        optimizer = OPTIMIZERS["AdamW8bit"](model.parameters())
        if on_host:
            lo.lower_state(optimizer, "cpu")
        optimizer.load_state_dict(saved[1])
        assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
        results.append(train(model, optimizer, BATCHES[2:4]))
    assert equal(*results)


def test_a_load_that_fails_leaves_the_optimizer_as_it_was():
    model, optimizer = started()
    other = OPTIMIZERS["AdamW"](list(model.parameters())[:2])
    lo.lower_state(optimizer, "cpu")
    train(model, optimizer, BATCHES[:1])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()


# -- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD", "AdamW8bit"])
@pytest.mark.parametrize("saved_on", ["cuda", "cpu"])
def test_on_a_gpu_loaded_states_are_pinned_and_go_on_bit_for_bit(name, saved_on, tmp_path):
    def start(*, on_host):
        model = make().cuda()
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, lo.lower_state(optimizer, "cpu") if on_host else None

    batches = [x.cuda() for x in BATCHES]
    model, optimizer, _ = start(on_host=False)
    train(model, optimizer, batches[:3])
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    expected = train(model, optimizer, batches[3:6])
    saved = torch.load(tmp_path / "saved.pt", map_location=saved_on)
    model, optimizer, undo = start(on_host=True)
    model.load_state_dict(saved[0])
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    optimizer.load_state_dict(saved[1])
    assert torch.cuda.max_memory_allocated() - held < 64 * 96  # less than the moment of a matrix, were it in 8 bits
    assert all(value.device.type == "cpu" and value.is_pinned() for value in moments(optimizer))
    assert equal(train(model, optimizer, batches[3:6]), expected)
    assert all(value.device.type == "cpu" for value in moments(optimizer))
    undo()
    assert all(value.device.type == "cuda" for value in moments(optimizer))
    train(model, optimizer, batches[:1])


@pytest.mark.gpu
def test_on_a_gpu_a_state_dict_right_after_a_step_is_that_of_the_step():
    weight = nn.Parameter(torch.zeros(64 * 2**20, device="cuda"))  # whose copies take a while
    optimizer = torch.optim.SGD([weight], lr=0.0, momentum=1.0)
    lo.lower_state(optimizer, "cpu")
    weight.grad = torch.ones_like(weight)
    for count in range(1, 5):
        optimizer.step()
        held = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert held[-1].item() == count
        assert held.eq(count).all()
