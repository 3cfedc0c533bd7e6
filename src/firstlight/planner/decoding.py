"""The memory of generation with a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from firstlight.errors import ConfigError
from firstlight.generation import few_rows
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.engine import DTYPES
from firstlight.generation.int8 import quantize_int8
from firstlight.models import ModelConfig, build_model
from firstlight.planner.compiling import replaced
from firstlight.planner.kernels import Target, this_cpu
from firstlight.planner.prediction import MemoryPrediction, predict
from firstlight.planner.recipes import kernels_of
from firstlight.planner.trace import Tracer
from firstlight.planner.watching import allow_casts, fake_tensors, mark_weights


def predict_generation(
    config: ModelConfig,
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    sequences: int = 1,
    dtype: str = "float32",
    target: Target | None = None,
) -> MemoryPrediction:
    """What generation takes: the cache of keys and values, the prompts one after the other, and a
    step of all sequences at their full length.

    Args:
        config: the model's.
        prompt_tokens, max_new_tokens: of each sequence.
        sequences: decoded together.
        dtype: a name of `firstlight.generation.engine.DTYPES` but "auto".
        target: that it will run on; None is this machine's CPU.

    Raises:
        ConfigError: the dtype is unknown, or the prompt fills the context.
    """
    weights = DTYPES.get(dtype)
    if weights is None:
        known = ", ".join(name for name in DTYPES if name != "auto")
        raise ConfigError(f"dtype '{dtype}' can't be planned (known: {known})")
    target = target or this_cpu()
    tracer = Tracer()
    longest = min(prompt_tokens + max_new_tokens, config.max_position_embeddings)
    with fake_tensors(), _few_rows(target), tracer, kernels_of(target):
        model = build_model(config)
        allow_casts(model)
        model.to(weights)
        model.eval()
        if dtype == "int8":
            quantize_int8(model)
        few_rows.use_few_rows(model)
        mark_weights(model, tracer)
        decoder = BatchDecoder(model, sequences, longest)
        mark_weights(model, tracer)
        tracer.mark((*decoder._cache.keys, *decoder._cache.values), "activations")
        with tracer.phase("prefill"):
            for _ in range(sequences):
                decoder.add([0] * prompt_tokens)
        decoder._lengths = [longest - 1] * sequences
        first = tracer.tick + 1
        with tracer.phase("decode"):
            decoder.step([0] * sequences)
        trace = tracer.finish()
    return predict(trace, target, first, phases=("prefill", "decode"))


@contextlib.contextmanager
def _few_rows(target: Target) -> Iterator[None]:
    """The CPU's own kernel for few rows would read addresses that fake tensors have not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(few_rows, "_few_rows_linear", _few_rows_product))
        if target.kind == "cuda":
            stack.enter_context(replaced(few_rows, "_has_kernels", lambda: False))
        yield


def _few_rows_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """What that kernel allocates."""
    rows = x.float().contiguous()
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    del rows
    return out
