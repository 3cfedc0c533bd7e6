"""The base class of all models, with the code that the families share.

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
    """The `init` section of a recipe: initial weights of a new model. Most weights are drawn with
    the standard deviation `model.initializer_range`; this section has the exceptions."""

    residual_projections: Literal["scaled", "zero"] = "scaled"
    """initial weights of the projections that write into the residual stream (o_proj, down_proj,
    c_proj): "scaled" multiplies their standard deviation by 1/sqrt(2 layers); "zero" sets them to
    zero, so that each layer starts as the identity."""
    embedding_std: float | None = Field(None, gt=0, le=10)
    """standard deviation of the token embedding, and of a head tied to it; null is
    model.initializer_range."""
    head_std: float | None = Field(None, gt=0, le=10)
    """standard deviation of a head that is not tied; null is model.initializer_range. With a small
    value, a new model predicts almost equal probabilities."""


class LanguageModel(nn.Module):
    """A decoder-only language model. Its parameters are not initialised: call `init_weights()` or
    load weights.

    A family's class names its modules in the class attributes, creates them in `__init__`, and
    computes the last layer's output in `decode`. Its `__init__` has a second argument
    `padded_vocab_size`: the number of rows of embedding and head, rounded up so that matrix
    products are fast; None is `vocab_size`. Rows beyond the vocabulary are zero and have no logits.

    Args:
        config: sizes and settings of the model.

    Attributes:
        head_loss: function that computes the loss from the last hidden states; efficiency methods
            replace it.
        make_mask: function that makes the masks for the layers' `attend`; efficiency methods
            replace it together with `attend`.
        norm_init: initial value of the norms' weights.
        router_statistics: statistics of the routers in training since they were last read; None for
            a dense model.
        embedding_name: name of the module with the token embedding.
        layers_name: name of the module list with the layers.
        final_modules: names of the modules after the layers: the final norm and the head.
        head_file_name: name of the head's weight in the family's files; in the model it is always
            `lm_head.weight`.
        residual_projections: substrings of the names of the parameters of projections that write
            into the residual stream.
        zero_vectors: suffixes of the names of vectors that begin at zero; other vectors are norms'
            weights.
        tensor_parallel_plan: module name -> kind of sharding in tensor parallelism, see
            `Llama.tensor_parallel_plan`; empty if it is not supported.
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
        """The norm after the last layer."""
        return self.get_submodule(self.final_modules[0])

    def finish_loading(self) -> None:
        """Tie the head to the embedding if `tie_word_embeddings` is true."""
        if self.config.tie_word_embeddings:
            # Tied again after `__init__`, because `to_empty` allocates the tied parameter twice.
            self.lm_head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, init: InitConfig | None = None) -> None:
        """Draw the initial weights from a normal distribution with mean 0 and standard deviation
        `initializer_range`; biases and attention sinks are zero, norms `norm_init`.

        Projections that write into the residual stream are scaled by 1/sqrt(2 layers), so that the
        variance of the stream does not grow with depth (Radford et al. 2019, GPT-2).

        Args:
            generator: source of the random numbers, on the parameters' device.
            init: the recipe's `init` section; None is its defaults.
        """
        init = init or InitConfig()
        std = self.config.initializer_range
        # Each layer adds to the residual stream twice: attention and MLP.
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        # The embedding comes second, so that its value overwrites the value of a tied head.
        vocabulary = {
            id(self.lm_head.weight): init.head_std,
            id(self.embedding.weight): init.embedding_std,
        }
        for name, parameter in self.named_parameters():
            # Experts' biases are recognised by name: they are stacked to 2 dimensions.
            if parameter.dim() < 2 or name.endswith("bias"):
                parameter.fill_(0.0 if name.endswith(self.zero_vectors) else self.norm_init)
                continue
            is_residual = any(part in name for part in self.residual_projections)
            rows = self.config.vocab_size if id(parameter) in vocabulary else None
            own_std = vocabulary.get(id(parameter)) or (residual_std if is_residual else std)
            # Padded rows draw no random numbers, so that a seed gives the same model regardless of
            # padding.
            parameter[:rows].normal_(0.0, own_std, generator=generator)
            if is_residual and init.residual_projections == "zero":
                # Numbers were drawn nevertheless, so that the other weights are the same as with
                # "scaled".
                parameter.zero_()
            if rows is not None:
                parameter[rows:].zero_()

    def cast(self, dtype: torch.dtype, *, frozen: bool = False) -> None:
        """Cast the parameters, except in modules whose attribute `keeps_precision` is true. Buffers
        keep their dtype. With `frozen`, trained parameters keep theirs.

        The parameters stay the same objects, only their data is replaced. `nn.Module.to` would
        replace fake tensors, on which the planner traces a step, by new parameters.
        """
        for module in self.modules():
            if getattr(module, "keeps_precision", False):
                continue
            for parameter in module.parameters(recurse=False):
                if not (frozen and parameter.requires_grad):
                    parameter.data = parameter.data.to(dtype)

    def make_cache(self, batch_size: int, max_tokens: int, dtype: torch.dtype) -> KVCache:
        """Create an empty cache on the model's device for keys and values, and for the states of
        layers with linear attention. Arguments as in `KVCache`."""
        return KVCache(
            self.config.num_hidden_layers,
            self.config.num_key_value_heads,
            self.config.head_dim,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=dtype,
            device=self.embedding.weight.device,
            states=self.config.state_shapes,
        )

    def decode(
        self, input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's output [B, T, C], and a list with the router's logits [N, E] of
        each layer with experts. Arguments as in `forward`."""
        raise NotImplementedError

    def finish(self, x_BTC: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output [B, T, C] and return the head's input
        [B, T, C].

        In pipeline parallelism, all stages but the last replace this method.
        """
        return self.final_norm(x_BTC)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: Cache | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        """Compute logits, or with `labels` the loss.

        Args:
            input_ids: token ids, int64 [B, T].
            labels: the token after each input token, int64 [B, T]; -100 excludes a token from the
                loss.
            document_ids: int [B, T], equal for neighbouring tokens of one document: tokens see
                only their own document, and positions start at 0 in each. Not with a cache.
            cache: keys and values of the tokens before `input_ids`; those of `input_ids` are added.
            logits_to_keep: number of last positions to compute logits for, 0 for all; or one
                position of each sequence, int64 [B].

        Returns:
            Without labels, the logits [B, T, V] of the next token. With labels, the cross-entropy
            summed over the valid labels, fp32 []. In training, a model with experts adds for every
            valid label `router_aux_loss_coef` times the load-balancing loss of this forward pass.
        """
        x_BTC, router_logits = self.decode(input_ids, document_ids, cache)
        if cache is not None:
            # After the last layer, because all layers store the new tokens at the same positions.
            cache.advance(input_ids.shape[1])
        # Selected before the norm and the head, because the logits of a whole prompt can take
        # gigabytes.
        if isinstance(logits_to_keep, Tensor):
            rows_B = torch.arange(len(x_BTC), device=x_BTC.device)
            x_BTC = x_BTC[rows_B, logits_to_keep][:, None]
        elif logits_to_keep:
            x_BTC = x_BTC[:, -logits_to_keep:]
        x_BTC = self.finish(x_BTC)
        vocab_size, softcap = self.config.vocab_size, self.config.logit_softcap
        if labels is None:
            return soft_capped(self.lm_head(x_BTC)[..., :vocab_size], softcap)
        # Head and loss are computed in one function, so that a chunked loss never materializes all
        # logits.
        loss = self.head_loss(x_BTC, self.lm_head, vocab_size, labels, softcap)
        # The loss of an evaluation is the cross-entropy alone, comparable with a dense model's.
        if self.training and router_logits:
            loss = loss + self._router_loss_sum(router_logits, labels)
        return loss

    def balance(self, router_logits: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the load-balancing loss [] of a pass and the number of tokens routed to each
        expert, int64 [L, E], from the logits [N, E] of each layer with a router."""
        return load_balancing_loss(router_logits, self.config.visited_experts)

    def _router_loss_sum(self, router_logits: list[Tensor], labels: Tensor) -> Tensor:
        assert self.router_statistics is not None
        auxiliary, visits_LE = self.balance(router_logits)
        valid = (labels != IGNORE_INDEX).sum()
        self.router_statistics.add(auxiliary.detach() * valid, visits_LE)
        # Multiplied by the number of valid labels, because the caller divides the sum by the valid
        # labels of the global batch.
        return self.config.router_loss_coefficient * auxiliary * valid  # type: ignore[no-any-return]


def token_positions(
    input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Tensor, int]:
    """Return the positions of the new tokens; arguments as in `LanguageModel.forward`.

    Returns:
        - positions in each token's document, int64 [T] or [B, T];
        - positions in the cache or, without a cache, in the sequence, int64 [T] or [B, T];
        - S, the number of keys that attention reads.
    """
    T = total = input_ids.shape[1]
    if cache is None:
        cache_positions = torch.arange(T, device=input_ids.device)
    else:
        cache_positions, total = cache.positions(T), cache.total(T)
    if document_ids is None:
        return cache_positions, cache_positions, total
    return document_positions(document_ids), cache_positions, total
