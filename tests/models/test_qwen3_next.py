"""Qwen3-Next: the gated delta rule, packed documents, and cached states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from firstlight.errors import ConfigError
from firstlight.evaluation.scores import TokenPair, likelihoods
from firstlight.generation.batch import BatchDecoder
from firstlight.lora.loading import load_model
from firstlight.methods import can_compile
from firstlight.models import Model, Qwen3NextConfig, empty_model
from firstlight.models.accounting import (
    cache_bytes_per_token,
    count_parameters,
    meta_model,
    state_bytes,
    train_flops_per_token,
)
from firstlight.models.qwen3_next import gated_delta_rule
from firstlight.optim.config import parameter_kinds
from firstlight.optim.muon import MUON
from firstlight.weights.loading import weights_to_save

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 3,
    "max_position_embeddings": 512,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONFIG = Qwen3NextConfig(**_SIZES)


def some_model(config: Qwen3NextConfig = CONFIG) -> Model:
    """Return an fp64 model: the norm of each head's output would amplify rounding errors."""
    model = empty_model(config).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return model


def some_ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(0, 37, (rows, tokens), generator=torch.Generator().manual_seed(1))


def rule_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, tokens, 3, size, generator=generator, dtype=torch.float64)
        for size in (4, 4, 5)
    )
    decay = -torch.rand(2, tokens, 3, generator=generator, dtype=torch.float64)
    return q, k, v, decay, torch.rand(2, tokens, 3, generator=generator, dtype=torch.float64)


def apply_rule(
    inputs: Sequence[Tensor], state: Tensor | None = None, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = inputs
    return gated_delta_rule(q, k, v, decay, beta, state, places)


def by_definition(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute the rule token by token, with the equations of Yang et al. 2024."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    S = torch.zeros(*q.shape[::2], 4, 5, dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        S = S * decay[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], S)
        S = S + torch.einsum("bhd,bhe->bhde", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t] / 2, S))  # sqrt(4)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("tokens", [1, 63, 64, 150])
def test_delta_rule_in_chunks_equals_token_by_token(tokens: int) -> None:
    inputs = rule_inputs(tokens)
    found, _ = apply_rule(inputs)
    torch.testing.assert_close(found, by_definition(*inputs), atol=1e-12, rtol=1e-10)


def test_delta_rule_state_continues_after_earlier_tokens() -> None:
    inputs = rule_inputs(150)
    expected, last = apply_rule(inputs)
    first, state = apply_rule([x[:, :70] for x in inputs])
    second, state = apply_rule([x[:, 70:] for x in inputs], state)
    torch.testing.assert_close(torch.cat((first, second), 1), expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=1e-10)


def test_qwen3_next_documents_of_a_row_equal_each_alone() -> None:
    """They start within a chunk, at its first token, and after more than one chunk."""
    model, ids, lengths = some_model(), some_ids(2, 300), [5, 59, 1, 2, 130, 103]
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths)).expand(2, -1)
    found = model(ids, document_ids=documents)
    alone = torch.cat([model(part) for part in torch.split(ids, lengths, dim=1)], dim=1)
    torch.testing.assert_close(found, alone, atol=1e-11, rtol=1e-9)
    # The same holds for gradients: a loss on one document's tokens gives none to the other
    # documents.
    whole = model(ids)
    assert (whole - found)[:, 5:].abs().max() > 0.01, "the comparison would say nothing"


def test_delta_rule_gradients_match_finite_differences() -> None:
    inputs = tuple(x[:1, :5, :1].clone().requires_grad_() for x in rule_inputs(5))
    places = torch.tensor([[0, 1, 0, 1, 2]])
    assert torch.autograd.gradcheck(lambda *x: apply_rule(x, places=places)[0], inputs)


def test_qwen3_next_conversation_reuses_state_only_for_same_prefix() -> None:
    model, computed = some_model(), list[int]()
    plain = model.forward
    model.forward = lambda ids, **more: computed.append(ids.shape[1]) or plain(ids, **more)  # type: ignore[func-returns-value, method-assign]
    decoder = BatchDecoder(model, 2, 64, reuse_prefixes=True)
    decoder.add([1, 2, 3, 4])
    decoder.step([5])
    found = decoder.add([1, 2, 3, 4, 5, 6, 7])
    expected = plain(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]))[0, -1]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)
    decoder.remove(1)
    # A state can't be rolled back to the three common tokens.
    torch.testing.assert_close(
        decoder.add([1, 2, 3, 9]), plain(torch.tensor([[1, 2, 3, 9]]))[0, -1], atol=1e-10, rtol=1e-8
    )
    assert computed == [4, 1, 2, 4]


@torch.no_grad()
def test_qwen3_next_beams_carry_their_states() -> None:
    model, ids = some_model(), some_ids(3, 9)
    cache = model.make_cache(3, 20, torch.float64)
    model(ids, cache=cache)
    rows = torch.tensor([2, 0, 0])
    cache.reorder(rows)
    found = model(torch.tensor([[5], [6], [7]]), cache=cache)[:, -1]
    expected = model(torch.cat((ids[rows], torch.tensor([[5], [6], [7]])), 1))[:, -1]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)


def test_qwen3_next_continuation_scores_match_whole_text() -> None:
    model, context = some_model(), tuple(range(1, 20))
    pairs = [TokenPair(context, (3, 4)), TokenPair(context, (5,)), TokenPair((7, 8), (9, 1, 2))]
    for pair, found in zip(pairs, likelihoods(model, pairs, batch_size=8), strict=True):
        ids = torch.tensor([[*pair.context, *pair.continuation]])
        logprobs = model(ids)[0].log_softmax(-1).detach()
        first = len(pair.context) - 1
        expected = sum(float(logprobs[first + i, t]) for i, t in enumerate(pair.continuation))
        assert found.logprob == pytest.approx(expected, abs=1e-9)


@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a compiler")
def test_qwen3_next_compiled_decoding_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="not support qwen3_next models, whose"):
        BatchDecoder(some_model(), 2, 64, compile=True)


def test_qwen3_next_multi_token_prediction_layers_are_dropped(tmp_path: Path) -> None:
    model = some_model()
    tensors = weights_to_save(model) | {"mtp.layers.0.mlp.gate.weight": torch.zeros(2, 2)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_hf()))
    loaded = load_model(tmp_path, dtype=torch.float32).model
    assert weights_to_save(loaded).keys() == tensors.keys() - {"mtp.layers.0.mlp.gate.weight"}
    ids = some_ids(1, 9)
    assert torch.equal(loaded(ids), model.float()(ids))


def test_qwen3_next_published_shape_has_80b_parameters_and_3b_active() -> None:
    config = Qwen3NextConfig.from_hf({"model_type": "qwen3_next", "full_attention_interval": 4})
    assert sum(not config.is_linear(layer) for layer in range(48)) == 12
    count = count_parameters(meta_model(config))
    assert count.total == 79_674_391_296
    # 12 layers x 2 x 2 heads of dimension 256 in bf16; 36 states of 32 heads, and 3 inputs of 8,192
    # channels.
    assert cache_bytes_per_token(config, torch.bfloat16) == 12 * 2 * 2 * 256 * 2
    assert state_bytes(config) == 36 * 4 * (32 * 128 * 128 + 3 * 8192)


def test_qwen3_next_flops_count_states_and_visible_tokens() -> None:
    model = meta_model(CONFIG)
    short, long = train_flops_per_token(model, 8), train_flops_per_token(model, 16)
    # One of three layers has attention: 12 x 4 heads x head dimension 8 x half of the 8 extra
    # tokens.
    assert long - short == 12 * 32 * 4
    wider = meta_model(CONFIG.model_copy(update={"linear_conv_kernel_dim": 5}))
    # One more weight per channel of the convolution, in two layers.
    assert train_flops_per_token(wider, 8) - short == 6 * 2 * (2 * 16 + 24)
    smaller = meta_model(CONFIG.model_copy(update={"linear_value_head_dim": 5}))
    lost = count_parameters(model).total - count_parameters(smaller).total
    # Two layers have a gated norm of the value's size, which is not a matrix; 18 per element of a
    # state.
    assert short - train_flops_per_token(smaller, 8) == 6 * (lost - 2) + 18 * 2 * 4 * 8


def test_qwen3_next_initial_decays_match_published_class() -> None:
    model = empty_model(CONFIG)
    model.init_weights(torch.Generator().manual_seed(0))
    kinds = parameter_kinds(model)
    for name, parameter in model.named_parameters():
        part = name.split(".", 3)[-1]
        if part in ("linear_attn.dt_bias", "linear_attn.norm.weight"):
            assert (parameter == 1).all()
        elif part == "linear_attn.A_log":
            assert ((parameter.exp() > 0) & (parameter.exp() < 16)).all()
            assert parameter.exp().max() > 1
        elif part.endswith("norm.weight"):
            assert not parameter.any()
        if part == "linear_attn.conv1d.weight":
            assert kinds[name].role == "vector"
            assert not MUON.takes(name, parameter)
            assert 0.01 < parameter.std() < 0.03


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads 3 must be a multiple of",
        ),
        ({"layer_types": ["linear_attention"] * 3}, "no layer has full_attention"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries"),
        ({"sliding_window": 5}, "sliding_window is not a key of qwen3_next models"),
    ],
)
def test_qwen3_next_impossible_shapes_raise_value_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Qwen3NextConfig(**_SIZES | changes)


def test_qwen3_next_equivalent_configs_are_equal() -> None:
    usual = ["linear_attention"] * 3 + ["full_attention"]
    sizes = {key: value for key, value in _SIZES.items() if key != "layer_types"}
    sizes |= {"num_hidden_layers": 4}
    assert Qwen3NextConfig(**sizes | {"layer_types": usual}) == Qwen3NextConfig(**sizes)
    assert Qwen3NextConfig(**sizes | {"moe_intermediate_size": 9}) == Qwen3NextConfig(
        **sizes, moe_intermediate_size=9, shared_expert_intermediate_size=9
    )
    few = Qwen3NextConfig(**sizes | {"num_hidden_layers": 2})
    assert few.to_hf()["layer_types"] == ["linear_attention", "full_attention"]
    assert Qwen3NextConfig.from_hf(few.to_hf()) == few
