"""Read GPT models from nanoGPT.

A model is a file named `ckpt.pt`. Source: karpathy/nanoGPT `model.py`.
"""

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

#: The tensor names are the same in nanoGPT and in Hugging Face's GPT-2. All biases are optional.
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
    """Open the model in a checkpoint.

    Args:
        content: content of the file, which is either a dict with the key `model_args` or a bare
            state_dict.
        weights: state_dict of the model.
    """
    args = content.get("model_args")
    settings = Settings(
        found={"layer_norm_epsilon": 1e-5},
        assumed={"activation_function": "gelu"},
        notes={
            "activation_function": "The activation is assumed to be the exact GELU, which nanoGPT "
            'has used since May 2023 (set "activation_function": "gelu_new" for a file of an older '
            "version)."
        },
        model_args=args if isinstance(args, Mapping) else None,
    )
    return Opened(LAYOUT, without_buffers(weights), settings)


def shape_notes(shape: Shape) -> list[str]:
    """Return notes for the user about a padded vocabulary and an untied output head."""
    notes = []
    if shape.sizes["V"] == _PADDED_VOCABULARY:
        notes.append(
            "The vocabulary is 50304, GPT-2's 50257 rounded up for speed: the last 47 ids have "
            "no token."
        )
    if not shape.tied:
        notes.append("Its head and embedding differ although nanoGPT ties them: both are kept.")
    return notes
