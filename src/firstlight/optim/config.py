"""The `optimizer` section of a recipe, the table of available optimizers, and the parameter groups
with their learning rates, betas and weight decays.

The section contains the keys of all optimizers, so that `name` can be changed without changing
other keys. `OptimizerConfig` inherits the keys of each optimizer from a separate class, such as
`AdamWConfig`. The keys of AdamW and SGD, which torch provides, are defined in this module. Each of
the other optimizers has a separate module with its keys and its `OptimizerSpec`.

The module, name and shape of a parameter determine its role. The roles are embedding table, head,
vector (norms and biases) and matrix (all other parameters, including stacked expert matrices).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from firstlight.errors import ConfigError
from firstlight.optim.adafactor import ADAFACTOR, AdafactorConfig
from firstlight.optim.dtensors import is_sharded, own_shard
from firstlight.optim.eight_bit import EIGHT_BIT, EightBitConfig
from firstlight.optim.lion import LION
from firstlight.optim.muon import MUON, MuonConfig
from firstlight.optim.spec import (
    Groups,
    Layout,
    OptimizerKeys,
    OptimizerSpec,
    decay_cautiously,
    momentum_layout,
)

Role = Literal["embedding", "head", "matrix", "vector"]

#: Titles of the roles in the table printed at the start of a run, in the order of the table's rows.
ROLES: dict[Role, str] = {
    "embedding": "embeddings",
    "head": "head",
    "matrix": "matrices",
    "vector": "norms and biases",
}

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def elementwise_optimizers() -> str:
    """Return the names of the optimizers that can update one shard of a parameter without the other
    shards, as a phrase such as "adamw or sgd"."""
    return _listed(name for name, spec in OPTIMIZERS.items() if spec.elementwise)


def sharded_optimizers() -> str:
    """Return the names of the optimizers that can update DTensors, as a phrase such as "adamw, muon
    or sgd"."""
    return _listed(name for name, spec in OPTIMIZERS.items() if spec.elementwise or spec.gathers)


def _listed(names: Iterable[str]) -> str:
    *others, last = sorted(names)
    return f"{', '.join(others)} or {last}"


class AdamWConfig(OptimizerKeys):
    """Keys of AdamW, which also apply to the 8-bit optimizers and Lion."""

    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    """decay rates of the moments of AdamW (including 8-bit AdamW) and Lion."""
    eps: float = Field(1e-8, gt=0)
    """term added to the denominator of the update in AdamW (including 8-bit AdamW)."""


def _adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        **_switches(groups, config),
    )
    # The hook applies weight decay, so it is not needed without weight decay.
    if config.cautious_weight_decay and any(group["weight_decay"] for group in groups):
        make_cautious(optimizer)
    return optimizer


def make_cautious(optimizer: torch.optim.AdamW) -> None:
    """Replace the weight decay of torch's AdamW with `decay_cautiously`. This works for all
    implementations of AdamW (fused, foreach and for-loop).

    As in torch, the decay is applied before the step. Only the sign of the update is needed. It
    equals the sign of the first moment after the gradient of this step has been added to it.
    """
    for group in optimizer.param_groups:
        group["cautious_weight_decay"], group["weight_decay"] = group["weight_decay"], 0.0
    # A hook is used instead of a subclass, so that code that observes optimizer steps sees a single
    # step of torch's AdamW.
    optimizer.register_step_pre_hook(_decay)


@torch.no_grad()
def _decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    skips = None if found_inf is None else found_inf > 0
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["cautious_weight_decay"] else ():
            if parameter.grad is None:
                continue
            direction = own_shard(parameter.grad, parameter)
            state = optimizer.state.get(parameter, {})
            # The first moment does not exist before the first step, so the update has the sign of
            # the gradient.
            if "exp_avg" in state:
                average = own_shard(state["exp_avg"], parameter)
                direction = average.lerp(direction, 1 - group["betas"][0])
            amount = group["lr"] * group["cautious_weight_decay"]
            decay_cautiously(own_shard(parameter, parameter), direction, amount, skips)


def _adamw_layout(parameter: Tensor, *_: Any) -> Layout:
    moment = (tuple(parameter.shape), parameter.dtype)
    return {"step": ((), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}


class SGDConfig(OptimizerKeys):
    """Keys of SGD."""

    sgd_momentum: float = Field(0.9, ge=0, lt=1)
    """momentum of SGD; with 0, SGD has no state."""


def _sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups,
        lr=config.learning_rate,
        momentum=config.sgd_momentum,
        **_switches(groups, config),
    )


def _sgd_layout(parameter: Tensor, config: OptimizerConfig, _: Any) -> Layout:
    return momentum_layout(parameter) if config.sgd_momentum else {}


def _switches(groups: Groups, config: OptimizerConfig) -> dict[str, bool]:
    """Return the values of the arguments `fused` and `foreach` with which torch uses the
    implementation that the config selects."""
    parameters = [p for group in groups for p in group["params"]]
    device = parameters[0].device.type
    wanted = config.implementation
    if wanted == "fused" and device not in _FUSED_DEVICES:
        raise ConfigError(
            f"torch has no fused {config.name} for {device}: set optimizer.implementation "
            "to foreach"
        )
    # torch's fused SGD does not support DTensors (FSDP2).
    unknown = config.name == "sgd" and any(map(is_sharded, parameters))
    if wanted == "fused" and unknown:
        raise ConfigError(
            "torch has no fused sgd for distributed.engine fsdp: set optimizer.implementation "
            "to foreach"
        )
    if wanted == "auto":
        wanted = "fused" if device in _FUSED_DEVICES and not unknown else "foreach"
    return {"fused": wanted == "fused", "foreach": wanted == "foreach"}


#: Optimizers, keyed by their `optimizer.name` in a recipe.
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        _adamw,
        _adamw_layout,
        elementwise=True,
        options=("betas", "cautious_weight_decay", "tuned_width"),
    ),
    "adamw8bit": EIGHT_BIT,
    "paged_adamw8bit": EIGHT_BIT,
    "adafactor": ADAFACTOR,
    "muon": MUON,
    "sgd": OptimizerSpec(_sgd, _sgd_layout, elementwise=True),
    "lion": LION,
}

if TYPE_CHECKING:
    # Type checkers can't evaluate a Literal whose values are read from a table.
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


class OptimizerConfig(AdafactorConfig, SGDConfig, MuonConfig, AdamWConfig, EightBitConfig):
    """The `optimizer` section of a recipe.

    The numbers of bytes of state per parameter in the description of `name` do not include the fp32
    parameter (4 bytes) and its gradient (4 bytes).
    """

    name: OptimizerName = "adamw"
    """"adamw" (Loshchilov and Hutter 2019): two fp32 moments, 8 bytes of state per parameter. This
    is the default, except for new models whose recipe does not set the optimizer, the schedule or
    the initial weights (docs/learning.md). "adamw8bit": AdamW with both moments in 8 bits and one
    scale for every 256 values (Dettmers et al. 2022), 2.03 bytes. The loss is nearly the same. Each
    update unpacks and packs the moments, which on a CPU takes at least ten times as long as AdamW's
    update. "paged_adamw8bit": the same as "adamw8bit", but the moments are in managed memory, which
    CUDA moves to the CPU while GPU memory is full (bitsandbytes; CUDA only). Moving memory takes
    time. "adafactor" (Shazeer and Stern 2018): no first moment, and only one row and one column of
    second moments per matrix, almost 0 bytes. The steps are relative to the root mean square of a
    parameter, so Adafactor needs a different learning_rate, about 1e-2. "muon" (Jordan et al.
    2024): Muon updates the matrices and stacked experts in the layers (4 bytes), and AdamW updates
    embeddings, head and norms (8 bytes). Each update takes 15 additional matrix products per
    matrix, but training needs fewer steps. "sgd": momentum only, 4 bytes, or 0 bytes with
    sgd_momentum
    0. SGD has the cheapest update, but trains a Transformer slowly. "lion" (Chen et al. 2023): one
       moment, 4 bytes. Every value moves by the learning rate in the direction opposite to the sign
       of its averaged gradient. Therefore, Lion needs a third to a tenth of AdamW's learning_rate,
       three to ten times its weight_decay, and betas [0.9, 0.99]."""
    weight_decay: float = Field(0.1, ge=0)
    """weight decay of matrices, and of the embeddings and the head unless these are set separately.
    Weight decay is decoupled, except for SGD, which adds it to the gradient. With Adafactor, it can
    be relative to the size of the parameter (see adafactor_variant)."""
    cautious_weight_decay: bool = False
    """true applies weight decay to a value only in steps whose update also moves the value towards
    zero (Chen et al. 2025, arXiv 2510.12402). This is supported for adamw, lion and muon. It needs
    memory for a temporary copy of one parameter, or for three copies with AdamW."""
    embedding_weight_decay: float | None = Field(None, ge=0)
    """weight decay of token and position embeddings, and of a head that is tied to them; null uses
    `weight_decay`. 0 preserves the embeddings of rare tokens. Weight decay shrinks each row of the
    embedding in every step, but a row receives a gradient only in steps whose batch contains its
    token."""
    head_weight_decay: float | None = Field(None, ge=0)
    """weight decay of a head that is not tied to the embedding; null uses `weight_decay`."""
    vector_weight_decay: float = Field(0.0, ge=0)
    """weight decay of norms and biases."""
    embedding_lr_multiple: float = Field(1.0, gt=0)
    """peak learning rate of embeddings (and of a head that is tied to them) as a multiple of
    `learning_rate`. If a plan or a sweep changes learning_rate, the peak learning rate of
    embeddings changes by the same factor."""
    head_lr_multiple: float = Field(1.0, gt=0)
    """peak learning rate of a head that is not tied to the embedding, as a multiple of
    `learning_rate`."""
    vector_lr_multiple: float = Field(1.0, gt=0)
    """peak learning rate of norms and biases as a multiple of `learning_rate`."""
    embedding_betas: list[float] | None = Field(None, min_length=2, max_length=2)
    """betas of embeddings (and of a head that is tied to them); null uses `betas`."""
    head_betas: list[float] | None = Field(None, min_length=2, max_length=2)
    """betas of a head that is not tied to the embedding; null uses `betas`."""
    vector_betas: list[float] | None = Field(None, min_length=2, max_length=2)
    """betas of norms and biases; null uses `betas`."""
    tuned_width: int | None = Field(None, gt=0)
    """hidden_size of the model for which the learning rates were tuned. For a model with a
    different hidden_size, let r = tuned_width / hidden_size. With AdamW and Lion, the learning
    rates of matrices and of an untied head are then multiplied by r (Yang et al. 2022, arXiv
    2203.03466, table 8). Muon's learning rate is multiplied by sqrt(r), because its updates already
    grow with sqrt(hidden_size). The learning rates of embeddings, norms and biases do not change.
    null leaves all learning rates unchanged."""
    max_grad_norm: float = Field(1.0, ge=0)
    """maximum global L2 norm of the gradients. If the norm is larger, the gradients are scaled down
    to it. 0 disables clipping. Clipping reads all gradients once, and writes them once if they are
    scaled. On a GPU, AdamW scales them as part of its update."""
    clip_after_warmup: bool = False
    """true clips gradients only after the learning-rate warm-up; false clips them in all steps."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        for key in ("betas", "embedding_betas", "head_betas", "vector_betas"):
            betas = getattr(self, key)
            if betas is not None and not all(0 <= beta < 1 for beta in betas):
                raise ValueError(f"{key} {betas} must each be at least 0 and below 1")
        if self.clip_after_warmup and not self.max_grad_norm:
            raise ValueError(
                "clip_after_warmup requires a max_grad_norm above 0: set max_grad_norm, or set "
                "clip_after_warmup to false"
            )
        spec = OPTIMIZERS[self.name]
        if self.implementation not in spec.implementations:
            raise ValueError(
                f"{self.name} has no implementation '{self.implementation}': set implementation to "
                f"{' or '.join(spec.implementations)}, or name to adamw"
            )
        for key in ("cautious_weight_decay", "embeddings_in_32_bits", "tuned_width"):
            if getattr(self, key) and key not in spec.options:
                names = _listed(name for name, one in OPTIMIZERS.items() if key in one.options)
                raise ValueError(
                    f"{key} applies only to {names}, but name is {self.name}: remove it, or set "
                    "name to one of these"
                )
        return self

    def for_width(self, hidden_size: int) -> OptimizerConfig:
        """Return a copy of these settings with learning rates adjusted to a model of the given
        width (see `tuned_width`)."""
        if self.tuned_width in (None, hidden_size):
            return self
        assert self.tuned_width is not None
        ratio = self.tuned_width / hidden_size
        changes: dict[str, Any] = {"tuned_width": hidden_size}
        if self.name == "muon":
            muon_rate = self.muon_learning_rate or self.learning_rate
            changes["muon_learning_rate"] = muon_rate * math.sqrt(ratio)
            changes["head_lr_multiple"] = self.head_lr_multiple * ratio
        else:
            # The learning rate of the head is a multiple of this rate, so it changes as well. The
            # learning rates of embeddings and vectors stay the same.
            changes["learning_rate"] = self.learning_rate * ratio
            changes["embedding_lr_multiple"] = self.embedding_lr_multiple / ratio
            changes["vector_lr_multiple"] = self.vector_lr_multiple / ratio
        return self.model_copy(update=changes)

    def peak_rate(self, role: Role) -> float:
        """Return the peak learning rate of a role. For matrices that Muon updates, this is Muon's
        learning rate."""
        if self.name == "muon" and role == "matrix":
            return self.muon_learning_rate or self.learning_rate
        return float(self.group_settings(role)["lr"])

    def group_settings(self, role: Role) -> dict[str, Any]:
        """Return the `lr`, `betas` and `weight_decay` of a role, in the format of torch's parameter
        groups."""
        # Keys without a prefix apply to matrices.
        own = (
            {}
            if role == "matrix"
            else {
                key: getattr(self, f"{role}_{key}")
                for key in ("lr_multiple", "betas", "weight_decay")
            }
        )
        decay = own.get("weight_decay")
        return {
            "lr": self.learning_rate * own.get("lr_multiple", 1.0),
            "betas": tuple(own.get("betas") or self.betas),
            "weight_decay": self.weight_decay if decay is None else decay,
        }


# Parameters and their groups


class Kind(NamedTuple):
    """The properties of a parameter, other than its shape, that an optimizer needs.

    Attributes:
        role: role of the parameter, which selects its settings.
        transposed: True if the matrix is stored as [inputs, outputs], like the matrices of GPT-2,
            instead of [outputs, inputs].
    """

    role: Role
    transposed: bool = False


def parameter_kinds(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of each parameter of a model, keyed by the parameter's name. A tied head has
    the role of the embedding."""
    # Embeddings are identified by their module, because their names differ between model families.
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    # These parameters are the trained rows of an otherwise frozen embedding or head.
    rows = (m for m in model.modules() if getattr(m, "is_table", False))
    tables |= {id(p) for module in rows for p in module.parameters(recurse=False)}
    transposed = {
        id(p)
        for module in model.modules()
        if getattr(module, "stores_transposed", False)
        for p in module.parameters(recurse=False)
    }

    def role(name: str, parameter: Tensor) -> Role:
        if id(parameter) in tables:
            return "embedding"
        # The biases of experts are stacked, so they have two dimensions. A depthwise convolution
        # has only a few weights per channel and is not a matrix product.
        if parameter.dim() < 2 or name.endswith(("bias", "conv1d.weight")):
            return "vector"
        # Adapters of the head are treated as matrices, like all other adapters.
        return "head" if name == "lm_head.weight" else "matrix"

    return {
        name: Kind(role(name, p), p.dim() > 1 and id(p) in transposed)
        for name, p in model.named_parameters()
    }


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], kinds: Mapping[str, Kind], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return torch's parameter groups, each with `lr`, `betas`, `weight_decay` and `transposed`.

    Roles with equal settings share a group, to reduce the number of foreach operations. Vectors are
    always in separate groups.

    Args:
        parameters: parameters, keyed by name.
        kinds: kinds of these parameters, keyed by name.
        config: the recipe's `optimizer` section.
    """
    groups: dict[Any, dict[str, Any]] = {}
    # Sort vectors last, regardless of the order of the model's parameters.
    for name, parameter in sorted(parameters.items(), key=lambda item: item[1].dim() < 2):
        role, transposed = kinds[name]
        settings = {**config.group_settings(role), "transposed": transposed}
        # Within an Adafactor group, either all parameters must have at least two dimensions, or all
        # must have fewer.
        key = (role == "vector", parameter.dim() < 2, *settings.values())
        groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    return list(groups.values())


def describe_groups(
    parameters: Mapping[str, Tensor], kinds: Mapping[str, Kind], config: OptimizerConfig
) -> Iterator[str]:
    """Yield the lines of a table with one row for each role that has parameters. The columns show
    the number of tensors, the number of parameters, the peak learning rate and the weight decay."""
    heading = f"optimizer {config.name}"
    yield f"{heading:<18}{'tensors':>8}{'parameters':>16}{'rate':>10}{'decay':>8}"
    for role, title in ROLES.items():
        # With a tied head or with LoRA, some roles do not have parameters.
        found = [p for name, p in parameters.items() if kinds[name].role == role]
        if found:
            settings, count = config.group_settings(role), sum(p.numel() for p in found)
            rate = config.peak_rate(role)
            yield (
                f"  {title:<16}{len(found):>8,}{count:>16,}{rate:>10.4g}"
                f"{settings['weight_decay']:>8.4g}"
            )


def decay_counts(
    parameters: Mapping[str, Tensor], kinds: Mapping[str, Kind], config: OptimizerConfig
) -> dict[str, int]:
    """Count the parameters and tensors with weight decay, and the parameters and tensors without
    it."""
    counts = dict.fromkeys(
        ("decayed_parameters", "decayed_tensors", "undecayed_parameters", "undecayed_tensors"), 0
    )
    for name, parameter in parameters.items():
        is_decayed = config.group_settings(kinds[name].role)["weight_decay"] > 0
        kind = "decayed" if is_decayed else "undecayed"
        counts[f"{kind}_parameters"] += parameter.numel()
        counts[f"{kind}_tensors"] += 1
    return counts
