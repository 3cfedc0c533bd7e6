"""Rotary positions (Su et al. 2021, RoFormer): frequencies, their rescalings for longer texts, and
the rotation.

Shape letters as in `models/ops.py`; R, the number of dimensions of a head that are rotated, is D
unless a family rotates a part of each head only.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from firstlight.section import Section

#: A model's rotary tables, cos and sin of each: see `AttentionSpec.rope`.
Ropes: TypeAlias = tuple[tuple[Tensor, Tensor], ...]


class LinearRope(Section):
    """Position interpolation: every position divided by `factor` (Chen et al. 2023)."""

    rope_type: Literal["linear"]
    factor: float = Field(gt=0)


class DynamicRope(Section):
    """A base that grows with the text beyond `max_position_embeddings`, to `factor` times that
    (bloc97 and emozilla 2023, "dynamic NTK")."""

    rope_type: Literal["dynamic"]
    factor: float = Field(gt=0)


class YarnRope(Section):
    """YaRN (Peng et al. 2023): dimensions that turn fewer than `beta_slow` times in the original
    context are divided by `factor`, those that turn more than `beta_fast` times are kept, and the
    ones between are blended; cos and sin are multiplied by `attention_factor`, null being
    0.1 ln(factor) + 1, or the ratio of that with `mscale` and with `mscale_all_dim`."""

    rope_type: Literal["yarn"]
    factor: float = Field(gt=0)
    original_max_position_embeddings: int = Field(gt=0)
    attention_factor: float | None = Field(None, gt=0)
    beta_fast: float = Field(32.0, gt=0)
    beta_slow: float = Field(1.0, gt=0)
    mscale: float | None = Field(None, ge=0)
    mscale_all_dim: float | None = Field(None, ge=0)
    truncate: bool = True


class LongRope(Section):
    """LongRoPE (Ding et al. 2024): each frequency has its own divisor, from `long_factor` for texts
    longer than the original context, else from `short_factor`; cos and sin are multiplied by
    `attention_factor`, null being sqrt(1 + ln(factor) / ln(original context)), where a `factor` of
    null is max_position_embeddings over the original context."""

    rope_type: Literal["longrope"]
    short_factor: list[float]
    long_factor: list[float]
    original_max_position_embeddings: int = Field(gt=1)
    factor: float | None = Field(None, gt=0)
    attention_factor: float | None = Field(None, gt=0)


class Llama3Rope(Section):
    """The frequency rescaling of Llama 3.1 (meta-llama/llama-models `apply_scaling`).

    Wavelengths beyond `original_max_position_embeddings / low_freq_factor` are stretched by
    `factor`, those below `original_max_position_embeddings / high_freq_factor` are kept, and
    those between are blended.
    """

    rope_type: Literal["llama3"]
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: int = Field(gt=0)


AnyRope = LinearRope | DynamicRope | YarnRope | LongRope | Llama3Rope
RopeScaling = Annotated[AnyRope, Field(discriminator="rope_type")]

#: Class of each kind's settings.
ROPE_KINDS: dict[str, type[AnyRope]] = {
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "llama3": Llama3Rope,
}


def check_rope(
    scaling: AnyRope | None, rotary_dim: int, rope_theta: float, *, nested: bool = False
) -> None:
    """Refuse rotary settings that can't be computed.

    Args:
        scaling: rescaling of the frequencies; None is none.
        rotary_dim: R, the dimensions of a head that are rotated.
        rope_theta: base of the frequencies.
        nested: True where config.json has rotary settings of each kind of layer.

    Raises:
        ValueError: the settings and the number of rotated dimensions do not fit.
    """
    # Its base grows by the power R / (R - 2).
    if isinstance(scaling, DynamicRope) and rotary_dim == 2:
        raise ValueError("rope_scaling: rope_type dynamic needs more than 2 rotated dimensions")
    # Its dimensions are found by dividing by the logarithm of the base.
    if isinstance(scaling, YarnRope) and rope_theta <= 1:
        raise ValueError("rope_scaling: rope_type yarn needs a rope_theta above 1")
    if nested and isinstance(scaling, YarnRope) and not scaling.truncate:
        raise ValueError(
            "rope_scaling: truncate must be true where layers with a window have a base of their "
            "own: transformers does not read it there; leave it out, also to resume a run that had "
            "it"
        )
    if isinstance(scaling, LongRope):
        pairs = (rotary_dim + 1) // 2
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != pairs:
                raise ValueError(
                    f"rope_scaling: {name} has {len(getattr(scaling, name))} numbers, and "
                    f"{pairs} pairs of dimensions are rotated"
                )


def rope_changes_at(scaling: AnyRope | None) -> int | None:
    """Tokens of the shortest text that LongRoPE's long factors are for; None for other scalings."""
    if not isinstance(scaling, LongRope):
        return None
    return scaling.original_max_position_embeddings + 1


def rope_frequencies(
    rotary_dim: int,
    rope_theta: float,
    scaling: AnyRope | None,
    *,
    is_long: bool = False,
) -> Tensor:
    """Angle by which each pair of dimensions turns from one position to the next, fp32 [R/2].

    Args:
        rotary_dim: R, the dimensions of a head that are rotated.
        rope_theta: base of the frequencies.
        scaling: rescaling of the frequencies for longer texts; None is none. Those of "dynamic"
            beyond the model's context are `dynamic_frequencies`.
        is_long: True for texts longer than the original context, for the kind "longrope".
    """
    # The steps of transformers, one by one: in another order the last bits would differ.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    if isinstance(scaling, LongRope):
        # One set for the whole text: keys that are in a cache were rotated by it.
        divisors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
        return 1.0 / (divisors * rope_theta**exponents)
    frequencies = 1.0 / (rope_theta**exponents)
    if isinstance(scaling, LinearRope):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnRope):
        return _yarn_frequencies(rotary_dim, rope_theta, scaling, rope_theta**exponents)
    if isinstance(scaling, Llama3Rope):
        return _llama3_frequencies(frequencies, scaling)
    return frequencies


def dynamic_frequencies(
    rotary_dim: int, rope_theta: float, scaling: DynamicRope, length: Tensor, max_positions: int
) -> Tensor:
    """The frequencies of the kind "dynamic" for texts longer than the model's context, fp32 [R/2],
    or [B, R/2] for lengths [B].

    Args:
        rotary_dim: R, the dimensions of a head that are rotated.
        rope_theta: base of the frequencies of shorter texts.
        scaling: settings.
        length: number of tokens of the text, int64 [], or of several [B].
        max_positions: the model's `max_position_embeddings`.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=length.device).float()
    growth = scaling.factor * length / max_positions - (scaling.factor - 1)
    # This base divides the lowest frequency by `growth` and leaves the highest as it is.
    base = rope_theta * growth ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / (base[..., None] ** (exponents / rotary_dim))


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    # Short waves tell neighbours apart and stay; waves longer than the original context never came
    # full circle in training, and would meet new angles beyond it.
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    stretched = frequencies / scaling.factor
    # 0 at the longest wavelength of those between, 1 at the shortest.
    kept_share = (
        scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor
    ) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - kept_share) * stretched + kept_share * frequencies
    result = torch.where(wavelengths > longest, stretched, blended)
    return torch.where(wavelengths < shortest, frequencies, result)


def _yarn_frequencies(
    rotary_dim: int, rope_theta: float, scaling: YarnRope, periods: Tensor
) -> Tensor:
    def dimension_of(turns: float) -> float:
        """The dimension whose pair makes this number of turns in the original context."""
        context = scaling.original_max_position_embeddings
        # Solves turns = context / (2 pi theta^(2 i / R)) for the pair i.
        logarithm = math.log(context / (turns * 2 * math.pi))
        return (rotary_dim * logarithm) / (2 * math.log(rope_theta))

    first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # as transformers keeps from dividing by zero
    dimensions = torch.arange(len(periods), dtype=torch.float32)
    kept_share = 1 - ((dimensions - first) / (last - first)).clamp(0, 1)
    stretched = 1.0 / (scaling.factor * periods)
    return stretched * (1 - kept_share) + (1.0 / periods) * kept_share


def rope_magnitude(scaling: AnyRope | None, max_positions: int) -> float:
    """Factor of cos and sin; 1 unless the kind is "yarn" or "longrope".

    Args:
        scaling: rescaling of the frequencies; None is none.
        max_positions: the model's `max_position_embeddings`.
    """
    if not isinstance(scaling, YarnRope | LongRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if isinstance(scaling, LongRope):
        context = scaling.original_max_position_embeddings
        factor = scaling.factor or max_positions / context
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    # DeepSeek multiplies the scores themselves: a ratio is left for the tables.
    if scaling.mscale and scaling.mscale_all_dim:
        whole = yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
        return yarn_magnitude(scaling.factor, scaling.mscale) / whole
    return yarn_magnitude(scaling.factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cos and sin, 0.1 scale ln(factor) + 1 (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_tables(
    frequencies: Tensor, position_ids: Tensor, dtype: torch.dtype, *, polar: bool = False
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, R] or [B, 1, T, R], of the angles at `position_ids` ([T] or [B, T]).

    Args:
        frequencies: angle of each pair from one position to the next, fp32 [R/2] or [B, 1, R/2].
        position_ids: positions, int64.
        dtype: dtype of the tables.
        polar: True takes both from complex numbers: torch rounds those otherwise.
    """
    # bf16 has no number for most positions beyond 256; fp32 has all up to 16 million.
    with torch.autocast(frequencies.device.type, enabled=False):
        angles = position_ids.float()[..., None] * frequencies.float()
        # Both halves of a head turn by the same angles: see `apply_rope`.
        angles = torch.cat((angles, angles), dim=-1)
        if position_ids.dim() == 2:
            angles = angles[:, None]  # for all heads
        if polar:
            parts = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).to(dtype)
            return parts[..., 0], parts[..., 1]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + R/2) of the first R dimensions of [B, H, T, D] by position: the layout
    of Hugging Face weights.

    Args:
        x_BHTD: queries or keys.
        cos, sin: tables of `rope_tables`, of the dtype of `x_BHTD`, or the result is wider.
    """
    R = cos.shape[-1]
    if x_BHTD.shape[-1] != R:
        # The other dimensions carry no position.
        rotated = apply_rope(x_BHTD[..., :R], cos, sin)
        return torch.cat((rotated, x_BHTD[..., R:]), dim=-1)
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat((-second, first), dim=-1) * sin


def apply_rope_to_neighbours(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of the first R dimensions of [B, H, T, D] by position: the layout
    of GLM's weights. Arguments as in `apply_rope`."""
    R = cos.shape[-1]
    turned, rest = x_BHTD[..., :R], x_BHTD[..., R:]
    # The tables have each angle twice, half a head apart; neighbours need it side by side.
    cos, sin = (table[..., : R // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    crossed = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat((turned * cos + crossed * sin, rest), dim=-1)


def apply_rope_as_complex(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate all pairs of [B, H, T, R] as `apply_rope_to_neighbours` does, each one as a complex
    number, as in DeepSeek-V2's class: torch rounds their products otherwise."""
    if torch.compiler.is_compiling():
        # torch's compiler writes no code for complex numbers.
        return apply_rope_to_neighbours(x_BHTD, cos, sin)
    wide_BHTD = x_BHTD.to(torch.promote_types(x_BHTD.dtype, cos.dtype))
    pairs = wide_BHTD.view(*wide_BHTD.shape[:-1], -1, 2)
    if any(place % 2 for place in (pairs.storage_offset(), *pairs.stride()[:-1])):
        # A view as complex numbers begins at even places. `contiguous` would keep odd strides of
        # dimensions of size 1.
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    R = cos.shape[-1]
    turns = torch.complex(cos[..., : R // 2], sin[..., : R // 2])
    return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2)


def apply_rope_from_neighbours(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of [B, H, T, R] by position, to pairs (i, i + R/2): the layout of
    DeepSeek-V3's weights. Queries and keys in one order have the same products in any; in this
    they are added up as in transformers. Arguments as in `apply_rope`."""
    pairs = x_BHTD.view(*x_BHTD.shape[:-1], -1, 2)
    return apply_rope(pairs.transpose(-1, -2).flatten(-2), cos, sin)
