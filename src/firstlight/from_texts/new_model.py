"""Train a new model on texts: scan the texts, create a tokenizer and shards, choose the settings,
and train."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.console import counted, rounded, time_text
from firstlight.errors import ConfigError, RunReplacedError
from firstlight.from_texts.choices import check_given, choose, choose_vocabulary
from firstlight.from_texts.plan import Choices, Row, RunPlan
from firstlight.from_texts.preparation import (
    Preparation,
    fitting_prompts,
    held_out_gzip,
    prepared_texts,
    train_tokenizer_on,
)
from firstlight.from_texts.request import Request
from firstlight.from_texts.run_folder import RunCall
from firstlight.from_texts.scan import CorpusFacts, Scan, estimated_text, scan_texts
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Length, TextFacts

if TYPE_CHECKING:
    from firstlight.training.loop import TrainResult

#: Number of seconds of training after which the speed of the run is compared with the speed
#: measured before training.
_FIRST_SECONDS = 10.0
#: Number of initial steps that are slow because they compile and allocate memory.
_SLOW_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class TextPlan(RunPlan):
    """The plan of a new model's run.

    Attributes:
        scan: scan of the texts.
        text: token statistics of the texts, which are estimated until the texts are prepared.
        vocabulary: reason for the vocabulary size.
        held_out_gzip: size of the held-out text when compressed with gzip -9, in bits per byte;
            None if the texts are not prepared yet.
    """

    scan: Scan
    text: TextFacts
    vocabulary: str
    held_out_gzip: float | None = None
    data_name = "the text"

    @property
    def held_out_tokens(self) -> float:
        return self.text.val_tokens

    @property
    def recorded(self) -> dict[str, Any]:
        return {"corpus": asdict(self.scan.facts)}

    def choose_again(self, length: Length, text: TextFacts | None = None) -> TextPlan:
        """Return the plan for a different length of the run. If `text` is given, it replaces the
        token statistics of the texts."""
        text = text or self.text
        choices = choose(text, self.speed, length, self.request.fixed, size=self.request.size)
        return replace(self, text=text, choices=choices)

    def model_lines(self) -> Iterator[str]:
        choices = {choice.key: choice for choice in self.choices.choices}
        width = choices["model.hidden_size"]
        yield (
            f"model: {rounded(self.choices.parameters)} parameters, "
            f"{counted(choices['model.num_hidden_layers'].value, 'layer')}, hidden size "
            f"{width.value} ({width.reason})"
        )

    def expected_result(self) -> str:
        expected = "bits per byte unknown for this optimizer"
        if self.choices.bits_per_byte is not None:
            low, high = self.choices.bits_per_byte
            expected = f"{low:.2f} to {high:.2f} bits per byte of held-out text"
            if self.text.is_unusual:
                expected += ", a wide range because this text is hard to predict"
        gzip = f"gzip -9 of all text: {self.scan.facts.gzip_text}"
        if self.held_out_gzip is not None:
            gzip = f"gzip -9 of the held-out text: {self.held_out_gzip:.2f}"
        return f"{expected} ({gzip})"

    def first_rows(self) -> list[Row]:
        return [("vocabulary", f"{self.text.vocab_size:,} tokens", self.vocabulary)]


class NewModel:
    """Trains a new model on texts; implements `run.Work`.

    Args:
        request: inputs, length and overrides of the run.
        tell: callback for each message to the user.
        progress: True to show a progress bar.

    Attributes:
        content_key: hash of the texts.

    Raises:
        InputError, ConfigError: see `scan_texts`.
    """

    def __init__(self, request: Request, tell: Callable[[str], None], *, progress: bool) -> None:
        self._scan = scan_texts(request, tell, check_given, progress=progress)
        self.content_key = self._scan.facts.content_key

    def plan(self, request: Request, gpu: str | None = None) -> TextPlan:
        """Choose settings from estimated token statistics of the texts.

        Args:
            request: inputs, overrides and length of the run; the default length is
                `DEFAULT_SECONDS`.
            gpu: name of a GPU to plan for; None to plan for this machine.

        Raises:
            ConfigError: an option is invalid, the GPU is unknown, or the budget is too short.
        """
        from firstlight.planner.advise.speed import new_model_speed
        from firstlight.planner.plan.machine import find_machine

        fixed, scan = request.fixed, self._scan
        machine = find_machine(gpu, device=fixed.get("run.device") or "auto")
        speed = new_model_speed(machine)
        vocabulary = choose_vocabulary(scan.facts, fixed)
        text = estimated_text(scan.facts, vocabulary.value, scan.val_bytes)
        length = request.training_length(scan.facts.total_bytes)
        plan = TextPlan(
            request=request,
            scan=scan,
            machine=machine,
            speed=speed,
            text=text,
            vocabulary=vocabulary.reason,
            choices=choose(text, speed, length, fixed, size=request.size),
            prompts=scan.prompts,
        )
        plan.require_time(length)
        return plan

    def begin(self, plan: RunPlan, request: Request, call: RunCall) -> TrainResult:
        """Prepare the texts, choose the settings again from the counted tokens and the remaining
        time, and train."""
        assert isinstance(plan, TextPlan)
        scan, size = plan.scan, plan.text.vocab_size
        texts = Preparation(
            scan,
            request.text_key,
            plan.choices.tokens * plan.text.bytes_per_token,
            str(size),
            tokenizer=lambda: train_tokenizer_on(scan, request.text_key, size, call.tell),
        )
        data = prepared_texts(texts, call)
        call.write_unread(scan.unread)
        text = counted_text(data, scan.facts, call.state.get("xz"))
        length = call.length(request)
        plan = replace(plan, request=request, held_out_gzip=held_out_gzip(data))
        plan = plan.choose_again(length, text)
        plan.require_time(length)
        if text.vocab_size < size:
            plan = replace(plan, vocabulary=f"too few different pairs for {size:,} tokens")
            call.tell(f"note: the text has {plan.vocabulary}")
        try:
            return self._train(plan, data, call)
        except _OtherModelError as error:
            plan = error.plan
            call.tell(str(error))
        gc.collect()  # Free the memory of the first model.
        _forget_first_steps(call.folder)
        return self._train(plan, data, call, chosen_again=True)

    def _train(
        self, plan: TextPlan, data: Path, call: RunCall, *, chosen_again: bool = False
    ) -> TrainResult:
        """Train a plan's model.

        Raises:
            _OtherModelError: a different model is expected to be better (see `_FirstSteps`). This
                error is not raised if the plan has already been chosen again.
        """
        from firstlight.from_texts.machine import train_plan
        from firstlight.tokenizer import Tokenizer

        most = plan.choices["data.seq_len"] // 2
        prompts = fitting_prompts(plan.scan.prompts, Tokenizer.from_pretrained(data), most)
        plan = replace(plan, data={"dir": str(data)}, prompts=prompts)
        return train_plan(
            plan,
            call,
            on_step=None
            if chosen_again
            else lambda choices: _FirstSteps(replace(plan, choices=choices), call),
            names_files=not chosen_again,
        )


class _OtherModelError(RunReplacedError):
    """Error that ends a run because a different model is expected to be better.

    Args:
        message: message shown to the user.
        plan: plan with the better model.
    """

    def __init__(self, message: str, plan: TextPlan) -> None:
        super().__init__(message)
        self.plan = plan


class _FirstSteps:
    """Callback of `train` for each step's metrics. It calls `call.on_step`. If the speed in the
    first seconds of training differs from the speed measured before training, it chooses the model
    again.

    Args:
        plan: plan of the run.
        call: the call to `train_texts`.
    """

    def __init__(self, plan: TextPlan, call: RunCall) -> None:
        self._plan, self._call = plan, call
        self._rates: list[float] = []
        self._seconds = 0.0
        # If the user sets the size of the model, or a number of tokens or steps, the choice does
        # not depend on the speed.
        self._is_done = plan.request.seconds is None or plan.request.size is not None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """See `train`.

        Raises:
            _OtherModelError: a different model is expected to be better, even though less time is
                left to train it.
        """
        if self._call.on_step is not None:
            self._call.on_step(record)
        if self._is_done:
            return
        self._rates.append(record["tokens_per_second"])
        if len(self._rates) > _SLOW_STEPS:
            self._seconds += record["seconds"]
        if self._seconds < _FIRST_SECONDS:
            return
        self._is_done = True
        reached = statistics.median(self._rates[_SLOW_STEPS:])
        factor = reached / self._plan.choices.tokens_per_second
        if max(factor, 1 / factor) > defaults.OTHER_SPEED:
            self._choose_again(reached, factor, record["elapsed_seconds"])

    def _choose_again(self, reached: float, factor: float, used: float) -> None:
        """Choose again between the current model, trained for the full time, and other models,
        trained for the remaining time.

        Args:
            reached: tokens per second in the first steps.
            factor: ratio of the reached speed to the expected speed.
            used: seconds that the training loop has taken.
        """
        plan, call = self._plan, self._call
        before = plan.choices
        found = f"{reached:,.0f} tokens/s instead of {before.tokens_per_second:,.0f}"
        plan = replace(plan, speed=plan.speed.times(factor))
        own = {key: before[key] for key in (*_SHAPE, "data.seq_len")}
        try:
            left = call.length(plan.request)
            other = plan.choose_again(left)
        except ConfigError:  # Too little time is left, even for the smallest model.
            return
        assert left.seconds is not None
        whole = Length(used + left.seconds)
        kept = choose(plan.text, plan.speed, whole, plan.request.fixed | own)
        if left.seconds < 2 * used or not _is_better(other.choices, kept):
            call.tell(f"{found}: the chosen model is still the best one for the remaining time")
            return
        raise _OtherModelError(
            f"{found}: training restarts with {rounded(other.choices.parameters)} parameters "
            f"instead of {rounded(before.parameters)}, for the remaining {time_text(left.seconds)}",
            other,
        )


#: Recipe keys that are determined by the chosen model size.
_SHAPE = ("model.hidden_size", "model.num_hidden_layers")


def _is_better(other: Choices, kept: Choices) -> bool:
    """Return True if `other` is a different model from `kept` and is expected to reach fewer bits
    per byte. A different model is also accepted if the expected bits per byte are unknown.
    """
    if all(other[key] == kept[key] for key in _SHAPE):
        return False
    if other.bits_per_byte is None or kept.bits_per_byte is None:
        return True
    return other.bits_per_byte < kept.bits_per_byte


def _forget_first_steps(folder: Path) -> None:
    """Delete the checkpoints, times and metrics of a run's first steps.

    If the run is killed afterwards, it restarts with the model in its recipe.
    """
    from firstlight.checkpoint.manifest import CHECKPOINTS
    from firstlight.files.atomic import remove_file, remove_folder
    from firstlight.run_log.names import LENGTH_NAME, METRICS_NAME

    if (folder / CHECKPOINTS).exists():
        remove_folder(folder / CHECKPOINTS)
    for name in (LENGTH_NAME, METRICS_NAME):
        remove_file(folder / name)


def counted_text(data: Path, facts: CorpusFacts, xz: float | None = None) -> TextFacts:
    """Return facts about prepared text, with counted tokens.

    Args:
        data: folder of the shards.
        facts: facts about the corpus from its scan.
        xz: size of the held-out text when compressed with xz, in bits per byte; None to keep the
            value measured on the sample.
    """
    from firstlight.data.shards import read_manifest

    manifest = read_manifest(data)
    splits = manifest["splits"]
    train, val = splits["train"], splits.get("val", {"tokens": 0, "text_bytes": 0})
    size = train["text_bytes"] + val["text_bytes"]
    tokens = train["tokens"] + val["tokens"]
    hardness = facts.hardness
    if xz is not None:
        hardness = replace(hardness, held_out_xz_bits_per_byte=xz)
    return TextFacts(
        manifest["vocab_size"],
        train["tokens"],
        size / tokens,
        hardness,
        val_tokens=val["tokens"],
        bytes_per_character=facts.bytes_per_character,
    )
