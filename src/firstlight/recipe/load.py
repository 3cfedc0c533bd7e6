"""Reads recipes from YAML files and options `--section.key value`, and reports mistakes in them.

Precedence: defaults < file < `--section.key value`. All mistakes are reported at once, each with
the nearest existing name.
"""

from __future__ import annotations

import copy
import json
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import yaml
from pydantic import BaseModel, ValidationError

from firstlight.errors import ConfigError, InputError, nearest
from firstlight.files.atomic import read_file
from firstlight.models import DEFAULT_FAMILY, FAMILIES
from firstlight.models.family import not_a_key
from firstlight.recipe.schema import Recipe, ResolvedRecipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def override_pairs(
    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]],
) -> list[tuple[str, str]]:
    """Overrides in the form of command line options: pairs (`section.key`, value as YAML text).

    Args:
        overrides: values of any type, by `section.key` or as pairs.

    Raises:
        ConfigError: a value has a type that a recipe can't hold, such as an array.
    """
    found = []
    for name, value in overrides.items() if isinstance(overrides, Mapping) else overrides:
        try:
            text = str(value) if isinstance(value, str | Path) else json.dumps(value)
        except TypeError as error:
            raise ConfigError(
                f"override {name} is {value!r:.80}, which no recipe can hold: give a number, text, "
                "true, false, null, or a list or dict of them"
            ) from error
        found.append((name, text))
    return found


def load_recipe(
    path: str | Path, overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
) -> Recipe:
    """Read a recipe file.

    Args:
        path: path of the YAML file.
        overrides: values by `section.key`, or pairs (`section.key`, value), that replace those of
            the file. A string is parsed as YAML: "3e-4" is a number.

    Raises:
        ConfigError: the file is missing or not YAML, or keys or values are invalid; one message
            has all mistakes.
    """
    name, path = str(path), Path(path)
    if not path.exists():
        siblings = [str(p) for p in path.parent.glob("*.y*ml") if _is_recipe(p)]
        raise ConfigError(f"recipe {name} does not exist{nearest(str(path), siblings)}")
    try:
        values = parse_yaml(read_file(path, MAX_RECIPE_BYTES))
    except InputError as error:
        raise ConfigError(f"recipe {error}") from error
    except ValueError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {path} must consist of sections such as `data:` and `model:`")
    recipe = parse_recipe(values, str(path), override_pairs(overrides))
    if recipe.run.dir is None:
        recipe = recipe.with_keys("run", dir=str(Path("runs") / path.stem))
    return recipe


def _is_recipe(path: Path) -> bool:
    """True if a YAML file has a section of a recipe."""
    try:
        values = parse_yaml(read_file(path, MAX_RECIPE_BYTES))
    except (OSError, ValueError, InputError):
        return False
    return isinstance(values, dict) and not values.keys().isdisjoint(Recipe.model_fields)


#: Largest number of mistakes in one message.
_MAX_PROBLEMS = 20


def parse_recipe(
    values: Mapping[str, Any],
    where: str = "recipe",
    overrides: Sequence[tuple[str, str]] = (),
) -> Recipe:
    """Validate nested values as a recipe.

    Args:
        values: sections, keys and values.
        where: name of the recipe, for messages.
        overrides: pairs (`section.key`, value as YAML text); see `override_pairs`.

    Raises:
        ConfigError: keys or values are invalid; one message has all mistakes.
    """
    if overrides:
        changed = copy.deepcopy(dict(values))
        # A given size replaces one that firstlight has chosen, and is kept.
        if any(name == "batch.micro_batch_size" for name, _ in overrides):
            _override(changed, "batch.divide_micro_batch", "false")
        for name, text in overrides:
            _override(changed, name, text)
        values = changed
    return _parsed(Recipe, values, where)


def changed_recipe(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's values with some of them changed.

    Args:
        values: nested values of a recipe.
        changes: values by `section.key`, or whole sections.
    """
    result = dict(values)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        result[section] = {**result.get(section, {}), name: value} if name else value
    return result


def parse_resolved_recipe(values: Mapping[str, Any], where: str = "recipe") -> ResolvedRecipe:
    """Validate nested values as a resolved recipe, in which no key is open.

    Raises:
        ConfigError: see `parse_recipe`; or a key is open ("auto" or null).
    """
    return _parsed(ResolvedRecipe, values, where)


def _parsed(kind: type[AnyRecipe], values: Mapping[str, Any], where: str) -> AnyRecipe:
    model = values.get("model")
    if isinstance(model, Mapping):
        # Recipes may leave the model family out.
        values = {**values, "model": {"model_type": DEFAULT_FAMILY, **model}}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        entries = error.errors()
        problems = [_describe(entry) for entry in entries[:_MAX_PROBLEMS]]
        if len(entries) > _MAX_PROBLEMS:
            problems.append(f"and {len(entries) - _MAX_PROBLEMS} more")
        raise ConfigError(f"{where}: {'; '.join(problems)}") from None


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set `section.key` (or `section.key.inner`) to a value given as text."""
    *sections, key = name.split(".")
    if not sections:
        hint = hint_for_other_name(name, as_option=True) or nearest(name, known_keys())
        raise ConfigError(f"option --{name} is unknown{hint}")
    place = values
    for section in sections:
        inner = place.setdefault(section, {})
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"option --{name}: {section} is not a section")
        place = inner
    place[key] = override_value(name, text)


def override_value(name: str, text: str) -> Any:
    """The value of `section.key` from a text; ConfigError if it is not YAML."""
    try:
        return text if _takes_text(name) and text not in ("null", "~") else parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"option --{name}: '{text}' is not a valid value: {error}") from error


def _takes_text(name: str) -> bool:
    """True if the key's type is a string, so that `--data.dir 2024` is a folder's name and not a
    number."""
    section: type[BaseModel] = Recipe
    *sections, key = name.split(".")
    for part in sections:
        field = section.model_fields.get(part)
        inner = [] if field is None else _section_types(field.annotation)
        if not inner:
            return False
        section = inner[0]
    field = section.model_fields.get(key)
    return field is not None and field.annotation in (str, str | None)


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    """The config classes in a field's type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (Union, types.UnionType, Annotated, list):
        return [kind for part in typing.get_args(annotation) for kind in _section_types(part)]
    return []


def known_keys() -> list[str]:
    """All keys of a recipe as `section.key`, sorted."""
    return sorted({f"{section}.{key}" for section, _, key in recipe_fields()})


def recipe_fields() -> Iterator[tuple[str, type[BaseModel], str]]:
    """Section, class of the section, and key, for each key of a recipe in the schema's order."""
    for section, field in Recipe.model_fields.items():
        for kind in _section_types(field.annotation):
            for key in kind.model_fields:
                yield section, kind, key


#: Names of settings in other programs -> the key of a recipe, with the value that means the same,
#: and after ";" a remark; or, for a setting that has no key, a sentence. Of transformers'
#: TrainingArguments, nanoGPT and build-nanogpt, LLMs-from-scratch, TRL, axolotl and others.
OTHER_NAMES = {
    # The model
    "n_embd": "model.hidden_size",
    "emb_dim": "model.hidden_size",
    "embed_dim": "model.hidden_size",
    "d_model": "model.hidden_size",
    "dim": "model.hidden_size",
    "n_layer": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "n_kv_head": "model.num_key_value_heads",
    "n_kv_heads": "model.num_key_value_heads",
    "n_kv_groups": "model.num_key_value_heads",
    "num_kv_groups": "model.num_key_value_heads",
    "n_positions": "model.max_position_embeddings",
    "n_ctx": "model.max_position_embeddings",
    "block_size": "model.max_position_embeddings; rows of data.seq_len tokens are as long",
    "context_length": "model.max_position_embeddings; rows of data.seq_len tokens are as long",
    "context_size": "model.max_position_embeddings; rows of data.seq_len tokens are as long",
    "n_inner": "model.intermediate_size",
    "hidden_dim": "model.intermediate_size",
    "ffn_dim": "model.intermediate_size",
    "moe_hidden_dim": "model.moe_intermediate_size",
    "rope_base": "model.rope_theta",
    "rope_freq": "model.rope_scaling",
    "rope_local_base": "model.rope_local_base_freq",
    "qk_norm": "a model with norms of queries and keys is model.model_type qwen3",
    "drop_rate": "model.resid_pdrop; the same rate is model.embd_pdrop and attn_pdrop, all of gpt2",
    "drop_rate_emb": "model.embd_pdrop",
    "drop_rate_attn": "model.attn_pdrop",
    "drop_rate_resid": "model.resid_pdrop",
    "dropout": "model.resid_pdrop; the same rate is model.embd_pdrop and attn_pdrop, all of gpt2",
    "bias": "GPT-2's layers have biases; model.qkv_bias: false leaves out those of attention",
    # The text
    "batch_size": "batch.micro_batch_size",
    "per_device_train_batch_size": "batch.micro_batch_size",
    "per_gpu_train_batch_size": "batch.micro_batch_size",
    "train_batch_size": "batch.micro_batch_size",
    "device_batch_size": "batch.micro_batch_size",
    "auto_find_batch_size": "batch.micro_batch_size: auto",
    "total_batch_size": "batch.global_batch_tokens",
    "grad_accum_steps": "batch.gradient_accumulation_steps",
    "B": "batch.micro_batch_size",
    "T": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "sequence_length": "data.seq_len",
    "max_length": "data.seq_len",
    "cutoff_len": "data.seq_len",
    "stride": "rows follow each other without overlap, a stride of data.seq_len",
    "data_dir": "data.dir",
    "dataset": "data.dir; firstlight prepare makes it from texts",
    "path": "data.dir",
    "datasets": "data.files",
    "data_files": "data.files",
    "val_set_size": "data.val_fraction",
    "train_ratio": "firstlight prepare --val-fraction holds text out",
    "chat_template": "data.template",
    "train_on_inputs": "data.train_on: all",
    "assistant_only_loss": "data.train_on: assistant",
    "excess_length_strategy": "data.long",
    "num_workers": "data.workers",
    "dataloader_num_workers": "data.workers",
    "dataloader_prefetch_factor": "data.prefetch",
    "dataloader_pin_memory": "data.pin_memory",
    "dataloader_drop_last": "no row is dropped: an epoch's last step continues into the next epoch",
    "drop_last": "no row is dropped: an epoch's last step continues into the next epoch",
    "shuffle": "the rows of each epoch are shuffled by run.seed",
    **dict.fromkeys(
        (
            "dataloader_persistent_workers",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
        ),
        "data.workers are threads of the run, on which the order of the rows does not depend",
    ),
    **dict.fromkeys(
        ("group_by_length", "train_sampling_strategy", "length_column_name"),
        "all rows have data.seq_len tokens, so nothing is grouped by length",
    ),
    **dict.fromkeys(
        ("remove_unused_columns", "label_names"),
        "prepared text has token ids alone; firstlight prepare --text-key names the text's field",
    ),
    "ignore_data_skip": "--resume always continues at the exact row",
    # The schedule
    "max_iters": "schedule.max_steps",
    "num_iterations": "schedule.max_steps",
    "total_steps": "schedule.max_steps",
    "num_train_epochs": "schedule.epochs",
    "num_epochs": "schedule.epochs",
    "n_epochs": "schedule.epochs",
    "warmup_iters": "schedule.warmup_steps",
    "lr_decay_iters": "schedule.decay_steps",
    "decay_lr": "schedule.kind; cosine falls, constant does not",
    "lr_scheduler_type": "schedule.kind",
    "lr_scheduler_kwargs": "its values are keys of the schedule, such as schedule.min_lr_ratio",
    "lr_decay_style": "schedule.kind",
    "decay_type": "schedule.decay_shape",
    "decay_ratio": "schedule.decay_fraction",
    "num_decay_steps": "schedule.cooldown_steps",
    "min_lr": "schedule.min_learning_rate",
    "initial_lr": "schedule.initial_learning_rate",
    # The optimizer
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "peak_lr": "optimizer.learning_rate",
    "optim": "optimizer.name; adamw_torch_fused is adamw, which is fused where the device has it, "
    "adamw_bnb_8bit is adamw8bit and paged_adamw_8bit is paged_adamw8bit",
    "optim_args": "its values are keys of the optimizer, such as optimizer.betas",
    "optim_target_modules": "GaLore and APOLLO are not there; optimizer.name adafactor and "
    "adamw8bit, or lora.rank, save the state's memory",
    "adafactor": "optimizer.name: adafactor",
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "beta1", "beta2"),
        "optimizer.betas; a list, such as [0.9, 0.95]",
    ),
    "adam_epsilon": "optimizer.eps",
    "grad_clip": "optimizer.max_grad_norm",
    "fused": "optimizer.implementation: fused",
    "label_smoothing_factor": "the loss is the cross-entropy without label smoothing, which "
    "preference.label_smoothing has for pairs alone",
    "average_tokens_across_devices": "the loss is always the mean over the tokens of all devices",
    "neftune_noise_alpha": "firstlight adds no noise to embeddings",
    "dpo_beta": "preference.beta",
    "pref_beta": "preference.beta",
    "loss_type": "preference.objective",
    # Precision, memory and speed
    "fp16": "efficiency.precision: fp16",
    "bf16": "efficiency.precision: bf16",
    "tf32": "efficiency.precision: tf32",
    "dtype": "efficiency.precision; bfloat16 is bf16, float16 is fp16, float32 is fp32",
    "torch_dtype": "efficiency.precision; bfloat16 is bf16, float16 is fp16, float32 is fp32",
    "mixed_precision": "efficiency.precision",
    **dict.fromkeys(
        ("half_precision_backend", "fp16_backend", "fp16_opt_level"),
        "mixed precision is torch's autocast, by efficiency.precision alone",
    ),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "evaluation has the precision of training, efficiency.precision",
    ),
    "float32_matmul_precision": "efficiency.matmul_precision",
    "gradient_checkpointing": "efficiency.activation_checkpointing: full",
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        "efficiency.activation_checkpointing (full, selective, budget) has no further settings",
    ),
    "torch_compile": "efficiency.compile: true",
    "use_compile": "efficiency.compile: true",
    "torchdynamo": "efficiency.compile_backend",
    "torch_compile_backend": "efficiency.compile_backend",
    "torch_compile_mode": "efficiency.compile_mode",
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        "efficiency.compile fuses kernels, efficiency.loss_chunk_tokens saves the logits' memory",
    ),
    "torch_empty_cache_steps": "efficiency.empty_cache_steps",
    "attn_implementation": "efficiency.attention",
    "use_cache": "training keeps no cache of keys and values",
    "use_ipex": "IPEX has ended; efficiency.compile and efficiency.precision bf16 serve CPUs",
    "jit_mode_eval": "evaluation is not compiled; efficiency.compile compiles training",
    # Devices and processes
    "use_cpu": "run.device: cpu",
    "no_cuda": "run.device: cpu",
    "use_mps_device": "run.device: mps",
    "device_type": "run.device",
    "fsdp": "distributed.engine: fsdp",
    "fsdp_config": "distributed.engine: fsdp; its values are keys of distributed, such as "
    "distributed.shard",
    "fsdp_min_num_params": "distributed.engine fsdp gathers one layer at a time",
    "fsdp_transformer_layer_cls_to_wrap": "distributed.engine fsdp gathers one layer at a time",
    "deepspeed": "distributed.deepspeed_config",
    **dict.fromkeys(
        ("accelerator_config", "parallelism_config"),
        "processes are set by the keys of distributed, such as distributed.engine",
    ),
    "ddp_timeout": "distributed.timeout_seconds",
    **dict.fromkeys(
        ("ddp_backend", "backend"), "GPUs exchange tensors by NCCL and CPUs by gloo, without a key"
    ),
    **dict.fromkeys(
        (
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
        ),
        "distributed.engine ddp needs no settings",
    ),
    **dict.fromkeys(("tpu_num_cores", "tpu_metrics_debug"), "firstlight doesn't run on TPUs"),
    "local_rank": "firstlight train --nproc N, or torchrun, gives each process its rank",
    # Evaluation, logs and checkpoints
    "eval_freq": "evaluation.every_steps",
    "eval_steps": "evaluation.every_steps",
    "eval_interval": "evaluation.every_steps",
    "eval_every": "evaluation.every_steps",
    "eval_strategy": "evaluation.every_steps; 0 evaluates at the end alone",
    "evaluation_strategy": "evaluation.every_steps; 0 evaluates at the end alone",
    "eval_iter": "evaluation.max_rows; rows, which are batches times their size",
    "eval_iters": "evaluation.max_rows; rows, which are batches times their size",
    "eval_on_start": "evaluation.on_start",
    "initial_validation": "evaluation.on_start",
    "eval_delay": "evaluation.every_steps counts from the first step, without a delay",
    "per_device_eval_batch_size": "evaluation takes batch.micro_batch_size rows at a time",
    "per_gpu_eval_batch_size": "evaluation takes batch.micro_batch_size rows at a time",
    "eval_batch_size": "evaluation takes batch.micro_batch_size rows at a time",
    "eval_only": "firstlight eval RUN evaluates without training",
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
            "include_for_metrics",
            "batch_eval_metrics",
            "include_inputs_for_metrics",
        ),
        "evaluation computes losses, samples and the scores of evaluation.tasks",
    ),
    "start_context": "evaluation.sample_prompts",
    "print_sample_iter": "evaluation.every_steps; or evaluation.samples_at: epoch",
    **dict.fromkeys(
        (
            "logging_steps",
            "logging_strategy",
            "logging_first_step",
            "log_interval",
            "include_num_input_tokens_seen",
            "logging_nan_inf_filter",
            "logging_dir",
        ),
        "each step is a line of metrics.jsonl in run.dir, with its tokens_seen",
    ),
    **dict.fromkeys(
        (
            "log_level",
            "log_level_replica",
            "log_on_each_node",
            "disable_tqdm",
            "debug",
            "skip_memory_metrics",
        ),
        "the run's messages have no levels, and its metrics are always complete",
    ),
    "report_to": "run.trackers",
    "wandb_log": "run.trackers: [wandb]",
    "run_name": "run.dir; trackers name the run after its folder",
    "wandb_run_name": "run.dir; trackers name the run after its folder",
    **dict.fromkeys(
        (
            "project",
            "wandb_project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
        ),
        "the tracker of run.trackers reads it from its environment variable, such as WANDB_PROJECT",
    ),
    "output_dir": "run.dir",
    "out_dir": "run.dir",
    "overwrite_output_dir": "a run folder is never overwritten: give another run.dir",
    "data_seed": "run.seed",
    "full_determinism": "run.deterministic: true",
    "save_steps": "checkpoint.every_steps",
    "save_ckpt_freq": "checkpoint.every_steps",
    "save_strategy": "checkpoint.every_steps; 0 saves at the end alone",
    "save_total_limit": "checkpoint.keep_last",
    "always_save_checkpoint": "each of checkpoint.every_steps is saved, however its loss is",
    "save_only_model": "firstlight convert makes a folder of the model alone",
    "save_on_each_node": "the processes of a run write one checkpoint into run.dir",
    "save_safetensors": "weights are always saved as safetensors",
    "enable_jit_checkpoint": "a run that gets SIGTERM or SIGINT always saves before it ends",
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "checkpoint.keep_best keeps the lowest val/loss, which --best of the other commands takes",
    ),
    "resume_from_checkpoint": "firstlight train RECIPE --resume continues a run",
    "restore_callback_states_from_checkpoint": "--resume restores the whole state of a run",
    "init_from": "firstlight train RECIPE --init-from MODEL starts from its weights",
    **dict.fromkeys(
        (
            "push_to_hub",
            "hub_token",
            "hub_private_repo",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
            "push_to_hub_model_id",
            "push_to_hub_token",
            "push_to_hub_organization",
        ),
        "firstlight push uploads a run's model after training",
    ),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"),
        "the commands are firstlight train, firstlight eval and firstlight generate",
    ),
}

#: A key in `OTHER_NAMES`, with a value and a remark.
_OWN_KEY = re.compile(r"(\w+\.\w+)(?:: ([^;]+))?(?:; (.+))?")


def hint_for_other_name(name: str, known: Sequence[str] = (), *, as_option: bool = False) -> str:
    """A hint for the name of another program's setting, or of a key of another section: the key or
    what else to do; "" if the name is neither.

    Args:
        name: the unknown key, without its section.
        known: keys of the section in which the name stands; the hint then leaves the section out.
        as_option: True for an option of the command line.
    """
    elsewhere = [full for full in known_keys() if full.split(".")[1] == name]
    text = OTHER_NAMES.get(name) or (elsewhere[0] if elsewhere else "")
    match = _OWN_KEY.fullmatch(text)
    if match is None:
        return f": {text}" if text else ""
    key, value, remark = match.groups()
    shown = key.partition(".")[2] if key.partition(".")[2] in known else key
    if as_option:
        shown = f"--{key}" + (f" {value}" if value else "")
    elif value:
        shown += f": {value}"
    return f" (did you mean '{shown}'?)" + (f": {remark}" if remark else "")


def _describe(entry: Any) -> str:
    """The message for one of pydantic's validation errors."""
    location, owners = _locate([str(part) for part in entry["loc"]])
    name = ".".join(location)
    kind = entry["type"]
    if kind == "extra_forbidden":
        tags = [part for part in entry["loc"] if part in FAMILIES]
        is_of_model = len(location) == 2 and location[0] == "model" and tags
        if is_of_model and (problem := not_a_key(location[-1], tags[0])):
            return f"model: {problem}"
        if len(location) == 1 and isinstance(entry["input"], Mapping):
            return _suggest_for_section(name, entry["input"])
        known = sorted({key for owner in owners for key in owner.model_fields})
        return f"unknown key {name}{_suggest(location[-1], known)}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "union_tag_invalid":
        context = {key: str(value).replace("'", "") for key, value in entry["ctx"].items()}
        hint = nearest(context["tag"], context["expected_tags"].split(", "))
        return (
            f"{name}.{context['discriminator']} '{context['tag']}' is unknown{hint} "
            f"(known: {context['expected_tags']})"
        )
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name} must be a section with keys of its own, not {entry['input']!r}"
    message = entry["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if kind == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message} (given: {entry['input']!r})"


def _locate(location: list[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """A key's location without the tags that pydantic inserts for unions, and the classes of the
    section that has the key."""
    names: list[str] = []
    owners: list[type[BaseModel]] = [Recipe]
    for position, part in enumerate(location):
        fields = [owner.model_fields[part] for owner in owners if part in owner.model_fields]
        tagged = [owner for owner in owners if part in _tags(owner)]
        if not fields and tagged and len(owners) > 1:
            owners = tagged
            continue
        names.append(part)
        if fields and position < len(location) - 1:
            owners = [kind for field in fields for kind in _section_types(field.annotation)]
    return names, owners


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    """The discriminator values of this class in a union: ("llama",) for LlamaConfig."""
    for field in section.model_fields.values():
        if typing.get_origin(field.annotation) is typing.Literal:
            return typing.get_args(field.annotation)
    return ()


def _suggest(key: str, known: Sequence[str]) -> str:
    """A hint for an unknown key: another program's or another section's name, or the nearest key of
    its section."""
    hint = hint_for_other_name(key, known) or nearest(key, known)
    return hint or f" (known: {', '.join(known)})"


def _suggest_for_section(name: str, inner: Mapping[Any, Any]) -> str:
    """The message for an unknown section: a hint for the section, or one for each of its keys that
    another section or program has, such as those of `training`."""
    sections = [section for section in Recipe.model_fields if nearest(name, [section])]
    keys = set(known_keys())
    if not any(all(f"{section}.{key}" in keys for key in inner) for section in sections):
        hints = {key: hint_for_other_name(str(key)) for key in inner}
        if any(hints.values()):
            return "; ".join(f"unknown key {name}.{key}{hint}" for key, hint in hints.items())
    return f"unknown key {name}{_suggest(name, list(Recipe.model_fields))}"


#: Limits far above any real recipe: file size in bytes, values (anchors expanded), and levels.
MAX_RECIPE_BYTES = 32_768
_MAX_VALUES = 100_000
_MAX_DEPTH = 50


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which in addition reads 3e-4 as a number, refuses duplicate keys, and
    limits levels and keys."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="too many levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # `<<` merges may multiply: each mapping can merge two others, which merge two others.
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:
            raise yaml.MarkedYAMLError(problem="too many keys", problem_mark=node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key, _ in node.value:
            # `<<: *anchor` merges another mapping, and may occur several times.
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if isinstance(name, Hashable) and name in seen:
                lines = f"in lines {seen[name]} and {key.start_mark.line + 1}"
                raise yaml.MarkedYAMLError(problem=f"key '{name}' is given twice, {lines}")
            # A key that is not hashable is refused below.
            if isinstance(name, Hashable):
                seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _require_small(values: object) -> None:
    """Refuse YAML whose anchors expand to a huge number of values, or contain themselves.

    Raises:
        ValueError: there are too many values, or one is a number of more than 64 bits.
    """
    rest, count = [values], 0
    while rest:
        value = rest.pop()
        count += 1
        if count > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES:,} values")
        if isinstance(value, int) and value.bit_length() > 64:
            raise ValueError("a number of more than 64 bits")
        if isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            rest += value


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse_yaml(content: bytes | str) -> Any:
    """The values of a YAML text.

    Raises:
        ValueError: the text is not YAML or has too many values; the message is one line.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        values = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        _require_small(values)
    # ValueError comes from bytes that are not UTF-8, and from invalid dates such as 2001-99-99.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML's name for a text that is not read by itself from a file.
        message = str(error).replace('in "<unicode string>", line', "in line")
        raise ValueError(" ".join(message.split())) from error
    return values
