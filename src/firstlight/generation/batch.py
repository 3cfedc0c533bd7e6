"""Continuous batching: decode sequences of different lengths in one batch. Sequences can join or
leave the batch at any step.

Decoding steps can be compiled with torch.compile. On a CUDA GPU, both compiled and uncompiled steps
are recorded as CUDA graphs (see `RecordedSteps`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import ConfigError, ModelError
from firstlight.generation.few_rows import (
    FewRowsLinear,
    Int8Linear,
    lay_out,
    ready_to_compile,
)
from firstlight.generation.llama_step import llama_step
from firstlight.hardware.device import upload
from firstlight.methods import can_compile
from firstlight.methods.attention import varying_lengths
from firstlight.models import KVCache, Model, RaggedCache, ops
from firstlight.models.moe import reads_rows_of_experts
from firstlight.models.rope import DynamicRope, LongRope

#: The number of cache positions that attention reads is rounded up to a multiple of this number.
#: With a larger number, there are fewer different shapes, each of which needs a CUDA graph. With a
#: smaller number, attention reads fewer unused positions.
_REACH_STEP = 64

#: Values of `BatchDecoder.pass_tokens` for a CPU and for a GPU. A CPU takes about as long to
#: compute 512 tokens as a GPU takes to compute 8,192.
_CPU_PASS_TOKENS, _GPU_PASS_TOKENS = 512, 8192

#: Maximum number of elements in a tensor of logits while a prompt is scored.
_MOST_LOGITS = 2**22


#: Function that computes a decoding step: (input_ids_B1, lengths_B, reach) -> logits [B, V]. See
#: `CompiledStep.__call__` for the arguments.
_Step = Callable[[Tensor, Tensor, int], Tensor]


class BatchDecoder:
    """Runs a model on several sequences and manages their key-value cache. The caller chooses the
    tokens.

    The sequences are numbered from 0 to `len(decoder)` - 1. When a sequence is removed, the last
    sequence takes over its number.

    Args:
        model: a model in evaluation mode.
        max_sequences: maximum number of simultaneous sequences.
        max_tokens: maximum length of each sequence, including prompt and new tokens; at most the
            model's context length.
        reuse_prefixes: True to reuse the cached keys and values of an earlier sequence that begins
            with the same tokens, as in a conversation. When only the remainder of a prompt is
            processed, rounding can change the last digit of the results.
        compile: True to decode with torch.compile (see `CompiledStep`). The first step takes about
            a minute unless `warm_up` was called.

    Attributes:
        lengths: current number of tokens in each sequence.
        cache: keys and values of all sequences.
        pass_tokens: maximum number of tokens, including padding, that `add_many` processes in one
            forward pass. With fewer tokens, the device would be partly idle.

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
        # The cache is longer than the maximum reach, because torch.compile would specialise the
        # step for a reach that equals the size of the cache.
        cache_tokens = self.max_tokens + (_REACH_STEP if compile else 0)
        self.cache = model.make_cache(max_sequences, cache_tokens, parameter.dtype)
        self._compiled = CompiledStep(model, self.cache) if compile else None
        #: Decoding step for a small number of sequences, used instead of the model's forward pass.
        self._llama_step = None if compile else llama_step(model, self.cache)
        self._is_recorded = _can_record(model, self._device, self.cache)
        steps = RecordedSteps if self._is_recorded else RaggedSteps
        compute = self._compiled or functools.partial(_eager, model, self.cache)
        self._ragged = steps(compute, max_sequences, self._device)
        is_cpu = self._device.type == "cpu"
        self.pass_tokens = _CPU_PASS_TOKENS if is_cpu else _GPU_PASS_TOKENS
        self.lengths: list[int] = []
        self._reuse_prefixes = reuse_prefixes
        #: For each row of the cache, the tokens whose keys and values it stores. This includes rows
        #: of removed sequences.
        self._stored: list[list[int]] = [[] for _ in range(max_sequences)]

    def __len__(self) -> int:
        return len(self.lengths)

    @torch.inference_mode()
    @varying_lengths()
    def add(
        self,
        prompt_ids: Sequence[int],
        on_logits: Callable[[Tensor], None] | None = None,
        *,
        may_fill: bool = False,
    ) -> Tensor:
        """Run the model on a prompt, and append the prompt as the last sequence. Return the logits
        [V] of its next token.

        Args:
            prompt_ids: token ids of the prompt, at least one.
            on_logits: callback that receives the logits [T, V] of consecutive chunks of the prompt.
                With `on_logits`, the prompt can fill the context.
            may_fill: True to allow the prompt to fill the context even without `on_logits`.

        Raises:
            ConfigError, ModelError: see `require_prompt`.
        """
        assert len(self) < self.max_sequences, "there is no room for another sequence"
        fills = may_fill or on_logits is not None
        require_prompt(self.model, prompt_ids, room=0 if fills else 1)
        cache = self.cache.sequence(len(self))
        if self._reuse_prefixes and on_logits is None:
            cache.length = self._take_prefix(prompt_ids)
        cache.least_length = len(prompt_ids)
        input_ids = upload([list(prompt_ids[cache.length :])], self._device)
        # The row is recorded as empty until the whole prompt has been processed.
        self._stored[len(self)] = []
        if on_logits is None:
            logits_V: Tensor = self.model(input_ids, cache=cache, logits_to_keep=1)[0, -1]
        else:
            # The prompt is processed in chunks, because the logits of a long prompt would take
            # gigabytes.
            tokens = max(_MOST_LOGITS // self.model.config.vocab_size, 1)
            for ids in torch.split(input_ids, tokens, dim=1):
                logits_TV = self.model(ids, cache=cache)[0]
                on_logits(logits_TV)
            logits_V = logits_TV[-1]
        self._stored[len(self)] = list(prompt_ids)
        self.lengths.append(len(prompt_ids))
        return logits_V

    @torch.inference_mode()
    @varying_lengths()
    def add_many(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Append N prompts, in order, as the last sequences. Return the logits [N, V] of their next
        tokens. Consecutive prompts of similar lengths are processed in one forward pass,
        right-padded to the length of the longest one. Cached prefixes are not reused.

        Args:
            prompts: token ids of each prompt; at least one prompt.

        Raises:
            ConfigError, ModelError: see `require_prompt`. In this case, no prompt is added.
        """
        assert len(self) + len(prompts) <= self.max_sequences, "more sequences than rows"
        for prompt_ids in prompts:
            require_prompt(self.model, prompt_ids)
        parts: list[Tensor] = []
        while len(rest := prompts[sum(map(len, parts)) :]):
            count = self._together(rest)
            parts.append(self._add_padded(rest[:count]) if count > 1 else self.add(rest[0])[None])
        return torch.cat(parts)

    def _together(self, prompts: Sequence[Sequence[int]]) -> int:
        """Return how many prompts to process together in the next forward pass, counted from the
        first prompt. The result is at least 1.
        """
        # Padding would change recurrent states and length-dependent rotary frequencies.
        scaling = getattr(self.model.config, "rope_scaling", None)
        if self.cache.has_states or isinstance(scaling, DynamicRope | LongRope):
            return 1
        longest = total = 0
        for count, prompt_ids in enumerate(prompts):
            longest, total = max(longest, len(prompt_ids)), total + len(prompt_ids)
            # At most a third of a pass can be padding.
            if (count + 1) * longest > min(1.5 * total, self.pass_tokens):
                return max(count, 1)
        return len(prompts)

    def _add_padded(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        first, lengths = len(self), [len(prompt_ids) for prompt_ids in prompts]
        input_ids_BT = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt_ids in enumerate(prompts):
            input_ids_BT[row, : len(prompt_ids)] = torch.tensor(prompt_ids)
            # The rows are recorded as empty until the prompts have been processed. The causal mask
            # hides the padding at the end of the prompts, and the padding is overwritten by later
            # tokens in the cache.
            self._stored[first + row] = []
        logits_BV: Tensor = self.model(
            upload(input_ids_BT, self._device),
            cache=self.cache.sequence(first, len(prompts)),
            logits_to_keep=upload(lengths, self._device) - 1,
        )[:, 0]
        self._stored[first : first + len(prompts)] = map(list, prompts)
        self.lengths += lengths
        return logits_BV

    def _take_prefix(self, prompt_ids: Sequence[int]) -> int:
        """Find the longest prefix of a prompt that is cached in any row, and copy it to the row of
        the next sequence. Return the length of the prefix. It never includes the prompt's last
        token, which must be processed because its logits are needed.
        """
        shared = [
            _common(stored, prompt_ids[:-1])
            if self._is_long(stored) == self._is_long(prompt_ids)
            else 0
            for stored in self._stored
        ]
        if self.cache.has_states:
            # A recurrent state summarises all tokens of its row, so a prefix can be reused only if
            # it contains every token stored in that row.
            whole = zip(shared, self._stored, strict=True)
            shared = [count if count == len(stored) else 0 for count, stored in whole]
        row, length = max(enumerate(shared), key=lambda entry: entry[1])
        if row != len(self):
            self.cache.copy_row(row, len(self), length)
        return length

    def _is_long(self, token_ids: Sequence[int]) -> bool:
        """Return True if a sequence is long enough to use the rotary frequencies for long sequences
        (see `FamilyConfig.long_from`).
        """
        first = self.model.config.long_from
        return first is not None and len(token_ids) >= first

    @torch.inference_mode()
    @varying_lengths()
    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Append one token to each sequence. Return the logits [B, V] of the following tokens.

        Args:
            token_ids: the new token of each sequence, in the order of the sequence numbers.
        """
        assert len(token_ids) == len(self) > 0
        assert max(self.lengths) < self.max_tokens, "a sequence is full"
        for number, length in enumerate(self.lengths):
            if length + 1 == self.model.config.long_from:
                # The cached keys were rotated with the frequencies for short sequences, so all keys
                # are recomputed, as transformers does for Phi-3.
                input_ids = upload([self._stored[number]], self._device)
                cache = self.cache.sequence(number)
                cache.least_length = length + 1
                self.model(input_ids, cache=cache, logits_to_keep=1)
        logits_BV = self._logits(token_ids, self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        for stored, token_id in zip(self._stored, token_ids, strict=False):
            stored.append(token_id)
        return logits_BV

    def _logits(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        if self._llama_step is not None and len(lengths) <= self._llama_step.most_rows:
            return self._llama_step(token_ids, lengths)
        count, longest = len(lengths), max(lengths) + 1
        if count == 1 and self._compiled is None and not self._is_recorded:
            # A single sequence needs neither a mask nor indices of cache positions.
            cache = self.cache.sequence(0)
            cache.length = lengths[0]
            input_ids_B1 = upload([list(token_ids)], self._device)
            logits_BV: Tensor = self.model(input_ids_B1, cache=cache)[:, -1]
            return logits_BV
        reach = -(-longest // _REACH_STEP) * _REACH_STEP
        spare = 0
        if self._is_recorded:
            # Unused rows of the cache are also computed, to reduce the number of different shapes.
            reach = _REACH_STEP * _ladder(reach // _REACH_STEP)
            spare = min(_ladder(count), self.max_sequences) - count
            for row in range(count, count + spare):
                self._stored[row] = []
        reach = min(reach, self.max_tokens)
        return self._ragged(list(token_ids), list(lengths), count + spare, reach)[:count]

    @torch.inference_mode()
    def keep(self, ids_B: Tensor, ids: list[int]) -> None:
        """Use tokens that were chosen on a GPU as the input of the next step, without copying them
        to the GPU again. After a step, pass this method to `choose_tokens` as the argument `keep`.

        Args:
            ids_B: the next token of each sequence, int64 on the model's device.
            ids: list that contains the same tokens by the time `step` is called.
        """
        self._ragged.keep(ids_B, ids)

    @torch.inference_mode()
    @varying_lengths()
    def warm_up(self) -> None:
        """Compile the decoding step for a single sequence and for several sequences. Call this
        method before adding the first sequence. It has no effect without `compile`.
        """
        assert not any(self._stored), "warm_up must be called before the first sequence is added"
        for count in {1, min(2, self.max_sequences)} if self._compiled is not None else ():
            self._logits([0] * count, [0] * count)

    def room(self, number: int) -> int:
        """Return the number of tokens that can still be added to a sequence."""
        return self.max_tokens - self.lengths[number]

    def remove(self, number: int) -> None:
        """Remove a sequence. The last sequence then takes over its number."""
        last, length = len(self) - 1, self.lengths[-1]
        if number != last:
            self.cache.copy_row(last, number, length)
            self.lengths[number] = length
            self._stored[number] = list(self._stored[last])
        self.lengths.pop()


def _eager(
    model: Model, cache: KVCache, input_ids_B1: Tensor, lengths_B: Tensor, reach: int
) -> Tensor:
    """Compute one decoding step without compilation. See `CompiledStep.__call__` for the arguments.

    This is not a method of `BatchDecoder`, because the decoder would then hold a reference to
    itself, and its cache would stay in memory until the garbage collector runs.
    """
    logits_BV: Tensor = model(input_ids_B1, cache=cache.ragged(lengths_B, reach))[:, -1]
    return logits_BV


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def require_prompt(model: Model, prompt_ids: Sequence[int], *, room: int = 1) -> None:
    """Raise an error for a prompt that the model can't continue.

    Args:
        model: the model.
        prompt_ids: token ids of the prompt.
        room: number of tokens that must fit in the context after the prompt.

    Raises:
        ConfigError: the prompt is empty or fills the context.
        ModelError: the prompt contains an id beyond the vocabulary.
    """
    limit = model.config.max_position_embeddings
    if not prompt_ids:
        raise ConfigError("the prompt has no tokens: the model continues from at least one token")
    if len(prompt_ids) + room > limit:
        raise ConfigError(
            f"the prompt has {len(prompt_ids)} tokens, which leaves too little room in the model's "
            f"context of {limit} tokens: shorten the prompt, or enable slide (--slide)"
        )
    if max(prompt_ids) >= model.config.vocab_size:
        raise ModelError(
            f"the prompt contains token id {max(prompt_ids)}, but the model's vocabulary has only "
            f"{model.config.vocab_size} tokens: use the model's own tokenizer"
        )


#: Maximum number of recorded steps. Each recording takes a few hundred KiB of GPU memory for its
#: kernels. For example, up to 64 sequences of up to 4,096 tokens need 121 recordings, one for each
#: combination of 11 batch sizes and 11 reaches.
_MOST_RECORDED = 128


class CompiledStep:
    """Compiled forward pass of a model for one new token per sequence.

    On a CPU, torch.compile's inductor treats the weights as constants ("freezing") and copies them
    into a different layout for its matrix products. The step is compiled separately for one
    sequence, for several sequences, and for more than `few_rows.MOST_ROWS` sequences, each time on
    the first call. Within each of these cases, the number and lengths of the sequences can vary
    without recompilation.

    Args:
        model: a model in evaluation mode whose weights do not change afterwards.
        cache: key-value cache of all sequences.

    Raises:
        ConfigError: no compiler is available, or the model has layers with linear attention.
    """

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._device = cache.keys[0].device
        if not can_compile(self._device):
            raise ConfigError(
                "compiled decoding needs a C++ compiler on a CPU and triton on a GPU: install "
                "g++ or clang, or decode without compiling"
            )
        if cache.has_states:
            raise ConfigError(
                f"compiled decoding does not support {model.config.model_type} models, whose "
                "linear-attention layers keep a state: decode without compiling"
            )
        ready_to_compile()
        ops.ready_to_compile()
        self._compiled = torch.compile(self._forward, fullgraph=True)

    def __call__(self, input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> Tensor:
        """Append one token to each sequence. Return the logits [B, V] of the following tokens.

        Args:
            input_ids_B1: the new token of each sequence, int64.
            lengths_B: length of each sequence before its new token, int64.
            reach: number of cache positions that attention reads (see `RaggedCache`).
        """
        # The shape of this empty tensor passes the reach to the compiled function as a dynamic
        # size.
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


def _can_record(model: Model, device: torch.device, cache: KVCache) -> bool:
    """Return True if decoding steps can be recorded as CUDA graphs. This requires that all
    operations of a step run on the GPU and that the CPU does not read any intermediate result.
    """
    if device.type != "cuda" or cache.has_states or reads_rows_of_experts(model):
        return False
    # Do not record steps for a model in training. It can have hooks that exchange weights between
    # processes, and recording would take memory that the next training step needs. Only models that
    # were loaded for generation have few-rows or int8 layers.
    return isinstance(model.lm_head, FewRowsLinear | Int8Linear)


def _ladder(number: int) -> int:
    """Return the smallest of 1, 2, 4, 8, 16, 24, 32, ... that is at least `number`."""
    return min(1 << (number - 1).bit_length(), -(-number // 8) * 8) if number > 1 else 1


class RaggedSteps:
    """Decoding steps for sequences of different lengths. The new tokens and the lengths of the
    sequences are stored and updated on the device. They are copied from the host only when
    sequences have been added or removed.

    Args:
        compute: function that computes a step. The cache that it reads and writes must stay at the
            same memory address.
        max_sequences: maximum number of sequences.
        device: device of the model.
    """

    def __init__(self, compute: _Step, max_sequences: int, device: torch.device) -> None:
        self._compute = compute
        self._ids_B, self._lengths_B = (
            torch.zeros(max_sequences, dtype=torch.int64, device=device) for _ in range(2)
        )
        #: New tokens and sequence lengths that are already stored on the device.
        self._known: tuple[list[int], list[int]] = [], []

    def __call__(self, ids: list[int], lengths: list[int], rows: int, reach: int) -> Tensor:
        """Append one token to each sequence. Return the logits [rows, V] of the following tokens.

        Args:
            ids: the new token of each sequence.
            lengths: length of each sequence before its new token, at least one.
            rows: number of rows to compute, including unused rows after the sequences. It must
                depend only on the number of sequences.
            reach: number of cache positions that attention reads (see `RaggedCache`).
        """
        if self._known != (ids, lengths):
            # Unused rows have length 0 at first, so they stay shorter than the sequences.
            spare = [0] * (rows - len(ids))
            new_2B = upload([[*ids, *spare], [*lengths, *spare]], self._ids_B.device)
            self._ids_B[:rows], self._lengths_B[:rows] = new_2B
        self._known = [], []
        logits_BV = self._run(rows, reach)
        self._known = [], [length + 1 for length in lengths]
        return logits_BV

    def _run(self, rows: int, reach: int) -> Tensor:
        lengths_B = self._lengths_B[:rows]
        logits_BV = self._compute(self._ids_B[:rows, None], lengths_B, reach)
        lengths_B += 1
        return logits_BV

    def keep(self, ids_B: Tensor, ids: list[int]) -> None:
        """See `BatchDecoder.keep`."""
        _, lengths = self._known
        if len(lengths) == len(ids_B):  # Otherwise, the previous step did not use these tensors.
            self._ids_B[: len(ids_B)] = ids_B
            self._known = ids, lengths


class RecordedSteps(RaggedSteps):
    """Decoding steps recorded as CUDA graphs. There is one graph per shape, which consists of the
    number of rows and the number of cache positions that attention reads ("reach"). Without a
    graph, launching the kernels of a step takes many times as long as running them.

    The first step of a shape is computed without recording, because compilation, kernel loading and
    persistent allocations can't be recorded. The second step is recorded and replayed; later steps
    are only replayed. When the maximum number of recordings is exceeded, the least recently used
    recording is dropped. The weights must stay at the same memory addresses.
    """

    def __init__(self, compute: _Step, max_sequences: int, device: torch.device) -> None:
        super().__init__(compute, max_sequences, device)
        #: The CUDA graph and its output logits [rows, V] for each shape, or None if the shape has
        #: been computed only once.
        self._by_shape: OrderedDict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor] | None] = (
            OrderedDict()
        )
        self._pool: Any = None

    def _run(self, rows: int, reach: int) -> Tensor:
        shape = rows, reach
        if shape not in self._by_shape:
            self._by_shape[shape] = None
            if len(self._by_shape) > _MOST_RECORDED:
                self._by_shape.popitem(last=False)
            return super()._run(rows, reach)
        self._by_shape.move_to_end(shape)
        recorded = self._by_shape[shape] or self._record(rows, reach)
        self._by_shape[shape] = recorded
        graph, logits_BV = recorded
        graph.replay()
        # A copy is returned, because the next step of any shape can overwrite the logits.
        return logits_BV.clone()

    def _record(self, rows: int, reach: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            # All graphs can share one memory pool for intermediate results, because no two graphs
            # are replayed at the same time.
            self._pool = torch.cuda.graph_pool_handle()
        # If the garbage collector freed another graph during recording, the recording would become
        # invalid.
        collects = gc.isenabled()
        gc.disable()
        try:
            # "thread_local" lets other threads use the GPU during recording.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                return graph, super()._run(rows, reach)
        finally:
            if collects:
                gc.enable()


@contextlib.contextmanager
def _settings(device: torch.device) -> Iterator[None]:
    """Apply the compiler settings for decoding within a `with` block."""
    # This is imported here because importing inductor takes a second, and decoding without
    # compilation does not need it.
    import torch._inductor.config as inductor_config

    # `freezing` is set globally. As an option of torch.compile, it would have no effect, because
    # the weights become arguments of the graph before the option is applied. The limits are raised
    # because torch counts the recompilations of a function across all models in a process.
    with (
        inductor_config.patch(freezing=device.type == "cpu"),
        torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096),
    ):
        yield
