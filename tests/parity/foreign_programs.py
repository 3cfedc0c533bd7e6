"""Small random models of nanoGPT and LLMs-from-scratch, and the files in which they are saved.

Written from the descriptions of both programs, with exactly their tensors' names.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from firstlight.conversion.foreign.model import ForeignModel
from firstlight.models.rope import Llama3Rope, rope_frequencies

AnyModel = TypeVar("AnyModel", bound=nn.Module)

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 61, 24, 48, 3, 2
IDS = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(5))
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


def heads_of(x: Tensor, count: int) -> Tensor:
    """Reshape [B, T, C] to [B, H, T, D]."""
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention explicitly, from [B, H, T, D] to [B, T, C]."""
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    y: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return y.transpose(1, 2).flatten(2)


class NanoNorm(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias, 1e-5)


class NanoBlock(nn.Module):
    def __init__(self, bias: bool, mask: bool, gelu: str) -> None:
        super().__init__()
        self.gelu = gelu
        self.ln_1, self.ln_2 = NanoNorm(bias), NanoNorm(bias)
        self.attn = nn.ModuleDict(
            {
                "c_attn": nn.Linear(WIDTH, 3 * WIDTH, bias=bias),
                "c_proj": nn.Linear(WIDTH, WIDTH, bias=bias),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(WIDTH, 4 * WIDTH, bias=bias),
                "c_proj": nn.Linear(4 * WIDTH, WIDTH, bias=bias),
            }
        )
        if mask:  # without flash attention
            self.attn.register_buffer("bias", torch.ones(1, 1, CONTEXT, CONTEXT).tril())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attn["c_attn"](self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (heads_of(part, HEADS) for part in parts)
        x = x + self.attn["c_proj"](attend(q, k, v))
        inner = self.mlp["c_fc"](self.ln_2(x))
        inner = F.relu(inner) if self.gelu == "relu" else F.gelu(inner, approximate=self.gelu)
        return x + self.mlp["c_proj"](inner)  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    def __init__(self, bias: bool = True, mask: bool = False, gelu: str = "none") -> None:
        super().__init__()
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.ModuleDict(
            {
                "wte": embedding,
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(NanoBlock(bias, mask, gelu) for _ in range(LAYERS)),
                "ln_f": NanoNorm(bias),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.transformer
        x: Tensor = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for block in parts["h"].children():
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))  # type: ignore[no-any-return]


class BookNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() + self.shift


class TanhGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class BookAttention(nn.Module):
    def __init__(self, qkv_bias: bool) -> None:
        super().__init__()
        self.W_query = nn.Linear(WIDTH, WIDTH, bias=qkv_bias)
        self.W_key = nn.Linear(WIDTH, WIDTH, bias=qkv_bias)
        self.W_value = nn.Linear(WIDTH, WIDTH, bias=qkv_bias)
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(W(x), HEADS) for W in (self.W_query, self.W_key, self.W_value))
        return self.out_proj(attend(q, k, v))  # type: ignore[no-any-return]


class FastAttention(nn.Module):
    def __init__(self, qkv_bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=qkv_bias)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.proj(attend(*qkv.unbind()))  # type: ignore[no-any-return]


class BookBlock(nn.Module):
    def __init__(self, qkv_bias: bool, fast: bool) -> None:
        super().__init__()
        self.att = FastAttention(qkv_bias) if fast else BookAttention(qkv_bias)
        self.ff = nn.Module()
        self.ff.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh") if fast else TanhGelu(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.norm1: nn.Module = nn.LayerNorm(WIDTH) if fast else BookNorm()
        self.norm2: nn.Module = nn.LayerNorm(WIDTH) if fast else BookNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.ff.layers(self.norm2(x))  # type: ignore[no-any-return,operator]


class BookGPT(nn.Module):
    def __init__(self, qkv_bias: bool = False, fast: bool = False) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_emb = nn.Embedding(CONTEXT, WIDTH)
        self.trf_blocks = nn.Sequential(*(BookBlock(qkv_bias, fast) for _ in range(LAYERS)))
        self.final_norm: nn.Module = nn.LayerNorm(WIDTH) if fast else BookNorm()
        self.out_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        return self.out_head(self.final_norm(self.trf_blocks(x)))  # type: ignore[no-any-return]


class BookLlamaBlock(nn.Module):
    def __init__(self, kv_heads: int, head_dim: int, saved: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.att = nn.Module()
        self.att.W_query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.att.W_key = nn.Linear(WIDTH, kv_heads * head_dim, bias=False)
        self.att.W_value = nn.Linear(WIDTH, kv_heads * head_dim, bias=False)
        self.att.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        if saved:  # as in the book's first Llamas
            self.att.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).triu(1))
            self.att.register_buffer("cos", saved[0])
            self.att.register_buffer("sin", saved[1])
        self.ff = nn.Module()
        self.ff.fc1 = nn.Linear(WIDTH, 80, bias=False)
        self.ff.fc2 = nn.Linear(WIDTH, 80, bias=False)
        self.ff.fc3 = nn.Linear(80, WIDTH, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turned(x: Tensor) -> Tensor:
            half = self.head_dim // 2
            other = torch.cat((-x[..., half:], x[..., :half]), -1)
            return x * cos[: x.shape[2]] + other * sin[: x.shape[2]]

        y = self.norm1(x)
        q, k, v = (
            getattr(self.att, name)(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("W_query", "W_key", "W_value")
        )
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (turned(k), v))
        x = x + self.att.out_proj(attend(turned(q), k, v))  # type: ignore[operator]
        y = self.norm2(x)
        inner = F.silu(self.ff.fc1(y)) * self.ff.fc2(y)  # type: ignore[operator]
        return x + self.ff.fc3(inner)  # type: ignore[no-any-return,operator]


class BookLlama(nn.Module):
    def __init__(
        self,
        heads: int = 6,
        kv_heads: int = 2,
        rope_theta: float = 5000.0,
        scaling: Llama3Rope | None = None,
        saves_tables: bool = False,
    ) -> None:
        super().__init__()
        head_dim = WIDTH // heads
        turns = torch.arange(CONTEXT)[:, None] * rope_frequencies(head_dim, rope_theta, scaling)
        self.tables = (torch.cat((turns, turns), 1).cos(), torch.cat((turns, turns), 1).sin())
        saved = self.tables if saves_tables else None
        self.tok_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.trf_blocks = nn.ModuleList(
            BookLlamaBlock(kv_heads, head_dim, saved) for _ in range(LAYERS)
        )
        self.final_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.out_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_emb(ids)
        for block in self.trf_blocks:
            x = block(x, *self.tables)
        return self.out_head(self.final_norm(x))  # type: ignore[no-any-return]


def drawn(model: AnyModel) -> AnyModel:
    """Return the model with random weights everywhere, including biases and norms."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.dim() == 1 and name.endswith(("weight", "scale"))
            parameter.copy_(noise * 0.3 + is_scale)
    return model.eval()


def nanogpt_checkpoint(model: NanoGPT, bias: bool = True, prefix: str = "") -> dict[str, Any]:
    """Return the checkpoint that nanoGPT's train.py saves after an optimizer step."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters())
    loss = trained(IDS).sum()
    loss.backward()
    optimizer.step()
    return {
        "model": {prefix + name: tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": {
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_embd": WIDTH,
            "block_size": CONTEXT,
            "bias": bias,
            "vocab_size": VOCABULARY,
            "dropout": 0.2,
        },
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "device": "cpu", "compile": True, "learning_rate": 6e-4},
    }


def in_transformers(foreign: ForeignModel) -> nn.Module:
    """Return the model that transformers creates from the config, with all tensors loaded."""
    config = transformers.AutoConfig.for_model(**foreign.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = dict(foreign.tensors)
    if foreign.config["tie_word_embeddings"]:
        assert "lm_head.weight" not in tensors
        embedding = "transformer.wte.weight" if config.model_type == "gpt2" else None
        tensors["lm_head.weight"] = tensors[embedding or "model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    # transformers itself sets biases that a file lacks to zero.
    has_all = foreign.config.get("qkv_bias", True)
    assert {name.split(".", 3)[-1] for name in missing} == (
        set() if has_all else {"attn.c_attn.bias"}
    )
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]
