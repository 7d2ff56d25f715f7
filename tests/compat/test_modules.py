"""Modules' own dictionaries, hooks and base classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.compat import modules
from lowtide.compat.frames import frame_at


def test_layers_have_the_bases_that_are_named_for_them() -> None:
    assert isinstance(nn.BatchNorm2d(1), modules.BatchNormBase)
    assert isinstance(nn.SyncBatchNorm(1), modules.BatchNormBase)
    assert isinstance(nn.InstanceNorm1d(1), modules.NormBase)
    assert isinstance(nn.InstanceNorm1d(1), modules.InstanceNormBase)
    assert not isinstance(nn.InstanceNorm1d(1), modules.BatchNormBase)
    assert isinstance(nn.LazyBatchNorm1d(), modules.LazyNormBase)
    assert isinstance(nn.ConvTranspose2d(1, 1, 1), modules.ConvBase)
    assert isinstance(nn.AlphaDropout(), modules.DropoutBase)


def test_dictionaries_are_the_modules_own() -> None:
    norm, linear = nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)
    assert list(modules.own_parameters(linear)) == ["weight", "bias"]
    assert list(modules.own_buffers(norm)) == ["running_mean", "running_var", "num_batches_tracked"]
    modules.own_buffers(norm)["running_mean"] = mean = torch.ones(2)
    assert norm.running_mean is mean
    chain = nn.Sequential(norm)
    modules.own_children(chain)["0"] = linear
    assert chain[0] is linear


def test_attributes_are_without_parameters_and_children() -> None:
    linear = nn.Linear(2, 2)
    linear.note = "here"  # pyright: ignore[reportArgumentType]
    found = modules.own_attributes(linear)
    assert found["note"] == "here"
    assert all(
        each is not value for value in found.values() for each in (modules.own_parameters(linear), linear.weight)
    )


def test_hooks_are_found() -> None:
    linear = nn.Linear(2, 2)

    def hook(*_: Any) -> None: ...

    assert modules.hooks_of(linear) == []
    handles = (linear.register_forward_pre_hook(hook), linear.register_forward_hook(hook))
    handles += (linear.register_full_backward_hook(hook), linear.register_full_backward_pre_hook(hook))
    assert modules.hooks_of(linear) == [hook] * 4
    modules.forward_pre_hooks(linear).clear()
    assert modules.hooks_of(linear) == [hook] * 3
    assert len(handles) == 4


def test_global_hooks_are_found() -> None:
    assert len(modules.GLOBAL_HOOKS) == 4
    before = [len(hooks) for hooks in modules.GLOBAL_HOOKS]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    after = [len(hooks) for hooks in modules.GLOBAL_HOOKS]
    handle.remove()
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 1, 0, 0]


def test_a_forward_with_hooks_is_called_by_the_code_of_a_call() -> None:
    class Model(nn.Module):
        def forward(self) -> bool:
            return modules.CALL in (
                frame_at(1).f_code,
                frame_at(2).f_code,
            )  # between are torch's own, with global hooks

    assert Model()()


def test_loading_is_told() -> None:
    class Told(modules.TellsOfLoading, nn.Linear):
        loaded = 0

        def after_loading(self) -> None:
            assert torch.equal(self.weight, torch.ones(1, 1))
            self.loaded += 1

    model = nn.Sequential(Told(1, 1))
    model.load_state_dict({"0.weight": torch.ones(1, 1), "0.bias": torch.ones(1)})
    assert model[0].loaded == 1


def test_buffers_that_are_not_saved_are_known() -> None:
    model = nn.Module()
    model.register_buffer("saved", torch.ones(1))
    model.register_buffer("other", torch.ones(1), persistent=False)
    assert (modules.is_persistent(model, "saved"), modules.is_persistent(model, "other")) == (True, False)


def test_compiled_modules_are_known() -> None:
    plain, inside = nn.Linear(1, 1), nn.Linear(1, 1)
    inside.compile(backend="eager")
    wrapped: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    assert [modules.runs_compiled(each) for each in (plain, inside, wrapped)] == [False, True, True]
    assert vars(inside)[modules.COMPILED_CALL] is not None


def test_an_input_of_another_shape_is_refused() -> None:
    modules.check_input(nn.BatchNorm2d(1), torch.ones(1, 1, 1, 1))
    with pytest.raises(ValueError, match="4D"):
        modules.check_input(nn.BatchNorm2d(1), torch.ones(1, 1))


def test_no_forward_of_ddp_runs() -> None:
    assert not modules.in_ddp_forward()


def test_weights_of_a_recurrent_layer_are_replaced() -> None:
    layer, x = nn.LSTM(2, 3), torch.ones(1, 1, 2)
    zeros: list[Tensor] = [torch.zeros_like(weight) for weight in modules.flat_weights(layer)]
    assert all(map(torch.equal, modules.flat_weights(layer), layer.parameters()))
    modules.set_flat_weights(layer, zeros)
    assert not layer(x)[0].any()
