"""LoRA: the `lora` section of a recipe, the adapted linear layer, adding adapters to a model and
merging them, and their parameters by the names in PEFT's files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from firstlight.errors import ConfigError, ModelError, nearest
from firstlight.lora.quantized import NF4Linear, require_nf4
from firstlight.models import Model
from firstlight.models.gpt2 import Conv1D
from firstlight.models.moe import Experts, Router
from firstlight.models.ops import Embedding
from firstlight.section import Section

LinearLayer = nn.Linear | Conv1D
HEAD = "lm_head"

#: Module classes that a target may name by mistake -> their names in the error message.
_OTHER_KINDS: dict[type[nn.Module], str] = {
    Embedding: "an embedding",
    Experts: "a stack of experts",
    Router: "the router of experts",
}


_Target = Annotated[str, Field(min_length=1)]


class LoraConfig(Section):
    """The `lora` section of a recipe: the initial weights are frozen, and low-rank matrices
    added to them are trained (LoRA, Hu et al. 2021, arXiv 2106.09685).
    """

    rank: int = Field(8, ge=1)
    """rank of the matrices that are added to a layer: rows of A, and columns of B."""
    alpha: float = Field(16.0, gt=0)
    """scale of the product B A that is added to a layer: it is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout probability for the input of the low-rank matrices, in training."""
    targets: Literal["all-linear"] | Annotated[list[_Target], Field(min_length=1)] = "all-linear"
    """adapted layers by the last parts of their names (`q_proj`, `mlp.c_proj`), or "all-linear":
    every linear layer except the head, as in PEFT."""
    dora: bool = False
    """true trains the magnitude of each output separately from its direction (DoRA, Liu et al.
    2024). Costs a pass over every adapted weight in each forward pass."""
    quantize: Literal["none", "nf4"] = "none"
    """"nf4" stores the frozen linear layers except the head in 4 bits, and multiplies with their
    dequantised weights (QLoRA, Dettmers et al. 2023; needs bitsandbytes). Stacked experts stay
    unquantised."""


class LoraLinear(nn.Module):
    """A frozen linear layer W with a trainable low-rank term B A.

        LoRA  y = W x + b + s B A x
        DoRA  y = m / |W + s B A| * (W + s B A) x + b

    LoRA is Hu et al. 2021 (arXiv 2106.09685), DoRA Liu et al. 2024 (arXiv 2402.09353). |.| are the
    norms of a weight's rows [out], which the gradient treats as constants (DoRA, section 4.3).
    Parameters are at least fp32, and stay so when `LanguageModel.cast` makes the model bf16;
    products with A and B run in the dtype of the input, or that of autocast.

    Args:
        base_layer: the layer with W [out, in] and b [out]; frozen here.
        rank: r, the rank of B A.
        scaling: s, the factor of B A.
        dropout: dropout probability for A's input, in training.
        dora: True for DoRA, whose magnitudes m start at |W|.

    Attributes:
        lora_A: A [r, in], zero until `reset` or a file fills it.
        lora_B: B [out, r], zero until training or a file fills it.
        lora_magnitude_vector: m [out]; None for LoRA.
        keeps_precision: True, since the update of A or B in one step could be lost in bf16's
            rounding; see `LanguageModel.cast`.
    """

    keeps_precision = True

    def __init__(
        self,
        base_layer: LinearLayer | NF4Linear,
        rank: int,
        scaling: float,
        dropout: float,
        dora: bool,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.scaling, self.dropout = scaling, dropout
        weight = weight_of(base_layer)
        out_features, in_features = weight.shape
        self.lora_A = nn.Parameter(weight.new_zeros(rank, in_features))
        self.lora_B = nn.Parameter(weight.new_zeros(out_features, rank))
        norm = torch.linalg.vector_norm(weight, dim=1) if dora else None
        self.lora_magnitude_vector = None if norm is None else nn.Parameter(norm)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw A from Uniform(-1/sqrt(in), 1/sqrt(in)), as PEFT does. B stays zero, so that B A is
        zero.

        Args:
            generator: a generator on the CPU, so that all devices start from the same numbers.
        """
        drawn = torch.empty(self.lora_A.shape)
        bound = 1 / math.sqrt(drawn.shape[1])
        self.lora_A.copy_(drawn.uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        y: Tensor = self.base_layer(x)
        inner = F.dropout(x, self.dropout, self.training) if self.dropout else x
        inner = F.linear(inner, self.lora_A.to(x.dtype))
        y = y + self.scaling * F.linear(inner, self.lora_B.to(x.dtype))
        if self.lora_magnitude_vector is None:
            return y
        scale = self.lora_magnitude_vector / self._norm()
        scaled = y * scale
        if self.base_layer.bias is not None:
            # y already includes the bias, which is not scaled.
            scaled = scaled + (1 - scale) * self.base_layer.bias
        return scaled.to(y.dtype)

    def merged_weight(self) -> Tensor:
        """Return the weight [out, in] of the plain layer that computes the same, in at least
        fp32."""
        with torch.no_grad():
            weight = self._changed()
            if self.lora_magnitude_vector is not None:
                weight *= (self.lora_magnitude_vector / self._norm())[:, None]
        return weight

    def _norm(self) -> Tensor:
        # In fp32 even under autocast: m started as a norm in fp32, and m / |W| must start at 1.
        with torch.no_grad(), torch.autocast(self.lora_A.device.type, enabled=False):
            norm: Tensor = torch.linalg.vector_norm(self._changed(), dim=1)
        # Rows of zeros, which pad a vocabulary, have m = 0 and |W| = 0: 0 / 0 would be NaN.
        return norm.clamp_min(torch.finfo(norm.dtype).tiny)

    def _changed(self) -> Tensor:
        return weight_of(self.base_layer) + self.scaling * (self.lora_B @ self.lora_A)


def weight_of(layer: LinearLayer | NF4Linear) -> Tensor:
    """Return a linear layer's weight as [out, in], in at least fp32."""
    if isinstance(layer, NF4Linear):
        return layer.weight_in(torch.promote_types(layer.dtype, torch.float32))
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def add_lora(
    model: Model,
    config: LoraConfig,
    generator: torch.Generator,
    *,
    frozen_dtype: torch.dtype | None = None,
) -> None:
    """Freeze a plain model and add trainable adapters to its linear layers. The model computes the
    same as before until it is trained (with 4-bit weights, nearly the same).

    Args:
        model: the model; changed in place.
        config: the recipe's `lora` section.
        generator: a generator on the CPU, from which each A is drawn.
        frozen_dtype: dtype of the frozen linear layers' weights, except the head's; None leaves
            them unchanged. Under autocast to this dtype the results are the same, and these
            weights take half the memory of fp32.

    Raises:
        ConfigError: a target is not a linear layer of the model, or the device has no 4-bit
            kernels.
        MissingDependencyError: 4-bit weights need bitsandbytes.
    """
    layers = linear_layers(model)
    names = _target_names(model, config, layers)
    model.requires_grad_(False)
    for name, layer in layers.items():
        if name == HEAD:
            continue
        if config.quantize == "nf4":
            require_nf4(layer.weight.device)
            _replace(model, name, NF4Linear(layer))
        elif frozen_dtype is not None:
            layer.weight.data = layer.weight.data.to(frozen_dtype)
    for name in names:
        wrapped = wrap(model, name, config.rank, config.alpha / config.rank, config)
        wrapped.reset(generator)


def wrap(model: Model, name: str, rank: int, scaling: float, config: LoraConfig) -> LoraLinear:
    """Replace a linear layer with a `LoraLinear` that computes the same as before.

    Args:
        model: the model; changed in place.
        name: name of the layer.
        rank, scaling: see `LoraLinear`.
        config: the section that gives dropout and DoRA.
    """
    base = model.get_submodule(name)
    assert isinstance(base, nn.Linear | Conv1D | NF4Linear)
    wrapped = LoraLinear(base, rank, scaling, config.dropout, config.dora).train(base.training)
    _replace(model, name, wrapped)
    return wrapped


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield the adapted layers and their names in the plain model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' parameters by name; {} for a model without adapters."""
    return {
        f"{name}.{kind}": parameter
        for name, layer in lora_layers(model)
        for kind, parameter in layer.named_parameters(recurse=False)
    }


def merge_lora(model: Model) -> None:
    """Merge the adapters into the base weights, in place. The model then has plain linear layers,
    whose weights have the base's dtype; 4-bit weights are dequantised; and all parameters are
    trainable.

    An adapted head is untied from the embedding, including in `model.config`.
    """
    is_head_adapted = isinstance(model.lm_head, LoraLinear)
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            _replace(model, name, _plain(module.base_layer, module.merged_weight()))
        elif isinstance(module, NF4Linear) and not name.endswith(".base_layer"):
            _replace(model, name, _plain(module, weight_of(module)))
    if is_head_adapted and model.config.tie_word_embeddings:
        model.config = model.config.model_copy(update={"tie_word_embeddings": False})
    model.requires_grad_(True)


def _plain(base: LinearLayer | NF4Linear, weight: Tensor) -> LinearLayer:
    """Return a plain linear layer with the weight [out, in] and the base layer's class, dtype and
    bias."""
    is_conv1d = isinstance(base, Conv1D) or (isinstance(base, NF4Linear) and base.is_conv1d)
    dtype = base.dtype if isinstance(base, NF4Linear) else base.weight.dtype
    with torch.device("meta"):
        if is_conv1d:
            layer: LinearLayer = Conv1D(
                weight.shape[1], weight.shape[0], bias=base.bias is not None
            )
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=base.bias is not None)
    layer.weight = nn.Parameter((weight.T if is_conv1d else weight).to(dtype).contiguous())
    layer.bias = base.bias
    return layer.train(base.training)


def linear_layers(model: Model) -> dict[str, LinearLayer]:
    """Return the linear layers by name, without the routers of experts: adapting a router could
    change the output much, and PEFT's files have no routers among their layers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(module, Router)
    }


def _target_names(model: Model, config: LoraConfig, layers: dict[str, LinearLayer]) -> list[str]:
    """Return the names of the layers that a config's targets match, in the model's order.

    Raises:
        ConfigError: a target matches no layer.
    """
    if config.targets == "all-linear":
        return [name for name in layers if name != HEAD]
    for target in config.targets:
        if not any(_is_target(name, target) for name in layers):
            raise ConfigError(_no_such_target(model, target, layers))
    return [name for name in layers if any(_is_target(name, t) for t in config.targets)]


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _no_such_target(model: Model, target: str, layers: dict[str, LinearLayer]) -> str:
    known = sorted({name.rpartition(".")[2] for name in layers})
    problem = f"matches no linear layer of this model{nearest(target, known)}"
    for name, module in model.named_modules():
        kind = next((k for t, k in _OTHER_KINDS.items() if isinstance(module, t)), None)
        # Stacked experts are parameters that have the names of an expert's linear layers.
        stacked = dict(module.named_parameters(recurse=False)) if kind else {}
        if kind and any(
            _is_target(place, target) for place in (name, *(f"{name}.{n}" for n in stacked))
        ):
            problem = f"is {kind}, not a linear layer"
    return f"lora.targets '{target}' {problem}: there are {', '.join(known)}"


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


# Parameters under the names of PEFT's files

#: Prefix of the tensor names in PEFT's file.
PREFIX = "base_model.model."
#: Parameter of `LoraLinear` -> suffix of its tensor name in PEFT's file.
SUFFIXES = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora_magnitude_vector": "lora_magnitude_vector",
}


def fill_adapter(model: Model, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy the tensors of `adapter_tensors` into a model that has the same adapters.

    Args:
        model: the model; changed in place.
        tensors: A [r, in], B [out, r] and magnitudes [out], by their names in PEFT's file.
        where: name of the tensors' source for error messages.

    Raises:
        ModelError: a tensor is missing, extra or of another shape (named).
    """
    places = dict(_places(model))
    for name in sorted(places.keys() ^ tensors.keys()):
        problem = "lacks" if name in places else "has, besides the model's adapters,"
        raise ModelError(f"{where} {problem} tensor {name}")
    with torch.no_grad():
        for name, place in places.items():
            if place.shape != tensors[name].shape:
                raise ModelError(
                    f"{where}: tensor {name} is {list(tensors[name].shape)}, expected "
                    f"{list(place.shape)}"
                )
            place.copy_(tensors[name])


def adapter_tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors of `adapter_model.safetensors` by name, on the CPU and contiguous: A [r,
    in], B [out, r] and, for DoRA, magnitudes [out] of each adapted layer."""
    return {name: place.detach().cpu().contiguous() for name, place in _places(model)}


def _places(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters' parameters by their names in PEFT's file, without the rows that pad the
    vocabulary."""
    for name, parameter in lora_parameters(model).items():
        layer, _, kind = name.rpartition(".")
        rows = model.config.vocab_size if layer == HEAD and kind != "lora_A" else None
        yield f"{PREFIX}{layer}.{SUFFIXES[kind]}", parameter[:rows]
