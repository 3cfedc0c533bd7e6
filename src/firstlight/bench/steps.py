"""The options of a benchmark that trains for some steps, resolved for this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.bench.models import SMALL, find_model
from firstlight.bench.options import StepsBench, require_positive
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, find_hardware, machine_facts
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token


@dataclass(frozen=True)
class StepsPlan:
    """The resolved options of a `StepsBench`; `name` is the option `model`."""

    name: str
    model: ModelConfig
    hardware: Hardware
    seq_len: int
    micro_batch_size: int
    steps: int
    repeats: int

    def head(self, warmup_steps: int) -> dict[str, Any]:
        """The part of a result that is known before anything is measured."""
        model = meta_model(self.model)
        return {
            "model": self.name,
            "parameters": count_parameters(model).total,
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch_size,
            "steps": self.steps,
            "warmup_steps": warmup_steps,
            "repeats": self.repeats,
            "flops_per_token": train_flops_per_token(model, self.seq_len),
            "machine": machine_facts(self.hardware),
        }


def plan_steps(bench: StepsBench, command: str) -> StepsPlan:
    """Resolve the options that are None.

    Raises:
        ConfigError: a value is out of range, or the model or the device is unknown.
    """
    hardware = find_hardware(bench.device)
    if hardware.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{command} runs on cpu and cuda, not on {hardware.device.type}")
    name = bench.model or (SMALL if bench.quick else "gpt2-124m")
    model = find_model(name)
    on_gpu = hardware.device.type == "cuda"
    limit = model.max_position_embeddings
    usual = {
        "seq_len": min(256 if bench.quick else 1024, limit),
        "micro_batch_size": 16 if on_gpu else 4,
        "steps": 20 if on_gpu else 4,
        "repeats": 1 if bench.quick else 3,
    }
    given = {key: getattr(bench, key) for key in usual}
    chosen = {key: usual[key] if value is None else value for key, value in given.items()}
    require_positive(**chosen)
    if chosen["seq_len"] > limit:
        raise ConfigError(f"seq_len {chosen['seq_len']} is more than {name}'s context of {limit}")
    return StepsPlan(name, model, hardware, **chosen)


def steps_title(result: Mapping[str, Any]) -> str:
    """Heading of the picture of a result of a benchmark that trains for some steps."""
    size = f"{result['micro_batch_size']} x {result['seq_len']} tokens a step"
    end = "" if result["complete"] else " (not complete)"
    return f"{result['model']}, {size}; {result['machine']['name']}{end}"
