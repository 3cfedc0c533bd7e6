"""The result of a run on texts: the loss beside gzip and xz, samples, and next commands."""

from __future__ import annotations

import itertools
import shlex
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from firstlight.data.shards import read_manifest
from firstlight.pipeline.chosen import Choices
from firstlight.pipeline.plan import Request, time_text
from firstlight.pipeline.run_folder import RunCall
from firstlight.report.findings import best_checkpoint
from firstlight.report.length import read_length
from firstlight.report.records import METRICS_NAME, SAMPLES_NAME, read_json_lines
from firstlight.training.course import LossCurve

if TYPE_CHECKING:
    from firstlight.training.loop import TrainResult


#: Columns and rows of the curve of the loss.
_CURVE_COLUMNS, _CURVE_ROWS = 80, 8
#: Characters of the prompt that a next command has.
_PROMPT_CHARS = 32
#: The last evaluation is worse than the best one from this share of its bits on.
_WORSE = 0.02


@dataclass(frozen=True)
class TextRun:
    """The result of `train_texts`.

    Attributes:
        run_folder: folder of the recipe, the data, checkpoints and the report.
        training: the result of the training; None for a run that was complete before.
        choices: every setting; None where the run of an earlier call was gone on with.
        bits_per_byte: bits per byte of held-out text, last evaluation (see `best`); None before the
            first one.
        gzip_bits_per_byte: bits per byte of the held-out text by gzip -9.
        xz_bits_per_byte: bits per byte of the held-out text by xz.
        samples: (prompt, continuation) pairs of the last evaluation.
        seconds: wall-clock time of the whole call.
        next_commands: (command, purpose) pairs.
        best: True where the last evaluations were worse than an earlier one, whose checkpoint is
            kept and the one to use (`--best`); `bits_per_byte` and `next_commands` are of that one
            then.
        answers: True for a model that was trained to answer; `bits_per_byte` is of answers then.
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


def result_of(call: RunCall, result: TrainResult | None, request: Request) -> TextRun:
    """The result for the caller, from the run folder's files."""
    folder, state = call.folder, call.state
    metrics = read_json_lines(folder / METRICS_NAME)
    evaluated = [line for line in metrics if line["step"] and line.get("bits_per_byte") is not None]
    found = [line["bits_per_byte"] for line in evaluated]
    kept = best_checkpoint(folder)
    # Evaluations of several steps can be equally good, and a recipe may keep none of them.
    best_steps = [line["step"] for line in evaluated if line["bits_per_byte"] == min(found)]
    is_worse = bool(found) and min(found) < (1 - _WORSE) * found[-1]
    best = is_worse and kept is not None and kept.step in best_steps
    samples = read_json_lines(folder / SAMPLES_NAME)
    prompt = first_words(samples[0]["prompt"]) if samples else ""
    last = max((line["step"] for line in samples), default=0)
    if best and kept is not None:
        last = kept.step
    splits = read_manifest(Path(state["data"]))["splits"]
    held = splits.get("val")
    gzip = None
    if held is not None and "gzip_bytes" in held:
        gzip = 8 * held["gzip_bytes"] / max(held["text_bytes"], 1)
    return TextRun(
        folder,
        result,
        call.choices,
        (min(found) if best else found[-1]) if found else None,
        gzip,
        state.get("xz"),
        [(line["prompt"], line["text"]) for line in samples if line["step"] == last],
        time.time() - call.began,
        list(_next_commands(call, request, prompt, best=best)),
        state.get("kind") == "chat",
        best,
    )


def first_words(prompt: str) -> str:
    """The beginning of a prompt for a command line: words of its first line, up to a character
    that a terminal could act on; "" for none."""
    line = next((line.strip() for line in prompt.splitlines() if line.strip()), "")
    line = "".join(itertools.takewhile(str.isprintable, line))
    short = textwrap.shorten(line, _PROMPT_CHARS, placeholder="", break_long_words=False)
    # Some languages have no spaces between words.
    return short or line[:_PROMPT_CHARS]


def _next_commands(
    call: RunCall, request: Request, prompt: str, *, best: bool
) -> Iterator[tuple[str, str]]:
    folder, inputs = shlex.quote(str(call.folder)), shlex.join(request.inputs)
    run = f"{folder} --best" if best else folder
    answers = call.state.get("kind") == "chat"
    if answers:
        yield f"firstlight chat {run}", "ask it, and read its answers"
    else:
        # The prompt is in the language and kind of the texts.
        words = shlex.quote(prompt or "Once upon a time")
        yield f"firstlight generate {run} --prompt {words}", "continue a text"
        yield f"firstlight chat {run}", "write and let it go on, turn by turn"
    yield f"firstlight serve {run}", "an OpenAI-compatible server"
    yield (
        f"firstlight convert {run} --to gguf --out {folder}-gguf",
        "a file for llama.cpp and Ollama",
    )
    length = read_length(call.folder)
    if length.get("max_steps") is not None and length["max_steps"] == length.get("most_steps"):
        return  # The text was read as often as it helps.
    longer = "1h" if request.seconds is None else f"{round(4 * request.seconds / 60)}m"
    more = "".join(
        f" --{key} {shlex.quote(value)}" for key, value in request.overrides if key != "run.dir"
    )
    more += f" --size {request.size}" if request.size is not None else ""
    if request.init_from is not None:
        more += f" --init-from {shlex.quote(request.init_from)}"
    if request.text_key != "text":
        more += f" --text-key {shlex.quote(request.text_key)}"
    yield f"firstlight train {inputs} --budget {longer}{more}", "train longer, beside this run"


def _curve_lines(folder: Path) -> Iterator[str]:
    """The training losses of a run, over all its calls; nothing for a run of a single step."""
    curve = LossCurve()
    for line in read_json_lines(folder / METRICS_NAME):
        if line.get("train/loss") is not None:
            curve.add(line["step"], line["train/loss"])
    if curve.last_step > curve.first_step:
        yield "training loss"
        yield from curve.lines(_CURVE_COLUMNS, _CURVE_ROWS)


def result_lines(run: TextRun, *, with_curve: bool = True) -> Iterator[str]:
    """The result for people, with the curve of the training loss unless that was shown before."""
    if with_curve:
        yield from _curve_lines(run.run_folder)
    if run.bits_per_byte is not None:
        beside = [
            f"{name}: {value:.3f}"
            for name, value in (("gzip -9", run.gzip_bits_per_byte), ("xz", run.xz_bits_per_byte))
            if value is not None
        ]
        compared = f" ({', '.join(beside)})" if beside else ""
        kind = "answers" if run.answers else "text"
        yield (
            f"the model needs {run.bits_per_byte:.3f} bits for a byte of held-out {kind}{compared}"
        )
    if run.best:
        yield (
            "later steps made it worse on held-out text, since the run has read its own too often: "
            "--best takes the checkpoint before them"
        )
    for prompt, text in run.samples[:3]:
        yield f"  {prompt!r} -> {text!r}"
    yield f"all of it took {time_text(run.seconds)}; report: {run.run_folder / 'report.html'}"
    yield ""
    width = max(len(command) for command, _ in run.next_commands)
    for command, purpose in run.next_commands:
        yield f"{command:<{width}}  # {purpose}"
