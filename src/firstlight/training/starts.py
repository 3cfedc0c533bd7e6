"""starts.jsonl: when a run was started and resumed, on what machine, and what it is about."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from firstlight.files import write_file
from firstlight.hardware import Hardware
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.training.datasets import record_of_examples
from firstlight.training.job import Job
from firstlight.training.logs import STARTS_NAME
from firstlight.training.metrics import read_json_lines
from firstlight.training.report_text import own_version


def record_start(job: Job) -> None:
    """Add a line to the run's starts.jsonl; one without a checkpoint begins the file anew.

    Raises:
        CheckpointError: a line in the middle of it is damaged.
        StorageError: the disk refuses.
    """
    path = Path(job.run_folder) / STARTS_NAME
    lines = read_json_lines(path) if job.saved_step > 0 else []
    held_out = job.validation
    conversations = record_of_examples(job.dataset, held_out, job.seq_len)
    gzip_bytes = held_out.gzip_bytes if held_out else None
    lines.append(
        {
            "step": job.state.step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "max_steps": job.max_steps,
            "parameters": count_parameters(meta_model(job.model.config)).total,
            "tokenizer_sha256": job.tokenizer.fingerprint,
            "gzip_bits_per_byte": (
                8 * gzip_bytes / held_out.text_bytes if held_out and gzip_bytes else None
            ),
            **({"conversations": conversations} if conversations else {}),
            "machine": _machine(job.hardware),
        }
    )
    write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


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
