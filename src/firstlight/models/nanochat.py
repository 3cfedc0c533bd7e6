"""The first version of nanochat's model (karpathy/nanochat until January 2026). It differs from
Llama in:

- norms without weights, and a norm after the embedding;
- queries and keys rotated in the opposite direction and then normalised;
- an MLP with squared ReLU and without a gate;
- a soft cap on the logits.

Parameters have the same names as in Hugging Face's `NanoChatForCausalLM`. Shape letters are defined
in `llama.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from firstlight.models.family import FamilySpec, hf_values
from firstlight.models.llama import Llama, LlamaAttention, LlamaBlock, RMSNorm, normalized
from firstlight.models.llama_config import DecoderConfig, LlamaConfig
from firstlight.models.rope import Ropes

_NANOCHAT = FamilySpec(
    "NanoChatForCausalLM",
    own_keys=("attention_bias", "final_logit_softcapping"),
    hf_defaults=hf_values(
        vocab_size=50304,
        hidden_size=768,
        intermediate_size=8192,
        num_hidden_layers=12,
        num_attention_heads=6,
        max_position_embeddings=2048,
    ),
    activation="relu2",
    gated=False,
)


class NanoChatConfig(LlamaConfig):
    """Configuration of a model from the first version of nanochat."""

    families: ClassVar[Mapping[str, FamilySpec]] = {"nanochat": _NANOCHAT}

    model_type: Literal["nanochat"] = "nanochat"
    """"nanochat"."""
    final_logit_softcapping: float | None = Field(15.0, gt=0)
    """soft cap c of the logits z, which become c tanh(z / c); null disables the cap."""

    @classmethod
    def usual_width(cls, hidden_size: int) -> int:
        """Return the default inner width of the MLP."""
        return 4 * hidden_size


class BareRMSNorm(RMSNorm):
    """RMSNorm without a weight."""

    def __init__(self, size: int, eps: float) -> None:
        # `RMSNorm.__init__` is skipped, because it creates a weight.
        nn.Module.__init__(self)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, self.eps).to(x.dtype)


class NanoChatAttention(LlamaAttention):
    """Grouped-query attention that rotates queries and keys in the opposite direction, and then
    normalises them."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.rotated_norm = BareRMSNorm(config.head_dim, config.rms_norm_eps)

    def rotate(self, q_BHTD: Tensor, k_BKTD: Tensor, ropes: Ropes) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.rotate`."""
        opposite = tuple((cos, -sin) for cos, sin in ropes)
        q_BHTD, k_BKTD = super().rotate(q_BHTD, k_BKTD, opposite)
        return self.rotated_norm(q_BHTD), self.rotated_norm(k_BKTD)


class NanoChatMLP(nn.Module):
    """An MLP with squared ReLU (So et al. 2021, Primer, arXiv 2109.08668). Inputs and outputs have
    shape [B, T, C]."""

    def __init__(self, config: NanoChatConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x_BTC)).square())  # type: ignore[no-any-return]


class NanoChatBlock(LlamaBlock):
    """One layer with nanochat's attention and MLP."""

    attention_class = NanoChatAttention
    mlp_class = NanoChatMLP
    norm_class = BareRMSNorm


class NanoChat(Llama):
    """A language model from the first version of nanochat. See `LanguageModel` for the interface
    that all models share."""

    config: NanoChatConfig

    block_class = NanoChatBlock
    residual_projections = ("o_proj.", "fc2.")
    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {
        **{name: kind for name, kind in Llama.tensor_parallel_plan.items() if ".mlp" not in name},
        "model.layers.*.mlp.fc1": "columns",
        "model.layers.*.mlp.fc2": "rows",
    }

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first layer's input [B, T, C] for token ids. See `Llama.embed` for the
        arguments."""
        # transformers applies the final norm here. The norm has no weights, so a function can be
        # called instead of the module. The first stage of a pipeline does not have the module.
        x_BTC = super().embed(input_ids)
        return normalized(x_BTC, self.config.rms_norm_eps).to(x_BTC.dtype)
