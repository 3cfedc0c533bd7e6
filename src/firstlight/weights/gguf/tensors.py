"""Map the tensors of a GGUF file to Hugging Face tensors and back.

`tensor_rules` yields one conversion rule for each tensor. The module `writer` applies the rules,
and the module `reader` reverses them. The names and layouts are those that llama.cpp expects. Their
source is ggml-org/llama.cpp `convert_hf_to_gguf.py`. In the functions below, `theirs` is a prefix
of GGUF names, and `ours` is a prefix of Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from firstlight.models import FAMILIES
from firstlight.models.family import ExpertNames

Change = Literal[
    "none",
    "transposed",
    "rotary",
    "interleaved",
    "one_plus",
    "negative_exp",
    "by_head",
    "by_head_transposed",
]


@dataclass(frozen=True)
class TensorRule:
    """Rule for converting one or more Hugging Face tensors to one tensor in a GGUF file.

    Attributes:
        gguf: name of the tensor in the GGUF file.
        sources: names of the Hugging Face tensors. If there are several, such as those of all
            experts, they are stacked in this order.
        shape: shape of each source tensor.
        change: transformation that is applied to the source tensors:

            - "none": The tensor is stored unchanged.
            - "transposed": The last two dimensions are swapped.
            - "rotary": The rows of each head are reordered. RoPE rotates rows (i, i + D/2) as a
              pair in the source, and rows (2i, 2i + 1) in the file.
            - "interleaved": The source contains q, k and v of the first head, then those of the
              second head, and so on. In the file, all rows of q come first, followed by all rows of
              k and all rows of v.
            - "one_plus": 1 is added to the weight of a norm. Hugging Face's class adds 1 in
              `forward` instead.
            - "negative_exp": Every element x is replaced with -exp(x).
            - "by_head": The shape changes from [H x N, ...] to [H, N, ...], where H is the number
              of heads.
            - "by_head_transposed": The shape changes as with "by_head", and the last two dimensions
              are then swapped.
        heads: number of attention heads in the tensor. 0 if `change` does not depend on the number
            of heads.
        stacked: True if the sources are stacked along an additional first dimension.
        taken: indices of the slices of the source tensor that are stored in the file. If it is (),
            all slices are stored.
        axis: dimension of the source tensor that `taken` indexes.
        dropped: dimension of size 1 that is removed from the tensor in the file, or None.
    """

    gguf: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    change: Change = "none"
    heads: int = 0
    stacked: bool = False
    taken: Sequence[int] = ()
    axis: int = 0
    dropped: int | None = None

    @property
    def gguf_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file, with the outermost dimension first."""
        shape = list(self.shape)
        if self.taken:
            shape[self.axis] = len(self.taken)
        if self.change in ("by_head", "by_head_transposed"):
            shape[:1] = [self.heads, shape[0] // self.heads]
        if self.change in ("transposed", "by_head_transposed"):
            shape[-2:] = shape[:-3:-1]
        if self.dropped is not None:
            del shape[self.dropped]
        return (len(self.sources), *shape) if self.stacked else tuple(shape)

    @property
    def small(self) -> bool:
        """True if llama.cpp requires the tensor in fp32 regardless of the file's format. This
        applies to vectors, biases, routers, learned positions, convolutions and head norms."""
        small_tables = (
            "position_embd.weight",
            "ffn_gate_inp.weight",
            "_norm.weight",
            ".bias",
            "ssm_conv1d.weight",
            "shortconv.conv.weight",
        )
        return len(self.gguf_shape) == 1 or self.gguf.endswith(small_tables)

    def to_gguf(self, source: Tensor) -> Tensor:
        """Convert one source tensor of shape `shape` to the layout used in the file. If `stacked`
        is True, the result is one slice of the stacked tensor in the file.
        """
        if self.taken:
            source = source.index_select(self.axis, torch.tensor(self.taken))
        if self.change == "transposed":
            return source.mT.contiguous()
        if self.change in ("by_head", "by_head_transposed"):
            heads = source.reshape(self.heads, -1, *source.shape[1:])
            return (heads if self.change == "by_head" else heads.mT).contiguous()
        if self.change == "negative_exp":
            return -source.float().exp()
        if self.change == "rotary":
            halves = source.reshape(self.heads, 2, -1, *self.shape[1:])
            return halves.transpose(1, 2).reshape(self.shape)
        if self.change == "interleaved":
            return source.reshape(self.heads, 3, -1).transpose(0, 1).reshape(self.shape)
        if self.change == "one_plus":
            return source.float() + 1
        return (source if self.dropped is None else source.squeeze(self.dropped)).contiguous()

    def put_into(self, tensors: MutableMapping[str, Tensor], source: str, stored: Tensor) -> None:
        """Convert a tensor from the GGUF file to Hugging Face's layout, and add it to `tensors`.

        Args:
            tensors: the Hugging Face tensors, modified in place.
            source: name of the Hugging Face tensor. If `taken` is not empty, only the slices listed
                there are set.
            stored: the tensor in the file. If `stacked` is True, only the slice of it that was
                converted from `source`.
        """
        values = self.from_gguf(stored)
        if not self.taken:
            tensors[source] = values.clone()
            return
        whole = tensors.setdefault(source, torch.zeros(self.shape))
        whole.index_copy_(self.axis, torch.tensor(self.taken), values)

    def from_gguf(self, stored: Tensor) -> Tensor:
        """Undo the transformation of `to_gguf`. Return the source tensor, or only its slices in
        `taken` if `taken` is not empty.
        """
        if self.change == "transposed":
            return stored.mT.contiguous()
        if self.change in ("by_head", "by_head_transposed"):
            return (stored if self.change == "by_head" else stored.mT).flatten(0, 1)
        if self.change == "negative_exp":
            return (-stored).log()
        if self.change == "rotary":
            pairs = stored.reshape(self.heads, -1, 2, *self.shape[1:])
            return pairs.transpose(1, 2).reshape(self.shape)
        if self.change == "interleaved":
            return stored.reshape(3, self.heads, -1).transpose(0, 1).reshape(self.shape)
        if self.change == "one_plus":
            return stored - 1
        return stored if self.dropped is None else stored.unsqueeze(self.dropped)


def tensor_rules(model: Any) -> Iterator[TensorRule]:
    """Yield a rule for each tensor of a model, in the order of the file. The factors for the rotary
    frequencies have no rules.

    Args:
        model: config of the model.
    """
    names = FAMILIES[model.model_type].model
    embedding, table = f"{names.embedding_name}.weight", (model.vocab_size, model.hidden_size)
    yield TensorRule("token_embd.weight", (embedding,), table)
    if not model.has_rotary:
        positions = (model.max_position_embeddings, model.hidden_size)
        yield TensorRule("position_embd.weight", ("transformer.wpe.weight",), positions)
    for i in range(model.num_hidden_layers):
        yield from _layer_rules(model, i, f"blk.{i}.", f"{names.layers_name}.{i}.")
    last_norm = "token_embd_norm" if model.family.gguf.layer == "conv" else "output_norm"
    yield from _norm_rules(model, last_norm, names.final_modules[0])
    if not model.tie_word_embeddings:
        yield TensorRule("output.weight", (names.head_file_name,), table)
    elif model.family.gguf.head == "written":
        yield TensorRule("output.weight", (embedding,), table)


def _layer_rules(model: Any, layer: int, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for a layer. Layers are numbered from 0."""
    kind = model.family.gguf.layer
    if kind == "named":
        yield from _named_rules(model, theirs, ours)
    elif kind == "latent":
        yield from _two_norm_rules(model, theirs, ours, "ffn_norm")
        yield from _latent_rules(model, theirs, f"{ours}self_attn.")
        if model.has_experts(layer):
            yield from _shared_expert_rules(model, theirs, ours, "mlp.shared_experts.")
        else:
            yield from _mlp_rules(model, theirs, f"{ours}mlp.")
    elif kind == "sinks":
        yield from _two_norm_rules(model, theirs, ours, "post_attention_norm")
        yield from _attention_rules(model, theirs, f"{ours}self_attn.")
        sinks = (f"{ours}self_attn.sinks",)
        yield TensorRule(f"{theirs}attn_sinks.weight", sinks, (model.num_attention_heads,))
        yield from _biased_expert_rules(model, theirs, f"{ours}mlp.")
    elif kind == "conv":
        yield from _conv_rules(model, layer, theirs, ours)
    elif model.family.gguf.has_delta:
        yield from _two_norm_rules(model, theirs, ours, "post_attention_norm")
        if model.is_linear(layer):
            rules = _delta_rules if kind == "delta" else _tiled_delta_rules
            yield from rules(model, theirs, f"{ours}linear_attn.")
        else:
            yield from _attention_rules(model, theirs, f"{ours}self_attn.")
        if not model.has_experts(layer):
            yield from _mlp_rules(model, theirs, f"{ours}mlp.")
            return
        yield from _shared_expert_rules(model, theirs, ours, "mlp.shared_expert.")
        gate, sizes = (f"{ours}mlp.shared_expert_gate.weight",), (1, model.hidden_size)
        yield TensorRule(f"{theirs}ffn_gate_inp_shexp.weight", gate, sizes, dropped=0)
    else:
        yield from _block_rules(model, theirs, ours)


def _norm_rules(model: Any, theirs: str, ours: str, size: int = 0) -> Iterator[TensorRule]:
    """Yield the rules for a norm over `size` elements. If `size` is 0, the norm is over hidden_size
    elements.
    """
    kind: Change = "one_plus" if model.family.norm_kind == "one_plus" else "none"
    sizes = (size or model.hidden_size,)
    yield TensorRule(f"{theirs}.weight", (f"{ours}.weight",), sizes, kind)
    if model.family.norm_kind == "layer" or not model.has_rotary:
        yield TensorRule(f"{theirs}.bias", (f"{ours}.bias",), sizes)


def _named_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for a layer in which all modules have biases. The modules are listed in
    `GGUFSpec.block`.
    """
    C = model.hidden_size
    F = model.intermediate_size
    heads = model.num_attention_heads
    sizes = {"attn_qkv": (3 * C, C), "attn_output": (C, C), "ffn_up": (F, C), "ffn_down": (C, F)}
    for word, name in model.family.gguf.block.items():
        if word not in sizes:
            yield from _norm_rules(model, theirs + word, ours + name)
            continue
        change: Change = "transposed" if model.stores_transposed else "none"
        if word == "attn_qkv" and model.has_rotary:
            change = "interleaved"
        rows = sizes[word][0]
        matrix = sizes[word][::-1] if change == "transposed" else sizes[word]
        source = (f"{ours}{name}.weight",)
        yield TensorRule(f"{theirs}{word}.weight", source, matrix, change, heads=heads)
        change = "interleaved" if change == "interleaved" else "none"
        source = (f"{ours}{name}.bias",)
        yield TensorRule(f"{theirs}{word}.bias", source, (rows,), change, heads=heads)


def _block_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for a layer of a Llama-like model."""
    spec = model.family
    norms = spec.norms
    for word, name in (
        ("attn_norm", norms.before_attention),
        ("post_attention_norm", norms.after_attention),
        ("ffn_norm", None if model.use_parallel_residual else norms.before_mlp),
        ("post_ffw_norm", norms.after_mlp),
    ):
        if name is not None:
            yield from _norm_rules(model, theirs + word, ours + name)
    yield from _attention_rules(model, theirs, f"{ours}self_attn.")
    if spec.experts is not None:
        yield from _expert_rules(model, spec.experts, theirs, ours)
    else:
        yield from _mlp_rules(model, theirs, f"{ours}mlp.")


def _attention_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    C = model.hidden_size
    D = model.head_dim
    spec = model.family
    counts = {
        "q": model.num_attention_heads,
        "k": model.num_key_value_heads,
        "v": model.num_key_value_heads,
    }
    if spec.fused is True:
        rows = sum(counts.values()) * D
        yield TensorRule(f"{theirs}attn_qkv.weight", (f"{ours}qkv_proj.weight",), (rows, C))
        counts = {}
    # In Qwen3-Next, q_proj also computes a gate for the output of each head, so it has twice as
    # many rows.
    wide = 2 if spec.gguf.has_delta else 1
    for letter, heads in counts.items():
        change: Change = "rotary" if spec.gguf.rotates_pairs and letter != "v" else "none"
        for kind, rest in (("weight", (C,)), ("bias", ()))[: 2 if model.qkv_bias else 1]:
            rows = heads * D * (wide if letter == "q" else 1)
            name, sizes = f"{ours}{letter}_proj.{kind}", (rows, *rest)
            yield TensorRule(f"{theirs}attn_{letter}.{kind}", (name,), sizes, change, heads=heads)
        if letter != "v":
            yield from _head_norm_rules(
                model, f"{theirs}attn_{letter}_norm", ours, letter, heads=heads
            )
    columns = model.num_attention_heads * D
    yield TensorRule(f"{theirs}attn_output.weight", (f"{ours}o_proj.weight",), (C, columns))
    if model.attention_bias and spec.output_bias:
        yield TensorRule(f"{theirs}attn_output.bias", (f"{ours}o_proj.bias",), (C,))


def _head_norm_rules(
    model: Any, theirs: str, ours: str, letter: str, *, heads: int
) -> Iterator[TensorRule]:
    """Yield the rules for the norm of the queries or of the keys, if the model has such a norm."""
    D = model.head_dim
    if model.qk_norm == "own":
        names = tuple(f"{ours}{letter}_layernorm.norms.{head}.weight" for head in range(heads))
        yield TensorRule(f"{theirs}.weight", names, (D,), stacked=True)
    elif model.qk_norm is not None:
        size = D if model.qk_norm == "head" else heads * D
        yield from _norm_rules(model, theirs, f"{ours}{letter}_norm", size)


def _mlp_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    C = model.hidden_size
    F = model.intermediate_size
    spec = model.family
    parts = [("up", "up_proj", F, C), ("down", "down_proj", C, F)]
    if spec.fused:
        parts[0] = ("up", "gate_up_proj", 2 * F, C)
    elif spec.gated:
        parts = [("gate", "gate_proj", F, C), *parts]
    for word, name, outputs, inputs in parts:
        yield TensorRule(f"{theirs}ffn_{word}.weight", (f"{ours}{name}.weight",), (outputs, inputs))
        if model.mlp_bias:
            yield TensorRule(f"{theirs}ffn_{word}.bias", (f"{ours}{name}.bias",), (outputs,))


def _expert_rules(model: Any, names: ExpertNames, theirs: str, ours: str) -> Iterator[TensorRule]:
    C = model.hidden_size
    F = getattr(model, names.size)
    E = model.num_experts
    yield TensorRule(f"{theirs}ffn_gate_inp.weight", (f"{ours}{names.router}",), (E, C))
    for word, outputs, inputs in (("gate", F, C), ("up", F, C), ("down", C, F)):
        sources = tuple(ours + names.matrix(word, expert) for expert in range(E))
        yield TensorRule(
            f"{theirs}ffn_{word}_exps.weight", sources, (outputs, inputs), stacked=True
        )


def _two_norm_rules(model: Any, theirs: str, ours: str, second: str) -> Iterator[TensorRule]:
    """Yield the rules for the two norms of a layer, before attention and before the MLP. `second`
    is the name that llama.cpp uses for the norm before the MLP.
    """
    yield from _norm_rules(model, f"{theirs}attn_norm", f"{ours}input_layernorm")
    yield from _norm_rules(model, theirs + second, f"{ours}post_attention_layernorm")


def _latent_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for multi-head latent attention.

    kv_b_proj contains the key rows and then the value rows of each head in turn. It is split into a
    tensor for the keys and a tensor for the values. In the code, H is the number of heads, L is the
    rank of the KV latent, and Q is the rank of the query latent.
    """
    C = model.hidden_size
    H = model.num_attention_heads
    L = model.kv_lora_rank
    Q = model.q_lora_rank
    queries = H * model.head_dim
    keys = model.qk_nope_head_dim
    values = model.v_head_dim
    parts: list[tuple[str, str, tuple[int, ...]]] = [("attn_q", "q_proj", (queries, C))]
    if Q is not None:
        parts = [("attn_q_a", "q_a_proj", (Q, C)), ("attn_q_a_norm", "q_a_layernorm", (Q,))]
        parts.append(("attn_q_b", "q_b_proj", (queries, Q)))
    parts += [
        ("attn_kv_a_mqa", "kv_a_proj_with_mqa", (L + model.qk_rope_head_dim, C)),
        ("attn_kv_a_norm", "kv_a_layernorm", (L,)),
        ("attn_output", "o_proj", (C, H * values)),
    ]
    for word, name, sizes in parts:
        yield TensorRule(f"{theirs}{word}.weight", (f"{ours}{name}.weight",), sizes)
    rows, source = torch.arange(H * (keys + values)).view(H, -1), (f"{ours}kv_b_proj.weight",)
    shape = (rows.numel(), L)
    # llama.cpp multiplies the queries by the key matrices, and therefore stores the key matrices
    # transposed.
    split: tuple[tuple[str, Tensor, Change], ...] = (
        ("attn_k_b", rows[:, :keys], "by_head_transposed"),
        ("attn_v_b", rows[:, keys:], "by_head"),
    )
    for word, part, change in split:
        taken = part.flatten().tolist()
        yield TensorRule(f"{theirs}{word}.weight", source, shape, change, heads=H, taken=taken)


def _shared_expert_rules(model: Any, theirs: str, ours: str, shared: str) -> Iterator[TensorRule]:
    """Yield the rules for the routed experts and the shared experts of a layer. The shared experts
    are combined into a single MLP.
    """
    if model.family.experts is not None:
        yield from _expert_rules(model, model.family.experts, theirs, ours)
    C = model.hidden_size
    if model.family.gguf.layer == "latent":
        size = model.moe_intermediate_size * model.n_shared_experts
        if model.family.has_buffers:
            bias = (f"{ours}mlp.gate.e_score_correction_bias",)
            yield TensorRule(f"{theirs}exp_probs_b.bias", bias, (model.num_experts,))
    else:
        size = model.shared_expert_intermediate_size
    for word, sizes in (("gate", (size, C)), ("up", (size, C)), ("down", (C, size))):
        source = (f"{ours}{shared}{word}_proj.weight",)
        yield TensorRule(f"{theirs}ffn_{word}_shexp.weight", source, sizes)


def _biased_expert_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for the router and experts of gpt-oss. The columns of Hugging Face's
    gate_up_proj alternate between the gate and up projections.
    """
    C = model.hidden_size
    F = model.intermediate_size
    E = model.num_experts
    for kind, router in (("weight", (E, C)), ("bias", (E,))):
        yield TensorRule(f"{theirs}ffn_gate_inp.{kind}", (f"{ours}router.{kind}",), router)
    gates, ups = range(0, 2 * F, 2), range(1, 2 * F, 2)
    for word, name, inputs, outputs, taken in (
        ("gate", "gate_up_proj", C, 2 * F, gates),
        ("up", "gate_up_proj", C, 2 * F, ups),
        ("down", "down_proj", F, C, ()),
    ):
        source, sizes = f"{ours}experts.{name}", (E, inputs, outputs)
        to = f"{theirs}ffn_{word}_exps"
        yield TensorRule(f"{to}.weight", (source,), sizes, "transposed", taken=taken, axis=2)
        yield TensorRule(f"{to}.bias", (f"{source}_bias",), (E, outputs), taken=taken, axis=1)


def _delta_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for Qwen3-Next's linear attention.

    in_proj_qkvz contains the queries, keys, values and gates of each key head in turn. Its rows are
    divided between two tensors in the file. The first tensor contains all queries, followed by all
    keys and all values. The second tensor contains all gates. In the code, G is the number of key
    heads, D is their size, H is the number of value heads, and E is their size.
    """
    C = model.hidden_size
    G = model.linear_num_key_heads
    H = model.linear_num_value_heads
    D, E = model.linear_key_head_dim, model.linear_value_head_dim
    channels, V = 2 * G * D + H * E, H * E
    rows = torch.arange(channels + V).view(G, -1)
    q, k, v, z = (part.flatten() for part in torch.split(rows, [D, D, V // G, V // G], 1))
    source, sizes = (f"{ours}in_proj_qkvz.weight",), (channels + V, C)
    for word, part in (("attn_qkv", torch.cat((q, k, v))), ("attn_gate", z)):
        yield TensorRule(f"{theirs}{word}.weight", source, sizes, taken=part.tolist())
    width = model.linear_conv_kernel_dim
    others: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("ssm_ba.weight", "in_proj_ba.weight", (2 * H, C)),
        ("ssm_conv1d.weight", "conv1d.weight", (channels, 1, width)),
        ("ssm_dt.bias", "dt_bias", (H,)),
        ("ssm_norm.weight", "norm.weight", (E,)),
        ("ssm_out.weight", "out_proj.weight", (C, V)),
    )
    for word, name, shape in others:
        dropped = 1 if name == "conv1d.weight" else None
        yield TensorRule(theirs + word, (ours + name,), shape, dropped=dropped)
    yield TensorRule(f"{theirs}ssm_a", (f"{ours}A_log",), (H,), "negative_exp")


def _tiled_delta_rules(model: Any, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for Qwen3.5's linear attention.

    In the source, the value heads of the first key head come first, followed by those of the second
    key head, and so on. In the file, the first value heads of all key heads come first, because
    llama.cpp repeats the queries and keys of all key heads as a whole. Letters: see `_delta_rules`.
    """
    C = model.hidden_size
    G, H = model.linear_num_key_heads, model.linear_num_value_heads
    D, E = model.linear_key_head_dim, model.linear_value_head_dim
    heads = torch.arange(H).view(G, -1).T.flatten()
    values = (heads[:, None] * E + torch.arange(E)).flatten()
    keys = 2 * G * D
    mixed = torch.cat((torch.arange(keys), keys + values))
    width = model.linear_conv_kernel_dim
    parts: tuple[tuple[str, str, tuple[int, ...], Tensor, int], ...] = (
        ("attn_qkv.weight", "in_proj_qkv.weight", (keys + H * E, C), mixed, 0),
        ("attn_gate.weight", "in_proj_z.weight", (H * E, C), values, 0),
        ("ssm_beta.weight", "in_proj_b.weight", (H, C), heads, 0),
        ("ssm_alpha.weight", "in_proj_a.weight", (H, C), heads, 0),
        ("ssm_conv1d.weight", "conv1d.weight", (keys + H * E, 1, width), mixed, 0),
        ("ssm_dt.bias", "dt_bias", (H,), heads, 0),
        ("ssm_a", "A_log", (H,), heads, 0),
        ("ssm_out.weight", "out_proj.weight", (C, H * E), values, 1),
    )
    for word, name, shape, order, axis in parts:
        yield TensorRule(
            theirs + word,
            (ours + name,),
            shape,
            "negative_exp" if name == "A_log" else "none",
            taken=order.tolist(),
            axis=axis,
            dropped=1 if name == "conv1d.weight" else None,
        )
    yield TensorRule(f"{theirs}ssm_norm.weight", (f"{ours}norm.weight",), (E,))


def _conv_rules(model: Any, layer: int, theirs: str, ours: str) -> Iterator[TensorRule]:
    """Yield the rules for a layer of LFM2, which has a short convolution or attention."""
    C = model.hidden_size
    F = model.intermediate_size
    D = model.head_dim
    queries, keys = model.num_attention_heads * D, model.num_key_value_heads * D
    parts: list[tuple[str, str, tuple[int, ...]]] = [
        ("attn_norm", "operator_norm", (C,)),
        ("ffn_norm", "ffn_norm", (C,)),
        ("ffn_gate", "feed_forward.w1", (F, C)),
        ("ffn_up", "feed_forward.w3", (F, C)),
        ("ffn_down", "feed_forward.w2", (C, F)),
    ]
    if model.is_conv(layer):
        parts += [
            ("shortconv.in_proj", "conv.in_proj", (3 * C, C)),
            ("shortconv.conv", "conv.conv", (C, 1, model.conv_L_cache)),
            ("shortconv.out_proj", "conv.out_proj", (C, C)),
        ]
    else:
        parts += [
            ("attn_q", "self_attn.q_proj", (queries, C)),
            ("attn_k", "self_attn.k_proj", (keys, C)),
            ("attn_v", "self_attn.v_proj", (keys, C)),
            ("attn_output", "self_attn.out_proj", (C, queries)),
            ("attn_q_norm", "self_attn.q_layernorm", (D,)),
            ("attn_k_norm", "self_attn.k_layernorm", (D,)),
        ]
    for word, name, sizes in parts:
        dropped = 1 if len(sizes) == 3 else None
        source = (f"{ours}{name}.weight",)
        yield TensorRule(f"{theirs}{word}.weight", source, sizes, dropped=dropped)
