"""Which parameter gets which rule, and what torch's own optimizers keep of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.distributed.pieces import is_in_pieces
from firstlight.errors import ConfigError
from firstlight.optim.adafactor import Adafactor
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.eight_bit import eight_bit_rule
from firstlight.optim.rule import Layout, Rule
from firstlight.optim.stacked_muon import StackedMuon

Parameters = Mapping[str, nn.Parameter]

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def make_rules(
    parameters: Parameters, config: OptimizerConfig, embeddings: Collection[str] = ()
) -> list[Rule]:
    """The rules that together update the parameters, each exactly once.

    Args:
        parameters: by name.
        config: the recipe's section.
        embeddings: names of those that are embeddings.

    Raises:
        ConfigError: the config can't work on the parameters' device.
        MissingDependencyError: an 8-bit library is needed and not installed.
    """
    wide = embeddings if config.embeddings_in_32_bits else ()
    others = {name: p for name, p in parameters.items() if name not in wide}
    rules = RULES[config.name](others, config) if others else []
    return [*rules, *_adamw({n: p for n, p in parameters.items() if n in wide}, config)]


def is_decayed(parameter: Tensor) -> bool:
    """Whether weight decay is for a parameter: a matrix or a stack of them, no norm and no bias."""
    return parameter.dim() >= 2


def decay_groups(parameters: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """torch's parameter groups: weight decay for what has two or more dimensions only."""
    matrices = [p for p in parameters.values() if is_decayed(p)]
    vectors = [p for p in parameters.values() if not is_decayed(p)]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decay_counts(parameters: Iterable[Tensor]) -> dict[str, int]:
    """Parameters with and without weight decay, and the tensors that they are in."""
    counts = dict.fromkeys(
        ("decayed_parameters", "decayed_tensors", "undecayed_parameters", "undecayed_tensors"), 0
    )
    for parameter in parameters:
        kind = "decayed" if is_decayed(parameter) else "undecayed"
        counts[f"{kind}_parameters"] += parameter.numel()
        counts[f"{kind}_tensors"] += 1
    return counts


def _adamw(parameters: Parameters, config: OptimizerConfig) -> list[Rule]:
    if not parameters:
        return []
    optimizer = torch.optim.AdamW(
        decay_groups(parameters, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        **_switches(parameters, config),
    )
    return [_torch_rule(optimizer, _adamw_layout)]


def _sgd(parameters: Parameters, config: OptimizerConfig) -> list[Rule]:
    optimizer = torch.optim.SGD(
        decay_groups(parameters, config.weight_decay),
        lr=config.learning_rate,
        momentum=config.sgd_momentum,
        **_switches(parameters, config),
    )
    return [_torch_rule(optimizer, _momentum_layout if config.sgd_momentum else _no_layout)]


def _adafactor(parameters: Parameters, config: OptimizerConfig) -> list[Rule]:
    groups = decay_groups(parameters, config.weight_decay)
    rate, decay = config.learning_rate, config.adafactor_beta2_decay
    threshold, foreach = config.adafactor_threshold, config.implementation == "foreach"
    optimizer: torch.optim.Optimizer
    if config.adafactor_variant == "torch":
        optimizer = torch.optim.Adafactor(
            groups, rate, beta2_decay=decay, d=threshold, foreach=foreach
        )
    else:
        optimizer = Adafactor(groups, rate, decay, threshold, foreach=foreach)
    return [_torch_rule(optimizer, _adafactor_layout)]


def _muon(parameters: Parameters, config: OptimizerConfig) -> list[Rule]:
    inside = {n: p for n, p in parameters.items() if p.dim() in (2, 3) and _inside_a_layer(n)}
    others = {n: p for n, p in parameters.items() if n not in inside}
    rules = []
    for dimensions in (2, 3):
        if matrices := [p for p in inside.values() if p.dim() == dimensions]:
            optimizer = _muon_of(matrices, dimensions, config)
            rules.append(_torch_rule(optimizer, _momentum_layout))
    return [*rules, *_adamw(others, config)]


def _muon_of(
    matrices: list[nn.Parameter], dimensions: int, config: OptimizerConfig
) -> torch.optim.Optimizer:
    rate = config.muon_learning_rate or config.learning_rate
    if dimensions == 3:
        return StackedMuon(matrices, rate, config.muon_momentum, config.weight_decay)
    return torch.optim.Muon(
        matrices,
        lr=rate,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw8bit(parameters: Parameters, config: OptimizerConfig) -> list[Rule]:
    groups = decay_groups(parameters, config.weight_decay)
    return [eight_bit_rule(groups, config)]


def _inside_a_layer(name: str) -> bool:
    """Whether a parameter belongs to a numbered layer (`model.layers.3...`, `h.3...`)."""
    return any(part.isdigit() for part in name.split("."))


def _switches(parameters: Parameters, config: OptimizerConfig) -> dict[str, bool]:
    """torch's `fused` and `foreach` for the implementation that the config asks for."""
    device = next(iter(parameters.values())).device.type
    wanted = config.implementation
    if wanted == "fused" and device not in _FUSED_DEVICES:
        raise ConfigError(
            f"torch has no fused {config.name} for {device}: set optimizer.implementation "
            "to foreach"
        )
    # Of what is in pieces (FSDP2), torch's fused SGD knows nothing.
    unknown = config.name == "sgd" and any(is_in_pieces(p) for p in parameters.values())
    if wanted == "fused" and unknown:
        raise ConfigError(
            "torch has no fused sgd for distributed.engine fsdp: set optimizer.implementation "
            "to foreach"
        )
    if wanted == "auto":
        wanted = "fused" if device in _FUSED_DEVICES and not unknown else "foreach"
    return {"fused": wanted == "fused", "foreach": wanted == "foreach"}


# State of torch's own optimizers: tensors already


def _torch_rule(optimizer: torch.optim.Optimizer, layout: Callable[[Tensor], Layout]) -> Rule:
    fused = bool(optimizer.defaults.get("fused"))

    def rebuild(parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        # A fused step counter lives where its parameter does, others are read by Python.
        return {
            key: tensor.to("cpu" if key == "step" and not fused else parameter.device, copy=True)
            for key, tensor in tensors.items()
        }

    return Rule(optimizer, layout, lambda state: dict(state), rebuild)


def _adamw_layout(parameter: Tensor) -> Layout:
    moment = (tuple(parameter.shape), parameter.dtype)
    return {"step": ((), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}


def _momentum_layout(parameter: Tensor) -> Layout:
    return {"momentum_buffer": (tuple(parameter.shape), parameter.dtype)}


def _no_layout(parameter: Tensor) -> Layout:
    return {}


def _adafactor_layout(parameter: Tensor) -> Layout:
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if len(shape) < 2:
        return {"step": ((), torch.float32), "variance": (shape, dtype)}
    return {
        "step": ((), torch.float32),
        "row_var": ((*shape[:-1], 1), dtype),
        "col_var": ((*shape[:-2], 1, shape[-1]), dtype),
    }


RULES: dict[str, Callable[[Parameters, OptimizerConfig], list[Rule]]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "paged_adamw8bit": _adamw8bit,
    "adafactor": _adafactor,
    "muon": _muon,
    "sgd": _sgd,
}
