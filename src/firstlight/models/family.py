"""Model families: the facts that loading, conversion, parallelism and planning need of each, and
the table of the Llama-like families.

Outside of `models/`, only readers of other programs' files and benchmarks name a family. A
Llama-like family is one entry of `DENSE` or `ROUTED`; a family with an architecture of its own is
a file with a config class that derives from `FamilyConfig`, and a model class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from firstlight.section import Section


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer.

    Attributes:
        window: number of tokens, itself included, that a token sees; None is all before it.
        dropout: probability with which an attention weight is dropped in training.
        scale: factor of the scores; None is 1 / sqrt(head_dim).
    """

    window: int | None = None
    dropout: float = 0.0
    scale: float | None = None


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts in a family's files, {} standing for an expert's number.

    Attributes:
        gate, up, down: matrices of an expert.
        router: matrix of the router.
        size: key of config.json for the width inside an expert.
    """

    gate: str
    up: str
    down: str
    router: str
    size: str


@dataclass(frozen=True)
class GGUFSpec:
    """Form of a family in llama.cpp's files.

    Attributes:
        architecture: the value of general.architecture.
        rotates_pairs: True where llama.cpp turns neighbouring rows of a head, where Hugging Face
            turns halves: rows of queries and keys lie in another order.
        rope_kinds: kinds of rotary scaling that llama.cpp computes.
        fixed: settings that llama.cpp computes one way only: (config.json's key, values that it
            computes with, value of a missing key).
        numbers: config.json's key of a number -> GGUF's key.
    """

    architecture: str
    rotates_pairs: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear")
    fixed: tuple[tuple[str, tuple[Any, ...], Any], ...] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FamilySpec:
    """Facts of one `model_type`.

    Attributes:
        architecture: transformers' class, as in config.json's "architectures".
        gguf: form in llama.cpp's files.
        own_keys: config keys that not all families of the config class have.
        hf_defaults: values of keys that config.json leaves out, as Hugging Face's config class has
            them, where they differ from a recipe's.
        qkv_bias: True where queries, keys and values always have biases.
        qk_norm: True where queries and keys are normalised by head.
        has_window_switch: True where config.json has use_sliding_window.
        experts: names of the experts in the files; None for dense models.
        tokenizer_split: split of text that transformers gives every tokenizer of the family; None
            is the tokenizer's own.
    """

    architecture: str
    gguf: GGUFSpec
    own_keys: tuple[str, ...] = ()
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    has_window_switch: bool = False
    experts: ExpertNames | None = None
    tokenizer_split: str | None = None


class FamilyConfig(Section):
    """Base of the config classes: what can be asked of every model.

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

    @property
    def family(self) -> FamilySpec:
        """The facts of this model's family."""
        return self.families[self.model_type]

    @property
    def expert_count(self) -> int:
        """Experts of a layer that has some; 0 for dense models."""
        return 0

    @property
    def router_loss_coefficient(self) -> float:
        """Weight of the load-balancing loss in training; 0 for dense models."""
        return 0.0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (counted from 0) has experts in place of an MLP."""
        return False

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Attention of a layer, counted from 0."""
        return AttentionSpec()


# The Llama-like families: `LlamaConfig` is the config class of `DENSE`, `MoEConfig` of `ROUTED`.

#: Values of keys that config.json leaves out, as in Hugging Face's config classes, where a recipe
#: has another default. A family's own values stand in its entry.
HF_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}

_NO_BIAS = ("attention_bias", (False,), False)
_ALL_ROPE = ("default", "linear", "llama3")

#: Granite's keys.
MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

# Sizes that several of Hugging Face's config classes have in common.
_SIZES_OF_LLAMA = {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}
_SIZES_OF_MISTRAL = {
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_SIZES_OF_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}

DENSE: dict[str, FamilySpec] = {
    "llama": FamilySpec(
        "LlamaForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=_ALL_ROPE),
        own_keys=("attention_bias", "mlp_bias"),
        hf_defaults=_SIZES_OF_LLAMA,
    ),
    "mistral": FamilySpec(
        "MistralForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=_ALL_ROPE),
        own_keys=("sliding_window",),
        hf_defaults={**_SIZES_OF_MISTRAL, "sliding_window": 4096},
    ),
    "qwen2": FamilySpec(
        "Qwen2ForCausalLM",
        GGUFSpec("qwen2"),
        own_keys=("sliding_window", "max_window_layers"),
        hf_defaults=_SIZES_OF_QWEN,
        qkv_bias=True,
        has_window_switch=True,
        tokenizer_split="qwen2",
    ),
    "qwen3": FamilySpec(
        "Qwen3ForCausalLM",
        GGUFSpec("qwen3", fixed=(_NO_BIAS,)),
        own_keys=("attention_bias", "sliding_window", "max_window_layers"),
        hf_defaults={**_SIZES_OF_QWEN, "head_dim": 128},
        qk_norm=True,
        has_window_switch=True,
    ),
    "granite": FamilySpec(
        "GraniteForCausalLM",
        GGUFSpec(
            "granite",
            rotates_pairs=True,
            numbers={
                "embedding_multiplier": "embedding_scale",
                "attention_multiplier": "attention.scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
            },
        ),
        own_keys=("attention_bias", "mlp_bias", *MULTIPLIERS),
        hf_defaults={**_SIZES_OF_LLAMA, "attention_multiplier": 1.0},
    ),
}

ROUTED: dict[str, FamilySpec] = {
    "mixtral": FamilySpec(
        "MixtralForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=_ALL_ROPE),
        own_keys=("sliding_window",),
        hf_defaults={
            **_SIZES_OF_MISTRAL,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        experts=ExpertNames(
            gate="block_sparse_moe.experts.{}.w1.weight",
            up="block_sparse_moe.experts.{}.w3.weight",
            down="block_sparse_moe.experts.{}.w2.weight",
            router="block_sparse_moe.gate.weight",
            size="intermediate_size",
        ),
    ),
    "qwen3_moe": FamilySpec(
        "Qwen3MoeForCausalLM",
        GGUFSpec(
            "qwen3moe",
            fixed=(
                _NO_BIAS,
                ("norm_topk_prob", (True,), False),
                ("decoder_sparse_step", (1,), 1),
                ("mlp_only_layers", ([], None), None),
            ),
        ),
        own_keys=("attention_bias", "sliding_window"),
        hf_defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        qk_norm=True,
        has_window_switch=True,
        experts=ExpertNames(
            gate="mlp.experts.{}.gate_proj.weight",
            up="mlp.experts.{}.up_proj.weight",
            down="mlp.experts.{}.down_proj.weight",
            router="mlp.gate.weight",
            size="moe_intermediate_size",
        ),
    ),
}

#: Keys that not all families have.
OWN_KEYS: frozenset[str] = frozenset(
    key for spec in (DENSE | ROUTED).values() for key in spec.own_keys
)
