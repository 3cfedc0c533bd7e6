"""An exported file in llama.cpp itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def opened(path: Path, *, context: int = 256) -> Iterator[Any]:
    """The file in llama.cpp, with an fp32 cache."""
    import llama_cpp

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
