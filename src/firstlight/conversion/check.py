"""The check after a conversion: source and result must be the same model.

Three comparisons find different errors: the tensors one by one (a token or an expert that the
prompt does not use), the logits on a fixed prompt (settings of the model; the layout of another
program's tensors), the chat template's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from firstlight.errors import FirstlightError, ModelError
from firstlight.models import Model, ModelConfig, build_model
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import config_from_hf
from firstlight.weights.loading import fill

#: The prompt of both models. Words, numbers, code, two scripts: many rows of the embedding count.
PROMPT = (
    "The first light of day fell on 12 old houses.\n\n    def dawn(hour):\n"
    "        return hour + 0.5  # früh am Morgen\n"
)
#: Number of tokens, filled up with arbitrary ones if the prompt has fewer.
_PROMPT_TOKENS = 64

#: The conversation that both chat templates render.
CONVERSATION = [
    {"role": "user", "content": "When does the sun rise?"},
    {"role": "assistant", "content": "At six.\nIn winter, at eight."},
    {"role": "user", "content": "And set?"},
]

#: The greatest difference of two logits by rounding, as a share of the largest logit, by the format
#: that numbers were rounded to (f32: not rounded).
#:
#: Measured, greatest of 30 random models a family, 2 to 4 layers of width 64, then stories260K:
#: f16 0.0041 and 0.0006, bf16 0.037 and 0.005, q8_0 0.073 and 0.016; and f32, between another
#: program's own forward pass and the one here, 9e-6. The limit is three times the random models'
#: difference, whose rounding errors add up more than those of trained models; for bf16 it is
#: larger, since models of width 10 with heads of size 2 reach 0.13.
TOLERANCES = {"f32": 3e-5, "f16": 0.0125, "bf16": 0.2, "q8_0": 0.22}

#: The rounding error of a number by the same formats: a share of its tensor's largest number, and
#: an absolute error for numbers below the format's normal ones.
_ROUNDING = {
    "f32": (0.0, 0.0),
    "f16": (2**-11, 2**-25),
    "bf16": (2**-8, 0.0),
    # Half of 1/127 of the largest number, and the scale's own rounding to f16.
    "q8_0": (2**-7, 2**-18),
}
#: Rows of a tensor that are compared at a time, since the comparison is in fp32.
_ROWS = 4096


def prompt_ids(tokenizer: Tokenizer | None, vocab_size: int, context: int) -> Tensor:
    """Token ids that models are compared on, int64 [1, T]: the prompt's, filled up with ids from
    the whole vocabulary, which are the only ones without a tokenizer."""
    count = min(_PROMPT_TOKENS, context)
    ids: list[int] = []
    if tokenizer is not None:
        start = [tokenizer.separator_id] if tokenizer.add_bos else []
        ids = [i for i in [*start, *tokenizer.encode(PROMPT)] if i < vocab_size]
    ids += [(7 * i * i + 3 * i + 1) % vocab_size for i in range(count)]
    return torch.tensor([ids[:count]])


def check_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype that source and result are computed in: fp32, or bf16 if memory is short."""
    # fp32 weights twice: the model's, and those read from a GGUF file.
    needed = 8 * count_parameters(meta_model(config)).total
    return torch.float32 if needed < psutil.virtual_memory().available else torch.bfloat16


@torch.inference_mode()
def logits_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The logits [1, T, V], fp32, of a model.

    Args:
        config: the model's config.json.
        tensors: weights by their names in the file.
        ids: token ids, int64 [1, T].
        dtype: dtype of the computation.
    """
    with torch.device("meta"):
        model: Model = build_model(config_from_hf(config, "the model"))
    fill(model, tensors, dtype)
    logits: Tensor = model.eval()(ids)
    return logits.float()


def first_names(names: Sequence[str]) -> str:
    """The first three names and the number of the others, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def require_tensors(
    where: str, expected: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]
) -> None:
    """Refuse tensors that are missing, extra or misshapen.

    Args:
        where: the model or file, for the message.
        expected, given: shapes by name.

    Raises:
        ModelError: there are such tensors (named).
    """
    wrong = [
        f"{name} is {list(given[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]
    for problem, names in (
        ("lacks", sorted(expected.keys() - given.keys())),
        ("has unknown", sorted(given.keys() - expected.keys())),
        ("has misshapen", wrong),
    ):
        if names:
            raise ModelError(f"{where} {problem} tensors: {first_names(names)}")


def require_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights with NaN or infinity.

    Raises:
        ModelError: there are such tensors (named).
    """
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise ModelError(
            f"{where} has tensors with NaN or infinity: {first_names(broken)}; such a model says "
            "nothing, take an earlier checkpoint"
        )


def is_finite(tensor: Tensor) -> bool:
    """True if all numbers of a tensor are finite; it has any shape, and at least one number."""
    # torch.isfinite would allocate tensors of the same size.
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def require_same_tensors(
    source: Mapping[str, Tensor], result: Mapping[str, Tensor], kind: str, shifted: str = ""
) -> None:
    """Compare the tensors of source and result one by one.

    Args:
        source, result: tensors by their Hugging Face names.
        kind: format that they were rounded to; "f32" if they were not.
        shifted: suffix of the names of tensors to which 1 may have been added in fp32 and
            subtracted again; "" is none.

    Raises:
        ModelError: a tensor is missing, or differs by more than rounding (named).
    """
    share, smallest = _ROUNDING[kind]
    for name in sorted(source.keys() | result.keys()):
        if name not in source or name not in result:
            raise ModelError(
                f"the converted model is not the source: only one of them has {name}; nothing was "
                "written"
            )
        largest, difference = _distance(source[name], result[name])
        limit = share * largest + smallest
        if shifted and name.endswith(shifted):
            limit = max(limit, 2**-23 * (largest + 1))
        if not difference <= limit:
            raise ModelError(
                f"the converted model is not the source: numbers of {name} differ by up to "
                f"{difference:.3g}, where rounding gives {limit:.3g}; nothing was written"
            )


def _distance(source: Tensor, result: Tensor) -> tuple[float, float]:
    """The largest absolute value of `source`, and the greatest difference to `result`."""
    if source.shape != result.shape:
        return 0.0, float("inf")
    largest = difference = 0.0
    for a, b in zip(torch.split(source, _ROWS), torch.split(result, _ROWS), strict=True):
        a, b = a.float(), b.float()
        largest = max(largest, float(a.abs().max()))
        # Written so that NaN counts as the greatest difference.
        found = float((a - b).abs().max())
        difference = difference if found <= difference else found
    return largest, difference


def require_same_logits(
    source: Tensor, result: Tensor, limit: float, *, is_routed: bool = False, hint: str = ""
) -> tuple[float, float]:
    """Compare the logits of source and result, [1, T, V] each.

    The mean of each position is subtracted, since softmax ignores it: the logits of OpenAI's GPT-2
    lie around -35 or -110, and relative to that any difference would look small.

    Args:
        source, result: the logits.
        limit: greatest difference that passes, as a share of the largest logit.
        is_routed: True if weights were rounded and the model has routers. A few tokens then get
            other experts, so the greatest difference is ignored (measured: up to 0.9 of the
            largest logit), and half of the positions must be within the limit (measured at the
            median position, the difference is that of models without experts).
        hint: further possible causes, for the message.

    Returns:
        The greatest difference, and the largest logit of the source.

    Raises:
        ModelError: the logits differ by more, or are not numbers.
    """
    source, result = (x - x.mean(-1, keepdim=True) for x in (source, result))
    by_position = (source - result).abs().amax(-1).flatten()
    difference, largest = float(by_position.max()), float(source.abs().max())
    judged = float(by_position.median()) if is_routed else difference
    if not judged <= limit * largest:
        where = " at half of all positions" if is_routed else ""
        raise ModelError(
            f"the converted model is not the source: on a fixed prompt their logits differ{where} "
            f"by up to {judged:.3g}, where the largest is {largest:.3g} (allowed: {limit:g} of "
            f"it); {hint}nothing was written"
        )
    return difference, largest


def require_same_chat(source: Tokenizer, result: Tokenizer | None, what: str) -> list[str]:
    """Compare a conversation that the chat templates of source and result render.

    Args:
        source, result: the tokenizers; the result has none if it has no chat template either.
        what: name of the result for the message.

    Returns:
        Notes: the reason why neither renders it.

    Raises:
        ModelError: the texts differ.
    """
    expected = _rendered(source)
    found = None if result is None else _rendered(result)
    if found != expected:
        raise ModelError(
            f"the chat template of {what} renders a conversation as {found!r}, the source's as "
            f"{expected!r}; nothing was written"
        )
    if source.chat_template is None:
        return []
    try:
        source.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    except FirstlightError as error:
        return [f"the chat template was taken over, but renders no ordinary conversation: {error}"]
    return []


def _rendered(tokenizer: Tokenizer) -> str | None:
    """The conversation as text, or the template's error; None without a template."""
    if tokenizer.chat_template is None:
        return None
    try:
        return tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    except FirstlightError as error:
        # A template may be for other conversations, or broken: it only has to be copied.
        return str(error)
