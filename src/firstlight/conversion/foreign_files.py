"""Files of other programs' models: recognise the program, read its tensors and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.check import first_names
from firstlight.conversion.foreign_forward import (
    META_NAMES,
    TORCHTUNE_NAMES,
    book_gpt_logits,
    book_llama_logits,
    litgpt_logits,
    nanochat_logits,
    nanogpt_logits,
    openai_logits,
    pairs_llama_logits,
)
from firstlight.conversion.foreign_layouts import (
    LAYOUTS,
    META,
    NANOCHAT,
    NANOGPT,
    OPENAI,
    TORCHTUNE,
    Layout,
    litgpt_layout,
)
from firstlight.conversion.foreign_settings import (
    NANOCHAT_KEYS,
    Settings,
    book_llama_settings,
    litgpt_settings,
    meta_settings,
    nanochat_settings,
    openai_settings,
)
from firstlight.conversion.pickled import is_whole, named_weights, read_pickle
from firstlight.conversion.tensor_bundle import read_bundle
from firstlight.errors import ModelError
from firstlight.files.atomic import read_file, read_json
from firstlight.recipe.load import parse_yaml
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.stored import INDEX_NAME, WEIGHTS_NAME

#: Ends of the names of tensors that are no weights: masks and rotary tables.
_BUFFERS = (".attn.bias", ".att.mask", ".att.cos", ".att.sin", "rope.freqs")

LITGPT_NAME = "lit_model.pth"
_LITGPT_CONFIG = "model_config.yaml"
_META_FILE = re.compile(r"consolidated\.(\d\d)\.pth")
_META_CONFIG = "params.json"
_OPENAI_CONFIG = "hparams.json"
_NANOCHAT_FILE = re.compile(r"model_(\d+)\.pt")
#: nanochat pads the rows of embedding and head to a multiple of this.
_NANOCHAT_ROWS = 64
#: Maximum number of names in a message.
_SHOWN = 12
#: Maximum size of litgpt's model_config.yaml in bytes.
_MAX_CONFIG_BYTES = 1_000_000

#: Dimension along which Meta's files shard a module's matrix (tensor parallelism), by its name.
_META_CUT = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output"), 0),
    **dict.fromkeys(("wo", "w2"), 1),
}


@dataclass(frozen=True)
class Opened:
    """Another program's model, as it is in its files.

    Attributes:
        layout: names and shapes of the program's tensors.
        weights: tensors by the program's names. A tied head is under both its names.
        settings: settings in the files, and those that the program's code assumes.
        logits: function from config.json and token ids, int64 [B, T], to the logits that the
            program's own code would compute, fp32 [B, T, V].
        left_out: keys of the file's optimizer states, which are not converted.
    """

    layout: Layout
    weights: dict[str, Any]
    settings: Settings
    logits: Callable[[Mapping[str, Any], Tensor], Tensor]
    left_out: Sequence[str] = ()


def foreign_folder(path: Path) -> Path | None:
    """The folder of another program's model that consists of several files.

    Args:
        path: the folder, or for litgpt, Meta and OpenAI its file of weights.

    Returns:
        The folder; None for any other file, and for folders of Hugging Face or unknown programs.
    """
    folder = path if path.is_dir() else path.parent
    is_named = path.name == LITGPT_NAME or ".ckpt" in path.name
    is_meant = is_named or path.is_dir() or _META_FILE.fullmatch(path.name) is not None
    if not is_meant or not folder.is_dir():
        return None
    if path.is_dir() and any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME)):
        return None  # a litgpt folder can also hold the Hugging Face model that it was made from
    if (folder / LITGPT_NAME).is_file() and (folder / _LITGPT_CONFIG).is_file():
        return folder
    if (folder / _META_CONFIG).is_file() and _meta_files(folder):
        return folder
    # A folder without meta_STEP.json is accepted here, so that the error names the missing file.
    if path.is_dir() and _nanochat_files(folder) and not (folder / CONFIG_NAME).is_file():
        return folder
    return folder if (folder / _OPENAI_CONFIG).is_file() and _bundles(folder) else None


def open_foreign(path: Path) -> Opened:
    """Open another program's model.

    Raises:
        InputError: a file of settings can't be read.
        ModelError: a file can't be read, holds objects other than weights, or is of an unknown
            program.
    """
    folder = foreign_folder(path)
    if folder is None:
        return _open_file(path)
    if (folder / LITGPT_NAME).is_file():
        return _open_litgpt(folder)
    if _meta_files(folder):
        return _open_meta(folder)
    steps = _nanochat_files(folder)
    return _open_file(steps[-1]) if steps else _open_openai(folder)


def _open_file(path: Path) -> Opened:
    """Open a checkpoint file of nanoGPT, LLMs-from-scratch, torchtune or nanochat."""
    content = read_pickle(path)
    everything = named_weights(path, content)
    return replace(_open_weights(path, content, everything), left_out=_optimizer_states(content))


def _optimizer_states(content: Mapping[str, Any]) -> list[str]:
    """The keys of a checkpoint's optimizer states. A state_dict alone has none, since its values
    are tensors."""
    return [
        key for key, value in content.items() if "optim" in str(key) and isinstance(value, Mapping)
    ]


def _open_weights(path: Path, content: Mapping[str, Any], everything: dict[str, Any]) -> Opened:
    """Open the state_dict `everything` of a file with this content."""
    layout = _layout_of(path, everything)
    if layout.program == NANOCHAT.program:
        return _open_nanochat(path, everything, layout)
    weights = _without_buffers(everything)
    tensors = {name: value for name, value in everything.items() if isinstance(value, Tensor)}
    if layout.program == NANOGPT.program:
        args = content.get("model_args")
        told = Settings(model_args=args if isinstance(args, Mapping) else None)
        return Opened(
            layout,
            weights,
            told,
            lambda config, ids: nanogpt_logits(
                tensors, config["n_head"], ids, config["activation_function"]
            ),
        )
    if layout.program == TORCHTUNE.program:
        _tie(weights)
        return Opened(
            layout,
            weights,
            Settings(),
            lambda config, ids: pairs_llama_logits([weights], TORCHTUNE_NAMES, config, ids),
        )
    if layout.kind == "llama":
        return Opened(
            layout,
            weights,
            book_llama_settings(path, everything),
            lambda config, ids: book_llama_logits(
                tensors, config["num_attention_heads"], ids, config["rope_parameters"]
            ),
        )
    return Opened(
        layout,
        weights,
        Settings(),
        # The book's own activation, whatever the config specifies, so that another one shows; but
        # for ReLU, which its readers put in its place.
        lambda config, ids: book_gpt_logits(
            tensors,
            config["n_head"],
            ids,
            "relu" if config["activation_function"] == "relu" else "gelu_new",
        ),
    )


def _nanochat_files(folder: Path) -> list[Path]:
    """nanochat's `model_STEP.pt` files in a folder, in order of the steps."""
    steps = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _NANOCHAT_FILE.fullmatch(path.name))
    }
    return [steps[step] for step in sorted(steps) if steps[step].is_file()]


def _open_nanochat(path: Path, weights: Mapping[str, Any], layout: Layout) -> Opened:
    """Open a nanochat model of the architecture before 11 January 2026: `model_STEP.pt`, with
    `meta_STEP.json` beside it."""
    match = _NANOCHAT_FILE.fullmatch(path.name)
    meta = path.with_name(f"meta_{match[1]}.json") if match else None
    if meta is None or not meta.is_file():
        raise ModelError(
            f"{path} is of nanochat, and its settings are missing: name a model_STEP.pt that has "
            "its meta_STEP.json beside it, or their folder"
        )
    settings = nanochat_settings(meta, read_json(meta))
    _require_first_form(path, weights, settings)
    size, own = settings.found["vocab_size"], dict(weights)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        rows = own.get(name)
        if isinstance(rows, Tensor) and rows.dim() == 2 and 0 < len(rows) - size < _NANOCHAT_ROWS:
            own[name] = rows[:size]
    tensors = [one for one in own.values() if isinstance(one, Tensor) and is_whole(one)]
    # On a GPU, nanochat keeps the embedding in bf16 and the rest in fp32. Widening it to fp32 is
    # exact, and gives the file one dtype, which transformers then loads.
    is_mixed = {tensor.dtype for tensor in tensors} == {torch.float32, torch.bfloat16}
    is_widened = is_mixed and len(tensors) == len(own)
    return Opened(
        layout,
        {name: tensor.float() for name, tensor in own.items()} if is_widened else own,
        settings,
        lambda config, ids: nanochat_logits(own, config["num_attention_heads"], ids),
    )


def _require_first_form(path: Path, weights: Mapping[str, Any], settings: Settings) -> None:
    """Refuse later nanochat models, and name the tensors and settings that the first form lacks."""
    known = {name.replace("{}", "*") for names in NANOCHAT.names.values() for name in names}
    found = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in weights)
    more = [name for name in found if name not in known]
    more += [str(key) for key in settings.model_args or () if key not in NANOCHAT_KEYS]
    if more:
        raise ModelError(
            f"{path} is of a later nanochat, whose model no Hugging Face class computes "
            f"(NanoChatForCausalLM is that of before 11 January 2026): it also has "
            f"{', '.join(more[:_SHOWN])}; use it with nanochat"
        )


def _without_buffers(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {n: t for n, t in weights.items() if not n.endswith(_BUFFERS)}


def _tie(weights: dict[str, Any]) -> None:
    """Use the embedding as the head if there is no head."""
    if "tok_embeddings.weight" in weights:
        weights.setdefault("output.weight", weights["tok_embeddings.weight"])


def _layout_of(path: Path, weights: Mapping[str, Any]) -> Layout:
    for layout in LAYOUTS:
        if any(name.endswith(layout.mark) for name in weights):
            return layout
    if any(name.startswith("transformer.h.0.attn.qkv.") for name in weights):
        raise ModelError(
            f"{path} is of litgpt: name the folder that has it as {LITGPT_NAME} "
            f"beside its {_LITGPT_CONFIG}"
        )
    if any(name.endswith(META.mark) for name in weights):
        raise ModelError(
            f"{path} is of Meta: name the folder that has its consolidated.00.pth beside its "
            f"{_META_CONFIG}"
        )
    raise ModelError(
        f"{path} is of an unknown layout, it begins with '{next(iter(weights))}': GPTs of "
        "nanoGPT, GPTs and Llamas of LLMs-from-scratch and Llamas of torchtune are read, and "
        "folders of OpenAI's GPT-2, Meta's Llama, litgpt and nanochat"
    )


def _open_openai(folder: Path) -> Opened:
    """Open OpenAI's GPT-2 as saved by TensorFlow: `model.ckpt.*` and `hparams.json`."""
    bundles = _bundles(folder)
    if len(bundles) > 1:
        names = [path.name for path in bundles]
        raise ModelError(f"{folder} has several checkpoints: {first_names(names)}; keep one")
    prefix = bundles[0].with_suffix("")
    weights: dict[str, Any] = {}
    for name, tensor in read_bundle(prefix).items():
        # OpenAI's linear layers are convolutions of width 1, with weights [1, in, out].
        is_convolution = name.endswith("/w") and tensor.dim() == 3
        if is_convolution and len(tensor) != 1:
            raise ModelError(
                f"{prefix}: {name} is {list(tensor.shape)}, expected [1, inputs, outputs]: it is "
                "no GPT-2 of OpenAI's"
            )
        weights[name] = tensor[0] if is_convolution else tensor
    if not any(name.endswith(OPENAI.mark) for name in weights):
        raise ModelError(
            f"{prefix}.index names no tensor such as 'model/h0{OPENAI.mark}': it is no GPT-2 of "
            "OpenAI's"
        )
    settings = openai_settings(folder / _OPENAI_CONFIG, read_json(folder / _OPENAI_CONFIG))
    return Opened(
        OPENAI,
        weights,
        settings,
        lambda config, ids: openai_logits(weights, config["n_head"], ids),
    )


def _bundles(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ckpt*.index"))


def _meta_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _META_FILE.fullmatch(path.name))


def _open_meta(folder: Path) -> Opened:
    """Open Meta's Llama: `params.json`, and tensor-parallel shards in `consolidated.*.pth`."""
    files = _meta_files(folder)
    missing = {f"consolidated.{i:02}.pth" for i in range(len(files))} - {f.name for f in files}
    if missing:
        raise ModelError(f"{folder} lacks {min(missing)}: a model needs all its parts, copy it too")
    shards = [_without_buffers(named_weights(path, read_pickle(path))) for path in files]
    for path, shard in zip(files, shards, strict=True):
        broken = [n for n, t in shard.items() if not isinstance(t, Tensor) or not is_whole(t)]
        if broken:
            raise ModelError(f"{path} has {broken[0]!r:.80}, which is no plain tensor")
        _tie(shard)
    settings = meta_settings(folder / _META_CONFIG, read_json(folder / _META_CONFIG))
    return Opened(
        META,
        _joined(files, shards),
        settings,
        lambda config, ids: pairs_llama_logits(shards, META_NAMES, config, ids),
    )


def _joined(files: Sequence[Path], shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """The whole tensors, joined from the files' shards; those of a single file are unchanged."""
    if len(shards) == 1:
        return dict(shards[0])
    first = shards[0]
    for path, shard in zip(files, shards, strict=True):
        if {n: (t.shape, t.dtype) for n, t in shard.items()} != {
            n: (t.shape, t.dtype) for n, t in first.items()
        }:
            raise ModelError(f"{path} and {files[0]} are no parts of one model: shapes differ")
    width = first["norm.weight"].numel() if "norm.weight" in first else 0
    joined = {}
    for name, tensor in first.items():
        module = name.split(".")[-2] if "." in name else name
        cut = _META_CUT.get(module)
        if module == "tok_embeddings" and tensor.dim() == 2:
            # Llama 1 and 2 shard the embedding's width, Llama 3 its vocabulary.
            cut = 0 if tensor.shape[1] == width else 1
        parts = [shard[name] for shard in shards]
        if cut is None:
            if not all(torch.equal(tensor, part) for part in parts):
                raise ModelError(f"{name} differs between {files[0]} and its other parts")
            joined[name] = tensor
        elif tensor.dim() != 2:
            raise ModelError(f"{files[0]}: {name} is {list(tensor.shape)}, expected a matrix")
        else:
            joined[name] = torch.cat(parts, cut)
    return joined


def _open_litgpt(folder: Path) -> Opened:
    """Open a Llama-like model of litgpt: `lit_model.pth` and `model_config.yaml`."""
    path, config_path = folder / LITGPT_NAME, folder / _LITGPT_CONFIG
    content = read_file(config_path, _MAX_CONFIG_BYTES)
    try:
        values = parse_yaml(content)
    except ValueError as error:
        raise ModelError(f"{config_path} is no valid YAML ({error}): copy it again") from error
    settings, rows = litgpt_settings(config_path, values)
    saved = read_pickle(path)
    weights = named_weights(path, saved)
    layout = litgpt_layout(
        qkv_bias=settings.found["model_type"] == "qwen2",
        qk_norm=settings.found["model_type"] == "qwen3",
    )
    return Opened(
        layout,
        _cut_qkv(path, weights, rows),
        settings,
        lambda config, ids: litgpt_logits(weights, config, ids),
        _optimizer_states(saved),
    )


def _cut_qkv(path: Path, weights: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The tensors, with litgpt's fused matrix `attn.qkv` split into `attn.qkv[q]`, `[k]` and `[v]`
    of `rows` rows each."""
    cut: dict[str, Any] = {}
    for name, value in weights.items():
        match = re.fullmatch(r"(.*\.attn\.qkv)\.(weight|bias)", name)
        if match is None or not isinstance(value, Tensor):
            cut[name] = value
        elif value.dim() == 0 or len(value) != sum(rows):
            raise ModelError(
                f"{path}: {name} is {list(value.shape)}, and {_LITGPT_CONFIG} asks for "
                f"{sum(rows)} rows"
            )
        elif not is_whole(value):
            raise ModelError(f"{path}: {name} has fewer numbers than its shape says")
        else:
            for letter, part in zip("qkv", torch.split(value, list(rows)), strict=True):
                cut[f"{match[1]}[{letter}].{match[2]}"] = part
    return cut
