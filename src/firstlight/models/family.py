"""Model families: the facts that loading, conversion, parallelism and planning need of each.

Outside of `models/`, only readers of other programs' files and benchmarks name a family. A
Llama-like family is one entry of `llama_families.py`; a family with an architecture of its own is
a file with a config class that derives from `FamilyConfig`, and a model class. `registry.py` has
the table of all families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from firstlight.models.rope import rope_changes_at
from firstlight.section import Section


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer.

    Attributes:
        window: number of tokens, itself included, that a token sees; None is all before it.
        dropout: probability with which an attention weight is dropped in training.
        scale: factor of the scores; None is 1 / sqrt(head_dim).
        softcap: bound c of the scores s, which become c tanh(s / c); None leaves them as they are.
        rope: number of the rotary table that turns queries and keys: 0, or 1 if layers with a
            window have another table; None is no rotation.
        sinks: True where each head has a learned logit more in its softmax, of a token without a
            value.
        value_dim: size of a value's head, if it differs from that of a key's.
        state_size: numbers of the state that the layer keeps of all earlier tokens, in place of
            attention to each; 0 is attention.
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
        module: a layer's module of router and experts.
        matrices: names of an expert's matrices "gate", "up" and "down".
        size: key of config.json for the width inside an expert.
    """

    module: str
    matrices: Mapping[str, str]
    size: str

    @property
    def router(self) -> str:
        """Name of the router's matrix in a layer."""
        return f"{self.module}.gate.weight"

    def matrix(self, word: str, expert: int) -> str:
        """Name of an expert's "gate", "up" or "down" in a layer."""
        return f"{self.module}.experts.{expert}.{self.matrices[word]}.weight"


#: llama.cpp's form of their mixtures of experts, for `GGUFSpec.fixed`.
GGUF_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}

#: The names that Qwen and DeepSeek share.
QWEN_EXPERTS = ExpertNames(
    "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, "moe_intermediate_size"
)


@dataclass(frozen=True)
class GGUFSpec:
    """Form of a family in llama.cpp's files.

    Attributes:
        architecture: the value of general.architecture; "" where GGUF files of the family are
            neither written nor read.
        rotates_pairs: True if llama.cpp rotates neighbouring rows of a head, while Hugging Face
            rotates halves; rows of queries and keys are then stored in another order.
        rope_kinds: kinds of rotary scaling that llama.cpp computes.
        fixed: settings that llama.cpp computes one way only: config.json's key -> values that it
            computes with. A missing key is the family's default, or else the first of them.
        numbers: our key of a number -> GGUF's key.
        counts: our key of a whole number -> GGUF's key.
        optional: those of `numbers` and `counts` that a model may lack; for a count that is 0.
        layer: kind of a layer's tensors: "llama", "named" (those of `block`), "latent" (multi-head
            latent attention), "sinks" (a learned logit beside the scores) or "delta" (layers with
            the gated delta rule).
        block: GGUF's names of a layer's parts -> the family's, where a layer has biases everywhere
            and one matrix for queries, keys and values; {} is a layer as in Llama.
        head: "written" where llama.cpp wants a tensor for a tied head, too; "tied" where it knows
            no head but the embedding.
        has_windows: True where llama.cpp computes the window of those layers that have one.
        needs_window: True where its layers cannot do without one.
        has_window_base: True where it computes a rotary base of their own, too.
        exact_heads: True where llama.cpp wants the heads to share hidden_size.
        gating: function of a router's scores, in layers with latent attention.
        inner_eps: epsilon of the norms within attention in the model, for which llama.cpp takes
            rms_norm_eps; None where the two are one.
        wide_scale_layers: number of layers at which llama.cpp takes hidden_size over heads for
            query_pre_attn_scalar, in place of head_dim; 0 is none.
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
    """Names of a layer's norms, as in the family's files; None if a layer lacks this norm.

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
    """Rotary positions of a family.

    Attributes:
        kinds: kinds of scaling that the family has beside "default"; () is all.
        other_kinds: config.json's other names of kinds -> kind.
        turns_neighbours: True where dimensions 2i and 2i + 1 turn together, and not i and i + R/2.
        in_fp32: True where the rotation is computed in fp32 and then rounded.
        polar: True where transformers rotates by complex numbers, see `rope_tables`.
        partial_factor: rotated part of each head where config.json does not say it.
        original_positions: config.json's default of original_max_position_embeddings if this key is
            outside the rotary settings; 0 if it is one of them.
        nested: True where config.json has rotary settings of each kind of layer.
        local_theta_key: config.json's old key of the base in layers with a window; "" is none.
        default: rotary settings of a config.json without any, under its names.
    """

    kinds: tuple[str, ...] = ()
    other_kinds: Mapping[str, str] = field(default_factory=dict)
    turns_neighbours: bool = False
    in_fp32: bool = False
    polar: bool = False
    partial_factor: float = 1.0
    original_positions: int = 0
    nested: bool = False
    local_theta_key: str = ""
    default: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FamilySpec:
    """Facts of one `model_type`.

    Attributes:
        architecture: transformers' class, as in config.json's "architectures".
        gguf: form in llama.cpp's files.
        own_keys: config keys that not all families of the config class have.
        json_names: config.json's name of a key of ours, where it has another.
        hf_defaults: values of keys that config.json leaves out, as Hugging Face's config class has
            them, where they differ from a recipe's: see `hf_values`.
        qkv_bias: True where queries, keys and values always have biases.
        output_bias: False where the attention's output projection never has a bias.
        qk_norm: "head" if queries and keys are normalised in each head, "width" if over all heads
            together; None without normalisation.
        norms: names of a layer's norms.
        norm_kind: "rounded" where a norm's result is rounded before its weight w is multiplied in,
            "wide" where after it, "one_plus" where the factor is 1 + w, and rounded after it;
            "bare" where there is no weight; "layer" for LayerNorm with a bias in place of RMSNorm.
        activation: config.json's name of the MLP's activation.
        activation_key: config.json's key of the activation.
        gated: True where the MLP has a gate, as in SwiGLU and GeGLU.
        fused: True where one matrix holds queries, keys and values, and one gate and up
            projection; "mlp" where only the latter.
        scales_embeddings: True where embeddings are multiplied by sqrt(hidden_size).
        rope: rotary positions.
        full_attention_every: period of the layers (counted from 1) that see all tokens; the others
            have the window; 0 is none.
        no_rope_every: period of the layers (counted from 1) that have no rotary positions, but the
            window if there is one; 0 is none.
        period_key: config.json's old key of `full_attention_every`; "" is none.
        divides_width: True where transformers wants hidden_size to be a multiple of the heads even
            if head_dim is given.
        derived_keys: keys that always follow from the others, and that config.json does not have.
        indivisible: reason why tensor parallelism can't shard the layers; "" if it can.
        has_window_switch: True where config.json has use_sliding_window.
        experts: names of the experts in the files; None for dense models, and where the files have
            them stacked, as the model has.
        has_buffers: True where the files have tensors that are no parameters.
        has_mxfp4: True where experts may be stored in MXFP4.
        left_out: beginnings of the names of tensors that files may have beside the model.
        tokenizer_split: split of text that transformers gives every tokenizer of the family; None
            is the tokenizer's own.
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
    norm_kind: Literal["rounded", "wide", "one_plus", "bare", "layer"] = "rounded"
    activation: Literal["silu", "relu2", "gelu_pytorch_tanh", "gelu"] = "silu"
    activation_key: str = "hidden_act"
    gated: bool = True
    fused: Literal[False, True, "mlp"] = False
    scales_embeddings: bool = False
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


#: Sizes that all of Hugging Face's config classes have, in the order of `hf_values`.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def hf_values(
    *sizes: int | None,
    rms_norm_eps: float = 1e-6,
    experts: tuple[int, int] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Default values of a config class of Hugging Face.

    Args:
        sizes: vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
            num_key_value_heads and max_position_embeddings; None is worked out from the others.
        experts: num_experts and num_experts_per_tok of a mixture of experts.
        rms_norm_eps, others: values of further keys.
    """
    values = {name: size for name, size in zip(_SIZES, sizes, strict=True) if size is not None}
    if experts is not None:
        values["num_experts"], values["num_experts_per_tok"] = experts
        others = {"router_aux_loss_coef": 0.001, **others}
    return {**values, "rms_norm_eps": rms_norm_eps, **others}


class FamilyConfig(Section):
    """Base of the config classes: the facts that every model's config has.

    Attributes:
        families: facts by `model_type`.
        hf_names: config.json's name of a key of ours, where it has another.
        has_rotary: True where queries and keys are rotated by their positions; False where
            positions are learned.
        stores_transposed: True where linear layers keep their weights as [in, out].
        tensor_parallel_sizes: sizes that tensor parallelism divides by the number of processes;
            without any, there is no tensor parallelism.
        has_pipeline: True where the layers can be spread over the stages of a pipeline.
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
        """The family of a config that doesn't name it."""
        return str(cls.model_fields["model_type"].default)

    @property
    def family(self) -> FamilySpec:
        """The facts of this model's family."""
        return self.families[self.model_type]

    @property
    def indivisible(self) -> str:
        """Reason why tensor parallelism can't shard this model's layers; "" if it can."""
        return self.family.indivisible

    @property
    def expert_count(self) -> int:
        """Experts of a layer that has some; 0 for dense models."""
        return getattr(self, "num_experts", 0)

    @property
    def visited_experts(self) -> int:
        """Experts of a layer that each token visits; 0 for dense models."""
        return getattr(self, "num_experts_per_tok", 0)

    @property
    def logit_softcap(self) -> float | None:
        """Bound c of the logits z, which become c tanh(z / c); None leaves them as they are."""
        return None

    @property
    def cached_numbers(self) -> int:
        """Numbers that a token takes in a layer's key-value cache."""
        config: Any = self
        return 2 * int(config.num_key_value_heads) * int(config.head_dim)

    @property
    def state_shapes(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Shapes, without the batch, of the states that layers cache in place of keys and values,
        by the layer's number."""
        return {}

    @property
    def long_from(self) -> int | None:
        """Length from which on a text's rotary positions are others, so that nothing computed of
        its shorter beginning fits; None where they stay the same."""
        return rope_changes_at(getattr(self, "rope_scaling", None))

    @property
    def router_loss_coefficient(self) -> float:
        """Weight of the load-balancing loss in training; 0 for dense models."""
        return getattr(self, "router_aux_loss_coef", 0.0)

    def require_multiple(self, name: str, of: str) -> None:
        """Check that one key is a multiple of another.

        Raises:
            ValueError: it is not.
        """
        value, divisor = getattr(self, name), getattr(self, of)
        if value % divisor:
            raise ValueError(f"{name} {value} must be a multiple of {of} {divisor}")

    def has_experts(self, layer: int) -> bool:
        """True if a layer (counted from 0) has experts in place of an MLP."""
        return self.expert_count > 0

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Attention of a layer, counted from 0."""
        return AttentionSpec()


#: Most families that a message lists as those without a key, in place of those with it.
_MOST_WITHOUT = 3


def not_a_key(name: str, model_type: str) -> str:
    """Message that a family lacks a key, with the families that have it; "" if none has it."""
    classes: list[type[FamilyConfig]] = [FamilyConfig]
    for kind in classes:  # grows
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
    return f"{name} is not a key of {model_type} models (of {families})" if has else ""
