"""Sequences of unequal lengths, decoded together in one batch that they may join and leave, and the
batch's decoding step through torch.compile and CUDA graphs."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.efficiency import can_compile
from firstlight.errors import ConfigError, ModelError
from firstlight.generation.few_rows import lay_out, ready_to_compile
from firstlight.models import Cache, KVCache, Model, RaggedCache

#: Attention reads a multiple of this number of cache positions: few shapes, few unused positions.
_REACH_STEP = 64

#: Logits that are held at a time while a prompt is scored.
_MOST_LOGITS = 2**22


class BatchDecoder:
    """The state of several sequences: the model's cache and their lengths. It does not choose
    tokens.

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
        ConfigError: the model can't be compiled on this machine.
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
        cache.least_length = len(prompt_ids)
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
        """Copy the longest beginning of a prompt that is cached in any row into the next row;
        return its length. The last token is left out: its logits are wanted."""
        shared = [
            _common(stored, prompt_ids[:-1])
            if self._is_long(stored) == self._is_long(prompt_ids)
            else 0
            for stored in self._stored
        ]
        if self.cache.has_states:
            # A state is of all its row's tokens, and of no fewer.
            whole = zip(shared, self._stored, strict=True)
            shared = [count if count == len(stored) else 0 for count, stored in whole]
        row, length = max(enumerate(shared), key=lambda entry: entry[1])
        self._copy(row, len(self), length)
        return length

    def _is_long(self, token_ids: Sequence[int]) -> bool:
        """True if a text's rotary positions are those of long texts."""
        first = self.model.config.long_from
        return first is not None and len(token_ids) >= first

    def _copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens' keys and values of one row into another."""
        if source != target:
            self.cache.copy_row(source, target, length)

    @torch.inference_mode()
    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Give each sequence its next token; return the logits [B, V] of the ones after.

        Args:
            token_ids: new token of each sequence, in their order.
        """
        assert len(token_ids) == len(self) > 0
        assert max(self.lengths) < self.max_tokens, "a sequence is full"
        for number, length in enumerate(self.lengths):
            if length + 1 == self.model.config.long_from:
                # As in transformers' Phi-3: the cached keys have the positions of short texts.
                input_ids = torch.tensor([self._stored[number]], device=self._device)
                cache = self.cache.sequence(number)
                cache.least_length = length + 1
                self.model(input_ids, cache=cache, logits_to_keep=1)
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
            cache = self.cache.ragged(lengths_B, reach)
        logits_BV: Tensor = self.model(input_ids_B1, cache=cache)[:, -1]
        return logits_BV

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile, where that is asked for, before the first text comes."""
        assert not any(self._stored), "there are texts already"
        for count in {1, min(2, self.max_sequences)} if self._compiled is not None else ():
            self._logits([0] * count, [0] * count)

    def room(self, number: int) -> int:
        """Number of tokens that can be added to a sequence."""
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
    """Number of tokens of the longest common prefix of two texts."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def require_prompt(model: Model, prompt_ids: Sequence[int], *, room: int = 1) -> None:
    """Refuse a prompt that the model can't go on from.

    Args:
        prompt_ids: ids of the prompt.
        room: tokens that the context must have room for after it.

    Raises:
        ConfigError: the prompt is empty or fills the context.
        ModelError: the prompt has an id beyond the vocabulary.
    """
    limit = model.config.max_position_embeddings
    if not prompt_ids:
        raise ConfigError("the prompt has no tokens: the model needs at least one to go on from")
    if len(prompt_ids) + room > limit:
        raise ConfigError(
            f"the prompt has {len(prompt_ids)} tokens, and the model's context is {limit}: "
            "shorten it, or generate with slide (--slide)"
        )
    if max(prompt_ids) >= model.config.vocab_size:
        raise ModelError(
            f"the tokenizer gives id {max(prompt_ids)}, beyond the model's vocabulary of "
            f"{model.config.vocab_size}: they don't belong together"
        )


#: Recorded steps that are kept: each takes some hundred KiB of the GPU's memory for its kernels.
_MOST_RECORDED = 64


class CompiledStep:
    """A model's forward pass over one new token of each sequence, compiled.

    On a CPU, torch.compile's inductor takes the weights as constants (its "freezing") and copies
    them into another layout for its matrix products. It compiles once for one sequence and once for
    several, whatever their number and lengths, when the first such step is taken; and once more for
    more of them than `few_rows` takes.

    On a CUDA GPU, a step whose number of sequences and reach came before is replayed as a CUDA
    graph: starting its kernels one by one would take longer than they do. Mixtures of experts are
    not recorded.

    Args:
        model: a model in evaluation mode; its weights must not change any more.
        cache: key-value cache of all sequences.

    Raises:
        ConfigError: there is no compiler, or the model keeps states beside keys and values.
    """

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._device = cache.keys[0].device
        if not can_compile(self._device):
            raise ConfigError(
                "compiled decoding needs a C++ compiler on a CPU and triton on a GPU: install g++ "
                "or clang, or decode without"
            )
        if cache.has_states:
            raise ConfigError(
                f"compiled decoding is not built for {model.config.model_type} models, whose "
                "linear attention keeps a state: decode without"
            )
        ready_to_compile()
        self._compiled = torch.compile(self._forward, fullgraph=True)
        self._recorded: RecordedSteps | None = None
        # Without a grouped kernel for experts, the host reads the number of rows of each expert,
        # which a CUDA graph can't do.
        if self._device.type == "cuda" and not model.config.expert_count:
            self._recorded = RecordedSteps(self._step)

    def __call__(self, input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> Tensor:
        """The logits [B, V] after one more token.

        Args:
            input_ids_B1: the new tokens.
            lengths_B: length of each sequence before it.
            reach: see `RaggedCache`.
        """
        step = self._step if self._recorded is None else self._recorded
        return step(input_ids_B1, lengths_B, reach)

    def _step(self, input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> Tensor:
        # Its shape carries the reach into the compiled function as a size that may change.
        reach_S = torch.empty(reach, 0, device=self._device)
        torch._dynamo.mark_dynamic(reach_S, 0)
        if len(lengths_B) > 1:
            torch._dynamo.mark_dynamic(input_ids_B1, 0)
            torch._dynamo.mark_dynamic(lengths_B, 0)
        with _settings(self._device):
            logits_BV: Tensor = self._compiled(
                input_ids_B1, lengths_B, reach_S, self._cache.keys, self._cache.values
            )
        return logits_BV

    def _forward(
        self,
        input_ids_B1: Tensor,
        lengths_B: Tensor,
        reach_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        cache = RaggedCache(keys, values, lengths_B, reach_S.shape[0])
        logits_BV: Tensor = self._model(input_ids_B1, cache=cache)[:, -1]
        return logits_BV


@dataclass(frozen=True)
class _Recorded:
    """A recorded step, and the memory that it reads from and writes to: the new tokens [B, 1], the
    lengths [B] and the logits [B, V]."""

    graph: torch.cuda.CUDAGraph
    input_ids: Tensor
    lengths: Tensor
    logits: Tensor


class RecordedSteps:
    """A decoding step as CUDA graphs, one for each number of sequences and reach.

    The first step of such a shape is computed without recording, because compiling, loading and
    lasting allocations can't be recorded; the second is recorded; it and all later ones are
    replayed. The least recently used recording makes room for a new one.

    Args:
        compute: the step: (input_ids_B1, lengths_B, reach) -> logits [B, V]. The other tensors that
            it reads and writes, weights and cache, keep their places in memory.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        self._compute = compute
        self._by_shape: OrderedDict[tuple[int, int], _Recorded | None] = OrderedDict()
        self._pool: Any = None

    def __call__(self, input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> Tensor:
        """The logits [B, V] after one more token: arguments as in `CompiledStep`."""
        shape = len(lengths_B), reach
        if shape not in self._by_shape:
            self._by_shape[shape] = None
            if len(self._by_shape) > _MOST_RECORDED:
                self._by_shape.popitem(last=False)
            return self._compute(input_ids_B1, lengths_B, reach)
        self._by_shape.move_to_end(shape)
        recorded = self._by_shape[shape]
        if recorded is None:
            recorded = self._record(input_ids_B1.clone(), lengths_B.clone(), reach)
            self._by_shape[shape] = recorded
        else:
            recorded.input_ids.copy_(input_ids_B1)
            recorded.lengths.copy_(lengths_B)
        recorded.graph.replay()
        # The next step of any shape may write over it.
        return recorded.logits.clone()

    def _record(self, input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> _Recorded:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            # No two steps are replayed at a time: their intermediate results may share memory.
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads may go on using the GPU.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_BV = self._compute(input_ids_B1, lengths_B, reach)
        return _Recorded(graph, input_ids_B1, lengths_B, logits_BV)


@contextlib.contextmanager
def _settings(device: torch.device) -> Iterator[None]:
    # Importing inductor takes a second, which plain decoding does not need.
    import torch._inductor.config as inductor_config

    # Freezing, as an option of torch.compile, would come too late: the weights are arguments by
    # then. And torch counts what it compiles by the code of a function, over all models of a
    # process.
    with (
        inductor_config.patch(freezing=device.type == "cpu"),
        torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096),
    ):
        yield
