"""Part "run" of `benchmarks gpu`: a real run by `firstlight train`, from text to its report.

    python -m firstlight.hardware.fresh_process benchmarks.gpu.run REQUEST

REQUEST is a JSON object:

    arguments    arguments of `firstlight train`
    budget       duration of the command in seconds; None without a budget
    work         folder in which the command is called, for its run folder
    keep         folder into which files of the run are copied, and its output
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import BenchMachine, Findings, Page, Part, Row
from benchmarks.pages import markdown_table
from firstlight.bench.display import new_figure, png_of
from firstlight.errors import TrainingError
from firstlight.files.atomic import read_json
from firstlight.hardware.fresh_process import last_words
from firstlight.run_log.reader import read_json_lines

NAME = "run"
_MODULE = "benchmarks.gpu.run"
_ROW = "standard library, 3 minutes"

#: Files of the run folder that are copied into the folder of the results, as run-NAME.
_KEPT = ("metrics.jsonl", "report.png", "report.html")

#: Number of points of the loss curve in results.json, up to twice that.
_POINTS = 300

_GIB = 2**30


def _rows(machine: BenchMachine) -> list[Row]:
    arguments, budget = ["stdlib", "--budget", "3m", "--run.device", machine.device], 180.0
    if machine.dry:
        arguments[1:3] = ["--steps", "6"]
    request = {"arguments": arguments, "budget": None if machine.dry else budget}
    return [Row(_ROW, _MODULE, request, seconds=30 if machine.dry else 200, value=2)]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Call `firstlight train` on texts.

    Returns:
        - "wall_seconds": duration of the command
        - "command": the command; "budget": its time budget in seconds, or None
        - "choices": its choices as {"key", "value", "reason"}; "parameters": size of the model
        - "bits_per_byte", "gzip", "xz": bits per byte of held-out text by the model and by the two
          compression programs; "expected": the range that was predicted for the model
        - "forecast": "predicted" and "measured" speed and memory
        - "median_rate": tokens per second of the median step
        - "curve", "validation": lists of [tokens seen, loss] of training and validation
        - "last": the last line of the metrics

    Raises:
        TrainingError: the command failed.
    """
    work, keep = Path(request["work"]), Path(request["keep"])
    command = ["firstlight", "train", *request["arguments"], "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command],
        cwd=work,
        capture_output=True,
        text=True,
        errors="replace",
    )
    seconds = time.perf_counter() - start
    (keep / "run-log.txt").write_text(done.stderr, encoding="utf-8")
    if done.returncode:
        raise TrainingError(f"firstlight train: {last_words(done.returncode, done.stderr)}")
    result = json.loads(done.stdout)
    folder = work / result["run_folder"]
    for name in _KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, keep / f"run-{name}")
    metrics = read_json_lines(folder / "metrics.jsonl")
    evaluated = [line for line in metrics if line.get("val/loss") is not None]
    steps = [line for line in metrics if line["step"]]
    every = max(1, len(steps) // _POINTS)
    return {
        "wall_seconds": seconds,
        "command": " ".join(command[:-1]),
        "budget": request["budget"],
        "choices": result["choices"]["choices"],
        "parameters": result["choices"]["parameters"],
        "bits_per_byte": result["bits_per_byte"],
        "gzip": result["gzip_bits_per_byte"],
        "xz": result["xz_bits_per_byte"],
        "expected": result["expected_bits_per_byte"],
        "forecast": read_json(folder / "forecast.json"),
        "median_rate": statistics.median(line["tokens_per_second"] for line in steps),
        "curve": [[line["tokens_seen"], line["train/loss"]] for line in steps[::every]],
        "validation": [[line["tokens_seen"], line["val/loss"]] for line in evaluated],
        "last": steps[-1],
        "line": f"{result['bits_per_byte']} bits per byte after {seconds:.0f} s",
    }


def _page(found: Findings) -> Page:
    run = found.outcome(NAME, _ROW).runs[-1]
    last = run["last"]
    rows = [
        ("the whole command", _duration(run)),
        ("bits per byte of held-out text", _bits(run)),
        ("gzip -9, xz", f"{run['gzip']:.3f}, {run['xz']:.3f}"),
        ("parameters", f"{run['parameters'] / 1e6:.1f} million"),
        ("steps", f"{last['step']:,}"),
        ("tokens, passes over the text", f"{last['tokens_seen']:,}, {last['epoch']:.2g}"),
        ("tokens/s, median of the steps", f"{run['median_rate']:,.0f}"),
    ]
    predicted, measured = run["forecast"]["predicted"], run["forecast"]["measured"]
    if measured["peak_bytes"] is not None:
        peaks = [one["peak_bytes"] / _GIB for one in (measured, predicted)]
        rows.append(("peak of tensors, predicted", "{:.2f} GiB, {:.2f} GiB".format(*peaks)))
    named = [choice for choice in run["choices"] if choice["reason"]]
    chosen = [(choice["key"], str(choice["value"]), choice["reason"]) for choice in named]
    pictures = {"gpu-run.png": _draw(run)}
    text = (
        f"`{run['command']}` prepares the text, chooses the model and the settings, trains,\n"
        "evaluates and saves.\n\n"
        f"{markdown_table(('figure', 'value'), rows)}\n![loss](../images/gpu-run.png)\n\n"
        f"Chosen settings:\n\n{markdown_table(('setting', 'value', 'why'), chosen)}"
    )
    report = None if found.folder is None else found.folder / "run-report.png"
    if report is not None and report.is_file():
        pictures["gpu-run-report.png"] = report.read_bytes()
        text += "\nThe run's own report:\n\n![report](../images/gpu-run-report.png)\n"
    summary = (
        f"- {run['parameters'] / 1e6:.1f} million parameters, {last['tokens_seen'] / 1e6:,.0f} "
        f"million tokens: {_bits(run)}; xz {run['xz']:.3f}. The whole command: {_duration(run)}."
    )
    return Page(summary, text, pictures)


def _duration(run: Mapping[str, Any]) -> str:
    budget = run["budget"]
    return f"{run['wall_seconds']:.0f} s" + ("" if budget is None else f" of {budget:.0f} s")


def _bits(run: Mapping[str, Any]) -> str:
    """The measured bits per byte and the predicted range."""
    found = "none measured"
    if run["bits_per_byte"] is not None:
        found = f"{run['bits_per_byte']:.3f} bits per byte"
    low, high = run["expected"] or (None, None)
    return found if low is None else f"{found}, {low:.2f} to {high:.2f} expected"


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
    "A real run: the standard library in three minutes",
    "`firstlight train stdlib --budget 3m`: the source of Python's standard library in, a model "
    "and its report out. Loss curve, the duration of the whole command, and what was predicted.",
    _rows,
    page=_page,
)
