"""Published tables of GPU memory, against the planner.

bert-large, fine-tuned on a 16 GB V100 with batch size 4 and sequence length 512; memory as reported
by the driver. Hugging Face's Trainer was used in early 2022 (torch 1.10), with unfused attention
and dropout, AdamW one parameter at a time, and gradients clipped and zeroed in place. The context
of 1,343 MB was measured there, too.

LoRA on a 40 GB A100: Lit-GPT's `tutorials/resource-tables.md` of 2023-10-27 (torch 2.1), see
`_LitGPT`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.planner.memory.kernels import cuda_target
from firstlight.planner.memory.module import plan_module

_MB = 2**20
_CONTEXT = 1343 * _MB

#: Measured MB, by row.
_PUBLISHED = {
    "plain": 14_949,
    "fp16": 13_939,
    "8-bit Adam": 13_085,
    "Adafactor": 12_295,
    "accumulation": 8_681,
    "accumulation, checkpointing, fp16": 7_275,
    "accumulation and checkpointing": 6_775,
    "accumulation, checkpointing, fp16, 8-bit Adam": 5_363,
    "accumulation, checkpointing, fp16, Adafactor": 4_847,
}


def _adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    optimizer: torch.optim.Optimizer = Adafactor(
        parameters, scale_parameter=False, relative_step=False, lr=1e-3
    )
    return optimizer


def _eight_bit_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.Adam8bit(parameters)
    return optimizer


def _bert_large() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        return BertForSequenceClassification(config)


def _batch(rows: int) -> dict[str, Tensor]:
    ids = torch.empty(rows, 512, dtype=torch.int64, device="meta")
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "attention_mask": ids, "token_type_ids": ids, "labels": labels}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_published_memory_table_is_met_within_8_percent_and_in_order() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    model = _bert_large()
    small: dict[str, Any] = {"rows": 1, "gradient_accumulation_steps": 4}
    checkpointing = small | {"activation_checkpointing": True}
    all_three = checkpointing | {"precision": "fp16"}
    rows: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp16": {"precision": "fp16"},
        "8-bit Adam": {"optimizer": _eight_bit_adam},
        "Adafactor": {"optimizer": _adafactor},
        "accumulation": small,
        "accumulation, checkpointing, fp16": all_three,
        "accumulation and checkpointing": checkpointing,
        "accumulation, checkpointing, fp16, 8-bit Adam": all_three | {"optimizer": _eight_bit_adam},
        "accumulation, checkpointing, fp16, Adafactor": all_three | {"optimizer": _adafactor},
    }
    target = cuda_target("V100", (7, 0), _CONTEXT, torch_version=(1, 10))
    predicted = {}
    for name, settings in rows.items():
        options: dict[str, Any] = {"optimizer": "adamw_for_loop", "rows": 4, **settings}
        batch = _batch(options.pop("rows"))
        found = plan_module(
            model, batch, zero_grad="in_place", max_grad_norm=1.0, target=target, **options
        )
        predicted[name] = found.total_bytes / _MB
    errors = {name: predicted[name] / _PUBLISHED[name] - 1 for name in rows}
    assert max(map(abs, errors.values())) < 0.08, errors
    assert sorted(predicted, key=lambda name: -predicted[name]) == list(_PUBLISHED)


@dataclass(frozen=True)
class _Shape:
    """A model in Lit-GPT's table.

    Attributes:
        vocab, width, heads, layers, inner: sizes of the model; the vocabulary includes its padding.
        rotary: number of dimensions per head that are rotated.
        tokens: length of the longest Alpaca example under the model's tokenizer, from the table's
            page.
        is_llama: True for RMSNorm, SwiGLU, attention followed by the MLP, and no biases; False for
            LayerNorm, GELU, and attention parallel to the MLP.
        has_two_norms: True if attention and MLP have separate norms.
        head_bias: True if the head has a bias.
    """

    vocab: int
    width: int
    heads: int
    layers: int
    inner: int
    rotary: int
    tokens: int
    is_llama: bool = False
    has_two_norms: bool = True
    head_bias: bool = False


class _RMSNorm(nn.Module):
    """RMSNorm computed in fp32, as in the tree with the published table. The older commit named in
    the table computes it in bf16, which would give 3 to 5 % less for the three Llama models.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = torch.mean(wide * wide, dim=-1, keepdim=True)
        return (self.weight * (wide * torch.rsqrt(mean + 1e-5))).to(x.dtype)


class _QKV(nn.Module):
    """Queries, keys and values as one product, with LoRA of rank 8 on queries and values."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.width, self.dropout = width, nn.Dropout(0.05)
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.lora_a = nn.Parameter(torch.zeros(16, width))
        self.lora_b = nn.Parameter(torch.zeros(2 * width, 8))

    def forward(self, x_BTC: Tensor) -> Tensor:
        small_B2RT = F.linear(self.dropout(x_BTC), self.lora_a).transpose(-2, -1)
        qv_BT2C = F.conv1d(small_B2RT, self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        places = torch.arange(self.width, device=x_BTC.device)
        places = torch.cat((places, places + 2 * self.width))
        first = qv_BT2C.transpose(0, 1)
        padded = first.new_zeros((*first.shape[:-1], 3 * self.width)).view(-1, 3 * self.width)
        padded = padded.index_copy(1, places, first.reshape(-1, 2 * self.width))
        padded = padded.view((*first.shape[:-1], 3 * self.width)).transpose(0, 1)
        found: Tensor = self.linear(x_BTC) + padded * 2.0
        return found


class _Layer(nn.Module):
    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        width, bias = shape.width, not shape.is_llama
        norm = _RMSNorm if shape.is_llama else nn.LayerNorm
        self.shape, self.norm_1 = shape, norm(width)
        self.norm_2 = norm(width) if shape.has_two_norms else None
        self.qkv = _QKV(width, bias)
        self.attended = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, shape.inner, bias=bias)
        self.gate = nn.Linear(width, shape.inner, bias=False) if shape.is_llama else None
        self.down = nn.Linear(shape.inner, width, bias=bias)

    def attend(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        heads, size = self.shape.heads, C // self.shape.heads
        qkv = self.qkv(x_BTC).view(B, T, heads, 3, size).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(B, heads, T, size) for part in qkv.split((1, 1, 1), dim=2))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        done: Tensor = self.attended(y.transpose(1, 2).reshape(B, T, C))
        return done

    def mlp(self, x: Tensor) -> Tensor:
        up = self.up(x)
        done: Tensor = self.down(F.gelu(up) if self.gate is None else F.silu(up) * self.gate(x))
        return done

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attend(normed, cos, sin)
        if self.shape.is_llama and self.norm_2 is not None:
            x = attended + x
            done: Tensor = self.mlp(self.norm_2(x)) + x
            return done
        second = normed if self.norm_2 is None else self.norm_2(x)
        return self.mlp(second) + attended + x


def _turned(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head, with fp32 tables."""
    count = cos.shape[-1]
    first, rest = x_BHTD[..., :count], x_BHTD[..., count:]
    other = torch.cat((-first[..., count // 2 :], first[..., : count // 2]), dim=-1)
    return torch.cat((((first * cos) + (other * sin)).type_as(first), rest), dim=-1)


class _LitGPT(nn.Module):
    """The models of `finetune/lora.py` with their memory layout, and the settings that determine
    their figures:

    - "Max GPU RAM" is what the script prints, `torch.cuda.max_memory_allocated() / 1e9`: decimal
      gigabytes of tensors, without the context, fragmentation, or the allocator's cache. It equals
      `MemoryPrediction.peak_bytes`.
    - `--precision bf16-true`: all parameters, including the adapters, are bf16, as are gradients
      and AdamW's moments. Fabric converts the result of `forward`, the logits, to fp32.
    - the first micro-batch contains the longest example, and its other rows are padded to this
      length; it has the peak, in the first of 128 / micro-batch backward passes.
    - the head is applied to 128 positions at a time, and so is the loss; the script holds all the
      logits in a variable until the next step.
    - `conv1d` uses cuDNN, whose workspaces are not counted; they were small.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = (_RMSNorm if shape.is_llama else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=shape.head_bias)
        self.to(torch.bfloat16)
        self.register_buffer("cos", torch.zeros(shape.tokens, shape.rotary))
        self.register_buffer("sin", torch.zeros(shape.tokens, shape.rotary))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)
        self.held: list[Tensor] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.held = []
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        rounded = [self.head(part) for part in torch.split(self.norm(x), 128, dim=1)]
        logits = [part.float() for part in rounded]
        del rounded
        logits[-1] = logits[-1][:, :-1]
        self.held = logits
        losses = [
            F.cross_entropy(part.flatten(0, 1), labels.flatten(), reduction="none")
            for part, labels in zip(logits, torch.split(input_ids[:, 1:], 128, dim=1), strict=True)
        ]
        return torch.cat(losses).mean()


#: GB by micro-batch size.
_LORA_TABLE = {
    "phi-1.5": (
        _Shape(51200, 2048, 32, 24, 8192, 32, 1044, has_two_norms=False, head_bias=True),
        {1: 4.82, 2: 6.76, 4: 10.68},
    ),
    "StableLM-alpha 3B": (
        _Shape(50688, 4096, 32, 16, 16384, 32, 1034),
        {1: 9.69, 2: 12.10, 4: 16.92},
    ),
    "Llama-2 7B": (
        _Shape(32000, 4096, 32, 32, 11008, 128, 1304, is_llama=True),
        {1: 21.30, 2: 29.07},
    ),
    "Llama-2 13B": (
        _Shape(32000, 5120, 40, 40, 13824, 128, 1304, is_llama=True),
        {1: 38.12},
    ),
}


@pytest.mark.slow
def test_published_lit_gpt_lora_table_is_met_within_1_percent() -> None:
    target = cuda_target("A100", (8, 0), 0, torch_version=(2, 1))
    errors = {}
    for name, (shape, published) in _LORA_TABLE.items():
        with torch.device("meta"):
            model = _LitGPT(shape)
        for rows, gigabytes in published.items():
            ids = torch.empty(rows, shape.tokens, dtype=torch.int64, device="meta")
            found = plan_module(
                model, {"input_ids": ids}, gradient_accumulation_steps=128 // rows, target=target
            )
            errors[name, rows] = found.peak_bytes / 1e9 / gigabytes - 1
    assert max(map(abs, errors.values())) < 0.01, errors
