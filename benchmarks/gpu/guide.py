"""Part "guide" of `python -m benchmarks gpu`: the table of Hugging Face's guide for one GPU.

The guide ("Methods and tools for efficient training on a single GPU", transformers 4.20 to 4.29)
fine-tunes bert-large with rows of 512 tokens on a V100 with 16 GB, and reads the used memory from
the driver (NVML).

    python -m firstlight.hardware.fresh_process benchmarks.gpu.guide REQUEST

REQUEST is a JSON object:

    device         "cuda", or "cpu" in a dry run
    config         keys of transformers' BertConfig
    seq_len        tokens of a row
    rows           rows of a micro-batch
    accumulation   micro-batches of a step
    steps          number of steps, of which the first three are not timed
    checkpointing  true for activation checkpointing
    fp16           true for autocast to fp16 with loss scaling (on a CPU to bf16)
    optimizer      the Trainer's `optim`, such as "adamw_torch", "adafactor", "adamw_bnb_8bit"
    loop           "trainer", or "accelerate": the guide's own loop
    target         see `planner_steps.target_request`

The model is transformers' BertForSequenceClassification with random weights and dropout. Its
attention is that of the time when the guide's figures were published: two products and a softmax.
The data are random token ids with the label 0.

The process prints one line on stdout, a JSON object:

    samples_per_second  rows per second: the median over the timed steps, "step_seconds"
    peak_bytes          peak of the memory that torch's allocator has given to tensors
    reserved_bytes      peak of the memory that torch's allocator holds
    driver_bytes        growth of the GPU's used memory since before the process used it (NVML)
    context_bytes       growth before the model is made, without the allocator's memory

On a CPU, the last four are missing. The planner's prediction is added: the keys of
`planner_steps.memory_entry`, and "operators".
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.gpu.parts import BenchMachine, Findings, Page, Part, Row, draw_bars
from benchmarks.memory import driver_used_bytes
from benchmarks.pages import markdown_table
from benchmarks.planner_steps import (
    memory_entry,
    packed,
    predicting,
    target_of,
    target_request,
    unpacked,
)
from benchmarks.programs import run_trainer
from firstlight.bench.display import cells
from firstlight.bench.steps import StepClock
from firstlight.planner.memory.module import plan_module
from firstlight.planner.speed.throughput import Workload, all_micro_batches, predict_speed

NAME = "guide"
_MODULE = "benchmarks.gpu.guide"
_WARMUP_STEPS = 3
_MIB = 2**20

_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_BERT_LARGE = dict(zip(_KEYS, (30522, 1024, 24, 16, 4096), strict=True))
_TINY = dict(zip(_KEYS, (1000, 32, 2, 2, 64), strict=True))


@dataclass(frozen=True)
class GuideRow:
    """One row of the guide's table.

    Attributes:
        name: name in tables.
        options: keys of the request that differ from the plain row's.
        samples: published samples/s on the V100; None if the guide has no figure.
        megabytes: published MB (2^20 bytes) of used memory, read from the driver; None likewise.
        needs: packages that must be installed to measure the row.
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
    GuideRow("batch 4", {}, 8.86, 14949, value=2),
    GuideRow("batch 1 x 4 accumulated", _SMALL, 7.75, 8681),
    GuideRow("batch 1 x 4, checkpointing", {**_SMALL, "checkpointing": True}, 5.99, 6775),
    GuideRow("batch 4, fp16", {"fp16": True}, 18.64, 13939, value=3),
    GuideRow("batch 1 x 4, checkpointing, fp16", _ALL, 10.09, 7275),
    GuideRow("batch 4, Adafactor", _ADAFACTOR, 7.96, 12295),
    GuideRow(
        "batch 1 x 4, checkpointing, fp16, Adafactor", {**_ALL, **_ADAFACTOR}, 9.06, 4847, value=2
    ),
    GuideRow("batch 4, 8-bit Adam", _EIGHT_BIT, 9.15, 13085, needs=_BNB),
    GuideRow(
        "batch 1 x 4, checkpointing, fp16, 8-bit Adam",
        {**_ALL, **_EIGHT_BIT},
        10.35,
        5363,
        needs=_BNB,
    ),
    # The guide shows its Accelerate loop with the 8-bit optimizer, without figures.
    GuideRow(
        "the same by the Accelerate loop", {**_ALL, **_EIGHT_BIT, "loop": "accelerate"}, needs=_BNB
    ),
    GuideRow(
        "batch 1 x 4, checkpointing, fp16, Adafactor by the Accelerate loop",
        {**_ALL, **_ADAFACTOR, "loop": "accelerate"},
    ),
)


def _guide(machine: BenchMachine) -> tuple[GuideRow, ...]:
    if not machine.dry:
        return GUIDE
    wanted = ("batch 4", "batch 1 x 4, checkpointing, fp16, Adafactor by the Accelerate loop")
    return tuple(row for row in GUIDE if row.name in wanted or row.needs)


def _rows(machine: BenchMachine) -> list[Row]:
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
        # To be quick, a dry run leaves bitsandbytes out; a missing package is still listed.
        lacks = machine.lacks("transformers", "accelerate", *entry.needs)
        if machine.dry and entry.needs and not lacks:
            continue
        seconds = 10.0 if machine.dry else 32.0
        rows.append(
            Row(entry.name, _MODULE, request, seconds=seconds, value=entry.value, skip=lacks)
        )
    return rows


#: A row of the guide, the result of its measurement, and the samples/s that the planner predicts
#: (None if it has no data sheet of the GPU).
_Measured = tuple[GuideRow, Mapping[str, Any], float | None]


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
        yield entry, run, predicted


def _page(found: Findings) -> Page:
    measured = list(_measured(found))
    header = (
        "bert-large, 512 tokens",
        "samples/s",
        "planner",
        "V100, published",
        "driver, MB",
        "planner",
        "V100, published",
        "allocator's peak, MB",
        "planner",
    )
    text = [
        markdown_table(header, [_cells(*one) for one in measured]),
        "Published figures: Hugging Face's guide, on a V100 with 16 GB; it has none for the\n"
        "Accelerate loop. All rows are trained as the guide does it (transformers' Trainer, or\n"
        "Accelerate), with attention as two products, as it was then, and AdamW as torch has it\n"
        "today. The driver's figure is NVML's, less what the GPU held before the process; the\n"
        "planner's is the allocator's reserve, and the context as it was measured here (the\n"
        "guide's V100 had 1,343 MB of context). MB are 2^20 bytes, as in the guide.\n",
        "![samples per second](../images/gpu-guide.png)\n",
    ]
    bars = [(entry.name, run["samples_per_second"]) for entry, run, _ in measured]
    pictures = {"gpu-guide.png": draw_bars("bert-large, 512 tokens", "samples/s", bars)}
    return Page("\n".join(_summary(measured)), "\n".join(text), pictures)


def _cells(entry: GuideRow, run: Mapping[str, Any], predicted: float | None) -> list[str]:
    reserved, context = run.get("predicted_reserved_bytes"), run.get("context_bytes")
    held = None if reserved is None or context is None else reserved + context
    return cells(
        "{entry.name} | {samples_per_second:.2f} | {predicted:.2f} | {entry.samples:.2f}"
        " | {driver_bytes:mebi} | {held:mebi} | {entry.megabytes:,} | {peak_bytes:mebi}"
        " | {predicted_bytes:mebi}",
        {**run, "entry": entry, "predicted": predicted, "held": held},
    )


def _summary(measured: Sequence[_Measured]) -> Iterator[str]:
    for entry, run, _ in measured:
        if entry.samples is None:
            continue
        rate, memory = run["samples_per_second"], ""
        if "driver_bytes" in run:
            memory = f", {run['driver_bytes'] / _MIB:,.0f} MB of the driver"
        ratio = f"{rate / entry.samples:.1f} times the published V100"
        yield f"- {entry.name}: {rate:.1f} samples/s{memory}; {ratio}."


GUIDE_PART = Part(
    NAME,
    "The guide's table",
    "bert-large as Hugging Face's guide for one GPU fine-tunes it, beside the guide's figures of a "
    "V100 and the planner's prediction.",
    _rows,
    page=_page,
)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train and predict; the module's docstring describes the request and the result."""
    on_gpu = request["device"] == "cuda"
    idle = driver_used_bytes() if on_gpu else None
    with predicting([(predict_bert, (request,))], beside=on_gpu) as predictions:
        found = _train(request, idle) | predictions()[0]
    memory = "" if "peak_bytes" not in found else f", {found['peak_bytes'] / 2**20:,.0f} MiB"
    return found | {"line": f"{found['samples_per_second']:.2f} samples/s{memory}"}


def _model(request: dict[str, Any], device: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.BertConfig(**request["config"], attn_implementation="eager")
    with torch.device(device):
        return transformers.BertForSequenceClassification(config)


def _train(request: dict[str, Any], idle: int | None) -> dict[str, Any]:
    on_gpu = request["device"] == "cuda"
    found: dict[str, Any] = {}

    def note_growth(key: str, known: int) -> None:
        """Note the growth of the GPU's used memory since `idle`, without `known` bytes."""
        used = driver_used_bytes()
        if used is not None and idle is not None:
            found[key] = used - idle - known

    if on_gpu:
        # As in the guide, a small tensor creates the CUDA context and loads the kernels.
        torch.ones((1, 1), device="cuda") + 1
        note_growth("context_bytes", torch.cuda.memory_reserved())
    torch.manual_seed(0)
    clock = StepClock(torch.device(request["device"]))
    loop = _accelerate_loop if request["loop"] == "accelerate" else _trainer_loop
    loop(_model(request, request["device"]), request, clock)
    seconds = clock.seconds[_WARMUP_STEPS:]
    samples = request["rows"] * request["accumulation"]
    found |= {"samples_per_second": samples / statistics.median(seconds), "step_seconds": seconds}
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        note_growth("driver_bytes", 0)
    return found


class _DummyData(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows of token ids [seq_len], with the label 0."""

    def __init__(self, request: dict[str, Any]) -> None:
        count = request["rows"] * request["accumulation"] * request["steps"]
        generator = torch.Generator().manual_seed(0)
        shape = (count, request["seq_len"])
        self._ids = torch.randint(100, request["config"]["vocab_size"], shape, generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[number], "labels": torch.tensor(0)}


def _trainer_loop(model: Any, request: dict[str, Any], clock: StepClock) -> None:
    on_cpu = request["device"] == "cpu"
    run_trainer(
        model,
        _DummyData(request),
        clock,
        max_steps=request["steps"],
        per_device_train_batch_size=request["rows"],
        gradient_accumulation_steps=request["accumulation"],
        gradient_checkpointing=request["checkpointing"],
        fp16=request["fp16"] and not on_cpu,
        bf16=request["fp16"] and on_cpu,
        optim=request["optimizer"],
        use_cpu=on_cpu,
        logging_strategy="no",
        dataloader_pin_memory=not on_cpu,
    )


def _accelerate_loop(model: Any, request: dict[str, Any], clock: StepClock) -> None:
    """The guide's training loop with Accelerate."""
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]

    on_cpu = request["device"] == "cpu"
    if request["checkpointing"]:
        model.gradient_checkpointing_enable()
    precision = _precision(request)
    mixed = "no" if precision == "fp32" else precision
    accelerator = Accelerator(mixed_precision=mixed, cpu=on_cpu)
    loader = torch.utils.data.DataLoader(_DummyData(request), batch_size=request["rows"])
    optimizer = _optimizer(request["optimizer"], model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for number, batch in enumerate(loader):
        if number % request["accumulation"] == 0:
            clock.start()
        loss = model(**batch).loss / request["accumulation"]
        accelerator.backward(loss)
        if (number + 1) % request["accumulation"] == 0:
            optimizer.step()
            optimizer.zero_grad()
            clock.stop()


def _optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the Trainer makes for a name of its option `optim`."""
    optimizer: torch.optim.Optimizer
    if name == "adafactor":
        from transformers.optimization import Adafactor

        options = {"scale_parameter": False, "relative_step": False, "lr": 5e-5}
        optimizer = Adafactor(parameters, **options)
    elif name == "adamw_bnb_8bit":
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(parameters)
    else:
        optimizer = torch.optim.AdamW(parameters, foreach=True)
    return optimizer


def _precision(request: dict[str, Any]) -> Literal["fp32", "fp16", "bf16"]:
    if not request["fp16"]:
        return "fp32"
    return "bf16" if request["device"] == "cpu" else "fp16"


def predict_bert(request: dict[str, Any]) -> dict[str, Any]:
    """The planner's prediction for a request: the keys of `memory_entry`, and "operators"."""
    ids = torch.empty(request["rows"], request["seq_len"], dtype=torch.int64, device="meta")
    labels = torch.empty(request["rows"], dtype=torch.int64, device="meta")
    found = plan_module(
        _model(request, "meta"),
        {"input_ids": ids, "labels": labels},
        optimizer=functools.partial(_optimizer, request["optimizer"]),
        precision=_precision(request),
        gradient_accumulation_steps=request["accumulation"],
        activation_checkpointing=request["checkpointing"],
        # The guide's own loop does not clip gradients, unlike the Trainer.
        max_grad_norm=1.0 if request["loop"] == "trainer" else 0.0,
        target=target_of(request["target"]),
    )
    counted = all_micro_batches(found, request["accumulation"])
    return memory_entry(found) | {"operators": packed(counted.operators)}
