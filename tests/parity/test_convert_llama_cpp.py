"""GGUF files written on the command line generate the same tokens in llama.cpp as their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_programs import CONTEXT, VOCABULARY, NanoGPT, drawn, nanogpt_checkpoint
from in_llama_cpp import opened

from firstlight.cli.main import main
from firstlight.tokenizer import Tokenizer

pytest.importorskip("gguf", reason="the package gguf is not installed")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = pytest.mark.slow


def converted(source: Path, out: Path, *options: str) -> Path:
    """Write the GGUF file on the command line."""
    assert main(["convert", str(source), "--to", "gguf", "--out", str(out), *options]) == 0
    (file,) = out.iterdir()
    return file


def greedy(llama: Any, ids: list[int], count: int) -> list[int]:
    found = list(ids)
    llama.reset()
    llama.eval(ids)
    while len(found) < len(ids) + count:
        found.append(int(np.argmax(llama.scores[len(found) - 1])))
        llama.eval(found[-1:])
    return found[len(ids) :]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_stories260k_gguf_generates_published_story(
    dtype: str, tmp_path: Path, shared: Path
) -> None:
    folder = shared / "models" / "stories260K"
    file = converted(folder, tmp_path / "out", "--dtype", dtype)
    assert file.name == f"stories260K-{dtype}.gguf"
    tokenizer = Tokenizer.from_pretrained(folder)
    with opened(file, context=512) as llama:
        ids = greedy(llama, [1], 256)
        text = llama.detokenize(ids, prev_tokens=[1]).decode().removeprefix(" ")
    assert text == tokenizer.decode(ids)
    assert text == (folder / "greedy.txt").read_text(encoding="utf-8")


def test_nanogpt_model_generates_same_tokens_as_nanogpt(tmp_path: Path) -> None:
    model = drawn(NanoGPT())
    torch.save(nanogpt_checkpoint(model), tmp_path / "ckpt.pt")
    prompts = [[3, 1, 4], [59, 2, 6, 53], [58]]
    expected = []
    for prompt in prompts:
        ids, count = list(prompt), CONTEXT - len(prompt)
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert len({token for ids in expected for token in ids}) > 5
    with opened(converted(tmp_path / "ckpt.pt", tmp_path / "out"), context=CONTEXT) as llama:
        assert llama.n_vocab() == VOCABULARY
        found = [greedy(llama, ids, CONTEXT - len(ids)) for ids in prompts]
    assert found == expected
