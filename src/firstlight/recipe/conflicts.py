"""Refuses combinations of methods that can't work at all or not on the given hardware, before a run
starts. Each message names the nearest combination that works.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.methods.attention import GPU_BACKENDS, able_backends, why_unable
from firstlight.methods.compilation import TRITON_CAPABILITY, why_unrecordable
from firstlight.methods.precision import FP8_CAPABILITY, NO_FP8_LAYERS, fp8_layers
from firstlight.models import ModelConfig
from firstlight.models.accounting import meta_model
from firstlight.optim.config import OPTIMIZERS, elementwise_optimizers, sharded_optimizers
from firstlight.parallel.engine import Engine
from firstlight.parallel.engine_choice import ENGINES
from firstlight.parallel.sharding import unshardable
from firstlight.recipe.schema import ResolvedRecipe


def require_combination(
    recipe: ResolvedRecipe,
    hardware: Hardware,
    engine: str = "none",
    tensor_parallel: int = 1,
    pipeline: int = 1,
) -> None:
    """Refuse a recipe whose methods can't work together on this hardware.

    Args:
        recipe: recipe of the run.
        hardware: hardware of the run.
        engine: name of the engine between processes that compute different sequences: "none",
            "ddp", "fsdp" or "deepspeed".
        tensor_parallel: number of processes that compute each layer together.
        pipeline: number of pipeline stages, each a process with some of the layers.

    Raises:
        ConfigError: there are conflicts; the message has all of them, each with the nearest
            combination that works.
    """
    spec = ENGINES[engine]
    problems = [
        *_conflicts(recipe),
        *_missing_hardware(recipe, hardware),
        *_conflicts_with(spec, recipe),
        *(
            _conflicts_in_parts(recipe, "distributed.tensor_parallel")
            if tensor_parallel > 1
            else ()
        ),
        *(_conflicts_in_parts(recipe, "distributed.pipeline") if pipeline > 1 else ()),
        *_conflicts_of_pairs(recipe, spec, tensor_parallel, pipeline),
        *_conflicts_of_sharded(recipe, spec, tensor_parallel),
        *_conflicts_of_average(recipe),
        *(_conflicts_with_deepspeed(recipe) if spec.updates_itself else ()),
        *(unshardable(recipe.model, tensor_parallel) if tensor_parallel > 1 else ()),
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def ineffective(recipe: ResolvedRecipe, hardware: Hardware) -> Iterator[str]:
    """Warnings: a sentence for each setting of the recipe that has no effect with the recipe's
    other settings or on this hardware."""
    yield from _ineffective_of_optimizer(recipe)
    config, device = recipe.efficiency, hardware.device.type
    if config.matmul_precision is not None and config.precision not in ("fp32", "tf32"):
        yield (
            "efficiency.matmul_precision is for products of fp32 tensors, and those of "
            f"efficiency.precision {config.precision} are not: set precision to fp32"
        )
    if config.bf16_residual and config.precision == "bf16_params":
        yield (
            "efficiency.bf16_residual does nothing with efficiency.precision bf16_params, whose "
            "activations are all bf16"
        )
    if config.precision == "fp8" and not config.compile:
        yield (
            "efficiency.precision fp8 is slower than bf16 without torch.compile, which joins its "
            "casts: set efficiency.compile to true"
        )
    if device == "cuda":
        return
    if config.precision == "tf32":
        yield f"efficiency.precision tf32 is fp32 on a {device} device"
    if config.activation_offload and device == "cpu":
        yield "efficiency.activation_offload gains nothing on a CPU, where all is in its memory"
    if config.empty_cache_steps:
        yield f"efficiency.empty_cache_steps does nothing on a {device} device"
    if config.compile and config.compile_mode != "default":
        yield f"efficiency.compile_mode {config.compile_mode} is for GPUs"
    if config.compile and config.compile_backend == "cudagraphs":
        yield (
            f"efficiency.compile_backend cudagraphs is for GPUs, and like aot_eager on a {device} "
            "device"
        )


def _ineffective_of_optimizer(recipe: ResolvedRecipe) -> Iterator[str]:
    """Settings of the `optimizer` section without effect."""
    config, name = recipe.optimizer, recipe.optimizer.name
    roles = {"embedding": "embedding", "head": "head", "vector": "norm or bias"}
    if recipe.lora is None or recipe.lora.modules_to_save or recipe.lora.trainable_token_indices:
        roles.clear()
    elif recipe.lora.dora:
        # DoRA's magnitudes are vectors that are trained.
        del roles["vector"]
    for key, field in type(config).model_fields.items():
        if getattr(config, key) == field.default:
            continue
        role, _, setting = key.partition("_")
        if role in roles:
            yield f"optimizer.{key} does nothing with lora, which trains no {roles[role]}"
        elif role == "head" and recipe.model.tie_word_embeddings:
            yield (
                f"optimizer.{key} does nothing with model.tie_word_embeddings true: a tied head "
                f"has optimizer.embedding_{setting}"
            )
        elif key.endswith("betas") and "betas" not in OPTIMIZERS[name].options:
            yield f"optimizer.{key} does nothing with optimizer.name {name}, which has no betas"
        elif role == "muon" and name != "muon":
            yield f"optimizer.{key} does nothing with optimizer.name {name}: it is for muon"


def _conflicts(recipe: ResolvedRecipe) -> Iterator[str]:
    """Conflicts that depend neither on the engine nor on the hardware."""
    config, model = recipe.efficiency, recipe.model
    if config.optimizer_in_backward:
        yield from _conflicts_in_backward(recipe, recipe.data.seq_len)
    if config.activation_checkpointing == "budget" and not config.compile:
        yield (
            "efficiency.activation_checkpointing budget is torch.compile's: set "
            "efficiency.compile to true, or activation_checkpointing to selective"
        )
    if not config.compile and (config.compile_regional or config.compile_mode != "default"):
        yield (
            "efficiency.compile_regional and compile_mode say how to compile: set "
            "efficiency.compile to true, or leave them out"
        )
    if config.compile_backend != "inductor" and config.compile_mode != "default":
        yield (
            f"efficiency.compile_mode {config.compile_mode} is inductor's: set "
            "efficiency.compile_backend to inductor, or compile_mode to default"
        )
    if config.precision == "fp8" and not fp8_layers(meta_model(model)):
        yield NO_FP8_LAYERS
    if config.bf16_residual and config.precision in ("fp32", "tf32", "fp16"):
        yield (
            "efficiency.bf16_residual is for precision bf16 or fp8, and efficiency.precision is "
            f"{config.precision}: set precision to bf16, or bf16_residual to false"
        )
    if config.attention in ("flex", "flash") and model.attention_spec(0).dropout:
        yield (
            f"efficiency.attention {config.attention} has no dropout: set model.attn_pdrop to 0, "
            "or efficiency.attention to auto"
        )


def _conflicts_with(engine: type[Engine], recipe: ResolvedRecipe) -> Iterator[str]:
    """Conflicts with an engine of several processes, most of them with sharding."""
    if engine is Engine:  # the engine of one process
        return
    if engine.shards_state and recipe.model.family.has_buffers:
        yield (
            f"distributed.engine {engine.name} saves parameters alone, and "
            f"{recipe.model.model_type} models have a bias of their routers that is none: use "
            "distributed.engine ddp"
        )
    if recipe.efficiency.optimizer_in_backward:
        yield (
            "efficiency.optimizer_in_backward updates before the processes' gradients are added "
            "up: switch it off (distributed.engine fsdp frees more memory than it does)"
        )
    if not engine.keeps_shards:
        return
    if recipe.efficiency.precision in ("bf16_params", "fp8"):
        yield (
            f"efficiency.precision {recipe.efficiency.precision} is not for distributed.engine "
            "fsdp: use bf16, which keeps the shards in fp32 and puts layers together in bf16"
        )
    spec = OPTIMIZERS[recipe.optimizer.name]
    if not (spec.elementwise or spec.gathers):
        yield (
            f"optimizer.name {recipe.optimizer.name} needs whole parameters, and "
            "distributed.engine fsdp cuts them: use "
            f"{sharded_optimizers()}, or distributed.engine ddp"
        )
    if spec.gathers and recipe.distributed.offload == "cpu":
        yield (
            f"optimizer.name {recipe.optimizer.name} computes matrix products in the update, which "
            "distributed.offload cpu would leave to the CPU: set distributed.offload to none, or "
            "optimizer.name to adamw"
        )
    if recipe.efficiency.activation_offload:
        yield (
            "efficiency.activation_offload does not work on distributed.engine fsdp's shards: use "
            "activation_checkpointing full, or distributed.engine ddp"
        )
    yield from _conflicts_of_lora_in_shards(recipe)


def _conflicts_of_lora_in_shards(recipe: ResolvedRecipe) -> Iterator[str]:
    lora = recipe.lora
    if lora is None:
        return
    if lora.quantize != "none":
        yield (
            f"lora.quantize {lora.quantize} packs weights, which distributed.engine fsdp can't "
            "cut: set it to none, or use distributed.engine ddp"
        )
    keys = ("modules_to_save", "trainable_token_indices")
    changes = [f"lora.{key}" for key in keys if getattr(lora, key)]
    embedding = meta_model(recipe.model).embedding_name.rpartition(".")[2]
    if any(target.rpartition(".")[2] == embedding for target in lora.targets):
        changes.append("an embedding in lora.targets")
    for change in changes:
        yield f"{change} is not for distributed.engine fsdp: use distributed.engine ddp"


def _conflicts_of_pairs(
    recipe: ResolvedRecipe, engine: type[Engine], tensor_parallel: int, pipeline: int
) -> Iterator[str]:
    """Conflicts of training on preference pairs, whose loss is a function of whole answers'
    log-probabilities."""
    if recipe.preference is None:
        return
    for key, parts in (("tensor_parallel", tensor_parallel), ("pipeline", pipeline)):
        if parts > 1:
            yield f"distributed.{key} is not for preference pairs: use distributed.engine fsdp"
    if engine.updates_itself:
        yield "distributed.engine deepspeed is not for preference pairs: use ddp or fsdp"
    if recipe.efficiency.loss_chunk_tokens:
        yield (
            "efficiency.loss_chunk_tokens computes the cross-entropy, and preference pairs need "
            "each answer's log-probability: set it to 0 (a smaller batch.micro_batch_size frees "
            "memory too)"
        )
    if recipe.loss.z_loss_coef:
        yield (
            "loss.z_loss_coef belongs to the cross-entropy, which preference pairs have not: set "
            "it to 0"
        )
    if recipe.model.expert_count:
        yield (
            f"preference pairs are not for experts ({recipe.model.model_type}), whose balancing "
            "loss is not part of theirs: use a dense model"
        )


def _conflicts_with_deepspeed(recipe: ResolvedRecipe) -> Iterator[str]:
    """Further conflicts with the engine deepspeed."""
    config = recipe.efficiency
    if config.precision in ("bf16_params", "fp8"):
        yield (
            f"efficiency.precision {config.precision} is not for distributed.engine deepspeed: use "
            "bf16 or fp16, with fp32 parameters"
        )
    if config.compile:
        yield (
            "efficiency.compile does not see through distributed.engine deepspeed: set it to "
            "false, or distributed.engine to fsdp"
        )
    if config.activation_offload:
        yield (
            "efficiency.activation_offload is not for distributed.engine deepspeed: use "
            "activation_checkpointing full"
        )
    if recipe.optimizer.clip_after_warmup:
        yield (
            "optimizer.clip_after_warmup is not for distributed.engine deepspeed, which clips in "
            "all steps: set it to false, or distributed.engine to fsdp"
        )
    if not OPTIMIZERS[recipe.optimizer.name].elementwise:
        yield (
            f"optimizer.name {recipe.optimizer.name} needs whole parameters, and "
            "distributed.engine deepspeed cuts its state: use "
            f"{elementwise_optimizers()}, or distributed.engine ddp"
        )
    if recipe.lora is not None:
        yield "lora is not for distributed.engine deepspeed: set it to ddp or fsdp"


def _conflicts_of_average(recipe: ResolvedRecipe) -> Iterator[str]:
    if recipe.checkpoint.average_last == 0:
        return
    if recipe.checkpoint.sharded:
        yield (
            "checkpoint.average_last reads whole checkpoints, and checkpoint.sharded writes "
            "shards: leave one of them out"
        )
    if recipe.lora is not None:
        yield "checkpoint.average_last is not for lora: set it to 0"


def _conflicts_of_sharded(
    recipe: ResolvedRecipe, engine: type[Engine], tensor_parallel: int
) -> Iterator[str]:
    if not recipe.checkpoint.sharded:
        return
    if not engine.keeps_shards:
        yield (
            "checkpoint.sharded has each process write its shards, and distributed.engine "
            f"{engine.name} cuts no model: leave it out, or set distributed.engine to fsdp"
        )
    if tensor_parallel > 1:
        yield (
            "checkpoint.sharded knows nothing of distributed.tensor_parallel's shards: leave one "
            "of them out"
        )
    if recipe.lora is not None:
        yield "checkpoint.sharded is for large checkpoints, and lora's are small: leave it out"


def _conflicts_in_parts(recipe: ResolvedRecipe, key: str) -> Iterator[str]:
    """Conflicts of tensor parallelism or of a pipeline.

    Args:
        recipe: recipe of the run.
        key: "distributed.tensor_parallel" or "distributed.pipeline", for the messages.
    """
    config = recipe.efficiency
    if config.precision in ("bf16_params", "fp8"):
        yield f"efficiency.precision {config.precision} is not for {key}: use bf16"
    spec = OPTIMIZERS[recipe.optimizer.name]
    if not (spec.elementwise or spec.gathers):
        yield f"optimizer.name {recipe.optimizer.name} is not for {key}: use {sharded_optimizers()}"
    if config.optimizer_in_backward:
        yield (
            f"efficiency.optimizer_in_backward is not for {key}: switch it off (distributed.engine "
            "fsdp frees more memory than it does)"
        )
    if recipe.lora is not None:
        yield f"lora is not for {key}: leave one out (distributed.engine fsdp works with lora)"
    if config.compile:
        yield f"efficiency.compile is not for {key}: set it to false"
    if config.bf16_residual and key == "distributed.pipeline":
        yield f"efficiency.bf16_residual is not for {key}: set it to false"
    if config.activation_offload:
        yield (
            f"efficiency.activation_offload is not for {key}: use "
            "efficiency.activation_checkpointing full"
        )
    if config.loss_chunk_tokens:
        yield f"efficiency.loss_chunk_tokens is not for {key}: set it to 0"


def _conflicts_in_backward(recipe: ResolvedRecipe, seq_len: int) -> Iterator[str]:
    """Conflicts with `efficiency.optimizer_in_backward`."""
    accumulation = recipe.batch.accumulation(seq_len)
    if recipe.batch.ramp_start_tokens is not None:
        yield (
            "efficiency.optimizer_in_backward updates after every backward pass, and "
            "batch.ramp_start_tokens raises the number of passes a step: leave one of them out"
        )
    elif accumulation > 1:
        change = f"batch.micro_batch_size to {recipe.batch.rows * accumulation}"
        if recipe.batch.gradient_accumulation_steps is not None:
            change += " and batch.gradient_accumulation_steps to 1"
        yield (
            "efficiency.optimizer_in_backward updates after every backward pass, so it can't "
            f"accumulate gradients over {accumulation} of them: set {change} (with "
            "activation_checkpointing full if that doesn't fit), or switch it off"
        )
    if recipe.optimizer.max_grad_norm > 0:
        yield (
            "efficiency.optimizer_in_backward updates before the gradient's norm is known, so it "
            "can't clip: set optimizer.max_grad_norm to 0, or switch it off"
        )
    if recipe.efficiency.precision == "fp16":
        yield (
            "efficiency.optimizer_in_backward updates before it is known whether fp16 gradients "
            "overflowed: set efficiency.precision to bf16, or switch it off"
        )


def _missing_hardware(recipe: ResolvedRecipe, hardware: Hardware) -> Iterator[str]:
    """Methods that this hardware does not support."""
    config, device = recipe.efficiency, hardware.device.type
    if unable := why_unable(recipe.model, config.attention, device):
        yield f"efficiency.attention {config.attention} {unable}"
    elif device != "cuda" and config.attention in GPU_BACKENDS:
        able = able_backends(recipe.model) or ("sdpa", "flash", "math", "blockwise", "plain")
        names = [name for name in able if name not in GPU_BACKENDS]
        yield (
            f"efficiency.attention {config.attention} needs a CUDA GPU, and this is "
            f"{hardware.name}: use auto, {', '.join(names[:-1])} or {names[-1]}"
        )
    if config.attention == "flash" and device not in ("cpu", "cuda"):
        yield (
            f"efficiency.attention flash is for CPUs and CUDA GPUs, and the device is {device}: "
            "use auto, sdpa, math, blockwise or plain"
        )
    fast_only = config.attention in ("flash", "cudnn") and device == "cuda"
    if fast_only and (recipe.data.document_masking or _window(recipe.model) < recipe.data.seq_len):
        yield (
            f"efficiency.attention {config.attention} takes no mask on a GPU, which documents and "
            "sliding windows need: set efficiency.attention to auto, flex or efficient"
        )
    if hardware.capability is not None:
        yield from _missing_units(recipe, hardware.name, hardware.capability)
    if fast_only and config.precision in ("fp32", "tf32"):
        yield (
            f"efficiency.attention {config.attention} computes in bf16 or fp16 on a GPU: set "
            "efficiency.precision to bf16, or efficiency.attention to efficient"
        )
    if recipe.run.deterministic and config.attention == "cudnn" and device == "cuda":
        yield (
            "efficiency.attention cudnn adds up in no fixed order: set it to flash, or "
            "run.deterministic to false"
        )
    if unrecordable := why_unrecordable(recipe.model, config, hardware):
        yield unrecordable
    if recipe.data.pin_memory and device != "cuda":
        yield "data.pin_memory is for copies to a CUDA GPU: leave it out"


def _missing_units(recipe: ResolvedRecipe, name: str, capability: tuple[int, int]) -> Iterator[str]:
    """Methods that a GPU of this name and compute capability does not support."""
    config = recipe.efficiency
    if config.precision == "fp8" and capability < FP8_CAPABILITY:
        yield (
            "efficiency.precision fp8 needs a GPU with fp8 matrix units (compute capability 8.9 "
            f"or higher), and this is {name}: use bf16"
        )
    compiles = config.compile and config.compile_backend == "inductor"
    if compiles and capability < TRITON_CAPABILITY:
        yield (
            "efficiency.compile needs triton, and so a GPU of compute capability 7.0 or higher "
            f"(Volta and later), and this is {name}: set efficiency.compile to false"
        )
    if config.attention in ("flash", "cudnn") and capability < (8, 0):
        yield (
            f"efficiency.attention {config.attention} needs a GPU of compute capability 8.0 or "
            f"higher (Ampere and later), and this is {name}: use auto, sdpa or efficient"
        )


def _window(model: ModelConfig) -> float:
    """The shortest sliding window of the model's layers, in tokens; infinity if none has one."""
    windows = (model.attention_spec(layer).window for layer in range(model.num_hidden_layers))
    return min((window for window in windows if window is not None), default=float("inf"))
