"""The documentation site: pages, links, made pages, and the site as `make docs` builds it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import matplotlib.image
import pytest
import yaml

import firstlight
from firstlight.cli.main import firstlight as command_line
from firstlight.recipe import recipe_fields

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_WRITTEN = sorted(path.relative_to(_DOCS).as_posix() for path in _DOCS.rglob("*.md"))
#: What a reader of the repository opens, README.md as the others.
_IN_REPOSITORY = sorted(
    path.relative_to(_ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", ".github/**/*.*")
    for path in _ROOT.glob(pattern)
)


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
    made = {**written, **_hook().pages()}
    return {path: _hook().site_links(text) for path, text in made.items()}


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
    """Anchors of a page's headings as GitHub names them: the second of a title ends in -1."""
    found: set[str] = set()
    for title in re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
    ):
        given = re.search(r" \{#(\S+)\}$", title)
        plain = re.sub(r"[^\w\- ]", "", title.lower())
        name = given[1] if given else plain.strip().replace(" ", "-")
        ends = chain([""], (f"-{number}" for number in count(1)))
        found.add(next(name + end for end in ends if name + end not in found))
    return found


def _links(text: str) -> list[tuple[str, str]]:
    """(path, anchor) of each relative link of a page."""
    found = re.findall(r'\]\(\s*([^)\s]+)(?: "[^"]*")?\s*\)', _without_code(text))
    parts = [link.partition("#") for link in found if not re.match(r"\w+:", link)]
    return [(path, anchor) for path, _, anchor in parts]


def test_site_navigation_contains_every_page_once() -> None:
    nav = yaml.safe_load((_ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(_in_nav(nav)) == sorted(_pages())


@pytest.mark.parametrize("path", sorted({*_WRITTEN, *_hook().ROOT_PAGES.values()}))
def test_site_page_links_resolve(path: str) -> None:
    lost = []
    for name, anchor in _links(_pages()[path]):
        target = (_DOCS / path).parent / name if name else _DOCS / path
        page = target.resolve().relative_to(_DOCS).as_posix()
        known = _anchors(_pages()[page]) if page in _pages() else None
        if (known is None and not target.is_file()) or (anchor and anchor not in (known or ())):
            lost.append((name, anchor))
    assert lost == []


@pytest.mark.parametrize("path", _IN_REPOSITORY)
def test_repository_links_resolve(path: str) -> None:
    lost = []
    for name, anchor in _links((_ROOT / path).read_text(encoding="utf-8")):
        target = (_ROOT / path).parent / name if name else _ROOT / path
        if not target.exists() or (
            anchor and anchor not in _anchors(target.read_text(encoding="utf-8"))
        ):
            lost.append((name, anchor))
    assert lost == []


def test_site_start_page_links_to_each_guide() -> None:
    start = _pages()["index.md"]
    nav = yaml.safe_load((_ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    guides = next(entry["Guides"] for entry in nav if "Guides" in entry)
    assert [page for page in _in_nav(guides) if f"]({page}" not in start] == []


def test_site_recipe_reference_has_type_default_meaning_and_version_of_every_key() -> None:
    text = "".join(_pages()[f"reference/{page}.md"] for page in ("recipe", "model"))
    entries = dict(re.findall(r"^### `(\S+)` .*\n((?:(?!#).*\n)*)", text, re.M))
    assert set(entries) == {f"{section}.{key}" for section, _, key in recipe_fields()}
    for name, entry in entries.items():
        assert re.search(
            r"\*\*Type\*\*: \S.*\n- \*\*Default\*\*: \S.*\n- \*\*Since\*\*: \d", entry
        ), name
        assert re.search(r"\n\n\S.{8,}", entry), name


def test_site_reference_types_defaults_and_bounds_match_schema() -> None:
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
            if not one.hidden:
                yield from _below(f"{name} {verb}", one)


def test_site_command_reference_has_every_command_and_option() -> None:
    sections = re.split(r"^## ", _pages()["reference/commands.md"], flags=re.M)[1:]
    by_name = {section.partition(" {")[0]: section for section in sections}
    found = dict(_below("firstlight", command_line))
    assert by_name.keys() == found.keys()
    for name, command in found.items():
        for option in command.params:
            if isinstance(option, click.Option):
                assert all(f"{one}" in by_name[name] for one in option.opts), (name, option.opts)


def test_site_python_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: firstlight\.(\w+)$", _pages()["reference/python.md"], re.M)
    assert sorted(named) == firstlight.__all__
    packages = {module.split(".")[1] for module in firstlight._MODULES.values()}
    assert packages <= _hook()._TITLES.keys()


def test_documented_parts_of_a_run_exist() -> None:
    for names in _hook().PARTS.values():
        for name in names:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(f"firstlight.{module}"), attribute), name


def test_site_installation_page_has_every_extra() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| `([\w-]+)` \|", _pages()["installation.md"], re.M)
    assert sorted(rows) == sorted(project["optional-dependencies"])


def test_site_hook_converts_github_pages_for_mkdocs() -> None:
    page = "**Names**\n- one\n  more\n<!-- note -->\n| `a\\|b` |\n|---|\n```\ntext\n- code\n```\n"
    made = _hook().github_markdown(page)
    assert made == (
        "**Names**\n\n- one\n  more\n<!-- note -->\n\n| `a|b` |\n|---|\n```\ntext\n- code\n```\n"
    )


def test_site_links_show_page_titles_instead_of_paths(tmp_path: Path) -> None:
    (tmp_path / "chat.md").write_text("# Chatting with a model\ntext\n")
    (tmp_path / "benchmarks").mkdir()
    linked = (
        "[chat.md](../chat.md#python), [docs/chat.md](../chat.md), "
        "[here](../chat.md), [no.md](no.md)"
    )
    assert _hook().titled_links(linked, tmp_path / "benchmarks") == (
        "[Chatting with a model](../chat.md#python), [Chatting with a model](../chat.md), "
        "[here](../chat.md), [no.md](no.md)"
    )


def _brightness(picture: Path) -> float:
    """Mean of a picture's pixels, 0 (black) to 1; of an SVG, of its background's colour."""
    if picture.suffix == ".svg":
        colour = re.search(r"\.a\{fill:#(\w{6})\}", picture.read_text(encoding="utf-8"))
        assert colour, picture
        return sum(bytes.fromhex(colour[1])) / 3 / 255
    return float(matplotlib.image.imread(picture)[..., :3].mean())


def test_site_dark_mode_inverts_pictures_with_white_background() -> None:
    style = (_DOCS / "assets" / "site.css").read_text(encoding="utf-8")
    kept = re.findall(r'\[src\*="([^"]+)"\]', style)
    pictures = sorted((_DOCS / "images").iterdir())
    dark = [one.name for one in pictures if _brightness(one) < 0.5]
    assert dark == [one.name for one in pictures if any(part in one.name for part in kept)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site as `make docs` builds it."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("docs") / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    ended = subprocess.run(build, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(_pages())
    loaded = re.compile(
        r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//"
    )
    for page in pages:
        assert loaded.search(page.read_text(encoding="utf-8")) is None, page.name
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert re.search(r"@import|url\([\"']?(?:https?:)?//", text) is None, style.name


def _search_index(site: Path) -> dict[str, Any]:
    """The search's words: opened as a file, a page can't fetch them, and has them as a script."""
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text.removeprefix("var __index = ").rstrip("; \n"))
    return index


@pytest.mark.slow
def test_site_search_finds_each_key_by_name(site: Path) -> None:
    index = _search_index(site)
    titles = {one["location"]: re.sub(r"<[^>]+>", "", one["title"]) for one in index["docs"]}
    for section, _, key in recipe_fields():
        page = "model" if section == "model" else "recipe"
        title = titles[f"reference/{page}.html#{section}.{key}"]
        assert re.split(index["config"]["separator"], title) == [section, key]


@pytest.mark.slow
def test_site_search_ranks_reference_pages_below_explanations(site: Path) -> None:
    entries = _search_index(site)["docs"]
    assert {one["location"].partition(".")[0] for one in entries if one.get("boost", 1) < 1} == {
        "architecture",
        "contributing",
        "changelog",
        "reference/parts",
        "reference/python",
    }


#: Common tasks: a word for the task in the text of a link, and what the linked section has to show.
_TASKS = {
    "train on a folder of texts": ("folder of texts", "firstlight train my_texts/ --budget"),
    "resume a killed run": ("killed", "--resume"),
    "fine-tune on chats": ("chats", "--data.files"),
    "train LoRA adapters": ("LoRA", "--lora.rank 8"),
    "train with QLoRA": ("QLoRA", "--lora.quantize nf4"),
    "train on preferences": ("DPO", "train pairs.jsonl --init-from"),
    "fit a larger model into memory": ("memory", "activation_checkpointing"),
    "plan a run for an H100": ("H100", "--gpu H100"),
    "export to GGUF and Ollama": ("GGUF", "--to ollama"),
    "load in transformers": ("transformers", "AutoModelForCausalLM.from_pretrained"),
    "serve OpenAI's API": ("OpenAI", "/v1/chat/completions"),
    "evaluate on HellaSwag": ("HellaSwag", "--tasks hellaswag"),
    "add a family": ("Add a model family", "FamilySpec"),
    "several GPUs": ("several GPUs", "--nproc"),
    "Slurm": ("Slurm", "srun firstlight train"),
    "change the schedule": ("schedule", "warmup_steps"),
    "tune hyper-parameters": ("hyperparameters", "firstlight tune"),
    "push to the hub": ("Push", "firstlight push"),
    "track a run with wandb": ("wandb", "--run.trackers"),
    "continue the pretraining of a model": ("Continue pretraining", "--init-from"),
    "extend the context": ("context", "rope_type: yarn"),
    "mix corpora": ("Mix several corpora", "weight: 3"),
    "use it from Python": ("an example", "firstlight.load_recipe"),
    "extend the tokenizer": ("Add tokens to a tokenizer", "firstlight tokenizer extend"),
    "cite firstlight": ("Cite", "@software{"),
    "report a bug": ("Report a bug", "firstlight --version"),
}


class _Article(HTMLParser):
    """Links of a page's article with their texts, and its text by the ids before it.

    Attributes:
        links: (address, text) of each link, in order.
        sections: id of a heading -> text from it to the next heading of its level or a higher one.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.sections: dict[str, str] = {"": ""}
        self._open: dict[str, int] = {"": 0}  # headings whose sections go on, with their levels
        self._link: list[str] | None = None
        self.feed(page[page.index("<article") : page.index("</article")])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if re.fullmatch(r"h[1-6]", tag) and values.get("id"):
            level = int(tag[1])
            self._open = {name: one for name, one in self._open.items() if one < level}
            self._open[values["id"] or ""] = level
            self.sections[values["id"] or ""] = ""
        elif tag == "a":
            self._link = [values.get("href") or ""]

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._link:
            self.links.append((self._link[0], "".join(self._link[1:])))
            self._link = None

    def handle_data(self, text: str) -> None:
        for name in self._open:
            self.sections[name] += text
        if self._link:
            self._link.append(text)


@pytest.mark.slow
def test_site_common_tasks_are_three_clicks_from_start_page(site: Path) -> None:
    read = cache(lambda path: _Article((site / path).read_text(encoding="utf-8")))
    seen = {"index.html"}
    clicks: dict[str, int] = {}
    layer = ["index.html"]
    for number in (1, 2, 3):
        following = []
        for page in layer:
            for link, text in read(page).links:
                name, _, anchor = link.partition("#")
                folder = os.path.dirname(page)
                target = os.path.normpath(os.path.join(folder, name)) if name else page
                if re.match(r"\w+:", link) or not target.endswith(".html"):
                    continue
                shown = read(target).sections.get(anchor, "")
                for task, (word, content) in _TASKS.items():
                    if word in text and content in shown:
                        clicks.setdefault(task, number)
                if target not in seen:
                    seen.add(target)
                    following.append(target)
        layer = following
    assert _TASKS.keys() - clicks.keys() == set()
