"""Read a DeepSpeed configuration file. Keys that have a counterpart in the recipe are converted,
and other supported keys are passed on to DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError, InputError, nearest
from firstlight.files.atomic import read_json
from firstlight.optim.config import OPTIMIZERS, elementwise_optimizers

#: Keys of a DeepSpeed file, mapped to the corresponding keys of a recipe.
_SAME = {
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "gradient_clipping": "optimizer.max_grad_norm",
    "zero_optimization.stage": "distributed.zero_stage",
    "zero_optimization.offload_optimizer.nvme_path": "distributed.nvme_path",
    "zero_optimization.offload_optimizer.device": "distributed.offload",
    "optimizer.params.lr": "optimizer.learning_rate",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.momentum": "optimizer.sgd_momentum",
}

#: DeepSpeed's `optimizer.type` in lower case, mapped to the recipe's `optimizer.name`.
_OPTIMIZERS = {"adam": "adamw"} | {name: name for name, o in OPTIMIZERS.items() if o.elementwise}

#: Keys without a counterpart in a recipe that are passed on to DeepSpeed unchanged.
_HANDED_ON = (
    "communication_data_type",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.allgather_partitions",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.reduce_scatter",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.max_in_cpu",
    "zero_optimization.offload_param.pin_memory",
)

#: Common keys to ignore. They configure parts of DeepSpeed that firstlight does not use, because it
#: has its own training loop, messages and checkpoints, always uses torch's optimizers, and keeps
#: parameters in fp32.
_WITHOUT_EFFECT = (
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "optimizer.params.adam_w_mode",
    "optimizer.params.torch_adam",
)

#: Accepted keys of the `fp16` section. Only `enabled` has an effect, because firstlight scales the
#: loss itself. Its scale starts at 2^16, is halved after an overflow, and is doubled after 2,000
#: steps without an overflow.
_FP16 = {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window"}
_FP16 |= {"hysteresis", "min_loss_scale", "consecutive_hysteresis"}


@dataclass(frozen=True)
class DeepSpeedFile:
    """The contents of a DeepSpeed configuration file.

    Attributes:
        recipe: recipe keys such as "optimizer.learning_rate". Each is mapped to the name of the
            corresponding key in the file and that key's value.
        handed_on: nested settings to pass to `deepspeed.initialize` together with the engine's own
            settings.
        train_batch_size: number of sequences per step on all processes; None if the file does not
            specify it.
    """

    recipe: dict[str, tuple[str, Any]] = field(default_factory=dict)
    handed_on: dict[str, Any] = field(default_factory=dict)
    train_batch_size: int | None = None


def read_deepspeed_file(path: str | Path) -> DeepSpeedFile:
    """Read a DeepSpeed configuration file. Keys with the value "auto" or null are treated as unset.

    Raises:
        ConfigError: the file can't be read or is not a JSON object, or a key or value is not
            supported. The message names that key.
    """
    try:
        values = read_json(Path(path).expanduser())
    except InputError as error:
        raise ConfigError(f"distributed.deepspeed_config: {error}") from error
    except OSError as error:
        raise ConfigError(f"distributed.deepspeed_config {path}: {error.strerror}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"distributed.deepspeed_config: {path} is not a JSON object")
    try:
        return _read(dict(_leaves(values)))
    except ConfigError as error:
        raise ConfigError(f"distributed.deepspeed_config: {path}: {error}") from error


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each key in nested sections, except unset keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None and value != "auto":
            yield f"{prefix}{key}", value


def _read(leaves: dict[str, Any]) -> DeepSpeedFile:
    """Convert the values in `leaves`, which maps the dotted name of each key to its value.
    Supported keys are removed from `leaves`, and an error is raised if any key remains.
    """
    found = DeepSpeedFile(train_batch_size=_count(leaves.pop("train_batch_size", None)))
    _require_zero(leaves)
    for reader in (_precision, _optimizer):
        found.recipe.update(reader(leaves))
    for name in _SAME.keys() & leaves.keys():
        found.recipe[_SAME[name]] = (name, leaves.pop(name))
    for name in _HANDED_ON:
        if name in leaves:
            *sections, key = name.split(".")
            place = found.handed_on
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = leaves.pop(name)
    for name in _WITHOUT_EFFECT:
        leaves.pop(name, None)
    if leaves:
        name = min(leaves)
        raise ConfigError(_advice(name))
    return found


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"train_batch_size is {value!r}: it must be a whole number of at least 1")
    return value


def _precision(leaves: dict[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield the entry of `DeepSpeedFile.recipe` that corresponds to the fp16 or bf16 section, if
    one of these sections is enabled.
    """
    own = {name: leaves.pop(name) for name in list(leaves) if name.split(".")[0] in _NARROW}
    enabled = [name for name in _NARROW if own.get(f"{name}.enabled", False) is True]
    if len(enabled) > 1:
        raise ConfigError("fp16.enabled and bf16.enabled are both true: remove one of them")
    odd = [n for n in own if n.split(".")[1] not in (_FP16 if n[:4] == "fp16" else {"enabled"})]
    if odd:
        raise ConfigError(_advice(odd[0]))
    if own.get("fp16.loss_scale", 0) != 0 and enabled == ["fp16"]:
        raise ConfigError(
            f"fp16.loss_scale is {own['fp16.loss_scale']}, but firstlight's loss scale is dynamic: "
            "set it to 0, or remove it"
        )
    for name in enabled:
        yield "efficiency.precision", (f"{name}.enabled", name)


#: Sections of the file that enable a precision. Their names are also valid values of the recipe's
#: `efficiency.precision`.
_NARROW = ("fp16", "bf16")


def _optimizer(leaves: dict[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield the entry of `DeepSpeedFile.recipe` for `optimizer.type`, if the file sets that key."""
    kind = leaves.pop("optimizer.type", None)
    if kind is None:
        return
    name = _OPTIMIZERS.get(str(kind).lower())
    plain_adam = str(kind).lower() == "adam" and leaves.get("optimizer.params.adam_w_mode") is False
    if name is None or plain_adam:
        raise ConfigError(
            f"optimizer.type is {kind}{' without adam_w_mode' if plain_adam else ''}, but "
            f"distributed.engine deepspeed supports {elementwise_optimizers()}: set one of them"
        )
    yield "optimizer.name", ("optimizer.type", name)


def _require_zero(leaves: dict[str, Any]) -> None:
    """Reject combinations of `zero_optimization` keys that the engine does not support.

    A recipe has no key for offloading parameters. They are offloaded if and only if the stage is 3
    and optimizer state is offloaded. The file's `offload_param` keys must be consistent with this
    rule.
    """
    name = "zero_optimization.offload_param.device"
    parameters = leaves.pop(name, "none")
    optimizer = leaves.get("zero_optimization.offload_optimizer.device", "none")
    if parameters not in ("none", "cpu"):
        raise ConfigError(
            f"{name} is {parameters}, but parameters can be offloaded only to cpu: set it to cpu"
        )
    stage = leaves.get("zero_optimization.stage")
    if parameters == "cpu" and (optimizer == "none" or stage != 3):
        raise ConfigError(
            f"{name} is cpu, which needs zero_optimization.stage 3 and "
            "offload_optimizer.device cpu or nvme: set both, or remove it"
        )
    if stage == 0:
        raise ConfigError(
            "zero_optimization.stage is 0, which corresponds to distributed.engine ddp (none for "
            "one process): remove distributed.engine and distributed.deepspeed_config"
        )
    leaves.pop("zero_optimization.offload_param.nvme_path", None)


_INSTEAD: dict[str, str] = {
    "scheduler": "set the recipe's schedule section instead",
    "activation_checkpointing": "set efficiency.activation_checkpointing instead",
    "data_types": "set efficiency.precision instead",
    "amp": "set efficiency.precision instead",
    "checkpoint": "set the recipe's checkpoint section instead",
    "tensorboard": "set run.trackers to [tensorboard] instead",
    "wandb": "set run.trackers to [wandb] instead",
}


def _advice(name: str) -> str:
    """Return the error message for an unsupported key. The message names the recipe key to set
    instead, or a supported key with a similar name.
    """
    section = name.split(".")[0]
    known = [*_SAME, *_HANDED_ON, *_WITHOUT_EFFECT, "train_batch_size", "optimizer.type"]
    instead = _INSTEAD.get(section)
    if instead is None:
        return f"{name} is not supported{nearest(name, known)}: remove it"
    return f"{name} is not supported: remove it, and {instead}"
