from lowtide.profiling.profile import ModuleUsage, Usage
from lowtide.reporting.outline import outline

MIB = 2**20


def module(path: str, kind: str, size: int) -> ModuleUsage:
    return ModuleUsage(path, kind, Usage(), Usage(size, size, size))


def test_blocks_that_are_built_alike_share_a_line(make_profile):
    lines = outline(make_profile(root="layers", blocks=9).by_module)
    by_name = {line.name: line for line in lines}
    assert by_name["0 … 8"].type == "9 × Block"
    assert by_name["0 … 8"].usage.saved_bytes == 9 * 64 * MIB
    assert by_name["relu"].type == "9 × ReLU"
    assert [line.depth for line in lines] == [0, 1, 2, 3, 3]


def test_light_siblings_are_folded_and_still_counted():
    tree = [module("", "Net", 55), *(module(f"m{i}", f"Kind{i}", i) for i in range(1, 11))]
    lines = outline(tree, breadth=3)
    assert [line.name for line in lines] == ["(model)", "m8", "m9", "m10", "… 7 more"]
    assert lines[-1].usage.peak_bytes == sum(range(1, 8))


def test_the_heaviest_branch_is_opened_first():
    tree = [
        module("", "Net", 10),
        module("a", "A", 1),
        module("a.x", "X", 1),
        module("b", "B", 9),
        module("b.y", "Y", 9),
    ]
    assert [line.name for line in outline(tree, limit=4)] == ["(model)", "a", "b", "y"]


def test_nothing_to_outline():
    assert outline([]) == []
