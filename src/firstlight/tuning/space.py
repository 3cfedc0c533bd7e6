"""Define the search space of `firstlight tune`, and create the recipes of trials.

A trial is a shortened run of the recipe. The schedule and all other values that count steps are
scaled to the length of the trial. The learning rate therefore decays to the same value as at the
end of the full run. The search space contains values for the full run, not for a trial. All trials
process the same number of tokens.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from firstlight.console import compact
from firstlight.errors import ConfigError, nearest
from firstlight.optim.schedule import ALTERNATIVES
from firstlight.recipe import Recipe, known_keys, parse_recipe, recipe_fields
from firstlight.recipe.load import changed_recipe, parse_yaml

#: Number of evaluations in a trial. The last evaluation is at the end of the trial.
POINTS = 6

#: Recipe sections whose keys can be searched, because they affect the result of training.
_SECTIONS = (
    "model",
    "init",
    "batch",
    "schedule",
    "optimizer",
    "loss",
    "efficiency",
    "lora",
    "preference",
)

#: Keys that set the length of a run. They can't be searched, because longer runs would always give
#: better results.
_LENGTHS = (
    "schedule.max_steps",
    "schedule.epochs",
    "schedule.max_minutes",
    "schedule.resume",
)

#: Keys that count steps or tokens of the full run. They are scaled to the length of a trial.
_SCALED = (
    "schedule.warmup_steps",
    "schedule.warmup_tokens",
    "schedule.decay_steps",
    "schedule.decay_tokens",
    "schedule.cooldown_steps",
    "batch.ramp_steps",
    "optimizer.muon_momentum_warmup_steps",
)

#: The default ranges of learning rates and weight decay extend from the recipe's value divided by
#: this factor to the recipe's value multiplied by this factor.
_FACTOR = 5.0

#: Default range of schedule.warmup_ratio.
_WARMUP = (0.005, 0.2)

#: Value of a key in a trial. It is either a number from a range or one of the listed choices as
#: YAML text.
Value = float | int | str


@dataclass(frozen=True)
class SearchKey:
    """A recipe key and its search space, which is a range or a list of values.

    Attributes:
        key: `section.key`.
        choices: the values as YAML text; empty for a range.
        low: lower end of the range, inclusive.
        high: upper end of the range, inclusive.
        log: True to sample the range on a logarithmic scale.
        whole: True to sample only integers from the range.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def in_words(self) -> str:
        """The key and its search space in the format of --search."""
        if self.choices:
            return f"{self.key}={','.join(self.choices)}"
        return f"{self.key}={self.low:g}..{self.high:g}{':log' if self.log else ''}"

    def rounded(self, value: Value) -> Value:
        """Round a sampled number to three significant digits for readability, and clamp it to the
        range. Return strings and integers unchanged."""
        if isinstance(value, str) or self.whole:
            return value
        return min(max(float(f"{value:.3g}"), self.low), self.high)


def parse_search(text: str) -> SearchKey:
    """Parse `KEY=LOW..HIGH`, `KEY=LOW..HIGH:log` or `KEY=VALUE,VALUE,...`.

    Raises:
        ConfigError: the key is unknown or can't be searched, or its values are invalid.
    """
    key, equals, values = (part.strip() for part in text.partition("="))
    section = key.partition(".")[0]
    if not equals or not values:
        raise ConfigError(
            f"--search '{text}' is not KEY=LOW..HIGH[:log] or KEY=VALUE,VALUE,...: use, for "
            "example, optimizer.learning_rate=1e-4..1e-2:log"
        )
    if key not in known_keys():
        raise ConfigError(f"--search {key}: there is no such key{nearest(key, known_keys())}")
    if section not in _SECTIONS:
        raise ConfigError(
            f"--search {key}: keys in section {section} can't be searched: choose keys in "
            f"{', '.join(_SECTIONS)}"
        )
    if key in _LENGTHS:
        raise ConfigError(
            f"--search {key}: the length of a run can't be searched, since all trials see the "
            "same number of tokens: set --trial-steps"
        )
    match = re.fullmatch(r"(\S+?)\.\.([^\s:]+)(:log)?", values)
    if match is None:
        return SearchKey(key, _choices(key, values))
    return _range(key, match[1], match[2], log=match[3] is not None)


def _choices(key: str, values: str) -> tuple[str, ...]:
    # A comma inside brackets belongs to the value, as in [0.9,0.95].
    choices = tuple(part.strip() for part in re.split(r",(?![^\[]*\])", values))
    if len(set(choices)) < 2 or "" in choices:
        raise ConfigError(
            f"--search {key}={values}: specify a range, or at least two different values"
        )
    try:
        for choice in choices:
            parse_yaml(choice)
    except ValueError as error:
        raise ConfigError(f"--search {key}: {error}") from None
    return tuple(dict.fromkeys(choices))


def _range(key: str, low: str, high: str, *, log: bool) -> SearchKey:
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = math.nan, math.nan
    where = f"--search {key}={low}..{high}"
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise ConfigError(f"{where}: a range must be two numbers, the smaller one first")
    if log and ends[0] <= 0:
        raise ConfigError(f"{where}:log must begin above 0: use a small number instead of {low}")
    kinds = _kinds_of(key)
    if not kinds & {int, float}:
        raise ConfigError(f"{where}: {key} is not a number: list its values, {key}=VALUE,VALUE,...")
    whole = float not in kinds
    if whole and not all(end.is_integer() for end in ends):
        raise ConfigError(
            f"{where}: {key} is an integer, so the ends of its range must be integers"
        )
    return SearchKey(key, (), *ends, log, whole)


def _kinds_of(key: str) -> set[Any]:
    """Return the types of values that the schema allows for a key."""
    section, _, name = key.partition(".")
    fields = [
        kind.model_fields[own] for of, kind, own in recipe_fields() if (of, own) == (section, name)
    ]
    return {kind for field in fields for kind in _plain(field.annotation)}


def _plain(annotation: Any) -> set[Any]:
    if typing.get_origin(annotation) in (Union, types.UnionType, Annotated):
        return {kind for part in typing.get_args(annotation) for kind in _plain(part)}
    return {Literal} if typing.get_origin(annotation) is Literal else {annotation}


def default_search(recipe: Recipe) -> list[SearchKey]:
    """Return the default search space, which contains the learning rates, the weight decay and the
    warm-up. The ranges of the learning rates and the weight decay are centred on the recipe's
    values.

    The batch size is not included, because short trials favour smaller batches than long runs.
    """
    own = recipe.optimizer
    values = {"learning_rate": own.learning_rate, "weight_decay": own.weight_decay}
    if own.name == "muon":
        values["muon_learning_rate"] = own.muon_learning_rate or own.learning_rate
    around = [
        SearchKey(f"optimizer.{key}", (), value / _FACTOR, value * _FACTOR, log=True)
        for key, value in values.items()
        if value
    ]
    return [*around, SearchKey("schedule.warmup_ratio", (), *_WARMUP, log=True)]


def own_values(keys: Sequence[SearchKey], recipe: Recipe, warmup_ratio: float) -> dict[str, Value]:
    """Return the values of the searched keys in the recipe. Keys that the recipe does not set and
    values outside the search space are omitted.

    Args:
        keys: the searched keys.
        recipe: the recipe.
        warmup_ratio: warm-up of the full run as a fraction of the run's steps.
    """
    found: dict[str, Value] = {}
    for one in keys:
        section, _, name = one.key.partition(".")
        value = getattr(getattr(recipe, section), name, None)
        if one.key == "schedule.warmup_ratio" and value is None:
            value = warmup_ratio
        if one.key == "optimizer.muon_learning_rate" and value is None:
            value = recipe.optimizer.learning_rate
        texts = [text for text in one.choices if parse_yaml(text) == value]
        if texts:
            found[one.key] = texts[0]
        elif isinstance(value, int | float) and not one.choices and one.low <= value <= one.high:
            found[one.key] = one.rounded(value)
    return found


def with_values(recipe: Recipe, values: Mapping[str, Value], seq_len: int) -> Recipe:
    """Return the recipe of the full run with the values of a trial.

    A searched key replaces alternative keys in the recipe. For example, `warmup_ratio` replaces
    `warmup_steps`. If the batch size changes, the number of steps is adjusted so that the total
    number of tokens stays the same.

    Args:
        recipe: the recipe as written by the user.
        values: values, keyed by `section.key`; {} to keep the recipe's values.
        seq_len: number of tokens per sequence.

    Raises:
        ConfigError: the recipe with these values is invalid.
    """
    content = recipe.model_dump(mode="json", exclude_unset=True)
    for key, value in values.items():
        section, _, name = key.partition(".")
        others = {one for group, _ in ALTERNATIVES if name in group for one in group}
        if section == "schedule" and section in content:
            kept = {one: own for one, own in content[section].items() if one not in others}
            content[section] = kept
        parsed = parse_yaml(value) if isinstance(value, str) else value
        content = changed_recipe(content, {key: parsed})
    found = parse_recipe(content, f"the recipe with {describe(values)}")
    steps, tokens = found.schedule.max_steps, step_tokens(found, seq_len)
    if steps is None or tokens == step_tokens(recipe, seq_len):
        return found
    steps = max(round(steps * step_tokens(recipe, seq_len) / tokens), 1)
    return parse_recipe(changed_recipe(content, {"schedule.max_steps": steps}))


def require_keys(keys: Sequence[SearchKey], recipe: Recipe) -> None:
    """Check that each value in the search space is valid together with the remaining values of the
    recipe.

    Raises:
        ConfigError: a key is repeated, or the recipe is invalid with one of the values.
    """
    names = [one.key for one in keys]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--search {twice[0]} is repeated: keep only one")
    seq_len = recipe.data.seq_len or 1
    for one in keys:
        for value in one.choices or (one.low, one.high):
            own = value if isinstance(value, str) else int(value) if one.whole else value
            with_values(recipe, {one.key: own}, seq_len)


def describe(values: Mapping[str, Value]) -> str:
    """Format values as a string, such as "optimizer.learning_rate 0.003". Return "its own values"
    if the mapping is empty."""
    parts = (f"{key} {show_value(value)}" for key, value in values.items())
    return ", ".join(parts) or "its own values"


def show_value(value: Value) -> str:
    """Format a value as a short string."""
    return value if isinstance(value, str) else compact(value)


def step_tokens(recipe: Recipe, seq_len: int) -> int:
    """Return the number of tokens per optimizer step in a run with one process.

    Raises:
        ConfigError: the global batch size is not a multiple of the micro-batch size.
    """
    if recipe.batch.global_batch_tokens is not None:
        return recipe.batch.global_batch_tokens
    if recipe.batch.micro_batch_size == "auto":
        return recipe.batch.global_rows(seq_len) * seq_len
    return recipe.batch.rows * recipe.batch.accumulation(seq_len) * seq_len


def trial_recipe(
    recipe: Recipe, values: Mapping[str, Value], trial_steps: int, full_steps: int, seq_len: int
) -> tuple[dict[str, Any], int]:
    """Create the recipe of a trial.

    Args:
        recipe: the recipe as written by the user.
        values: values of the searched keys, keyed by `section.key`; see `with_values`.
        trial_steps: number of steps in a trial with the recipe's batch size.
        full_steps: number of steps in the full run with the recipe's batch size.
        seq_len: number of tokens per sequence.

    Returns:
        The values of the trial's recipe without `run.dir`, and the number of steps of the trial.

    Raises:
        ConfigError: the recipe with these values is invalid.
    """
    found = with_values(recipe, values, seq_len)
    ratio = step_tokens(recipe, seq_len) / step_tokens(found, seq_len)
    steps = max(round(trial_steps * ratio), 1)
    content = found.model_dump(mode="json", exclude_unset=True)
    changes: dict[str, Any] = {"schedule.max_steps": steps, "schedule.epochs": None}
    for key in _SCALED:
        section, _, name = key.partition(".")
        if value := getattr(getattr(found, section), name):
            changes[key] = max(round(value * trial_steps / full_steps), 1)
    evaluation = {"every_steps": -(-steps // POINTS), "max_rows": found.evaluation.max_rows}
    changes |= {
        "evaluation": {**evaluation, "sample_prompts": []},
        # Checkpoints are not saved, because trials are never resumed.
        "checkpoint": {"every_steps": 0, "keep_best": 0},
        "run.max_minutes": None,
        "run.trackers": [],
    }
    content = changed_recipe(content, changes)
    parse_recipe(content, f"the trial with {describe(values)}")
    return content, steps
