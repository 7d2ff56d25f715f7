"""A target on the command line becomes a workload; a wrong one says what to write."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.loading import load, make_loader

from .errors import fails

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


def test_a_function_in_a_file_is_called_with_arguments_converted_as_it_annotates_them(write: Any) -> None:
    write(TRAIN)
    work = load("train.py:workload", {"width": "6", "scale": "2", "bias": "no"}, batch=3)
    assert work.model.seen == (6, 2.0, False, None)
    assert work.batch.shape == (3, 6)
    assert work.name == "train.py:workload"
    fails("train.py:workload", "takes no 'seq'", "width, scale", "def workload(", seq=4)


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
            model = torch.nn.Linear(WIDTH, late())
            return Workload(model, lambda m, x: m(x).mean(), torch.ones(1, WIDTH), name="mine")
        """
    )
    before = list(sys.path)
    work = load("train.py:workload")
    assert work.model.weight.shape == (3, 9)
    assert work.name == "mine"
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
