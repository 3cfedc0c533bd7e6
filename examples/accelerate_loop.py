r"""Train a firstlight model in a custom loop with Hugging Face Accelerate.

    accelerate launch --num_processes 2 examples/accelerate_loop.py RECIPE.yaml [--section.key V]...

prints the loss of each step, which equals that of `firstlight train RECIPE.yaml` for any number of
processes. Gradient accumulation, activation checkpointing, mixed precision and 8-bit AdamW (with
embeddings in 32 bits, unless `optimizer.embeddings_in_32_bits` is false) follow the recipe:

    python examples/accelerate_loop.py RECIPE.yaml --efficiency.activation_checkpointing full \
        --efficiency.precision fp16 --optimizer.name adamw8bit

fp16 needs a GPU; on a CPU, use bf16. On a CPU, `accelerate launch` always starts a single process;
`torchrun --nproc-per-node 2 examples/accelerate_loop.py ...` starts two.

Run here: one and two processes on a CPU (tests/parity/test_other_trainers.py). Not run here: GPUs,
Accelerate's FSDP and DeepSpeed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate import Accelerator
from parts import MIXED_PRECISION, parts_of, run
from torch import Tensor

from firstlight.methods.memory import checkpoint_layers
from firstlight.recipe import Recipe


def train(recipe: Recipe) -> list[float]:
    """Train with the recipe, and return the loss of each step, over the tokens of all processes."""
    precision = MIXED_PRECISION.get(recipe.efficiency.precision)
    on_cpu = recipe.run.device == "cpu"
    accelerator: Any = Accelerator(cpu=on_cpu, mixed_precision=precision)
    rank, processes = accelerator.process_index, accelerator.num_processes
    # If its configuration does not match, Accelerate silently trains in one process.
    accelerator.print(f"processes {processes} on {accelerator.device.type}")
    parts = parts_of(recipe)
    if recipe.efficiency.activation_checkpointing != "none":
        selective = recipe.efficiency.activation_checkpointing == "selective"
        checkpoint_layers(parts.model, selective)
    accumulation = recipe.batch.accumulation(parts.seq_len, processes)
    # The loader is not passed to Accelerate, because it handles ranks itself.
    model, optimizer = accelerator.prepare(parts.model, parts.optimizer)
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    torch.manual_seed(recipe.run.seed + rank)  # dropout
    losses = []
    with parts.loader(rank, processes) as loader:
        for step in range(parts.schedule.max_steps):
            batches = [loader.next_batch().to(accelerator.device) for _ in range(accumulation)]
            valid = torch.tensor(sum(batch.num_valid for batch in batches))
            tokens = accelerator.reduce(valid.to(accelerator.device), "sum")
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                rate = peak * parts.schedule.lr_scale(step)
                # torchao keeps the learning rate in a tensor, which its compiled update reads.
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            total = torch.zeros((), device=accelerator.device)
            for number, batch in enumerate(batches, start=1):
                is_last = number == accumulation
                with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                    loss: Tensor = model(batch.input_ids, batch.labels)
                    # DDP averages the processes' gradients, but the sum is needed.
                    accelerator.backward(loss * processes / tokens)
                total += loss.detach()
            if recipe.optimizer.max_grad_norm:
                accelerator.clip_grad_norm_(model.parameters(), recipe.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(total, "sum") / tokens))
            accelerator.print(f"step {step + 1} loss {losses[-1]!r}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    run(train)
