"""Published GGUF files: SmolLM2-135M-Instruct (Q4_1, byte-level BPE) and Gemma 3 270M (Q4_K_M,
sentencepiece), beside llama.cpp and transformers. Run with `make test-real`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from in_llama_cpp import opened, vocabulary
from torch import Tensor

from firstlight.cli.main import main
from firstlight.lora.loading import LoadedModel, load_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.gguf.tokenizer import describe_tokenizer
from real_weights import WEIGHTS, weights_folder

pytest.importorskip("gguf", reason="the package gguf is not installed")
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = pytest.mark.real

PROMPT = "The capital of France is Paris, and the capital of Italy is"
#: llama.cpp multiplies 4-bit weights by activations that it rounds to 8 bits, and firstlight in
#: fp32: the greatest divergence of two distributions of the next token, in nats, and the greatest
#: difference of two logits that are compared.
DIVERGENCE, LOGITS = 0.1, 1.5


@pytest.fixture(scope="module", params=WEIGHTS)
def file(request: pytest.FixtureRequest) -> Path:
    path = weights_folder() / str(request.param)
    if not path.is_file():
        pytest.skip(f"{request.param} is not in {weights_folder()}: run `make test-real`")
    return path


@pytest.fixture(scope="module")
def loaded(file: Path) -> LoadedModel:
    return load_model(file)


def ours(model: Any, ids: list[int]) -> Tensor:
    """The logits after each of `ids`, [len(ids), vocabulary]."""
    with torch.inference_mode():
        found = model(torch.tensor([ids]))
    return (found if isinstance(found, Tensor) else found.logits)[0].float()


def theirs(llama: Any, ids: list[int]) -> Tensor:
    llama.reset()
    llama.eval(ids)
    return torch.from_numpy(np.array(llama.scores[: len(ids)]))


def greedy(llama: Any, ids: list[int], count: int) -> list[int]:
    found = list(ids)
    llama.reset()
    llama.eval(ids)
    for _ in range(count):
        found.append(int(np.argmax(llama.scores[len(found) - 1])))
        llama.eval(found[-1:])
    return found


def require_near(found: Tensor, expected: Tensor) -> None:
    """Both predict the same token, or one that is almost as probable, and similar distributions."""
    a, b = found.log_softmax(-1), expected.log_softmax(-1)
    assert ((a.exp() * (a - b)).sum(-1)).max() < DIVERGENCE
    best, other = found.argmax(-1), expected.argmax(-1)
    rows = torch.arange(len(found))
    assert (found[rows, best] - found[rows, other]).max() < LOGITS


def test_gguf_file_matches_logits_and_greedy_text_of_llama_cpp(
    file: Path, loaded: LoadedModel
) -> None:
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode_prompt(PROMPT)
    with opened(file) as llama:
        assert llama.tokenize(PROMPT.encode()) == ids
        text = greedy(llama, ids, 40)
        expected = theirs(llama, text)
    found = ours(loaded.model, text)
    require_near(found, expected)
    # The text is the same until two tokens are almost equally probable.
    chosen = found[len(ids) - 1 : -1].argmax(-1).tolist()
    assert chosen[:8] == text[len(ids) : len(ids) + 8]


def sample_texts(shared: Path) -> list[str]:
    plays = (shared / "data" / "wikitext2-valid.txt").read_text(encoding="utf-8")
    pieces = [plays[start : start + 500] for start in range(0, 190_000, 500)]
    more = [
        "",
        " ",
        "  a",
        "\n\n\nb",
        "\t\tx = 1",
        "日本　語",
        "naïve café",
        "🙂👨‍👩‍👧",
        "a\r\nb",
        "हिन्दी",
        "12345 ½",
    ]
    return [*pieces, *more, *(" " * n + "a" for n in range(1, 31))]


def test_gguf_file_tokenizer_matches_ids_of_llama_cpp(
    file: Path, loaded: LoadedModel, shared: Path
) -> None:
    texts = sample_texts(shared)
    assert len(texts) > 400
    assert loaded.tokenizer is not None
    with opened(file) as llama:
        for text in texts:
            expected = llama.tokenize(text.encode(), add_bos=False, special=False)
            assert loaded.tokenizer.encode(text) == expected, text


def test_gguf_rewritten_tokenizer_matches_ids_of_llama_cpp(
    loaded: LoadedModel, shared: Path, tmp_path: Path
) -> None:
    own = loaded.tokenizer
    assert own is not None
    if own.byte_token_ids:
        own = as_published(own)
    with vocabulary(tmp_path, describe_tokenizer(own, own.vocab_size)) as (llama, _):
        for text in sample_texts(shared):
            expected = llama.tokenize(text.encode(), add_bos=False, special=False)
            assert own.encode(text) == expected, text


def as_published(own: Tokenizer) -> Tokenizer:
    """Gemma's tokenizer as in its tokenizer.json: runs of spaces are tokens of ▁, and their merges
    and those of other user-defined tokens come first, the longest left halves first."""
    state = json.loads(own.backend.to_str())
    model, added = state["model"], state["added_tokens"]
    renamed = {t["content"]: t["content"].replace(" ", "▁") for t in added}
    model["vocab"] = {renamed.get(token, token): i for token, i in model["vocab"].items()}
    for token in added:
        token["content"] = renamed[token["content"]]
    defined = [token["content"] for token in added if not token["special"]]
    cuts = [(t[:i], t[i:]) for t in defined for i in range(1, len(t))]
    first = [cut for cut in cuts if set(cut) & model["vocab"].keys() == set(cut)]
    first.sort(key=lambda cut: (len(cut[0]), len(cut[1])), reverse=True)
    model["merges"] = [*first, *model["merges"]]
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    state["pre_tokenizer"] = {**split, "invert": False}
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    return Tokenizer(backend, bos_token=own.bos_token, eos_token=own.eos_token, add_bos=True)


def test_converted_gguf_folder_matches_file_in_transformers(
    file: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    assert main(["convert", str(file), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode_prompt(PROMPT)
    assert tokenizer(PROMPT)["input_ids"] == ids
    found, expected = ours(loaded.model, ids), ours(model.eval(), ids)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)
    text = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist()
    assert found[-1].argmax() == text[len(ids)]
    chosen = ours(loaded.model, text)[len(ids) - 1 : -1].argmax(-1).tolist()
    assert chosen == text[len(ids) :]


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k_m"])
def test_requantized_gguf_file_stays_near_source(
    dtype: str,
    file: Path,
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Opening the result writes its weights in fp32 into the cache.
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    options = ["--to", "gguf", "--dtype", dtype, "--out", str(tmp_path / "gguf")]
    assert main(["convert", str(file), *options]) == 0
    (made,) = (tmp_path / "gguf").iterdir()
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode_prompt(PROMPT)
    back = load_model(made)
    assert back.tokenizer is not None
    assert back.tokenizer.encode_prompt(PROMPT) == ids
    with opened(made) as llama:
        require_near(ours(back.model, ids), theirs(llama, ids))
    if dtype == "q8_0":
        require_near(ours(back.model, ids), ours(loaded.model, ids))
