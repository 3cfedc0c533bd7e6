"""`python -m benchmarks budget`: settings chosen by `train TEXTS --budget` against a random search.

Each run is `train_texts` in a separate process, from the texts to the trained model, within the
budget of wall-clock time. The first run for a text and budget uses the settings that firstlight
chooses. In the others, vocabulary, shape, sequence length, batch, learning rates and passes over
the text are drawn at random, with the same draws for every text and budget. A run that is far worse
than the first at the same fraction of its steps is ended early (`FAR_ABOVE`). All other runs for a
text are evaluated on all of its held-out text, which is the same for all settings.

Each finished run is one line of results.jsonl. A second call in the same folder measures the
missing runs. If a random run's passes over the text take less time than two of the budgets, it is
measured with only one of them, because it would take the same steps with the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import BudgetBench
from benchmarks.pages import markdown_table
from benchmarks.rows import run_bench
from firstlight.bench.display import new_figure, png_of
from firstlight.bench.rows import Found, Keep, Result, RowOutcome, require_positive
from firstlight.console import parse_time, rounded, say
from firstlight.data.shards import read_manifest
from firstlight.errors import ConfigError
from firstlight.evaluation.perplexity import evaluate, load_for_evaluation
from firstlight.files.atomic import write_file
from firstlight.from_texts.run import train_texts
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.hardware.fresh_process import ask, error_of, training_environment
from firstlight.run_log.reader import read_json_lines, read_length

RESULTS_NAME = "results.jsonl"

#: Time in seconds after the end of the budget at which a run is stopped.
_PATIENCE = 300.0

#: Settings of the random search: values of equal probability.
_CHOICES: dict[str, Sequence[Any]] = {
    "model.vocab_size": (512, 1024, 2048, 4096, 8192),
    "model.hidden_size": (64, 128, 192, 256, 320, 384),
    "model.num_hidden_layers": (2, 3, 4, 6, 8),
    "data.seq_len": (128, 256, 512),
    "batch.global_batch_tokens": (1024, 2048, 4096, 8192, 16384),
    "schedule.decay_fraction": (0.3, 0.5, 0.65, 0.8, 1.0),
    "schedule.epochs": (1.0, 2.0, 4.0, 8.0, 16.0),
}
#: Other settings: lower and upper end of a log-uniform distribution.
_RANGES: dict[str, tuple[float, float]] = {
    "optimizer.muon_learning_rate": (0.003, 0.05),
    "optimizer.learning_rate": (0.05, 1.0),
    "optimizer.head_lr_multiple": (0.004, 0.1),
    "optimizer.weight_decay": (0.01, 3.0),
}

#: A run that takes less than this fraction of its budget ended after its passes over the text, not
#: because of time; other runs take at least 93 %.
_FILLED = 0.8

#: Version of the lines of results.jsonl; runs with lines of another version are measured again.
_FORMAT = 3


def random_settings(number: int) -> dict[str, Any]:
    """Return the settings of a random draw, by `section.key`.

    Args:
        number: number of the draw, which is also its seed.
    """
    draw = random.Random(number)
    found = {key: draw.choice(values) for key, values in _CHOICES.items()}
    for key, (low, high) in _RANGES.items():
        found[key] = float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.3g}")
    # The drawn learning rates must not be scaled from another width.
    return found | {"optimizer.tuned_width": found["model.hidden_size"]}


def is_same_run(run: Mapping[str, Any], budget: str, chosen: Curve) -> bool:
    """Return True if a random run would be the same with another budget, because its passes over
    the text end before both budgets.

    Args:
        run: the run's line of results.jsonl.
        budget: the other budget.
        chosen: curve of the run with the chosen settings and the other budget.
    """
    share, bits = run["curve"][-1]
    longest = _FILLED * min(parse_time(run["budget"]), parse_time(budget))
    # A run that was ended early must also be far above the chosen settings with the other budget.
    is_complete = run["bits_per_byte"] is not None
    return run["seconds"] / share < longest and (is_complete or is_hopeless(share, bits, chosen))


@dataclass(frozen=True)
class BudgetCase:
    """One run of the comparison.

    Attributes:
        text: "stdlib", or a file or folder of text.
        budget: wall-clock time, such as "3m".
        trial: number of the random draw; 0 for the settings that firstlight chooses.
    """

    text: str
    budget: str
    trial: int

    @property
    def settings(self) -> dict[str, Any]:
        """Recipe values that are set, by `section.key`; firstlight chooses the others."""
        return random_settings(self.trial) if self.trial else {}

    @property
    def name(self) -> str:
        """Name of the text without its suffix and folder, which differs between machines."""
        return Path(self.text).stem

    @property
    def title(self) -> str:
        """Name of the run in messages."""
        return f"{self.name}, {self.budget}, {self.trial or 'chosen'}"

    @property
    def digest(self) -> str:
        """Hash of the text's name, budget and settings; the text's content and the code are not
        part of it."""
        content = json.dumps([_FORMAT, self.name, self.budget, self.settings], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def bench_budget(bench: BudgetBench, on_run: Keep) -> Result:
    """Measure the runs that have no result yet.

    Args:
        bench: texts, budgets and number of draws.
        on_run: function that is called with the result so far after each run.

    Returns:
        "machine", "complete", "problems" (error messages by `BudgetCase.title`), and "runs": the
        line of results.jsonl of each finished run.

    Raises:
        ConfigError: an option is invalid.
        StorageError: a file system error.
        CheckpointError: results.jsonl is damaged.
    """
    require_positive(trials=bench.trials)
    stems = [Path(text).stem for text in dict.fromkeys(bench.corpora)]
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise ConfigError(f"--corpus: two texts have the name {twice[0]}: rename one")
    for budget in bench.budgets:
        parse_time(budget)
    cases = {
        case.title: case
        for text in dict.fromkeys(bench.corpora)
        for budget in dict.fromkeys(bench.budgets)
        for trial in range(bench.trials + 1)
        for case in [BudgetCase(text, budget, trial)]
    }
    path = bench.folder / RESULTS_NAME
    lines = {line["digest"]: line for line in read_json_lines(path)}
    outcomes = {title: RowOutcome() for title in cases}
    for title, case in cases.items():
        if case.digest in lines:
            outcomes[title].runs.append(lines[case.digest])
    machine = machine_facts(find_hardware())

    def result(outcomes: Mapping[str, RowOutcome]) -> Result:
        problems = {title: one.problem for title, one in outcomes.items() if one.problem}
        runs = [run for one in outcomes.values() for run in one.runs]
        return {"machine": machine, "problems": problems, "complete": False, "runs": runs}

    def measure(title: str) -> Found:
        case = cases[title]
        chosen = lines.get(replace(case, trial=0).digest)
        if case.trial and chosen is None:
            return error_of("Failed", "the run with the chosen settings failed")
        curve = chosen["curve"] if chosen else ()
        found = _same_run(case, bench.budgets, lines, curve)
        found = found or measure_run(case, bench.folder, curve)
        if "error" in found:
            say(f"{title}: {found['error']['message']}")
            return found
        lines[case.digest] = found
        write_file(path, "".join(json.dumps(line) + "\n" for line in lines.values()))
        say(f"{title}: {_said(found)}, {found['seconds']:.0f} s")
        return found

    return run_bench(
        "budget", list(cases), 1, measure, summarize=result, on_run=on_run, outcomes=outcomes
    )


def _same_run(
    case: BudgetCase, budgets: Sequence[str], lines: Mapping[str, dict[str, Any]], chosen: Curve
) -> dict[str, Any] | None:
    """Return the line of a case, derived from the same run with another budget, or None if there is
    none.

    Args:
        case: the run.
        budgets: all budgets.
        lines: lines of results.jsonl by their digest.
        chosen: curve of the run with the chosen settings and the budget of `case`.
    """
    own = {"digest": case.digest, "budget": case.budget}
    for budget in budgets if case.trial else ():
        line = lines.get(replace(case, budget=budget).digest)
        if line is not None and is_same_run(line, case.budget, chosen):
            return {"measured_with": line["budget"], **line, **own}
    return None


def _said(run: Mapping[str, Any]) -> str:
    """Return the bits per byte of a run, for a message."""
    if run["bits_per_byte"] is not None:
        return f"{run['bits_per_byte']:.4f} bits per byte"
    share, bits = run["curve"][-1]
    return f"{bits:.4f} bits per byte, ended after {share:.0%} of its steps"


def measure_run(case: BudgetCase, folder: Path, chosen: Curve) -> dict[str, Any]:
    """Train one case in a separate process.

    Args:
        case: the run.
        folder: folder of the benchmark, for temporary files.
        chosen: curve of the run with the chosen settings; empty to end no run early.

    Returns:
        The run's line of results.jsonl, or {"error": {"type", "message"}}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # `train_texts` reuses texts that were prepared next to the run folder. With a separate folder,
    # each run prepares the text within its budget.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as own:
        request: dict[str, Any] = {"text": case.text, "budget": case.budget, "chosen": chosen}
        request |= {"settings": case.settings, "run": str(Path(own) / "run")}
        limit = parse_time(case.budget) + _PATIENCE
        found = ask(__name__, request, training_environment(), limit)
    if "error" in found:
        return found
    head = {"text": case.name, "budget": case.budget, "trial": case.trial}
    return {"digest": case.digest, **head, "settings": case.settings, **found}


# The measurement of one run.


#: A random run is ended if its bits per byte exceed those of the chosen settings by more than a
#: fraction, at the same share of their steps: (share from which it counts, fraction). 41 of 138
#: runs of `benchmarks learning` were so far above the best recipe, and ended 7 % above it or more.
#: The last pair is for the training loss (`_EARLY`). It was tested in runs of ten minutes on
#: WikiText-2: of 20 random runs, 4 were more than 30 % above, and their first evaluations were also
#: hopeless. One that was 29 % above ended 9 % above.
FAR_ABOVE = ((0.45, 0.1), (0.2, 0.15), (0.1, 0.3))

#: Shares of the steps between which the mean of the training loss is taken: there is no evaluation
#: so early. In the first pass over the text it is close to the held-out loss. In later passes it is
#: lower, so that it ends fewer runs.
_EARLY = (0.05, 0.1)

#: Share of the steps and held-out bits per byte of each evaluation of a run, in their order, after
#: the bits per byte of the training loss at `_EARLY`.
Curve = Sequence[Sequence[float]]


def is_hopeless(share: float, bits: float, chosen: Curve) -> bool:
    """Return True if a run is so far above the run with the chosen settings that it should be
    ended.

    Args:
        share: share of the run's steps that are done.
        bits: its bits per byte at this point, of the same kind as the curve.
        chosen: curve of the run with the chosen settings, interpolated linearly between points.
    """
    fraction = next((most for start, most in FAR_ABOVE if share >= start), math.inf)
    shares, values = zip(*chosen, strict=True)
    return bits > (1 + fraction) * float(np.interp(share, shares, values))


def share_of_steps(record: Mapping[str, Any], length: Mapping[str, Any]) -> float:
    """Return the share of a run's steps that are done; an estimate until their number is decided.

    Args:
        record: metrics of the last step.
        length: result of `read_length`.
    """
    if "max_steps" in length:
        return float(record["step"] / length["max_steps"])
    by_time = record["elapsed_seconds"] / (60 * length["max_minutes"])
    return float(max(by_time, record["step"] / length.get("most_steps", math.inf)))


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train on a text within a budget, and evaluate on all held-out text.

    Args:
        request: "text", "budget", "settings" by key of the recipe, "run", the run folder, and
            "chosen", the curve of the run of the chosen settings, or an empty list.

    Returns:
        - "bits_per_byte": bits per byte of the held-out text by the model; None if the run was
          ended early
        - "step": optimizer steps
        - "curve": share of the steps and bits per byte; see `Curve`
        - "seconds": duration of `train_texts`, without the evaluation on all held-out text

        A run that was not ended early has also:

        - "gzip", "xz": bits per byte of the held-out text by the two compression programs
        - "expected": [low, high], the range of bits per byte that was predicted
        - "tokens", "parameters": training tokens and model size

    Raises:
        FirstlightError: see `train_texts`.
    """
    folder, began = Path(request["run"]), time.monotonic()
    watch = _Watch(folder, request["chosen"])
    try:
        run = train_texts(
            request["text"],
            budget=request["budget"],
            run_dir=folder,
            overrides=request["settings"],
            on_step=watch,
            progress=False,
        )
    except _Hopeless:
        seconds = time.monotonic() - began
        ended = {"bits_per_byte": None, "curve": watch.curve(), "seconds": seconds}
        return ended | {"step": watch.step}
    training, choices = run.training, run.choices
    assert training is not None
    assert choices is not None
    assert choices.bits_per_byte is not None
    found = evaluate(load_for_evaluation(training.checkpoint), folder / "data")
    return {
        "bits_per_byte": found.bits_per_byte,
        "curve": watch.curve(training.step),
        "seconds": run.seconds,
        "gzip": run.gzip_bits_per_byte,
        "xz": run.xz_bits_per_byte,
        "expected": list(choices.bits_per_byte),
        "step": training.step,
        "tokens": training.tokens_seen,
        "parameters": choices.parameters,
    }


class _Watch:
    """Records the evaluations of a run, and ends it if it is hopeless.

    Args:
        folder: the run folder, with the prepared text.
        chosen: curve of the run of the chosen settings; empty to end no run.
    """

    def __init__(self, folder: Path, chosen: Curve) -> None:
        self._folder, self._chosen = folder, chosen
        self._points: list[tuple[int, float]] = []
        self._early: list[float] = []
        self._share = 0.0

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Process a step's metrics.

        Raises:
            _Hopeless: the run is far above the run of the chosen settings.
        """
        bits = record.get("bits_per_byte")
        if self._points and bits is None:
            return
        self._share = share_of_steps(record, read_length(self._folder))
        if not self._points:
            bits = self._early_bits(record["train/loss"])
        if bits is None:
            return
        self._points.append((record["step"], bits))
        is_open = self._share < 1 and len(self._chosen) > 0
        if is_open and is_hopeless(self._share, bits, self._chosen):
            raise _Hopeless

    def _early_bits(self, loss: float) -> float | None:
        """Return the bits per byte of the training loss at `_EARLY`, or None before that point."""
        start, end = _EARLY
        if self._share >= start:
            self._early.append(loss)
        if self._share < end:
            return None
        split = read_manifest(self._folder / "data")["splits"]["train"]
        tokens_per_byte: float = split["tokens"] / split["text_bytes"]
        return statistics.mean(self._early) / math.log(2) * tokens_per_byte

    @property
    def step(self) -> int:
        """The step of the curve's last point."""
        return self._points[-1][0]

    def curve(self, steps: int | None = None) -> Curve:
        """Return the curve of the run.

        Args:
            steps: steps of the run; None if it was ended early, and has an estimated share.
        """
        total = steps or self.step / self._share
        return [(step / total, bits) for step, bits in self._points]


class _Hopeless(Exception):  # noqa: N818 - no error
    """Raised to end a run that is far above the run of the chosen settings."""


# The page.


def budget_groups(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the runs by text and budget ("TEXT, BUDGET"), each group in the order of its
    trials."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["trial"]):
        groups.setdefault(f"{run['text']}, {run['budget']}", []).append(run)
    # Without a run with the chosen settings, there is nothing to compare with.
    return {title: own for title, own in groups.items() if own[0]["trial"] == 0}


HEADER = (
    "text, budget",
    "chosen",
    "expected",
    "best of random",
    "ended early",
    "chosen over best",
    "gzip -9",
    "xz",
    "seconds",
    "parameters",
)


def group_cells(title: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a row of the table (see HEADER): the run with the chosen settings, and the random
    draws."""
    chosen, ended = runs[0], [run for run in runs if run["bits_per_byte"] is None]
    draws = [run["bits_per_byte"] for run in runs[1:] if run not in ended]
    low, high = chosen["expected"]
    bits = chosen["bits_per_byte"]
    is_inside = "" if low <= bits <= high else ", missed"
    return (
        title,
        f"{bits:.4f}",
        f"{low:.2f} to {high:.2f}{is_inside}",
        f"{min(draws):.4f} of {len(runs) - 1}" if draws else "all ended early" if ended else "",
        f"{len(ended)}",
        f"{bits / min(draws) - 1:+.1%}" if draws else "",
        *("" if chosen[key] is None else f"{chosen[key]:.3f}" for key in ("gzip", "xz")),
        f"{chosen['seconds']:.0f}",
        rounded(chosen["parameters"]),
    )


def draw(result: Mapping[str, Any]) -> bytes:
    """Return a PNG of every run's bits per byte: a dot for a random draw, a circle for one that
    ended early, and a line for the chosen settings."""
    groups = budget_groups(result["runs"])
    figure = new_figure(10, 0.8 * len(groups) + 1.5)
    axes = figure.subplots()
    for place, (title, runs) in enumerate(groups.items()):
        chosen = runs[0]["bits_per_byte"]
        for run in runs[1:]:
            bits, fill = run["bits_per_byte"], "full"
            if bits is None:
                bits, fill = run["curve"][-1][1], "none"
            axes.plot(bits, place, "o", color="tab:gray", alpha=0.6, fillstyle=fill)
        axes.plot([chosen] * 2, [place - 0.35, place + 0.35], color="tab:red", linewidth=3)
        low, high = runs[0]["expected"]
        axes.fill_betweenx([place - 0.2, place + 0.2], low, high, color="tab:red", alpha=0.12)
        axes.annotate(title, (chosen, place - 0.38), fontsize="small", parse_math=False)
    axes.set_yticks([])
    # Downwards, with space for the first title.
    axes.set_ylim(len(groups) - 0.5, -0.75)
    axes.set_xlabel(
        "held-out bits per byte (red: chosen, with the expected range; gray: random settings, "
        "circles: ended early)"
    )
    return png_of(figure)


def page(result: Mapping[str, Any], picture: str) -> str:
    """Return the page of the results, in Markdown.

    Args:
        result: result of `bench_budget`.
        picture: address of the picture.
    """
    machine, groups = result["machine"], budget_groups(result["runs"])
    name = f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}"
    limits = ", ".join(f"{most:.0%} after {start:.0%}" for start, most in reversed(FAR_ABOVE))
    parts = [_HEAD.format(machine=name, limits=limits)]
    parts.append(markdown_table(HEADER, [group_cells(*group) for group in groups.items()]))
    parts.append(f"![bits per byte of chosen and of random settings]({picture})\n")
    return "\n".join(parts)


_HEAD = """\
# Budget: chosen settings against a random search

    make benchmarks NAMES=budget                                                    # this page
    python -m benchmarks budget --out DIR --corpus stdlib --corpus FILE --page PAGE.md

This page compares the settings that firstlight chooses for a time budget with a random search. Each
run executes `firstlight train TEXT --budget TIME` in a separate process.

The random search varies the vocabulary size, width, depth, sequence length, batch size, learning
rates, weight decay, decay fraction and epochs. All bits per byte are measured on the whole held-out
text. "Seconds" is the duration of the command with the chosen settings.

A random run is stopped early if its bits per byte are too far above those of the run with the
chosen settings at the same fraction of the steps. The limits are {limits} of the steps. In the
plots, circles mark the last value of a run that was stopped.

Machine: {machine}.
"""
