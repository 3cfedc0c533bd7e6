"""The recipe of a run as YAML with the reason of each choice above its key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

import yaml

from firstlight.recipe import Recipe

_WIDTH = 100


def commented_yaml(recipe: Recipe, reasons: Mapping[str, str], header: Iterable[str] = ()) -> str:
    """A recipe as YAML.

    Args:
        recipe: the recipe; every key is written.
        reasons: reason of each chosen key, by `section.key`.
        header: lines of a comment at the top.
    """
    text = yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)
    lines = [f"# {line}" for line in header]
    section = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.partition(":")[0]
        elif line[2:3] not in (" ", "-", ""):
            reason = reasons.get(f"{section}.{line.strip().partition(':')[0]}", "")
            lines += textwrap.wrap(reason, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        lines.append(line)
    return "\n".join(lines) + "\n"
