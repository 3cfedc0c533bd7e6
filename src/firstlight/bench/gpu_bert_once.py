"""bert-large fine-tuned as Hugging Face's guide for one GPU does it, in a process of its own.

    python -m firstlight.bench.gpu_bert_once REQUEST

REQUEST is a JSON object:

    device         "cuda", or "cpu" of a dry run
    config         keys of transformers' BertConfig
    seq_len        tokens of a row
    rows           of a micro-batch
    accumulation   micro-batches of a step
    steps          steps; the first three are not timed
    checkpointing  whether activations are computed again
    fp16           autocast to fp16 with loss scaling (on a CPU to bf16)
    optimizer      the Trainer's `optim`, such as "adamw_torch", "adafactor", "adamw_bnb_8bit"
    loop           "trainer", or "accelerate": the guide's own loop
    target         see `gpu_predictions.target_request`

The model is transformers' BertForSequenceClassification with random weights, attention as it was
when the guide's figures were published (two products and a softmax), and dropout; the data are
random token ids and labels.

The one line on stdout is a JSON object: "samples_per_second" over the timed steps, "peak_bytes" and
"reserved_bytes" of torch's allocator, "driver_bytes" that the GPU holds more than before this
process began to use it (NVML, as the guide reads it), "context_bytes" of these before the model was
made; and what the planner predicts: see `gpu_predictions.memory_entry`, with "operators".
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from firstlight.bench.driver_memory import driver_used_bytes
from firstlight.bench.fresh_process import answer
from firstlight.bench.gpu_predictions import memory_entry, packed, predicting, target_of
from firstlight.bench.training_once import StepClock
from firstlight.planner.memory.module import plan_module
from firstlight.planner.speed.recipe import all_micro_batches

_WARMUP_STEPS = 3


def gpu_bert_once(request: dict[str, Any]) -> dict[str, Any]:
    """Train and predict as the module's head says."""
    on_gpu = request["device"] == "cuda"
    idle = driver_used_bytes() if on_gpu else None
    with predicting([(predict_bert, (request,))], beside=on_gpu) as predictions:
        found = _train(request, idle)
        found |= predictions()[0]
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
    if on_gpu:
        # One small tensor loads the kernels, as in the guide.
        torch.ones((1, 1), device="cuda") + 1
        used = driver_used_bytes()
        if used is not None and idle is not None:
            found["context_bytes"] = used - idle - torch.cuda.memory_reserved()
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
        used = driver_used_bytes()
        if used is not None and idle is not None:
            found["driver_bytes"] = used - idle
    return found


class _DummyData(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows of token ids, with the label 0.

    Args:
        request: see the module's head.
    """

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
    import transformers

    class Times(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stop()

    on_cpu = request["device"] == "cpu"
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=request["steps"],
            per_device_train_batch_size=request["rows"],
            gradient_accumulation_steps=request["accumulation"],
            gradient_checkpointing=request["checkpointing"],
            fp16=request["fp16"] and not on_cpu,
            bf16=request["fp16"] and on_cpu,
            optim=request["optimizer"],
            use_cpu=on_cpu,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=not on_cpu,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=_DummyData(request), callbacks=[Times()]
        )
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()


def _accelerate_loop(model: Any, request: dict[str, Any], clock: StepClock) -> None:
    """The guide's loop, with an optimizer of torch where bitsandbytes is not installed."""
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]

    on_cpu = request["device"] == "cpu"
    if request["checkpointing"]:
        model.gradient_checkpointing_enable()
    precision = _precision(request)
    mixed = "no" if precision == "fp32" else precision
    accelerator = Accelerator(mixed_precision=mixed, cpu=on_cpu)
    loader = torch.utils.data.DataLoader(_DummyData(request), batch_size=request["rows"])
    optimizer = _OPTIMIZERS[request["optimizer"]](model.parameters())
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


def _adafactor(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    optimizer: torch.optim.Optimizer = Adafactor(
        parameters, scale_parameter=False, relative_step=False, lr=5e-5
    )
    return optimizer


def _eight_bit_adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters)
    return optimizer


#: What the Trainer's names stand for.
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_torch": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adafactor": _adafactor,
    "adamw_bnb_8bit": _eight_bit_adam,
}


def _precision(request: dict[str, Any]) -> Literal["fp32", "fp16", "bf16"]:
    if not request["fp16"]:
        return "fp32"
    return "bf16" if request["device"] == "cpu" else "fp16"


def predict_bert(request: dict[str, Any]) -> dict[str, Any]:
    """The planner's memory and operators for a request."""
    ids = torch.empty(request["rows"], request["seq_len"], dtype=torch.int64, device="meta")
    labels = torch.empty(request["rows"], dtype=torch.int64, device="meta")
    found = plan_module(
        _model(request, "meta"),
        {"input_ids": ids, "labels": labels},
        optimizer=_OPTIMIZERS[request["optimizer"]],
        precision=_precision(request),
        gradient_accumulation_steps=request["accumulation"],
        activation_checkpointing=request["checkpointing"],
        # The guide's own loop doesn't clip.
        max_grad_norm=1.0 if request["loop"] == "trainer" else 0.0,
        target=target_of(request["target"]),
    )
    counted = all_micro_batches(found, request["accumulation"])
    return memory_entry(found) | {"operators": packed(counted.operators)}


if __name__ == "__main__":
    answer(gpu_bert_once, sys.argv[1])
