"""`firstlight info`."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.output import human_bytes, say_rows, with_json

if TYPE_CHECKING:
    from firstlight.models import ModelConfig


@click.command("info")
@click.argument("checkpoint", required=False)
@with_json
def info_command(checkpoint: str | None, as_json: bool) -> dict[str, Any]:
    """What a model is (CHECKPOINT), or what this machine can do (nothing named)."""
    return _machine() if checkpoint is None else _model(checkpoint)


def _machine() -> dict[str, Any]:
    import torch

    from firstlight.hardware import find_hardware, measured_matmul_flops

    hardware = find_hardware()
    rates = {
        name: measured_matmul_flops(hardware.device, dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        if name == "fp32" or hardware.bf16
    }
    result = {
        "device": str(hardware.device),
        "name": hardware.name,
        "memory_bytes": hardware.memory_bytes,
        "cpu_threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "bf16": hardware.bf16,
        "matmul_flops": rates,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    speeds = ", ".join(f"{name} {rate / 1e12:.2f} TFLOP/s" for name, rate in rates.items())
    say_rows(
        [
            ("device", f"{hardware.device} ({hardware.name})"),
            ("memory", human_bytes(hardware.memory_bytes)),
            ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
            ("bf16", "in hardware" if hardware.bf16 else "not in hardware: fp32 is used"),
            ("matrix products", f"{speeds} (measured now)"),
            ("torch", torch.__version__),
            ("python", f"{platform.python_version()} on {platform.platform()}"),
        ]
    )
    return result


def _model(checkpoint: str) -> dict[str, Any]:
    import torch

    from firstlight.checkpoint import resolve_model_folder, trained_on
    from firstlight.huggingface import read_config, tokenizer_of
    from firstlight.models.accounting import cache_bytes_per_token, count_parameters, meta_model
    from firstlight.weights import weight_dtypes

    folder = resolve_model_folder(checkpoint)
    config = read_config(folder)
    count = count_parameters(meta_model(config))
    tokenizer = tokenizer_of(folder)
    parts = {
        name: getattr(count, name) for name in ("embedding", "attention", "mlp", "norm", "head")
    }
    cache = cache_bytes_per_token(config, torch.float32)
    context = config.max_position_embeddings
    inference = 4 * count.total + cache * context
    # fp32 weights, gradients and AdamW's two moments; activations come on top.
    training = 16 * count.total
    result = {
        "folder": str(folder),
        "model_type": config.model_type,
        "parameters": count.total,
        "parameters_by_part": parts,
        "dtypes": weight_dtypes(folder),
        "config": config.model_dump(),
        "max_position_embeddings": context,
        "tokenizer": None
        if tokenizer is None
        else {
            "vocab_size": tokenizer.vocab_size,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "chat_template": "chat_template" in tokenizer.config,
            "sha256": tokenizer.fingerprint,
        },
        "cache_bytes_per_token": cache,
        "inference_bytes": inference,
        "training_state_bytes": training,
        "trained_on": trained_on(folder),
    }
    _say_model(result, config)
    return result


def _say_model(result: dict[str, Any], config: ModelConfig) -> None:
    tokenizer, parts = result["tokenizer"], result["parameters_by_part"]
    shape = (
        f"{config.num_hidden_layers} layers, {config.hidden_size} wide, "
        f"{config.num_attention_heads} heads ({config.num_key_value_heads} for keys and values)"
    )
    say_rows(
        [
            ("folder", result["folder"]),
            ("family", f"{config.model_type}: {shape}"),
            ("parameters", f"{result['parameters']:,}"),
            *((f"  {name}", f"{number:,}") for name, number in parts.items() if number),
            ("weights", ", ".join(result["dtypes"])),
            ("context", f"{config.max_position_embeddings:,} tokens"),
            ("tied head", "yes" if config.tie_word_embeddings else "no"),
            (
                "tokenizer",
                "none"
                if tokenizer is None
                else f"{tokenizer['vocab_size']:,} tokens, bos {tokenizer['bos_token']}, "
                f"eos {tokenizer['eos_token']}",
            ),
            (
                "memory to generate",
                f"{human_bytes(result['inference_bytes'])} in fp32 with a full cache",
            ),
            (
                "memory to train",
                f"{human_bytes(result['training_state_bytes'])} with AdamW, and the activations",
            ),
        ]
    )
