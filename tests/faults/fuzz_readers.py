"""Fuzzes the readers of files from strangers with atheris.

    python fuzz_readers.py READER SECONDS FOUND CORPUS

A reader may refuse its input with a `FirstlightError` and nothing else. An input that makes it do
otherwise, or takes long or much memory, is written into FOUND; CORPUS is what fuzzing starts from.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


def _file(name: str, content: bytes) -> Path:
    path = _FOLDER / name
    path.write_bytes(content)
    return path


def _tokenizer(name: str, content: bytes) -> None:
    from firstlight.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(_file(name, content))
    tokenizer.decode(tokenizer.encode("hello\n\n 123"))


def _safetensors(content: bytes) -> None:
    from firstlight.weights.stored import read_header

    read_header(_file("model.safetensors", content))


def _gguf(content: bytes) -> None:
    from firstlight.weights.gguf.reader import read_gguf

    read_gguf(_file("model.gguf", content)).tokenizer()


def _template(content: bytes) -> None:
    from firstlight.tokenizer.chat_template import render

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    render(content.decode("utf-8", errors="replace"), messages, {"bos_token": "<s>"})


def _adapter(content: bytes) -> None:
    from firstlight.lora.files import read_peft_config

    config = read_peft_config(_file("adapter_config.json", content).parent)
    lora = config.lora(targets=["q_proj"], modules_to_save=[])
    lora.scaling_of("model.layers.0.self_attn.q_proj")


READERS: dict[str, Callable[[bytes], None]] = {
    "tokenizer": lambda content: _tokenizer("tokenizer.json", content),
    "sentencepiece": lambda content: _tokenizer("tokenizer.model", content),
    "safetensors": _safetensors,
    "gguf": _gguf,
    "template": _template,
    "adapter": _adapter,
}


def read(reader: str, content: bytes) -> None:
    """Let a reader read it; what a person is told in one line is no error."""
    from firstlight.errors import FirstlightError

    try:
        READERS[reader](content)
    except FirstlightError as error:
        if "\n" in str(error):
            raise ValueError("an error of more than one line") from error


if __name__ == "__main__":
    import atheris

    name, seconds, found, corpus = sys.argv[1:]
    with atheris.instrument_imports(include=["firstlight"]):
        read(name, b"")
    options = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=2000", "-max_len=20000"]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={found}/", found, corpus],
        lambda content: read(name, content),
    )
    atheris.Fuzz()
