"""Hugging Face's transformers is the reference: the same files must mean the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from drawn import (
    NAMES,
    assert_same_logits,
    draw,
    hf_config,
    hf_model,
    load_in_transformers,
    own_model,
    write_folder,
)

from firstlight.errors import ModelError
from firstlight.generation.engine import generate, load
from firstlight.models import GPT2Config, LlamaConfig, ModelConfig, MoEConfig
from firstlight.models.rope import LinearRope
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.weights.huggingface import load_model, read_config
from firstlight.weights.stored import stored_tensors


def draw_tied_gpt2(tied: bool) -> ModelConfig:
    return draw("gpt2", 2).model_copy(update={"tie_word_embeddings": tied})


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", NAMES)
def test_what_firstlight_saves_loads_in_transformers_with_the_same_logits_and_config(
    family: str, seed: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = draw(family, seed)
    own = own_model(config, seed)
    folder = write_folder(tmp_path / "own", own, tokenizer)
    theirs = load_in_transformers(folder)
    assert theirs.dtype == torch.float32
    assert_same_logits(own, theirs, seed)

    read, expected = theirs.config.to_dict(), hf_config(config).to_dict()
    loose = ("bos_token_id", "eos_token_id", "architectures", "_name_or_path", "dtype")
    # transformers' None and the number it stands for
    read["n_inner"] = read.get("n_inner") if expected.get("n_inner") else None
    expected.setdefault("n_inner", None)
    assert {k: v for k, v in read.items() if k not in loose and k in expected} == {
        k: v for k, v in expected.items() if k not in loose
    }
    assert theirs.config.eos_token_id == tokenizer.eos_token_id
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id

    # and back again: the same numbers, the same config
    theirs.save_pretrained(tmp_path / "back")
    assert read_config(tmp_path / "back") == config
    assert_same_files(folder / "model.safetensors", tmp_path / "back" / "model.safetensors")


def assert_same_files(one: Path, other: Path) -> None:
    """The same names, formats and bytes of tensors."""
    a, b = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert tensor.shape == b[name].shape
        assert tensor.numpy().tobytes() == b[name].numpy().tobytes(), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", NAMES)
def test_loading_and_saving_changes_no_bit_of_what_transformers_wrote(
    family: str, seed: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    hf_model(draw(family, seed), seed).save_pretrained(tmp_path / "theirs")
    own = load_model(tmp_path / "theirs").model
    folder = write_folder(tmp_path / "own", own, tokenizer)
    assert_same_files(tmp_path / "theirs" / "model.safetensors", folder / "model.safetensors")


_SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 256,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-3,
    "rope_theta": 99.0,
    "rope_scaling": LinearRope(rope_type="linear", factor=2.0),
    "tie_word_embeddings": True,
}
_WINDOW: dict[str, Any] = {"sliding_window": 77, "max_window_layers": 1}
_DIVISIBLE: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(vocab_size=99, hidden_size=96, num_hidden_layers=2, num_attention_heads=4),
    "llama": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": LlamaConfig(**_SHAPE, model_type="mistral", sliding_window=77),
    "qwen2": LlamaConfig(**_SHAPE, **_WINDOW, model_type="qwen2", num_hidden_layers=30),
    "qwen3": LlamaConfig(**_SHAPE, **_WINDOW, model_type="qwen3", num_hidden_layers=30),
    "granite": LlamaConfig(
        **_SHAPE,
        model_type="granite",
        embedding_multiplier=12.0,
        attention_multiplier=0.1,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "smollm3": LlamaConfig(
        **_SHAPE, model_type="smollm3", sliding_window=77, num_hidden_layers=36, mlp_bias=True
    ),
    "phi3": LlamaConfig(
        **_SHAPE | {"rope_scaling": None},
        model_type="phi3",
        sliding_window=77,
        partial_rotary_factor=0.5,
    ),
    "olmo2": LlamaConfig(**_SHAPE, model_type="olmo2", attention_bias=True),
    "olmo3": LlamaConfig(
        **_SHAPE,
        model_type="olmo3",
        sliding_window=77,
        num_hidden_layers=32,
        rope_local_base_freq=33.0,
    ),
    "arcee": LlamaConfig(**_SHAPE, model_type="arcee", attention_bias=True, mlp_bias=True),
    "glm4": LlamaConfig(**_SHAPE, model_type="glm4", partial_rotary_factor=0.25),
    "gemma2": LlamaConfig(
        **_SHAPE | {"num_key_value_heads": 4},
        model_type="gemma2",
        num_hidden_layers=26,
        sliding_window=77,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=9.0,
    ),
    "gemma3_text": LlamaConfig(
        **_SHAPE | {"num_key_value_heads": 4},
        model_type="gemma3_text",
        num_hidden_layers=26,
        sliding_window=77,
        rope_local_base_freq=33.0,
    ),
    "mixtral": MoEConfig(**_SHAPE, sliding_window=77, num_experts=4),
    "qwen3_moe": MoEConfig(
        **_SHAPE, model_type="qwen3_moe", sliding_window=77, num_experts=9, moe_intermediate_size=8
    ),
}


@pytest.mark.parametrize("family", NAMES)
def test_a_key_left_out_of_config_json_means_what_it_means_to_transformers(
    family: str, tmp_path: Path
) -> None:
    """Its shape stays possible whichever default takes a key's place."""
    full = _DIVISIBLE[family].to_hf()
    path = tmp_path / "config.json"
    for left_out in sorted(full.keys() - {"model_type"}):
        path.write_text(json.dumps({k: v for k, v in full.items() if k != left_out}))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert read_config(tmp_path) == type(_DIVISIBLE[family]).from_hf(theirs.to_dict()), left_out


@pytest.mark.parametrize("family", NAMES)
def test_an_empty_config_json_is_the_families_own_default_to_both(
    family: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path) == type(_DIVISIBLE[family]).from_hf(theirs.to_dict())


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_the_rope_keys_of_transformers_4_are_read(
    scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    hf_model(draw("llama", 0), 0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 777.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = load_model(tmp_path).model
    assert isinstance(own.config, LlamaConfig)
    assert own.config.rope_theta == 777.0
    assert (own.config.rope_scaling is None) == (scaling is None)
    assert_same_logits(own, load_in_transformers(tmp_path))


@pytest.mark.parametrize("family", NAMES)
def test_weights_in_several_files_are_read_through_their_index(family: str, tmp_path: Path) -> None:
    theirs = hf_model(draw(family, 4), 4)
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(load_model(tmp_path).model, theirs)

    last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ModelError, match=f"{last.name} is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize("prefixed", [True, False])
def test_gpt2_files_of_the_hub_with_mask_buffers_are_read(prefixed: bool, tmp_path: Path) -> None:
    """openai-community/gpt2 has no `transformer.` before its names, and a causal mask a layer."""
    theirs = hf_model(draw_tied_gpt2(True), 2)
    theirs.save_pretrained(tmp_path)
    prefix = "transformer." if prefixed else ""
    tensors = {
        name.replace("transformer.", prefix): tensor.clone()
        for name, tensor in theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    for layer in range(theirs.config.n_layer):
        tensors[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        tensors[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(load_model(tmp_path).model, theirs)


def test_an_untied_gpt2_head_without_prefix_is_read(tmp_path: Path) -> None:
    theirs = hf_model(draw_tied_gpt2(False), 1)
    theirs.save_pretrained(tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in theirs.state_dict().items()
    }
    assert "lm_head.weight" in tensors
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(load_model(tmp_path).model, theirs)


def test_the_rotary_buffers_of_old_llama_files_are_passed_over(tmp_path: Path) -> None:
    theirs = hf_model(draw("llama", 0), 0)
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for layer in range(theirs.config.num_hidden_layers):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(load_model(tmp_path).model, theirs)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_half_precision_files_are_read_as_they_are_or_as_fp32(
    family: str, dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    hf_model(draw(family, 2), 2).to(dtype).save_pretrained(tmp_path)
    assert {p.dtype for p in load_model(tmp_path).model.parameters()} == {dtype}
    own = load_model(tmp_path, dtype=torch.float32).model
    assert {p.dtype for p in own.parameters()} == {torch.float32}
    assert sorted({t.kind for t in stored_tensors(tmp_path).values()}) == [name]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="eager"
    )
    assert_same_logits(own, theirs.eval())


# Of a qwen2 folder transformers reads the tokenizer otherwise; `export_notes` says so.
@pytest.mark.parametrize("family", [name for name in NAMES if name != "qwen2"])
def test_tokenizer_files_give_the_same_ids_and_text_in_transformers(
    family: str, tmp_path: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    """Beside either config.json: transformers also looks at the model's family."""
    folder = write_folder(tmp_path / "own", own_model(draw(family, 0), 0), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*texts[:20], "", " ", "\n\n  x", "e\u0301 🙂 \u200b", "don't  stop   "]:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == tokenizer.decode(ids)
    assert theirs.eos_token_id == tokenizer.eos_token_id
    assert theirs.bos_token_id == tokenizer.bos_token_id
    assert len(theirs) == tokenizer.vocab_size


def test_a_tokenizer_that_transformers_saved_again_gives_the_same_ids(
    tmp_path: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    tokenizer.save_pretrained(tmp_path / "own")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "back")
    back = Tokenizer.from_pretrained(tmp_path / "back")
    assert back.encode_batch(texts[:20]) == tokenizer.encode_batch(texts[:20])
    assert (back.bos_token, back.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)
    assert back.add_bos == tokenizer.add_bos


@pytest.mark.parametrize("name", ["gpt2-tokenizer", "llama2-tokenizer", "llama3-tokenizer"])
def test_well_known_tokenizers_give_the_same_prompts_in_transformers(
    name: str, shared: Path, tmp_path: Path, texts: list[str]
) -> None:
    """A prompt's ids with bos where the model expects it."""
    tokenizer = Tokenizer.from_pretrained(shared / "models" / name)
    tokenizer.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts[:5], "Hello, world! 12345\n\n  x", "日本語 🙂"]:
        assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text)


@pytest.mark.parametrize("family", NAMES)
def test_a_checkpoint_of_a_training_run_is_a_model_folder_of_transformers(
    family: str, recipe: dict[str, Any]
) -> None:
    """Weights, config, tokenizer and end token, without a conversion between."""
    if family == "gpt2":
        recipe["model"].pop("num_key_value_heads")
    recipe["model"]["model_type"] = family
    recipe["schedule"] = {"max_steps": 3}
    checkpoint = train(recipe).checkpoint
    own = load(checkpoint)
    theirs = load_in_transformers(checkpoint)
    assert_same_logits(own.model, theirs)
    assert (theirs.generation_config.eos_token_id,) == own.eos_token_ids

    assert own.tokenizer is not None
    inputs = transformers.AutoTokenizer.from_pretrained(checkpoint)("the star", return_tensors="pt")
    expected = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
    result = generate(own, "the star", max_new_tokens=12, temperature=0)
    assert [*own.tokenizer.encode("the star"), *result.token_ids] == expected
