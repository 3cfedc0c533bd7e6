"""One decoding step through torch.compile: one token for each sequence of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from firstlight.efficiency import can_compile
from firstlight.errors import ConfigError
from firstlight.generation import few_rows
from firstlight.models import KVCache, Model, RaggedCache


class CompiledStep:
    """A model's forward pass over one new token of each sequence, compiled.

    On a CPU, torch.compile's inductor takes the weights as constants (its "freezing") and lays them
    out anew for its matrix products: a second copy of them. It compiles once for one sequence and
    once for several, whatever their number and lengths, when the first such step is taken; and
    once more for more of them than `few_rows` takes.

    Args:
        model: in evaluation mode; its weights must not change any more.
        cache: of all sequences.

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

    def __call__(self, input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> Tensor:
        """The logits [B, V] after one more token.

        Args:
            input_ids_B1: the new tokens.
            lengths_B: of each sequence before it.
            reach: see `RaggedCache`.
        """
        # Its shape carries the reach into the compiled function as a size that may change.
        places_S = torch.empty(reach, 0, device=self._device)
        torch._dynamo.mark_dynamic(places_S, 0)
        if len(lengths_B) > 1:
            torch._dynamo.mark_dynamic(input_ids_B1, 0)
            torch._dynamo.mark_dynamic(lengths_B, 0)
        with _settings(self._device):
            logits_BV: Tensor = self._compiled(
                input_ids_B1, lengths_B, places_S, self._cache.keys, self._cache.values
            )
        return logits_BV

    def _forward(
        self,
        input_ids_B1: Tensor,
        lengths_B: Tensor,
        places_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        cache = RaggedCache(keys, values, lengths_B, places_S.shape[0])
        logits_BV: Tensor = self._model(input_ids_B1, cache=cache)[:, -1]
        return logits_BV


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
