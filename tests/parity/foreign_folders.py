"""Folders of random tensors in the formats of OpenAI's GPT-2, Meta's Llama, litgpt, torchtune and
nanochat.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from firstlight.conversion.foreign.openai import crc32c

VOCABULARY, CONTEXT, WIDTH, HEADS, GROUPS, LAYERS, MLP = 64, 24, 48, 4, 2, 2, 80
_DTYPES = {torch.float32: 1, torch.float64: 2, torch.int64: 9, torch.float16: 19}


def draw(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Draw random tensors; gains and weights of norms are close to one."""
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        noise = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        is_gain = len(shape) == 1 and not name.endswith(("/b", ".bias"))
        tensors[name] = noise + is_gain
    return tensors


def checksum(content: bytes) -> int:
    """Return a checksum in LevelDB's format, as written by TensorFlow."""
    value = crc32c(np.frombuffer(content, np.uint8))
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def field(number: int, value: int | bytes) -> bytes:
    """Return a protocol buffer field: an integer or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def block(entries: Mapping[bytes, bytes]) -> bytes:
    """Return a block of a table with its trailer; every third key is written in full."""
    content, restarts, last = b"", [], b""
    for i, (key, value) in enumerate(entries.items()):
        shared = 0
        if i % 3:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        else:
            restarts.append(len(content))
        content += varint(shared) + varint(len(key) - shared) + varint(len(value))
        content, last = content + key[shared:] + value, key
    content += b"".join(struct.pack("<I", at) for at in restarts or [0])
    content += struct.pack("<I", len(restarts or [0])) + b"\0"
    return content + struct.pack("<I", checksum(content))


def entry(tensor: Tensor, offset: int, content: bytes, *more: bytes) -> bytes:
    """Return a BundleEntryProto."""
    shape = b"".join(field(2, field(1, size) if size else b"") for size in tensor.shape)
    message = field(1, _DTYPES[tensor.dtype]) + field(2, shape)
    message += field(4, offset) if offset else b""
    message += field(5, len(content)) if content else b""
    message += varint(6 << 3 | 5) + struct.pack("<I", checksum(content))
    return message + b"".join(more)


def table(entries: Mapping[bytes, bytes], entries_a_block: int = 5) -> bytes:
    """Return an index file: sorted blocks of entries, and the index of blocks."""
    items, content, handles = sorted(entries.items()), b"", {}
    for start in range(0, len(items), entries_a_block):
        part = dict(items[start : start + entries_a_block])
        data = block(part)
        handles[max(part)] = varint(len(content)) + varint(len(data) - 5)
        content += data
    empty, places = block({}), block(handles)
    footer = varint(len(content)) + varint(len(empty) - 5)
    footer += varint(len(content) + len(empty)) + varint(len(places) - 5)
    magic = struct.pack("<Q", 0xDB4775248B80FB57)
    return content + empty + places + footer.ljust(40, b"\0") + magic


HEADER = field(1, 1) + field(3, field(1, 1))


def write_bundle(prefix: Path, tensors: Mapping[str, Tensor], header: bytes = HEADER) -> None:
    """Write a TensorFlow checkpoint."""
    data, entries = b"", {b"": header}
    for name, tensor in sorted(tensors.items()):
        content = tensor.numpy().tobytes()
        entries[name.encode()] = entry(tensor, len(data), content)
        data += content
    prefix.with_name(prefix.name + ".data-00000-of-00001").write_bytes(data)
    prefix.with_name(prefix.name + ".index").write_bytes(table(entries))


def openai_gpt2(folder: Path, **hparams: Any) -> dict[str, Tensor]:
    """Write a folder like the published GPT-2 of OpenAI, and return its tensors."""
    C = WIDTH
    shapes: dict[str, tuple[int, ...]] = {"model/wte": (VOCABULARY, C), "model/wpe": (CONTEXT, C)}
    for i in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"model/h{i}/{norm}/g": (C,), f"model/h{i}/{norm}/b": (C,)}
        for module, size in (
            ("attn/c_attn", (C, 3 * C)),
            ("attn/c_proj", (C, C)),
            ("mlp/c_fc", (C, 4 * C)),
            ("mlp/c_proj", (4 * C, C)),
        ):
            shapes |= {f"model/h{i}/{module}/w": (1, *size), f"model/h{i}/{module}/b": size[1:]}
    tensors = draw({**shapes, "model/ln_f/g": (C,), "model/ln_f/b": (C,)})
    write_bundle(folder / "model.ckpt", tensors)
    given = {"n_vocab": VOCABULARY, "n_ctx": CONTEXT, "n_embd": C, "n_head": HEADS}
    (folder / "hparams.json").write_text(json.dumps({**given, "n_layer": LAYERS, **hparams}))
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\n')
    return tensors


def _llama_shapes(names: Mapping[str, str], block: str) -> dict[str, tuple[int, ...]]:
    C, K = WIDTH, WIDTH // HEADS * GROUPS
    sizes = {"q": (C, C), "k": (K, C), "v": (K, C), "o": (C, C), "norm1": (C,), "norm2": (C,)}
    sizes |= {"gate": (MLP, C), "up": (MLP, C), "down": (C, MLP)}
    return {f"{block}.{i}.{names[key]}": size for i in range(LAYERS) for key, size in sizes.items()}


META = {
    **{x: f"attention.w{x}.weight" for x in "qkvo"},
    "norm1": "attention_norm.weight",
    "norm2": "ffn_norm.weight",
    **{k: f"feed_forward.w{i}.weight" for k, i in (("gate", 1), ("down", 2), ("up", 3))},
}
TORCHTUNE = {
    **{x: f"attn.{x}_proj.weight" for x in "qkv"},
    "o": "attn.output_proj.weight",
    "norm1": "sa_norm.scale",
    "norm2": "mlp_norm.scale",
    **{k: f"mlp.w{i}.weight" for k, i in (("gate", 1), ("down", 2), ("up", 3))},
}
PARAMS = {
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": GROUPS,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": VOCABULARY,
    "multiple_of": 8,
}


def meta_llama(
    folder: Path, parts: int = 1, *, cuts_vocabulary: bool = True, **params: Any
) -> dict[str, Tensor]:
    """Write a folder like the published Llamas of Meta, in `parts` files, and return its full
    tensors.
    """
    shapes = _llama_shapes(META, "layers") | {"tok_embeddings.weight": (VOCABULARY, WIDTH)}
    tensors = draw({**shapes, "norm.weight": (WIDTH,), "output.weight": (VOCABULARY, WIDTH)})
    columns = ("wo.weight", "w2.weight", *(() if cuts_vocabulary else ("tok_embeddings.weight",)))
    for i in range(parts):
        shard = {
            name: tensor
            if tensor.dim() == 1
            else tensor.chunk(parts, int(name.endswith(columns)))[i].clone()
            for name, tensor in tensors.items()
        }
        torch.save({**shard, "rope.freqs": torch.ones(6)}, folder / f"consolidated.{i:02}.pth")
    (folder / "params.json").write_text(json.dumps({**PARAMS, **params}))
    return tensors


def torchtune_llama(path: Path, *, tied: bool = False) -> dict[str, Tensor]:
    """Write a checkpoint like torchtune's recipes, and return its tensors."""
    shapes = _llama_shapes(TORCHTUNE, "layers") | {"tok_embeddings.weight": (VOCABULARY, WIDTH)}
    tensors = draw({**shapes, "norm.scale": (WIDTH,), "output.weight": (VOCABULARY, WIDTH)})
    if tied:
        del tensors["output.weight"]
    torch.save({"model": tensors, "epochs_run": 1, "seed": 3}, path)
    return tensors


LITGPT = {
    "norm1": "norm_1.weight",
    "norm2": "norm_2.weight",
    "o": "attn.proj.weight",
    "q": "attn.q.weight",
    "k": "attn.k.weight",
    "v": "attn.v.weight",
    "gate": "mlp.fc_1.weight",
    "up": "mlp.fc_2.weight",
    "down": "mlp.proj.weight",
}
LITGPT_CONFIG: dict[str, Any] = {
    "name": "tiny",
    "hf_config": {"org": "x", "name": "y"},
    "n_layer": LAYERS,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_query_groups": GROUPS,
    "head_size": WIDTH // HEADS,
    "bias": False,
    "block_size": CONTEXT,
    "vocab_size": 60,
    "padded_vocab_size": VOCABULARY,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "norm_eps": 1e-6,
    "parallel_residual": False,
    "rotary_percentage": 1.0,
    "rope_base": 20000,
    "intermediate_size": MLP,
    "rope_adjustments": None,
    "sliding_window_size": None,
}


def litgpt_model(folder: Path, **changed: Any) -> dict[str, Tensor]:
    """Write a folder like litgpt, and return its tensors."""
    config = {**LITGPT_CONFIG, **changed}
    shapes = _llama_shapes(LITGPT, "transformer.h")
    parts = {n: s for n, s in shapes.items() if n.endswith(("n.q.weight", "k.weight", "v.weight"))}
    shapes = {n: s for n, s in shapes.items() if n not in parts}
    rows = WIDTH + 2 * WIDTH // HEADS * GROUPS
    for i in range(LAYERS):
        attention = f"transformer.h.{i}.attn"
        shapes[f"{attention}.qkv.weight"] = (rows, WIDTH)
        if config.get("attn_bias"):
            shapes[f"{attention}.qkv.bias"] = (rows,)
        if config.get("norm_qk"):
            shapes |= {f"{attention}.norm_{x}.weight": (WIDTH // HEADS,) for x in "qk"}
    shapes |= {f"{name}.weight": (VOCABULARY, WIDTH) for name in ("lm_head", "transformer.wte")}
    tensors = draw({**shapes, "transformer.ln_f.weight": (WIDTH,)})
    torch.save(tensors, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
    return tensors


NANOCHAT: dict[str, int] = {
    "sequence_len": CONTEXT,
    "vocab_size": VOCABULARY,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_kv_head": GROUPS,
    "n_embd": WIDTH,
}


def nanochat_model(folder: Path, step: int = 650, **changed: Any) -> dict[str, Tensor]:
    """Write a folder like a saved step of nanochat's first form, with some settings changed, and
    return its tensors. Embedding and head have `VOCABULARY` rows, whatever the vocabulary is.
    """
    config = {**NANOCHAT, **changed}
    C, K = WIDTH, WIDTH // HEADS * config["n_kv_head"]
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCABULARY, C)}
    for i in range(LAYERS):
        sizes = {"attn.c_q": (C, C), "attn.c_k": (K, C), "attn.c_v": (K, C)}
        sizes |= {"attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        shapes |= {f"transformer.h.{i}.{name}.weight": size for name, size in sizes.items()}
    tensors = draw({**shapes, "lm_head.weight": (VOCABULARY, C)})
    torch.save(tensors, folder / f"model_{step:06}.pt")
    meta = {"step": step, "val_bpb": 0.81, "model_config": config, "user_config": {"run": "dummy"}}
    (folder / f"meta_{step:06}.json").write_text(json.dumps(meta))
    return tensors
