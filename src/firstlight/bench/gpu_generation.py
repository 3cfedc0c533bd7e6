"""Part of `firstlight bench gpu`: generation beside transformers, and beside the memory's limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.bench.gpu_cases import model_values
from firstlight.bench.gpu_machine import Machine
from firstlight.bench.gpu_pages import Findings, Page, Part, draw_bars, markdown_table
from firstlight.bench.runner import Row

NAME = "generation"

_MODULE = "firstlight.bench.gpu_generation_once"

#: Rows by what their programs are; each has transformers in turns with its own.
_GROUPS = {
    "as it is": ("transformers", "firstlight", "decoder"),
    "compiled": ("transformers", "firstlight, compiled", "decoder, compiled"),
}


def _rows(machine: Machine) -> list[Row]:
    models = ["tiny-gpt2"] if machine.dry else ["gpt2-124m", "llama-1b"]
    rows = []
    for model in models:
        for group, programs in _GROUPS.items():
            if machine.dry and group == "compiled":
                continue
            # What transformers lacks, its comparison lacks; our own rates stand.
            known = [one for one in programs if one != "transformers" or not _lacks(machine)]
            request: dict[str, Any] = {
                "model": model_values(model),
                "device": machine.device,
                "dtype": "float32" if machine.dry else "bfloat16",
                "programs": known,
                "batch_sizes": [1, 2] if machine.dry else [1, 8, 64],
                "prompt_tokens": 16 if machine.dry else 128,
                "new_tokens": 8 if machine.dry else 64,
                "turns": 2,
            }
            seconds = 9.0 if machine.dry else 130.0 if group == "compiled" else 70.0
            value = 4 if group == "compiled" else 3
            rows.append(Row(f"{model}, {group}", _MODULE, request, seconds=seconds, value=value))
    return rows


def _lacks(machine: Machine) -> str:
    return machine.lacks("transformers")


@dataclass(frozen=True)
class _Rate:
    """Tokens per second of a program with one number of texts.

    Attributes:
        model, program: which.
        batch: see `gpu_generation_once`.
        limit: tokens per second that reading memory allows; None where that is not known.
        ratio: median of the turns' ratios to transformers; None without.
    """

    model: str
    program: str
    batch: Mapping[str, Any]
    limit: float | None
    ratio: float | None

    @property
    def rate(self) -> float:
        """The median of the turns."""
        rates: list[float] = self.batch["tokens_per_second"]
        return statistics.median(rates)

    @property
    def share(self) -> str:
        """The share of the limit as text."""
        return "" if self.limit is None else f"{self.rate / self.limit:.0%}"


def _rates(found: Findings) -> Iterator[_Rate]:
    for row in found.measured(NAME):
        run = found.outcome(NAME, row.name).runs[0]
        bandwidth = run["copy_bytes_per_second"]
        if found.machine.gpu is not None:
            bandwidth = max(bandwidth, found.machine.gpu.bandwidth)
        base = {
            one["batch_size"]: one["tokens_per_second"]
            for one in run["programs"].get("transformers", {}).get("batches", ())
        }
        for program, entry in run["programs"].items():
            for batch in entry["batches"]:
                size = batch["batch_size"]
                if not batch["tokens_per_second"]:
                    continue
                read = run["step_bytes"][str(size)]
                pairs = zip(batch["tokens_per_second"], base.get(size, ()), strict=False)
                ratios = [own / theirs for own, theirs in pairs]
                yield _Rate(
                    row.name.partition(",")[0],
                    program,
                    batch,
                    None if read is None else size * bandwidth / read,
                    statistics.median(ratios) if ratios else None,
                )


def _page(found: Findings) -> Page:
    rates = list(_rates(found))
    cells = [
        (
            f"{one.model}, {one.program}",
            one.batch["batch_size"],
            f"{one.rate:,.0f}",
            "" if one.ratio is None else f"{one.ratio:.2f}x",
            one.share,
            f"{1000 * statistics.median(one.batch['first_token_seconds']):.0f}",
            f"{one.batch['warm_up_seconds']:.1f}",
        )
        for one in rates
    ]
    header = (
        "program",
        "texts",
        "tokens/s",
        "to transformers",
        "of the limit",
        "first ms",
        "warm-up s",
    )
    failed = [
        (f"{row.name}: {program}", entry["reason"])
        for row in found.measured(NAME)
        for program, entry in found.outcome(NAME, row.name).runs[0]["programs"].items()
        if entry["reason"]
    ]
    text = [
        markdown_table(header, cells),
        'bf16, random weights, prompts of 128 tokens, 64 new ones, greedy. "firstlight" chooses\n'
        'the tokens of each text by itself, as `generate` and `serve` do; "decoder" those of all\n'
        "texts at once on the GPU. The limit is that of the memory: the weights and the cached\n"
        "keys and values of all texts are read once for each step, at the data sheet's bandwidth\n"
        "(or that of copying, if it was measured to be higher). Ratios are medians over turns\n"
        "(A B A B).\n",
        "![tokens per second](../images/gpu-generation.png)\n",
    ]
    if failed:
        text.insert(1, markdown_table(("program without a figure", "reason"), failed))
    bars = [
        (f"{one.model}, {one.program}, {one.batch['batch_size']} texts", one.rate) for one in rates
    ]
    pictures = {"gpu-generation.png": draw_bars("Generation", "tokens/s", bars)} if bars else {}
    return Page("\n".join(_summary(rates)), "\n".join(text), pictures)


def _summary(rates: Sequence[_Rate]) -> Iterator[str]:
    for key in dict.fromkeys((one.model, one.batch["batch_size"]) for one in rates):
        own = [
            one
            for one in rates
            if (one.model, one.batch["batch_size"]) == key and one.program != "transformers"
        ]
        if not own:
            continue
        best = max(own, key=lambda one: one.rate)
        beside = "" if best.ratio is None else f", {best.ratio:.1f} times transformers"
        share = f", {best.share} of the memory's limit" if best.share else ""
        name = f"{key[0]}, {key[1]} text{'s' * (key[1] > 1)}"
        yield f"- {name}: {best.rate:,.0f} tokens/s ({best.program}){beside}{share}."


GENERATION = Part(
    NAME,
    "Generation",
    "Tokens per second with 1, 8 and 64 texts at a time, beside transformers' `generate` on the "
    "same weights and beside what the memory's bandwidth allows.",
    _rows,
    _page,
)
