"""Models with random weights, made where they will run."""

from __future__ import annotations

import torch

from firstlight.models import Model, ModelConfig, allocate, build_model


def random_model(
    config: ModelConfig, device: torch.device, vocab_multiple: int = 1, seed: int = 0
) -> Model:
    """A model with random fp32 weights, made on the device: one of 8 billion parameters takes a
    second there, and nothing of the machine's own memory.

    Args:
        config: the model's shape.
        device: where the weights lie.
        vocab_multiple: see `build_model`.
        seed: of the device's own random numbers.
    """
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    allocate(model, device)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    return model
