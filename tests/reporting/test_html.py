import os
import re
import subprocess
import sys

import pytest

from lowtide.errors import MissingExtra
from lowtide.profiling.profile import Outside
from lowtide.reporting.html import report
from lowtide.reporting.palette import COLORS
from tests.refusals import refused
from tests.reporting.pages import Document

MIB = 2**20

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def subjects(make_profile, planned, sweep):
    profile = make_profile(outside=Outside(600 * MIB, 480 * MIB, 10 * MIB, 4096 * MIB))
    return {"profile": profile, "comparison": profile.compare(planned), "sweep": sweep}


@pytest.mark.parametrize("kind", ["profile", "comparison", "sweep"])
def test_the_page_loads_nothing_from_outside(tmp_path, subjects, kind):
    text = report(subjects[kind], tmp_path / "page.html").read_text()
    for _, attributes in Document(text).elements:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    assert not re.search(r"https?://|@import|url\(", text)
    assert "default-src 'none'" in text


def test_the_page_opens_with_the_peaks(tmp_path, profile):
    text = report(profile, tmp_path / "page.html").read_text()
    figures = re.findall(r"<dt>(.*?)</dt><dd><strong>(.*?)</strong>", text)
    assert figures == [
        ("Allocated peak", "428 MiB"),
        ("Storage peak", "420 MiB"),
        ("Static", "100 MiB"),
        ("Saved for backward", "256 MiB"),
        ("Time of all ops", "20.0 ms"),
    ]
    assert "<code>convolution_backward</code> in <code>3.conv</code>" in text
    assert text.count("<circle") == sum(size > 0 for size in profile.by_category.values())
    assert COLORS["activation"] in text
    assert any(attributes.get("data-action") == "axis" for _, attributes in Document(text).elements)
    assert "own scale" in text  # of the optimizer


def test_names_are_never_markup(tmp_path, make_profile):
    profile = make_profile(name=EVIL, root=EVIL, notes=(EVIL,))
    text = report(profile, tmp_path / "page.html").read_text()
    assert EVIL not in text
    document = Document(text)
    assert sum(tag == "script" for tag, _ in document.elements) == 3
    assert any(EVIL in name for name in document.data["profiles"][0]["strings"])


def test_outside_pytorch_is_explained(tmp_path, subjects, profile):
    assert "Outside PyTorch" not in report(profile, tmp_path / "cpu.html").read_text()
    text = report(subjects["profile"], tmp_path / "cuda.html").read_text()
    assert "Outside PyTorch" in text
    assert "<b>1.05 GiB</b> for this process" in text


def test_a_comparison_shows_both_on_one_scale(tmp_path, subjects):
    text = report(subjects["comparison"], tmp_path / "page.html").read_text()
    tops = re.findall(r'data-top="(\d+)"', text)
    assert tops == [str(subjects["profile"].peak_bytes)] * 2
    assert "chain → planned" in text


def test_a_sweep_marks_cells_above_the_limit(tmp_path, sweep):
    text = report(sweep, tmp_path / "page.html").read_text()
    assert re.findall(r'class="over"[^>]*>([^<]*)', text) == ["6.00"]
    assert "5 of 6" in text


def test_an_empty_step_has_a_page_and_an_unknown_subject_none(tmp_path, make_profile):
    assert report(make_profile(blocks=0), tmp_path / "page.html").exists()
    with refused("list"):
        report([], tmp_path / "page.html")


@pytest.mark.parametrize("name", ["page.foo", "page.png", "page"])
def test_an_unknown_suffix_is_refused_before_anything_is_made(tmp_path, profile, name):
    with refused(f"'{name}'", ".html", ".htm"):
        report(profile, tmp_path / "new" / name)
    assert not (tmp_path / "new").exists()
    assert report(profile, tmp_path / "PAGE.HTM").exists()


def test_a_missing_jinja_names_the_extra(monkeypatch, tmp_path, profile):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with refused("jinja2", "lowtide[report]", kind=MissingExtra):
        report(profile, tmp_path / "page.html")


@pytest.mark.skipif("LOWTIDE_BROWSER" not in os.environ, reason="set LOWTIDE_BROWSER=chromium to run the script")
@pytest.mark.parametrize("kind", ["profile", "comparison", "sweep"])
def test_the_script_runs_in_a_browser(tmp_path, subjects, kind):
    page = report(subjects[kind], tmp_path / "page.html")
    out = subprocess.run(
        [
            os.environ["LOWTIDE_BROWSER"], "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--virtual-time-budget=2000", "--enable-logging=stderr", f"--user-data-dir={tmp_path}",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in out.stderr
    assert 'data-theme="' in out.stdout
    if kind == "profile":
        assert "4 storages, 256 MiB" in out.stdout
        assert "At the peak, op 9" in out.stdout
