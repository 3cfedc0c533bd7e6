"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, 2021) around a plain model.

Stage 1 shards optimizer state over the processes, stage 2 also gradients, stage 3 also parameters.
Optimizer state, and with stage 3 parameters, can be offloaded to the CPU's memory or to files.

The training loop, the loss, the schedule and the content of checkpoints are firstlight's; DeepSpeed
accumulates and clips gradients and updates parameters.
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
from firstlight.parallel.deepspeed_file import read_deepspeed_file
from firstlight.parallel.engine import DistributedConfig
from firstlight.parallel.group import barrier, broadcast_object, is_exchange_error

#: Elements of a communication bucket: DeepSpeed's default `reduce_bucket_size`.
_BUCKET = 500_000_000

#: Precisions with fp32 parameters and 16-bit matrix products (autocast).
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for this kind of device, without its messages, which it writes to stdout.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: DeepSpeed was imported for another kind of device.
    """
    if device.type == "cpu":
        # DeepSpeed would select a GPU if the machine has one, and selects only once in a process.
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
            f"run.device is {device}, and DeepSpeed was set up for {found} (DS_ACCELERATOR): start "
            "a process of its own for each kind of device, without that variable"
        )
    deepspeed.utils.logger.setLevel("WARNING")
    # Newer versions of torch renamed these functions, and DeepSpeed still uses the old names.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    # On a CPU, DeepSpeed would compile an extension for shared-memory all-reduces, which takes a
    # minute; gloo's all-reduce gives the same sums.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context in which stdout goes to stderr, and warnings about DeepSpeed's code are hidden."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ZeroModel:
    """A model distributed over the processes of a run by DeepSpeed.

    Args:
        model: the model on this process' device, with fp32 parameters that are equal on all
            processes. It is changed in place. Its outputs stay the same, but from then on all
            processes have to call it together.
        optimizer: an elementwise optimizer of torch for all of the model's parameters.
        config: the recipe's `distributed` section.
        device: this process' device.
        precision: the recipe's `efficiency.precision`. With "bf16" and "fp16", matrix products have
            this dtype; gradients and parameters are exchanged in fp32.
        max_grad_norm: L2 norm to which larger gradients are scaled down; 0 switches clipping off.
        local_rank: this process' number on its machine.

    Attributes:
        engine: DeepSpeed's engine.
        stage: the stage of ZeRO, 1 to 3.

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
            # The training loop counts sequences and micro-batches itself. Any number of
            # accumulation steps above 1 makes DeepSpeed add up gradients until `set_last`.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": max_grad_norm,
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            # torch's optimizer updates offloaded parameters on the CPU: DeepSpeed's CPU optimizer,
            # which has to be compiled, is not needed.
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
        """The model's forward pass; shapes as in `LanguageModel.forward`."""
        # Autocast is inside the model (`_cast_inside`), because DeepSpeed switches it off outside.
        with torch.autocast(self.device.type, enabled=False):
            output: Tensor = self.engine(*inputs)
        return output

    def set_last(self, last: bool) -> None:
        """Tell DeepSpeed whether the next forward and backward pass are the last of a step."""
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass from this process' loss, a scalar []. The gradients are averaged
        over the processes."""
        self.engine.backward(loss, scale_wrt_gas=False)

    @contextlib.contextmanager
    def whole_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """A context in which parameters sharded by stage 3 are replaced by whole parameters on the
        CPU of every process, to be read or written, not to compute with. Parameters of stages 1 and
        2 are whole anyway. All processes have to call it.

        Args:
            changed: True copies values written inside back to the sharded parameters; they must be
                the same on all processes.
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
    """The settings of DeepSpeed's `zero_optimization` that its memory depends on.

    Args:
        config: the recipe's `distributed` section.
        sizes: number of elements of each of the model's parameters.
        on_cpu: True if the model is on a CPU.

    Raises:
        ConfigError: the DeepSpeed file can't be read.
    """
    settings: dict[str, Any] = {
        "reduce_bucket_size": max(*sizes, min(sum(sizes), _BUCKET)),
        "overlap_comm": not on_cpu,
        # DeepSpeed's defaults, of stage 3.
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
    """DeepSpeed's engine around a model.

    Raises:
        ConfigError: DeepSpeed raised an error, whose text is in the message. Out-of-memory errors
            and errors of exchanges between processes are raised unchanged.
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
            f"DeepSpeed {deepspeed.__version__} refuses to set this run up ({said}): change what "
            "it names, or set distributed.engine to ddp or fsdp"
        ) from error
    return engine


def _update(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Merge nested values into nested settings; values of sections that the settings lack are
    dropped."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            _update(settings.get(key, {}), value)
        else:
            settings[key] = value


def set_shard(parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """Set this process' shard of a parameter's fp32 copy or optimizer state from a full tensor, in
    ZeRO stage 3.

    Args:
        parameter: the sharded parameter.
        value: the full tensor, with the parameter's unsharded shape; the same on all processes.
        key: name in the optimizer's state ("exp_avg"); None sets the parameter's fp32 copy.
    """
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    held: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    # All shards have the same size: the last ones are padded with zeros.
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
    """Make DeepSpeed look up torch's process group again, if the group of an earlier run in this
    process is closed."""
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
    """Wrap the model's forward function in autocast: DeepSpeed switches off autocast that is
    around its engine."""
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
    """Compile DeepSpeed's library for offloading into files, unless an earlier run has compiled it:
    this takes minutes, once on each machine. All processes have to call it.

    Args:
        local_rank: this process' number on its machine.

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
        _tell_of_lock(builder.name)
        _load(builder)
    # The others wait: a process that loads the library during the build would find half of it.
    barrier()
    _load(builder)


def _load(builder: Any) -> None:
    try:
        with _quiet():
            builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            "distributed.offload nvme: DeepSpeed's library for it can't be compiled "
            f"({' '.join(str(error).split())[:300]}): set distributed.offload to cpu"
        ) from error


def _tell_of_lock(name: str) -> None:
    """Print a message if there is a lock file, which a killed build leaves behind: torch would wait
    for its end silently and forever."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, verbose=False)) / "lock"
    if lock.exists():
        say(
            f"waiting for {lock}: another process compiles DeepSpeed's library; if there is none, "
            "it was killed: delete that file"
        )


def _new_swap_folder(config: DistributedConfig) -> Path:
    """Make a folder for this run's offloaded tensors, of the same name on all machines; each
    process makes its own files in it."""
    assert config.nvme_path is not None
    token = broadcast_object(secrets.token_hex(4))
    folder = Path(config.nvme_path).expanduser() / f"firstlight-swap-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"distributed.nvme_path {config.nvme_path}: {error.strerror}") from error
    return folder
