"""Generate pages of the documentation site from the code: a hook of mkdocs (`mkdocs.yml`).

Recipe keys come from the schema, commands from click, and Python names from the package's list of
public names. The first paragraphs of these pages are in docs/reference/, for readers of the
repository. README.md, CHANGELOG.md and SECURITY.md become pages of the site, and CITATION.cff
becomes a BibTeX entry; links between them and docs/ are changed to the site's paths.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page
    from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]

#: Version in which a key was added. All keys are from the first version; a later key gets an entry.
SINCE = {"": "0.1.0"}

#: Titles of the packages with public names, in the order of the page.
_TITLES = {
    "from_texts": "From texts to a model",
    "tokenizer": "Tokenizers",
    "data": "Data",
    "recipe": "Recipes",
    "training": "Training",
    "evaluation": "Evaluation",
    "generation": "Generation and chat",
    "lora": "Models",
    "conversion": "Conversion",
    "planner": "Planning",
    "tuning": "Searching keys",
    "report": "Reports",
    "sharing": "Sharing on the hub",
    "errors": "Errors",
}

#: Parts of a custom training loop (examples/parts.py), by title.
PARTS = {
    "Models": [
        "models.empty_model",
        "models.language_model.LanguageModel",
        "models.family.FamilySpec",
    ],
    "Data": ["data.corpus.TokenDataset", "data.loader.TokenLoader"],
    "Optimizers": [
        "optim.optimizer.make_optimizers",
        "optim.spec.OptimizerSpec",
        "optim.config.parameter_kinds",
    ],
    "Schedules": [
        "optim.schedule.resolve_schedule",
        "optim.schedule.Schedule",
        "optim.schedule.BatchSchedule",
    ],
    "Memory": ["methods.memory.checkpoint_layers"],
    "A step": ["training.step.train_step"],
}

#: Pages of the site made from other files of the repository, by file.
ROOT_PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "citing.md",
}

#: Start of the part of a page in docs/reference/ that is omitted on the site: where to find the
#: list.
_WITHOUT_SITE = "<!-- without the site -->"

#: Search weights of pages that mention many subjects or many words, and that the search lists after
#: pages that explain them. Other pages have weight 1.
_SEARCH_WEIGHTS = {
    "architecture.md": 0.3,
    "changelog.md": 0.3,
    "contributing.md": 0.3,
    "reference/parts.md": 0.3,
    "reference/python.md": 0.5,
}

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def github_markdown(text: str) -> str:
    """Convert GitHub's Markdown to the form that Python-Markdown, used by mkdocs, needs.

    An empty line is inserted before a list or table, and vertical bars in code within tables lose
    their backslash.
    """
    lines: list[str] = []
    in_fence = False
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        in_fence ^= line.lstrip().startswith("```")
        kind = "" if in_fence else _block(line)
        follows_text = before.strip() and not before.startswith((" ", "```"))
        if kind and follows_text and _block(before) != kind:
            lines.append("")
        if kind == "table":
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _block(line: str) -> str:
    """Return "list", "table" or "", depending on the start of a line."""
    if re.match(r"(?:[-*] |\d+\. )", line):
        return "list"
    return "table" if line.startswith("|") else ""


def type_text(annotation: Any) -> str:
    """Return a key's type in words: `int or null`, or the values of a Literal."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, types.NoneType):
        return "null"
    if origin is typing.Annotated:
        return type_text(inner[0])
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(one)}`" for one in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(one) for one in inner))
    if origin is not None:
        return (
            f"{origin.__name__} of {' and '.join(dict.fromkeys(type_text(one) for one in inner))}"
        )
    return str(getattr(annotation, "__name__", annotation))


def _bounds(field: FieldInfo) -> str:
    """Return the bounds of a number, such as ", above 0", or ""."""
    found = [
        f"{word} {getattr(one, name)}"
        for one in field.metadata
        for name, word in _BOUNDS.items()
        if getattr(one, name, None) is not None
    ]
    return f", {' and '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    """Return a field's default as JSON in code, or "required"."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return f"`{json.dumps(value, default=str)}`"


def _text(field: FieldInfo) -> str:
    """Return a field's documentation as one sentence."""
    text = " ".join((field.description or "").split())
    return text[:1].upper() + text[1:]


def keys() -> dict[str, dict[str, list[tuple[type, FieldInfo]]]]:
    """Return every key of a recipe by section and name, with each class that has it."""
    from firstlight.recipe import recipe_fields

    found: dict[str, dict[str, list[tuple[type, FieldInfo]]]] = {}
    for section, kind, key in recipe_fields():
        owners = found.setdefault(section, {}).setdefault(key, [])
        owners.append((kind, kind.model_fields[key]))
    return found


def _entry(name: str, owners: list[tuple[type, FieldInfo]], families: int) -> Iterator[str]:
    """Return the lines of a key; keys of a model list the families that have them."""
    types_ = " or ".join(dict.fromkeys(type_text(f.annotation) + _bounds(f) for _, f in owners))
    yield f"### `{name}` {{#{name}}}\n"
    defaults: dict[str, list[str]] = {}
    for kind, field in owners:
        defaults.setdefault(_default(field), []).append(kind.__name__.removesuffix("Config"))
    if len(defaults) == 1:
        default = next(iter(defaults))
    else:
        default = "; ".join(f"{value} ({', '.join(who)})" for value, who in defaults.items())
    since = SINCE.get(name, SINCE[""])
    yield f"- **Type**: {types_}\n- **Default**: {default}\n- **Since**: {since}"
    if families and len(owners) < families:
        yield f"- **Families**: {', '.join(k.__name__.removesuffix('Config') for k, _ in owners)}"
    for text in dict.fromkeys(_text(field) for _, field in owners):
        yield f"\n{text}\n"


def _head(name: str) -> str:
    """Return the start of docs/reference/NAME.md, which the site's page has, too."""
    text = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    head, mark, _ = text.partition(_WITHOUT_SITE)
    assert mark, f"docs/reference/{name}.md lacks {_WITHOUT_SITE}"
    return head


def recipe_page() -> str:
    """Return the page of all sections except `model`."""
    from firstlight.recipe import Recipe

    lines = [_head("recipe")]
    for section, entries in keys().items():
        if section == "model":
            continue
        lines.append(f"## {section} {{#{section}}}\n")
        owner = next(iter(entries.values()))[0][0]
        lines.append(" ".join((owner.__doc__ or "").split()) + "\n")
        for key, owners in entries.items():
            lines += _entry(f"{section}.{key}", owners, 0)
    assert Recipe.model_fields.keys() >= keys().keys()
    return "\n".join(lines)


def model_page() -> str:
    """Return the page of the `model` section, with the keys of all families."""
    entries = keys()["model"]
    families = max(len(owners) for owners in entries.values())
    lines = [_head("model"), "## model {#model}\n"]
    for key, owners in entries.items():
        lines += _entry(f"model.{key}", owners, families)
    return "\n".join(lines)


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield (full name, command) for a command and all its subcommands."""
    yield name, command
    if isinstance(command, click.Group):
        for verb, below in command.commands.items():
            if below.hidden:
                continue
            yield from commands(below, f"{name} {verb}")


def commands_page() -> str:
    """Return the page of all commands with all options."""
    from firstlight.cli.main import firstlight

    lines = [_head("commands")]
    for name, command in commands(firstlight, "firstlight"):
        lines += _command(name, command)
    return "\n".join(lines)


def _command(name: str, command: click.Command) -> Iterator[str]:
    """Return the lines of one command."""
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {name} {{#{name.replace(' ', '-')}}}\n"
    yield f"    {name} {usage}\n"
    for block in (command.help or "").replace("\f", "").split("\n\n"):
        if block.startswith("\b\n"):
            yield "\n".join(f"    {line}" for line in block.splitlines()[1:]) + "\n"
        else:
            yield " ".join(block.split()).replace("<", "&lt;") + "\n"
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    yield "| option | default | meaning |\n|---|---|---|"
    for option in options:
        default = option.get_default(context) if option.show_default else None
        shown = "" if default is None or default is False else f"`{default}`"
        if option.is_flag and option.secondary_opts and default is not None:
            shown = "on" if default else "off"
        text = " ".join((option.help or "").split())
        yield f"| {_option(option, context)} | {shown} | {_cell(text)} |"
    yield ""


def _option(option: click.Option, context: click.Context) -> str:
    """Return an option's names with its metavar, in code."""
    names = ", ".join(option.opts)
    if option.secondary_opts:
        names += f" / {', '.join(option.secondary_opts)}"
    if not option.is_flag and not option.count:
        names += f" {option.make_metavar(context)}"
    return f"<code>{_cell(names)}</code>"


def _cell(text: str) -> str:
    """Return text for a table cell."""
    return text.replace("<", "&lt;").replace("|", "&#124;").replace("*", "&#42;")


def python_page() -> str:
    """Return the page of the names that `import firstlight` provides."""
    import firstlight

    by_title: dict[str, list[str]] = {title: [] for title in _TITLES.values()}
    for name in firstlight.__all__:
        package = firstlight._MODULES[name].split(".")[1]
        by_title[_TITLES[package]].append(name)
    lines = [_head("python")]
    for title, names in by_title.items():
        if names:
            lines += [f"## {title}\n", *(f"::: firstlight.{name}\n" for name in names)]
    return "\n".join(lines)


def parts_page() -> str:
    """Return the page of the parts of a custom training loop."""
    lines = [_head("parts")]
    for title, names in PARTS.items():
        lines += [f"## {title}\n", *(f"::: firstlight.{name}\n" for name in names)]
    return "\n".join(lines)


def _root_page(name: str) -> str:
    """Return a Markdown file of the repository's root, with its links relative to docs/."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(
        r"\]\(([\w.]+)(?=[)#])", lambda link: f"]({ROOT_PAGES.get(link[1], link[1])}", text
    )


def site_links(text: str) -> str:
    """Change a page's links to README.md and other files of the root to links to their pages."""
    files = "|".join(re.escape(name) for name in ROOT_PAGES)
    # The repository's root is one folder above docs/, where the site has these pages.
    return re.sub(
        rf"\]\(\.\./((?:\.\./)*)({files})(?=[)#])",
        lambda link: f"]({link[1]}{ROOT_PAGES[link[2]]}",
        text,
    )


def citing_page() -> str:
    """Return the page of CITATION.cff, with a BibTeX entry."""
    import yaml

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    authors = " and ".join(f"{{{one['name']}}}" for one in cited["authors"])
    return (
        "# Citing firstlight\n\n"
        f"{cited['message']} The same fields stand in `CITATION.cff`.\n\n"
        f"    @software{{firstlight,\n      title = {{{cited['title']}}},\n"
        f"      author = {authors},\n      version = {{{cited['version']}}},\n"
        f"      license = {{{cited['license']}}}\n    }}\n"
    )


def pages() -> dict[str, str]:
    """Return the text of each generated page by its path."""
    return {
        "overview.md": _root_page("README.md"),
        "changelog.md": _root_page("CHANGELOG.md"),
        "security.md": _root_page("SECURITY.md"),
        "citing.md": citing_page(),
        "reference/recipe.md": recipe_page(),
        "reference/model.md": model_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
        "reference/parts.md": parts_page(),
    }


def on_config(config: MkDocsConfig) -> None:
    """Create the anchors of headings like GitHub."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages, in place of those of docs/reference/."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        if written := files.get_file_from_path(path):
            files.remove(written)
        files.append(File.generated(config, path, content=text))


def titled_links(text: str, folder: Path) -> str:
    """Change links that show a page's path, such as `[chat.md](chat.md)`, to show its title.

    Args:
        text: the page.
        folder: the folder from which its links lead.
    """

    def title(link: re.Match[str]) -> str:
        page = folder / link[2]
        if not link[1].endswith(page.name) or not page.is_file():
            return link[0]
        heading = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f"[{heading}]({link[2]}{link[3] or ''})"

    return re.sub(r"\[([\w./-]+\.md)\]\(([\w./-]+\.md)(#[^)\s]*)?\)", title, text)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Read each page like GitHub, name pages by their titles, and let the search list guides before
    pages for developers.
    """
    page.meta["search"] = {"boost": _SEARCH_WEIGHTS.get(page.file.src_uri, 1)}
    text = site_links(github_markdown(markdown))
    return titled_links(text, ROOT / "docs" / Path(page.file.src_uri).parent)
