"""Resolve a recipe. Keys that the user left open (null or "auto") are set from facts about the
machine, the data and the run. A recipe is resolved once per run, and in the same way by the
commands train, plan and bench.

The facts are collected first. They include the kind of data, the config of the model to be trained,
the number of processes and the rates of the device. From these facts, `resolve` sets document
masking, the `preference` section, the settings of new models, the row length, the micro-batch size,
precision, attention, compilation and the variant of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from firstlight.data.corpus import Kind
from firstlight.data.loader import NO_MASKING
from firstlight.errors import ConfigError
from firstlight.hardware.compiling import NOT_COMPILED, Compiler, Compiling, best_compile_mode
from firstlight.hardware.device import Hardware, peak_flops
from firstlight.methods import (
    EfficiencyConfig,
    resolve_attention,
    resolve_precision,
)
from firstlight.methods.attention import GPU_BACKENDS
from firstlight.methods.compilation import find_compiler, needs_compiling
from firstlight.methods.precision import dtype_of, has_only_fp16_units
from firstlight.models import ModelConfig
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.models.language_model import InitConfig
from firstlight.optim.config import OPTIMIZERS, OptimizerConfig
from firstlight.optim.eight_bit import installed_library
from firstlight.optim.new_model import MODEL, NEW_MODEL, RATE_WIDTH, WARMUP_RATIO
from firstlight.optim.schedule import KINDS_OF_KEYS, ScheduleConfig
from firstlight.parallel.engine import DistributedConfig
from firstlight.parallel.engine_choice import named_engine
from firstlight.recipe.micro_batch import resolve_micro_batch
from firstlight.recipe.schema import PreferenceConfig, Recipe, ResolvedRecipe

#: Fraction of the peak rate that training usually reaches (model FLOPs utilization, MFU).
USUAL_MFU = 0.4

#: Assumed duration of a run of unknown length, in seconds. The value is large because most runs are
#: long.
_LONG_SECONDS = 1e6

#: Minimum time in seconds that a GPU needs per step and layer for launching kernels.
_LAUNCH_SECONDS = 2e-3

#: Minimum vocabulary size for which computing the loss in chunks saves a lot of memory.
_LARGE_VOCABULARY = 16384


#: Keys of the `schedule` section that set the length of a run. All remaining keys set the shape of
#: the schedule.
_LENGTHS = frozenset(("max_steps", "epochs", "max_minutes"))

#: Precisions that can replace "auto" when a recipe is resolved.
AutoPrecision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Facts:
    """Facts about the machine, the data and the run that determine how a recipe is resolved.

    Attributes:
        device: type of the device: "cpu", "cuda" or "mps".
        precision: the precision to which "auto" is resolved.
        compiler: compile times and speed-ups of torch.compile on the device; None if it does not
            work there.
        flops: function that returns the peak rate of matrix products in FLOP/s for a dtype, or None
            if the rate is unknown.
        processes: number of processes that share each optimizer step.
        epoch_tokens: number of tokens in the training split; None if the data is not on this
            machine.
        kind: kind of the data. It is "chat" for a mix that contains conversations, and None if the
            kind is unknown.
        model: config of the model to be trained; None to use the recipe's `model` section.
        new_model: True if the run trains a new model with random initial weights.
        run_folder: the run folder; None to keep the recipe's `run.dir`.
        earlier: resolved recipe of the run that is resumed; {} for a new run.
        largest_micro_batch: function that determines, by trials, the largest micro-batch size that
            fits in memory; None to use the default size.
    """

    device: str
    precision: AutoPrecision
    compiler: Compiler | None
    flops: Callable[[torch.dtype], float | None]
    processes: int = 1
    epoch_tokens: int | None = None
    kind: Kind | None = None
    model: ModelConfig | None = None
    new_model: bool = False
    run_folder: Path | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)
    largest_micro_batch: Callable[[ResolvedRecipe], int] | None = None


def facts_here(hardware: Hardware, **more: Any) -> Facts:
    """Return the `Facts` for a device on this machine.

    Args:
        hardware: device to run on.
        more: values for additional attributes of `Facts`.
    """
    dtype = resolve_precision(EfficiencyConfig(), hardware)
    narrow: AutoPrecision = "fp16" if has_only_fp16_units(hardware) else "fp32"
    return Facts(
        hardware.device.type,
        "bf16" if dtype == torch.bfloat16 else narrow,
        find_compiler(hardware),
        lambda dtype: peak_flops(hardware.device, dtype),
        **more,
    )


def for_new_model(
    recipe: Recipe, earlier: Mapping[str, Any], tell: Callable[[str], None] = lambda _: None
) -> Recipe:
    """Apply the `NEW_MODEL` settings to a recipe that sets neither the optimizer nor the schedule
    nor the initial weights.

    The `NEW_MODEL` settings were tuned together. They are therefore not applied if the recipe sets
    any key of the optimizer, the shape of the schedule or the initial weights. In this case, all
    unset keys have their usual defaults.

    Args:
        recipe: recipe of a run that starts from random weights.
        earlier: resolved recipe of the run that is resumed, whose settings are kept; {} for a new
            run.
        tell: function that is called with a message if the settings are applied to a new run.
    """
    if not _names_no_settings(recipe):
        return recipe
    chosen = earlier or {
        "init": NEW_MODEL["init"],
        "optimizer": {**NEW_MODEL["optimizer"], "tuned_width": RATE_WIDTH},
        "schedule": {**NEW_MODEL["schedule"], "warmup_ratio": WARMUP_RATIO},
    }
    if not earlier:
        tell(
            "the recipe sets no optimizer, schedule or initial weights: using the settings for "
            "new models"
        )
    length = recipe.schedule.model_dump(include=set(_LENGTHS))
    changes = {
        "init": InitConfig.model_validate(chosen.get("init", {})),
        "optimizer": OptimizerConfig.model_validate(chosen.get("optimizer", {})),
        "schedule": ScheduleConfig.model_validate({**chosen.get("schedule", {}), **length}),
    }
    return recipe.model_copy(update=changes)


def _names_no_settings(recipe: Recipe) -> bool:
    """Return True if the `NEW_MODEL` settings apply to the recipe.

    They apply under three conditions. The model must have the layout for which `NEW_MODEL` was
    tuned. The recipe must not set any key of the optimizer, the shape of the schedule or the
    initial weights. The engine must support the optimizer of `NEW_MODEL`.
    """
    model, parts = recipe.model, recipe.distributed
    return (
        model is not None
        and all(getattr(model, key) == value for key, value in MODEL.items())
        and recipe.lora is None
        and recipe.preference is None
        # DeepSpeed and offloading do not support Muon.
        and not named_engine(parts).updates_itself
        and parts.deepspeed_config is None
        and parts.offload == "none"
        and not recipe.optimizer.model_fields_set
        and not recipe.init.model_fields_set
        and recipe.schedule.model_fields_set <= _LENGTHS
    )


def require_fitting_data(recipe: Recipe, kind: Kind, *, from_weights: bool) -> None:
    """Reject a recipe that contradicts its data.

    Args:
        recipe: the recipe as written by the user.
        kind: see `Facts`.
        from_weights: True if the run starts from an existing model or a checkpoint.

    Raises:
        ConfigError: document masking is disabled although the data consists of conversations or
            preference pairs. Also raised if the recipe has a `preference` section for data without
            preference pairs, or if a run on preference pairs starts from random weights.
    """
    is_off = "document_masking" in recipe.data.model_fields_set and not recipe.data.document_masking
    if kind in ("chat", "preference") and is_off:
        raise ConfigError(f"data.{NO_MASKING}")
    if kind != "preference" and recipe.preference is not None:
        raise ConfigError(
            "the preference section applies to pairs of answers only: set data.kind to "
            "preference, or remove the section"
        )
    if kind == "preference" and not from_weights:
        raise ConfigError(
            "preference pairs need a model that can already answer: fine-tune one on "
            "conversations (data.kind chat), and pass it with --init-from"
        )


def resolve(
    recipe: Recipe, facts: Facts, tell: Callable[[str], None] = lambda _: None
) -> ResolvedRecipe:
    """Set every open key of a recipe (null or "auto"), and return the resolved recipe. A resumed
    run must continue with the same choices. Choices that depend on the machine or on a measurement
    could turn out differently the second time, so the choices of the earlier run (`facts.earlier`)
    take precedence.

    Args:
        recipe: the recipe as written by the user.
        facts: see `Facts`. The vocabulary size of the model must be known.
        tell: function that is called with a message about each important choice.

    Raises:
        ConfigError: `data.seq_len` is longer than the model's context, or no micro-batch size fits.
    """
    model = facts.model or recipe.model
    assert model is not None
    seq_len = sequence_length(recipe, model)
    known = _with_known(recipe, facts, {"seq_len": seq_len}, tell)
    efficiency = _resolve_efficiency(known, model, seq_len, facts)
    if efficiency != known.efficiency:
        compiling = "compiled" if efficiency.compile is True else "not compiled"
        if efficiency.compile_regional:
            compiling = "layers and loss compiled"
        tell(
            f"chosen for this machine: {efficiency.precision}, attention {efficiency.attention}, "
            f"{compiling}"
        )
    optimizer = known.optimizer.for_width(model.hidden_size)
    batch = resolve_micro_batch(
        known.batch,
        seq_len,
        device=facts.device,
        processes=facts.processes,
        earlier=facts.earlier.get("batch", {}).get("micro_batch_size"),
        is_tried=facts.largest_micro_batch is not None,
        tell=tell,
    )
    is_tried = batch.micro_batch_size == "auto"
    resolved = ResolvedRecipe.model_validate(
        {
            **dict(known),
            "model": model,
            "data": dict(known.data),
            "efficiency": dict(efficiency),
            "optimizer": _resolve_optimizer(optimizer, facts.earlier.get("optimizer", {}), tell),
            "schedule": _resolve_curve(known.schedule, facts.earlier.get("schedule", {})),
            # Use a micro-batch size of 1 as a placeholder until trials determine the actual size.
            "batch": {**dict(batch), **({"micro_batch_size": 1} if is_tried else {})},
        }
    )
    if not is_tried or facts.largest_micro_batch is None:
        return resolved
    rows = _largest_micro_batch(resolved, facts.largest_micro_batch)
    return resolved.with_keys("batch", micro_batch_size=rows)


def _with_known(
    recipe: Recipe, facts: Facts, data: dict[str, Any], tell: Callable[[str], None]
) -> Recipe:
    """Return the recipe after setting the keys that depend on the data and the run. For a new
    model, also apply the `NEW_MODEL` settings.

    Args:
        recipe: the recipe as written by the user.
        facts: see `Facts`.
        data: additional values for the `data` section.
        tell: see `resolve`.
    """
    sections: dict[str, Any] = {}
    if facts.kind in ("chat", "preference"):
        # Enable document masking, because tokens must not attend to other examples in the same row.
        data = {**data, "document_masking": True}
    if facts.kind == "preference":
        data = {**data, "kind": "preference"}
        sections["preference"] = recipe.preference or PreferenceConfig()
    if facts.run_folder is not None:
        sections["run"] = recipe.run.model_copy(update={"dir": str(facts.run_folder)})
    is_new = facts.new_model or facts.earlier
    known = for_new_model(recipe, facts.earlier, tell) if is_new else recipe
    return known.with_keys("data", **data).model_copy(update=sections)


def sequence_length(recipe: Recipe, model: ModelConfig) -> int:
    """Return the number of tokens per training sequence, which is `data.seq_len` or, if that key is
    null, the model's context length.

    Raises:
        ConfigError: `data.seq_len` is longer than the model's context.
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
    """Return the attention backend that the setting "auto" selects for a recipe and a precision."""
    return resolve_attention(
        EfficiencyConfig(),
        facts.device,
        dtype_of(precision),
        model,
        seq_len=seq_len,
        documents=recipe.data.document_masking,
        compiles=facts.compiler is not None,
    )


def _resolve_efficiency(
    recipe: Recipe, model: ModelConfig, seq_len: int, facts: Facts
) -> EfficiencyConfig:
    """Return the `efficiency` section after resolving `precision`, `compile`, `loss_chunk_tokens`
    and `attention`.
    """
    config, earlier = recipe.efficiency, facts.earlier.get("efficiency", {})
    chosen: dict[str, Any] = {}
    if config.precision == "auto":
        # Use fp32 with optimizer_in_backward, because parameters are then updated before it is
        # known whether the fp16 gradients have overflowed.
        overflows = facts.precision == "fp16" and config.optimizer_in_backward
        own = "fp32" if overflows else facts.precision
        chosen["precision"] = earlier.get("precision", own)
    precision = chosen.get("precision", config.precision)
    if config.compile == "auto":
        size = model.hidden_size, model.num_hidden_layers
        modes = open_compile_modes(config, recipe.distributed, facts.compiler, size)
        mode = modes[0]
        if len(modes) > 1 and (before := earlier.get("compile")) is not None:
            mode = Compiling(before is True, earlier.get("compile_regional", False))
        elif len(modes) > 1:
            seconds = usual_seconds(recipe, model, seq_len, precision, facts=facts)
            mode = best_compile_mode(modes, lambda mode: seconds / mode.gain)
        chosen["compile"] = needs_compiling(config) or mode.compiles
        chosen["compile_regional"] = config.compile_regional or mode.regional
    if config.loss_chunk_tokens is None:
        chunk = _loss_chunk_tokens(recipe, model, facts.device, precision)
        chosen["loss_chunk_tokens"] = earlier.get("loss_chunk_tokens", chunk)
    config = config.model_copy(update=chosen)
    if config.attention != "auto":
        return config
    # Keep the attention backend of the earlier run only if the precision and the compilation mode
    # have not changed and this device supports the backend.
    same = all(earlier.get(key) == getattr(config, key) for key in ("precision", "compile"))
    kept = earlier.get("attention") if same else None
    if kept == "auto" or kept in (("blockwise",) if facts.device == "cuda" else GPU_BACKENDS):
        kept = None
    attention = kept or attention_backend(recipe, model, seq_len, facts, precision=precision)
    return config.model_copy(update={"attention": attention})


def _resolve_curve(config: ScheduleConfig, earlier: Mapping[str, Any]) -> ScheduleConfig:
    """Return the `schedule` section. If the last step of the decay would have a learning rate of 0,
    it would not train anything. To avoid this, set `decay_starts_at_peak`.
    """
    falls = KINDS_OF_KEYS["decay_starts_at_peak"]
    if config.decay_starts_at_peak is not None or config.kind not in falls:
        return config
    is_late = earlier.get("decay_starts_at_peak")
    # Runs that were started with an older version keep their learning-rate curve.
    is_kept = earlier.get("kind") in falls and (is_late or _ends_at_zero(earlier))
    if not is_kept:
        is_late = _ends_at_zero(config.model_dump()) or None
    return config.model_copy(update={"decay_starts_at_peak": is_late})


def _ends_at_zero(schedule: Mapping[str, Any]) -> bool:
    """Return True if a decay reaches a learning rate of 0 in the last step of the run."""
    keys = ("min_lr_ratio", "min_learning_rate", "decay_steps", "decay_tokens")
    return not any(schedule.get(key) for key in keys)


def _resolve_optimizer(
    config: OptimizerConfig, earlier: Mapping[str, Any], tell: Callable[[str], None]
) -> OptimizerConfig:
    """Return the `optimizer` section after resolving the 8-bit library, the precision of the
    embeddings' optimizer state and the Adafactor variant.
    """
    chosen: dict[str, Any] = {}
    has_choice = "embeddings_in_32_bits" in OPTIMIZERS[config.name].options
    if has_choice and config.embeddings_in_32_bits is None:
        # Runs that were started with an older version of firstlight keep the state of the
        # embeddings in 8 bits.
        before = earlier.get("embeddings_in_32_bits", False) if earlier else None
        chosen["embeddings_in_32_bits"] = before is not False
    if config.name == "adamw8bit" and config.eight_bit_library == "auto":
        library = earlier.get("eight_bit_library", "auto")
        chosen["eight_bit_library"] = installed_library(library) if library == "auto" else library
    if config.name == "adafactor" and config.adafactor_variant == "auto":
        # Recipes that were saved by older versions do not have this key. These versions used
        # torch's Adafactor.
        variant = earlier.get("adafactor_variant", "torch") if earlier else "paper"
        chosen["adafactor_variant"] = "paper" if variant == "auto" else variant
        if chosen["adafactor_variant"] == "torch":
            tell(
                "this run started with torch's Adafactor and continues with it: "
                "optimizer.adafactor_variant torch (new runs use paper, whose weight decay is "
                "relative to the parameter's size)"
            )
    return config.model_copy(update=chosen)


def _is_whole(parts: DistributedConfig) -> bool:
    """Return True if each process computes the full model, without tensor or pipeline
    parallelism."""
    return parts.tensor_parallel * parts.pipeline == 1


def open_compile_modes(
    config: EfficiencyConfig,
    parts: DistributedConfig,
    compiler: Compiler | None,
    size: tuple[int, int],
    *,
    is_busy: bool = False,
) -> list[Compiling]:
    """Return the compilation modes that a recipe allows. The list can contain `NOT_COMPILED`.

    Args:
        config, parts: the sections `efficiency` and `distributed` of the recipe.
        compiler: compile times and speed-ups of torch.compile on the device; None if it does not
            work there.
        size: hidden size and number of layers of the model.
        is_busy: True if other programs keep the cores busy.
    """
    # In these cases, `conflicts.py` rejects compilation.
    is_refused = (
        not _is_whole(parts)
        or named_engine(parts).updates_itself
        or parts.deepspeed_config is not None
    )
    modes = [] if compiler is None or is_refused else compiler.modes(size, is_busy=is_busy)
    compiles = config.compile is True or needs_compiling(config)
    if compiles or "compile_regional" in config.model_fields_set:
        modes = [mode for mode in modes if mode.regional == config.compile_regional]
    if config.compile is False or not modes:
        return [NOT_COMPILED]
    # Without compilation, the casts to fp8 cost more time than the faster matrix products save.
    return modes if compiles or config.precision == "fp8" else [NOT_COMPILED, *modes]


def _loss_chunk_tokens(recipe: Recipe, model: ModelConfig, device: str, precision: str) -> int:
    """Return the value that replaces a null `efficiency.loss_chunk_tokens`. It is 512, or 0 to
    compute the loss without chunks.

    In fp32 on a CPU, chunks take no additional time and save most of the memory for logits. In
    bf16, torch.compile fuses the head and the loss, which is faster than using chunks.
    """
    worth_it = (
        device == "cpu"
        and dtype_of(precision) == torch.float32
        and model.vocab_size >= _LARGE_VOCABULARY
        and recipe.lora is None
        and recipe.preference is None
        and _is_whole(recipe.distributed)
    )
    return 512 if worth_it else 0


def _largest_micro_batch(recipe: ResolvedRecipe, find: Callable[[ResolvedRecipe], int]) -> int:
    if recipe.preference is not None:
        raise ConfigError(
            "batch.micro_batch_size auto does not support preference pairs: set a number"
        )
    for key in ("tensor_parallel", "pipeline"):
        if getattr(recipe.distributed, key) > 1:
            raise ConfigError(
                f"batch.micro_batch_size auto runs trials with the full model, but "
                f"distributed.{key} gives each process only a part: set a number"
            )
    return find(recipe)


def usual_seconds(
    recipe: Recipe, model: ModelConfig, seq_len: int, precision: str, *, facts: Facts
) -> float:
    """Return the expected duration of all steps of a run in seconds, at the usual MFU and without
    torch.compile."""
    batch, schedule = recipe.batch, recipe.schedule
    minutes = schedule.max_minutes
    rows = 1 if batch.micro_batch_size == "auto" else batch.rows
    # Number of tokens that each process computes per step.
    tokens: float = rows * (batch.gradient_accumulation_steps or 1) * seq_len
    if batch.global_batch_tokens is not None:
        tokens = batch.global_batch_tokens / facts.processes
    steps = math.inf
    if schedule.max_steps is not None:
        steps = schedule.max_steps
    elif facts.epoch_tokens is not None and (minutes is None or schedule.epochs is not None):
        steps = facts.epoch_tokens * (schedule.epochs or 1) / (tokens * facts.processes)
    flops = facts.flops(dtype_of(precision)) or 0.0
    work = train_flops_per_token(meta_model(model), seq_len) * tokens / USUAL_MFU
    step = work / flops if flops else math.inf
    if facts.device == "cuda":
        step = max(step, _LAUNCH_SECONDS * model.num_hidden_layers)
    most = _LONG_SECONDS if minutes is None else 60 * minutes
    return min(steps * step if steps else 0.0, most)
