"""Texts from a model: load it, then continue one text piece by piece, or many at a time."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from firstlight.checkpoint.selection import read_model_folder
from firstlight.errors import ConfigError, ModelError, nearest
from firstlight.generation.batch import BatchDecoder, require_prompt
from firstlight.generation.beams import search
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation, Generation
from firstlight.generation.few_rows import use_few_rows
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import LoadedModel, load_model
from firstlight.weights.loading import LOADING_MODES, LoadingMode

#: Names of `load`'s dtypes, and the dtype that is read; None is that of the file.
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
    """Load a model: a run folder (its newest complete checkpoint), a checkpoint folder, any
    Hugging Face model folder, or a hub id.

    Args:
        checkpoint: model to load.
        device: device of the weights: "cpu", "cuda", ...
        dtype: "auto" (that of the file), "float32", "bfloat16" or "float16"; "int8" gives the
            linear layers weights of 8 bits (`Int8Linear`), and all else is bfloat16: for
            generation only.
        way: "mmap" maps the file into memory: at once, but the file must not be overwritten in
            place while the model lives; "sequential" reads each tensor straight into its place;
            "straight" takes twice the memory; "auto" maps on the CPU where nothing is converted,
            else reads.
        best: take a run folder's checkpoint with the lowest validation loss, not the newest.

    Raises:
        ConfigError: `dtype` or `way` is unknown, or `best` is not of a run folder.
        ModelError, CheckpointError, TokenizerError: the model is missing, damaged or of an unknown
            kind.
    """
    for name, value, known in (("dtype", dtype, DTYPES), ("way", way, LOADING_MODES)):
        if value not in known:
            hint = nearest(value, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"{name} '{value}' is unknown{hint}")
    loaded = read_model_folder(
        checkpoint,
        lambda folder: load_model(folder, device, dtype=DTYPES[dtype], mode=way),
        best=best,
    )
    if dtype == "int8":
        from firstlight.generation.few_rows import quantize_int8

        quantize_int8(loaded.model)
    use_few_rows(loaded.model)
    return loaded


def pieces_of(text: Continuation, decoder: BatchDecoder) -> Iterator[str]:
    """Continue a text to its end, or until the caller stops: yields the text that each new token
    makes certain, which is often empty.

    Args:
        text: nothing of it is in the decoder yet.
        decoder: a decoder without sequences, before and afterwards.

    Raises:
        ConfigError, ModelError: see `require_prompt` and `Continuation.push`.
    """
    assert len(decoder) == 0
    # Half of the context: less would forget more than needed, more would read again too often.
    half = max(decoder.max_tokens // 2, 1)
    prompt_ids = text.prompt_ids
    if text.config.slide and len(prompt_ids) >= decoder.max_tokens:
        prompt_ids = prompt_ids[-half:]
    logits_V = decoder.add(prompt_ids, text.score_prompt)
    try:
        yield text.push(logits_V)
        while text.finish_reason is None:
            if decoder.room(0):
                logits_V = decoder.step(text.token_ids[-1:])[0]
            else:
                # Positions count from the beginning of the kept text, as in training.
                decoder.remove(0)
                logits_V = decoder.add([*text.prompt_ids, *text.token_ids][-half:])
            yield text.push(logits_V)
    finally:
        decoder.remove(0)


def pieces_of_many(
    texts: Sequence[Continuation], decoder: BatchDecoder
) -> Iterator[tuple[int, str]]:
    """Continue texts to their ends, as many at a time as the decoder has room for: one that ends
    makes room for the next at once. Yields each token's text as (index of its text, piece).

    Args:
        texts: nothing of them is in the decoder yet.
        decoder: a decoder without sequences.

    Raises:
        ConfigError: a text is to slide or to be searched for with beams.
        ConfigError, ModelError: see `require_prompt` and `Continuation.push`.
    """
    if any(text.config.slide or text.config.beams > 1 for text in texts):
        raise ConfigError("slide and beams are for one text at a time: leave them out of a batch")
    assert len(decoder) == 0
    waiting = deque(range(len(texts)))
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < decoder.max_sequences:
            index = waiting.popleft()
            logits_V = decoder.add(texts[index].prompt_ids, texts[index].score_prompt)
            yield index, texts[index].push(logits_V)
            running.append(index)
            if texts[index].finish_reason is not None:
                decoder.remove(len(running) - 1)
                running.pop()
        if not running:
            continue
        logits_BV = decoder.step([texts[index].token_ids[-1] for index in running])
        for row in reversed(range(len(running))):
            index = running[row]
            yield index, texts[index].push(logits_BV[row])
            if texts[index].finish_reason is not None:
                decoder.remove(row)
                running[row] = running[-1]
                running.pop()


def continuation(
    loaded: LoadedModel, prompt_ids: Sequence[int], config: SamplingConfig
) -> Continuation:
    """A text that a model is to continue.

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
    """The model's tokenizer.

    Raises:
        ModelError: the model's folder has no tokenizer.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.folder} has no tokenizer: add tokenizer.json to it")
    return loaded.tokenizer


class GenerationStream:
    """The pieces of a continuation as they become certain; afterwards, the whole in `result`.

    Args:
        loaded: a model from `load`.
        prompt: text to continue.
        config: see `SamplingConfig`.
        compile: decode through torch.compile: a minute or so of compiling, then faster; see
            `firstlight.generation.batch`.

    Raises:
        ModelError: the model folder has no tokenizer.
    """

    def __init__(
        self, loaded: LoadedModel, prompt: str, config: SamplingConfig, *, compile: bool = False
    ) -> None:
        self.result: Generation | None = None
        self._loaded, self._prompt, self._config = loaded, prompt, config
        self._compile = compile
        self._tokenizer = tokenizer_of(loaded)

    def __iter__(self) -> Iterator[str]:
        self._loaded.require_unchanged()
        prompt_ids = self._tokenizer.encode_prompt(self._prompt)
        if self._config.beams > 1:
            if self._compile:
                raise ConfigError("beams is not for compiled decoding: leave one of them out")
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
        text.finish_reason,
        text.config.seed,
        text.logprobs,
        text.choices,
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
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    slide: bool = False,
    beams: int = 1,
    choices: int | None = None,
    compile: bool = False,
) -> Generation:
    """Continue a text.

    Args:
        checkpoint: a folder or hub id as for `load`, or what `load` returned.
        prompt: text to continue; empty starts from the model's beginning-of-text token.
        max_new_tokens: greatest number of new tokens.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: number of likeliest tokens to choose among; 0 is all.
        top_p: probability that the tokens to choose among reach together.
        seed: seed of the random choice.
        min_p: least probability of a token, relative to the likeliest one's.
        repetition_penalty: divisor of the logits of tokens seen before.
        stop: texts that end the text.
        logprobs: number of likeliest tokens whose log probabilities are given.
        frequency_penalty: amount taken from a token's logit for each time it was seen.
        presence_penalty: amount taken from the logit of each token seen before.
        logit_bias: additions to the logits by token id.
        slide: go on beyond the model's context.
        beams: number of beams of a beam search; 1 is no beam search.
        choices: number of likeliest tokens that are given with their probabilities.
        compile: see `GenerationStream`.

    Raises:
        ConfigError: a value is out of range, or the prompt fills the context.
        ModelError, CheckpointError, TokenizerError: the model can't be used.
    """
    # The arguments, before any other name is bound.
    given = {**locals(), "logit_bias": logit_bias or {}}
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    names = [field.name for field in dataclasses.fields(SamplingConfig) if field.name in given]
    config = SamplingConfig(**{name: given[name] for name in names})
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else load(checkpoint)
    stream = GenerationStream(loaded, prompt, config, compile=compile)
    for _ in stream:
        pass
    assert stream.result is not None
    return stream.result


def generate_batch(
    loaded: LoadedModel,
    prompts: Sequence[str],
    config: SamplingConfig,
    *,
    batch_size: int = 8,
    compile: bool = False,
) -> list[Generation]:
    """Continue several texts at a time, each as if it were alone.

    A text that ends makes room for the next one at once. With a seed in the config every text is
    sampled with this seed, as by `generate`; without one, each text has another seed. Computing in
    a batch rounds differently from computing alone, in the last digit of fp32: of two tokens that
    are equally likely to this digit, the other one may be chosen.

    Args:
        loaded: a model from `load`.
        prompts: texts to continue.
        config: see `SamplingConfig`.
        batch_size: texts at a time.
        compile: see `GenerationStream`.

    Returns:
        The continuations, in the order of the prompts.

    Raises:
        ConfigError: a prompt fills the context, or `batch_size` is below 1.
        ModelError: the model has no tokenizer, or its outputs are no numbers.
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
