"""Verify that a conversion has not changed the model.

The source model and the converted model are compared in three ways. Each comparison detects errors
that the other two miss:

- Comparing the tensors detects errors in embedding rows or experts that the prompt does not use.
- Comparing the logits on a fixed prompt detects wrong settings in the config.
- Rendering a conversation with both chat templates detects a changed template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from firstlight.errors import FirstlightError, ModelError
from firstlight.models import Model, ModelConfig, build_model
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import config_from_hf
from firstlight.weights.loading import fill, first_names, is_finite

#: Prompt on which the logits of the source and the result are compared. It contains prose, numbers,
#: code and a non-ASCII letter, so that it uses many different rows of the embedding.
PROMPT = (
    "The first light of day fell on 12 old houses.\n\n    def dawn(hour):\n"
    "        return hour + 0.5  # früh am Morgen\n"
)
#: Number of token ids on which the logits are compared. A shorter prompt is extended with arbitrary
#: ids.
_PROMPT_TOKENS = 64

#: Conversation that is rendered with the chat templates of the source and the result.
CONVERSATION = [
    {"role": "user", "content": "When does the sun rise?"},
    {"role": "assistant", "content": "At six.\nIn winter, at eight."},
    {"role": "user", "content": "And set?"},
]

#: Largest allowed difference between the logits of the source and the result, as a fraction of the
#: source's largest absolute logit. The keys are the formats to which the weights were rounded. The
#: key "f32" means that they were not rounded.
#:
#: These are the largest differences measured, as fractions of the source's largest absolute logit:
#:
#:     format   random models   stories260K
#:     f16      0.0127          0.0006
#:     bf16     0.037           0.005
#:     q8_0     0.073           0.016
#:
#: For the column "random models", 30 models with random weights were converted per model family.
#: They have 2 to 4 layers and a hidden size of 64. Random weights accumulate larger rounding errors
#: than trained weights, especially in linear attention. Without the models that use linear
#: attention, the largest difference in f16 is 0.0041.
#:
#: The limits for f16 and q8_0 are three times the largest difference. The limit for bf16 is larger,
#: because models with a hidden size of 10 and a head dimension of 2 reach a difference of 0.13. The
#: limit for f32 allows for a different order of summation.
TOLERANCES = {"f32": 3e-5, "f16": 0.04, "bf16": 0.2, "q8_0": 0.22}

#: Largest rounding error of a weight, keyed by the format to which the weights were rounded. The
#: error is the sum of a relative and an absolute error. The first number of each entry is the
#: relative error, as a fraction of the tensor's largest absolute value. The second number is the
#: absolute error, which accounts for subnormal numbers.
_ROUNDING = {
    "f32": (0.0, 0.0),
    "f16": (2**-11, 2**-25),
    "bf16": (2**-8, 0.0),
    # Half a quantisation step is 1/254 of the largest number in the block. The scale of the block
    # is rounded to f16, and its rounding error is multiplied by up to 127. The error of a subnormal
    # scale, which is 2^-25, therefore becomes 2^-18.
    "q8_0": (2**-7, 2**-18),
}
#: Number of rows of a tensor that are compared at a time. The rows are copied to fp32, which would
#: take too much memory for the full tensor.
_ROWS = 4096


def prompt_ids(tokenizer: Tokenizer | None, vocab_size: int, context: int) -> Tensor:
    """Return the token ids for which the logits of the source and the result are compared, as an
    int64 tensor of shape [1, T]. T is 64 or the context length, whichever is smaller.

    The sequence starts with the token ids of `PROMPT`, followed by fixed ids that are spread over
    the vocabulary. Without a tokenizer, it consists of the fixed ids only.
    """
    count = min(_PROMPT_TOKENS, context)
    ids: list[int] = []
    if tokenizer is not None:
        start = [tokenizer.separator_id] if tokenizer.add_bos else []
        # Ids outside the vocabulary have no row in the embedding.
        ids = [i for i in [*start, *tokenizer.encode(PROMPT)] if i < vocab_size]
    # The quadratic formula spreads the ids over the vocabulary. Consecutive ids would test only a
    # small part of it.
    ids += [(7 * i * i + 3 * i + 1) % vocab_size for i in range(count)]
    return torch.tensor([ids[:count]])


def check_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype in which the logits of the source and the result are computed. It is fp32 if
    at least 8 bytes of memory per parameter are available, and bf16 otherwise.
    """
    # Two copies of the weights in fp32 can be in memory at the same time: the parameters of the
    # model and the tensors read from a GGUF file.
    needed = 8 * count_parameters(meta_model(config)).total
    return torch.float32 if needed < psutil.virtual_memory().available else torch.bfloat16


@torch.inference_mode()
def logits_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the logits of a model. Return fp32 logits of shape [1, T, V].

    Args:
        config: content of the model's config.json.
        tensors: weights, keyed by Hugging Face name.
        ids: int64 token ids of shape [1, T].
        dtype: dtype of the weights and of the computation.
    """
    with torch.device("meta"):
        model: Model = build_model(config_from_hf(config, "the model"))
    fill(model, tensors, dtype)
    logits: Tensor = model.eval()(ids)
    return logits.float()


def require_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise an error for weights that contain NaN or infinity.

    Args:
        tensors: weights, keyed by name.
        where: name of the model, for the message.

    Raises:
        ModelError: a tensor contains NaN or infinity. The message names up to three such tensors.
    """
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise ModelError(
            f"{where} has tensors with NaN or infinity ({first_names(broken)}): use an earlier "
            "checkpoint"
        )


def require_same_tensors(
    source: Mapping[str, Tensor], result: Mapping[str, Tensor], kind: str, shifted: str = ""
) -> None:
    """Compare each tensor of the source with the tensor of the same name in the result.

    Args:
        source, result: tensors, keyed by Hugging Face name.
        kind: format to which the weights were rounded, which is a key of `TOLERANCES`. It is "f32"
            if they were not rounded.
        shifted: name suffix of the norm weights to which the conversion adds 1. It is "" if there
            are no such weights.

    Raises:
        ModelError: a tensor is missing, or differs by more than the rounding error. The message
            names the tensor.
    """
    share, smallest = _ROUNDING[kind]
    for name in sorted(source.keys() | result.keys()):
        if name not in source or name not in result:
            raise ModelError(
                f"the converted model differs from the source: {name} exists in only one of the "
                "two; nothing was written"
            )
        largest, difference = _distance(source[name], result[name])
        limit = share * largest + smallest
        if shifted and name.endswith(shifted):
            # The weights are rounded to fp32 twice: when 1 is added to write the file, and when 1
            # is subtracted to read it. Each rounding error is at most 2^-24 of the value.
            limit = max(limit, 2**-23 * (largest + 1))
        # Use `not <=`, because `difference > limit` would be False for NaN.
        if not difference <= limit:
            raise ModelError(
                f"the converted model differs from the source: values of {name} differ by up to "
                f"{difference:.3g}, but rounding explains only {limit:.3g}; nothing was written"
            )


def _distance(source: Tensor, result: Tensor) -> tuple[float, float]:
    """Return the largest absolute value in `source`, and the largest absolute difference between
    `source` and `result`. If the shapes of the two tensors differ, return 0 and infinity.
    """
    if source.shape != result.shape:
        return 0.0, float("inf")
    # Keep the maximum as a tensor, because torch's maximum propagates NaN, but Python's may not.
    largest, difference = 0.0, torch.zeros(())
    for a, b in zip(torch.split(source, _ROWS), torch.split(result, _ROWS), strict=True):
        a, b = a.float(), b.float()
        largest = max(largest, float(a.abs().max()))
        difference = torch.maximum(difference, (a - b).abs().max())
    return largest, float(difference)


def require_same_logits(
    source: Tensor, result: Tensor, limit: float, *, is_routed: bool = False
) -> tuple[float, float]:
    """Compare the logits of the source and the result.

    At each position, the mean over the vocabulary is subtracted from the logits first. Softmax is
    invariant to this mean, but it can be large: the logits of OpenAI's GPT-2, for example, are
    around -35 or -110. Relative to such values, any difference would look small.

    Args:
        source, result: logits of shape [1, T, V].
        limit: largest allowed difference between two logits, as a fraction of the source's largest
            absolute logit.
        is_routed: True if the weights were rounded and the model routes tokens to experts. In this
            case, only half of the positions have to be within the limit. Rounding can send a few
            tokens to different experts, and differences of up to 0.9 of the largest logit were
            measured for such tokens. At the median position, the measured difference is the same as
            for models without experts.

    Returns:
        A tuple of the largest difference at any position and the source's largest absolute logit.
        Both values are computed after the mean has been subtracted.

    Raises:
        ModelError: the logits differ by more than the limit, or are NaN.
    """
    source, result = (x - x.mean(-1, keepdim=True) for x in (source, result))
    by_position = (source - result).abs().amax(-1).flatten()
    difference, largest = float(by_position.max()), float(source.abs().max())
    judged = float(by_position.median()) if is_routed else difference
    if not judged <= limit * largest:
        where = " at half of all positions" if is_routed else ""
        raise ModelError(
            "the converted model differs from the source: on a fixed prompt, the logits "
            f"differ{where} by up to {judged:.3g}, but only {limit:g} of the largest logit "
            f"({largest:.3g}) is allowed; nothing was written"
        )
    return difference, largest


def require_same_chat(source: Tokenizer, result: Tokenizer | None, what: str) -> list[str]:
    """Render `CONVERSATION` with the chat templates of the source and the result, and compare the
    output.

    Args:
        source: tokenizer of the source.
        result: tokenizer of the result. None if the result has no chat template.
        what: name of the result, for the message.

    Returns:
        A list with a note for the user if both templates fail with the same error. Otherwise, an
        empty list.

    Raises:
        ModelError: the two outputs or error messages differ, or only one of the two tokenizers has
            a chat template.
    """
    expected = _rendered(source)
    found = None if result is None else _rendered(result)
    if found != expected:
        raise ModelError(
            f"the chat template of {what} renders a conversation as {found!r}, but the source's "
            f"template as {expected!r}; nothing was written"
        )
    if source.chat_template is None:
        return []
    try:
        source.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    except FirstlightError as error:
        return [
            (f"the chat template was copied, but does not render an ordinary conversation: {error}")
        ]
    return []


def _rendered(tokenizer: Tokenizer) -> str | None:
    """Render `CONVERSATION` with a tokenizer's chat template. Return the rendered text or, if the
    template fails, its error message. Return None if the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        return tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    except FirstlightError as error:
        # The template has an error or does not support this conversation. The conversion continues,
        # because it copies the template unchanged.
        return str(error)
