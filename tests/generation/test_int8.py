"""Tests of 8-bit weights for generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import ConfigError
from firstlight.generation.engine import generate, load
from firstlight.generation.few_rows import Int8Linear, quantize_int8, rounded
from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, MoEConfig, empty_model

GPT2 = GPT2Config(
    vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64,
)  # fmt: skip
LLAMA = LlamaConfig(
    vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
MIXTRAL = MoEConfig(
    model_type="mixtral", vocab_size=200, hidden_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    max_position_embeddings=64,
)  # fmt: skip


def new_model(config: ModelConfig) -> Model:
    model = empty_model(config).eval()
    model.init_weights(torch.Generator().manual_seed(3))
    return model


@given(seed=st.integers(0, 2**32), size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_int8_quantized_weight_is_within_half_a_step(seed: int, size: float) -> None:
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed)) * size
    weight[2] = 0
    integers, scale = rounded(weight)
    assert integers.dtype == torch.int8
    assert integers.min() >= -127
    found = integers.float() * scale.float()[:, None]
    # The scale is also rounded, by up to 1/256, so the largest weight may be clipped by that much.
    bound = scale.float()[:, None] * 0.5 + weight.abs() / 256
    assert (found - weight).abs().le(bound).all()
    assert found[2].eq(0).all()
    largest = integers.abs().amax(1)
    assert largest[[0, 1, 3, 4]].ge(126).all()


@pytest.mark.parametrize("rows", [1, 4, 16, 17, 40])
@pytest.mark.parametrize("width", [32, 33, 172, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_linear_computes_with_dequantized_weight(rows: int, width: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, width, generator=generator)
    offset = torch.randn(48, generator=generator).bfloat16() if bias else None
    layer = Int8Linear(weight, offset)
    x = torch.randn(2, rows, width, generator=generator).bfloat16()
    meant = layer.weight_int8[:, :width].float() * layer.scale.float()[:, None]
    expected = F.linear(x.float(), meant)
    if offset is not None:
        expected = expected + offset.float()
    found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("config", [GPT2, LLAMA, MIXTRAL], ids=["gpt2", "llama", "mixtral"])
@torch.no_grad()
def test_int8_logits_are_within_quantization_error_of_fp32(config: ModelConfig) -> None:
    exact, quantized = new_model(config), new_model(config).bfloat16()
    quantize_int8(quantized)
    kinds = [type(module).__name__ for module in quantized.modules()]
    assert kinds.count("Int8Linear") == {"gpt2": 9, "llama": 15, "mixtral": 9}[config.model_type]
    assert kinds.count("Conv1D") == 0
    ids = torch.arange(40)[None] * 7 % 200
    expected, found = exact(ids), quantized(ids).float()
    difference = (found - expected).std() / expected.std()
    assert difference < 0.06
    assert difference > 1e-4  # The weights were rounded.


def test_int8_model_is_half_the_size_of_bf16() -> None:
    model = new_model(LLAMA).bfloat16()
    linear = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n
    )
    before = sum(p.nbytes for p in model.parameters())
    quantize_int8(model)
    after = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    scales = sum(b.nbytes for n, b in model.named_buffers() if n.endswith("scale"))
    others = sum(b.nbytes for n, b in model.named_buffers() if "rotary" in n)
    tied = LLAMA.vocab_size * LLAMA.hidden_size if LLAMA.tie_word_embeddings else 0
    assert after - scales - others == before - linear + tied


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1)])
def test_load_int8_on_gpu_raises_config_error(device: torch.device | str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "dtype int8 is supported only on CPUs, because it is slower than bfloat16 on a GPU:"
        ),
    ):
        load("a-folder", device, dtype="int8")


def test_load_int8_generates_text(tmp_path: Path, shared: Path) -> None:
    loaded = load(shared / "models" / "stories260K", dtype="int8")
    assert isinstance(loaded.model.get_submodule("lm_head"), Int8Linear)
    told = generate(loaded, "Once upon a time", temperature=0, max_new_tokens=24).text
    plain = generate(shared / "models" / "stories260K", "Once upon a time", temperature=0).text
    assert told[:12] == plain[:12]
