"""Names and shapes of other programs' tensors, in one table per family.

A layout maps each Hugging Face name to the program's names that its tensor is made of; "{}" is the
layer's number.

Sources of the names:
    karpathy/nanoGPT          model.py
    rasbt/LLMs-from-scratch   pkg/llms_from_scratch/ch04.py and llama3.py, ch05/07_gpt_to_llama
    openai/gpt-2              src/model.py
    meta-llama/llama          llama/model.py
    pytorch/torchtune         torchtune/models/convert_weights.py
    Lightning-AI/litgpt       litgpt/model.py
    karpathy/nanochat         nanochat/gpt.py before 11 January 2026

Shapes are those of Hugging Face's tensors, as letters:
    V  vocabulary    P  positions    C  hidden size    F  MLP size    D  size of a head
    Q  query heads x head size    K  kv heads x head size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

#: Columns: Hugging Face's module of a GPT-2; shape of its weight; shape of its bias ("" for none);
#: LLMs-from-scratch's modules, separated by spaces if several are stacked along the outputs;
#: OpenAI's module.
_GPT2 = (
    ("transformer.wte", "V C", "", "tok_emb", "model/wte"),
    ("transformer.wpe", "P C", "", "pos_emb", "model/wpe"),
    ("transformer.h.{}.ln_1", "C", "C", "trf_blocks.{}.norm1", "model/h{}/ln_1"),
    (
        *("transformer.h.{}.attn.c_attn", "C 3C", "3C"),
        "trf_blocks.{}.att.W_query trf_blocks.{}.att.W_key trf_blocks.{}.att.W_value",
        "model/h{}/attn/c_attn",
    ),
    (
        *("transformer.h.{}.attn.c_proj", "C C", "C"),
        *("trf_blocks.{}.att.out_proj", "model/h{}/attn/c_proj"),
    ),
    ("transformer.h.{}.ln_2", "C", "C", "trf_blocks.{}.norm2", "model/h{}/ln_2"),
    (
        *("transformer.h.{}.mlp.c_fc", "C 4C", "4C"),
        *("trf_blocks.{}.ff.layers.0", "model/h{}/mlp/c_fc"),
    ),
    (
        *("transformer.h.{}.mlp.c_proj", "4C C", "C"),
        *("trf_blocks.{}.ff.layers.2", "model/h{}/mlp/c_proj"),
    ),
    ("transformer.ln_f", "C", "C", "final_norm", "model/ln_f"),
    ("lm_head", "V C", "", "out_head", "model/wte"),
)
#: Columns: Hugging Face's module of a Llama; shape of its weight; the modules of LLMs-from-scratch,
#: Meta, torchtune and litgpt.
_LLAMA = (
    (
        *("model.embed_tokens", "V C"),
        *("tok_emb", "tok_embeddings", "tok_embeddings", "transformer.wte"),
    ),
    (
        *("model.layers.{}.input_layernorm", "C", "trf_blocks.{}.norm1"),
        *("layers.{}.attention_norm", "layers.{}.sa_norm", "transformer.h.{}.norm_1"),
    ),
    (
        *("model.layers.{}.self_attn.q_proj", "Q C", "trf_blocks.{}.att.W_query"),
        *("layers.{}.attention.wq", "layers.{}.attn.q_proj", "transformer.h.{}.attn.qkv[q]"),
    ),
    (
        *("model.layers.{}.self_attn.k_proj", "K C", "trf_blocks.{}.att.W_key"),
        *("layers.{}.attention.wk", "layers.{}.attn.k_proj", "transformer.h.{}.attn.qkv[k]"),
    ),
    (
        *("model.layers.{}.self_attn.v_proj", "K C", "trf_blocks.{}.att.W_value"),
        *("layers.{}.attention.wv", "layers.{}.attn.v_proj", "transformer.h.{}.attn.qkv[v]"),
    ),
    (
        *("model.layers.{}.self_attn.o_proj", "C Q", "trf_blocks.{}.att.out_proj"),
        *("layers.{}.attention.wo", "layers.{}.attn.output_proj", "transformer.h.{}.attn.proj"),
    ),
    (
        *("model.layers.{}.post_attention_layernorm", "C", "trf_blocks.{}.norm2"),
        *("layers.{}.ffn_norm", "layers.{}.mlp_norm", "transformer.h.{}.norm_2"),
    ),
    (
        *("model.layers.{}.mlp.gate_proj", "F C", "trf_blocks.{}.ff.fc1"),
        *("layers.{}.feed_forward.w1", "layers.{}.mlp.w1", "transformer.h.{}.mlp.fc_1"),
    ),
    (
        *("model.layers.{}.mlp.up_proj", "F C", "trf_blocks.{}.ff.fc2"),
        *("layers.{}.feed_forward.w3", "layers.{}.mlp.w3", "transformer.h.{}.mlp.fc_2"),
    ),
    (
        *("model.layers.{}.mlp.down_proj", "C F", "trf_blocks.{}.ff.fc3"),
        *("layers.{}.feed_forward.w2", "layers.{}.mlp.w2", "transformer.h.{}.mlp.proj"),
    ),
    ("model.norm", "C", "final_norm", "norm", "norm", "transformer.ln_f"),
    ("lm_head", "V C", "out_head", "output", "output", "lm_head"),
)
#: Columns: Hugging Face's module of a nanochat model; shape of its weight; nanochat's module.
_NANOCHAT = (
    ("model.embed_tokens", "V C", "transformer.wte"),
    ("model.layers.{}.self_attn.q_proj", "Q C", "transformer.h.{}.attn.c_q"),
    ("model.layers.{}.self_attn.k_proj", "K C", "transformer.h.{}.attn.c_k"),
    ("model.layers.{}.self_attn.v_proj", "K C", "transformer.h.{}.attn.c_v"),
    ("model.layers.{}.self_attn.o_proj", "C Q", "transformer.h.{}.attn.c_proj"),
    ("model.layers.{}.mlp.fc1", "F C", "transformer.h.{}.mlp.c_fc"),
    ("model.layers.{}.mlp.fc2", "C F", "transformer.h.{}.mlp.c_proj"),
    ("lm_head", "V C", "lm_head"),
)
_GPT2_SHAPES = {
    f"{module}.{kind}": shape
    for module, weight, bias, _, _ in _GPT2
    for kind, shape in (("weight", weight), ("bias", bias))
    if shape
}
_LLAMA_SHAPES = {f"{row[0]}.weight": row[1] for row in _LLAMA}
#: Family -> letter -> (Hugging Face tensor, its dimension) that gives the size of the letter.
SIZES = {
    "gpt2": {
        "V": ("transformer.wte.weight", 0),
        "C": ("transformer.wte.weight", 1),
        "P": ("transformer.wpe.weight", 0),
    },
    "llama": {
        "V": ("model.embed_tokens.weight", 0),
        "C": ("model.embed_tokens.weight", 1),
        "F": ("model.layers.{}.mlp.gate_proj.weight", 0),
        "Q": ("model.layers.{}.self_attn.q_proj.weight", 0),
        "K": ("model.layers.{}.self_attn.k_proj.weight", 0),
    },
}
SIZES["nanochat"] = SIZES["llama"] | {"F": ("model.layers.{}.mlp.fc1.weight", 0)}
#: Weights that Hugging Face's and OpenAI's GPT-2 store as [in, out]. Other programs' GPTs use
#: `nn.Linear`, which stores [out, in].
TRANSPOSED = frozenset(
    f"transformer.h.{{}}.{name}.weight"
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
)
#: Biases that LLMs-from-scratch's GPT lacks by default (`qkv_bias`).
QKV_BIAS = frozenset({"transformer.h.{}.attn.c_attn.bias"})


@dataclass(frozen=True)
class Layout:
    """The tensors of one program's model.

    Attributes:
        program: name of the program.
        kind: Hugging Face's family whose names the tensors get: "gpt2", "nanochat" or "llama"
            (also for Mistral, Qwen2 and Qwen3, whose names are Llama's).
        mark: end of a tensor's name by which the layout is recognised.
        names: the program's tensors that each Hugging Face tensor is made of; several are stacked
            along the outputs.
        shapes: shapes of the Hugging Face tensors, in letters.
        optional: biases, by Hugging Face name, that a file may lack; it lacks all or none of them.
        rotates_pairs: True if rotary positions rotate pairs (2i, 2i + 1) of a head's rows; False
            for Hugging Face's pairs (i, i + D/2).
        is_transposed: True if the weights in `TRANSPOSED` are [out, in], unlike Hugging Face's.
    """

    program: str
    kind: str
    mark: str
    names: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    rotates_pairs: bool = False
    is_transposed: bool = True


def _book_gpt(mark: str, norm: Mapping[str, str], **changed: str) -> Layout:
    """The layout of a GPT of LLMs-from-scratch.

    Args:
        mark: see `Layout`.
        norm: names of a norm's tensors "weight" and "bias".
        changed: attention modules with other names than in `_GPT2`, by the last part of Hugging
            Face's name.
    """
    names = {}
    for module, _, bias, theirs, _ in _GPT2:
        modules = changed.get(module.rsplit(".", 1)[-1] if ".attn." in module else "", theirs)
        for kind in ("weight", "bias") if bias else ("weight",):
            name = norm[kind] if "ln_" in module else kind
            names[f"{module}.{kind}"] = tuple(f"{one}.{name}" for one in modules.split())
    return Layout("LLMs-from-scratch", "gpt2", mark, names, _GPT2_SHAPES, optional=QKV_BIAS)


def _openai_names() -> dict[str, tuple[str, ...]]:
    """OpenAI's tensors of a GPT-2, by Hugging Face's names: g (gain) and b of norms, w and b of
    linear layers, and the embeddings, which have no suffix."""
    names: dict[str, tuple[str, ...]] = {}
    for module, _, bias, _, theirs in _GPT2:
        if not bias:
            names[f"{module}.weight"] = (theirs,)
            continue
        names[f"{module}.weight"] = (theirs + ("/g" if "ln_" in module else "/w"),)
        names[f"{module}.bias"] = (f"{theirs}/b",)
    return names


def _llama(
    program: str, mark: str, column: int, norm: str = "weight", *, rotates_pairs: bool = False
) -> Layout:
    """The layout of a program's Llama, whose modules are in a column of `_LLAMA`; `norm` is the
    program's name for the weight of a norm."""
    names = {
        f"{row[0]}.weight": (f"{row[column]}.{norm if row[1] == 'C' else 'weight'}",)
        for row in _LLAMA
    }
    return Layout(program, "llama", mark, names, _LLAMA_SHAPES, rotates_pairs=rotates_pairs)


NANOGPT = Layout(
    program="nanoGPT",
    kind="gpt2",
    mark=".attn.c_attn.weight",
    names={name: (name,) for name in _GPT2_SHAPES},
    shapes=_GPT2_SHAPES,
    optional=frozenset(name for name in _GPT2_SHAPES if name.endswith(".bias")),
)
#: LLMs-from-scratch's `GPTModelFast`: one matrix for queries, keys and values, and nn.LayerNorm.
BOOK_GPT_FAST = _book_gpt(
    ".att.qkv.weight",
    {"weight": "weight", "bias": "bias"},
    c_attn="trf_blocks.{}.att.qkv",
    c_proj="trf_blocks.{}.att.proj",
)
#: LLMs-from-scratch's `GPTModel`.
BOOK_GPT = _book_gpt(".ff.layers.0.weight", {"weight": "scale", "bias": "shift"})
#: LLMs-from-scratch's `Llama2Model`, `Llama3Model` and `Llama3ModelFast`. Their rotary pairs are
#: Hugging Face's (i, i + D/2).
BOOK_LLAMA = _llama("LLMs-from-scratch", ".ff.fc1.weight", 2)
OPENAI = Layout(
    program="OpenAI's GPT-2 (TensorFlow)",
    kind="gpt2",
    mark="/attn/c_attn/w",
    names=_openai_names(),
    shapes=_GPT2_SHAPES,
    is_transposed=False,
)
META = _llama("Meta's Llama", ".attention.wq.weight", 3, rotates_pairs=True)
TORCHTUNE = _llama("torchtune", ".attn.output_proj.weight", 4, "scale", rotates_pairs=True)
#: nanochat's first form: without value embeddings, residual scaling factors and sliding windows.
NANOCHAT = Layout(
    program="nanochat",
    kind="nanochat",
    mark=".attn.c_q.weight",
    names={f"{row[0]}.weight": (f"{row[2]}.weight",) for row in _NANOCHAT},
    shapes={f"{row[0]}.weight": row[1] for row in _NANOCHAT},
)
#: Additional tensors of litgpt's Qwen2 (biases of queries, keys and values) and Qwen3 (norms of
#: queries and keys). litgpt's one matrix for queries, keys and values is split into [q], [k] and
#: [v] when a file is opened.
_LITGPT_BIASES = {
    f"model.layers.{{}}.self_attn.{x}_proj.bias": (f"transformer.h.{{}}.attn.qkv[{x}].bias",)
    for x in "qkv"
}
_LITGPT_NORMS = {
    f"model.layers.{{}}.self_attn.{x}_norm.weight": (f"transformer.h.{{}}.attn.norm_{x}.weight",)
    for x in "qk"
}


def litgpt_layout(*, qkv_bias: bool, qk_norm: bool) -> Layout:
    """The layout of a Llama-like model of litgpt.

    Args:
        qkv_bias: True if queries, keys and values have biases.
        qk_norm: True if queries and keys are normalised.
    """
    plain = _llama("litgpt", ".mlp.fc_1.weight", 5)
    names, shapes = dict(plain.names), dict(plain.shapes)
    if qkv_bias:
        names |= _LITGPT_BIASES
        shapes |= {name: "Q" if "q_proj" in name else "K" for name in _LITGPT_BIASES}
    if qk_norm:
        names |= _LITGPT_NORMS
        shapes |= dict.fromkeys(_LITGPT_NORMS, "D")
    return replace(plain, names=names, shapes=shapes)


#: Layouts of single files, tried in this order. A `GPTModelFast` also has the mark of `GPTModel`,
#: and therefore comes first.
LAYOUTS = (NANOGPT, BOOK_GPT_FAST, BOOK_GPT, BOOK_LLAMA, TORCHTUNE, NANOCHAT)
