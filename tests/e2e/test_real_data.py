"""Real corpora with real tokenizers, all the way from text to a model that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import firstlight

pytestmark = pytest.mark.usefixtures("forked_processes")


def text_to_model(
    folder: Path, text: str, tokenizer: Path, model: dict[str, Any]
) -> tuple[dict[str, Any], firstlight.LoadedModel]:
    """prepare, train, load, eval and generate on the text; the manifest, and the model."""
    (folder / "corpus.txt").write_text(text, encoding="utf-8")
    manifest = firstlight.prepare([folder / "corpus.txt"], tokenizer, folder / "data")
    assert sum(split["text_bytes"] for split in manifest["splits"].values()) == len(text.encode())
    recipe = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **model},
        "data": {"dir": str(folder / "data"), "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 6, "warmup_steps": 1},
        "optimizer": {"learning_rate": 3e-2},
        "efficiency": {"precision": "fp32"},
        "evaluation": {"every_steps": 3, "max_rows": 4, "sample_tokens": 4, "on_start": False},
        "checkpoint": {"every_steps": 0},
    }
    records: list[Mapping[str, Any]] = []
    firstlight.train(recipe, on_step=records.append)
    assert len(records) == 6
    assert records[-1]["train/loss"] < records[0]["train/loss"] - 0.3
    loaded = firstlight.load(folder / "run")
    evaluated = firstlight.evaluate(loaded)
    assert evaluated.loss < records[0]["train/loss"] - 0.3
    assert evaluated.gzip_bits_per_byte is not None
    assert 1 < evaluated.gzip_bits_per_byte < 8
    generated = firstlight.generate(loaded, "The ", max_new_tokens=8, seed=1)
    assert len(generated.token_ids) == 8 or generated.finish_reason == "stop"
    assert generated.text.encode("utf-8")  # no lone half of a character
    return manifest, loaded


def assert_transformers_agrees(ours: firstlight.LoadedModel, text: str) -> None:
    """transformers loads the folder as it is, with the same ids and the same logits."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ours.folder)
    theirs.eval()
    assert ours.tokenizer is not None
    ids = ours.tokenizer.encode_prompt(text)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(ours.folder)
    assert their_tokenizer(text)["input_ids"] == ids
    assert their_tokenizer.decode(ids, skip_special_tokens=True) == text
    input_ids = torch.tensor([ids[:32]])
    with torch.inference_mode():
        difference = theirs(input_ids).logits - ours.model(input_ids)
    assert float(difference.abs().max()) < 1e-5


def test_tinyshakespeare_with_gpt2_tokenizer_model_matches_transformers(
    shared: Path, tmp_path: Path
) -> None:
    text = (shared / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:60_000]
    manifest, loaded = text_to_model(
        tmp_path,
        text,
        shared / "models" / "gpt2-tokenizer",
        {"model_type": "gpt2", "max_position_embeddings": 64},
    )
    assert (manifest["vocab_size"], manifest["dtype"]) == (50257, "uint16")
    assert_transformers_agrees(loaded, text[1000:1100])


@pytest.mark.slow
def test_wikitext_with_llama3_tokenizer_model_matches_transformers(
    shared: Path, tmp_path: Path
) -> None:
    text = (shared / "data" / "wikitext2-valid.txt").read_text(encoding="utf-8")[:60_000]
    manifest, loaded = text_to_model(
        tmp_path,
        text,
        shared / "models" / "llama3-tokenizer" / "tokenizer.model",
        {
            "model_type": "llama",
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
        },
    )
    assert (manifest["vocab_size"], manifest["dtype"]) == (128256, "uint32")
    assert_transformers_agrees(loaded, text[1000:1100])


@pytest.mark.slow
def test_real_model_is_fine_tuned_with_one_command(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    run = firstlight.train_texts(
        shared / "data" / "instruction-data.json",
        init_from=shared / "models" / "stories260K",
        steps=16,
        run_dir=tmp_path / "run",
        overrides={"evaluation.sample_tokens": 8, "evaluation.max_rows": 8},
        progress=False,
    )
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["val/loss"] for line in lines if line.get("val/loss") is not None]
    assert losses[-1] < losses[0] - 0.2
    # Its tokenizer has no template, and the model gets one that is plain text.
    assert "### Instruction:" in str(firstlight.load(tmp_path / "run").tokenizer.chat_template)  # type: ignore[union-attr]
    assert [prompt for prompt, _ in run.samples] != [""]
