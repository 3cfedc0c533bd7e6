"""Tests of reading pickled checkpoints of other programs: which values are read and which are
filled in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.conversion.foreign.model import read_foreign
from firstlight.errors import ModelError
from firstlight.models.rope import rope_frequencies
from foreign_files import (
    CONTEXT,
    LAYERS,
    LLAMA_CONFIG,
    MLP,
    VOCABULARY,
    WIDTH,
    book_gpt,
    book_llama,
    nanogpt,
    save,
)

Save = Callable[[Any], Path]


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    """Return a function that saves an object with torch.save and returns the file's path."""
    return functools.partial(save, tmp_path / "model.pth")


def test_read_foreign_nanogpt_file_gives_complete_config(saved: Save) -> None:
    foreign = read_foreign(saved(nanogpt()))
    expected = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": VOCABULARY,
        "n_positions": CONTEXT,
        "n_ctx": CONTEXT,
        "n_embd": WIDTH,
        "n_inner": 4 * WIDTH,
        "n_layer": LAYERS,
        "n_head": 4,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": 0.25,
        "attn_pdrop": 0.25,
        "resid_pdrop": 0.25,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    assert {key: foreign.config[key] for key in expected} == expected
    note, left_out = foreign.notes
    assert left_out.startswith("Its optimizer state (optimizer) is not converted: training")
    assert "exact GELU" in note


def test_read_foreign_nanogpt_transposes_linear_weights_and_drops_tied_head(saved: Save) -> None:
    checkpoint = nanogpt()
    foreign = read_foreign(saved(checkpoint))
    linear = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    expected = {
        name: tensor.t() if name.endswith(linear) else tensor
        for name, tensor in checkpoint["model"].items()
        if name != "lm_head.weight"
    }
    assert foreign.tensors.keys() == expected.keys()
    for name, tensor in foreign.tensors.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.is_contiguous(), name


def test_read_foreign_nanogpt_without_biases_adds_zeros_and_note(saved: Save) -> None:
    foreign = read_foreign(saved(nanogpt(bias=False)))
    biases = {name: t for name, t in foreign.tensors.items() if name.endswith(".bias")}
    assert len(biases) == 6 * LAYERS + 1
    assert all(not tensor.any() for tensor in biases.values())
    assert biases["transformer.h.1.mlp.c_fc.bias"].shape == (4 * WIDTH,)
    assert "It has no biases for ln_1, attn.c_attn" in foreign.notes[-1]
    assert "transformer.ln_f: they are set to zero" in foreign.notes[-1]


def test_read_foreign_nanogpt_missing_one_bias_raises(saved: Save) -> None:
    checkpoint = nanogpt()
    del checkpoint["model"]["transformer.h.1.ln_2.bias"]
    with pytest.raises(ModelError, match=r"lacks tensors: transformer\.h\.1\.ln_2\.bias$"):
        read_foreign(saved(checkpoint))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_read_foreign_strips_compile_and_ddp_prefixes(saved: Save, prefix: str) -> None:
    checkpoint = nanogpt()
    plain = read_foreign(saved(checkpoint))
    checkpoint["model"] = {prefix + name: t for name, t in checkpoint["model"].items()}
    prefixed = read_foreign(saved(checkpoint))
    assert prefixed.config == plain.config
    assert prefixed.tensors.keys() == plain.tensors.keys()


def test_read_foreign_padded_vocabulary_is_kept_with_note(saved: Save) -> None:
    checkpoint = nanogpt(vocab_size=50304)
    wide = torch.zeros(50304, WIDTH)
    checkpoint["model"] |= {"transformer.wte.weight": wide, "lm_head.weight": wide}
    foreign = read_foreign(saved(checkpoint))
    assert foreign.tensors["transformer.wte.weight"].shape == (50304, WIDTH)
    assert any("last 47 ids" in note for note in foreign.notes)


@pytest.mark.parametrize(
    "args, message",
    [
        ({"n_layer": 3}, r"model_args specify n_layer 3, but its tensors have 2"),
        ({"block_size": 6}, r"model_args specify block_size 6, but its tensors have 5"),
        ({"n_head": 5}, r"n_head is 5, but must be a divisor of the width 64"),
        ({"n_head": 0}, r"n_head is 0"),
        ({"n_head": "4"}, r"n_head is '4'"),
        ({"dropout": 2.0}, r"embd_pdrop"),
    ],
)
def test_read_foreign_inconsistent_model_args_raise_model_error(
    saved: Save, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_foreign(saved(nanogpt(**args)))


def test_read_foreign_bare_nanogpt_state_dict_guesses_heads_unless_given(saved: Save) -> None:
    path = saved(nanogpt()["model"])
    guessed = read_foreign(path)
    assert guessed.config["n_head"] == 1
    assert any('set "n_head"' in note for note in guessed.notes)
    given = read_foreign(path, config={"num_attention_heads": 16})
    assert given.config["n_head"] == 16
    assert not any("heads" in note for note in given.notes)


def test_read_foreign_book_gpt_merges_queries_keys_and_values(saved: Save) -> None:
    weights = book_gpt(qkv_bias=True)
    tensors = read_foreign(saved(weights)).tensors
    parts = [weights[f"trf_blocks.1.att.W_{name}.weight"] for name in ("query", "key", "value")]
    assert torch.equal(
        tensors["transformer.h.1.attn.c_attn.weight"], torch.cat([part.t() for part in parts], 1)
    )
    parts = [weights[f"trf_blocks.1.att.W_{name}.bias"] for name in ("query", "key", "value")]
    assert torch.equal(tensors["transformer.h.1.attn.c_attn.bias"], torch.cat(parts))
    assert torch.equal(
        tensors["transformer.h.0.mlp.c_proj.weight"], weights["trf_blocks.0.ff.layers.2.weight"].t()
    )
    assert torch.equal(tensors["transformer.h.0.ln_2.bias"], weights["trf_blocks.0.norm2.shift"])
    assert torch.equal(tensors["transformer.ln_f.weight"], weights["final_norm.scale"])
    assert torch.equal(tensors["lm_head.weight"], weights["out_head.weight"])


def test_read_foreign_book_gpt_without_qkv_biases_adds_none(saved: Save) -> None:
    path = saved(book_gpt())
    foreign = read_foreign(path)
    assert foreign.config["qkv_bias"] is False
    assert not any(name.endswith("c_attn.bias") for name in foreign.tensors)
    assert "transformer.h.0.attn.c_proj.bias" in foreign.tensors
    assert foreign.notes[-1].startswith("Its queries, keys and values have no biases")
    with pytest.raises(ModelError, match="has qkv_bias False, but the config specifies True"):
        read_foreign(path, config={"qkv_bias": True})
    assert "qkv_bias" not in read_foreign(saved(book_gpt(qkv_bias=True))).config


def test_read_foreign_head_equal_to_embedding_is_tied(saved: Save) -> None:
    weights = book_gpt()
    weights["out_head.weight"] = weights["tok_emb.weight"].clone()
    foreign = read_foreign(saved(weights))
    assert foreign.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in foreign.tensors


def test_read_foreign_unknown_head_count_raises_and_asks_for_it(saved: Save) -> None:
    path = saved(book_gpt(C=48))
    with pytest.raises(ModelError, match=r'hidden size 48 is not a multiple of 64.*set "n_head"'):
        read_foreign(path)
    assert read_foreign(path, config={"n_head": 3}).config["n_head"] == 3


def test_read_foreign_book_llama_takes_missing_values_from_config(saved: Save) -> None:
    weights = book_llama()
    foreign = read_foreign(saved(weights), config={**LLAMA_CONFIG, "eos_token_id": 3})
    expected = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 3,
    }
    assert {key: foreign.config[key] for key in expected} == expected
    assert torch.equal(
        foreign.tensors["model.layers.1.mlp.gate_proj.weight"],
        weights["trf_blocks.1.ff.fc1.weight"],
    )
    assert torch.equal(
        foreign.tensors["model.layers.1.mlp.up_proj.weight"], weights["trf_blocks.1.ff.fc2.weight"]
    )
    assert len(foreign.tensors) == len(weights)


@pytest.mark.parametrize(
    "lacking, named",
    [
        ({"num_attention_heads"}, "num_attention_heads: set"),
        ({"max_position_embeddings"}, "max_position_embeddings: set"),
        ({"rope_parameters"}, r"rope_parameters \(with rope_theta\): set"),
        (set(LLAMA_CONFIG), "num_attention_heads, max_position_embeddings, rope_parameters"),
    ],
)
def test_read_foreign_llama_missing_values_raise_and_are_named(
    saved: Save, lacking: set[str], named: str
) -> None:
    config = {key: value for key, value in LLAMA_CONFIG.items() if key not in lacking}
    with pytest.raises(ModelError, match=rf"does not specify {named}"):
        read_foreign(saved(book_llama()), config=config)


def test_read_foreign_llama_tables_determine_heads_and_context_and_verify_base(saved: Save) -> None:
    turns = torch.arange(12)[:, None] * rope_frequencies(16, 2000.0, None)
    tables = {"att.cos": turns.cos().repeat(1, 2), "att.sin": turns.sin().repeat(1, 2)}
    weights = book_llama()
    for i in range(LAYERS):
        weights |= {f"trf_blocks.{i}.{name}": table for name, table in tables.items()}
    path = saved(weights)
    foreign = read_foreign(path, config={"rope_theta": 2000.0})
    assert foreign.config["num_attention_heads"] == 4
    assert foreign.config["num_key_value_heads"] == 2
    assert foreign.config["max_position_embeddings"] == 12
    with pytest.raises(ModelError, match="rotary tables that don't match rope_theta 10000"):
        read_foreign(path, config={"rope_theta": 10000.0})
    with pytest.raises(ModelError, match="num_attention_heads 4, but the config specifies 8"):
        read_foreign(path, config=LLAMA_CONFIG)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_embd": 65}, "has n_embd 64, but the config specifies 65"),
        ({"hidden_size": 65}, "has n_embd 64, but the config specifies 65"),
        ({"n_head": 2}, "has n_head 4, but the config specifies 2"),
        ({"tie_word_embeddings": False}, "has tie_word_embeddings True"),
        ({"model_type": "llama"}, "has model_type 'gpt2'"),
        ({"n_heads": 4}, r"no key 'n_heads' \(did you mean 'n_head'\?\)"),
        ({"activation_function": "silu"}, "activation_function 'silu' is not supported"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon"),
    ],
)
def test_read_foreign_config_contradicting_file_raises_model_error(
    saved: Save, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_foreign(saved(nanogpt()), config=change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_attention_heads": 3}, "num_attention_heads is 3, but must be a divisor"),
        ({"num_attention_heads": 1}, "can't be divided into heads of dimension 64"),
        ({"num_attention_heads": 64}, "head_dim 1 must be even"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"sliding_window": 4}, "no key 'sliding_window'"),
    ],
)
def test_read_foreign_llama_impossible_config_raises_model_error(
    saved: Save, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_foreign(saved(book_llama()), config={**LLAMA_CONFIG, **change})


def test_read_foreign_accepts_complete_gpt2_config_json(saved: Save) -> None:
    config = {
        "n_inner": None,
        "eos_token_id": 2,
        "summary_type": "cls_index",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }
    foreign = read_foreign(saved(nanogpt()), config=config)
    assert foreign.config["n_inner"] == 4 * WIDTH
    assert foreign.config["eos_token_id"] == 2
    assert foreign.config["activation_function"] == "gelu_new"
    assert foreign.config["layer_norm_epsilon"] == 1e-5
    assert [note for note in foreign.notes if "optimizer state" not in note] == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells mapped files on Linux")
def test_read_foreign_maps_file_without_copying(saved: Save) -> None:
    path = saved(book_llama())
    model = read_foreign(path, config=LLAMA_CONFIG)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert model.tensors
