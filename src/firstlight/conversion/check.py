"""Verify that the result of a conversion is the same model as the source.

Three comparisons are made. Each finds errors that the others miss:

- comparing the tensors finds errors in rows or experts that the prompt does not use;
- comparing the logits on a fixed prompt finds wrong model settings;
- rendering a conversation with both chat templates finds a changed template.
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

#: Prompt on which the logits of source and result are compared. Prose, numbers, code and a
#: non-ASCII letter use many different rows of the embedding.
PROMPT = (
    "The first light of day fell on 12 old houses.\n\n    def dawn(hour):\n"
    "        return hour + 0.5  # früh am Morgen\n"
)
#: Number of tokens that are compared; a shorter prompt is extended with arbitrary ids.
_PROMPT_TOKENS = 64

#: Conversation rendered by both chat templates.
CONVERSATION = [
    {"role": "user", "content": "When does the sun rise?"},
    {"role": "assistant", "content": "At six.\nIn winter, at eight."},
    {"role": "user", "content": "And set?"},
]

#: Largest allowed difference between the logits of source and result, as a fraction of the source's
#: largest logit, keyed by the format to which the weights were rounded ("f32": not rounded).
#:
#: Largest measured differences, also as fractions of the source's largest logit:
#:
#:     format   random models   stories260K
#:     f16      0.0127          0.0006
#:     bf16     0.037           0.005
#:     q8_0     0.073           0.016
#:
#: The random models are 30 models of each family, with 2 to 4 layers and hidden size 64. They
#: accumulate larger rounding errors than trained models, especially in the states of linear
#: attention: without linear attention, the largest difference in f16 is 0.0041.
#:
#: The limits of f16 and q8_0 are three times the largest difference. The limit of bf16 is larger,
#: because models with hidden size 10 and head dimension 2 reach 0.13. The limit of f32 allows for a
#: different order of summation.
TOLERANCES = {"f32": 3e-5, "f16": 0.04, "bf16": 0.2, "q8_0": 0.22}

#: Largest rounding error of a weight, keyed by the same formats. The error is the sum of two
#: numbers: a fraction of the tensor's largest absolute value, and an absolute error for subnormal
#: numbers.
_ROUNDING = {
    "f32": (0.0, 0.0),
    "f16": (2**-11, 2**-25),
    "bf16": (2**-8, 0.0),
    # Half a step is 1/254 of the block's largest number. The block's scale is rounded to f16, and
    # its error is multiplied by up to 127, so the error of 2^-25 for a subnormal scale becomes
    # 2^-18.
    "q8_0": (2**-7, 2**-18),
}
#: Number of rows of a tensor that are compared at a time, so that their fp32 copies need less
#: memory than the full tensor.
_ROWS = 4096


def prompt_ids(tokenizer: Tokenizer | None, vocab_size: int, context: int) -> Tensor:
    """Return the token ids on which source and result are compared, int64 [1, T], where T is the
    smaller of 64 and the context length.

    The sequence starts with the ids of `PROMPT` and continues with fixed ids from the full
    vocabulary. Without a tokenizer, it contains only the fixed ids.
    """
    count = min(_PROMPT_TOKENS, context)
    ids: list[int] = []
    if tokenizer is not None:
        start = [tokenizer.separator_id] if tokenizer.add_bos else []
        # An id beyond the vocabulary has no row in the embedding.
        ids = [i for i in [*start, *tokenizer.encode(PROMPT)] if i < vocab_size]
    # The quadratic formula spreads the ids over the vocabulary; consecutive ids would test only a
    # small part of it.
    ids += [(7 * i * i + 3 * i + 1) % vocab_size for i in range(count)]
    return torch.tensor([ids[:count]])


def check_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype in which the logits of source and result are computed: fp32, or bf16 if less
    than 8 bytes of memory per parameter are available."""
    # Two fp32 copies of the weights are needed: the model, and the tensors read from a GGUF file.
    needed = 8 * count_parameters(meta_model(config)).total
    return torch.float32 if needed < psutil.virtual_memory().available else torch.bfloat16


@torch.inference_mode()
def logits_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the logits of a model, fp32 [1, T, V].

    Args:
        config: the model's config.json as an object.
        tensors: weights, keyed by Hugging Face name.
        ids: token ids, int64 [1, T].
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
        ModelError: a tensor contains NaN or infinity; the message names up to three such tensors.
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
    """Compare the tensors of source and result one by one.

    Args:
        source, result: tensors, keyed by Hugging Face name.
        kind: format to which the result was rounded, a key of `TOLERANCES`; "f32" if it was not
            rounded.
        shifted: suffix of the names of norm weights w that the result's file stores as 1 + w; "" if
            there are no such weights.

    Raises:
        ModelError: a tensor is missing or differs by more than rounding; the message names it.
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
            # The sum is rounded to fp32 when the file is written, and the difference when the file
            # is read. Each rounding error is at most 2^-24 of the value.
            limit = max(limit, 2**-23 * (largest + 1))
        # `difference > limit` would be False for NaN.
        if not difference <= limit:
            raise ModelError(
                f"the converted model differs from the source: values of {name} differ by up to "
                f"{difference:.3g}, but rounding explains only {limit:.3g}; nothing was written"
            )


def _distance(source: Tensor, result: Tensor) -> tuple[float, float]:
    """Return the largest absolute value in `source` and the largest absolute difference between
    `source` and `result`, or 0 and infinity if their shapes differ.
    """
    if source.shape != result.shape:
        return 0.0, float("inf")
    # Kept as a tensor, because torch's maximum propagates NaN but Python's may not.
    largest, difference = 0.0, torch.zeros(())
    for a, b in zip(torch.split(source, _ROWS), torch.split(result, _ROWS), strict=True):
        a, b = a.float(), b.float()
        largest = max(largest, float(a.abs().max()))
        difference = torch.maximum(difference, (a - b).abs().max())
    return largest, float(difference)


def require_same_logits(
    source: Tensor, result: Tensor, limit: float, *, is_routed: bool = False
) -> tuple[float, float]:
    """Compare the logits of source and result.

    The mean over the vocabulary is subtracted at each position, because softmax is invariant to it.
    The logits of OpenAI's GPT-2, for example, are around -35 or -110; relative to such values, any
    difference would look small.

    Args:
        source, result: logits, [1, T, V].
        limit: largest allowed difference, as a fraction of the source's largest logit.
        is_routed: True if weights were rounded and the model has routers. Rounding routes a few
            tokens to different experts, which caused measured differences of up to 0.9 of the
            largest logit. In this case only half of the positions must be within the limit: at the
            median position, the measured difference is the same as for models without experts.

    Returns:
        The largest difference at any position, and the largest absolute logit of the source, both
        after the subtraction.

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
    """Render `CONVERSATION` with the chat templates of source and result, and compare the texts.

    Args:
        source: the source's tokenizer.
        result: the result's tokenizer; None means that the result has no chat template.
        what: name of the result, for the message.

    Returns:
        A list with one note if both templates fail with the same error, otherwise an empty list.

    Raises:
        ModelError: the texts or the error messages differ, or only one of the two tokenizers has a
            template.
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
    """Render `CONVERSATION`. Return the text or the template's error message, or None without a
    template.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        return tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    except FirstlightError as error:
        # The template is broken or does not support this conversation. Neither prevents the
        # conversion, which copies the template unchanged.
        return str(error)
