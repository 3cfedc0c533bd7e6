"""Support for DeepSpeed's ZeRO (Rajbhandari et al. 2020, 2021). This module contains the engine, an
`Optimizer` that wraps DeepSpeed's optimizer, and the code that sets up DeepSpeed.

Stage 1 shards the optimizer state over the processes. Stage 2 also shards the gradients, and stage
3 also shards the parameters. The optimizer state can be offloaded to CPU memory or to files. In
stage 3, offloading also moves the parameters to CPU memory.

DeepSpeed accumulates and clips gradients and updates parameters. firstlight provides the training
loop, the loss, the schedule and the contents of checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.console import say
from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.hardware.device import is_out_of_memory
from firstlight.models import Model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer, require_fitting_state
from firstlight.optim.spec import Layout
from firstlight.parallel.deepspeed_file import read_deepspeed_file
from firstlight.parallel.engine import DistributedConfig, Engine, StateTensors, TensorsOf, on_cpu
from firstlight.parallel.group import barrier, broadcast_object, group_of_one, is_exchange_error

#: Number of elements in a communication bucket, the same as DeepSpeed's default
#: `reduce_bucket_size`.
_BUCKET = 500_000_000

#: Autocast dtype for each precision that has fp32 parameters and 16-bit matrix products.
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for this kind of device. Messages that DeepSpeed would write to stdout are
    written to stderr.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: DeepSpeed was imported for another kind of device.
    """
    if device.type == "cpu":
        # DeepSpeed selects a device only once per process, and it selects a GPU if there is one,
        # even for a run on the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with _quiet():
            import deepspeed
            from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise MissingDependencyError(
            "deepspeed", "deepspeed", "distributed.engine deepspeed"
        ) from error
    found = get_accelerator().device_name()
    if not str(device).startswith(str(found)):
        raise ConfigError(
            f"run.device is {device}, but DeepSpeed was set up for {found} (DS_ACCELERATOR): "
            "start a separate process for each kind of device, and unset that variable"
        )
    deepspeed.utils.logger.setLevel("WARNING")
    # Newer versions of torch renamed these functions, and DeepSpeed still uses the old names.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    # On a CPU, DeepSpeed would spend a minute compiling an extension for shared-memory all-reduces.
    # gloo's all-reduce gives the same sums.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the context, redirect stdout to stderr and hide warnings that DeepSpeed's code
    triggers.
    """
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ZeroModel:
    """A model that DeepSpeed has distributed over the processes of a run.

    Args:
        model: the model on this process's device, with fp32 parameters that are equal on all
            processes. The model is changed in place. Its outputs stay the same, but all processes
            must call it together.
        optimizer: an elementwise torch optimizer for all parameters of the model.
        config: the recipe's `distributed` section.
        device: this process's device.
        precision: the recipe's `efficiency.precision`. With "bf16" or "fp16", matrix products use
            the named dtype. Gradients and parameters are always exchanged in fp32.
        max_grad_norm: maximum L2 norm of the gradients after clipping; 0 disables clipping.
        local_rank: this process's number on its machine.

    Attributes:
        engine: DeepSpeed's engine.
        stage: the ZeRO stage, 1 to 3.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: DeepSpeed can't be set up with this config, device or DeepSpeed file, or
            `distributed.nvme_path` can't be used.
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        config: DistributedConfig,
        device: torch.device,
        *,
        precision: str,
        max_grad_norm: float,
        local_rank: int = 0,
    ) -> None:
        deepspeed = import_deepspeed(device)
        _forget_closed_group()
        self.stage = config.zero_stage or 2
        self.device = device
        self.model = model
        folder = None
        if config.offload == "nvme":
            require_asynchronous_io(local_rank)
            folder = _new_swap_folder(config)
        if precision in _CAST:
            _cast_inside(model, device, _CAST[precision])
        sizes = [p.numel() for p in model.parameters()]
        settings: dict[str, Any] = {
            # These two values are placeholders, because the training loop itself counts sequences
            # and micro-batches. If the number of accumulation steps is above 1, DeepSpeed
            # accumulates gradients until `set_last(True)` is called.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": max_grad_norm,
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            # Use torch's optimizer to update offloaded parameters on the CPU, because DeepSpeed's
            # own CPU optimizer would have to be compiled.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.stage,
                **zero_settings(config, sizes, on_cpu=device.type == "cpu"),
                **_offloading(config, folder, device),
            },
        }
        if config.deepspeed_config is not None:
            _update(settings, read_deepspeed_file(config.deepspeed_config).handed_on)
        self.engine = _initialized(deepspeed, model, optimizer, settings)
        if folder is not None:
            weakref.finalize(self.engine, shutil.rmtree, folder, ignore_errors=True)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Run the model's forward pass. The arguments and the result have the same shapes as those
        of `LanguageModel.forward`.
        """
        # `_cast_inside` has enabled autocast inside the model, because DeepSpeed disables it
        # outside.
        with torch.autocast(self.device.type, enabled=False):
            output: Tensor = self.engine(*inputs)
        return output

    def set_last(self, last: bool) -> None:
        """Tell DeepSpeed whether the next forward and backward pass is the last one of a step."""
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass from this process's loss, a scalar []. The gradients are averaged
        over the processes.
        """
        self.engine.backward(loss, scale_wrt_gas=False)

    @contextlib.contextmanager
    def whole_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """Within the context, replace the parameters that stage 3 has sharded with full parameters
        on the CPU of every process. The full parameters can be read and written, but not used in a
        forward pass. In stages 1 and 2, the parameters are always full. All processes must call
        this method.

        Args:
            changed: True to copy the full parameters back to the shards on exit. All processes must
                then write the same values within the context.
        """
        places = self._places() if self.stage == 3 else []
        wholes: dict[int, nn.Parameter] = {}
        try:
            for module, name, parameter in places:
                if id(parameter) not in wholes:
                    with _gathered(parameter):
                        copy = parameter.detach().to("cpu", copy=True)
                    wholes[id(parameter)] = nn.Parameter(copy, parameter.requires_grad)
                module._parameters[name] = wholes[id(parameter)]
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter
        if changed:
            self._put_back(wholes)

    def _places(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [
            (module, name, parameter)
            for module in self.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    @torch.no_grad()
    def _put_back(self, wholes: dict[int, nn.Parameter]) -> None:
        if self.stage < 3:
            self.engine.optimizer.refresh_fp32_params()
            return
        for parameter in self.model.parameters():
            value = wholes[id(parameter)].detach()
            with _gathered(parameter, changed=True):
                parameter.copy_(value)
            set_shard(parameter, value)


def zero_settings(
    config: DistributedConfig, sizes: Sequence[int], *, on_cpu: bool
) -> dict[str, Any]:
    """Return the `zero_optimization` settings that determine DeepSpeed's memory use.

    Args:
        config: the recipe's `distributed` section.
        sizes: number of elements in each parameter of the model.
        on_cpu: True if the model is on a CPU.

    Raises:
        ConfigError: the DeepSpeed file can't be read.
    """
    settings: dict[str, Any] = {
        "reduce_bucket_size": max(*sizes, min(sum(sizes), _BUCKET)),
        "overlap_comm": not on_cpu,
        # Default values that DeepSpeed uses in stage 3.
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
    }
    if config.deepspeed_config is not None:
        handed_on = read_deepspeed_file(config.deepspeed_config).handed_on
        given = handed_on.get("zero_optimization", {})
        settings |= {key: given[key] for key in settings if key in given}
    return settings


def _initialized(
    deepspeed: ModuleType,
    model: Model,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> Any:
    """Return a new DeepSpeed engine for a model.

    Raises:
        ConfigError: DeepSpeed raised an error; the message contains the text of this error.
            Out-of-memory errors and communication errors are raised unchanged.
    """
    try:
        with _quiet():
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=settings, dist_init_required=False
            )
    except Exception as error:
        if is_out_of_memory(error) or is_exchange_error(error):
            raise
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} can't set up this run ({said}): change the "
            "setting that it names, or set distributed.engine to ddp or fsdp"
        ) from error
    return engine


def _update(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Merge nested values into nested settings, in place. Values in sections that the settings do
    not contain are ignored.
    """
    for key, value in changes.items():
        if isinstance(value, Mapping):
            _update(settings.get(key, {}), value)
        else:
            settings[key] = value


def set_shard(parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """In ZeRO stage 3, set this process's shard of a parameter's fp32 copy or optimizer state.

    Args:
        parameter: the sharded parameter.
        value: the full tensor, which has the parameter's unsharded shape and is the same on all
            processes.
        key: name of the optimizer state, such as "exp_avg"; None sets the parameter's fp32 copy.
    """
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    held: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    # All shards have the same size, so zeros are appended to the last ones.
    count = held.numel()
    start = torch.distributed.get_rank() * count
    own = value.reshape(-1)[start : start + count].float()
    shard = torch.zeros(count, dtype=torch.float32)
    shard[: len(own)] = own
    if key is None:
        safe_set_local_fp32_param(parameter, shard)
    else:
        safe_set_local_optimizer_state(parameter, shard, key)


@contextlib.contextmanager
def _gathered(parameter: nn.Parameter, *, changed: bool = False) -> Iterator[None]:
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter], modifier_rank=0 if changed else None):
        yield


def _forget_closed_group() -> None:
    """Make DeepSpeed use torch's current process group if it still refers to the closed process
    group of an earlier run in this process.
    """
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    known = groups._WORLD_GROUP
    if known is None:
        return
    try:
        torch.distributed.get_process_group_ranks(known)
    except (KeyError, ValueError):
        groups._release_process_group_references(group=None)
        comm.cdb = None


def _cast_inside(model: Model, device: torch.device, dtype: torch.dtype) -> None:
    """Wrap the model's forward function in autocast. DeepSpeed disables autocast if it was enabled
    outside its engine.
    """
    plain: Callable[..., Tensor] = model.forward

    @functools.wraps(plain)
    def forward(*inputs: Any, **options: Any) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return plain(*inputs, **options)

    model.forward = forward  # type: ignore[method-assign]


def _offloading(
    config: DistributedConfig, folder: Path | None, device: torch.device
) -> dict[str, Any]:
    if config.offload == "none":
        return {}
    pinned = device.type == "cuda"
    on_cpu = {"device": "cpu", "pin_memory": pinned}
    places: dict[str, Any] = {"offload_optimizer": on_cpu}
    if folder is not None:
        places["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": pinned,
        }
    if config.zero_stage == 3:
        places["offload_param"] = on_cpu
    return places


def require_asynchronous_io(local_rank: int) -> None:
    """Compile the library with which DeepSpeed offloads tensors to files, unless an earlier run has
    compiled it. Compiling takes several minutes, but only once per machine. All processes must call
    this function.

    Args:
        local_rank: this process's number on its machine.

    Raises:
        ConfigError: libaio or a C++ compiler is missing, or the library can't be compiled.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    with _quiet():
        is_possible = builder.is_compatible(verbose=False)
    if not is_possible:
        raise ConfigError(
            "distributed.offload nvme needs libaio and a C++ compiler (apt-get install libaio-dev "
            "g++): install them, or set distributed.offload to cpu"
        )
    if local_rank == 0:
        _report_lock(builder.name)
        _load(builder)
    # Make the other processes wait, because the library's file is incomplete until the build ends.
    barrier()
    _load(builder)


def _load(builder: Any) -> None:
    try:
        with _quiet():
            builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            "distributed.offload nvme: DeepSpeed's library for NVMe can't be compiled "
            f"({' '.join(str(error).split())[:300]}): set distributed.offload to cpu"
        ) from error


def _report_lock(name: str) -> None:
    """Print a message if there is a lock file. A build that was killed leaves its lock file behind,
    and torch would silently wait forever for this file to disappear.
    """
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, verbose=False)) / "lock"
    if lock.exists():
        say(
            f"waiting for {lock}: another process is compiling DeepSpeed's library (if no such "
            "process is running, it was killed: delete the file)"
        )


def _new_swap_folder(config: DistributedConfig) -> Path:
    """Create a folder for this run's offloaded tensors. The folder has the same name on all
    machines, and each process creates its own files in it.
    """
    assert config.nvme_path is not None
    token = broadcast_object(secrets.token_hex(4))
    folder = Path(config.nvme_path).expanduser() / f"firstlight-swap-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"distributed.nvme_path {config.nvme_path}: {error.strerror}") from error
    return folder


_OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


class DeepSpeedEngine(Engine):
    """Shards the model with DeepSpeed's ZeRO. A run with one process can use this engine for
    offloading."""

    name = "deepspeed"
    shards_state = True
    updates_itself = True
    averages_gradients = True
    # A failed step can't be repeated, because DeepSpeed's buffers may already contain some of its
    # gradients.
    can_repeat_step = False
    _zero: ZeroModel

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `Engine.session`.

        Within the context, the environment variable LOCAL_RANK is set to the index of this
        process's device, because DeepSpeed reads the index from this variable. Not all launchers
        set LOCAL_RANK. Even if it is set, it is not the index of the GPU when the launcher makes
        only one GPU visible to each process. DeepSpeed rejects a LOCAL_RANK that differs from Open
        MPI's variable, so Open MPI's variable is set to the same index.
        """
        world, device = self.world, self.device
        index = (device.index or 0) if device.type == "cuda" else world.local_rank
        names = ["LOCAL_RANK"]
        if _OPEN_MPI_LOCAL_RANK in os.environ:
            names.append(_OPEN_MPI_LOCAL_RANK)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, str(index)))
        # Stage 3 replaces this function with a version that does not work for models without
        # DeepSpeed.
        linear = torch.nn.functional.linear
        try:
            with group_of_one(device) if world.size == 1 else contextlib.nullcontext():
                yield
        finally:
            torch.nn.functional.linear = linear
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def set_up(
        self, model: Model, config: OptimizerConfig, precision: str, **_: Any
    ) -> tuple[Optimizer, Callable[..., Tensor]]:
        """See `Engine.set_up`. DeepSpeed wraps the model and the optimizer together, so this engine
        does not use `share`.
        """
        optimizer = ZeroOptimizer(
            model,
            config,
            self.config,
            self.device,
            precision=precision,
            local_rank=self.world.local_rank,
        )
        self._zero = optimizer.zero
        return optimizer, self._zero.forward

    @contextlib.contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """See `Engine.backward_pass`."""
        self._zero.set_last(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""
        self._zero.backward(loss)

    def state_tensors(
        self, model: Model, optimizer: Optimizer, tensors_of: TensorsOf
    ) -> StateTensors:
        """See `Engine.state_tensors`."""
        moments = optimizer.state_tensors(keep=self.is_main)
        with optimizer.master_weights():
            return StateTensors(on_cpu(tensors_of(model)) if self.is_main else {}, moments)


class ZeroOptimizer(Optimizer):
    """An `Optimizer` that wraps DeepSpeed's optimizer. The parameters and the state are in fp32.

    Args:
        model: see `ZeroModel`.
        config: the recipe's `optimizer` section, which must specify an elementwise torch optimizer.
        sharing: the recipe's `distributed` section.
        device: this process's device.
        precision, local_rank: see `ZeroModel`.

    Attributes:
        zero: the distributed model and its DeepSpeed engine.

    Raises:
        MissingDependencyError, ConfigError: see `ZeroModel`.
    """

    def __init__(
        self,
        model: Model,
        config: OptimizerConfig,
        sharing: DistributedConfig,
        device: torch.device,
        *,
        precision: str,
        local_rank: int = 0,
    ) -> None:
        self._expected: dict[str, Layout] = {}
        super().__init__(model, config)
        self.reads_found_inf = False  # The update runs in DeepSpeed, which ignores `found_inf`.
        self._expected = self._layouts()
        ((self._spec, self._torch),) = self._parts
        self._has_state, self._grad_scale = False, 1.0
        self.zero = ZeroModel(
            model,
            self._torch,
            sharing,
            device,
            precision=precision,
            max_grad_norm=config.max_grad_norm,
            local_rank=local_rank,
        )

    @property
    def _inner(self) -> Any:
        """DeepSpeed's optimizer, which wraps torch's optimizer."""
        return self.zero.engine.optimizer

    # One step

    def accumulate(self) -> None:
        """Do nothing, because DeepSpeed accumulates the gradients of micro-batches itself."""

    def clip_gradients(
        self, grad_scale: float = 1.0, joined: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the L2 norm of the gradients after division by `grad_scale`, a scalar [] in fp32.
        The norm is infinite if a gradient is not finite. `step` later divides and clips the
        gradients themselves.
        """
        self._grad_scale = grad_scale
        from deepspeed.runtime.utils import combine_grad_norm_groups

        inner = self._inner
        if self.zero.stage == 3:
            norm = combine_grad_norm_groups(inner._get_norm_groups())
        else:
            norm = inner.scaled_global_norm()
        assert isinstance(norm, Tensor)
        # DeepSpeed's norm is -1 if a gradient is not finite.
        norm = norm.detach().float()
        return torch.where(norm < 0, torch.inf, norm) / grad_scale

    def step(self, found_inf: Tensor | None = None) -> None:
        """Divide the gradients by the `grad_scale` passed to `clip_gradients`, clip them to
        `max_grad_norm`, and update the parameters. `found_inf` is ignored.
        """
        # The loss was scaled outside of DeepSpeed before the backward pass. Tell DeepSpeed the
        # scale, so that its update divides the gradients by it.
        self._inner.loss_scale = self._grad_scale
        self.zero.engine.step()
        self._inner.loss_scale = 1.0
        self._has_state = True

    def zero_grad(self) -> None:
        """Clear the gradients in the same way as DeepSpeed does after an fp16 overflow."""
        inner = self._inner
        # DeepSpeed's `zero_grad` does not clear ZeRO's copies of the gradients, which are stored in
        # buffers and dictionaries. Clear these copies here.
        inner.zero_grad(set_to_none=True)
        is_offloaded = inner.offload_optimizer if self.zero.stage == 3 else inner.cpu_offload
        if is_offloaded:
            inner.reset_cpu_buffers()
        if self.zero.stage == 3:
            inner._pre_step()
            if not is_offloaded:
                inner.averaged_gradients = {}
            return
        # DeepSpeed increments this number before each backward pass, so that the first pass of a
        # step has number 0.
        inner.micro_step_id = -1
        if is_offloaded:
            inner._offload_accumulated_param_ids = set()
            return
        for kept in (inner.averaged_gradients, inner.all_grad_tensors):
            for group in kept:
                kept[group] = None

    # State

    def master_weights(self, *, changed: bool = False) -> contextlib.AbstractContextManager[None]:
        """Within the context, make the model's full parameters available for reading and, with
        `changed`, also for writing. See `ZeroModel.whole_parameters`.
        """
        return self.zero.whole_parameters(changed=changed)

    def state_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """See `Optimizer.state_tensors`. All processes must call this method."""
        if not self._has_state:
            return {}
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state()
        found: dict[str, Tensor] = {}
        for name, layout in self._expected.items():
            parameter = self.parameters[name]
            for key, (shape, dtype) in layout.items():
                if key == "step":
                    value = self._steps()
                else:
                    value = safe_get_full_optimizer_state(parameter, key)
                    assert value is not None
                if keep:
                    found[f"{name}.{key}"] = (
                        value.detach().cpu().reshape(shape).to(dtype).contiguous()
                    )
        return found

    def state_shards(self) -> dict[str, Tensor]:
        """Return an empty dict, because DeepSpeed stores the state of many parameters in one flat
        tensor, without their names.
        """
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load_state_tensors`. All processes must call this method."""
        require_fitting_state(self._expected, tensors)
        steps = next((t for name, t in tensors.items() if name.endswith(".step")), None)
        self._make_state(steps)
        for name, layout in self._expected.items():
            for key in layout:
                if key != "step":
                    self._set_state(self.parameters[name], key, tensors[f"{name}.{key}"])
        self._has_state = True

    def fill_state(self, fill: Callable[[dict[str, Tensor]], None]) -> None:
        """See `Optimizer.fill_state`. On every process, `fill` receives full tensors on the CPU.
        All processes must call this method.
        """
        tensors = {
            f"{name}.{key}": torch.zeros(shape, dtype=dtype)
            for name, layout in self._expected.items()
            for key, (shape, dtype) in layout.items()
        }
        fill(tensors)
        self.load_state_tensors(tensors)

    def _layouts(self) -> dict[str, Layout]:
        # Parameters that stage 3 has sharded have shape [0], so use the shapes and strides recorded
        # before sharding.
        return self._expected or super()._layouts()

    def _steps(self) -> Tensor:
        """Return the step counter of torch's optimizer, which is the same for all parameters."""
        states = self._torch.state.values()
        steps: Tensor = next(state["step"] for state in states if "step" in state)
        return steps

    def _flat(self) -> list[Tensor]:
        """Return the 1-D tensors that torch's optimizer updates. Each of these tensors contains the
        concatenated shards of many parameters.
        """
        inner = self._inner
        if self.zero.stage == 3:
            return list(inner.fp32_partitioned_groups_flat)
        return list(inner.single_partition_of_fp32_groups)

    def _make_state(self, steps: Tensor | None) -> None:
        """Create optimizer state in which all moments are zero. `steps` is the number of completed
        steps, as a scalar tensor.
        """
        keys = {key for layout in self._expected.values() for key in layout}
        for number, flat in enumerate(self._flat()):
            with self._at_hand(number):
                state: dict[str, Tensor] = {key: torch.zeros_like(flat) for key in keys - {"step"}}
                if "step" in keys:
                    assert steps is not None
                    state["step"] = steps
                parameter = flat if isinstance(flat, nn.Parameter) else nn.Parameter(flat)
                self._torch.state[flat] = self._spec.rebuild(self._torch, parameter, state)
        self._link_state()

    def _link_state(self) -> None:
        """In stages 1 and 2, link all parameters to their optimizer state again. DeepSpeed links
        them too early: right after it has updated the first parameter group, when the other groups
        do not have state yet.
        """
        if self.zero.stage < 3:
            self._inner._hp_optimizer_states_linked = False
            self._inner._lazy_init_hp_params_optimizer_state()

    @contextlib.contextmanager
    def _at_hand(self, number: int) -> Iterator[None]:
        """If optimizer state is offloaded to files ("nvme"), load the state of a parameter group
        into memory, and write it back when the context exits.
        """
        inner = self._inner
        in_files = self.zero.stage == 3 and inner._swappable_optimizer_subgroup(number)
        if in_files:
            inner._optimizer_states_and_gradient_swap_in(number)
        yield
        if in_files:
            inner._optimizer_states_and_gradient_swap_out(number)

    def _set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set a parameter's state from a full tensor that is the same on all processes."""
        if self.zero.stage == 3:
            set_shard(parameter, value, key)
        else:
            from deepspeed.utils import safe_set_full_optimizer_state

            safe_set_full_optimizer_state(parameter, value.to(self.zero.device), key)
