"""nanoGPT's GPT (karpathy/nanoGPT `model.py`): a file `ckpt.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.conversion.foreign.layout import (
    GPT2_SHAPES,
    Layout,
    Opened,
    Settings,
    Shape,
    without_buffers,
)

#: The names are Hugging Face's, and the biases optional.
LAYOUT = Layout(
    program="nanoGPT",
    kind="gpt2",
    mark=".attn.c_attn.weight",
    names={name: (name,) for name in GPT2_SHAPES},
    shapes=GPT2_SHAPES,
    optional=frozenset(name for name in GPT2_SHAPES if name.endswith(".bias")),
)
#: GPT-2's vocabulary of 50257 tokens, rounded up to a multiple of 64.
_PADDED_VOCABULARY = 50304


def open_weights(content: Mapping[str, Any], weights: Mapping[str, Any]) -> Opened:
    """Return the model of a checkpoint.

    Args:
        content: the file's content, with `model_args` unless it is a bare state_dict.
        weights: the state_dict.
    """
    args = content.get("model_args")
    settings = Settings(
        found={"layer_norm_epsilon": 1e-5},
        assumed={"activation_function": "gelu"},
        notes={
            "activation_function": "The activation is taken to be the exact GELU, nanoGPT's since "
            'May 2023 (give "activation_function": "gelu_new" for a file of an older one).'
        },
        model_args=args if isinstance(args, Mapping) else None,
    )
    return Opened(LAYOUT, without_buffers(weights), settings)


def shape_notes(shape: Shape) -> list[str]:
    """Return notes on a padded vocabulary and an untied head."""
    notes = []
    if shape.sizes["V"] == _PADDED_VOCABULARY:
        notes.append(
            "The vocabulary is 50304, GPT-2's 50257 rounded up for speed: the last 47 ids "
            "stand for no token."
        )
    if not shape.tied:
        notes.append("Its head and embedding differ, though nanoGPT ties them: both are kept.")
    return notes
