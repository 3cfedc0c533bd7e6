"""A recipe's YAML as plain values: nothing executed, no key twice, no larger than recipes are."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

__all__ = ["MAX_RECIPE_BYTES", "parse_yaml"]

#: No recipe has more: bytes, values (those of an anchor counted wherever it is named), levels.
MAX_RECIPE_BYTES, _MAX_VALUES, _MAX_DEPTH = 32_768, 100_000, 50


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also reads 3e-4 as a number and refuses a key given twice."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="too many levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Each mapping may take the keys of two others over, and so on.
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:
            raise yaml.MarkedYAMLError(problem="too many keys", problem_mark=node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            # `<<: *anchor` takes another mapping's keys over, and may stand beside any of them.
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if isinstance(name, Hashable) and name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key '{name}' is given twice", problem_mark=node.start_mark
                )
            # What is not hashable is refused below.
            seen.update([name] if isinstance(name, Hashable) else [])
        return super().construct_mapping(node, deep)


def _require_small(values: object) -> None:
    """Refuse what a few anchors can blow up, or hold themselves.

    Raises:
        ValueError: there are too many values, or one is a number of more than 64 bits.
    """
    rest, count = [values], 0
    while rest:
        value = rest.pop()
        count += 1
        if count > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES:,} values")
        if isinstance(value, int) and value.bit_length() > 64:
            raise ValueError("a number of more than 64 bits")
        if isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            rest += value


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse_yaml(content: bytes | str) -> Any:
    """The values of a YAML text.

    Raises:
        ValueError: it is not YAML, or larger than any recipe; in one line.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        values = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        _require_small(values)
    # ValueError: bytes that are not UTF-8, a date such as 2001-99-99.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return values
