"""Optimizers and their options on the device under test, compared with the same runs on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Runs, difference, make_program, train_recipe
from switches import CPU, Combination

from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware
from firstlight.optim.config import OPTIMIZERS

_LLAMA: Combination = frozenset([("model", "llama")])
#: Bounds of loss and weights if kernels of another device sum in a different order, and for updates
#: that turn the smallest difference into a large one: a sign, or equalized singular values.
_ROUNDING, _AMPLIFIED = (1e-5, 1e-3), (3e-4, 3e-2)
_MUON = {"optimizer.name": "muon", "optimizer.learning_rate": 5e-3}
_ADAFACTOR = {"optimizer.name": "adafactor", "optimizer.learning_rate": 1e-2}

_OPTIONS: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "adamw": ({}, _ROUNDING),
    "sgd without momentum": (
        {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1, "optimizer.sgd_momentum": 0.0},
        _ROUNDING,
    ),
    "lion": ({"optimizer.name": "lion", "optimizer.learning_rate": 3e-4}, _AMPLIFIED),
    "adafactor of the paper": ({**_ADAFACTOR, "optimizer.adafactor_variant": "paper"}, _ROUNDING),
    "adafactor of torch": ({**_ADAFACTOR, "optimizer.adafactor_variant": "torch"}, _ROUNDING),
    "normuon": ({**_MUON, "optimizer.muon_beta2": 0.95}, _AMPLIFIED),
    # Its steep polynomials amplify the rounding of bf16 products more.
    "polar express": (
        {**_MUON, "optimizer.muon_coefficients": "polar_express"},
        (3e-3, _AMPLIFIED[1]),
    ),
    "muon warmed up": ({**_MUON, "optimizer.muon_momentum_warmup_steps": 10}, _AMPLIFIED),
    "cautious weight decay": (
        {"optimizer.cautious_weight_decay": True, "optimizer.weight_decay": 0.1},
        _ROUNDING,
    ),
    "groups": (
        {
            "optimizer.embedding_lr_multiple": 3.0,
            "optimizer.head_lr_multiple": 0.5,
            "optimizer.embedding_weight_decay": 0.0,
            "optimizer.vector_betas": [0.9, 0.99],
        },
        _ROUNDING,
    ),
    "z-loss": ({"loss.z_loss_coef": 1e-3}, _ROUNDING),
    "z-loss in chunks": (
        {"loss.z_loss_coef": 1e-3, "efficiency.loss_chunk_tokens": 24},
        _ROUNDING,
    ),
}


@pytest.mark.parametrize("name", _OPTIONS)
def test_optimizer_option_on_device_matches_cpu(rows: Path, hardware: Hardware, name: str) -> None:
    settings, (loss, weights) = _OPTIONS[name]
    runs = Runs(rows, hardware)
    recipe = runs.recipe(_LLAMA, settings)
    run, on_cpu = train_recipe(recipe, hardware=hardware), train_recipe(recipe, hardware=CPU)
    found = difference(run, on_cpu)
    assert found.loss <= loss
    assert found.weights <= weights
    assert name == "adamw" or difference(run, runs.of(_LLAMA)).weights > 1e-4


def test_every_optimizer_is_tested() -> None:
    """Optimizers that need a GPU or a package are tested in `test_alone.py`."""
    tried = {settings.get("optimizer.name", "adamw") for settings, _ in _OPTIONS.values()}
    assert tried | {"adamw8bit", "paged_adamw8bit"} == set(OPTIMIZERS)


@pytest.mark.needs("bitsandbytes")
def test_embeddings_in_32_bits_on_device_are_updated_like_adamw(
    rows: Path, hardware: Hardware
) -> None:
    ids = torch.randint(300, (4, 33), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), 4 * 32)
    runs = Runs(rows, hardware, {"model.intermediate_size": 256})
    found = []
    for settings in (
        {},
        {"optimizer.name": "adamw8bit"},
        {"optimizer.name": "adamw8bit", "optimizer.embeddings_in_32_bits": False},
    ):
        program = make_program(runs.recipe(_LLAMA, settings), hardware)
        program.step([batch.to(hardware.device)], 1.0)
        found.append((program.model.embedding.weight, program.optimizer.state_tensors()))
    (plain, _), (wide, state), (_, narrow) = found
    assert torch.equal(wide, plain)

    def small(tensors: dict[str, torch.Tensor]) -> set[str]:
        return {name for name, tensor in tensors.items() if tensor.dtype == torch.uint8}

    assert small(state)
    assert {name.split(".")[1] for name in small(narrow) - small(state)} == {"embed_tokens"}
