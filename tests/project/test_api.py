from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import firstlight

_HEAVY = ("torch", "numpy", "transformers", "matplotlib", "tokenizers", "safetensors", "pydantic")


def modules_after(code: str) -> set[str]:
    """The modules that a fresh Python has imported after running some code."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("name", firstlight.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    value = getattr(firstlight, name)
    assert inspect.getdoc(value)
    assert value.__name__ == name
    if inspect.isfunction(value):
        assert inspect.signature(value).return_annotation is not inspect.Signature.empty
        documentation = inspect.getdoc(value) or ""
        for parameter in inspect.signature(value).parameters:
            assert parameter in documentation, f"{name}({parameter}) is not documented"


def test_public_names_are_sorted_and_unique() -> None:
    assert firstlight.__all__ == sorted(set(firstlight.__all__))
    assert set(firstlight.__all__) <= set(dir(firstlight))


def test_public_names_have_same_modules_for_type_checkers_and_imports() -> None:
    tree = ast.parse(inspect.getsource(firstlight))
    for_type_checkers = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("firstlight.")
        for alias in node.names
    }
    assert for_type_checkers == firstlight._MODULES


def test_unknown_name_raises_attribute_error() -> None:
    assert not hasattr(firstlight, "trian")
    with pytest.raises(AttributeError, match="'firstlight' has no attribute 'trian'"):
        firstlight.__getattr__("trian")


def test_version_equals_installed_package() -> None:
    from importlib.metadata import version

    assert version("firstlight") == firstlight.__version__


def test_package_import_loads_no_heavy_modules() -> None:
    assert modules_after("import firstlight").isdisjoint(_HEAVY)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["generate", "--help"], ["prepare", "--help"], ["nonsense"], []],
)
def test_help_and_usage_errors_do_not_import_torch(arguments: list[str]) -> None:
    code = f"from firstlight.cli.main import main\nmain({arguments!r})"
    imported = modules_after(code)
    assert "click" in imported
    assert imported.isdisjoint(_HEAVY)


def test_command_and_module_are_same_program() -> None:
    module = subprocess.run(
        [sys.executable, "-m", "firstlight", "--help"], capture_output=True, text=True, check=True
    )
    command = Path(sys.executable).with_name("firstlight")
    if not command.exists():
        pytest.skip("the command is not installed beside this Python")
    installed = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert installed.stdout == module.stdout
    assert module.stdout.startswith("Usage: firstlight ")
    for verb in ("tokenizer", "prepare", "train", "eval", "generate", "info"):
        assert f"\n  {verb} " in module.stdout


def test_train_help_lists_every_recipe_key(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from firstlight.cli.main import main
    from firstlight.recipe import known_keys

    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help-all"]) == 0
    lines = capfd.readouterr().out.splitlines()
    listed = {line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")}
    assert set(known_keys()) <= listed
