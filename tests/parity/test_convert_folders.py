"""Folders written by `convert`, loaded in transformers: every tensor is used, and the logits are
the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from drawn import NAMES, VOCABULARY, draw, hf_model, load_in_transformers, some_ids
from torch import Tensor, nn

from builders import slow_but
from firstlight.conversion.convert import convert
from firstlight.models import FAMILIES

#: Keys in folders of the hub that firstlight does not know.
_UNKNOWN = {"quantum": {"spin": 0.5}, "nothing": None, "name": "früh", "big": 10**20}


def saved(folder: Path, family: str, seed: int, **options: Any) -> Any:
    """Return a transformers model for a seed, and the folder in which it is saved, with additional
    keys.
    """
    model = hf_model(draw(family, seed), seed)
    model.save_pretrained(folder, **options)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if not FAMILIES[family].spec.requires_known_keys:
        content |= _UNKNOWN
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {n: t for file in files for n, t in safetensors.torch.load_file(file).items()}


def json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@torch.no_grad()
def assert_equal_models(expected: nn.Module, folder: Path) -> None:
    ids = some_ids(0)
    logits = expected(ids).logits
    assert logits.abs().max() > 0.05, "the comparison would say nothing"
    found = load_in_transformers(folder)(ids).logits
    assert torch.equal(found, logits)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", NAMES)
def test_convert_transformers_folder_keeps_files_unchanged(
    family: str, seed: int, tmp_path: Path
) -> None:
    model = saved(tmp_path / "source", family, seed)
    result = convert(tmp_path / "source", tmp_path / "out")
    assert result.largest_difference == 0.0
    expected, found = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {t.dtype for t in found.values()} == {torch.float32}
    for name in ("config.json", "generation_config.json"):
        assert json_of(tmp_path / "out" / name) == json_of(tmp_path / "source" / name)
    assert_equal_models(model, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("family", NAMES)
def test_convert_transformers_shards_become_one_file(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "source", family, 1, max_shard_size="1KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").is_file()
    convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert_equal_models(model, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", NAMES)
def test_convert_rounded_model_loads_in_its_dtype(family: str, dtype: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "source", family, 2)
    result = convert(tmp_path / "source", tmp_path / "out", dtype=dtype)
    found = load_in_transformers(tmp_path / "out")
    kind = getattr(torch, dtype)
    expected = dict(model.named_parameters())
    # transformers converts some parameters of gpt-oss to fp32 that are fp16 in the file.
    wide = {n for n in expected if family == "gpt_oss" and "norm" in n and dtype == "float16"}
    for name, parameter in found.named_parameters():
        assert parameter.dtype == (torch.float32 if name in wide else kind)
        assert torch.equal(parameter.to(kind), expected[name].to(kind)), name
    content = json_of(tmp_path / "out" / "config.json")
    named = {"dtype": dtype, "torch_dtype": dtype}
    assert content == {**json_of(tmp_path / "source" / "config.json"), **named}
    # The way back is exact.
    again = convert(tmp_path / "out", tmp_path / "again", dtype="f32")
    assert again.largest_difference == 0.0
    assert result.largest_difference > 0


@pytest.mark.parametrize("family", slow_but(("gpt2", "llama", "gemma2", "mixtral"), NAMES))
def test_convert_rounding_stays_within_tolerance(family: str, tmp_path: Path) -> None:
    """Tested on many models, including those whose routers then choose other experts."""
    noted = 0
    for seed in range(8):
        saved(tmp_path / f"{seed}", family, seed)
        for dtype in ("f16", "bf16"):
            result = convert(tmp_path / f"{seed}", tmp_path / f"{dtype}-{seed}", dtype=dtype)
            noted += any("different experts" in note for note in result.notes)
    assert noted == 0 or draw(family, 0).expert_count


def test_random_models_have_vocabulary_of_test_ids() -> None:
    assert all(draw(family, 0).vocab_size == VOCABULARY for family in NAMES)
