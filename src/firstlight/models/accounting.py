"""Count the parameters, FLOPs and bytes of a model by inspecting its modules. The functions also
accept models on the meta device, whose parameters use no memory (see `meta_model`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firstlight.models import Model, ModelConfig, build_model
from firstlight.models.lfm2 import ShortConv
from firstlight.models.llama import RMSNorm
from firstlight.models.moe import Router
from firstlight.models.ops import Embedding, SelfAttention
from firstlight.models.qwen3_next import GatedDeltaNet


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters in each part of a model.

    A tied head is counted once, as part of `embedding`. `experts` counts the routed experts only;
    shared experts are counted in `mlp`.

    Attributes:
        idle: number of parameters in the routed experts that are not chosen for a token.
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
        """Number of parameters in each part, keyed by the part's name. The values add up to
        `total`."""
        return {name: getattr(self, name) for name in _PARTS}

    @property
    def total(self) -> int:
        """Total number of parameters."""
        return sum(self.by_part.values())

    @property
    def active(self) -> int:
        """Number of parameters used per token."""
        return self.total - self.idle


_PARTS = ("embedding", "attention", "mlp", "experts", "router", "norm", "head")


#: Models most recently created by `meta_model`, keyed by the class and the JSON values of their
#: config.
_meta_models: dict[tuple[type, str], Model] = {}
_META_MODELS = 4


def meta_model(config: ModelConfig) -> Model:
    """Create a model from its config on the meta device, where parameters do not take any memory.

    The model is cached, because a run or a plan needs it many times. Callers must not modify it.
    """
    key = (type(config), config.model_dump_json())
    if key not in _meta_models:
        with torch.device("meta"):
            model = build_model(config)
        while len(_meta_models) >= _META_MODELS:
            _meta_models.pop(next(iter(_meta_models)), None)
        _meta_models[key] = model
    return _meta_models[key]


def matrix_shapes(config: ModelConfig, vocab_multiple: int = 1) -> list[tuple[int, int]]:
    """Return the shapes of all weights that multiply activations, with one entry per expert.

    Args:
        config: config of the model.
        vocab_multiple: the embedding is padded so that its number of rows is a multiple of this
            number.
    """
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    named = model.layers.named_parameters()
    weights: list[Tensor] = [p for name, p in named if not name.endswith("conv1d.weight")]
    weights.append(model.lm_head.weight)
    # The weights of all experts are stored in one 3-D tensor.
    return [
        (weight.shape[-2], weight.shape[-1])
        for weight in weights
        if weight.dim() >= 2
        for _ in range(math.prod(weight.shape[:-2]))
    ]


def count_parameters(model: Model) -> ParameterCount:
    """Count the parameters in each part of a model."""
    counts = dict.fromkeys(_PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[_part_for(model, name)] += parameter.numel()
    idle = round(counts["experts"] * (1 - _visited_share(model.config)))
    return ParameterCount(**counts, idle=idle)


def _part_for(model: Model, name: str) -> str:
    """Return the part of the model that contains the parameter `name`. The result is one of
    `_PARTS`."""
    parts = name.split(".")
    # All modules on the path, from the outermost to the parameter's owner.
    modules = [model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts) - 1)]
    if parts[0] == "lm_head":
        return "head"
    if isinstance(modules[-1], Embedding):
        return "embedding"
    # Norms are checked before attention, because attention modules contain norms of queries and
    # keys.
    if isinstance(modules[-1], nn.LayerNorm | RMSNorm):
        return "norm"
    if any(isinstance(module, SelfAttention | GatedDeltaNet | ShortConv) for module in modules):
        return "attention"
    if "experts" in parts:
        return "experts"
    return "router" if isinstance(modules[-1], Router) else "mlp"


def is_multiplied(model: Model, name: str) -> bool:
    """Return True if the parameter `name` is a matrix that multiplies activations. Return False for
    vectors, and for the embedding, whose rows are only looked up."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return not isinstance(owner, Embedding) and model.get_parameter(name).dim() >= 2


def _visited_share(config: ModelConfig) -> float:
    """Return the fraction of a layer's routed experts that each token uses, or 1 for dense
    models."""
    return config.visited_experts / config.expert_count if config.expert_count else 1.0


def train_flops_per_token(model: Model, seq_len: int, *, frozen: bool = False) -> float:
    """Return the FLOPs per token of a forward and backward pass, without recomputation.

    - Matrices: 6 FLOPs per weight applied to the token, 2 in the forward pass and 4 in the backward
      pass. The head is included even if it is tied. Embedding lookups and routed experts that are
      not chosen for the token are not included.
    - Attention: 12 * heads * head_dim FLOPs per layer for each token that the current token attends
      to. Because attention is causal, a token attends to half of the sequence on average, or less
      with a sliding window. Chowdhery et al. 2022 (arXiv 2204.02311, appendix B) count the full
      sequence instead.
    - Linear attention: 18 FLOPs per element of the recurrent state. For each token, the element is
      decayed, read for the update, written, and read for the output.

    Args:
        model: model to count.
        seq_len: sequence length in tokens.
        frozen: True if the weights do not receive gradients (LoRA). The cost is then 4 FLOPs per
            weight instead of 6. The FLOPs of the adapters are not included.
    """
    config = model.config
    matrix_weights = 0.0
    # Include duplicates, so that a tied head is counted. The weight that it shares with the
    # embedding is not counted under the embedding's name, because lookups cost no FLOPs.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 3 and "experts" in name.split("."):  # stacked
            matrix_weights += parameter.numel() * _visited_share(config)
        elif is_multiplied(model, name):
            matrix_weights += parameter.numel()
    seen = states = 0.0
    for layer in range(config.num_hidden_layers):
        spec = config.attention_spec(layer)
        if spec.state_size:
            # The cost per token is constant, because it does not depend on the number of earlier
            # tokens.
            states += spec.state_size
            continue
        width = min(spec.window or seq_len, seq_len)
        # The first `width` tokens attend to width / 2 tokens on average, and all later tokens
        # attend to `width` tokens.
        seen += width - width * width / (2 * max(seq_len, 1))
    matrices = (4.0 if frozen else 6.0) * matrix_weights
    return matrices + 12.0 * config.num_attention_heads * config.head_dim * seen + 18.0 * states


def cache_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the number of bytes that the key-value cache needs per token, summed over all layers
    that cache keys and values."""
    layers = config.num_hidden_layers - len(config.state_shapes)
    return layers * config.cached_numbers * dtype.itemsize


def state_bytes(config: ModelConfig) -> int:
    """Return the size in bytes of the recurrent states that all layers with linear attention store
    for one sequence. The states are in fp32. Their size does not depend on the sequence length."""
    shapes = (shape for layer in config.state_shapes.values() for shape in layer)
    return sum(4 * math.prod(shape) for shape in shapes)


def is_inside_a_layer(name: str) -> bool:
    """Return True if the parameter `name` belongs to a numbered layer of the model."""
    return any(part.isdigit() for part in name.split("."))
