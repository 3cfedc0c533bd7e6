"""Mixtral (Jiang et al. 2024, arXiv 2401.04088) and Qwen3-MoE (Qwen team 2025, arXiv 2505.09388).
They differ from Llama in that experts replace the MLP. The models of other families with experts
derive from the classes in this module.

Shape letters are defined in `models/moe.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from firstlight.models.cache import Cache
from firstlight.models.family import (
    GGUF_EXPERTS,
    QWEN_EXPERTS,
    ExpertNames,
    FamilySpec,
    GGUFSpec,
    hf_values,
)
from firstlight.models.llama import Llama, LlamaBlock
from firstlight.models.llama_config import DecoderConfig
from firstlight.models.llama_families import ALL_ROPE, NO_BIAS, SIZES_OF_MISTRAL, YARN_ROPE
from firstlight.models.moe import Experts, RoutedMLP, Router
from firstlight.models.rope import Ropes

_ROUTED: dict[str, FamilySpec] = {
    "mixtral": FamilySpec(
        "MixtralForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=ALL_ROPE),
        own_keys=("sliding_window",),
        hf_defaults=hf_values(
            **SIZES_OF_MISTRAL,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            experts=(8, 2),
        ),
        experts=ExpertNames(
            "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}, "intermediate_size"
        ),
    ),
    "qwen3_moe": FamilySpec(
        "Qwen3MoeForCausalLM",
        GGUFSpec(
            "qwen3moe",
            rope_kinds=YARN_ROPE,
            fixed={**NO_BIAS, **GGUF_EXPERTS},
        ),
        own_keys=("attention_bias", "sliding_window"),
        hf_defaults=hf_values(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            experts=(128, 8),
            moe_intermediate_size=768,
            norm_topk_prob=False,
        ),
        qk_norm="head",
        has_window_switch=True,
        experts=QWEN_EXPERTS,
    ),
}


class MoEConfig(DecoderConfig):
    """Configuration of a mixture-of-experts model, whose router chooses a few experts per token."""

    families: ClassVar[Mapping[str, FamilySpec]] = _ROUTED

    model_type: Literal["mixtral", "qwen3_moe"] = "mixtral"
    """"mixtral" or "qwen3_moe" (which normalises the queries and keys of each head)."""
    num_experts: int = Field(8, gt=0, le=10_000)
    """number of experts per layer."""
    num_experts_per_tok: int = Field(2, gt=0)
    """number of experts per token."""
    moe_intermediate_size: int = Field(0, ge=0)
    """inner width of an expert; 0 uses intermediate_size."""
    norm_topk_prob: bool = True
    """normalise each token's routing weights to sum to 1 (always true in mixtral)."""
    router_aux_loss_coef: float = Field(0.01, ge=0)
    """weight of the load-balancing loss during training (Fedus et al. 2021, arXiv 2101.03961)."""
    decoder_sparse_step: int = Field(1, gt=0)
    """interval n between layers with experts. The layers n, 2n, 3n and so on, counted from 1, have
    experts (not in mixtral)."""
    mlp_only_layers: list[int] = Field([])
    """indices of layers without experts, counted from 0 (not in mixtral)."""

    @classmethod
    def _filled_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._filled_in(values)
        size = values.get("moe_intermediate_size") or values.get("intermediate_size", 0)
        return values | {"moe_intermediate_size": size}

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.model_type == "mixtral" and (
            self.moe_intermediate_size != self.intermediate_size
            or not self.norm_topk_prob
            or self.decoder_sparse_step != 1
            or self.mlp_only_layers
        ):
            raise ValueError(
                "mixtral models have one intermediate_size, normalised routing weights and "
                "experts in every layer: use model_type qwen3_moe for other settings"
            )
        if not any(self.has_experts(layer) for layer in range(self.num_hidden_layers)):
            raise ValueError(
                f"decoder_sparse_step {self.decoder_sparse_step} and mlp_only_layers "
                f"{self.mlp_only_layers} leave no layer with experts: use a dense model_type"
            )
        return self

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has experts instead of an MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        content = super().to_hf() | {"output_router_logits": False}
        # transformers 5 writes the number of experts under Mixtral's key for both families.
        # transformers 4 reads a different key for each family.
        content["num_local_experts"] = self.num_experts
        if self.model_type == "mixtral":
            for name in (
                "num_experts",
                "moe_intermediate_size",
                "norm_topk_prob",
                "decoder_sparse_step",
                "mlp_only_layers",
            ):
                del content[name]
        return content


class SparseMLP(RoutedMLP):
    """The router and the experts of one layer. For each token, the experts with the highest
    probabilities are chosen; the probabilities are a softmax over all experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts_per_tok, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts, bias=False)
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.experts = Experts(*sizes)

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RoutedMLP.route`."""
        logits_NE = self.gate(x_NC)
        # The probabilities are computed in fp32, as in transformers, because rounding to bf16 would
        # change the order of experts with similar logits.
        weights_NK, experts_NK = logits_NE.float().softmax(-1).topk(self.num_experts_per_tok)
        # Without this normalisation, the weights sum to less than 1, because they do not include
        # the probabilities of the experts that were not chosen.
        if self.normalise:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return logits_NE, weights_NK, experts_NK


class RoutedBlock(LlamaBlock):
    """One layer of a model in which some or all layers have experts instead of the MLP.

    Attributes:
        experts_class: class of the module with the router and the experts.
    """

    experts_class: ClassVar[Callable[..., RoutedMLP]] = SparseMLP

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See `LlamaBlock.make_mlp`."""
        return (self.experts_class if config.has_experts(layer) else self.mlp_class)(config)

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `LlamaBlock.forward`."""
        mask = self.own_mask(masks)
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), ropes, mask, cache)
        return self.add_mlp_output(x_BTC)

    def add_mlp_output(self, x_BTC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add the output of the experts or of the MLP to the residual stream [B, T, C]. Return the
        residual stream, and the router's logits [N, E] or, for a layer with an MLP, None."""
        y_BTC = self.post_attention_layernorm(x_BTC)
        if not isinstance(self.mlp, RoutedMLP):
            return x_BTC + self.mlp(y_BTC), None
        y_BTC, logits_NE = self.mlp(y_BTC)
        return x_BTC + y_BTC, logits_NE


class Mixtral(Llama):
    """A mixture-of-experts language model. See `LanguageModel` for the interface that all models
    share."""

    config: MoEConfig  # type: ignore[assignment]

    block_class = RoutedBlock
