"""What a recipe leaves to firstlight: decided before the run, and kept when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from firstlight.efficiency import (
    EfficiencyConfig,
    can_compile,
    resolve_attention,
    resolve_precision,
)
from firstlight.errors import ConfigError
from firstlight.hardware import Hardware, peak_flops
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.eight_bit import installed_library
from firstlight.optim.table import OptimizerConfig
from firstlight.training.config import DEFAULT_ROWS, Recipe
from firstlight.training.fit import largest_micro_batch

#: A run of so many seconds at the machine's full matrix rate, so of some times as many in fact,
#: is worth the minute that compiling may take.
_WORTH_COMPILING_SECONDS = 240.0

#: Tokens of a forward pass from which on a CPU multiplies at its full rate.
_BUSY_TOKENS = 1024


def decide(
    recipe: Recipe,
    saved: Mapping[str, Any],
    hardware: Hardware,
    epoch_tokens: int,
    tell: Callable[[str], None],
    processes: int = 1,
) -> Recipe:
    """The recipe with every "auto" replaced by what it comes to here.

    What depends on a measurement could come out otherwise another day, and a resumed run must
    compute as before: the checkpoint's choice stands.

    Args:
        recipe: with its model and row length.
        saved: the checkpoint's recipe, {} for a new run.
        hardware: to run on.
        epoch_tokens: of the training split.
        tell: called with each choice worth knowing.
        processes: that share each step.

    Raises:
        ConfigError: the micro-batch size can't be found.
    """
    assert recipe.model is not None
    assert recipe.data.seq_len is not None
    before = saved.get("efficiency", {})
    config = recipe.efficiency
    chosen: dict[str, Any] = {}
    dtype = resolve_precision(config, hardware)
    if config.precision == "auto":
        chosen["precision"] = before.get("precision", "bf16" if dtype == torch.bfloat16 else "fp32")
    if config.compile == "auto":
        seconds = _ideal_seconds(recipe, hardware, dtype, epoch_tokens)
        pays = before.get("compile", seconds >= _WORTH_COMPILING_SECONDS) is True
        # It would be refused: see `require_combination`.
        pays = pays and recipe.distributed.tensor_parallel * recipe.distributed.pipeline == 1
        pays = pays and recipe.distributed.engine != "deepspeed"
        chosen["compile"] = _says_how_to_compile(config) or (pays and can_compile(hardware.device))
    if config.loss_chunk_tokens is None:
        chunk = _loss_chunk_tokens(recipe, hardware, dtype)
        chosen["loss_chunk_tokens"] = before.get("loss_chunk_tokens", chunk)
    config = config.model_copy(update=chosen)
    if config.attention == "auto":
        attention = resolve_attention(
            config,
            hardware,
            dtype,
            recipe.model,
            recipe.data.seq_len,
            recipe.data.document_masking,
        )
        # What was chosen for another precision or device may not work, or not be right, here.
        same = all(before.get(key) == getattr(config, key) for key in ("precision", "compile"))
        kept = before.get("attention") if same else None
        of_gpus = ("flex", "efficient", "cudnn")
        if kept in (("blockwise",) if hardware.device.type == "cuda" else of_gpus):
            kept = None
        config = config.model_copy(update={"attention": kept or attention})
    if config != recipe.efficiency:
        way = "compiled" if config.compile is True else "not compiled"
        tell(f"chosen for this machine: {config.precision}, attention {config.attention}, {way}")
    recipe = recipe.model_copy(update={"efficiency": config})
    optimizer = _decided_optimizer(recipe.optimizer, saved.get("optimizer", {}), tell)
    recipe = recipe.model_copy(update={"optimizer": optimizer})
    if recipe.batch.micro_batch_size in (None, "auto"):
        rows = saved.get("batch", {}).get("micro_batch_size")
        if rows is None and recipe.batch.micro_batch_size == "auto":
            _require_whole_model(recipe)
            rows = largest_micro_batch(recipe, hardware, tell, processes)
        elif rows is None:
            rows = usual_rows(recipe, hardware.device.type, processes)
        batch = recipe.batch.model_copy(update={"micro_batch_size": rows})
        recipe = recipe.model_copy(update={"batch": batch})
    return recipe


def _decided_optimizer(
    config: OptimizerConfig, saved: Mapping[str, Any], tell: Callable[[str], None]
) -> OptimizerConfig:
    """The optimizer with the library of its 8 bits and the form of Adafactor decided.

    Args:
        config: the recipe's section.
        saved: the checkpoint's section, {} for a new run.
        tell: called with a choice that a new run would not make.
    """
    chosen: dict[str, Any] = {}
    if config.name == "adamw8bit" and config.eight_bit_library == "auto":
        library = saved.get("eight_bit_library", "auto")
        chosen["eight_bit_library"] = installed_library(library) if library == "auto" else library
    if config.name == "adafactor" and config.adafactor_variant == "auto":
        # Before there was this key, all runs had torch's.
        variant = saved.get("adafactor_variant", "torch") if saved else "paper"
        chosen["adafactor_variant"] = "paper" if variant == "auto" else variant
        if chosen["adafactor_variant"] == "torch":
            tell(
                "this run began with torch's Adafactor and goes on with it: "
                "optimizer.adafactor_variant torch (a new run takes paper, whose weight decay "
                "is relative to the parameter's size)"
            )
    return config.model_copy(update=chosen)


def _require_whole_model(recipe: Recipe) -> None:
    """What is tried for the largest micro-batch is one process with the whole model, on text."""
    if recipe.preference is not None:
        raise ConfigError(
            "batch.micro_batch_size auto tries rows of text, not preference pairs: give a number"
        )
    for key in ("tensor_parallel", "pipeline"):
        if getattr(recipe.distributed, key) > 1:
            raise ConfigError(
                f"batch.micro_batch_size auto tries the whole model, of which distributed.{key} "
                "gives each process a part: give a number"
            )


def _says_how_to_compile(config: EfficiencyConfig) -> bool:
    """Whether keys are set that mean nothing without compiling."""
    return (
        config.compile_regional
        or config.compile_mode != "default"
        or config.activation_checkpointing == "budget"
    )


def _loss_chunk_tokens(recipe: Recipe, hardware: Hardware, dtype: torch.dtype) -> int:
    """In fp32 on a CPU the chunks cost no time, and all logits much memory; where torch.compile
    fuses bf16's head and loss, chunks would be slower."""
    assert recipe.model is not None
    worth_it = (
        hardware.device.type == "cpu"
        and dtype == torch.float32
        and recipe.model.vocab_size >= 16384
        and recipe.lora is None
        and recipe.preference is None
        and recipe.distributed.tensor_parallel * recipe.distributed.pipeline == 1
    )
    return 512 if worth_it else 0


def usual_rows(recipe: Recipe, device_type: str, processes: int) -> int:
    """Rows of a micro-batch where nothing is said, that cut the step evenly: a CPU is no faster
    with more than keep it busy, and so stores fewer activations.

    Args:
        recipe: with its row length.
        device_type: "cpu", "cuda".
        processes: that share each step.
    """
    seq_len, tokens = recipe.data.seq_len, recipe.batch.global_batch_tokens
    assert seq_len is not None
    if tokens is not None:
        tokens //= processes
    accumulation = recipe.batch.gradient_accumulation_steps
    if tokens is not None and accumulation is not None and tokens >= accumulation * seq_len:
        return tokens // (accumulation * seq_len)
    if tokens is None or tokens % seq_len:
        return DEFAULT_ROWS
    total, most = tokens // seq_len, DEFAULT_ROWS
    if device_type == "cpu":
        most = min(max(_BUSY_TOKENS // seq_len, 1), most)
    return next(rows for rows in range(most, 0, -1) if total % rows == 0)


def _ideal_seconds(
    recipe: Recipe, hardware: Hardware, dtype: torch.dtype, epoch_tokens: int
) -> float:
    """How long the run would take if the hardware did nothing but multiply, at its best rate."""
    assert recipe.model is not None
    assert recipe.data.seq_len is not None
    per_token = train_flops_per_token(meta_model(recipe.model), recipe.data.seq_len)
    tokens, batch = epoch_tokens * (recipe.schedule.epochs or 1), recipe.batch
    if recipe.schedule.max_steps is not None:
        rows = 1 if batch.micro_batch_size == "auto" else batch.rows
        a_step = rows * (batch.gradient_accumulation_steps or 1) * recipe.data.seq_len
        tokens = recipe.schedule.max_steps * (batch.global_batch_tokens or a_step)
    return per_token * tokens / peak_flops(hardware.device, dtype)
