from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from firstlight.models import (
    DeepseekConfig,
    GPT2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    NanoChatConfig,
    build_model,
    empty_model,
)
from firstlight.models.language_model import InitConfig
from firstlight.models.ops import AttentionOptions, attention, cross_entropy_sum
from firstlight.models.rope import (
    LinearRope,
    Llama3Rope,
    apply_rope,
    apply_rope_as_complex,
    apply_rope_from_neighbours,
    apply_rope_to_neighbours,
    rope_frequencies,
    rope_tables,
)

GPT2 = GPT2Config(
    vocab_size=31,
    hidden_size=18,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=24,
)
LLAMA = LlamaConfig(
    vocab_size=31,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=24,
)
both = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


def ready(config: ModelConfig, seed: int = 0) -> Model:
    """Return a model in which every parameter affects the output."""
    model = empty_model(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 31, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# The key-value cache


@both
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 1, 11], [1, 19], [13, 6, 1]])
@torch.no_grad()
def test_cached_decoding_matches_full_forward_pass(config: ModelConfig, chunks: list[int]) -> None:
    model, input_ids = ready(config), ids(3, 20)
    cache = model.make_cache(3, 22, torch.float32)
    parts, start = [], 0
    for size in chunks:
        parts.append(model(input_ids[:, start : start + size], cache=cache))
        start += size
        assert cache.length == start
    torch.testing.assert_close(torch.cat(parts, dim=1), model(input_ids), atol=1e-5, rtol=1e-5)


@both
def test_cache_holds_only_key_value_heads(config: ModelConfig) -> None:
    cache = ready(config).make_cache(5, 9, torch.bfloat16)
    assert len(cache.keys) == len(cache.values) == 2
    assert cache.keys[0].shape == (5, config.num_key_value_heads, 9, config.head_dim)
    assert cache.keys[0].dtype == cache.values[0].dtype == torch.bfloat16
    assert cache.max_tokens == 9


@both
def test_cache_full_raises_on_next_token(config: ModelConfig) -> None:
    model = ready(config)
    cache = model.make_cache(1, 4, torch.float32)
    model(ids(1, 3), cache=cache)
    with pytest.raises(AssertionError, match="full"):
        model(ids(1, 2), cache=cache)


@both
@torch.no_grad()
def test_model_output_does_not_depend_on_later_tokens(config: ModelConfig) -> None:
    model, input_ids = ready(config), ids(1, 12)
    changed = input_ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 31
    before, after = model(input_ids), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8], after[:, 8])


@both
@torch.no_grad()
def test_model_batch_rows_are_independent(config: ModelConfig) -> None:
    model, input_ids = ready(config), ids(4, 10)
    alone = torch.cat([model(row[None]) for row in input_ids])
    torch.testing.assert_close(model(input_ids), alone, atol=1e-5, rtol=1e-5)


# Logits and loss


@both
@pytest.mark.parametrize("keep", [1, 3, 12])
@torch.no_grad()
def test_logits_to_keep_returns_last_logits(config: ModelConfig, keep: int) -> None:
    model, input_ids = ready(config), ids(2, 12)
    kept = model(input_ids, logits_to_keep=keep)
    assert kept.shape == (2, keep, 31)
    torch.testing.assert_close(kept, model(input_ids)[:, -keep:], atol=1e-5, rtol=1e-5)


@both
def test_model_with_labels_returns_summed_loss_of_logits(config: ModelConfig) -> None:
    model, input_ids, labels = ready(config), ids(2, 9), ids(2, 9, seed=1)
    labels[1, 4:] = -100
    loss = model(input_ids, labels)
    assert loss.dim() == 0
    expected = cross_entropy_sum(model(input_ids), labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40)
def test_cross_entropy_sum_ignores_masked_labels(
    rows: int, tokens: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, tokens, 7, generator=generator, dtype=torch.float64) * 5
    labels = torch.randint(0, 7, (rows, tokens), generator=generator)
    labels[torch.rand(rows, tokens, generator=generator) < share] = -100
    by_hand = sum(
        -math.log(logits[b, t].softmax(-1)[int(labels[b, t])])
        for b in range(rows)
        for t in range(tokens)
        if labels[b, t] != -100
    )
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(by_hand, rel=1e-5, abs=1e-6)


def test_model_row_without_labels_has_zero_loss_and_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 3), -100))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_loss_is_computed_in_fp32_for_any_logits_dtype() -> None:
    logits = torch.randn(1, 400, 9, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(1, 400, dtype=torch.int64)
    loss = cross_entropy_sum(logits.bfloat16(), labels)
    assert loss.dtype == torch.float32
    exact = F.cross_entropy(logits.bfloat16().double()[0], labels[0], reduction="sum")
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


# Initial weights


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("layers", [1, 8])
def test_initial_weights_are_normal_with_residual_projections_scaled_by_depth(
    family: str, layers: int
) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "max_position_embeddings": 256,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    }
    if family == "llama":
        shape |= {"attention_bias": True, "mlp_bias": True}
    model = empty_model(GPT2Config(**shape) if family == "gpt2" else LlamaConfig(**shape))
    model.init_weights(torch.Generator().manual_seed(1))
    residual = ("c_proj.weight", "o_proj.weight", "down_proj.weight")
    seen = {"matrix": 0, "residual": 0, "bias": 0, "norm": 0}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            kind = "bias" if name.endswith("bias") else "norm"
            assert torch.equal(parameter, torch.full_like(parameter, float(kind == "norm"))), name
        else:
            kind = "residual" if name.endswith(residual) else "matrix"
            std = 0.05 / math.sqrt(2 * layers) if kind == "residual" else 0.05
            # the standard error of the standard deviation of n values is std / sqrt(2 n)
            tolerance = 5 * std / math.sqrt(2 * parameter.numel())
            assert parameter.std().item() == pytest.approx(std, abs=tolerance), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name
        seen[kind] += 1
    assert seen["residual"] == 2 * layers
    assert all(seen.values())


@both
def test_model_same_seed_gives_same_initial_weights(config: ModelConfig) -> None:
    def initial(seed: int) -> dict[str, Tensor]:
        model = empty_model(config)
        model.init_weights(torch.Generator().manual_seed(seed))
        return model.state_dict()

    one, again, other = initial(1), initial(1), initial(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@both
def test_model_initialization_covers_every_parameter(config: ModelConfig) -> None:
    model = empty_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights(torch.Generator().manual_seed(0))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@both
def test_initial_weights_follow_init_section(config: ModelConfig) -> None:
    """Zero residual projections do not change the other parameters' random values."""
    config = config.model_copy(update={"tie_word_embeddings": False, "vocab_size": 31})
    plain, own = empty_model(config), empty_model(config)
    plain.init_weights(torch.Generator().manual_seed(0))
    init = InitConfig(residual_projections="zero", embedding_std=0.5, head_std=0.004)
    own.init_weights(torch.Generator().manual_seed(0), init)
    expected = dict(plain.named_parameters())
    for name, parameter in own.named_parameters():
        value = expected[name].detach()
        if name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight")):
            value = torch.zeros_like(value)
        elif parameter is own.embedding.weight:
            value = value * (0.5 / 0.02)
        elif name == "lm_head.weight":
            value = value * (0.004 / 0.02)
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-5, atol=1e-9)
    inputs = ids(1, 6)
    # The layers add nothing, so the logits are those of the normalized embedding.
    with torch.no_grad():
        x = own.embedding(inputs)
        if config.model_type == "gpt2":
            x = x + own.get_submodule("transformer.wpe")(torch.arange(6))
        torch.testing.assert_close(own(inputs), own.lm_head(own.finish(x)), rtol=1e-5, atol=1e-6)


@both
def test_tied_head_is_initialized_like_embedding(config: ModelConfig) -> None:
    model = empty_model(config.model_copy(update={"tie_word_embeddings": True}))
    model.init_weights(torch.Generator().manual_seed(0), InitConfig(embedding_std=0.5))
    assert 0.4 < float(model.lm_head.weight.detach().std()) < 0.6


def test_model_cast_rounds_parameters_in_place_and_keeps_tables() -> None:
    deepseek = DeepseekConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    for config, name in ((LLAMA, "rotary.frequencies"), (deepseek, "e_score_correction_bias")):
        model = ready(config)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        for table in buffers.values():
            table += 1 / 3  # not representable in bf16
        expected = {key: one.detach().clone() for key, one in (parameters | buffers).items()}
        assert any(key.endswith(name) for key in buffers)
        model.cast(torch.bfloat16)
        for key, parameter in model.named_parameters():
            assert parameter is parameters[key]
            assert torch.equal(parameter, expected[key].bfloat16())
        for key, table in model.named_buffers():
            assert table.dtype == torch.float32
            assert torch.equal(table, expected[key])


# The tie of head and embedding


@both
@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_shares_embedding_parameter(config: ModelConfig, tied: bool) -> None:
    model = empty_model(config.model_copy(update={"tie_word_embeddings": tied}))
    model.init_weights(torch.Generator().manual_seed(0))
    names = [name for name, _ in model.named_parameters()]
    embedding = dict(model.named_parameters())[
        "transformer.wte.weight" if config is GPT2 else "model.embed_tokens.weight"
    ]
    assert (model.lm_head.weight is embedding) == tied
    assert ("lm_head.weight" in names) != tied
    model(ids(1, 6), ids(1, 6, seed=1)).backward()
    assert embedding.grad is not None
    # Tokens that are not in the input only get a gradient through the head.
    unseen = next(i for i in range(31) if i not in ids(1, 6))
    assert bool(embedding.grad[unseen].any()) == tied


@both
def test_tied_embedding_update_changes_head(config: ModelConfig) -> None:
    model = empty_model(config.model_copy(update={"tie_word_embeddings": True})).double()
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert torch.equal(model.lm_head.weight, next(model.parameters()))


# Rotary positions


def test_rope_frequencies_decrease_from_one_by_powers_of_theta() -> None:
    frequencies = rope_frequencies(8, 10_000.0, None)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert frequencies.dtype == torch.float32


def test_rope_linear_scaling_divides_position_by_factor() -> None:
    scaled = rope_frequencies(8, 100.0, LinearRope(rope_type="linear", factor=4.0))
    plain = rope_frequencies(8, 100.0, None)
    for table, expected in zip(
        rope_tables(scaled, torch.arange(0, 40, 4), torch.float32),
        rope_tables(plain, torch.arange(10), torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(table, expected)


def test_llama3_scaling_keeps_short_waves_stretches_long_and_blends_between() -> None:
    scaling = Llama3Rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = rope_frequencies(128, 500_000.0, None).double()
    scaled = rope_frequencies(128, 500_000.0, scaling).double()
    kinds = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected, kind = before, "kept"
        elif wavelength > 8192:
            expected, kind = before / 8, "stretched"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected, kind = (1 - smooth) * before / 8 + smooth * before, "blended"
        assert after == pytest.approx(expected, rel=1e-5)
        kinds.add(kind)
    assert kinds == {"kept", "stretched", "blended"}


@pytest.mark.parametrize(("start", "size"), [(0, 4), (3, 7), (3, 8), (2, 7)])
def test_rope_rotation_is_equal_for_every_implementation(start: int, size: int) -> None:
    """This includes a slice of a head that starts at an odd offset, which complex numbers can't
    view.
    """
    tables = rope_tables(rope_frequencies(4, 100.0, None), torch.arange(5), torch.float32)
    whole = torch.randn(2, 5, 3, size, generator=torch.Generator().manual_seed(1))
    x_BHTD = whole.transpose(1, 2)[..., start : start + 4]
    expected = apply_rope_to_neighbours(x_BHTD, *tables)
    torch.testing.assert_close(apply_rope_as_complex(x_BHTD, *tables), expected)
    # One new token of one text: dimensions of size 1 may have odd strides.
    one = x_BHTD[:1, :1, :1]
    found = apply_rope_as_complex(one, *(table[:1] for table in tables))
    torch.testing.assert_close(found, expected[:1, :1, :1])
    apart = torch.cat((expected[..., 0::2], expected[..., 1::2]), -1)
    torch.testing.assert_close(apply_rope_from_neighbours(x_BHTD, *tables), apart)
    polar = rope_tables(
        rope_frequencies(4, 100.0, None), torch.arange(5), torch.float32, polar=True
    )
    torch.testing.assert_close(polar, tables)


def test_rope_tables_are_cosine_and_sine_of_position_times_frequency() -> None:
    frequencies = rope_frequencies(6, 50.0, None)
    positions = torch.tensor([0, 1, 7, 100_000])
    cos, sin = rope_tables(frequencies, positions, torch.float32)
    assert cos.shape == sin.shape == (4, 6)
    for t, position in enumerate(positions.tolist()):
        for i in range(6):
            angle = (torch.tensor(float(position)) * frequencies[i % 3]).item()
            assert cos[t, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert sin[t, i].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_rope_tables_accept_positions_per_row() -> None:
    frequencies = rope_frequencies(4, 10.0, None)
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    cos, sin = rope_tables(frequencies, positions, torch.float32)
    assert cos.shape == sin.shape == (2, 1, 3, 4)
    for row in range(2):
        expected = rope_tables(frequencies, positions[row], torch.float32)
        assert torch.equal(cos[row, 0], expected[0])
        assert torch.equal(sin[row, 0], expected[1])


def test_rope_tables_are_exact_under_autocast() -> None:
    frequencies, positions = rope_frequencies(8, 10_000.0, None), torch.arange(3000, 3020)
    expected = rope_tables(frequencies, positions, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rope_tables(frequencies, positions, torch.float32)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_rope_products_depend_only_on_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)
    frequencies = rope_frequencies(8, 100.0, None)

    def product(query_at: int, key_at: int) -> float:
        turned = [
            apply_rope(x, *rope_tables(frequencies, torch.tensor([at]), torch.float64))
            for x, at in ((q, query_at), (k, key_at))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(5, 0), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


# Attention


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    new=st.integers(1, 6),
    old=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_attention_matches_causal_softmax(
    kv_heads: int, group: int, new: int, old: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, kv_heads * group, new, 4, generator=generator)
    k = torch.randn(2, kv_heads, old + new, 4, generator=generator)
    v = torch.randn(2, kv_heads, old + new, 4, generator=generator)
    result = attention(q, k, v)
    for head in range(kv_heads * group):
        for t in range(new):
            seen = old + t + 1
            keys, values = k[:, head // group, :seen], v[:, head // group, :seen]
            weights = ((keys @ q[:, head, t, :, None])[..., 0] / 2).softmax(-1)
            expected = (weights[..., None] * values).sum(1)
            torch.testing.assert_close(result[:, head, t], expected, atol=1e-5, rtol=1e-4)


def test_attention_mask_replaces_causal_mask() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    only_itself = torch.eye(5, dtype=torch.bool)[None, None]
    found = attention(q[None], k[None], v[None], AttentionOptions(only_itself))[0]
    torch.testing.assert_close(found, v, atol=1e-6, rtol=1e-6)


# Dropout


def test_dropout_is_active_in_training_only() -> None:
    config = GPT2.model_copy(update={"embd_pdrop": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5})
    model, input_ids = ready(config), ids(1, 10)
    torch.manual_seed(0)
    assert torch.equal(model(input_ids), model(input_ids))
    model.train()
    assert not torch.equal(model(input_ids), model(input_ids))


# Configs


@both
def test_model_on_meta_device_allocates_no_memory(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = build_model(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@both
def test_config_round_trips_through_config_json(config: ModelConfig) -> None:
    assert type(config).from_hf(config.to_hf()) == config


def test_config_missing_values_follow_from_others() -> None:
    gpt2 = GPT2Config(hidden_size=40, num_attention_heads=5)
    assert (gpt2.intermediate_size, gpt2.head_dim, gpt2.num_key_value_heads) == (160, 8, 5)
    llama = LlamaConfig(hidden_size=192, num_attention_heads=6)
    assert (llama.head_dim, llama.num_key_value_heads, llama.intermediate_size) == (32, 6, 512)
    # 8/3 * 200 = 533.3, rounded up to a multiple of 32
    assert LlamaConfig(hidden_size=200, num_attention_heads=4).intermediate_size == 544


def test_config_odd_rotary_dimension_raises_validation_error() -> None:
    DeepseekConfig(qk_nope_head_dim=3, qk_rope_head_dim=2)
    with pytest.raises(ValidationError, match="qk_rope_head_dim 3 must be even"):
        DeepseekConfig(qk_nope_head_dim=3, qk_rope_head_dim=3)


@pytest.mark.parametrize(
    "family, values, problem",
    [
        (GPT2Config, {"hidden_size": 10, "num_attention_heads": 3}, "multiple of"),
        (GPT2Config, {"hidden_size": 0}, "greater than 0"),
        (GPT2Config, {"attn_pdrop": 1.0}, "less than 1"),
        (GPT2Config, {"n_embd": 10}, "Extra inputs"),
        (LlamaConfig, {"hidden_size": 10, "num_attention_heads": 3}, "multiple of"),
        (LlamaConfig, {"hidden_size": 10, "num_attention_heads": 3, "head_dim": 4}, "multiple of"),
        (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 3}, "multiple of"),
        (LlamaConfig, {"hidden_size": 12, "num_attention_heads": 4}, "must be even"),
        (LlamaConfig, {"head_dim": -2}, "greater than or equal to 0"),
        (LlamaConfig, {"num_attention_heads": 0}, "greater than 0"),
        (LlamaConfig, {"rope_theta": float("inf")}, "finite"),
        (LlamaConfig, {"rope_scaling": {"rope_type": "proportional"}}, "linear"),
        (LlamaConfig, {"rope_scaling": {"rope_type": "linear"}}, "required"),
        (LlamaConfig, {"hidden_size": "256"}, "valid integer"),
    ],
)
def test_config_impossible_shapes_raise_validation_error(
    family: type[GPT2Config] | type[LlamaConfig], values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        family(**values)


def test_granite_multipliers_are_keys_of_granite_only() -> None:
    """Otherwise the hashes that identify the base models of existing `lora` runs would change."""
    granite = LlamaConfig(model_type="granite", hidden_size=32, num_attention_heads=2)
    keys = {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    assert granite.attention_multiplier == granite.model_dump()["attention_multiplier"] == 0.25
    assert granite.model_dump().keys() - LlamaConfig().model_dump().keys() == keys
    with pytest.raises(
        ValidationError,
        match=r"logits_scaling is not a key of llama models .it is a key of granite",
    ):
        LlamaConfig(logits_scaling=2.0)


def test_nanochat_logit_cap_defaults_to_15() -> None:
    sections: list[tuple[dict[str, Any], float | None]] = [
        ({}, 15.0),
        ({"final_logit_softcapping": None}, None),
    ]
    for values, cap in sections:
        config = NanoChatConfig(hidden_size=24, **values)
        assert config.intermediate_size == 4 * 24
        assert config.logit_softcap == cap
        # As stored in a run's recipe and in config.json.
        assert NanoChatConfig(**config.model_dump()) == config
        assert NanoChatConfig.from_hf(config.to_hf()) == config
