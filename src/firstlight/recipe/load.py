"""Read recipes from YAML files and `--section.key value` options, and report errors in them.

Options take precedence over the file, and the file takes precedence over defaults. All errors are
reported together. For an unknown key, the nearest existing name is suggested. A recipe can name a
DeepSpeed configuration file. That file then supplies values for open keys, which are keys that are
unset, null or "auto".
"""

from __future__ import annotations

import copy
import functools
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
from firstlight.parallel.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from firstlight.recipe.schema import Recipe, ResolvedRecipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def override_pairs(
    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]],
) -> list[tuple[str, str]]:
    """Convert overrides to the format of command-line options. These are pairs of `section.key` and
    the value as YAML text.

    Args:
        overrides: values of any type, given as a mapping from `section.key` to the value or as
            (`section.key`, value) pairs.

    Raises:
        ConfigError: a value has a type that a recipe can't contain, such as an array.
    """
    found = []
    for name, value in overrides.items() if isinstance(overrides, Mapping) else overrides:
        try:
            text = str(value) if isinstance(value, str | Path) else json.dumps(value)
        except TypeError as error:
            raise ConfigError(
                f"override {name} is {value!r:.80}, which a recipe can't contain: use a number, "
                "text, true, false, null, or a list or dict of them"
            ) from error
        found.append((name, text))
    return found


def load_recipe(
    path: str | Path, overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
) -> Recipe:
    """Read a recipe file.

    Args:
        path: path of the YAML file.
        overrides: values that replace the values in the file, given as a mapping from `section.key`
            to the value or as (`section.key`, value) pairs. Strings are parsed as YAML, so "3e-4"
            is a number.

    Raises:
        ConfigError: the file is missing or not valid YAML, or keys or values are invalid. A single
            message lists all errors.
    """
    name, path = str(path), Path(path)
    if not path.exists():
        siblings = [str(p) for p in path.parent.glob("*.y*ml") if _is_recipe(p)]
        raise ConfigError(f"recipe {name} does not exist{nearest(str(path), siblings)}")
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


def _is_recipe(path: Path) -> bool:
    """Return True if a YAML file contains at least one section of a recipe."""
    try:
        values = parse_yaml(read_file(path, MAX_RECIPE_BYTES))
    except (OSError, ValueError, InputError):
        return False
    return isinstance(values, dict) and not values.keys().isdisjoint(Recipe.model_fields)


#: Maximum number of errors in one message.
_MAX_PROBLEMS = 20


def parse_recipe(
    values: Mapping[str, Any],
    where: str = "recipe",
    overrides: Sequence[tuple[str, str]] = (),
) -> Recipe:
    """Create a recipe from nested values, and validate it.

    Args:
        values: mapping from section names to mappings of keys to values.
        where: name of the recipe, for messages.
        overrides: pairs of `section.key` and the value as YAML text, as returned by
            `override_pairs`.

    Raises:
        ConfigError: keys or values are invalid. A single message lists all errors.
    """
    if overrides:
        changed = copy.deepcopy(dict(values))
        # A micro-batch size that the user sets here must not be lowered. If firstlight has chosen
        # the size in the recipe, `divide_micro_batch` is true, which would allow lowering it, so
        # set this key to false.
        if any(name == "batch.micro_batch_size" for name, _ in overrides):
            _override(changed, "batch.divide_micro_batch", "false")
        for name, text in overrides:
            _override(changed, name, text)
        values = changed
    return _parsed(Recipe, values, where)


def changed_recipe(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's values with some of the values replaced.

    Args:
        values: nested values of a recipe.
        changes: new values, keyed by `section.key`. A complete section can also be replaced, with
            its name as the key.
    """
    result = dict(values)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        result[section] = {**result.get(section, {}), name: value} if name else value
    return result


def parse_resolved_recipe(values: Mapping[str, Any], where: str = "recipe") -> ResolvedRecipe:
    """Create a resolved recipe from nested values, and validate it. Every key must have a definite
    value.

    Raises:
        ConfigError: a key is open ("auto" or null), or the values are invalid.
    """
    return _parsed(ResolvedRecipe, values, where)


def _parsed(kind: type[AnyRecipe], values: Mapping[str, Any], where: str) -> AnyRecipe:
    model = values.get("model")
    if isinstance(model, Mapping):
        # A recipe can omit the model family.
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
    """Set `section.key` (or `section.key.inner`) to a value that is given as YAML text."""
    *sections, key = name.split(".")
    if not sections:
        hint = hint_for_other_name(name, as_option=True) or nearest(name, known_keys())
        raise ConfigError(f"option --{name} is unknown{hint}")
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
    """Parse the value of `section.key` from YAML text.

    Raises:
        ConfigError: the text is not valid YAML.
    """
    try:
        return text if _takes_text(name) and text not in ("null", "~") else parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"option --{name}: '{text}' is not a valid value: {error}") from error


def _takes_text(name: str) -> bool:
    """Return True if the type of the key is a string. The value of such a key is not parsed as
    YAML. In `--data.dir 2024`, for example, `2024` is the name of a folder and not a number.
    """
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
    """Return the config classes in a field's type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (Union, types.UnionType, Annotated, list):
        return [kind for part in typing.get_args(annotation) for kind in _section_types(part)]
    return []


def known_keys() -> list[str]:
    """Return all keys of a recipe in the form `section.key`, sorted."""
    return sorted({f"{section}.{key}" for section, _, key in recipe_fields()})


def recipe_fields() -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield the section name, the section's class and the key name of each recipe key, in the order
    of the schema.
    """
    for section, field in Recipe.model_fields.items():
        for kind in _section_types(field.annotation):
            for key in kind.model_fields:
                yield section, kind, key


@functools.cache
def other_names() -> Mapping[str, str]:
    """Return the hints in other_names.yaml. They explain settings of other programs, and are keyed
    by the names of these settings.
    """
    text = Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8")
    return {name: hint for hint, names in yaml.safe_load(text).items() for name in names}


#: Pattern of a hint in `other_names` that consists of a recipe key, an optional value and an
#: optional remark.
_OWN_KEY = re.compile(r"(\w+\.\w+)(?:: ([^;]+))?(?:; (.+))?")


def hint_for_other_name(name: str, known: Sequence[str] = (), *, as_option: bool = False) -> str:
    """Return a hint if a name is a setting of another program or a key of a different section. The
    hint names the corresponding recipe key or an alternative. If there is no hint for the name,
    return "".

    Args:
        name: the unknown key, without its section.
        known: keys of the section in which the name occurs. If the corresponding key is one of
            them, the hint omits the section.
        as_option: True if the name is a command-line option.
    """
    elsewhere = [full for full in known_keys() if full.split(".")[1] == name]
    text = other_names().get(name) or (elsewhere[0] if elsewhere else "")
    match = _OWN_KEY.fullmatch(text)
    if match is None:
        return f": {text}" if text else ""
    key, value, remark = match.groups()
    shown = key.partition(".")[2] if key.partition(".")[2] in known else key
    if as_option:
        shown = f"--{key}" + (f" {value}" if value else "")
    elif value:
        shown += f": {value}"
    return f" (did you mean '{shown}'?)" + (f": {remark}" if remark else "")


def _describe(entry: Any) -> str:
    """Return the message for one of pydantic's validation errors."""
    location, owners = _locate([str(part) for part in entry["loc"]])
    name = ".".join(location)
    kind = entry["type"]
    if kind == "extra_forbidden":
        tags = [part for part in entry["loc"] if part in FAMILIES]
        is_of_model = len(location) == 2 and location[0] == "model" and tags
        if is_of_model and (problem := not_a_key(location[-1], tags[0])):
            return f"model: {problem}"
        if len(location) == 1 and isinstance(entry["input"], Mapping):
            return _suggest_for_section(name, entry["input"])
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
        return f"{name} must be a section with keys, not {entry['input']!r}"
    message = entry["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if kind == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message} (given: {entry['input']!r})"


def _locate(location: list[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the location of a key, and the classes that the key's section can have. The location
    does not include the tags that pydantic inserts for unions.
    """
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
    """Return the values that identify a class in a discriminated union, such as ("llama",) for
    LlamaConfig."""
    for field in section.model_fields.values():
        if typing.get_origin(field.annotation) is typing.Literal:
            return typing.get_args(field.annotation)
    return ()


def _suggest(key: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown key. If another program or a different section has such a key,
    the hint contains the right name. Otherwise, the hint contains the nearest key of the same
    section."""
    hint = hint_for_other_name(key, known) or nearest(key, known)
    return hint or f" (known: {', '.join(known)})"


def _suggest_for_section(name: str, inner: Mapping[Any, Any]) -> str:
    """Return the message for an unknown section. If its keys exist in other sections or programs,
    as is likely for a section named `training`, the message contains hints for the keys. Otherwise,
    it contains a hint for the section."""
    sections = [section for section in Recipe.model_fields if nearest(name, [section])]
    keys = set(known_keys())
    if not any(all(f"{section}.{key}" in keys for key in inner) for section in sections):
        hints = {key: hint_for_other_name(str(key)) for key in inner}
        if any(hints.values()):
            return "; ".join(f"unknown key {name}.{key}{hint}" for key, hint in hints.items())
    return f"unknown key {name}{_suggest(name, list(Recipe.model_fields))}"


#: Maximum file size in bytes, maximum number of values after anchors are expanded, and maximum
#: nesting depth. A real recipe is far below all of these limits.
MAX_RECIPE_BYTES = 32_768
_MAX_VALUES = 100_000
_MAX_DEPTH = 50


#: Use libyaml's loader if PyYAML was built with libyaml, because it is ten times as fast as
#: PyYAML's own loader.
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BaseLoader):  # type: ignore[misc]
    """PyYAML's safe loader with three changes: 3e-4 is read as a number, duplicate keys are
    rejected, and the number of keys is limited."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # With `<<`, the number of keys can grow exponentially, because a mapping can merge two
        # mappings that each merge two more.
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:
            raise yaml.MarkedYAMLError(problem="too many keys", problem_mark=node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key, _ in node.value:
            # The key `<<`, which merges another mapping, can occur several times.
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if isinstance(name, Hashable) and name in seen:
                lines = f"in lines {seen[name]} and {key.start_mark.line + 1}"
                raise yaml.MarkedYAMLError(problem=f"key '{name}' is given twice, {lines}")
            # The base class rejects keys that can't be hashed.
            if isinstance(name, Hashable):
                seen[name] = key.start_mark.line + 1
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


def _require_shallow(text: str) -> None:
    """Reject deeply nested YAML before it is loaded, because libyaml's loader is recursive and
    would crash the process.

    Raises:
        yaml.YAMLError: the nesting is too deep, or the text is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="too many levels")


def _require_small(values: object) -> None:
    """Reject YAML whose anchors expand to a huge number of values, or contain themselves.

    Raises:
        ValueError: there are too many values, or a number has more than 64 bits.
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
    """Parse YAML text.

    Raises:
        ValueError: the text is not valid YAML or has too many values. The message is a single line.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        _require_shallow(text)
        values = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        _require_small(values)
    # Bytes that are not UTF-8 and invalid dates such as 2001-99-99 raise ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # "<unicode string>" is PyYAML's name for text that was not read from a file.
        message = str(error).replace('in "<unicode string>", line', "in line")
        raise ValueError(" ".join(message.split())) from error
    return values


def yaml_text(values: object) -> str:
    """Format the values of a recipe or a model card as YAML text, keeping the order of keys."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text


# Functions that apply the DeepSpeed configuration file that a recipe names.


def with_deepspeed_file(recipe: Recipe, processes: int) -> Recipe:
    """Set open keys of the recipe to the values in the DeepSpeed file named by
    `distributed.deepspeed_config`.

    Applying this function to its own result has no effect, so a resumed run gets the same recipe.

    Args:
        recipe: the recipe as written by the user.
        processes: number of processes that share each optimizer step.

    Raises:
        ConfigError: the file can't be read, has unsupported keys, or contradicts the recipe. The
            message names each such key.
    """
    config = recipe.distributed
    if config.deepspeed_config is None:
        return recipe
    path = Path(config.deepspeed_config).expanduser().absolute()
    if config.engine not in ("auto", "deepspeed"):
        raise ConfigError(
            f"distributed.deepspeed_config {config.deepspeed_config} requires distributed.engine "
            f"deepspeed, but the engine is {config.engine}: set it to deepspeed, or remove "
            "deepspeed_config"
        )
    found = read_deepspeed_file(path)
    problems = []
    values: dict[str, dict[str, Any]] = {
        "distributed": {"engine": "deepspeed", "deepspeed_config": str(path)}
    }
    for key, (name, value) in found.recipe.items():
        section, _, own = key.partition(".")
        current = getattr(getattr(recipe, section), own)
        if not _is_open(recipe, section, own) and current != value:
            problems.append(f"{name} {value} and {key} {current}")
        values.setdefault(section, {})[own] = value
    if "gradient_accumulation_steps" in values.get("batch", {}) and not _is_open(
        recipe, "batch", "global_batch_tokens"
    ):
        problems.append("gradient_accumulation_steps and batch.global_batch_tokens")
    if problems:
        raise ConfigError(
            f"distributed.deepspeed_config {path} contradicts the recipe: {'; '.join(problems)}: "
            "make each pair equal, or remove one of the two"
        )
    return _with_whole_batch(_with(recipe, values, path), found, processes, path)


def _is_open(recipe: Recipe, section: str, key: str) -> bool:
    """Return True if the user has not set the key, or has set it to null or "auto"."""
    config = getattr(recipe, section)
    return key not in config.model_fields_set or getattr(config, key) in (None, "auto")


def _with(recipe: Recipe, values: dict[str, dict[str, Any]], path: Path) -> Recipe:
    """Return the recipe with new, validated values for some keys.

    Args:
        recipe: the recipe.
        values: new values, keyed by section and key.
        path: path of the DeepSpeed file, for messages.

    Raises:
        ConfigError: a value is invalid. The message contains `path` and the key.
    """
    sections = {}
    for section, changes in values.items():
        before = getattr(recipe, section)
        try:
            sections[section] = type(before).model_validate(
                {**before.model_dump(exclude_unset=True), **changes}
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([section, *(str(part) for part in first["loc"])])
            raise ConfigError(
                f"distributed.deepspeed_config {path}: {where}: {first['msg']} "
                f"(given: {first['input']!r})"
            ) from None
    return recipe.model_copy(update=sections)


def _with_whole_batch(recipe: Recipe, found: DeepSpeedFile, processes: int, path: Path) -> Recipe:
    """Return the recipe with its global batch size set to the DeepSpeed file's `train_batch_size`,
    which is a number of sequences.

    Raises:
        ConfigError: `train_batch_size` contradicts other keys in the recipe's `batch` section.
    """
    rows = found.train_batch_size
    batch = recipe.batch
    seq_len = recipe.data.seq_len
    if rows is None:
        return recipe
    start = f"distributed.deepspeed_config {path}: train_batch_size {rows}"
    if batch.global_batch_tokens is not None:
        if seq_len is None or batch.global_batch_tokens != rows * seq_len:
            raise ConfigError(
                f"{start} contradicts batch.global_batch_tokens {batch.global_batch_tokens}: "
                "remove one of them"
            )
        return recipe
    if not isinstance(batch.micro_batch_size, int):
        if seq_len is None:
            raise ConfigError(
                f"{start} also needs train_micro_batch_size_per_gpu, or data.seq_len in the "
                "recipe: set one of them"
            )
        return _with(recipe, {"batch": {"global_batch_tokens": rows * seq_len}}, path)
    steps, rest = divmod(rows, batch.micro_batch_size * processes)
    if rest or batch.gradient_accumulation_steps not in (None, steps):
        accumulated = batch.gradient_accumulation_steps
        raise ConfigError(
            f"{start} is not {batch.micro_batch_size} rows per micro-batch"
            f"{'' if accumulated is None else f' x {accumulated} accumulated'} x {processes} "
            f"process{'' if processes == 1 else 'es'}: change one of them"
        )
    return _with(recipe, {"batch": {"gradient_accumulation_steps": steps}}, path)
