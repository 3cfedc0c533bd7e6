"""gpt-oss, OpenAI's open-weight models (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv
2508.10925). They differ from Llama in their attention sinks, and in their experts, which have
biases and a clamped SwiGLU.

Every second layer has a sliding window. Parameters have the same names and layouts as in Hugging
Face's `GptOssForCausalLM`, so tensors do not have to be changed for import and export. The weights
of a layer's experts are stacked in tensors with the layout [in, out], and the columns of the gate
and up projections are interleaved. OpenAI's files store the experts in MXFP4, a format that
`weights/stored.py` reads.

Shape letters are defined in `models/moe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from firstlight.models.blockwise import blockwise_attention
from firstlight.models.family import AttentionSpec, FamilySpec, GGUFSpec, RopeSpec, hf_values
from firstlight.models.llama import Llama, LlamaAttention
from firstlight.models.llama_config import DecoderConfig
from firstlight.models.llama_variants import WideRMSNorm
from firstlight.models.mixtral import RoutedBlock
from firstlight.models.moe import Experts, RoutedMLP, Router, grouped_linear
from firstlight.models.ops import AttentionOptions

_GPT_OSS = FamilySpec(
    "GptOssForCausalLM",
    GGUFSpec(
        "gpt-oss",
        rope_kinds=("default", "linear", "yarn"),
        fixed={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        layer="sinks",
        head="written",
        has_windows=True,
        needs_window=True,
    ),
    own_keys=("attention_bias", "sliding_window", "layer_types"),
    hf_defaults=hf_values(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        experts=(128, 4),
        rms_norm_eps=1e-5,
        head_dim=64,
        rope_theta=150_000.0,
        sliding_window=128,
    ),
    rope=RopeSpec(
        default={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    ),
    full_attention_every=2,
    has_mxfp4=True,
)


class GptOssConfig(DecoderConfig):
    """Configuration of a gpt-oss model."""

    families: ClassVar[Mapping[str, FamilySpec]] = {"gpt_oss": _GPT_OSS}

    model_type: Literal["gpt_oss"] = "gpt_oss"
    """"gpt_oss"."""
    attention_bias: bool = True
    """biases on all projections of attention."""
    num_experts: int = Field(8, gt=0, le=10_000)
    """number of experts per layer."""
    num_experts_per_tok: int = Field(2, gt=0)
    """number of experts per token."""
    swiglu_alpha: float = Field(1.702, gt=0)
    """factor a in the activation g sigmoid(a g) of an expert's gate projection g."""
    swiglu_limit: float = Field(7.0, gt=0)
    """upper bound of an expert's gate projection, and of the absolute value of its up
    projection."""
    router_aux_loss_coef: float = Field(0.01, ge=0)
    """weight of the load-balancing loss during training (Fedus et al. 2021, arXiv 2101.03961)."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        return AttentionSpec(super().attention_spec(layer).window, sinks=True)

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        content = super().to_hf() | {"output_router_logits": False}
        content["num_local_experts"] = content.pop("num_experts")
        return content


class GptOssExperts(Experts):
    """All experts of a layer, in stacked tensors. The weights are `gate_up_proj` of shape [E, C,
    2F] and `down_proj` of shape [E, F, C]. The columns of `gate_up_proj` are in the order gate 0,
    up 0, gate 1, up 1, and so on. Their biases have the shapes [E, 2F] and [E, C].

    The output of an expert is down((u + 1) g sigmoid(a g)), where a is `swiglu_alpha`. The gate
    projection g is clamped to at most `swiglu_limit`, and the up projection u to between
    -`swiglu_limit` and `swiglu_limit`.
    """

    def __init__(self, config: GptOssConfig) -> None:
        # `Experts.__init__` is skipped, because it creates tensors without biases and in the
        # transposed layout.
        nn.Module.__init__(self)
        E = config.num_experts
        C = config.hidden_size
        hidden = config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, C, 2 * hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(E, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(E, hidden, C))
        self.down_proj_bias = nn.Parameter(torch.empty(E, C))
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def visited(self, x_MC: Tensor, experts_M: Tensor, ends_E: Tensor) -> Tensor:
        """See `Experts.visited`."""
        # The bias of each row is looked up with a one-hot matrix product. Indexing would not be
        # deterministic on GPUs, because its gradient is summed in an arbitrary order.
        every_E = torch.arange(len(self.down_proj), device=x_MC.device)
        is_own_ME = experts_M[:, None] == every_E

        def linear(rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor) -> Tensor:
            product = grouped_linear(rows, weight_EIO.transpose(1, 2), ends_E)
            return product + is_own_ME.to(bias_EO.dtype) @ bias_EO

        gate_up_M2F = linear(x_MC, self.gate_up_proj, self.gate_up_proj_bias)
        # The gate does not need a lower bound, because g sigmoid(a g) approaches 0 as g approaches
        # minus infinity.
        gate_MF = gate_up_M2F[:, ::2].clamp(max=self.limit)
        up_MF = gate_up_M2F[:, 1::2].clamp(-self.limit, self.limit)
        hidden_MF = (up_MF + 1) * (gate_MF * torch.sigmoid(gate_MF * self.alpha))
        return linear(hidden_MF, self.down_proj, self.down_proj_bias)


class GptOssMLP(RoutedMLP):
    """The router and the experts of one layer. The router has a bias. The routing weights of a
    token are computed with a softmax over the logits of the experts chosen for the token."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.router = Router(config.hidden_size, config.num_experts)
        self.experts = GptOssExperts(config)

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RoutedMLP.route`."""
        logits_NE = self.router(x_NC)
        # The experts are chosen in fp32, as in the other routers, because rounding to bf16 would
        # change the order of experts with similar logits.
        greatest_NK, experts_NK = logits_NE.float().topk(self.num_experts_per_tok)
        return logits_NE, greatest_NK.softmax(-1), experts_NK


class GptOssAttention(LlamaAttention):
    """Attention with a sink in each head (see `AttentionOptions.sinks`)."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))
        # torch's fused kernels do not support sinks.
        self.attend = blockwise_attention

    def options(self, mask: Any) -> AttentionOptions:
        """See `LlamaAttention.options`."""
        return AttentionOptions(mask, sinks=self.sinks)


class GptOssBlock(RoutedBlock):
    """One layer: attention with sinks, and experts."""

    attention_class = GptOssAttention
    experts_class = GptOssMLP
    norm_class = WideRMSNorm


class GptOss(Llama):
    """A gpt-oss language model. See `LanguageModel` for the interface that all models share."""

    config: GptOssConfig  # type: ignore[assignment]

    block_class = GptOssBlock
