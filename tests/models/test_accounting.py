from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from firstlight.models import GPT2Config, LlamaConfig, ModelConfig, empty_model
from firstlight.models.accounting import (
    ParameterCount,
    cache_bytes_per_token,
    count_parameters,
    meta_model,
    train_flops_per_token,
)
from firstlight.models.rope import LinearRope
from firstlight.weights.huggingface import config_from_hf

GPT2_124M = GPT2Config(vocab_size=50257)
LLAMA_2_7B = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
)
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
SMALL_LLAMA = LlamaConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    attention_bias=True,
    mlp_bias=True,
    rope_scaling=LinearRope(rope_type="linear", factor=2.0),
)
SMALL_GPT2 = GPT2Config(
    vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=31
)


#: Shapes from the makers' config.json (only the values that determine parameters), with the totals
#: shown on the hub.
WELL_KNOWN: list[tuple[dict[str, Any], int]] = [
    ({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16}, 354_823_168),
    ({"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20}, 774_030_080),
    ({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    ({"model_type": "mistral"}, 7_241_732_096),
    (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    ({"model_type": "mixtral"}, 46_702_792_704),
    (
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "num_hidden_layers": 48,
            "moe_intermediate_size": 768,
            "num_experts": 128,
        },
        30_532_122_624,
    ),
    ({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_experts": 32}, 20_914_757_184),
    ({"model_type": "gpt_oss"}, 116_829_156_672),
]


@pytest.mark.parametrize(
    "config, published",
    [
        (GPT2_124M, 124_439_808),
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_3_2_1B, 1_235_814_400),
        *((config_from_hf(known, "known"), total) for known, total in WELL_KNOWN),
    ],
)
def test_parameter_totals_match_well_known_models(config: ModelConfig, published: int) -> None:
    model = meta_model(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert count_parameters(model).total == published


def test_parameters_by_kind_of_gpt2_match_hand_count() -> None:
    C, V, T, L = 768, 50257, 1024, 12
    expected = ParameterCount(
        embedding=V * C + T * C,
        attention=L * (C * 3 * C + 3 * C + C * C + C),
        mlp=L * (C * 4 * C + 4 * C + 4 * C * C + C),
        norm=L * 4 * C + 2 * C,
        head=0,
    )
    assert count_parameters(meta_model(GPT2_124M)) == expected


def test_parameters_by_kind_of_llama_with_biases_and_odd_heads_match_hand_count() -> None:
    expected = ParameterCount(
        embedding=50 * 24,
        attention=3 * ((24 * 60 + 60) + 2 * (24 * 20 + 20) + (60 * 24 + 24)),
        mlp=3 * (2 * (24 * 40 + 40) + (40 * 24 + 24)),
        norm=3 * 2 * 24 + 24,
        head=50 * 24,
    )
    assert count_parameters(meta_model(SMALL_LLAMA)) == expected


@pytest.mark.parametrize("config", [SMALL_GPT2, SMALL_LLAMA])
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_total_matches_real_model_and_counts_tied_head_once(
    config: ModelConfig, tied: bool
) -> None:
    config = config.model_copy(update={"tie_word_embeddings": tied})
    count = count_parameters(meta_model(config))
    assert count.total == sum(p.numel() for p in empty_model(config).parameters())
    assert count.head == (0 if tied else 50 * 24)


def test_flops_of_gpt2_match_hand_calculation() -> None:
    """6 FLOPs per matrix weight, including the tied head, and half of the full attention matrix."""
    weights = 12 * 12 * 768**2 + 50257 * 768
    attention = 6 * 12 * 768 * 1024
    assert train_flops_per_token(meta_model(GPT2_124M), 1024) == 6 * weights + attention
    assert 6 * weights + attention == 797_815_296


def test_flops_of_llama_match_hand_calculation() -> None:
    weights = 3 * (24 * 60 + 2 * 24 * 20 + 60 * 24 + 3 * 24 * 40) + 50 * 24
    assert train_flops_per_token(meta_model(SMALL_LLAMA), 7) == 6 * weights + 6 * 3 * 6 * 10 * 7


@pytest.mark.parametrize("config", [SMALL_GPT2, SMALL_LLAMA])
def test_flops_do_not_depend_on_tied_head(config: ModelConfig) -> None:
    tied, untied = (
        train_flops_per_token(
            meta_model(config.model_copy(update={"tie_word_embeddings": tie})), 16
        )
        for tie in (True, False)
    )
    assert tied == untied


@pytest.mark.parametrize("config", [SMALL_GPT2, SMALL_LLAMA])
def test_flops_of_matrix_products_match_torch_counter(config: ModelConfig) -> None:
    model, rows, tokens = empty_model(config), 2, 8
    model.init_weights(torch.Generator().manual_seed(0))
    input_ids = torch.ones(rows, tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids, input_ids).backward()
    products = {torch.ops.aten.mm, torch.ops.aten.addmm}
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if op in products)
    assert counted == rows * tokens * train_flops_per_token(model, 0)


@pytest.mark.parametrize("config", [SMALL_GPT2, SMALL_LLAMA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_match_real_cache(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = empty_model(config).make_cache(2, 5, dtype)
    real = sum(layer.nbytes for layer in (*cache.keys, *cache.values))
    assert cache_bytes_per_token(config, dtype) * 2 * 5 == real


def test_cache_bytes_match_hand_calculation() -> None:
    assert cache_bytes_per_token(LLAMA_3_8B, torch.bfloat16) == 2 * 32 * 8 * 128 * 2
