"""GPT-2 (Radford et al. 2019): a Transformer with LayerNorm, learned positions, multi-head
attention and GELU.

Parameters have the same names as in Hugging Face's `GPT2LMHeadModel`, and projections have the same
layout [in, out], so tensors do not have to be changed for import and export. Recipes use the key
names that all families share, such as `hidden_size`. In config.json, GPT-2 has its own key names,
such as `n_embd`.

Shape letters are defined in `models/ops.py`. In addition, F is the inner width of the MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from torch import Tensor, nn

from firstlight.errors import ModelError
from firstlight.models.cache import Cache
from firstlight.models.family import AttentionSpec, FamilyConfig, FamilySpec, GGUFSpec
from firstlight.models.language_model import LanguageModel, token_positions
from firstlight.models.ops import AttentionOptions, Embedding, SelfAttention, attention

#: Mapping from the Hugging Face name of an activation to its name in recipes.
_ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_new"),
    "gelu": "gelu",
    "relu": "relu",
}

#: Mapping from the name of an activation in recipes to its function.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    # OpenAI's model was trained with the tanh approximation. Exact GELU would give different
    # logits.
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}

#: Keys added after the first versions. They are omitted from the dumped section if they have their
#: default values, so that the hash of a base model still matches the hash stored in existing LoRA
#: runs.
_LATER_KEYS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")

_GGUF = GGUFSpec(
    "gpt2",
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    layer="named",
    block={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
)


class GPT2Config(FamilyConfig):
    """Configuration of a GPT-2 model. Dropout is off by default, as is usual for pretraining
    today."""

    families: ClassVar[Mapping[str, FamilySpec]] = {"gpt2": FamilySpec("GPT2LMHeadModel", _GGUF)}
    hf_names: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "embd_pdrop": "embd_pdrop",
        "attn_pdrop": "attn_pdrop",
        "resid_pdrop": "resid_pdrop",
        "tie_word_embeddings": "tie_word_embeddings",
        "initializer_range": "initializer_range",
        **{name: name for name in _LATER_KEYS},
    }
    has_rotary = False
    stores_transposed = True

    model_type: Literal["gpt2"] = "gpt2"
    """"gpt2"."""
    vocab_size: int = Field(0, ge=0)
    """vocabulary size in tokens; 0 uses the tokenizer's."""
    hidden_size: int = Field(768, gt=0)
    """width of the residual stream."""
    intermediate_size: int = Field(0, ge=0)
    """inner width of the MLP; 0 uses 4 * hidden_size."""
    num_hidden_layers: int = Field(12, gt=0, le=10_000)
    """number of layers."""
    num_attention_heads: int = Field(12, gt=0)
    """number of attention heads, each with hidden_size / num_attention_heads dimensions."""
    max_position_embeddings: int = Field(1024, gt=0)
    """maximum sequence length in tokens."""
    activation_function: Literal["gelu_new", "gelu", "relu"] = "gelu_new"
    """"gelu_new" (tanh approximation, as in GPT-2), "gelu" (exact, as in nanoGPT) or "relu"."""
    qkv_bias: bool = True
    """biases on the query, key and value projections: true in OpenAI's models, false in
    LLMs-from-scratch."""
    scale_attn_weights: bool = True
    """divide attention scores by the square root of the head dimension."""
    scale_attn_by_inverse_layer_idx: bool = False
    """also divide attention scores by the layer number, counted from 1 (as in Stanford's
    Mistral)."""
    layer_norm_epsilon: float = Field(1e-5, gt=0)
    """term added to the variance in LayerNorm."""
    embd_pdrop: float = Field(0.0, ge=0, lt=1)
    """dropout after the embeddings."""
    attn_pdrop: float = Field(0.0, ge=0, lt=1)
    """dropout of attention weights."""
    resid_pdrop: float = Field(0.0, ge=0, lt=1)
    """dropout before each addition to the residual stream."""
    tie_word_embeddings: bool = True
    """use the token embedding as the weight of the head."""
    initializer_range: float = Field(0.02, gt=0, le=1)
    """standard deviation of the initial weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        # A hidden_size of the wrong type is rejected later, when its field is validated.
        if isinstance(values, dict) and isinstance(values.get("hidden_size", 768), int):
            inner = values.get("intermediate_size") or 4 * values.get("hidden_size", 768)
            return {**values, "intermediate_size": inner}
        return values

    @model_validator(mode="after")
    def _check(self) -> GPT2Config:
        self.require_multiple("hidden_size", of="num_attention_heads")
        return self

    @model_serializer(mode="wrap")
    def _leave_later_keys_out(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        usual = {name: type(self).model_fields[name].default for name in _LATER_KEYS}
        return {
            name: value
            for name, value in dump(self).items()
            if name not in usual or value != usual[name]
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GPT2Config:
        """Create the config from a Hugging Face `config.json`.

        Raises:
            ModelError: the config has a setting that would change the outputs and is not
                implemented.
        """
        activation = config.get("activation_function", "gelu_new")
        if activation not in _ACTIVATIONS:
            raise ModelError(
                f"activation_function '{activation}' is not supported: "
                "only 'gelu_new', 'gelu' and 'relu' are"
            )
        known = {
            ours: config[theirs]
            for ours, theirs in cls.hf_names.items()
            if config.get(theirs) is not None
        }
        # config.json can omit these keys. In that case, the defaults of transformers' config class
        # apply.
        defaults = {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "vocab_size": 50257}
        known["activation_function"] = _ACTIVATIONS[activation]
        # OpenAI's config.json does not contain this key, and the model has biases.
        known["qkv_bias"] = config.get("qkv_bias", True)
        return cls(**{**defaults, **known})

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model.

        `qkv_bias` is written only if it is false. transformers ignores this key and uses zeros for
        the missing biases.
        """
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{theirs: getattr(self, ours) for ours, theirs in self.hf_names.items()},
            "n_ctx": self.max_position_embeddings,
            "activation_function": self.activation_function,
            **({} if self.qkv_bias else {"qkv_bias": False}),
        }

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        scale = None
        if not self.scale_attn_weights or self.scale_attn_by_inverse_layer_idx:
            scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
            scale /= layer + 1 if self.scale_attn_by_inverse_layer_idx else 1
        return AttentionSpec(dropout=self.attn_pdrop, scale=scale)

    @property
    def head_dim(self) -> int:
        """Dimension of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of key and value heads, equal to the number of query heads."""
        return self.num_attention_heads


class Conv1D(nn.Module):
    """A linear layer whose weight is stored as [in, out], as in OpenAI's release. Inputs have shape
    [..., in], and outputs have shape [..., out].

    Attributes:
        stores_transposed: always True. Code that handles both layouts of linear layers reads this
            attribute.
    """

    stores_transposed = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        # `addmm` computes the product and adds the bias in one operation, but accepts only
        # matrices.
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class GPT2Attention(SelfAttention):
    """Multi-head causal self-attention (Vaswani et al. 2017)."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        C = config.hidden_size
        self.layer, self.heads = layer, config.num_attention_heads
        spec = config.attention_spec(layer)
        self.dropout, self.scale = spec.dropout, spec.scale
        self.c_attn = Conv1D(C, 3 * C, bias=config.qkv_bias)
        self.c_proj = Conv1D(C, C)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        self.attend = attention

    def forward(self, x_BTC: Tensor, mask: Any, cache: Cache | None) -> Tensor:
        """Compute attention. The result has the shape [B, T, C].

        Args:
            x_BTC: normalised input of the layer, [B, T, C].
            mask: result of the model's `make_mask`.
            cache: keys and values of earlier tokens.
        """
        B, T, C = x_BTC.shape
        # A single projection computes queries, keys and values, in this order, as in OpenAI's
        # weights.
        qkv_BT3HD = self.c_attn(x_BTC).view(B, T, 3, self.heads, C // self.heads)
        q_BHTD, k_BHSD, v_BHSD = (part.transpose(1, 2) for part in qkv_BT3HD.unbind(2))
        if cache is not None:
            k_BHSD, v_BHSD = cache.update(self.layer, k_BHSD, v_BHSD)
        # `attend` is a function and not a module, so `eval()` does not turn off its dropout.
        options = AttentionOptions(mask, self.dropout if self.training else 0.0, self.scale)
        y_BHTD = self.attend(q_BHTD, k_BHSD, v_BHSD, options)
        y_BTC: Tensor = self.c_proj(y_BHTD.transpose(1, 2).reshape(B, T, C))
        return self.resid_dropout(y_BTC)  # type: ignore[no-any-return]


class GPT2MLP(nn.Module):
    """The MLP of a layer. Inputs and outputs have shape [B, T, C]. The activation is ReLU, exact
    GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) or its tanh approximation."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size)
        self.activation_function = config.activation_function
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden_BTF = ACTIVATIONS[self.activation_function](self.c_fc(x_BTC))
        return self.dropout(self.c_proj(hidden_BTF))  # type: ignore[no-any-return]


class GPT2Block(nn.Module):
    """One layer. Inputs and outputs have shape [B, T, C]. The inputs of attention and of the MLP
    are normalised, and their outputs are added to the residual stream."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, x_BTC: Tensor, mask: Any, cache: Cache | None) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), mask, cache)
        return x_BTC + self.mlp(self.ln_2(x_BTC))  # type: ignore[no-any-return]


class GPT2Decoder(nn.Module):
    """The embeddings, the layers and the final norm. Hugging Face's model class calls this module
    `transformer`."""

    def __init__(self, config: GPT2Config, padded_vocab_size: int) -> None:
        super().__init__()
        self.wte = Embedding(padded_vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(GPT2Block(config, i) for i in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)


class GPT2(LanguageModel):
    """A GPT-2 language model (Radford et al. 2019). See `LanguageModel` for the interface that all
    models share."""

    config: GPT2Config

    embedding_name = "transformer.wte"
    layers_name = "transformer.h"
    final_modules = ("transformer.ln_f", "lm_head")
    residual_projections = ("c_proj.",)

    def __init__(self, config: GPT2Config, padded_vocab_size: int | None = None) -> None:
        super().__init__(config)
        rows = padded_vocab_size or config.vocab_size
        self.transformer = GPT2Decoder(config, rows)
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.finish_loading()

    def decode(
        self, input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's output [B, T, C] and an empty list of router logits, because
        GPT-2 has no routers. See `LanguageModel.decode`."""
        positions, cache_positions, total = token_positions(input_ids, document_ids, cache)
        mask = self.make_mask(cache_positions, total, None, document_ids)
        x_BTC = self.transformer.wte(input_ids) + self.transformer.wpe(positions)
        x_BTC = self.transformer.drop(x_BTC)
        for layer in self.transformer.h:
            x_BTC = layer(x_BTC, mask, cache)
        return x_BTC, []
