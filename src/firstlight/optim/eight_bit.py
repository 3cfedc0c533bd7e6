"""8-bit AdamW (Dettmers et al. 2022, arXiv 2110.02861) from bitsandbytes or torchao, and the
conversion of its state to plain tensors.

Both libraries store a moment as three tensors. The first contains codes (uint8, one per value), and
the second contains scales (fp32, one per block of 256 values). The third, "qmap", is a table that
maps codes to values (fp32 [256]). The libraries use different names for these tensors:

    torchao:        exp_avg.codes, exp_avg.scale, exp_avg.qmap; the same three for exp_avg_sq
    bitsandbytes:   state1, absmax1, qmap1; state2, absmax2, qmap2
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

#: Number of values that share a scale, and minimum number of values that a tensor needs to have
#: 8-bit moments. These are the defaults of bitsandbytes and torchao.
_BLOCK = 256
_SMALLEST = 4096


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress warnings and log messages within the context. bitsandbytes and torchao log the names
    of kernels that they can't load, and torch's compiler warns about its own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def installed_library(wanted: str) -> str:
    """Return the name of the library that `eight_bit_library` selects. "auto" selects torchao if
    only torchao is installed, and bitsandbytes in all other cases."""
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
    """Flatten the 8-bit optimizer state of one parameter, from torchao or bitsandbytes, into plain
    tensors. The tensors have the names that the layout of the state specifies.

    A torchao 8-bit tensor becomes three tensors: `codes` (uint8, same shape as the parameter),
    `scale` (fp32, [blocks]) and `qmap` (fp32, [256]). A Python number becomes a scalar int64
    tensor.
    """
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        if hasattr(value, "codes"):
            flat |= {f"{key}.{part}": getattr(value, part) for part in ("codes", "scale", "qmap")}
        elif not isinstance(value, Tensor):
            flat[key] = torch.tensor(value, dtype=torch.int64)
        else:
            # bitsandbytes shares one qmap among all parameters, but safetensors does not write
            # tensors that share memory.
            flat[key] = value.clone() if key.startswith("qmap") else value
    return flat


def rebuild_eight_bit(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Convert tensors returned by `flatten_eight_bit` back to the state of one parameter, in the
    format of the library that created the state."""
    if "state1" in tensors:
        return _rebuild_bitsandbytes(optimizer, parameter, tensors)
    return _rebuild_torchao(parameter, tensors)


# bitsandbytes


def _bitsandbytes(kind: str, groups: Groups, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Create an optimizer of the class `bitsandbytes.optim.KIND`, and test that it works on the
    device of the parameters."""
    optimizer: torch.optim.Optimizer = getattr(_import("bitsandbytes"), kind)(groups, **settings)
    _try_bitsandbytes(kind, groups[0]["params"][0].device)
    return optimizer


def _rebuild_bitsandbytes(
    optimizer: Any, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Create the bitsandbytes state of one parameter, store it in the optimizer, and return it."""
    # The library allocates the state, because a paged optimizer stores its tensors in managed
    # memory, which torch can't allocate. The values are then copied into these tensors.
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
    """Update a small tensor once, to check that the installed release has kernels for the device.

    Raises:
        ConfigError: the installed bitsandbytes does not have a kernel for the device.
    """
    parameter = nn.Parameter(torch.zeros(_SMALLEST, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        getattr(_import("bitsandbytes"), kind)([parameter]).step()
    except (NotImplementedError, RuntimeError, AttributeError, NameError) as error:
        raise ConfigError(
            f"the installed bitsandbytes does not support 8-bit AdamW on {device.type}: set "
            "optimizer.eight_bit_library to torchao, or optimizer.name to adamw"
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
        # The compiler is imported here because the first step would otherwise import it and show
        # its warnings.
        importlib.import_module("torch._inductor.compile_fx")
    # In the first step, torch warns that its cache of compiled code does not have a stable hash for
    # this tensor class. The warning is suppressed, because users can't do anything about it.
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
        # torchao stores a state tensor in the dtype of the parameter if the tensor's last block
        # would be incomplete.
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
    """library of the 8-bit AdamW: "bitsandbytes" has precompiled kernels and starts immediately;
    "torchao" compiles its update in the first step, which takes tens of seconds on a CPU. "auto" is
    bitsandbytes if it is installed, otherwise torchao. Tensors with fewer than 4096 values and
    embeddings (see embeddings_in_32_bits) have 32-bit moments. Neither library can read the state
    of the other library."""
    embeddings_in_32_bits: bool | None = None
    """true, with an 8-bit optimizer, updates token and position embeddings (and a head that is tied
    to them) with torch's AdamW and fp32 moments, as Dettmers et al. 2022 recommend. This takes 8
    bytes per embedding parameter; paged_adamw8bit does not page these moments. null is true with
    8-bit optimizers. false saves 6 bytes per embedding parameter, but then, unless hidden_size is a
    multiple of 256, several rows share a scale. In a test with bitsandbytes on a GPU, this moved
    the rows of rare tokens ten times too far."""

    @model_validator(mode="after")
    def _check_library(self) -> EightBitConfig:
        if self.eight_bit_library == "torchao" and _is_paged(self):
            raise ValueError(
                "torchao does not have a paged optimizer: set eight_bit_library to bitsandbytes, "
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
    """Return True if torch.compile compiles the optimizer's update, as it does for torchao's
    optimizers."""
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
