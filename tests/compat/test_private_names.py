"""Private names of torch are used in ``lowtide.compat`` alone, where each has a docstring and a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx, nn

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lowtide"
COMPAT = sorted(path for path in (SOURCE / "compat").glob("*.py") if path.name != "__init__.py")
UNDOCUMENTED = {  # without an underscore, and torch's own all the same
    "desc",
    "mutated_input",
    "inner_exception",
    "py_kernels",
    "FailOnRecompileLimitHit",
    "NumpyTensorSource",
    "TorchRuntimeError",
    "Unsupported",
}
STRINGS = {
    "torch.utils.checkpoint",
    "torch.backends.cudnn.is_acceptable",
    "torch.cuda.amp.common.amp_definitely_not_available",
}
OTHERS = {
    "_replace": "a method of named tuples, which Python documents",
    "_model_mapping": "of transformers",
    "_new_buffer": "of torchao",
    "_subclass_zeros": "of torchao",
    "_FSDP_WRAPPED_QUANT_STATE_KEY": "of bitsandbytes",
}


def test_private_names_of_torch_are_used_in_compat_alone() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if "compat" not in path.parts}
    own = {name for tree in trees.values() for name in defined(tree)} | OTHERS.keys()
    uses = {str(path.relative_to(SOURCE)): list(private_names(tree, own)) for path, tree in trees.items()}
    assert {path: names for path, names in uses.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils import _pytree as pytree",
        "torch._C._get_tracing_state()",
        "tensor._version",
        "self.tensor._version",
        "module._forward_pre_hooks.clear()",
        "alias._foreach_add_(tensors, 1)",
        "getattr(node, '_saved_self')",
        "getattr(modules, f'_global_{kind}_hooks')",
        "vars(optimizer)['_opt_called']",
        "names = ('_buffers', '_parameters')",
        "importlib.import_module('torch._decomp')",
        "operator.attrgetter('_x')",
        "attrgetter('graph._x')",
        "methodcaller('_x', 1)",
        "obj.__dict__['_x']",
        "obj.__dict__.get('_x')",
        "vars(obj).pop('_x')",
        "node.meta['desc']",
        "node.meta.get('desc', ())",
        "op.py_kernels",
        "type(error).__name__ == 'Unsupported'",
        "super(torch.autograd.Function, Node).apply",
        "super(Function, Node).apply",
        "node.meta.get('nn_module_stack')",
        "node.meta['stack_trace']",
        r"re.sub(r'\._modules|\[', '', path)",
        "node.name.startswith('tangents')",
        "name == 'tangents_1'",
        "hook.__module__ == 'torch.utils.checkpoint'",
        "OPAQUE = ('torch.utils.checkpoint', OTHER)",
        "mock.patch('torch.backends.cudnn.is_acceptable')",
    ],
)
def test_each_way_to_a_private_name_is_seen(code: str) -> None:
    assert list(private_names(ast.parse(code), set()))


@pytest.mark.parametrize(
    "code",
    [
        "torch.ops.aten._to_copy.default",
        "_aten._foreach_add_.Scalar",
        "op.endswith('_to_copy')",
        "self.__dict__",
        "class A:\n    def __init__(self):\n        self._version = 1",
        "plan._own",
        "class Mine:\n    def run(self): super(Mine, self).run()",
        "node.meta.get('val')",
        "self.tangents",
        "re.sub(r'(_\\d+)+$', '', name)",
    ],
)
def test_names_of_operators_and_of_lowtide_itself_are_not_private_names_of_torch(code: str) -> None:
    tree = ast.parse(code)
    assert not list(private_names(tree, {"_own", *defined(tree)}))


def test_compat_imports_nothing_of_lowtide_but_errors() -> None:
    for path in COMPAT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowtide"):
                assert node.module == "lowtide.errors" or (node.module or "").startswith("lowtide.compat"), path


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: path.stem)
def test_importing_compat_looks_up_no_private_name_but_by_its_features(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If) and "attrgetter" not in ast.unparse(node):
            paths = [each for each in ast.walk(node) if isinstance(each, ast.Attribute | ast.ImportFrom | ast.Import)]
            names = [name for each in paths for name in private_names(each, set())]
            assert names in ([], ["sys._getframe"]), ast.unparse(node)


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: path.stem)
def test_each_name_of_compat_has_a_docstring_and_a_test(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    test = ast.parse((Path(__file__).parent / f"test_{path.name}").read_text())
    tested = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    tested |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    body += [each for node in body if isinstance(node, ast.If) for each in node.orelse]
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name, has_docstring = node.name, ast.get_docstring(node) is not None
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name, has_docstring = ast.unparse(target), isinstance(after, ast.Expr)
        else:
            continue
        if not name.startswith(("_", "(_")):
            assert has_docstring, f"{path.stem}.{name} does not say what for"
            assert name in tested, f"{path.stem}.{name} has no test"


def private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """The private names of torch in a module; ``own`` are names that lowtide itself defines."""
    here = set(defined(tree))
    attributes = known() - here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if is_in_torch(each.name))
        elif isinstance(node, ast.ImportFrom):
            yield from (path for each in node.names if is_in_torch(path := f"{node.module}.{each.name}"))
        elif isinstance(node, ast.Attribute) and node.attr in UNDOCUMENTED:
            yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path = ast.unparse(node)
            if path.startswith(("torch.ops.", "aten.", "_aten.")):  # operators are called by their names in graphs
                continue
            mine = node.attr in here and is_self(node.value)
            if is_in_torch(path) or node.attr not in own or (node.attr in known() and not mine):
                yield path
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = is_in_torch(node.value) and " " not in node.value
            if (
                is_name
                or node.value in attributes | UNDOCUMENTED | STRINGS
                or re.match(r"tangents(_\d+)?$", node.value)
            ):
                yield node.value
        elif isinstance(node, ast.Call | ast.Subscript):
            yield from (name for name in named_attributes(node) if is_private(name) and name not in own)
            yield from meta_keys(node)
            yield from past_own_class(node, here)
            yield from (name for name in names_in_pattern(node) if name in known())


def named_attributes(node: ast.Call | ast.Subscript) -> Iterator[str]:
    """The names that ``getattr`` and its like get as strings, up to what is only known when they run."""
    strings: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        strings = [node.slice] if is_namespace(node.value) else []
    elif (function := called(node.func)) in ("getattr", "setattr", "hasattr", "delattr"):
        strings = node.args[1:2]
    elif function in ("attrgetter", "methodcaller"):
        strings = node.args
    elif isinstance(node.func, ast.Attribute) and is_namespace(node.func.value):
        strings = node.args[:1]
    for string in strings:
        known_part = string.values[0] if isinstance(string, ast.JoinedStr) else string
        if isinstance(known_part, ast.Constant) and isinstance(known_part.value, str):
            yield from known_part.value.split(".")


def meta_keys(node: ast.Call | ast.Subscript) -> Iterator[str]:
    """The keys that are read of a node's ``meta``. Only ``val`` is documented."""
    of = node.value if isinstance(node, ast.Subscript) else getattr(node.func, "value", None)
    key = node.slice if isinstance(node, ast.Subscript) else next(iter(node.args), None)
    if isinstance(of, ast.Attribute) and of.attr == "meta" and isinstance(key, ast.Constant) and key.value != "val":
        yield str(key.value)


def past_own_class(node: ast.Call | ast.Subscript, here: set[str]) -> Iterator[str]:
    """Calls of ``super`` that start at a class of others, and so reach below what it documents."""
    if isinstance(node, ast.Call) and called(node.func) == "super" and node.args:
        start = ast.unparse(node.args[0])
        if start not in here and start != "cls":
            yield f"super({start})"


def names_in_pattern(node: ast.Call | ast.Subscript) -> Iterator[str]:
    """The words of regular expressions, which may take torch's names apart."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re":
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield from re.findall(r"\w+", each.value)


def called(function: ast.expr) -> str:
    """The last part of a function's name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_namespace(node: ast.expr) -> bool:
    """Tell whether an expression is the dictionary of an object's attributes."""
    is_vars = isinstance(node, ast.Call) and called(node.func) == "vars"
    return is_vars or (isinstance(node, ast.Attribute) and node.attr == "__dict__")


def defined(tree: ast.AST) -> Iterator[str]:
    """The attributes that a module defines: its own names, those of its classes, and what methods set on ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.ClassDef):
                    yield each.name
                elif isinstance(each, ast.Assign | ast.AnnAssign):
                    targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                    yield from (
                        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                    )
                    if ast.unparse(targets[0]) == "__slots__" and each.value is not None:
                        yield from ast.literal_eval(each.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_in_torch(path: str) -> bool:
    return path.startswith("torch.") and any(map(is_private, path.split(".")))


@cache
def known() -> frozenset[str]:
    """Private attributes of torch's objects, which are torch's also where a class of lowtide has one of that name."""
    tensor = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([tensor])
    modules = (nn.BatchNorm2d(1), nn.LSTM(1, 1), nn.Linear(1, 1))
    rest = (tensor.exp().grad_fn, tensor.untyped_storage(), torch.default_generator, torch.ops.aten.add.Tensor)
    names = (name for each in (tensor, optimizer, *modules, *rest, fx.Graph(), fx.Node) for name in dir(each))
    return frozenset(filter(is_private, names))
