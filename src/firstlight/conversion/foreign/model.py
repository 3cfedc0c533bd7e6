"""Read checkpoints written by nanoGPT, nanochat, LLMs-from-scratch, litgpt and torchtune, and the
original checkpoints of OpenAI's GPT-2 and Meta's Llama.

The tensors are converted to the names and layouts that Hugging Face uses. The tensor names, files
and settings of each program are described in a separate module.

The config.json of the result combines the settings in the program's files, the caller's settings
and the program's defaults. The caller's settings must not contradict the files. If a setting is
specified neither in the files nor by the caller, the program's default value is used, and a note
for the user is added. If there is no default value, an error is raised that asks the user for the
setting.

A model can't always be recognised by the names and shapes of its tensors. For example, the GPT with
sliding-window attention in LLMs-from-scratch (`ch04/06_swa`) has the same tensors as the GPT with
full attention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.foreign import (
    litgpt,
    llms_from_scratch,
    meta,
    nanochat,
    nanogpt,
    openai,
    torchtune,
)
from firstlight.conversion.foreign.layout import (
    SIZES,
    TRANSPOSED,
    Layout,
    Opened,
    Settings,
    Shape,
    optimizer_states,
)
from firstlight.conversion.pickled import is_whole, named_weights, read_pickle
from firstlight.errors import ModelError, nearest
from firstlight.models import GPT2Config
from firstlight.models.llama_config import LlamaConfig
from firstlight.models.llama_families import OWN_KEYS
from firstlight.models.rope import Llama3Rope, rope_frequencies
from firstlight.weights.huggingface import CONFIG_NAME, config_from_hf
from firstlight.weights.loading import first_names
from firstlight.weights.stored import INDEX_NAME, WEIGHTS_NAME

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: Layouts of checkpoints that are single files, in the order in which they are tried.
#: `GPTModelFast` of LLMs-from-scratch must come before `GPTModel`, because its checkpoints also
#: contain the tensor by which `GPTModel` is recognised.
LAYOUTS = (
    nanogpt.LAYOUT,
    llms_from_scratch.GPT_FAST,
    llms_from_scratch.GPT,
    llms_from_scratch.LLAMA,
    torchtune.LAYOUT,
    nanochat.LAYOUT,
)


@dataclass(frozen=True)
class ForeignModel:
    """A model from another program, with the names and the config that Hugging Face uses.

    Attributes:
        config: content of config.json for a GPT-2, nanochat or Llama-like model.
        tensors: tensors, keyed by the names that they have in model.safetensors. A tied output head
            is omitted. Tensors that can be used without rearranging their values are memory-mapped,
            so they change if the file changes.
        program: name of the program.
        notes: messages to the user, for example about default values that were used.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    program: str
    notes: tuple[str, ...]


def read_foreign(path: Path, *, config: Mapping[str, Any] | None = None) -> ForeignModel:
    """Read a checkpoint of another program.

    Args:
        path: for nanoGPT, LLMs-from-scratch and torchtune, the checkpoint file. For OpenAI's GPT-2,
            Meta's Llama, litgpt and nanochat, the folder or a weights file in it.
        config: settings that are missing from the checkpoint, under the keys of a Hugging Face
            config.json. For a GPT model from LLMs-from-scratch, `n_head` is required unless the
            head dimension is 64. For Llama models from LLMs-from-scratch and torchtune,
            `num_attention_heads`, `max_position_embeddings` and `rope_parameters` are required.

    Raises:
        InputError: a settings file can't be read.
        ModelError: the file can't be read, contains objects other than weights, or belongs to an
            unknown program; a tensor is missing, unknown, not floating point or has the wrong
            shape; or `config` lacks a required key or contradicts the file.
    """
    opened = _open(path)
    layout, weights = opened.layout, opened.weights
    layers, sources = _sources(path, weights, layout)
    _check_dtypes(path, weights)
    sizes = {**_sizes(path, weights, layout), "D": opened.settings.found.get("head_dim", 0)}
    _check_shapes(path, weights, sources, layout, sizes=sizes)
    # The embedding is the first tensor in every layout.
    (embedding,), (head,) = next(iter(sources.values())), sources["lm_head.weight"]
    a, b = weights[embedding], weights[head]
    tied = a.dtype == b.dtype and torch.equal(a, b)
    qkv_bias = (
        layout.optional != llms_from_scratch.QKV_BIAS
        or "transformer.h.0.attn.c_attn.bias" in sources
    )
    shape = Shape(sizes, layers, tied, qkv_bias)
    full_config, notes = _config(path, opened, shape, config or {})
    tensors, filled = _convert(weights, sources, layout, sizes, tied=tied)
    if layout.rotates_pairs:
        _turn_halves(tensors, full_config["head_dim"])
    if opened.left_out:
        notes.append(
            f"Its optimizer state ({', '.join(opened.left_out)}) is not converted: training that "
            "starts from the result (firstlight train --init-from) begins with new moments."
        )
    if filled:
        notes.append(f"It has no biases for {', '.join(filled)}: they are set to zero.")
    if not qkv_bias:
        notes.append(
            "Its queries, keys and values have no biases, so the result has none either (qkv_bias: "
            "false in config.json). transformers uses zeros for them; for other programs, convert "
            "the result again, which writes the zeros."
        )
    return ForeignModel(full_config, tensors, layout.program, tuple(notes))


def foreign_folder(path: Path) -> Path | None:
    """Return the folder of another program's model that consists of several files, or None.

    Args:
        path: the folder. For litgpt, Meta and OpenAI, it can also be a weights file in the folder.

    Returns:
        The folder of the model. None if `path` is a different kind of file, a Hugging Face model
        folder or the folder of an unknown program.
    """
    folder = path if path.is_dir() else path.parent
    is_named = path.name == litgpt.FILE or ".ckpt" in path.name
    is_meant = is_named or path.is_dir() or meta.FILE.fullmatch(path.name) is not None
    if not is_meant or not folder.is_dir():
        return None
    if path.is_dir() and any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME)):
        # A litgpt folder can also contain the Hugging Face model from which it was created.
        return None
    if (folder / litgpt.FILE).is_file() and (folder / litgpt.CONFIG).is_file():
        return folder
    if (folder / meta.CONFIG).is_file() and meta.files_in(folder):
        return folder
    # Accept a folder without meta_STEP.json here. The error that is raised later names the missing
    # file.
    if path.is_dir() and nanochat.files_in(folder) and not (folder / CONFIG_NAME).is_file():
        return folder
    return folder if (folder / openai.CONFIG).is_file() and openai.bundles_in(folder) else None


def _open(path: Path) -> Opened:
    """Open a checkpoint of another program.

    Raises:
        InputError: a settings file can't be read.
        ModelError: a file can't be read, contains objects other than weights, or belongs to an
            unknown program.
    """
    folder = foreign_folder(path)
    if folder is None:
        return _open_file(path)
    if (folder / litgpt.FILE).is_file():
        return litgpt.open_folder(folder)
    if meta.files_in(folder):
        return meta.open_folder(folder)
    steps = nanochat.files_in(folder)
    return _open_file(steps[-1]) if steps else openai.open_folder(folder)


def _open_file(path: Path) -> Opened:
    """Open a checkpoint file of nanoGPT, LLMs-from-scratch, torchtune or nanochat."""
    content = read_pickle(path)
    weights = named_weights(path, content)
    layout = _layout_of(path, weights)
    if layout is nanochat.LAYOUT:
        opened = nanochat.open_file(path, weights)
    elif layout is nanogpt.LAYOUT:
        opened = nanogpt.open_weights(content, weights)
    elif layout is torchtune.LAYOUT:
        opened = torchtune.open_weights(weights)
    elif layout is llms_from_scratch.LLAMA:
        opened = llms_from_scratch.open_llama(path, weights)
    else:
        opened = llms_from_scratch.open_gpt(weights, layout)
    return replace(opened, left_out=optimizer_states(content))


def _layout_of(path: Path, weights: Mapping[str, Any]) -> Layout:
    for layout in LAYOUTS:
        if any(name.endswith(layout.mark) for name in weights):
            return layout
    if any(name.startswith("transformer.h.0.attn.qkv.") for name in weights):
        raise ModelError(
            f"{path} is a litgpt file: use the folder that contains it as {litgpt.FILE} together "
            f"with {litgpt.CONFIG}"
        )
    if any(name.endswith(meta.LAYOUT.mark) for name in weights):
        raise ModelError(
            f"{path} is a file of Meta's Llama: use the folder that contains consolidated.00.pth "
            f"and {meta.CONFIG}"
        )
    raise ModelError(
        f"{path} has an unknown layout (the first tensor is '{next(iter(weights))}'): firstlight "
        "reads GPTs of nanoGPT, GPTs and Llamas of LLMs-from-scratch, Llamas of torchtune, and "
        "folders of OpenAI's GPT-2, Meta's Llama, litgpt and nanochat"
    )


def _config(
    path: Path, opened: Opened, shape: Shape, config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the content of the model's config.json, and notes about the default values used."""
    layout, settings = opened.layout, opened.settings
    given = given_config(path, config, layout.kind)
    if layout.kind != "gpt2":
        return llama_config(path, shape, given, settings, program=layout.program)
    full_config, notes = gpt2_config(path, shape, given, settings)
    return full_config, notes + (nanogpt.shape_notes(shape) if layout is nanogpt.LAYOUT else [])


def _turn_halves(tensors: dict[str, Tensor], head_dim: int) -> None:
    """Reorder the rows of the query and key projections in `tensors` for Hugging Face's version of
    RoPE.

    In the checkpoint, RoPE rotates rows (2i, 2i + 1) of a head as a pair. In Hugging Face, it
    rotates rows (i, i + D/2), where D is the head dimension.
    """
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = tensor.reshape(-1, head_dim // 2, 2, tensor.shape[1])
            tensors[name] = pairs.transpose(1, 2).flatten(0, 2).contiguous()


def _sources(
    path: Path, weights: Mapping[str, Any], layout: Layout
) -> tuple[int, dict[str, tuple[str, ...]]]:
    """Return the number of layers, and the names of the checkpoint's tensors from which each
    Hugging Face tensor is built.

    nanoGPT checkpoints can lack the optional biases. The lists of tensors for these biases are then
    empty, which means that the biases are set to zero. LLMs-from-scratch checkpoints can lack the
    biases of the query, key and value projections. These biases are then omitted from the result.
    """
    # Determine the number of layers from the layer numbers in the tensor names. In OpenAI's names,
    # they have the form "h0/".
    first = next(theirs for names in layout.names.values() for theirs in names if "{}" in theirs)
    number = re.compile(re.escape(first.partition("{}")[0]) + r"(\d+)[./]")
    layers = len({match[1] for name in weights if (match := number.match(name))})
    sources = {
        name.format(i): tuple(theirs.format(i) for theirs in layout.names[name])
        for name in layout.shapes
        for i in range(layers if "{}" in name else 1)
    }
    optional = {n.format(i) for n in layout.optional for i in range(layers)}
    if not any(theirs in weights for name in optional for theirs in sources[name]):
        sources.update(dict.fromkeys(optional, ()))
        if layout.optional == llms_from_scratch.QKV_BIAS:
            sources = {name: parts for name, parts in sources.items() if name not in optional}
    expected = dict.fromkeys(theirs for names in sources.values() for theirs in names)
    unknown = [name for name in weights if name not in expected]
    _refuse(path, f"has tensors that {layout.program}'s model doesn't have", unknown)
    _refuse(path, "lacks tensors", [name for name in expected if name not in weights])
    return layers, sources


def _check_dtypes(path: Path, weights: Mapping[str, Any]) -> None:
    """Reject weights that are not plain floating-point tensors, such as quantised weights, which
    are useless without their scales. Also reject tensors whose storage is smaller than their shape
    requires.
    """
    others = [
        f"{name} is {str(value.dtype).removeprefix('torch.') if is_tensor else 'not a tensor'}"
        for name, value in weights.items()
        if not (is_tensor := isinstance(value, Tensor)) or value.dtype not in _DTYPES
    ]
    _refuse(path, "has weights that are not plain floating point", others)
    repeated = [name for name, value in weights.items() if not is_whole(value)]
    _refuse(path, "has weights with fewer elements than their shape requires", repeated)


def _sizes(path: Path, weights: Mapping[str, Tensor], layout: Layout) -> dict[str, int]:
    """Return the size that each letter in the layout's shapes stands for. The sizes are read from
    the tensors listed in `SIZES`.
    """
    sizes = {}
    for letter, (ours, dimension) in SIZES[layout.kind].items():
        name = layout.names[ours][0].format(0)
        shape = list(weights[name].shape)
        if len(shape) != 2 or 0 in shape:
            raise ModelError(f"{path}: {name} has shape {shape}, but must be a matrix")
        sizes[letter] = shape[dimension]
    return sizes


def _shape_of(spec: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the shape that `spec` describes. For example, "C 3C" is [64, 192] if the size of C is
    64.
    """
    return [int(part[:-1] or 1) * sizes[part[-1]] for part in spec.split()]


def _template(name: str) -> str:
    """Replace the layer number in a tensor name with "{}". For example,
    `transformer.h.3.ln_1.weight` becomes `transformer.h.{}.ln_1.weight`.
    """
    return re.sub(r"\.\d+\.", ".{}.", name)


def _check_shapes(
    path: Path,
    weights: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    layout: Layout,
    *,
    sizes: Mapping[str, int],
) -> None:
    """Raise an error for tensors whose shapes do not match the layout."""
    wrong = []
    for name, parts in sources.items():
        shape = _shape_of(layout.shapes[_template(name)], sizes)
        # Convert the shape to the order of dimensions that the program uses, in which the output
        # dimension comes first. Tensors are stacked along this dimension.
        if layout.is_transposed and _template(name) in TRANSPOSED:
            shape.reverse()
        for part in parts:
            expected = [shape[0] // len(parts), *shape[1:]]
            if list(weights[part].shape) != expected:
                wrong.append(f"{part} is {list(weights[part].shape)}, expected {expected}")
    _refuse(path, "has tensors with wrong shapes", wrong)


def _refuse(path: Path, problem: str, names: list[str]) -> None:
    """Raise a ModelError if `names` is not empty. The message lists the tensors in it."""
    if names:
        raise ModelError(f"{path} {problem}: {first_names(names)}")


def _convert(
    weights: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    layout: Layout,
    sizes: Mapping[str, int],
    *,
    tied: bool,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors, keyed by Hugging Face name, and the names of the modules whose biases
    were missing and have been set to zero.
    """
    tensors, filled = {}, []
    for name, parts in sources.items():
        template = _template(name)
        if tied and name == "lm_head.weight":
            continue
        if not parts:
            dtype = weights[next(iter(weights))].dtype
            tensors[name] = torch.zeros(_shape_of(layout.shapes[template], sizes), dtype=dtype)
            filled.append(template.removesuffix(".bias").rsplit("}.", 1)[-1])
            continue
        stacked = [weights[part].detach() for part in parts]
        tensor = torch.cat(stacked) if len(stacked) > 1 else stacked[0]
        is_transposed = layout.is_transposed and template in TRANSPOSED
        tensors[name] = (tensor.t() if is_transposed else tensor).contiguous()
    return tensors, list(dict.fromkeys(filled))


# The config.json

#: Keys of config.json for GPT-2 models. They include the key names of most other models and the
#: names that are specific to GPT-2.
_GPT2_KEYS = {
    *GPT2Config.hf_names,
    *GPT2Config.hf_names.values(),
    "n_ctx",
    "qkv_bias",
    "activation_function",
    "reorder_and_upcast_attn",
    "task_specific_params",
}
_LLAMA_KEYS = {
    *(LlamaConfig.model_fields.keys() - OWN_KEYS),
    *LlamaConfig.families["llama"].own_keys,
    "rope_parameters",
    "hidden_act",
    "attention_dropout",
    "pretraining_tp",
}
#: Keys of config.json that do not describe the architecture.
_OTHER_KEYS = {
    "model_type",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
}
#: Special token ids for a model without a tokenizer. They are always written, because Hugging
#: Face's config classes use the special tokens of the original models by default. If there is a
#: tokenizer, its ids replace these values.
_NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def given_config(path: Path, config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the caller's config without null values. For a GPT-2 model, key names that are common
    to most models are replaced with the names in GPT-2's config.json.

    Raises:
        ModelError: a key is unknown.
    """
    is_gpt2 = model_type == "gpt2"
    known = _OTHER_KEYS | (_GPT2_KEYS if is_gpt2 else _LLAMA_KEYS)
    given = {}
    for name, value in config.items():
        # OpenAI's original GPT-2 config.json contains a dozen settings for a classification head
        # that is no longer used.
        if name not in known and not name.startswith("summary_"):
            raise ModelError(
                f"{path} is a {model_type} model, whose config.json has no key "
                f"'{name}'{nearest(name, known)}"
            )
        if value is not None:
            given[GPT2Config.hf_names.get(name, name) if is_gpt2 else name] = value
    return given


def _merged(
    path: Path, assumed: dict[str, Any], given: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    """Merge the three configs. Later arguments take precedence.

    Args:
        path: the file, for messages.
        assumed: default values of the program.
        given: the caller's settings.
        found: settings from the file. `given` must not contradict them.

    Raises:
        ModelError: `given` contradicts `found`.
    """
    # If the config has `rope_parameters`, a separate `rope_theta` (a key of transformers 4) would
    # be ignored. It must therefore equal the value in `rope_parameters`.
    rope, told = {**assumed, **given, **found}.get("rope_parameters"), dict(found)
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        told["rope_theta"] = rope["rope_theta"]
    for key in told.keys() & given.keys():
        if given[key] != told[key]:
            raise ModelError(
                f"{path} has {key} {told[key]!r}, but the config specifies {given[key]!r}: "
                f"remove {key} from the config"
            )
    return {**assumed, **given, **found}


def gpt2_config(
    path: Path,
    shape: Shape,
    given: dict[str, Any],
    settings: Settings,
) -> tuple[dict[str, Any], list[str]]:
    """Return the content of config.json for a GPT-2 model, and notes about default values that were
    used.

    Args:
        path: the file, for messages.
        shape: shape of the model, determined from its tensors.
        given: the caller's settings.
        settings: settings from the files, and default values of the program.

    Raises:
        ModelError: two of `shape`, `given` and `settings` contradict each other, or the number of
            heads is unknown.
    """
    sizes, model_args = shape.sizes, settings.model_args or {}
    notes = [note for key, note in settings.notes.items() if key not in given]
    found: dict[str, Any] = {
        **settings.found,
        "model_type": "gpt2",
        "vocab_size": sizes["V"],
        "n_positions": sizes["P"],
        "n_ctx": sizes["P"],
        "n_embd": sizes["C"],
        "n_inner": 4 * sizes["C"],
        "n_layer": shape.layers,
        "tie_word_embeddings": shape.tied,
        "qkv_bias": shape.qkv_bias,
    }
    for theirs in ("vocab_size", "block_size", "n_embd", "n_layer"):
        ours = found["n_positions" if theirs == "block_size" else theirs]
        if model_args.get(theirs, ours) != ours:
            raise ModelError(
                f"{path}: {settings.where} specify {theirs} {model_args[theirs]!r}, but its "
                f"tensors have {ours}"
            )
    if "n_head" in model_args:
        found["n_head"] = model_args["n_head"]
    dropout = model_args.get("dropout", 0.0)
    assumed = {
        **_NO_SPECIAL_TOKENS,
        **settings.assumed,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout),
    }
    if "n_head" not in {**given, **found}:
        assumed["n_head"] = _guess_heads(path, sizes["C"])
        notes.append(
            f"The number of heads is not in the file: {assumed['n_head']} heads of dimension 64 "
            "are "
            'assumed (set "n_head" in the config if that is wrong).'
        )
    config = _merged(path, assumed, given, found)
    _check_heads(path, config["n_head"], "n_head", sizes["C"])
    for key, choices in settings.choices.items():
        if config[key] not in choices:
            raise ModelError(
                f"{path}: {key} is {config[key]!r}, but its program supports only "
                f"{' or '.join(map(repr, choices))}: correct {key} in the config"
            )
    checked = config_from_hf(config, f"{path}: config")
    del config["qkv_bias"]  # `to_hf` writes this key only for models without biases.
    return {**config, **checked.to_hf()}, notes


def _guess_heads(path: Path, width: int) -> int:
    """Return the number of heads for a head dimension of 64, as in all GPT-2 models from OpenAI."""
    if width % 64:
        raise ModelError(
            f"{path} does not specify the number of heads, and its hidden size {width} is not a "
            "multiple "
            'of 64, the usual head dimension: set "n_head" in the config (--config FILE.json)'
        )
    return width // 64


def _check_heads(path: Path, heads: Any, key: str, width: int) -> None:
    """Raise an error if the total width of the queries is not divisible by the number of heads."""
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or width % heads:
        raise ModelError(f"{path}: {key} is {heads!r}, but must be a divisor of the width {width}")


def llama_config(
    path: Path, shape: Shape, given: dict[str, Any], settings: Settings, program: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the content of config.json for a Llama-like or nanochat model, and notes about default
    values that were used.

    Args:
        path, shape, given, settings: see `gpt2_config`.
        program: name of the program.

    Raises:
        ModelError: the number of heads, the context length or the RoPE base is unknown or
            contradicts the file.
    """
    sizes = shape.sizes
    told = {
        "vocab_size": sizes["V"],
        "hidden_size": sizes["C"],
        "intermediate_size": sizes["F"],
        "num_hidden_layers": shape.layers,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
    }
    for key, value in settings.found.items():
        if told.get(key, value) != value:
            raise ModelError(
                f"{path}: its settings specify {key} {value!r}, but its tensors have {told[key]!r}"
            )
    found = {"model_type": "llama", **told, **settings.found}
    assumed = {**_NO_SPECIAL_TOKENS, "rms_norm_eps": 1e-5, **settings.assumed}
    config = _merged(path, assumed, given, found)
    _check_llama_is_complete(path, config)
    heads = config["num_attention_heads"]
    _check_heads(path, heads, "num_attention_heads", sizes["Q"])
    head_dim = sizes["Q"] // heads
    if sizes["K"] % head_dim:
        raise ModelError(
            f"{path}: keys of total width {sizes['K']} can't be divided into heads of dimension "
            f"{head_dim} (num_attention_heads {heads}): correct num_attention_heads"
        )
    shown = {"num_key_value_heads": sizes["K"] // head_dim, "head_dim": head_dim}
    for key, value in shown.items():
        if found.get(key, value) != value:
            raise ModelError(
                f"{path}: its settings specify {key} {found[key]!r}, but its tensors have {value}"
            )
    config = _merged(path, assumed, given, {**found, **shown})
    checked = config_from_hf(config, f"{path}: config")
    scaling = getattr(checked, "rope_scaling", None)
    if not isinstance(scaling, (NoneType, Llama3Rope)):
        raise ModelError(
            f"{path}: {program} does not support rotary positions of type {scaling.rope_type!r}: "
            "correct rope_parameters"
        )
    if settings.sines is not None and len(settings.sines) > 1:
        _check_rope(path, checked, settings.sines)
    notes = [note for key, note in settings.notes.items() if key not in given]
    if "rms_norm_eps" not in {**given, **found}:
        notes.append(f"The norms' epsilon is assumed to be 1e-05, as in {program}.")
    return {**config, **checked.to_hf()}, notes


def _check_llama_is_complete(path: Path, config: Mapping[str, Any]) -> None:
    """Raise an error if the config lacks the number of heads, the context length or the RoPE base.
    There are no safe default values for these settings.
    """
    missing = [k for k in ("num_attention_heads", "max_position_embeddings") if k not in config]
    rope = config.get("rope_parameters")
    if "rope_theta" not in config and not (isinstance(rope, Mapping) and "rope_theta" in rope):
        missing.append("rope_parameters (with rope_theta)")
    if missing:
        raise ModelError(
            f"{path} does not specify {', '.join(missing)}: set them in the config "
            '(--config FILE.json), such as {"num_attention_heads": 32, "max_position_embeddings": '
            '8192, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}'
        )


def _check_rope(path: Path, config: Any, sines: Tensor) -> None:
    """Check that the RoPE frequencies of the config match a table of sines in the file.

    Args:
        path: the file, for messages.
        config: the model's config.
        sines: table of shape [positions, head dimension], which may have been saved in bf16.

    Raises:
        ModelError: the frequencies do not match the table.
    """
    # At position 1, the RoPE angles are equal to the frequencies.
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    saved = sines[1, : len(frequencies)].float()
    if not torch.allclose(saved, frequencies.sin(), rtol=1e-2, atol=1e-6):
        raise ModelError(
            f"{path} contains rotary tables that don't match rope_theta {config.rope_theta:g} "
            "with the config's scaling: correct rope_parameters"
        )
