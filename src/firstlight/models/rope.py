"""Rotary position embeddings (RoPE; Su et al. 2021, RoFormer, arXiv 2104.09864). This module
computes the frequencies, rescales them for longer sequences, and applies the rotation.

Shape letters are defined in `models/ops.py`. In addition, R is the number of rotated dimensions of
a head. It equals D unless a family rotates only a part of each head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from firstlight.section import Section

#: The rotary tables of a model. Each table is a pair (cos, sin), and `AttentionSpec.rope` is an
#: index into this tuple.
Ropes: TypeAlias = tuple[tuple[Tensor, Tensor], ...]


class LinearRope(Section):
    """Position interpolation: every position is divided by `factor` (Chen et al. 2023, arXiv
    2306.15595)."""

    rope_type: Literal["linear"]
    factor: float = Field(gt=0)


class DynamicRope(Section):
    """Scaling of the kind "dynamic NTK" (bloc97 and emozilla 2023). For sequences longer than
    `max_position_embeddings`, the base of the frequencies grows with the length of the sequence and
    with `factor` (see `dynamic_frequencies`)."""

    rope_type: Literal["dynamic"]
    factor: float = Field(gt=0)


class YarnRope(Section):
    """YaRN (Peng et al. 2023, arXiv 2309.00071).

    Frequencies of pairs that complete fewer than `beta_slow` rotations in the original context are
    divided by `factor`. Frequencies of pairs that complete more than `beta_fast` rotations are not
    changed. For all other pairs, the result is interpolated between the divided and the unchanged
    frequency. With `truncate`, the bounds of the interpolated range are rounded to whole
    dimensions.

    cos and sin are multiplied by `attention_factor`. If it is null, they are multiplied by m(1),
    where m(s) = 0.1 s ln(factor) + 1, or by m(`mscale`) / m(`mscale_all_dim`) if both of these keys
    are specified.
    """

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
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753).

    Each of the R/2 frequencies is divided by its own factor. The factors are the entries of
    `long_factor` for sequences longer than the original context, and the entries of `short_factor`
    for all other sequences.

    cos and sin are multiplied by `attention_factor`. If it is null, they are multiplied by sqrt(1 +
    ln(factor) / ln(original context)). If `factor` is null, max_position_embeddings divided by the
    original context is used.
    """

    rope_type: Literal["longrope"]
    short_factor: list[float]
    long_factor: list[float]
    original_max_position_embeddings: int = Field(gt=1)
    factor: float | None = Field(None, gt=0)
    attention_factor: float | None = Field(None, gt=0)


class Llama3Rope(Section):
    """The frequency rescaling of Llama 3.1 (meta-llama/llama-models `apply_scaling`).

    Wavelengths (in tokens) above `original_max_position_embeddings / low_freq_factor` are
    multiplied by `factor`. Wavelengths below `original_max_position_embeddings / high_freq_factor`
    are not changed. For wavelengths in between, the result is interpolated between the scaled and
    the unchanged frequency.
    """

    rope_type: Literal["llama3"]
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: int = Field(gt=0)


AnyRope = LinearRope | DynamicRope | YarnRope | LongRope | Llama3Rope
RopeScaling = Annotated[AnyRope, Field(discriminator="rope_type")]

#: Classes of the scaling settings, keyed by `rope_type`.
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
    """Check that the rotary frequencies can be computed from the settings.

    Args:
        scaling: rescaling of the frequencies; None for no rescaling.
        rotary_dim: R, the number of rotated dimensions of a head.
        rope_theta: base of the frequencies.
        nested: True if there are separate settings for each kind of layer (see `RopeSpec.nested`).

    Raises:
        ValueError: the settings are inconsistent with each other or with the number of rotated
            dimensions.
    """
    # For the kind "dynamic", the base grows with the exponent R / (R - 2), so R must be greater
    # than 2.
    if isinstance(scaling, DynamicRope) and rotary_dim == 2:
        raise ValueError("rope_scaling: rope_type dynamic needs more than 2 rotated dimensions")
    # YaRN divides by the logarithm of the base to compute the bounds of its range of dimensions.
    if isinstance(scaling, YarnRope) and rope_theta <= 1:
        raise ValueError("rope_scaling: rope_type yarn needs a rope_theta above 1")
    if nested and isinstance(scaling, YarnRope) and not scaling.truncate:
        raise ValueError(
            "rope_scaling: truncate must be true if layers with a sliding window have a separate "
            "base, because transformers ignores truncate for those layers: remove truncate (also "
            "to resume a run that sets it)"
        )
    if isinstance(scaling, LongRope):
        pairs = (rotary_dim + 1) // 2
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != pairs:
                raise ValueError(
                    f"rope_scaling: {name} has {len(getattr(scaling, name))} numbers, but "
                    f"{pairs} pairs of dimensions are rotated"
                )


def rope_changes_at(scaling: AnyRope | None) -> int | None:
    """Return the sequence length in tokens from which LongRoPE's `long_factor` applies, or None for
    other kinds of scaling."""
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
    """Return the rotary frequencies, fp32 [R/2]: the angle in radians by which each pair of
    dimensions is rotated per position.

    Args:
        rotary_dim: R, the number of rotated dimensions of a head.
        rope_theta: base of the frequencies.
        scaling: rescaling of the frequencies for longer sequences; None for no rescaling. For the
            kind "dynamic", the result applies to sequences within the model's context; see
            `dynamic_frequencies` for longer sequences.
        is_long: True for a sequence longer than the original context. Used only for the kind
            "longrope".
    """
    # The operations are the same as in transformers and are in the same order, because a different
    # order would change the last bits.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    if isinstance(scaling, LongRope):
        # All positions of a sequence must use the same divisors, because cached keys have already
        # been rotated.
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
    """Return the rotary frequencies of the kind "dynamic" for sequences longer than the model's
    context: fp32 [R/2], or [B, R/2] for lengths [B].

    The base is rope_theta * (factor * length / max_positions - (factor - 1))^(R / (R - 2)).

    Args:
        rotary_dim: R, the number of rotated dimensions of a head.
        rope_theta: base of the frequencies for shorter sequences.
        scaling: settings of the scaling.
        length: length in tokens of all sequences, int64 [], or of each sequence, int64 [B].
        max_positions: the model's `max_position_embeddings`.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=length.device).float()
    growth = scaling.factor * length / max_positions - (scaling.factor - 1)
    # With this base, the lowest frequency is divided by `growth`, and the highest is unchanged.
    base = rope_theta * growth ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / (base[..., None] ** (exponents / rotary_dim))


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    # High frequencies distinguish neighbouring positions and are not changed. Pairs of dimensions
    # whose wavelength is longer than the original context never completed a full rotation in
    # training. Without stretching these wavelengths, longer sequences would contain angles that
    # never occurred in training.
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    stretched = frequencies / scaling.factor
    # The weight of the unscaled frequency increases from 0 at the wavelength `longest` to 1 at the
    # wavelength `shortest`.
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
        """Return the index of the pair of dimensions that completes `turns` rotations over the
        length of the original context."""
        context = scaling.original_max_position_embeddings
        # Solve turns = context / (2 pi theta^(2 i / R)) for the index i of the pair.
        logarithm = math.log(context / (turns * 2 * math.pi))
        return (rotary_dim * logarithm) / (2 * math.log(rope_theta))

    first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # as in transformers, to avoid a division by zero
    dimensions = torch.arange(len(periods), dtype=torch.float32)
    kept_share = 1 - ((dimensions - first) / (last - first)).clamp(0, 1)
    stretched = 1.0 / (scaling.factor * periods)
    return stretched * (1 - kept_share) + (1.0 / periods) * kept_share


def rope_magnitude(scaling: AnyRope | None, max_positions: int) -> float:
    """Return the factor by which cos and sin are multiplied, which is 1 unless the kind is "yarn"
    or "longrope".

    Args:
        scaling: rescaling of the frequencies; None for no rescaling.
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
    # DeepSeek's attention already multiplies the scores by m(mscale_all_dim)^2, so the tables are
    # multiplied only by the ratio.
    if scaling.mscale and scaling.mscale_all_dim:
        whole = yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
        return yarn_magnitude(scaling.factor, scaling.mscale) / whole
    return yarn_magnitude(scaling.factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor for cos and sin: 0.1 scale ln(factor) + 1 (Peng et al. 2023, equation
    22), or 1 if `factor` is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_tables(
    frequencies: Tensor, position_ids: Tensor, dtype: torch.dtype, *, polar: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles at `position_ids`, each [T, R] for positions [T],
    or [B, 1, T, R] for positions [B, T].

    Args:
        frequencies: angle by which each pair is rotated per position, fp32 [R/2] or [B, 1, R/2].
        position_ids: positions, int64 [T] or [B, T].
        dtype: dtype of the tables.
        polar: True to compute cos and sin with `torch.polar`, which rounds differently, as in
            transformers' class for DeepSeek-V2.
    """
    # bf16 can't represent most positions above 256. fp32 can represent all positions up to 16
    # million (2^24).
    with torch.autocast(frequencies.device.type, enabled=False):
        angles = position_ids.float()[..., None] * frequencies.float()
        # Dimensions i and i + R/2 form a pair and have the same angle (see `apply_rope`).
        angles = torch.cat((angles, angles), dim=-1)
        if position_ids.dim() == 2:
            angles = angles[:, None]  # for all heads
        if polar:
            parts = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).to(dtype)
            return parts[..., 0], parts[..., 1]
        return angles.cos().to(dtype), angles.sin().to(dtype)


class RotaryTables(nn.Module):
    """The rotary frequencies of a model, from which each forward pass computes its tables of cos
    and sin.

    Args:
        config: config of the model, a `llama_config.DecoderConfig`.

    Attributes:
        frequencies: rotary frequencies (see `rope_frequencies`), fp32 [R/2] for any dtype of the
            model.
        long_frequencies: frequencies for sequences longer than the original context. Defined only
            with LongRoPE.
        local_frequencies: frequencies of the layers with a sliding window. Defined only if the
            config specifies a separate base for these layers.
    """

    frequencies: Tensor
    long_frequencies: Tensor
    local_frequencies: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        names = ["frequencies"]
        if isinstance(config.rope_scaling, LongRope):
            names.append("long_frequencies")
        if config.rope_local_base_freq is not None:
            names.append("local_frequencies")
        for name in names:
            # The buffers are not persistent, because the frequencies are computed from the config.
            self.register_buffer(name, torch.empty(0), persistent=False)

    def reset(self, device: torch.device) -> None:
        """Compute the frequencies and store them on a device."""
        size, base = self.config.rotary_dim, self.config.rope_theta
        scaling, local_base = self.config.rope_scaling, self.config.rope_local_base_freq
        # The frequencies are always computed on the CPU, so that they are bit-identical on every
        # device.
        with torch.device("cpu"):
            self.frequencies = rope_frequencies(size, base, scaling).to(device)
            if isinstance(scaling, LongRope):
                long = rope_frequencies(size, base, scaling, is_long=True)
                self.long_frequencies = long.to(device)
            if local_base is not None:
                # Layers with a sliding window attend only to nearby tokens, so their frequencies
                # are not rescaled for a longer context (Gemma 3).
                self.local_frequencies = rope_frequencies(size, local_base, None).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # The frequencies are recomputed, because `model.to(torch.bfloat16)` rounds them, and
        # `to_empty` leaves them uninitialised.
        self.reset(self.frequencies.device)
        return self

    def tables(self, positions: Tensor, length: int | Tensor) -> Ropes:
        """Compute the rotary tables in fp32. The result contains one pair (cos, sin), or two pairs
        if layers with a sliding window have a separate base. If queries grow with their position,
        the second pair contains twice the factor of each position, [T, 1] or [B, 1, T, 1].

        Args:
            positions: positions of the tokens, int64 [T] or [B, T].
            length: length of the sequences in tokens (see `Cache.text_length`).
        """
        config = self.config
        # torch's compiler can't generate code for complex numbers.
        polar = config.family.rope.polar and not torch.compiler.is_compiling()
        # The tables are computed in fp32, because bf16 can't represent position 257.
        tables = rope_tables(self._frequencies_at(length), positions, torch.float32, polar=polar)
        # YaRN and LongRoPE scale up queries and keys. This sharpens the softmax, which is spread
        # over more tokens in a longer context.
        magnitude = rope_magnitude(config.rope_scaling, config.max_position_embeddings)
        if magnitude != 1:
            tables = (tables[0] * magnitude, tables[1] * magnitude)
        if config.llama_4_scaling_beta is not None:
            original = config.rope_scaling.original_max_position_embeddings
            growth = (1 + (positions // original).float()).log() * config.llama_4_scaling_beta + 1
            growth = growth[..., None] if positions.dim() == 1 else growth[:, None, :, None]
            return tables, (growth, growth)
        if config.rope_local_base_freq is None:
            return (tables,)
        return tables, rope_tables(self.local_frequencies, positions, torch.float32)

    def _frequencies_at(self, length: int | Tensor) -> Tensor:
        """Return the rotary frequencies for sequences of `length` tokens: fp32 [R/2], or [B, 1,
        R/2] for lengths int64 [B]."""
        config, short = self.config, self.frequencies
        scaling = config.rope_scaling
        limit = config.max_position_embeddings
        if isinstance(scaling, LongRope):
            limit = scaling.original_max_position_embeddings
        elif not isinstance(scaling, DynamicRope):
            return short
        if isinstance(length, int) and length <= limit:
            return short
        if isinstance(scaling, LongRope):
            long = self.long_frequencies
        else:
            length = torch.as_tensor(length, device=short.device)
            long = dynamic_frequencies(
                config.rotary_dim, config.rope_theta, scaling, length, max_positions=limit
            )
        if isinstance(length, int) or length.dim() == 0:
            return long
        is_long_B11 = (length > limit)[:, None, None]
        return torch.where(is_long_B11, long if long.dim() == 1 else long[:, None], short)


def apply_rope(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of each head by their position. Most
    Hugging Face weights have this layout.

    Args:
        x_BHTD: queries or keys.
        cos, sin: results of `rope_tables`.

    Returns:
        Rotated queries or keys [B, H, T, D], in the wider of the dtypes of `x_BHTD` and the tables.
    """
    R = cos.shape[-1]
    if x_BHTD.shape[-1] != R:
        # The dimensions after the first R are not rotated.
        rotated = apply_rope(x_BHTD[..., :R], cos, sin)
        return torch.cat((rotated, x_BHTD[..., R:]), dim=-1)
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat((-second, first), dim=-1) * sin


def apply_rope_to_neighbours(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the first R dimensions of each head by their position. GLM's
    weights have this layout. See `apply_rope` for the arguments and the result."""
    R = cos.shape[-1]
    turned, rest = x_BHTD[..., :R], x_BHTD[..., R:]
    # The tables contain each angle at i and at i + R/2, but these pairs need it at 2i and 2i + 1.
    cos, sin = (table[..., : R // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    crossed = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat((turned * cos + crossed * sin, rest), dim=-1)


def apply_rope_as_complex(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of [B, H, T, R] by their position, like
    `apply_rope_to_neighbours`. As in Hugging Face's class for DeepSeek-V2, the rotation is computed
    as a product of complex numbers, which rounds differently. See `apply_rope` for the
    arguments."""
    if torch.compiler.is_compiling():
        # torch's compiler can't generate code for complex numbers.
        return apply_rope_to_neighbours(x_BHTD, cos, sin)
    wide_BHTD = x_BHTD.to(torch.promote_types(x_BHTD.dtype, cos.dtype))
    pairs = wide_BHTD.view(*wide_BHTD.shape[:-1], -1, 2)
    if any(place % 2 for place in (pairs.storage_offset(), *pairs.stride()[:-1])):
        # `view_as_complex` requires an even offset and even strides. `contiguous` would not change
        # odd strides of dimensions of size 1.
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    R = cos.shape[-1]
    turns = torch.complex(cos[..., : R // 2], sin[..., : R // 2])
    return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2)


def apply_rope_from_neighbours(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of [B, H, T, R] by their position, as the weights of
    DeepSeek-V3 require. In the result, each pair is stored at the dimensions (i, i + R/2). See
    `apply_rope` for the arguments.

    The attention scores do not depend on the order of the dimensions if it is the same for queries
    and keys. With the order used here, the products in a score are summed in the same order as in
    transformers.
    """
    pairs = x_BHTD.view(*x_BHTD.shape[:-1], -1, 2)
    return apply_rope(pairs.transpose(-1, -2).flatten(-2), cos, sin)
