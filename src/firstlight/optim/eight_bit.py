"""8-bit AdamW (Dettmers et al. 2022, arXiv 2110.02861) of bitsandbytes and torchao, and its state
as plain tensors.

Both libraries keep a moment as codes (uint8, one for each value), a scale (fp32) for each block of
256 values, and a table that maps a code to a value (fp32 [256], "qmap"). Their names differ:

    torchao:        exp_avg.codes, exp_avg.scale, exp_avg.qmap, and the same of exp_avg_sq
    bitsandbytes:   state1, absmax1, qmap1, and the same with 2
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.optim.spec import Groups, Layout, OptimizerKeys, OptimizerSpec

EightBitLibrary = Literal["auto", "bitsandbytes", "torchao"]

#: Values that share a scale, and minimum number of values of a tensor that has 8-bit moments.
#: Both are defaults of bitsandbytes and of torchao.
_BLOCK = 256
_SMALLEST = 4096


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Context in which warnings and log messages are suppressed. Both libraries write some about
    kernels that they can't load, and torch's compiler writes some about its own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def installed_library(wanted: str) -> str:
    """Return the library that `eight_bit_library` names. "auto" is the first installed one of
    bitsandbytes and torchao, or bitsandbytes if neither is installed."""
    if wanted != "auto":
        return wanted
    installed = [n for n in ("bitsandbytes", "torchao") if importlib.util.find_spec(n) is not None]
    return installed[0] if installed else "bitsandbytes"


def _import(library: str) -> Any:
    try:
        with quiet_import():
            return importlib.import_module(f"{library}.optim")
    except ImportError as error:
        raise MissingDependencyError(library, "8bit", "an 8-bit optimizer") from error


def _is_small(parameter: Tensor) -> bool:
    return parameter.numel() < _SMALLEST


def flatten_eight_bit(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert one parameter's state in either library to plain tensors, named as in `Layout`.

    An 8-bit tensor of torchao becomes its codes (uint8, the parameter's shape), scale (fp32
    [blocks]) and qmap (fp32 [256]); a Python number becomes an int64 tensor [].
    """
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        if hasattr(value, "codes"):
            flat |= {f"{key}.{part}": getattr(value, part) for part in ("codes", "scale", "qmap")}
        elif not isinstance(value, Tensor):
            flat[key] = torch.tensor(value, dtype=torch.int64)
        else:
            # bitsandbytes shares one qmap among all parameters, and safetensors refuses to write
            # tensors that share memory.
            flat[key] = value.clone() if key.startswith("qmap") else value
    return flat


def rebuild_eight_bit(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Convert the tensors of `flatten_eight_bit` back to one parameter's state, in the form of the
    library that they come from."""
    if "state1" in tensors:
        return _rebuild_bitsandbytes(optimizer, parameter, tensors)
    return _rebuild_torchao(parameter, tensors)


# bitsandbytes


def _bitsandbytes(kind: str, groups: Groups, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Create the optimizer of class `bitsandbytes.optim.KIND`, after a trial on the parameters'
    device."""
    optimizer: torch.optim.Optimizer = getattr(_import("bitsandbytes"), kind)(groups, **settings)
    _try_bitsandbytes(kind, groups[0]["params"][0].device)
    return optimizer


def _rebuild_bitsandbytes(
    optimizer: Any, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return one parameter's state in bitsandbytes, and set it in the optimizer."""
    # The library allocates the state, because the tensors of a paged optimizer are in managed
    # memory, which torch can't allocate; the values are copied into these tensors.
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state: dict[str, Any] = optimizer.state[parameter]
    for key, tensor in tensors.items():
        if key == "step":
            state[key] = int(tensor)
        elif key.startswith("qmap"):
            state[key] = tensor.to(parameter.device, copy=True)
        else:
            state[key].copy_(tensor)
    return state


def _try_bitsandbytes(kind: str, device: torch.device) -> None:
    """Update a small tensor once, because not every release has kernels for every device.

    Raises:
        ConfigError: the installed bitsandbytes has no kernel for the device.
    """
    parameter = nn.Parameter(torch.zeros(_SMALLEST, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        getattr(_import("bitsandbytes"), kind)([parameter]).step()
    except (NotImplementedError, RuntimeError, AttributeError, NameError) as error:
        raise ConfigError(
            f"the installed bitsandbytes has no 8-bit AdamW for {device.type}: "
            "set optimizer.eight_bit_library to torchao, or optimizer.name to adamw"
        ) from error


def _bitsandbytes_layout(parameter: Tensor) -> Layout:
    shape = tuple(parameter.shape)
    layout: Layout = {"step": ((), torch.int64)}
    for i in (1, 2):
        if _is_small(parameter):
            layout[f"state{i}"] = (shape, torch.float32)
        else:
            layout[f"state{i}"] = (shape, torch.uint8)
            layout[f"qmap{i}"] = ((256,), torch.float32)
            blocks = math.ceil(parameter.numel() / _BLOCK)
            layout[f"absmax{i}"] = ((blocks,), torch.float32)
    return layout


# torchao


def _torchao(
    groups: Groups, settings: dict[str, Any], device: torch.device
) -> torch.optim.Optimizer:
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError(
            "torchao's 8-bit AdamW needs a C++ compiler on a CPU: install g++ or clang, "
            "or set optimizer.eight_bit_library to bitsandbytes"
        )
    library = _import("torchao")
    with quiet_import():
        # Otherwise the first step would import the compiler and show its warnings.
        importlib.import_module("torch._inductor.compile_fx")
    # Suppress torch's warning in the first step that its cache of compiled code has no stable hash
    # for this tensor class, which a user can't change.
    warnings.filterwarnings("ignore", message="OptimState8bit does not implement")
    optimizer: torch.optim.Optimizer = library.AdamW8bit(groups, **settings)
    return optimizer


def _rebuild_torchao(parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {"step": tensors["step"].clone()}
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        parts = [
            tensors[f"{key}.{part}"].to(parameter.device, copy=True)
            for part in ("codes", "scale", "qmap")
            if f"{key}.{part}" in tensors
        ]
        if parts:
            module = importlib.import_module("torchao.optim.subclass_8bit")
            state[key] = module.OptimState8bit(*parts, signed, dtype=parameter.dtype)
        else:
            state[key] = tensors[key].to(parameter.device, copy=True)
    return state


def _torchao_layout(parameter: Tensor) -> Layout:
    shape = tuple(parameter.shape)
    layout: Layout = {"step": ((), torch.float32)}
    for key in ("exp_avg", "exp_avg_sq"):
        # torchao keeps a tensor with an incomplete last block in the parameter's dtype.
        if _is_small(parameter) or parameter.numel() % _BLOCK:
            layout[key] = (shape, parameter.dtype)
        else:
            layout[f"{key}.codes"] = (shape, torch.uint8)
            layout[f"{key}.scale"] = ((parameter.numel() // _BLOCK,), torch.float32)
            layout[f"{key}.qmap"] = ((256,), torch.float32)
    return layout


# The entry in the table of optimizers


class EightBitConfig(OptimizerKeys):
    """Keys of the 8-bit optimizers."""

    eight_bit_library: EightBitLibrary = "auto"
    """library of the 8-bit AdamW: "bitsandbytes" has precompiled kernels and starts at once;
    "torchao" compiles its update, which takes tens of seconds on a CPU at the first step. "auto"
    is bitsandbytes if it is installed, otherwise torchao. Tensors of fewer than 4096 values stay in
    32 bits, and so do embeddings (see embeddings_in_32_bits). Neither library can read the other's
    state."""
    embeddings_in_32_bits: bool | None = None
    """true, with an 8-bit optimizer, updates token and position embeddings (and a head that is tied
    to them) by torch's AdamW with fp32 moments, 8 bytes per parameter of these, as Dettmers et al.
    2022 advise; paged_adamw8bit does not page these moments. null is true with 8-bit optimizers.
    false saves 6 bytes per parameter of these; a row then shares its scale with others unless
    hidden_size is a multiple of 256, and with bitsandbytes on a GPU rows of rare tokens were moved
    ten times too far."""

    @model_validator(mode="after")
    def _check_library(self) -> EightBitConfig:
        if self.eight_bit_library == "torchao" and _is_paged(self):
            raise ValueError(
                "torchao has no paged optimizer: set eight_bit_library to bitsandbytes, "
                "or name to adamw8bit"
            )
        return self


def _eight_bit(groups: Groups, config: Any) -> torch.optim.Optimizer:
    device = groups[0]["params"][0].device
    if _is_paged(config) and device.type != "cuda":
        raise ConfigError(
            f"optimizer.name paged_adamw8bit moves memory between a CUDA GPU and the CPU, "
            f"but the device is {device.type}: set it to adamw8bit"
        )
    settings = {
        "lr": config.learning_rate,
        "betas": (config.betas[0], config.betas[1]),
        "eps": config.eps,
    }
    if _library(config) == "torchao":
        return _torchao(groups, settings, device)
    kind = "PagedAdamW8bit" if _is_paged(config) else "AdamW8bit"
    return _bitsandbytes(kind, groups, settings)


def _eight_bit_layout(parameter: Tensor, config: Any, _: Any) -> Layout:
    if _library(config) == "torchao":
        return _torchao_layout(parameter)
    return _bitsandbytes_layout(parameter)


def _is_paged(config: Any) -> bool:
    return bool(config.name == "paged_adamw8bit")


def _library(config: Any) -> str:
    return "bitsandbytes" if _is_paged(config) else installed_library(config.eight_bit_library)


def compiles_update(config: Any) -> bool:
    """Return True if torch.compile compiles the optimizer's update, as it does for torchao's."""
    return bool(config.name == "adamw8bit") and _library(config) == "torchao"


EIGHT_BIT = OptimizerSpec(
    _eight_bit,
    _eight_bit_layout,
    elementwise=False,
    implementations=("auto",),
    options=("betas", "embeddings_in_32_bits", "tuned_width"),
    flatten=flatten_eight_bit,
    rebuild=rebuild_eight_bit,
)
