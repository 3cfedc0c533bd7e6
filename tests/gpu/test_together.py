"""Recipes with several methods on the device under test, including adapters and preference
pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from runs import Runs, difference, make_program, train_recipe
from switches import CPU, Combination

from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware
from firstlight.recipe import PreferenceConfig
from firstlight.training.step import StepResult

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

_LLAMA: Combination = frozenset([("model", "llama")])
#: Bounds of loss and weights: the bounds of the methods add up.
_FP32, _BF16, _EIGHT_BITS = (2e-5, 2e-3), (0.02, 0.1), (0.02, 0.3)
_DOCUMENTS = {"data.document_masking": True}
_LORA = {"lora.rank": 4}
_NO_CLIPPING = {"optimizer.max_grad_norm": 0.0}


def _efficiency(**values: object) -> dict[str, Any]:
    return {f"efficiency.{key}": value for key, value in values.items()}


def _case(
    name: str,
    mathematics: dict[str, Any],
    methods: dict[str, Any],
    bounds: tuple[float, float],
    *marks: pytest.MarkDecorator,
) -> ParameterSet:
    return pytest.param(mathematics, methods, bounds, id=name, marks=marks)


_COMPILES = pytest.mark.cuda_only("inductor compiles for half a minute on a CPU")
_BITSANDBYTES, _TORCHAO = pytest.mark.needs("bitsandbytes"), pytest.mark.needs("torchao")
_TWICE = {"batch.micro_batch_size": 2, "batch.gradient_accumulation_steps": 2}

_CASES = [
    _case(
        "bf16-chunks-full-padded",
        _DOCUMENTS,
        _efficiency(
            precision="bf16",
            loss_chunk_tokens=24,
            activation_checkpointing="full",
            vocab_multiple=64,
        ),
        _BF16,
    ),
    _case(
        "fp16-accumulated-chunks",
        {},
        {**_TWICE, **_efficiency(precision="fp16", loss_chunk_tokens=24)},
        _BF16,
    ),
    _case(
        "bf16_params-selective-accumulated",
        {},
        {**_TWICE, **_efficiency(precision="bf16_params", activation_checkpointing="selective")},
        _BF16,
    ),
    _case(
        "muon-offload-full",
        {"optimizer.name": "muon", "optimizer.learning_rate": 5e-3},
        _efficiency(activation_offload=True, activation_checkpointing="full"),
        (3e-4, 0.03),
    ),
    _case(
        "adafactor-in-backward-bf16",
        {"optimizer.name": "adafactor", "optimizer.learning_rate": 1e-2, **_NO_CLIPPING},
        _efficiency(precision="bf16", optimizer_in_backward=True),
        _BF16,
    ),
    _case(
        "in-backward-bf16_params",
        _NO_CLIPPING,
        _efficiency(precision="bf16_params", optimizer_in_backward=True),
        _BF16,
    ),
    _case(
        "lora-bf16-full",
        _LORA,
        _efficiency(precision="bf16", activation_checkpointing="full"),
        _BF16,
    ),
    _case("lora-bf16_params", _LORA, _efficiency(precision="bf16_params"), _BF16),
    _case(
        "dora-selective-documents",
        {**_LORA, "lora.dora": True, **_DOCUMENTS},
        _efficiency(activation_checkpointing="selective"),
        _FP32,
    ),
    _case(
        "qlora-full-offload",
        {**_LORA, "lora.quantize": "nf4"},
        _efficiency(activation_checkpointing="full", activation_offload=True),
        _FP32,
        _BITSANDBYTES,
    ),
    _case(
        "qlora-bf16",
        {**_LORA, "lora.quantize": "nf4"},
        _efficiency(precision="bf16"),
        _BF16,
        _BITSANDBYTES,
    ),
    _case(
        "8-bits-bf16_params",
        {},
        {"optimizer.name": "adamw8bit", **_efficiency(precision="bf16_params")},
        _EIGHT_BITS,
        _BITSANDBYTES,
    ),
    _case(
        "aot_eager-bf16-chunks",
        _DOCUMENTS,
        _efficiency(
            precision="bf16", compile=True, compile_backend="aot_eager", loss_chunk_tokens=24
        ),
        _BF16,
    ),
    _case(
        "compiled-bf16-flex-chunks",
        _DOCUMENTS,
        _efficiency(precision="bf16", compile=True, attention="flex", loss_chunk_tokens=24),
        _BF16,
        _COMPILES,
    ),
    _case(
        "cuda-graphs-bf16-fused",
        {},
        _efficiency(precision="bf16", compile=True, compile_mode="reduce-overhead"),
        _BF16,
        _COMPILES,
    ),
    _case(
        "compiled-lora-bf16", _LORA, _efficiency(precision="bf16", compile=True), _BF16, _COMPILES
    ),
    _case(
        "compiled-qlora-bf16",
        {**_LORA, "lora.quantize": "nf4"},
        _efficiency(precision="bf16", compile=True),
        _BF16,
        _COMPILES,
        _BITSANDBYTES,
    ),
    _case(
        "compiled-fp8",
        {},
        _efficiency(precision="fp8", compile=True),
        _EIGHT_BITS,
        _COMPILES,
        _TORCHAO,
    ),
]


@pytest.mark.parametrize("mathematics, methods, bounds", _CASES)
def test_several_methods_on_device_stay_near_plain_run(
    rows: Path,
    hardware: Hardware,
    mathematics: dict[str, Any],
    methods: dict[str, Any],
    bounds: tuple[float, float],
) -> None:
    runs = Runs(rows, hardware, mathematics)
    run = train_recipe(runs.recipe(_LLAMA, methods), hardware=hardware)
    found = difference(run, runs.of(_LLAMA))
    assert run.skipped == 0
    assert found.loss <= bounds[0]
    assert found.weights <= bounds[1]


def _pairs() -> Batch:
    """Return two rows of two pairs each: eight answers of eight tokens, the last of them
    padding.
    """
    ids = torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(5))
    labels = ids[:, 1:].clone()
    labels.view(2, 4, 8)[:, :, :3] = -100
    documents = torch.arange(4, dtype=torch.int32).repeat_interleave(8).expand(2, -1).contiguous()
    references = torch.tensor([[-29.0, -28.0, -27.5, -29.5], [-28.0, -28.5, 0.0, 0.0]])
    references[1, 2:] = float("nan")
    valid = int((labels != -100).sum())
    return Batch(ids[:, :-1].contiguous(), labels, valid, documents, references.double())


def _learn_pairs(runs: Runs, hardware: Hardware, **settings: object) -> tuple[Any, ...]:
    recipe = runs.recipe(_LLAMA, {**_DOCUMENTS, **_efficiency(**settings)})
    program = make_program(recipe.model_copy(update={"preference": PreferenceConfig()}), hardware)
    batch = _pairs().to(hardware.device)
    results: list[StepResult] = [program.step([batch], 1.0) for _ in range(8)]
    weights = {n: p.detach().float().cpu() for n, p in program.model.named_parameters()}
    return [result.loss for result in results], weights, program.preference_metrics("train")


@pytest.mark.parametrize(
    "settings, loss, weights",
    [
        ({}, 1e-5, 1e-4),
        ({"precision": "bf16"}, 0.05, 0.02),
        ({"activation_checkpointing": "full", "activation_offload": True}, 1e-5, 1e-4),
    ],
    ids=str,
)
def test_preference_training_on_device_matches_cpu(
    rows: Path, hardware: Hardware, settings: dict[str, Any], loss: float, weights: float
) -> None:
    runs = Runs(rows, hardware)
    losses, found, metrics = _learn_pairs(runs, hardware, **settings)
    expected_losses, expected, expected_metrics = _learn_pairs(runs, CPU)
    assert expected_losses[-1] < expected_losses[0] - 0.1
    assert losses == pytest.approx(expected_losses, abs=loss)
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm()) <= weights * float(tensor.norm()), name
    assert metrics == pytest.approx(expected_metrics, abs=10 * loss)


@pytest.mark.cuda_only("page-locked memory")
def test_loader_batches_on_device_are_page_locked_and_complete(device: torch.device) -> None:
    """The copy to the GPU is queued behind other work, and the batch is freed before it runs."""
    expected = _pairs()
    copies = []
    for _ in range(20):
        pinned = _pairs().pin_memory()
        assert pinned.input_ids.is_pinned()
        torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]
        copies.append(pinned.to(device))
        del pinned
    for copy in copies:
        assert torch.equal(copy.input_ids.cpu(), expected.input_ids)
        assert torch.equal(copy.labels.cpu(), expected.labels)
