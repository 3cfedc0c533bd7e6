"""Combines a recipe with the DeepSpeed configuration file that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from firstlight.errors import ConfigError
from firstlight.parallel.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from firstlight.recipe.schema import Recipe


def with_deepspeed_file(recipe: Recipe, processes: int) -> Recipe:
    """The recipe, with values from the file `distributed.deepspeed_config` for the keys that the
    recipe leaves open.

    Calling it again with its result changes nothing, so that a resumed run gets the same recipe.

    Args:
        recipe: the recipe as the user wrote it.
        processes: number of processes that share each optimizer step.

    Raises:
        ConfigError: the file can't be read or has unsupported keys, or it contradicts the recipe;
            the message names each key.
    """
    config = recipe.distributed
    if config.deepspeed_config is None:
        return recipe
    path = Path(config.deepspeed_config).expanduser().absolute()
    if config.engine not in ("auto", "deepspeed"):
        raise ConfigError(
            f"distributed.deepspeed_config {config.deepspeed_config} is for distributed.engine "
            f"deepspeed, and the engine is {config.engine}: set it to deepspeed, or leave "
            "deepspeed_config out"
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
            "leave one of each out, or make them equal"
        )
    return _with_whole_batch(_with(recipe, values, path), found, processes, path)


def _is_open(recipe: Recipe, section: str, key: str) -> bool:
    """True if the user has not set the key, or has set it to null or "auto"."""
    config = getattr(recipe, section)
    return key not in config.model_fields_set or getattr(config, key) in (None, "auto")


def _with(recipe: Recipe, values: dict[str, dict[str, Any]], path: Path) -> Recipe:
    """The recipe with new values for some keys (section -> key -> value), validated.

    Raises:
        ConfigError: a value is invalid; the message names the file `path` and the key.
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
    """The recipe with a global batch of the file's `train_batch_size` sequences.

    Raises:
        ConfigError: `train_batch_size` contradicts the recipe's other keys of the batch.
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
                f"{start} contradicts batch.global_batch_tokens {batch.global_batch_tokens}: leave "
                "one of them out"
            )
        return recipe
    if not isinstance(batch.micro_batch_size, int):
        if seq_len is None:
            raise ConfigError(
                f"{start} needs train_micro_batch_size_per_gpu beside it, or data.seq_len in the "
                "recipe: set one of them"
            )
        return _with(recipe, {"batch": {"global_batch_tokens": rows * seq_len}}, path)
    steps, rest = divmod(rows, batch.micro_batch_size * processes)
    if rest or batch.gradient_accumulation_steps not in (None, steps):
        accumulated = batch.gradient_accumulation_steps
        raise ConfigError(
            f"{start} is not {batch.micro_batch_size} rows a micro-batch"
            f"{'' if accumulated is None else f' x {accumulated} accumulated'} x {processes} "
            f"process{'' if processes == 1 else 'es'}: change one of them"
        )
    return _with(recipe, {"batch": {"gradient_accumulation_steps": steps}}, path)
