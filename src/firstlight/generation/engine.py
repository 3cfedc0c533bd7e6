"""Run a model token by token: prefill the cache with the prompt, then decode."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from firstlight.checkpoint import resolve_model_folder
from firstlight.errors import ConfigError, ModelError, nearest
from firstlight.generation.sampling import SamplingConfig, sample
from firstlight.huggingface import LoadedModel, load_model
from firstlight.models import Model
from firstlight.tokenizer import TextStream, Tokenizer
from firstlight.weights import LOADING_WAYS, LoadingWay

#: Names of `load`'s dtypes; None is that of the file.
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


def load(
    checkpoint: str | Path,
    device: torch.device | str = "cpu",
    *,
    dtype: str = "auto",
    way: LoadingWay = "auto",
) -> LoadedModel:
    """Load a model: a run folder (its newest complete checkpoint), a checkpoint folder, any
    Hugging Face model folder, or a hub id.

    Args:
        checkpoint: what to load.
        device: where the weights go: "cpu", "cuda", ...
        dtype: "auto" (that of the file), "float32", "bfloat16" or "float16".
        way: "mmap" maps the file into memory: at once, but the file must not be overwritten in
            place while the model lives; "sequential" reads each tensor straight into its place;
            "straight" takes twice the memory; "auto" maps on the CPU where nothing is converted,
            else reads.

    Raises:
        ConfigError: `dtype` or `way` is unknown.
        ModelError, CheckpointError, TokenizerError: it is missing, damaged or unknown.
    """
    for name, value, known in (("dtype", dtype, DTYPES), ("way", way, LOADING_WAYS)):
        if value not in known:
            hint = nearest(value, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"{name} '{value}' is unknown{hint}")
    return load_model(resolve_model_folder(checkpoint), device, dtype=DTYPES[dtype], way=way)


@torch.inference_mode()
def generate_ids(
    model: Model,
    prompt_ids: Sequence[int],
    config: SamplingConfig,
    eos_token_ids: Sequence[int] = (),
) -> Iterator[int]:
    """Yield new token ids after `prompt_ids` until an end token (not yielded), `max_new_tokens`
    or the model's context limit.

    Raises:
        ConfigError: the prompt is empty or fills the context.
        ModelError: the prompt holds an id beyond the vocabulary.
    """
    limit = model.config.max_position_embeddings
    if not prompt_ids:
        raise ConfigError("the prompt has no tokens: the model needs at least one to go on from")
    if len(prompt_ids) >= limit:
        raise ConfigError(
            f"the prompt has {len(prompt_ids)} tokens, and the model's context is {limit}: "
            "shorten it"
        )
    if max(prompt_ids) >= model.config.vocab_size:
        raise ModelError(
            f"the tokenizer gives id {max(prompt_ids)}, beyond the model's vocabulary of "
            f"{model.config.vocab_size}: they don't belong together"
        )
    parameter = next(model.parameters())
    count = min(config.max_new_tokens, limit - len(prompt_ids))
    generator = torch.Generator().manual_seed(_seed(config))
    cache = model.make_cache(1, len(prompt_ids) + count, parameter.dtype)
    input_ids = torch.tensor([list(prompt_ids)], device=parameter.device)
    for _ in range(count):
        logits_V = model(input_ids, cache=cache, logits_to_keep=1)[0, -1]
        token_id = sample(logits_V, config, generator)
        if token_id in eos_token_ids:
            return
        yield token_id
        input_ids = torch.tensor([[token_id]], device=parameter.device)


def _seed(config: SamplingConfig) -> int:
    return config.seed if config.seed is not None else secrets.randbits(62)


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
        prompt: as given.
        text: what the model added.
        token_ids: of the added text.
        prompt_tokens: number of tokens of the prompt, bos included.
        finish_reason: "stop" at an end token, "length" at a limit.
        seed: gives the same text again.
    """

    prompt: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    seed: int


class GenerationStream:
    """The pieces of a continuation as they become certain; afterwards, the whole in `result`.

    Args:
        loaded: from `load`.
        prompt: text to continue.
        config: see `SamplingConfig`.

    Raises:
        ModelError: the model folder has no tokenizer.
    """

    def __init__(self, loaded: LoadedModel, prompt: str, config: SamplingConfig) -> None:
        if loaded.tokenizer is None:
            raise ModelError(f"{loaded.folder} has no tokenizer: add tokenizer.json to it")
        self.result: Generation | None = None
        self._loaded, self._tokenizer, self._prompt = loaded, loaded.tokenizer, prompt
        self._config = replace(config, seed=_seed(config))

    def __iter__(self) -> Iterator[str]:
        self._loaded.require_unchanged()
        tokenizer: Tokenizer = self._tokenizer
        prompt_ids = tokenizer.encode_prompt(self._prompt)
        stream = TextStream(tokenizer, prompt_ids)
        ids: list[int] = []
        pieces: list[str] = []
        stops = self._loaded.eos_token_ids
        for token_id in generate_ids(self._loaded.model, prompt_ids, self._config, stops):
            ids.append(token_id)
            piece = stream.push(token_id)
            if piece:
                pieces.append(piece)
                yield piece
        rest = stream.finish()
        if rest:
            pieces.append(rest)
            yield rest
        room = self._loaded.model.config.max_position_embeddings - len(prompt_ids)
        at_limit = len(ids) == min(self._config.max_new_tokens, room)
        assert self._config.seed is not None
        self.result = Generation(
            self._prompt,
            "".join(pieces),
            ids,
            len(prompt_ids),
            "length" if at_limit else "stop",
            self._config.seed,
        )


def generate(
    checkpoint: str | Path | LoadedModel,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Generation:
    """Continue a text.

    Args:
        checkpoint: a folder or hub id as for `load`, or what `load` returned.
        prompt: text to continue; empty starts from the model's beginning-of-text token.
        max_new_tokens, temperature, top_k, top_p, seed: see `SamplingConfig`.

    Raises:
        ConfigError: a value is out of range, or the prompt fills the context.
        ModelError, CheckpointError, TokenizerError: the model can't be used.
    """
    config = SamplingConfig(max_new_tokens, temperature, top_k, top_p, seed)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else load(checkpoint)
    stream = GenerationStream(loaded, prompt, config)
    for _ in stream:
        pass
    assert stream.result is not None
    return stream.result
