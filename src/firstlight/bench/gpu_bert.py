"""Part of `firstlight bench gpu`: the table of Hugging Face's guide for one GPU.

The guide ("Methods and tools for efficient training on a single GPU", transformers 4.20 to 4.29)
fine-tunes bert-large with rows of 512 tokens on a V100 with 16 GB, and reads memory with the
driver's tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.bench.gpu_machine import Machine
from firstlight.bench.gpu_pages import Findings, Page, Part, draw_bars, markdown_table
from firstlight.bench.gpu_predictions import target_request, unpacked
from firstlight.bench.runner import Row
from firstlight.planner.speed.throughput import Workload, predict_speed

NAME = "guide"

_MODULE = "firstlight.bench.gpu_bert_once"

_MIB = 2**20

_BERT_LARGE = {
    "vocab_size": 30522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_TINY = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@dataclass(frozen=True)
class GuideRow:
    """One row of the guide's table.

    Attributes:
        name: for people.
        options: keys of the request of `gpu_bert_once` that differ from the plain row's.
        samples, megabytes: published samples/s and MB of the driver on the V100; None where the
            guide has no figure.
        needs: packages that it can't do without.
        value: see `runner.Row`.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    samples: float | None = None
    megabytes: int | None = None
    needs: Sequence[str] = ()
    value: int = 4


_SMALL = {"rows": 1, "accumulation": 4}
_ALL = {**_SMALL, "checkpointing": True, "fp16": True}
_EIGHT_BIT = {"optimizer": "adamw_bnb_8bit"}
_ADAFACTOR = {"optimizer": "adafactor"}
_BNB = ("bitsandbytes",)

GUIDE: tuple[GuideRow, ...] = (
    GuideRow("batch 4", {}, 8.86, 14949, value=3),
    GuideRow("batch 1 x 4 accumulated", _SMALL, 7.75, 8681),
    GuideRow("batch 1 x 4, checkpointing", {**_SMALL, "checkpointing": True}, 5.99, 6775),
    GuideRow("batch 4, fp16", {"fp16": True}, 18.64, 13939, value=3),
    GuideRow("batch 1 x 4, checkpointing, fp16", _ALL, 10.09, 7275),
    GuideRow("batch 4, Adafactor", _ADAFACTOR, 7.96, 12295),
    GuideRow(
        "batch 1 x 4, checkpointing, fp16, Adafactor", {**_ALL, **_ADAFACTOR}, 9.06, 4847, value=3
    ),
    GuideRow("batch 4, 8-bit Adam", _EIGHT_BIT, 9.15, 13085, _BNB),
    GuideRow(
        "batch 1 x 4, checkpointing, fp16, 8-bit Adam", {**_ALL, **_EIGHT_BIT}, 10.35, 5363, _BNB
    ),
    # The guide's loop has the 8-bit optimizer, and no figures.
    GuideRow(
        "the same by the Accelerate loop", {**_ALL, **_EIGHT_BIT, "loop": "accelerate"}, needs=_BNB
    ),
    GuideRow(
        "batch 1 x 4, checkpointing, fp16, Adafactor by the Accelerate loop",
        {**_ALL, **_ADAFACTOR, "loop": "accelerate"},
    ),
)


def _guide(machine: Machine) -> tuple[GuideRow, ...]:
    if not machine.dry:
        return GUIDE
    wanted = ("batch 4", "batch 1 x 4, checkpointing, fp16, Adafactor by the Accelerate loop")
    return tuple(row for row in GUIDE if row.name in wanted or row.needs)


def _rows(machine: Machine) -> list[Row]:
    rows = []
    for entry in _guide(machine):
        request = {
            "device": machine.device,
            "config": _TINY if machine.dry else _BERT_LARGE,
            "seq_len": 32 if machine.dry else 512,
            "rows": 4,
            "accumulation": 1,
            "steps": 5 if machine.dry else 23,
            "checkpointing": False,
            "fp16": False,
            "optimizer": "adamw_torch",
            "loop": "trainer",
            "target": target_request(machine),
            **entry.options,
        }
        # bitsandbytes has no figure of its own in a dry run, which is to be quick.
        lacks = machine.lacks("transformers", "accelerate", *entry.needs)
        if machine.dry and entry.needs and not lacks:
            continue
        seconds = 10.0 if machine.dry else 32.0
        rows.append(
            Row(entry.name, _MODULE, request, seconds=seconds, value=entry.value, skip=lacks)
        )
    return rows


@dataclass(frozen=True)
class _Measured:
    """A row with its figures.

    Attributes:
        entry: the guide's row.
        run: see `gpu_bert_once`.
        predicted_samples: samples/s by the planner; None where the GPU has no data sheet.
    """

    entry: GuideRow
    run: Mapping[str, Any]
    predicted_samples: float | None


def _measured(found: Findings) -> Iterator[_Measured]:
    rows = {row.name: row for row in found.measured(NAME)}
    gpu = found.machine.gpu
    for entry in _guide(found.machine):
        if entry.name not in rows:
            continue
        run, request = found.outcome(NAME, entry.name).runs[0], rows[entry.name].request
        predicted = None
        if gpu is not None and "operators" in run:
            tokens = request["rows"] * request["accumulation"] * request["seq_len"]
            work = Workload(tokens, 1.0, "fp16" if request["fp16"] else "fp32")
            speed = predict_speed(unpacked(run["operators"]), work, gpu)
            predicted = speed.tokens_per_second.expected / request["seq_len"]
        yield _Measured(entry, run, predicted)


def _page(found: Findings) -> Page:
    measured = list(_measured(found))
    header = (
        *("bert-large, 512 tokens", "samples/s", "planner", "V100, published"),
        *("driver, MB", "planner", "V100, published", "allocator's peak, MB", "planner"),
    )
    text = [
        markdown_table(header, [_cells(one) for one in measured]),
        "Published figures: Hugging Face's guide, on a V100 with 16 GB; it has none for the\n"
        "Accelerate loop. All rows are trained as the guide does it (transformers' Trainer, or\n"
        "Accelerate), with attention as two products, as it was then, and AdamW as torch has it\n"
        "today. The driver's figure is NVML's, less what the GPU held before the process; the\n"
        "planner's is the allocator's reserve, and the context as it was measured here (the\n"
        "guide's V100 had 1,343 MB of context). MB are 2^20 bytes, as in the guide.\n",
        "![samples per second](../images/gpu-guide.png)\n",
    ]
    bars = [(one.entry.name, one.run["samples_per_second"]) for one in measured]
    pictures = {"gpu-guide.png": draw_bars("bert-large, 512 tokens", "samples/s", bars)}
    return Page("\n".join(_summary(measured)), "\n".join(text), pictures)


def _cells(one: _Measured) -> tuple[str, ...]:
    run, entry = one.run, one.entry

    def megabytes(size: float | None) -> str:
        return "" if size is None else f"{size / _MIB:,.0f}"

    driver = run.get("predicted_reserved_bytes")
    driver = None if driver is None or "context_bytes" not in run else driver + run["context_bytes"]
    return (
        entry.name,
        f"{run['samples_per_second']:.2f}",
        "" if one.predicted_samples is None else f"{one.predicted_samples:.2f}",
        "" if entry.samples is None else f"{entry.samples:.2f}",
        megabytes(run.get("driver_bytes")),
        megabytes(driver),
        "" if entry.megabytes is None else f"{entry.megabytes:,}",
        megabytes(run.get("peak_bytes")),
        megabytes(run.get("predicted_bytes")),
    )


def _summary(measured: Sequence[_Measured]) -> Iterator[str]:
    for one in measured:
        if one.entry.samples is None:
            continue
        ratio = one.run["samples_per_second"] / one.entry.samples
        memory = ""
        if "driver_bytes" in one.run:
            memory = f", {one.run['driver_bytes'] / _MIB:,.0f} MB of the driver"
        yield (
            f"- {one.entry.name}: {one.run['samples_per_second']:.1f} samples/s{memory}; "
            f"{ratio:.1f} times the published V100."
        )


GUIDE_PART = Part(
    NAME,
    "The guide's table",
    "bert-large as Hugging Face's guide for one GPU fine-tunes it, beside the guide's figures of a "
    "V100 and the planner's prediction.",
    _rows,
    _page,
)
