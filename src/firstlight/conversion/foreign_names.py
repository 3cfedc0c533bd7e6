"""Other programs' names for the tensors of a GPT-2 or a Llama, beside Hugging Face's.

One table a layout, from a Hugging Face name to the names it is made of ("{}" is the layer's
number). Sources: karpathy/nanoGPT `model.py`; rasbt/LLMs-from-scratch
`pkg/llms_from_scratch/ch04.py` and `llama3.py`, and `ch05/07_gpt_to_llama`.

Names and shapes can't tell what else a model's code does: a GPT of LLMs-from-scratch with sliding
windows (`ch04/06_swa`) looks like one without.

Shapes are Hugging Face's, as letters:
    V  vocabulary    P  positions    C  hidden size    F  MLP size    K  kv heads x head size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GPT2_SHAPES = {
    "transformer.wte.weight": "V C",
    "transformer.wpe.weight": "P C",
    "transformer.h.{}.ln_1.weight": "C",
    "transformer.h.{}.ln_1.bias": "C",
    "transformer.h.{}.attn.c_attn.weight": "C 3C",
    "transformer.h.{}.attn.c_attn.bias": "3C",
    "transformer.h.{}.attn.c_proj.weight": "C C",
    "transformer.h.{}.attn.c_proj.bias": "C",
    "transformer.h.{}.ln_2.weight": "C",
    "transformer.h.{}.ln_2.bias": "C",
    "transformer.h.{}.mlp.c_fc.weight": "C 4C",
    "transformer.h.{}.mlp.c_fc.bias": "4C",
    "transformer.h.{}.mlp.c_proj.weight": "4C C",
    "transformer.h.{}.mlp.c_proj.bias": "C",
    "transformer.ln_f.weight": "C",
    "transformer.ln_f.bias": "C",
    "lm_head.weight": "V C",
}

LLAMA_SHAPES = {
    "model.embed_tokens.weight": "V C",
    "model.layers.{}.input_layernorm.weight": "C",
    "model.layers.{}.self_attn.q_proj.weight": "C C",
    "model.layers.{}.self_attn.k_proj.weight": "K C",
    "model.layers.{}.self_attn.v_proj.weight": "K C",
    "model.layers.{}.self_attn.o_proj.weight": "C C",
    "model.layers.{}.post_attention_layernorm.weight": "C",
    "model.layers.{}.mlp.gate_proj.weight": "F C",
    "model.layers.{}.mlp.up_proj.weight": "F C",
    "model.layers.{}.mlp.down_proj.weight": "C F",
    "model.norm.weight": "C",
    "lm_head.weight": "V C",
}

#: Hugging Face's GPT-2 keeps these [in, out]; `nn.Linear`, which the others use, [out, in].
TRANSPOSED = frozenset(
    f"transformer.h.{{}}.{name}.weight"
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
)


@dataclass(frozen=True)
class Layout:
    """The tensors of one program's model.

    Attributes:
        program: who writes it.
        model_type: what it is in Hugging Face's terms, "gpt2" or "llama".
        mark: the end of a tensor's name that tells the layout.
        blocks: what stands before a layer's number.
        names: of what a Hugging Face tensor is made; several are stacked along the outputs.
        shapes: of the Hugging Face tensors.
        sizes: the tensor and dimension that tell the size of each letter.
        optional: biases, by Hugging Face name, that a file may lack, all or none of them.
        buffers: ends of names that hold no weights.
    """

    program: str
    model_type: str
    mark: str
    blocks: str
    names: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, str]
    sizes: Mapping[str, tuple[str, int]]
    optional: frozenset[str]
    buffers: tuple[str, ...]


def _gpt2_names(
    modules: Mapping[str, tuple[str, ...]], norm: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Names of all of GPT-2's tensors, given those of its modules and of a norm's two tensors."""
    names = {}
    for ours in GPT2_SHAPES:
        module, kind = ours.rsplit(".", 1)
        kind = norm[kind] if "ln_" in module else kind
        names[ours] = tuple(f"{theirs}.{kind}" for theirs in modules[module])
    return names


_BOOK_GPT_MODULES = {
    "transformer.wte": ("tok_emb",),
    "transformer.wpe": ("pos_emb",),
    "transformer.h.{}.ln_1": ("trf_blocks.{}.norm1",),
    "transformer.h.{}.attn.c_attn": (
        "trf_blocks.{}.att.W_query",
        "trf_blocks.{}.att.W_key",
        "trf_blocks.{}.att.W_value",
    ),
    "transformer.h.{}.attn.c_proj": ("trf_blocks.{}.att.out_proj",),
    "transformer.h.{}.ln_2": ("trf_blocks.{}.norm2",),
    "transformer.h.{}.mlp.c_fc": ("trf_blocks.{}.ff.layers.0",),
    "transformer.h.{}.mlp.c_proj": ("trf_blocks.{}.ff.layers.2",),
    "transformer.ln_f": ("final_norm",),
    "lm_head": ("out_head",),
}
_BOOK_BUFFERS = (".att.mask", ".att.cos", ".att.sin")
_BOOK_GPT_SIZES = {
    "V": ("tok_emb.weight", 0),
    "C": ("tok_emb.weight", 1),
    "P": ("pos_emb.weight", 0),
}
#: Which a GPT may do without (`qkv_bias`), as LLMs-from-scratch's does by default.
QKV_BIAS = frozenset({"transformer.h.{}.attn.c_attn.bias"})

NANOGPT = Layout(
    program="nanoGPT",
    model_type="gpt2",
    mark=".attn.c_attn.weight",
    blocks="transformer.h.",
    names={name: (name,) for name in GPT2_SHAPES},
    shapes=GPT2_SHAPES,
    sizes={
        "V": ("transformer.wte.weight", 0),
        "C": ("transformer.wte.weight", 1),
        "P": ("transformer.wpe.weight", 0),
    },
    optional=frozenset(name for name in GPT2_SHAPES if name.endswith(".bias")),
    buffers=(".attn.bias",),
)

#: `GPTModelFast`: queries, keys and values in one, torch's own norms.
BOOK_GPT_FAST = Layout(
    program="LLMs-from-scratch",
    model_type="gpt2",
    mark=".att.qkv.weight",
    blocks="trf_blocks.",
    names=_gpt2_names(
        {
            **_BOOK_GPT_MODULES,
            "transformer.h.{}.attn.c_attn": ("trf_blocks.{}.att.qkv",),
            "transformer.h.{}.attn.c_proj": ("trf_blocks.{}.att.proj",),
        },
        {"weight": "weight", "bias": "bias"},
    ),
    shapes=GPT2_SHAPES,
    sizes=_BOOK_GPT_SIZES,
    optional=QKV_BIAS,
    buffers=_BOOK_BUFFERS,
)

#: `GPTModel`.
BOOK_GPT = Layout(
    program="LLMs-from-scratch",
    model_type="gpt2",
    mark=".ff.layers.0.weight",
    blocks="trf_blocks.",
    names=_gpt2_names(_BOOK_GPT_MODULES, {"weight": "scale", "bias": "shift"}),
    shapes=GPT2_SHAPES,
    sizes=_BOOK_GPT_SIZES,
    optional=QKV_BIAS,
    buffers=_BOOK_BUFFERS,
)

#: `Llama2Model`, `Llama3Model` and `Llama3ModelFast`: rotary pairs (i, i + D/2), as Hugging Face.
BOOK_LLAMA = Layout(
    program="LLMs-from-scratch",
    model_type="llama",
    mark=".ff.fc1.weight",
    blocks="trf_blocks.",
    names={
        "model.embed_tokens.weight": ("tok_emb.weight",),
        "model.layers.{}.input_layernorm.weight": ("trf_blocks.{}.norm1.weight",),
        "model.layers.{}.self_attn.q_proj.weight": ("trf_blocks.{}.att.W_query.weight",),
        "model.layers.{}.self_attn.k_proj.weight": ("trf_blocks.{}.att.W_key.weight",),
        "model.layers.{}.self_attn.v_proj.weight": ("trf_blocks.{}.att.W_value.weight",),
        "model.layers.{}.self_attn.o_proj.weight": ("trf_blocks.{}.att.out_proj.weight",),
        "model.layers.{}.post_attention_layernorm.weight": ("trf_blocks.{}.norm2.weight",),
        "model.layers.{}.mlp.gate_proj.weight": ("trf_blocks.{}.ff.fc1.weight",),
        "model.layers.{}.mlp.up_proj.weight": ("trf_blocks.{}.ff.fc2.weight",),
        "model.layers.{}.mlp.down_proj.weight": ("trf_blocks.{}.ff.fc3.weight",),
        "model.norm.weight": ("final_norm.weight",),
        "lm_head.weight": ("out_head.weight",),
    },
    shapes=LLAMA_SHAPES,
    sizes={
        "V": ("tok_emb.weight", 0),
        "C": ("tok_emb.weight", 1),
        "F": ("trf_blocks.0.ff.fc1.weight", 0),
        "K": ("trf_blocks.0.att.W_key.weight", 0),
    },
    optional=frozenset(),
    buffers=_BOOK_BUFFERS,
)

#: The first whose mark a file has is its layout: the fast GPT has the plain one's mark as well.
LAYOUTS = (NANOGPT, BOOK_GPT_FAST, BOOK_GPT, BOOK_LLAMA)
