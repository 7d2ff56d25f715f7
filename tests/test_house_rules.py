"""The rules of the house: imports to the left, one name a class, short functions, a test file for each module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lowtide"
DOORS = ("__init__.py", "__main__.py")  # of the package itself: they may import everything
REGISTRIES = ("registry.py",)  # names built-in classes as text, which stand to its right

MOST_LINES = 60
MOST_COMPLEX = 15


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its path below ``src/lowtide``."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


# -- imports -------------------------------------------------------------------------------------------


def order() -> list[str]:
    """The rooms from left to right, as docs/design.md has them."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- import order -->\n+((?:    .+\n)+)", page)
    assert match, "docs/design.md has no import order"
    return re.findall(r"\w+", match[1])


def room(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def imported(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and room of each import from lowtide: absolute, relative, for types alone, or of a module named as text."""
    package = ["lowtide", *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path not in REGISTRIES:
            names = re.findall(r"^(lowtide\.\w+)[.:]\w", node.value)
        else:
            continue
        yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("lowtide."))


def imports_to_the_right(path: str, tree: ast.Module, rooms: list[str]) -> list[str]:
    here = rooms.index(room(path))
    return [f"{path}:{line} imports {name}" for line, name in imported(path, tree) if rooms.index(name) > here]


def test_every_import_goes_to_the_left():
    rooms = order()
    wrong = [
        each
        for path, tree in modules().items()
        if path not in DOORS
        for each in imports_to_the_right(path, tree, rooms)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "import lowtide.planning.plan",
        "from lowtide.planning.plan import Plan",
        "from lowtide import planning",
        "from ..planning.plan import Plan",
        "from ..planning import plan",
        "from .. import planning",
        "def late():\n    from lowtide.planning.plan import Plan",
        "import_module('lowtide.planning.plan')",
        "HOME = 'lowtide.planning.plan:Plan'",
    ],
)
def test_an_import_to_the_right_is_found(line):
    wrong = imports_to_the_right("tracing/graph.py", ast.parse(line), order())
    assert wrong == [f"tracing/graph.py:{line.count(chr(10)) + 1} imports planning"]
    assert imports_to_the_right("reporting/html.py", ast.parse(line), order()) == []


def test_a_relative_import_starts_at_its_own_folder():
    line = ast.parse("from . import planning")
    assert imports_to_the_right("workload.py", line, order()) == ["workload.py:1 imports planning"]
    assert imports_to_the_right("tracing/graph.py", line, order()) == []
    assert imports_to_the_right("tracing/__init__.py", line, order()) == []


# -- names ---------------------------------------------------------------------------------------------


def shared_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Classes of one name, a leading underscore aside, with their modules."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.strip("_")].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_two_classes_share_a_name():
    assert shared_names({path: tree for path, tree in modules().items() if room(path) != "zoo"}) == {}


def test_a_shared_name_is_found():
    trees = {"a.py": ast.parse("class Grid: ..."), "b.py": ast.parse("if True:\n    class Grid: ...")}
    assert shared_names(trees) == {"Grid": ["a.py", "b.py"]}
    assert shared_names({**trees, "b.py": ast.parse("class _Grid: ...")}) == {"Grid": ["a.py", "b.py"]}


# -- functions -----------------------------------------------------------------------------------------

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DECISIONS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def complexity(function: Function) -> int:
    """McCabe's number: one more than the statements that branch, those of inner functions included."""
    inside = [node for node in ast.walk(function) if node is not function]
    return 1 + sum(isinstance(node, (*_DECISIONS, ast.FunctionDef, ast.AsyncFunctionDef)) for node in inside)


def too_large(path: str, tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, Function) and not any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES or complexity(node) > MOST_COMPLEX:
                names.append(f"{path}:{node.lineno} {node.name}: {lines} lines, complexity {complexity(node)}")
    return names


def test_no_function_is_too_long_or_too_complex():
    assert [each for path, tree in modules().items() for each in too_large(path, tree)] == []


@pytest.mark.parametrize(
    "body",
    ["    x = 1\n" * 60, "    if x: pass\n" * 15, "    if x: pass\n    elif y: pass\n    for _ in x: pass\n" * 5],
)
def test_a_function_over_the_limits_is_found(body):
    assert len(too_large("a.py", ast.parse(f"def long(x, y):\n{body}"))) == 1
    assert too_large("a.py", ast.parse(f"@triton.jit\ndef long(x, y):\n{body}")) == []


# -- tests ---------------------------------------------------------------------------------------------


def mirrored(path: str) -> Path:
    """The mirrored place. A kernel is one contract: its reference and Triton's version are tested together."""
    folder, _, name = re.sub(r"^kernels/(reference|triton)/", "kernels/", path).rpartition("/")
    return ROOT / "tests" / folder / f"test_{name}"


def untested() -> set[str]:
    return {path for path in modules() if not path.endswith(DOORS) and not mirrored(path).exists()}


def test_every_module_has_its_test_file():
    assert sorted(untested()) == []


# -- state of the process ------------------------------------------------------------------------------


def process_state(path: str, tree: ast.Module) -> Iterator[str]:
    """Containers, objects, thread-local and global variables that outlive a call, readers of frames, global hooks."""
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    yield from (f"{path} {name}" for name in sorted(changed))
    called = {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    yield from (f"{path} {name}" for name in sorted(called) if re.match("register_(module|optimizer_step)_", name))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "frame_at" for alias in node.names):
            yield f"{path} frame_at"
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        value = ast.unparse(node.value)
        is_empty = value in ("{}", "[]", "set()", "dict()", "list()")
        is_empty = is_empty or re.fullmatch(r"(\w+\.)?(local|deque|defaultdict|OrderedDict|Counter|count)\(.*\)", value)
        is_object = re.fullmatch(r"(\w+\.)?_?[A-Z]\w*\(\)", value)
        is_shared = re.match(r"(\w+\.)?(Weak\w+|ContextVar|ProcessPatch|Registry)\(", value)
        if isinstance(target, ast.Name) and target.id not in changed and (is_empty or is_object or is_shared):
            yield f"{path} {target.id}"


def test_the_design_page_names_all_state_of_the_process():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = {f"{file} {name}" for file, name in re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", page, re.MULTILINE)}
    assert named == {each for path, tree in modules().items() for each in process_state(path, tree)}


@pytest.mark.parametrize(
    "line",
    [
        "_seen = {}",
        "_seen: dict[str, int] = {}",
        "_seen = weakref.WeakSet()",
        "_thread = threading.local()",
        "_watching = Undo()",
        "_numbers = itertools.count(1)",
        "_groups = defaultdict(list)",
        "_on = ContextVar('on', default=False)",
        "_patch = ProcessPatch(change)",
        "KINDS: Registry[Kind] = Registry('kind')",
        "seen = None\ndef see():\n    global seen\n    seen = 1",
        "register_module_forward_hook (see)",
        "register_optimizer_step_post_hook (see)",
    ],
)
def test_state_of_the_process_is_found(line):
    assert list(process_state("nn/layer.py", ast.parse(line))) == [f"nn/layer.py {line.partition(' ')[0].strip(':')}"]
