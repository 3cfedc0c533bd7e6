"""A plan of a run on texts: facts about the texts and the machine, and every setting."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from firstlight.console import parse_count, parse_time, plain, rounded
from firstlight.data.sources import (
    DataSource,
    by_ending,
    find_sources,
    listed,
    note_on_inputs,
    unread_files,
)
from firstlight.errors import ConfigError, InputError
from firstlight.pipeline import settings
from firstlight.pipeline.choices import choose, choose_vocabulary, parameters_of
from firstlight.pipeline.chosen import Choices
from firstlight.pipeline.facts import Length, MachineFacts, TextFacts, estimated_text
from firstlight.pipeline.scan import SHOWN_FILES, Scan, described, scan_corpus

if TYPE_CHECKING:
    from firstlight.planner.plan.machine import Machine

Tell = Callable[[str], None]

#: The time of a run that nobody has given a length, where there is nobody to ask.
DEFAULT_SECONDS = 600.0
#: Least bytes of text: less leaves no validation text.
LEAST_BYTES = 1000
#: The times that a person is shown when asked.
OFFERED_SECONDS = (180.0, 600.0, 3600.0)


@dataclass(frozen=True)
class Request:
    """A person's request.

    Attributes:
        inputs: files, folders, globs, "stdlib", "hf:NAME[:CONFIG[:SPLIT]]".
        seconds: wall-clock time of the whole command, or
        tokens: tokens to train on, or
        steps: optimizer steps.
        size: name or number of parameters of the model; None chooses.
        overrides: (`section.key`, value as YAML text) pairs.
        text_key: field of the text in JSONL lines, tables and datasets.
        init_from: folder of the model to start from; None trains a new one.
    """

    inputs: Sequence[str]
    seconds: float | None = None
    tokens: float | None = None
    steps: int | None = None
    size: str | None = None
    overrides: Sequence[tuple[str, str]] = ()
    text_key: str = "text"
    init_from: str | None = None

    def __post_init__(self) -> None:
        given = {"--budget": self.seconds, "--tokens": self.tokens, "--steps": self.steps}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} both say how long the run is: keep one")
        if any(value is not None and not value > 0 for value in given.values()):
            raise ConfigError(f"{named[0]} has to be more than 0")

    @property
    def has_length(self) -> bool:
        """True if the request gives the length of the run."""
        return (self.seconds, self.tokens, self.steps) != (None, None, None)

    @property
    def fixed(self) -> dict[str, Any]:
        """The values of the overrides, by `section.key`."""
        from firstlight.recipe.load import parse_yaml

        return {name: parse_yaml(text) for name, text in self.overrides}

    def check(self, *, conversations: bool = False) -> None:
        """Refuse overrides that are no keys of a recipe, or have no meaning here, before anything
        is trained.

        Args:
            conversations: the inputs are conversations.

        Raises:
            ConfigError: a key is unknown, chosen by the inputs, or its value is invalid.
        """
        from firstlight.recipe import parse_recipe

        taken = {"data.dir": "the inputs are prepared for the run"}
        taken |= {"data.files": "they are the inputs", "data.kind": "the inputs tell it"}
        taken |= {"data.mix": "prepare the corpora, and train a recipe"}
        taken |= {f"schedule.{key}": "use --budget, --tokens or --steps" for key in _LENGTH_KEYS}
        for name, _ in self.overrides:
            if name in taken:
                raise ConfigError(f"--{name} is chosen with texts as inputs: {taken[name]}")
            section = name.partition(".")[0]
            if self.init_from is not None and section in ("model", "init"):
                raise ConfigError(
                    f"--{name} is for new models, and --init-from names {self.init_from}: "
                    "leave one of them out"
                )
            if self.init_from is None and section == "lora":
                raise ConfigError(
                    f"--{name} is for fine-tuning: name the model to start from with --init-from"
                )
        if self.init_from is not None and self.size is not None:
            raise ConfigError(
                f"--size is for new models, and {self.init_from} already has a size: leave "
                "one of them out"
            )
        data = {"kind": "chat", "files": ["unused"]} if conversations else {"dir": "unused"}
        # Some keys go only with the kind of schedule that is chosen.
        kind = settings.LAYOUT["schedule.kind"]
        parse_recipe({"data": data, "schedule": {"kind": kind}}, "options", self.overrides)


_LENGTH_KEYS = ("max_steps", "epochs", "max_minutes")


def request_of(
    inputs: str | Path | Sequence[str | Path],
    budget: str | float | None,
    tokens: str | float | None,
    steps: int | None,
    size: str | None,
    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]],
    text_key: str,
    init_from: str | Path | None = None,
) -> Request:
    """The request of `train_texts`'s arguments.

    Raises:
        ConfigError: a time, number or size can't be read, or two lengths are given.
    """
    from firstlight.recipe import override_pairs

    if size is not None and size not in settings.SIZES:
        parameters_of(size)  # before any text is read
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    return Request(
        tuple(str(name) for name in names),
        parse_time(budget) if isinstance(budget, str) else budget,
        parse_count(tokens) if isinstance(tokens, str) else tokens,
        steps,
        size,
        tuple(override_pairs(overrides)),
        text_key,
        None if init_from is None else str(init_from),
    )


class RunPlan(Protocol):
    """A plan of a run: of a new model, or of a model that is started from.

    Attributes:
        choices: every setting.
    """

    @property
    def choices(self) -> Choices: ...

    def choose_again(self, length: Length) -> RunPlan:
        """The plan of another length."""
        ...

    def with_memory(self) -> RunPlan:
        """The plan with the expected memory, which takes a second or two to find."""
        ...

    def lines(self) -> Iterator[str]:
        """The plan for people: what is trained, what to expect, and a table of all choices."""
        ...

    def record(self) -> dict[str, Any]:
        """The plan as JSON values."""
        ...


@dataclass(frozen=True)
class TextPlan:
    """A plan of a run on texts.

    Attributes:
        request: inputs, length and overrides of the run.
        scan: the texts.
        machine: the machine to train on.
        speed: its speed.
        text: the texts as tokens: estimated, or counted once they are prepared.
        vocabulary: reason for the size of the vocabulary.
        choices: every setting.
        memory_bytes: expected memory of the run; None if it was not asked.
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
        """The plan of another length, or of the texts once they are prepared."""
        text = text or self.text
        choices = choose(text, self.speed, length, self.request.fixed, self.request.size)
        return replace(self, text=text, choices=choices)

    def with_memory(self) -> TextPlan:
        """The plan with the expected memory, before the texts are prepared."""
        from firstlight.pipeline.machine import memory_of_choices

        overrides = self.request.overrides
        return replace(self, memory_bytes=memory_of_choices(self.choices, overrides, self.machine))

    def lines(self) -> Iterator[str]:
        """The plan for people: what is trained, what to expect, and a table of all choices."""
        choices = self.choices
        assert choices.bits_per_byte is not None
        low, high = choices.bits_per_byte
        yield from run_lines(choices, self.speed, "the text")
        yield (
            f"expected: {low:.2f} to {high:.2f} bits for a byte of held-out text "
            f"(gzip -9: about {self.text.gzip_bits_per_byte:.2f})"
        )
        if self.memory_bytes is not None:
            yield memory_line(self.memory_bytes, self.speed)
        if choices.advice:
            yield f"more text: {choices.advice}"
        yield ""
        vocabulary = ("vocabulary", f"{self.text.vocab_size:,} tokens", self.vocabulary)
        yield from table_lines(choices, vocabulary)

    def record(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "machine": self.speed.name,
            "corpus": asdict(self.scan.facts),
            "memory_bytes": self.memory_bytes,
            **asdict(self.choices),
        }


def run_lines(choices: Choices, speed: MachineFacts, data: str) -> Iterator[str]:
    """The machine's speed and the length of a run, for people.

    Args:
        choices: every setting.
        speed: the machine.
        data: name of the data that passes are made over, such as "the text".
    """
    yield (
        f"{speed.name} ({speed.origin}): {choices.tokens_per_second:,.0f} tokens/s for "
        f"{rounded(choices.parameters)} parameters"
    )
    yield (
        f"the run: about {rounded(choices.tokens)} tokens in {choices.steps:,} steps, "
        f"{choices.epochs:.2g} times {data}, {time_text(choices.seconds)} of training"
    )


def memory_line(memory_bytes: float, speed: MachineFacts) -> str:
    """The expected memory of a run, for people."""
    return (
        f"expected memory: {memory_bytes / 2**30:.2f} GiB for tensors, of "
        f"{speed.usable_bytes / 2**30:.1f} GiB"
    )


def table_lines(choices: Choices, *first: tuple[str, str, str]) -> Iterator[str]:
    """All choices that have a reason as a table.

    Args:
        choices: every setting.
        first: rows above them: (name, value, reason).
    """
    shown = list(first)
    shown += [(c.key, plain(c.value), c.reason) for c in choices.choices if c.reason]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    for key, value, reason in shown:
        yield f"{key:<{widths[0]}}  {value:>{widths[1]}}  {reason}"


def scan_texts(request: Request, tell: Tell, *, progress: bool) -> Scan:
    """Scan the texts of a request; the first line for people comes at once.

    Args:
        request: inputs, length and overrides of the run.
        tell: called with each line for people.
        progress: show a progress bar on stderr.

    Raises:
        InputError: the inputs can't be read, or hold no text, or too little.
        ConfigError: an override is no key of a recipe.
    """
    sources = find_sources(request.inputs)
    tell(reading_line(request.inputs, sources))
    if note := note_on_inputs(request.inputs):
        tell(note)
    scan = scan_corpus(sources, request.text_key, progress=progress)
    if scan.facts.text_bytes < LEAST_BYTES:
        raise InputError(
            f"the inputs hold {scan.facts.text_bytes:,} bytes of text, too little to learn from: "
            f"give {LEAST_BYTES:,} at least, better a megabyte"
        )
    for line in described(scan.facts, size_text):
        tell(line)
    if unread := unread_files(request.inputs):
        tell(_unread_line(unread))
    # Only here: it imports torch, which takes seconds.
    request.check()
    return scan


def _unread_line(files: Sequence[Path]) -> str:
    """The files of other kinds than texts, for people."""
    names = ", ".join(map(str, files[:SHOWN_FILES])) + (", ..." if len(files) > SHOWN_FILES else "")
    count = f"{len(files):,} file{'s' if len(files) != 1 else ''}"
    return f"{count} not read, being of other kinds: {listed(by_ending(files))}: {names}"


def plan_texts(request: Request, scan: Scan, gpu: str | None = None) -> TextPlan:
    """Choose settings for scanned texts.

    Args:
        request: inputs and overrides, and the length, by default `DEFAULT_SECONDS`.
        scan: its texts.
        gpu: name of a GPU to plan for; None is this machine.

    Raises:
        ConfigError: an option is invalid, or the GPU is unknown.
    """
    from firstlight.pipeline.machine import machine_facts

    machine, speed = machine_facts(gpu)
    fixed = request.fixed
    vocabulary = choose_vocabulary(scan.facts, fixed)
    text = estimated_text(scan.facts, vocabulary.value)
    length = Length(request.seconds, request.tokens, request.steps)
    if not request.has_length:
        length = Length(DEFAULT_SECONDS)
    choices = choose(text, speed, length, fixed, request.size)
    return TextPlan(request, scan, machine, speed, text, vocabulary.reason, choices)


def offers(plan: RunPlan) -> Iterator[tuple[float, Choices]]:
    """(seconds, the settings) of some lengths of a run."""
    for seconds in OFFERED_SECONDS:
        yield seconds, plan.choose_again(Length(seconds)).choices


def reading_line(inputs: Sequence[str], sources: Sequence[DataSource]) -> str:
    """The first line for people, which names the input."""
    named = shlex.join(inputs) if len(inputs) <= 3 else f"{len(inputs)} inputs"
    return f"reading {named}: {_sources_text(sources)}"


def _sources_text(sources: Sequence[DataSource]) -> str:
    files = [source for source in sources if source.dataset is None]
    parts = [f"{len(files):,} file{'s' if len(files) != 1 else ''}"] if files else []
    if files:
        parts.append(size_text(sum(source.size for source in files)))
    if len(files) < len(sources):
        parts.append(f"{len(sources) - len(files)} dataset(s)")
    return ", ".join(parts)


def run_name(inputs: Sequence[str]) -> str:
    """A name for the run of inputs, for its folder."""
    first = inputs[0].removeprefix("hf:").partition(":")[0]
    stem = Path(first).expanduser().resolve().name if Path(first).exists() else Path(first).name
    name = stem.partition(".")[0] or stem.strip(".")
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-")
    return kept or "texts"


def size_text(count: float) -> str:
    """1234567 -> '1.2 MB'."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def time_text(seconds: float) -> str:
    """95 -> '1 min 35 s'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
