"""`python -m benchmarks budget`: settings chosen by `train TEXTS --budget` against a random search.

Each run is `train_texts` in a process of its own, from the texts to the trained model, within the
budget of wall-clock time. The first run of a text and budget has the settings that firstlight
chooses. The others have vocabulary, shape, sequence length, batch, learning rates and passes over
the text drawn at random, the same draws for every text and budget. A run that is far above the
first one at the same share of its steps is ended there (`FAR_ABOVE`). All other runs of a text are
evaluated on all of its held-out text, which is the same for all settings.

Each finished run is one line of results.jsonl. A second call in the same folder measures the
missing runs. A random run whose passes over the text take less than two of the budgets is measured
with one of them: with the other it would take the same steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import budget_once
from benchmarks.budget_once import Curve, is_hopeless
from benchmarks.options import BudgetBench
from firstlight.bench.options import Keep, Result, require_positive
from firstlight.bench.runner import Found, RowOutcome, run_bench
from firstlight.console import parse_time, say
from firstlight.errors import ConfigError
from firstlight.files.atomic import write_file
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.hardware.fresh_process import ask, error_of, training_environment
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
    "optimizer.weight_decay": (0.01, 3.0),
}

#: A run that takes less than this fraction of its budget is ended by its passes over the text, and
#: not by the time: others take 93 % of it and more.
_FILLED = 0.8

#: Version of the lines of results.jsonl: lines of another version are measured again.
_FORMAT = 3


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


def is_same_run(run: Mapping[str, Any], budget: str, chosen: Curve) -> bool:
    """True if a random run would be the same with another budget: its passes over the text end
    before both budgets.

    Args:
        run: the run's line of results.jsonl.
        budget: the other budget.
        chosen: the curve of the run of the chosen settings with the other budget.
    """
    share, bits = run["curve"][-1]
    longest = _FILLED * min(parse_time(run["budget"]), parse_time(budget))
    # A run that was ended early must be far above the chosen settings of the other budget, too.
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
        """Values of the recipe that are given, by `section.key`; firstlight chooses the others."""
        return random_settings(self.trial) if self.trial else {}

    @property
    def name(self) -> str:
        """The text's name, without its folder, which differs between machines, and suffix."""
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
        chosen = lines.get(replace(case, trial=0).digest)
        if case.trial and chosen is None:
            return error_of("Failed", "the run of the chosen settings failed")
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

    return run_bench("budget", list(cases), 1, measure, result, on_run, outcomes=outcomes)


def _same_run(
    case: BudgetCase, budgets: Sequence[str], lines: Mapping[str, dict[str, Any]], chosen: Curve
) -> dict[str, Any] | None:
    """The line of a case, made from that of the same run with another budget; None without one.

    Args:
        case: the run.
        budgets: all budgets.
        lines: lines of results.jsonl by their digest.
        chosen: the curve of the run of the chosen settings with the budget of `case`.
    """
    own = {"digest": case.digest, "budget": case.budget}
    for budget in budgets if case.trial else ():
        line = lines.get(replace(case, budget=budget).digest)
        if line is not None and is_same_run(line, case.budget, chosen):
            return {"measured_with": line["budget"], **line, **own}
    return None


def _said(run: Mapping[str, Any]) -> str:
    """The bits per byte of a run, for a message."""
    if run["bits_per_byte"] is not None:
        return f"{run['bits_per_byte']:.4f} bits per byte"
    share, bits = run["curve"][-1]
    return f"{bits:.4f} bits per byte, ended after {share:.0%} of its steps"


def measure_run(case: BudgetCase, folder: Path, chosen: Curve) -> dict[str, Any]:
    """Train one case in a process of its own.

    Args:
        case: the run.
        folder: folder of the benchmark, for temporary files.
        chosen: the curve of the run of the chosen settings; empty to end no run early.

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
        found = ask(budget_once.__name__, request, training_environment(), limit)
    if "error" in found:
        return found
    head = {"text": case.name, "budget": case.budget, "trial": case.trial}
    return {"digest": case.digest, **head, "settings": case.settings, **found}
