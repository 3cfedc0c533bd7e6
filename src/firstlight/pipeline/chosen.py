"""Settings of a run with their reasons, and the choices that new models and fine-tuning share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firstlight.pipeline import settings
from firstlight.pipeline.facts import MachineFacts


@dataclass(frozen=True)
class Choice:
    """A key of the recipe, its value, and the reason for it."""

    key: str
    value: Any
    reason: str

    def unless_given(self, fixed: Mapping[str, Any]) -> Choice:
        """This choice, or the value that a person has given for its key."""
        return Choice(self.key, fixed[self.key], "given") if self.key in fixed else self


@dataclass(frozen=True)
class Choices:
    """A whole run with the chosen settings.

    Attributes:
        choices: every key, in the order of a recipe.
        parameters: number of the model's parameters.
        tokens, steps, seconds: length of the run, expected.
        tokens_per_second: expected rate of training.
        epochs: passes over the text.
        bits_per_byte: least and most that are expected on held-out text; None if the run starts
            from a model, for which there is no expectation.
        advice: a sentence on the gain of more text; "" where the text is enough.
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
        """The values of the recipe, by section."""
        found: dict[str, Any] = {}
        for choice in self.choices:
            section, _, key = choice.key.partition(".")
            found.setdefault(section, {})[key] = choice.value
        return found

    @property
    def keys(self) -> set[str]:
        """The keys that were chosen."""
        return {choice.key for choice in self.choices}

    def with_value(self, key: str, value: Any) -> Choices:
        """The choices with another value of a key, if they have it."""
        return replace(
            self,
            choices=[replace(one, value=value) if one.key == key else one for one in self.choices],
        )

    def __getitem__(self, key: str) -> Any:
        return next(choice.value for choice in self.choices if choice.key == key)


def given_rows(fixed: Mapping[str, Any]) -> int:
    """Sequences of the micro-batch that a person has given; 1 if it is not decided yet."""
    rows = fixed.get("batch.micro_batch_size")
    return rows if isinstance(rows, int) else 1


@dataclass(frozen=True)
class RunFacts:
    """Length and speed of a run, and the choices that follow from them.

    Attributes:
        steps: number of steps of its training.
        batch_tokens: tokens of a step.
        seq_len: tokens of a sequence.
        rate: tokens a second.
    """

    steps: int
    batch_tokens: int
    seq_len: int
    rate: float

    @property
    def tokens(self) -> int:
        """Tokens of the training."""
        return self.steps * self.batch_tokens

    def choices(
        self, items: Sequence[Choice], fixed: Mapping[str, Any], parameters: int, epochs: float
    ) -> Choices:
        """The whole run.

        Args:
            items: a choice for each key.
            fixed: values of keys that a person has given, which replace those chosen.
            parameters: number of the model's parameters.
            epochs: passes over the text.
        """
        chosen = [one.unless_given(fixed) for one in items]
        seconds = self.tokens / self.rate / (1 - settings.EVALUATION_SHARE)
        return Choices(chosen, parameters, self.tokens, self.steps, seconds, self.rate, epochs)

    def micro_batch(self, machine: MachineFacts, fixed: Mapping[str, Any]) -> Choice:
        """The sequences of a forward pass, a divisor of those of a step.

        Args:
            machine: the machine to train on.
            fixed: values of keys that a person has given.
        """
        rows = self.batch_tokens // self.seq_len
        busy = max(settings.MICRO_BATCH_TOKENS[machine.kind] // self.seq_len, 1)
        micro = min(rows, 1 << int(math.log2(busy)))
        while rows % micro:
            micro -= 1
        reason = f"{micro * self.seq_len:,} tokens keep this device busy"
        return Choice(
            "batch.micro_batch_size",
            fixed.get("batch.micro_batch_size") or micro,
            reason if micro < rows else "all of a step at once",
        )

    def other_choices(self, machine: MachineFacts, val_tokens: float) -> Iterator[Choice]:
        """Compiling, evaluations and checkpoints.

        Args:
            machine: the machine to train on.
            val_tokens: tokens of the validation split.
        """
        is_long = self.tokens / self.rate >= settings.COMPILE_SECONDS
        compiles = machine.kind == "cuda" and machine.compiles and is_long
        cost = "compiling would cost more than it gains"
        why = "a minute of compiling is repaid" if compiles else cost
        yield Choice("efficiency.compile", compiles, why)
        count = settings.EVALUATIONS
        every = max(math.ceil(self.steps / count), 1)
        yield Choice("evaluation.every_steps", every, f"{count} evaluations in the run")
        # The rest is for the sample texts.
        share = settings.EVALUATION_SHARE * 2 / 3
        tokens = share * self.tokens * settings.EVALUATION_SPEED / count
        rows = max(int(tokens / self.seq_len), 16)
        if rows * self.seq_len >= val_tokens:
            yield Choice("evaluation.max_rows", 0, "all that is held out")
        else:
            yield Choice("evaluation.max_rows", rows, f"evaluations take {share:.0%} of the run")
        yield Choice("checkpoint.every_steps", every, "with each evaluation")
