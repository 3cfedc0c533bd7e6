"""The base class of all models, which contains the code that the families share.

Shape letters are defined in `models/ops.py`.
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
    """The `init` section of a recipe, which configures the initial weights of a new model. Most
    weights are drawn with the standard deviation `model.initializer_range`. This section sets the
    exceptions."""

    residual_projections: Literal["scaled", "zero"] = "scaled"
    """initial weights of the projections that write into the residual stream (o_proj, down_proj,
    c_proj). "scaled" multiplies their standard deviation by 1/sqrt(2 layers). "zero" sets the
    weights to zero, so that each layer starts as the identity."""
    embedding_std: float | None = Field(None, gt=0, le=10)
    """standard deviation of the token embedding, and of a head that is tied to it; null uses
    model.initializer_range."""
    head_std: float | None = Field(None, gt=0, le=10)
    """standard deviation of an untied head; null uses model.initializer_range. With a small value,
    a new model predicts almost equal probabilities for all tokens."""


class LanguageModel(nn.Module):
    """A decoder-only language model. The constructor does not initialise the parameters. Call
    `init_weights()` or load weights before using the model.

    Each family has a subclass that creates its modules in `__init__`, specifies their names in the
    class attributes, and computes the last layer's output in `decode`. The subclass's `__init__`
    has a second argument, `padded_vocab_size`, which is the number of rows of the embedding and the
    head, rounded up to make matrix products fast. None means `vocab_size`. Rows beyond the
    vocabulary are zero, and no logits are returned for them.

    Args:
        config: config of the model.

    Attributes:
        head_loss: function that computes the loss from the last hidden states; efficiency methods
            replace it.
        make_mask: function that creates the masks that layers pass to `attend`; efficiency methods
            replace both functions together.
        norm_init: initial value of the weights of norms.
        router_statistics: statistics of the routers, accumulated over all training steps since they
            were last read; None for a dense model.
        embedding_name: name of the module with the token embedding.
        layers_name: name of the module list that contains the layers.
        final_modules: names of the modules that follow the layers (the final norm and the head).
        head_file_name: name of the head's weight in the family's checkpoint files. In the model,
            the name is always `lm_head.weight`.
        residual_projections: substrings that occur in the names of the projections that write into
            the residual stream.
        zero_vectors: name suffixes of the vectors initialised to zero. All other vectors are
            weights of norms.
        tensor_parallel_plan: mapping from a module's name to its kind of sharding in tensor
            parallelism (see `Llama.tensor_parallel_plan`); empty if tensor parallelism is not
            supported.
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
        """The layers, in order."""
        return self.get_submodule(self.layers_name)  # type: ignore[return-value]

    @property
    def final_norm(self) -> nn.Module:
        """The final norm, which follows the last layer."""
        return self.get_submodule(self.final_modules[0])

    def finish_loading(self) -> None:
        """Tie the head to the embedding if the config's `tie_word_embeddings` is true."""
        if self.config.tie_word_embeddings:
            # This is called in `__init__` and again after `to_empty`, which allocates a tied
            # parameter twice.
            self.lm_head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, init: InitConfig | None = None) -> None:
        """Draw the initial weights from a normal distribution with mean 0 and standard deviation
        `initializer_range`. Biases and attention sinks are set to zero, and weights of norms are
        set to `norm_init`.

        Projections that write into the residual stream are scaled by 1/sqrt(2 layers), so that the
        variance of the residual stream does not grow with depth (Radford et al. 2019, GPT-2).

        Args:
            generator: source of the random numbers, on the parameters' device.
            init: the recipe's `init` section; None uses its default values.
        """
        init = init or InitConfig()
        std = self.config.initializer_range
        # Each layer adds two outputs to the residual stream: the output of attention and the output
        # of the MLP.
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        # The embedding comes second, so that `embedding_std` takes precedence over `head_std` if
        # the head is tied.
        vocabulary = {
            id(self.lm_head.weight): init.head_std,
            id(self.embedding.weight): init.embedding_std,
        }
        for name, parameter in self.named_parameters():
            # Biases of experts are recognised by name, because they are stacked in 2-dimensional
            # tensors.
            if parameter.dim() < 2 or name.endswith("bias"):
                parameter.fill_(0.0 if name.endswith(self.zero_vectors) else self.norm_init)
                continue
            is_residual = any(part in name for part in self.residual_projections)
            rows = self.config.vocab_size if id(parameter) in vocabulary else None
            own_std = vocabulary.get(id(parameter)) or (residual_std if is_residual else std)
            # No random numbers are drawn for padding rows, so that a seed gives the same model for
            # any amount of padding.
            parameter[:rows].normal_(0.0, own_std, generator=generator)
            if is_residual and init.residual_projections == "zero":
                # The random numbers are drawn even if they are not used, so that all other weights
                # are the same as with "scaled".
                parameter.zero_()
            if rows is not None:
                parameter[rows:].zero_()

    def cast(self, dtype: torch.dtype, *, frozen: bool = False) -> None:
        """Cast the parameters to a dtype, except in modules whose attribute `keeps_precision` is
        true. Buffers keep their dtype. With `frozen`, only frozen parameters are cast.

        Only the data of each parameter is replaced. `nn.Module.to` is not used, because it would
        create new parameters in place of the fake tensors with which the planner traces a step.
        """
        for module in self.modules():
            if getattr(module, "keeps_precision", False):
                continue
            for parameter in module.parameters(recurse=False):
                if not (frozen and parameter.requires_grad):
                    parameter.data = parameter.data.to(dtype)

    def make_cache(self, batch_size: int, max_tokens: int, dtype: torch.dtype) -> KVCache:
        """Create an empty cache on the model's device. It stores keys and values, and the recurrent
        states of layers with linear attention. See `KVCache` for the arguments."""
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
        """Return the last layer's output [B, T, C] and a list of router logits, with one tensor [N,
        E] for each layer with experts. See `forward` for the arguments."""
        raise NotImplementedError

    def finish(self, x_BTC: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output [B, T, C] and return the head's input
        [B, T, C].

        In pipeline parallelism, this method is replaced in all stages except the last one.
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
        """Compute the logits or, if `labels` is given, the loss.

        Args:
            input_ids: token ids, int64 [B, T].
            labels: id of the token that follows each input token, int64 [B, T]. Positions with the
                label -100 are excluded from the loss.
            document_ids: id of each token's document, int [B, T]. Neighbouring tokens with the same
                id belong to the same document. Tokens attend only to tokens of their own document,
                and positions start at 0 in each document. Can't be combined with a cache.
            cache: keys and values of the tokens before `input_ids`. The keys and values of
                `input_ids` are added to the cache.
            logits_to_keep: positions for which logits are computed. An integer n selects the last n
                positions of each sequence, and 0 selects all positions. A tensor, int64 [B],
                selects one position per sequence.

        Returns:
            Without labels, the logits [B, T, V] of the next token. With labels, the cross-entropy
            summed over the valid labels, fp32 []. In training, models with experts add the
            load-balancing loss of this forward pass, multiplied by `router_aux_loss_coef` and by
            the number of valid labels.
        """
        x_BTC, router_logits = self.decode(input_ids, document_ids, cache)
        if cache is not None:
            # The length of the cache is increased only after the last layer, because all layers
            # must store the new tokens at the same positions.
            cache.advance(input_ids.shape[1])
        # The positions are selected before the norm and the head, because the logits of a whole
        # prompt can take gigabytes.
        if isinstance(logits_to_keep, Tensor):
            rows_B = torch.arange(len(x_BTC), device=x_BTC.device)
            x_BTC = x_BTC[rows_B, logits_to_keep][:, None]
        elif logits_to_keep:
            x_BTC = x_BTC[:, -logits_to_keep:]
        x_BTC = self.finish(x_BTC)
        vocab_size, softcap = self.config.vocab_size, self.config.logit_softcap
        if labels is None:
            return soft_capped(self.lm_head(x_BTC)[..., :vocab_size], softcap)
        # The head and the loss are computed in one function, so that a chunked loss never
        # materialises all logits.
        loss = self.head_loss(x_BTC, self.lm_head, vocab_size, labels, softcap)
        # In evaluation, the loss is the cross-entropy alone, so that it is comparable with the loss
        # of a dense model.
        if self.training and router_logits:
            loss = loss + self._router_loss_sum(router_logits, labels)
        return loss

    def balance(self, router_logits: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the load-balancing loss [] of a forward pass, and the number of tokens routed to
        each expert, int64 [L, E]. `router_logits` contains the logits [N, E] of each layer with a
        router."""
        return load_balancing_loss(router_logits, self.config.visited_experts)

    def _router_loss_sum(self, router_logits: list[Tensor], labels: Tensor) -> Tensor:
        assert self.router_statistics is not None
        auxiliary, visits_LE = self.balance(router_logits)
        valid = (labels != IGNORE_INDEX).sum()
        self.router_statistics.add(auxiliary.detach() * valid, visits_LE)
        # The loss is multiplied by the number of valid labels, because the caller divides the sum
        # by the number of valid labels in the global batch.
        return self.config.router_loss_coefficient * auxiliary * valid  # type: ignore[no-any-return]


def token_positions(
    input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Tensor, int]:
    """Return the positions of the new tokens. See `LanguageModel.forward` for the arguments.

    Returns:
        - position of each token in its document, int64 [T] or [B, T];
        - position of each token in the cache, int64 [T] or [B, T]; without a cache, this is its
          position in the sequence;
        - the number of keys that attention reads, S.
    """
    T = total = input_ids.shape[1]
    if cache is None:
        cache_positions = torch.arange(T, device=input_ids.device)
    else:
        cache_positions, total = cache.positions(T), cache.total(T)
    if document_ids is None:
        return cache_positions, cache_positions, total
    return document_positions(document_ids), cache_positions, total
