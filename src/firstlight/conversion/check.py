"""The check after a conversion: source and result must give the same logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.huggingface import config_from_hf
from firstlight.models import Model, build_model
from firstlight.models.accounting import count_parameters
from firstlight.tokenizer import Tokenizer
from firstlight.weights import fill

#: What both models read. Words, numbers, code, two scripts: no single row of the embedding decides.
PROMPT = (
    "The first light of day fell on 12 old houses.\n\n    def dawn(hour):\n"
    "        return hour + 0.5  # früh am Morgen\n"
)
#: At most so many tokens of it.
_PROMPT_TOKENS = 64

#: The conversation that both chat templates render.
CONVERSATION = [
    {"role": "user", "content": "When does the sun rise?"},
    {"role": "assistant", "content": "At six.\nIn winter, at eight."},
    {"role": "user", "content": "And set?"},
]

#: By the format that is written: the greatest difference of two logits that is rounding, as a
#: share of the largest logit.
TOLERANCES = {
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 1e-1,
    "q8_0": 1e-1,
}


def prompt_ids(tokenizer: Tokenizer | None, vocab_size: int, context: int) -> Tensor:
    """The prompt's ids, int64 [1, T]; without a tokenizer, ids spread over the vocabulary."""
    count = min(_PROMPT_TOKENS, context)
    if tokenizer is None:
        ids = [(7 * i * i + 3 * i + 1) % vocab_size for i in range(count)]
    else:
        ids = [i for i in tokenizer.encode_prompt(PROMPT) if i < vocab_size]
    return torch.tensor([ids[:count]])


@torch.inference_mode()
def logits_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The logits [1, T, V] that a model gives, in fp32 where memory allows it, else in its own
    dtype.

    Args:
        config: its config.json.
        tensors: its weights by their names in the file.
        ids: int64 [1, T].
    """
    with torch.device("meta"):
        model: Model = build_model(config_from_hf(config, "the result"))
    fits = 8 * count_parameters(model).total < psutil.virtual_memory().available
    dtype = torch.float32 if fits else next(iter(tensors.values())).dtype
    fill(model, tensors, dtype)
    logits: Tensor = model.eval()(ids)
    return logits.float()


def require_same_logits(
    source: Tensor, result: Tensor, kind: str, tolerance: float | None
) -> tuple[float, float]:
    """Compare the logits of source and result.

    Args:
        source, result: [1, T, V].
        kind: the format that was written, a key of `TOLERANCES`.
        tolerance: instead of the one for `kind`.

    Returns:
        The greatest difference, and the largest logit of the source.

    Raises:
        ModelError: they differ by more than rounding, or are not numbers.
    """
    limit = TOLERANCES[kind] if tolerance is None else tolerance
    difference = float((source - result).abs().max())
    largest = float(source.abs().max())
    if not difference <= limit * largest:
        raise ModelError(
            f"the converted model is not the source: on a fixed prompt their logits differ by up "
            f"to {difference:.3g}, where the largest is {largest:.3g} (allowed: {limit:g} of it); "
            "nothing was written"
        )
    return difference, largest


def require_same_chat(source: Tokenizer, result: Tokenizer | None, what: str) -> None:
    """Compare what the chat templates of source and result make of a conversation.

    Raises:
        ModelError: it is not the same text.
    """
    if source.chat_template is None:
        return
    expected = source.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    found = None
    if result is not None and result.chat_template is not None:
        found = result.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    if found != expected:
        raise ModelError(
            f"the chat template of {what} renders a conversation as {found!r}, the source's as "
            f"{expected!r}; nothing was written"
        )
