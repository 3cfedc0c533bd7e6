"""Parameters, FLOPs and bytes, counted from the model itself.

Give it a model on the meta device and nothing is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from firstlight.models import GPT2Config, Model, ModelConfig, MoEConfig, build_model


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
        """The numbers by what the parameters do."""
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
_EMBEDDINGS = ("embed_tokens", "wte", "wpe")


def meta_model(config: ModelConfig) -> Model:
    """The model without memory for its parameters."""
    with torch.device("meta"):
        return build_model(config)


def count_parameters(model: Model) -> ParameterCount:
    """Count a model's parameters by what they do."""
    counts = dict.fromkeys(_PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[_part_of(name)] += parameter.numel()
    idle = round(counts["experts"] * (1 - _visited_share(model.config)))
    return ParameterCount(**counts, idle=idle)


def _part_of(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "lm_head":
        return "head"
    if parts[-2] in _EMBEDDINGS:
        return "embedding"
    if "norm" in parts[-2]:
        return "norm"
    if "self_attn" in parts or "attn" in parts:
        return "attention"
    if "experts" in parts:
        return "experts"
    if parts[-2] == "gate":
        return "router"
    return "mlp" if "mlp" in parts else "norm"


def _visited_share(config: ModelConfig) -> float:
    """The share of a layer's experts that a token visits."""
    return config.num_experts_per_tok / config.num_experts if isinstance(config, MoEConfig) else 1.0


def train_flops_per_token(model: Model, seq_len: int, *, frozen: bool = False) -> float:
    """FLOPs of one token's forward and backward pass (recomputation not counted).

    6 for each weight of a matrix product that the token meets (2 forward, 4 backward; the head
    included, also when tied; the embedding look-up costs none; of the experts, those visited),
    and for attention 12 * heads * head_dim a layer for each token that it sees: on average half
    the row, as causality leaves it, or what a sliding window leaves of that (Chowdhery et al.
    2022, appendix B, counts the whole row).

    Args:
        frozen: the weights get no gradient of their own (LoRA): 4 for each instead of 6. What
            the adapters add is not counted.
    """
    config = model.config
    matrix_weights = 0.0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 3:
            matrix_weights += parameter.numel() * _visited_share(config)
        elif _is_multiplied(name, parameter):
            matrix_weights += parameter.numel()
    seen = 0.0
    for layer in range(config.num_hidden_layers):
        window = None if isinstance(config, GPT2Config) else config.window(layer)
        width = min(window or seq_len, seq_len)
        seen += width - width * width / (2 * max(seq_len, 1))
    return (
        4.0 if frozen else 6.0
    ) * matrix_weights + 12.0 * config.num_attention_heads * config.head_dim * seen


def cache_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the key-value cache."""
    return (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    )


Engine = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one process of a run needs, by what they hold; see `rank_memory`.

    Attributes:
        weights: fp32 parameters, or this process' pieces of them.
        gradients: fp32, of the same.
        moments: AdamW's two, fp32, of the same.
        computing: bf16 weights, and with fsdp gradients, of what is whole at a time.
        layer_inputs: kept for the backward pass, of one row.
        accumulating: whole gradients, in steps of several micro-batches.
        offloaded: whether weights, gradients and moments lie in the CPU's memory.
    """

    weights: int
    gradients: int
    moments: int
    computing: int
    layer_inputs: int
    accumulating: int
    offloaded: bool

    @property
    def state(self) -> int:
        """Weights, gradients and moments."""
        return self.weights + self.gradients + self.moments

    @property
    def device(self) -> int:
        """On the GPU, with one row and one micro-batch a step."""
        return self.computing + self.layer_inputs + (0 if self.offloaded else self.state)

    @property
    def host(self) -> int:
        """In the CPU's memory."""
        return self.state if self.offloaded else 0


def rank_memory(
    config: ModelConfig,
    row_tokens: int,
    engine: Engine = "none",
    processes: int = 1,
    *,
    shard: int | None = None,
    offload: bool = False,
) -> RankMemory:
    """What training a model takes of each process: fp32 AdamW, products in bf16, full activation
    checkpointing.

    Arithmetic, not a measurement. Left out: what a layer needs while it is computed (again), the
    logits (`efficiency.loss_chunk_tokens` bounds them), buffers of NCCL and of the allocator.

    Args:
        config: the model's shape.
        row_tokens: tokens of the one row of a micro-batch.
        engine: what the processes share the model by.
        processes: how many.
        shard: with fsdp, how many processes share one copy; None is all.
        offload: with fsdp, keep the pieces in the CPU's memory.
    """
    parameters = dict(meta_model(config).named_parameters())
    whole = sum(p.numel() for p in parameters.values())
    inside = sum(p.numel() for name, p in parameters.items() if is_inside_a_layer(name))
    pieces = (shard or processes) if engine == "fsdp" else 1
    # FSDP2 cuts the first dimension, into pieces that are as large as the first.
    held = sum(-(-len(p) // pieces) * (p.numel() // len(p)) for p in parameters.values())
    stream = row_tokens * config.hidden_size * config.num_hidden_layers
    if engine == "fsdp":
        outside, layer = whole - inside, inside // config.num_hidden_layers
        # While a layer is computed back: its weights and the next's, its gradient, that gradient in
        # fp32 for the sum; and outside of the layers, weights and gradient. In the end: the latter
        # with their gradient in fp32.
        computing = max(4 * outside + 10 * layer, 8 * outside)
    else:
        # autocast's copies of the matrices stay until the forward pass is done.
        factors = meta_model(config).named_parameters(remove_duplicate=False)
        computing = 2 * sum(p.numel() for name, p in factors if _is_multiplied(name, p))
    return RankMemory(
        weights=4 * held,
        gradients=4 * held,
        moments=8 * held,
        computing=computing,
        # The stream is of the embedding's dtype, which fsdp puts together in bf16.
        layer_inputs=stream * (2 if engine == "fsdp" else 4),
        accumulating=4 * whole if engine == "fsdp" else 0,
        offloaded=offload,
    )


def is_inside_a_layer(name: str) -> bool:
    """Whether a parameter of this name is one of a layer's."""
    return any(part.isdigit() for part in name.split("."))


def _is_multiplied(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a factor of a matrix product, and not only looked up."""
    return parameter.dim() >= 2 and name.split(".")[-2] not in _EMBEDDINGS
