"""`python -m benchmarks learning`: loss of recipes after the same tokens, or after the same time.

Every run is a training in a process of its own. Each recipe, which is a row of the tables, runs
with several seeds, and the rows take turns over the seeds (A B A B). On one corpus and size all
rows have the same budget: tokens, or minutes of training at the speed of their first steps, which
is measured once per row. `max_steps` is set so that the schedule ends with the budget. Seconds are
those of training steps, including waiting for data, without evaluations, checkpoints and the start
of the process.

Each point of a curve is measured on the same sample of the held-out text. The final figure of a run
is measured on all of the held-out text or on a larger sample, in fp32. A token's context is the
part of its sequence before it, so the sequence length, which is part of a recipe, affects the loss.

Each finished run is one line of results.jsonl. A second call in the same folder measures the
missing runs, and repeats runs that were measured with another recipe, budget or corpus.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning_rows import SIZES, choose_rows, find_row, recipe_values
from benchmarks.options import LearningBench
from benchmarks.training import library_corpus
from firstlight.bench.options import Keep, Result, require_known, require_positive
from firstlight.bench.runner import Found, RowOutcome, run_bench
from firstlight.console import say
from firstlight.data.shards import read_manifest
from firstlight.errors import ConfigError
from firstlight.evaluation.inputs import load_for_evaluation
from firstlight.evaluation.perplexity import evaluate
from firstlight.files.atomic import write_file
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.hardware.fresh_process import ask, training_environment
from firstlight.recipe import Recipe, parse_recipe
from firstlight.recipe.load import changed_recipe
from firstlight.report.records import read_json_lines
from firstlight.training.loop import train

RESULTS_NAME = "results.jsonl"

#: Defaults: the demo's size, and the tokens of a run without a budget.
_SIZES, _TOKENS = ("2.6m",), 1_474_560

#: Number of points of a curve, and of held-out tokens for each point.
_POINTS, _POINT_TOKENS = 12, 32_768

#: Minimum of held-out tokens for the final figure; each point of the curve has an eighth of them.
_LEAST_HELD_OUT = 8192

#: Vocabulary size of a tokenizer; and of one whose tokens are the 256 bytes and the end of a text.
_VOCAB_SIZE, _BYTES = 4096, 257

#: Number of steps whose time is measured to find the number of steps that fit into a budget of
#: minutes; number of warm-up steps before them.
_PACE_STEPS, _PACE_WARMUP = 8, 4

_FIRST_SEED = 1337


@dataclass(frozen=True)
class LearningCorpus:
    """A prepared corpus.

    Attributes:
        name: name in tables: "stdlib", or the stem of the text's file, followed by " bytes" if the
            tokens are bytes.
        sha256: hash of the hashes of its shards.
        folder: folder of its shards.
    """

    name: str
    sha256: str
    folder: Path = Path()


@dataclass(frozen=True)
class LearningCase:
    """A recipe on a corpus at a model size; its runs differ only in their seeds.

    Attributes:
        corpus: the corpus.
        size: name in `learning_rows.SIZES`.
        row: name of the row.
        tokens: budget of a run in tokens; None if it is in minutes.
        minutes: budget of a run in minutes of training; None if it is in tokens.
        held_out_tokens: held-out tokens of the final figure; None is all of the held-out text.
    """

    corpus: LearningCorpus
    size: str
    row: str
    tokens: int | None
    minutes: float | None
    held_out_tokens: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Values of the recipe, without data, length and seed."""
        return recipe_values(find_row(self.row), self.size)

    @property
    def digest(self) -> str:
        """Hash of everything that affects the results except the seed and the code."""
        content = [self.corpus.sha256, self.values, self.tokens, self.minutes]
        if self.held_out_tokens is not None:
            content.append(self.held_out_tokens)
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def budget(self) -> str:
        """Length of a run in words, and the number of held-out tokens if they are a sample."""
        unit = "minute" if self.minutes == 1 else "minutes"
        length = f"{self.minutes:g} {unit}" if self.tokens is None else f"{self.tokens:,} tokens"
        if self.held_out_tokens is None:
            return length
        return f"{length}, {self.held_out_tokens:,} held-out tokens"

    def recipe(self, max_steps: int, seed: int) -> dict[str, Any]:
        """Values of the recipe of a run, without its folder."""
        values = self.values
        seq_len = values["data"]["seq_len"]
        # All points together are then evaluated on little more tokens than the final figure.
        point_tokens = min(_POINT_TOKENS, (self.held_out_tokens or sys.maxsize) // 8)
        evaluation = {
            "every_steps": max(max_steps // _POINTS, 1),
            "max_rows": max(point_tokens // seq_len, 1),
            "sample_prompts": [],
            "on_start": False,
        }
        run = {"device": "auto", "seed": seed}
        changes = {"data.dir": str(self.corpus.folder), "schedule.max_steps": max_steps}
        return changed_recipe({**values, "run": run, "evaluation": evaluation}, changes)

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        recipe = self.parsed(1)
        assert recipe.data.seq_len is not None
        rows = recipe.batch.rows * recipe.batch.accumulation(recipe.data.seq_len)
        return rows * recipe.data.seq_len

    def parsed(self, max_steps: int) -> Recipe:
        """The validated recipe.

        Raises:
            ConfigError: the values are not a valid recipe.
        """
        return parse_recipe(self.recipe(max_steps, _FIRST_SEED), f"row {self.row}")


def prepare_corpus(name: str, folder: Path) -> LearningCorpus:
    """Prepare a corpus in `folder`, unless it is there.

    Args:
        name: "stdlib", a text file, or "bytes:FILE" for tokens that are bytes.
        folder: parent of the corpora.

    Raises:
        InputError: the text does not exist.
        StorageError: a file system error.
    """
    file = name.removeprefix("bytes:")
    # The hash of the path: files with the same name in different folders are different corpora.
    key = hashlib.sha256(str(Path(file).resolve()).encode()).hexdigest()[:8]
    title = name if name == "stdlib" else Path(file).stem + (" bytes" if name != file else "")
    own = title if name == "stdlib" else f"{title}-{key}"
    vocab_size = _VOCAB_SIZE if name == file else _BYTES
    corpus = library_corpus(folder / own.replace(" ", "-"), vocab_size, file)
    manifest = read_manifest(corpus)
    shards = [shard["sha256"] for split in manifest["splits"].values() for shard in split["shards"]]
    sha256 = hashlib.sha256("".join(shards).encode()).hexdigest()
    return LearningCorpus(title, sha256, corpus)


def learning_cases(bench: LearningBench) -> dict[str, LearningCase]:
    """Prepare the corpora; every row on every corpus at every size, by title.

    Raises:
        ConfigError: an option is invalid, or a row is not a recipe.
        InputError, StorageError: see `prepare_corpus`.
    """
    require_known("size", bench.sizes, SIZES)
    require_positive(seeds=bench.seeds, tokens=bench.tokens or _TOKENS)
    if bench.held_out_tokens is not None and bench.held_out_tokens < _LEAST_HELD_OUT:
        raise ConfigError(
            f"--held-out-tokens is {bench.held_out_tokens}: it must be at least {_LEAST_HELD_OUT}"
        )
    if bench.tokens is not None and bench.minutes is not None:
        raise ConfigError("--tokens and --minutes both say how long a run is: keep one")
    if bench.minutes is not None and not bench.minutes > 0:
        raise ConfigError(f"--minutes is {bench.minutes}: it must be above 0")
    tokens = None if bench.minutes is not None else bench.tokens or _TOKENS
    rows = choose_rows(bench.rows, bench.variants)
    folder = bench.folder / "corpora"
    cases = [
        LearningCase(corpus, size, row, tokens, bench.minutes, bench.held_out_tokens)
        for corpus in [prepare_corpus(name, folder) for name in dict.fromkeys(bench.corpora)]
        for size in dict.fromkeys(bench.sizes or _SIZES)
        for row in rows
    ]
    for case in cases:
        case.parsed(1)
    return {f"{case.corpus.name}, {case.size}, {case.row}": case for case in cases}


def bench_learning(bench: LearningBench, on_run: Keep) -> Result:
    """Measure the runs that have no result yet.

    Args:
        bench: the options.
        on_run: function that is called with the result so far after each run.

    Returns:
        "machine", "complete", "problems" (error messages by title), and "runs": the lines of
        results.jsonl of all finished runs, including those of earlier calls.

    Raises:
        ConfigError, InputError, StorageError: see `learning_cases`.
        CheckpointError: results.jsonl is damaged.
    """
    cases = learning_cases(bench)
    path = bench.folder / RESULTS_NAME
    lines = [line for line in read_json_lines(path) if _case_of(line) is not None]
    outcomes = {title: _outcome(case, lines, bench.seeds) for title, case in cases.items()}
    machine = machine_facts(find_hardware())

    def result(outcomes: Mapping[str, RowOutcome]) -> Result:
        problems = {title: one.problem for title, one in outcomes.items() if one.problem}
        head = {"machine": machine, "problems": problems, "complete": False}
        return {**head, "runs": _in_order(lines, list(cases.values()))}

    def measure(title: str) -> Found:
        found = measure_run(cases[title], outcomes[title].runs, bench.folder)
        if "error" in found:
            say(f"{title}: {found['error']['message']}")
        else:
            lines.append(dict(found))
            write_file(path, "".join(json.dumps(line) + "\n" for line in lines))
            say(f"{title}, seed {found['seed']}: {found['bits_per_byte']:.4f} bits per byte")
        return found

    turns, titles = bench.seeds, list(cases)
    return run_bench("learning", titles, turns, measure, result, on_run, outcomes=outcomes)


def _case_of(line: Mapping[str, Any]) -> LearningCase | None:
    """The case of a line of results.jsonl; None if the recipe of its row has changed since."""
    corpus = LearningCorpus(line["corpus"], line["corpus_sha256"])
    budget = (line["budget_tokens"], line["budget_minutes"], line.get("held_out_tokens"))
    try:
        case = LearningCase(corpus, line["size"], line["row"], *budget)
        return case if case.digest == line["digest"] else None
    except (ConfigError, KeyError):
        return None


def _in_order(lines: list[dict[str, Any]], cases: Sequence[LearningCase]) -> list[dict[str, Any]]:
    """The lines in the order of the cases, and of the seeds; then those of other calls' cases."""
    places = {case.digest: place for place, case in enumerate(cases)}
    return sorted(lines, key=lambda line: (places.get(line["digest"], len(places)), line["seed"]))


def _outcome(case: LearningCase, lines: Sequence[dict[str, Any]], seeds: int) -> RowOutcome:
    """The finished runs of a case, from the first seed to the last one before a gap."""
    done = {line["seed"]: line for line in lines if line["digest"] == case.digest}
    outcome = RowOutcome(case.digest)
    for seed in range(_FIRST_SEED, _FIRST_SEED + seeds):
        if seed not in done:
            break
        outcome.runs.append(done[seed])
    return outcome


def measure_run(case: LearningCase, earlier: list[dict[str, Any]], folder: Path) -> Found:
    """Train a case with its next seed.

    Args:
        case: the case.
        earlier: finished runs of the case with other seeds; the new run has their number of steps.
        folder: folder of the benchmark, for temporary files.

    Returns:
        The run's line of results.jsonl, or {"error": {"type", "message"}}.
    """
    seed = _FIRST_SEED + len(earlier)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as run:

        def once(recipe: Mapping[str, Any], pace: bool) -> Found:
            request = {"recipe": changed_recipe(recipe, {"run.dir": run}), "pace": pace}
            request |= {"threads": torch.get_num_threads(), "data": str(case.corpus.folder)}
            request["held_out_tokens"] = case.held_out_tokens
            return ask(__spec__.name, request, training_environment())

        if earlier:
            max_steps = earlier[0]["step"]
        elif case.tokens is not None:
            max_steps = max(case.tokens // case.step_tokens, 1)
        else:
            found = once(case.recipe(10**6, seed), True)
            if "error" in found:
                return found
            assert case.minutes is not None
            max_steps = max(round(60 * case.minutes / found["step_seconds"]), 1)
        found = once(case.recipe(max_steps, seed), False)
    if "error" in found:
        return found
    head = {
        "corpus": case.corpus.name,
        "corpus_sha256": case.corpus.sha256,
        "size": case.size,
        "row": case.row,
        "budget": case.budget,
        "budget_tokens": case.tokens,
        "budget_minutes": case.minutes,
        "held_out_tokens": case.held_out_tokens,
    }
    return {"digest": case.digest, **head, "seed": seed, "step": max_steps, **found}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train a recipe, in a process of its own.

    Args:
        request: "recipe", values of the recipe; "data", folder of the corpus; "threads" of torch;
            "pace", True to measure only the time of a step; "held_out_tokens" of the final figure,
            None for all.

    Returns:
        With "pace" the median "step_seconds"; otherwise "parameters", "tokens" and "seconds" of the
        whole run, the final "bits_per_byte" and "gzip_bits_per_byte", and "curve": [tokens seen,
        seconds, bits per byte] of each point.

    Raises:
        FirstlightError: see `train`, `evaluate`.
    """
    torch.set_num_threads(request["threads"])
    recipe = parse_recipe(request["recipe"])
    seconds: list[float] = []
    curve: list[list[float]] = []

    def on_step(record: Mapping[str, Any]) -> None:
        seconds.append(record["seconds"])
        if "bits_per_byte" in record:
            curve.append([record["tokens_seen"], sum(seconds), record["bits_per_byte"]])
        if request["pace"] and len(seconds) == _PACE_WARMUP + _PACE_STEPS:
            raise _PaceIsKnown

    try:
        result = train(recipe, on_step=on_step)
    except _PaceIsKnown:
        return {"step_seconds": statistics.median(seconds[_PACE_WARMUP:])}
    loaded = load_for_evaluation(result.checkpoint, recipe.run.device)
    tokens = request["held_out_tokens"]
    assert recipe.data.seq_len is not None
    sample = None if tokens is None else tokens // recipe.data.seq_len
    found = evaluate(loaded, request["data"], sample=sample)
    return {
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "tokens": result.tokens_seen,
        "seconds": sum(seconds),
        "bits_per_byte": found.bits_per_byte,
        "gzip_bits_per_byte": found.gzip_bits_per_byte,
        "curve": curve,
    }


class _PaceIsKnown(Exception):  # noqa: N818 - no error
    """Ends a run of which only the first steps are measured."""
