"""The command `firstlight info`, which describes a model or this machine, and the command
`firstlight report`, which writes reports of runs.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import best_option, path_option
from firstlight.cli.output import end_with, say_findings, show_rows, show_table, with_json
from firstlight.console import gib, human_bytes, say
from firstlight.errors import ConfigError

if TYPE_CHECKING:
    from firstlight.models import ModelConfig
    from firstlight.tokenizer import Tokenizer


@click.command("info")
@click.argument("checkpoint", required=False)
@best_option
@click.option(
    "--check",
    is_flag=True,
    help="Compare a small training step and generation on each device with fp64 on the CPU.",
)
@with_json
def info_command(checkpoint: str | None, best: bool, check: bool, as_json: bool) -> dict[str, Any]:
    """Describe a model or, without CHECKPOINT, this machine."""
    if checkpoint is None and best:
        raise ConfigError("--best needs a run folder")
    if checkpoint is not None and check:
        raise ConfigError("--check applies to this machine: omit the model")
    if checkpoint is None:
        return _machine(check=check)
    from firstlight.checkpoint.selection import read_model_folder

    result, config = read_model_folder(checkpoint, _model, best=best)
    _show_model(result, config)
    return result


def _machine(*, check: bool) -> dict[str, Any]:
    import torch

    from firstlight.hardware.device import GpuMonitor, find_hardware, measured_matmul_flops

    hardware = find_hardware()
    # Query the current use of the GPU before measuring the hardware, because the measurement itself
    # uses the GPU.
    gpu = GpuMonitor(hardware.device).read()
    rates = {
        name: measured_matmul_flops(hardware.device, dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        if name == "fp32" or hardware.bf16
    }
    result: dict[str, Any] = {
        "device": str(hardware.device),
        "name": hardware.name,
        "memory_bytes": hardware.memory_bytes,
        **{key: gpu[key] for key in ("device_used_bytes", "gpu_utilization") if key in gpu},
        "cpu_threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "bf16": hardware.bf16,
        "matmul_flops": rates,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    checks: list[dict[str, Any]] = []
    if check:
        from firstlight.training.device_check import check_machine

        checks = result["checks"] = check_machine(say)
    if any(one["problem"] for one in checks):
        end_with(1)
    speeds = ", ".join(f"{name} {rate / 1e12:.2f} TFLOP/s" for name, rate in rates.items())
    show_rows(
        [
            ("device", f"{hardware.device} ({hardware.name})"),
            ("memory", gib(hardware.memory_bytes)),
            *_in_use(result),
            ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
            ("bf16", "in hardware" if hardware.bf16 else "not in hardware: fp32 is used"),
            ("matrix products", f"{speeds} (measured now)"),
            ("torch", torch.__version__),
            ("python", f"{platform.python_version()} on {platform.platform()}"),
            *(
                (f"{one['device']} in {one['precision']}", one["problem"] or "passed")
                for one in checks
            ),
        ]
    )
    return result


def _in_use(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a list with one table row about the current use of the GPU. The list is empty if the
    driver can't be queried.
    """
    if "gpu_utilization" not in machine:
        return []
    used = gib(machine["device_used_bytes"])
    return [("in use now", f"{used} by all programs, GPU {machine['gpu_utilization']:.0%} busy")]


def _model(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    from firstlight.checkpoint.selection import trained_on
    from firstlight.lora.files import adapter_chain, config_folder
    from firstlight.lora.loading import model_without_weights
    from firstlight.models.accounting import (
        cache_bytes_per_token,
        count_parameters,
        meta_model,
        state_bytes,
    )
    from firstlight.weights.composite import read_carried
    from firstlight.weights.huggingface import read_config, tokenizer_of
    from firstlight.weights.loading import fitting_tensors, nonfinite_tensor, stored_values

    config = read_config(config_folder(folder))
    *adapters, base = adapter_chain(folder)
    stored = fitting_tensors(meta_model(config), base)
    model, _ = model_without_weights(folder, config)
    config, count = model.config, count_parameters(model)
    dtype = stored[next(iter(stored))].dtype
    tokenizer = tokenizer_of(folder) or tokenizer_of(base)
    cache = cache_bytes_per_token(config, dtype)
    context = config.max_position_embeddings
    result = {
        "folder": folder,
        "base": base if adapters else None,
        "model_type": config.model_type,
        "parameters": count.total,
        "active_parameters": count.active,
        "parameters_by_part": count.by_part,
        "dtypes": sorted({tensor.kind for tensor in stored.values()}),
        # Read all weights, one tensor at a time. This takes about one second per GB.
        "carried": None
        if (carried := read_carried(base, config)) is None
        else {"parts": carried.parts, "bytes": carried.nbytes},
        "nonfinite_tensor": nonfinite_tensor(stored_values(stored)),
        "config": config.model_dump(),
        "max_position_embeddings": context,
        "tokenizer": None if tokenizer is None else _describe_tokenizer(tokenizer),
        "cache_bytes_per_token": cache,
        "inference_bytes": dtype.itemsize * count.total + cache * context + state_bytes(config),
        # Training stores four fp32 values per parameter: the weight, the gradient and the two
        # moments of AdamW. This estimate does not include activations.
        "training_state_bytes": 16 * count.total,
        "trained_on": trained_on(folder),
    }
    return result, config


def _describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "kind": type(tokenizer.backend.model).__name__,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": len(tokenizer.special_token_ids),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "add_bos": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
        "sha256": tokenizer.fingerprint,
    }


def _show_model(result: dict[str, Any], config: ModelConfig) -> None:
    tokenizer, parts = result["tokenizer"], result["parameters_by_part"]
    shape = (
        f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_attention_heads} heads ({config.num_key_value_heads} for keys and values)"
    )
    total, active = result["parameters"], result["active_parameters"]
    dtypes, damaged = ", ".join(result["dtypes"]), result["nonfinite_tensor"]
    unusable = f": UNUSABLE, {damaged} has values that are not finite numbers" if damaged else ""
    show_rows(
        [
            ("folder", result["folder"]),
            *([("adapts", result["base"])] if result["base"] else []),
            ("family", f"{config.model_type}: {shape}"),
            ("parameters", f"{total:,}{f', {active:,} per token' if active < total else ''}"),
            *((f"  {name}", f"{number:,}") for name, number in parts.items() if number),
            ("weights", f"{dtypes}{unusable}"),
            *_carried_rows(result["carried"]),
            ("context", f"{config.max_position_embeddings:,} tokens"),
            ("tied head", "yes" if config.tie_word_embeddings else "no"),
            *_tokenizer_rows(tokenizer),
            (
                "memory to generate",
                f"{gib(result['inference_bytes'])} in {dtypes}: weights, and a KV cache of "
                f"{human_bytes(result['cache_bytes_per_token'])} per token for the full context",
            ),
            (
                "memory to train",
                f"{gib(result['training_state_bytes'])} in fp32: weights, gradients and "
                "AdamW's moments, but not activations",
            ),
        ]
    )


def _carried_rows(carried: dict[str, Any] | None) -> list[tuple[str, object]]:
    if carried is None:
        return []
    parts = f"{', '.join(carried['parts'])} ({human_bytes(carried['bytes'])})"
    return [("not used", f"{parts}: carried unchanged into checkpoints and converted folders")]


def _tokenizer_rows(tokenizer: dict[str, Any] | None) -> list[tuple[str, object]]:
    if tokenizer is None:
        return [("tokenizer", "none"), ("chat template", "none")]
    described = (
        f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens "
        f"({tokenizer['special_tokens']:,} special), bos {tokenizer['bos_token']}"
        f"{' before every text' if tokenizer['add_bos'] else ''}, eos {tokenizer['eos_token']}"
    )
    template = tokenizer["chat_template"]
    first = "none" if template is None else " ".join(template.split())
    return [
        ("tokenizer", described),
        ("chat template", first if len(first) <= 70 else f"{first[:70]}..."),
    ]


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@path_option(
    "--out",
    metavar="FILE.html",
    help="Page to write; the picture has the same name "
    "but ends in .png.  [default: report.html in the "
    "run folder; comparison.html for several runs]",
)
@with_json
def report_command(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> dict[str, Any]:
    """Write a report of a run, or compare several runs.

    RUN is a run folder. The run can still be in progress, and it can also have been killed. The
    report consists of a web page, which is a single self-contained file, and an image.
    """
    from firstlight.report import report as report_files
    from firstlight.report.compare import number_table

    report = report_files.write_report([run.expanduser() for run in runs], out)
    result = report_files.as_json(report)
    for line in (line for run in report.comparison.runs for line in run.left_out):
        say(f"note: {line}")
    rows = [(name, *texts) for name, texts, _ in number_table(report.comparison)]
    show_table([("", *report.comparison.labels), *rows])
    show_rows([("report", report.page), ("picture", report.picture)])
    for label, findings in zip(report.comparison.labels, report.comparison.findings, strict=True):
        say_findings(findings, label if len(runs) > 1 else "")
    return result
