"""torch.compile on tensors without memory: all of its pipeline, but no kernel is built or run.

What inductor generates is Python code that allocates buffers, calls kernels and libraries, and
gives buffers up; that code, with kernels that do nothing, is run on fake tensors, so that the
lifetime of every buffer is the real one. What it costs is the pipeline's own time, some two
seconds a layer: so whole models are planned from their first few layers, see `layers.py`. Half of
that time goes into graphs, before inductor fuses their operators; graphs alone can be run too.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.optim.eight_bit import quiet_import


@contextlib.contextmanager
def stubbed_compiler() -> Iterator[None]:
    """Inside, what torch.compile makes for a CPU has kernels that do nothing, and allocates
    through torch's operators. Functions compiled before are forgotten, and those compiled inside
    after it."""
    with quiet_import():
        import torch._functorch.config as functorch_config
        import torch._inductor.async_compile as async_compile
        import torch._inductor.compile_fx
        import torch._inductor.cpu_vec_isa as vector_units
        from torch._inductor import config
        from torch._inductor.codecache import PyCodeCache

    guards = torch._C._dynamo.guards
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    options = {"size_asserts": False, "fx_graph_cache": False, "compile_threads": 1}
    # Collecting garbage would take 0.1 to 0.2 s, and fake tensors have no memory to give back.
    quickly = torch._dynamo.config.patch(run_gc_after_compile=False)
    with (
        replaced(guards, "_empty_strided_cpu", _empty_strided),
        replaced(guards, "_reinterpret_tensor", _reinterpret),
        replaced(async_compile.AsyncCompile, "cpp_pybinding", _no_kernel),
        # Without a look at the machine's vector units, for which it would start the C++ compiler.
        replaced(vector_units, "valid_vec_isa_list", list),
        # For logs and caches that are not kept.
        replaced(torch.fx.GraphModule, "print_readable", _no_text),
        config.patch(options),
        quickly,
        functorch_config.patch(enable_autograd_cache=False),
    ):
        try:
            yield
        finally:
            torch._dynamo.reset()
            PyCodeCache.cache_clear()


@dataclass
class Graphs:
    """What runs of a compiled step.

    Attributes:
        runs: the graphs of its forward and backward pass, operator by operator as they were before
            inductor fused them; else what inductor made of them.
    """

    runs: bool


@contextlib.contextmanager
def graphs_kept(*, fuses: bool) -> Iterator[Graphs]:
    """Inside, of what is compiled the graphs stay.

    What is saved for the backward pass is decided by then, so each layer of a model adds the same
    to both.

    Args:
        fuses: whether inductor compiles them as well; else they are all that there is to run.
    """
    with quiet_import():
        import torch._inductor.compile_fx as compile_fx
    from torch._dynamo.backends.debugging import boxed_nop

    chosen = Graphs(runs=not fuses)
    compile_graph = compile_fx._compile_fx_inner

    def keep(graph: torch.fx.GraphModule, inputs: Any, *args: Any, **options: Any) -> Any:
        # Inductor changes the one that it is given.
        plain = boxed_nop(_copied(graph), inputs)
        if not fuses:
            return plain
        fused: Any = compile_graph(graph, inputs, *args, **options)

        def run(arguments: list[Any]) -> Any:
            return (plain if chosen.runs else fused)(arguments)

        # The list is emptied by who takes it, so that what is in it can go early.
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with replaced(compile_fx, "_compile_fx_inner", keep):
        yield chosen


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, Python does not look for cycles: among the compiler's millions of objects that live
    on, it is a tenth of the time. Nor does it depend on when it looks which storages are there."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Inside, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(
    tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _no_kernel(*_: object, **__: object) -> Callable[..., None]:
    return _nothing


def _no_text(*_: object, **__: object) -> str:
    return ""


def _nothing(*_: object) -> None:
    """Does nothing."""
