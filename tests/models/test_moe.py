"""Mixture of experts: grouped products, balance, and training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import slow_but
from firstlight.errors import ConfigError
from firstlight.models import Llama, MoEConfig, empty_model, moe
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.models.llama import LlamaBlock
from firstlight.models.mixtral import SparseMLP
from firstlight.models.moe import RouterStatistics, _blocks, grouped_linear, load_balancing_loss
from firstlight.recipe import parse_recipe
from firstlight.training.loop import train


def expected_product(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    parts = [x[a:b] @ weight[e].T for e, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(16, 8), (16, 9), (7, 8), (8, 16)])
@pytest.mark.parametrize("ends", [[4, 4, 10], [0, 0, 10], [3, 6, 10], [10, 10, 10]])
def test_grouped_products_and_gradients_match_each_block(
    dtype: torch.dtype, sizes: tuple[int, int], ends: list[int]
) -> None:
    """With the kernel, and without it for sizes that it does not support."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, sizes[0], generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3, sizes[1], sizes[0], generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(10, sizes[1], generator=generator).to(dtype)
    found = []
    for product in (
        grouped_linear(x, weight, torch.tensor(ends)),
        expected_product(x, weight, ends),
    ):
        gradients = torch.autograd.grad(product, (x, weight), upstream)
        found.append((product.detach(), *gradients))
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    for own, expected in zip(*found, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "ends", [[130, 140, 400], [0, 399, 400], [400, 400, 400], [7, 150, 400], [200, 390, 400]]
)
def test_grouped_linear_many_bf16_rows_are_multiplied_in_blocks(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_seen: list[int] = []

    def seen(x: Tensor, ends_E: Tensor) -> Iterator[tuple[slice, slice, slice]]:
        rows_seen.append(len(x))
        return _blocks(x, ends_E)

    monkeypatch.setattr(moe, "_blocks", seen)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(3, 24, 16, generator=generator).bfloat16().requires_grad_()
    upstream = torch.randn(400, 24, generator=generator).bfloat16()
    product = grouped_linear(x, weight, torch.tensor(ends))
    found = (product, *torch.autograd.grad(product, (x, weight), upstream))
    assert rows_seen == [400, 400]
    exact = [one.detach().float().requires_grad_() for one in (x, weight)]
    product = expected_product(exact[0], exact[1], ends)
    wanted = (product, *torch.autograd.grad(product, exact, upstream.float()))
    for own, expected in zip(found, wanted, strict=True):
        assert own.dtype == torch.bfloat16
        torch.testing.assert_close(own.float(), expected, atol=0.1, rtol=0.01)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6))
def test_grouped_linear_rows_need_little_padding(visits: list[int]) -> None:
    ends = torch.tensor(visits).cumsum(0)
    rows = torch.arange(sum(visits))
    found = list(_blocks(rows, ends))
    for (own, block, place), expected in zip(found, torch.split(rows, visits), strict=True):
        assert torch.equal(rows[own], expected)
        assert torch.equal(rows[block][place], expected)
        assert block.stop <= len(rows)
        count, more = len(expected), len(rows[block]) - len(expected)
        assert 0 <= more <= max(7, count / 16)


def test_grouped_linear_uses_few_shapes_for_any_routing() -> None:
    """oneDNN compiles code for each shape, and keeps half a MB of it."""
    rows = torch.zeros(5000)
    sizes = {
        block.stop - block.start
        for count in range(4096)
        for _, block, _ in _blocks(rows, torch.tensor([count]))
    }
    assert len(sizes) < 120


def test_grouped_linear_under_autocast_computes_in_autocast_dtype() -> None:
    x, weight = torch.randn(4, 8), torch.randn(2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_linear(x, weight, torch.tensor([1, 4])).dtype == torch.bfloat16


def config(**changes: Any) -> MoEConfig:
    keys: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        **changes,
    }
    return MoEConfig(**keys)


def some_model(config: MoEConfig) -> Llama:
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(1))
    assert isinstance(model, Llama)
    return model


def test_sparse_mlp_calls_two_grouped_products_per_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    real = F.grouped_mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "grouped_mm", counted)
    model = some_model(config(num_experts=40))
    model(torch.arange(32)[None] % 50)
    assert calls == 2 * 2  # of two layers


def test_sparse_mlp_output_is_weighted_sum_of_chosen_experts() -> None:
    """Compared with a plain loop over tokens."""
    model = some_model(config())
    layer = model.model.layers[0]
    assert isinstance(layer, LlamaBlock)
    mlp = layer.mlp
    assert isinstance(mlp, SparseMLP)
    x_BTC = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))
    found, logits = mlp(x_BTC)
    for x, y, scores in zip(x_BTC.flatten(0, 1), found.flatten(0, 1), logits, strict=True):
        weights, chosen = scores.softmax(-1).topk(2)
        total = torch.zeros(32)
        for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ x).chunk(2)
            total += weight * (mlp.experts.down_proj[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(y, total, atol=1e-6, rtol=1e-5)


def test_balancing_loss_is_lowest_with_equal_expert_loads() -> None:
    even = [torch.eye(4).repeat(3, 1) * 50]
    loss, visits = load_balancing_loss(even, 1)
    assert loss.item() == pytest.approx(1.0)
    assert visits.tolist() == [[3, 3, 3, 3]]
    lopsided = [torch.tensor([[50.0, 0, 0, 0]]).repeat(12, 1)]
    loss, visits = load_balancing_loss(lopsided, 1)
    assert loss.item() == pytest.approx(4.0)
    assert visits.tolist() == [[12, 0, 0, 0]]
    # Over both layers together, like transformers.
    both = load_balancing_loss([even[0], lopsided[0]], 1)[0].item()
    assert both == pytest.approx(4 * ((15 / 24) * (1 + 0.25) / 2 + 3 * (3 / 24) * 0.25 / 2))


def test_router_statistics_cover_passes_since_last_take() -> None:
    statistics = RouterStatistics()
    assert statistics.take(1) == {}
    statistics.add(torch.tensor(6.0), torch.tensor([[3, 1], [0, 4]]))
    statistics.add(torch.tensor(2.0), torch.tensor([[1, 3], [0, 4]]))
    assert statistics.take(4) == {
        "moe/router_loss": 2.0,
        "moe/max_load": 2.0,
        "moe/min_load": 0.0,
        "moe/unused_experts": 1,
    }
    assert statistics.take(4) == {}


def test_balancing_loss_trains_router_only_in_training_mode() -> None:
    ids = torch.arange(32)[None] % 50
    plain, balanced = some_model(config(router_aux_loss_coef=0.0)), some_model(config())
    assert plain.eval()(ids, ids) == balanced.eval()(ids, ids)
    assert balanced.router_statistics is not None
    assert balanced.router_statistics.take(1) == {}
    difference = balanced.train()(ids, ids) - plain.train()(ids, ids)
    found = balanced.router_statistics.take(32)["moe/router_loss"]
    assert difference.item() == pytest.approx(32 * 0.01 * found, rel=1e-3)
    assert found == pytest.approx(2, rel=0.3)


@pytest.fixture
def moe_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["model"] |= {
        "model_type": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
    }
    return recipe


def metrics_of(run_folder: Path) -> list[dict[str, Any]]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("compiled", slow_but([False], [False, True]))
def test_train_logs_expert_loads_and_loss_without_router_loss(
    compiled: bool, moe_recipe: dict[str, Any], tmp_path: Path
) -> None:
    moe_recipe["batch"]["gradient_accumulation_steps"] = 2
    moe_recipe["schedule"] = {"max_steps": 3}
    moe_recipe["efficiency"] = {
        "precision": "fp32",
        "compile": compiled,
        # Tracing and graph breaks are the same as with inductor, which takes 40 s longer.
        "compile_backend": "aot_eager",
    }
    losses = {}
    for coefficient in (0.5,) if compiled else (0.0, 0.5):
        moe_recipe["model"]["router_aux_loss_coef"] = coefficient
        moe_recipe["run"]["dir"] = str(tmp_path / str(coefficient))
        records = metrics_of(train(moe_recipe).run_folder)
        losses[coefficient] = [record["train/loss"] for record in records]
        for record in records:
            assert record["moe/router_loss"] == pytest.approx(2, rel=0.3)
            assert 0 <= record["moe/min_load"] <= 1 <= record["moe/max_load"] <= 4
            assert record["moe/unused_experts"] in range(9)
    if not compiled:
        assert losses[0.0][0] == pytest.approx(losses[0.5][0], rel=1e-6)
        assert losses[0.0][2] != losses[0.5][2]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_moe_run_resumes_bit_for_bit(
    family: str, moe_recipe: dict[str, Any], tmp_path: Path
) -> None:
    moe_recipe["model"]["model_type"] = family
    if family == "deepseek_v3":
        moe_recipe["model"]["num_key_value_heads"] = 0
    moe_recipe["schedule"]["max_steps"] = 6
    moe_recipe["evaluation"]["every_steps"] = 0
    whole = train(moe_recipe)
    expected = [(r["train/loss"], r["moe/router_loss"]) for r in metrics_of(whole.run_folder)]
    moe_recipe["run"]["dir"] = str(tmp_path / "second")

    class StopError(Exception):
        pass

    def stop(record: Any) -> None:
        if record["step"] == 5:
            raise StopError

    with pytest.raises(StopError):
        train(moe_recipe, on_step=stop)
    again = train(moe_recipe, resume=True)
    found = [(r["train/loss"], r["moe/router_loss"]) for r in metrics_of(again.run_folder)]
    assert found == expected
    weights = "model.safetensors"
    assert (again.checkpoint / weights).read_bytes() == (whole.checkpoint / weights).read_bytes()


def test_accounting_counts_visited_experts_only() -> None:
    model = meta_model(config())
    count = count_parameters(model)
    experts = 2 * 5 * 3 * 32 * 24
    assert count.experts == experts
    assert count.router == 2 * 5 * 32
    assert count.mlp == 0
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.active == count.total - experts * 3 // 5
    dense = count.attention + count.router + count.head
    attention = 2 * 12 * 4 * 8 * 32 / 2
    assert train_flops_per_token(model, 32) == 6 * (dense + experts * 2 / 5) + attention


def test_accounting_sliding_window_reduces_flops() -> None:
    full, narrow = meta_model(config()), meta_model(config(sliding_window=8))
    difference = train_flops_per_token(full, 32) - train_flops_per_token(narrow, 32)
    # Average widths: 16 tokens, against (1 + ... + 8 + 24 * 8) / 32.
    assert difference == 2 * 12 * 4 * 8 * (16 - (8 - 64 / 64))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"moe_intermediate_size": 9}, "mixtral models have one intermediate_size"),
        ({"norm_topk_prob": False}, "mixtral models have"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1, 2, 3]},
            "leave no layer with experts",
        ),
        (
            {"mlp_bias": True},
            "mlp_bias is not a key of mixtral models (it is a key of arcee, deepseek_v2",
        ),
        (
            {"max_window_layers": 1, "sliding_window": 4},
            "max_window_layers is not a key of mixtral",
        ),
    ],
)
def test_moe_shapes_unsupported_by_all_programs_raise_config_error(
    changes: dict[str, Any], said: str
) -> None:
    model = {"model_type": "mixtral", **changes}
    with pytest.raises(ConfigError) as caught:
        parse_recipe({"model": model, "data": {"dir": "d"}})
    assert said in str(caught.value)
