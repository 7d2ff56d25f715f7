"""bitsandbytes in the place of torch's SGD, and 8-bit states for its own optimizers: the same rules, fewer bytes."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide.errors import MissingExtra
from lowtide.planning import predict
from lowtide.profiling import profile
from lowtide.techniques import Option, techniques
from lowtide.techniques.optimizer_state import OptimizerStateConfig
from tests.contract.contract import TechniqueContract
from tests.contract.workloads import seeded, wide
from tests.optim.training import make, resumes
from tests.refusals import refused

SMALL, LARGE = 60, 128 * 128


def built(kind, **options):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(128, 128) / 10), nn.Parameter(torch.randn(SMALL) / 10)]
    return weights, kind(weights, **{"lr": 0.01, **options})


def train(weights, optimizer, start, end):
    for i in range(start, end):
        for n, weight in enumerate(weights):
            generator = torch.Generator().manual_seed(10 * i + n)
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in weights]


def momentum(**options):
    return built(torch.optim.SGD, **{"momentum": 0.9, **options})


# -- what is refused, with and without the library -----------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"nesterov": True}, {"dampening": 0.5}, {"maximize": True}, {"momentum": 0.0}],
    ids=lambda o: next(iter(o)),
)
def test_what_bitsandbytes_would_do_otherwise_is_refused(options):
    _, optimizer = momentum(**options)
    with refused(next(iter(options))):
        lo.lower_state(optimizer, "8bit")
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.parametrize("weight", [torch.ones(3, 4).t(), torch.ones(3, dtype=torch.float64)], ids=["strides", "dtype"])
def test_parameters_that_it_cannot_step_are_refused(weight):
    with refused(str(weight.dtype)):
        lo.lower_state(torch.optim.SGD([nn.Parameter(weight)], lr=0.1, momentum=0.9), "8bit")


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    _, optimizer = momentum()
    with pytest.raises(MissingExtra) as missing:
        lo.lower_state(optimizer, "8bit")
    assert "lowtide[optim]" in str(missing.value)
    assert type(optimizer) is torch.optim.SGD


# -- with the library ----------------------------------------------------------------------------------------


@pytest.fixture
def library():
    return pytest.importorskip("bitsandbytes")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_in_8_bits_follows_torchs(decay):
    weights, optimizer = momentum(weight_decay=decay)
    start = [w.detach().clone() for w in weights]
    expected = train(weights, optimizer, 0, 20)
    twins, other = momentum(weight_decay=decay)
    lo.lower_state(other, "8bit")
    actual = train(twins, other, 0, 20)
    assert other.state[twins[0]]["state1"].dtype == torch.uint8
    assert (actual[0] - expected[0]).norm() < 0.02 * (expected[0] - start[0]).norm()
    torch.testing.assert_close(actual[1], expected[1])  # small ones stay in float32: the same rule


@pytest.mark.usefixtures("library")
def test_momentum_that_is_there_goes_on_in_8_bits_and_comes_back():
    weights, optimizer = momentum()
    expected = train(weights, optimizer, 0, 10)
    twins, other = momentum()
    train(twins, other, 0, 5)
    undo = lo.lower_state(other, "8bit")
    train(twins, other, 5, 8)
    undo()
    assert type(other) is torch.optim.SGD
    assert set(other.state[twins[0]]) == {"momentum_buffer"}
    actual = train(twins, other, 8, 10)
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize(
    ("name", "moments", "options"),
    [
        ("SGD", 1, {"momentum": 0.9}),
        ("LARS", 1, {"momentum": 0.9}),
        ("Lion", 1, {}),
        ("RMSprop", 1, {}),
        ("Adagrad", 1, {}),
        ("LAMB", 2, {}),
        ("Adam", 2, {}),
        ("AdamW", 2, {}),
    ],
)
def test_bytes_of_states_are_one_a_value_and_a_scale_for_256(library, name, moments, options):
    weights, optimizer = built(getattr(library.optim, name), **options)
    lo.lower_state(optimizer, "8bit")
    train(weights, optimizer, 0, 2)
    state = optimizer.state[weights[0]]
    counted = [v for key, v in state.items() if isinstance(v, torch.Tensor) and not key.startswith(("qmap", "unorm"))]
    assert sum(v.nbytes for v in counted) == moments * (LARGE + 4 * LARGE // 256)
    # One table of 256 float32 values for all parameters: 1.08 bytes a value for this matrix, 1.016 for many.
    assert round((sum(v.nbytes for v in counted) + moments * 1024) / LARGE, 2) == {1: 1.08, 2: 2.16}[moments]
    assert optimizer.state[weights[1]]["state1"].dtype == torch.float32


@pytest.mark.parametrize("name", ["SGD", "LARS", "Lion", "RMSprop", "Adagrad", "LAMB", "Adam", "AdamW"])
def test_8_bits_follow_the_librarys_own_32(library, name):
    options = {"momentum": 0.9} if name in ("SGD", "LARS") else {}
    weights, optimizer = built(getattr(library.optim, name), **options)
    start = weights[0].detach().clone()
    expected = train(weights, optimizer, 0, 10)
    twins, other = built(getattr(library.optim, name), **options)
    train(twins, other, 0, 2)
    undo = lo.lower_state(other, "8bit")
    actual = train(twins, other, 2, 10)
    near = 0.02 if name in ("SGD", "LARS") else 0.1  # a sign near zero; a small second moment
    assert (actual[0] - expected[0]).norm() < near * (expected[0] - start).norm()
    undo()
    assert other.state[twins[0]]["state1"].dtype == torch.float32
    assert other.args.optim_bits == 32


def test_a_bound_is_kept_with_8_bits_where_the_librarys_own_forgets_it(library):
    """If this fails at the last line, bitsandbytes' LARS8bit has learned its bound: use its step."""
    moved = {}
    for name in ("LARS", "ours", "LARS8bit", "SGD8bit"):
        kind = library.optim.LARS if name == "ours" else getattr(library.optim, name)
        weights, optimizer = built(kind, momentum=0.9)
        if name == "ours":
            lo.lower_state(optimizer, "8bit")
        start = weights[0].detach().clone()
        moved[name] = float((train(weights, optimizer, 0, 3)[0] - start).norm())
    assert moved["ours"] == pytest.approx(moved["LARS"], rel=0.01)
    assert moved["LARS8bit"] == moved["SGD8bit"] > 10 * moved["LARS"]


@pytest.mark.parametrize("name", ["SGD of torch", "Lion", "LARS"])
def test_a_resumed_run_goes_on_bit_for_bit(library, name):
    def start():
        model = make()
        kind = torch.optim.SGD if name == "SGD of torch" else getattr(library.optim, name)
        optimizer = kind(model.parameters(), lr=0.01, **({} if name == "Lion" else {"momentum": 0.9}))
        lo.lower_state(optimizer, "8bit")
        return model, optimizer

    assert resumes(start)


@pytest.mark.parametrize("name", ["SGD of torch", "Lion"])
def test_a_plain_state_that_is_loaded_is_lowered_and_is_what_the_undo_gives(library, name):
    kind, options = (torch.optim.SGD, {"momentum": 0.9}) if name == "SGD of torch" else (library.optim.Lion, {})
    weights, optimizer = built(kind, **options)
    train(weights, optimizer, 0, 3)
    twins, other = built(kind, **options)
    undo = lo.lower_state(other, "8bit")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[twins[0]]["state1"].dtype == torch.uint8
    assert other.state[twins[1]]["state1"].dtype == torch.float32
    undo()
    key = "momentum_buffer" if name == "SGD of torch" else "state1"
    for weight, twin, near in zip(weights, twins, (0.02, 0.0), strict=True):
        expected = optimizer.state[weight][key]
        assert (other.state[twin][key] - expected).norm() <= near * expected.norm()


@pytest.mark.usefixtures("library")
def test_momentum_is_read_from_the_groups_as_schedulers_set_it():
    weights, optimizer = momentum()
    lo.lower_state(optimizer, "8bit")
    twins, plain = momentum()
    for i, value in enumerate((0.9, 0.5, 0.0001)):
        for each in (optimizer, plain):
            each.param_groups[0]["momentum"] = value
        actual, expected = train(weights, optimizer, i, i + 1), train(twins, plain, i, i + 1)
    torch.testing.assert_close(actual[1], expected[1])
    optimizer.param_groups[0]["nesterov"] = True
    with refused("nesterov"):
        train(weights, optimizer, 3, 4)


def sgd_work():
    work = seeded(wide)()
    return replace(work, optimizer=torch.optim.SGD(work.model.parameters(), lr=0.1, momentum=0.9), name="wide, SGD")


EIGHT = Option("optimizer_state", ("",), OptimizerStateConfig("8bit"))


@pytest.mark.usefixtures("library")
class TestContract(TechniqueContract):
    """8-bit momentum by its name, as people ask for it."""

    @pytest.fixture
    def technique(self):
        return techniques()["optimizer_state"]

    @pytest.fixture
    def work(self):
        return sgd_work()

    @pytest.fixture
    def option(self):
        return EIGHT


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("device", [None, "h200"])
def test_a_predicted_step_knows_the_bytes_and_changes_nothing(device):
    work = sgd_work()
    plain = profile(work, fake=device is not None, device=device)
    predicted = predict(work, [EIGHT], plain)
    scales = 4 * 4096 // 256 if device is None else 512  # in what a GPU allocates at the least
    assert plain.static_bytes - predicted.static_bytes == 3 * 4096 - scales - 1024
    if device is None:
        with lo.lower_state(work.optimizer, "8bit"):
            assert profile(work).storage_peak_bytes == predicted.storage_peak_bytes
            work.compute_loss().backward()
            work.optimizer.step()
    assert type(work.optimizer) is torch.optim.SGD
