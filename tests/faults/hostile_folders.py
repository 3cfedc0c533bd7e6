"""Hostile checkpoints, model folders and data, by name."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hostile_place import (
    DEEP,
    Build,
    Opened,
    Place,
    add_json_text,
    change_json,
    fifo,
    folder_instead,
    link,
    reseal,
    reseal_data,
    safetensors_file,
    set_json,
    sparse,
    without,
)

Spoil = Callable[[Path], object]


def model(spoil: Callable[[Place, Path], object], call: str = "load") -> Build:
    """A model folder, spoiled."""

    def build(place: Place) -> Opened:
        folder = place.copy("model")
        spoil(place, folder)
        return Opened(call, folder)

    return build


def model_file(name: str, spoil: Spoil) -> Build:
    """A model folder with one file spoiled."""
    return model(lambda _, folder: spoil(folder / name))


def config(**values: Any) -> Build:
    """A model folder whose config.json has other values."""
    return model(lambda _, folder: set_json(folder / "config.json", **values))


def weights(header: Any, data: bytes = b"", length: int | None = None) -> Build:
    """A model folder whose weights have another header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = safetensors_file(text, data, length)
    return model(lambda _, folder: (folder / "model.safetensors").write_bytes(content))


def tensor(**values: Any) -> dict[str, Any]:
    """The header of one tensor of four fp32 numbers, with other values."""
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **values}}


def run(spoil: Callable[[Place, Path], object], *, vouch: bool = True) -> Build:
    """A run whose checkpoint is spoiled and, unless not to be, vouched for by its manifest."""

    def build(place: Place) -> Opened:
        place.copy("run")
        spoil(place, place.checkpoint)
        if vouch:
            reseal(place.checkpoint)
        # The model is the checkpoint's, whatever that says.
        return Opened("resume", place.recipe_file(model=None))

    return build


def run_file(name: str, spoil: Spoil, *, vouch: bool = True) -> Build:
    """A run with one file of its checkpoint spoiled."""
    return run(lambda _, folder: spoil(folder / name), vouch=vouch)


def state(change: Callable[[Any], object]) -> Build:
    """A run whose trainer_state.json says something else."""
    return run_file("trainer_state.json", lambda path: change_json(path, change))


def listed(name: str) -> Build:
    """A run whose manifest lists a file elsewhere."""

    def build(place: Place) -> Opened:
        place.copy("run")
        entry = {"bytes": place.secret.stat().st_size, "sha256": "0" * 64}
        shown = name.replace("SECRET", str(place.secret))
        reseal(place.checkpoint, lambda manifest: manifest["files"].update({shown: entry}))
        return Opened("resume", place.recipe_file())

    return build


def pickled(content: Callable[[Place], bytes]) -> Build:
    """A model folder with this as its pytorch_model.bin and no other weights, to be converted."""

    def spoil(place: Place, folder: Path) -> None:
        without(folder / "model.safetensors")
        (folder / "pytorch_model.bin").write_bytes(content(place))

    return model(spoil, "pickled")


def archive(content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive such as torch.save's with this as its pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
    return made.getvalue()


def index(name: str) -> Build:
    """A model folder whose index names a file elsewhere."""

    def spoil(place: Place, folder: Path) -> None:
        (folder / "model.safetensors").rename(place.folder / "outside.safetensors")
        shown = name.replace("SECRET", str(place.secret))
        content = {"metadata": {}, "weight_map": {"lm_head.weight": shown}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return model(spoil)


def linked_shard_of_weights(place: Place, folder: Path) -> None:
    """An index that names a link to the secret."""
    without(folder / "model.safetensors")
    link(folder / "part.safetensors", place.folder / "part")
    (place.folder / "part").write_bytes(place.pickled())
    content = {"weight_map": {"lm_head.weight": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def adapter(spoil: Callable[[Place, Path], object], **settings: Any) -> Build:
    """An adapter of the model, spoiled."""

    def build(place: Place) -> Opened:
        base, folder = place.copy("model"), place.folder / "adapter"
        folder.mkdir()
        content = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(base), **settings}
        (folder / "adapter_config.json").write_text(json.dumps(content))
        layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        header = {
            f"{layer}A.weight": {"dtype": "F32", "shape": [2, 32], "data_offsets": [0, 256]},
            f"{layer}B.weight": {"dtype": "F32", "shape": [32, 2], "data_offsets": [256, 512]},
        }
        content_bytes = safetensors_file(json.dumps(header).encode(), bytes(512))
        (folder / "adapter_model.safetensors").write_bytes(content_bytes)
        spoil(place, folder)
        return Opened("load", folder)

    return build


def based_on(name: str) -> Build:
    """An adapter that names another base."""

    def spoil(place: Place, folder: Path) -> None:
        shown = name.replace("OUTSIDE", str(place.outside))
        set_json(folder / "adapter_config.json", base_model_name_or_path=shown)

    return adapter(spoil)


def data(spoil: Callable[[Place, Path], object], call: str = "dataset") -> Build:
    """A prepared folder, spoiled."""

    def build(place: Place) -> Opened:
        folder = place.copy("data")
        spoil(place, folder)
        return Opened(call, folder)

    return build


def shard(spoil: Spoil, *, vouch: bool = True, call: str = "dataset") -> Build:
    """A prepared folder with a shard spoiled and, unless not to be, vouched for."""

    def change(place: Place, folder: Path) -> None:
        spoil(folder / "train-00000.bin")
        if vouch:
            reseal_data(folder)

    return data(change, call)


def data_manifest(change: Callable[[Any], object]) -> Build:
    """A prepared folder whose manifest says something else."""
    return data(lambda _, folder: change_json(folder / "manifest.json", change))


def train_shard(manifest: Any) -> Any:
    return manifest["splits"]["train"]["shards"][0]


def shard_named(name: str) -> Build:
    """A prepared folder whose manifest names a shard elsewhere."""

    def spoil(place: Place, folder: Path) -> None:
        shown = name.replace("SECRET", str(place.secret))
        change_json(folder / "manifest.json", lambda m: train_shard(m).update(file=shown))

    return data(spoil)


#: Where a shard's header has which number.
_HEADER = {"itemsize": ("<I", 12), "tokens": ("<Q", 16), "documents": ("<Q", 24)}


def header(path: Path, **values: int) -> None:
    """Other numbers in a shard's header."""
    content = bytearray(path.read_bytes())
    for name, value in values.items():
        form, place = _HEADER[name]
        struct.pack_into(form, content, place, value)
    path.write_bytes(content)


def put(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content)


def torch_archive(path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, path)


def empty_experts(**values: Any) -> Build:
    """A model folder whose weights are of any number of experts, and of no numbers."""

    def spoil(_: Place, folder: Path) -> None:
        set_json(folder / "config.json", **values)
        entry = {"dtype": "F32", "shape": [10**9, 0, 0], "data_offsets": [0, 0]}
        header = json.dumps({"a.experts.b": entry}).encode()
        (folder / "model.safetensors").write_bytes(safetensors_file(header, b""))

    return model(spoil)


#: A dict whose key is a tuple of a tuple twice, 60 times: its hash takes 2^60 steps.
_TUPLES = b"\x80\x02}K\x01\x85q\x00" + b"h\x00\x86q\x00" * 60 + b"K\x01s."
_LAYERS = 10**9
_DEEP_JSON = b'{"a": ' * DEEP + b"1" + b"}" * DEEP

FOLDERS: dict[str, Build] = {
    # Pickles and archives under our names
    "a pickle as model.safetensors": model(
        lambda place, folder: (folder / "model.safetensors").write_bytes(place.pickled())
    ),
    "torch's archive as model.safetensors": model_file("model.safetensors", torch_archive),
    "a pickle as pytorch_model.bin alone": model(
        lambda place, folder: (
            without(folder / "model.safetensors"),
            (folder / "pytorch_model.bin").write_bytes(place.pickled()),
        )
    ),
    "a pickle as pytorch_model.bin, converted": pickled(lambda place: place.pickled()),
    "a pickle that asks for memory, converted": pickled(
        lambda _: archive(b"\x80\x02}X\1\0\0\0ac__builtin__\nbytearray\n\x8a\5\0\0\0\0\1\x85Rs.")
    ),
    "a compressed archive as pytorch_model.bin, converted": pickled(
        lambda _: archive(bytes(500_000_000), zipfile.ZIP_DEFLATED)
    ),
    "a pickle of a tuple that takes for ever to hash": pickled(lambda _: archive(_TUPLES)),
    "a pickle as config.json": model(
        lambda place, folder: (folder / "config.json").write_bytes(place.pickled())
    ),
    "a pickle as generation_config.json": model(
        lambda place, folder: (folder / "generation_config.json").write_bytes(place.pickled())
    ),
    "a pickle as optimizer.safetensors": run(
        lambda place, folder: (folder / "optimizer.safetensors").write_bytes(place.pickled())
    ),
    "torch's archive as optimizer.safetensors": run_file("optimizer.safetensors", torch_archive),
    "a pickle as trainer_state.json": run(
        lambda place, folder: (folder / "trainer_state.json").write_bytes(place.pickled())
    ),
    "a pickle as a checkpoint's manifest": run(
        lambda place, folder: (folder / "manifest.json").write_bytes(place.pickled()), vouch=False
    ),
    "a pickle as a shard": shard(put(b"\x80\x04cos\nsystem\n(S'true'\ntR.".ljust(100))),
    "a pickle as a data manifest": data(
        lambda place, folder: (folder / "manifest.json").write_bytes(place.pickled())
    ),
    "a pickle as an adapter": adapter(
        lambda place, folder: (folder / "adapter_model.safetensors").write_bytes(place.pickled())
    ),
    "a pickle as a foreign checkpoint": lambda place: Opened(
        "foreign", place.file("model.pt", place.pickled())
    ),
    # Names and links that lead elsewhere
    "a checkpoint's manifest lists ../": listed("../../../../outside/secret"),
    "a checkpoint's manifest lists an absolute path": listed("SECRET"),
    "a checkpoint's manifest lists a name with a line end": listed("a\nb"),
    "a link as model.safetensors of a checkpoint": run(
        lambda place, folder: link(folder / "model.safetensors", place.secret), vouch=False
    ),
    "a link as a checkpoint's manifest": run(
        lambda place, folder: link(folder / "manifest.json", place.secret), vouch=False
    ),
    "an index names ../": index("../outside.safetensors"),
    "an index names an absolute path": index("SECRET"),
    "an index names a link to a pickle": model(linked_shard_of_weights),
    "an index names a folder": index("."),
    "a data manifest names ../": shard_named("../../outside/secret"),
    "a data manifest names an absolute path": shard_named("SECRET"),
    "a data manifest names a name with zeros": shard_named("train\0.bin"),
    "a shard is a link to no end of zeros": shard(
        lambda path: link(path, "/dev/zero"), vouch=False
    ),
    "an adapter's base is itself": based_on("."),
    "an adapter's base is a folder without a model": based_on("OUTSIDE"),
    "an adapter's base is not there": based_on("/nowhere/at/all"),
    "an adapter's pattern never ends": adapter(
        lambda *_: None, rank_pattern={"([a-z._0-9]+)+!": 2}, alpha_pattern={"(.*)*(.*)*(.*)*!": 2}
    ),
    # Pipes, folders, devices, and files without end
    "a pipe as config.json": model_file("config.json", fifo),
    "a pipe as model.safetensors": model_file("model.safetensors", fifo),
    "a folder as model.safetensors": model_file("model.safetensors", folder_instead),
    "a device as config.json": model_file("config.json", lambda path: link(path, "/dev/zero")),
    "a pipe as trainer_state.json": run_file("trainer_state.json", fifo, vouch=False),
    "a folder as optimizer.safetensors": run_file(
        "optimizer.safetensors", folder_instead, vouch=False
    ),
    "a pipe as a shard": shard(fifo, vouch=False),
    "a pipe as a data manifest": data(lambda _, folder: fifo(folder / "manifest.json")),
    "a gigabyte as config.json": model_file("config.json", sparse),
    "a gigabyte as an index": model(
        lambda _, folder: (
            without(folder / "model.safetensors"),
            sparse(folder / "model.safetensors.index.json"),
        )
    ),
    "a gigabyte as generation_config.json": model_file("generation_config.json", sparse),
    "a gigabyte as a checkpoint's manifest": run_file("manifest.json", sparse, vouch=False),
    "a gigabyte as a data manifest": data(lambda _, folder: sparse(folder / "manifest.json")),
    # Headers of safetensors that lie
    "a header of 2^63 bytes": weights(b"{}", length=2**63),
    "a header of 2^64 - 1 bytes": weights(b"{}", length=2**64 - 1),
    "a header longer than its file": weights(b"{}", length=10**6),
    "a header of 90 megabytes": weights(b"{" + b" " * 90_000_000 + b"}"),
    "no header at all": model_file("model.safetensors", put(b"")),
    "a header that is no JSON": weights(b"\xff" * 64),
    "a header 100,000 deep": weights(_DEEP_JSON),
    "tensors that overlap": weights(
        {**tensor(), "v": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, bytes(24)
    ),
    "a tensor before the file": weights(tensor(data_offsets=[-16, 0]), bytes(16)),
    "a tensor that ends before it begins": weights(tensor(data_offsets=[16, 0]), bytes(16)),
    "a tensor after the file's end": weights(tensor(data_offsets=[2**64 - 16, 2**64 - 1])),
    "a shape that overflows": weights(tensor(shape=[2**32, 2**32, 4]), bytes(16)),
    "a negative shape": weights(tensor(shape=[-4, -1]), bytes(16)),
    "a shape of words": weights(tensor(shape=["four"]), bytes(16)),
    "an unknown number format": weights(tensor(dtype="F33"), bytes(16)),
    "bytes after the last tensor": weights(tensor(), bytes(64)),
    "a tensor given twice": weights(
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(16),
    ),
    # Sizes that nothing has
    "a billion layers": config(num_hidden_layers=_LAYERS),
    "a hidden size of a billion": config(hidden_size=10**9, intermediate_size=10**9),
    "a vocabulary of 10^12": config(vocab_size=10**12),
    "a billion heads": config(num_attention_heads=10**9, num_key_value_heads=10**9),
    "a hidden size of 10^30": config(hidden_size=10**30),
    "a billion experts": config(
        model_type="qwen3_moe", num_experts=10**9, moe_intermediate_size=8, num_experts_per_tok=1
    ),
    "10,000 layers beside experts without numbers": empty_experts(num_hidden_layers=10_000),
    "10,000 experts in 200 layers without numbers": empty_experts(
        model_type="qwen3_moe",
        num_hidden_layers=200,
        num_experts=10_000,
        moe_intermediate_size=8,
        num_experts_per_tok=1,
    ),
    "a negative size": config(hidden_size=-32),
    "a size in words": config(hidden_size="large"),
    "a billion layers in GPT-2": config(model_type="gpt2", n_layer=10**9),
    "a billion layers in a checkpoint": run_file(
        "config.json", lambda path: set_json(path, num_hidden_layers=_LAYERS)
    ),
    "a hidden size of a billion in a checkpoint": run_file(
        "config.json", lambda path: set_json(path, hidden_size=10**9, intermediate_size=10**9)
    ),
    "a shard of 2^63 tokens": shard(lambda path: header(path, tokens=2**63)),
    "a shard whose counts add up past 2^64": shard(
        lambda path: header(path, tokens=2**63 - 1, documents=2**64 - 1)
    ),
    "a shard of 2^61 documents": shard(lambda path: header(path, documents=2**61)),
    "a shard of no documents": shard(lambda path: header(path, documents=0)),
    "a shard of bytes of 2^32 - 1": shard(lambda path: header(path, itemsize=2**32 - 1)),
    "a shard of bytes of 0": shard(lambda path: header(path, itemsize=0)),
    "documents of a shard lead back": shard(
        lambda path: path.write_bytes(path.read_bytes()[:-16] + bytes(8) + path.read_bytes()[-8:])
    ),
    "a shard vouched for with ids beyond its vocabulary": data(
        lambda _, folder: reseal_data(folder, lambda m: m.update(vocab_size=100))
    ),
    "a vocabulary of 10^30 in a data manifest": data_manifest(
        lambda m: m.update(vocab_size=10**30)
    ),
    "counts in words in a data manifest": data_manifest(
        lambda m: train_shard(m).update(tokens="9")
    ),
    "negative counts in a data manifest": data_manifest(lambda m: train_shard(m).update(tokens=-9)),
    "a shard without end in a data manifest": data_manifest(
        lambda m: train_shard(m).update(bytes=10**30)
    ),
    # JSON that programs read differently
    "a key twice in config.json": model_file(
        "config.json", lambda path: add_json_text(path, '"hidden_size": 32')
    ),
    "a key twice in trainer_state.json": run_file(
        "trainer_state.json", lambda path: add_json_text(path, '"step": 0')
    ),
    "a key twice in a data manifest": data(
        lambda _, folder: add_json_text(folder / "manifest.json", '"vocab_size": 9')
    ),
    "NaN in config.json": model_file(
        "config.json", lambda path: add_json_text(path, '"attention_dropout_": NaN')
    ),
    "infinity in config.json": config(rms_norm_eps=float("inf")),
    "infinity in trainer_state.json": state(lambda s: s.update(tokens_seen=float("inf"))),
    "config.json 100,000 deep": model_file("config.json", put(_DEEP_JSON)),
    "generation_config.json 100,000 deep": model_file("generation_config.json", put(_DEEP_JSON)),
    "generation_config.json is a list": model_file("generation_config.json", put(b"[1]")),
    "trainer_state.json 100,000 deep": run_file("trainer_state.json", put(_DEEP_JSON)),
    "a data manifest 100,000 deep": data(
        lambda _, folder: (folder / "manifest.json").write_bytes(_DEEP_JSON)
    ),
    "a number of 10^5 digits in config.json": model_file(
        "config.json", lambda path: add_json_text(path, f'"n": {"9" * 10**5}')
    ),
    "trainer_state.json is a list": run_file("trainer_state.json", put(b"[]")),
    "a step in words": state(lambda s: s.update(step="many")),
    "a step below zero": state(lambda s: s.update(step=-5)),
    "a position below zero": state(lambda s: s["loader"].update(rows_seen=-5)),
    "a position in words": state(lambda s: s["loader"].update(rows_seen="far")),
    "no position at all": state(lambda s: s.pop("loader")),
    "a recipe in trainer_state.json that is none": state(lambda s: s.update(recipe=[1])),
    "data in trainer_state.json that are none": state(lambda s: s.update(data="data")),
}
