"""`python -m benchmarks learning`: loss of recipes after the same tokens, or after the same time.

Every run trains in a separate process. Each recipe, which is a row in the tables, runs with several
seeds, and the rows take turns over the seeds (A B A B). For a corpus and size, all rows have the
same budget: tokens, or minutes of training at the speed of their first steps, which is measured
once per row. `max_steps` is set so that the schedule ends with the budget. Seconds are those of
training steps, including waiting for data, without evaluations, checkpoints and the start of the
process.

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

from benchmarks.options import LearningBench
from benchmarks.pages import markdown_table
from benchmarks.rows import run_bench, variant_changes
from benchmarks.training import library_corpus
from firstlight.bench.display import new_figure, png_of
from firstlight.bench.rows import Found, Keep, Result, RowOutcome, require_known, require_positive
from firstlight.console import say
from firstlight.data.shards import read_manifest
from firstlight.errors import ConfigError
from firstlight.evaluation.perplexity import evaluate, load_for_evaluation
from firstlight.files.atomic import write_file
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.hardware.fresh_process import ask, training_environment
from firstlight.optim.new_model import RATE_WIDTH, WARMUP_RATIO
from firstlight.planner.advise.defaults import LAYOUT
from firstlight.recipe import Recipe, parse_recipe
from firstlight.recipe.load import changed_recipe, parse_yaml
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import train


@dataclass(frozen=True)
class LearningRow:
    """One recipe.

    Attributes:
        changes: values of the recipe by key (`section.key`).
        of: name of the row to which the changes are applied; "" for a complete recipe.
        about: description of the recipe or of the change.
        successor_of: name of the row that this complete recipe replaced as the default, with which
            it is compared if both were measured; "" for all others.
    """

    changes: Mapping[str, Any]
    of: str = ""
    about: str = ""
    successor_of: str = ""


#: Model shapes by name. For a given shape, Llama-like and GPT-2-like layouts have about the same
#: number of parameters.
SIZES: dict[str, dict[str, Any]] = {
    # nanoGPT's shape for a CPU.
    "0.8m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    # The demo's shape.
    "2.6m": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3},
    # nanoGPT's shape for Shakespeare by characters on a GPU.
    "11m": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6},
    "30m": {"hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8},
    # The shape of GPT-2 124M, with a smaller vocabulary.
    "88m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}

#: The demo's earlier recipe: the row to which each single change is applied.
BEFORE = "before"

#: The settings of new models, which are also those of the demo.
NEW = "new"

#: Name for `--rows` that selects all single changes.
CHANGES = "changes"

_NANOGPT: dict[str, Any] = {
    "model.model_type": "gpt2",
    "model.activation_function": "gelu",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 6e-4,
    "schedule.min_lr_ratio": 0.1,
}

# nanochat's settings in Qwen3's layout, without its squared ReLU, softcap and value embeddings.
_NANOCHAT: dict[str, Any] = {
    "model.model_type": "qwen3",
    "model.tie_word_embeddings": False,
    "init.residual_projections": "zero",
    "init.embedding_std": 0.8,
    "init.head_std": 0.001,
    "optimizer.name": "muon",
    # nanochat's 0.02, converted to firstlight's scale of Muon's updates at a width of 192.
    "optimizer.muon_learning_rate": 0.007,
    "optimizer.muon_coefficients": "polar_express",
    "optimizer.muon_beta2": 0.95,
    "optimizer.muon_momentum_warmup_steps": 150,
    "optimizer.cautious_weight_decay": True,
    "optimizer.embedding_weight_decay": 0.0,
    "optimizer.head_weight_decay": 0.0,
    "optimizer.learning_rate": 0.3,
    "optimizer.head_lr_multiple": 0.0133,
    "optimizer.vector_lr_multiple": 0.0133,
    "optimizer.betas": [0.8, 0.95],
    "optimizer.max_grad_norm": 0.0,
    "schedule.warmup_ratio": 0.02,
    "schedule.kind": "wsd",
    "schedule.decay_fraction": 0.65,
    "schedule.min_lr_ratio": 0.05,
}

_ZERO: dict[str, Any] = {"schedule.kind": "linear", "schedule.min_lr_ratio": 0.0}

ROWS: dict[str, LearningRow] = {
    # Complete recipes.
    "nanogpt": LearningRow(
        _NANOGPT, about="nanoGPT: GPT-2 layout, AdamW at 6e-4, cosine to a tenth"
    ),
    "nanogpt-tuned": LearningRow(
        {**_NANOGPT, "optimizer.learning_rate": 2e-3},
        about="nanoGPT with a learning rate of 2e-3, which suits small models",
    ),
    "nanogpt-cpu": LearningRow(
        {
            **_NANOGPT,
            "optimizer.learning_rate": 1e-3,
            "optimizer.betas": [0.9, 0.99],
            "data.seq_len": 64,
            "batch.micro_batch_size": 12,
        },
        about="nanoGPT's settings for character-level Shakespeare on a CPU: 12 rows of 64 tokens, "
        "AdamW at 1e-3, second beta 0.99",
    ),
    BEFORE: LearningRow(
        {
            "model.model_type": "llama",
            "model.tie_word_embeddings": True,
            "optimizer.name": "muon",
            "optimizer.muon_learning_rate": 0.005,
            "optimizer.learning_rate": 0.02,
            "optimizer.betas": [0.8, 0.95],
            "schedule.warmup_ratio": 0.07,
            "schedule.min_lr_ratio": 0.05,
        },
        about="firstlight's earlier demo: Llama layout, Muon at 0.005, AdamW at 0.02, cosine "
        "decay to a twentieth",
    ),
    "nanochat": LearningRow(
        _NANOCHAT,
        about="nanochat's settings that work in the Qwen3 layout: zero-initialised projections, "
        "NorMuon, AdamW at 0.3 on the embedding and 0.004 on the head, linear decay over the last "
        "65%",
    ),
    NEW: LearningRow(
        {
            **LAYOUT,
            "optimizer.tuned_width": RATE_WIDTH,
            "schedule.warmup_ratio": WARMUP_RATIO,
        },
        about="the settings of new models: nanochat's, but with Muon at 0.012 for width 192, and "
        "linear decay to zero",
        successor_of=BEFORE,
    ),
    # Single changes.
    "linear-to-zero": LearningRow(_ZERO, BEFORE, "linear decay to zero after the warm-up"),
    "stable-then-zero": LearningRow(
        {**_ZERO, "schedule.kind": "wsd", "schedule.decay_fraction": 0.6},
        BEFORE,
        "a constant rate, then linear decay to zero over the last 60%",
    ),
    "qk-norm": LearningRow(
        {"model.model_type": "qwen3"}, BEFORE, "Qwen3's normalisation of queries and keys"
    ),
    "untied-head": LearningRow(
        {"model.tie_word_embeddings": False, "optimizer.head_lr_multiple": 0.2},
        BEFORE,
        "an untied head at a fifth of the embedding's learning rate",
    ),
    "half-batch": LearningRow(
        {"batch.micro_batch_size": 4}, BEFORE, "4 rows per step instead of 8"
    ),
    "half-rows": LearningRow(
        {"batch.micro_batch_size": 16, "data.seq_len": 128}, BEFORE, "16 rows of 128 tokens"
    ),
    "zero-init": LearningRow(
        {"init.residual_projections": "zero"}, BEFORE, "layers that start as the identity"
    ),
    "low-adamw": LearningRow({"optimizer.learning_rate": 0.01}, BEFORE, "AdamW at 0.01"),
    "high-muon": LearningRow({"optimizer.muon_learning_rate": 0.01}, BEFORE, "Muon at 0.01"),
    "no-embedding-decay": LearningRow(
        {"optimizer.embedding_weight_decay": 0.0}, BEFORE, "no weight decay on the embedding"
    ),
    "cautious-decay": LearningRow(
        {"optimizer.cautious_weight_decay": True}, BEFORE, "cautious weight decay"
    ),
    "polar-express": LearningRow(
        {"optimizer.muon_coefficients": "polar_express"},
        BEFORE,
        "Muon with Polar Express coefficients",
    ),
    "normuon": LearningRow({"optimizer.muon_beta2": 0.95}, BEFORE, "NorMuon"),
}

#: Values of the recipe in all rows that don't change them.
_COMMON: dict[str, Any] = {
    "data": {"seq_len": 256},
    "batch": {"micro_batch_size": 8},
    "schedule": {"warmup_ratio": 0.05},
    # Compiling would take a large part of a run of a few minutes.
    "efficiency": {"compile": False},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
}

#: Sections that rows may change; the benchmark sets the other ones.
_VARIABLE = ("data", "model", "init", "batch", "schedule", "optimizer", "loss", "efficiency")


def choose_rows(names: Sequence[str], variants: Sequence[str]) -> dict[str, LearningRow]:
    """Return the named rows in order, followed by the variants, by name.

    Args:
        names: names of `ROWS`, or `CHANGES` for all single changes and the row that they change;
            without names all complete recipes.
        variants: see `find_row`.

    Raises:
        ConfigError: a name is unknown, or a variant is invalid.
    """
    require_known("row", names, [*ROWS, CHANGES])
    changes = [BEFORE, *(name for name, row in ROWS.items() if row.of == BEFORE)]
    chosen = [one for name in names for one in (changes if name == CHANGES else [name])]
    chosen = chosen or [name for name, row in ROWS.items() if not row.of]
    return {name: find_row(name) for name in (*chosen, *variants)}


def find_row(name: str) -> LearningRow:
    """Return the row of a name, or a variant of a row.

    Args:
        name: name in `ROWS`, or "NAME:section.key=value,section.key=value" for a variant of NAME.

    Raises:
        ConfigError: the name is unknown, or the variant is not of that form.
    """
    of, colon, text = name.partition(":")
    require_known("row", [of], ROWS)
    if not colon:
        return ROWS[of]
    changes = {}
    example = f"{BEFORE}:optimizer.learning_rate=0.01"
    for key, value in variant_changes(name, text, _VARIABLE, example):
        try:
            changes[key] = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(f"--set {name}: {error}") from None
    return LearningRow(changes, of, text)


def recipe_values(row: LearningRow, size: str) -> dict[str, Any]:
    """Return the values of the recipe of a row at a size, without the corpus and the number of
    steps."""
    chain = [row]
    while chain[0].of:
        chain.insert(0, ROWS[chain[0].of])
    values = changed_recipe(_COMMON, {"model": SIZES[size]})
    for one in chain:
        values = changed_recipe(values, one.changes)
    # The context is the sequence length: learned positions beyond it would never be trained.
    context = values["data"]["seq_len"]
    return changed_recipe(values, {"model.max_position_embeddings": context})


RESULTS_NAME = "results.jsonl"

#: Defaults: the demo's size, and the tokens of a run without a budget.
_SIZES, _TOKENS = ("2.6m",), 1_474_560

#: Number of points of a curve, and of held-out tokens for each point.
_POINTS, _POINT_TOKENS = 12, 32_768

#: Minimum number of held-out tokens for the final figure; each point of the curve uses an eighth of
#: them.
_LEAST_HELD_OUT = 8192

#: Vocabulary size of a tokenizer, and of a byte tokenizer with 256 bytes and the end of a text.
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
        size: name in `SIZES`.
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
        """Return the values of the recipe of a run, without its folder."""
        values = self.values
        seq_len = values["data"]["seq_len"]
        # All points together are then evaluated on only a few more tokens than the final figure.
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
        """Return the validated recipe.

        Raises:
            ConfigError: the values are not a valid recipe.
        """
        return parse_recipe(self.recipe(max_steps, _FIRST_SEED), f"row {self.row}")


def prepare_corpus(name: str, folder: Path) -> LearningCorpus:
    """Prepare a corpus in `folder`, unless it already exists.

    Args:
        name: "stdlib", a text file, or "bytes:FILE" for tokens that are bytes.
        folder: parent of the corpora.

    Raises:
        InputError: the text does not exist.
        StorageError: a file system error.
    """
    file = name.removeprefix("bytes:")
    # The hash of the path distinguishes files with the same name in different folders.
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
    """Prepare the corpora; return a case for every row, corpus and size, by title.

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
        raise ConfigError(
            "--tokens and --minutes both set the length of a run: use only one of them"
        )
    if bench.minutes is not None and not bench.minutes > 0:
        raise ConfigError(f"--minutes is {bench.minutes}: it must be greater than 0")
    tokens = None if bench.minutes is not None else bench.tokens or _TOKENS
    rows = choose_rows(bench.rows, bench.variants)
    folder = bench.folder / "corpora"
    cases = [
        LearningCase(
            corpus, size, row, tokens, minutes=bench.minutes, held_out_tokens=bench.held_out_tokens
        )
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
    return run_bench(
        "learning", titles, turns, measure, summarize=result, on_run=on_run, outcomes=outcomes
    )


def _case_of(line: Mapping[str, Any]) -> LearningCase | None:
    """Return the case of a line in results.jsonl, or None if the recipe of its row has changed
    since."""
    corpus = LearningCorpus(line["corpus"], line["corpus_sha256"])
    budget = (line["budget_tokens"], line["budget_minutes"], line.get("held_out_tokens"))
    try:
        case = LearningCase(corpus, line["size"], line["row"], *budget)
        return case if case.digest == line["digest"] else None
    except (ConfigError, KeyError):
        return None


def _in_order(lines: list[dict[str, Any]], cases: Sequence[LearningCase]) -> list[dict[str, Any]]:
    """Return the lines in the order of the cases, and of the seeds; then those of other calls'
    cases."""
    places = {case.digest: place for place, case in enumerate(cases)}
    return sorted(lines, key=lambda line: (places.get(line["digest"], len(places)), line["seed"]))


def _outcome(case: LearningCase, lines: Sequence[dict[str, Any]], seeds: int) -> RowOutcome:
    """Return the finished runs of a case, from the first seed to the last one before a gap."""
    done = {line["seed"]: line for line in lines if line["digest"] == case.digest}
    outcome = RowOutcome()
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
    """Train a recipe; runs in a separate process.

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
    """Raised to end a run of which only the first steps are measured."""


# The page.


#: Minimum number of seeds for a verdict, and minimum gain that counts, in standard deviations.
_SEEDS, _LEAST_GAIN = 3, 2.0

#: Number of the best rows in a panel of the picture.
_BEST = 4


@dataclass(frozen=True)
class RowFigures:
    """The runs of a row in a group, which differ in their seeds.

    Attributes:
        name: name of the row.
        row: the recipe.
        runs: the row's lines of results.jsonl.
        over: name of the row with which this one is compared: the one that it changes, or that it
            replaced as the default; the baseline for other complete recipes.
        compared: the runs of that row; empty for the baseline itself, and if there are none.
        goal: mean bits per byte at the end of the baseline's curve.
    """

    name: str
    row: LearningRow
    runs: Sequence[Mapping[str, Any]]
    over: str
    compared: Sequence[Mapping[str, Any]]
    goal: float

    @property
    def bits_per_byte(self) -> float:
        """Final bits per byte of the held-out text, the mean over the seeds."""
        return statistics.mean(_final(self.runs))

    @property
    def gains(self) -> list[float]:
        """Reduction of bits per byte relative to the compared row, for each seed that both have.

        Runs with the same seed read the same text in the same order, so the difference between two
        of them varies less than that of runs with different seeds.
        """
        other = {run["seed"]: run["bits_per_byte"] for run in self.compared}
        return [
            other[run["seed"]] - run["bits_per_byte"] for run in self.runs if run["seed"] in other
        ]

    @property
    def gain_in_spreads(self) -> float | None:
        """The mean gain divided by its standard deviation over the seeds; None with fewer than
        three seeds."""
        if len(self.gains) < _SEEDS:
            return None
        return statistics.mean(self.gains) / max(statistics.stdev(self.gains), 1e-6)

    def curve(self) -> list[tuple[float, float, list[float]]]:
        """Return (tokens, mean seconds, bits per byte of each seed) at each point."""
        return [
            (points[0][0], statistics.mean(p[1] for p in points), [p[2] for p in points])
            for points in zip(*(run["curve"] for run in self.runs), strict=False)
        ]

    def to_goal(self) -> tuple[float, float] | None:
        """Return (tokens, seconds) at which the mean curve reaches the goal, interpolated linearly
        between points; None if it never does."""
        points = [(t, s, statistics.mean(bits)) for t, s, bits in self.curve()]
        before = None
        for tokens, seconds, bits in points:
            if bits <= self.goal:
                if before is None:
                    return tokens, seconds
                part = (before[2] - self.goal) / (before[2] - bits)
                return (
                    before[0] + part * (tokens - before[0]),
                    before[1] + part * (seconds - before[1]),
                )
            before = tokens, seconds, bits
        return None


def _final(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["bits_per_byte"] for run in runs]


@dataclass(frozen=True)
class LearningGroup:
    """The rows on one corpus at one size with one budget; the first row is the baseline."""

    corpus: str
    size: str
    budget: str
    rows: Sequence[RowFigures]

    @property
    def title(self) -> str:
        """Heading of the group."""
        return f"{self.corpus}, {self.size}, {self.budget}"


def learning_groups(runs: Sequence[Mapping[str, Any]]) -> list[LearningGroup]:
    """Return the runs by group and row, both in the order of their first runs."""
    groups: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for run in runs:
        key = (run["corpus"], run["size"], run["budget"])
        groups.setdefault(key, {}).setdefault(run["row"], []).append(run)
    found = []
    for (corpus, size, budget), rows in groups.items():
        baseline = next(iter(rows))
        goal = statistics.mean(run["curve"][-1][2] for run in rows[baseline])
        figures = []
        for name, own in rows.items():
            row = find_row(name)
            over = row.of or (row.successor_of if row.successor_of in rows else baseline)
            compared = [] if over == name else rows.get(over, [])
            figures.append(RowFigures(name, row, own, over, compared=compared, goal=goal))
        found.append(LearningGroup(corpus, size, budget, figures))
    return found


def verdicts(groups: Sequence[LearningGroup]) -> dict[str, str]:
    """Return the verdict on each single change, and on each recipe that replaced another as the
    default, by name of the row.

    A change is kept if its gain exceeds two standard deviations on two corpora and at two sizes,
    and no group has a loss of that size.
    """
    found: dict[str, list[tuple[LearningGroup, RowFigures]]] = {}
    for group in groups:
        for row in group.rows:
            decided = row.over in (row.row.of, row.row.successor_of)
            if decided and row.gain_in_spreads is not None:
                found.setdefault(row.name, []).append((group, row))
    return {name: _verdict(cases) for name, cases in found.items()}


def _verdict(cases: Sequence[tuple[LearningGroup, RowFigures]]) -> str:
    gains = [(group, row.gain_in_spreads or 0.0) for group, row in cases]
    worse = [f"{group.corpus} {group.size}" for group, gain in gains if gain < -_LEAST_GAIN]
    better = [group for group, gain in gains if gain > _LEAST_GAIN]
    corpora, sizes = {one.corpus for one in better}, {one.size for one in better}
    if worse:
        return f"not kept: worse on {', '.join(worse)}"
    if not better:
        return "not kept: no gain above twice its spread"
    gained = f"gains on {', '.join(sorted(corpora))}, at {', '.join(sorted(sizes))}"
    return f"{'kept' if len(corpora) > 1 and len(sizes) > 1 else 'open'}: {gained}"


HEADER = ("recipe", "bits per byte", "seconds to baseline", "gain over", "gain")


def row_cells(row: RowFigures) -> tuple[str, ...]:
    """Return a row of a group's table; see HEADER."""
    goal = row.to_goal()
    return (
        row.name,
        f"{row.bits_per_byte:.4f}",
        "never" if goal is None else f"{goal[1]:,.0f}",
        row.over if row.compared else "",
        _gain_cell(row.gains),
    )


def _gain_cell(gains: Sequence[float]) -> str:
    if len(gains) < 2:
        return "".join(f"{gain:+.4f}" for gain in gains)
    return f"{statistics.mean(gains):+.4f} ± {statistics.stdev(gains):.4f}"


def draw(result: Mapping[str, Any]) -> bytes:
    """Return a PNG of the held-out bits per byte by tokens and by seconds, with bands over the
    seeds, for the baseline, the best rows and the rows with which they are compared."""
    groups = learning_groups(result["runs"])
    figure = new_figure(13, 3.6 * max(len(groups), 1))
    axes = figure.subplots(max(len(groups), 1), 2, squeeze=False)
    for places, group in zip(axes, groups, strict=False):
        # Only the best rows and those with which they are compared: more lines could not be
        # distinguished.
        best = sorted(group.rows[1:], key=lambda row: row.bits_per_byte)[:_BEST]
        names = {group.rows[0].name, *(row.name for row in best), *(row.over for row in best)}
        shown = [row for row in group.rows if row.name in names]
        for row in shown:
            curve = row.curve()
            for place, axis in zip(places, (0, 1), strict=True):
                x = [point[axis] for point in curve]
                means = [statistics.mean(point[2]) for point in curve]
                (line,) = place.plot(x, means, label=row.name)
                low, high = ([f(point[2]) for point in curve] for f in (min, max))
                place.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
        ends = [bits for row in shown for _, _, seeds in row.curve()[-1:] for bits in seeds]
        middle = [bits for row in shown for _, _, seeds in row.curve()[:3][-1:] for bits in seeds]
        for place, label in zip(places, ("tokens", "training seconds"), strict=True):
            place.set(xlabel=label, ylabel="held-out bits per byte")
            # The axis ends at the third points, because the first two are far above all others.
            if middle and max(middle) > min(ends):
                place.set_ylim(min(ends) - 0.02, max(middle))
            place.set_title(group.title, loc="left", fontsize="medium", parse_math=False)
            place.legend(fontsize="small")
        places[0].xaxis.set_major_formatter("{x:,.0f}")
    return png_of(figure)


def page(result: Mapping[str, Any], picture: str) -> str:
    """Return the page of the results, in Markdown.

    Args:
        picture: address of the picture.
    """
    groups, machine = learning_groups(result["runs"]), result["machine"]
    known = {row.name: row.row for group in groups for row in group.rows}
    recipes = [
        f"- `{name}`: {row.of and f'`{row.of}` with '}{row.about}" for name, row in known.items()
    ]
    decided = verdicts(groups)
    parts = [
        _HEAD.format(
            machine=f"{machine['name']}, torch {machine['torch']}, threads: {machine['threads']}"
        )
    ]
    parts.append("\n".join(recipes) + "\n")
    for group in groups:
        seeds = max(len(row.runs) for row in group.rows)
        parts.append(f"## {group.title}\n\nBaseline: {group.rows[0].name}; {seeds} seeds.\n")
        parts.append(markdown_table(HEADER, [row_cells(row) for row in group.rows]))
    if result["problems"]:
        failed = [f"- {title}: {problem}" for title, problem in result["problems"].items()]
        parts.append("\n".join(["## Runs that failed", "", *failed, ""]))
    if decided:
        parts.append("## Verdict on each change\n")
        alike: dict[str, list[str]] = {}
        for name, verdict in decided.items():
            alike.setdefault(verdict, []).append(f"`{name}`")
        lines = [f"- {', '.join(names)}: {verdict}" for verdict, names in alike.items()]
        parts.append("\n".join(lines) + "\n")
    parts.append(f"![held-out bits per byte by tokens and by seconds]({picture})\n")
    return "\n".join(parts)


_HEAD = """\
# Learning: recipes at equal tokens or equal time

    make benchmarks NAMES=learning                            # this page
    python -m benchmarks learning --out DIR --page PAGE.md    # a page of your own rows and corpora

This page compares the settings of new models (`new`) with those of nanoGPT and nanochat, and with
earlier defaults. Each run is a separate `firstlight train` process.

- **bits per byte**: The mean over seeds at the end of a run, measured on the held-out text or on
  the number of its tokens given in the heading. All recipes share a tokenizer that was trained on
  the full text. For Shakespeare with 2,048 tokens, this lowers bits per byte by 2.6%.
- **seconds to baseline**: The training time that a recipe needs to reach the final bits per byte of
  the baseline.
- **gain**: The reduction in bits per byte. The mean and the standard deviation are computed over
  pairs of runs with the same seed.

A change is kept if its gain is larger than two standard deviations on at least two corpora and at
two model sizes, and if it never makes a result worse by that much. If each token is one byte, one
nat is 1.4427 bits per byte.

Machine: {machine}.
"""
