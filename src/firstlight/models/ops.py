"""What the model families share: tensor functions, pure but for the embedding.

Shape letters, here and in the families: B batch, T new tokens, S tokens attended to,
H query heads, K key-value heads, D head size, C hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

IGNORE_INDEX = -100


class LinearRope(BaseModel):
    """Position interpolation: every position divided by `factor` (Chen et al. 2023)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    rope_type: Literal["linear"]
    factor: float = Field(gt=0)


class Llama3Rope(BaseModel):
    """The frequency rescaling of Llama 3.1 (meta-llama/llama-models `apply_scaling`).

    Wavelengths beyond `original_max_position_embeddings / low_freq_factor` are stretched by
    `factor`, those below `original_max_position_embeddings / high_freq_factor` are kept, and
    those between are blended.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    rope_type: Literal["llama3"]
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: int = Field(gt=0)


RopeScaling = Annotated[LinearRope | Llama3Rope, Field(discriminator="rope_type")]


def rope_frequencies(
    head_dim: int, rope_theta: float, scaling: LinearRope | Llama3Rope | None
) -> Tensor:
    """Angle by which each pair of dimensions turns from one position to the next, fp32 [D/2].

    Source: Su et al. 2021 (RoFormer), with `scaling` as in its class.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope_theta**exponents)
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRope):
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    stretched = frequencies / scaling.factor
    kept_share = (
        scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor
    ) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - kept_share) * stretched + kept_share * frequencies
    result = torch.where(wavelengths > longest, stretched, blended)
    return torch.where(wavelengths < shortest, frequencies, result)


def rope_tables(
    frequencies: Tensor, position_ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, D] or [B, 1, T, D], of the angles at `position_ids` ([T] or [B, T])."""
    with torch.autocast(frequencies.device.type, enabled=False):
        angles = position_ids.float()[..., None] * frequencies.float()
        angles = torch.cat((angles, angles), dim=-1)
        if position_ids.dim() == 2:
            angles = angles[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) by position: the layout of Hugging Face weights."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat((-second, first), dim=-1) * sin


def attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal attention [B, H, T, D]: new token t sees all of the first S - T + t + 1 tokens.

    Args:
        mask: bool [T, S] or [B, 1, T, S], true where a query may look; replaces the causal mask.
    """
    new, total = q_BHTD.shape[-2], k_BKSD.shape[-2]
    if mask is None and 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q_BHTD.device).tril(total - new)
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and new > 1,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )


class Embedding(nn.Embedding):
    """torch's, whose values are not drawn: models here are initialised or loaded as a whole.

    Drawing them on the meta device would also import torch's compiler: a second, and some 50 MB
    in every process that loads a model.
    """

    def reset_parameters(self) -> None:
        """Leaves the values as they are."""


def sliding_window_mask(positions_T: Tensor, total: int, window: int | None) -> Tensor | None:
    """True where the query at a position may look: at itself and the `window` - 1 before it,
    bool [T, S]; None where that is no restriction.

    Args:
        positions_T: of the queries.
        total: tokens there are to look at, from position 0.
    """
    if window is None or total <= window:
        return None
    keys_S = torch.arange(total, device=positions_T.device)
    distance_TS = positions_T[:, None] - keys_S
    return (distance_TS >= 0) & (distance_TS < window)


def cross_entropy_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum of the cross-entropy (nats, fp32) over the labels that are not -100.

    A sum and not a mean: the caller divides by the valid labels of the whole global batch, so
    that accumulation gives the same gradient as one large batch.
    """
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1),
        labels_BT.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
