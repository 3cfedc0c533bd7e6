"""Tests of the decoding step of a plain Llama for few texts: its logits equal those of the model's
operations, and it is not used for models with different operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstlight.generation.batch import BatchDecoder
from firstlight.generation.few_rows import quantize_int8, use_few_rows
from firstlight.generation.llama_step import MOST_TEXTS, LlamaStep, llama_step
from firstlight.methods import can_compile
from firstlight.models import LlamaConfig, Model, empty_model

pytestmark = pytest.mark.skipif(
    not can_compile(torch.device("cpu")), reason="no C++ compiler was found"
)

#: Differences from the usual model below.
PLAIN: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "one key head": {"num_key_value_heads": 1},
    "every head its keys": {"num_key_value_heads": 4},
    "biases": {"model_type": "qwen2"},
    "norms of queries and keys": {"model_type": "qwen3"},
    "a window": {"model_type": "mistral", "sliding_window": 7},
    "wide heads": {"head_dim": 80},
    "heads wider than the cache": {"model_type": "qwen3", "hidden_size": 32, "head_dim": 256},
    "an odd width": {"hidden_size": 68, "head_dim": 16, "intermediate_size": 101},
    "an own head": {"tie_word_embeddings": False},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "rescaled frequencies": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "scaled scores": {"head_dim": 32},
}


def _model(dtype: torch.dtype, **settings: Any) -> Model:
    usual = {
        "vocab_size": 67,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    model = empty_model(LlamaConfig(**{**usual, **settings}))
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # Norms and biases, which are initialised to equal values.
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.to(dtype).eval()


def _logits(model: Model, ids: list[int], prompt: int) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] after each token beyond the prompt, from a decoder and from the
    model.
    """
    decoder = BatchDecoder(model, 1, 64)
    decoder.add(ids[:prompt])
    found = torch.cat([decoder.step([token]) for token in ids[prompt:]])
    cache = model.make_cache(1, 64, next(model.parameters()).dtype)
    with torch.inference_mode():
        model(torch.tensor([ids[:prompt]]), cache=cache)
        steps = [model(torch.tensor([[token]]), cache=cache)[0] for token in ids[prompt:]]
    return found, torch.cat(steps)


IDS = torch.randint(0, 67, (50,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", PLAIN)
def test_llama_step_fp32_logits_match_model(name: str) -> None:
    model = _model(torch.float32, **PLAIN[name])
    use_few_rows(model)
    assert llama_step(model, model.make_cache(1, 64, torch.float32)) is not None
    found, expected = _logits(model, IDS, 5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["grouped queries", "biases", "norms of queries and keys"])
@pytest.mark.parametrize("int8", [False, True])
def test_llama_step_bf16_logits_are_as_accurate_as_model(name: str, int8: bool) -> None:
    model = _model(torch.bfloat16, **PLAIN[name])
    exact = _model(torch.float32, **PLAIN[name])
    exact.load_state_dict(model.state_dict())
    if int8:
        quantize_int8(model)
    use_few_rows(model)
    found, expected = _logits(model, IDS, 5)
    assert found.dtype == torch.bfloat16
    wide, _ = _logits(exact, IDS, 5)
    error, own = (float((one.float() - wide).square().mean().sqrt()) for one in (found, expected))
    assert error <= 1.1 * own
    assert float((found.float() - expected.float()).square().mean().sqrt()) < own


def _steps(model: Model, prompts: list[list[int]], count: int) -> Tensor:
    """Return the logits [count, B, V] of texts that a decoder continues together with the first of
    `IDS`.
    """
    decoder = BatchDecoder(model, len(prompts), 64)
    for prompt_ids in prompts:
        decoder.add(prompt_ids)
    return torch.stack([decoder.step([token] * len(prompts)) for token in IDS[:count]])


@pytest.mark.parametrize("rows", [2, 5, MOST_TEXTS])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    "name", ["biases", "norms of queries and keys", "a window", "an odd width"]
)
def test_llama_step_batched_logits_are_bitwise_equal_to_single(
    name: str, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(torch.float32 if kind == "fp32" else torch.bfloat16, **PLAIN[name])
    if kind == "int8":
        quantize_int8(model)
    use_few_rows(model)
    prompts = [IDS[row : 3 * row + 1] for row in range(rows)]
    alone = torch.cat([_steps(model, [prompt_ids], 4) for prompt_ids in prompts], dim=1)
    calls: list[int] = []
    own = LlamaStep.__call__

    def counted(step: LlamaStep, token_ids: list[int], lengths: list[int]) -> Tensor:
        calls.append(len(token_ids))
        return own(step, token_ids, lengths)

    monkeypatch.setattr(LlamaStep, "__call__", counted)
    assert torch.equal(_steps(model, prompts, 4), alone)
    assert calls == [rows] * 4


def test_llama_step_more_texts_than_supported_match_model() -> None:
    model = _model(torch.float32)
    use_few_rows(model)
    prompts = [IDS[row : row + 5] for row in range(MOST_TEXTS + 1)]
    found = _steps(model, prompts, 2)
    torch.testing.assert_close(found[:, :-1], _steps(model, prompts[:-1], 2), rtol=1e-4, atol=1e-4)


def test_llama_step_after_others_left_matches_logits_of_text_alone() -> None:
    model = _model(torch.float32)
    use_few_rows(model)
    decoder = BatchDecoder(model, 3, 64)
    for prompt_ids in (IDS[:5], IDS[20:26], IDS[30:42]):
        decoder.add(prompt_ids)
    decoder.step([IDS[5], IDS[26], IDS[42]])
    decoder.remove(0)
    decoder.step([IDS[43], IDS[27]])
    decoder.remove(1)
    again = BatchDecoder(model, 1, 64)
    again.add(IDS[30:42])
    expected = [again.step([token]) for token in IDS[42:45]]
    assert torch.equal(decoder.step([IDS[44]]), expected[-1])


def test_llama_step_propagates_nan() -> None:
    model = _model(torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.k_proj.weight")[0, 0] = torch.nan
    use_few_rows(model)
    decoder = BatchDecoder(model, 1, 64)
    decoder.add(IDS[:5])
    assert decoder.step([3]).isnan().all()


def test_llama_step_ignores_default_dtype_of_torch() -> None:
    model = _model(torch.float32)
    use_few_rows(model)
    expected, _ = _logits(model, IDS, 5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        step = llama_step(model, model.make_cache(1, 64, torch.float32))
        assert step is not None
        assert step._work.dtype == torch.float32
        found, _ = _logits(model, IDS, 5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["an odd width", "heads wider than the cache"])
def test_llama_step_writes_nothing_beyond_buffer(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(torch.float32, **PLAIN[name])
    use_few_rows(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    step = llama_step(model, model.make_cache(3, 8, torch.float32))
    assert step is not None
    size = step._work.numel()
    larger = torch.zeros(size + 4096)
    larger[size:] = 7
    step._llama.work = larger.data_ptr()
    for length, token in enumerate(IDS[:8]):
        step([token] * 3, [length] * 3)
    assert larger[:size].any()
    assert (larger[size:] == 7).all()


def test_llama_step_id_beyond_vocabulary_raises_index_error() -> None:
    model = _model(torch.float32)
    use_few_rows(model)
    decoder = BatchDecoder(model, 1, 64)
    decoder.add(IDS[:5])
    with pytest.raises(IndexError, match="token id 67 is outside the embedding table of 67"):
        decoder.step([67])


def _hooked(model: Model) -> None:
    model.layers[1].register_forward_hook(lambda *_: None)


def _hooked_itself(model: Model) -> None:
    model.register_forward_pre_hook(lambda *_: None)


def _another_class(model: Model) -> None:
    class Other(nn.Linear):
        pass

    model.lm_head.__class__ = Other


def _another_attention(model: Model) -> None:
    layer: Any = model.layers[1]
    layer.self_attn.attend = lambda *_: None


def _mixed_dtypes(model: Model) -> None:
    model.final_norm.to(torch.float64)


@pytest.mark.parametrize(
    "change", [_hooked, _hooked_itself, _another_class, _another_attention, _mixed_dtypes]
)
def test_llama_step_modified_model_is_unsupported(change: Callable[[Model], None]) -> None:
    model = _model(torch.float32)
    use_few_rows(model)
    change(model)
    assert llama_step(model, model.make_cache(1, 64, torch.float32)) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gemma3_text"},
        {"model_type": "olmo2"},
        {"model_type": "smollm3"},
        {"model_type": "granite"},
        {"head_dim": 8},
    ],
)
def test_llama_step_other_families_and_sizes_are_unsupported(
    settings: dict[str, Any],
) -> None:
    model = _model(torch.float32, **settings)
    use_few_rows(model)
    assert llama_step(model, model.make_cache(1, 64, torch.float32)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_llama_step_dtype_without_kernels_is_unsupported(dtype: torch.dtype) -> None:
    model = _model(dtype)
    use_few_rows(model)
    assert llama_step(model, model.make_cache(1, 64, dtype)) is None
