"""Store the chosen settings of a run and format the printed plan, for training a new model and for
fine-tuning."""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from firstlight.console import counted, gib, plain, rounded, shortened, time_text
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
        key: recipe key, `section.key`.
        value: chosen value.
        reason: reason for the value, shown to the user. Keys whose reason is "" are omitted from
            the printed table. These are settings from `optim.new_model`, which users rarely change.
    """

    key: str
    value: Any
    reason: str

    def unless_given(self, fixed: Mapping[str, Any]) -> Choice:
        """Return this choice. If `fixed` contains the key, return a choice with the user's
        value."""
        return Choice(self.key, fixed[self.key], "given") if self.key in fixed else self


@dataclass(frozen=True)
class Choices:
    """All chosen settings of a run, and its expected results.

    Attributes:
        choices: settings, in the order of a recipe.
        parameters: number of the model's parameters. Until the recipe is known, the number does not
            include the parameters of norms.
        tokens, steps, seconds: expected length of the run.
        tokens_per_second: expected training speed.
        epochs: number of passes over the training data.
        bits_per_byte: lowest and highest expected bits per byte on held-out text. None for
            fine-tuning and for optimizers other than Muon, for which there is no estimate.
        advice: sentence about the benefit of more text; "" if the text is long enough.
        compile_gain: expected speed-up from torch.compile, which is included in
            `tokens_per_second`; 1 for a run that is not compiled.
        samples: number of sample texts per evaluation.
        least_seconds: minimum duration in seconds of a training loop with a time budget.
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
    samples: int = defaults.PARTS[0][1]
    least_seconds: float = 0.0

    @property
    def values(self) -> dict[str, Any]:
        """Return the chosen values as recipe sections: section -> key -> value."""
        found: dict[str, Any] = {}
        for choice in self.choices:
            section, _, key = choice.key.partition(".")
            found.setdefault(section, {})[key] = choice.value
        return found

    @property
    def keys(self) -> set[str]:
        """Return the chosen keys, as `section.key`."""
        return {choice.key for choice in self.choices}

    def with_value(self, key: str, value: Any) -> Choices:
        """Return the choices with a different value for a key. If the key is not among the chosen
        keys, return the choices unchanged."""
        return replace(
            self,
            choices=[replace(one, value=value) if one.key == key else one for one in self.choices],
        )

    def __getitem__(self, key: str) -> Any:
        return next(choice.value for choice in self.choices if choice.key == key)


def _given_passes(fixed: Mapping[str, Any]) -> int:
    """Return the number of micro-batches per step set by the user, or 1 if it is not set."""
    return fixed.get("batch.gradient_accumulation_steps") or 1


def given_unit(fixed: Mapping[str, Any], seq_len: int) -> int:
    """Return the smallest valid number of tokens per step. All other valid numbers are multiples of
    it. It is the sequence length, multiplied by the micro-batch size and the number of
    micro-batches if the user has set them."""
    rows = fixed.get("batch.micro_batch_size")
    return seq_len * (rows if isinstance(rows, int) else 1) * _given_passes(fixed)


def given_batch(fixed: Mapping[str, Any], seq_len: int) -> int | None:
    """Return the number of tokens per step that the user has set, either directly or through the
    size and number of micro-batches. Return None if the user has set neither.

    Args:
        fixed: values given by the user, keyed by `section.key`.
        seq_len: sequence length in tokens.

    Raises:
        ConfigError: the number of tokens is not a multiple of the sequence length, or it does not
            match the size and number of micro-batches.
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
            f"batch.global_batch_tokens {tokens} does not match the {unit} tokens of "
            f"{parts}: set it to {take}"
        )
    return int(tokens)


def expected_range(
    bits: float, text: TextFacts, fixed: Mapping[str, Any]
) -> tuple[float, float] | None:
    """Return the lowest and highest expected bits per byte. Return None if the user sets an
    optimizer for which there is no estimate.

    Args:
        bits: result of `law.expected_bits`.
        text: facts about the text.
        fixed: values given by the user, keyed by `section.key`.
    """
    key = "optimizer.name"
    if fixed.get(key, defaults.LAYOUT[key]) != defaults.LAYOUT[key]:
        return None
    low, high = defaults.UNUSUAL_RANGE if text.is_unusual else defaults.EXPECTED_RANGE
    # Repetitive text is easier to predict than its n-grams suggest. Because xz finds repetitions,
    # the lowest expected value never exceeds the bits per byte of the text compressed with xz.
    lowest = min(low * bits, text.hardness.held_out_xz_bits_per_byte)
    # A uniform guess among the 256 byte values costs 8 bits.
    return lowest, min(high * bits, 8.0)


def given_keys(section: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's values for the keys of a section. `fixed` is keyed by `section.key`."""
    prefix = f"{section}."
    return {
        key.removeprefix(prefix): value for key, value in fixed.items() if key.startswith(prefix)
    }


def compile_ways(
    machine: MachineFacts, fixed: Mapping[str, Any], size: tuple[int, int]
) -> list[Compiling]:
    """Return the compilation modes that the user's settings allow, including no compilation.

    Args:
        machine: machine to train on.
        fixed: values given by the user, keyed by `section.key`.
        size: (hidden size, number of layers) of the model.
    """
    # Imported here, because these modules import torch, and `train TEXTS` must print its first line
    # before torch is loaded.
    from firstlight.methods import EfficiencyConfig
    from firstlight.parallel.engine import DistributedConfig
    from firstlight.recipe.resolve import open_compile_modes

    return open_compile_modes(
        EfficiencyConfig.model_validate(given_keys("efficiency", fixed)),
        DistributedConfig.model_validate(given_keys("distributed", fixed)),
        machine.compiler,
        size,
        is_busy=machine.is_busy,
    )


def is_displaced(key: str, fixed: Mapping[str, Any]) -> bool:
    """Return True if the user sets an alternative to `key`, such as warmup_ratio instead of
    warmup_steps. Also return True if the user sets a kind of schedule that does not use `key`."""
    from firstlight.optim.schedule import ALTERNATIVES, KINDS_OF_KEYS

    section, _, name = key.partition(".")
    kind = fixed.get("schedule.kind", "wsd")
    if section == "schedule" and kind not in KINDS_OF_KEYS.get(name, (kind,)):
        return True
    groups = [keys for keys, _ in ALTERNATIVES if section == "schedule" and name in keys]
    return any(f"schedule.{one}" in fixed for keys in groups for one in keys if one != name)


#: Bytes per trained parameter in a checkpoint, which contains the weight and two moments in fp32.
STATE_BYTES = 12


@dataclass(frozen=True)
class Parts:
    """The evaluations, sample texts and checkpoints of a run.

    Attributes:
        evaluations: number of evaluations, not counting the one before the first step.
        rows: number of rows per evaluation.
        samples: number of sample texts per evaluation.
        sample_tokens: number of tokens per sample text.
        saves: number of checkpoints.
        save_interval: maximum seconds between two checkpoints; None without a time budget.
        loss_seconds, sample_seconds, save_seconds: expected total seconds of the loss evaluations,
            sample texts and checkpoints.
        loop_seconds: duration of the training loop, in seconds. The numbers of evaluations, samples
            and checkpoints were chosen for this duration.
    """

    evaluations: int
    rows: int
    samples: int
    sample_tokens: int
    saves: int
    save_interval: float | None
    loss_seconds: float
    sample_seconds: float
    save_seconds: float
    loop_seconds: float

    @property
    def seconds(self) -> float:
        """Expected total seconds of evaluations, sample texts and checkpoints."""
        return self.loss_seconds + self.sample_seconds + self.save_seconds

    @property
    def share(self) -> float:
        """Fraction of the training loop's time that is reserved for evaluations, sample texts and
        checkpoints. It is the usual fraction, or a larger fraction if they take more time. It is
        limited to 0.9, so that models can be compared even if the time is too short."""
        needed = self.seconds / max(self.loop_seconds, 1e-9)
        return min(max(needed, defaults.EVALUATION_SHARE), 0.9)

    def share_text(self, seconds: float) -> str:
        """Format `seconds` as a fraction of the training loop's time."""
        share = seconds / max(self.loop_seconds, 1e-9)
        return "less than 1%" if share < 0.005 else f"{100 * share:.0f}%"


@dataclass(frozen=True)
class PartFacts:
    """The facts that determine the evaluations, sample texts and checkpoints of a run.

    Attributes:
        seq_len: sequence length in tokens.
        held_out_tokens: number of tokens in the validation split.
        checkpoint_bytes: size of a checkpoint.
        fixed: values given by the user, keyed by `section.key`.
        splits: number of validation splits, each of which is evaluated on up to the same number of
            rows.
    """

    seq_len: int
    held_out_tokens: float
    checkpoint_bytes: float
    fixed: Mapping[str, Any]
    splits: int = 1

    def parts(self, rate: float, loop_seconds: float, budget: float | None) -> Parts:
        """Choose the evaluations, sample texts and checkpoints of a training loop. Use the first
        entry in `defaults.PARTS` whose evaluations fit in the available time. If no entry fits, use
        the last entry with as few rows per evaluation as possible.

        Args:
            rate: training speed in tokens per second.
            loop_seconds: duration of the training loop in seconds.
            budget: maximum duration of the training loop in seconds; None for a run with a given
                number of tokens or steps, for which the first entry is always used.
        """
        # Imported here, because it imports torch.
        from firstlight.training.time_budget import (
            FORWARD_SHARE,
            PROBE_TOKENS,
            SAVE_SHARE,
            WRITTEN_PER_SECOND,
            sampled_token_seconds,
            save_interval,
        )

        held = math.ceil(self.held_out_tokens / self.seq_len)
        row = self.splits * FORWARD_SHARE * self.seq_len / rate
        token = sampled_token_seconds(1 / rate)
        save = self.checkpoint_bytes / WRITTEN_PER_SECOND
        timed = budget is not None
        for count, samples, tokens, share in defaults.PARTS if timed else defaults.PARTS[:1]:
            samples = len(self.fixed.get("evaluation.sample_prompts", range(samples)))
            tokens = self.fixed.get("evaluation.sample_tokens", tokens)
            # The first sample texts of a run are discarded: see `training.validation.evaluate`.
            sampling = token * (count * samples * tokens + sum(PROBE_TOKENS) + 2)
            left = share * loop_seconds - sampling - count * save
            left = min(left, defaults.LOSS_SHARE * share * loop_seconds)
            rows = min(int(max(left, 0) / (row * (count + 1))), held)
            if left >= 0 and rows >= min(defaults.USUAL_ROWS, held):
                break
        least = defaults.USUAL_ROWS
        if timed:
            least = max(defaults.LEAST_ROWS, defaults.LEAST_EVALUATED // self.seq_len)
        rows = max(rows, min(least, held))
        if "evaluation.max_rows" in self.fixed:
            rows = min(self.fixed["evaluation.max_rows"] or held, held)
        losses = (count + 1) * rows * row
        # There may be more checkpoints than evaluations, so that a killed run loses less work.
        saves = int(SAVE_SHARE * loop_seconds / max(save, 1e-9))
        saves = max(count, min(saves, defaults.MOST_SAVES))
        interval = None if budget is None else save_interval(budget, save)
        if interval:
            saves = max(saves, int(loop_seconds / interval + 1e-9))
        return Parts(
            count,
            rows,
            samples,
            tokens,
            saves=saves,
            save_interval=interval,
            loss_seconds=losses,
            sample_seconds=sampling,
            save_seconds=saves * save,
            loop_seconds=loop_seconds,
        )

    def parts_of_run(self, rate: float, tokens: float, loop_seconds: float | None) -> Parts:
        """Choose the evaluations, sample texts and checkpoints of a run with a given number of
        tokens.

        Args:
            rate: training speed in tokens per second.
            tokens: number of tokens of the run.
            loop_seconds: maximum duration of the training loop in seconds; None without a limit.
        """
        share = defaults.EVALUATION_SHARE
        if loop_seconds is not None:
            share = self.parts(rate, loop_seconds, loop_seconds).share
        return self.parts(rate, tokens / rate / (1 - share), loop_seconds)

    def least_seconds(self, rate: float, most_tokens: float, unit: int) -> float:
        """Return the duration in seconds of the shortest useful training loop. At least half of
        this time is spent on steps. The loop contains at least `defaults.LEAST_STEPS` steps, or as
        many steps as the data allows, whichever is less.

        Args:
            rate: training speed in tokens per second.
            most_tokens: maximum number of tokens that the run can read.
            unit: number of tokens in the smallest step.
        """
        # Imported here, because it imports torch.
        from firstlight.training.time_budget import SAVE_SHARE

        parts = self.parts(rate, 0.0, 0.0).seconds
        steps = min(defaults.LEAST_STEPS * unit, most_tokens) / rate
        # In a longer loop, additional checkpoints take up to SAVE_SHARE of the time.
        return max(parts / (0.5 - SAVE_SHARE), (parts + steps) / (1 - SAVE_SHARE))


@dataclass(frozen=True)
class RunFacts:
    """The length and speed of a run, and the settings that depend on them.

    Attributes:
        steps: number of optimizer steps.
        batch_tokens: number of tokens per step.
        seq_len: sequence length in tokens.
        rate: training speed in tokens per second.
        parts: evaluations, sample texts and checkpoints of the run.
        way: compilation mode of the run.
    """

    steps: int
    batch_tokens: int
    seq_len: int
    rate: float
    parts: Parts
    way: Compiling = NOT_COMPILED

    @property
    def tokens(self) -> int:
        """Number of tokens that the run trains on, including repetitions."""
        return self.steps * self.batch_tokens

    @property
    def seconds(self) -> float:
        """Expected seconds of the training loop, including compilation and evaluations."""
        return self.tokens / self.rate / (1 - self.parts.share) + self.way.seconds

    def choices(
        self, items: Sequence[Choice], fixed: Mapping[str, Any], parameters: int, epochs: float
    ) -> Choices:
        """Return all settings of the run together with its expected length and speed.

        Args:
            items: one choice per key.
            fixed: values set by the user, keyed by `section.key`. They replace chosen values.
            parameters: number of the model's parameters.
            epochs: number of passes over the training data.
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
            samples=self.parts.samples,
        )

    def micro_batch(self, machine: MachineFacts, fixed: Mapping[str, Any]) -> Choice:
        """Choose the micro-batch size, in sequences. It divides the number of sequences per step
        evenly.

        Args:
            machine: machine to train on.
            fixed: values given by the user, keyed by `section.key`.
        """
        rows = self.batch_tokens // self.seq_len
        busy = max(defaults.MICRO_BATCH_TOKENS[machine.kind] // self.seq_len, 1)
        micro = min(rows, 1 << int(math.log2(busy)))
        if is_given := "batch.gradient_accumulation_steps" in fixed:
            micro = max(rows // _given_passes(fixed), 1)
        while rows % micro:
            micro -= 1
        reason = f"{micro * self.seq_len:,} tokens are enough to keep this device busy"
        if is_given:
            reason = "the global batch divided by the given number of micro-batches"
        return Choice(
            "batch.micro_batch_size",
            fixed.get("batch.micro_batch_size") or micro,
            reason if micro < rows else "the whole global batch in one pass",
        )

    def warmup(self, percent: int) -> Choice:
        """Choose the length of the warm-up. It is a percentage of the run, but at least ten steps.
        In a run with fewer than 100 steps, it is 10% of the run.

        Args:
            percent: length of the warm-up as a percentage of the run, for long runs.
        """
        steps = max(self.steps * percent // 100, min(10, self.steps // 10))
        share = f"{percent}% of the run, at least 10 steps"
        if self.steps < 100:
            share = "10% of a short run"
        return Choice("schedule.warmup_steps", steps, share)

    def other_choices(self, machine: MachineFacts, held_out_tokens: float) -> Iterator[Choice]:
        """Yield the choices for compilation, evaluations, sample texts and checkpoints.

        Args:
            machine: machine to train on.
            held_out_tokens: number of tokens in the validation split.
        """
        way, why = self.way, "compiling would take more time than it saves"
        if machine.compiler is None:
            why = "torch.compile does not work on this device, or lacks a compiler"
        elif way.compiles:
            why = f"{way.gain:.2f} times the speed is worth about {way.seconds:.0f} s of compiling"
        yield Choice("efficiency.compile", way.compiles, why)
        part = "compile one layer and the loss only, which takes less time" if way.regional else ""
        yield Choice("efficiency.compile_regional", way.regional, part)
        parts = self.parts
        share = parts.share_text
        every = max(math.ceil(self.steps / parts.evaluations), 1)
        reason = f"{parts.evaluations} evaluations in the run"
        if parts.evaluations == 1:
            # The interval is much longer than the run, so that there is no evaluation before the
            # end even if the run has more steps than expected.
            every, reason = 10 * self.steps, "only before the first and after the last step"
        yield Choice("evaluation.every_steps", every, reason)
        if parts.rows * self.seq_len >= held_out_tokens:
            yield Choice("evaluation.max_rows", 0, "all held-out sequences")
        else:
            reason = f"evaluations take {share(parts.loss_seconds)} of the run"
            yield Choice("evaluation.max_rows", parts.rows, reason)
        texts, taken = counted(parts.samples, "sample text"), share(parts.sample_seconds)
        reason = f"{texts} per evaluation, {taken} of the run"
        yield Choice("evaluation.sample_tokens", parts.sample_tokens, reason)
        every, count = 0, "one checkpoint at the end"
        if parts.saves > 1:
            every, count = math.ceil(self.steps / parts.saves), f"{parts.saves} checkpoints"
        reason = f"{count}, {share(parts.save_seconds)} of the run"
        if parts.save_interval is not None:
            reason = f"also every {time_text(parts.save_interval)}: {reason}"
            # The maximum time between checkpoints already results in this number of checkpoints,
            # unless the limit on epochs ends the run early.
            if parts.saves * parts.save_interval <= parts.loop_seconds / defaults.EARLY:
                every = self.steps
            every = every or self.steps
        yield Choice("checkpoint.every_steps", every, reason)


#: Lengths of a run, in seconds, that are offered to the user.
OFFERED_SECONDS = (180.0, 600.0, 3600.0)
#: Row of the printed table, as (name, value, reason).
Row = tuple[str, str, str]

#: Suggested budgets are this multiple of the expected time, so that they also suffice for slower
#: runs.
_SLOWER = 1.2

#: Maximum number of characters of a value in the table.
_MOST_VALUE = 24


@dataclass(frozen=True, kw_only=True)
class RunPlan(ABC):
    """The plan of a run that trains a new model (`TextPlan`) or fine-tunes a model (`TuningPlan`).

    Attributes:
        request: inputs, length and overrides of the run.
        machine: machine to train on.
        speed: machine with its measured or predicted speed.
        choices: all settings.
        data: keys and values of the recipe's `data` section, in addition to the chosen keys.
        prompts: prompts of the sample texts.
        start: name or folder of the initial model; None for a new model.
        memory_bytes: expected memory of the run; None if unknown or not computed yet.
    """

    request: Request
    machine: Machine
    speed: MachineFacts
    choices: Choices
    # The text has not been prepared yet when the plan is made.
    data: Mapping[str, Any] = field(default_factory=lambda: {"dir": "unused"})
    prompts: Sequence[str] = ()
    start: str | None = None
    memory_bytes: float | None = None

    @property
    @abstractmethod
    def data_name(self) -> str:
        """Name of the training data in messages, such as "the text"."""

    @property
    @abstractmethod
    def held_out_tokens(self) -> float:
        """Number of tokens in the validation split."""

    @property
    @abstractmethod
    def recorded(self) -> dict[str, Any]:
        """Facts on which the chosen settings are based. They are part of `record`."""

    @abstractmethod
    def choose_again(self, length: Length) -> Self:
        """Return the plan for a different length of the run."""

    def require_time(self, length: Length) -> None:
        """Reject a time budget that does not leave enough time for steps.

        Args:
            length: length of the training loop that remains within the budget.

        Raises:
            ConfigError: the time is too short. The message suggests a sufficient budget.
        """
        whole, least = self.request.seconds, self.choices.least_seconds
        if whole is None or length.seconds is None or length.seconds >= least:
            return
        needed = _SLOWER * least + max(whole - length.seconds, defaults.OTHER_SECONDS)
        busy = ", which is busy" if self.speed.is_busy else ""
        raise ConfigError(
            f"the budget of {time_text(whole)} is too short for {rounded(self.choices.parameters)} "
            f"parameters at {self.choices.tokens_per_second:,.0f} tokens/s on this machine{busy}: "
            f"two evaluations, a sample text, a checkpoint and {defaults.LEAST_STEPS} steps need "
            f"{time_text(least)}, because the steps must take at least half of the time; use "
            f"--budget {_whole_minutes(needed)}"
        )

    @abstractmethod
    def first_rows(self) -> list[Row]:
        """Return the rows of the table that come before the chosen settings, as (name, value,
        reason)."""

    @abstractmethod
    def model_lines(self) -> Iterator[str]:
        """Yield lines that tell the user which model was chosen, why it was chosen, and how it is
        trained."""

    def expected_result(self) -> str:
        """Describe the expected result of the run for the user. Return "" if it is unknown."""
        return ""

    def lines(self) -> Iterator[str]:
        """Yield a few lines that summarise the plan for the user. They contain the model, the
        length of the run, the expected result and the memory use."""
        yield from self.model_lines()
        yield from length_lines(self.choices, self.speed, self.data_name)
        expected = [self.expected_result()]
        if self.memory_bytes is not None:
            usable = gib(self.speed.usable_bytes)
            expected.append(f"{gib(self.memory_bytes)} for tensors, of {usable}")
        if any(expected):
            yield f"expected: {'; '.join(filter(None, expected))}"
        if self.choices.advice:
            yield f"more text: {self.choices.advice}"

    def table(self) -> Iterator[str]:
        """Yield lines for the user: a blank line and the table of all choices with their
        reasons."""
        yield ""
        rows = self.first_rows()
        if given := self.request.val_inputs:
            reason = f"{shlex.join(given)} instead of a part of the texts"
            rows.append(("validation", f"{rounded(round(self.held_out_tokens))} tokens", reason))
        yield from _table_lines(self, rows)

    def record(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {
            "machine": self.speed.name,
            **self.recorded,
            "memory_bytes": self.memory_bytes,
            **asdict(self.choices),
        }


def _whole_minutes(seconds: float) -> str:
    """Format a duration as the value of a command-line option. Durations of up to two minutes are
    rounded up to a multiple of 10 s, and longer durations to full minutes."""
    if seconds <= 120:
        return f"{10 * math.ceil(seconds / 10)}s"
    return f"{math.ceil(seconds / 60)}m"


def length_lines(choices: Choices, speed: MachineFacts, data: str) -> Iterator[str]:
    """Yield lines that tell the user the length of the run and the speed of the machine.

    Args:
        choices: all settings.
        speed: machine with its measured or predicted speed.
        data: name of the training data, such as "the text".
    """
    origin = speed.origin
    if choices.compile_gain > 1:
        origin += f", with an expected speed-up of {choices.compile_gain:.2f} from compiling"
    about = "about " if "schedule.max_minutes" in choices.keys else ""
    epochs = counted(choices.epochs, "epoch", ".2g")
    yield (
        f"length: {about}{counted(choices.steps, 'step')} of "
        f"{choices['batch.global_batch_tokens']:,} tokens, {epochs} of {data}, "
        f"{time_text(choices.seconds)} with evaluations and saves, at "
        f"{choices.tokens_per_second:,.0f} tokens/s ({speed.name}, {origin})"
    )
    if speed.is_busy:
        yield "this machine is busy: training will be slower unless other programs are stopped"
    if _ends_early(choices):
        whole = time_text(60 * choices["schedule.max_minutes"])
        yield (
            f"the run ends after {epochs}, before its {whole} are used up: more "
            "epochs (--schedule.epochs) would help little or overfit"
        )


def _ends_early(choices: Choices) -> bool:
    """Return True if the run reaches the maximum number of passes over the data well before its
    time is used up."""
    if "schedule.max_minutes" not in choices.keys:
        return False
    minutes: float = choices["schedule.max_minutes"]
    return choices.seconds < defaults.EARLY * 60 * minutes


def _table_lines(plan: RunPlan, first: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table with the length of the run, the precision, all choices that have a
    reason, and the remaining keys set by the user.

    Args:
        plan: plan of the run.
        first: rows at the start of the table.
    """
    choices, machine = plan.choices, plan.machine
    steps = "given"
    if "schedule.max_minutes" in choices.keys:
        steps = "as many as the time allows, adjusted to the measured speed"
        if _ends_early(choices):
            steps = "the epoch limit, which ends the run before the time is used up"
    fixed = plan.request.fixed
    others = {"efficiency.precision": machine.precision} | fixed
    for key in (*choices.keys, "run.dir", *(f"data.{row[0]}" for row in first)):
        others.pop(key, None)
    precision = others.pop("efficiency.precision")
    shown = [
        *first,
        ("steps", f"{choices.steps:,}", steps),
        ("epochs", f"{choices.epochs:.2g}", "passes over the training data"),
        ("precision", str(precision), "of matrix products"),
        *((c.key, plain(c.value), c.reason) for c in choices.choices if c.reason),
        *((key, plain(value), "given") for key, value in others.items()),
    ]
    # Values set by the user can contain line breaks.
    shown = [
        (key, shortened(" ".join(value.split()), _MOST_VALUE), reason)
        for key, value, reason in shown
    ]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    for key, value, reason in shown:
        yield f"{key:<{widths[0]}}  {value:>{widths[1]}}  {reason}"


def offers(plan: RunPlan) -> Iterator[tuple[float, Choices]]:
    """Yield a tuple (seconds, chosen settings) for each run length in `OFFERED_SECONDS`."""
    for seconds in OFFERED_SECONDS:
        request = replace(plan.request, seconds=seconds)
        yield seconds, plan.choose_again(request.training_length()).choices
