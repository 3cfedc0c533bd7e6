"""Groups of parameters with their own learning rates, betas and weight decay.

A parameter's role follows from its module, name and shape: an embedding table, the head, a vector
(norms and biases) or a matrix (everything else, including stacks of experts' matrices).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

Role = Literal["embedding", "head", "matrix", "vector"]

#: Role -> its title in the table at the start of a run, in the order of the table.
ROLES: dict[Role, str] = {
    "embedding": "embeddings",
    "head": "head",
    "matrix": "matrices",
    "vector": "norms and biases",
}


class Kind(NamedTuple):
    """The properties of a parameter, beside its shape, that an optimizer needs.

    Attributes:
        role: role of the parameter, which selects its settings.
        transposed: True for a matrix stored [inputs, outputs], as GPT-2's are, instead of
            [outputs, inputs].
    """

    role: Role
    transposed: bool = False


def parameter_kinds(model: nn.Module) -> dict[str, Kind]:
    """The kind of each of a model's parameters, by name. A head that is tied to the embedding has
    the embedding's role."""
    # By identity, not by name: model families name their embeddings differently.
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    transposed = {
        id(p)
        for module in model.modules()
        if getattr(module, "stores_transposed", False)
        for p in module.parameters(recurse=False)
    }

    def role(name: str, parameter: Tensor) -> Role:
        if id(parameter) in tables:
            return "embedding"
        # Experts' biases are stacked, so they have two dimensions. A depthwise convolution has a
        # few weights for each channel, and is no matrix product.
        if parameter.dim() < 2 or name.endswith(("bias", "conv1d.weight")):
            return "vector"
        # An adapter of the head is a matrix like all adapters.
        return "head" if name == "lm_head.weight" else "matrix"

    return {
        name: Kind(role(name, p), p.dim() > 1 and id(p) in transposed)
        for name, p in model.named_parameters()
    }


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], kinds: Mapping[str, Kind], config: Any
) -> list[dict[str, Any]]:
    """torch's parameter groups, each with `lr`, `betas`, `weight_decay` and `transposed`.

    Roles with equal settings share a group, so that foreach operations are few. Vectors always have
    groups of their own.

    Args:
        parameters: parameters by name.
        kinds: kinds of these parameters by name.
        config: the recipe's section, an `OptimizerConfig`, which this module can't import.
    """
    groups: dict[Any, dict[str, Any]] = {}
    # Vectors last, whatever the order of the model's parameters.
    for name, parameter in sorted(parameters.items(), key=lambda item: item[1].dim() < 2):
        role, transposed = kinds[name]
        settings = {**config.group_settings(role), "transposed": transposed}
        # A group of Adafactor has either parameters with two or more dimensions or with fewer.
        key = (role == "vector", parameter.dim() < 2, *settings.values())
        groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    return list(groups.values())


def describe_groups(
    parameters: Mapping[str, Tensor], kinds: Mapping[str, Kind], config: Any
) -> Iterator[str]:
    """A table in lines: for each role with parameters, the number of its tensors and parameters,
    peak learning rate and weight decay."""
    heading = f"optimizer {config.name}"
    yield f"{heading:<18}{'tensors':>8}{'parameters':>16}{'rate':>10}{'decay':>8}"
    for role, title in ROLES.items():
        # With a tied head, or with LoRA, some roles have no parameters.
        found = [p for name, p in parameters.items() if kinds[name].role == role]
        if found:
            settings, count = config.group_settings(role), sum(p.numel() for p in found)
            rate = config.peak_rate(role)
            yield (
                f"  {title:<16}{len(found):>8,}{count:>16,}{rate:>10.4g}"
                f"{settings['weight_decay']:>8.4g}"
            )


def decay_counts(
    parameters: Mapping[str, Tensor], kinds: Mapping[str, Kind], config: Any
) -> dict[str, int]:
    """The numbers of parameters and of tensors with weight decay, and of those without."""
    counts = dict.fromkeys(
        ("decayed_parameters", "decayed_tensors", "undecayed_parameters", "undecayed_tensors"), 0
    )
    for name, parameter in parameters.items():
        is_decayed = config.group_settings(kinds[name].role)["weight_decay"] > 0
        kind = "decayed" if is_decayed else "undecayed"
        counts[f"{kind}_parameters"] += parameter.numel()
        counts[f"{kind}_tensors"] += 1
    return counts
