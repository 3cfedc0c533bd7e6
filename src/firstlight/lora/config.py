"""The `lora` section of a recipe, and adapter_config.json as PEFT writes it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from firstlight.errors import InputError, ModelError
from firstlight.files.atomic import read_json
from firstlight.section import Section

_Target = Annotated[str, Field(min_length=1)]


class LoraConfig(Section):
    """The `lora` section of a recipe: the initial weights are frozen, and low-rank matrices beside
    them are trained (Hu et al. 2021).
    """

    rank: int = Field(8, ge=1)
    """rank of a layer's change: rows of A, and columns of B."""
    alpha: float = Field(16.0, gt=0)
    """scale of a layer's change, which is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout probability of the input to the low-rank matrices, in training."""
    targets: Literal["all-linear"] | Annotated[list[_Target], Field(min_length=1)] = "all-linear"
    """adapted layers, by the last parts of their names (`q_proj`, `mlp.c_proj`), or "all-linear":
    every linear layer but the head, as in PEFT."""
    dora: bool = False
    """train each output's magnitude apart from its direction (DoRA, Liu et al. 2024). Costs a pass
    over every adapted weight for each forward pass."""
    quantize: Literal["none", "nf4"] = "none"
    """"nf4" stores the frozen linear layers but the head in 4 bits, and multiplies with their
    dequantised weights (QLoRA, Dettmers et al. 2023; needs bitsandbytes). Stacked experts stay
    unquantised."""


ADAPTER_CONFIG_NAME = "adapter_config.json"

_T = TypeVar("_T", int, float)

#: Entries of rank_pattern and alpha_pattern together; the deepest models have 900 linear layers.
_MOST_PATTERNS = 3000
_MOST_PATTERN_CHARS = 500
#: Settings that change nothing once there are tensors. Any other unknown setting must be off.
_WITHOUT_EFFECT = {
    *("auto_mapping", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "megatron_core", "peft_version"),
    *("qalora_group_size", "runtime_config", "target_modules"),
}
#: Initialisations of an adapter that do not change the base's weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


class PeftConfig(BaseModel):
    """The content of an adapter_config.json; unlisted fields are kept as extras."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int = Field(8, ge=1)
    lora_alpha: float = Field(8, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    bias: Literal["none"] = "none"
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] | None = None
    init_lora_weights: bool | str | None = True

    def scaling(self, layer: str) -> float:
        """The scale of a layer's B A: alpha / r, or alpha / sqrt(r) (rank-stabilised LoRA,
        Kalajdzievski 2023)."""
        alpha = _by_pattern(self.alpha_pattern, layer, self.lora_alpha)
        rank = self.rank(layer)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, layer: str) -> int:
        """The rank of a layer's change."""
        return _by_pattern(self.rank_pattern, layer, self.r)


def _by_pattern(patterns: Mapping[str, _T] | None, layer: str, otherwise: _T) -> _T:
    """The value of the first pattern that matches the end of a layer's name, as PEFT does it."""
    for pattern, value in (patterns or {}).items():
        if _compiled(pattern).match(layer):
            return value
    return otherwise


@functools.lru_cache(maxsize=2 * _MOST_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def read_peft_config(folder: Path) -> PeftConfig:
    """The settings of an adapter's folder.

    Raises:
        ModelError: the file is missing or damaged, or a setting is not supported.
    """
    path = folder / ADAPTER_CONFIG_NAME
    try:
        config = PeftConfig.model_validate(read_json(path))
    except InputError as error:
        raise ModelError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ModelError(
            f"{path}: {name[:100]}: {first['msg']} (given: {_short(first['input'])}); only LoRA "
            "and DoRA of language models are read"
        ) from error
    start = config.init_lora_weights
    if start not in _PLAIN_STARTS:
        raise ModelError(
            f"{path}: init_lora_weights {_short(start)} changed the base model's weights, which is "
            "not supported: convert the adapter with PEFT (save_pretrained's path_initial_model_for"
            "_weight_conversion), or merge it there"
        )
    for name, value in (config.model_extra or {}).items():
        if value and name not in _WITHOUT_EFFECT:
            raise ModelError(
                f"{path}: {name[:100]} is not supported: merge the adapter with PEFT "
                "(merge_and_unload), and use the merged model"
            )
    _require_quick_patterns(path, [*(config.rank_pattern or {}), *(config.alpha_pattern or {})])
    return config


def _require_quick_patterns(path: Path, patterns: list[str]) -> None:
    """Refuse patterns that would take long, by their number or their repetitions.

    Raises:
        ModelError: there are such patterns, or one is invalid.
    """
    if len(patterns) > _MOST_PATTERNS:
        raise ModelError(
            f"{path}: rank_pattern and alpha_pattern have {len(patterns):,} entries, more than the "
            f"{_MOST_PATTERNS:,} that are read: merge the adapter with PEFT (merge_and_unload)"
        )
    for pattern in patterns:
        # A regular expression with repeated groups, or many repetitions or choices, can take for
        # ever on one name.
        choices = len(re.findall(r"\(", pattern)) + len(re.findall(r"(?<!\()\?", pattern))
        is_slow = re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3
        if is_slow or choices > 5 or len(pattern) > _MOST_PATTERN_CHARS:
            raise ModelError(
                f"{path}: pattern {_short(pattern)} repeats too much: name the layers in full"
            )
        try:
            _compiled(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(f"{path}: {_short(pattern)} is no pattern: {error}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
