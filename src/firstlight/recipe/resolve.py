"""The keys that a recipe leaves open: `with_deepspeed_file` takes them from the DeepSpeed file that
it names, `for_new_model` has the optimizer, schedule and initial weights of a new model whose
recipe names none, and `resolve` decides the others, for train, plan and bench alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from firstlight.efficiency import (
    EfficiencyConfig,
    can_compile,
    resolve_attention,
    resolve_precision,
)
from firstlight.efficiency.attention import GPU_BACKENDS
from firstlight.efficiency.precision import dtype_of, has_only_fp16_units
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, peak_flops
from firstlight.models import ModelConfig
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.models.language_model import InitConfig
from firstlight.optim.eight_bit import installed_library
from firstlight.optim.new_model import MODEL, NEW_MODEL, RATE_WIDTH, WARMUP_RATIO
from firstlight.optim.registry import OptimizerConfig
from firstlight.optim.schedule import ScheduleConfig
from firstlight.parallel.selection import named_engine
from firstlight.recipe.schema import DEFAULT_ROWS, Recipe, ResolvedRecipe

#: Seconds of a run at the machine's peak rate from which on compiling pays: the real run takes
#: some times as long, and compiling up to a minute.
_WORTH_COMPILING_SECONDS = 240.0

#: Usual share of the peak rate that training reaches.
USUAL_MFU = 0.4

#: Tokens of a forward pass from which on a CPU multiplies at its full rate.
_BUSY_TOKENS = 1024

#: Size of the vocabulary from which on chunks of the loss save much memory.
_LARGE_VOCABULARY = 16384


#: Keys of the schedule that say how long a run is, and not how its rate rises and falls.
_LENGTHS = frozenset(("max_steps", "epochs", "max_minutes"))

#: The precisions that "auto" can stand for.
AutoPrecision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Facts:
    """Machine, data and history that a recipe is resolved with.

    Attributes:
        device: type of the device: "cpu", "cuda" or "mps".
        precision: precision that "auto" stands for.
        compiles: True if the device has its compiler for torch.compile.
        flops: peak rate of matrix products in a dtype, FLOP/s; None where it is unknown.
        processes: number of processes that share each optimizer step.
        epoch_tokens: tokens of the training split; None if the data are not on this machine.
        earlier: resolved recipe of the run that is resumed, {} for a new run.
        largest_micro_batch: finds the largest micro-batch that fits, by trying; None takes the
            default size.
    """

    device: str
    precision: AutoPrecision
    compiles: bool
    flops: Callable[[torch.dtype], float | None]
    processes: int = 1
    epoch_tokens: int | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)
    largest_micro_batch: Callable[[ResolvedRecipe], int] | None = None


def facts_here(hardware: Hardware, **more: Any) -> Facts:
    """Facts of a device of this machine.

    Args:
        hardware: device to run on.
        more: further attributes of `Facts`.
    """
    dtype = resolve_precision(EfficiencyConfig(), hardware)
    narrow: AutoPrecision = "fp16" if has_only_fp16_units(hardware) else "fp32"
    return Facts(
        hardware.device.type,
        "bf16" if dtype == torch.bfloat16 else narrow,
        can_compile(hardware.device),
        lambda dtype: peak_flops(hardware.device, dtype),
        **more,
    )


def for_new_model(
    recipe: Recipe, earlier: Mapping[str, Any], tell: Callable[[str], None] = lambda _: None
) -> Recipe:
    """The recipe of a new model with optimizer, schedule and initial weights, if it names none.

    The settings go together: a recipe that names an optimizer, a rate, the shape of the schedule or
    initial weights trains with its own and with the defaults of the keys that it leaves out.

    Args:
        recipe: recipe of a model that starts from new weights.
        earlier: resolved recipe of the run that is resumed, whose settings are kept; {} for a new
            run.
        tell: called with the message that a recipe takes these settings.
    """
    if not _names_no_settings(recipe):
        return recipe
    chosen = earlier or {
        "init": NEW_MODEL["init"],
        "optimizer": {**NEW_MODEL["optimizer"], "tuned_width": RATE_WIDTH},
        "schedule": {**NEW_MODEL["schedule"], "warmup_ratio": WARMUP_RATIO},
    }
    if not earlier:
        tell("the recipe names no optimizer, schedule or initial weights: those of new models")
    length = recipe.schedule.model_dump(include=set(_LENGTHS))
    changes = {
        "init": InitConfig.model_validate(chosen.get("init", {})),
        "optimizer": OptimizerConfig.model_validate(chosen.get("optimizer", {})),
        "schedule": ScheduleConfig.model_validate({**chosen.get("schedule", {}), **length}),
    }
    return recipe.model_copy(update=changes)


def _names_no_settings(recipe: Recipe) -> bool:
    """True if a recipe has the layout that `NEW_MODEL` was measured with, names no setting of
    optimizer, schedule's shape or initial weights, and can train with those of `NEW_MODEL`."""
    model, parts = recipe.model, recipe.distributed
    return (
        model is not None
        and all(getattr(model, key) == value for key, value in MODEL.items())
        and recipe.lora is None
        and recipe.preference is None
        # These have no Muon.
        and not named_engine(parts).updates_itself
        and parts.deepspeed_config is None
        and parts.offload == "none"
        and not recipe.optimizer.model_fields_set
        and not recipe.init.model_fields_set
        and recipe.schedule.model_fields_set <= _LENGTHS
    )


def resolve(
    recipe: Recipe, facts: Facts, tell: Callable[[str], None] = lambda _: None
) -> ResolvedRecipe:
    """The recipe with every open key decided.

    A choice that follows from a measurement could differ on another day, and a resumed run must
    compute as before: `facts.earlier` overrules.

    Args:
        recipe: recipe with its model, whose vocabulary size is known.
        facts: see `Facts`.
        tell: called with each choice that is worth a message.

    Raises:
        ConfigError: a row is longer than the model's context, or no micro-batch size fits.
    """
    assert recipe.model is not None
    seq_len = sequence_length(recipe, recipe.model)
    values: dict[str, Any] = dict(recipe)
    values["data"] = {**dict(recipe.data), "seq_len": seq_len}
    efficiency = _resolve_efficiency(recipe, recipe.model, seq_len, facts)
    if efficiency != recipe.efficiency:
        compiling = "compiled" if efficiency.compile is True else "not compiled"
        tell(
            f"chosen for this machine: {efficiency.precision}, attention {efficiency.attention}, "
            f"{compiling}"
        )
    values["efficiency"] = dict(efficiency)
    earlier = facts.earlier.get("optimizer", {})
    optimizer = recipe.optimizer.for_width(recipe.model.hidden_size)
    values["optimizer"] = _resolve_optimizer(optimizer, earlier, tell)
    rows = recipe.batch.micro_batch_size
    if rows in (None, "auto"):
        rows = facts.earlier.get("batch", {}).get("micro_batch_size")
    # One row takes the place of a size that is not decided yet.
    values["batch"] = {**dict(recipe.batch), "micro_batch_size": rows or 1}
    resolved = ResolvedRecipe.model_validate(values)
    if rows is not None:
        return resolved
    if recipe.batch.micro_batch_size is None or facts.largest_micro_batch is None:
        rows = default_micro_batch_size(recipe, seq_len, facts)
    else:
        rows = _largest_micro_batch(resolved, facts.largest_micro_batch)
    return resolved.with_keys("batch", micro_batch_size=rows)


def sequence_length(recipe: Recipe, model: ModelConfig) -> int:
    """Tokens of a training row.

    Raises:
        ConfigError: the recipe's row is longer than the model's context.
    """
    limit = model.max_position_embeddings
    seq_len = recipe.data.seq_len or limit
    if seq_len > limit:
        raise ConfigError(
            f"data.seq_len {seq_len} is more than model.max_position_embeddings {limit}: "
            "lower the first or raise the second"
        )
    return seq_len


def attention_backend(
    recipe: Recipe, model: ModelConfig, seq_len: int, facts: Facts, precision: str
) -> str:
    """Attention backend that a recipe takes in a precision if it leaves the choice open."""
    return resolve_attention(
        EfficiencyConfig(),
        facts.device,
        dtype_of(precision),
        model,
        seq_len,
        documents=recipe.data.document_masking,
        compiles=facts.compiles,
    )


def _resolve_efficiency(
    recipe: Recipe, model: ModelConfig, seq_len: int, facts: Facts
) -> EfficiencyConfig:
    config, earlier = recipe.efficiency, facts.earlier.get("efficiency", {})
    chosen: dict[str, Any] = {}
    if config.precision == "auto":
        # An update in the backward pass can't wait until it is known whether fp16 overflowed.
        overflows = facts.precision == "fp16" and config.optimizer_in_backward
        own = "fp32" if overflows else facts.precision
        chosen["precision"] = earlier.get("precision", own)
    precision = chosen.get("precision", config.precision)
    if config.compile == "auto":
        pays = earlier.get("compile")
        if pays is None:
            pays = (
                _ideal_seconds(recipe, model, seq_len, precision, facts) >= _WORTH_COMPILING_SECONDS
            )
        # `conflicts.py` refuses the others.
        able = _is_whole(recipe) and not named_engine(recipe.distributed).updates_itself
        pays = pays is True and able and facts.compiles
        chosen["compile"] = _says_how_to_compile(config) or pays
    if config.loss_chunk_tokens is None:
        chunk = _loss_chunk_tokens(recipe, model, facts.device, precision)
        chosen["loss_chunk_tokens"] = earlier.get("loss_chunk_tokens", chunk)
    config = config.model_copy(update=chosen)
    if config.attention != "auto":
        return config
    # The backend of another precision or device may be wrong here, or not exist.
    same = all(earlier.get(key) == getattr(config, key) for key in ("precision", "compile"))
    kept = earlier.get("attention") if same else None
    if kept == "auto" or kept in (("blockwise",) if facts.device == "cuda" else GPU_BACKENDS):
        kept = None
    attention = kept or attention_backend(recipe, model, seq_len, facts, precision)
    return config.model_copy(update={"attention": attention})


def _resolve_optimizer(
    config: OptimizerConfig, earlier: Mapping[str, Any], tell: Callable[[str], None]
) -> OptimizerConfig:
    """The optimizer with the library of its 8 bits and the form of Adafactor decided."""
    chosen: dict[str, Any] = {}
    if config.name == "adamw8bit" and config.eight_bit_library == "auto":
        library = earlier.get("eight_bit_library", "auto")
        chosen["eight_bit_library"] = installed_library(library) if library == "auto" else library
    if config.name == "adafactor" and config.adafactor_variant == "auto":
        # Before there was this key, all runs had torch's.
        variant = earlier.get("adafactor_variant", "torch") if earlier else "paper"
        chosen["adafactor_variant"] = "paper" if variant == "auto" else variant
        if chosen["adafactor_variant"] == "torch":
            tell(
                "this run began with torch's Adafactor and goes on with it: "
                "optimizer.adafactor_variant torch (a new run takes paper, whose weight decay "
                "is relative to the parameter's size)"
            )
    return config.model_copy(update=chosen)


def _is_whole(recipe: Recipe) -> bool:
    """True if each process has all layers, and each of them whole."""
    return recipe.distributed.tensor_parallel * recipe.distributed.pipeline == 1


def _says_how_to_compile(config: EfficiencyConfig) -> bool:
    """True if keys are set that have no effect without compiling."""
    return (
        config.compile_regional
        or config.compile_mode != "default"
        or config.activation_checkpointing == "budget"
    )


def _loss_chunk_tokens(recipe: Recipe, model: ModelConfig, device: str, precision: str) -> int:
    """Resolved `loss_chunk_tokens`: chunks in fp32 on a CPU, where they cost no time and all logits
    take much memory; none where torch.compile fuses bf16's head and loss, which is faster."""
    worth_it = (
        device == "cpu"
        and dtype_of(precision) == torch.float32
        and model.vocab_size >= _LARGE_VOCABULARY
        and recipe.lora is None
        and recipe.preference is None
        and _is_whole(recipe)
    )
    return 512 if worth_it else 0


def _largest_micro_batch(recipe: ResolvedRecipe, find: Callable[[ResolvedRecipe], int]) -> int:
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
    return find(recipe)


def default_micro_batch_size(recipe: Recipe, seq_len: int, facts: Facts) -> int:
    """The largest micro-batch size up to a limit that divides the step evenly. On a CPU the limit
    just keeps it busy, because more rows are not faster and store more activations."""
    batch, accumulation = recipe.batch, recipe.batch.gradient_accumulation_steps
    if batch.global_batch_tokens is None:
        return DEFAULT_ROWS
    tokens = batch.global_batch_tokens // facts.processes
    if accumulation is not None and tokens >= accumulation * seq_len:
        return tokens // (accumulation * seq_len)
    if batch.ramp_start_tokens is not None:
        # The smallest step has to come out even.
        tokens = batch.ramp_start_tokens // facts.processes
    if tokens % seq_len:
        return DEFAULT_ROWS
    total, most = tokens // seq_len, DEFAULT_ROWS
    if facts.device == "cpu":
        most = min(max(_BUSY_TOKENS // seq_len, 1), most)
    return next(rows for rows in range(most, 0, -1) if total % rows == 0)


def _ideal_seconds(
    recipe: Recipe, model: ModelConfig, seq_len: int, precision: str, facts: Facts
) -> float:
    """Seconds of the run's matrix products at the peak rate; infinite where that is unknown."""
    flops = facts.flops(dtype_of(precision))
    batch, steps, minutes = recipe.batch, recipe.schedule.max_steps, recipe.schedule.max_minutes
    if steps is not None:
        rows = 1 if batch.micro_batch_size == "auto" else batch.rows
        a_step = rows * (batch.gradient_accumulation_steps or 1) * seq_len
        tokens: float = steps * (batch.global_batch_tokens or a_step)
    elif facts.epoch_tokens is not None and (minutes is None or recipe.schedule.epochs is not None):
        tokens = facts.epoch_tokens * (recipe.schedule.epochs or 1)
    else:
        tokens = math.inf
    most = math.inf if minutes is None else USUAL_MFU * 60 * minutes
    token_flops = train_flops_per_token(meta_model(model), seq_len)
    return most if flops is None else min(token_flops * tokens / flops, most)
