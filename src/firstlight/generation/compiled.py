"""One decoding step through torch.compile: one token for each sequence of a batch."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from firstlight.efficiency import can_compile
from firstlight.errors import ConfigError
from firstlight.generation import few_rows
from firstlight.models import KVCache, Model, RaggedCache

#: Recorded steps that are kept: each takes some hundred KiB of the GPU's memory for its kernels.
_MOST_RECORDED = 64


class CompiledStep:
    """A model's forward pass over one new token of each sequence, compiled.

    On a CPU, torch.compile's inductor takes the weights as constants (its "freezing") and lays them
    out anew for its matrix products: a second copy of them. It compiles once for one sequence and
    once for several, whatever their number and lengths, when the first such step is taken; and
    once more for more of them than `few_rows` takes.

    On a CUDA GPU, a step whose number of sequences and reach came before is replayed as a CUDA
    graph: starting its kernels one by one would take longer than they do. Mixtures of experts are
    not recorded.

    Args:
        model: a model in evaluation mode; its weights must not change any more.
        cache: key-value cache of all sequences.

    Raises:
        ConfigError: there is no compiler.
    """

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._device = cache.keys[0].device
        if not can_compile(self._device):
            raise ConfigError(
                "compiled decoding needs a C++ compiler on a CPU and triton on a GPU: install g++ "
                "or clang, or decode without"
            )
        few_rows.ready_to_compile()
        self._compiled = torch.compile(self._forward, fullgraph=True)
        self._recorded: RecordedSteps | None = None
        # Where experts have no grouped kernel, the host asks for how many rows each has.
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

    The first step of such a shape is computed plainly, since what it compiles, loads and allocates
    for good can't be recorded; the second is recorded; it and all later ones are replayed. The
    least recently used recording makes room for a new one.

    Args:
        compute: the step: (input_ids_B1, lengths_B, reach) -> logits [B, V]. What else it reads and
            writes, weights and cache, stays where it is.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        self._compute = compute
        self._by_shape: OrderedDict[tuple[int, int], _Recorded | None] = OrderedDict()
        self._pool: Any = None

    def __call__(self, input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> Tensor:
        """See `CompiledStep`."""
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
    # Freezing, as an option of torch.compile, would come too late: the weights are arguments by
    # then. And torch counts what it compiles by the code of a function, over all models of a
    # process.
    with (
        inductor_config.patch(freezing=device.type == "cpu"),
        torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096),
    ):
        yield
