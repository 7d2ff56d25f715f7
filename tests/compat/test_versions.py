"""Features are off on versions on which their private names were not seen, or where such a name is missing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lowtide.compat.versions import CAPTURE, TRIED, Feature
from lowtide.errors import TraceError
from tests.fresh import run_fresh

PAINTING = Feature("painting by numbers", error=TraceError)


@pytest.mark.parametrize(("version", "is_off"), [("2.10.1", True), ("2.11.0+cu128", False), ("2.14.0.dev2026", True)])
def test_a_feature_is_off_outside_of_its_versions_of_torch(
    version: str, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not PAINTING.is_off
    monkeypatch.setattr(torch, "__version__", version)
    assert PAINTING.is_off == CAPTURE.is_off == is_off
    assert not TRIED.is_off


def test_a_feature_is_off_outside_of_its_versions_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.compat.versions.sys.version_info", (3, 13, 0))
    assert PAINTING.is_off


def test_a_function_of_a_feature_that_is_off_says_so_and_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    paint = PAINTING(calls.append)
    paint(1)
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    with pytest.raises(TraceError) as error:
        paint(2)
    assert all(part in str(error.value) for part in (PAINTING.name, "3.0.0", *PAINTING.torch, *PAINTING.python))
    assert calls == [1]


def test_a_function_that_lacks_a_name_or_a_module_says_which() -> None:
    @PAINTING
    def name() -> Any:
        return torch._no_such_name  # pyright: ignore

    @PAINTING
    def module() -> None:
        import_module("torch._no_such_module")

    for paint in (name, module):
        with pytest.raises(TraceError) as error:
            paint()
        assert f"_no_such_{paint.__name__}" in str(error.value)


@pytest.mark.parametrize("kind", [ImportError, AttributeError])
def test_errors_of_what_a_function_calls_are_its_own(kind: type[Exception]) -> None:
    @PAINTING
    def paint(what: Callable[[], object]) -> object:
        return what()

    with pytest.raises(kind, match="the user's"):
        paint(Mock(side_effect=kind("the user's")))


def test_names_are_found_and_missing_ones_raise_where_they_are_used() -> None:
    assert PAINTING.find("torch._C:_functorch.is_batchedtensor")(torch.ones(2)) is False
    assert PAINTING.find("torch._C:_no_such_name", None) is None
    missing = PAINTING.find("torch._no_such_module:name")

    class Below(missing):
        pass

    assert missing in {missing, Below}
    for use in (missing, Below, list, len, lambda name: name.part, lambda kind: isinstance(1, kind | int)):
        with pytest.raises(TraceError) as error:
            use(missing)
        assert "torch._no_such_module:name" in str(error.value)


PROFILE = """
import lowtide
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.ReLU())
work = lowtide.Workload(model, lambda model, batch: model(batch).sum(), torch.ones(2, 1, 3, 3))
assert lowtide.profile(work).storage_peak_bytes > 0
"""


def test_importing_lowtide_needs_no_private_name_but_the_registration_of_trees() -> None:
    run_fresh("""
from importlib import import_module
from typing import Any
from operator import attrgetter
from pkgutil import walk_packages
from lowtide.compat import versions
def missing(module): raise AttributeError(module)
versions.attrgetter = lambda path: attrgetter(path) if path == "register_pytree_node" else missing
import lowtide
for module in walk_packages(lowtide.__path__, "lowtide."):
    if "__main__" not in module.name and ".triton." not in module.name and ".cli" not in module.name:
        import_module(module.name)
from lowtide.compat.tensors import make_wrapper
try:
    make_wrapper()
except lowtide.LowtideError:
    pass
else:
    raise AssertionError
""")


def test_a_plain_profile_needs_none_of_the_names_of_other_features() -> None:
    run_fresh(f"""
del torch._C._select_batch_norm_backend, torch._C._DisableTorchDispatch
del torch._C._autograd._enable_profiler_legacy, torch._compile._disable_dynamo, torch.fx.graph._BoxedCodeGen
del torch._subclasses.fake_tensor.FakeTensorMode.dispatch, torch.nn.modules.conv._ConvNd, torch._foreach_sub
{PROFILE}""")


def test_a_plain_profile_works_on_another_version_of_torch_and_a_capture_is_off() -> None:
    run_fresh(f"""
torch.__version__ = "99.0"
{PROFILE}
from lowtide.tracing.capture.loss import capture_joint
try:
    capture_joint(work)
except lowtide.LowtideError as error:
    assert "99.0" in str(error)
else:
    raise AssertionError
""")
