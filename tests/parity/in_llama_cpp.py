"""An exported file opened in llama.cpp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from firstlight.weights.gguf.tokenizer import GGUFTokenizer
from firstlight.weights.gguf.writer import _add_tokenizer


@contextlib.contextmanager
def opened(path: Path, *, context: int = 256) -> Iterator[Any]:
    """Open the file in llama.cpp, with an fp32 cache."""
    import llama_cpp
    from llama_cpp import llama_cpp as bindings

    defaults = bindings.llama_model_default_params

    def without_repacking() -> Any:
        # Quantised weights are repacked for AMX if the processor supports it, and llama.cpp's tile
        # configuration for them causes a general protection fault if built with GCC 12.
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


@contextlib.contextmanager
def vocabulary(folder: Path, described: GGUFTokenizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a file that contains only a tokenizer in llama.cpp, and return it with its metadata."""
    import gguf
    import llama_cpp

    writer = gguf.GGUFWriter(folder / "vocabulary.gguf", "llama")
    _add_tokenizer(writer, described)
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    entries = {key: entry.value for key, entry in writer.kv_data[0].items()}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    llama = llama_cpp.Llama(str(folder / "vocabulary.gguf"), vocab_only=True, verbose=False)
    try:
        yield llama, {key: [*v] if isinstance(v, tuple) else v for key, v in entries.items()}
    finally:
        llama.close()
