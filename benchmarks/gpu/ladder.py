"""Part "ladder" of `python -m benchmarks gpu`: each row of a table adds a method to the row before.

There are ladders for the speed of GPT-2 124M and for the memory of full fine-tuning of a Llama 3.2
3B, which is compared with the figures in torchtune's README. A row of a ladder is called a rung.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.parts import BenchMachine, Findings, Page, Part, Row, draw_bars
from benchmarks.models import PlannerCase
from benchmarks.pages import markdown_table
from benchmarks.planner_steps import STEPS_MODULE, steps_request

NAME = "ladder"

_GIB = 2**30

#: Goal for peak memory in GiB of the last rung of full fine-tuning, a figure of torchtune's.
MEMORY_GOAL = 17.6


@dataclass(frozen=True)
class Rung:
    """One method.

    Attributes:
        name: name in tables.
        changes: values of the recipe by key (`section.key`), added to those of the rungs before.
        needs: packages that must be installed; if one is missing, the rung is skipped, and later
            rungs don't have its changes.
        slow: True if the rung compiles the model.
        value: see `runner.Row`.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()
    slow: bool = False
    value: int = 3


@dataclass(frozen=True)
class Ladder:
    """Rungs of one model.

    Attributes:
        title: heading of the table.
        model: see `models.PlannerCase`.
        rows: sequences of a micro-batch.
        tokens: tokens of a sequence.
        rungs: the rungs in their order.
        seconds: expected duration of a rung's process in seconds, without compiling.
    """

    title: str
    model: str
    rows: int
    tokens: int
    rungs: Sequence[Rung]
    seconds: float

    def cases(self, machine: BenchMachine) -> Iterator[tuple[Rung, PlannerCase, str]]:
        """Each rung, its configuration, and the reason why it is skipped ("" if it is not)."""
        changes: dict[str, Any] = {}
        for rung in self.rungs:
            missing = machine.lacks(*rung.needs)
            own = {**changes, **rung.changes}
            if not missing:
                changes = own
            yield rung, PlannerCase(self.model, self.rows, self.tokens, own), missing


_BF16 = {"efficiency.precision": "bf16"}
_FUSED = {"optimizer.implementation": "fused"}
_FULL = {"efficiency.activation_checkpointing": "full"}
_COMPILED = {"efficiency.compile": True}
_OFFLOADED = {"efficiency.activation_offload": True}
_IN_BACKWARD = {"efficiency.optimizer_in_backward": True, "optimizer.max_grad_norm": 0.0}
_PLAIN = {
    "efficiency.attention": "plain",
    "optimizer.implementation": "for-loop",
    "optimizer.max_grad_norm": 0.0,
}
_4_BITS = ("bitsandbytes",)


def _speed_rungs(rows: int) -> tuple[Rung, ...]:
    """The rungs of the ladder of speed.

    Args:
        rows: sequences of a micro-batch of the first rungs.
    """
    return (
        Rung("fp32, attention as two products, AdamW parameter by parameter", _PLAIN, value=2),
        Rung("+ bf16", _BF16, value=2),
        Rung("+ fused attention (SDPA)", {"efficiency.attention": "sdpa"}),
        Rung("+ fused AdamW", _FUSED),
        Rung("+ torch.compile", _COMPILED, slow=True, value=2),
        Rung("+ padded vocabulary", {"efficiency.vocab_multiple": 64}, slow=True),
        Rung("+ twice the micro-batch", {"batch.micro_batch_size": 2 * rows}, slow=True),
        Rung("+ CUDA graphs", {"efficiency.compile_mode": "reduce-overhead"}, slow=True, value=6),
    )


_ADAFACTOR = {"optimizer.name": "adafactor", "optimizer.learning_rate": 0.01}

_MEMORY_RUNGS = (
    Rung("bf16, fp32 weights, fused AdamW", {**_BF16, **_FUSED}),
    Rung("+ loss in chunks", {"efficiency.loss_chunk_tokens": 1024}),
    Rung("+ activation checkpointing", _FULL, value=2),
    Rung("+ optimizer in the backward pass", _IN_BACKWARD),
    Rung("+ activations offloaded", _OFFLOADED),
    Rung(
        "+ 8-bit AdamW",
        {"optimizer.name": "adamw8bit", "optimizer.implementation": "auto"},
        needs=_4_BITS,
    ),
    Rung(
        "+ Adafactor in place of AdamW", {**_ADAFACTOR, "optimizer.implementation": "auto"}, value=2
    ),
)

#: Published rungs: name, peak memory in GiB, tokens/s.
Published = Sequence[tuple[str, float, float]]

#: torchtune's README (0.6), "Optimization flags": Llama 3.2 3B in bf16 on an A100, batch size 2,
#: sequences of 4,096 tokens.
_PUBLISHED_3B: Published = (
    ("packed rows, pure bf16, AdamW", 60.0, 7075),
    ("+ compile", 51.0, 8998),
    ("+ chunked cross-entropy", 42.9, 9174),
    ("+ activation checkpointing", 24.9, 7210),
    ("+ optimizer in the backward pass", 23.1, 7309),
    ("+ activation offloading", 21.8, 7301),
    ("+ 8-bit AdamW", 17.6, 6960),
)


def ladders(machine: BenchMachine) -> tuple[tuple[Ladder, Published], ...]:
    """The ladders for a machine, each with published figures (() without)."""
    if machine.dry:
        tiny = Rung("bf16, chunks, checkpointing", {**_BF16, "efficiency.loss_chunk_tokens": 64})
        four = Rung("4 bits without a package", {}, needs=("no-such-package",))
        speed = (Rung("plain", _PLAIN), Rung("+ fused AdamW", _FUSED))
        return (
            (Ladder("Speed of a tiny GPT-2", "tiny-gpt2", 2, 128, rungs=speed, seconds=6.0), ()),
            (
                Ladder(
                    "Memory of a tiny Llama", "tiny-llama", 2, 128, rungs=(tiny, four), seconds=6.0
                ),
                _PUBLISHED_3B,
            ),
        )
    return (
        (
            Ladder(
                "GPT-2 124M: speed", "gpt2-124m", 16, 1024, rungs=_speed_rungs(16), seconds=20.0
            ),
            (),
        ),
        (
            Ladder(
                "Llama 3.2 3B, full fine-tuning: memory",
                "llama-3b",
                2,
                4096,
                rungs=_MEMORY_RUNGS,
                seconds=30.0,
            ),
            _PUBLISHED_3B,
        ),
    )


def _row_name(ladder: Ladder, rung: Rung) -> str:
    return f"{ladder.model}: {rung.name}"


def _rows(machine: BenchMachine) -> list[Row]:
    rows = []
    for ladder, _ in ladders(machine):
        for rung, case, missing in ladder.cases(machine):
            rows.append(
                Row(
                    _row_name(ladder, rung),
                    STEPS_MODULE,
                    steps_request(machine, [case], 3.0),
                    seconds=ladder.seconds + (40.0 if rung.slow else 0.0),
                    value=rung.value,
                    skip=missing,
                )
            )
    return rows


@dataclass(frozen=True)
class _Found:
    """Results of a rung.

    Attributes:
        rung: the rung.
        result: its configuration's entry of the result of `planner_steps`; {} if there is none.
        reason: the reason why there is no figure; "" if there is one.
    """

    rung: Rung
    result: Mapping[str, Any]
    reason: str

    @property
    def rate(self) -> float:
        """Tokens per second."""
        rate: float = self.result["tokens_a_step"] / statistics.median(self.result["step_seconds"])
        return rate


def _found(ladder: Ladder, found: Findings) -> list[_Found]:
    entries = []
    for rung, _, missing in ladder.cases(found.machine):
        outcome = found.outcome(NAME, _row_name(ladder, rung))
        result = outcome.runs[0]["cases"][0] if outcome.runs else {}
        reason = missing or outcome.problem or result.get("reason", "not measured yet")
        entries.append(_Found(rung, result, reason))
    return entries


def _page(found: Findings) -> Page:
    text: list[str] = []
    summary: list[str] = []
    pictures: dict[str, bytes] = {}
    for number, (ladder, published) in enumerate(ladders(found.machine)):
        entries = _found(ladder, found)
        good = [entry for entry in entries if not entry.reason]
        text += [f"## {ladder.title}\n", f"{ladder.rows} x {ladder.tokens:,} tokens a step.\n"]
        text.append(_table(entries))
        if published:
            text.append(
                markdown_table(
                    ("published (torchtune)", "GiB", "tokens/s"),
                    [(name, f"{gib:.1f}", f"{rate:,.0f}") for name, gib, rate in published],
                )
            )
        if len(good) < 2:
            continue  # nothing to compare
        summary.append(_summary(ladder, entries))
        if not number:
            bars = [(entry.rung.name, entry.rate) for entry in good]
            pictures["gpu-ladder-speed.png"] = draw_bars(ladder.title, "tokens/s", bars)
        elif number == 1:
            bars = [(entry.rung.name, entry.result["peak_bytes"] / _GIB) for entry in good]
            pictures["gpu-ladder-memory.png"] = draw_bars(
                ladder.title,
                "GiB at the peak, of the allocator",
                bars,
                line=(f"goal: {MEMORY_GOAL} GiB", MEMORY_GOAL),
            )
    text += [f"![{name[4:-4]}](../images/{name})\n" for name in pictures]
    text.append(
        'Peak memory is that of torch\'s allocator; "predicted" is the error of what `firstlight\n'
        "plan` says of it. torchtune's weights are bf16 alone; here fp32 weights are trained,\n"
        "which take 2 bytes a parameter more. Weights and tokens are random.\n"
    )
    return Page("\n".join(summary), "\n".join(text), pictures)


def _table(entries: Sequence[_Found]) -> str:
    good = [entry for entry in entries if not entry.reason]
    rows, before = [], None
    for entry in entries:
        if entry.reason:
            rows.append((entry.rung.name, "", "", "", "", "", entry.reason))
            continue
        predicted, peak = entry.result.get("predicted_bytes"), entry.result["peak_bytes"]
        rows.append(
            (
                entry.rung.name,
                f"{entry.rate:,.0f}",
                "" if before is None else f"{entry.rate / before:.2f}x",
                "" if entries[0].reason else f"{entry.rate / good[0].rate:.2f}x",
                f"{peak / _GIB:.2f}",
                f"{predicted / peak - 1:+.1%}" if predicted else "",
                entry.result.get("prediction_problem", ""),
            )
        )
        before = entry.rate
    header = ("method", "tokens/s", "to the one before", "to the first", "GiB", "predicted", "note")
    return markdown_table(header, rows)


def _summary(ladder: Ladder, entries: Sequence[_Found]) -> str:
    good = [entry for entry in entries if not entry.reason]
    count = "" if len(good) == len(entries) else f", {len(good)} of {len(entries)} rungs"
    fastest = max(good, key=lambda entry: entry.rate)
    gain = f'"{fastest.rung.name}"'
    if not entries[0].reason:
        gain = f"{fastest.rate / good[0].rate:.1f} times the first rung, {gain}"
    least = min(good, key=lambda entry: entry.result["peak_bytes"])
    goal = f" (goal {MEMORY_GOAL})" if ladder.model == "llama-3b" else ""
    return (
        f"- {ladder.title}{count}: up to {fastest.rate:,.0f} tokens/s "
        f"({gain}), down to "
        f'{least.result["peak_bytes"] / _GIB:.2f} GiB{goal} ("{least.rung.name}").'
    )


LADDER = Part(
    NAME,
    "The ladder of the guides",
    "Each method added to those before it: for speed, and for memory beside torchtune's published "
    "ladder.",
    _rows,
    page=_page,
)
