"""Initial weights, optimizer and schedule of a new model: the settings that learned most from the
same tokens in `firstlight bench learning` (docs/learning.md). They assume norms on queries and keys
and an untied head.

This module loads no torch, so that settings can be chosen before torch is there.
"""

from __future__ import annotations

from typing import Any

#: The layout of the model that the settings were measured with.
MODEL: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": False}

#: The settings by section of a recipe. Their rates are those of a width of `RATE_WIDTH`.
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

#: The width that the rates were measured at: `optimizer.tuned_width`.
RATE_WIDTH = 192

#: The warm-up as a share of the run, `schedule.warmup_ratio`.
WARMUP_RATIO = 0.02
