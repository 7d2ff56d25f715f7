from lowtide.reporting.palette import COLORS, PHASE_COLORS, STACK, heat
from lowtide.tracing.graph import CATEGORIES, PHASES


def test_every_category_has_its_own_color_and_place():
    assert set(COLORS) == set(STACK) == set(CATEGORIES)
    assert len(set(COLORS.values())) == len(STACK) == len(CATEGORIES)
    assert set(PHASE_COLORS) == set(PHASES)


def test_heat_runs_from_light_to_dark():
    brightness = [sum(bytes.fromhex(heat(i / 10)[1:])) for i in range(11)]
    assert brightness == sorted(brightness, reverse=True)
