"""Models of installed packages are training steps."""

from __future__ import annotations

import sys
import types
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.errors import MissingExtra
from lowtide.loading import load
from tests.refusals import refused

from .errors import fails


def test_a_model_of_torchvision_is_a_step_on_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", _torchvision_models())
    work = load("torchvision:resnet18", {"num_classes": "5"}, batch=2, image=32)
    assert work.batch[0].shape == (2, 3, 32, 32)
    assert int(work.batch[1].max()) < 5
    assert work.compute_loss().item() > 0
    fails("torchvision:resnet19", "torchvision", "'resnet19'", "resnet18")
    fails("torchvision:resnet18", "--image", seq=4)
    fails("torchvision:resnet18", "'sdg'", "sgd", optimizer="sdg")
    fails("torchvision:maskrcnn", "train.py:workload")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    fails("torchvision:resnet18", "torchvision is not installed", "zoo:resnet50")
    with refused("lowtide[transformers]", kind=MissingExtra):
        load("transformers:gpt2")


def test_transformers_loads_offline_and_counts_no_cached_keys() -> None:
    pytest.importorskip("transformers")
    work = load("transformers:gpt2", {"n_layer": "2", "n_embd": "64", "n_head": "2"}, batch=2, seq=16)
    assert work.compute_loss().item() > 0
    assert not work.model.config.use_cache
    fails("transformers:gpt2", "1024 tokens", "max_position_embeddings=2048", seq=2048)


def test_a_model_of_timm_is_a_step_on_images_of_its_size() -> None:
    pytest.importorskip("timm")
    work = load("timm:vit_tiny_patch16_224", {"num_classes": "5", "depth": "1"}, batch=2)
    assert [tensor.shape for tensor in work.batch] == [(2, 3, 224, 224), (2,)]
    assert work.compute_loss().requires_grad
    assert load("timm:resnet18", batch=2, image=32).batch[0].shape == (2, 3, 32, 32)
    fails("timm:resnet19", "timm", "'resnet19'", "resnet18")
    fails("timm:resnet18", "--image", seq=4)


def test_a_target_of_timm_goes_by_its_own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(torch.nn.Linear):
        default_cfg = MappingProxyType({"input_size": (3, 2, 4)})
        num_classes = 5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1))

    stand_in: Any = types.ModuleType("timm")
    stand_in.is_model = ["net"].__contains__
    stand_in.list_models = lambda: ["net"]
    stand_in.create_model = lambda name, pretrained: Net(24, 5)
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    work = load("timm:net", batch=3)
    assert work.batch[0].shape == (3, 3, 2, 4)
    assert work.compute_loss().requires_grad
    fails("timm:ned", "timm", "'ned'", "net")
    monkeypatch.setitem(sys.modules, "timm", None)
    fails("timm:net", "timm is not installed")


def _torchvision_models() -> Any:
    """The three functions of torchvision.models that are used, over a model of ours."""

    def resnet18(*, num_classes: int, weights: None = None) -> nn.Module:
        return zoo.model("resnet18", width=8, classes=num_classes)

    def maskrcnn() -> None: ...

    resnet18.__module__ = "torchvision.models.resnet"
    maskrcnn.__module__ = "torchvision.models.detection.mask_rcnn"
    builders = {"resnet18": resnet18, "maskrcnn": maskrcnn}
    models: Any = types.ModuleType("torchvision.models")
    models.list_models = lambda: list(builders)
    models.get_model_builder = builders.__getitem__
    models.get_model = lambda name, **options: builders[name](**options)
    return models
