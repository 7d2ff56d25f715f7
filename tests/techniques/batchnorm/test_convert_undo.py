"""Whole models are converted, trained, copied, and taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.errors import LowtideError
from lowtide.nn import BatchNormAct2d
from lowtide.techniques import Forward, replace_forward
from lowtide.techniques.batchnorm import convert
from tests.soak import in_soak
from tests.techniques.batchnorm.converting import SHALLOW, assert_converts, calls, pickled, results, snapshot
from tests.techniques.batchnorm.models import ResNetBlock, build, conv, image

# -- whole models, and the way back ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lenet", "resnet18", "densenet121", "unet", *in_soak(SHALLOW)])
def test_the_zoo(name: str) -> None:
    work = zoo.small(name, optimizer="none")
    norms = sum(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in work.model.modules())
    shortcuts = sum(path.endswith("shortcut.1") for path, _ in work.model.named_modules())
    assert_converts(work.model, work.batch[0].double(), fused=norms - shortcuts, left=shortcuts)


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


@pytest.mark.parametrize(("copied", "used"), [(copy.deepcopy, False), (pickled, True)])
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


def test_a_failed_conversion_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    before = snapshot(model)
    calls_of_it = 0
    make = BatchNormAct2d.from_batch_norm

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls_of_it
        calls_of_it += 1
        if calls_of_it == 4:
            raise KeyboardInterrupt
        return make(*args, **kwargs)

    monkeypatch.setattr(BatchNormAct2d, "from_batch_norm", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(model)
    assert calls_of_it == 4
    assert snapshot(model) == before
    with pytest.raises(LowtideError) as refusal:
        convert(model, strategy="nonsense")  # pyright: ignore[reportArgumentType]
    assert "nonsense" in str(refusal.value)


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
    with pytest.raises(LowtideError) as refusal:
        conversion.undo()
    assert "(1)" in str(refusal.value)


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
