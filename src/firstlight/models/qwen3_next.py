"""Qwen3-Next (Qwen team 2025) and the text models of Qwen3.5 (Qwen team 2026). Three out of every
four layers use linear attention with a gated delta rule.

The state of a layer with linear attention is one matrix per head. For each token, the state is
multiplied by a decay, and the value that it stores for the token's key is looked up. The state is
then updated by the difference between the token's value and the looked-up value (Yang et al. 2024,
"Gated Delta Networks", arXiv 2412.06464). Every fourth layer has full attention, with a gate on its
output. In Qwen3-Next and the larger models of Qwen3.5, all layers have routed experts and a shared
expert for every token. In the smaller models of Qwen3.5, they have an MLP. Parameters have the same
names as in Hugging Face's `Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM` and
`Qwen3_5MoeForCausalLM`.

Shape letters are defined in `models/ops.py` and `models/moe.py`. In layers with linear attention,
these letters are used instead:

    G   number of key heads
    H   number of value heads
    D   dimension of a key head
    E   dimension of a value head
    X   number of channels of the convolution
    W   width of the convolution
    N   number of chunks
    S   number of tokens per chunk
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from firstlight.models.cache import Cache
from firstlight.models.family import (
    GGUF_EXPERTS,
    QWEN_EXPERTS,
    AttentionSpec,
    FamilySpec,
    GGUFSpec,
    RopeSpec,
    hf_values,
)
from firstlight.models.language_model import InitConfig
from firstlight.models.llama import Llama, LlamaAttention, LlamaMLP, RMSNorm
from firstlight.models.llama_config import DecoderConfig, values_from_json
from firstlight.models.llama_variants import OnePlusRMSNorm
from firstlight.models.mixtral import MoEConfig, RoutedBlock, SparseMLP
from firstlight.models.ops import at_least_fp32
from firstlight.models.rope import Ropes

#: Number of tokens in a chunk, the same as in transformers. The state updates of a chunk are
#: computed together.
_CHUNK_TOKENS = 64

_FULL, _LINEAR = "full_attention", "linear_attention"


def _usual_types(layers: int, period: int) -> list[str]:
    """Return the kind of each layer in a model in which every `period`-th layer has full
    attention."""
    return [_LINEAR if (i + 1) % period else _FULL for i in range(layers)]


#: Sizes of linear attention in GGUF files, keyed by config key.
_GGUF_COUNTS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_SHARED_COUNT = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}


def _family(
    architecture: str, gguf: GGUFSpec, composites: tuple[str, ...] = (), **sizes: Any
) -> FamilySpec:
    """Return the specification of a family. `sizes` are default values of its config class."""
    return FamilySpec(
        architecture,
        gguf,
        own_keys=("attention_bias", "layer_types", "partial_rotary_factor"),
        hf_defaults=hf_values(
            num_attention_heads=16,
            max_position_embeddings=32768,
            head_dim=256,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            **sizes,
        ),
        qk_norm="head",
        norm_kind="one_plus",
        rope=RopeSpec(partial_factor=0.25),
        experts=QWEN_EXPERTS if "experts" in sizes else None,
        # Layers for multi-token prediction (MTP). transformers does not load them either.
        left_out=("mtp.",),
        composites=composites,
        requires_known_keys=gguf.architecture == "qwen35moe",
        other_keys={
            "attn_output_gate": (True,),
            "full_attention_interval": (),
            "mamba_ssm_dtype": ("float32",),
            "mlp_only_layers": ([], None),
            "mtp_num_hidden_layers": (),
            "mtp_use_dedicated_embeddings": (),
        },
        # transformers reads the tokenizer of the dense text models as it is stored.
        tokenizer_split="qwen3_5" if gguf.architecture == "qwen35moe" else None,
    )


def _gguf(architecture: str, layer: Literal["delta", "tiled_delta"], **more: Any) -> GGUFSpec:
    """Return the GGUF specification of a family; with experts if it has `experts`."""
    counts, fixed = _GGUF_COUNTS, {"attention_bias": (False,)}
    if more.pop("experts", False):
        counts, fixed = {**counts, **_SHARED_COUNT}, {**fixed, **GGUF_EXPERTS}
    return GGUFSpec(
        architecture,
        rope_kinds=("default", "linear", "yarn"),
        fixed=fixed,
        counts=counts,
        layer=layer,
        inner_eps=1e-6,
    )


class DeltaConfig(DecoderConfig):
    """Config keys of the families that use linear attention with a gated delta rule."""

    layer_types: list[Literal["full_attention", "linear_attention"]] | None = None  # type: ignore[assignment]
    """list with "full_attention" or "linear_attention" (gated delta rule) for each layer. With
    null, every fourth layer has full attention. In a model with fewer than four layers, the last
    layer has full attention."""
    linear_conv_kernel_dim: int = Field(4, gt=0, le=1024)
    """width of the causal convolution in layers with linear attention, in tokens."""
    linear_key_head_dim: int = Field(32, gt=0)
    """number of dimensions per query and key head in layers with linear attention."""
    linear_value_head_dim: int = Field(32, gt=0)
    """number of dimensions per value head in layers with linear attention."""
    linear_num_key_heads: int = Field(4, gt=0)
    """number of query and key heads in layers with linear attention."""
    linear_num_value_heads: int = Field(8, gt=0)
    """number of value heads in layers with linear attention, a multiple of linear_num_key_heads."""

    @classmethod
    def _filled_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._filled_in(values)
        layers = values.get("num_hidden_layers", cls.model_fields["num_hidden_layers"].default)
        kinds = values.get("layer_types")
        if isinstance(layers, int) and kinds and kinds == _usual_types(layers, min(layers, 4)):
            # The default is removed, so that equal models have equal configs.
            del values["layer_types"]
        return values

    @model_validator(mode="after")
    def _check_linear(self) -> Self:
        if all(self.is_linear(layer) for layer in range(self.num_hidden_layers)):
            raise ValueError(
                "no layer has full_attention, which transformers' cache requires: "
                "add one to layer_types"
            )
        self.require_multiple("linear_num_value_heads", of="linear_num_key_heads")
        return self

    @property
    def state_shapes(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Shapes of the recurrent states that layers with linear attention cache, keyed by layer
        index (see `FamilyConfig.state_shapes`). Each of these layers has two states: the last
        inputs of its convolution, [W - 1, X], and the state of its delta rule, [H, D, E]. Shape
        letters are defined at the top of `qwen3_next.py`."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        heads, size = self.linear_num_value_heads, self.linear_value_head_dim
        inputs = self.linear_conv_kernel_dim - 1, 2 * keys + heads * size
        shapes = inputs, (heads, self.linear_key_head_dim, size)
        return {i: shapes for i in range(self.num_hidden_layers) if self.is_linear(i)}

    def is_linear(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has linear attention."""
        if self.layer_types is not None:
            return self.layer_types[layer] == _LINEAR
        return (layer + 1) % min(self.num_hidden_layers, 4) != 0

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        if not self.is_linear(layer):
            return super().attention_spec(layer)
        size = self.linear_key_head_dim * self.linear_value_head_dim
        return AttentionSpec(rope=None, state_size=self.linear_num_value_heads * size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        kind = cls.default_type()
        values = values_from_json(cls.families[kind], tuple(cls.model_fields), config)
        kinds, period = config.get("layer_types"), config.get("full_attention_interval") or 4
        values["layer_types"] = list(kinds or _usual_types(values["num_hidden_layers"], period))
        return cls(**{**values, "model_type": kind})

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        kinds = [_LINEAR if self.is_linear(i) else _FULL for i in range(self.num_hidden_layers)]
        return super().to_hf() | {"layer_types": kinds}


class Qwen3NextConfig(DeltaConfig, MoEConfig):
    """Configuration of a Qwen3-Next model."""

    families: ClassVar[Mapping[str, FamilySpec]] = {
        "qwen3_next": _family(
            "Qwen3NextForCausalLM",
            _gguf("qwen3next", "delta", experts=True),
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=48,
            num_key_value_heads=2,
            experts=(512, 10),
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        )
    }

    model_type: Literal["qwen3_next"] = "qwen3_next"  # type: ignore[assignment]
    """"qwen3_next"."""
    shared_expert_intermediate_size: int = Field(0, ge=0)
    """inner width of the shared expert, which is applied to every token; 0 uses
    moe_intermediate_size."""

    @classmethod
    def _filled_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._filled_in(values)
        shared = "shared_expert_intermediate_size"
        values[shared] = values.get(shared) or values["moe_intermediate_size"]
        return values

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        content = super().to_hf()
        del content["num_local_experts"]
        return content


class Qwen35Config(DeltaConfig):
    """Configuration of the text model of a Qwen3.5 model without experts."""

    families: ClassVar[Mapping[str, FamilySpec]] = {
        "qwen3_5_text": _family(
            "Qwen3_5ForCausalLM",
            _gguf("qwen35", "tiled_delta"),
            composites=("qwen3_5",),
            vocab_size=248320,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=32,
            num_key_value_heads=4,
        )
    }

    model_type: Literal["qwen3_5_text"] = "qwen3_5_text"
    """"qwen3_5_text"."""


class Qwen35MoEConfig(Qwen3NextConfig):
    """Configuration of the text model of a Qwen3.5 model with experts."""

    families: ClassVar[Mapping[str, FamilySpec]] = {
        "qwen3_5_moe_text": _family(
            "Qwen3_5MoeForCausalLM",
            _gguf("qwen35moe", "tiled_delta", experts=True),
            composites=("qwen3_5_moe",),
            vocab_size=248320,
            hidden_size=2048,
            num_hidden_layers=40,
            num_key_value_heads=2,
            experts=(256, 8),
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        )
    }

    model_type: Literal["qwen3_5_moe_text"] = "qwen3_5_moe_text"  # type: ignore[assignment]
    """"qwen3_5_moe_text"."""

    @model_validator(mode="after")
    def _check_same_layers(self) -> Self:
        if not self.norm_topk_prob or self.decoder_sparse_step != 1 or self.mlp_only_layers:
            raise ValueError(
                "qwen3_5_moe_text models have normalised routing weights and experts in every "
                "layer: use model_type qwen3_next for other settings"
            )
        return self

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        content = super().to_hf()
        for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
            del content[name]
        return content


class GatedRMSNorm(RMSNorm):
    """RMSNorm of a head's output [..., E], multiplied by the SiLU of a gate [..., E]."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) * F.silu(at_least_fp32(gate))).to(x.dtype)


class CausalConv(nn.Conv1d):
    """A causal convolution of each channel without a bias.

    Args:
        channels: number of channels, X.
        width: width of the convolution in tokens, W.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=False)

    def convolve(
        self, x_BTX: Tensor, before: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply the convolution.

        Args:
            x_BTX: inputs, [B, T, X].
            before: inputs of the W - 1 tokens before these tokens, [B, W - 1, X]; None for zeros.
            positions: position of each token in its document, int64 [B, T]; None for a single
                document.

        Returns:
            The outputs [B, T, X], and the last inputs [B, W - 1, X], to be passed as `before` for
            the next tokens.
        """
        B, T, X = x_BTX.shape
        weight_XW = self.weight[:, 0]
        earlier = weight_XW.shape[1] - 1
        if before is None and positions is None:
            # As in transformers, the result is longer than needed and is then truncated. SiLU would
            # round the last elements differently in a row of exactly the required length.
            weight_X1W = self.weight
            y_BXT = F.conv1d(x_BTX.transpose(1, 2), weight_X1W, padding=earlier, groups=X)
            last_BSX = F.pad(x_BTX[:, -earlier:], (0, 0, max(earlier - T, 0), 0))
            return y_BXT[..., :T].transpose(1, 2), last_BSX
        first = x_BTX.new_zeros(B, earlier, X) if before is None else before.to(x_BTX.dtype)
        all_BSX = torch.cat((first, x_BTX), 1)
        if positions is None:
            y_BTX = self(all_BSX.transpose(1, 2)).transpose(1, 2)
        else:
            # The convolution is computed as a sum, because the first tokens of a document must not
            # see inputs of the previous document.
            y_BTX = at_least_fp32(x_BTX) * weight_XW[:, -1]
            for back in range(1, earlier + 1):
                seen_BTX = all_BSX[:, earlier - back : earlier - back + T]
                seen_BTX = seen_BTX * (positions >= back)[..., None]
                y_BTX = y_BTX + seen_BTX * weight_XW[:, -1 - back]
        # The last W - 1 inputs are returned. If T is smaller, some of them are taken from `before`.
        return y_BTX.to(x_BTX.dtype), all_BSX[:, T:]


class GatedDeltaNet(nn.Module):
    """Linear attention (Yang et al. 2024, arXiv 2412.06464). A short causal convolution is applied
    to queries, keys and values. The gated delta rule follows, and its output is normalised and
    gated."""

    def __init__(self, config: DeltaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        G, H = config.linear_num_key_heads, config.linear_num_value_heads
        D, E = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_heads, self.group = G, H // G
        self.head_sizes = [D, D, self.group * E, self.group * E]
        self.channels, self.value_dim = [G * D, G * D, H * E], E
        C, X = config.hidden_size, sum(self.channels)
        self.conv1d = CausalConv(X, config.linear_conv_kernel_dim)
        self.add_projections(C, H)
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.A_log = nn.Parameter(torch.empty(H))
        self.norm = GatedRMSNorm(E, config.rms_norm_eps)
        self.out_proj = nn.Linear(H * E, C, bias=False)

    def add_projections(self, hidden_size: int, value_heads: int) -> None:
        """Create the input projections. Their names match the family's checkpoint files."""
        outputs = sum(self.channels) + value_heads * self.value_dim
        self.in_proj_qkvz = nn.Linear(hidden_size, outputs, bias=False)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * value_heads, bias=False)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute all linear projections of the layer's input [B, T, C].

        Returns:
            Four tensors: the concatenated queries, keys and values of all heads, [B, T, X]; the
            gates of the output, with B x T x H x E elements; and two tensors [B, T, H] from which
            the update strengths and the decays are computed.
        """
        heads = (*x_BTC.shape[:2], self.key_heads, -1)
        q, k, v, z = torch.split(self.in_proj_qkvz(x_BTC).view(heads), self.head_sizes, -1)
        b, a = self.in_proj_ba(x_BTC).view(heads).chunk(2, -1)
        mixed_BTX = torch.cat([part.flatten(2) for part in (q, k, v)], -1)
        return mixed_BTX, z, b.flatten(2), a.flatten(2)

    def forward(self, x_BTC: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor:
        """Compute linear attention. The result has the shape [B, T, C].

        Args:
            x_BTC: normalised input of the layer, [B, T, C].
            positions: position of each token in its document, int64 [B, T]; None for a single
                document.
            cache: cache that contains the recurrent states after the earlier tokens.
        """
        B, T, _ = x_BTC.shape
        inputs, state_BHDE = (None, None) if cache is None else cache.state(self.layer)
        heads = (B, T, self.key_heads, -1)
        mixed_BTX, z, b_BTH, a_BTH = self.project(x_BTC)
        # A single convolution computes queries, keys and values, because each channel has its own
        # filter.
        mixed_BTX, inputs = self.conv1d.convolve(mixed_BTX, inputs, positions)
        mixed_BTX = F.silu(mixed_BTX)
        q, k, v = (part.view(heads) for part in torch.split(mixed_BTX, self.channels, -1))
        v_BTHE = v.reshape(B, T, -1, self.value_dim)
        # If each value head has its own key head, queries and keys are not copied. A copy would
        # have a different memory layout, which affects the order of sums over a head and therefore
        # their last bits.
        q_BTHD, k_BTHD = q, k
        if self.group > 1:
            q_BTHD, k_BTHD = (part.repeat_interleave(self.group, 2) for part in (q, k))
        # Decays are computed in fp32, because the state is multiplied by thousands of decays, many
        # of which are so close to 1 that bf16 would round them to 1.
        step_BTH = F.softplus(at_least_fp32(a_BTH) + self.dt_bias)
        decay_BTH = -at_least_fp32(self.A_log).exp() * step_BTH
        beta_BTH = b_BTH.sigmoid()
        # Autocast is disabled, because it would round each product in the sums over all earlier
        # tokens.
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHE, state_BHDE = gated_delta_rule(
                q_BTHD,
                k_BTHD,
                v_BTHE,
                decay_BTH,
                beta_BTH=beta_BTH,
                state_BHDE=state_BHDE,
                positions_BT=positions,
            )
        if cache is not None:
            cache.set_state(self.layer, (inputs, state_BHDE))
        # Each row contains the values of one head for one token. The rows are in the order that the
        # output projection requires.
        rows, gates = (x.reshape(-1, self.value_dim) for x in (y_BTHE.to(mixed_BTX.dtype), z))
        return self.out_proj(self.norm(rows, gates).view(B, T, -1))  # type: ignore[no-any-return]


class Qwen35DeltaNet(GatedDeltaNet):
    """Linear attention with four separate input matrices. One matrix computes queries, keys and
    values, and the other three compute the gates, the update strengths and the decays. The rows of
    each matrix are ordered by head."""

    def add_projections(self, hidden_size: int, value_heads: int) -> None:
        """See `GatedDeltaNet.add_projections`."""
        self.in_proj_qkv = nn.Linear(hidden_size, sum(self.channels), bias=False)
        self.in_proj_z = nn.Linear(hidden_size, value_heads * self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, value_heads, bias=False)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `GatedDeltaNet.project`."""
        mixed_BTX, z = self.in_proj_qkv(x_BTC), self.in_proj_z(x_BTC)
        return mixed_BTX, z, self.in_proj_b(x_BTC), self.in_proj_a(x_BTC)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Split [B, H, T, ...] into chunks [B, H, N, size, ...], padded with zeros after the last
    token."""
    x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, -x.shape[2] % size))
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def _document_masks(positions_BT: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the masks that prevent documents in the same sequence from affecting each other.

    Args:
        positions_BT: position of each token in its document, int64 [B, T].
        size: number of tokens in a chunk, S.

    Returns:
        Bool tensors:
        - [B, 1, N, S, S], true for two tokens of the same document;
        - [B, 1, N, S], true for tokens that read the state from the end of the previous chunk;
        - [B, 1, N, S], true for tokens that contribute to the state at the end of their chunk;
        - [B, 1, N], true for chunks in which no document starts, so that the state after the chunk
          still includes the state before it.
    """
    documents = _in_chunks((positions_BT == 0).cumsum(1)[:, None], size)
    # The state before a chunk belongs to the last document of the previous chunk. Only tokens of
    # this document read it, and only tokens of a chunk's last document contribute to the state
    # after the chunk.
    last_BN = documents[..., -1]
    open_BN = F.pad(last_BN[..., :-1], (1, 0), value=1)
    same = documents[..., :, None] == documents[..., None, :]
    reads, is_kept = documents == open_BN[..., None], documents == last_BN[..., None]
    return same, reads, is_kept, open_BN == last_BN


def gated_delta_rule(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHE: Tensor,
    decay_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHDE: Tensor | None,
    positions_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule in chunks (Yang et al. 2024, arXiv 2412.06464, section 3.3).

    For each token, the state S [D, E] of a head is replaced by exp(g) S + beta k^T (v - k exp(g)
    S). The output of the token is q S, computed with the new state. Keys k are normalised to length
    1, and queries q to length 1 / sqrt(D). The updates within a chunk form a triangular linear
    system, which is solved for all tokens of the chunk at once.

    Args:
        q_BTHD, k_BTHD, v_BTHE: queries, keys and values.
        decay_BTH: g, the logarithm of the decay, at most 0.
        beta_BTH: strength of the update, 0 to 1.
        state_BHDE: state before the first token; None for zeros.
        positions_BT: position of each token in its document, int64; None for a single document.
            Each document starts with a state of zeros.

    Returns:
        The outputs [B, T, H, E] and the last state [B, H, D, E], in at least fp32.
    """
    B, T, H, D = k_BTHD.shape
    # Inputs of more than one token are padded to full chunks, so that the results match
    # transformers to the last bit.
    size = _CHUNK_TOKENS if T > 1 else 1
    inputs = q_BTHD, k_BTHD, v_BTHE, decay_BTH, beta_BTH
    q, k, v, g, beta = (at_least_fp32(x.transpose(1, 2)) for x in inputs)
    # 1e-6 is added, as in transformers. The vectors are normalised before the padding, because
    # normalising them afterwards would change the rounding.
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k, v, g, beta = (_in_chunks(x, size) for x in (q, k, v, g, beta))
    q, g = q * D**-0.5, g.cumsum(-1)
    # Decays between tokens are differences of summed logarithms, because quotients of decays could
    # divide by 0.
    from_start = g.exp()
    to_end = (g[..., -1:] - g).exp()
    whole = g[..., -1].exp()
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    if positions_BT is not None:
        # Documents are separated by masks with exact zeros. A very negative logarithm of the decay
        # at the start of each document would also separate the documents. However, the remaining
        # terms of the sums would then be lost to rounding.
        same, reads, is_kept, passes = _document_masks(positions_BT, size)
        seen = seen & same
        from_start = from_start * reads
        to_end = to_end * is_kept
        whole = whole * passes
    # The mask is applied before `exp`, because `exp` would overflow for keys of later tokens and
    # result in NaN gradients.
    between = (g[..., :, None] - g[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    k_beta = k * beta[..., None]
    # Row s contains the decayed products of key s with the earlier keys of its chunk. The solver
    # uses these products to compute which part of the value of token s has already been stored by
    # earlier updates. Token s adds only the difference.
    system = k_beta @ k.mT * between
    wanted = torch.cat((v * beta[..., None], k_beta * from_start[..., None]), -1)
    wanted = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new_v, known_k = wanted[..., :-D], wanted[..., -D:]
    weights = q @ k.mT * between
    q_start, k_end = q * from_start[..., None], k * to_end[..., None]
    state_BHDE = v.new_zeros(B, H, D, v.shape[-1]) if state_BHDE is None else state_BHDE
    outputs = []
    for n in range(v.shape[2]):
        written = new_v[:, :, n] - known_k[:, :, n] @ state_BHDE
        outputs.append(q_start[:, :, n] @ state_BHDE + weights[:, :, n] @ written)
        kept = state_BHDE * whole[:, :, n, None, None]
        state_BHDE = kept + k_end[:, :, n].mT @ written
    return torch.cat(outputs, 2)[:, :, :T].transpose(1, 2), state_BHDE


class Qwen3NextAttention(LlamaAttention):
    """Attention with a sigmoid gate on the output of each head. `q_proj` also computes the gates.
    For each head, its weight contains the rows of the query, followed by the rows of the gate."""

    norm_class = OnePlusRMSNorm

    def add_projections(self, config: Any) -> None:
        """See `LlamaAttention.add_projections`."""
        super().add_projections(config)
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.sizes[0], bias=config.qkv_bias)

    def forward(self, x_BTC: Tensor, ropes: Ropes, mask: Any, cache: Cache | None) -> Tensor:
        """Compute gated attention. See `LlamaAttention.forward` for the arguments and the
        result."""
        heads = (*x_BTC.shape[:2], -1, self.head_dim)
        q_and_gate = self.q_proj(x_BTC).view(*heads[:3], 2 * self.head_dim)
        q_BTHD, gate_BTHD = q_and_gate.chunk(2, -1)
        q_BTHD, k_BTKD = self.normalize(q_BTHD, self.k_proj(x_BTC).view(heads))
        v_BTKD = self.v_proj(x_BTC).view(heads)
        q_BHTD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        q_BHTD, k_BKSD = self.rotate(q_BHTD, k_BKSD, ropes)
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(self.layer, k_BKSD, v_BKSD)
        y_BTHD = self.attend(q_BHTD, k_BKSD, v_BKSD, self.options(mask)).transpose(1, 2)
        gated_BTC = y_BTHD.flatten(2) * gate_BTHD.flatten(2).sigmoid()
        return self.o_proj(gated_BTC)  # type: ignore[no-any-return]


class Qwen3NextMLP(SparseMLP):
    """The experts of one layer: routed experts, and a shared expert applied to every token. The
    output of the shared expert is multiplied by a sigmoid gate."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__(config)
        shared = {"intermediate_size": config.shared_expert_intermediate_size}
        self.shared_expert = LlamaMLP(config.model_copy(update=shared))
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, [B, T, C], and the router's logits, [N, E]."""
        y_BTC, logits_NE = super().forward(x_BTC)
        weight_BT1 = self.shared_expert_gate(x_BTC).sigmoid()
        return y_BTC + weight_BT1 * self.shared_expert(x_BTC), logits_NE


class Qwen3NextBlock(RoutedBlock):
    """One layer: linear or full attention, followed by experts or an MLP.

    Attributes:
        linear_class: class of the linear attention module.
    """

    linear_class: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet
    attention_class, experts_class = Qwen3NextAttention, Qwen3NextMLP
    norm_class = OnePlusRMSNorm

    def add_attention(self, config: Any, layer: int) -> None:
        """See `LlamaBlock.add_attention`."""
        self.is_linear = config.is_linear(layer)
        if self.is_linear:
            self.linear_attn = self.linear_class(config, layer)
        else:
            super().add_attention(config, layer)

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one layer. See `LlamaBlock.forward` for the arguments and the result. Here,
        `masks` contains the attention mask, and the position of each token in its document (the
        argument `positions` of `GatedDeltaNet.forward`)."""
        if not self.is_linear:
            return super().forward(x_BTC, ropes, masks, cache)
        x_BTC = x_BTC + self.linear_attn(self.input_layernorm(x_BTC), masks[1], cache)
        return self.add_mlp_output(x_BTC)


class Qwen35Block(Qwen3NextBlock):
    """One layer of Qwen3.5."""

    linear_class = Qwen35DeltaNet


class Qwen3Next(Llama):
    """A Qwen3-Next language model. See `LanguageModel` for the interface that all models share."""

    config: DeltaConfig  # type: ignore[assignment]

    block_class = Qwen3NextBlock
    norm_init = 0.0  # see `OnePlusRMSNorm`
    residual_projections = ("o_proj.", "out_proj.", "down_proj")

    def init_weights(self, generator: torch.Generator, init: InitConfig | None = None) -> None:
        """Draw the initial weights as in `LanguageModel.init_weights`. The decay parameters are
        initialised as in the Hugging Face implementation."""
        super().init_weights(generator, init)
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                with torch.no_grad():
                    module.dt_bias.fill_(1.0)
                    module.norm.weight.fill_(1.0)
                    # The initial decays of the heads range from slow to fast, so that some heads
                    # remember long ranges and others short ones.
                    module.A_log.uniform_(0.01, 16.0, generator=generator).log_()

    def make_masks(
        self, cache_positions: Tensor, total: int, document_ids: Tensor | None, positions: Tensor
    ) -> tuple[Any, Any]:
        """Return the attention mask, and the position of each token in its document, int64 [B, T],
        or None for a single document. See `Llama.make_masks` for the arguments."""
        mask = self.make_mask(cache_positions, total, None, document_ids)
        return mask, None if document_ids is None else positions


class Qwen35(Qwen3Next):
    """The text model of a Qwen3.5 model. See `LanguageModel` for the interface that all models
    share."""

    block_class = Qwen35Block
