"""The first version of nanochat's model (karpathy/nanochat until January 2026). It differs from
Llama in:

- norms without weights, and a norm after the embedding;
- queries and keys that are normalised after the rotation, which has the opposite direction;
- an MLP with squared ReLU and no gate;
- a soft cap of the logits.

Parameter names are those of Hugging Face's `NanoChatForCausalLM`. Shape letters as in `llama.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from firstlight.models.family import FamilySpec, hf_values
from firstlight.models.llama import Llama
from firstlight.models.llama_config import DecoderConfig, LlamaConfig
from firstlight.models.llama_layers import ACTIVATIONS, LlamaAttention, LlamaBlock, rms_norm
from firstlight.models.rope import Ropes, apply_rope

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
    norm_kind="bare",
    activation="relu2",
    gated=False,
)


class NanoChatConfig(LlamaConfig):
    """Configuration of a model of nanochat's first version."""

    families: ClassVar[Mapping[str, FamilySpec]] = {"nanochat": _NANOCHAT}

    model_type: Literal["nanochat"] = "nanochat"
    """"nanochat"."""
    final_logit_softcapping: float | None = Field(15.0, gt=0)
    """bound c of the logits z, which become c tanh(z / c); null is no bound."""

    @classmethod
    def usual_width(cls, hidden_size: int) -> int:
        """Default inner width of the MLP."""
        return 4 * hidden_size


def _turned_and_normalised(x_BHTD: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> Tensor:
    """Rotate [B, H, T, D] by `apply_rope`, then normalise each head by an RMSNorm without a
    weight."""
    turned_BHTD = apply_rope(x_BHTD, cos, sin)
    return rms_norm(turned_BHTD.to(x_BHTD.dtype), eps)


class NanoChatAttention(LlamaAttention):
    """Grouped-query attention that normalises queries and keys after their rotation."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.turn = functools.partial(_turned_and_normalised, eps=config.rms_norm_eps)


class NanoChatMLP(nn.Module):
    """MLP with squared ReLU (So et al. 2021, Primer, arXiv 2109.08668), [B, T, C] to [B, T, C]."""

    def __init__(self, config: NanoChatConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACTIVATIONS[config.family.activation]

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x_BTC)))  # type: ignore[no-any-return]


class NanoChatBlock(LlamaBlock):
    """One layer, with nanochat's attention and MLP."""

    attention_class, mlp_class = NanoChatAttention, NanoChatMLP


class NanoChat(Llama):
    """A language model of nanochat's first version; see `LanguageModel`."""

    config: NanoChatConfig

    block_class = NanoChatBlock
    residual_projections = ("o_proj.", "fc2.")
    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {
        **{name: kind for name, kind in Llama.tensor_parallel_plan.items() if ".mlp" not in name},
        "model.layers.*.mlp.fc1": "columns",
        "model.layers.*.mlp.fc2": "rows",
    }

    def embed(self, input_ids: Tensor) -> Tensor:
        """The first layer's input [B, T, C]: see `Llama.embed`."""
        # transformers applies the final norm's module here, which has no weights. The first stage
        # of a pipeline does not have that module.
        return rms_norm(super().embed(input_ids), self.config.rms_norm_eps)

    def _ropes(self, positions: Tensor, length: int | Tensor) -> Ropes:
        """Rotary tables for a rotation in the opposite direction: see `Llama._ropes`."""
        return tuple((cos, -sin) for cos, sin in super()._ropes(positions, length))
