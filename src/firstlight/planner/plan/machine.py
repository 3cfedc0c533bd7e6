"""Describe the machine for which a plan is made. It is either this machine or a different machine
with GPUs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.checkpoint.selection import read_model_folder
from firstlight.data.corpus import Kind
from firstlight.data.packing import kind_of, open_training_split
from firstlight.data.shards import MANIFEST_NAME
from firstlight.errors import ConfigError, FirstlightError
from firstlight.hardware.compiling import Compiler
from firstlight.hardware.device import Hardware, bf16_is_faster, find_hardware, free_memory_bytes
from firstlight.hardware.gpus import GPU, GPUS, find_gpu
from firstlight.lora.files import config_folder, is_adapter
from firstlight.lora.loading import model_without_weights
from firstlight.methods.compilation import TRITON_CAPABILITY, find_compiler
from firstlight.methods.precision import has_only_fp16_units
from firstlight.models import ModelConfig
from firstlight.optim.schedule import BatchSchedule, PredictedLength, Schedule, resolve_schedule
from firstlight.planner.memory.kernels import Target, cuda_target, this_cpu
from firstlight.planner.memory.ranks import copies_of
from firstlight.planner.speed.gpu import measured_gpu
from firstlight.recipe import Recipe, ResolvedRecipe, parse_resolved_recipe
from firstlight.recipe.load import with_deepspeed_file
from firstlight.recipe.resolve import (
    AutoPrecision,
    Facts,
    facts_here,
    require_fitting_data,
    resolve,
)
from firstlight.training.starting_model import continued_lora, with_positions
from firstlight.training.time_budget import predicted_steps
from firstlight.weights.huggingface import read_config

#: Usable fraction of the memory of a GPU that is not in the table.
_GPU_SHARE = 0.98

#: Usable fraction of a CPU's free memory. The rest is left for other programs.
_CPU_SHARE = 0.9

_UNITS = {"b": 1, "": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Machine:
    """One or several devices of the same type.

    Attributes:
        name: the device's name.
        count: number of devices.
        memory_bytes: bytes of memory of each device.
        usable_bytes: bytes of each device's memory that a run can use.
        target: the device whose kernels and allocator are modelled.
        gpu: the GPU with its data-sheet rates. None for a CPU, or if only the memory size of the
            GPU is known.
        precision: the precision that "auto" resolves to: "bf16", "fp16" or "fp32".
        is_here: True for the machine that this process runs on.
    """

    name: str
    count: int
    memory_bytes: int
    usable_bytes: int
    target: Target
    gpu: GPU | None
    precision: AutoPrecision
    is_here: bool

    @property
    def compiler(self) -> Compiler | None:
        """Compile times and speed-ups of torch.compile on this device; None if torch.compile is not
        supported.

        The Triton version that comes with torch requires capability 7.0, and firstlight does not
        compile for Apple GPUs. A different machine is assumed to have few CPU cores if its GPU is
        as old as a T4, and many CPU cores otherwise.
        """
        if self.is_here or self.target.kind == "cpu":
            return find_compiler(self.hardware)
        old = self.gpu is not None and (0, 0) < self.gpu.capability < (8, 0)
        if self.gpu is not None and (
            self.gpu.is_apple or (old and self.gpu.capability < TRITON_CAPABILITY)
        ):
            return None
        return Compiler("cuda", device="", cores=2 if old else 16)

    @property
    def notes(self) -> list[str]:
        """Notes about what a plan for this GPU assumes and omits."""
        if self.gpu is None:
            return []
        if self.gpu.is_apple:
            return [
                "memory and speed are estimated for CUDA kernels, and were not compared with "
                "measurements on Apple GPUs"
            ]
        if (0, 0) < self.gpu.capability < (5, 0):
            return [
                f"{self.name} has compute capability {self.gpu.capability[0]}."
                f"{self.gpu.capability[1]}, and torch's builds for CUDA 12 have no kernels for it"
            ]
        return []

    @property
    def hardware(self) -> Hardware:
        """Return the device for which the plan is made as a `Hardware` object, which is the type
        that the rest of firstlight uses.
        """
        device = torch.device(self.target.kind)
        # If only the memory size of a GPU is known, its capability is set to None, so that no
        # method is rejected.
        of_table = self.gpu is not None and self.gpu.capability != (0, 0)
        known = self.target.kind == "cuda" and (self.is_here or of_table)
        capability = self.target.capability if known else None
        return Hardware(
            device, self.name, self.memory_bytes, self.precision == "bf16", capability=capability
        )


def find_machine(
    gpu: str | None = None,
    memory_bytes: int | None = None,
    count: int = 1,
    device: str = "auto",
) -> Machine:
    """Return the machine that is described by command-line options.

    Args:
        gpu: name of a GPU; None for this machine's GPU or, if it has none, its CPU.
        memory_bytes: memory of each GPU in bytes. It replaces the value in the GPU table. Without
            `gpu`, it describes a GPU of unknown speed.
        count: number of GPUs.
        device: `run.device` of a run on this machine.

    Raises:
        ConfigError: the device does not exist, `memory_bytes` or `count` is invalid, or the GPU is
            unknown. In the last case, the message names the nearest GPU.
    """
    if count < 1:
        raise ConfigError(f"--gpus is {count}: it must be at least 1")
    if memory_bytes is not None and memory_bytes < 2**20:
        raise ConfigError(f"--gpu-memory is {memory_bytes} bytes: set a size such as 24GiB")
    if gpu is not None:
        return _known(find_gpu(gpu, memory_bytes), memory_bytes, count)
    if memory_bytes is not None:
        target = cuda_target("a GPU", (8, 0))
        name = f"a GPU with {memory_bytes / 2**30:.3g} GiB"
        return _gpu_machine(name, count, memory_bytes, target, gpu=None, precision="bf16")
    found = find_hardware(device)
    if found.device.type == "cuda":
        return _this_gpu(found, count)
    if count > 1:
        raise ConfigError(
            f"--gpus {count} requires the GPU model: add --gpu NAME, such as 'RTX 4090'"
        )
    usable = int(_CPU_SHARE * free_memory_bytes(found.device))
    is_fast = found.bf16 and bf16_is_faster(found.device)
    precision: AutoPrecision = "bf16" if is_fast else "fp32"
    return Machine(
        found.name,
        1,
        found.memory_bytes,
        usable,
        target=this_cpu(),
        gpu=None,
        precision=precision,
        is_here=True,
    )


def parse_bytes(text: str) -> int:
    """Parse a size such as "24GiB", "24 GB" or "24000 MiB", and return it in bytes. A size without
    a unit is in bytes.

    Raises:
        ConfigError: the string is not a valid size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].lower() if match else None
    if match is None or unit not in _UNITS:
        raise ConfigError(f"'{text}' is not a memory size: use, for example, 24GiB or 24GB")
    return int(float(match[1]) * _UNITS[unit])


def _known(gpu: GPU, memory_bytes: int | None, count: int) -> Machine:
    capability = (8, 0) if gpu.capability == (0, 0) else gpu.capability
    target = cuda_target(gpu.name, capability, _context_bytes(gpu))
    narrow: AutoPrecision = "fp16" if gpu.fp16 > 2 * gpu.fp32 else "fp32"
    precision: AutoPrecision = "bf16" if gpu.bf16 else narrow
    memory = memory_bytes or gpu.memory_bytes
    return _gpu_machine(gpu.name, count, memory, target, gpu=gpu, precision=precision)


def _context_bytes(gpu: GPU) -> int | None:
    """Return the bytes of GPU memory that a process uses outside torch's allocator. The value is
    known if it was measured for this GPU type. GPUs with the same capability as the H100 load the
    same kernels, so the H100's value is used for them. For all other GPUs, return None."""
    found = measured_gpu(gpu)
    if found is None and gpu.capability == GPUS["H100"].capability:
        found = measured_gpu(GPUS["H100"])
    return None if found is None else found.context_bytes


def _this_gpu(found: Hardware, count: int) -> Machine:
    gpu: GPU | None = None
    with contextlib.suppress(ConfigError):
        gpu = find_gpu(found.name, found.memory_bytes)
    capability = torch.cuda.get_device_capability(found.device)
    target = cuda_target(found.name, capability, None if gpu is None else _context_bytes(gpu))
    narrow: AutoPrecision = "fp16" if has_only_fp16_units(found) else "fp32"
    precision: AutoPrecision = "bf16" if found.bf16 else narrow
    machine = _gpu_machine(
        found.name, count, found.memory_bytes, target, gpu=gpu, precision=precision
    )
    return Machine(**{**vars(machine), "is_here": True})


def _gpu_machine(
    name: str, count: int, memory: int, target: Target, *, gpu: GPU | None, precision: AutoPrecision
) -> Machine:
    usable = int((_GPU_SHARE if gpu is None else gpu.usable_share) * memory)
    return Machine(
        name, count, memory, usable, target=target, gpu=gpu, precision=precision, is_here=False
    )


def with_changes(recipe: ResolvedRecipe, changes: Mapping[str, Any]) -> ResolvedRecipe:
    """Return a copy of the recipe with some values changed. Keys have the form `section.key`. The
    name of a section can also be used as a key to replace the entire section.

    Raises:
        ConfigError: a value is invalid.
    """
    if not changes:
        return recipe
    values = recipe.model_dump(mode="json")
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if not key:
            values[section] = value
        else:
            values[section] = {**(values[section] or {}), key: value}
    return parse_resolved_recipe(values)


def resolve_for(recipe: Recipe, machine: Machine, init_from: str | None = None) -> ResolvedRecipe:
    """Resolve the recipe in the same way as a run on the machine would; see `resolve`.

    Args:
        recipe: the recipe as written.
        machine: the machine to run on.
        init_from: folder of a model to start from.

    Raises:
        ConfigError: the recipe has no model, or its vocabulary is unknown; see also `resolve`.
        ModelError: `init_from` is not the folder of a model.
    """
    read = with_deepspeed_file(recipe, machine.count)
    if init_from is None:
        return resolve(read, facts_of(read, machine))
    read, start = _starting_model(read, init_from)
    return resolve(read, facts_of(read, machine, start))


def facts_of(recipe: Recipe, machine: Machine, start: ModelConfig | None = None) -> Facts:
    """Return the facts needed to resolve the recipe on the machine.

    Args:
        recipe, machine: the recipe as written and the machine to run on.
        start: config of the model to start from; None for the recipe's new model.

    Raises:
        ConfigError: the number of devices is not a multiple of tensor_parallel x pipeline; see also
            `resolve_for`.
        ModelError: see `resolve_for`.
    """
    kind = recipe.data.kind or _prepared_kind(recipe)
    if kind is not None:
        # Preference pairs require an initial model for training, but not for a plan.
        require_fitting_data(recipe, kind, from_weights=True)
    known: dict[str, Any] = {
        "processes": copies_of(recipe, machine.count),
        "epoch_tokens": epoch_tokens(recipe),
        "kind": kind,
        "model": start or _model_config(recipe),
        "new_model": start is None,
    }
    if machine.is_here or machine.target.kind == "cpu":
        return facts_here(machine.hardware, **known)
    gpu = machine.gpu
    # If the rates are unknown, they are None. `resolve` then makes its usual choice without
    # comparing them.
    rates = {} if gpu is None else {torch.bfloat16: gpu.bf16, torch.float16: gpu.fp16}
    return Facts(
        machine.target.kind,
        machine.precision,
        machine.compiler,
        lambda dtype: rates.get(dtype, 0 if gpu is None else gpu.fp32) or None,
        **known,
    )


def epoch_tokens(recipe: Recipe) -> int | None:
    """Return the number of tokens in the training split. Return None if the data is not on this
    machine."""
    found = [prepared_vocabulary(folder) for folder in _folders(recipe)]
    return None if None in found else sum(one[1] for one in found if one)


def _folders(recipe: Recipe) -> list[str]:
    """Return the folders of a recipe's prepared data."""
    return [corpus.dir for corpus in recipe.data.mix or ()] or [str(recipe.data.dir)]


def _prepared_kind(recipe: Recipe) -> Kind | None:
    """Return the kind of the prepared data. Return None if the data is not on this machine."""
    kind: Kind | None = None
    for folder in _folders(recipe):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, FirstlightError):
            kind = kind_of(json.loads((Path(folder) / MANIFEST_NAME).read_text(encoding="utf-8")))
            if kind != "text":
                break
    return kind


def _starting_model(recipe: Recipe, init_from: str) -> tuple[Recipe, ModelConfig]:
    """Return the recipe and the model config for a run that starts from `init_from`. If the run
    continues to train an existing adapter, the settings of the adapter become the `lora` section of
    the recipe, as in the run."""

    # Messages about these changes are shown only by the run, so that the user sees them once.
    def tell(_: str) -> None:
        return None

    def read(folder: Path) -> tuple[Recipe, ModelConfig]:
        config = with_positions(recipe, read_config(config_folder(folder)), init_from, tell)
        if not is_adapter(folder):
            return recipe, config
        model, found = model_without_weights(folder, config, merge=recipe.lora is None)
        if recipe.lora is None or found is None:
            return recipe, model.config
        lora = continued_lora(recipe.lora, found, tell)
        return recipe.model_copy(update={"lora": lora}), model.config

    return read_model_folder(init_from, read)


def _model_config(recipe: Recipe) -> ModelConfig:
    """Return the config of the new model that a run would train."""
    model = recipe.model or recipe.planning.model
    if model is None:
        raise ConfigError(
            "the recipe has no model: add a `model:` section, or set --init-from to the folder of "
            "the weights to start from"
        )
    if model.vocab_size:
        return model
    folder = _folders(recipe)[0]
    prepared = prepared_vocabulary(folder)
    tokens = recipe.planning.vocab_size if prepared is None else prepared[0]
    if tokens is None:
        raise ConfigError(
            f"the vocabulary size comes from the data's tokenizer, but {folder} is not on this "
            "machine: prepare the data, or set the size, for example --planning.vocab_size 50257"
        )
    return model.model_copy(update={"vocab_size": tokens})


def prepared_vocabulary(folder: str) -> tuple[int, int] | None:
    """Return the vocabulary size and the number of training tokens of a folder with prepared data.
    Return None if the folder is not on this machine or its data is not prepared."""
    try:
        manifest = json.loads((Path(folder) / MANIFEST_NAME).read_text(encoding="utf-8"))
        return int(manifest["vocab_size"]), int(manifest["splits"]["train"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError, FirstlightError):
        return None


@dataclass(frozen=True)
class PlannedRun:
    """The length of a run in steps, tokens and epochs.

    Attributes:
        schedule: resolved schedule, as `train` computes it.
        batch: number of sequences per optimizer step, summed over all devices.
        tokens: tokens of the whole run.
        epochs: passes over the training split; None if the data is not on this machine.
    """

    schedule: Schedule
    batch: BatchSchedule
    tokens: int
    epochs: float | None


def planned_run(
    recipe: ResolvedRecipe, machine: Machine, tokens_per_second: float | None = None
) -> PlannedRun | None:
    """Return the length of a run with a resolved recipe. Return None if the length depends on data
    that is not on this machine, or on an unknown speed.

    Args:
        recipe: the resolved recipe.
        machine: the machine that it runs on.
        tokens_per_second: predicted speed, for a run with a time budget; None if unknown.

    Raises:
        ConfigError: the schedule is invalid; see `resolve_schedule`.
    """
    seq_len, copies = recipe.data.seq_len, copies_of(recipe, machine.count)
    batch = recipe.batch.schedule(seq_len, copies)
    rows = _rows_per_epoch(recipe, seq_len)
    minutes, length = recipe.schedule.max_minutes, None
    is_one_epoch = minutes is None and recipe.schedule.max_steps is None
    if minutes is not None:
        if tokens_per_second is None:
            return None
        length = PredictedLength(predicted_steps(minutes, tokens_per_second, batch, seq_len))
    if rows is None and (recipe.schedule.epochs is not None or is_one_epoch):
        return None
    peak = recipe.optimizer.learning_rate
    schedule = resolve_schedule(
        recipe.schedule, peak, rows or 0, batch, seq_len=seq_len, length=length
    )
    seen = batch.before(schedule.max_steps)
    return PlannedRun(schedule, batch, seen * seq_len, None if not rows else seen / rows)


def _rows_per_epoch(recipe: Recipe, seq_len: int) -> int | None:
    """Return the number of rows in the training split. Return None if there is no prepared data on
    this machine."""
    folders = _folders(recipe)
    try:
        splits = [
            open_training_split(
                folder,
                verify=False,
                long=recipe.data.long,
                row_alignment=recipe.data.row_alignment,
            )
            for folder in folders
        ]
        return sum(split.num_rows(seq_len) for split in splits)
    except FirstlightError:
        return None
