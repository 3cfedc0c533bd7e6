"""Tests of llama.cpp's quantised formats: the checks before and after quantisation, and the
quantiser itself if llama-cpp-python is installed.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from firstlight.conversion.convert import convert, read_source
from firstlight.conversion.quantize import (
    PERPLEXITY_LIMITS,
    QUANTISED,
    evaluation_ids,
    importance_matrix,
    perplexity,
    perplexity_limit,
)
from firstlight.errors import ConfigError, MissingDependencyError, ModelError

pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture
def stories(shared: Path) -> Path:
    return shared / "models" / "stories260K"


def test_perplexity_limits_fall_with_more_bits() -> None:
    limits = [perplexity_limit(name) for name in sorted(QUANTISED, key=lambda n: n.strip("iq")[0])]
    assert limits == sorted(limits, reverse=True)
    assert set(limits) == set(PERPLEXITY_LIMITS.values())


def test_perplexity_covers_all_tokens_except_first() -> None:
    ids = torch.tensor([[3, 1, 2]])
    logits = torch.zeros(1, 3, 4)
    assert perplexity(logits, ids) == pytest.approx(4.0)
    logits[0, 0, 1] = logits[0, 1, 2] = 50.0
    assert perplexity(logits, ids) == pytest.approx(1.0)
    assert perplexity(-1e3 * logits, ids) == math.inf


def test_importance_is_mean_square_of_matrix_inputs(stories: Path) -> None:
    model = read_source(stories, None, None, lambda source: source)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text = (stories / "greedy.txt").read_text() * 5
    found = importance_matrix(model.config, model.tensors, tokenizer, text)
    assert len(found) == 7 * 5
    ids = torch.tensor(tokenizer.encode(text))[: 512 * (len(tokenizer.encode(text)) // 512)]
    weights = model.tensors
    x = weights["model.embed_tokens.weight"][ids]
    x = x * (x.square().mean(-1, keepdim=True) + model.config["rms_norm_eps"]).rsqrt()
    x = x * weights["model.layers.0.input_layernorm.weight"]
    expected = x.square().mean(0)
    torch.testing.assert_close(found["blk.0.attn_q.weight"], expected)
    torch.testing.assert_close(found["blk.0.attn_v.weight"], expected)
    with pytest.raises(ConfigError, match="has 4 tokens: use at least 512"):
        importance_matrix(model.config, model.tensors, tokenizer, "a b c d")


def test_evaluation_text_fills_context(stories: Path) -> None:
    tokenizer = read_source(stories, None, None, lambda source: source.tokenizer)
    assert tokenizer is not None
    assert evaluation_ids(tokenizer, 100).shape == (1, 100)
    assert evaluation_ids(tokenizer, 10_000).shape == (1, 512)


def test_quantize_missing_requirements_raise_before_work(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"--calibration requires one of llama\.cpp's formats, "
            r"for example"
        ),
    ):
        convert(stories, tmp_path / "out", to="gguf", calibration=stories / "greedy.txt")
    with pytest.raises(ConfigError, match=r"gguf does not support dtype 'q4_k' \(did you mean"):
        convert(stories, tmp_path / "out", to="gguf", dtype="q4_k")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingDependencyError, match=r"firstlight\[llama-cpp\]"):
        convert(stories, tmp_path / "out", to="gguf", dtype="q4_k_m")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_quantize_with_llama_cpp_reports_perplexity(stories: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    result = convert(stories, tmp_path / "out", to="ollama", dtype="Q4_K_M")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "Modelfile",
        "stories260K-q4_k_m.gguf",
    ]
    assert (tmp_path / "out" / "Modelfile").read_text().startswith("FROM ./stories260K-q4_k_m.gguf")
    assert result.dtype == "q4_k_m"
    assert result.perplexity is not None
    before, after, bits = result.perplexity
    assert before == pytest.approx(16.345, abs=0.01)
    assert 1.0 < after / before < 1.1
    assert 5 < bits < 10


@pytest.mark.slow
def test_quantize_with_calibration_text_changes_weights_and_lowers_loss(
    stories: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    (tmp_path / "text").write_text((stories / "greedy.txt").read_text() * 5)
    plain = convert(stories, tmp_path / "a", to="gguf", dtype="q4_0")
    told = convert(stories, tmp_path / "b", to="gguf", dtype="q4_0", calibration=tmp_path / "text")
    assert plain.perplexity is not None
    assert told.perplexity is not None
    assert told.perplexity[1] < plain.perplexity[1]


@pytest.mark.slow
def test_quantize_perplexity_above_limit_raises_and_writes_nothing(
    stories: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    with pytest.raises(ModelError, match=r"q4_0 raises the perplexity .* more than the allowed 1%"):
        convert(stories, tmp_path / "out", to="gguf", dtype="q4_0", tolerance=0.01)
    assert list(tmp_path.iterdir()) == []
