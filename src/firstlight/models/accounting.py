"""Parameters, FLOPs and bytes, counted from the model itself.

Give it a model on the meta device and nothing is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from firstlight.models import Model, ModelConfig, build_model
from firstlight.models.llama_layers import RMSNorm
from firstlight.models.moe import Router
from firstlight.models.ops import Embedding, SelfAttention
from firstlight.models.qwen3_next import GatedDeltaNet


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; a tied head counts once, under `embedding`.

    `idle` are those, among the experts', that a token doesn't pass through.
    """

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int
    experts: int = 0
    router: int = 0
    idle: int = 0

    @property
    def by_part(self) -> dict[str, int]:
        """Numbers of parameters by their use."""
        return {name: getattr(self, name) for name in _PARTS}

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.by_part.values())

    @property
    def active(self) -> int:
        """The parameters that a token passes through."""
        return self.total - self.idle


_PARTS = ("embedding", "attention", "mlp", "experts", "router", "norm", "head")


def meta_model(config: ModelConfig) -> Model:
    """The model without memory for its parameters."""
    with torch.device("meta"):
        return build_model(config)


def count_parameters(model: Model) -> ParameterCount:
    """Count a model's parameters by their use."""
    counts = dict.fromkeys(_PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[_part_of(model, name)] += parameter.numel()
    idle = round(counts["experts"] * (1 - _visited_share(model.config)))
    return ParameterCount(**counts, idle=idle)


def _part_of(model: Model, name: str) -> str:
    """The role of a parameter of this name: one of `_PARTS`."""
    parts = name.split(".")
    # From the outermost module to the parameter's own.
    modules = [model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts) - 1)]
    if parts[0] == "lm_head":
        return "head"
    if isinstance(modules[-1], Embedding):
        return "embedding"
    # Before attention, which has norms of queries and keys inside it.
    if isinstance(modules[-1], nn.LayerNorm | RMSNorm):
        return "norm"
    if any(isinstance(module, SelfAttention | GatedDeltaNet) for module in modules):
        return "attention"
    if "experts" in parts:
        return "experts"
    return "router" if isinstance(modules[-1], Router) else "mlp"


def is_multiplied(model: Model, name: str) -> bool:
    """True if the parameter of this name is a factor of a matrix product, not only looked up."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return not isinstance(owner, Embedding) and model.get_parameter(name).dim() >= 2


def _visited_share(config: ModelConfig) -> float:
    """The share of a layer's experts that a token visits."""
    return config.visited_experts / config.expert_count if config.expert_count else 1.0


def train_flops_per_token(model: Model, seq_len: int, *, frozen: bool = False) -> float:
    """FLOPs of one token's forward and backward pass (recomputation not counted).

    6 for each weight of a matrix product that the token meets (2 forward, 4 backward; the head
    included, also when tied; the embedding look-up costs none; of the experts, those visited),
    and for attention 12 * heads * head_dim a layer for each token that it sees: on average half the
    row, because attention is causal, or less with a sliding window (Chowdhery et al. 2022, appendix
    B, counts the whole row). A layer with a state costs 18 for each of the state's numbers: every
    token decays it, reads it for the update, writes it and reads it.

    Args:
        frozen: True if the weights get no gradient (LoRA): 4 for each instead of 6. The FLOPs of
            the adapters are not counted.
    """
    config = model.config
    matrix_weights = 0.0
    # With duplicates: a tied head is multiplied with, though its embedding is only looked up.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 3 and "experts" in name.split("."):  # stacked
            matrix_weights += parameter.numel() * _visited_share(config)
        elif is_multiplied(model, name):
            matrix_weights += parameter.numel()
    seen = states = 0.0
    for layer in range(config.num_hidden_layers):
        spec = config.attention_spec(layer)
        if spec.state_size:
            # The same for each token, however many came before.
            states += spec.state_size
            continue
        width = min(spec.window or seq_len, seq_len)
        # The first `width` tokens see half of it on average, all after them the whole.
        seen += width - width * width / (2 * max(seq_len, 1))
    matrices = (4.0 if frozen else 6.0) * matrix_weights
    return matrices + 12.0 * config.num_attention_heads * config.head_dim * seen + 18.0 * states


def cache_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the key-value cache."""
    # Layers with a state have no keys and values.
    layers = config.num_hidden_layers - len(config.state_shapes)
    return layers * config.cached_numbers * dtype.itemsize


def state_bytes(config: ModelConfig) -> int:
    """Bytes of the fp32 states of a sequence of any length, in layers without keys and values."""
    shapes = (shape for layer in config.state_shapes.values() for shape in layer)
    return sum(4 * math.prod(shape) for shape in shapes)


def is_inside_a_layer(name: str) -> bool:
    """True if a parameter of this name is one of a layer's."""
    return any(part.isdigit() for part in name.split("."))
