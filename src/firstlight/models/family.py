"""Specifications of model families, used for loading, conversion, parallelism and planning.

Outside `models/`, only benchmarks and the readers of other projects' checkpoint formats refer to
families by name. To add a Llama-like family, an entry in `llama_families.py` is sufficient. A
family with a different architecture has its own module, with a model class and a config class
derived from `FamilyConfig`. `FAMILIES` in `firstlight.models` lists all families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from firstlight.models.rope import rope_changes_at
from firstlight.section import Section


@dataclass(frozen=True)
class AttentionSpec:
    """Attention settings of one layer.

    Attributes:
        window: number of tokens that a token attends to, including itself; None if it attends to
            all earlier tokens.
        dropout: probability of dropping an attention weight in training.
        scale: factor by which the scores are multiplied; None for 1 / sqrt(head_dim).
        softcap: soft cap c of the scores s, which become c tanh(s / c); None for no cap.
        rope: index of the rotary table applied to queries and keys; None for no rotation. Index 1
            selects a second table, which some families use in layers with a window.
        sinks: True if each head has an attention sink, a learned logit in its softmax that has no
            value vector.
        value_dim: dimension of a value head; None for the dimension of a key head.
        state_size: number of elements in the recurrent state of a layer with linear attention; 0
            for all other layers.
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
    """Names that a family's checkpoint files use for the experts of a layer.

    Attributes:
        module: name of the layer's module that contains the router and the experts.
        matrices: names of an expert's matrices, keyed by "gate", "up" and "down".
        size: name of the config.json key that specifies the inner width of an expert.
    """

    module: str
    matrices: Mapping[str, str]
    size: str

    @property
    def router(self) -> str:
        """Name of the router's weight, without the prefix of the layer."""
        return f"{self.module}.gate.weight"

    def matrix(self, word: str, expert: int) -> str:
        """Return the name of an expert's "gate", "up" or "down" weight, without the prefix of the
        layer."""
        return f"{self.module}.experts.{expert}.{self.matrices[word]}.weight"


#: Values of expert settings that llama.cpp requires for the Qwen families; used in
#: `GGUFSpec.fixed`.
GGUF_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}

#: Names of the experts in the checkpoint files of Qwen and DeepSeek.
QWEN_EXPERTS = ExpertNames(
    "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, "moe_intermediate_size"
)


@dataclass(frozen=True)
class GGUFSpec:
    """How a family is represented in GGUF files, and which of its settings llama.cpp supports.

    Attributes:
        architecture: value of general.architecture; "" if the family has no GGUF files.
        rotates_pairs: True if llama.cpp rotates the pairs of dimensions (2i, 2i + 1) of a head,
            whereas Hugging Face rotates the pairs (i, i + R/2). The rows of the query and key
            weights are then reordered.
        rope_kinds: kinds of rotary scaling that llama.cpp supports.
        fixed: mapping from a key of config.json to the only values that llama.cpp supports for it.
            If config.json does not contain the key, the family's default is checked. If the family
            has no default, the first value is assumed.
        numbers: mapping from the name of a floating-point config key to its name in GGUF.
        counts: mapping from the name of an integer config key to its name in GGUF.
        optional: keys of `numbers` and `counts` that can be None. In GGUF files, a missing number
            or a count of 0 represents None.
        layer: kind of the layers, which determines their tensors: "llama", "named" (the tensors
            listed in `block`), "latent" (multi-head latent attention), "sinks" (attention sinks),
            "conv" (short convolutions), "delta" (gated delta rule) or "tiled_delta" (gated delta
            rule in which llama.cpp orders the value heads by their position in the group of a key
            head).
        block: mapping from the GGUF name of a module in a layer to the name that the family uses.
            It is required for layers of the kind "named" and is empty for all other kinds. In
            "named" layers, all projections have biases, and one matrix computes queries, keys and
            values.
        head: "written" if llama.cpp requires a tensor for the head even if the head is tied to the
            embedding; "tied" if llama.cpp always uses the embedding as the head; "" if llama.cpp
            supports tied and untied heads.
        has_windows: True if llama.cpp supports models that mix layers with and without a sliding
            window.
        needs_window: True if llama.cpp requires a sliding window.
        has_window_base: True if llama.cpp supports a separate rotary base in layers with a sliding
            window.
        exact_heads: True if llama.cpp requires num_attention_heads * head_dim to equal hidden_size.
        gating: name of the function applied to the router's logits, for layers of the kind
            "latent".
        inner_eps: epsilon that the model uses for normalisation inside attention, where llama.cpp
            always uses rms_norm_eps; None if the model uses rms_norm_eps as well.
        wide_scale_layers: number of layers by which llama.cpp recognises a specific model of the
            family. For this model, llama.cpp uses hidden_size / num_attention_heads as
            query_pre_attn_scalar, instead of head_dim. 0 if the family has no such model.
    """

    architecture: str
    rotates_pairs: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear")
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    layer: Literal["llama", "named", "latent", "sinks", "conv", "delta", "tiled_delta"] = "llama"
    block: Mapping[str, str] = field(default_factory=dict)
    head: Literal["", "written", "tied"] = ""
    has_windows: bool = False
    needs_window: bool = False
    has_window_base: bool = False
    exact_heads: bool = False
    gating: Literal["softmax", "sigmoid"] = "softmax"
    inner_eps: float | None = None
    wide_scale_layers: int = 0

    @property
    def has_delta(self) -> bool:
        """True if some layers have linear attention with a gated delta rule."""
        return self.layer in ("delta", "tiled_delta")


@dataclass(frozen=True)
class BlockNorms:
    """Names of a layer's norms in the family's checkpoint files, or None for norms that the family
    does not have.

    Attributes:
        before_attention, after_attention: norms of the input and of the output of attention.
        before_mlp, after_mlp: norms of the input and of the output of the MLP.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions (RoPE) of a family.

    Attributes:
        kinds: kinds of scaling that the family supports in addition to "default"; empty if the
            family supports all kinds.
        other_kinds: mapping from alternative names of kinds, which config.json can contain, to the
            names used here.
        polar: True if transformers computes the rotation as a product of complex numbers (see
            `rope_tables`).
        partial_factor: fraction of each head that is rotated if config.json does not specify it.
        original_positions: default value of original_max_position_embeddings if the family's
            config.json contains this key at its top level; 0 if the key is one of the rotary
            settings.
        nested: True if config.json has separate rotary settings for each kind of layer.
        local_theta_key: older config.json key for the rotary base of layers with a sliding window;
            "" if there is none.
        default: rotary settings that apply if config.json does not contain any, with the key names
            that config.json uses.
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
    """Specification of one model family. Families are identified by their `model_type`.

    Attributes:
        architecture: name of transformers' class, as in config.json's "architectures".
        gguf: representation in GGUF files.
        own_keys: config keys of this family that other families with the same config class do not
            have.
        json_names: mapping from the name of a config key to its name in config.json. It contains
            only keys whose names differ.
        hf_defaults: default values of Hugging Face's config class that differ from the defaults in
            recipes. They apply to keys that config.json omits. See `hf_values`.
        qkv_bias: True if queries, keys and values always have biases.
        output_bias: False if the attention's output projection never has a bias.
        qk_norm: "head" if queries and keys are normalised in each head, "width" if they are
            normalised over all heads together; None without normalisation.
        norms: names of a layer's norms.
        norm_kind: "rms" for RMSNorm, "one_plus" for RMSNorm that multiplies by 1 + weight, or
            "layer" for LayerNorm with a bias.
        activation: name of the MLP's activation in config.json.
        activation_key: name of the config.json key that specifies the activation.
        gated: True if the MLP has a gate, as in SwiGLU and GeGLU.
        fused: True if one matrix computes queries, keys and values, and another matrix computes the
            gate and up projections; "mlp" if only the gate and up projections share a matrix.
        rope: rotary positions.
        full_attention_every: n if every n-th layer has full attention and all other layers have a
            sliding window; 0 if there is no such pattern.
        no_rope_every: n if every n-th layer has no rotary positions; 0 if there is no such pattern.
            If the model has a sliding window, it applies only to the layers without rotary
            positions.
        period_key: older config.json key for `full_attention_every`; "" if there is none.
        divides_width: True if hidden_size must be a multiple of num_attention_heads even if
            head_dim is specified.
        derived_keys: keys that config.json does not contain because their values follow from other
            keys.
        indivisible: reason why tensor parallelism can't shard the layers; "" if they can be
            sharded.
        has_window_switch: True if config.json has the key use_sliding_window.
        experts: names of the experts in the checkpoint files; None for dense models and for
            families whose files store the experts in stacked tensors.
        has_buffers: True if the checkpoint files contain tensors that are buffers of the model.
        has_mxfp4: True if the checkpoint files can store the experts in MXFP4.
        left_out: name prefixes of tensors in the checkpoint files that are ignored, because they
            are not part of the model.
        composites: values of `model_type` of folders that contain a model of this family beside
            other parts, such as an image encoder.
        other_keys: keys of config.json that have no field in the config class, mapped to their
            supported values; () if the value does not change the outputs.
        requires_known_keys: True if a config.json with unknown keys is rejected.
        tokenizer_split: key in `SPLIT_PATTERNS`. It selects the pattern with which transformers
            splits text for all tokenizers of the family. None if transformers uses the pattern
            stored with the tokenizer.
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
    composites: tuple[str, ...] = ()
    other_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    requires_known_keys: bool = False
    tokenizer_split: str | None = None

    @property
    def has_default_types(self) -> bool:
        """True if the family alternates, in a fixed pattern, between layers with and without a
        sliding window."""
        return bool(self.full_attention_every or self.no_rope_every)


def hf_values(
    *,
    rms_norm_eps: float = 1e-6,
    experts: tuple[int, int] | None = None,
    **values: Any,
) -> dict[str, Any]:
    """Return the default values of a Hugging Face config class.

    Args:
        rms_norm_eps: default value of this key.
        experts: default values of num_experts and num_experts_per_tok of a mixture of experts.
        values: default values of all other keys.
    """
    if experts is not None:
        num_experts, visited = experts
        routing = {"num_experts": num_experts, "num_experts_per_tok": visited}
        values = {"router_aux_loss_coef": 0.001, **routing, **values}
    return {"rms_norm_eps": rms_norm_eps, **values}


class FamilyConfig(Section):
    """Base class of the model configs, with the properties that all families have.

    Attributes:
        families: family specifications, keyed by `model_type`.
        hf_names: mapping from the name of a config key to its name in config.json; {} if
            `FamilySpec.json_names` is used instead.
        has_rotary: True for rotary positions; False for learned positions.
        stores_transposed: True if linear layers store their weights as [in, out].
        tensor_parallel_sizes: config keys whose values must be multiples of the number of
            tensor-parallel processes; empty if tensor parallelism is not supported.
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
        """Return the `model_type` to use if a config does not specify one."""
        return str(cls.model_fields["model_type"].default)

    @property
    def family(self) -> FamilySpec:
        """Specification of this model's family."""
        return self.families[self.model_type]

    @property
    def indivisible(self) -> str:
        """Reason why tensor parallelism can't shard this model's layers; "" if they can be
        sharded."""
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
        """Soft cap c of the logits z, which become c tanh(z / c); None for no soft cap."""
        return None

    @property
    def cached_numbers(self) -> int:
        """Number of elements cached per token in each layer that caches keys and values."""
        config: Any = self
        return 2 * int(config.num_key_value_heads) * int(config.head_dim)

    @property
    def state_shapes(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Shapes of the recurrent states that some layers cache instead of keys and values, keyed
        by the zero-based layer index. The shapes do not include the batch dimension."""
        return {}

    @property
    def long_from(self) -> int | None:
        """Sequence length in tokens at which the rotary frequencies change; None if they never
        change. Once a sequence reaches this length, keys that were cached while it was shorter
        can't be reused."""
        return rope_changes_at(getattr(self, "rope_scaling", None))

    @property
    def router_loss_coefficient(self) -> float:
        """Weight of the load-balancing loss in training; 0 for dense models."""
        return getattr(self, "router_aux_loss_coef", 0.0)

    def require_multiple(self, name: str, of: str) -> None:
        """Check that the value of one key is a multiple of the value of another key.

        Raises:
            ValueError: the value of `name` is not a multiple of the value of `of`.
        """
        value, divisor = getattr(self, name), getattr(self, of)
        if value % divisor:
            raise ValueError(f"{name} {value} must be a multiple of {of} {divisor}")

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has experts instead of an MLP."""
        return self.expert_count > 0

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the attention settings of a layer (counted from 0)."""
        return AttentionSpec()


#: Maximum number of families that an error message lists as not having a key. If more families do
#: not have the key, the message lists the families that have it instead.
_MOST_WITHOUT = 3


def not_a_key(name: str, model_type: str) -> str:
    """Return the error message for a key that a family does not have. The message lists the
    families that have the key. Return "" if no family has it."""
    classes: list[type[FamilyConfig]] = [FamilyConfig]
    for kind in classes:  # the loop extends this list, so it visits all subclasses
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
