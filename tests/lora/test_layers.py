"""Adapters on a frozen model: their output, the layers that get them, and merging."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from firstlight.errors import ConfigError, ModelError
from firstlight.lora.files import peft_notes
from firstlight.lora.layers import (
    LoraConfig,
    LoraLinear,
    adapter_tensors,
    add_lora,
    fill_adapter,
    lora_parameters,
    merge_lora,
    with_new_tokens,
)
from firstlight.models import (
    GPT2,
    DeepseekConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    MoEConfig,
    Qwen3NextConfig,
    Qwen35Config,
    Qwen35MoEConfig,
    empty_model,
)
from firstlight.models.gpt2 import Conv1D

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
    "llama": LlamaConfig(**_SIZES),
    "tied": LlamaConfig(**_SIZES, model_type="qwen2", tie_word_embeddings=True),
    "mixtral": MoEConfig(**_SIZES, num_experts=3),
    "gpt_oss": GptOssConfig(**_SIZES, num_experts=3),
    "deepseek_v3": DeepseekConfig(**_SIZES | {"num_key_value_heads": 4}, q_lora_rank=8),
    "qwen3_next": Qwen3NextConfig(**_SIZES, head_dim=8, num_experts=3),
    "qwen3_5_text": Qwen35Config(**_SIZES, head_dim=8),
    "lfm2": Lfm2Config(**_SIZES),
    "qwen3_5_moe_text": Qwen35MoEConfig(**_SIZES, head_dim=8, num_experts=3),
}
IDS = torch.arange(24).view(2, 12) * 5 % 37
EVERY_LINEAR = {
    "gpt2": ["c_attn", "c_proj", "c_fc", "lm_head"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": [
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ],
    "qwen3_next": [
        *("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
        *("shared_expert_gate", "gate_proj", "up_proj", "down_proj"),
    ],
    "qwen3_5_text": [
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ],
    "lfm2": [
        *("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w3", "w2"),
    ],
    "qwen3_5_moe_text": [
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("shared_expert_gate", "gate_proj", "up_proj", "down_proj"),
    ],
}


def some_model(name: str, vocab_multiple: int = 1, **changes: Any) -> Model:
    """Create a model with large weights and nonzero biases."""
    model = empty_model(CONFIGS[name].model_copy(update=changes), vocab_multiple)
    model.init_weights(generator(7))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_vocabulary = name.split(".")[-2] in ("wte", "embed_tokens", "lm_head")
            place = parameter[:37] if is_vocabulary else parameter
            place.add_(torch.randn(place.shape, generator=generator(1)) * 0.1)
    return model.eval()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def adapted(model: Model, disturbed: bool = True, **settings: Any) -> Model:
    """Return the model with adapters that change its output."""
    add_lora(model, LoraConfig(**{"rank": 3, "alpha": 6.0, **settings}), generator(2))
    if disturbed:
        disturb(model)
    return model


@torch.no_grad()
def disturb(model: Model) -> None:
    for name, parameter in lora_parameters(model).items():
        # Adapter rows of vocabulary padding never get a gradient and stay zero.
        rows = 37 if name.startswith("lm_head") and not name.endswith("lora_A") else None
        noise = torch.randn(parameter.shape, generator=generator(len(name))) * 0.3
        parameter[:rows].add_(noise[:rows])


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS)
    return found


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.clone() for n, p in lora_parameters(model).items() if p.grad is not None}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_new_lora_adapters_change_nothing_and_alone_are_trainable(name: str, dora: bool) -> None:
    model = some_model(name)
    before = logits(model)
    adapted(model, disturbed=False, dora=dora)
    if dora:  # magnitude divided by the norm from which it was initialized
        torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(logits(model), before)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == lora_parameters(model).keys()
    kinds = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if dora else set())
    assert {n.rpartition(".")[2] for n in trained} == kinds
    assert all(p is lora_parameters(model)[n] for n, p in trained.items())


def test_lora_factors_start_like_peft_and_zero() -> None:
    model = adapted(some_model("llama"), disturbed=False, targets=["down_proj"])
    draws = generator(2)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            expected = torch.empty(layer.lora_A.shape)
            nn.init.kaiming_uniform_(expected, a=5**0.5, generator=draws)
            torch.testing.assert_close(layer.lora_A.data, expected)
            assert not layer.lora_B.any()


@pytest.mark.parametrize("name, kinds", EVERY_LINEAR.items())
def test_lora_all_linear_targets_every_linear_layer_but_head(name: str, kinds: list[str]) -> None:
    model = adapted(some_model(name))
    found = {n.split(".")[-2] for n in lora_parameters(model)}
    assert found == set(kinds) - {"lm_head"}
    plain = some_model(name)
    linear = [n for n, m in plain.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    layers = {n for n in linear if n != "lm_head" and not n.endswith(("mlp.gate", "router"))}
    assert {n.rpartition(".")[0] for n in lora_parameters(model)} == layers


@pytest.mark.parametrize(
    ("name", "lost"),
    [("llama", []), ("gpt_oss", []), ("deepseek_v3", ["6"]), ("qwen3_next", ["6"])],
)
def test_peft_notes_count_adapters_that_peft_would_drop(name: str, lost: list[str]) -> None:
    notes = peft_notes(adapted(some_model(name), disturbed=False))
    assert [word for note in notes for word in note.split() if word.isdigit()] == lost
    of_attention = EVERY_LINEAR[name][:1]
    assert peft_notes(adapted(some_model(name), disturbed=False, targets=of_attention)) == []


def test_peft_notes_name_module_with_buffer_that_adapters_do_not_contain() -> None:
    model = adapted(some_model("deepseek_v3"), targets=["o_proj"], modules_to_save=["mlp"])
    (note,) = peft_notes(model)
    assert note.startswith(
        "PEFT does not load model.layers.1.mlp.gate, because adapters do not contain its "
        "e_score_correction_bias: "
    )
    model = adapted(some_model("deepseek_v3"), targets=["o_proj"], modules_to_save=["experts"])
    assert peft_notes(model) == []


def test_lora_target_matches_end_of_module_name() -> None:
    model = adapted(some_model("gpt2"), targets=["mlp.c_proj", "transformer.h.1.attn.c_attn"])
    assert {n.rpartition(".")[0] for n in lora_parameters(model)} == {
        "transformer.h.0.mlp.c_proj",
        "transformer.h.1.attn.c_attn",
        "transformer.h.1.mlp.c_proj",
    }


@pytest.mark.parametrize(
    "name, target, problem",
    [
        ("llama", "qproj", r"matches no linear layer of this model \(did you mean 'q_proj'\?\)"),
        ("llama", "proj", "matches no linear layer"),  # no name ends with .proj
        ("gpt2", "q_proj", ".*: choose from c_attn, c_fc, c_proj, lm_head"),
        ("gpt2", "wpe", "is an embedding, not a linear layer"),
        ("mixtral", "experts", "is a stack of experts, not a linear layer"),
        ("mixtral", "down_proj", "is a stack of experts, not a linear layer"),
        ("mixtral", "gate", "is a router of experts, not a linear layer"),
        ("gpt_oss", "router", "is a router of experts, not a linear layer"),
        ("gpt_oss", "gate_up_proj", "is a stack of experts, not a linear layer"),
    ],
)
def test_lora_target_not_a_linear_layer_raises_config_error(
    name: str, target: str, problem: str
) -> None:
    model = some_model(name)
    with pytest.raises(ConfigError, match=f"lora.targets '{target}' {problem}"):
        adapted(model, targets=[*EVERY_LINEAR[name][:1], target])
    assert not lora_parameters(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "values",
    [
        {"rank": 0},
        {"rank": 4.0},
        {"alpha": 0.0},
        {"dropout": 1.0},
        {"targets": []},
        {"targets": [""]},
        {"targets": "all_linear"},
        {"quantize": "int8"},
        {"r": 8},
    ],
)
def test_lora_invalid_settings_raise_validation_error(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig(**values)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "kind, bias", [("Linear", False), ("Linear", True), ("Conv1D", False), ("Conv1D", True)]
)
def test_lora_layer_output_matches_papers(kind: str, bias: bool, dora: bool) -> None:
    base = nn.Linear(5, 7, bias=bias) if kind == "Linear" else Conv1D(5, 7, bias=bias)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator(1)))
    base = base.double()
    W = base.weight.detach().T if kind == "Conv1D" else base.weight.detach()
    b = torch.zeros(7, dtype=torch.float64) if base.bias is None else base.bias.detach()
    layer = LoraLinear(base, 2, 1.5, 0.0, dora)
    with torch.no_grad():
        for parameter in (layer.lora_A, layer.lora_B):
            parameter.copy_(torch.randn(parameter.shape, generator=generator(2)))
    A, B = (p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    x = torch.randn(3, 5, generator=generator(3), dtype=torch.float64)
    changed = W + 1.5 * B @ A
    m = W.norm(dim=1).requires_grad_()
    expected = x @ changed.T
    if dora:
        expected = expected * (m / changed.norm(dim=1).detach())
    expected = expected + b
    torch.testing.assert_close(layer(x), expected)
    layer(x).sin().sum().backward()
    expected.sin().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(layer.lora_A.grad, A.grad)
    torch.testing.assert_close(layer.lora_B.grad, B.grad)
    if dora:
        assert layer.lora_magnitude_vector is not None
        torch.testing.assert_close(layer.lora_magnitude_vector.grad, m.grad)
    assert base.weight.grad is None
    torch.testing.assert_close(F.linear(x, layer.merged_weight(), b), expected.detach())


def test_lora_dropout_applies_before_first_factor_in_training_only() -> None:
    base = nn.Linear(6, 4)
    W, b = base.weight.detach(), base.bias.detach()
    layer = LoraLinear(base, 2, 2.0, 0.5, False)
    layer.reset(generator(0))
    with torch.no_grad():
        layer.lora_B.normal_(generator=generator(1))
    x = torch.randn(3, 6, generator=generator(2))
    with torch.no_grad():
        torch.manual_seed(0)
        found = layer.train()(x)
        torch.manual_seed(0)
        dropped = F.dropout(x, 0.5)
        change = 2.0 * dropped @ layer.lora_A.T @ layer.lora_B.T
        torch.testing.assert_close(found, F.linear(x, W, b) + change)
        assert not torch.equal(dropped, x)
        still = layer.eval()(x)
        change = 2.0 * x @ layer.lora_A.T @ layer.lora_B.T
        torch.testing.assert_close(still, F.linear(x, W, b) + change)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_lora_merge_gives_plain_model_with_same_output(name: str, head: bool, dora: bool) -> None:
    model, plain = some_model(name), some_model(name)
    layer = {"gpt2": "c_attn", "deepseek_v3": "kv_b_proj"}.get(name, "v_proj")
    targets = [layer, "lm_head"] if head else "all-linear"
    adapted(model, targets=targets, dora=dora)
    before = logits(model)
    assert (before - logits(plain)).abs().max() > 0.05
    merge_lora(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(p.requires_grad for p in model.parameters())
    is_tied = model.lm_head.weight is _embedding(model).weight
    assert is_tied == model.config.tie_word_embeddings
    assert is_tied == (plain.config.tie_word_embeddings and not head)
    assert torch.equal(_embedding(model).weight, _embedding(plain).weight)


def _embedding(model: Model) -> nn.Embedding:
    return model.transformer.wte if isinstance(model, GPT2) else model.model.embed_tokens


def test_lora_merge_keeps_base_dtype_and_rounds_once() -> None:
    model = adapted(some_model("llama").bfloat16(), targets=["q_proj"])
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(layer, LoraLinear)
    weight = layer.base_layer.get_parameter("weight").float()
    expected = (weight + 2.0 * layer.lora_B @ layer.lora_A).bfloat16()
    merge_lora(model)
    found = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_lora_adapters_on_bf16_base_are_fp32_and_stream_stays_bf16(first: bool, dora: bool) -> None:
    if first:
        model = adapted(some_model("llama"), dora=dora)
        parameters = lora_parameters(model)
        before = {n: p.detach().clone() for n, p in parameters.items()}
        model.cast(torch.bfloat16)
        assert all(p is parameters[n] for n, p in lora_parameters(model).items())
        assert all(torch.equal(p, before[n]) for n, p in parameters.items())
    else:
        model = adapted(some_model("llama").bfloat16(), dora=dora)
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    assert {p.dtype for p in lora_parameters(model).values()} == {torch.float32}
    assert model(IDS).dtype == torch.bfloat16
    found = gradients(model, model(IDS, IDS))
    assert {g.dtype for g in found.values()} == {torch.float32}
    wide = adapted(some_model("llama").bfloat16().float(), dora=dora)
    assert (logits(model).float() - logits(wide)).abs().max() < 0.1 * logits(wide).abs().max()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lora_frozen_weights_in_autocast_dtype_keep_values(name: str, dora: bool) -> None:
    wide, narrow = some_model(name), some_model(name)
    settings = LoraConfig(rank=3, targets=["c_attn"] if name == "gpt2" else ["q_proj"], dora=dora)
    add_lora(wide, settings, generator(2))
    add_lora(narrow, settings, generator(2), frozen_dtype=torch.bfloat16)
    disturb(wide)
    disturb(narrow)
    if dora:  # the magnitudes are norms of the rounded weights
        for n, p in lora_parameters(narrow).items():
            assert p.dtype == torch.float32, n
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = logits(narrow), logits(wide)
    assert (
        torch.allclose(found, expected, rtol=0.02, atol=0.02)
        if dora
        else torch.equal(found, expected)
    )
    stored = {n: p.dtype for n, p in narrow.named_parameters() if p.dtype == torch.bfloat16}
    linear = [n for n, m in some_model(name).named_modules() if isinstance(m, nn.Linear | Conv1D)]
    assert len(stored) == len(linear) - 1  # all but the head
    assert all(n.endswith("weight") for n in stored)


@pytest.mark.parametrize("dora", [False, True])
def test_lora_model_moved_to_fp64_converts_adapters(dora: bool) -> None:
    model = adapted(some_model("llama"), dora=dora)
    before = logits(model)
    assert {p.dtype for p in model.double().parameters()} == {torch.float64}
    torch.testing.assert_close(logits(model).float(), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_lora_autocast_keeps_parameter_dtype_and_casts_output(dora: bool) -> None:
    layer = LoraLinear(nn.Linear(6, 4), 2, 2.0, 0.0, dora)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.ones(3, 6))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.lora_B.grad is not None
    assert layer.lora_B.grad.dtype == torch.float32


def test_dora_magnitude_is_not_rounded_to_bf16_under_autocast() -> None:
    layer = LoraLinear(nn.Linear(64, 64, bias=False), 2, 1.0, 0.0, True)
    x = torch.randn(256, 64, generator=generator(0))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before = layer(x).float()
        assert layer.lora_magnitude_vector is not None
        layer.lora_magnitude_vector.mul_(1.003)
        after = layer(x).float()
    # In bf16, 1.003 rounds to 1 and nothing would change.
    assert float((after / before).mean()) == pytest.approx(1.003, abs=1e-3)


@pytest.mark.parametrize(
    "name, dora",
    [
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
        ("llama", True),
    ],
)
def test_lora_forward_pass_compiles_without_graph_break(name: str, dora: bool) -> None:
    model = some_model(name, num_hidden_layers=1)
    adapted(model, dora=dora, targets=["lm_head", EVERY_LINEAR[name][0]], dropout=0.1)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and name == "gpt2":
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            expected = gradients(model, model(IDS, IDS))
            found = gradients(model, compiled(IDS, IDS))
        assert found.keys() == lora_parameters(model).keys() == expected.keys()
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        for key, gradient in expected.items():
            limit = tolerance * float(gradient.abs().max())
            torch.testing.assert_close(found[key], gradient, rtol=0, atol=limit, msg=key)
    torch.compiler.reset()


@pytest.mark.parametrize("dora", [False, True])
def test_lora_recomputed_activations_give_same_gradients(dora: bool) -> None:
    model = adapted(some_model("llama"), dora=dora, dropout=0.2).train()
    torch.manual_seed(0)
    expected = gradients(model, model(IDS, IDS))
    for layer in model.model.layers:  # type: ignore[union-attr]
        forward = layer.forward
        layer.forward = lambda *a, f=forward: checkpoint(f, *a, use_reentrant=False)
    torch.manual_seed(0)
    found = gradients(model, model(IDS, IDS))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "tied"])
def test_lora_padded_vocabulary_rows_stay_zero_and_unsaved(name: str, dora: bool) -> None:
    padded = adapted(some_model(name, 64), targets=["lm_head"], dora=dora)
    plain = adapted(some_model(name), targets=["lm_head"], dora=dora)
    fill_adapter(padded, adapter_tensors(plain), "the adapter")
    torch.testing.assert_close(logits(padded), logits(plain))
    optimizer = torch.optim.AdamW(lora_parameters(padded).values(), lr=0.01)
    for _ in range(2):
        found = gradients(padded, padded(IDS, IDS))
        assert all(gradient.isfinite().all() for gradient in found.values())
        optimizer.step()
    tensors = adapter_tensors(padded)
    assert [t.shape[0] for n, t in tensors.items() if "lora_A" not in n] == [37] * (1 + dora)
    head = padded.lm_head
    assert isinstance(head, LoraLinear)
    assert head.lora_B.shape[0] == 64
    assert not head.lora_B[37:].any()
    merge_lora(padded)
    assert not padded.lm_head.weight[37:].any()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_lora_training_lowers_loss_and_keeps_base(name: str, dora: bool) -> None:
    model = some_model(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    adapted(model, disturbed=False, rank=4, dora=dora).train()
    optimizer = torch.optim.AdamW(lora_parameters(model).values(), lr=0.05)
    losses = []
    for _ in range(10):
        loss = model(IDS, IDS)
        gradients(model, loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.85 * losses[0]
    now = {n.replace(".base_layer.", "."): p for n, p in model.named_parameters()}
    assert all(torch.equal(now[n], p) for n, p in before.items())


def test_lora_mismatched_tensors_raise_and_are_named() -> None:
    model = adapted(some_model("llama"), targets=["q_proj"])
    tensors = adapter_tensors(model)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    Change = dict[str, Tensor]
    changes: list[tuple[Change, str]] = [
        ({n: t for n, t in tensors.items() if n != name}, f"lacks tensor {name}"),
        (
            {**tensors, "base_model.model.x": torch.ones(1)},
            "addition to the model's adapters, tensor",
        ),
        ({**tensors, name: torch.ones(4, 16)}, rf"{name} is \[4, 16\], expected \[3, 16\]"),
    ]
    for changed, problem in changes:
        with pytest.raises(ModelError, match=f"^step 5.*{problem}"):
            fill_adapter(model, changed, "step 5")


def test_lora_adapter_tensors_filled_into_other_model_give_same_logits() -> None:
    one, two = (adapted(some_model("tied"), dora=True, disturbed=i == 0) for i in range(2))
    tensors = copy.deepcopy(adapter_tensors(one))
    assert not torch.equal(logits(one), logits(two))
    fill_adapter(two, tensors, "the adapter")
    assert torch.equal(logits(one), logits(two))


@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ["q_proj", "lm_head"], "trainable_token_indices": [5, 3]},
        {"targets": ["q_proj", "lm_head"], "trainable_token_indices": {"lm_head": [5]}},
        {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 3]},
    ],
)
def test_lora_tied_head_changed_twice_raises_config_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"both change .*lm_head|both change .* tied to it"):
        adapted(some_model("tied"), **settings)


def test_lora_tied_head_with_fully_trained_embedding_stays_shared() -> None:
    settings: dict[str, Any] = {
        "targets": ["q_proj", "lm_head"],
        "modules_to_save": ["embed_tokens"],
    }
    shared = adapted(some_model("tied"), ensure_weight_tying=True, **settings)
    assert not [name for name in lora_parameters(shared) if name.startswith("lm_head")]
    assert shared.lm_head.weight is shared.embedding.weight


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("llama", {"targets": ["lm_head"]}, "targets changes lm_head, .* for lm_head$"),
        ("llama", {"targets": ["embed_tokens"]}, "targets changes embed_tokens, .* embed_tokens$"),
        ("tied", {"targets": ["q_proj", "lm_head"]}, "lm_head, .* for embed_tokens and lm_head$"),
        ("tied", {"modules_to_save": ["lm_head"]}, "modules_to_save changes lm_head, .* 2 new"),
    ],
)
def test_lora_new_tokens_with_adapter_of_same_table_raise_config_error(
    name: str, settings: dict[str, Any], message: str
) -> None:
    config = LoraConfig(**settings)
    with pytest.raises(ConfigError, match=message) as caught:
        with_new_tokens(some_model(name), config, 35, 37)
    assert "token_indices" not in str(caught.value)
    tables = {"modules_to_save": ["embed_tokens", "lm_head"]}
    model = some_model(name)
    accepted = with_new_tokens(model, LoraConfig(**settings | tables), 35, 37)
    assert accepted.trainable_token_indices == {}
    add_lora(model, accepted, None)


def test_lora_missing_module_to_save_raises_and_lists_all_modules() -> None:
    with pytest.raises(ConfigError, match=r"from down_proj, embed_tokens, .*lm_head"):
        adapted(some_model("tied"), modules_to_save=["nothing"])
