"""Store and check the user's request for a run on text or conversations. The inputs, the length and
the settings are checked before any input is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.console import parse_count, parse_time
from firstlight.errors import ConfigError, nearest
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Length

#: Default length of a run in seconds. It is used if the user has not set the length and can't be
#: prompted for it.
DEFAULT_SECONDS = 600.0
#: Keys that restrict the valid widths of a model.
HEADS = ("model.num_attention_heads", "model.num_key_value_heads")


@dataclass(frozen=True)
class Request:
    """The user's request for a run. At most one of `seconds`, `tokens` and `steps` is set.

    Attributes:
        inputs: files, folders, globs, "stdlib" or "hf:NAME[:CONFIG[:SPLIT]]".
        seconds: wall-clock time of the whole command.
        tokens, steps: length of the run as a number of tokens or optimizer steps.
        size: name of the model's size, or its parameter count as text; None to choose the size.
        overrides: pairs (`section.key`, value as YAML text).
        text_key: field that holds the text in JSONL lines, tables and datasets.
        init_from: folder of the initial model; None to train a new model.
        val_inputs: validation data, in the same form as `inputs`. If it is empty, a part of the
            inputs is held out.
        as_is: True to read text unchanged; see `prepare`.
        keep: text that a fine-tuned model should not forget, in the same form as `inputs`, or the
            folder of a prepared corpus or a run. If it is empty, a control set is used.
    """

    inputs: Sequence[str]
    seconds: float | None = None
    tokens: float | None = None
    steps: int | None = None
    size: str | None = None
    overrides: Sequence[tuple[str, str]] = ()
    text_key: str = "text"
    init_from: str | None = None
    val_inputs: Sequence[str] = ()
    as_is: bool = False
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        given = {"--budget": self.seconds, "--tokens": self.tokens, "--steps": self.steps}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ConfigError(
                f"{' and '.join(named)} both set the length of the run: use only one of them"
            )
        if any(value is not None and not value > 0 for value in given.values()):
            raise ConfigError(f"{named[0]} must be more than 0")

    @property
    def has_length(self) -> bool:
        """True if the user has set the length of the run."""
        return (self.seconds, self.tokens, self.steps) != (None, None, None)

    def training_length(self, text_bytes: float = 0.0) -> Length:
        """Return the expected length of training.

        With a time budget, the result is the budget minus the seconds that the rest of the command
        is expected to take. The default budget is `DEFAULT_SECONDS`.

        Args:
            text_bytes: bytes of text that must be prepared.
        """
        if self.has_length and self.seconds is None:
            return Length(None, self.tokens, self.steps)
        seconds = self.seconds or DEFAULT_SECONDS
        prepared = min(text_bytes, defaults.PREPARED_BYTES) / defaults.PREPARED_PER_SECOND
        return Length(max(seconds - defaults.OTHER_SECONDS - prepared, seconds / 2))

    @property
    def fixed(self) -> dict[str, Any]:
        """Values of the overrides, keyed by `section.key`."""
        from firstlight.recipe.load import override_value

        return {name: override_value(name, text) for name, text in self.overrides}

    def check(self, *, conversations: bool = False) -> None:
        """Reject invalid overrides before anything is trained.

        Args:
            conversations: True if the inputs are conversations.

        Raises:
            ConfigError: a key is unknown, a key can't be set because the inputs determine its
                value, or a value is invalid.
        """
        from firstlight.recipe import parse_recipe

        taken = {"data.dir": "the inputs are prepared for the run"}
        taken |= {
            "data.files": "the inputs are the files",
            "data.kind": "the kind follows from the inputs",
        }
        taken |= {"data.mix": "prepare the corpora and train with a recipe"}
        taken |= {"data.keep": "use --keep"}
        lengths = ("schedule.max_steps", "schedule.max_minutes")
        taken |= dict.fromkeys(lengths, "use --budget, --tokens or --steps")
        if self.tokens or self.steps or self.fixed.get("schedule.epochs", 1) is None:
            taken["schedule.epochs"] = "it only limits the passes within a --budget"
        if self.init_from is None and (self.keep or "data.replay" in self.fixed):
            raise ConfigError(
                "--keep and --replay apply to fine-tuning only: add --init-from with the model"
            )
        for name, value in self.overrides:
            is_chat = (name, value) == AS_CHAT
            if is_chat and self.init_from is None:
                raise ConfigError(
                    "--data.kind chat applies to fine-tuning only: add --init-from with the model"
                )
            if name in taken and not is_chat:
                raise ConfigError(f"omit --{name} with texts as inputs: {taken[name]}")
            section = name.partition(".")[0]
            if self.init_from is not None and section in ("model", "init"):
                raise ConfigError(
                    f"--{name} applies to new models only: omit it, or omit --init-from "
                    f"{self.init_from}"
                )
            if self.init_from is None and section == "lora":
                raise ConfigError(
                    f"--{name} applies to fine-tuning only: add --init-from with the model"
                )
        if self.init_from is not None and self.size is not None:
            raise ConfigError(
                f"--size applies to new models only: omit it, or omit --init-from {self.init_from}"
            )
        data = {"kind": "chat", "files": ["unused"]} if conversations else {"dir": "unused"}
        data |= {} if self.init_from is None else {"keep": "unused"}
        # Some keys are only valid in combination with keys that are chosen later.
        others = sections_for(self.fixed)
        parse_recipe({"data": data, **others}, "options", self.overrides)


#: Setting this key causes all inputs to be read as conversations.
AS_CHAT = ("data.kind", "chat")


def request_of(
    inputs: str | Path | Sequence[str | Path],
    budget: str | float | None,
    tokens: str | float | None,
    steps: int | None,
    size: str | None,
    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]],
    text_key: str,
    init_from: str | Path | None = None,
    val_inputs: str | Path | Sequence[str | Path] = (),
    *,
    as_is: bool = False,
    keep: str | Path | Sequence[str | Path] = (),
    replay: float | None = None,
) -> Request:
    """Return the request for the arguments of `train_texts`.

    Raises:
        ConfigError: a time, number or size is invalid, or more than one length is set.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    if not all(isinstance(value, str) for _, value in pairs):
        # This import is skipped for command-line options, because it imports torch, which would
        # delay the first message.
        from firstlight.recipe import override_pairs

        pairs = override_pairs(pairs)
    if replay is not None:
        if not 0 <= replay < 1:
            raise ConfigError(f"--replay is a share such as 0.1 for 10%, not {replay:g}")
        pairs = [*pairs, ("data.replay", f"{replay:g}")]
    if size is not None and size not in defaults.SIZES:
        parameters_of(size)  # raises an error if the size is invalid
    return Request(
        _names(inputs),
        _parsed("--budget", parse_time, budget),
        _parsed("--tokens", parse_count, tokens),
        steps,
        size=size,
        overrides=tuple(pairs),
        text_key=text_key,
        init_from=None if init_from is None else str(init_from),
        val_inputs=_names(val_inputs),
        as_is=as_is,
        keep=_names(keep),
    )


def sections_for(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return recipe sections with preliminary values for keys that are chosen later. Without these
    values, keys set by the user could be rejected as invalid.
    """
    layout, size = defaults.LAYOUT, defaults.HEAD_DIM
    found: dict[str, Any] = {"schedule": {"kind": layout["schedule.kind"]}}
    if "optimizer.name" not in fixed:
        found["optimizer"] = {"learning_rate": layout["optimizer.learning_rate"]}
    if not any(name.startswith("model.") for name in fixed):
        return found
    model = {"model_type": layout["model.model_type"]}
    width, heads = fixed.get("model.hidden_size"), fixed.get(HEADS[0]) or fixed.get(HEADS[1])
    if isinstance(heads, int) and heads > 0:
        model |= {"hidden_size": size * heads, "num_attention_heads": heads}
    elif isinstance(width, int) and width > 0:
        model["num_attention_heads"] = 1 if width % size else width // size
    return {**found, "model": model}


def parameters_of(size: str) -> float:
    """Return the parameter count of a size such as "10M".

    Raises:
        ConfigError: `size` is not a number above 0.
    """
    try:
        found = parse_count(size)
    except ConfigError:
        found = 0.0
    if not found:
        raise ConfigError(
            f"--size {size} is unknown{nearest(size, defaults.SIZES)}: choose one of "
            f"{', '.join(defaults.SIZES)}, or a number of parameters such as 10M"
        )
    return found


def _names(inputs: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    return tuple(str(name) for name in names)


def _parsed(option: str, parse: Callable[[str], float], value: str | float | None) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
