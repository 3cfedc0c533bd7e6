"""The settings and the printed plan that runs of new models and of fine-tuning share."""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from firstlight.console import plain, rounded, time_text
from firstlight.errors import ConfigError
from firstlight.hardware.compiling import NOT_COMPILED, Compiling
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Length, MachineFacts, TextFacts

if TYPE_CHECKING:
    from firstlight.from_texts.request import Request
    from firstlight.planner.plan.machine import Machine


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
        compile_gain: the part of `tokens_per_second` that torch.compile is expected to gain, as a
            multiple; 1 for a run that is not compiled.
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
    compile_gain: float = 1.0

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


def compile_ways(
    machine: MachineFacts, fixed: Mapping[str, Any], size: tuple[int, int]
) -> list[Compiling]:
    """The ways to compile a model, or not to, that the user leaves open.

    Args:
        machine: the machine to train on.
        fixed: values given by the user, by `section.key`.
        size: hidden size and number of layers of the model.
    """
    # Imported only here, because they import torch: the first line of `train TEXTS` comes before.
    from firstlight.methods import EfficiencyConfig
    from firstlight.parallel.engine import DistributedConfig
    from firstlight.recipe.resolve import open_ways

    return open_ways(
        EfficiencyConfig.model_validate(given_keys("efficiency", fixed)),
        DistributedConfig.model_validate(given_keys("distributed", fixed)),
        machine.compiler,
        size,
        is_busy=machine.is_busy,
    )


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
        way: the way in which the run is compiled.
    """

    steps: int
    batch_tokens: int
    seq_len: int
    rate: float
    way: Compiling = NOT_COMPILED

    @property
    def tokens(self) -> int:
        """Number of tokens that are trained on, repetitions included."""
        return self.steps * self.batch_tokens

    @property
    def seconds(self) -> float:
        """Expected seconds of the training loop, compiling and evaluations included."""
        return self.tokens / self.rate / (1 - defaults.EVALUATION_SHARE) + self.way.seconds

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
        return Choices(
            chosen,
            parameters,
            self.tokens,
            self.steps,
            self.seconds,
            tokens_per_second=self.rate,
            epochs=epochs,
            compile_gain=self.way.gain,
        )

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
        way, why = self.way, "compiling would cost more than it gains"
        if machine.compiler is None:
            why = "torch.compile does not work on this device, or lacks a compiler"
        elif way.compiles:
            why = f"{way.gain:.2f} times the speed repays about {way.seconds:.0f} s of compiling"
        yield Choice("efficiency.compile", way.compiles, why)
        part = "a layer and the loss alone, which takes less time" if way.regional else ""
        yield Choice("efficiency.compile_regional", way.regional, part)
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


#: Lengths in seconds that are offered when the user is asked.
OFFERED_SECONDS = (180.0, 600.0, 3600.0)
#: A row of the printed table: name, value and reason.
Row = tuple[str, str, str]

#: Largest number of characters of a value in the table.
_MOST_VALUE = 24


@dataclass(frozen=True, kw_only=True)
class RunPlan(ABC):
    """The plan of a run: of a new model (`TextPlan`) or of fine-tuning (`TuningPlan`).

    Attributes:
        request: inputs, length and overrides of the run.
        machine: the machine to train on.
        speed: its speed.
        choices: all settings.
        memory_bytes: expected memory of the run; None if unknown or not computed yet.
    """

    request: Request
    machine: Machine
    speed: MachineFacts
    choices: Choices
    memory_bytes: float | None = None

    @property
    @abstractmethod
    def data_name(self) -> str:
        """The name of the training data in messages, such as "the text"."""

    @property
    @abstractmethod
    def held_out_tokens(self) -> float:
        """Tokens of the validation split."""

    @property
    @abstractmethod
    def recorded(self) -> dict[str, Any]:
        """Facts from which the settings follow, for `record`."""

    @abstractmethod
    def choose_again(self, length: Length) -> Self:
        """The plan for another length of the run."""

    @abstractmethod
    def with_memory(self) -> Self:
        """The plan with expected memory and counted parameters, which take a second or two."""

    @abstractmethod
    def first_rows(self) -> list[Row]:
        """The rows of the table above those of the choices: name, value and reason."""

    def expectations(self) -> Iterator[str]:
        """Lines for the user with the expected result of the run."""
        yield from ()

    def lines(self) -> Iterator[str]:
        """The plan as text for the user: model, expectations, and a table of all choices."""
        yield from run_lines(self.choices, self.speed, self.data_name)
        yield from self.expectations()
        if self.memory_bytes is not None:
            yield (
                f"expected memory: {self.memory_bytes / 2**30:.2f} GiB for tensors, of "
                f"{self.speed.usable_bytes / 2**30:.1f} GiB"
            )
        if self.choices.advice:
            yield f"more text: {self.choices.advice}"
        yield ""
        rows = self.first_rows()
        if given := self.request.val_inputs:
            reason = f"of {shlex.join(given)}, instead of a part of the texts"
            rows.append(("validation", f"{rounded(self.held_out_tokens)} tokens", reason))
        yield from _table_lines(self, rows)

    def record(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {
            "machine": self.speed.name,
            **self.recorded,
            "memory_bytes": self.memory_bytes,
            **asdict(self.choices),
        }


def run_lines(choices: Choices, speed: MachineFacts, data: str) -> Iterator[str]:
    """Lines for the user with the machine's speed and the length of the run.

    Args:
        choices: all settings.
        speed: the machine.
        data: name of the training data, such as "the text".
    """
    origin = speed.origin
    if choices.compile_gain > 1:
        origin += f", x {choices.compile_gain:.2f} expected by compiling"
    yield (
        f"{speed.name} ({origin}): {choices.tokens_per_second:,.0f} tokens/s for "
        f"{rounded(choices.parameters)} parameters"
    )
    if speed.is_busy:
        yield "this machine is busy: expect less, or stop other programs"
    yield (
        f"the run: about {rounded(choices.tokens)} tokens in {choices.steps:,} steps, "
        f"{choices.epochs:.2g} times {data}, {time_text(choices.seconds)} of training"
    )
    if _ends_early(choices):
        whole = time_text(60 * choices["schedule.max_minutes"])
        yield (
            f"the run ends after about {time_text(choices.seconds)} of its {whole}, when it has "
            f"read {data} {choices.epochs:.2g} times: more passes (--schedule.epochs) would help "
            "little, or harm"
        )


def _ends_early(choices: Choices) -> bool:
    """True if the run ends by its passes over the data, clearly before its time."""
    if "schedule.max_minutes" not in choices.keys:
        return False
    minutes: float = choices["schedule.max_minutes"]
    return choices.seconds < defaults.EARLY * 60 * minutes


def _table_lines(plan: RunPlan, first: Sequence[Row]) -> Iterator[str]:
    """The lines of a table with the length of the run, the precision, all choices that have a
    reason, and the other given keys.

    Args:
        plan: the plan of the run.
        first: rows above all others.
    """
    choices, machine = plan.choices, plan.machine
    steps = "as given"
    if "schedule.max_minutes" in choices.keys:
        steps = "for which there is time; measured steps decide them"
        if _ends_early(choices):
            steps = "of the passes over what is trained on, which end before the time"
    fixed = plan.request.fixed
    others = {"efficiency.precision": machine.precision} | fixed
    for key in (*choices.keys, "run.dir", *(f"data.{row[0]}" for row in first)):
        others.pop(key, None)
    precision = others.pop("efficiency.precision")
    shown = [
        *first,
        ("steps", f"{choices.steps:,}", steps),
        ("epochs", f"{choices.epochs:.2g}", "passes over what is trained on"),
        ("precision", str(precision), "of matrix products"),
        *((c.key, plain(c.value), c.reason) for c in choices.choices if c.reason),
        *((key, plain(value), "given") for key, value in others.items()),
    ]
    shown = [(key, _shortened(value), reason) for key, value, reason in shown]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    for key, value, reason in shown:
        yield f"{key:<{widths[0]}}  {value:>{widths[1]}}  {reason}"


def _shortened(value: str) -> str:
    """A value for the table: on one line, and cut if it is long."""
    line = " ".join(value.split())
    return line if len(line) <= _MOST_VALUE else line[: _MOST_VALUE - 3] + "..."


def offers(plan: RunPlan) -> Iterator[tuple[float, Choices]]:
    """Some lengths of a run in seconds (`OFFERED_SECONDS`), each with the settings for it."""
    for seconds in OFFERED_SECONDS:
        request = replace(plan.request, seconds=seconds)
        yield seconds, plan.choose_again(request.training_length()).choices
