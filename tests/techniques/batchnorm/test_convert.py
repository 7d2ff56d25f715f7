"""Batch norms and what follows them are found, wherever they stand, and converted."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import TraceError
from lowtide.nn import BatchNormAct2d
from lowtide.techniques.batchnorm import convert
from tests.refusals import refused
from tests.techniques.batchnorm.converting import RESIDUALS, assert_converts, calls
from tests.techniques.batchnorm.models import (
    Decoder,
    DenseBlock,
    DenseLayer,
    EndsElsewhere,
    Excited,
    Many,
    PreActivation,
    ResNetBlock,
    Shifted,
    Switched,
    conv,
    image,
    joined,
)

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


def test_an_activation_that_is_shared_in_a_sequential_works_where_no_batch_norm_is_before_it() -> None:
    act = nn.PReLU()
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), act, conv(), act, conv(), nn.BatchNorm2d(4), act)
    assert_converts(model, image(), fused=2)
    assert model[4] is act
    assert model[2].weight is act.weight


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y + r": lambda y, r: y + r,
    "r + y": lambda y, r: r + y,
    "y += r": operator.iadd,
    "torch.add(y, r)": torch.add,
    "torch.add(r, y)": lambda y, r: torch.add(r, y),
    "y.add(r)": lambda y, r: y.add(r),
    "y.add_(r)": lambda y, r: y.add_(r),
}

MODELS: dict[str, tuple[Callable[[], nn.Module], list[Any], int]] = {
    "sequentials in sequentials and identities between": (
        lambda: nn.Sequential(
            nn.Sequential(conv(), nn.BatchNorm2d(4)),
            nn.Identity(),
            nn.ReLU(),
            nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Identity(), nn.Tanh()),
        ),
        [image()],
        2,
    ),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1)),
        [image(dims=1)],
        1,
    ),
    "no dimension": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24), nn.Tanh()), [image(dims=1)], 1),
    "three dimensions": (
        lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.BatchNorm3d(4), nn.PReLU(), nn.Conv3d(4, 4, 1)),
        [image(dims=3)],
        1,
    ),
    "pre-activation": (PreActivation, [image()], 2),
    "lists, and dropout by mode": (
        lambda: nn.Sequential(conv(), DenseBlock(), nn.BatchNorm2d(10), nn.ReLU()),
        [image()],
        7,
    ),
    "a tensor": (lambda: DenseLayer(4), [image()], 2),
    "a list": (lambda: DenseLayer(8), [[image(), image()]], 2),
    "squeeze and excitation": (Excited, [image()], 3),
    "one of any number of arguments": (Many, [image()], 1),
    "three of any number of arguments": (Many, [image(), image(), image()], 1),
    **{f"join {name}": (partial(joined, add), [image()], 1) for name, add in JOINS.items()},
    **{f"residual {name}": (partial(Shifted, residual), [image()], 1) for name, residual in RESIDUALS.items()},
    **{
        f"{norm.__name__} with {setting}": (
            lambda norm=norm, setting=setting: nn.Sequential(conv(), norm(4, **setting), nn.ReLU(), conv()),
            [image()],
            1,
        )
        for norm in (nn.BatchNorm2d, nn.SyncBatchNorm)
        for setting in ({"affine": False}, {"track_running_stats": False}, {"momentum": None})
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models_in_the_ways_that_people_write_them(name: str) -> None:
    make, inputs, fused = MODELS[name]
    conversion = assert_converts(make(), *inputs, fused=fused)
    assert not name.startswith(("join", "residual")) or conversion.changed[0].join


# -- attributes and functions in a forward ---------------------------------------------------------------


def test_one_relu_module_behind_several_batch_norms() -> None:
    model = ResNetBlock()
    relu = model.relu
    conversion = assert_converts(model, image(), fused=2)
    assert model.relu is relu
    assert "forward" not in vars(relu)
    assert [change.join for change in conversion.changed] == [False, True]
    assert calls(model, nn.ReLU, lambda: model(image())) == 0


def test_a_residual_of_a_wider_type_makes_the_result_wider() -> None:
    model = ResNetBlock()
    plain = copy.deepcopy(model)
    convert(model)
    x = image().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, wanted = model(x), plain(x)
    assert actual.dtype == wanted.dtype
    torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)  # a bfloat16 batch norm, rounded otherwise


def test_batch_norms_at_the_end_of_a_module() -> None:
    conversion = assert_converts(nn.Sequential(EndsElsewhere(), conv()), image(), fused=4)
    assert {change.path: change.join for change in conversion.changed} == {
        "0.a.bn": False,
        "0.b.1": False,
        "0.b.3.bn": True,
        "0.c.0.bn": False,
    }


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
    with pytest.warns(UserWarning, match="bn"):
        torch.testing.assert_close(model(x, skip=skip, normal=False), plain(x, skip=skip, normal=False))
    for normal in (True, False):
        torch.testing.assert_close(model(x, skip=skip, normal=normal), plain(x, skip=skip, normal=normal))
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


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


class Block(nn.Module):
    """A residual block whose activations are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x + self.last(F.silu(self.norm(self.conv(x)))))


def test_torch_fx_traces_a_converted_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU(), Block(), nn.MaxPool2d(2))
    plain = copy.deepcopy(model)
    convert(model)
    traced, x = torch.fx.symbolic_trace(copy.deepcopy(model)), torch.randn(3, 4, 6, 6)
    torch.testing.assert_close(traced(x), torch.fx.symbolic_trace(plain)(x))


def test_torch_fx_of_a_root_whose_forward_was_replaced_is_refused() -> None:
    block = Block()
    convert(block)
    with refused("Block", "nn.Sequential(model)", kind=TraceError):
        torch.fx.symbolic_trace(block)
