"""Writing and reading GGUF files: a round trip changes nothing, and unsupported content raises an
error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from builders import slow_but
from firstlight.checkpoint.selection import resolve_model_folder, resolve_tokenizer
from firstlight.cli.main import main
from firstlight.errors import MissingDependencyError, ModelError, StorageError, TokenizerError
from firstlight.files import disk as seam
from firstlight.lora.files import base_name
from firstlight.lora.loading import load_model
from firstlight.models import FAMILIES
from firstlight.models.rope import Llama3Rope
from firstlight.tokenizer import Tokenizer
from firstlight.weights.gguf.metadata import ARCHITECTURES, config_of, llama3_factors
from firstlight.weights.gguf.reader import GGUFParser, gguf_folder, read_gguf
from firstlight.weights.gguf.writer import GGUFDtype, gguf_notes, write_gguf
from firstlight.weights.loading import file_tensors

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
transformers.utils.logging.disable_progress_bar()

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}

Saved = tuple[dict[str, Any], dict[str, Tensor]]


def _values_of_later_families(
    family: str, values: dict[str, Any], choose: Callable[[Any], Any]
) -> dict[str, Any]:
    """The values in which a family differs from Llama, under the names in transformers."""
    rope, width = values.get("rope_parameters", {}), values.get("head_dim", 0)
    shared = values["hidden_size"] // values["num_attention_heads"] if rope else 0
    kinds: dict[str, Any] = {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    theta = rope.get("rope_theta")
    window = {"sliding_window": choose((8, 40)), "rope_parameters": kinds, "num_hidden_layers": 7}
    same_base = {**kinds, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
    gemma = {"sliding_window": 8, "query_pre_attn_scalar": width, "tie_word_embeddings": True}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    longrope = {
        **plain,
        "rope_type": "longrope",
        **factors,
        "partial_rotary_factor": 4 / shared if shared else 1,
    }
    part = {**rope, "partial_rotary_factor": choose((0.5, 1.0))}
    parallel = {"use_parallel_residual": choose((True, False)), "head_dim": None}
    families: dict[str, dict[str, Any]] = {
        "smollm3": {"num_hidden_layers": 5},
        "phi3": {
            "head_dim": shared,
            "sliding_window": choose((None, 40)),
            "original_max_position_embeddings": 48,
            "rope_parameters": choose((plain, longrope)),
        },
        "olmo2": {"head_dim": shared},
        "olmo3": {**window, "head_dim": shared, "rope_parameters": same_base},
        "glm4": {"attention_bias": choose((True, False)), "rope_parameters": part},
        "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
        "gemma2": gemma | {"num_hidden_layers": 3},
        "gemma3_text": gemma | window | {"final_logit_softcapping": choose((None, 30.0))},
        "stablelm": {
            **parallel,
            "rope_parameters": part,
            "use_qkv_bias": choose((True, False)),
            "qk_layernorm": choose((True, False)),
        },
        "gpt_neox": {
            **parallel,
            "rope_parameters": part,
            "hidden_act": choose(("gelu", "gelu_new")),
        },
        **_values_of_routed_families(rope, values, choose),
    }
    return families.get(family, {})


def _values_of_routed_families(
    rope: dict[str, Any], values: dict[str, Any], choose: Callable[[Any], Any]
) -> dict[str, Any]:
    """The values of families with their own expert layers."""
    heads, plain = values.get("num_attention_heads", 0), {"rope_type": "default"}
    yarn = {**YARN, **choose(({}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale_all_dim": 1.0}))}
    deepseek = {
        "num_key_value_heads": heads,
        "num_hidden_layers": 3,
        "rope_parameters": choose((yarn, {**plain, "rope_theta": 1e4})),
        "q_lora_rank": choose((None, 24)),
        "kv_lora_rank": choose((16, 40)),
        "qk_nope_head_dim": choose((8, 32)),
        "qk_rope_head_dim": choose((4, 16)),
        "v_head_dim": choose((8, 12)),
        "n_routed_experts": 8,
        "num_experts_per_tok": choose((1, 3)),
        "n_shared_experts": choose((1, 2)),
        "moe_intermediate_size": choose((20, 32)),
        "first_k_dense_replace": choose((0, 1)),
        "routed_scaling_factor": choose((1.0, 2.5)),
        "n_group": 1,
        "topk_group": 1,
    }
    groups = choose(({}, {"n_group": 4, "topk_group": 2}, {"n_group": 2, "topk_group": 2}))
    size = choose((8, 32))
    deepseek["head_dim"] = deepseek["qk_rope_head_dim"]
    layers = choose((2, 3))
    delta = {
        "num_hidden_layers": choose((4, 5)),
        "rope_parameters": {**rope, "partial_rotary_factor": choose((0.5, 1.0))},
        "linear_conv_kernel_dim": choose((2, 4)),
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_num_key_heads": choose((1, 2)),
        "linear_num_value_heads": choose((2, 4)),
    }
    routed = {
        "num_experts": choose((2, 5)),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": choose((20, 32)),
        "shared_expert_intermediate_size": choose((12, 32)),
    }
    return {
        "deepseek_v2": deepseek,
        "deepseek_v3": {**deepseek, **groups, "norm_topk_prob": choose((True, False))},
        "gpt_oss": {
            "num_local_experts": choose((2, 5)),
            "num_experts_per_tok": choose((1, 2)),
            "sliding_window": choose((8, 40)),
            "rope_parameters": choose((rope, YARN, {**YARN, "truncate": False})),
        },
        "qwen3_next": {**delta, **routed},
        "qwen3_5_text": delta,
        "lfm2": {
            "layer_types": (["conv", "full_attention"] * layers)[:layers],
            "num_hidden_layers": layers,
            "head_dim": values.get("hidden_size", 0) // max(heads, 1),
            "conv_L_cache": choose((2, 3)),
            "block_auto_adjust_ff_dim": False,
        },
        "qwen3_5_moe_text": {**delta, **routed},
    }


def drawn(family: str, folder: Path, seed: int = 0, **changes: Any) -> Saved:
    """Write config.json and model.safetensors with transformers, for a small random model."""
    choose = random.Random(f"{family} {seed}").choice
    kv_heads, width = choose((1, 2, 3)), choose((8, 12, 16, 32))
    heads = kv_heads * choose((1, 2, 4))
    values: dict[str, Any] = {
        "vocab_size": choose((320, 333)),
        "hidden_size": heads * width,
        "intermediate_size": choose((20, 64)),
        "num_hidden_layers": choose((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": choose((width, 2 * width)),
        "max_position_embeddings": 96,
        "pad_token_id": None,
        "rms_norm_eps": choose((1e-5, 1e-6)),
        "rope_parameters": choose(
            (
                {"rope_type": "default", "rope_theta": 10_000.0},
                {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5},
            )
        ),
        "tie_word_embeddings": choose((True, False)),
    }
    if family == "gpt2":
        values = {
            "vocab_size": values["vocab_size"],
            "n_embd": values["hidden_size"],
            "n_inner": values["intermediate_size"],
            "n_layer": values["num_hidden_layers"],
            "n_head": heads,
            "n_positions": 96,
            "layer_norm_epsilon": values["rms_norm_eps"],
            "tie_word_embeddings": values["tie_word_embeddings"],
        }
    if family == "llama":
        rope = choose((LLAMA3, values["rope_parameters"]))
        values |= {"rope_parameters": rope, "attention_bias": choose((True, False))}
        values["mlp_bias"] = values["attention_bias"]
    if family == "granite":
        values |= {"embedding_multiplier": choose((1.0, 12.0)), "attention_multiplier": 0.0625}
        values |= {"residual_multiplier": choose((1.0, 0.22)), "logits_scaling": choose((1.0, 8.0))}
    if family in ("mistral", "mixtral"):
        values["sliding_window"] = choose((None, 40))
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
        values |= choose(({}, window))
    if family in ("mixtral", "qwen3_moe"):
        values |= {"num_local_experts": choose((2, 5)), "num_experts_per_tok": choose((1, 2))}
    if family == "qwen3_moe":
        values |= {"moe_intermediate_size": choose((24, 32)), "norm_topk_prob": True}
    values |= _values_of_later_families(family, values, choose)
    config = transformers.AutoConfig.for_model(family, **{**values, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder / "hf")
    tensors = safetensors.torch.load_file(folder / "hf" / "model.safetensors")
    return json.loads((folder / "hf" / "config.json").read_text(encoding="utf-8")), tensors


#: Families whose norms multiply by 1 + w.
_ONE_PLUS = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
#: Tensors stored in fp32 in every format.
_ALWAYS_FP32 = (
    *("wpe.weight", ".gate.weight", "router.weight", "_proj_bias"),
    *("conv1d.weight", "conv.conv.weight", "shared_expert_gate.weight"),
)


def same_numbers(family: str, found: Tensor, expected: Tensor) -> bool:
    """Check bitwise equality. In the file, the weights of some norms are larger by 1, and decays
    are stored as exponentials.
    """
    if family in _ONE_PLUS and found.dim() == 1:
        return torch.allclose(found, expected, rtol=0, atol=1e-6)
    return torch.equal(found, expected)


def rounded(tensor: Tensor, dtype: str) -> Tensor:
    """Return a matrix rounded to a format, using torch's rounding."""
    if tensor.dim() == 1 or dtype == "f32":
        return tensor
    return tensor.to(torch.bfloat16 if dtype == "bf16" else torch.float16).float()


@pytest.mark.parametrize("seed", slow_but([0, 1], range(4)))
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_read_back_has_values_and_model_written(
    family: str, seed: int, tmp_path: Path
) -> None:
    config, tensors = drawn(family, tmp_path, seed)
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="f32")
    found = read_gguf(tmp_path / "model.gguf")
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_numbers(family, found.tensors[name], tensor), name
    assert found.tokenizer() is None
    ids = torch.randint(0, 320, (1, 96), generator=torch.Generator().manual_seed(0))
    logits: list[Tensor] = []
    for values, state in ((config, tensors), (found.config, found.tensors)):
        folder = tmp_path / f"again-{len(logits)}"
        transformers.AutoConfig.for_model(**values).save_pretrained(folder)
        safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    # Linear attention amplifies the rounding of its decays, which are stored as exponentials.
    tolerance = 5e-4 if family.startswith("qwen3_5") else 1e-4 if family in _ONE_PLUS else 0
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=tolerance)
    own = FAMILIES[family].config
    assert own.from_hf(found.config) == own.from_hf(config)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_half_precision_keeps_representable_values(
    family: str, dtype: GGUFDtype, tmp_path: Path
) -> None:
    config, tensors = drawn(family, tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype=dtype)
    found = read_gguf(tmp_path / "model.gguf").tensors
    for name, tensor in tensors.items():
        exact = name.endswith(_ALWAYS_FP32)
        expected = tensor if exact else rounded(tensor, dtype)
        assert same_numbers(family, found[name], expected), name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_bf16_weights_are_unchanged_in_bf16(family: str, tmp_path: Path) -> None:
    config, tensors = drawn(family, tmp_path)
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_gguf(tmp_path / "model.gguf", config, halves, None, dtype="bf16")
    found = read_gguf(tmp_path / "model.gguf").tensors
    for name, tensor in halves.items():
        assert same_numbers(family, found[name], tensor.float()), name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_q8_0_values_are_within_half_a_step_of_block(family: str, tmp_path: Path) -> None:
    # Rows of 64, and rows of 20 or 24, which are not divisible into blocks.
    narrow = {"moe_intermediate_size": 24} if family == "qwen3_moe" else {"intermediate_size": 20}
    narrow = {"n_inner": 20} if family == "gpt2" else narrow
    width = {"n_embd": 64, "n_head": 2} if family == "gpt2" else {"hidden_size": 64, "head_dim": 16}
    width |= {"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
    heads = {} if family == "gpt2" else {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family.startswith("deepseek"):
        width, heads = {"hidden_size": 64}, {}
    config, tensors = drawn(family, tmp_path, **narrow, **width, **heads)
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="q8_0")
    found = read_gguf(tmp_path / "model.gguf").tensors
    changed = 0
    for name, tensor in tensors.items():
        # GPT-2's projections and gpt-oss experts are transposed in the file.
        transposed = {
            "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
            "gpt_oss": ("experts.gate_up_proj", "experts.down_proj"),
        }
        flip = name.endswith(transposed.get(family, ("no name",)))
        source, read = (tensor.mT, found[name].mT) if flip else (tensor, found[name])
        if name.endswith("kv_b_proj.weight"):
            # Half of it is transposed.
            torch.testing.assert_close(read, source, atol=float(tensor.abs().max()) / 127, rtol=0)
        elif name.endswith(_ALWAYS_FP32) or tensor.dim() == 1:
            assert same_numbers(family, read, source), name
        elif source.shape[-1] % 32:
            assert torch.equal(read, rounded(source, "f16")), name
            changed += 1
        else:
            blocks = source.reshape(-1, 32)
            step = blocks.abs().amax(1, keepdim=True) / 127
            error = (read.reshape(-1, 32) - blocks).abs()
            # Half a step, plus the error of rounding the step itself to 11 bits.
            assert (error <= step * (0.5 + 127 / 2048)).all(), name
            assert error.max() > 0
            changed += 1
    assert changed > 3


def raw_tensors(path: Path) -> dict[str, Any]:
    """Return the file's tensors, read with the gguf package."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_gguf_llama_queries_are_stored_in_adjacent_pairs(tmp_path: Path) -> None:
    config, tensors = drawn(
        "llama", tmp_path, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, head_dim=4,
        attention_bias=True, mlp_bias=False,
    )  # fmt: skip
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="f32")
    raw = raw_tensors(tmp_path / "model.gguf")
    layer = "model.layers.0.self_attn."
    # Two heads of four rows: rows of the first half alternate with rows of the second half.
    order = [0, 2, 1, 3, 4, 6, 5, 7]
    for kind in ("weight", "bias"):
        query, key = tensors[f"{layer}q_proj.{kind}"], tensors[f"{layer}k_proj.{kind}"]
        assert raw[f"blk.0.attn_q.{kind}"].data.tolist() == query[order].tolist()
        assert raw[f"blk.0.attn_k.{kind}"].data.tolist() == key[order[:4]].tolist()
    value = tensors[f"{layer}v_proj.weight"]
    assert raw["blk.0.attn_v.weight"].data.tolist() == value.tolist()


def test_gguf_qwen_queries_are_stored_unchanged(tmp_path: Path) -> None:
    config, tensors = drawn("qwen2", tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="f32")
    raw = raw_tensors(tmp_path / "model.gguf")
    for kind in ("weight", "bias"):
        query = tensors[f"model.layers.0.self_attn.q_proj.{kind}"]
        assert raw[f"blk.0.attn_q.{kind}"].data.tolist() == query.tolist()


def test_gguf_experts_are_stacked_and_gpt2_weights_transposed(tmp_path: Path) -> None:
    config, tensors = drawn("mixtral", tmp_path, num_local_experts=5)
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="f32")
    raw = raw_tensors(tmp_path / "model.gguf")
    block = "model.layers.0.block_sparse_moe.experts."
    for name, source in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        stacked = torch.stack([tensors[f"{block}{i}.{source}.weight"] for i in range(5)])
        assert raw[f"blk.0.ffn_{name}_exps.weight"].data.tolist() == stacked.tolist()
    config, tensors = drawn("gpt2", tmp_path)
    write_gguf(tmp_path / "gpt2.gguf", config, tensors, None, dtype="f32")
    weight = raw_tensors(tmp_path / "gpt2.gguf")["blk.0.ffn_up.weight"].data
    assert weight.tolist() == tensors["transformer.h.0.mlp.c_fc.weight"].T.tolist()


def test_gguf_llama3_factors_match_divisors_of_transformers(tmp_path: Path) -> None:
    theta = 500_000.0
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters=LLAMA3, max_position_embeddings=512
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = 1 / theta ** (torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    scaling = {k: v for k, v in LLAMA3.items() if k not in ("rope_type", "rope_theta")}
    factors = llama3_factors(Llama3Rope(rope_type="llama3", **scaling), theta, 32)
    torch.testing.assert_close(plain.float() / factors, rotary.inv_freq, rtol=1e-5, atol=0)
    assert factors[0] == 1
    assert factors[-1] == 8


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("own", "magnitude"),
    [
        ({}, 1.0),
        ({"attention_factor": 1.25}, 1.25 / (0.1 * math.log(4) + 1)),
        (
            {"mscale": 0.7, "mscale_all_dim": 1.0},
            (0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1) ** 2,
        ),
    ],
)
def test_gguf_yarn_entries_are_those_read_by_llama_cpp(
    family: str, own: dict[str, float], magnitude: float, tmp_path: Path
) -> None:
    """llama.cpp multiplies cos and sin by attn_factor and by 0.1 ln(factor) + 1."""
    scaling = {**YARN, **own}
    config, tensors = drawn(family, tmp_path, rope_parameters=scaling)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, tensors, None, dtype="f32")
    fields = gguf.GGUFReader(path).fields
    name = fields["general.architecture"].contents()

    def entry(key: str) -> Any:
        return fields[f"{name}.rope.scaling.{key}"].contents()

    assert (entry("type"), entry("factor")) == ("yarn", 4.0)
    assert entry("original_context_length") == 24
    assert entry("attn_factor") == pytest.approx(magnitude, rel=1e-6)
    found = read_gguf(path).config["rope_parameters"]
    assert found.items() >= scaling.items()
    # As written by other programs, without firstlight's entry.
    path.write_bytes(path.read_bytes().replace(b"firstlight.config", b"somethingelse.cfg"))
    other = read_gguf(path).config["rope_scaling"]
    kept = {key: YARN[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
    assert other.pop("attention_factor", None) == (
        pytest.approx(magnitude * (0.1 * math.log(4) + 1), rel=1e-5) if own else None
    )
    assert other == kept


@pytest.mark.parametrize("original", [64, 8192])
def test_gguf_llama3_scaling_is_recognised_by_its_factors(original: int, tmp_path: Path) -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": original}
    config, tensors = drawn("llama", tmp_path, rope_parameters=scaling)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, tensors, None, dtype="f32")
    found = read_gguf(path).config
    assert found["rope_parameters"] == scaling
    assert found["rope_theta"] == scaling["rope_theta"]
    assert found["rope_scaling"].items() <= scaling.items()
    # As written by other programs, without firstlight's entry.
    path.write_bytes(path.read_bytes().replace(b"firstlight.config", b"somethingelse.cfg"))
    if original == 8192:
        assert read_gguf(path).config["rope_parameters"] == scaling
    else:
        with pytest.raises(ModelError, match=r"rope_freqs\.weight does not contain Llama 3"):
            read_gguf(path)


def test_gguf_both_notations_of_rotary_settings_are_read(tmp_path: Path) -> None:
    config, tensors = drawn("mistral", tmp_path)
    linear = {"rope_type": "linear", "factor": 3.0}
    new = {**config, "rope_parameters": {"rope_theta": 5e5, **linear}}
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}}
    for values in (new, old):
        write_gguf(tmp_path / "model.gguf", values, tensors, None, dtype="f32")
        found = read_gguf(tmp_path / "model.gguf").config
        assert found["rope_parameters"] == {"rope_theta": 5e5, **linear}
        assert (found["rope_theta"], found["rope_scaling"]) == (5e5, linear)


def test_gguf_mistral_without_window_is_read_without_one(tmp_path: Path) -> None:
    config, tensors = drawn("mistral", tmp_path, sliding_window=None)
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="f32")
    found = read_gguf(tmp_path / "model.gguf").config
    assert found["model_type"] == "mistral"
    assert found["sliding_window"] is None


def test_gguf_olmo3_window_is_omitted_for_llama_cpp(tmp_path: Path) -> None:
    """Its layers with a sliding window do not scale positions."""
    full: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    config, tensors = drawn("olmo3", tmp_path, **full)
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="f32")
    assert "olmo2.attention.sliding_window" not in gguf.GGUFReader(tmp_path / "model.gguf").fields


def test_gguf_settings_without_gguf_key_are_kept(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    config, tensors = drawn("qwen2", tmp_path, **window)
    # As written by transformers 4.
    del config["layer_types"]
    write_gguf(tmp_path / "model.gguf", config, tensors, None, dtype="f32")
    found = read_gguf(tmp_path / "model.gguf").config
    assert window.items() <= found.items()
    assert found["initializer_range"] == config["initializer_range"]


def test_gguf_metadata_has_keys_required_by_llama_cpp(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config, tensors = drawn("qwen3_moe", tmp_path, vocab_size=333)
    write_gguf(tmp_path / "m.gguf", config, tensors, tokenizer, dtype="q8_0", name="Dawn")
    fields = {k: v.contents() for k, v in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    assert fields["general.name"] == "Dawn"
    assert (fields["general.file_type"], fields["general.quantization_version"]) == (7, 2)
    for key, name in (
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("rope.dimension_count", "head_dim"),
        ("expert_count", "num_local_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
    ):
        assert fields[f"qwen3moe.{key}"] == config.get(name, config["hidden_size"]), key
    assert fields["qwen3moe.attention.layer_norm_rms_epsilon"] == pytest.approx(
        config["rms_norm_eps"]
    )


def test_gguf_vocabulary_is_padded_to_embedding(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config, tensors = drawn("llama", tmp_path, vocab_size=333)
    write_gguf(tmp_path / "m.gguf", config, tensors, tokenizer, dtype="f32")
    found = read_gguf(tmp_path / "m.gguf")
    tokens = found.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 333
    assert tokens[320:] == [f"[PAD{i}]" for i in range(320, 333)]
    assert [tokenizer.backend.token_to_id(token) for token in tokens[:320]] == [*range(320)]
    assert found.config["eos_token_id"] == tokenizer.eos_token_id


def test_gguf_tokenizer_larger_than_embedding_raises(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config, tensors = drawn("llama", tmp_path, vocab_size=319)
    with pytest.raises(
        TokenizerError, match=("320 tokens, but the model's embedding has only 319 rows")
    ):
        write_gguf(tmp_path / "m.gguf", config, tensors, tokenizer, dtype="f32")
    assert not (tmp_path / "m.gguf").exists()


def test_gguf_chat_template_is_restored(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    chatty = Tokenizer(tokenizer.backend, eos_token=tokenizer.eos_token)
    chatty.config["chat_template"] = template
    config, tensors = drawn("llama", tmp_path)
    write_gguf(tmp_path / "m.gguf", config, tensors, chatty, dtype="f32")
    assert read_gguf(tmp_path / "m.gguf").metadata["tokenizer.chat_template"] == template


def test_gguf_file_opened_by_path_is_cached_until_it_changes(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    config, tensors = drawn("llama", tmp_path)
    file = tmp_path / "M.GGUF"
    write_gguf(file, config, tensors, tokenizer, dtype="f32")
    folder = resolve_model_folder(file)
    assert resolve_tokenizer(file) == folder
    assert gguf_folder(file) == folder
    loaded = load_model(file)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("the light") == tokenizer.encode("the light")
    assert loaded.eos_token_ids == (tokenizer.eos_token_id,)
    for name, tensor in file_tensors(loaded.model).items():
        assert torch.equal(tensor, tensors[name].float()), name
    assert transformers.AutoTokenizer.from_pretrained(folder).encode("the") == (
        tokenizer.encode_prompt("the")
    )
    assert base_name(file, folder) == str(file)
    # Ollama's files do not have a suffix.
    blob = tmp_path / "sha256-3f1c"
    blob.symlink_to(file)
    assert resolve_model_folder(blob) == folder
    write_gguf(file, config, tensors, None, dtype="f16")
    (folder.parent / f".tmp-{folder.name}-0123abcd").mkdir()  # from a process that was killed
    changed = resolve_model_folder(file)
    assert changed != folder
    assert [path.name for path in changed.parent.iterdir() if path.is_dir()] == [changed.name]
    assert load_model(file).tokenizer is None


def test_gguf_damaged_file_opened_by_path_prints_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert main(["info", str(tmp_path / "m.gguf")]) == 1
    message = f"firstlight: error: {tmp_path}/m.gguf: the file is damaged or truncated\n"
    assert capsys.readouterr() == ("", message)
    assert [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()] == []


def test_gguf_file_replaced_with_same_size_and_time_is_read_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    config, tensors = drawn("llama", tmp_path)
    file = tmp_path / "m.gguf"
    for factor in (1, 2):
        values = {name: factor * tensor for name, tensor in tensors.items()}
        write_gguf(file, config, values, tokenizer, dtype="f32")
        os.utime(file, (0, 0))
        for name, tensor in file_tensors(load_model(file).model).items():
            assert torch.equal(tensor, values[name].float()), name


_OTHER_BASE = {
    "full_attention": {"rope_type": "default", "rope_theta": 9.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"model_type": "bert"}, "model_type 'bert' can't be converted to GGUF"),
        ("gpt2", {"activation_function": "relu"}, "gpt2 with activation_function 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_embd": 7, "n_head": 2}, "hidden_size 7 must be a multiple"),
        ("llama", {"hidden_act": "gelu"}, "llama with hidden_act 'gelu'"),
        ("llama", {"vocab_size": 99}, "misshapen tensors: model.embed_tokens.weight is"),
        ("llama", {"num_hidden_layers": 9}, "lacks tensors: model.layers.3.input_layernorm"),
        ("llama", {"num_attention_heads": 0}, "config.json: num_attention_heads: "),
        ("llama", {"num_key_value_heads": 5}, "must be a multiple of num_key_value_heads 5"),
        ("llama", {"head_dim": 5}, "head_dim 5 must be even"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "type 'dynamic' can't be stored in GGUF",
        ),
        ("llama", {"rope_parameters": {**YARN, "beta_slow": 2.0}}, "llama with yarn with other"),
        ("qwen3", {"rope_parameters": {**YARN, "beta_fast": 8.0}}, "qwen3 with yarn with other"),
        ("deepseek_v3", {"attention_bias": True}, "deepseek_v3 with attention_bias True"),
        (
            "deepseek_v2",
            {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
            "topk_group 2 of n_group 4: only all groups",
        ),
        (
            "deepseek_v2",
            {"num_hidden_layers": 27, "q_lora_rank": 8},
            "q_lora_rank in 27 layers: only null",
        ),
        (
            "deepseek_v3",
            {"rope_interleave": False},
            "rope_interleave False: GGUF requires True",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "gpt_oss with swiglu_limit 5.0: GGUF requires 7.0"),
        (
            "qwen3_next",
            {"linear_value_head_dim": 16, "linear_key_head_dim": 8},
            "linear_value_head_dim 16: only linear_key_head_dim, 8",
        ),
        ("qwen3_5_moe_text", {"attention_bias": True}, "qwen3_5_moe_text with attention_bias True"),
        ("qwen3_next", {"mlp_only_layers": [0]}, r"qwen3_next with mlp_only_layers \[0\]"),
        ("llama", {"rope_parameters": {**YARN, "factor": 0.5}}, "llama with yarn with factor 0.5"),
        (
            "granite",
            {"rope_parameters": YARN},
            ("rope type 'yarn' can't be stored in GGUF for gra"),
        ),
        (
            "llama",
            {"rope_parameters": {**LLAMA3, "factor": None}},
            "rope_scaling: llama3: factor: ",
        ),
        (
            "qwen2",
            {"rope_parameters": LLAMA3},
            ("rope type 'llama3' can't be stored in GGUF for q"),
        ),
        ("qwen3", {"attention_bias": True}, "qwen3 with attention_bias True"),
        ("qwen3_moe", {"norm_topk_prob": False}, "qwen3_moe with norm_topk_prob False"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 5"),
        (
            "smollm3",
            {"no_rope_layers": [1, 0, 1, 1, 1]},
            "smollm3 with no_rope_layers with a different",
        ),
        ("smollm3", {"mlp_bias": True}, "smollm3 with mlp_bias True"),
        ("olmo2", {"head_dim": 64}, "olmo2 with head_dim 64: only hidden_size /"),
        (
            "olmo3",
            {"rope_parameters": _OTHER_BASE},
            "a rotary base of 5.0 in layers with a sliding window",
        ),
        ("gemma2", {"query_pre_attn_scalar": 7}, "gemma2 with query_pre_attn_scalar 7: only"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping None: only a number"),
        (
            "gemma3_text",
            {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]},
            "layer_types",
        ),
        ("gpt_neox", {"attention_bias": False}, "gpt_neox with attention_bias False"),
        (
            "llama",
            {"max_position_embeddings": 2**33},
            "max_position_embeddings 8589934592 can't be stored in GGUF",
        ),
    ],
)
def test_gguf_models_computed_differently_by_llama_cpp_raise_model_error(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, tensors = (
        drawn(family, tmp_path, num_hidden_layers=3)
        if family == "llama"
        else drawn(family, tmp_path)
    )
    with pytest.raises(ModelError, match=message):
        write_gguf(tmp_path / "m.gguf", {**config, **changes}, tensors, None, dtype="f32")
    assert not (tmp_path / "m.gguf").exists()


def test_gguf_mismatched_tensors_are_named(tmp_path: Path) -> None:
    config, tensors = drawn("llama", tmp_path, tie_word_embeddings=False)
    path, norm = tmp_path / "m.gguf", "model.norm.weight"
    headless = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    for changed, message in (
        ({**tensors, "model.extra": tensors[norm]}, "unknown tensors: model.extra"),
        ({**tensors, norm: tensors[norm] / 0}, f"integer or non-finite tensors: {norm}"),
        ({**tensors, norm: tensors[norm].int()}, f"integer or non-finite tensors: {norm}"),
        (headless, "has no lm_head.weight"),
    ):
        with pytest.raises(ModelError, match=message):
            write_gguf(path, config, changed, None, dtype="f32")
    with pytest.raises(ModelError, match=r"ties lm_head\.weight to model\.embed_tokens"):
        write_gguf(path, {**config, "tie_word_embeddings": True}, tensors, None, dtype="f32")
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    write_gguf(path, {**config, "tie_word_embeddings": True}, same, None, dtype="f32")
    assert "lm_head.weight" not in read_gguf(path).tensors
    buffers = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    write_gguf(path, config, buffers, None, dtype="f32")
    assert read_gguf(path).tensors.keys() == tensors.keys()


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_gguf_values_too_large_for_dtype_raise_model_error(
    dtype: GGUFDtype, tmp_path: Path
) -> None:
    config, tensors = drawn("llama", tmp_path, hidden_size=64, num_attention_heads=2, head_dim=32,
                            num_key_value_heads=1)  # fmt: skip
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors[name] + 1e7
    with pytest.raises(ModelError, match=f"{name} contains a number too large for {dtype}"):
        write_gguf(tmp_path / "m.gguf", config, tensors, None, dtype=dtype)


def test_gguf_notes_name_differences_of_llama_cpp() -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 4, "n_layer": 1, "n_head": 1}
    gpt2["n_positions"] = 8
    assert gguf_notes({**gpt2, "activation_function": "gelu_new"}) == []
    [note] = gguf_notes({**gpt2, "activation_function": "gelu"})
    assert "GELU" in note
    mistral = transformers.MistralConfig(sliding_window=64, max_position_embeddings=65).to_dict()
    [note] = gguf_notes(mistral)
    assert "ignores mistral's sliding window of 64 tokens" in note
    assert gguf_notes({**mistral, "max_position_embeddings": 64}) == []
    assert gguf_notes({**mistral, "sliding_window": None}) == []
    assert gguf_notes(transformers.Qwen2Config(sliding_window=64).to_dict()) == []
    windows = transformers.Qwen2Config(sliding_window=64, use_sliding_window=True)
    assert len(gguf_notes(windows.to_dict())) == 1
    gpt_oss = transformers.GptOssConfig().to_dict()
    [note] = gguf_notes(gpt_oss)
    assert "rounds the bounds between which YaRN blends" in note
    assert gguf_notes({**gpt_oss, "rope_parameters": YARN}) == []
    deepseek = transformers.DeepseekV3Config().to_dict()
    assert gguf_notes({**deepseek, "rms_norm_eps": 1e-6}) == []
    [note] = gguf_notes({**deepseek, "rms_norm_eps": 1e-5})
    assert "uses rms_norm_eps 1e-05 for the norms within attention" in note


def test_gguf_exact_gelu_is_restored(tmp_path: Path) -> None:
    config, tensors = drawn("gpt2", tmp_path, activation_function="gelu")
    write_gguf(tmp_path / "m.gguf", config, tensors, None, dtype="f32")
    assert read_gguf(tmp_path / "m.gguf").config["activation_function"] == "gelu"


@pytest.fixture
def whole(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Write a valid file: a small Mixtral with a tokenizer."""
    config, tensors = drawn("mixtral", tmp_path, num_hidden_layers=1)
    write_gguf(tmp_path / "whole.gguf", config, tensors, tokenizer, dtype="f16")
    return tmp_path / "whole.gguf"


def test_gguf_file_truncated_anywhere_raises(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    # At every offset of the header and the start of the metadata, then in steps, then at the end.
    for length in (*range(200), *range(200, len(content), 4999), len(content) - 33):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: "):
            read_gguf(path)


def test_gguf_impossible_counts_raise_immediately(whole: Path) -> None:
    content = whole.read_bytes()
    for key, message in (
        (b"llama.block_count", "too few for 2147483647 layers"),
        (b"llama.expert_count", "routers do not have 2147483647 experts"),
    ):
        position = content.index(key) + len(key)
        assert content[position : position + 4] == struct.pack("<I", 4)
        huge = content[: position + 4] + struct.pack("<I", 2**31 - 1) + content[position + 8 :]
        whole.write_bytes(huge)
        with pytest.raises(ModelError, match=message):
            read_gguf(whole)


def _gguf(entries: bytes, count: int = 1, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + entries


def _entry(key: str, kind: int, value: bytes) -> bytes:
    """Return a metadata entry."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    "content, message",
    [
        (_gguf(b"", count=2_000_001), "has 2,000,001 values, more than the limit of 2,000,000"),
        (_gguf(_entry("x", 9, struct.pack("<IQ", 0, 2_000_000) + bytes(2_000_000))), "2,000,001 v"),
        (_gguf(_entry("x", 9, struct.pack("<IQ", 8, 2_000_000) + bytes(9))), "2,000,001 values"),
        (_gguf(b"", tensors=20_001), "20,001 tensors, more than the limit of 20,000"),
    ],
)
def test_gguf_content_expanding_far_beyond_file_size_raises(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bomb.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_gguf_stored_config_nested_too_deeply_raises() -> None:
    metadata = {"general.architecture": "llama", "firstlight.config": "[" * 100_000}
    with pytest.raises(ModelError, match=r"firstlight\.config is not JSON"):
        config_of(metadata, {}, {})


def test_gguf_damaged_bytes_raise_or_change_values_only(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    path = tmp_path / "damaged.gguf"
    generator = random.Random(0)
    head = content.index(b"output_norm.weight") + 64
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        position = generator.randrange(head)
        size = generator.choice((1, 8))
        damaged[position : position + size] = generator.randbytes(size)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except ModelError:
            refused += 1
    assert refused > 50


def test_gguf_other_files_raise_model_error(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    with pytest.raises(ModelError, match=r"other\.gguf can't be read: No such file"):
        read_gguf(path)
    path.write_bytes(b"PK\x03\x04" * 9)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(ModelError, match="version 9 is not supported"):
        read_gguf(path)
    path.write_bytes(whole.read_bytes().replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", (
        b"\x05\x00\x00\x00\x00\x00\x00\x00gemma")))  # fmt: skip
    with pytest.raises(ModelError, match="architecture 'gemma' are not supported"):
        read_gguf(path)


def test_gguf_dtypes_of_other_programs_are_read(tmp_path: Path) -> None:
    config, tensors = drawn("llama", tmp_path, num_hidden_layers=1, hidden_size=64, head_dim=16,
                            num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    write_gguf(tmp_path / "m.gguf", config, tensors, None, dtype="f32")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "q4.gguf", "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "firstlight.")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        packed = tensor.name == "blk.0.attn_v.weight"
        kind = gguf.GGMLQuantizationType.Q4_0
        data = gguf.quants.quantize(tensor.data, kind) if packed else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=kind if packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "q4.gguf").tensors
    name = "model.layers.0.self_attn.v_proj.weight"
    step = tensors[name].reshape(-1, 32).abs().amax(1, keepdim=True) / 8
    error = (found[name] - tensors[name]).reshape(-1, 32).abs()
    assert (error <= step * 1.01).all()
    assert error.max() > 0.01
    other = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(found[other], tensors[other])


def test_gguf_without_package_names_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = drawn("gpt2", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[interop\]'"):
        write_gguf(tmp_path / "m.gguf", config, tensors, None, dtype="f32")
    with pytest.raises(MissingDependencyError, match="gguf"):
        read_gguf(tmp_path / "m.gguf")


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("refused", ["create", "write", "sync", "rename"])
def test_gguf_write_on_full_disk_keeps_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    config, tensors = drawn("gpt2", tmp_path)
    path = tmp_path / "out" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(seam.disk, refused, full)
        with pytest.raises(StorageError, match=r"the disk is full at .*m\.gguf"):
            write_gguf(path, config, tensors, None, dtype="f32")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_gguf_every_dtype_has_expected_size(tmp_path: Path) -> None:
    config, tensors = drawn("llama", tmp_path, num_hidden_layers=2, hidden_size=128, head_dim=32,
                            num_attention_heads=4, num_key_value_heads=4, vocab_size=4096,
                            intermediate_size=256)  # fmt: skip
    numbers = sum(tensor.numel() for tensor in tensors.values())
    bits = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5}
    assert set(bits) == set(get_args(GGUFDtype))
    for dtype in get_args(GGUFDtype):
        write_gguf(tmp_path / "m.gguf", config, tensors, None, dtype=dtype)
        size = (tmp_path / "m.gguf").stat().st_size
        assert math.isclose(size, numbers * bits[dtype] / 8, rel_tol=0.02)


def test_gguf_overlapping_tensors_raise(tmp_path: Path) -> None:
    """A small file could otherwise use any amount of memory."""
    path = tmp_path / "model.gguf"
    config, tensors = drawn("llama", tmp_path)
    write_gguf(path, config, tensors, None, dtype="f32")
    content = bytearray(path.read_bytes())
    with open(path, "rb") as file:
        _, stored, data_start = GGUFParser(file, len(content)).parse()
    for name, tensor in stored.items():
        # After the name: number of dimensions, their sizes, type, offset.
        place = content.index(name.encode()) + len(name) + 4 + 8 * len(tensor.shape) + 4
        struct.pack_into("<Q", content, place, 0)
    largest = max(4 * math.prod(tensor.shape) for tensor in stored.values())
    path.write_bytes(content[: data_start + largest])
    with pytest.raises(ModelError, match=r"model\.gguf: .*bytes, but its tensors need"):
        read_gguf(path)


def test_gguf_layers_and_experts_without_tensors_raise(tmp_path: Path) -> None:
    """A few tensors, or empty ones, must not lead to tables of all layers and experts."""
    path = tmp_path / "model.gguf"
    config, tensors = drawn("qwen3_moe", tmp_path)
    write_gguf(path, config, tensors, None, dtype="f32")
    content = path.read_bytes()
    with open(path, "rb") as file:
        _, stored, _ = GGUFParser(file, len(content)).parse()

    def spoil(values: dict[bytes, int], router: bytes = b"") -> None:
        spoiled = bytearray(content)
        for key, value in values.items():
            # After the key: the number of its type, uint32.
            struct.pack_into("<I", spoiled, content.index(key) + len(key) + 4, value)
        if router:
            # After the name: number of dimensions, and their sizes, innermost first.
            place = content.index(router) + len(router) + 4
            struct.pack_into("<QQ", spoiled, place, 0, values[b"qwen3moe.expert_count"])
        path.write_bytes(spoiled)

    spoil({b"qwen3moe.block_count": len(stored)})
    with pytest.raises(ModelError, match=f"too few for {len(stored)} layers"):
        read_gguf(path)
    spoil({b"qwen3moe.expert_count": 100_000}, b"blk.0.ffn_gate_inp.weight")
    with pytest.raises(ModelError, match="routers do not have 100000 experts"):
        read_gguf(path)


@pytest.mark.parametrize("is_key", [True, False])
def test_gguf_huge_strings_and_factors_raise_unread(is_key: bool, tmp_path: Path) -> None:
    length = struct.pack("<Q", 1 << 50)
    architecture = struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<I", 8)
    path = tmp_path / "a.gguf"
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1))
        file.write(length if is_key else architecture + length)
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"a string of 1,125,899,906,842,624 bytes, but"):
        read_gguf(path)
    factors = struct.pack("<Q", 17) + b"rope_freqs.weight" + struct.pack("<IQIQ", 1, 1 << 33, 0, 0)
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + factors)
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"tensor rope_freqs\.weight has shape \[8589934592\]"):
        read_gguf(path)
