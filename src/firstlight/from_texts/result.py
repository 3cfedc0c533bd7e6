"""Summarise the result of a run. The summary contains the loss compared with gzip and xz, sample
texts, and commands that use the model."""

from __future__ import annotations

import itertools
import shlex
import textwrap
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.console import console, time_text
from firstlight.data.shards import read_manifest
from firstlight.errors import DataError
from firstlight.from_texts.plan import Choices
from firstlight.from_texts.preparation import held_out_gzip
from firstlight.from_texts.request import Request
from firstlight.from_texts.run_folder import (
    RECIPE_NAME,
    RunCall,
    command_of,
    has_run,
    length_options,
    own_options,
)
from firstlight.recipe.load import parse_yaml
from firstlight.report.summary import KeptResult, best_checkpoint, kept_result
from firstlight.run_log.names import METRICS_NAME, SAMPLES_NAME
from firstlight.run_log.reader import read_json_lines, read_length
from firstlight.training.progress import sample_line

if TYPE_CHECKING:
    from firstlight.training.loop import TrainResult


#: Maximum number of sample texts and maximum number of commands to show.
_SHOWN_SAMPLES, _SHOWN_COMMANDS = 2, 3
#: Maximum number of characters of the prompt in a suggested command.
_PROMPT_CHARS = 32
#: Minimum number of characters in a suggested prompt with several words, and minimum number of
#: characters in a single word of a script without upper and lower case.
_LEAST_CHARS, _LEAST_LETTERS = 8, 4
#: Characters that can follow a complete word. "" represents the end of the line.
_AFTER_A_WORD = ("", *"\t,;:.!?…،؛؟।、，；：。！？")
#: Minimum budget, in minutes, that is suggested for a longer run.
_LEAST_MINUTES = 3
#: Purposes of the commands that continue training or train longer.
_CONTINUE, _LONGER = "continue this run", "train longer, in another folder"
#: An earlier checkpoint is recommended if its bits per byte are lower than those of the last
#: evaluation by at least this fraction.
_WORSE = 0.02


@dataclass(frozen=True)
class TextRun:
    """The result of `train_texts`.

    Attributes:
        run_folder: folder that contains the recipe, the data, the checkpoints and the report.
        training: result of the training; None if the run was already complete.
        choices: all settings; None if the call resumed the run of an earlier call.
        bits_per_byte: bits per byte on held-out text at the last evaluation, or at an earlier
            evaluation if `best` is True. None if there was no evaluation.
        gzip_bits_per_byte, xz_bits_per_byte: size of the held-out text after compression with gzip
            -9 or with xz, in bits per byte; None if unknown.
        samples: pairs (prompt, continuation) from the last evaluation.
        seconds: wall-clock time of the whole call.
        next_commands: pairs (command, purpose) of commands that use the model.
        answers: True if the model was trained on conversations. In this case, `bits_per_byte` is
            measured on the assistant's answers.
        best: True if the last evaluation was clearly worse than an earlier evaluation whose
            checkpoint still exists. The user should then use the earlier checkpoint with `--best`.
            `bits_per_byte`, `samples` and `next_commands` also refer to the earlier checkpoint.
        held_out_share: fraction of the held-out text on which `bits_per_byte` was measured; 1 for
            conversations. `gzip_bits_per_byte` and `xz_bits_per_byte` refer to all of the held-out
            text.
        expected_bits_per_byte: lowest and highest expected value of `bits_per_byte`; None for
            fine-tuning and for a run that was stopped.
        reward_accuracy: fraction of the held-out preference pairs whose preferred answer had the
            higher reward at the last evaluation. None if there was no evaluation with preference
            pairs.
        kept: change of the new text and the kept text by fine-tuning. None for a new
            model. Its step is that of the checkpoint that `best` recommends.
    """

    run_folder: Path
    training: TrainResult | None
    choices: Choices | None
    bits_per_byte: float | None
    gzip_bits_per_byte: float | None
    xz_bits_per_byte: float | None
    samples: Sequence[tuple[str, str]]
    seconds: float
    next_commands: Sequence[tuple[str, str]]
    answers: bool = False
    best: bool = False
    held_out_share: float = 1.0
    expected_bits_per_byte: tuple[float, float] | None = None
    reward_accuracy: float | None = None
    kept: KeptResult | None = None


def result_of(call: RunCall, result: TrainResult | None, request: Request) -> TextRun:
    """Read the result of a call from the files in the run folder.

    Args:
        call: the call to `train_texts`.
        result: result of the training; None if the run was already complete.
        request: inputs, length and overrides of the run.
    """
    folder, state = call.folder, call.state
    metrics = read_json_lines(folder / METRICS_NAME)
    evaluated = [line for line in metrics if line["step"] and line.get("bits_per_byte") is not None]
    found = [line["bits_per_byte"] for line in evaluated]
    kept = best_checkpoint(folder)
    # Several evaluations can have the same lowest value. The checkpoints of their steps may all
    # have been deleted.
    best_steps = [line["step"] for line in evaluated if line["bits_per_byte"] == min(found)]
    is_worse = bool(found) and min(found) < (1 - _WORSE) * found[-1]
    best = is_worse and kept is not None and kept.step in best_steps
    trade = kept_result(folder)
    best_bits = min(found, default=None)
    if trade is not None and trade.new is not None:
        best = not trade.is_last
        best_bits = None if trade.of_pairs else trade.new[1]
    key = "val/reward_accuracy"
    # At step 0, all rewards are 0, because they are relative to the starting model.
    in_order = [line[key] for line in metrics if line["step"] and key in line]
    samples = read_json_lines(folder / SAMPLES_NAME)
    prompt = first_words(line["prompt"] for line in samples)
    last = max((line["step"] for line in samples), default=0)
    if best and kept is not None:
        last = kept.step
    stopped = result is not None and result.stopped_by is not None
    held = gzip = None
    try:
        held = read_manifest(Path(state["data"]))["splits"].get("val")
        gzip = held_out_gzip(Path(state["data"]))
    except DataError as error:
        # The shards were deleted while the run was using them. The model itself is complete.
        call.tell(f"warning: {error}")
    return TextRun(
        folder,
        result,
        call.choices,
        (best_bits if best else found[-1]) if found else None,
        gzip_bits_per_byte=gzip,
        xz_bits_per_byte=state.get("xz"),
        samples=[(line["prompt"], line["text"]) for line in samples if line["step"] == last],
        seconds=time.time() - call.began,
        next_commands=list(
            _next_commands(call, request, metrics, prompt, best=best, stopped=stopped)
        ),
        answers=state.get("kind") == "chat",
        best=best,
        held_out_share=1.0
        if held is None
        else _held_out_share(folder, held["tokens"], state.get("kind")),
        expected_bits_per_byte=None
        if stopped or not state.get("expected")
        else tuple(state["expected"]),
        reward_accuracy=in_order[-1] if in_order else None,
        kept=trade,
    )


def _held_out_share(folder: Path, tokens: int, kind: str | None) -> float:
    """Return the fraction of the validation split that each evaluation of the run reads. `tokens`
    is the number of tokens in the split. For conversations, return 1, because their rows are padded
    and the fraction can't be computed from the number of tokens."""
    if kind == "chat":
        return 1.0
    recipe = parse_yaml((folder / RECIPE_NAME).read_text(encoding="utf-8"))
    rows = recipe["evaluation"]["max_rows"]
    return min(1.0, rows * recipe["data"]["seq_len"] / max(tokens, 1)) if rows else 1.0


def first_words(prompts: Iterable[str]) -> str:
    """Return a short prompt for use in a command. It is the beginning of the first line that looks
    like natural language, and consists only of letters and spaces. Return "" if no line looks like
    natural language.
    """
    for line in itertools.chain.from_iterable(map(str.splitlines, prompts)):
        # Skip quotation marks, list markers and similar characters.
        start = next((at for at, c in enumerate(line) if c.isalnum()), len(line))
        text = "".join(itertools.takewhile(_is_of_words, line[start:]))
        after = line[start + len(text) :][:1]
        if after not in _AFTER_A_WORD:
            text = text.rpartition(" ")[0]  # The last word is a part of a name, a path or a number.
        short = textwrap.shorten(text, _PROMPT_CHARS, placeholder="", break_long_words=False)
        # In a language without spaces, the line is a single long word, so it is shortened by
        # characters.
        short = short or text.strip()[:_PROMPT_CHARS]
        is_sentence = " " in short and len(short) >= _LEAST_CHARS
        # Text in a script without upper and lower case may not contain any spaces.
        if is_sentence or (len(short) >= _LEAST_LETTERS and short.lower() == short.upper()):
            return short
    return ""


def _is_of_words(character: str) -> bool:
    """Return True for spaces, letters, and combining marks, which belong to the letters in many
    scripts."""
    return character == " " or unicodedata.category(character)[0] in "LM"


def _next_commands(
    call: RunCall,
    request: Request,
    metrics: Sequence[Mapping[str, Any]],
    prompt: str,
    *,
    best: bool,
    stopped: bool,
) -> Iterator[tuple[str, str]]:
    """Yield pairs (command, purpose) of commands that use the model, train longer, or continue a
    stopped run. The most useful commands come first."""
    answers = call.state.get("kind") == "chat"
    first, second, *others = model_commands(call.folder, prompt, answers=answers, best=best)
    if stopped:
        again = length_options(request) + own_options(request)
        yield command_of(request, again), _CONTINUE
    yield first
    yield second
    if not stopped:
        yield from _longer(call, request, metrics)
    yield from others


def model_commands(
    folder: Path, prompt: str, *, answers: bool, best: bool = False
) -> list[tuple[str, str]]:
    """Return pairs (command, purpose) of commands that use a run's model. The most useful commands
    come first.

    Args:
        folder: run folder.
        prompt: prompt in the language and style of the training text; "" for a default prompt.
        answers: True if the model was trained on conversations.
        best: True to use the checkpoint with the lowest validation loss.
    """
    name = shlex.quote(str(folder))
    run = f"{name} --best" if best else name
    words = shlex.quote(prompt or "Once upon a time")
    generate = f"firstlight generate {run} --prompt {words}", "continue a text"
    return [
        *([] if answers else [generate]),
        (f"firstlight chat {run}", "ask questions" if answers else "continue a text in turns"),
        (f"firstlight serve {run}", "OpenAI-compatible server"),
        (f"firstlight convert {run} --to gguf --out {name}-gguf", "file for llama.cpp and Ollama"),
    ]


def _longer(
    call: RunCall, request: Request, metrics: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield the command for a longer run and its purpose. Yield nothing if a longer run would
    produce the same model."""
    length = read_length(call.folder)
    if length.get("max_steps") is not None and length["max_steps"] == length.get("most_steps"):
        return  # The run has reached the limit on epochs.
    seconds = request.seconds
    if seconds is None:
        seconds = sum(line.get("seconds", 0.0) for line in metrics)
    minutes = max(round(4 * seconds / 60), _LEAST_MINUTES)
    # --run.dir is omitted, because that folder already contains this run.
    own = [(key, value) for key, value in request.overrides if key != "run.dir"]
    longer = replace(request, seconds=60.0 * minutes, tokens=None, steps=None, overrides=own)
    while has_run(longer, call.state["content_key"]):
        longer = replace(longer, seconds=4 * (longer.seconds or 0.0))
    command = command_of(longer, length_options(longer) + own_options(longer))
    yield command, _LONGER


def result_lines(run: TextRun) -> Iterator[str]:
    """Yield at most fourteen lines that describe the result to the user. They contain the loss
    compared with gzip and xz, sample texts, the path of the model, and the most useful commands.

    Args:
        run: result to show.
    """
    if run.bits_per_byte is not None:
        beside = [
            f"{name}: {value:.3f}"
            for name, value in (("gzip -9", run.gzip_bits_per_byte), ("xz", run.xz_bits_per_byte))
            if value is not None
        ]
        if run.expected_bits_per_byte is not None:
            beside.append("expected: {:.2f} to {:.2f}".format(*run.expected_bits_per_byte))
        compared = f" ({', '.join(beside)})" if beside else ""
        kind = "answers" if run.answers else "text"
        share = run.held_out_share
        part = f", measured on {100 * share:.0f}% of it" if share < 0.995 else ""
        yield f"result: {run.bits_per_byte:.3f} bits per byte of held-out {kind}{part}{compared}"
        if run.gzip_bits_per_byte is not None and run.bits_per_byte > run.gzip_bits_per_byte:
            yield f"the result is worse than gzip -9: {_remedy(run)}"
    if run.reward_accuracy is not None:
        yield (
            f"result: {run.reward_accuracy:.1%} of held-out preference pairs in the right order "
            "(relative to the starting model)"
        )
    if run.best and run.kept is not None:
        yield (
            "later steps are worse on both texts together: --best uses the checkpoint of step "
            f"{run.kept.step:,}"
        )
    elif run.best:
        yield (
            "later steps overfitted (the held-out loss rose again): --best uses the checkpoint "
            "before them"
        )
    for prompt, text in run.samples[:_SHOWN_SAMPLES]:
        yield f"  {sample_line(prompt, text, console().width - 2)}"
    # The duration is omitted if the run was already complete, because the call did not train the
    # model.
    took = "" if run.training is None else f"; total time: {time_text(run.seconds)}"
    yield f"model: {run.run_folder}; report: {run.run_folder / 'report.html'}{took}"
    yield from command_lines(run.next_commands)
    if run.kept is not None:
        yield ""
        yield str(run.kept)


def _remedy(run: TextRun) -> str:
    """Return advice for improving a model that has learned too little."""
    purposes = [purpose for _, purpose in run.next_commands]
    if run.best or not {_CONTINUE, _LONGER}.intersection(purposes):
        return "add texts, because more steps on the same texts would not help"
    how = "continues this run" if _CONTINUE in purposes else "starts a new run from the beginning"
    return f"train longer (the command below {how})"


def command_lines(commands: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield lines for the user: a blank line, followed by the first commands and their purposes."""
    yield ""
    shown = commands[:_SHOWN_COMMANDS]
    width = max(len(command) for command, _ in shown)
    for command, purpose in shown:
        yield f"{command:<{width}}  # {purpose}"
