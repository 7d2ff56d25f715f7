import io
import sys
from importlib import import_module

import pytest
from rich.console import Console

from lowtide.errors import MissingExtra
from lowtide.profiling.profile import Outside
from lowtide.reporting.terminal import progress, show, show_sweep
from tests.refusals import refused

MIB = 2**20


def text_of(show_it, subject, *, width=120, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, color_system=None)
    show_it(subject, console)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_show_prints_both_peaks_and_who_holds_them(profile):
    text = text_of(show, profile)
    for part in ("chain", "NVIDIA H200", "predicted", "428 MiB", "420 MiB", "100 MiB", "256 MiB"):
        assert part in text
    assert "activation 192 MiB 45%" in text
    assert "workspace 64.0 MiB 15%" in text
    assert "4 × Block" in text
    assert "4 storages, 256 MiB" in text
    assert "net/model.py:42" in text
    assert "Seconds come from the roofline." in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(make_profile, width):
    lines = text_of(show, make_profile(root="a_rather_long_name_of_a_module"), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("64.0 MiB   " in line for line in lines) >= 4  # sizes stay, names give way
    assert any("source" in line for line in lines) == (width >= 100)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_that_is_not_utf8_gets_ascii(profile, sweep, encoding):
    text = text_of(show, profile, encoding=encoding)
    assert text.isascii()
    assert "v peak in backward" in text
    assert "#####" in text
    assert "4 x Block" in text
    assert "6.00!" in text_of(show_sweep, sweep, encoding=encoding)


def test_outside_explains_nvidia_smi(make_profile):
    text = text_of(show, make_profile(outside=Outside(500 * MIB, 480 * MIB, 0, 1024 * MIB)))
    assert "nvidia-smi shows 980 MiB" in text


def test_sweep_marks_cells_above_the_limit(sweep):
    text = text_of(show_sweep, sweep)
    assert "6.00!" in text
    assert "5.00!" not in text
    assert "above the limit of 5.50 GB" in text


def test_markup_in_names_is_printed_as_it_is(make_profile):
    text = text_of(show, make_profile(name="[red]net[/red]", root="[bold]x[/bold]", notes=("[link]",)))
    assert "[red]net[/red]" in text
    assert "[bold]x[/bold]" in text
    assert "[link]" in text


def test_progress_is_silent_without_a_terminal(capsys):
    with progress("Sweeping", total=2) as advance:
        advance()
        advance(2, 2)
    assert capsys.readouterr() == ("", "")


def test_measured_untimed_and_empty_profiles_are_shown(make_profile):
    text = text_of(show, make_profile(fake=False, timed=False))
    assert "measured" in text
    assert "seconds" not in text
    assert "0 B" in text_of(show, make_profile(blocks=0))


def test_a_missing_rich_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "lowtide.reporting.terminal")
    with refused("rich", "lowtide[cli]", kind=MissingExtra):
        import_module("lowtide.reporting.terminal")
