"""Shards, checkpoints and runs of an earlier version (tests/earlier/README.md) can still be
used.
"""

from __future__ import annotations

import importlib.util
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from firstlight.data.loader import TokenLoader
from firstlight.data.packing import open_split
from firstlight.data.shards import read_manifest
from firstlight.evaluation.perplexity import evaluate
from firstlight.files.atomic import read_json
from firstlight.lora.loading import load_model
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train

_EARLIER = Path(__file__).parents[1] / "earlier"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """Import the script that wrote the files, for its recipes."""
    spec = importlib.util.spec_from_file_location("earlier_maker", _EARLIER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the files to a folder other than the one in which they were written."""
    with tarfile.open(_EARLIER / "earlier.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("name", ["text", "chat", "mix", "pairs"])
def test_earlier_run_is_resumed(earlier: Path, maker: ModuleType, name: str) -> None:
    recipe = maker.recipe(earlier, name, maker.data_of(earlier, name))
    cached = sorted((earlier / "cache").rglob("*.json"))
    train(recipe, resume=True)
    steps = read_json_lines(earlier / f"{name}-run" / "metrics.jsonl")
    losses = read_json(earlier / "losses.json")[name]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["train/loss"] for line in steps] == pytest.approx(losses, rel=1e-5)
    assert len(set(losses)) == 6
    # The starting model's reference log-probabilities are in the cache; the model itself no longer
    # exists.
    assert sorted((earlier / "cache").rglob("*.json")) == cached


@pytest.mark.parametrize("name, loss", [("text", 5.5972556), ("chat", 5.5923127)])
def test_earlier_checkpoint_is_loaded_and_evaluated(earlier: Path, name: str, loss: float) -> None:
    folder = earlier / f"{name}-run"
    assert load_model(folder / "checkpoints" / "step-00000003").tokenizer is not None
    assert evaluate(folder, earlier / name, device="cpu").loss == pytest.approx(loss, rel=1e-5)


def test_earlier_shards_yield_same_rows(earlier: Path) -> None:
    expected = {"text": (384, 10648995), "chat": (134, 3526984), "pairs": (64, 1387588)}
    found: dict[str, Any] = {}
    for name in expected:
        split = open_split(earlier / name, "train")
        with TokenLoader(split, 96, 4, 7, document_masking=True, workers=0) as loader:
            batch = loader.next_batch()
        places = torch.arange(1, 1 + batch.labels.numel()).view_as(batch.labels)
        valid = batch.labels != -100
        found[name] = (batch.num_valid, int((places * batch.input_ids * valid).sum()))
    assert found == expected


@pytest.mark.parametrize("name", ["text", "chat", "pairs"])
def test_earlier_sources_are_prepared_to_same_bytes(
    earlier: Path, maker: ModuleType, name: str
) -> None:
    maker.write_sources(earlier)
    before = earlier / "before"
    (earlier / name).rename(before)
    maker.prepare_one(earlier, name, Tokenizer.from_pretrained(before))
    names = sorted(path.name for path in before.iterdir())
    made = {path.name for path in (earlier / name).iterdir()}
    assert sorted(made - {"sources.json"}) == names  # a key added later
    for file in names:
        if file == "manifest.json":  # only added keys differ
            new, old = (read_manifest(folder) for folder in (earlier / name, before))
            assert known_part(new, old) == old
        elif not file.endswith("-examples.txt"):  # contains the paths of the sources
            assert (earlier / name / file).read_bytes() == (before / file).read_bytes(), file


def known_part(new: Any, old: Any) -> Any:
    """Return the part of `new` with the keys of `old`."""
    if not isinstance(old, dict):
        return new
    return {key: known_part(new[key], value) for key, value in old.items()}
