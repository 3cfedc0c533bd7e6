"""Compile a training step for an H100 in a separate process, on a machine without a GPU.

    python -m gpu.compile_driver CASE

torch.compile's whole pipeline runs on fake CUDA tensors. inductor's kernels do nothing, and triton
compiles each of them for compute capability 9.0, with its own assembler. The one line on stdout is
a JSON object: "kernels", each kernel's architecture and the bytes of its machine code; "buffers",
how often compiled code allocates a tensor of a shape and a dtype in a step; and "breaks", the
reasons why a step is not one graph.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.async_compile as async_compile
import torch._inductor.compile_fx
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime import triton_helpers

from firstlight.planner.memory.program import replaced

from .fake_cuda import fake_cuda
from .no_gpu import H100, torch_cuda
from .test_fake_steps import GPT2, LLAMA, MIXTRAL, recipe_of, steps

#: Sizes for which no weight has as many elements as the residual stream or the logits.
_ODD = {"hidden_size": 96, "max_position_embeddings": 128}
_RESIDUAL = {"efficiency__bf16_residual": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (GPT2, {}),
    "llama in regions": (LLAMA, {"efficiency__compile_regional": True}),
    "mixtral": (MIXTRAL, {}),
    "gpt2 bf16 residual": (GPT2 | _ODD, _RESIDUAL),
    "llama bf16 residual": (LLAMA | _ODD, _RESIDUAL),
    "documents": (LLAMA, {"data__document_masking": True, "efficiency__attention": "flex"}),
}


def main(case: str) -> None:
    """Print the results of a case."""
    model, keys = CASES[case]
    recipe = recipe_of(model, efficiency__precision="bf16", efficiency__compile=True, **keys)
    with _code_for_gpus() as (sources, buffers), fake_cuda() as (cuda, _):
        steps(cuda, recipe)
    with torch_cuda():
        kernels = {name: _machine_code(name, source) for name, source in sources.items()}
    # `steps` runs two steps.
    counts = [(*buffer, count / 2) for buffer, count in buffers.items()]
    breaks = list(torch._dynamo.utils.counters["graph_break"])
    found = {"kernels": kernels, "buffers": counts, "breaks": breaks}
    os.write(1, (json.dumps(found) + "\n").encode())


@contextlib.contextmanager
def _code_for_gpus() -> Iterator[tuple[dict[str, str], Counter[tuple[tuple[int, ...], str]]]]:
    """Context manager in which inductor writes code for an H100 that does nothing. It yields the
    kernels, and how often the code allocates a tensor of each shape and dtype.
    """
    triton: Any = importlib.import_module("triton")
    # Triton asks a driver for these values, which a machine without a GPU does not have.
    driver = SimpleNamespace(
        get_current_target=_target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
    )
    triton.runtime.driver.set_active(driver)
    sources: dict[str, str] = {}
    buffers: Counter[tuple[tuple[int, ...], str]] = Counter()

    def allocate(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        buffers[tuple(size), str(dtype).removeprefix("torch.")] += 1
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def note(_: Any, name: str, source: str, **_options: Any) -> Any:
        sources[name] = source
        return SimpleNamespace(run=lambda *_, **__: None)

    options = {
        "size_asserts": False,
        "fx_graph_cache": False,
        "compile_threads": 1,
        # Both compute on the GPU during compilation.
        "joint_graph_constant_folding": False,
        "shape_padding": False,
    }
    library: Any = torch._C
    library._cuda_getCurrentRawStream = lambda index: 0
    properties = staticmethod(lambda device=None: H100)
    with (
        replaced(library._dynamo.guards, "_empty_strided_cuda", allocate),
        replaced(library._dynamo.guards, "_reinterpret_tensor", _reinterpret),
        replaced(async_compile.AsyncCompile, "triton", note),
        replaced(triton_helpers, "set_driver_to_gpu", lambda: None),
        replaced(CudaInterface, "get_device_properties", properties),
        replaced(CudaInterface, "current_device", staticmethod(lambda: 0)),
        inductor_config.patch(options),
    ):
        yield sources, buffers


def _target() -> Any:
    backends: Any = importlib.import_module("triton.backends.compiler")
    return backends.GPUTarget("cuda", 90, 32)


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _machine_code(name: str, source: str) -> tuple[str, int]:
    """Return the architecture of a kernel's machine code, and its bytes."""
    triton: Any = importlib.import_module("triton.compiler")
    inductor: Any = async_compile
    with replaced(triton_helpers, "set_driver_to_gpu", lambda: None):
        kernel = inductor._load_triton_kernel_from_source(name, source)
    config = kernel.configs[0]
    meta = kernel._create_compile_meta(config)
    text = triton.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    made = triton.compile(
        text,
        target=_target(),
        options=kernel._create_compile_options(config, meta),
    )
    architecture = made.asm["ptx"].split(".target ")[1].split()[0]
    return architecture, len(made.asm["cubin"])


if __name__ == "__main__":
    main(sys.argv[1])
