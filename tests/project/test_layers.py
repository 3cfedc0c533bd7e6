"""The architecture, checked on the source: who may import whom, and what no module does."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import firstlight

_ROOT = Path(firstlight.__file__).resolve().parent
_MODULES = sorted(_ROOT.rglob("*.py"))

#: Each module, by the first part of its name, and the layer it lies in.
_LAYERS = {
    "errors": 0,
    "console": 0,
    "section": 0,
    "files": 0,
    "hardware": 0,
    "tokenizer": 1,
    "models": 1,
    "optim": 1,
    "data": 1,
    "methods": 2,
    "lora": 2,
    "weights": 2,
    "checkpoint": 2,
    "parallel": 2,
    "recipe": 3,
    "run_log": 4,
    "training": 4,
    "report": 4,
    "generation": 4,
    "evaluation": 4,
    "conversion": 4,
    "planner": 5,
    "from_texts": 5,
    "finetuning": 5,
    "tuning": 5,
    "bench": 5,
    "serving": 5,
    "sharing": 5,
    "cli": 6,
}
#: Within layer 1 everything stands alone, but for this.
_ALLOWED_IN_LAYER_1 = {("data", "tokenizer")}
#: Imports within a layer that would turn a dependency round.
_TURNED_ROUND = {
    ("weights", "lora"),
    ("run_log", "training"),
    ("run_log", "report"),
    ("report", "training"),
}


def component(name: str) -> str:
    """`models` of `firstlight.models.llama`."""
    return name.split(".")[1]


def module_name(path: Path) -> str:
    parts = ["firstlight", *path.relative_to(_ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """The full names of firstlight's own modules that a module imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            # `from firstlight import models` imports firstlight.models.
            names = (
                [f"firstlight.{alias.name}" for alias in node.names]
                if node.module == "firstlight"
                else [node.module]
            )
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "firstlight")


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if (importer, imported) in _TURNED_ROUND:
        return False
    if _LAYERS[importer] == _LAYERS[imported] == 1:
        return (importer, imported) in _ALLOWED_IN_LAYER_1
    return _LAYERS[imported] <= _LAYERS[importer]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.fixture(scope="module", autouse=True)
def _no_trees_left() -> Iterator[None]:
    """They take 100 MB."""
    yield
    parsed.cache_clear()


def library_modules() -> list[Path]:
    """All modules but the command line and the package's two entrances."""
    entrances = {_ROOT / "__init__.py", _ROOT / "__main__.py"}
    return [p for p in _MODULES if p not in entrances and component(module_name(p)) != "cli"]


def test_every_module_has_a_layer() -> None:
    entrances = {_ROOT / "__init__.py", _ROOT / "__main__.py"}
    assert {component(module_name(p)) for p in _MODULES if p not in entrances} == set(_LAYERS)


def test_imports_point_down_the_layers_only() -> None:
    paths = [p for p in _MODULES if p.parent != _ROOT or p.stem[0] != "_"]
    wrong = [
        f"{module} imports {name}"
        for path in paths
        for module in [module_name(path)]
        for name in imports(parsed(path), module)
        if name == "firstlight" or not may_import(component(module), component(name))
    ]
    assert wrong == []


def test_package_imports_nothing_outside_itself() -> None:
    """Neither `benchmarks` nor `tests` is installed with the package."""
    wrong = [
        path
        for path in _MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
        if name.split(".")[0] in ("benchmarks", "tests")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "importer, imported, allowed",
    [
        ("training", "models", True),
        ("data", "tokenizer", True),
        ("checkpoint", "weights", True),
        ("models", "training", False),
        ("tokenizer", "data", False),
        ("models", "optim", False),
        ("optim", "models", False),
        ("data", "models", False),
        ("errors", "files", True),
        ("files", "tokenizer", False),
        ("training", "cli", False),
        ("lora", "weights", True),
        ("weights", "lora", False),
        ("training", "run_log", True),
        ("run_log", "training", False),
    ],
)
def test_layer_rule_allows_expected_imports(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed


def test_imports_finds_every_import_form() -> None:
    code = """
import firstlight.models.llama as x
from firstlight.training import loop
from firstlight import cli
def f():
    from firstlight.data.loader import TokenLoader
import torch
"""
    assert list(imports(ast.parse(code), "m")) == [
        "firstlight.models.llama",
        "firstlight.training",
        "firstlight.cli",
        "firstlight.data.loader",
    ]


def test_module_dependencies_have_no_cycle() -> None:
    graph = {module_name(path): set(imports(parsed(path), "")) for path in _MODULES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"circular import: {' -> '.join([*above, name])}"
        if name in done or name not in graph:
            return
        for other in graph[name] - {name}:
            visit(other, (*above, name))
        done.add(name)

    for name in graph:
        # The package's own page of names points at everything, and is imported by nobody.
        if name != "firstlight":
            visit(name, ())


def test_module_names_exclude_catch_all_names() -> None:
    drawers = re.compile(r"utils?|common|helpers?|misc|shared", re.IGNORECASE)
    names = [part for path in _MODULES for part in path.relative_to(_ROOT).with_suffix("").parts]
    assert [name for name in names if drawers.fullmatch(name)] == []


def called_name(call: ast.Call) -> str:
    """`torch.load` of a call of that function; "" of a call of any other expression."""
    names, place = [], call.func
    while isinstance(place, ast.Attribute):
        names.append(place.attr)
        place = place.value
    return ".".join([place.id, *reversed(names)]) if isinstance(place, ast.Name) else ""


def is_stderr(call: ast.Call) -> bool:
    return any(
        keyword.arg == "file" and ast.unparse(keyword.value) == "sys.stderr"
        for keyword in call.keywords
    )


def nodes(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST]]:
    """All of some files."""
    return ((path, node) for path in paths for node in ast.walk(parsed(path)))


def test_modules_below_command_line_do_not_write_to_stdout() -> None:
    for path, node in nodes(library_modules()):
        if isinstance(node, ast.Call) and called_name(node) == "print":
            assert is_stderr(node), f"{path}:{node.lineno} prints to stdout"
        # The trackers keep their libraries from writing there.
        is_guard = path.name == "trackers.py"
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "__stdout__"):
            assert is_guard or ast.unparse(node.value) != "sys", f"{path}:{node.lineno}"


def test_source_never_executes_what_it_reads() -> None:
    """No pickle in any form, no YAML tags, no eval: a file from elsewhere is only data."""
    for path, node in nodes(_MODULES):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {module, *(alias.name for alias in node.names)}
            bad = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
            assert not names & bad, f"{path}:{node.lineno}"
        if not isinstance(node, ast.Call):
            continue
        called = called_name(node)
        if called == "torch.load" and module_name(path) == "firstlight.conversion.pickled":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given["weights_only"] == "True", f"{path}:{node.lineno}"
            continue
        assert called not in ("eval", "exec", "torch.load", "torch.save", "np.load"), (
            f"{path}:{node.lineno} calls {called}"
        )
        assert not re.fullmatch(r"yaml\.(unsafe_|full_)?load(_all)?", called) or (
            called == "yaml.load" and ast.unparse(node.args[1]) in _safe_loaders(parsed(path))
        ), f"{path}:{node.lineno} reads YAML with a loader that is not safe"


def _safe_loaders(tree: ast.Module) -> set[str]:
    """yaml.SafeLoader, and the module's own classes that inherit from it alone, or from a name for
    it or its twin in C."""
    in_c = "getattr(yaml, 'CSafeLoader', yaml.SafeLoader)"
    named = {
        ast.unparse(node.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.value) == in_c
    }
    safe = {"yaml.SafeLoader", *named}
    own = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and len(node.bases) == 1
        and ast.unparse(node.bases[0]) in safe
    }
    return {"yaml.SafeLoader", *own}


def test_modules_classes_and_public_functions_have_docstrings() -> None:
    for path in _MODULES:
        tree = parsed(path)
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"
