"""Beam search: find a likely continuation by tracking a limited number of candidates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.generation.batch import require_prompt
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Generation
from firstlight.generation.sampling import penalize, require_biased_tokens, shift
from firstlight.lora.loading import LoadedModel
from firstlight.methods.attention import varying_lengths
from firstlight.models import Model
from firstlight.tokenizer import TextStream


@dataclass(frozen=True)
class _Beam:
    """A continuation, and the sum of the log-probabilities of its tokens (natural logarithm)."""

    token_ids: list[int]
    logprob: float

    def score(self, is_ended: bool) -> float:
        """Return the mean log-probability per token. The end token of a continuation that has ended
        is counted as a token.
        """
        return self.logprob / max(len(self.token_ids) + is_ended, 1)


def search(
    loaded: LoadedModel, prompt: str, prompt_ids: Sequence[int], config: SamplingConfig
) -> Generation:
    """Return the best continuation found by beam search.

    Args:
        loaded: the model and its tokenizer.
        prompt: text of the prompt.
        prompt_ids: token ids of the prompt.
        config: settings, of which only `beams`, `max_new_tokens`, the penalties and the biases are
            used.

    Raises:
        ConfigError: the prompt fills the context, or a bias is set for an id beyond the vocabulary.
        ModelError: the logits are not finite.
    """
    found, reason = beam_search(loaded.model, prompt_ids, config, loaded.eos_token_ids)
    assert loaded.tokenizer is not None
    stream = TextStream(loaded.tokenizer, prompt_ids)
    text = "".join(stream.push(token_id) for token_id in found) + stream.finish()
    return Generation(
        prompt, text, found, len(prompt_ids), finish_reason=reason, seed=config.seed or 0
    )


@torch.inference_mode()
@varying_lengths()
def beam_search(
    model: Model,
    prompt_ids: Sequence[int],
    config: SamplingConfig,
    eos_token_ids: Collection[int],
) -> tuple[list[int], str]:
    """Run a beam search, equivalent to that of transformers with `length_penalty=1`.

    Each step keeps the `config.beams` continuations with the largest sum of log-probabilities.
    Continuations that have ended are moved to a separate list, which is ranked by mean
    log-probability per token. The search stops when this list contains `config.beams` continuations
    and the best remaining beam does not have a higher mean, at its current length, than the worst
    continuation in the list.

    Args:
        model: a model in evaluation mode.
        prompt_ids: token ids of the prompt.
        config: settings (see `search`).
        eos_token_ids: end-of-text tokens.

    Returns:
        Token ids of the best continuation without its end token, and its finish reason, "stop" or
        "length".

    Raises:
        ConfigError, ModelError: see `search`.
    """
    require_prompt(model, prompt_ids)
    require_biased_tokens(config, model.config.vocab_size)
    count, ends = config.beams, frozenset(eos_token_ids)
    most = min(config.max_new_tokens, model.config.max_position_embeddings - len(prompt_ids))
    parameter = next(model.parameters())
    device = parameter.device
    cache = model.make_cache(count, len(prompt_ids) + most, parameter.dtype)
    # There is only one beam at first, but the prompt is processed in all rows, because every row of
    # the cache must contain it.
    ids_BT = torch.tensor([list(prompt_ids)] * count, device=device)
    beams, ended = [_Beam([], 0.0)], list[_Beam]()
    for _ in range(most):
        if cache.length + 1 == model.config.long_from:
            # The cached keys were rotated with the frequencies for short sequences, so all keys are
            # recomputed.
            rows_BT = [[*prompt_ids, *beam.token_ids[:-1]] for beam in beams]
            rows_BT += rows_BT[:1] * (count - len(rows_BT))
            cache.least_length, cache.length = cache.length + 1, 0
            model(torch.tensor(rows_BT, device=device), cache=cache, logits_to_keep=1)
        logits_BV: Tensor = model(ids_BT, cache=cache, logits_to_keep=1)[:, -1]
        beams, rows = _next_beams(beams, logits_BV, prompt_ids, config, ends=ends, ended=ended)
        if not beams or _is_settled(beams[0], ended, count):
            beams = []
            break
        rows_B = torch.tensor([*rows, *[0] * (count - len(rows))], device=device)
        cache.reorder(rows_B)
        last = [beam.token_ids[-1] for beam in beams]
        ids_BT = torch.tensor([*last, *last[:1] * (count - len(last))], device=device)[:, None]
    texts = [(one.score(True), one, "stop") for one in ended]
    texts += [(one.score(False), one, "length") for one in beams]
    _, best, reason = max(texts, key=lambda text: text[0])
    return best.token_ids, reason


def _next_beams(
    beams: Sequence[_Beam],
    logits_BV: Tensor,
    prompt_ids: Sequence[int],
    config: SamplingConfig,
    *,
    ends: Collection[int],
    ended: list[_Beam],
) -> tuple[list[_Beam], list[int]]:
    """Extend the beams by one token. Return the new beams, most likely first. Also return the index
    of the previous beam that each new beam continues.

    Args:
        beams: the beams so far.
        logits_BV: logits of the next token of each beam. Any additional rows are ignored.
        prompt_ids, config: the arguments of `beam_search`.
        ends: end-of-text tokens.
        ended: continuations that have ended, best first. Continuations that end in this step are
            added, and only the best `config.beams` are kept.
    """
    scores = [
        _logprobs(logits_V, beam, prompt_ids, config) + beam.logprob
        for logits_V, beam in zip(logits_BV, beams, strict=False)
    ]
    scores_N = torch.cat(scores)
    vocab_size = logits_BV.shape[1]
    # Select `config.beams` candidates, plus one for each end token of each beam. This leaves enough
    # beams even if every end token is among the most likely tokens.
    wanted = min((1 + max(len(ends), 1)) * config.beams, len(scores_N))
    values, places = scores_N.topk(wanted)
    following, rows = list[_Beam](), list[int]()
    for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
        row, token_id = divmod(place, vocab_size)
        if value == float("-inf"):
            break
        if token_id in ends:
            # A continuation that ends is added only if it is among the `config.beams` best
            # candidates.
            if rank < config.beams:
                ended.append(_Beam(beams[row].token_ids, value))
        elif len(following) < config.beams:
            following.append(_Beam([*beams[row].token_ids, token_id], value))
            rows.append(row)
    ended.sort(key=lambda one: -one.score(True))
    del ended[config.beams :]
    return following, rows


def _logprobs(
    logits_V: Tensor, beam: _Beam, prompt_ids: Sequence[int], config: SamplingConfig
) -> Tensor:
    """Return the log-probabilities of a beam's next token, after penalties and biases have been
    applied, as fp64 [V] on the CPU.
    """
    if not logits_V.max().isfinite():
        raise ModelError("the model's outputs are not finite numbers: its weights are unusable")
    if config.repetition_penalty != 1:
        logits_V = penalize(logits_V, config.repetition_penalty, {*prompt_ids, *beam.token_ids})
    counts = {token_id: beam.token_ids.count(token_id) for token_id in set(beam.token_ids)}
    # This is computed on the CPU, because Apple's GPUs do not support fp64.
    return shift(logits_V, config, counts).cpu().double().log_softmax(-1)


def _is_settled(best: _Beam, ended: Sequence[_Beam], count: int) -> bool:
    """Return True if `count` continuations have ended and the best beam does not have a higher mean
    log-probability, at its current length, than the worst of them.
    """
    return len(ended) == count and ended[-1].score(True) >= best.score(False)
