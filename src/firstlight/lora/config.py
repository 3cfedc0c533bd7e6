"""The `lora` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from firstlight.section import Section

_Target = Annotated[str, Field(min_length=1)]


class LoraConfig(Section):
    """The `lora` section of a recipe: the weights given to start from are frozen, and low-rank
    matrices beside them are trained (Hu et al. 2021).
    """

    rank: int = Field(8, ge=1)
    """columns of the one matrix and rows of the other that make up a layer's change."""
    alpha: float = Field(16.0, gt=0)
    """the change is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """of the input to the low-rank matrices, in training."""
    targets: Literal["all-linear"] | Annotated[list[_Target], Field(min_length=1)] = "all-linear"
    """the layers that are adapted, by the last parts of their names (`q_proj`, `mlp.c_proj`), or
    "all-linear": every linear layer but the head, as PEFT means it."""
    dora: bool = False
    """train each output's magnitude apart from its direction (DoRA, Liu et al. 2024). Costs a pass
    over every adapted weight for each forward pass."""
    quantize: Literal["none", "nf4"] = "none"
    """"nf4" keeps the frozen linear layers in 4 bits, the head excepted, and multiplies with what
    they stand for (QLoRA, Dettmers et al. 2023; needs bitsandbytes). Stacked experts stay as they
    are."""
