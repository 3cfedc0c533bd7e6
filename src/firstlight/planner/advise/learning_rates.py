"""Learning rates by optimizer and width: the one rule of `plan --budget`, `train TEXTS` and
fine-tuning.

Rates do not depend on the batch: they were measured together with the rule that makes the batch
grow with the run (`model.batch_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.errors import ConfigError
from firstlight.optim.new_model import NEW_MODEL, RATE_WIDTH

#: Learning rates of new models by optimizer, for a hidden_size of `RATE_WIDTH`. AdamW's is that of
#: the setting `nanogpt-tuned` in `python -m benchmarks learning`; Lion takes a third to a tenth of
#: it (Chen et al. 2023), and the steps of Adafactor are relative to the parameters' size.
NEW_MODEL_RATES: dict[str, dict[str, float]] = {
    "muon": {
        key: NEW_MODEL["optimizer"][key]
        for key in ("learning_rate", "muon_learning_rate", "head_lr_multiple", "vector_lr_multiple")
    },
    "adamw": {"learning_rate": 2e-3},
    "adamw8bit": {"learning_rate": 2e-3},
    "paged_adamw8bit": {"learning_rate": 2e-3},
    "lion": {"learning_rate": 4e-4},
    "adafactor": {"learning_rate": 1e-2},
}

#: Fine-tuning all weights: AdamW's learning rate TUNING_RATE for a hidden_size of TUNING_WIDTH. It
#: is inversely proportional to the width (Yang et al. 2022). For a width of 64, 2e-3 was the best
#: of 7e-4, 2e-3 and 5e-3.
TUNING_RATE, TUNING_WIDTH = 5e-5, 2000
#: Fine-tuning: learning rates of optimizers as multiples of AdamW's. Lion's is as for new models.
TUNING_MULTIPLES = {"adamw": 1.0, "adamw8bit": 1.0, "paged_adamw8bit": 1.0, "lion": 0.2}
#: Fine-tuning adapters: the learning rate at TUNING_WIDTH as a multiple of TUNING_RATE, and the
#: power of the inverse width (Schulman et al. 2025, "LoRA Without Regret", fitted to Llama models
#: of 1 billion parameters and more).
ADAPTER_MULTIPLE, ADAPTER_POWER = 10.0, 0.781


def new_model_rates(
    name: str, hidden_size: int, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Learning rates of a new model, as keys of the `optimizer` section.

    They are the measured rates, converted to the model's width as `optimizer.tuned_width`
    describes.

    Args:
        name: name of the optimizer.
        hidden_size: width of the model.
        given: keys of the `optimizer` section that the user gives. Given rates are for this model,
            or for the width of a given `tuned_width`.

    Raises:
        ConfigError: no rate is known for the optimizer, and none is given.
    """
    # Imported only here, because it imports torch: the first line of `train TEXTS` comes before.
    from firstlight.optim.config import OPTIMIZERS, OptimizerConfig

    given = given or {}
    width = given.get("tuned_width") or hidden_size
    follows_width = "tuned_width" in OPTIMIZERS[name].options
    if name != "muon" and "learning_rate" in given:
        rates = {"learning_rate": given["learning_rate"]}
    else:
        _require_known(name, NEW_MODEL_RATES, given)
        measured: dict[str, Any] = {"name": name, **NEW_MODEL_RATES[name]}
        if follows_width:
            measured["tuned_width"] = RATE_WIDTH
        config = OptimizerConfig(**measured).for_width(width)
        keys = [*NEW_MODEL_RATES[name]]
        if follows_width and name != "muon":
            # The rate of the matrices changes; these keep the rates of embeddings and vectors.
            keys += ["embedding_lr_multiple", "vector_lr_multiple"]
        rates = {key: float(f"{getattr(config, key):.3g}") for key in keys}
    return {**rates, "tuned_width": width} if follows_width else rates


def finetuning_rate(
    name: str, hidden_size: int, given: Mapping[str, Any], *, adapters: bool
) -> float:
    """Learning rate of fine-tuning; the narrower the model, the higher.

    Args:
        name: name of the optimizer.
        hidden_size: width of the model.
        given: keys of the `optimizer` section that the user gives.
        adapters: True for adapters, False for all weights.

    Raises:
        ConfigError: no rate is known for the optimizer, and none is given.
    """
    if "learning_rate" in given:
        return float(given["learning_rate"])
    _require_known(name, TUNING_MULTIPLES, given)
    ratio = TUNING_WIDTH / hidden_size
    rate = TUNING_RATE * ratio
    if adapters:
        rate = ADAPTER_MULTIPLE * TUNING_RATE * ratio**ADAPTER_POWER
    return float(f"{rate * TUNING_MULTIPLES[name]:.2g}")


def _require_known(name: str, rates: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if name not in rates and "learning_rate" not in given:
        raise ConfigError(
            f"no learning rate is known for --optimizer.name {name}: set --optimizer.learning_rate"
        )
