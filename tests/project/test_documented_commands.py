"""The commands that README.md and docs/ show are commands that there are, with their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from benchmarks.__main__ import benchmarks
from firstlight.cli.main import firstlight
from firstlight.recipe import recipe_fields

_ROOT = Path(__file__).parents[2]
_PAGES = [
    _ROOT / "README.md",
    *sorted(path for path in (_ROOT / "docs").rglob("*.md")),
]
_KEYS = {f"{section}.{key}" for section, _, key in recipe_fields()}
#: Commands that take the keys of a recipe as options.
_OF_RECIPES = {"train", "plan", "tune", "bench"}


def _commands(text: str) -> Iterator[str]:
    """The commands in lines of code and in code within lines, benchmarks included."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.startswith("    "):
            shown = re.match(
                r" {4,}(?:\d+  |\$ |srun |torchrun .* -m )?(?:\.venv/bin/)?"
                r"((?:firstlight|python -m benchmarks) \S.*)",
                line,
            )
            yield from [shown[1]] if shown else []
        else:
            # In tables, bars are written with a backslash.
            found = re.findall(r"`((?:firstlight|python -m benchmarks) [a-z][^`]*)`", line)
            yield from (code.replace(r"\|", "|") for code in found)


def _problem(shown: str) -> str:
    """What of a command is not there; nothing if all is."""
    # `until firstlight train ...; do`: a loop of the shell.
    words = shlex.split(shown.partition("; ")[0].partition(" && ")[0], comments=True)
    program = words.pop(0)
    command: click.Command = firstlight
    if program == "python":
        command, words = benchmarks, words[2:]
    verb = ""
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            return f"no command {name!r}"
        command, verb = command.commands[name], verb or name
    known = {one for option in command.params for one in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "-h"}
    for option in (word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)):
        if "." in option:
            key = option.removeprefix("--")
            if verb not in _OF_RECIPES or key not in _KEYS:
                return f"no key {key!r}"
        elif option not in known:
            return f"no option {option!r}"
    return ""


@pytest.mark.parametrize("page", _PAGES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_documented_commands_exist(page: Path) -> None:
    shown = list(_commands(page.read_text(encoding="utf-8")))
    assert {one: _problem(one) for one in shown if _problem(one)} == {}


def test_documented_commands_are_found_and_checked() -> None:
    page = "    firstlight train a.yaml \\\n        --optimizer.learning_rte 1\n"
    page += "as `firstlight pln X`\n"
    page += "    firstlight eval RUN --smaple 2  # an estimate\n    firstlight chat RUN --web\n"
    page += "    python -m benchmarks gpu --dyr\n    python -m benchmarks planner --only speed\n"
    assert [_problem(one) for one in _commands(page)] == [
        "no key 'optimizer.learning_rte'",
        "no command 'pln'",
        "no option '--smaple'",
        "",
        "no option '--dyr'",
        "",
    ]


def test_commands_without_json_match_training_page() -> None:
    page = (_ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    said = re.search(r"`--json`, every command except (.*) prints one JSON object", page)
    assert said
    without = {
        name
        for name, command in firstlight.commands.items()
        if not isinstance(command, click.Group)
        and not command.hidden
        and not any("--json" in option.opts for option in command.params)
    }
    assert set(re.findall(r"`(\w+)`", said[1])) == without
