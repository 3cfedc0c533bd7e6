"""Default initial weights, optimizer and schedule of a new model. These settings had the lowest
validation loss after a fixed number of tokens in `python -m benchmarks learning`
(docs/learning.md). They assume a model that normalises queries and keys and has an untied head.

This module does not import torch, so that settings can be resolved before torch is loaded.
"""

from __future__ import annotations

from typing import Any

#: Values of the `model` section for which the settings were tuned.
MODEL: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": False}

#: Settings, keyed by recipe section. The learning rates apply to a hidden_size of `RATE_WIDTH`.
NEW_MODEL: dict[str, dict[str, Any]] = {
    "init": {"residual_projections": "zero", "embedding_std": 0.8, "head_std": 0.001},
    "optimizer": {
        "name": "muon",
        "muon_learning_rate": 0.012,
        "muon_coefficients": "polar_express",
        "muon_beta2": 0.95,
        "muon_momentum_warmup_steps": 100,
        "cautious_weight_decay": True,
        "embedding_weight_decay": 0.0,
        "head_weight_decay": 0.0,
        "learning_rate": 0.3,
        "head_lr_multiple": 0.02,
        "vector_lr_multiple": 0.0133,
        "betas": [0.8, 0.95],
        "max_grad_norm": 0.0,
    },
    "schedule": {"kind": "wsd", "decay_fraction": 0.65, "min_lr_ratio": 0.0},
}

#: hidden_size of the model for which the learning rates were tuned (`optimizer.tuned_width`).
RATE_WIDTH = 192

#: Length of the warm-up as a fraction of the run's steps (`schedule.warmup_ratio`).
WARMUP_RATIO = 0.02
