from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import lowtide
from lowtide import zoo
from lowtide.errors import LowtideError
from lowtide.nn import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from lowtide.techniques import Forward, replace_forward
from lowtide.techniques.batchnorm import Conversion, convert
from lowtide.techniques.batchnorm.convert import Fused
from tests.techniques.batchnorm.models import (
    Applied,
    Block,
    Decoder,
    DenseBlock,
    DenseLayer,
    EndsElsewhere,
    Excited,
    Gate,
    HardSwish,
    Joined,
    Many,
    OwnNorm,
    PreActivation,
    ResNetBlock,
    Shifted,
    Swish,
    Switched,
    Taps,
    TwoEnds,
    Volume,
    Written,
    asks_the_type,
    build,
    calls_twice,
    conv,
    decides,
    draws,
    draws_tensors,
    freezes,
    image,
    reads_twice,
    recomputes,
    recomputes_reentrant,
    remembers,
    softens,
)

CNNS = [name for name in zoo.names() if name.startswith(("lenet", "res", "wrn", "dense", "unet"))]
SHALLOW = [name for name in CNNS if "101" not in name and "152" not in name]


def results(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The outputs, the gradients and the buffers of a step in training mode, and the outputs of one in evaluation."""
    torch.manual_seed(0)
    found: dict[str, Tensor] = {}
    inputs = pytree.tree_map(lambda x: x.clone().requires_grad_(), list(inputs))
    model.train()
    model.zero_grad()
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.stack([(out * torch.sin(torch.arange(out.numel()).view_as(out))).sum() for out in outputs]).sum().backward()
    found.update({f"output {i}": out for i, out in enumerate(outputs)})
    found.update({f"input {i}": x.grad for i, x in enumerate(pytree.tree_leaves(inputs)) if x.grad is not None})
    found.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    found.update(dict(model.named_buffers()))
    model.eval()
    with torch.no_grad():
        outputs = model(*inputs)
    found.update({f"evaluated {i}": out for i, out in enumerate(outputs if isinstance(outputs, tuple) else (outputs,))})
    model.train()
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_converts(model: nn.Module, *inputs: Any, fused: int, left: int = 0, **options: Any) -> Conversion:
    """Convert, and compare with the plain model in all that a training step and an evaluation give."""
    torch.manual_seed(1)
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and norm.affine:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    model = model.double()
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    conversion = convert(model, **options)
    assert (len(conversion.changed), len(conversion.left)) == (fused, left), str(conversion)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    wanted, found = results(plain, inputs), results(model, inputs)
    assert list(found) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], msg=lambda text, name=name: f"{name}: {text}")
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert all(None not in forward._codes.values() for forward in forwards if isinstance(forward, Fused))
    return conversion


def calls(model: nn.Module, kind: type[nn.Module], run: Callable[[], object]) -> int:
    """How often modules of a kind are called."""
    count = 0

    def note(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += isinstance(module, kind) and "forward" not in vars(module)

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        run()
    finally:
        hook.remove()
    return count


# -- neighbours in a nn.Sequential -----------------------------------------------------------------------

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.LeakyReLU(0.1),
    nn.LeakyReLU(0.1, inplace=True),
    nn.ELU(0.7),
    nn.SiLU(),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.Hardswish(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.Softplus(),
    nn.PReLU(),
    nn.PReLU(4),
    nn.Mish(),
    nn.ReLU6(),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_neighbours_in_a_sequential(activation: nn.Module) -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), copy.deepcopy(activation), conv())
    assert_converts(model, image(), fused=1)
    assert isinstance(model[1], BatchNormAct2d)
    assert type(model[2]) is type(activation)


@pytest.mark.parametrize("activation", [Swish(), HardSwish()], ids=lambda a: type(a).__name__)
def test_a_pointwise_module_of_ones_own(activation: nn.Module) -> None:
    assert_converts(nn.Sequential(conv(), nn.BatchNorm2d(4), activation, conv()), image(), fused=1)


def test_an_activation_that_is_shared_in_a_sequential_works_where_no_batch_norm_is_before_it() -> None:
    act = nn.PReLU()
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), act, conv(), act, conv(), nn.BatchNorm2d(4), act)
    assert_converts(model, image(), fused=2)
    assert model[4] is act
    assert model[2].weight is act.weight


def test_sequentials_in_sequentials_and_identities_between() -> None:
    first = nn.Sequential(conv(), nn.BatchNorm2d(4))
    second = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Identity(), nn.Tanh())
    assert_converts(nn.Sequential(first, nn.Identity(), nn.ReLU(), second), image(), fused=2)


def test_one_and_three_dimensions() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1))
    assert_converts(model, image(dims=1), fused=1)
    assert_converts(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24), nn.Tanh()), image(dims=1), fused=1)
    assert isinstance(model[1], BatchNormAct1d)
    model = nn.Sequential(nn.Conv3d(4, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 4, 1))
    assert_converts(model, image(dims=3), fused=1)
    assert isinstance(model[1], BatchNormAct3d)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str)
def test_batch_norms_of_all_settings(options: dict[str, Any]) -> None:
    assert_converts(nn.Sequential(conv(), nn.BatchNorm2d(4, **options), nn.ReLU(), conv()), image(), fused=1)


# -- attributes and functions in a forward ---------------------------------------------------------------


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "x.relu": lambda x: x.relu(),
    "x.relu_": lambda x: x.relu_(),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "F.leaky_relu by name": lambda x: F.leaky_relu(input=x, negative_slope=0.3, inplace=True),
    "F.elu": lambda x: F.elu(x, 0.5, True),
    "F.silu": F.silu,
    "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "F.hardswish": F.hardswish,
    "F.softplus": lambda x: F.softplus(x, 2.0),
    "F.relu6": F.relu6,
    "F.mish": F.mish,
    "torch.sigmoid": torch.sigmoid,
    "x.tanh": lambda x: x.tanh(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    model = Applied(FUNCTIONS[name])
    assert_converts(model, image(), fused=1)
    assert isinstance(model.bn, BatchNormAct2d)


def test_one_relu_module_behind_several_batch_norms() -> None:
    model = ResNetBlock()
    relu = model.relu
    conversion = assert_converts(model, image(), fused=2)
    assert model.relu is relu
    assert "forward" not in vars(relu)
    assert [change.join for change in conversion.changed] == [False, True]
    assert calls(model, nn.ReLU, lambda: model(image())) == 0


def test_the_shortcuts_batch_norm_is_left_as_the_residual() -> None:
    conversion = assert_converts(nn.Sequential(ResNetBlock(downsample=True), conv()), image(), fused=2, left=1)
    assert conversion.left[0].path == "0.downsample.1"
    assert "no activation follows; nothing to save" in conversion.left[0].why


def test_joins_can_be_left_out() -> None:
    conversion = assert_converts(ResNetBlock(), image(), fused=1, left=1, joins=0)
    assert conversion.left[0].path == "bn2"
    assert "joins=0" in conversion.left[0].why


def _add_to(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y + r": lambda y, r: y + r,
    "r + y": lambda y, r: r + y,
    "y += r": _add_to,
    "torch.add(y, r)": torch.add,
    "torch.add(r, y)": lambda y, r: torch.add(r, y),
    "y.add(r)": lambda y, r: y.add(r),
    "y.add_(r)": lambda y, r: y.add_(r),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(name: str) -> None:
    conversion = assert_converts(Joined(JOINS[name]), image(), fused=1)
    assert conversion.changed[0].join


@pytest.mark.parametrize(
    "add", [lambda y, r: r.add_(y), lambda y, r: _add_to(r, y), lambda y, r: torch.add(y, r, alpha=2)]
)
def test_sums_that_are_written_over_the_residual_or_scaled_are_left(add: Any) -> None:
    assert_converts(Joined(add), image(), fused=0, left=1)


RESIDUALS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a parameter": lambda self, x: self.bias,
    "of each channel": lambda self, x: self.embed(x.mean((2, 3)))[:, :, None, None],
    "an integer": lambda self, x: x.size(0),
    "of another dtype": lambda self, x: x.float(),
    "larger than x": lambda self, x: torch.stack([x, x]),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals_of_all_kinds(name: str) -> None:
    assert_converts(Shifted(RESIDUALS[name]), image(), fused=1)


def test_a_residual_of_a_wider_type_makes_the_result_wider() -> None:
    model = ResNetBlock()
    plain = copy.deepcopy(model)
    convert(model)
    x = image().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = model(x), plain(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)  # a bfloat16 batch norm, rounded otherwise


def test_of_two_batch_norms_that_are_added_the_first_is_joined() -> None:
    conversion = assert_converts(TwoEnds(), image(), fused=1, left=1)
    assert conversion.changed[0].path == "right.1"
    assert "residual of right.1" in conversion.left[0].why


def test_a_join_is_not_moved_behind_a_write_to_its_input() -> None:
    model = Written().eval()
    x = image().float()
    wanted = model(x)
    conversion = convert(model)
    assert torch.equal(model(x), wanted)
    assert "may be written to" in conversion.left[0].why


def test_batch_norms_at_the_end_of_a_module() -> None:
    conversion = assert_converts(nn.Sequential(EndsElsewhere(), conv()), image(), fused=4)
    assert {change.path: change.join for change in conversion.changed} == {
        "0.a.bn": False,
        "0.b.1": False,
        "0.b.3.bn": True,
        "0.c.0.bn": False,
    }


def test_pre_activation_blocks() -> None:
    assert_converts(PreActivation(), image(), fused=2)


def test_dense_layers_with_their_lists_and_dropout_by_mode() -> None:
    assert_converts(nn.Sequential(conv(), DenseBlock(), nn.BatchNorm2d(10), nn.ReLU()), image(), fused=7)


def test_a_dense_layer_takes_a_tensor_or_a_list() -> None:
    assert_converts(DenseLayer(4), image(), fused=2)
    assert_converts(DenseLayer(8), [image(), image()], fused=2)


def test_squeeze_and_excitation() -> None:
    assert_converts(Excited(), image(), fused=3)


def test_three_dimensional_attributes_and_a_prelu() -> None:
    assert_converts(Volume(), image(dims=3), fused=1)


def test_optional_arguments_are_followed_at_every_call() -> None:
    model = Decoder()
    model(image().float(), image().float())
    assert_converts(model, image(), image(), fused=1)


def test_a_call_in_which_something_else_follows_runs_as_it_was_written() -> None:
    model = Decoder()
    x, skip = image().float(), image().float()
    model(x, skip)
    plain = copy.deepcopy(model)
    convert(model)
    with pytest.warns(UserWarning, match="plain batch norms: what follows bn"):
        torch.testing.assert_close(model(x, skip=skip, normal=False), plain(x, skip=skip, normal=False))
    for normal in (True, False):
        torch.testing.assert_close(model(x, skip=skip, normal=normal), plain(x, skip=skip, normal=normal))
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_a_forward_of_any_number_of_arguments() -> None:
    assert_converts(Many(), image(), fused=1)
    assert_converts(Many(), image(), image(), image(), fused=1)


@pytest.mark.parametrize(("tap", "fused"), [(0, 2), (1, 1), (2, 2), (4, 1)])
def test_layers_of_a_sequential_that_are_called_one_by_one(tap: int, fused: int) -> None:
    assert_converts(Taps(tap), image(), fused=fused, left=2 - fused)


def test_settings_that_change_later_are_followed() -> None:
    model = Switched()
    assert_converts(model, image(), fused=2)
    x = image()
    model.eval()
    before = model(x)
    model.scale = 2.0
    torch.testing.assert_close(model(x), 2 * before)


def test_a_batch_norm_without_activation_is_converted_where_a_convolution_keeps_its_output() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), conv(), nn.BatchNorm2d(4), nn.MaxPool2d(2))
    conversion = assert_converts(model, image(), fused=1, left=1)
    assert (conversion.changed[0].path, conversion.changed[0].activation) == ("1", "identity")
    assert conversion.left[0].why == "no activation follows; nothing to save"


# -- what is left, and why -------------------------------------------------------------------------------


REASONS: dict[Callable[[Any, Tensor], Tensor], str] = {
    decides: r"Block.forward cannot be traced: it decides by the value .* \(models.py, line \d+\)",
    draws: "draws random numbers",
    draws_tensors: "it computes aten.rand",
    remembers: "it changes the attribute seen",
    freezes: "grad mode",
    recomputes: "checkpoint",
    recomputes_reentrant: "checkpoint",
    reads_twice: "its output is read by relu and add",
    calls_twice: "called 2 times",
    softens: "nothing to save",
    asks_the_type: "decides by the type",
}


@pytest.mark.parametrize("run", REASONS, ids=lambda run: run.__name__)
def test_forwards_that_are_left_run_as_before(run: Callable[[Any, Tensor], Tensor]) -> None:
    model = nn.Sequential(Block(run))
    conversion = assert_converts(model, image(), fused=0, left=1)
    assert conversion.left[0].path == "0.bn"
    assert re.search(REASONS[run], conversion.left[0].why), conversion.left[0].why


def test_tracing_leaves_no_trace() -> None:
    model = Block(remembers)
    convert(model)
    assert model.seen == []
    state = random.getstate()
    convert(Block(draws))
    assert random.getstate() == state


@pytest.mark.parametrize("activation", [nn.RReLU(), nn.Softmax(1), Gate(), nn.GLU(1)], ids=lambda a: type(a).__name__)
def test_activations_that_are_not_pointwise_are_left(activation: nn.Module) -> None:
    conversion = convert(nn.Sequential(nn.BatchNorm2d(4), activation))
    assert f"does not know {type(activation).__name__}" in conversion.left[0].why


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, out: None)
    return module


SHARED = nn.BatchNorm2d(4)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: nn.Sequential(OwnNorm(4), nn.ReLU()), "forward of its own"),
        (lambda: nn.Sequential(hooked(nn.BatchNorm2d(4)), nn.ReLU()), "it has hooks"),
        (lambda: nn.Sequential(nn.BatchNorm2d(4), hooked(nn.ReLU())), "ReLU, which follows, has hooks"),
        (lambda: nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU()), "lazy"),
        (lambda: nn.Sequential(BatchNormAct2d(4), nn.ReLU()), "converted already"),
        (lambda: nn.Sequential(SHARED, nn.ReLU(), SHARED, nn.ReLU()), "in the model twice: 0, 2"),
        (lambda: nn.BatchNorm2d(4), "it is the model itself"),
        (lambda: torch.fx.symbolic_trace(PreActivation()), "GraphModule"),
        (lambda: nn.ModuleList([nn.BatchNorm2d(4)]), "no forward was seen to call it"),
    ],
)
def test_batch_norms_that_cannot_be_replaced_are_left(model: Callable[[], nn.Module], why: str) -> None:
    conversion = convert(model())
    assert conversion.changed == ()
    assert why in conversion.left[0].why
    assert why in str(conversion)


def test_scripted_modules_are_left() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    conversion = convert(nn.Sequential(conv(), scripted))
    assert [(left.path, left.why) for left in conversion.left] == [("1.0", "it is compiled by torch.jit")]


def test_a_strategy_that_an_activation_cannot_have_leaves_it() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
    conversion = convert(model, strategy="inplace")
    assert [change.path for change in conversion.changed] == ["4"]
    assert "relu has no inverse" in conversion.left[0].why


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    model.compile(backend="eager")
    with pytest.raises(LowtideError, match="Convert first"):
        convert(model)


# -- whole models, and the way back ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SHALLOW)
def test_the_zoo(name: str) -> None:
    work = zoo.small(name, optimizer="none")
    norms = sum(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in work.model.modules())
    shortcuts = sum(path.endswith("shortcut.1") for path, _ in work.model.named_modules())
    assert_converts(work.model, work.batch[0].double(), fused=norms - shortcuts, left=shortcuts)


def test_a_converted_model_keeps_less_for_backward() -> None:
    model = nn.Sequential(*(PreActivation() for _ in range(8)))
    work = lowtide.Workload(model, lambda model, batch: model(batch).sum(), torch.randn(4, 4, 32, 32))
    plain = lowtide.profile(work).storage_peak_bytes
    with convert(model):
        assert lowtide.profile(work).storage_peak_bytes < 0.65 * plain


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at it
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks:UserWarning")
def test_a_converted_model_can_be_compiled() -> None:
    model, x = build(), image().float()
    convert(model)
    wanted = model.eval()(x)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), wanted)
    torch.compiler.reset()


def snapshot(model: nn.Module) -> list[Any]:
    modules = [(path, id(m), type(m), m.__dict__.get("forward"), m.training) for path, m in model.named_modules()]
    return [modules, [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]]


def test_undo_gives_the_same_modules_and_values_back() -> None:
    model = build()
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    conversion = convert(model)
    assert snapshot(model) != before
    conversion.undo()
    conversion.undo()
    assert snapshot(model) == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_undo_after_training_keeps_what_was_learned() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model)
    with convert(model):
        model(image().float()).square().sum().backward()
        optimizer.step()
        model.eval()
        trained = copy.deepcopy(model.state_dict())
        x = image().float()
        wanted = model(x)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(model(x), wanted)
    model.train()
    assert snapshot(model) == before


def test_undo_follows_a_move() -> None:
    model = build()
    conversion = convert(model)
    model.double()
    conversion.undo()
    assert all(t.dtype in (torch.float64, torch.int64) for t in model.state_dict().values())
    model(image())


def test_state_dicts_go_both_ways() -> None:
    plain, model, x = build(), build(), image().float()
    convert(model)
    model(x)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))
    other = build()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model.eval()(x), other.eval()(x))


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_is_converted_and_has_its_own_parameters(copied: Callable[[nn.Module], nn.Module], used: bool) -> None:
    model, x = build(), image().float()
    plain = copy.deepcopy(model)
    convert(model)
    if used:
        model(x)
        plain(x)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    wanted = results(plain, [x])
    for name, value in results(twin, [x]).items():
        torch.testing.assert_close(value, wanted[name])
    assert calls(twin, nn.ReLU, lambda: twin(x)) == 0
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    assert all(p.grad is None for p in model.parameters())


def test_a_second_conversion_finds_nothing_more() -> None:
    model = build()
    convert(model)
    again = convert(model)
    assert again.changed == ()
    assert sum("already" in left.why for left in again.left) == 9


def test_a_failed_conversion_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    before = snapshot(model)
    made = 0
    make = BatchNormAct2d.from_batch_norm

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        if made == 4:
            raise RuntimeError("half way")
        return make(*args, **kwargs)

    monkeypatch.setattr(BatchNormAct2d, "from_batch_norm", fail)
    with pytest.raises(RuntimeError, match="half way"):
        convert(model)
    assert made == 4
    assert snapshot(model) == before
    with pytest.raises(LowtideError, match="nonsense"):
        convert(model, strategy="nonsense")  # pyright: ignore[reportArgumentType]


class Negated(Forward):
    def __call__(self, *args: Any) -> Any:
        return -self.plain(*args)


def test_a_replaced_forward_is_not_looked_behind() -> None:
    model = nn.Sequential(ResNetBlock())
    with replace_forward(Negated(model[0])):
        conversion = convert(model)
    assert conversion.changed == ()
    assert "ResNetBlock.forward was replaced by Negated" in conversion.left[0].why


def test_undo_refuses_when_a_layer_was_replaced() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())
    conversion = convert(model)
    model[1] = nn.Identity()
    with pytest.raises(LowtideError, match="was replaced"):
        conversion.undo()


def test_the_table_folds_what_differs_only_by_number() -> None:
    text = str(convert(nn.Sequential(*(ResNetBlock(downsample=True) for _ in range(3)))))
    assert text.splitlines() == [
        "6 of 9 batch norms are one with what follows",
        "  *.bn* (3)  relu (auto)",
        "  *.bn* (3)  residual, relu (auto)",
        "left as they were",
        "  *.downsample.* (3)  no activation follows; nothing to save",
    ]


# -- max pooling -------------------------------------------------------------------------------------------


def test_max_poolings_keep_their_input_alone_until_undo() -> None:
    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(2, 3, 9, 9)
    torch.autograd.backward(stem(x).square().sum())
    expected = [parameter.grad for parameter in stem.parameters()]
    stem.zero_grad()
    done = convert(stem)
    assert done.pools == ("3",)
    assert "max poolings keep their input alone\n  3" in str(done)
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        out = stem(x)
    assert torch.int64 not in kept
    torch.autograd.backward(out.square().sum())
    torch.testing.assert_close([parameter.grad for parameter in stem.parameters()], expected)
    done.undo()
    assert not any("forward" in vars(module) for module in stem.modules())


def test_a_model_without_pairs_keeps_its_poolings() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2))
    assert not convert(model).pools
    assert "forward" not in vars(model[1])
