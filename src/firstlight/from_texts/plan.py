"""The plan of a run on texts: facts about texts and machine, and all settings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from firstlight.console import human_bytes, plain, rounded, time_text
from firstlight.data.sources import (
    DataSource,
    by_ending,
    find_sources,
    listed,
    note_on_inputs,
    unread_files,
    without,
)
from firstlight.errors import InputError
from firstlight.from_texts.choices import choose, choose_vocabulary
from firstlight.from_texts.chosen import Choices
from firstlight.from_texts.request import Request
from firstlight.from_texts.scan import SHOWN_FILES, Scan, described, estimated_text, scan_corpus
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Length, MachineFacts, TextFacts

if TYPE_CHECKING:
    from firstlight.planner.plan.machine import Machine

Tell = Callable[[str], None]

#: Fewest bytes of text: less leaves no validation text.
LEAST_BYTES = 1000
#: Lengths in seconds that are offered when the user is asked.
OFFERED_SECONDS = (180.0, 600.0, 3600.0)
#: Largest number of characters of a value in the table.
_MOST_VALUE = 24


class RunPlan(Protocol):
    """The plan of a run, for a new model (`TextPlan`) or for fine-tuning (`TuningPlan`).

    Attributes:
        request: inputs, length and overrides of the run.
        machine: the machine to train on.
        choices: all settings.
    """

    @property
    def request(self) -> Request: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def choices(self) -> Choices: ...

    def choose_again(self, length: Length) -> RunPlan:
        """The plan for another length of the run."""
        ...

    def with_memory(self) -> RunPlan:
        """The plan with expected memory and counted parameters, which take a second or two."""
        ...

    def lines(self) -> Iterator[str]:
        """The plan as text for the user: model, expectations, and a table of all choices."""
        ...

    def record(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        ...


@dataclass(frozen=True)
class TextPlan:
    """The plan of a new model's run; implements `RunPlan`.

    Attributes:
        request: inputs, length and overrides of the run.
        scan: the scan of the texts.
        machine: the machine to train on.
        speed: its speed.
        text: facts about the texts as tokens: estimated, or counted after they are prepared.
        vocabulary: reason for the vocabulary size.
        choices: all settings.
        memory_bytes: expected memory of the run; None if unknown or not computed yet.
    """

    request: Request
    scan: Scan
    machine: Machine
    speed: MachineFacts
    text: TextFacts
    vocabulary: str
    choices: Choices
    memory_bytes: int | None = None

    def choose_again(self, length: Length, text: TextFacts | None = None) -> TextPlan:
        """The plan for another length of the run, or with counted facts about the texts."""
        text = text or self.text
        choices = choose(text, self.speed, length, self.request.fixed, size=self.request.size)
        return replace(self, text=text, choices=choices)

    def with_memory(self) -> TextPlan:
        """See `RunPlan.with_memory`."""
        from firstlight.from_texts.machine import fitting_before_data

        given = self.request.overrides, self.request.fixed
        choices, memory = fitting_before_data(self.choices, *given, self.machine)
        return replace(self, choices=choices, memory_bytes=memory)

    def lines(self) -> Iterator[str]:
        """See `RunPlan.lines`."""
        choices = self.choices
        yield from run_lines(choices, self.speed, "the text")
        expected = "not known with this optimizer"
        if choices.bits_per_byte is not None:
            low, high = choices.bits_per_byte
            expected = f"{low:.2f} to {high:.2f} bits for a byte of held-out text"
            if self.text.is_unusual:
                expected += ", a wide range because such text is harder to predict"
        gzip = self.scan.facts.gzip_bits_per_byte
        yield f"expected: {expected} (gzip -9: about {gzip:.2f})"
        if self.memory_bytes is not None:
            yield memory_line(self.memory_bytes, self.speed)
        if choices.advice:
            yield f"more text: {choices.advice}"
        yield ""
        vocabulary = ("vocabulary", f"{self.text.vocab_size:,} tokens", self.vocabulary)
        yield from table_lines(
            self, vocabulary, *validation_rows(self.request, self.text.val_tokens)
        )

    def record(self) -> dict[str, Any]:
        """See `RunPlan.record`."""
        return {
            "machine": self.speed.name,
            "corpus": asdict(self.scan.facts),
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
    yield (
        f"{speed.name} ({speed.origin}): {choices.tokens_per_second:,.0f} tokens/s for "
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


def memory_line(memory_bytes: float, speed: MachineFacts) -> str:
    """A line for the user with the expected memory of a run."""
    return (
        f"expected memory: {memory_bytes / 2**30:.2f} GiB for tensors, of "
        f"{speed.usable_bytes / 2**30:.1f} GiB"
    )


def validation_rows(request: Request, tokens: float) -> list[tuple[str, str, str]]:
    """The row of the table with the given texts to validate on; [] without any.

    Args:
        request: the request.
        tokens: number of their tokens.
    """
    reason = f"of {shlex.join(request.val_inputs)}, instead of a part of the texts"
    return [("validation", f"{rounded(tokens)} tokens", reason)] if request.val_inputs else []


def table_lines(plan: RunPlan, *first: tuple[str, str, str]) -> Iterator[str]:
    """The lines of a table with the length of the run, the precision, all choices that have a
    reason, and the other given keys.

    Args:
        plan: the plan of the run.
        first: rows above all others: name, value and reason.
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


def scan_texts(request: Request, tell: Tell, *, progress: bool) -> Scan:
    """Scan the texts of a request. The first message comes before reading begins.

    Args:
        request: inputs, length and overrides of the run.
        tell: function that is called with each message for the user.
        progress: show a progress bar on stderr.

    Raises:
        InputError: the inputs can't be read, or have too little text.
        ConfigError: an override is invalid.
    """
    named = [*request.inputs, *request.val_inputs]
    val_sources = (
        find_sources(request.val_inputs, as_is=request.as_is) if request.val_inputs else []
    )
    sources = without(find_sources(request.inputs, as_is=request.as_is), val_sources)
    tell(reading_line(named, [*sources, *val_sources]))
    if note := note_on_inputs(named):
        tell(note)
    # After the first message, because it imports torch, which takes seconds.
    request.check()
    scan = scan_corpus(sources, request.text_key, val_sources=val_sources, progress=progress)
    trained = scan.facts.text_bytes - (scan.val_bytes if scan.val_documents else 0)
    trained -= scan.split.left_out_bytes
    if trained < LEAST_BYTES:
        beside = " that --val-input does not have" if scan.val_documents else ""
        raise InputError(
            f"the inputs hold {trained:,.0f} bytes of text{beside}, too little to learn from: "
            f"give {LEAST_BYTES:,} at least, better a megabyte"
        )
    for line in described(scan):
        tell(line)
    if unread := unread_files(named):
        tell(_unread_line(unread))
    return scan


def _unread_line(files: Sequence[Path]) -> str:
    """A message with the files that are not read because they are no texts."""
    names = ", ".join(map(str, files[:SHOWN_FILES])) + (", ..." if len(files) > SHOWN_FILES else "")
    count = f"{len(files):,} file{'s' if len(files) != 1 else ''}"
    return f"{count} not read, being of other kinds: {listed(by_ending(files))}: {names}"


def plan_texts(request: Request, scan: Scan, gpu: str | None = None) -> TextPlan:
    """Choose settings for scanned texts.

    Args:
        request: inputs and overrides, and the length of the run, by default `DEFAULT_SECONDS`.
        scan: the scan of its texts.
        gpu: name of a GPU to plan for; None plans for this machine.

    Raises:
        ConfigError: an option is invalid, or the GPU is unknown.
    """
    from firstlight.planner.advise.speed import new_model_speed
    from firstlight.planner.plan.machine import find_machine

    fixed = request.fixed
    machine = find_machine(gpu, device=fixed.get("run.device") or "auto")
    speed = new_model_speed(machine)
    vocabulary = choose_vocabulary(scan.facts, fixed)
    text = estimated_text(scan.facts, vocabulary.value, scan.val_bytes)
    length = request.training_length(scan.facts.total_bytes)
    choices = choose(text, speed, length, fixed, size=request.size)
    return TextPlan(
        request, scan, machine, speed, text=text, vocabulary=vocabulary.reason, choices=choices
    )


def offers(plan: RunPlan) -> Iterator[tuple[float, Choices]]:
    """Some lengths of a run in seconds (`OFFERED_SECONDS`), each with the settings for it."""
    for seconds in OFFERED_SECONDS:
        request = replace(plan.request, seconds=seconds)
        yield seconds, plan.choose_again(request.training_length()).choices


def reading_line(inputs: Sequence[str], sources: Sequence[DataSource]) -> str:
    """The first message of a run, with its inputs."""
    named = shlex.join(inputs) if len(inputs) <= 3 else f"{len(inputs)} inputs"
    files = [source for source in sources if source.dataset is None]
    parts = [f"{len(files):,} file{'s' if len(files) != 1 else ''}"] if files else []
    if files:
        parts.append(human_bytes(sum(source.size for source in files)))
    if len(files) < len(sources):
        parts.append(f"{len(sources) - len(files)} dataset(s)")
    return f"reading {named}: {', '.join(parts)}"
