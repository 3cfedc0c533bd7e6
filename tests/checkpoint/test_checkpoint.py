from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from firstlight.checkpoint import selection
from firstlight.checkpoint.checkpoint import (
    OPTIMIZER_NAME,
    STATE_NAME,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from firstlight.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST_NAME,
    sealed,
)
from firstlight.checkpoint.retention import CheckpointConfig, prune_checkpoints
from firstlight.checkpoint.selection import (
    list_checkpoints,
    newest_checkpoint,
    resolve_model_folder,
)
from firstlight.errors import CheckpointError, StorageError
from firstlight.files import disk as seam
from firstlight.files.disk import Disk
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.stored import WEIGHTS_NAME

_FILES = [CONFIG_NAME, WEIGHTS_NAME, OPTIMIZER_NAME, STATE_NAME]


def content(step: int) -> Checkpoint:
    """Return a small checkpoint in which every value depends on the step."""
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(
        files={CONFIG_NAME: json.dumps({"model_type": "llama", "of_step": step})},
        model={"a.weight": torch.randn(4, 3, generator=generator), "b": torch.full((5,), step)},
        optimizer={
            "a.weight.step": torch.tensor(float(step)),
            "a.weight.exp_avg": torch.randn(4, 3, generator=generator),
            "rng.cpu": torch.randint(256, (64,), generator=generator, dtype=torch.uint8),
        },
        trainer_state={"step": step, "tokens_seen": 10 * step, "loader": {"rows_seen": step}},
    )


def save(run: Path, *steps: int) -> list[Path]:
    return [save_checkpoint(run, step, content(step)) for step in steps]


def same_tensors(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def is_of_step(folder: Path, step: int) -> bool:
    """Return True if a checkpoint passes verification and equals `content(step)`."""
    verify_checkpoint(folder)
    loaded, expected = load_checkpoint(folder), content(step)
    return (
        same_tensors(loaded.model, expected.model)
        and same_tensors(loaded.optimizer, expected.optimizer)
        and loaded.trainer_state == expected.trainer_state
        and (folder / CONFIG_NAME).read_text(encoding="utf-8") == expected.files[CONFIG_NAME]
    )


def flip(path: Path, position: int, mask: int = 1) -> None:
    """Flip bits of one byte."""
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= mask
    path.write_bytes(damaged)


def names(run: Path) -> list[str]:
    """Return all paths next to and below the checkpoints, including hidden ones."""
    return sorted(path.name for path in (run / CHECKPOINTS).iterdir())


# --- saving and loading ----------------------------------------------------------------------


def test_checkpoint_saved_and_loaded_is_unchanged(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 7)
    assert folder == tmp_path / CHECKPOINTS / "step-00000007"
    assert is_of_step(folder, 7)
    assert sorted(os.listdir(folder)) == sorted([*_FILES, MANIFEST_NAME])


def test_checkpoint_files_have_permissions_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("made as any file is")
    (folder,) = save(tmp_path, 7)
    expected = (tmp_path / "plain").stat().st_mode
    assert {path.name: path.stat().st_mode for path in folder.iterdir()} == dict.fromkeys(
        [*_FILES, MANIFEST_NAME], expected
    )


def test_manifest_lists_every_file_and_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, bytes]] = []

    class Looking(Disk):
        def create(self, path: Path) -> FileIO:
            if path.name == MANIFEST_NAME:
                seen.append({file.name: file.read_bytes() for file in path.parent.iterdir()})
            return super().create(path)

    monkeypatch.setattr(seam, "disk", Looking())
    (folder,) = save(tmp_path, 3)
    (before,) = seen
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    manifest = json.loads(after.pop(MANIFEST_NAME))
    assert after == before
    assert manifest["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in after.items()
    }


def test_tensor_files_equal_those_of_safetensors(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 3)
    for name, tensors in (
        (WEIGHTS_NAME, content(3).model),
        (OPTIMIZER_NAME, content(3).optimizer),
    ):
        expected = safetensors.torch.save(dict(tensors), {"format": "pt"})
        assert (folder / name).read_bytes() == expected


def test_checkpoint_is_synced_before_final_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    inodes: list[set[int]] = []
    fsync, rename = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def spy_rename(source: Path, target: Path) -> None:
        inodes.append({path.stat().st_ino for path in [source, *source.iterdir()]})
        assert inodes[-1] <= synced
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_rename)
    (folder,) = save(tmp_path, 3)
    assert len(inodes) == 1
    assert folder.parent.stat().st_ino in synced


def test_loaded_tensors_survive_deletion_of_their_file(tmp_path: Path) -> None:
    # They may be memory-mapped, so overwriting the file in place would change them.
    (folder,) = save(tmp_path, 4)
    loaded = load_checkpoint(folder)
    save_checkpoint(tmp_path, 4, content(5))
    shutil.rmtree(folder)
    assert same_tensors(loaded.model, content(4).model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_save_non_finite_weights_raises_and_publishes_nothing(tmp_path: Path, value: float) -> None:
    save(tmp_path, 4)
    good = content(8)
    weights = dict(good.model)
    weights["a.weight"] = weights["a.weight"].clone()
    weights["a.weight"][3, 2] = value
    bad = Checkpoint(good.files, weights, good.optimizer, good.trainer_state)
    with pytest.raises(CheckpointError, match=r"step 8: tensor a\.weight is not finite"):
        save_checkpoint(tmp_path, 8, bad)
    assert names(tmp_path) == ["step-00000004"]


# --- the newest checkpoint -----------------------------------------------------------------


def test_list_checkpoints_missing_folder_is_empty(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert newest_checkpoint(tmp_path) == (None, [])


def test_list_checkpoints_orders_steps_numerically(tmp_path: Path) -> None:
    folders = save(tmp_path, 5, 99_999_999, 100_000_000)
    assert list_checkpoints(tmp_path) == folders
    assert newest_checkpoint(tmp_path) == (folders[2], [])


def test_list_checkpoints_ignores_incomplete_and_foreign_folders(tmp_path: Path) -> None:
    old, incomplete = save(tmp_path, 4, 8)
    (incomplete / MANIFEST_NAME).unlink()
    shutil.copytree(old, old.with_name(".tmp-step-00000012-abcdef01"))
    shutil.copytree(old, old.with_name("step-00000016.bak"))
    shutil.copytree(old, old.with_name("step-x"))
    old.with_name("step-00000020").write_text("a file")
    assert list_checkpoints(tmp_path) == [old]
    assert newest_checkpoint(tmp_path) == (old, [])


@pytest.mark.parametrize("name", [*_FILES, MANIFEST_NAME])
@pytest.mark.parametrize("damage", ["first byte", "middle byte", "last byte", "short", "long"])
def test_newest_checkpoint_damaged_file_is_named_and_older_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    older, newer = save(tmp_path, 4, 8)
    path = newer / name
    size = path.stat().st_size
    if damage == "short":
        os.truncate(path, size - 1)
    elif damage == "long":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        flip(path, {"first byte": 0, "middle byte": size // 2, "last byte": size - 1}[damage])
    found, problems = newest_checkpoint(tmp_path)
    assert found == older
    assert len(problems) == 1
    assert str(newer) in problems[0]
    if name != MANIFEST_NAME:
        assert str(path) in problems[0]
    assert is_of_step(older, 4)


@pytest.mark.parametrize("name", _FILES)
def test_newest_checkpoint_names_missing_file_and_returns_older(tmp_path: Path, name: str) -> None:
    older, newer = save(tmp_path, 4, 8)
    (newer / name).unlink()
    assert newest_checkpoint(tmp_path) == (older, [f"{newer / name} is missing"])


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_manifest_with_any_changed_byte_raises_checkpoint_error(tmp_path: Path, mask: int) -> None:
    (folder,) = save(tmp_path, 8)
    path = folder / MANIFEST_NAME
    original = path.read_bytes()
    for position in range(len(original)):
        flip(path, position, mask)
        with pytest.raises(CheckpointError):
            verify_checkpoint(folder)
        path.write_bytes(original)
    assert is_of_step(folder, 8)


def reseal(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change a manifest, update its sha256 accordingly, and return the old content."""
    before = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    now = {key: value for key, value in (before | changes).items() if key != "sha256"}
    (folder / MANIFEST_NAME).write_text(sealed(now), encoding="utf-8")
    return dict(before)


def test_trainer_state_step_differing_from_manifest_raises(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 8)
    reseal(folder, step=9)
    moved = folder.rename(folder.with_name("step-00000009"))
    with pytest.raises(CheckpointError, match=r"trainer_state.json is for step 8, .* for step 9"):
        verify_checkpoint(moved)


def test_newest_checkpoint_pruned_during_check_returns_newer_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4, 8)
    verified = verify_checkpoint

    def pruned(folder: Path) -> None:
        """Save two more checkpoints before the first file is read."""
        if folder.name == "step-00000008":
            newest = save(tmp_path, 12, 16)[-1]
            prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=1, keep_best=0))
        verified(folder)

    monkeypatch.setattr(selection, "verify_checkpoint", pruned)
    newest, problems = newest_checkpoint(tmp_path)
    assert newest is not None
    assert (newest.name, problems) == ("step-00000016", [])


def test_read_model_folder_pruned_during_read_uses_newer_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 4, 8)
    read: list[str] = []

    def reading(folder: Path) -> bytes:
        read.append(folder.name)
        if folder.name == "step-00000008":
            newest = save(tmp_path, 12)[-1]
            prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=1, keep_best=0))
        return (folder / WEIGHTS_NAME).read_bytes()

    assert selection.read_model_folder(tmp_path, reading)
    assert read == ["step-00000008", "step-00000012"]
    # For a folder that still exists, the error describes the actual problem.
    (tmp_path / "checkpoints" / "step-00000012" / "other").mkdir()
    with pytest.raises(OSError, match="other"):
        selection.read_model_folder(tmp_path, lambda folder: (folder / "other").read_bytes())


def test_read_model_folder_pruned_before_optional_files_uses_newer_checkpoint(
    tmp_path: Path,
) -> None:
    save(tmp_path, 4, 8)

    def weights_and_tokenizer(folder: Path) -> tuple[str, bool]:
        (folder / WEIGHTS_NAME).read_bytes()
        if folder.name == "step-00000008":
            newest = save(tmp_path, 12)[-1]
            prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=1, keep_best=0))
        return folder.name, (folder / CONFIG_NAME).is_file()

    assert selection.read_model_folder(tmp_path, weights_and_tokenizer) == (
        "step-00000012",
        True,
    )


_ENTRY = {"bytes": 3, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"format": "other"}, "is not the manifest of a checkpoint"),
        ({"version": 1}, "has version 1, but this version of firstlight reads version 2"),
        ({"version": "2"}, "has version 2"),
        ({"step": 9}, "contains step 9, which does not match its name"),
        ({"step": True}, "lacks required keys of a checkpoint's manifest"),
        ({"step": None}, "lacks required keys"),
        ({"sequence": 0}, "lacks required keys"),
        ({"sequence": "1"}, "lacks required keys"),
        ({"parent": -1}, "lacks required keys"),
        ({"val_loss": 3}, "lacks required keys"),
        ({"val_loss": "low"}, "lacks required keys"),
        ({"files": None}, "lacks required keys"),
        ({"files": []}, "lacks required keys"),
        ({"files": {CONFIG_NAME: 3}}, "lacks required keys"),
        ({"files": {CONFIG_NAME: {}}}, "lacks required keys"),
        ({"files": {CONFIG_NAME: {"bytes": "3", "sha256": ""}}}, "lacks required keys"),
        ({"files": {CONFIG_NAME: _ENTRY}}, "does not list model.safetensors"),
    ],
)
def test_manifest_with_invalid_structure_raises_checkpoint_error(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    (folder,) = save(tmp_path, 8)
    reseal(folder)
    assert is_of_step(folder, 8)
    reseal(folder, **changes)
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", "null", "3", '{"format": "firstlight-checkpoint", "format": "x"}', "[" * 9999],
)
def test_manifest_that_cannot_be_parsed_raises_checkpoint_error(
    tmp_path: Path, content: str
) -> None:
    (folder,) = save(tmp_path, 8)
    (folder / MANIFEST_NAME).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "", ".", "..", ".hidden", "a/b", "a\\b", "a\0", "a\n", "é", "~"],
)
def test_manifest_listing_file_outside_folder_raises_checkpoint_error(
    tmp_path: Path, name: str
) -> None:
    (folder,) = save(tmp_path, 8)
    (folder.parent / "secret").write_text("abc")
    before = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
    entry = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    reseal(folder, files={**before, name: entry})
    with pytest.raises(CheckpointError, match="lists a file outside the checkpoint"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", [*_FILES, MANIFEST_NAME])
@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_checkpoint_with_non_regular_file_raises_without_reading(
    tmp_path: Path, name: str, what: str
) -> None:
    (folder,) = save(tmp_path, 8)
    path = folder / name
    path.rename(tmp_path / "elsewhere")
    if what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)  # Opening it would block forever.
    with pytest.raises(CheckpointError, match="is not a regular file"):
        verify_checkpoint(folder)


def test_manifest_above_size_limit_raises_without_reading(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 8)
    os.truncate(folder / MANIFEST_NAME, 1 << 40)
    with pytest.raises(CheckpointError, match="is longer than the"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("state", ["[]", "3", "{", '{"step": 1, "step": 2}'])
def test_trainer_state_not_an_object_raises_checkpoint_error(tmp_path: Path, state: str) -> None:
    (folder,) = save(tmp_path, 8)
    (folder / STATE_NAME).write_text(state)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        load_checkpoint(folder, verify=False)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is damaged"):
        load_checkpoint(folder)


def test_checkpoint_copied_to_other_name_is_valid_but_not_newest(tmp_path: Path) -> None:
    """A user may copy the best checkpoint to another name."""
    (folder,) = save(tmp_path, 8)
    shutil.copytree(folder, tmp_path / "best")
    assert is_of_step(tmp_path / "best", 8)
    shutil.copytree(folder, folder.with_name("step-00000012"))
    assert newest_checkpoint(tmp_path)[0] == folder


def test_newest_checkpoint_all_damaged_raises_and_names_each(tmp_path: Path) -> None:
    folders = save(tmp_path, 4, 8)
    for folder in folders:
        flip(folder / WEIGHTS_NAME, -1)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be used") as caught:
        newest_checkpoint(tmp_path)
    assert all(str(folder / WEIGHTS_NAME) in str(caught.value) for folder in folders)


# --- model selection --------------------------------------------------------------------


def test_resolve_model_folder_run_uses_newest_good_checkpoint_and_reports_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = save(tmp_path, 4, 8)
    assert resolve_model_folder(tmp_path) == newer
    assert capsys.readouterr() == ("", "")
    flip(newer / WEIGHTS_NAME, -1)
    assert resolve_model_folder(tmp_path) == older
    out, err = capsys.readouterr()
    assert out == ""
    assert str(newer / WEIGHTS_NAME) in err


def test_resolve_model_folder_damaged_checkpoint_raises(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 4)
    assert resolve_model_folder(folder) == folder
    flip(folder / OPTIMIZER_NAME, -1)
    with pytest.raises(CheckpointError, match="damaged"):
        resolve_model_folder(folder)


def test_resolve_model_folder_run_without_complete_checkpoint_raises(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 4)
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        resolve_model_folder(tmp_path)


# --- pruning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [1, 2, 3, 99])
def test_prune_keeps_newest_checkpoints(tmp_path: Path, keep_last: int) -> None:
    for step in (4, 8, 12, 16):
        (newest,) = save(tmp_path, step)
        prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=keep_last, keep_best=0))
        kept = list_checkpoints(tmp_path)
        assert len(kept) == min(keep_last, step // 4)
        assert is_of_step(kept[-1], step)


def test_prune_folder_taken_over_by_other_run_deletes_nothing(tmp_path: Path) -> None:
    def gone() -> None:
        raise CheckpointError("taken over")

    *_, newest = save(tmp_path, 4, 8)
    with pytest.raises(CheckpointError, match="taken over"):
        prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=1, keep_best=0), gone)
    assert names(tmp_path) == ["step-00000004", "step-00000008"]


def test_prune_after_rollback_keeps_new_checkpoint_and_removes_damaged(
    tmp_path: Path,
) -> None:
    # Sorting by step alone would keep the damaged checkpoint 12 and delete the valid 8.
    save(tmp_path, 4, 12, 16)
    for step in (12, 16):
        flip(tmp_path / CHECKPOINTS / f"step-{step:08d}" / WEIGHTS_NAME, -1)
    found, problems = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.name, len(problems)) == ("step-00000004", 2)
    newest = save_checkpoint(tmp_path, 8, content(8), after=4)
    prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=1, keep_best=0))
    assert names(tmp_path) == ["step-00000008"]
    assert is_of_step(tmp_path / CHECKPOINTS / "step-00000008", 8)


@pytest.mark.parametrize("damage", ["flipped", "incomplete", "empty"])
def test_save_same_step_again_replaces_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    (folder,) = save(tmp_path, 8)
    if damage == "flipped":
        flip(folder / WEIGHTS_NAME, -1)
    elif damage == "incomplete":
        (folder / MANIFEST_NAME).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    save(tmp_path, 8)
    assert is_of_step(folder, 8)
    assert newest_checkpoint(tmp_path) == (folder, [])
    prune_checkpoints(tmp_path, folder, CheckpointConfig(keep_last=9, keep_best=0))
    assert names(tmp_path) == ["step-00000008"]


def test_prune_removes_leftovers_of_killed_saves(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 4)
    shutil.copytree(folder, folder.with_name(".tmp-step-00000008-abcdef01"))
    folder.with_name(".tmp-file").write_text("x")
    mine = folder.with_name("notes.txt")
    mine.write_text("not ours to delete")
    prune_checkpoints(tmp_path, folder, CheckpointConfig(keep_last=1, keep_best=0))
    assert names(tmp_path) == ["notes.txt", "step-00000004"]


# --- disk errors ---------------------------------------------------------------------


class Refusal:
    """Disk that passes on a given number of calls and is full afterwards."""

    def __init__(self, passes: int) -> None:
        self.calls, self.passes = 0, passes

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.passes + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return refusing


@pytest.mark.parametrize("name", ["make_folder", "create", "write", "sync", "rename"])
@pytest.mark.parametrize("replacing", [False, True])
def test_save_on_full_disk_at_any_call_keeps_only_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replacing: bool
) -> None:
    for passes in itertools.count():
        run = tmp_path / str(passes)
        older, *_ = folders = save(run, *([4, 8] if replacing else [4]))
        if replacing:
            flip(folders[1] / WEIGHTS_NAME, -1)
        refusal = Refusal(passes)
        with monkeypatch.context() as patch:
            patch.setattr(seam.disk, name, refusal.around(getattr(seam.disk, name)))
            message = ""
            try:
                save(run, 8)
            except StorageError as problem:
                message = str(problem)
        refused = refusal.calls > passes
        assert ("the disk is full" in message) == refused
        found, _ = newest_checkpoint(run)
        assert found is not None
        assert is_of_step(found, 4 if found == older else 8)
        assert is_of_step(older, 4)
        assert [entry for entry in names(run) if not entry.startswith("step-")] == []
        if not refused:
            assert passes >= 1, f"{name} is never called"
            assert found.name == "step-00000008"
            break


@pytest.mark.parametrize("name", _FILES)
def test_manifest_missing_required_file_raises_checkpoint_error(tmp_path: Path, name: str) -> None:
    (folder,) = save(tmp_path, 4)
    files = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    del files[name]
    reseal(folder, files=files)
    with pytest.raises(CheckpointError, match=re.escape(f"does not list {name}")):
        verify_checkpoint(folder)
