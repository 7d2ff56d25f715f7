import io

import pytest
from rich.console import Console

from lowtide.reporting.blocks import block_chart


def drawn(profile, width=80, color=None):
    console = Console(file=io.StringIO(), width=width, color_system=color, force_terminal=color is not None)
    console.print(block_chart(profile, console))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_pointer_stands_above_a_full_column_and_names_the_peak(profile, width):
    lines = drawn(profile, width).splitlines()
    row = next(i for i, line in enumerate(lines) if "▼" in line)
    assert lines[row + 1][lines[row].index("▼")] == "█"
    assert "peak in backward: convolution_backward in 3.conv" in "".join(lines[: row + 1])
    assert max(map(len, lines)) <= width


def test_phases_stand_below_in_their_order(profile):
    marks = drawn(profile).splitlines()[-1]
    assert marks.index("forward") < marks.index("backward") < marks.index("optimizer")


def test_colors_are_the_palette(profile):
    assert "38;2;213;94;0" in drawn(profile, color="truecolor")  # activation, #d55e00


def test_a_step_without_ops_has_no_chart(make_profile):
    assert block_chart(make_profile(blocks=0), Console(file=io.StringIO())) is None
