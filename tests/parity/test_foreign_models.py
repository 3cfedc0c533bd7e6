"""Checkpoints of other programs compute the same after they are converted.

Three results must agree with the programs' models: the reference logits by which conversions are
checked, and the logits of transformers and of this package with the converted tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from foreign_programs import (
    CONTEXT,
    HEADS,
    IDS,
    SCALED,
    VOCABULARY,
    WIDTH,
    BookGPT,
    BookLlama,
    NanoGPT,
    drawn,
    in_transformers,
    nanogpt_checkpoint,
)
from torch import nn

from firstlight.conversion.foreign.model import ForeignModel, read_foreign
from firstlight.lora.loading import load_model
from firstlight.models.rope import Llama3Rope


@torch.no_grad()
def assert_computes_the_same(model: nn.Module, foreign: ForeignModel, folder: Path) -> None:
    """Check that transformers and firstlight compute the logits of `model` from its tensors."""
    expected = model(IDS)
    assert expected.std() > 0.1
    theirs = in_transformers(foreign)(IDS).logits
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    (folder / "config.json").write_text(json.dumps(foreign.config))
    safetensors.torch.save_file(foreign.tensors, folder / "model.safetensors")
    ours = load_model(folder).model.float()(IDS)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt_computes_same_logits(tmp_path: Path, bias: bool, mask: bool, prefix: str) -> None:
    model = drawn(NanoGPT(bias, mask))
    torch.save(nanogpt_checkpoint(model, bias, prefix), tmp_path / "ckpt.pt")
    foreign = read_foreign(tmp_path / "ckpt.pt")
    assert foreign.program == "nanoGPT"
    assert foreign.config["tie_word_embeddings"] is True
    assert foreign.config["activation_function"] == "gelu"
    assert_computes_the_same(model, foreign, tmp_path)


def test_nanogpt_before_may_2023_computes_same_logits(tmp_path: Path) -> None:
    model = drawn(NanoGPT(gelu="tanh"))
    torch.save(nanogpt_checkpoint(model), tmp_path / "ckpt.pt")
    given = {"activation_function": "gelu_new"}
    assert_computes_the_same(model, read_foreign(tmp_path / "ckpt.pt", config=given), tmp_path)


def test_nanogpt_with_relu_setting_computes_same_logits(tmp_path: Path) -> None:
    model = drawn(NanoGPT(gelu="relu"))
    torch.save(nanogpt_checkpoint(model), tmp_path / "ckpt.pt")
    given = {"activation_function": "relu"}
    assert_computes_the_same(model, read_foreign(tmp_path / "ckpt.pt", config=given), tmp_path)


def test_nanogpt_untied_head_is_kept_with_embedding(tmp_path: Path) -> None:
    model = NanoGPT()
    model.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
    torch.save(nanogpt_checkpoint(drawn(model)), tmp_path / "ckpt.pt")
    foreign = read_foreign(tmp_path / "ckpt.pt")
    assert any("head and embedding differ" in note for note in foreign.notes)
    assert_computes_the_same(model, foreign, tmp_path)


def test_checkpoint_of_torch_before_1_6_computes_same_logits(tmp_path: Path) -> None:
    model = drawn(NanoGPT())
    path = tmp_path / "ckpt.pt"
    torch.save(nanogpt_checkpoint(model), path, _use_new_zipfile_serialization=False)
    assert_computes_the_same(model, read_foreign(path), tmp_path)


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_book_gpt_computes_same_logits(
    tmp_path: Path, qkv_bias: bool, fast: bool, tied: bool
) -> None:
    model = drawn(BookGPT(qkv_bias, fast))
    if tied:
        model.out_head.weight = model.tok_emb.weight
    torch.save(model.state_dict(), tmp_path / "model.pth")
    foreign = read_foreign(tmp_path / "model.pth", config={"n_head": HEADS})
    assert foreign.program == "LLMs-from-scratch"
    assert foreign.config["tie_word_embeddings"] is tied
    assert foreign.config["activation_function"] == "gelu_new"
    assert_computes_the_same(model, foreign, tmp_path)


def test_book_gpt_with_optimizer_state_computes_same_logits(tmp_path: Path) -> None:
    model = drawn(BookGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    model(IDS).sum().backward()
    optimizer.step()
    both = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(both, tmp_path / "model_and_optimizer.pth")
    foreign = read_foreign(
        tmp_path / "model_and_optimizer.pth", config={"num_attention_heads": HEADS}
    )
    assert "Its optimizer state (optimizer_state_dict) is not converted" in foreign.notes[0]
    assert_computes_the_same(model, foreign, tmp_path)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_book_llama_computes_same_logits(
    tmp_path: Path, kv_heads: int, tied: bool, scaled: bool
) -> None:
    scaling = Llama3Rope.model_validate(SCALED) if scaled else None
    model = drawn(BookLlama(kv_heads=kv_heads, scaling=scaling))
    if tied:
        model.out_head.weight = model.tok_emb.weight
    torch.save(model.state_dict(), tmp_path / "model.pth")
    config = {
        "num_attention_heads": 6,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_theta": 5000.0, **(SCALED if scaled else {})},
    }
    foreign = read_foreign(tmp_path / "model.pth", config=config)
    assert foreign.config["num_key_value_heads"] == kv_heads
    assert foreign.config["tie_word_embeddings"] is tied
    assert_computes_the_same(model, foreign, tmp_path)


def test_book_llama_with_tables_infers_heads_and_context(tmp_path: Path) -> None:
    model = drawn(BookLlama(saves_tables=True))
    torch.save(model.state_dict(), tmp_path / "model.pth")
    foreign = read_foreign(tmp_path / "model.pth", config={"rope_theta": 5000.0})
    assert foreign.config["num_attention_heads"] == 6
    assert foreign.config["max_position_embeddings"] == CONTEXT
    assert_computes_the_same(model, foreign, tmp_path)


@pytest.mark.parametrize("kind", ["nanoGPT", "GPT", "Llama"])
def test_foreign_bfloat16_weights_stay_bfloat16_and_compute_same_logits(
    tmp_path: Path, kind: str
) -> None:
    model: nn.Module
    config: dict[str, Any] = {}
    if kind == "nanoGPT":
        model = drawn(NanoGPT()).bfloat16()
        torch.save(nanogpt_checkpoint(model), tmp_path / "model.pth")
    elif kind == "GPT":
        model, config = drawn(BookGPT()).bfloat16(), {"n_head": HEADS}
        torch.save(model.state_dict(), tmp_path / "model.pth")
    else:
        # The saved tables are converted to bfloat16 with the model, which computes with its own
        # tables.
        model = drawn(BookLlama(saves_tables=True)).bfloat16()
        config = {"rope_theta": 5000.0}
        torch.save(model.state_dict(), tmp_path / "model.pth")
    foreign = read_foreign(tmp_path / "model.pth", config=config)
    assert {tensor.dtype for tensor in foreign.tensors.values()} == {torch.bfloat16}
    assert_computes_the_same(model.float(), foreign, tmp_path)
