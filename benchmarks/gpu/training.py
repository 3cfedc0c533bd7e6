"""Part "training" of `python -m benchmarks gpu`: tokens per second relative to other programs.

    python -m firstlight.hardware.fresh_process benchmarks.gpu.training REQUEST

REQUEST has the keys of `training`, but instead of "data" it has "work", the folder in which
the corpus of the standard library is prepared unless it exists, and "vocab_size", the size of its
vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.ceilings import measured_ceiling
from benchmarks.gpu.parts import BenchMachine, Findings, Page, Part, Row, draw_bars
from benchmarks.pages import markdown_table
from benchmarks.training import FIRSTLIGHT, REFERENCE, library_corpus, turn_ratios
from benchmarks.training import measure as measure_training
from firstlight.bench.models import find_model
from firstlight.models.accounting import meta_model, train_flops_per_token

NAME = "training"
_MODULE = "benchmarks.gpu.training"

#: Vocabulary size of the corpus's tokenizer, that of GPT-2; models may have larger vocabularies.
VOCAB_SIZE, DRY_VOCAB_SIZE = 50257, 512

_GIB = 2**30

_PROGRAMS = {
    FIRSTLIGHT: "bf16, compiled, vocabulary padded to a multiple of 64",
    REFERENCE: "a bare loop as nanoGPT's: fp32 weights, bf16 autocast, torch.compile, SDPA, fused "
    "AdamW, clipping",
}


@dataclass(frozen=True)
class TrainingCase:
    """One model to train, and the settings of its measurement.

    Attributes:
        model: name in `models.MODELS`.
        seq_len: tokens of a sequence.
        rows: micro-batch size by minimum memory of the GPU in GiB, the largest memory first.
        programs: (`Row.value`, expected seconds of the first turn) by program.
        goal: the goal in Markdown.
        goal_rate: label of the picture's reference line, and its tokens per second.
    """

    model: str
    seq_len: int
    rows: Mapping[int, int]
    programs: Mapping[str, tuple[int, float]]
    goal: str
    goal_rate: tuple[str, float]


_CASES = (
    TrainingCase(
        "gpt2-124m",
        1024,
        {120: 64, 60: 32, 30: 16, 0: 8},
        {FIRSTLIGHT: (1, 75), REFERENCE: (1, 65)},
        goal="60 % of the measured bf16 rate, and 1.1 times the bare loop; llm.c reaches about "
        "460,000 tokens/s on an H100",
        goal_rate=("llm.c on an H100", 460e3),
    ),
    TrainingCase(
        "llama-1b",
        2048,
        {120: 8, 60: 4, 30: 2, 0: 1},
        {FIRSTLIGHT: (2, 110)},
        goal="45,000 tokens/s; nanotron reaches 42,000",
        goal_rate=("nanotron", 42e3),
    ),
)
_DRY_CASES = (
    TrainingCase(
        "small",
        64,
        {0: 2},
        {FIRSTLIGHT: (1, 10), REFERENCE: (1, 10)},
        goal="none: a dry run",
        goal_rate=("no goal", 1.0),
    ),
)


def _cases(machine: BenchMachine) -> Sequence[TrainingCase]:
    return _DRY_CASES if machine.dry else _CASES


def _rows(machine: BenchMachine) -> list[Row]:
    return [
        Row(
            _row_name(case, program),
            _MODULE,
            {
                "program": program,
                "recipe": _recipe(case, machine),
                "micro_batch_size": _micro_batch_size(case, machine),
                "warmup_steps": 1 if machine.dry else 5,
                "steps": 2 if machine.dry else 20,
                "threads": machine.cpus,
                "compile": not machine.dry,
                "vocab_size": DRY_VOCAB_SIZE if machine.dry else VOCAB_SIZE,
            },
            seconds=seconds,
            value=value,
        )
        for case in _cases(machine)
        for program, (value, seconds) in case.programs.items()
    ]


def _row_name(case: TrainingCase, program: str) -> str:
    return f"{case.model}, {program}"


def _micro_batch_size(case: TrainingCase, machine: BenchMachine) -> int:
    return next(rows for least, rows in case.rows.items() if machine.memory_bytes >= least * _GIB)


def _recipe(case: TrainingCase, machine: BenchMachine) -> dict[str, Any]:
    micro = _micro_batch_size(case, machine)
    return {
        "run": {"device": machine.device},
        "model": find_model(case.model).model_dump(),
        "data": {"dir": "-", "seq_len": case.seq_len},
        "batch": {"micro_batch_size": micro, "gradient_accumulation_steps": 1},
        # The settings that the guide names for a GPU.
        "efficiency": {"compile": not machine.dry, "vocab_multiple": 64},
    }


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train as `training` does, on the standard library's source.

    Returns:
        "step_seconds", "first_step_seconds" and "chosen" of `training`; "peak_bytes", its
        "total_peak_bytes"; "tokens" of a step; "final_loss", that of the last timed step; "line",
        the result in words.
    """
    corpus = library_corpus(Path(request["work"]), request["vocab_size"])
    found = measure_training({**request, "data": str(corpus)})
    tokens = request["micro_batch_size"] * request["recipe"]["data"]["seq_len"]
    rate = tokens / statistics.median(found["step_seconds"])
    return {
        "step_seconds": found["step_seconds"],
        "tokens": tokens,
        "first_step_seconds": found["first_step_seconds"],
        "peak_bytes": found["total_peak_bytes"],
        "final_loss": found["losses"][-1],
        "chosen": found["chosen"],
        "line": f"{rate:,.0f} tokens/s, {found['total_peak_bytes'] / _GIB:.1f} GiB",
    }


def tokens_per_second(runs: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second, the median over the timed steps of all turns."""
    rates: list[float] = [run["tokens"] / s for run in runs for s in run["step_seconds"]]
    return statistics.median(rates)


def _page(found: Findings) -> Page:
    programs = "".join(f"- `{name}`: {text}\n" for name, text in _PROGRAMS.items())
    parts = [
        "Each program trains the same model on the same rows of the standard library's source, in "
        "fresh\nprocesses; rates are medians over the timed steps of all turns.\n\n" + programs
    ]
    summary, pictures = [], {}
    for case in _cases(found.machine):
        rates = {
            row.name: tokens_per_second(runs)
            for row in found.measured(NAME)
            if (runs := found.outcome(NAME, row.name).runs) and row.name.startswith(case.model)
        }
        if not rates:
            continue
        picture = f"gpu-training-{case.model}.png"
        parts.append(_section(case, found, rates) + f"\n![tokens a second](../images/{picture})\n")
        title = f"{case.model}: {found.machine.name}"
        pictures[picture] = draw_bars(title, "tokens/s", list(rates.items()), line=case.goal_rate)
        summary.append(_summary(case, found, rates))
    return Page("\n".join(summary), "\n".join(parts), pictures)


def _flops_per_token(case: TrainingCase) -> float:
    return train_flops_per_token(meta_model(find_model(case.model)), case.seq_len)


def _shares(case: TrainingCase, found: Findings, rate: float) -> tuple[float | None, float | None]:
    """MFU relative to the measured rate of bf16 products, and to the data sheet's; None if that
    rate is unknown."""
    flops, gpu = rate * _flops_per_token(case), found.machine.gpu
    ceiling = measured_ceiling(found)
    return flops / ceiling if ceiling else None, flops / gpu.bf16 if gpu and gpu.bf16 else None


def _ratio(case: TrainingCase, found: Findings, name: str) -> str:
    """The speed relative to the bare loop as text: the median of the turns' ratios, and the range;
    "" without ratios."""
    base = found.outcome(NAME, _row_name(case, REFERENCE)).runs
    ratios = turn_ratios(found.outcome(NAME, name).runs, base)
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _section(case: TrainingCase, found: Findings, rates: Mapping[str, float]) -> str:
    """A model's section of the page: the goal and the table of the programs."""
    rows = []
    for name, rate in rates.items():
        runs = found.outcome(NAME, name).runs
        measured, sheet = _shares(case, found, rate)
        rows.append(
            (
                name.removeprefix(f"{case.model}, "),
                f"{rate:,.0f}",
                _percent(measured),
                _percent(sheet),
                _ratio(case, found, name),
                f"{max(run['peak_bytes'] for run in runs) / _GIB:.1f}",
                f"{runs[-1]['final_loss']:.3f}",
                f"{runs[0]['first_step_seconds']:.0f}",
                str(len(runs)),
            )
        )
    header = (
        "program",
        "tokens/s",
        "of the measured bf16 rate",
        "of the data sheet's",
        "/ bare loop (by turn)",
        "peak GiB",
        "last loss",
        "first step, s",
        "turns",
    )
    micro = _micro_batch_size(case, found.machine)
    return (
        f"## {case.model}, {micro} x {case.seq_len} tokens a step\n\nGoal: {case.goal}.\n\n"
        f"{markdown_table(header, rows)}"
    )


def _summary(case: TrainingCase, found: Findings, rates: Mapping[str, float]) -> str:
    """A model's line for the summary in gpu.md."""
    ours = rates.get(_row_name(case, FIRSTLIGHT))
    if ours is None:
        return f"- {case.model}: firstlight's own row is missing."
    measured, sheet = _shares(case, found, ours)
    said = [f"{ours:,.0f} tokens/s"]
    said += [f"{_percent(measured)} of the measured bf16 rate"] if measured else []
    said += [f"{_percent(sheet)} of the data sheet's"] if sheet else []
    runs = found.outcome(NAME, _row_name(case, FIRSTLIGHT)).runs
    ratios = turn_ratios(runs, found.outcome(NAME, _row_name(case, REFERENCE)).runs)
    said += [f"{statistics.median(ratios):.2f} times the bare loop's"] if ratios else []
    peaks = [run["peak_bytes"] for run in runs]
    said.append(f"peak {max(peaks) / _GIB:.1f} GiB")
    return f"- {case.model}: {', '.join(said)}. Goal: {case.goal}."


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


TRAINING = Part(
    NAME,
    "Training: GPT-2 124M and Llama 1B beside other programs",
    "Tokens a second, MFU (against the measured rate of bf16 matrix products and the data sheet's) "
    "and peak memory of GPT-2 124M and a Llama of 1.2B parameters, with random weights and real "
    "token shards, beside a bare loop in nanoGPT's manner.",
    _rows,
    page=_page,
)
