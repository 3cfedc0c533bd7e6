"""Compile the training step with torch.compile, and make training steps bitwise reproducible."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from firstlight.errors import ConfigError
from firstlight.hardware.compiling import Compiler
from firstlight.hardware.device import Hardware
from firstlight.hardware.environment import usable_cpus
from firstlight.methods.config import EfficiencyConfig
from firstlight.models import Model, ModelConfig, ops

#: Minimum CUDA compute capability supported by Triton, which inductor uses to generate its kernels.
TRITON_CAPABILITY = (7, 0)


def require_compiler(config: EfficiencyConfig, hardware: Hardware) -> None:
    """Check that all software that inductor requires on a CPU is installed.

    Raises:
        ConfigError: required software is not installed.
    """
    needs_cpp = config.compile_backend == "inductor" and hardware.device.type == "cpu"
    if needs_cpp and (missing := _missing_on_cpu()):
        raise ConfigError(f"efficiency.compile needs {missing}, or set efficiency.compile to false")


def can_compile(device: torch.device) -> bool:
    """Return True if torch.compile's inductor backend supports the device.

    CUDA requires Triton, a C compiler, the Python headers and a GPU that Triton supports. If this
    machine has no GPU, only Triton is checked. See `require_compiler` for the requirements on CPUs.
    Other devices are not supported.
    """
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return False
        # If this machine does not have a GPU, a run on a different machine is being planned, and
        # the software of that machine is unknown.
        if not torch.cuda.is_available():
            return True
        has_c = "CC" in os.environ or any(map(shutil.which, ("gcc", "clang")))
        is_new = torch.cuda.get_device_capability(device) >= TRITON_CAPABILITY
        return has_c and is_new and _has_python_headers()
    return device.type == "cpu" and not _missing_on_cpu()


def _missing_on_cpu() -> str:
    """Return a description of the software that inductor requires on a CPU and that is missing,
    with installation instructions. Return "" if nothing is missing."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "a C++ compiler on a CPU: install g++ or clang"
    if not _has_python_headers():
        return "Python's headers on a CPU: install python3-dev or your system's equivalent"
    # Apple's compiler does not include OpenMP, so inductor looks for it in these folders.
    places = (
        os.environ.get("OMP_PREFIX"),
        os.environ.get("CONDA_PREFIX"),
        "/opt/homebrew/opt/libomp",
        "/usr/local/opt/libomp",
    )
    has_openmp = any(place and Path(place, "include", "omp.h").exists() for place in places)
    if platform.system() == "Darwin" and "CXX" not in os.environ and not has_openmp:
        return "OpenMP on a CPU: brew install libomp"
    return ""


def _has_python_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def find_compiler(hardware: Hardware) -> Compiler | None:
    """Return the `Compiler` for a device on this machine, or None if code can't be compiled for the
    device. Its values assume that no other programs are running."""
    if not can_compile(hardware.device):
        return None
    return Compiler(hardware.device.type, hardware.name, usable_cpus())


def compiled(
    model: Model, config: EfficiencyConfig, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Compile the forward pass with torch.compile, without changing inputs, outputs or parameter
    names.

    With `compile_regional`, all layers share one compiled function, and the head and the loss are a
    second compiled function. The embedding and the final norm are not compiled.

    Args:
        model: model to compile. With `compile_regional`, its layers are modified in place.
        config: the recipe's `efficiency` section.
        forward: function that computes the forward pass: the model, or an engine that wraps it.
    """
    ops.ready_to_compile()
    # All micro-batches of a run have the same shape, and code compiled for a fixed shape is faster
    # than code for arbitrary shapes.
    options: dict[str, Any] = {"backend": config.compile_backend, "dynamic": False}
    if config.compile_mode != "default":
        options["mode"] = config.compile_mode
    if not config.compile_regional:
        return torch.compile(forward, **options)

    def in_training(owner: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        compiled_function = torch.compile(plain, **options)
        return functools.partial(_compiled_in_training, owner, plain, compiled_function)

    for layer in model.layers:
        layer.forward = in_training(layer, layer.forward)
    model.head_loss = in_training(model, model.head_loss)
    return forward


def is_compile_failure(error: Exception) -> bool:
    """Return True if torch.compile raised an error. The error is identified by the name of its
    class, because it would take several seconds to import the class."""
    return any(kind.__name__ == "TorchDynamoException" for kind in type(error).__mro__)


def needs_compiling(config: EfficiencyConfig) -> bool:
    """Return True if any setting in the config requires torch.compile."""
    return (
        config.compile_regional
        or config.compile_mode != "default"
        or config.activation_checkpointing == "budget"
    )


def compile_time_recorder(
    config: EfficiencyConfig, hardware: Hardware, model: ModelConfig
) -> Callable[[float], None]:
    """Return a function that stores a compile time, in seconds, for later runs.
    `compile_time_recorder` must be called before the first step.

    The returned function stores nothing if the run does not use torch.compile or uses a backend or
    mode that is not the default. It also stores nothing if part of the code was already in
    inductor's cache.
    """
    compiler, how = find_compiler(hardware), (config.compile_backend, config.compile_mode)
    if not config.compile or compiler is None or how != ("inductor", "default"):
        return lambda _: None
    counters = torch._dynamo.utils.counters  # for the whole process
    before = Counter(counters["inductor"])

    def record(seconds: float) -> None:
        found = counters["inductor"] - before
        if found["fxgraph_cache_miss"] and not found["fxgraph_cache_hit"]:
            size = model.hidden_size, model.num_hidden_layers
            compiler.remember(size, seconds, regional=config.compile_regional)

    return record


def records_cuda_graphs(config: EfficiencyConfig) -> bool:
    """Return True if the config selects CUDA graphs for training steps on a GPU."""
    modes = ("reduce-overhead", "max-autotune")
    recorded = config.compile_backend == "cudagraphs" or config.compile_mode in modes
    return config.compile is True and recorded


def uses_cuda_graphs(config: EfficiencyConfig, hardware: Hardware) -> bool:
    """Return True if the training step runs as recorded CUDA graphs. The results of the step are
    then stored in memory that belongs to the graphs."""
    return records_cuda_graphs(config) and hardware.device.type == "cuda"


def why_unrecordable(model: ModelConfig, config: EfficiencyConfig, hardware: Hardware) -> str:
    """Return the reason why a model can't be trained with the CUDA graphs that a config selects.
    Return "" if the model can be trained, or if the config does not select CUDA graphs."""
    if not (model.expert_count and uses_cuda_graphs(config, hardware)):
        return ""
    setting = f"efficiency.compile_mode {config.compile_mode}"
    instead = "default or max-autotune-no-cudagraphs"
    if config.compile_backend == "cudagraphs":
        setting, instead = "efficiency.compile_backend cudagraphs", "inductor"
    # With torch 2.11, the backward pass reads activations from the memory addresses of an earlier
    # step (https://github.com/pytorch/pytorch/pull/197438).
    return f"{setting} gives wrong gradients for mixtures of experts on GPUs: set it to {instead}"


def keep_results(model: Model) -> None:
    """Copy the gradients that the step has accumulated so far out of the memory of CUDA graphs. The
    next forward pass overwrites this memory, and torch raises an error if the memory is read
    afterwards."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _compiled_in_training(
    owner: nn.Module,
    plain: Callable[..., Any],
    compiled_function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    # In generation, every call has a different length, and the code would be compiled again for
    # each of them.
    in_training = owner.training and torch.is_grad_enabled()
    return (compiled_function if in_training else plain)(*arguments)


@contextlib.contextmanager
def memory_budget(config: EfficiencyConfig) -> Iterator[None]:
    """Context manager for compilation. With activation_checkpointing "budget", torch's min-cut
    partitioner selects which activations to recompute, so that the stored activations fit into
    `activation_memory_budget`."""
    if config.activation_checkpointing != "budget":
        yield
        return
    # This is imported here because it loads torch's compiler, which takes a second.
    import torch._functorch.config as functorch

    with functorch.patch(activation_memory_budget=config.activation_memory_budget):
        yield


def room_for_programs(config: EfficiencyConfig) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that raises the limits on the number of compilations. torch counts
    the compilations of `forward` for all models of a process together. By default, torch stops
    compiling after eight compilations."""
    if config.compile is not True:
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = torch._dynamo.config.patch(
        recompile_limit=256, accumulated_recompile_limit=4096
    )
    return patched


# Reproducible steps

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
#: Sizes of the cuBLAS workspace for which the order of sums is fixed (see "Results Reproducibility"
#: in the cuBLAS documentation). The first size is the default on Hopper.
_CUBLAS_SIZES = (":4096:8", ":16:8")


def require_same_bits(hardware: Hardware) -> None:
    """Set a fixed size for the cuBLAS workspace on CUDA GPUs, as `same_bits` with `deterministic`
    requires. Call this before the process computes its first matrix product on a GPU, because torch
    reads the environment variable only once.

    Raises:
        ConfigError: the environment sets a different size, or a matrix product has already been
            computed without the fixed size.
    """
    if hardware.device.type != "cuda":
        return
    size = os.environ.setdefault(_CUBLAS, _CUBLAS_SIZES[0])
    if size not in _CUBLAS_SIZES:
        raise ConfigError(
            f"run.deterministic requires {_CUBLAS} to be {' or '.join(_CUBLAS_SIZES)}, but it is "
            f"'{size}': unset it"
        )
    # In deterministic mode, torch raises an error for this matrix product if cuBLAS was initialised
    # with a different workspace.
    one = torch.ones(8, 8, device=hardware.device)
    with _deterministic():
        try:
            one @ one
        except RuntimeError as error:
            if _CUBLAS not in str(error):
                raise
            raise ConfigError(
                "run.deterministic must be set before this process's first matrix product on "
                f"a GPU: set {_CUBLAS}={_CUBLAS_SIZES[0]} in its environment"
            ) from None


@contextlib.contextmanager
def same_bits(
    config: EfficiencyConfig, hardware: Hardware, *, deterministic: bool = False
) -> Iterator[None]:
    """Context manager that makes computations bitwise reproducible. It has an effect on compiled
    code on a CPU and, with `deterministic`, on CUDA GPUs. `deterministic` requires an earlier call
    to `require_same_bits`.

    Without this context, the order of some sums is not fixed. On a CPU, this affects the gradient
    of the embedding in compiled code. On a GPU, it affects the backward passes of attention and of
    a compiled embedding. In addition, inductor chooses kernels for a GPU by measuring their speed.
    """
    kind = hardware.device.type
    if (kind == "cpu" and config.compile is True) or (kind == "cuda" and deterministic):
        with _deterministic():
            yield
    else:
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Context manager that enables torch's deterministic algorithms. By default, torch also fills
    newly allocated memory in this mode. The context manager disables that. The settings are global,
    so they are restored on exit."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # In this mode, inductor chooses kernels without measuring them.
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=only_warns)
        settings.fill_uninitialized_memory = before[1]
