"""A firstlight model as lm-evaluation-harness sees one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.errors import ConfigError, InputError
from firstlight.evaluation.likelihood import TokenPair, likelihoods
from firstlight.evaluation.results import Progress
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import continuation, pieces_of_many, tokenizer_of
from firstlight.weights.huggingface import LoadedModel

#: Of the harness, for tasks that don't say.
_MAX_NEW_TOKENS = 256
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = {"top_k", "top_p", "min_p", "repetition_penalty"}


def harness_model(loaded: LoadedModel, batch_size: int, on_texts: Progress | None) -> Any:
    """The model as a `lm_eval.api.model.LM`.

    Args:
        loaded: with a tokenizer.
        batch_size: texts at a time.
        on_texts: called after each batch with the texts done and to do.

    Raises:
        ModelError: the model has no tokenizer.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = tokenizer_of(loaded)
    limit = loaded.model.config.max_position_embeddings

    class FirstlightLM(TemplateLM):  # type: ignore[misc]
        """See `lm_eval.api.model.LM`, also for what the methods are to return."""

        @property
        def eot_token_id(self) -> int:
            eos = tokenizer.eos_token_id
            return tokenizer.separator_id if eos is None else eos

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.separator_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            """The ids of a text, after bos where the model expects one and the text has none. The
            names of special tokens stand for these tokens, as everywhere in the harness."""
            ids = tokenizer.encode(string, special_tokens=True)
            begins = tokenizer.bos_token is not None and string.startswith(tokenizer.bos_token)
            wanted = not begins if add_special_tokens is None else add_special_tokens
            return [tokenizer.separator_id, *ids] if tokenizer.add_bos and wanted else ids

        def loglikelihood(
            self, requests: list[Any], disable_tqdm: bool = True
        ) -> list[tuple[float, bool]]:
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return found

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            pairs = [TokenPair(tuple(c), tuple(more)) for _, c, more in requests]
            for pair in pairs:
                _require_continuation(pair, limit)
            scored = likelihoods(loaded.model, pairs, batch_size=batch_size, on_pairs=on_texts)
            return [(one.logprob, one.is_greedy) for one in scored]

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = True
        ) -> list[float]:
            windows = [
                [
                    TokenPair(*map(tuple, make_disjoint_window(window)))
                    for window in get_rolling_token_windows(
                        token_list=self.tok_encode(request.args[0]),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=limit,
                        context_len=1,
                    )
                ]
                for request in requests
            ]
            pairs = [pair for several in windows for pair in several]
            scored = iter(
                likelihoods(loaded.model, pairs, batch_size=batch_size, on_pairs=on_texts)
            )
            return [math.fsum(next(scored).logprob for _ in several) for several in windows]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            texts = []
            for number, request in enumerate(requests):
                context, options = request.args
                config = sampling_of(options, number)
                room = limit - config.max_new_tokens
                if room < 1:
                    raise InputError(
                        f"a task asks for {config.max_new_tokens} new tokens, and the model's "
                        f"context has room for {limit}: set its max_gen_toks to less"
                    )
                ids = self.tok_encode(context)[-room:] or [tokenizer.separator_id]
                texts.append(continuation(loaded, ids, config))
            continue_texts(loaded, texts, batch_size, on_texts)
            # The harness decodes what is new by itself, without the space of a first word.
            return [
                before_stops(tokenizer.decode(text.token_ids), text.config.stop) for text in texts
            ]

    return FirstlightLM()


def _require_continuation(pair: TokenPair, limit: int) -> None:
    count = len(pair.continuation)
    if not 0 < count <= limit:
        raise InputError(
            f"a task has a text of {count} tokens to be scored, and the model's context has room "
            f"for 1 to {limit}"
        )


def sampling_of(options: Mapping[str, Any], number: int) -> SamplingConfig:
    """What a task's `generation_kwargs` come to.

    Args:
        options: of the request.
        number: its seed, where it draws.

    Raises:
        ConfigError: an option is unknown, or out of range.
    """
    known = {"until", "do_sample", "temperature", *_TOKEN_LIMITS, *_SAMPLING}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"a task's generation_kwargs have {', '.join(unknown)}, which is not known here "
            f"(known: {', '.join(sorted(known))})"
        )
    until = options.get("until") or []
    limits = [options[name] for name in _TOKEN_LIMITS if options.get(name) is not None]
    temperature = float(options.get("temperature") or 0.0)
    return SamplingConfig(
        max_new_tokens=int(limits[0]) if limits else _MAX_NEW_TOKENS,
        temperature=temperature if options.get("do_sample", temperature > 0) else 0.0,
        stop=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        seed=number,
        **{name: options[name] for name in _SAMPLING & set(options)},
    )


def before_stops(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of any stop texts."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def continue_texts(
    loaded: LoadedModel,
    texts: Sequence[Continuation],
    batch_size: int,
    on_texts: Progress | None,
) -> None:
    """Continue texts to their ends, some at a time: one that ends makes room for the next."""
    if not texts:
        return
    longest = max(len(text.prompt_ids) + text.config.max_new_tokens for text in texts)
    decoder = BatchDecoder(loaded.model, min(batch_size, len(texts)), longest)
    done = 0
    for index, _ in pieces_of_many(texts, decoder):
        if texts[index].finish_reason is not None:
            done += 1
            if on_texts is not None:
                on_texts(done, len(texts))
