"""Part "run" of `firstlight bench gpu`: a real run by `firstlight train`, from text to its report.

    python -m firstlight.bench.process firstlight.bench.gpu_run REQUEST

REQUEST is a JSON object:

    recipe       values of a recipe without its data and number of steps
    minutes      duration of the run
    trial_steps  steps of a first run that measures the speed
    vocab_size   vocabulary size of the tokenizer
    work         folder for the corpus and the runs
    keep         folder into which files of the run are copied
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.bench.gpu_parts import BenchMachine, Findings, Page, Part
from firstlight.bench.gpu_training import DRY_VOCAB_SIZE, VOCAB_SIZE
from firstlight.bench.pictures import new_figure, png_of
from firstlight.bench.process import last_words
from firstlight.bench.runner import Row
from firstlight.bench.tables import markdown_table
from firstlight.bench.training_once import library_corpus
from firstlight.errors import DIVERGED_EXIT_CODE, TrainingError
from firstlight.files.atomic import write_json

NAME = "run"
_MODULE = "firstlight.bench.gpu_run"
_ROW = "gpt2-124m on the standard library"

#: Files of the run folder that are copied into the folder of the results, as run-NAME.
_KEPT = ("metrics.jsonl", "report.png", "report.html")

#: Number of points of the loss curve in results.json, up to twice that.
_POINTS = 300

#: Exit code of a run that reached its time limit: it has saved a checkpoint, so it counts.
_STOPPED = 75

_GIB = 2**30


def _rows(machine: BenchMachine) -> list[Row]:
    large = machine.memory_bytes >= 60 * _GIB
    micro = 64 if machine.memory_bytes >= 120 * _GIB else 32 if large else 8
    model = {"model_type": "gpt2", "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    if machine.dry:
        micro = 2
        model |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model |= {"max_position_embeddings": 64}
    recipe = {
        "run": {"device": machine.device},
        "model": model,
        "batch": {"micro_batch_size": micro},
        "optimizer": {"learning_rate": 6e-4},
        "efficiency": {"compile": not machine.dry, "vocab_multiple": 64},
        "evaluation": {
            "on_start": False,
            "every_steps": 20 if machine.dry else 100,
            "max_rows": 2 if machine.dry else 256,
            "sample_prompts": ["def main():\n"],
            "sample_tokens": 8 if machine.dry else 128,
        },
        "checkpoint": {"every_steps": 0},
    }
    request = {
        "recipe": recipe,
        "minutes": 0.005 if machine.dry else 3,
        "trial_steps": 3 if machine.dry else 40,
        "vocab_size": DRY_VOCAB_SIZE if machine.dry else VOCAB_SIZE,
    }
    return [Row(_ROW, _MODULE, request, seconds=25 if machine.dry else 400, value=3, limit=500)]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train twice: "trial_steps" steps to measure the speed, then as many as fit into "minutes".

    Returns:
        - "steps", "tokens_per_step": of the second run
        - "trial_rate", "median_rate": tokens per second of the first and of the second run
        - "wall_seconds": duration of the second command
        - "curve", "validation": lists of [tokens seen, loss] of training and validation
        - "last": the last line of the metrics
        - "lowest": "step", "val/loss", "bits_per_byte" and "epoch" of the lowest validation loss
        - "stopped": True if the time limit ended the run; "diverged": True if it diverged

    Raises:
        TrainingError: `firstlight train` failed.
    """
    work, keep = Path(request["work"]), Path(request["keep"])
    corpus = library_corpus(work, request["vocab_size"])
    trial, _, _ = _train(request, corpus, work / "trial", request["trial_steps"])
    tokens = trial[0]["tokens_seen"]
    rate = statistics.median(line["tokens_per_second"] for line in trial[len(trial) // 2 :])
    steps = max(request["trial_steps"], int(60 * request["minutes"] * rate / tokens))
    metrics, code, seconds = _train(request, corpus, work / "run", steps)
    for name in _KEPT:
        if (work / "run" / name).is_file():
            shutil.copyfile(work / "run" / name, keep / f"run-{name}")
    evaluated = [line for line in metrics if "val/loss" in line]
    lowest = min(evaluated, key=lambda line: line["val/loss"], default={})
    every = max(1, len(metrics) // _POINTS)
    return {
        "steps": metrics[-1]["step"],
        "tokens_per_step": tokens,
        "trial_rate": rate,
        "median_rate": statistics.median(line["tokens_per_second"] for line in metrics),
        "wall_seconds": seconds,
        "curve": [[line["tokens_seen"], line["train/loss"]] for line in metrics[::every]],
        "validation": [[line["tokens_seen"], line["val/loss"]] for line in evaluated],
        "last": metrics[-1],
        "lowest": {key: lowest.get(key) for key in ("step", "val/loss", "bits_per_byte", "epoch")},
        "stopped": code == _STOPPED,
        "diverged": code == DIVERGED_EXIT_CODE,
        "line": f"{metrics[-1]['step']} steps, lowest val/loss {lowest.get('val/loss')}",
    }


def _train(
    request: Mapping[str, Any], corpus: Path, folder: Path, steps: int
) -> tuple[list[dict[str, Any]], int, float]:
    """Run `firstlight train` for a number of steps in a new folder.

    Returns:
        The lines of metrics.jsonl, the exit code, and the duration in seconds.

    Raises:
        TrainingError: the run failed; the text has the last message of the command.
    """
    values = json.loads(json.dumps(request["recipe"]))
    values["run"] |= {"dir": str(folder), "max_minutes": request["minutes"] + 1.5}
    values["data"] = {"dir": str(corpus)}
    values["schedule"] = {"max_steps": steps, "warmup_ratio": 0.05}
    recipe = folder.parent / f"{folder.name}.yaml"
    write_json(recipe, values)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-P", "-m", "firstlight", "train", str(recipe)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - start
    if done.returncode not in (0, _STOPPED, DIVERGED_EXIT_CODE):
        raise TrainingError(f"firstlight train: {last_words(done.returncode, done.stderr)}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], done.returncode, seconds


def _page(found: Findings) -> Page:
    run = found.outcome(NAME, _ROW).runs[-1]
    last, lowest = run["last"], run["lowest"]
    rows: Sequence[tuple[str, str]] = [
        ("steps", f"{run['steps']:,} of {run['tokens_per_step']:,} tokens"),
        ("tokens, epochs", f"{last['tokens_seen']:,}, {last['epoch']:.1f}"),
        ("tokens/s, median over the steps", f"{run['median_rate']:,.0f}"),
        ("the whole command", f"{run['wall_seconds']:.0f} s"),
        ("peak memory", f"{last['memory_bytes'] / _GIB:.1f} GiB"),
        ("first and last training loss", f"{run['curve'][0][1]:.3f}, {last['train/loss']:.3f}"),
        ("lowest validation loss", _lowest(lowest)),
    ]
    rows = [*rows, *((("ended by its time limit", "yes"),) if run["stopped"] else ())]
    rows = [*rows, *((("diverged", "yes"),) if run["diverged"] else ())]
    pictures = {"gpu-run.png": _draw(run)}
    text = (
        "A tokenizer and token shards of the library's source, some 3 million tokens, and\n"
        "`firstlight train` on them, with evaluations, samples and a checkpoint as in any run.\n\n"
        f"{markdown_table(('figure', 'value'), rows)}\n![loss](../images/gpu-run.png)\n"
    )
    report = None if found.folder is None else found.folder / "run-report.png"
    if report is not None and report.is_file():
        pictures["gpu-run-report.png"] = report.read_bytes()
        text += "\nThe run's own report:\n\n![report](../images/gpu-run-report.png)\n"
    summary = (
        f"- {run['steps']:,} steps, {last['tokens_seen'] / 1e6:,.0f} million tokens in "
        f"{run['wall_seconds']:.0f} s with start, evaluations and saves; "
        f"{run['median_rate']:,.0f} tokens/s; lowest validation loss {_lowest(lowest)}."
    )
    return Page(summary, text, pictures)


def _lowest(lowest: Mapping[str, Any]) -> str:
    if lowest["val/loss"] is None:
        return "none"
    bits = lowest["bits_per_byte"]
    said = "" if bits is None else f", {bits:.3f} bits per byte"
    return f"{lowest['val/loss']:.3f}{said}, at step {lowest['step']:,}"


def _draw(run: Mapping[str, Any]) -> bytes:
    """A PNG of training and validation loss over the tokens seen."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    for key, style, label in (("curve", "-", "train/loss"), ("validation", "o-", "val/loss")):
        axes.plot(
            [tokens / 1e6 for tokens, _ in run[key]],
            [loss for _, loss in run[key]],
            style,
            markersize=3,
            label=label,
        )
    axes.set(xlabel="tokens seen, millions", ylabel="nats a token")
    axes.legend()
    return png_of(figure)


RUN = Part(
    NAME,
    "A real run: GPT-2 124M on the standard library for three minutes",
    "From the source of Python's standard library to a report, by `firstlight train`: loss curve, "
    "speed with evaluations and saves, and the report itself.",
    _rows,
    _page,
)
