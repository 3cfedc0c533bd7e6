"""Attention backends on the device under test, with every mask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from runs import Outcome, Runs, difference, train_recipe
from switches import CPU, Combination

from firstlight.hardware.device import Hardware

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

#: Rows of more than one flex attention block, the last one not full.
_LONG = {"data.seq_len": 160, "model.max_position_embeddings": 160, "batch.micro_batch_size": 2}
_WINDOW = {"model.model_type": "mistral", "model.sliding_window": 40}
_MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"data.document_masking": True},
    "window": _WINDOW,
    "documents-window": {**_WINDOW, "data.document_masking": True},
}
_BACKENDS = ("sdpa", "math", "blockwise", "efficient", "flex", "flash", "cudnn")
_NOT_ON_A_CPU = ("efficient", "flex", "cudnn")
#: No masks on a GPU, and only bf16.
_CAUSAL_ONLY = ("flash", "cudnn")
_LLAMA: Combination = frozenset([("model", "llama")])
_BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (0.01, 0.05)}


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def train(rows: Path, hardware: Hardware) -> Train:
    """Return a function that trains on long rows with further settings, once for each."""
    done: dict[str, Outcome] = {}
    recipe = Runs(rows, further=_LONG).recipe

    def trained(settings: dict[str, Any], on: Hardware = hardware) -> Outcome:
        name = f"{on.device} {sorted(settings.items())}"
        if name not in done:
            done[name] = train_recipe(recipe(_LLAMA, settings), hardware=on)
        return done[name]

    return trained


def _cases() -> list[ParameterSet]:
    cases = []
    for backend in _BACKENDS:
        marks = [pytest.mark.cuda_only(f"attention {backend}")] if backend in _NOT_ON_A_CPU else []
        for precision in ("fp32", "bf16"):
            for mask in _MASKS:
                if backend in _CAUSAL_ONLY and (precision, mask) != ("bf16", "causal"):
                    continue
                name = f"{backend}-{precision}-{mask}"
                cases.append(pytest.param(backend, precision, mask, id=name, marks=marks))
    return cases


@pytest.mark.parametrize("backend, precision, mask", _cases())
def test_attention_backend_matches_explicit_softmax(
    train: Train, backend: str, precision: str, mask: str
) -> None:
    settings = {"efficiency.attention": backend, "efficiency.precision": precision}
    expected = train({**_MASKS[mask], "efficiency.attention": "plain"})
    found = difference(train({**_MASKS[mask], **settings}), expected)
    assert found.loss <= _BOUNDS[precision][0]
    assert found.weights <= _BOUNDS[precision][1]


@pytest.mark.parametrize("mask", _MASKS)
def test_attention_mask_on_device_matches_cpu(train: Train, mask: str) -> None:
    run = train(_MASKS[mask])
    found = difference(run, train(_MASKS[mask], CPU))
    assert found.loss <= 1e-5
    assert found.weights <= 1e-3
    assert mask == "causal" or difference(run, train({})).weights > 0.01


@pytest.mark.cuda_only("attention flex")
@pytest.mark.parametrize(
    "further",
    [
        {"efficiency.compile": True},
        {"efficiency.compile": True, "efficiency.compile_mode": "reduce-overhead"},
        {"efficiency.compile": True, "efficiency.compile_regional": True},
        {"efficiency.activation_checkpointing": "full"},
        {"efficiency.activation_checkpointing": "selective"},
        {"efficiency.activation_offload": True},
    ],
    ids=str,
)
def test_flex_attention_works_with_other_methods(train: Train, further: dict[str, Any]) -> None:
    settings = {**_MASKS["documents-window"], "efficiency.attention": "flex"}
    plain = {**_MASKS["documents-window"], "efficiency.attention": "plain"}
    found = difference(train({**settings, **further}), train(plain))
    assert found.loss <= 2e-5
    assert found.weights <= 2e-3


#: Models whose scores or values are supported by only some backends.
_OWN_WAYS: dict[str, dict[str, Any]] = {
    "sinks": {"model.model_type": "gpt_oss", "model.sliding_window": 40, "model.num_experts": 2},
    "capped scores": {
        "model.model_type": "gemma2",
        "model.sliding_window": 40,
        "model.attn_logit_softcapping": 0.5,
    },
    "values of another size": {
        "model.model_type": "deepseek_v2",
        "model.num_key_value_heads": 4,
        "model.v_head_dim": 24,
        "model.num_experts": 2,
        "model.num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        *((way, "blockwise") for way in _OWN_WAYS),
        ("values of another size", "math"),
        *(
            pytest.param(way, "flex", marks=pytest.mark.cuda_only("attention flex"))
            for way in ("sinks", "capped scores")
        ),
    ],
)
@pytest.mark.parametrize("documents", [False, True])
def test_attention_of_rare_shapes_matches_explicit_softmax(
    train: Train, way: str, backend: str, documents: bool
) -> None:
    settings = {**_OWN_WAYS[way], "data.document_masking": documents}
    expected = train({**settings, "efficiency.attention": "plain"})
    found = difference(train({**settings, "efficiency.attention": backend}), expected)
    # 1.2e-5 on an H100.
    assert found.loss <= 2 * _BOUNDS["fp32"][0]
    assert found.weights <= _BOUNDS["fp32"][1]
