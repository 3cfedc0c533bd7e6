"""Print the parity figures of the table in docs/model-families.md:

    python tests/parity/figures.py

For each family 40 random models (1 to 3 layers, odd sizes, grouped heads, tied or not, every
rotary scaling, sliding windows) with the same weights here and in transformers, in fp32: the
maximum absolute difference of a logit, and the maximum difference of a parameter's gradient
relative to its norm.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from typing import Any

import torch
from drawn import NAMES, draw, hf_model, some_ids

from firstlight.lora.loading import load_model
from firstlight.models import Model
from firstlight.models.ops import IGNORE_INDEX

DRAWS = 40


def differences(family: str, seed: int) -> tuple[float, float]:
    """Return the maximum differences of a model: (of a logit, of a gradient relative to its
    norm).
    """
    theirs = hf_model(draw(family, seed), seed)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        own = load_model(folder).model
    ids = some_ids(seed)
    expected = theirs(input_ids=ids, labels=ids)
    expected.loss.backward()
    logits = own(ids)
    # transformers also computes the last token, and excludes it from the loss.
    labels = torch.cat((ids[:, 1:], torch.full((len(ids), 1), IGNORE_INDEX)), 1)
    (own(ids, labels) / ids[:, 1:].numel()).backward()
    return float((logits - expected.logits).detach().abs().max()), gradient_difference(own, theirs)


def gradient_difference(own: Model, theirs: Any) -> float:
    """Return the maximum over all parameters. Gradients that are zero except for rounding, such as
    a router's if each token visits one expert, are measured relative to 1/10,000 of the largest
    gradient, or to 1/1000 in SmolLM3, where a bias of unrotated keys does not affect the softmax.
    """
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    least = 1e-3 if own.config.family.no_rope_every else 1e-4
    least *= max(float(gradient.norm()) for gradient in gradients.values())
    found = [0.0]
    for name, parameter in own.named_parameters():
        if parameter.grad is not None and name in gradients:
            norm = max(float(gradients[name].norm()), least)
            found.append(float((parameter.grad - gradients[name]).norm()) / norm)
    return max(found)


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    sys.stdout.write(
        "| family | greatest difference of a logit | of a gradient, relative |\n|---|---|---|\n"
    )
    for family in NAMES:
        pairs = [differences(family, seed) for seed in range(DRAWS)]
        logit, gradient = (max(values) for values in zip(*pairs, strict=True))
        sys.stdout.write(f"| {family} | {logit:.1e} | {gradient:.1e} |\n")


if __name__ == "__main__":
    main()
