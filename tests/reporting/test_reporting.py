import subprocess
import sys

import pytest

import lowtide.reporting
from tests.refusals import refused


def test_import_leaves_the_extras_alone():
    code = "import sys, lowtide.reporting; print([m for m in ('rich', 'altair', 'jinja2') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", lowtide.reporting.__all__)
def test_every_exported_name_is_there(name):
    assert callable(getattr(lowtide.reporting, name))


def test_an_unknown_name_is_an_attribute_error():
    with refused("lowtide.reporting", "'plot'", kind=AttributeError):
        lowtide.reporting.plot  # noqa: B018
