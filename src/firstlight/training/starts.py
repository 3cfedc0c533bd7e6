"""starts.jsonl: when a run was started and resumed, on what machine, and what it is about; and
the lines that say so to people."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.files.atomic import write_file
from firstlight.hardware.device import Hardware
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.optim.table import decay_counts
from firstlight.report.text import own_version
from firstlight.training.logs import STARTS_NAME
from firstlight.training.metrics import read_json_lines
from firstlight.training.run import Run


def record_start(run: Run) -> None:
    """Add a line to the run's starts.jsonl; one without a checkpoint begins the file anew.

    Raises:
        CheckpointError: a line in the middle of it is damaged.
        StorageError: the disk refuses.
    """
    path = Path(run.folder) / STARTS_NAME
    lines = read_json_lines(path) if run.saved_step > 0 else []
    held_out = run.validation
    splits = [split for split in (run.dataset, held_out) if split is not None]
    conversations = [record for split in splits for record in split.records(run.seq_len)]
    lines.append(
        {
            "step": run.state.step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "max_steps": run.max_steps,
            "warmup_steps": run.schedule.warmup_steps,
            "init_from": run.init_from,
            "parameters": count_parameters(meta_model(run.program.model.config)).total,
            "weight_decay": decay_counts(_trained(run)),
            "tokenizer_sha256": run.tokenizer.fingerprint,
            "gzip_bits_per_byte": held_out.gzip_bits_per_byte if held_out else None,
            **({"conversations": conversations} if conversations else {}),
            "machine": _machine(run.program.hardware),
        }
    )
    write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def last_start(run_folder: Path) -> dict[str, Any]:
    """What was recorded when the run was last started or resumed; {} if nothing was.

    Raises:
        CheckpointError: a line in the middle of the file is damaged.
    """
    lines = read_json_lines(run_folder / STARTS_NAME)
    return lines[-1] if lines else {}


def _trained(run: Run) -> list[Tensor]:
    """The parameters that are trained, whole; without memory where engines hold parts of them."""
    if run.recipe.lora is None:
        return list(meta_model(run.program.model.config).parameters())
    return [p for p in run.program.model.parameters() if p.requires_grad]


def describe_start(run: Run) -> Iterator[str]:
    """How long a run is, its learning rates, and what weight decay is for."""
    schedule, optimizer, rows = run.schedule, run.recipe.optimizer, run.global_batch_size
    epochs = schedule.max_steps * rows / run.dataset.num_rows(run.seq_len)
    peak = optimizer.learning_rate
    then = (
        "so long that the learning rate never falls: set schedule.warmup_steps lower"
        if schedule.warmup_steps >= schedule.max_steps
        else f"then down to {peak * schedule.min_lr_ratio:.4g} at step {schedule.decay_steps:,}"
    )
    yield (
        f"schedule: {schedule.max_steps:,} steps of {rows} x {run.seq_len} tokens "
        f"({epochs:.4g} epochs), warm-up of {schedule.warmup_steps:,} steps to {peak:g}, {then}"
    )
    counts = decay_counts(_trained(run))
    yield (
        f"weight decay {optimizer.weight_decay:g}: {counts['decayed_parameters']:,} parameters in "
        f"{counts['decayed_tensors']} matrices; none for {counts['undecayed_parameters']:,} in "
        f"{counts['undecayed_tensors']} norms and biases"
    )


def _machine(hardware: Hardware) -> dict[str, Any]:
    # Not platform.platform(), which starts a program to ask.
    system = os.uname()
    return {
        "device": str(hardware.device),
        "name": hardware.name,
        "memory_bytes": hardware.memory_bytes,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "firstlight": own_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{system.sysname} {system.release} {system.machine}",
    }
