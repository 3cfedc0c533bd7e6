"""Detect conflicts between the methods of a recipe.

A recipe is rejected before the run starts if it combines methods that never work together, or that
do not work on the given hardware. Each message suggests the nearest working combination.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.methods.attention import GPU_BACKENDS, able_backends, why_unable
from firstlight.methods.compilation import TRITON_CAPABILITY, why_unrecordable
from firstlight.methods.precision import FP8_CAPABILITY, NO_FP8_LAYERS, fp8_layers
from firstlight.models import FAMILIES, ModelConfig
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
    """Raise an error if the methods of a recipe can't be combined on the given hardware.

    Args:
        recipe: recipe of the run.
        hardware: hardware of the run.
        engine: name of the data-parallel engine: "none", "ddp", "fsdp" or "deepspeed".
        tensor_parallel: number of processes that share the computation of each layer.
        pipeline: number of pipeline stages. Each stage is a process that computes some of the
            layers.

    Raises:
        ConfigError: the recipe has conflicts. The message lists every conflict along with the
            nearest working combination.
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
        *_preference_conflicts(recipe, spec, tensor_parallel, pipeline),
        *_sharded_checkpoint_conflicts(recipe, spec, tensor_parallel),
        *_average_conflicts(recipe),
        *(_conflicts_with_deepspeed(recipe) if spec.updates_itself else ()),
        *(unshardable(recipe.model, tensor_parallel) if tensor_parallel > 1 else ()),
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def ineffective(recipe: ResolvedRecipe, hardware: Hardware) -> Iterator[str]:
    """Yield a warning for each setting that has no effect because of the hardware or other settings
    in the recipe."""
    yield from _ineffective_optimizer_keys(recipe)
    config, device = recipe.efficiency, hardware.device.type
    if config.matmul_precision is not None and config.precision not in ("fp32", "tf32"):
        yield (
            "efficiency.matmul_precision applies only to products of fp32 tensors, not to "
            f"efficiency.precision {config.precision}: set precision to fp32"
        )
    if config.bf16_residual and config.precision == "bf16_params":
        yield (
            "efficiency.bf16_residual has no effect with efficiency.precision bf16_params, whose "
            "activations are all bf16"
        )
    if config.precision == "fp8" and not config.compile:
        yield (
            "efficiency.precision fp8 is slower than bf16 without torch.compile, which fuses its "
            "casts: set efficiency.compile to true"
        )
    if device == "cuda":
        return
    if config.precision == "tf32":
        yield f"efficiency.precision tf32 is the same as fp32 on a {device} device"
    if config.activation_offload and device == "cpu":
        yield (
            "efficiency.activation_offload has no effect on a CPU, where activations are "
            "already in the CPU's memory"
        )
    if config.empty_cache_steps:
        yield f"efficiency.empty_cache_steps has no effect on a {device} device"
    if config.compile and config.compile_mode != "default":
        yield f"efficiency.compile_mode {config.compile_mode} has an effect on GPUs only"
    if config.compile and config.compile_backend == "cudagraphs":
        yield (
            "efficiency.compile_backend cudagraphs needs a GPU, and equals aot_eager on a "
            f"{device} device"
        )


def _ineffective_optimizer_keys(recipe: ResolvedRecipe) -> Iterator[str]:
    """Yield a warning for each setting of the `optimizer` section that has no effect."""
    config, name = recipe.optimizer, recipe.optimizer.name
    roles = {"embedding": "embedding", "head": "head", "vector": "norm or bias"}
    if recipe.lora is None or recipe.lora.modules_to_save or recipe.lora.trainable_token_indices:
        roles.clear()
    elif recipe.lora.dora:
        # Include the magnitudes of DoRA, which are trainable vectors.
        del roles["vector"]
    for key, field in type(config).model_fields.items():
        if getattr(config, key) == field.default:
            continue
        role, _, setting = key.partition("_")
        if role in roles:
            yield f"optimizer.{key} has no effect with lora, which trains no {roles[role]}"
        elif role == "head" and recipe.model.tie_word_embeddings:
            yield (
                f"optimizer.{key} has no effect with model.tie_word_embeddings true: a tied head "
                f"uses optimizer.embedding_{setting}"
            )
        elif key.endswith("betas") and "betas" not in OPTIMIZERS[name].options:
            yield (
                f"optimizer.{key} has no effect with optimizer.name {name}, which does not use "
                "betas"
            )
        elif role == "muon" and name != "muon":
            yield f"optimizer.{key} has no effect with optimizer.name {name}: it applies to muon"


def _conflicts(recipe: ResolvedRecipe) -> Iterator[str]:
    """Yield the conflicts that do not depend on the engine or the hardware."""
    config, model = recipe.efficiency, recipe.model
    if config.optimizer_in_backward:
        yield from _conflicts_in_backward(recipe, recipe.data.seq_len)
    if config.activation_checkpointing == "budget" and not config.compile:
        yield (
            "efficiency.activation_checkpointing budget requires torch.compile: set "
            "efficiency.compile to true, or activation_checkpointing to selective"
        )
    if not config.compile and (config.compile_regional or config.compile_mode != "default"):
        yield (
            "efficiency.compile_regional and compile_mode require compilation: set "
            "efficiency.compile to true, or remove them"
        )
    if config.compile_backend != "inductor" and config.compile_mode != "default":
        yield (
            f"efficiency.compile_mode {config.compile_mode} requires the inductor backend: set "
            "efficiency.compile_backend to inductor, or compile_mode to default"
        )
    if config.precision == "fp8" and not fp8_layers(meta_model(model)):
        yield NO_FP8_LAYERS
    if config.bf16_residual and config.precision in ("fp32", "tf32", "fp16"):
        yield (
            "efficiency.bf16_residual requires precision bf16 or fp8, but efficiency.precision is "
            f"{config.precision}: set precision to bf16, or bf16_residual to false"
        )
    if config.attention in ("flex", "flash") and model.attention_spec(0).dropout:
        yield (
            f"efficiency.attention {config.attention} does not support dropout: set "
            "model.attn_pdrop to 0, or efficiency.attention to auto"
        )


def _conflicts_with(engine: type[Engine], recipe: ResolvedRecipe) -> Iterator[str]:
    """Yield the conflicts between the recipe's methods and a data-parallel engine. Most of them are
    caused by sharding.
    """
    if engine is Engine:  # `Engine` itself is the engine for a single process.
        return
    if engine.shards_state and recipe.model.family.has_buffers:
        yield (
            f"distributed.engine {engine.name} saves only parameters, but the routers of "
            f"{recipe.model.model_type} models have a bias that is not a parameter: use "
            "distributed.engine ddp"
        )
    if recipe.efficiency.optimizer_in_backward:
        yield (
            "efficiency.optimizer_in_backward updates before the processes' gradients are summed: "
            "set it to false (distributed.engine fsdp saves more memory)"
        )
    if not engine.keeps_shards:
        return
    if recipe.efficiency.precision in ("bf16_params", "fp8"):
        yield (
            f"distributed.engine fsdp does not support efficiency.precision "
            f"{recipe.efficiency.precision}: use bf16, which keeps fp32 shards and gathers bf16 "
            "layers"
        )
    spec = OPTIMIZERS[recipe.optimizer.name]
    if not (spec.elementwise or spec.gathers):
        yield (
            f"optimizer.name {recipe.optimizer.name} needs full parameters, but "
            "distributed.engine fsdp shards them: use "
            f"{sharded_optimizers()}, or distributed.engine ddp"
        )
    if spec.gathers and recipe.distributed.offload == "cpu":
        yield (
            f"optimizer.name {recipe.optimizer.name} computes matrix products in the update, which "
            "distributed.offload cpu would run on the CPU: set distributed.offload to none, or "
            "optimizer.name to adamw"
        )
    if recipe.efficiency.activation_offload:
        yield (
            "distributed.engine fsdp does not support efficiency.activation_offload: use "
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
            "shard: set it to none, or use distributed.engine ddp"
        )
    keys = ("modules_to_save", "trainable_token_indices")
    changes = [f"lora.{key}" for key in keys if getattr(lora, key)]
    embedding = FAMILIES[recipe.model.model_type].model.embedding_name.rpartition(".")[2]
    if any(target.rpartition(".")[2] == embedding for target in lora.targets):
        changes.append("an embedding in lora.targets")
    for change in changes:
        yield f"distributed.engine fsdp does not support {change}: use distributed.engine ddp"


def _preference_conflicts(
    recipe: ResolvedRecipe, engine: type[Engine], tensor_parallel: int, pipeline: int
) -> Iterator[str]:
    """Yield the conflicts between the recipe's methods and training on preference pairs. They arise
    because the loss of a pair depends on the log-probabilities of complete answers.
    """
    if recipe.preference is None:
        return
    for key, parts in (("tensor_parallel", tensor_parallel), ("pipeline", pipeline)):
        if parts > 1:
            yield (
                f"distributed.{key} does not support preference pairs: use distributed.engine fsdp"
            )
    if engine.updates_itself:
        yield "distributed.engine deepspeed does not support preference pairs: use ddp or fsdp"
    if recipe.efficiency.loss_chunk_tokens:
        yield (
            "efficiency.loss_chunk_tokens computes the cross-entropy, but preference pairs need "
            "each answer's log-probability: set it to 0 (a smaller batch.micro_batch_size frees "
            "memory too)"
        )
    if recipe.loss.z_loss_coef:
        yield (
            "loss.z_loss_coef applies to cross-entropy only, not to preference pairs: set it to 0"
        )
    if recipe.model.expert_count:
        yield (
            f"preference pairs do not support experts ({recipe.model.model_type}), whose balancing "
            "loss is not part of the preference loss: use a dense model"
        )


def _conflicts_with_deepspeed(recipe: ResolvedRecipe) -> Iterator[str]:
    """Yield the conflicts that occur only with the deepspeed engine."""
    config = recipe.efficiency
    if config.precision in ("bf16_params", "fp8"):
        yield (
            "distributed.engine deepspeed does not support efficiency.precision "
            f"{config.precision}: use bf16 or fp16, with fp32 parameters"
        )
    if config.compile:
        yield (
            "distributed.engine deepspeed does not support efficiency.compile: set it to "
            "false, or distributed.engine to fsdp"
        )
    if config.activation_offload:
        yield (
            "distributed.engine deepspeed does not support efficiency.activation_offload: use "
            "activation_checkpointing full"
        )
    if recipe.optimizer.clip_after_warmup:
        yield (
            "optimizer.clip_after_warmup does not work with distributed.engine deepspeed, which "
            "clips in all steps: set it to false, or distributed.engine to fsdp"
        )
    if not OPTIMIZERS[recipe.optimizer.name].elementwise:
        yield (
            f"optimizer.name {recipe.optimizer.name} needs full parameters, but "
            "distributed.engine deepspeed shards its state: use "
            f"{elementwise_optimizers()}, or distributed.engine ddp"
        )
    if recipe.lora is not None:
        yield "distributed.engine deepspeed does not support lora: set the engine to ddp or fsdp"


def _average_conflicts(recipe: ResolvedRecipe) -> Iterator[str]:
    if recipe.checkpoint.average_last == 0:
        return
    if recipe.checkpoint.sharded:
        yield (
            "checkpoint.average_last reads full checkpoints, but checkpoint.sharded writes "
            "shards: disable one of them"
        )
    if recipe.lora is not None:
        yield "checkpoint.average_last does not support lora: set it to 0"


def _sharded_checkpoint_conflicts(
    recipe: ResolvedRecipe, engine: type[Engine], tensor_parallel: int
) -> Iterator[str]:
    if not recipe.checkpoint.sharded:
        return
    if not engine.keeps_shards:
        yield (
            "checkpoint.sharded writes each process's shards, but distributed.engine "
            f"{engine.name} does not shard the model: disable it, or set distributed.engine to fsdp"
        )
    if tensor_parallel > 1:
        yield (
            "checkpoint.sharded does not support distributed.tensor_parallel: disable one of them"
        )
    if recipe.lora is not None:
        yield "checkpoint.sharded does not support lora, whose checkpoints are small: disable it"


def _conflicts_in_parts(recipe: ResolvedRecipe, key: str) -> Iterator[str]:
    """Yield the conflicts between the recipe's methods and tensor or pipeline parallelism.

    Args:
        recipe: recipe of the run.
        key: key that is named in the messages, either "distributed.tensor_parallel" or
            "distributed.pipeline".
    """
    config = recipe.efficiency
    if config.precision in ("bf16_params", "fp8"):
        yield f"{key} does not support efficiency.precision {config.precision}: use bf16"
    spec = OPTIMIZERS[recipe.optimizer.name]
    if not (spec.elementwise or spec.gathers):
        yield (
            f"{key} does not support optimizer.name {recipe.optimizer.name}: use "
            f"{sharded_optimizers()}"
        )
    if config.optimizer_in_backward:
        yield (
            f"{key} does not support efficiency.optimizer_in_backward: set it to false "
            "(distributed.engine fsdp saves more memory)"
        )
    if recipe.lora is not None:
        yield f"{key} does not support lora: remove one (distributed.engine fsdp supports lora)"
    if config.compile:
        yield f"{key} does not support efficiency.compile: set it to false"
    if config.bf16_residual and key == "distributed.pipeline":
        yield f"{key} does not support efficiency.bf16_residual: set it to false"
    if config.activation_offload:
        yield (
            f"{key} does not support efficiency.activation_offload: use "
            "efficiency.activation_checkpointing full"
        )
    if config.loss_chunk_tokens:
        yield f"{key} does not support efficiency.loss_chunk_tokens: set it to 0"


def _conflicts_in_backward(recipe: ResolvedRecipe, seq_len: int) -> Iterator[str]:
    """Yield the conflicts between `efficiency.optimizer_in_backward` and other settings."""
    accumulation = recipe.batch.accumulation(seq_len)
    if recipe.batch.ramp_start_tokens is not None:
        yield (
            "efficiency.optimizer_in_backward updates after every backward pass, but "
            "batch.ramp_start_tokens raises the number of passes per step: disable one of them"
        )
    elif accumulation > 1:
        change = f"batch.micro_batch_size to {recipe.batch.rows * accumulation}"
        if recipe.batch.gradient_accumulation_steps is not None:
            change += " and batch.gradient_accumulation_steps to 1"
        yield (
            "efficiency.optimizer_in_backward updates after every backward pass, so it can't "
            f"accumulate gradients over {accumulation} passes: set {change} (with "
            "activation_checkpointing full if that does not fit in memory), or set "
            "optimizer_in_backward to false"
        )
    if recipe.optimizer.max_grad_norm > 0:
        yield (
            "efficiency.optimizer_in_backward updates before the gradient norm is known, so it "
            "can't clip: set optimizer.max_grad_norm to 0, or optimizer_in_backward to false"
        )
    if recipe.efficiency.precision == "fp16":
        yield (
            "efficiency.optimizer_in_backward updates before it is known whether fp16 gradients "
            "overflowed: set efficiency.precision to bf16, or optimizer_in_backward to false"
        )


def _missing_hardware(recipe: ResolvedRecipe, hardware: Hardware) -> Iterator[str]:
    """Yield a message for each method that this hardware does not support."""
    config, device = recipe.efficiency, hardware.device.type
    if unable := why_unable(recipe.model, config.attention, device):
        yield f"efficiency.attention {config.attention} {unable}"
    elif device != "cuda" and config.attention in GPU_BACKENDS:
        able = able_backends(recipe.model) or ("sdpa", "flash", "math", "blockwise", "plain")
        names = [name for name in able if name not in GPU_BACKENDS]
        yield (
            f"efficiency.attention {config.attention} needs a CUDA GPU, but this is "
            f"{hardware.name}: use auto, {', '.join(names[:-1])} or {names[-1]}"
        )
    if config.attention == "flash" and device not in ("cpu", "cuda"):
        yield (
            f"efficiency.attention flash needs a CPU or a CUDA GPU, but the device is {device}: "
            "use auto, sdpa, math, blockwise or plain"
        )
    fast_only = config.attention in ("flash", "cudnn") and device == "cuda"
    if fast_only and (recipe.data.document_masking or _window(recipe.model) < recipe.data.seq_len):
        yield (
            f"efficiency.attention {config.attention} does not support masks on a GPU, but "
            "documents and sliding windows need them: set efficiency.attention to auto, flex or "
            "efficient"
        )
    if hardware.capability is not None:
        yield from _missing_units(recipe, hardware.name, hardware.capability)
    if fast_only and config.precision in ("fp32", "tf32"):
        yield (
            f"efficiency.attention {config.attention} requires bf16 or fp16 on a GPU: set "
            "efficiency.precision to bf16, or efficiency.attention to efficient"
        )
    if recipe.run.deterministic and config.attention == "cudnn" and device == "cuda":
        yield (
            "efficiency.attention cudnn is not deterministic: set it to flash, or "
            "run.deterministic to false"
        )
    if unrecordable := why_unrecordable(recipe.model, config, hardware):
        yield unrecordable
    if recipe.data.pin_memory and device != "cuda":
        yield "data.pin_memory requires a CUDA GPU: remove it"


def _missing_units(recipe: ResolvedRecipe, name: str, capability: tuple[int, int]) -> Iterator[str]:
    """Yield a message for each method that a GPU does not support.

    Args:
        recipe: recipe of the run.
        name: name of the GPU, for the messages.
        capability: compute capability of the GPU.
    """
    config = recipe.efficiency
    if config.precision == "fp8" and capability < FP8_CAPABILITY:
        yield (
            "efficiency.precision fp8 needs a GPU with fp8 matrix units (compute capability 8.9 "
            f"or higher), but this is {name}: use bf16"
        )
    compiles = config.compile and config.compile_backend == "inductor"
    if compiles and capability < TRITON_CAPABILITY:
        yield (
            "efficiency.compile needs triton, and therefore a GPU of compute capability 7.0 or "
            f"higher (Volta and later), but this is {name}: set efficiency.compile to false"
        )
    if config.attention in ("flash", "cudnn") and capability < (8, 0):
        yield (
            f"efficiency.attention {config.attention} needs a GPU of compute capability 8.0 or "
            f"higher (Ampere and later), but this is {name}: use auto, sdpa or efficient"
        )


def _window(model: ModelConfig) -> float:
    """Return the length of the shortest sliding window in the model's layers, in tokens, or
    infinity if no layer has a window."""
    windows = (model.attention_spec(layer).window for layer in range(model.num_hidden_layers))
    return min((window for window in windows if window is not None), default=float("inf"))
