"""Chosen settings with their reasons, and the choices that new models and fine-tuning share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firstlight.errors import ConfigError
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import MachineFacts, TextFacts


@dataclass(frozen=True)
class Choice:
    """A chosen setting.

    Attributes:
        key: key of the recipe, `section.key`.
        value: the chosen value.
        reason: text for the user with the reason; "" leaves the key out of the printed table, for
            the measured settings of `optim.new_model` that nobody needs to think about.
    """

    key: str
    value: Any
    reason: str

    def unless_given(self, fixed: Mapping[str, Any]) -> Choice:
        """This choice, or the user's value if `fixed` has one for its key."""
        return Choice(self.key, fixed[self.key], "given") if self.key in fixed else self


@dataclass(frozen=True)
class Choices:
    """All chosen settings of a run, and what to expect from it.

    Attributes:
        choices: the settings, in the order of a recipe.
        parameters: number of the model's parameters; without those of norms until the recipe is
            known.
        tokens, steps, seconds: expected length of the run.
        tokens_per_second: expected speed of training.
        epochs: passes over the training data.
        bits_per_byte: lowest and highest expected bits per byte of held-out text; None for
            fine-tuning and for other optimizers than Muon, for which there is no estimate.
        advice: a sentence about the gain of more text; "" if the text is enough.
    """

    choices: Sequence[Choice]
    parameters: int
    tokens: int
    steps: int
    seconds: float
    tokens_per_second: float
    epochs: float
    bits_per_byte: tuple[float, float] | None = None
    advice: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The chosen values as sections of a recipe: section -> key -> value."""
        found: dict[str, Any] = {}
        for choice in self.choices:
            section, _, key = choice.key.partition(".")
            found.setdefault(section, {})[key] = choice.value
        return found

    @property
    def keys(self) -> set[str]:
        """The chosen keys, as `section.key`."""
        return {choice.key for choice in self.choices}

    def with_value(self, key: str, value: Any) -> Choices:
        """The choices with another value for a key; unchanged if the key is not among them."""
        return replace(
            self,
            choices=[replace(one, value=value) if one.key == key else one for one in self.choices],
        )

    def __getitem__(self, key: str) -> Any:
        return next(choice.value for choice in self.choices if choice.key == key)


def _given_passes(fixed: Mapping[str, Any]) -> int:
    """The micro-batches of a step given by the user; 1 if their number is not given."""
    return fixed.get("batch.gradient_accumulation_steps") or 1


def given_unit(fixed: Mapping[str, Any], seq_len: int) -> int:
    """The tokens of which a step has a multiple: those of a sequence, times the given size and the
    given number of micro-batches."""
    rows = fixed.get("batch.micro_batch_size")
    return seq_len * (rows if isinstance(rows, int) else 1) * _given_passes(fixed)


def given_batch(fixed: Mapping[str, Any], seq_len: int) -> int | None:
    """The tokens of a step as the user gives them: as such, or by the size and the number of its
    micro-batches; None if neither is given.

    Args:
        fixed: values given by the user, by `section.key`.
        seq_len: tokens of a sequence.

    Raises:
        ConfigError: the given number is not that of whole sequences or of the given micro-batches.
    """
    tokens, unit = fixed.get("batch.global_batch_tokens"), given_unit(fixed, seq_len)
    is_whole = isinstance(fixed.get("batch.micro_batch_size"), int) and (
        "batch.gradient_accumulation_steps" in fixed
    )
    if tokens is None:
        return unit if is_whole else None
    if tokens % unit or (is_whole and tokens != unit):
        parts = "a sequence" if unit == seq_len else "the given micro-batches"
        take = unit if is_whole else -(-tokens // unit) * unit
        raise ConfigError(
            f"batch.global_batch_tokens {tokens} does not go with the {unit} tokens of {parts}: "
            f"take {take}"
        )
    return int(tokens)


def expected_range(
    bits: float, text: TextFacts, fixed: Mapping[str, Any]
) -> tuple[float, float] | None:
    """The lowest and the highest bits per byte where `bits` are expected; None if the user gives an
    optimizer other than the one whose losses are known.

    Args:
        bits: result of `facts.expected_bits`.
        text: facts about the text.
        fixed: values given by the user, by `section.key`.
    """
    key = "optimizer.name"
    if fixed.get(key, defaults.LAYOUT[key]) != defaults.LAYOUT[key]:
        return None
    low, high = defaults.UNUSUAL_RANGE if text.is_unusual else defaults.EXPECTED_RANGE
    # Text that repeats itself is easier than its n-grams tell, and xz finds the repetitions.
    lowest = min(low * bits, text.hardness.held_out_xz_bits_per_byte)
    # Guessing a byte costs 8 bits.
    return lowest, min(high * bits, 8.0)


def given_keys(section: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a section that the user gives, from `fixed` by `section.key`."""
    prefix = f"{section}."
    return {
        key.removeprefix(prefix): value for key, value in fixed.items() if key.startswith(prefix)
    }


def is_displaced(key: str, fixed: Mapping[str, Any]) -> bool:
    """True if the user gives another key that says the same as `key`, such as warmup_ratio for
    warmup_steps."""
    from firstlight.optim.schedule import ALTERNATIVES

    section, _, name = key.partition(".")
    groups = [keys for keys, _ in ALTERNATIVES if section == "schedule" and name in keys]
    return any(f"schedule.{one}" in fixed for keys in groups for one in keys if one != name)


@dataclass(frozen=True)
class RunFacts:
    """Length and speed of a run, and the choices that follow from them.

    Attributes:
        steps: number of optimizer steps.
        batch_tokens: tokens of a step.
        seq_len: tokens of a sequence.
        rate: speed of training in tokens per second.
    """

    steps: int
    batch_tokens: int
    seq_len: int
    rate: float

    @property
    def tokens(self) -> int:
        """Number of tokens that are trained on, repetitions included."""
        return self.steps * self.batch_tokens

    @property
    def seconds(self) -> float:
        """Expected seconds of the training loop, evaluations included."""
        return self.tokens / self.rate / (1 - defaults.EVALUATION_SHARE)

    def choices(
        self, items: Sequence[Choice], fixed: Mapping[str, Any], parameters: int, epochs: float
    ) -> Choices:
        """All settings of the run, with its expected length and speed.

        Args:
            items: a choice for each key.
            fixed: values given by the user, by `section.key`, which replace chosen ones.
            parameters: number of the model's parameters.
            epochs: passes over the training data.
        """
        chosen = [one.unless_given(fixed) for one in items if not is_displaced(one.key, fixed)]
        length = (self.tokens, self.steps, self.seconds)
        return Choices(chosen, parameters, *length, self.rate, epochs)

    def micro_batch(self, machine: MachineFacts, fixed: Mapping[str, Any]) -> Choice:
        """The micro-batch size in sequences, a divisor of the sequences of a step.

        Args:
            machine: the machine to train on.
            fixed: values given by the user, by `section.key`.
        """
        rows = self.batch_tokens // self.seq_len
        busy = max(defaults.MICRO_BATCH_TOKENS[machine.kind] // self.seq_len, 1)
        micro = min(rows, 1 << int(math.log2(busy)))
        if is_given := "batch.gradient_accumulation_steps" in fixed:
            micro = max(rows // _given_passes(fixed), 1)
        while rows % micro:
            micro -= 1
        reason = f"{micro * self.seq_len:,} tokens keep this device busy"
        if is_given:
            reason = "a step's sequences in the given number of passes"
        return Choice(
            "batch.micro_batch_size",
            fixed.get("batch.micro_batch_size") or micro,
            reason if micro < rows else "all of a step at once",
        )

    def warmup(self, parts: int, part: str) -> Choice:
        """The warm-up: at least ten steps, but not more than a tenth of a short run.

        Args:
            parts: steps of a long run divided by those of its warm-up.
            part: this part as a text, such as "a fiftieth".
        """
        steps = max(self.steps // parts, min(10, self.steps // 10))
        share = f"{part}, ten at least" if self.steps >= 100 else "a tenth of a short run"
        return Choice("schedule.warmup_steps", steps, f"of a rising rate: {share}")

    def other_choices(self, machine: MachineFacts, val_tokens: float) -> Iterator[Choice]:
        """The choices for compiling, evaluations and checkpoints.

        Args:
            machine: the machine to train on.
            val_tokens: tokens of the validation split.
        """
        is_long = self.tokens / self.rate >= defaults.COMPILE_SECONDS
        compiles = machine.kind == "cuda" and machine.compiles and is_long
        cost = "compiling would cost more than it gains"
        why = "half a minute of compiling is repaid" if compiles else cost
        yield Choice("efficiency.compile", compiles, why)
        count = defaults.EVALUATIONS
        every = max(math.ceil(self.steps / count), 1)
        yield Choice("evaluation.every_steps", every, f"{count} evaluations in the run")
        # The other third of the evaluations' time is for sample texts.
        share = defaults.EVALUATION_SHARE * 2 / 3
        tokens = share * self.tokens * defaults.EVALUATION_SPEED / count
        rows = max(int(tokens / self.seq_len), 16)
        if rows * self.seq_len >= val_tokens:
            yield Choice("evaluation.max_rows", 0, "all that is held out")
        else:
            yield Choice("evaluation.max_rows", rows, f"evaluations take {share:.0%} of the run")
        yield Choice("checkpoint.every_steps", every, "with each evaluation")
