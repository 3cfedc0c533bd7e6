"""Tests of model folders with pickled weights, which are converted, or rejected if they contain
anything else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from firstlight.cli.main import main
from firstlight.conversion.convert import convert
from firstlight.errors import FirstlightError
from firstlight.models import GPT2Config, MoEConfig, build_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import file_tensors

BIN, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Write a model folder with safetensors: a GPT-2 with a tied head."""
    config = GPT2Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = build_model(config)
    model.init_weights(torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("pickled") / "sound"
    folder.mkdir()
    for name, text in model_files(config, tokenizer).items():
        (folder / name).write_text(text, encoding="utf-8")
    safetensors.torch.save_file(file_tensors(model), folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """The same folder without weights."""
    copy = Path(shutil.copytree(sound, tmp_path / "source"))
    (copy / "model.safetensors").unlink()
    return copy


def weights(sound: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(sound / "model.safetensors")


def save_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    weight_map = {name: (ONE, TWO)[i % 2] for i, name in enumerate(names)}
    for file in (ONE, TWO):
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        torch.save(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def with_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}


def of_the_decoder_alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as saved by GPT2Model, with the masks that old files contain."""
    inner = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return {**inner, "h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8)}


@pytest.mark.parametrize(
    "save",
    [
        lambda folder, tensors: torch.save(tensors, folder / BIN),
        lambda folder, tensors: torch.save(with_tied_head(tensors), folder / BIN),
        lambda folder, tensors: torch.save(
            of_the_decoder_alone(tensors), folder / BIN, _use_new_zipfile_serialization=False
        ),
        save_shards,
    ],
    ids=["one file", "tied head", "before torch 1.6", "shards"],
)
def test_convert_pickled_weights_gives_same_safetensors(
    sound: Path, folder: Path, tmp_path: Path, save: Callable[[Path, dict[str, Tensor]], object]
) -> None:
    save(folder, weights(sound))
    result = convert(folder, tmp_path / "out")
    assert (result.program, result.dtype, result.largest_difference) == ("Hugging Face", "f32", 0.0)
    found, expected = weights(tmp_path / "out"), weights(sound)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (sound / name).read_bytes()


def test_pickled_model_in_other_commands_suggests_convert(
    sound: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(weights(sound), folder / BIN)
    advice = f"`firstlight convert {folder} --out DIR`"
    assert main(["info", str(folder)]) == 1
    assert advice in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "a"]) == 1
    assert advice in capsys.readouterr().err
    with pytest.raises(FirstlightError, match=f"one file of a model: use its folder, {folder}"):
        convert(folder / BIN, folder / "out")


def test_convert_pickled_stacked_experts_writes_each_expert_separately(
    folder: Path, tmp_path: Path
) -> None:
    config = MoEConfig(
        vocab_size=320, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=3
    )
    model = build_model(config)
    model.init_weights(torch.Generator().manual_seed(1))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    torch.save(model.state_dict(), folder / BIN)
    convert(folder, tmp_path / "out")
    found, expected = weights(tmp_path / "out"), file_tensors(model)
    assert found.keys() == expected.keys()
    assert "model.layers.0.block_sparse_moe.experts.2.w3.weight" in found
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def changed(**tensors: Any) -> Callable[[Path, dict[str, Tensor]], object]:
    """Return a function that saves the weights with some tensors replaced; "__" stands for a
    dot."""
    other = {name.replace("__", "."): value for name, value in tensors.items()}
    return lambda folder, sound: torch.save({**sound, **other}, folder / BIN)


def cut(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, folder / BIN)
    content = (folder / BIN).read_bytes()
    (folder / BIN).write_bytes(content[: len(content) // 2])


def one_shard_gone(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_shards(folder, tensors)
    (folder / TWO).unlink()


def shards_changed_places(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_shards(folder, tensors)
    (folder / ONE).rename(folder / "x")
    (folder / TWO).rename(folder / ONE)
    (folder / "x").rename(folder / TWO)


def shard_elsewhere(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_shards(folder, tensors)
    path = folder / INDEX
    path.write_text(path.read_text().replace(TWO, "../" + TWO))


@pytest.mark.parametrize(
    "save, message",
    [
        (cut, rf"{BIN} is damaged, truncated or not a checkpoint with only weights"),
        (one_shard_gone, rf"{TWO} is missing, although .* lists it"),
        (shards_changed_places, rf"contains tensor .*, which {INDEX} places in {TWO}"),
        (shard_elsewhere, rf"{INDEX} names a file outside its folder: \.\./{TWO}"),
        (
            lambda folder, _: (folder / INDEX).write_text("[]"),
            f"{INDEX} does not have a weight_map",
        ),
        (lambda folder, _: torch.save([1], folder / BIN), "contains a list, not a model's"),
        (
            lambda folder, sound: torch.save({"state_dict": sound}, folder / BIN),
            "'state_dict' is not a plain named tensor, so this is",
        ),
        (
            # A single number, repeated in 320 rows.
            changed(transformer__wte__weight=torch.zeros(1, 1).expand(320, 32)),
            r"'transformer\.wte\.weight' is not a plain named tensor, so this is",
        ),
        (
            changed(transformer__wte__weight=torch.zeros(320, 32, device="meta")),
            r"contains more than weights \(torch\._utils\._rebuild_meta_tensor_no_storage\)",
        ),
        (
            changed(transformer__ln_f__weight=torch.ones(31)),
            r"misshapen tensors: transformer\.ln_f\.weight is \[31\], expected \[32\]",
        ),
        (
            changed(transformer__ln_f__weight=torch.ones(32, dtype=torch.int8)),
            r"quantised tensors \(transformer\.ln_f\.weight \(int8\)",
        ),
        (changed(extra=torch.ones(1)), "has unknown tensors: extra"),
        (
            changed(lm_head__weight=torch.zeros(320, 32)),
            r"ties lm_head\.weight to transformer\.wte\.weight, but their values differ",
        ),
        (changed(transformer__ln_f__weight=torch.full((32,), torch.nan)), "NaN or infinity"),
        (
            lambda folder, _: torch.save({"a": bytearray(5)}, folder / BIN),
            r"contains more than weights \(\S+\.bytearray\)",
        ),
        (
            lambda folder, _: torch.save(torch.nn.Linear(2, 2), folder / BIN),
            r"contains more than weights \(torch\.nn\.modules\.linear\.Linear\)",
        ),
    ],
)
def test_pickled_file_without_model_weights_raises(
    sound: Path,
    folder: Path,
    tmp_path: Path,
    save: Callable[[Path, dict[str, Tensor]], object],
    message: str,
) -> None:
    save(folder, weights(sound))
    with pytest.raises(FirstlightError, match=message) as caught:
        convert(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
