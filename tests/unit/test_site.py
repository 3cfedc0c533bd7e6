"""The documentation site: pages, links, made pages, and the site as `make docs` builds it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml

import firstlight
from firstlight.cli.main import firstlight as command_line
from firstlight.recipe import recipe_fields

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_WRITTEN = sorted(path.relative_to(_DOCS).as_posix() for path in _DOCS.rglob("*.md"))


@cache
def _hook() -> ModuleType:
    """The module `scripts/docs_reference.py`."""
    spec = importlib.util.spec_from_file_location(
        "docs_reference", _ROOT / "scripts" / "docs_reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def _pages() -> dict[str, str]:
    """Text of every page of the site by its path."""
    written = {path: (_DOCS / path).read_text(encoding="utf-8") for path in _WRITTEN}
    return {**written, **_hook().pages()}


def _in_nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from _in_nav(below)


def _without_code(text: str) -> str:
    """A page without fenced and indented blocks and code in lines."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "`", re.sub(r"^ {4,}.*$", "", text, flags=re.M))


def _anchors(text: str) -> set[str]:
    """Anchors of a page's headings as GitHub names them."""
    found = set()
    for title in re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
    ):
        given = re.search(r" \{#(\S+)\}$", title)
        plain = re.sub(r"[^\w\- ]", "", title.lower())
        found.add(given[1] if given else plain.strip().replace(" ", "-"))
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((_ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(_in_nav(nav)) == sorted(_pages())


@pytest.mark.parametrize("path", [*_WRITTEN, "overview.md", "changelog.md", "reference/recipe.md"])
def test_every_link_of_a_page_leads_somewhere(path: str) -> None:
    lost = []
    for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", _without_code(_pages()[path])):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (_DOCS / path).parent / name if name else _DOCS / path
        page = target.resolve().relative_to(_DOCS).as_posix()
        known = _anchors(_pages()[page]) if page in _pages() else None
        if (known is None and not target.is_file()) or (anchor and anchor not in (known or ())):
            lost.append(link)
    assert lost == []


def test_the_start_page_leads_to_each_guide() -> None:
    start = _pages()["index.md"]
    nav = yaml.safe_load((_ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    guides = next(entry["Guides"] for entry in nav if "Guides" in entry)
    assert [page for page in _in_nav(guides) if f"]({page}" not in start] == []


def test_every_key_has_type_default_meaning_and_version() -> None:
    text = "".join(_pages()[f"reference/{page}.md"] for page in ("recipe", "model"))
    entries = dict(re.findall(r"^### `(\S+)` .*\n((?:(?!#).*\n)*)", text, re.M))
    assert set(entries) == {f"{section}.{key}" for section, _, key in recipe_fields()}
    for name, entry in entries.items():
        assert re.search(
            r"\*\*Type\*\*: \S.*\n- \*\*Default\*\*: \S.*\n- \*\*Since\*\*: \d", entry
        ), name
        assert re.search(r"\n\n\S.{8,}", entry), name


def test_types_defaults_and_bounds_are_those_of_the_schema() -> None:
    text = _pages()["reference/recipe.md"]
    rate = text.partition("### `evaluation.every_steps`")[2].partition("###")[0]
    assert "**Type**: int, at least 0\n- **Default**: `200`" in rate
    kind = text.partition("### `guard.on_divergence`")[2].partition("###")[0]
    assert '**Type**: `"rollback"` or `"stop"`\n- **Default**: `"rollback"`' in kind
    minutes = text.partition("### `run.max_minutes`")[2].partition("###")[0]
    assert "**Type**: float or null, above 0\n- **Default**: `null`" in minutes


def _below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for verb, one in command.commands.items():
            yield from _below(f"{name} {verb}", one)


def test_every_command_and_option_is_in_the_reference() -> None:
    sections = re.split(r"^## ", _pages()["reference/commands.md"], flags=re.M)[1:]
    by_name = {section.partition(" {")[0]: section for section in sections}
    found = dict(_below("firstlight", command_line))
    assert by_name.keys() == found.keys()
    for name, command in found.items():
        for option in command.params:
            if isinstance(option, click.Option):
                assert all(f"{one}" in by_name[name] for one in option.opts), (name, option.opts)


def test_every_public_name_is_in_the_python_reference() -> None:
    named = re.findall(r"^::: firstlight\.(\w+)$", _pages()["reference/python.md"], re.M)
    assert sorted(named) == firstlight.__all__


def test_parts_of_a_run_are_there() -> None:
    for names in _hook().PARTS.values():
        for name in names:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(f"firstlight.{module}"), attribute), name


def test_every_extra_is_on_the_page_of_installation() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| `([\w-]+)` \|", _pages()["installation.md"], re.M)
    assert sorted(rows) == sorted(project["optional-dependencies"])


def test_pages_for_github_are_made_ready_for_mkdocs() -> None:
    page = "**Names**\n- one\n  more\n<!-- note -->\n| `a\\|b` |\n|---|\n```\ntext\n- code\n```\n"
    made = _hook().github_markdown(page)
    assert made == (
        "**Names**\n\n- one\n  more\n<!-- note -->\n\n| `a|b` |\n|---|\n```\ntext\n- code\n```\n"
    )


def test_the_site_builds_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(build, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(_pages())
    loaded = re.compile(
        r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//"
    )
    for page in pages:
        assert loaded.search(page.read_text(encoding="utf-8")) is None, page.name
    for style in (tmp_path / "site").rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert re.search(r"@import|url\([\"']?(?:https?:)?//", text) is None, style.name
    # Opened as a file, the page can't fetch the index, and has it as a script.
    assert "Searching a recipe" in (tmp_path / "site" / "search" / "search_index.js").read_text(
        encoding="utf-8"
    )
