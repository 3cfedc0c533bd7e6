"""Model families: the facts about each family that loading, conversion, parallelism and planning
need.

Outside `models/`, only benchmarks and readers of foreign checkpoint formats mention families by
name. A Llama-like family is one entry of `llama_families.py`. A family with a different
architecture has a module with a config class derived from `FamilyConfig` and a model class.
`FAMILIES` in `firstlight.models` lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from firstlight.models.rope import rope_changes_at
from firstlight.section import Section


@dataclass(frozen=True)
class AttentionSpec:
    """Settings of attention in one layer.

    Attributes:
        window: number of tokens that a token sees, including itself; None for all earlier tokens.
        dropout: probability of dropping an attention weight in training.
        scale: factor of the scores; None for 1 / sqrt(head_dim).
        softcap: bound c of the scores s, which become c tanh(s / c); None for no bound.
        rope: index of the rotary table for queries and keys: 0, or 1 for the second table, used by
            layers with a window; None for no rotation.
        sinks: True if each head has an attention sink: a learned logit in its softmax, without a
            value.
        value_dim: dimension of a value head; None for the dimension of a key head.
        state_size: number of elements in the recurrent state of a linear-attention layer; 0 for a
            layer with attention to every earlier token.
    """

    window: int | None = None
    dropout: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    rope: int | None = 0
    sinks: bool = False
    value_dim: int | None = None
    state_size: int = 0


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts in a family's files.

    Attributes:
        module: name of the layer's module that contains the router and the experts.
        matrices: "gate", "up" and "down" -> name of the matrix in an expert.
        size: key of config.json for the inner width of an expert.
    """

    module: str
    matrices: Mapping[str, str]
    size: str

    @property
    def router(self) -> str:
        """Name of the router's weight, relative to the layer."""
        return f"{self.module}.gate.weight"

    def matrix(self, word: str, expert: int) -> str:
        """Return the name of the weight "gate", "up" or "down" of an expert, relative to the
        layer."""
        return f"{self.module}.experts.{expert}.{self.matrices[word]}.weight"


#: Settings that llama.cpp uses for the experts of Qwen's families, for `GGUFSpec.fixed`.
GGUF_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}

#: Names of the experts in Qwen and DeepSeek files.
QWEN_EXPERTS = ExpertNames(
    "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, "moe_intermediate_size"
)


@dataclass(frozen=True)
class GGUFSpec:
    """How a family is stored in GGUF files, and the limits of llama.cpp, which reads them.

    Attributes:
        architecture: value of general.architecture; "" if the family has no GGUF files.
        rotates_pairs: True if llama.cpp rotates the pairs of rows (2i, 2i + 1) of a head, where
            Hugging Face rotates (i, i + R/2): rows of queries and keys are then reordered.
        rope_kinds: kinds of rotary scaling that llama.cpp supports.
        fixed: key of config.json -> the only values that llama.cpp supports. If config.json lacks
            the key, the family's default is checked, or the first value is assumed if there is
            none.
        numbers: our key of a float -> GGUF's key.
        counts: our key of an integer -> GGUF's key.
        optional: keys of `numbers` and `counts` that may be None, which GGUF files express as a
            missing number or a count of 0.
        layer: kind of a layer's tensors: "llama", "named" (the tensors of `block`), "latent"
            (multi-head latent attention), "sinks" (attention sinks) or "delta" (gated delta rule).
        block: GGUF's name -> the family's name of a layer's modules, for layers with biases
            everywhere and one matrix for queries, keys and values; {} for the other kinds.
        head: "written" if llama.cpp needs a tensor of a tied head; "tied" if it always uses the
            embedding as the head; "" if both work.
        has_windows: True if llama.cpp supports models that mix layers with and without a window.
        needs_window: True if llama.cpp requires a window.
        has_window_base: True if llama.cpp supports a separate rotary base in layers with a window.
        exact_heads: True if llama.cpp requires heads times head_dim to be hidden_size.
        gating: function applied to the router's logits, in layers with latent attention.
        inner_eps: epsilon of norms inside attention, where llama.cpp uses rms_norm_eps; None if the
            model also uses rms_norm_eps there.
        wide_scale_layers: number of layers of the model for which llama.cpp uses
            hidden_size / heads instead of head_dim as query_pre_attn_scalar; 0 if there is none.
    """

    architecture: str
    rotates_pairs: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear")
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    layer: Literal["llama", "named", "latent", "sinks", "delta"] = "llama"
    block: Mapping[str, str] = field(default_factory=dict)
    head: Literal["", "written", "tied"] = ""
    has_windows: bool = False
    needs_window: bool = False
    has_window_base: bool = False
    exact_heads: bool = False
    gating: Literal["softmax", "sigmoid"] = "softmax"
    inner_eps: float | None = None
    wide_scale_layers: int = 0


@dataclass(frozen=True)
class BlockNorms:
    """Names of a layer's norms, as in the family's files; None if a layer does not have the norm.

    Attributes:
        before_attention, after_attention: norms of the attention's input and of its output.
        before_mlp, after_mlp: norms of the MLP's input and of its output.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions (RoPE) of a family.

    Attributes:
        kinds: kinds of scaling that the family supports in addition to "default"; () means all.
        other_kinds: alternative name of a kind in config.json -> kind.
        polar: True if transformers rotates by complex numbers, see `rope_tables`.
        partial_factor: rotated fraction of each head, if config.json does not give it.
        original_positions: default of original_max_position_embeddings if config.json has this key
            at its top level; 0 if the key is one of the rotary settings.
        nested: True if config.json has separate rotary settings for each kind of layer.
        local_theta_key: older key of config.json for the base in layers with a window; "" if none.
        default: rotary settings, under config.json's names, if config.json has none.
    """

    kinds: tuple[str, ...] = ()
    other_kinds: Mapping[str, str] = field(default_factory=dict)
    polar: bool = False
    partial_factor: float = 1.0
    original_positions: int = 0
    nested: bool = False
    local_theta_key: str = ""
    default: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FamilySpec:
    """Facts about one `model_type`.

    Attributes:
        architecture: name of transformers' class, as in config.json's "architectures".
        gguf: form in GGUF files.
        own_keys: config keys of this family that other families of the config class lack.
        json_names: our name of a key -> config.json's name, if the two differ.
        hf_defaults: defaults of Hugging Face's config class that differ from the defaults in
            recipes; config.json may omit these keys. See `hf_values`.
        qkv_bias: True if queries, keys and values always have biases.
        output_bias: False if the attention's output projection never has a bias.
        qk_norm: "head" if queries and keys are normalised in each head, "width" if over all heads
            together; None without normalisation.
        norms: names of a layer's norms.
        norm_kind: "rms" for RMSNorm, "one_plus" for RMSNorm with a factor of 1 + weight, or "layer"
            for LayerNorm with a bias.
        activation: config.json's name of the MLP's activation.
        activation_key: config.json's key of the activation.
        gated: True if the MLP has a gate, as SwiGLU and GeGLU have.
        fused: True if queries, keys and values share one matrix, and gate and up projection
            another; "mlp" if only gate and up projection share one.
        rope: rotary positions.
        full_attention_every: n if every n-th layer has full attention, and the others the window;
            0 for no pattern.
        no_rope_every: n if every n-th layer has no rotary positions; only these layers have the
            window, if there is one. 0 for no pattern.
        period_key: older key of config.json for `full_attention_every`; "" if none.
        divides_width: True if hidden_size must be a multiple of the heads even with head_dim.
        derived_keys: keys that config.json does not have because they follow from other keys.
        indivisible: reason why tensor parallelism can't shard the layers; "" if it can.
        has_window_switch: True if config.json has use_sliding_window.
        experts: names of the experts in the files; None for dense models and stacked experts.
        has_buffers: True if the files have tensors that are buffers of the model.
        has_mxfp4: True if experts may be stored in MXFP4.
        left_out: prefixes of the names of tensors in the files that the model ignores.
        tokenizer_split: key in `SPLIT_PATTERNS` of the pattern that transformers uses to split text
            for every tokenizer of the family; None uses the tokenizer's pattern.
    """

    architecture: str
    gguf: GGUFSpec = GGUFSpec("")
    own_keys: tuple[str, ...] = ()
    json_names: Mapping[str, str] = field(default_factory=dict)
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    output_bias: bool = True
    qk_norm: Literal["head", "width"] | None = None
    norms: BlockNorms = BlockNorms()
    norm_kind: Literal["rms", "one_plus", "layer"] = "rms"
    activation: Literal["silu", "relu2", "gelu_pytorch_tanh", "gelu"] = "silu"
    activation_key: str = "hidden_act"
    gated: bool = True
    fused: Literal[False, True, "mlp"] = False
    rope: RopeSpec = RopeSpec()
    full_attention_every: int = 0
    no_rope_every: int = 0
    period_key: str = ""
    divides_width: bool = False
    derived_keys: tuple[str, ...] = ()
    indivisible: str = ""
    has_window_switch: bool = False
    experts: ExpertNames | None = None
    has_buffers: bool = False
    has_mxfp4: bool = False
    left_out: tuple[str, ...] = ()
    tokenizer_split: str | None = None

    @property
    def has_default_types(self) -> bool:
        """True if the family has a pattern of layers with and without a window."""
        return bool(self.full_attention_every or self.no_rope_every)


def hf_values(
    *,
    rms_norm_eps: float = 1e-6,
    experts: tuple[int, int] | None = None,
    **values: Any,
) -> dict[str, Any]:
    """Return the default values of a config class of Hugging Face.

    Args:
        rms_norm_eps: value of this key.
        experts: num_experts and num_experts_per_tok of a mixture of experts.
        values: default values of all other keys.
    """
    if experts is not None:
        num_experts, visited = experts
        routing = {"num_experts": num_experts, "num_experts_per_tok": visited}
        values = {"router_aux_loss_coef": 0.001, **routing, **values}
    return {"rms_norm_eps": rms_norm_eps, **values}


class FamilyConfig(Section):
    """Base of the config classes: the facts that every model's config has.

    Attributes:
        families: facts by `model_type`.
        hf_names: our name of a key -> config.json's; {} if `FamilySpec.json_names` is used.
        has_rotary: True for rotary positions; False for learned positions.
        stores_transposed: True if linear layers keep their weights as [in, out].
        tensor_parallel_sizes: keys of sizes that must be multiples of the number of processes in
            tensor parallelism; empty if tensor parallelism is not supported.
        has_pipeline: True if pipeline parallelism is supported.
    """

    families: ClassVar[Mapping[str, FamilySpec]] = {}
    hf_names: ClassVar[Mapping[str, str]] = {}
    has_rotary: ClassVar[bool] = True
    stores_transposed: ClassVar[bool] = False
    tensor_parallel_sizes: ClassVar[tuple[str, ...]] = ()
    has_pipeline: ClassVar[bool] = False

    model_type: str

    @classmethod
    def default_type(cls) -> str:
        """Return the `model_type` of a config that does not specify it."""
        return str(cls.model_fields["model_type"].default)

    @property
    def family(self) -> FamilySpec:
        """Facts about this model's family."""
        return self.families[self.model_type]

    @property
    def indivisible(self) -> str:
        """Reason why tensor parallelism can't shard this model's layers; "" if it can."""
        return self.family.indivisible

    @property
    def expert_count(self) -> int:
        """Number of routed experts in a layer with experts; 0 for dense models."""
        return getattr(self, "num_experts", 0)

    @property
    def visited_experts(self) -> int:
        """Number of routed experts per token in a layer; 0 for dense models."""
        return getattr(self, "num_experts_per_tok", 0)

    @property
    def logit_softcap(self) -> float | None:
        """Bound c of the logits z, which become c tanh(z / c); None is no bound."""
        return None

    @property
    def cached_numbers(self) -> int:
        """Number of elements cached per token and layer, in layers with keys and values."""
        config: Any = self
        return 2 * int(config.num_key_value_heads) * int(config.head_dim)

    @property
    def state_shapes(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Layer (from 0) -> shapes, without the batch dimension, of the states that it caches
        instead of keys and values."""
        return {}

    @property
    def long_from(self) -> int | None:
        """Sequence length in tokens at which the rotary frequencies change, so that keys cached for
        a shorter prefix can't be reused; None if the frequencies never change."""
        return rope_changes_at(getattr(self, "rope_scaling", None))

    @property
    def router_loss_coefficient(self) -> float:
        """Weight of the load-balancing loss in training; 0 for dense models."""
        return getattr(self, "router_aux_loss_coef", 0.0)

    def require_multiple(self, name: str, of: str) -> None:
        """Require that one key is a multiple of another.

        Raises:
            ValueError: it is not.
        """
        value, divisor = getattr(self, name), getattr(self, of)
        if value % divisor:
            raise ValueError(f"{name} {value} must be a multiple of {of} {divisor}")

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has experts in place of an MLP."""
        return self.expert_count > 0

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the settings of attention in a layer (counted from 0)."""
        return AttentionSpec()


#: Maximum number of families listed as lacking a key; if there are more, the message lists the
#: families that have it.
_MOST_WITHOUT = 3


def not_a_key(name: str, model_type: str) -> str:
    """Return the error message for a key that a family does not have, with the names of the
    families that have it, or "" if no family has such a key."""
    classes: list[type[FamilyConfig]] = [FamilyConfig]
    for kind in classes:  # the loop appends to this list, so that it reaches all subclasses
        classes += kind.__subclasses__()
    specs = {known: (kind, spec) for kind in classes for known, spec in kind.families.items()}
    own = {key for _, spec in specs.values() for key in spec.own_keys}
    has = {
        family
        for family, (kind, spec) in specs.items()
        if name in kind.model_fields and (name not in own or name in spec.own_keys)
    }
    lacks = specs.keys() - has
    few = f"all but {', '.join(sorted(lacks))}"
    families = few if len(lacks) <= _MOST_WITHOUT else ", ".join(sorted(has))
    return f"{name} is not a key of {model_type} models (it is a key of {families})" if has else ""
