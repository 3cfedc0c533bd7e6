"""`firstlight bench budget`: settings chosen by `train TEXTS --budget` against a random search.

Each run is `train_texts` in a process of its own, from the texts to the trained model, within the
budget of wall-clock time. The first run of a text and budget has the settings that firstlight
chooses. The others have vocabulary, shape, sequence length, batch, learning rates and passes over
the text drawn at random, the same draws for every text and budget. A run that is evaluated far
above the first one at the same share of its steps is ended there (`_FAR_ABOVE`). All other runs of
a text are evaluated on all of its held-out text, which is the same for all settings.

Each finished run is one line of results.jsonl. A second call in the same folder measures the
missing runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.bench.options import BudgetBench, Keep, Result, require_positive
from firstlight.bench.pictures import new_figure, png_of
from firstlight.bench.process import ask, training_environment
from firstlight.bench.runner import Found, RowOutcome, machine_facts, run_bench
from firstlight.bench.tables import markdown_table
from firstlight.console import parse_time, rounded, say
from firstlight.errors import ConfigError
from firstlight.evaluation.inputs import load_for_evaluation
from firstlight.evaluation.perplexity import evaluate
from firstlight.files.atomic import write_file
from firstlight.hardware.device import find_hardware
from firstlight.pipeline.run import train_texts
from firstlight.report.length import read_length
from firstlight.report.records import read_json_lines

RESULTS_NAME = "results.jsonl"

#: Seconds after the end of the budget at which a run that has not ended is stopped.
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
#: Further settings: lower and upper end of a log-uniform distribution.
_RANGES: dict[str, tuple[float, float]] = {
    "optimizer.muon_learning_rate": (0.003, 0.05),
    "optimizer.learning_rate": (0.05, 1.0),
    "optimizer.head_lr_multiple": (0.004, 0.1),
    "optimizer.weight_decay": (0.01, 0.5),
}

#: A random run is ended if its bits per byte exceed those of the chosen settings by more than a
#: fraction, at the same share of their steps: (share from which it counts, fraction). 59 of 138
#: runs of `bench learning` were so far above the best recipe, and ended 6 % above it or more.
_FAR_ABOVE = ((0.7, 0.07), (0.45, 0.1), (0.2, 0.15))

#: Keys of length.json with a number of steps, the least of which is the run's.
_STEPS_KEYS = ("predicted_steps", "most_steps", "max_steps")

#: Share of the steps and held-out bits per byte of each evaluation of a run, in their order.
Curve = Sequence[Sequence[float]]


def random_settings(number: int) -> dict[str, Any]:
    """The settings of a random draw, by `section.key`.

    Args:
        number: number of the draw, its seed: the same number has the same settings.
    """
    draw = random.Random(number)
    found = {key: draw.choice(values) for key, values in _CHOICES.items()}
    for key, (low, high) in _RANGES.items():
        found[key] = float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.3g}")
    # The drawn learning rates apply as they are: they must not be scaled from another width.
    return found | {"optimizer.tuned_width": found["model.hidden_size"]}


def is_hopeless(share: float, bits: float, chosen: Curve) -> bool:
    """True if a run is so far above the run of the chosen settings that it is ended.

    Args:
        share: share of the run's steps that are done.
        bits: its held-out bits per byte there.
        chosen: evaluations of the run of the chosen settings. Between two of them, its bits are
            taken to fall in a line.
    """
    fraction = next((most for start, most in _FAR_ABOVE if share >= start), math.inf)
    shares, values = zip(*chosen, strict=True)
    return bits > (1 + fraction) * float(np.interp(share, shares, values))


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
        """Values of the recipe that are given, by `section.key`; firstlight chooses the others."""
        return random_settings(self.trial) if self.trial else {}

    @property
    def title(self) -> str:
        """Name of the run in messages."""
        return f"{Path(self.text).stem}, {self.budget}, {self.trial or 'chosen'}"

    @property
    def digest(self) -> str:
        """Hash of the text's name, budget and settings; the text's content and the code are not
        part of it."""
        content = json.dumps([self.text, self.budget, self.settings], sort_keys=True)
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
    outcomes = {title: RowOutcome(case.digest) for title, case in cases.items()}
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
        chosen = lines.get(replace(case, trial=0).digest, {})
        found = measure_run(case, bench.folder, chosen.get("curve", ()))
        if "error" in found:
            say(f"{title}: {found['error']['message']}")
            return found
        lines[case.digest] = found
        write_file(path, "".join(json.dumps(line) + "\n" for line in lines.values()))
        share, bits = found["curve"][-1]
        end = f", ended after {share:.0%} of its steps" if found["bits_per_byte"] is None else ""
        say(
            f"{title}: {found['bits_per_byte'] or bits:.4f} bits per byte{end}, "
            f"{found['seconds']:.0f} s"
        )
        return found

    return run_bench("budget", list(cases), 1, measure, result, on_run, outcomes=outcomes)


def measure_run(case: BudgetCase, folder: Path, chosen: Curve) -> dict[str, Any]:
    """Train one case in a process of its own.

    Args:
        case: the run.
        folder: folder of the benchmark, for temporary files.
        chosen: evaluations of the run of the chosen settings; empty to end no run early.

    Returns:
        The run's line of results.jsonl, or {"error": {"type", "message"}}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # `train_texts` reuses texts that are prepared beside the run folder. A folder of its own makes
    # each run prepare the text within its budget.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as own:
        request: dict[str, Any] = {"text": case.text, "budget": case.budget, "chosen": chosen}
        request |= {"settings": case.settings, "run": str(Path(own) / "run")}
        limit = parse_time(case.budget) + _PATIENCE
        found = ask(__spec__.name, request, training_environment(), limit)
    if "error" in found:
        return found
    head = {"text": Path(case.text).stem, "budget": case.budget, "trial": case.trial}
    return {"digest": case.digest, **head, "settings": case.settings, **found}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train on a text within a budget, and evaluate on all held-out text.

    Args:
        request: "text", "budget", "settings" by key of the recipe, "run", the run folder, and
            "chosen", the evaluations of the run of the chosen settings, or an empty list.

    Returns:
        - "bits_per_byte": bits per byte of the held-out text by the model; None if the run was
          ended early
        - "curve": share of the steps and bits per byte of each evaluation of the run
        - "seconds": duration of `train_texts`, without the evaluation on all held-out text
        - the following ones of runs that were not ended early
        - "gzip", "xz": bits per byte of the held-out text by the two compression programs
        - "expected": [low, high], the range of bits per byte that was predicted
        - "step", "tokens", "parameters": optimizer steps, training tokens and model size

    Raises:
        FirstlightError: see `train_texts`.
    """
    folder, began = Path(request["run"]), time.monotonic()
    curve: list[tuple[float, float]] = []

    def on_step(record: Mapping[str, Any]) -> None:
        if "bits_per_byte" not in record:
            return
        length = read_length(folder)
        steps = min(length[key] for key in _STEPS_KEYS if key in length)
        curve.append((record["step"] / steps, record["bits_per_byte"]))
        if request["chosen"] and is_hopeless(*curve[-1], request["chosen"]):
            raise _Hopeless

    try:
        run = train_texts(
            request["text"],
            budget=request["budget"],
            run_dir=folder,
            overrides=request["settings"],
            on_step=on_step,
            progress=False,
        )
    except _Hopeless:
        return {"bits_per_byte": None, "curve": curve, "seconds": time.monotonic() - began}
    training, choices = run.training, run.choices
    assert training is not None
    assert choices is not None
    assert choices.bits_per_byte is not None
    found = evaluate(load_for_evaluation(training.checkpoint), folder / "data")
    return {
        "bits_per_byte": found.bits_per_byte,
        "curve": curve,
        "seconds": run.seconds,
        "gzip": run.gzip_bits_per_byte,
        "xz": run.xz_bits_per_byte,
        "expected": list(choices.bits_per_byte),
        "step": training.step,
        "tokens": training.tokens_seen,
        "parameters": choices.parameters,
    }


class _Hopeless(Exception):  # noqa: N818 - no error
    """Raised to end a run that is far above the run of the chosen settings."""


# The page


def budget_groups(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs by text and budget ("TEXT, BUDGET"), each group in the order of its trials."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["trial"]):
        groups.setdefault(f"{run['text']}, {run['budget']}", []).append(run)
    # Without a run of the chosen settings, there is nothing to compare a random search with.
    return {title: own for title, own in groups.items() if own[0]["trial"] == 0}


HEADER = (
    *("text, budget", "chosen", "expected", "best of random", "ended early", "chosen over best"),
    *("gzip -9", "xz", "seconds", "parameters"),
)


def group_cells(title: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A row of the table (see HEADER): the run of the chosen settings, and the random draws."""
    chosen, ended = runs[0], [run for run in runs if run["bits_per_byte"] is None]
    draws = [run["bits_per_byte"] for run in runs[1:] if run not in ended]
    low, high = chosen["expected"]
    bits = chosen["bits_per_byte"]
    is_inside = "" if low <= bits <= high else ", missed"
    return (
        title,
        f"{bits:.4f}",
        f"{low:.2f} to {high:.2f}{is_inside}",
        f"{min(draws):.4f} of {len(runs) - 1}" if draws else "",
        f"{len(ended)}",
        f"{bits / min(draws) - 1:+.1%}" if draws else "",
        *("" if chosen[key] is None else f"{chosen[key]:.3f}" for key in ("gzip", "xz")),
        f"{chosen['seconds']:.0f}",
        rounded(chosen["parameters"]),
    )


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of every run's bits per byte: a dot for a random draw, a circle for one that was ended
    early, a line for chosen settings."""
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
    axes.invert_yaxis()
    axes.set_xlabel(
        "held-out bits per byte (red: chosen, with the expected range; gray: random settings, "
        "circles: ended early)"
    )
    return png_of(figure)


def page(result: Mapping[str, Any], picture: str) -> str:
    """The page of the results, in Markdown.

    Args:
        result: result of `bench_budget`.
        picture: address of the picture.
    """
    machine, groups = result["machine"], budget_groups(result["runs"])
    name = f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}"
    limits = ", ".join(
        f"{most:.0%} from {start:.0%} of them on" for start, most in reversed(_FAR_ABOVE)
    )
    parts = [_HEAD.format(machine=name, limits=limits)]
    parts.append(markdown_table(HEADER, [group_cells(*group) for group in groups.items()]))
    parts.append(f"![bits per byte of chosen and of random settings]({picture})\n")
    return "\n".join(parts)


_HEAD = """\
# Budget: chosen settings beside a random search

    firstlight bench budget --out DIR --corpus stdlib --corpus FILE --page docs/benchmarks/budget.md

`make benchmarks NAMES=budget` calls it with three texts and budgets. Each run is the whole
command `firstlight train TEXT --budget TIME` in a process of its own. The random search draws
vocabulary, width, depth, sequence length, batch, learning rates, weight decay, the decay's part of
the schedule and the passes over the text; all else is as chosen. Bits per byte are those of the
whole held-out text after training. The best of the random search is the best of its results on this
same text. Seconds are those of the chosen run's whole command.

A random run is ended early if its held-out bits per byte exceed those of the chosen settings, at
the same share of their steps, by more than {limits}.

Machine: {machine}.
"""
