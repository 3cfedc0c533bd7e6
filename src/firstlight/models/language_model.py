"""The base class of the models, with the code that GPT-2 and Llama share.

Shape letters as in `models/ops.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from firstlight.models.cache import Cache, KVCache
from firstlight.models.moe import RouterStatistics, load_balancing_loss
from firstlight.models.ops import (
    IGNORE_INDEX,
    Embedding,
    HeadLoss,
    MaskFunction,
    dense_mask,
    document_positions,
    head_loss,
    soft_capped,
)
from firstlight.section import Section


class InitConfig(Section):
    """The `init` section of a recipe: initial weights of a new model, beside
    `model.initializer_range`."""

    residual_projections: Literal["scaled", "zero"] = "scaled"
    """projections that write into the residual stream (o_proj, down_proj, c_proj): "scaled" by
    1/sqrt(2 layers), or "zero", so that each layer begins as the identity."""
    embedding_std: float | None = Field(None, gt=0, le=10)
    """standard deviation of the token embedding, and of a head that is tied to it; null is
    model.initializer_range."""
    head_std: float | None = Field(None, gt=0, le=10)
    """standard deviation of a head that is not tied; null is model.initializer_range. A small one
    begins at nearly equal probabilities."""


class LanguageModel(nn.Module):
    """A decoder-only language model. Its parameters are not initialised: call `init_weights()` or
    load weights.

    A family names its modules in the class attributes, makes them in `__init__`, and computes the
    last layer's output in `decode`. Its `__init__` takes `padded_vocab_size`, too: the number of
    rows of embedding and head, a size that matrix units like; None is the vocabulary's. Rows
    beyond the vocabulary are zero, and have no logits.

    Args:
        config: sizes and settings of the model.

    Attributes:
        head_loss: function that computes the loss from the last hidden states; efficiency methods
            replace it.
        make_mask: function that makes the masks for the layers' `attend`; replaced together with
            `attend`.
        norm_init: initial value of the norms' weights.
        router_statistics: loss and visits of the routers in training since it was last emptied;
            None for a dense model.
        embedding_name: name of the module with the token embedding.
        layers_name: name of the module list with the layers.
        final_modules: names of the modules behind the layers: the final norm and the head.
        head_file_name: name of the head's weight, `lm_head.weight`, in the family's files.
        residual_projections: parts of the names of the projections that write into the residual
            stream.
        zero_vectors: ends of the names of vectors that begin at zero; others are norms' weights.
        tensor_parallel_plan: kind of shard of each module under tensor parallelism, by the module's
            name; empty where a family has none.
    """

    embedding_name: ClassVar[str]
    layers_name: ClassVar[str]
    final_modules: ClassVar[tuple[str, ...]]
    head_file_name: ClassVar[str] = "lm_head.weight"
    residual_projections: ClassVar[tuple[str, ...]]
    zero_vectors: ClassVar[tuple[str, ...]] = ("bias", ".sinks")
    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {}

    head_loss: HeadLoss
    make_mask: MaskFunction
    lm_head: nn.Linear
    norm_init: float = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.head_loss, self.make_mask = head_loss, dense_mask
        self.router_statistics = RouterStatistics() if config.expert_count else None

    @property
    def embedding(self) -> Embedding:
        """The token embedding."""
        return self.get_submodule(self.embedding_name)  # type: ignore[return-value]

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, first to last."""
        return self.get_submodule(self.layers_name)  # type: ignore[return-value]

    @property
    def final_norm(self) -> nn.Module:
        """The norm behind the layers."""
        return self.get_submodule(self.final_modules[0])

    def finish_loading(self) -> None:
        """Tie the head to the embedding where the config says so; a weights file has no ties."""
        if self.config.tie_word_embeddings:
            # Here and not in `__init__` alone: memory that is allocated later makes two of them.
            self.lm_head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, init: InitConfig | None = None) -> None:
        """Draw the initial weights from Normal(0, initializer_range); biases and sinks of attention
        are zero, norms one.

        Projections that write into the residual stream are scaled by 1/sqrt(2 layers), so that
        its variance does not grow with depth (Radford et al. 2019, GPT-2).

        Args:
            generator: source of the random numbers, on the parameters' device.
            init: the recipe's `init` section; None is its defaults.
        """
        init = init or InitConfig()
        std = self.config.initializer_range
        # Each layer adds to the stream twice: attention and MLP.
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        # The embedding second: a tied head is one with it.
        vocabulary = {
            id(self.lm_head.weight): init.head_std,
            id(self.embedding.weight): init.embedding_std,
        }
        for name, parameter in self.named_parameters():
            # Experts' biases are stacked: they are matrices by their shape.
            if parameter.dim() < 2 or name.endswith("bias"):
                parameter.fill_(0.0 if name.endswith(self.zero_vectors) else self.norm_init)
                continue
            is_residual = any(part in name for part in self.residual_projections)
            rows = self.config.vocab_size if id(parameter) in vocabulary else None
            own_std = vocabulary.get(id(parameter)) or (residual_std if is_residual else std)
            # Padding draws no numbers: the same seed gives the same model at any padding.
            parameter[:rows].normal_(0.0, own_std, generator=generator)
            if is_residual and init.residual_projections == "zero":
                # Drawn all the same: the other weights are those of a scaled start.
                parameter.zero_()
            if rows is not None:
                parameter[rows:].zero_()

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the parameters, except those of modules with `keeps_precision`.

        Each stays the tensor that it is, with other values: `nn.Module.to` would put others in
        the place of fake tensors, on which the planner traces a step. Buffers keep their dtype.
        """
        for module in self.modules():
            if getattr(module, "keeps_precision", False):
                continue
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)

    def make_cache(self, batch_size: int, max_tokens: int, dtype: torch.dtype) -> KVCache:
        """An empty key-value cache on the model's device."""
        return KVCache(
            self.config.num_hidden_layers,
            self.config.num_key_value_heads,
            self.config.head_dim,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=dtype,
            device=self.embedding.weight.device,
        )

    def decode(
        self, input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The last layer's output [B, T, C], and the router's logits [N, E] of each layer with
        experts; arguments as in `forward`."""
        raise NotImplementedError

    def finish(self, x_BTC: Tensor) -> Tensor:
        """The head's input [B, T, C] from the last layer's output: the final norm. All but the last
        stage of a pipeline replace it."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits [B, T, V] of the next token; with `labels`, the summed loss [] in fp32 instead.

        In training, a model with experts adds to that sum `router_aux_loss_coef` times the
        load-balancing loss of this forward pass for every valid label.

        Args:
            input_ids: token ids, int64 [B, T].
            labels: the token after each input token, int64 [B, T]; -100 leaves it out of the loss.
            document_ids: int [B, T], equal for neighbouring tokens of one document: tokens see
                their own document only, and positions start at 0 in each. Not with a cache.
            cache: keys and values of the tokens before these; the new ones are added.
            logits_to_keep: number of last positions with logits; 0 for all.
        """
        x_BTC, router_logits = self.decode(input_ids, document_ids, cache)
        if cache is not None:
            # After the last layer: all of them store the new tokens at the same positions.
            cache.advance(input_ids.shape[1])
        # Cut before the norm and the head: a prompt's logits would be gigabytes.
        x_BTC = self.finish(x_BTC[:, -logits_to_keep:] if logits_to_keep else x_BTC)
        vocab_size, softcap = self.config.vocab_size, self.config.logit_softcap
        if labels is None:
            return soft_capped(self.lm_head(x_BTC)[..., :vocab_size], softcap)
        # Head and loss are one function: a loss in chunks need not have all logits in memory.
        loss = self.head_loss(x_BTC, self.lm_head, vocab_size, labels, softcap)
        # An evaluation's loss is the cross-entropy alone, as that of a dense model.
        if self.training and router_logits:
            loss = loss + self._router_loss_sum(router_logits, labels)
        return loss

    def balance(self, router_logits: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The load-balancing loss [] of a pass, and the visits to each expert, int64 [L, E], by the
        logits [N, E] of each layer with a router."""
        return load_balancing_loss(router_logits, self.config.visited_experts)

    def _router_loss_sum(self, router_logits: list[Tensor], labels: Tensor) -> Tensor:
        assert self.router_statistics is not None
        auxiliary, visits_LE = self.balance(router_logits)
        valid = (labels != IGNORE_INDEX).sum()
        self.router_statistics.add(auxiliary.detach() * valid, visits_LE)
        # Times the labels, since the caller divides the whole sum by the labels of the batch.
        return self.config.router_loss_coefficient * auxiliary * valid  # type: ignore[no-any-return]


def token_positions(
    input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Tensor, int]:
    """Positions of new tokens, and the number of tokens to look at.

    Returns:
        Positions in each token's document, int64 [T] or [B, T]; positions in the cache (without
        one, in the sequence), int64 [T] or [B, T]; and S, the keys that attention has.
    """
    T = total = input_ids.shape[1]
    if cache is None:
        cache_positions = torch.arange(T, device=input_ids.device)
    else:
        cache_positions, total = cache.positions(T), cache.total(T)
    if document_ids is None:
        return cache_positions, cache_positions, total
    return document_positions(document_ids), cache_positions, total
