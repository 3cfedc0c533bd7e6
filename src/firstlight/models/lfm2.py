"""LFM2 (Liquid AI 2025, arXiv 2511.23404). Most layers have a short gated convolution in place of
attention. The other layers have grouped-query attention with norms of queries and keys. Parameters
have the same names as in Hugging Face's `Lfm2ForCausalLM`.

The state of a layer with a convolution consists of its last few inputs, so it does not grow with
the text. Shape letters are defined in `models/ops.py`. In addition, W is the width of the
convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from firstlight.errors import ModelError
from firstlight.models.cache import Cache
from firstlight.models.family import AttentionSpec, FamilySpec, GGUFSpec, hf_values
from firstlight.models.llama import Llama, LlamaAttention, RMSNorm
from firstlight.models.llama_config import DecoderConfig, values_from_json
from firstlight.models.ops import Embedding
from firstlight.models.qwen3_next import CausalConv, Qwen3Next
from firstlight.models.rope import Ropes

_FULL, _CONV = "full_attention", "conv"

#: Keys of published config.json files that repeat other keys or only concern initialisation.
_WITHOUT_EFFECT = (
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale "
    "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta "
    "full_attn_idxs tie_embedding block_ff_dim block_multiple_of block_ffn_dim_multiplier "
    "block_auto_adjust_ff_dim model_max_length"
).split()

_LFM2 = FamilySpec(
    "Lfm2ForCausalLM",
    GGUFSpec(
        "lfm2",
        rope_kinds=("default", "linear", "yarn"),
        counts={"conv_L_cache": "shortconv.l_cache"},
        layer="conv",
    ),
    own_keys=("layer_types",),
    json_names={"rms_norm_eps": "norm_eps"},
    hf_defaults=hf_values(
        vocab_size=65536,
        hidden_size=2560,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=128_000,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    derived_keys=("head_dim",),
    divides_width=True,
    requires_known_keys=True,
    other_keys={
        "conv_bias": (False,),
        "block_use_swiglu": (True,),
        "use_pos_enc": (True,),
        **dict.fromkeys(_WITHOUT_EFFECT, ()),
    },
)


class Lfm2Config(DecoderConfig):
    """Configuration of an LFM2 model without experts."""

    families: ClassVar[Mapping[str, FamilySpec]] = {"lfm2": _LFM2}

    model_type: Literal["lfm2"] = "lfm2"
    """"lfm2"."""
    layer_types: list[Literal["full_attention", "conv"]] | None = None  # type: ignore[assignment]
    """list with "full_attention" or "conv" (short convolution) for each layer. With null, every
    third layer has full attention. In a model with fewer than three layers, the last layer has full
    attention."""
    conv_L_cache: int = Field(3, gt=1, le=1024)  # noqa: N815 (the name in config.json)
    """width of the convolutions in tokens."""

    @classmethod
    def _filled_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._filled_in(values)
        layers = values.get("num_hidden_layers", cls.model_fields["num_hidden_layers"].default)
        kinds = values.get("layer_types")
        if isinstance(layers, int) and kinds and kinds == _usual_types(layers):
            # The default is removed, so that equal models have equal configs.
            del values["layer_types"]
        return values

    @model_validator(mode="after")
    def _check_convolutions(self) -> Self:
        if all(self.is_conv(layer) for layer in range(self.num_hidden_layers)):
            raise ValueError("no layer has full_attention, which caches require: add one")
        return self

    def is_conv(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has a convolution in place of attention."""
        kinds = self.layer_types or _usual_types(self.num_hidden_layers)
        return kinds[layer] == _CONV

    @property
    def state_shapes(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Shapes of the recurrent states, keyed by layer index (see `FamilyConfig.state_shapes`).
        They are the last inputs of each convolution, [W - 1, C]."""
        shapes = ((self.conv_L_cache - 1, self.hidden_size),)
        return {i: shapes for i in range(self.num_hidden_layers) if self.is_conv(i)}

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        if not self.is_conv(layer):
            return super().attention_spec(layer)
        return AttentionSpec(rope=None, state_size=(self.conv_L_cache - 1) * self.hidden_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        config = {**config, "intermediate_size": _inner_width(config)}
        if "tie_embedding" in config:
            config["tie_word_embeddings"] = config["tie_embedding"]
        values = values_from_json(_LFM2, tuple(cls.model_fields), config)
        layers, full = range(values["num_hidden_layers"]), config.get("full_attn_idxs")
        kinds = [_FULL if full is None or i in full else _CONV for i in layers]
        return cls(**{**values, "layer_types": config.get("layer_types") or kinds})

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        kinds = [_CONV if self.is_conv(i) else _FULL for i in range(self.num_hidden_layers)]
        # Other programs require the keys from which older configs compute the inner width.
        width = {
            "block_dim": self.hidden_size,
            "block_ff_dim": self.intermediate_size,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        }
        return super().to_hf() | {"layer_types": kinds, "conv_bias": False, **width}


def _usual_types(layers: int) -> list[str]:
    """Return the kind of each layer if `layer_types` is null."""
    return [_CONV if (i + 1) % min(layers, 3) else _FULL for i in range(layers)]


def _inner_width(config: Mapping[str, Any]) -> int:
    """Return the inner width of the MLPs for a config.json, which can specify it indirectly.

    Raises:
        ModelError: a number has the wrong type.
    """
    usual = _LFM2.hf_defaults["intermediate_size"]
    width = config.get("block_ff_dim", config.get("intermediate_size", usual))
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    multiple = config.get("block_multiple_of", 256)
    try:
        if config.get("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            if factor is not None:
                width = multiple * -(-int(factor * width) // multiple)
        return int(width)
    except (TypeError, ZeroDivisionError) as error:
        raise ModelError(f"block_ff_dim can't be computed: {error}: correct the file") from error


class ShortConv(nn.Module):
    """A causal convolution of a few tokens between two gates, which are computed from the layer's
    input."""

    def __init__(self, config: Lfm2Config, layer: int) -> None:
        super().__init__()
        C = config.hidden_size
        self.layer = layer
        self.conv = CausalConv(C, config.conv_L_cache)
        self.in_proj = nn.Linear(C, 3 * C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)

    def forward(self, x_BTC: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor:
        """Return the layer's output, [B, T, C]. See `GatedDeltaNet.forward` for the arguments."""
        before_BTC, after_BTC, inner_BTC = self.in_proj(x_BTC).chunk(3, -1)
        earlier = None if cache is None else cache.state(self.layer)[0]
        y_BTC, earlier = self.conv.convolve(before_BTC * inner_BTC, earlier, positions)
        if cache is not None:
            cache.set_state(self.layer, (earlier,))
        return self.out_proj(after_BTC * y_BTC)  # type: ignore[no-any-return]


class Lfm2Attention(LlamaAttention):
    """LFM2's attention, whose norms and output projection have different names."""

    def add_projections(self, config: DecoderConfig) -> None:
        """See `LlamaAttention.add_projections`."""
        C = config.hidden_size
        q_size, k_size, v_size = self.sizes
        self.q_proj = nn.Linear(C, q_size, bias=False)
        self.k_proj = nn.Linear(C, k_size, bias=False)
        self.v_proj = nn.Linear(C, v_size, bias=False)
        self.out_proj = nn.Linear(q_size, C, bias=False)
        self.q_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def normalize(self, q_BTHD: Tensor, k_BTKD: Tensor) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.normalize`."""
        return self.q_layernorm(q_BTHD), self.k_layernorm(k_BTKD)

    @property
    def o_proj(self) -> nn.Module:  # type: ignore[override]
        """The output projection of attention."""
        return self.out_proj


class Lfm2MLP(nn.Module):
    """SwiGLU with the names of LFM2's matrices. Inputs and outputs have shape [B, T, C]."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        C, hidden = config.hidden_size, config.intermediate_size
        self.w1 = nn.Linear(C, hidden, bias=False)
        self.w3 = nn.Linear(C, hidden, bias=False)
        self.w2 = nn.Linear(hidden, C, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))  # type: ignore[no-any-return]


class Lfm2Block(nn.Module):
    """One layer: a convolution or attention, followed by an MLP."""

    def __init__(self, config: Lfm2Config, layer: int) -> None:
        super().__init__()
        self.is_conv = config.is_conv(layer)
        if self.is_conv:
            self.conv = ShortConv(config, layer)
        else:
            self.self_attn = Lfm2Attention(config, layer)
        self.feed_forward = Lfm2MLP(config)
        self.operator_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, None]:
        """Compute one layer. See `Qwen3NextBlock.forward` for the arguments and the result."""
        y_BTC = self.operator_norm(x_BTC)
        if self.is_conv:
            x_BTC = x_BTC + self.conv(y_BTC, masks[1], cache)
        else:
            x_BTC = x_BTC + self.self_attn(y_BTC, ropes, masks[0], cache)
        return x_BTC + self.feed_forward(self.ffn_norm(x_BTC)), None


class Lfm2Decoder(nn.Module):
    """The embedding, the layers and the final norm. Hugging Face's model class calls this module
    `model`."""

    def __init__(self, config: Lfm2Config, padded_vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Lfm2Block(config, i) for i in range(config.num_hidden_layers))
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Lfm2(Llama):
    """An LFM2 language model. See `LanguageModel` for the interface that all models share."""

    config: Lfm2Config  # type: ignore[assignment]

    final_modules = ("model.embedding_norm", "lm_head")
    residual_projections = ("out_proj.", ".w2.")
    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {}

    make_masks = Qwen3Next.make_masks

    def add_decoder(self, rows: int) -> None:
        """See `Llama.add_decoder`."""
        self.model = Lfm2Decoder(self.config, rows)  # type: ignore[assignment]
