"""Logits of other programs' models, computed from their own tensors with the formulas of their own
code.

The reference for the programs that `foreign_programs` does not rebuild as modules: OpenAI's GPT-2,
Meta's Llama, torchtune, litgpt and nanochat. It shares no names, layout or model code with the
conversion: a wrong name, order or transposition of a tensor gives different logits. Constants in a
program's code are constants here, even if a config differs. The computation is in fp32.

Sources: see the programs' files in `firstlight/conversion/foreign`. Shape letters: B batch,
T positions, C width, H query heads, K key and value heads, D size of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]

#: Norm epsilon in OpenAI's GPT-2.
_EPSILON = 1e-5


@dataclass(frozen=True)
class PairsNames:
    """Names of a layer's modules, without the layer's prefix, in a Llama with rotary pairs
    (2i, 2i + 1). `attended` is attention's output projection, `scale` the name of a norm's weight.
    """

    norm_1: str
    q: str
    k: str
    v: str
    attended: str
    norm_2: str
    gate: str
    up: str
    down: str
    scale: str


META_NAMES = PairsNames(
    *"attention_norm attention.wq attention.wk attention.wv attention.wo ffn_norm".split(),
    *"feed_forward.w1 feed_forward.w3 feed_forward.w2 weight".split(),
)
TORCHTUNE_NAMES = PairsNames(
    *"sa_norm attn.q_proj attn.k_proj attn.v_proj attn.output_proj mlp_norm".split(),
    *"mlp.w1 mlp.w3 mlp.w2 scale".split(),
)


@torch.no_grad()
def openai_logits(weights: Weights, heads: int, ids: Tensor) -> Tensor:
    """Logits [B, T, V], fp32, of OpenAI's GPT-2, whose linear layers have weights [in, out].

    Args:
        weights: tensors by OpenAI's names.
        heads: number of attention heads.
        ids: token ids below V, int64 [B, T]; T is at most the number of positions.
    """

    def layer(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"model/{name}/w"].float() + weights[f"model/{name}/b"].float()

    def norm(name: str, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPSILON)
        return x * weights[f"model/{name}/g"].float() + weights[f"model/{name}/b"].float()

    x = weights["model/wte"][ids].float() + weights["model/wpe"][: ids.shape[1]].float()
    for block in takewhile(lambda h: f"model/{h}/ln_1/g" in weights, (f"h{i}" for i in count())):
        q, k, v = layer(f"{block}/attn/c_attn", norm(f"{block}/ln_1", x)).chunk(3, -1)
        size = x.shape[-1] // heads
        y = _attend(_split(q, size), _split(k, size), _split(v, size))
        x = x + layer(f"{block}/attn/c_proj", y)
        y = layer(f"{block}/mlp/c_fc", norm(f"{block}/ln_2", x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + layer(f"{block}/mlp/c_proj", y)
    return norm("ln_f", x) @ weights["model/wte"].float().t()


@torch.no_grad()
def pairs_llama_logits(
    shards: Sequence[Weights], names: PairsNames, config: Mapping[str, Any], ids: Tensor
) -> Tensor:
    """Logits [B, T, V], fp32, of Meta's or torchtune's Llama.

    Args:
        shards: the model's tensor-parallel shards, one per file; a list of one for torchtune. Each
            shard has some of the heads and a part of the MLP; their outputs are summed.
        names: names of the program's tensors.
        config: config.json, for heads, rotary positions and the norms' epsilon.
        ids: token ids below V, int64 [B, T].
    """
    eps, scale = config["rms_norm_eps"], names.scale
    x = _embedded(
        [shard["tok_embeddings.weight"] for shard in shards], ids, len(shards[0][f"norm.{scale}"])
    )
    layers = list(_blocks(shards[0], "layers.", f"{names.norm_1}.{scale}"))
    size = _rows(shards, f"{layers[0]}{names.q}") // config["num_attention_heads"]
    turns = torch.arange(ids.shape[1])[:, None] * _frequencies(size, config["rope_parameters"])
    turns = torch.polar(torch.ones_like(turns), turns)  # [T, D/2], complex
    for block in layers:
        y = _rms_norm(shards[0], block + names.norm_1, x, eps, scale)
        sums = torch.zeros_like(x)
        for shard in shards:
            q, k, v = (
                _split(_linear(shard, block + name, y), size)
                for name in (names.q, names.k, names.v)
            )
            y_part = _attend(_turned_pairs(q, turns), _turned_pairs(k, turns), v)
            sums = sums + _linear(shard, block + names.attended, y_part)
        x = x + sums
        y = _rms_norm(shards[0], block + names.norm_2, x, eps, scale)
        for shard in shards:
            inner = F.silu(_linear(shard, block + names.gate, y))
            inner = inner * _linear(shard, block + names.up, y)
            x = x + _linear(shard, block + names.down, inner)
    x = _rms_norm(shards[0], "norm", x, eps, scale)
    return torch.cat([_head(shard, "output", x) for shard in shards], -1)


@torch.no_grad()
def nanochat_logits(weights: Weights, heads: int, ids: Tensor) -> Tensor:
    """Logits [B, T, V], fp32, of nanochat's first form; `weights`, `heads` and `ids` as in
    `openai_logits`. The rotary tables are fp32 here, and bf16 in nanochat's code."""
    x = _bare_norm(F.embedding(ids, weights["transformer.wte.weight"]).float())
    size = x.shape[-1] // heads
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    angles = (torch.arange(ids.shape[1])[:, None] * _frequencies(size, rope)).repeat(1, 2)
    # nanochat rotates by the negative angle: the halves a and b of a head become
    # (a cos + b sin, b cos - a sin).
    cos, sin = angles.cos(), -angles.sin()
    for block in _blocks(weights, "transformer.h.", "attn.c_q.weight"):
        y = _bare_norm(x)
        q, k, v = (_split(_linear(weights, f"{block}attn.c_{n}", y), size) for n in "qkv")
        q, k = (_bare_norm(_turned(part, cos, sin)) for part in (q, k))
        x = x + _linear(weights, block + "attn.c_proj", _attend(q, k, v))
        inner = F.relu(_linear(weights, block + "mlp.c_fc", _bare_norm(x))).square()
        x = x + _linear(weights, block + "mlp.c_proj", inner)
    return 15 * torch.tanh(_head(weights, "lm_head", _bare_norm(x)) / 15)


def _embedded(parts: Sequence[Tensor], ids: Tensor, width: int) -> Tensor:
    """The embeddings of `ids`, fp32 [B, T, width], from shards [V, width / n] or [V / n, width]."""
    if parts[0].shape[1] != width:
        return torch.cat([F.embedding(ids, part).float() for part in parts], -1)
    x, first = torch.zeros(*ids.shape, width), 0
    for part in parts:
        is_here = (ids >= first) & (ids < first + len(part))
        x[is_here] = part[ids[is_here] - first].float()
        first += len(part)
    return x


def _rows(shards: Sequence[Weights], module: str) -> int:
    """Return rows of a module's weight from all shards."""
    return sum(len(shard[f"{module}.weight"]) for shard in shards)


@torch.no_grad()
def litgpt_logits(weights: Weights, config: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Logits [B, T, V], fp32, of a Llama-like model of litgpt.

    Args:
        weights: the state_dict.
        config: config.json, for heads, rotary positions, window and the norms' epsilon.
        ids: token ids below V, int64 [B, T].
    """
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    size, groups = config["head_dim"], config["num_key_value_heads"]
    x = F.embedding(ids, weights["transformer.wte.weight"]).float()
    angles = torch.arange(ids.shape[1])[:, None] * _frequencies(size, config["rope_parameters"])
    cos, sin = angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()
    for block in _blocks(weights, "transformer.h.", "norm_1.weight"):
        qkv = _linear(weights, block + "attn.qkv", _rms_norm(weights, block + "norm_1", x, eps))
        q, k, v = (
            _split(part, size)
            for part in torch.split(qkv, [heads * size, *2 * [groups * size]], -1)
        )
        if block + "attn.norm_q.weight" in weights:
            q = _rms_norm(weights, block + "attn.norm_q", q, eps)
            k = _rms_norm(weights, block + "attn.norm_k", k, eps)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        y = _attend(q, k, v, config.get("sliding_window"))
        x = x + _linear(weights, block + "attn.proj", y)
        y = _rms_norm(weights, block + "norm_2", x, eps)
        inner = F.silu(_linear(weights, block + "mlp.fc_1", y))
        x = x + _linear(
            weights, block + "mlp.proj", inner * _linear(weights, block + "mlp.fc_2", y)
        )
    return _head(weights, "lm_head", _rms_norm(weights, "transformer.ln_f", x, eps))


def _blocks(weights: Weights, prefix: str, first: str) -> Iterator[str]:
    """Return the prefixes of the blocks, such as "trf_blocks.0.", up to the first block without a
    tensor named `first`.
    """
    return takewhile(lambda block: block + first in weights, (f"{prefix}{i}." for i in count()))


def _linear(weights: Weights, module: str, x: Tensor) -> Tensor:
    bias = weights.get(f"{module}.bias")
    return F.linear(x, weights[f"{module}.weight"].float(), None if bias is None else bias.float())


def _head(weights: Weights, module: str, x: Tensor) -> Tensor:
    """Logits [B, T, V] of `x`, [B, T, C]."""
    return F.linear(x, weights[f"{module}.weight"].float())


def _rms_norm(
    weights: Weights, module: str, x: Tensor, epsilon: float = _EPSILON, scale: str = "weight"
) -> Tensor:
    root = (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return x / root * weights[f"{module}.{scale}"].float()


def _bare_norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without a weight, with torch's default epsilon."""
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def _split(x: Tensor, size: int) -> Tensor:
    """[B, T, H x D] reshaped to [B, H, T, D], D being `size`."""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def _attend(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int | None = None) -> Tensor:
    """Causal attention, [B, T, H x D].

    Args:
        q_BHTD: queries.
        k_BKTD, v_BKTD: keys and values, which H / K neighbouring query heads share.
        window: number of tokens that a token attends to, including itself; None is no limit.
    """
    shared = q_BHTD.shape[1] // k_BKTD.shape[1]
    k_BHTD, v_BHTD = (t.repeat_interleave(shared, dim=1) for t in (k_BKTD, v_BKTD))
    scores = q_BHTD @ k_BHTD.transpose(2, 3) / math.sqrt(q_BHTD.shape[-1])
    every = torch.ones(scores.shape[-2:], dtype=torch.bool)
    hidden = every.triu(1) if window is None else every.triu(1) | every.tril(-window)
    y_BHTD = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v_BHTD
    return y_BHTD.transpose(1, 2).flatten(2)


def _frequencies(size: int, rope: Mapping[str, Any]) -> Tensor:
    """Rotary angle of each pair per position, fp32 [D/2], D being `size`; rescaled as in Llama 3.1
    (meta-llama/llama-models `apply_scaling`) if `rope_type` is "llama3"."""
    frequencies: Tensor = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    if rope["rope_type"] != "llama3":
        return frequencies
    # Full rotations of each pair within the original context.
    rounds = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((rounds - low) / (high - low)).clamp(0, 1)
    return frequencies.mul(kept + (1 - kept) / rope["factor"])


def _turned(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of [B, H, T, D]; `cos` and `sin` are [T, D]."""
    half = x_BHTD.shape[-1] // 2
    other = torch.cat((-x_BHTD[..., half:], x_BHTD[..., :half]), -1)
    return x_BHTD * cos + other * sin


def _turned_pairs(x_BHTD: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of [B, H, T, D] by unit complex numbers `turns`, [T, D/2]."""
    pairs = torch.view_as_complex(x_BHTD.reshape(*x_BHTD.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)
