"""Commands that read a run's checkpoint while the run goes on, saves a newer one and deletes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import newest
from safetensors.torch import load_file

from firstlight.checkpoint import selection
from firstlight.checkpoint.checkpoint import load_trainer_state, verify_checkpoint
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.cli.main import main
from firstlight.conversion.convert import convert
from firstlight.errors import CheckpointError
from firstlight.evaluation.perplexity import evaluate, load_for_evaluation
from firstlight.generation.engine import load
from firstlight.lora.loading import base_identity
from firstlight.planner.plan.machine import find_machine, resolve_for
from firstlight.recipe import parse_recipe
from firstlight.sharing.card import read_facts
from firstlight.sharing.push import push
from firstlight.training.cooldown import cooldown_recipe
from firstlight.training.loop import train


class GoingRun:
    """A run that has two checkpoints, in turn: the older one is there until it is verified, and the
    newer one from then on."""

    def __init__(self, folder: Path, aside: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.older, self.newer = list_checkpoints(folder)
        self.copies = {path: aside / path.name for path in (self.older, self.newer)}
        for path, copy in self.copies.items():
            shutil.move(path, copy)

    def beside(self, read: Callable[[], Any]) -> Any:
        """Read with `read` while the run saves the newer checkpoint and deletes the older."""

        def verify(folder: Path) -> None:
            verify_checkpoint(folder)
            if folder == self.older:
                shutil.copytree(self.copies[self.newer], self.newer)
                shutil.rmtree(self.older)

        shutil.rmtree(self.newer, ignore_errors=True)
        shutil.copytree(self.copies[self.older], self.older)
        with self.patch.context() as patch:
            patch.setattr(selection, "verify_checkpoint", verify)
            result = read()
        assert list_checkpoints(self.folder) == [self.newer]
        return result


@pytest.fixture
def going_run(tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> GoingRun:
    recipe["schedule"] = {"kind": "constant", "max_steps": 2, "warmup_steps": 1}
    recipe["evaluation"]["every_steps"] = 1
    recipe["checkpoint"] = {"every_steps": 1, "keep_last": 2}
    aside = tmp_path / "aside"
    aside.mkdir()
    return GoingRun(train(recipe).run_folder, aside, monkeypatch)


def test_load_checkpoint_deleted_during_read_falls_back_to_newest(
    tmp_path: Path, recipe: dict[str, Any], going_run: GoingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run, newer = going_run.folder, going_run.newer
    going_run.beside(lambda: convert(run, tmp_path / "out"))
    expected = load_file(newer / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)

    capsys.readouterr()
    going_run.beside(lambda: main(["info", str(run), "--json"]))
    assert json.loads(capsys.readouterr().out)["folder"] == str(newer)

    assert going_run.beside(lambda: read_facts(run)).folder == newer
    assert going_run.beside(lambda: read_facts(run, best=True)).folder == newer
    assert going_run.beside(lambda: cooldown_recipe(run, 3))[1] == newer
    pushed = going_run.beside(lambda: push(run, "me/it", upload=False, out=tmp_path / "pushed"))
    assert pushed.step == 2

    planned, machine = parse_recipe({**recipe, "model": None}), find_machine("H100")
    resolved = going_run.beside(lambda: resolve_for(planned, machine, str(run)))
    assert resolved.model.hidden_size == recipe["model"]["hidden_size"]

    recipe["run"]["dir"] = str(tmp_path / "next")
    recipe["lora"] = {"rank": 2}
    going_run.beside(lambda: train(recipe, init_from=run))
    state = load_trainer_state(newest(tmp_path / "next"))
    assert state["lora_base"] == {
        "name": str(newer),
        "sha256": base_identity(newer),
        "lora": None,
    }


def test_load_checkpoint_deleted_between_file_opens_falls_back_to_newest(
    going_run: GoingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer, run = going_run.older, going_run.newer, going_run.folder

    def delete() -> None:
        if older.exists():
            shutil.copytree(going_run.copies[newer], newer)
            shutil.rmtree(older)

    # safetensors reads a file's header, and has torch open the file once more.
    shutil.copytree(going_run.copies[older], older)
    from_file, open_file = torch.UntypedStorage.from_file, os.open

    def deleted_before(*arguments: Any, **options: Any) -> Any:
        delete()
        return from_file(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "from_file", deleted_before)
        assert load(run, device="cpu").folder == newer

    shutil.rmtree(newer)
    shutil.copytree(going_run.copies[older], older)

    def deleted_after(path: Any, *arguments: Any, **options: Any) -> int:
        opened = open_file(path, *arguments, **options)
        if path == older / "manifest.json":
            delete()
        return opened

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", deleted_after)
        assert load(run, device="cpu").folder == newer


def test_evaluate_model_of_deleted_checkpoint_gives_same_result(
    going_run: GoingRun,
) -> None:
    before = going_run.beside(lambda: evaluate(going_run.folder, device="cpu"))
    loaded = load_for_evaluation(going_run.newer, "cpu")
    shutil.rmtree(going_run.newer)
    # Rows of 32 tokens, where the model's context has 64.
    assert evaluate(loaded, device="cpu") == before


def test_load_named_checkpoint_deleted_during_read_raises(
    recipe: dict[str, Any], going_run: GoingRun, capsys: pytest.CaptureFixture[str]
) -> None:
    older = going_run.older
    said = f"checkpoint {older} does not exist: a run deletes its older checkpoints"
    assert going_run.beside(lambda: main(["info", str(older)])) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"firstlight: error: {said}")
    assert line.endswith(f"use {going_run.folder} for its newest checkpoint")

    shutil.copytree(going_run.copies[older], older)
    cooldown, trunk = cooldown_recipe(older, 3)
    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match=f"^{said}"):
        train(cooldown, branch_from=trunk)
