"""What a target on the command line becomes, and what a wrong one is told."""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.errors import LowtideError, MissingExtra, WorkloadError
from lowtide.loading import load, make_loader
from lowtide.loading.arguments import bind, guess, parse_pairs

TRAIN = """
    import torch
    from torch import nn
    from lowtide import Workload

    def loss(model, batch):
        return model(batch).mean()

    def workload(width: int = 4, scale=0.5, bias: bool = True, batch=2, note: str | None = None):
        model = nn.Linear(width, 1, bias=bias)
        model.seen = (width, scale, bias, note)
        return Workload(model, loss, torch.ones(batch, width))

    def needy(width, depth):
        return Workload(nn.Linear(width, depth), loss, torch.ones(1, width))

    def number():
        return 7

    def broken():
        return nn.Linear(4, 4)(torch.ones(3))

    answer = 42
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a file into an empty current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def fails(target: str, *words: str, **settings: Any) -> str:
    with pytest.raises(WorkloadError) as caught:
        load(target, **settings)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_a_function_in_a_file_is_called_with_arguments_converted_as_it_annotates_them(write: Any) -> None:
    write(TRAIN)
    work = load("train.py:workload", {"width": "6", "scale": "2", "bias": "no"}, batch=3)
    assert work.model.seen == (6, 2.0, False, None)
    assert work.batch.shape == (3, 6)
    assert work.name == "train.py:workload"


def test_a_loader_builds_the_same_target_in_other_sizes(write: Any) -> None:
    write(TRAIN)
    make = make_loader("train.py:workload", {"width": "5"}, batch=2)
    assert [make(batch=b).batch.shape for b in (1, 8)] == [(1, 5), (8, 5)]
    assert make(scale=4).model.seen[1] == 4.0
    assert make().batch.shape == (2, 5)


def test_autocast_is_set_on_what_the_function_returns(write: Any) -> None:
    write(TRAIN)
    assert load("train.py:workload", autocast="bf16").autocast is torch.bfloat16
    fails("train.py:workload", "fp8", "bf16", autocast="fp8")


def test_a_file_imports_its_neighbours_and_the_path_stays_as_it_was(write: Any) -> None:
    write("WIDTH = 9", "neighbour_of_train.py")
    write("def late(): return 3", "late_neighbour_of_train.py")
    write(
        """
        import torch
        from lowtide import Workload
        from neighbour_of_train import WIDTH

        def workload():
            from late_neighbour_of_train import late
            return Workload(torch.nn.Linear(WIDTH, late()), lambda m, x: m(x).mean(), torch.ones(1, WIDTH))
        """
    )
    before = list(sys.path)
    assert load("train.py:workload").model.weight.shape == (3, 9)
    assert sys.path == before


def test_a_module_in_the_current_folder_is_found(write: Any) -> None:
    write("", "a_package/__init__.py")
    write(TRAIN, "a_package/steps.py")
    before = list(sys.path)
    assert load("a_package.steps:workload").model.weight.shape == (1, 4)
    assert sys.path == before


def test_the_device_goes_to_a_function_that_takes_one(write: Any) -> None:
    write(
        """
        import torch
        from lowtide import Workload

        def workload(device="cpu"):
            model = torch.nn.Linear(4, 4, device=device)
            return Workload(model, lambda m, x: m(x).mean(), torch.ones(1, 4, device=device))

        def looks(device="cpu"):
            return torch.ones(1, device=device).item()
        """
    )
    assert load("train.py:workload", device="meta").device.type == "meta"
    assert load("train.py:workload").device.type == "cpu"
    fails("train.py:looks", "item()", "device='meta'", device="meta")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing.py:workload", ("no file nothing.py", "current folder")),
        ("trian.py:workload", ("no file trian.py", "train.py")),
        ("train.py", ("names no function", "Write train.py:workload")),
        ("train.py:wrokload", ("no function 'wrokload'", "It has loss, workload, needy, number, broken")),
        ("train.py:answer", ("answer in train.py is 42", "not a function", "def workload")),
        ("train.py:number", ("returned int, not a Workload", "return lowtide.Workload(")),
        ("train.py:needy", ("needs width and depth", "--arg width=... --arg depth=...")),
        ("train.py:broken", ("RuntimeError", "train.py:21")),
        ("no_such_package.module:f", ("no module 'no_such_package.module'", "zoo:model")),
        ("keras:resnet50", ("no module 'keras'", "path/to/train.py:function")),
        ("resnet50", ("zoo:resnet50",)),
        ("something", ("not a workload", "zoo:resnet50")),
        ("zoo:resnet51", ("resnet51", "resnet50")),
    ],
)
def test_a_wrong_target_says_what_to_write(write: Any, target: str, words: tuple[str, ...]) -> None:
    write(TRAIN)
    fails(target, *words)


def test_a_wrong_argument_says_what_the_function_takes(write: Any) -> None:
    write(TRAIN)
    fails("train.py:workload", "takes no 'seq'", "width, scale", "def workload(", seq=4)
    with pytest.raises(WorkloadError, match="width=wide is not a whole number"):
        load("train.py:workload", {"width": "wide"})
    with pytest.raises(WorkloadError, match="bias=perhaps is not true or false"):
        load("train.py:workload", {"bias": "perhaps"})
    with pytest.raises(WorkloadError, match="batch is given twice"):
        load("train.py:workload", {"batch": "3"}, batch=4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch\nimport no_such_thing\n", ("No module named 'no_such_thing'", "train.py:2")),
        ("x = 1\ny = (\n", ("SyntaxError", "train.py:2")),
        ("import sys\nsys.exit(3)\n", ("ended the program", "__main__", "train.py:2")),
        ("from . import sibling\n", ("relative import", "package.module:function")),
    ],
)
def test_an_error_inside_the_file_is_shown_with_its_line(write: Any, text: str, words: tuple[str, ...]) -> None:
    write(text)
    fails("train.py:workload", "train.py could not be imported", *words)


def test_the_zoo_takes_sizes_and_options() -> None:
    work = load("zoo:gpt2", {"layers": "1", "width": "64", "heads": "2"}, batch=2, seq=16, device="meta")
    assert work.device.type == "meta"
    assert work.batch[0].shape == (2, 16)
    assert work.model.tokens.weight.shape[1] == 64
    make = make_loader("zoo:lenet", device="meta", optimizer="none")
    assert make(batch=7).batch[0].shape[0] == 7
    assert make().optimizer is None


def test_a_model_of_torchvision_is_a_step_on_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", _torchvision_models())
    work = load("torchvision:resnet18", {"num_classes": "5"}, batch=2, image=32)
    assert work.batch[0].shape == (2, 3, 32, 32)
    assert int(work.batch[1].max()) < 5
    assert work.compute_loss().item() > 0
    fails("torchvision:resnet19", "no torchvision:resnet19", "resnet18")
    fails("torchvision:resnet18", "--image, not --seq", seq=4)
    fails("torchvision:resnet18", "no optimizer 'sdg'", "adamw", optimizer="sdg")
    fails("torchvision:maskrcnn", "train.py:workload")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    fails("torchvision:resnet18", "torchvision is not installed", "zoo:resnet50")
    with pytest.raises(MissingExtra, match=r"lowtide\[transformers\]"):
        load("transformers:gpt2")


def test_transformers_loads_offline_and_counts_no_cached_keys() -> None:
    pytest.importorskip("transformers")
    work = load("transformers:gpt2", {"n_layer": "2", "n_embd": "64", "n_head": "2"}, batch=2, seq=16)
    assert work.compute_loss().item() > 0
    assert not work.model.config.use_cache
    fails("transformers:gpt2", "1024 tokens", "max_position_embeddings=2048", seq=2048)


def test_pairs_are_read_up_to_the_first_equals_sign() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="], option="--arg") == {"a": "1", "b": "x=y", "c": ""}
    for wrong in (["a"], ["=1"], ["a b=1"], ["a=1", "a=2"]):
        with pytest.raises(LowtideError, match="--arg"):
            parse_pairs(wrong, option="--arg")


def test_texts_are_read_as_python_writes_them() -> None:
    read = guess({"a": "1", "b": "1e-3", "c": "TRUE", "d": "none", "e": "2,3", "f": "gelu", "g": "-1"})
    assert read == {"a": 1, "b": 1e-3, "c": True, "d": None, "e": (2, 3), "f": "gelu", "g": -1}


def test_annotations_that_cannot_be_resolved_fall_back_to_defaults() -> None:
    def function(size: Unresolvable = 3, name=None, **rest):  # noqa: F821
        pass

    args = {"size": "4", "name": "x", "other": "5"}
    assert bind(function, args, {}, where="f") == {"size": 4, "name": "x", "other": "5"}


def test_none_is_none_where_the_annotation_allows_it() -> None:
    def function(size: int | None = 3, name: str = ""):
        pass

    assert bind(function, {"size": "none", "name": "none"}, {}, where="f") == {"size": None, "name": "none"}


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


def test_a_workload_keeps_the_name_it_was_given(write: Any) -> None:
    write(
        """
        import torch
        from lowtide import Workload

        def workload():
            return Workload(torch.nn.Linear(2, 2), lambda m, x: m(x).mean(), torch.ones(1, 2), name="mine")
        """
    )
    assert isinstance(load("train.py:workload"), Workload)
    assert load("train.py:workload").name == "mine"


def test_a_model_of_timm_is_a_step_on_images_of_its_size() -> None:
    pytest.importorskip("timm")
    work = load("timm:vit_tiny_patch16_224", {"num_classes": "5", "depth": "1"}, batch=2)
    assert [tensor.shape for tensor in work.batch] == [(2, 3, 224, 224), (2,)]
    assert work.compute_loss().requires_grad
    assert load("timm:resnet18", batch=2, image=32).batch[0].shape == (2, 3, 32, 32)
    fails("timm:resnet19", "no timm:resnet19", "resnet18")
    fails("timm:resnet18", "--image, not --seq", seq=4)


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
    fails("timm:ned", "no timm:ned", "net")
    monkeypatch.setitem(sys.modules, "timm", None)
    fails("timm:net", "timm is not installed")
