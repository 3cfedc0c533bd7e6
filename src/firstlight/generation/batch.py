"""Sequences of unequal lengths, decoded together in one batch that they may join and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firstlight.errors import ConfigError, ModelError
from firstlight.generation.few_rows import lay_out
from firstlight.models import Cache, Model, RaggedCache

if TYPE_CHECKING:
    from firstlight.generation.compiled import CompiledStep

#: Attention reads a multiple of so many cache positions: few shapes, and few positions in vain.
_REACH_STEP = 64

#: Logits that are held at a time while a prompt is scored.
_MOST_LOGITS = 2**22


class BatchDecoder:
    """The state of several sequences: what the model computed of them, and nothing of how tokens
    are chosen.

    The sequences are numbered 0 ... `len(decoder)` - 1. When one is removed, the last takes its
    number.

    Args:
        model: a model in evaluation mode.
        max_sequences: number of sequences at once.
        max_tokens: tokens of each sequence, prompt and new tokens together.
        reuse_prefixes: True if the common beginning of a text and an earlier one, as in a
            conversation, is computed once. Two parts are rounded otherwise than one, in the last
            digit.
        compile: decode through torch.compile, see `CompiledStep`. The first step takes a
            minute or so, unless `warm_up` was called.

    Raises:
        ConfigError: it can't be compiled here.
    """

    def __init__(
        self,
        model: Model,
        max_sequences: int,
        max_tokens: int,
        *,
        reuse_prefixes: bool = False,
        compile: bool = False,
    ) -> None:
        assert max_sequences > 0
        self.model, self.max_sequences = model, max_sequences
        self.max_tokens = min(max_tokens, model.config.max_position_embeddings)
        lay_out(model)
        parameter = next(model.parameters())
        self._device = parameter.device
        # A compiled step would be specialised to a reach that is the whole cache.
        cache_tokens = self.max_tokens + (_REACH_STEP if compile else 0)
        self.cache = model.make_cache(max_sequences, cache_tokens, parameter.dtype)
        self._compiled: CompiledStep | None = None
        if compile:
            # Only here: importing torch's compiler takes seconds.
            from firstlight.generation.compiled import CompiledStep

            self._compiled = CompiledStep(model, self.cache)
        self.lengths: list[int] = []
        self._reuse_prefixes = reuse_prefixes
        #: The tokens whose keys and values lie in each row, of sequences that left, too.
        self._stored: list[list[int]] = [[] for _ in range(max_sequences)]

    def __len__(self) -> int:
        return len(self.lengths)

    @torch.inference_mode()
    def add(
        self, prompt_ids: Sequence[int], on_logits: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Take in a sequence, as the last; return the logits [V] of its next token.

        Args:
            prompt_ids: ids of the prompt, at least one.
            on_logits: called with the logits [T, V] after each of the prompt's tokens, a bounded
                number of tokens at a time. The prompt may then fill the context.

        Raises:
            ConfigError, ModelError: see `require_prompt`.
        """
        assert len(self) < self.max_sequences, "there is no room for another sequence"
        require_prompt(self.model, prompt_ids, room=1 if on_logits is None else 0)
        cache = self.cache.sequence(len(self))
        if self._reuse_prefixes and on_logits is None:
            cache.length = self._take_prefix(prompt_ids)
        input_ids = torch.tensor([list(prompt_ids[cache.length :])], device=self._device)
        self._stored[len(self)] = []  # until the whole of it is there
        if on_logits is None:
            logits_V: Tensor = self.model(input_ids, cache=cache, logits_to_keep=1)[0, -1]
        else:
            # All logits of a long prompt would be gigabytes.
            tokens = max(_MOST_LOGITS // self.model.config.vocab_size, 1)
            for ids in torch.split(input_ids, tokens, dim=1):
                logits_TV = self.model(ids, cache=cache)[0]
                on_logits(logits_TV)
            logits_V = logits_TV[-1]
        self._stored[len(self)] = list(prompt_ids)
        self.lengths.append(len(prompt_ids))
        return logits_V

    def _take_prefix(self, prompt_ids: Sequence[int]) -> int:
        """Put the longest beginning of a prompt that lies in any row into the next one's; return
        its length. The last token is left out: its logits are wanted."""
        shared = [_common(stored, prompt_ids[:-1]) for stored in self._stored]
        row, length = max(enumerate(shared), key=lambda entry: entry[1])
        self._copy(row, len(self), length)
        return length

    def _copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens' keys and values of one row into another."""
        if source != target:
            for layer in (*self.cache.keys, *self.cache.values):
                layer[target, :, :length] = layer[source, :, :length]

    @torch.inference_mode()
    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Give each sequence its next token; return the logits [B, V] of the ones after.

        Args:
            token_ids: new token of each sequence, in their order.
        """
        assert len(token_ids) == len(self) > 0
        assert max(self.lengths) < self.max_tokens, "a sequence is full"
        logits_BV = self._logits(token_ids, self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        for stored, token_id in zip(self._stored, token_ids, strict=False):
            stored.append(token_id)
        return logits_BV

    def _logits(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        input_ids_B1 = torch.tensor(token_ids, device=self._device)[:, None]
        cache: Cache
        if len(lengths) == 1 and self._compiled is None:
            # One sequence needs neither a mask nor an index of cache positions.
            cache = self.cache.sequence(0)
            cache.length = lengths[0]
        else:
            lengths_B = torch.tensor(lengths, device=self._device)
            reach = min(-(-(max(lengths) + 1) // _REACH_STEP) * _REACH_STEP, self.max_tokens)
            if self._compiled is not None:
                return self._compiled(input_ids_B1, lengths_B, reach)
            cache = RaggedCache(self.cache.keys, self.cache.values, lengths_B, reach)
        logits_BV: Tensor = self.model(input_ids_B1, cache=cache)[:, -1]
        return logits_BV

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile, where that is asked for, before the first text comes."""
        assert not any(self._stored), "there are texts already"
        for count in {1, min(2, self.max_sequences)} if self._compiled is not None else ():
            self._logits([0] * count, [0] * count)

    def room(self, number: int) -> int:
        """How many more tokens a sequence can take."""
        return self.max_tokens - self.lengths[number]

    def remove(self, number: int) -> None:
        """Forget a sequence; the last one gets its number."""
        last, length = len(self) - 1, self.lengths[-1]
        if number != last:
            self._copy(last, number, length)
            self.lengths[number] = length
            self._stored[number] = list(self._stored[last])
        self.lengths.pop()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def require_prompt(model: Model, prompt_ids: Sequence[int], *, room: int = 1) -> None:
    """Refuse a prompt that the model can't go on from.

    Args:
        prompt_ids: ids of the prompt.
        room: tokens that the context must have room for after it.

    Raises:
        ConfigError: it is empty or fills the context.
        ModelError: it holds an id beyond the vocabulary.
    """
    limit = model.config.max_position_embeddings
    if not prompt_ids:
        raise ConfigError("the prompt has no tokens: the model needs at least one to go on from")
    if len(prompt_ids) + room > limit:
        raise ConfigError(
            f"the prompt has {len(prompt_ids)} tokens, and the model's context is {limit}: "
            "shorten it"
        )
    if max(prompt_ids) >= model.config.vocab_size:
        raise ModelError(
            f"the tokenizer gives id {max(prompt_ids)}, beyond the model's vocabulary of "
            f"{model.config.vocab_size}: they don't belong together"
        )
