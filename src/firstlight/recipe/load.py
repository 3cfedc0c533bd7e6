"""Reads recipes from YAML files and options `--section.key value`, and reports mistakes in them.

Precedence: defaults < file < `--section.key value`. All mistakes are reported at once, each with
the nearest existing name.
"""

from __future__ import annotations

import copy
import json
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import yaml
from pydantic import BaseModel, ValidationError

from firstlight.errors import ConfigError, InputError, nearest
from firstlight.files.atomic import read_file
from firstlight.models import DEFAULT_FAMILY, FAMILIES
from firstlight.models.family import not_a_key
from firstlight.recipe.schema import Recipe, ResolvedRecipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def override_pairs(
    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]],
) -> list[tuple[str, str]]:
    """Overrides in the form of command line options: pairs (`section.key`, value as YAML text).

    Args:
        overrides: values of any type, by `section.key` or as pairs.

    Raises:
        ConfigError: a value has a type that a recipe can't hold, such as an array.
    """
    found = []
    for name, value in overrides.items() if isinstance(overrides, Mapping) else overrides:
        try:
            text = str(value) if isinstance(value, str | Path) else json.dumps(value)
        except TypeError as error:
            raise ConfigError(
                f"override {name} is {value!r:.80}, which no recipe can hold: give a number, text, "
                "true, false, null, or a list or dict of them"
            ) from error
        found.append((name, text))
    return found


def load_recipe(
    path: str | Path, overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
) -> Recipe:
    """Read a recipe file.

    Args:
        path: path of the YAML file.
        overrides: values by `section.key`, or pairs (`section.key`, value), that replace those of
            the file. A string is parsed as YAML: "3e-4" is a number.

    Raises:
        ConfigError: the file is missing or not YAML, or keys or values are invalid; one message
            has all mistakes.
    """
    path = Path(path)
    if not path.exists():
        siblings = [str(p) for p in path.parent.glob("*.y*ml")]
        raise ConfigError(f"recipe {path} does not exist{nearest(str(path), siblings)}")
    try:
        values = parse_yaml(read_file(path, MAX_RECIPE_BYTES))
    except InputError as error:
        raise ConfigError(f"recipe {error}") from error
    except ValueError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {path} must consist of sections such as `data:` and `model:`")
    recipe = parse_recipe(values, str(path), override_pairs(overrides))
    if recipe.run.dir is None:
        recipe = recipe.with_keys("run", dir=str(Path("runs") / path.stem))
    return recipe


#: Largest number of mistakes in one message.
_MAX_PROBLEMS = 20


def parse_recipe(
    values: Mapping[str, Any],
    where: str = "recipe",
    overrides: Sequence[tuple[str, str]] = (),
) -> Recipe:
    """Validate nested values as a recipe.

    Args:
        values: sections, keys and values.
        where: name of the recipe, for messages.
        overrides: pairs (`section.key`, value as YAML text); see `override_pairs`.

    Raises:
        ConfigError: keys or values are invalid; one message has all mistakes.
    """
    if overrides:
        changed = copy.deepcopy(dict(values))
        for name, text in overrides:
            _override(changed, name, text)
            if name == "batch.micro_batch_size":
                # A given size replaces one that firstlight has chosen, and is kept.
                _override(changed, "batch.divide_micro_batch", "false")
        values = changed
    return _parsed(Recipe, values, where)


def parse_resolved_recipe(values: Mapping[str, Any], where: str = "recipe") -> ResolvedRecipe:
    """Validate nested values as a resolved recipe, in which no key is open.

    Raises:
        ConfigError: see `parse_recipe`; or a key is open ("auto" or null).
    """
    return _parsed(ResolvedRecipe, values, where)


def _parsed(kind: type[AnyRecipe], values: Mapping[str, Any], where: str) -> AnyRecipe:
    model = values.get("model")
    if isinstance(model, Mapping):
        # Recipes may leave the model family out.
        values = {**values, "model": {"model_type": DEFAULT_FAMILY, **model}}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        entries = error.errors()
        problems = [_describe(entry) for entry in entries[:_MAX_PROBLEMS]]
        if len(entries) > _MAX_PROBLEMS:
            problems.append(f"and {len(entries) - _MAX_PROBLEMS} more")
        raise ConfigError(f"{where}: {'; '.join(problems)}") from None


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set `section.key` (or `section.key.inner`) to a value given as text."""
    *sections, key = name.split(".")
    if not sections:
        raise ConfigError(f"option --{name} is unknown{nearest(name, known_keys())}")
    place = values
    for section in sections:
        inner = place.setdefault(section, {})
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"option --{name}: {section} is not a section")
        place = inner
    place[key] = override_value(name, text)


def override_value(name: str, text: str) -> Any:
    """The value of `section.key` from a text; ConfigError if it is not YAML."""
    try:
        return text if _takes_text(name) and text not in ("null", "~") else parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"option --{name}: '{text}' is not a valid value: {error}") from error


def _takes_text(name: str) -> bool:
    """True if the key's type is a string, so that `--data.dir 2024` is a folder's name and not a
    number."""
    section: type[BaseModel] = Recipe
    *sections, key = name.split(".")
    for part in sections:
        field = section.model_fields.get(part)
        inner = [] if field is None else _section_types(field.annotation)
        if not inner:
            return False
        section = inner[0]
    field = section.model_fields.get(key)
    return field is not None and field.annotation in (str, str | None)


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    """The config classes in a field's type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (Union, types.UnionType, Annotated, list):
        return [kind for part in typing.get_args(annotation) for kind in _section_types(part)]
    return []


def key_of_other_name(name: str) -> str | None:
    """The `section.key` for a key without its section, or for the name that another program has for
    this key; None if there is none."""
    key = _OTHER_NAMES.get(name, name)
    return next((full for full in known_keys() if key in (full, full.split(".")[1])), None)


def known_keys() -> list[str]:
    """All keys of a recipe as `section.key`, sorted."""
    return sorted({f"{section}.{key}" for section, _, key in recipe_fields()})


def recipe_fields() -> Iterator[tuple[str, type[BaseModel], str]]:
    """Section, class of the section, and key, for each key of a recipe in the schema's order."""
    for section, field in Recipe.model_fields.items():
        for kind in _section_types(field.annotation):
            for key in kind.model_fields:
                yield section, kind, key


#: Other programs' names -> key of a recipe; `section.key` if several sections have such a key.
_OTHER_NAMES = {
    "dpo_beta": "beta",
    "pref_beta": "beta",
    "loss_type": "objective",
    "n_embd": "hidden_size",
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "block_size": "max_position_embeddings",
    "max_seq_length": "seq_len",
    "batch_size": "micro_batch_size",
    "lr": "learning_rate",
    "max_iters": "max_steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "warmup_iters": "warmup_steps",
    "eval_on_start": "on_start",
    "initial_validation": "on_start",
    "lr_decay_iters": "decay_steps",
    "lr_scheduler_type": "schedule.kind",
    "lr_decay_style": "schedule.kind",
    "decay_type": "decay_shape",
    "decay_ratio": "decay_fraction",
    "num_decay_steps": "cooldown_steps",
    "min_lr": "min_learning_rate",
    "grad_clip": "max_grad_norm",
    "out_dir": "dir",
    "path": "dir",
    "datasets": "files",
    "data_files": "files",
    "val_set_size": "val_fraction",
    "chat_template": "template",
    "train_on_inputs": "train_on",
    "assistant_only_loss": "train_on",
    "sequence_len": "seq_len",
    "max_length": "seq_len",
    "cutoff_len": "seq_len",
    "excess_length_strategy": "long",
}


def _describe(entry: Any) -> str:
    """The message for one of pydantic's validation errors."""
    location, owners = _locate([str(part) for part in entry["loc"]])
    name = ".".join(location)
    kind = entry["type"]
    if kind == "extra_forbidden":
        tags = [part for part in entry["loc"] if part in FAMILIES]
        is_of_model = len(location) == 2 and location[0] == "model" and tags
        if is_of_model and (problem := not_a_key(location[-1], tags[0])):
            return f"model: {problem}"
        known = sorted({key for owner in owners for key in owner.model_fields})
        return f"unknown key {name}{_suggest(location[-1], known)}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "union_tag_invalid":
        context = {key: str(value).replace("'", "") for key, value in entry["ctx"].items()}
        hint = nearest(context["tag"], context["expected_tags"].split(", "))
        return (
            f"{name}.{context['discriminator']} '{context['tag']}' is unknown{hint} "
            f"(known: {context['expected_tags']})"
        )
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name} must be a section with keys of its own, not {entry['input']!r}"
    message = entry["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if kind == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message} (given: {entry['input']!r})"


def _locate(location: list[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """A key's location without the tags that pydantic inserts for unions, and the classes of the
    section that has the key."""
    names: list[str] = []
    owners: list[type[BaseModel]] = [Recipe]
    for position, part in enumerate(location):
        fields = [owner.model_fields[part] for owner in owners if part in owner.model_fields]
        tagged = [owner for owner in owners if part in _tags(owner)]
        if not fields and tagged and len(owners) > 1:
            owners = tagged
            continue
        names.append(part)
        if fields and position < len(location) - 1:
            owners = [kind for field in fields for kind in _section_types(field.annotation)]
    return names, owners


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    """The discriminator values of this class in a union: ("llama",) for LlamaConfig."""
    for field in section.model_fields.values():
        if typing.get_origin(field.annotation) is typing.Literal:
            return typing.get_args(field.annotation)
    return ()


def _suggest(key: str, known: Sequence[str]) -> str:
    """A hint for an unknown key: the nearest key of its section, or the same key in another
    section."""
    other = _OTHER_NAMES.get(key, key)
    if (own := other.rpartition(".")[2]) in known:
        return f" (did you mean '{own}'?)"
    hint = nearest(key, known)
    if hint:
        return hint
    elsewhere = [name for name in known_keys() if other in (name, name.split(".")[1])]
    return f" (did you mean '{elsewhere[0]}'?)" if elsewhere else f" (known: {', '.join(known)})"


#: Limits far above any real recipe: file size in bytes, values (anchors expanded), and levels.
MAX_RECIPE_BYTES, _MAX_VALUES, _MAX_DEPTH = 32_768, 100_000, 50


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which in addition reads 3e-4 as a number, refuses duplicate keys, and
    limits levels and keys."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="too many levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # `<<` merges may multiply: each mapping can merge two others, which merge two others.
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:
            raise yaml.MarkedYAMLError(problem="too many keys", problem_mark=node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            # `<<: *anchor` merges another mapping, and may occur several times.
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if isinstance(name, Hashable) and name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key '{name}' is given twice", problem_mark=node.start_mark
                )
            # A key that is not hashable is refused below.
            seen.update([name] if isinstance(name, Hashable) else [])
        return super().construct_mapping(node, deep)


def _require_small(values: object) -> None:
    """Refuse YAML whose anchors expand to a huge number of values, or contain themselves.

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
        ValueError: the text is not YAML or has too many values; the message is one line.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        values = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        _require_small(values)
    # ValueError comes from bytes that are not UTF-8, and from invalid dates such as 2001-99-99.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return values
