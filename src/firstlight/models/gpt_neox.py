"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and Pythia. They differ from Llama in:

- LayerNorm in place of RMSNorm, and biases on all projections of the layers;
- one matrix for queries, keys and values, whose rows are interleaved by head;
- rotary positions that apply to only a part of each head;
- an MLP with GELU and no gate;
- attention and MLP in parallel, each with its own norm.

Parameters have the same names as in Hugging Face's `GPTNeoXForCausalLM`. Shape letters are defined
in `llama.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.cache import Cache
from firstlight.models.family import FamilySpec, GGUFSpec, RopeSpec, hf_values
from firstlight.models.llama import Llama, LlamaAttention
from firstlight.models.llama_config import DecoderConfig
from firstlight.models.ops import Embedding
from firstlight.models.rope import Ropes

_NEOX = FamilySpec(
    "GPTNeoXForCausalLM",
    GGUFSpec(
        "gptneox",
        fixed={"attention_bias": (True,)},
        layer="named",
        block={
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        head="written",
    ),
    own_keys=("attention_bias", "partial_rotary_factor", "use_parallel_residual"),
    json_names={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    hf_defaults=hf_values(
        vocab_size=50432,
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=44,
        num_attention_heads=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    ),
    norm_kind="layer",
    activation="gelu",
    gated=False,
    rope=RopeSpec(partial_factor=0.25),
    divides_width=True,
    derived_keys=("head_dim", "num_key_value_heads"),
)


class GPTNeoXConfig(DecoderConfig):
    """Configuration of a GPT-NeoX model."""

    families: ClassVar[Mapping[str, FamilySpec]] = {"gpt_neox": _NEOX}
    tensor_parallel_sizes = ("num_attention_heads", "intermediate_size")
    has_pipeline = True

    model_type: Literal["gpt_neox"] = "gpt_neox"
    """"gpt_neox"."""
    hidden_act: Literal["gelu", "gelu_new", "gelu_fast"] = "gelu"
    """"gelu" is exact (Pythia); "gelu_fast" (GPT-NeoX-20B) and "gelu_new" are the tanh
    approximation."""
    attention_bias: bool = True
    """biases on all projections of attention; the MLP's projections always have biases."""
    use_parallel_residual: bool = True
    """compute attention and the MLP in parallel, from the same residual stream; false computes the
    MLP after attention."""

    @classmethod
    def usual_width(cls, hidden_size: int) -> int:
        """Return the default inner width of the MLP."""
        return 4 * hidden_size

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        return super().to_hf() | {"hidden_act": self.hidden_act}


class GPTNeoXAttention(LlamaAttention):
    """Multi-head attention with a single projection matrix for queries, keys and values. The rows
    of the matrix are ordered by head. The query, key and value rows of the first head come first,
    followed by the query, key and value rows of the second head, and so on."""

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the projections. Their names match the family's checkpoint files."""
        C, bias = config.hidden_size, config.attention_bias
        self.query_key_value = nn.Linear(C, sum(self.sizes), bias=bias)
        self.dense = nn.Linear(C, C, bias=bias)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [B, T, H, D], for the layer's input [B, T, C]."""
        qkv_BTH3D = self.query_key_value(x_BTC).unflatten(-1, (-1, 3, self.head_dim))
        q_BTHD, k_BTHD, v_BTHD = qkv_BTH3D.unbind(-2)
        return q_BTHD, k_BTHD, v_BTHD

    @property
    def o_proj(self) -> nn.Module:  # type: ignore[override]
        """The output projection of attention."""
        return self.dense


class GPTNeoXMLP(nn.Module):
    """An MLP with GELU. Inputs and outputs have shape [B, T, C]."""

    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)
        self.approximate = "none" if config.hidden_act == "gelu" else "tanh"

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden_BTF = F.gelu(self.dense_h_to_4h(x_BTC), approximate=self.approximate)
        return self.dense_4h_to_h(hidden_BTF)  # type: ignore[no-any-return]


class GPTNeoXBlock(nn.Module):
    """One layer. With `use_parallel_residual`, attention and the MLP read the same residual stream.
    Otherwise, the MLP reads the residual stream after the output of attention has been added."""

    def __init__(self, config: GPTNeoXConfig, layer: int) -> None:
        super().__init__()
        self.is_parallel = config.use_parallel_residual
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = GPTNeoXAttention(config, layer)
        self.mlp = GPTNeoXMLP(config)

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, None]:
        """Compute one layer. See `LlamaBlock.forward` for the arguments and the result."""
        y_BTC = self.attention(self.input_layernorm(x_BTC), ropes, masks[0], cache)
        if self.is_parallel:
            # The terms are added in the same order as in transformers, because sums in bf16 depend
            # on the order.
            return self.mlp(self.post_attention_layernorm(x_BTC)) + y_BTC + x_BTC, None
        x_BTC = y_BTC + x_BTC
        return self.mlp(self.post_attention_layernorm(x_BTC)) + x_BTC, None


class GPTNeoXDecoder(nn.Module):
    """The embedding, the layers and the final norm. Hugging Face's model class calls this module
    `gpt_neox`."""

    def __init__(self, config: GPTNeoXConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.embed_in = Embedding(padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            GPTNeoXBlock(config, i) for i in range(config.num_hidden_layers)
        )
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)


class GPTNeoX(Llama):
    """A GPT-NeoX language model. See `LanguageModel` for the interface that all models share."""

    config: GPTNeoXConfig  # type: ignore[assignment]

    embedding_name = "gpt_neox.embed_in"
    layers_name = "gpt_neox.layers"
    final_modules = ("gpt_neox.final_layer_norm", "lm_head")
    head_file_name = "embed_out.weight"
    residual_projections = ("attention.dense.", "dense_4h_to_h")
    # The rows of a head's query, key and value are adjacent, so a shard of the matrix contains
    # whole heads.
    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {
        "gpt_neox.embed_in": "table",
        "gpt_neox.layers.*.attention.query_key_value": "columns",
        "gpt_neox.layers.*.attention.dense": "rows",
        "gpt_neox.layers.*.mlp.dense_h_to_4h": "columns",
        "gpt_neox.layers.*.mlp.dense_4h_to_h": "rows",
        "lm_head": "head",
    }

    def add_decoder(self, rows: int) -> None:
        """Create the embedding, the layers and the final norm. Their names match the family's
        checkpoint files. `rows` is the number of rows of the embedding."""
        self.gpt_neox = GPTNeoXDecoder(self.config, rows)
