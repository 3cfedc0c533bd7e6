"""The plan of a run on texts: facts about texts and machine, and all settings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from firstlight.console import parse_count, parse_time, plain, rounded, size_text, time_text
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
from firstlight.pipeline.choices import choose, choose_vocabulary
from firstlight.pipeline.chosen import Choices
from firstlight.pipeline.facts import Length, MachineFacts, TextFacts, estimated_text
from firstlight.pipeline.scan import SHOWN_FILES, Scan, described, scan_corpus
from firstlight.pipeline.shapes import parameters_of, sections_for

if TYPE_CHECKING:
    from firstlight.planner.plan.machine import Machine

Tell = Callable[[str], None]

#: Length of a run in seconds if none is given and the user can't be asked.
DEFAULT_SECONDS = 600.0
#: Fewest bytes of text: less leaves no validation text.
LEAST_BYTES = 1000
#: Lengths in seconds that are offered when the user is asked.
OFFERED_SECONDS = (180.0, 600.0, 3600.0)


@dataclass(frozen=True)
class Request:
    """The user's request. At most one of seconds, tokens and steps is given.

    Attributes:
        inputs: files, folders, globs, "stdlib", "hf:NAME[:CONFIG[:SPLIT]]".
        seconds: wall-clock time of the whole command.
        tokens, steps: number of tokens to train on; number of optimizer steps.
        size: name of a size, or number of parameters, of the model; None chooses it.
        overrides: pairs (`section.key`, value as YAML text).
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
        from firstlight.recipe.load import override_value

        return {name: override_value(name, text) for name, text in self.overrides}

    def check(self, *, conversations: bool = False) -> None:
        """Refuse invalid overrides before anything is trained.

        Args:
            conversations: True if the inputs are conversations.

        Raises:
            ConfigError: a key is unknown or follows from the inputs, or its value is invalid.
        """
        from firstlight.recipe import parse_recipe

        taken = {"data.dir": "the inputs are prepared for the run"}
        taken |= {"data.files": "they are the inputs", "data.kind": "the inputs tell it"}
        taken |= {"data.mix": "prepare the corpora, and train a recipe"}
        lengths = ("schedule.max_steps", "schedule.max_minutes")
        taken |= dict.fromkeys(lengths, "use --budget, --tokens or --steps")
        if self.tokens or self.steps or self.fixed.get("schedule.epochs", 1) is None:
            taken["schedule.epochs"] = "it is a number of passes within a --budget"
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
        # Some keys are valid only with others that will be chosen.
        others = sections_for(self.fixed)
        parse_recipe({"data": data, **others}, "options", self.overrides)


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
    """The request for the arguments of `train_texts`.

    Raises:
        ConfigError: a time, number or size is invalid, or two lengths are given.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    if not all(isinstance(value, str) for _, value in pairs):
        # Not for options of the command line: it imports torch, before the first message.
        from firstlight.recipe import override_pairs

        pairs = override_pairs(pairs)
    if size is not None and size not in settings.SIZES:
        parameters_of(size)  # before any text is read
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    return Request(
        tuple(str(name) for name in names),
        _parsed("--budget", parse_time, budget),
        _parsed("--tokens", parse_count, tokens),
        steps,
        size,
        tuple(pairs),
        text_key,
        None if init_from is None else str(init_from),
    )


def _parsed(option: str, parse: Callable[[str], float], value: str | float | None) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


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
        """The plan with the expected memory, which takes a second or two to find."""
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
        choices = choose(text, self.speed, length, self.request.fixed, self.request.size)
        return replace(self, text=text, choices=choices)

    def with_memory(self) -> TextPlan:
        """See `RunPlan.with_memory`."""
        from firstlight.pipeline.machine import fitting_before_data

        given = self.request.overrides, self.request.fixed
        choices, memory = fitting_before_data(self.choices, *given, self.machine)
        return replace(self, choices=choices, memory_bytes=memory)

    def lines(self) -> Iterator[str]:
        """See `RunPlan.lines`."""
        choices = self.choices
        assert choices.bits_per_byte is not None
        low, high = choices.bits_per_byte
        yield from run_lines(choices, self.speed, "the text")
        yield (
            f"expected: {low:.2f} to {high:.2f} bits for a byte of held-out text "
            f"(gzip -9: about {self.scan.facts.gzip_bits_per_byte:.2f})"
        )
        if self.memory_bytes is not None:
            yield memory_line(self.memory_bytes, self.speed)
        if choices.advice:
            yield f"more text: {choices.advice}"
        yield ""
        vocabulary = ("vocabulary", f"{self.text.vocab_size:,} tokens", self.vocabulary)
        yield from table_lines(self, vocabulary)

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
    yield (
        f"the run: about {rounded(choices.tokens)} tokens in {choices.steps:,} steps, "
        f"{choices.epochs:.2g} times {data}, {time_text(choices.seconds)} of training"
    )


def memory_line(memory_bytes: float, speed: MachineFacts) -> str:
    """A line for the user with the expected memory of a run."""
    return (
        f"expected memory: {memory_bytes / 2**30:.2f} GiB for tensors, of "
        f"{speed.usable_bytes / 2**30:.1f} GiB"
    )


def table_lines(plan: RunPlan, *first: tuple[str, str, str]) -> Iterator[str]:
    """The lines of a table of all choices that have a reason, with the length of the run and the
    precision.

    Args:
        plan: the plan of the run.
        first: rows above all others: name, value and reason.
    """
    choices, machine = plan.choices, plan.machine
    is_timed = "schedule.max_minutes" in choices.keys
    steps = "for which there is time; measured steps decide them" if is_timed else "as given"
    precision = plan.request.fixed.get("efficiency.precision", machine.precision)
    shown = [
        *first,
        ("steps", f"{choices.steps:,}", steps),
        ("epochs", f"{choices.epochs:.2g}", "passes over what is trained on"),
        ("precision", str(precision), "of matrix products"),
        *((c.key, plain(c.value), c.reason) for c in choices.choices if c.reason),
    ]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    for key, value, reason in shown:
        yield f"{key:<{widths[0]}}  {value:>{widths[1]}}  {reason}"


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
    sources = find_sources(request.inputs)
    tell(reading_line(request.inputs, sources))
    if note := note_on_inputs(request.inputs):
        tell(note)
    # After the first message, because it imports torch, which takes seconds.
    request.check()
    scan = scan_corpus(sources, request.text_key, progress=progress)
    if scan.facts.text_bytes < LEAST_BYTES:
        raise InputError(
            f"the inputs hold {scan.facts.text_bytes:,} bytes of text, too little to learn from: "
            f"give {LEAST_BYTES:,} at least, better a megabyte"
        )
    for line in described(scan):
        tell(line)
    if unread := unread_files(request.inputs):
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
    """Some lengths of a run in seconds (`OFFERED_SECONDS`), each with the settings for it."""
    for seconds in OFFERED_SECONDS:
        yield seconds, plan.choose_again(Length(seconds)).choices


def reading_line(inputs: Sequence[str], sources: Sequence[DataSource]) -> str:
    """The first message of a run, with its inputs."""
    named = shlex.join(inputs) if len(inputs) <= 3 else f"{len(inputs)} inputs"
    files = [source for source in sources if source.dataset is None]
    parts = [f"{len(files):,} file{'s' if len(files) != 1 else ''}"] if files else []
    if files:
        parts.append(size_text(sum(source.size for source in files)))
    if len(files) < len(sources):
        parts.append(f"{len(sources) - len(files)} dataset(s)")
    return f"reading {named}: {', '.join(parts)}"
