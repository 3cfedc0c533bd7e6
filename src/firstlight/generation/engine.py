"""Load a model for generation. Continue a single prompt as a stream, or many prompts in a batch."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from firstlight.checkpoint.selection import read_model_folder
from firstlight.errors import ConfigError, ModelError, nearest
from firstlight.generation.batch import BatchDecoder, require_prompt
from firstlight.generation.beams import search
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import (
    Chosen,
    Continuation,
    Generation,
    choose_tokens,
)
from firstlight.generation.few_rows import use_few_rows, use_large_pages
from firstlight.hardware.environment import sharing_cores
from firstlight.lora.loading import LoadedModel, load_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import GENERATION_CONFIG_NAME
from firstlight.weights.loading import LOADING_MODES, LoadingMode

#: Mapping from the `dtype` argument of `load` to the dtype in which weights are loaded. None keeps
#: the dtype of the file.
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "int8": torch.bfloat16,
}


def load(
    checkpoint: str | Path,
    device: torch.device | str = "cpu",
    *,
    dtype: str = "auto",
    way: LoadingMode = "auto",
    best: bool = False,
) -> LoadedModel:
    """Load a model for generation.

    Args:
        checkpoint: a run folder (its newest complete checkpoint is loaded), a checkpoint folder, a
            Hugging Face model folder, or a hub id.
        device: device of the weights: "cpu", "cuda", ...
        dtype: "auto" (the file's dtype), "float32", "bfloat16", "float16" or "int8". "int8" rounds
            the weights of linear layers to 8 bits (`Int8Linear`) and casts all other weights to
            bfloat16. The resulting model can only be used for generation. CUDA GPUs do not support
            "int8".
        way: "mmap" maps the file into memory, which takes almost no time, but the file must not be
            overwritten in place while the model exists. "sequential" reads each tensor directly
            into its parameter. "straight" reads the whole file before the weights are copied, which
            takes twice the memory. "auto" means "mmap" if the model is loaded on the CPU and its
            weights are not converted, otherwise "sequential".
        best: True to load the checkpoint with the lowest validation loss from a run folder, instead
            of the newest checkpoint.

    Raises:
        ConfigError: `dtype` or `way` is unknown, the device does not support `dtype`, or `best` is
            set and `checkpoint` is not a run folder.
        ModelError, CheckpointError, TokenizerError: the model is missing, damaged or of an unknown
            type.
    """
    for name, value, known in (("dtype", dtype, DTYPES), ("way", way, LOADING_MODES)):
        if value not in known:
            hint = nearest(value, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"{name} '{value}' is unknown{hint}")
    if dtype == "int8" and torch.device(device).type == "cuda":
        # On CUDA GPUs, torch's int8 kernel is slower than casting the weights to bf16. This cast
        # moves 2.5 times as many bytes as a matrix product with bf16 weights.
        raise ConfigError(
            "dtype int8 is supported only on CPUs, because it is slower than bfloat16 on a GPU: "
            "use bfloat16, or set the device to cpu"
        )
    loaded = read_model_folder(
        checkpoint,
        lambda folder: load_model(folder, device, dtype=DTYPES[dtype], mode=way),
        best=best,
    )
    if dtype == "int8":
        from firstlight.generation.few_rows import quantize_int8

        quantize_int8(loaded.model)
    use_few_rows(loaded.model)
    use_large_pages(loaded.model, is_mapped=bool(loaded.mapped))
    return loaded


def pieces_of(text: Continuation, decoder: BatchDecoder) -> Iterator[str]:
    """Generate a continuation until it ends or the caller closes the generator.

    Args:
        text: a continuation for which no tokens have been generated yet.
        decoder: a decoder without sequences. The sequence that is added to it is removed at the
            end.

    Yields:
        For each new token, the piece of text that becomes final, which is often empty.

    Raises:
        ConfigError, ModelError: see `require_prompt` and `Continuation.push`.
    """
    assert len(decoder) == 0
    # When the context is full, half of its tokens are kept. If fewer tokens were kept, more text
    # than necessary would be dropped. If more tokens were kept, they would have to be recomputed
    # more often.
    kept = max(decoder.max_tokens // 2, 1)
    slides_by = text.config.slide_tokens
    if slides_by is not None:
        # Including the next token, the sequence is one token longer than the context, so its oldest
        # tokens are dropped.
        kept = max(decoder.max_tokens + 1 - slides_by, 1)
    prompt_ids = text.prompt_ids
    if text.config.slide and len(prompt_ids) >= decoder.max_tokens:
        prompt_ids = prompt_ids[-kept:]
    logits_V = decoder.add(prompt_ids, text.score_prompt, may_fill=slides_by is not None)
    try:
        (chosen,) = choose_tokens([text], logits_V[None])
        yield text.push(chosen)
        while text.finish_reason is None:
            if decoder.room(0):
                (chosen,) = next_tokens([text], decoder)
            else:
                # The kept tokens are recomputed, because their positions have changed: positions
                # are counted from the first kept token.
                decoder.remove(0)
                kept_ids = [*text.prompt_ids, *text.token_ids][-kept:]
                logits_V = decoder.add(kept_ids, may_fill=slides_by is not None)
                (chosen,) = choose_tokens([text], logits_V[None])
            yield text.push(chosen)
    finally:
        decoder.remove(0)


def pieces_of_many(
    texts: Sequence[Continuation], decoder: BatchDecoder
) -> Iterator[tuple[int, str]]:
    """Generate several continuations until they end, with up to `decoder.max_sequences` at a time.
    When a continuation ends, the next one starts immediately.

    Args:
        texts: continuations for which no tokens have been generated yet.
        decoder: a decoder without sequences.

    Yields:
        For each new token, the index of its continuation, and the piece of text that becomes final.

    Raises:
        ConfigError: the config of a continuation enables `slide` or `beams`.
        ConfigError, ModelError: see `require_prompt` and `Continuation.push`.
    """
    if any(text.config.slide or text.config.beams > 1 for text in texts):
        raise ConfigError(
            "slide and beams do not support batches: omit them, or generate one text at a time"
        )
    assert len(decoder) == 0
    waiting = deque(range(len(texts)))
    running: list[int] = []
    while waiting or running:
        first = len(running)
        while waiting and len(running) < decoder.max_sequences:
            running.append(waiting.popleft())
        if joining := [texts[index] for index in running[first:]]:
            chosen = first_tokens(joining, decoder)
        else:
            chosen, first = next_tokens([texts[index] for index in running], decoder), 0
        for row in reversed(range(first, len(running))):
            index = running[row]
            yield index, texts[index].push(chosen[row - first])
            if texts[index].finish_reason is not None:
                decoder.remove(row)
                running[row] = running[-1]
                running.pop()


def first_tokens(texts: Sequence[Continuation], decoder: BatchDecoder) -> list[Chosen | Exception]:
    """Add the prompts of several continuations to a decoder. Return the first new token of each
    continuation, as returned by `choose_tokens`.

    Raises:
        ConfigError, ModelError: see `require_prompt`.
    """
    if any(text.score_prompt is not None for text in texts):
        logits = [decoder.add(text.prompt_ids, text.score_prompt) for text in texts]
        return choose_tokens(texts, torch.stack(logits))
    return choose_tokens(texts, decoder.add_many([text.prompt_ids for text in texts]))


def next_tokens(texts: Sequence[Continuation], decoder: BatchDecoder) -> list[Chosen | Exception]:
    """Return the next token of each continuation in a decoder, as returned by `choose_tokens`. The
    continuations are in the order of the decoder's sequences.
    """
    logits_BV = decoder.step([text.token_ids[-1] for text in texts])
    return choose_tokens(texts, logits_BV, decoder.keep if logits_BV.is_cuda else None)


def continuation(
    loaded: LoadedModel, prompt_ids: Sequence[int], config: SamplingConfig
) -> Continuation:
    """Create the `Continuation` of a prompt with the model's context limit, end tokens and
    tokenizer.

    Raises:
        ModelError: the model folder has no tokenizer.
    """
    return Continuation(
        prompt_ids,
        config,
        context=loaded.model.config.max_position_embeddings,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=tokenizer_of(loaded),
    )


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """Return the model's tokenizer.

    Raises:
        ModelError: the model folder has no tokenizer.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.folder} has no tokenizer: add tokenizer.json to it")
    return loaded.tokenizer


def with_model_settings(
    config: SamplingConfig, loaded: LoadedModel, named: Collection[str]
) -> SamplingConfig:
    """Return the config updated with the settings in the model's generation_config.json. For beam
    search, which does not sample, return the config unchanged.

    Args:
        config: sampling settings.
        loaded: the model.
        named: names of the settings that the user has specified. These settings are not changed.

    Raises:
        ConfigError: a setting of the model is out of range.
    """
    own = {name: value for name, value in loaded.sampling.items() if name not in named}
    try:
        return config if config.beams > 1 else dataclasses.replace(config, **own)
    except ConfigError as error:
        raise ConfigError(f"{loaded.folder}: {GENERATION_CONFIG_NAME}: {error}") from None


class GenerationStream:
    """Iterable that generates a continuation and yields its text as it is generated.

    Args:
        loaded: a model from `load`.
        prompt: text that the model continues.
        config: sampling settings.
        compile: True to decode with torch.compile, which is faster after about a minute of
            compilation (see `firstlight.generation.batch`).

    Attributes:
        result: the complete continuation; None until the iteration ends.

    Raises:
        ModelError: the model folder has no tokenizer.
    """

    def __init__(
        self, loaded: LoadedModel, prompt: str, config: SamplingConfig, *, compile: bool = False
    ) -> None:
        self.result: Generation | None = None
        self._loaded = loaded
        self._prompt = prompt
        self._config = config
        self._compile = compile
        self._tokenizer = tokenizer_of(loaded)

    def __iter__(self) -> Iterator[str]:
        self._loaded.require_unchanged()
        prompt_ids = self._tokenizer.encode_prompt(self._prompt)
        if self._config.beams > 1:
            if self._compile:
                raise ConfigError("compiled decoding does not support beams: omit one of them")
            self.result = search(self._loaded, self._prompt, prompt_ids, self._config)
            yield self.result.text
            return
        text = continuation(self._loaded, prompt_ids, self._config)
        pieces: list[str] = []
        longest = len(prompt_ids) + text.config.max_new_tokens
        decoder = BatchDecoder(self._loaded.model, 1, longest, compile=self._compile)
        for piece in pieces_of(text, decoder):
            if piece:
                pieces.append(piece)
                yield piece
        self.result = _finished(text, self._prompt, "".join(pieces))


def _finished(text: Continuation, prompt: str, added: str) -> Generation:
    assert text.finish_reason is not None
    assert text.config.seed is not None
    return Generation(
        prompt,
        added,
        text.token_ids,
        len(text.prompt_ids),
        finish_reason=text.finish_reason,
        seed=text.config.seed,
        logprobs=text.logprobs,
        choices=text.choices,
    )


@sharing_cores()
def generate(
    checkpoint: str | Path | LoadedModel,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    slide: bool = False,
    slide_tokens: int | None = None,
    beams: int = 1,
    choices: int | None = None,
    compile: bool = False,
) -> Generation:
    """Generate a continuation of a prompt. `SamplingConfig` describes the settings in more detail.
    If temperature, top_k, top_p, min_p or repetition_penalty is None, its value is taken from the
    model's generation_config.json. If the value is missing there, the default of `SamplingConfig`
    is used.

    Args:
        checkpoint: a folder or hub id as in `load`, or a model returned by `load`.
        prompt: text that the model continues. An empty prompt starts from the model's
            beginning-of-text token.
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of the logits; 0 always chooses the most likely token.
        top_k: number of most likely tokens to choose from; 0 means all.
        top_p: probability mass to choose from: the smallest set of most likely tokens with at least
            this total probability; 1 means all.
        seed: random seed; None draws one at random.
        min_p: minimum probability of a token, relative to the probability of the most likely token;
            0 disables this.
        repetition_penalty: divisor of the positive logits, and factor of the negative logits, of
            tokens that the prompt or the new text contains; 1 disables the penalty.
        stop: strings that end the continuation.
        logprobs: number of most likely tokens whose log-probabilities are returned; None returns
            none.
        frequency_penalty: number subtracted from a token's logit for each time that the token was
            chosen.
        presence_penalty: number subtracted from the logit of each token that was already chosen.
        logit_bias: number added to the logit of each given token id.
        slide: True to continue beyond the model's context.
        slide_tokens: number of oldest tokens that `slide` drops each time the context is full; None
            drops half of the context.
        beams: number of beams; 1 disables beam search.
        choices: number of most likely tokens that are returned with their probabilities; None
            returns none.
        compile: True to decode with torch.compile (see `GenerationStream`).

    Raises:
        ConfigError: a value is out of range, or the prompt fills the context.
        ModelError, CheckpointError, TokenizerError: the model is unusable.
    """
    # `locals()` contains only the arguments here, because no other names have been assigned yet.
    given = {**locals(), "logit_bias": logit_bias or {}}
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    names = [field.name for field in dataclasses.fields(SamplingConfig) if field.name in given]
    named = {name: given[name] for name in names if given[name] is not None}
    config = SamplingConfig(**named)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else load(checkpoint)
    config = with_model_settings(config, loaded, named)
    stream = GenerationStream(loaded, prompt, config, compile=compile)
    for _ in stream:
        pass
    assert stream.result is not None
    return stream.result


@sharing_cores()
def generate_batch(
    loaded: LoadedModel,
    prompts: Sequence[str],
    config: SamplingConfig,
    *,
    batch_size: int = 8,
    compile: bool = False,
) -> list[Generation]:
    """Generate continuations of several prompts in a batch. Except for rounding, each continuation
    is the same as the result of `generate`.

    When one continuation ends, the next one starts immediately. If the config has a seed, this seed
    is used for every continuation. Otherwise, each continuation gets a different random seed. The
    logits of a prompt in a batch can differ in the last fp32 digit from the logits of the prompt
    alone. If two tokens are almost equally likely, a different token can therefore be chosen.

    Args:
        loaded: a model from `load`.
        prompts: the prompts to continue.
        config: sampling settings.
        batch_size: maximum number of continuations that are generated simultaneously.
        compile: True to decode with torch.compile (see `GenerationStream`).

    Returns:
        The continuations, in the order of the prompts.

    Raises:
        ConfigError: a prompt fills the context, the config enables `slide` or `beams`, or
            `batch_size` is below 1.
        ModelError: the model has no tokenizer, or its logits are not finite.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    loaded.require_unchanged()
    tokenizer = tokenizer_of(loaded)
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    for prompt_ids in ids:
        require_prompt(loaded.model, prompt_ids)
    longest = max(map(len, ids), default=0)
    size = max(min(batch_size, len(prompts)), 1)
    decoder = BatchDecoder(loaded.model, size, longest + config.max_new_tokens, compile=compile)
    pieces: list[list[str]] = [[] for _ in prompts]
    texts = [continuation(loaded, prompt_ids, config) for prompt_ids in ids]
    for index, piece in pieces_of_many(texts, decoder):
        pieces[index].append(piece)
    return [
        _finished(text, prompt, "".join(own))
        for text, prompt, own in zip(texts, prompts, pieces, strict=True)
    ]
