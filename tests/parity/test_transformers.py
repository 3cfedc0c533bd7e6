"""Hugging Face's transformers is the reference: the same files must give the same model."""

from __future__ import annotations

import json
import shutil
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
    spread,
    write_folder,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from builders import slow_but
from firstlight.checkpoint.checkpoint import OPTIMIZER_NAME
from firstlight.conversion.convert import convert
from firstlight.errors import ModelError
from firstlight.generation.engine import generate, load
from firstlight.lora.loading import load_model
from firstlight.models import (
    FAMILIES,
    DeepseekConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    ModelConfig,
    MoEConfig,
    NanoChatConfig,
    Qwen3NextConfig,
    Qwen35Config,
    Qwen35MoEConfig,
)
from firstlight.models.rope import LinearRope
from firstlight.recipe import load_recipe
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.weights.huggingface import read_config
from firstlight.weights.loading import LOADING_MODES
from firstlight.weights.stored import WEIGHTS_NAME, save_weights, stored_tensors, unpack_mxfp4


def draw_tied_gpt2(tied: bool) -> ModelConfig:
    return draw("gpt2", 2).model_copy(update={"tie_word_embeddings": tied})


#: Random models of each family: as many as the longest choice of a key has values.
_DRAWS = 6


@pytest.mark.parametrize("seed", range(_DRAWS))
@pytest.mark.parametrize("family", NAMES)
def test_saved_model_loads_in_transformers_with_same_logits_and_config(
    family: str, seed: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = spread(family, _DRAWS)[seed]
    own = own_model(config, seed)
    folder = write_folder(tmp_path / "own", own, tokenizer)
    theirs = load_in_transformers(folder)
    assert theirs.dtype == torch.float32
    assert_same_logits(own, theirs, seed)

    read, expected = theirs.config.to_dict(), hf_config(config).to_dict()
    loose = ("bos_token_id", "eos_token_id", "architectures", "_name_or_path", "dtype")
    # transformers' None, and the number that it stands for
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
    """Check that names, formats and bytes of the tensors are the same."""
    a, b = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert tensor.shape == b[name].shape
        assert tensor.numpy().tobytes() == b[name].numpy().tobytes(), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", NAMES)
def test_transformers_model_loaded_and_saved_is_bitwise_unchanged(
    family: str, seed: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    hf_model(spread(family, 3)[seed], seed).save_pretrained(tmp_path / "theirs")
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
_OWN_HEADS: dict[str, Any] = {"num_key_value_heads": 32}
_DIVISIBLE: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(vocab_size=99, hidden_size=96, num_hidden_layers=2, num_attention_heads=4),
    "llama": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": LlamaConfig(**_SHAPE, model_type="mistral", sliding_window=77),
    "ministral3": LlamaConfig(**_SHAPE, model_type="ministral3", sliding_window=77),
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
    "stablelm": LlamaConfig(
        **_SHAPE | {"num_key_value_heads": 32},
        model_type="stablelm",
        attention_bias=True,
        qk_layernorm=True,
        use_parallel_residual=True,
        partial_rotary_factor=0.5,
    ),
    "gpt_neox": GPTNeoXConfig(
        **_SHAPE | {"num_key_value_heads": 32, "hidden_size": 512, "num_attention_heads": 32},
        attention_bias=False,
        use_parallel_residual=False,
        partial_rotary_factor=0.5,
        hidden_act="gelu_fast",
    ),
    "nanochat": NanoChatConfig(
        **_SHAPE | {"hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 6},
        attention_bias=True,
        final_logit_softcapping=3.0,
    ),
    "mixtral": MoEConfig(**_SHAPE, sliding_window=77, num_experts=4),
    "qwen3_moe": MoEConfig(
        **_SHAPE, model_type="qwen3_moe", sliding_window=77, num_experts=9, moe_intermediate_size=8
    ),
    "deepseek_v2": DeepseekConfig(
        **_SHAPE | _OWN_HEADS, model_type="deepseek_v2", routed_scaling_factor=3.0, n_group=2
    ),
    "deepseek_v3": DeepseekConfig(
        **_SHAPE | {"num_attention_heads": 128, "num_key_value_heads": 128},
        num_hidden_layers=5,
        num_experts=16,
        n_group=8,
        topk_group=4,
        kv_lora_rank=9,
        rope_interleave=False,
    ),
    "qwen3_next": Qwen3NextConfig(
        **_SHAPE,
        num_hidden_layers=48,
        num_experts=16,
        partial_rotary_factor=0.5,
        linear_num_key_heads=2,
        linear_num_value_heads=32,
        layer_types=["full_attention", "linear_attention"] * 24,
    ),
    "qwen3_5_text": Qwen35Config(
        **_SHAPE,
        num_hidden_layers=32,
        partial_rotary_factor=0.5,
        linear_num_key_heads=2,
        linear_num_value_heads=32,
        layer_types=["full_attention", "linear_attention"] * 16,
    ),
    "qwen3_5_moe_text": Qwen35MoEConfig(
        **_SHAPE,
        num_hidden_layers=40,
        num_experts=16,
        partial_rotary_factor=0.5,
        linear_num_key_heads=2,
        linear_num_value_heads=32,
        layer_types=["full_attention", "linear_attention"] * 20,
    ),
    "lfm2": Lfm2Config(**_SHAPE, num_hidden_layers=32),
    "gpt_oss": GptOssConfig(
        **_SHAPE, sliding_window=77, num_hidden_layers=36, num_experts=9, swiglu_limit=3.0
    ),
}


@pytest.mark.parametrize("family", NAMES)
def test_config_json_missing_key_uses_default_of_transformers(family: str, tmp_path: Path) -> None:
    """The shape remains valid, whichever key is replaced by its default."""
    full = _DIVISIBLE[family].to_hf()
    path = tmp_path / "config.json"
    for left_out in sorted(full.keys() - {"model_type"}):
        path.write_text(json.dumps({k: v for k, v in full.items() if k != left_out}))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert read_config(tmp_path) == type(_DIVISIBLE[family]).from_hf(theirs.to_dict()), left_out


@pytest.mark.parametrize("family", NAMES)
def test_config_json_empty_uses_family_defaults_of_transformers(
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
def test_config_rope_keys_of_transformers_4_are_read(
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


@pytest.mark.parametrize("family", ["olmo3", "gemma3_text"])
def test_yarn_is_truncated_like_in_transformers(family: str, tmp_path: Path) -> None:
    """transformers does not read `truncate` if each kind of layers has separate settings."""
    config = draw(family, 0).model_copy(update={"head_dim": 16, "rope_local_base_freq": 50.0})
    hf_model(config, 0).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 33000.0, "factor": 16.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 32}
    content["rope_parameters"] |= {"full_attention": yarn}
    content["layer_types"] = ["full_attention"] * content["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    own = load_model(tmp_path).model
    assert_same_logits(own, load_in_transformers(tmp_path))
    del yarn["rope_theta"]
    with pytest.raises(ValueError, match="truncate must be true"):
        type(own.config)(**{**own.config.model_dump(), "rope_scaling": yarn})


@pytest.mark.parametrize("family", NAMES)
def test_load_model_sharded_weights_are_read_through_index(family: str, tmp_path: Path) -> None:
    theirs = hf_model(draw(family, 4), 4)
    theirs.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(load_model(tmp_path).model, theirs)

    last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ModelError, match=f"{last.name} is missing"):
        load_model(tmp_path)


def mxfp4_folder(folder: Path, seed: int) -> dict[str, Tensor]:
    """Write a gpt-oss in the format of OpenAI's files, with random bytes in its experts, and return
    these bytes.
    """
    folder.mkdir(exist_ok=True)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 3}
    config = GptOssConfig(
        **sizes, vocab_size=53, num_hidden_layers=2, num_attention_heads=4, sliding_window=7
    )
    theirs = hf_model(config, seed).bfloat16()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    packed: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            tensors[name] = tensor.clone()
            continue
        experts, inner, outer = tensor.shape
        shape = (experts, outer, inner // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(116, 124, shape[:-1], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_weights({**tensors, **packed}, folder, max_shard_bytes=20_000)
    content = theirs.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(content))
    return packed


def test_mxfp4_experts_are_read_like_in_transformers(tmp_path: Path) -> None:
    packed = mxfp4_folder(source := tmp_path / "source", 5)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        experts_implementation="eager",
    )
    for mode in LOADING_MODES:
        own = load_model(source, mode=mode).model
        for name, parameter in own.named_parameters():
            if f"{name}_blocks" in packed:
                parts = (packed[f"{name}_{kind}"] for kind in ("blocks", "scales"))
                assert torch.equal(parameter, convert_moe_packed_tensors(*parts)), name
            assert torch.equal(parameter, theirs.get_parameter(name)), name
    # In fp32, where the two differ only by the order of sums.
    assert_same_logits(load_model(source, dtype=torch.float32).model, theirs.float())
    convert(source, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensors[n], p) for n, p in own.named_parameters())
    assert_same_logits(own.float(), load_in_transformers(tmp_path / "out").float())


def test_mxfp4_every_byte_decodes_like_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales)[0].T
    found = unpack_mxfp4(blocks, scales)[0]
    # Compared bitwise, because zero times an infinite scale is NaN.
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"_scales": torch.zeros(3, 64, 1, dtype=torch.uint8)}, "MXFP4 has [E, out, in / 32, 16]"),
        ({"_scales": torch.zeros(3, 64, 2)}, "_scales are not uint8"),
        ({"_scales": None}, "lacks tensors: model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_mxfp4_mismatched_tensors_raise_model_error(
    change: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    mxfp4_folder(tmp_path, 5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {n: t for f in tmp_path.glob("*.safetensors") for n, t in load_file(f).items()}
    for file in tmp_path.glob("model*"):
        file.unlink()
    changed = {**tensors, **{f"{name}{end}": tensor for end, tensor in change.items()}}
    save_weights({n: t for n, t in changed.items() if t is not None}, tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path)
    assert said in str(caught.value)
    content = json.loads((tmp_path / "config.json").read_text())
    mlx = {"group_size": 64, "bits": 4}
    for packed, named in (
        ({"quantization_config": {"quant_method": "fp8"}}, "by fp8, and"),
        ({"quantization_config": ["mxfp4"]}, "by another program, and"),
        ({"quantization_config": {"quant_method": ["x"]}}, "by ..x.., and"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "by gptq to 8 bits"),
        ({"quantization": mlx}, "by mlx-lm to 4 bits.* `mlx_lm.convert --dequantize"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "by bitsandbytes to 4 bits.* model.dequantize",
        ),
    ):
        config = {k: v for k, v in content.items() if k != "quantization_config"}
        (tmp_path / "config.json").write_text(json.dumps({**config, **packed}))
        with pytest.raises(ModelError, match=f"quantised {named}"):
            load_model(tmp_path)


@pytest.mark.parametrize("prefixed", [True, False])
def test_gpt2_hub_files_with_mask_buffers_are_read(prefixed: bool, tmp_path: Path) -> None:
    """openai-community/gpt2 has no `transformer.` prefix in its names, and a causal mask per
    layer.
    """
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


def test_gpt2_with_relu_matches_transformers_and_saves_activation(
    tmp_path: Path,
) -> None:
    config = draw_tied_gpt2(True).model_copy(update={"activation_function": "relu"})
    theirs = hf_model(config, 3)
    theirs.save_pretrained(tmp_path)
    own = load_model(tmp_path).model
    assert own.config.to_hf()["activation_function"] == "relu"
    assert_same_logits(own, theirs)


def test_gpt2_untied_head_without_prefix_is_read(tmp_path: Path) -> None:
    theirs = hf_model(draw_tied_gpt2(False), 1)
    theirs.save_pretrained(tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in theirs.state_dict().items()
    }
    assert "lm_head.weight" in tensors
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(load_model(tmp_path).model, theirs)


def test_llama_rotary_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    theirs = hf_model(draw("llama", 0), 0)
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for layer in range(theirs.config.num_hidden_layers):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(load_model(tmp_path).model, theirs)


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8, torch.float16])
def test_pythia_mask_and_rotary_buffers_are_ignored(mask: torch.dtype, tmp_path: Path) -> None:
    theirs = hf_model(draw("gpt_neox", 0), 0)
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for layer in range(theirs.config.num_hidden_layers):
        name = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{name}.bias"] = torch.ones(1, 1, 64, 64).tril().to(mask)
        tensors[f"{name}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{name}.rotary_emb.inv_freq"] = torch.ones(2)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(load_model(tmp_path).model, theirs)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_load_model_half_precision_file_keeps_dtype_or_becomes_fp32(
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


# transformers reads the tokenizer of a qwen2 folder differently; `export_notes` reports this.
@pytest.mark.parametrize(
    "family", [name for name in NAMES if FAMILIES[name].spec.tokenizer_split is None]
)
def test_saved_tokenizer_gives_same_ids_and_text_in_transformers(
    family: str, tmp_path: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    """With either config.json, because transformers also considers the model's family."""
    folder = write_folder(tmp_path / "own", own_model(draw(family, 0), 0), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*texts[:20], "", " ", "\n\n  x", "e\u0301 🙂 \u200b", "don't  stop   "]:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == tokenizer.decode(ids)
    assert theirs.eos_token_id == tokenizer.eos_token_id
    assert theirs.bos_token_id == tokenizer.bos_token_id
    assert len(theirs) == tokenizer.vocab_size


def test_tokenizer_resaved_by_transformers_gives_same_ids(
    tmp_path: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    tokenizer.save_pretrained(tmp_path / "own")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "back")
    back = Tokenizer.from_pretrained(tmp_path / "back")
    assert back.encode_batch(texts[:20]) == tokenizer.encode_batch(texts[:20])
    assert (back.bos_token, back.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)
    assert back.add_bos == tokenizer.add_bos


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["gpt2-tokenizer", "llama2-tokenizer"],
        ["gpt2-tokenizer", "llama2-tokenizer", "llama3-tokenizer"],
    ),
)
def test_well_known_tokenizers_give_same_prompts_in_transformers(
    name: str, shared: Path, tmp_path: Path, texts: list[str]
) -> None:
    """The ids of a prompt, with bos if the model expects it."""
    tokenizer = Tokenizer.from_pretrained(shared / "models" / name)
    tokenizer.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts[:5], "Hello, world! 12345\n\n  x", "日本語 🙂"]:
        assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text)


#: One model of each kind: its config, its blocks, and how it is initialised.
_TRAINED = (*("gpt2", "llama", "qwen3", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"),)


@pytest.mark.parametrize("family", slow_but(_TRAINED, NAMES))
def test_training_checkpoint_is_transformers_model_folder(
    family: str, recipe: dict[str, Any]
) -> None:
    """Weights, config, tokenizer and end token load without conversion, and a resumed run stays
    bit-identical.
    """
    shares = (
        LlamaConfig,
        MoEConfig,
        GptOssConfig,
        Qwen3NextConfig,
        Qwen35Config,
        Qwen35MoEConfig,
        Lfm2Config,
    )
    if FAMILIES[family].config not in shares:
        recipe["model"].pop("num_key_value_heads")  # the other two share no file
    recipe["model"]["model_type"] = family
    recipe["schedule"] = {"max_steps": 3}
    recipe["checkpoint"] = {"every_steps": 2}
    checkpoint = train(recipe).checkpoint
    # Qwen3's recipe, which sets none of these settings, is the one for new models.
    trained = load_recipe(Path(recipe["run"]["dir"]) / "recipe.yaml")
    assert (trained.init.residual_projections == "zero") is (family == "qwen3")
    own = load(checkpoint)
    theirs = load_in_transformers(checkpoint)
    assert_same_logits(own.model, theirs)
    assert (theirs.generation_config.eos_token_id,) == own.eos_token_ids

    assert own.tokenizer is not None
    inputs = transformers.AutoTokenizer.from_pretrained(checkpoint)("the star", return_tensors="pt")
    expected = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
    result = generate(own, "the star", max_new_tokens=12, temperature=0)
    assert [*own.tokenizer.encode("the star"), *result.token_ids] == expected

    files = {name: (checkpoint / name).read_bytes() for name in (WEIGHTS_NAME, OPTIMIZER_NAME)}
    shutil.rmtree(checkpoint)
    assert train(recipe, resume=True).checkpoint == checkpoint
    assert {name: (checkpoint / name).read_bytes() for name in files} == files
