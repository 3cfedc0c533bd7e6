"""An exported file in llama.cpp itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock


@contextlib.contextmanager
def opened(path: Path, *, context: int = 256) -> Iterator[Any]:
    """The file in llama.cpp, with an fp32 cache."""
    import llama_cpp
    from llama_cpp import llama_cpp as bindings

    defaults = bindings.llama_model_default_params

    def without_repacking() -> Any:
        # Quantised weights are repacked for AMX where the processor has it, and llama.cpp's tile
        # configuration for them, built by GCC 12, is a general protection fault.
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    with mock.patch.object(bindings, "llama_model_default_params", without_repacking):
        llama = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_threads=2,
            logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            verbose=False,
        )
    try:
        yield llama
    finally:
        llama.close()
