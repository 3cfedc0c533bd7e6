"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, 2021) around a plain model: optimizer state (stage 1),
gradients too (2), parameters too (3) are sharded, one shard for each process, and may be in the
CPU's memory or in files.

The loop, the loss, the schedule and the content of checkpoints are firstlight's; DeepSpeed
accumulates gradients, clips and updates.
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
from collections.abc import Callable, Iterator, Mapping
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

#: Numbers in a buffer that is sent, as DeepSpeed's own default.
_BUCKET = 500_000_000

#: Precisions with fp32 parameters and 16-bit products.
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def import_deepspeed(device: torch.device) -> ModuleType:
    """The library, for this kind of device, and silent: it writes to stdout.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: DeepSpeed was imported for another kind of device.
    """
    if device.type == "cpu":
        # DeepSpeed takes any GPU that it sees, and looks once.
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
    # Newer versions of torch have other names for these functions, which DeepSpeed doesn't know.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    # On a CPU, DeepSpeed would compile an extension for a minute, for sums over processes that gloo
    # computes too.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, stdout is stderr, and warnings about the library's own code are hidden."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ZeroModel:
    """A model that the processes of a run share by DeepSpeed.

    Args:
        model: the model on this process' device, the same on all; its parameters are fp32. It is
            changed in place; its outputs stay the same, if all processes call it together.
        optimizer: an elementwise optimizer of torch's for all of the model's parameters.
        config: the recipe's `distributed` section.
        device: this process' device.
        precision: the recipe's; with "bf16" and "fp16", products are in it, and gradients and
            parameters are sent in fp32.
        max_grad_norm: the norm to which larger gradients are scaled down; 0 leaves them.
        local_rank: this process' number on its machine.

    Attributes:
        engine: DeepSpeed's engine.
        stage: the stage of ZeRO, 1 to 3.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: DeepSpeed can't share this model here.
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
        self.stage, self.device, self.model = config.zero_stage or 2, device, model
        folder = None
        if config.offload == "nvme":
            require_asynchronous_io(local_rank)
            folder = _new_swap_folder(config)
        if precision in _CAST:
            _cast_inside(model, device, _CAST[precision])
        largest = max(p.numel() for p in model.parameters())
        total = sum(p.numel() for p in model.parameters())
        settings: dict[str, Any] = {
            # The loop counts sequences and passes; with more than one pass here, DeepSpeed adds up
            # gradients until `set_last`.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": max_grad_norm,
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            # torch's optimizer updates on the CPU as well.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": max(largest, min(total, _BUCKET)),
                "overlap_comm": device.type == "cuda",
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
        # DeepSpeed switches autocast off: see `_cast_inside`.
        with torch.autocast(self.device.type, enabled=False):
            output: Tensor = self.engine(*inputs)
        return output

    def set_last(self, last: bool) -> None:
        """Say whether the forward and backward pass that come are a step's last."""
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """The backward pass. Gradients become those of the mean of all processes' losses."""
        self.engine.backward(loss, scale_wrt_gas=False)

    @contextlib.contextmanager
    def whole_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """Inside, sharded parameters are whole, on the CPU of every process, for reading and for
        writing, not for computing. All processes have to call it.

        Args:
            changed: True puts back values written inside, which are the same on all.
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


def _initialized(
    deepspeed: ModuleType,
    model: Model,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> Any:
    """DeepSpeed's engine around a model.

    Raises:
        ConfigError: DeepSpeed refuses something, in its own words.
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
    """Put nested values into nested settings; sections that the settings lack are left out."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            _update(settings.get(key, {}), value)
        else:
            settings[key] = value


def set_shard(parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """Set this process' shard of a parameter's fp32 copy or state under ZeRO-3 from a full tensor.

    Args:
        parameter: the sharded parameter.
        value: the full tensor, the same on all processes.
        key: name in the optimizer's state; None is the parameter's fp32 copy.
    """
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    held: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    # The last shards are padded to the size of the others.
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
    """Have DeepSpeed find the process group again, if that of an earlier run is closed."""
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
    """Put autocast inside the model's forward pass: DeepSpeed switches it off around the model."""
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
    """Compile DeepSpeed's library for offloading into files, if that is not done yet: this takes
    minutes, once on each machine. All processes have to call it.

    Args:
        local_rank: this process' number on its machine.

    Raises:
        ConfigError: the library can't be compiled.
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
    # A process that compiled at the same time would find half of a library.
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
    """Tell of a lock file of a killed build, for which torch would wait silently."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, verbose=False)) / "lock"
    if lock.exists():
        say(
            f"waiting for {lock}: another process compiles DeepSpeed's library; if there is none, "
            "it was killed: delete that file"
        )


def _new_swap_folder(config: DistributedConfig) -> Path:
    """A folder for this run's files, in which each process makes its own."""
    assert config.nvme_path is not None
    token = broadcast_object(secrets.token_hex(4))
    folder = Path(config.nvme_path).expanduser() / f"firstlight-swap-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"distributed.nvme_path {config.nvme_path}: {error.strerror}") from error
    return folder
