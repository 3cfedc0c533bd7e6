"""Tests that files and folders appear complete or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from firstlight.errors import FirstlightError, InputError, StorageError, describe_os_error
from firstlight.files import disk as seam
from firstlight.files.atomic import (
    make_folder,
    new_folder,
    read_json,
    remove_file,
    remove_folder,
    remove_leftovers,
    replacing,
    require_free,
    require_writable,
    sha256_of,
    storage_errors,
    write_file,
    write_json,
    write_probe,
)
from firstlight.files.disk import AppendedFile, Disk, HashedFile, OutputFile


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(
    path: Path, name: str = "file", *, replace: bool = False, then: Callable[[], Any] = list
) -> None:
    """Write a folder with one file, and call `then` before the folder is complete."""
    with new_folder(path, replace=replace) as folder:
        (folder / name).write_text("content")
        then()


def test_write_file_creates_parents_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "text.txt"
    write_file(path, "größer\r\n")
    assert path.read_bytes() == "größer\r\n".encode()
    write_file(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert names(path.parent) == ["text.txt"]


@pytest.mark.parametrize("refused", ["create", "write", "sync", "rename"])
def test_write_file_on_full_disk_keeps_old_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    path = tmp_path / "kept.json"
    write_file(path, "old")
    monkeypatch.setattr(seam.disk, refused, full_disk)
    with pytest.raises(StorageError, match="the disk is full"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["kept.json"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError, SystemExit])
def test_write_file_interrupted_keeps_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    def interrupted(*_: Any) -> None:
        raise failure

    path = tmp_path / "kept.json"
    write_file(path, "old")
    monkeypatch.setattr(seam.disk, "sync", interrupted)
    with pytest.raises(failure):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["kept.json"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the disk's operations, in order."""
    order: list[str] = []

    class Recorded(Disk):
        def sync(self, file: FileIO) -> None:
            order.append("sync file")
            super().sync(file)

        def sync_folder(self, path: Path) -> None:
            order.append("sync folder")
            super().sync_folder(path)

        def rename(self, source: Path, target: Path) -> None:
            order.append("rename")
            super().rename(source, target)

    monkeypatch.setattr(seam, "disk", Recorded())
    return order


def test_write_file_syncs_before_rename(tmp_path: Path, disk: list[str]) -> None:
    write_file(tmp_path / "file", "content")
    assert disk == ["sync file", "rename", "sync folder"]


def test_new_folder_syncs_before_rename(tmp_path: Path, disk: list[str]) -> None:
    fill(tmp_path / "out", then=lambda: disk.clear())
    assert disk == ["sync file", "sync folder", "rename", "sync folder"]


def test_new_folder_syncs_nested_folders(tmp_path: Path, disk: list[str]) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").mkdir()
        (folder / "a" / "file").write_text("content")
        disk.clear()
    assert disk == ["sync file", "sync folder", "sync folder", "rename", "sync folder"]


def test_new_folder_does_not_sync_files_twice(tmp_path: Path, disk: list[str]) -> None:
    with new_folder(tmp_path / "out", synced=True) as folder:
        disk.clear()
        with OutputFile(folder / "file") as file:
            file.write(b"content")
    assert disk == ["sync file", "sync folder", "rename", "sync folder"]


def test_created_folders_are_synced_from_outside_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []

    class Recorded(Disk):
        def make_folder(self, path: Path) -> None:
            calls.append(("make", path.name))
            super().make_folder(path)

        def sync_folder(self, path: Path) -> None:
            calls.append(("sync", path.name))
            super().sync_folder(path)

    monkeypatch.setattr(seam, "disk", Recorded())
    make_folder(tmp_path / "a" / "b")
    assert calls == [("make", "a"), ("sync", tmp_path.name), ("make", "b"), ("sync", "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(calls) == 4


def test_write_json_rejects_values_outside_json(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"ä": [1, None, 0.1]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ä": [1, None, 0.1]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"ä": [1, None, 0.1]}


def test_new_folder_appears_complete(tmp_path: Path) -> None:
    path = tmp_path / "a" / "out"
    with new_folder(path) as folder:
        (folder / "file").write_text("content")
        assert folder.parent == path.parent
        assert not path.exists()
    assert (path / "file").read_text() == "content"
    assert names(path.parent) == ["out"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_new_folder_failure_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    def fail_half_way() -> None:
        assert len(names(tmp_path / "a" / "b")) == 1
        raise failure

    with pytest.raises(failure):
        fill(tmp_path / "a" / "b" / "out", then=fail_half_way)
    assert names(tmp_path) == []


def test_new_folder_keeps_parents_filled_by_others(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        (tmp_path / "a" / "theirs").write_text("kept")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fill(tmp_path / "a" / "b" / "out", then=fail_half_way)
    assert names(tmp_path / "a") == ["theirs"]


@pytest.mark.parametrize("refused", ["sync", "sync_folder", "rename"])
@pytest.mark.parametrize("replace", [False, True])
def test_new_folder_full_disk_at_end_keeps_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, replace: bool
) -> None:
    path = tmp_path / "out"
    if replace:
        path.mkdir()
        (path / "old").write_text("old")
    with pytest.raises(StorageError, match="the disk is full"):
        fill(path, replace=replace, then=lambda: monkeypatch.setattr(seam.disk, refused, full_disk))
    assert names(tmp_path) == (["out"] if replace else [])
    if replace:
        assert names(path) == ["old"]


def test_new_folder_failed_second_rename_restores_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").write_text("old")
    rename = seam.disk.rename
    calls: list[Path] = []

    def fails_once(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            full_disk()
        rename(source, target)

    monkeypatch.setattr(seam.disk, "rename", fails_once)
    with pytest.raises(StorageError):
        fill(path, "new", replace=True)
    assert len(calls) == 3
    assert names(path) == ["old"]
    assert names(tmp_path) == ["out"]


def test_new_folder_can_keep_old_folder_under_another_name(tmp_path: Path) -> None:
    path, aside = tmp_path / "out", tmp_path / "old"
    for name in ("first", "second"):
        with new_folder(path, replace=True, aside=aside) as folder:
            (folder / name).write_text("content")
        assert names(path) == [name]
    assert names(aside) == ["first"]
    assert names(tmp_path) == ["old", "out"]


def test_new_folder_replacement_leaves_only_new_content(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").write_text("old")
    seen: list[str] = []
    fill(path, "new", replace=True, then=lambda: seen.extend(names(path)))
    assert seen == ["old"]
    assert names(path) == ["new"]
    assert names(tmp_path) == ["out"]


def test_new_folder_onto_non_empty_folder_raises_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    fill(path, "first")
    with pytest.raises(StorageError):
        fill(path, "second")
    assert names(path) == ["first"]
    assert names(tmp_path) == ["out"]


def test_new_folder_failure_removes_created_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = seam.disk.make_folder

    def fails_below(path: Path) -> None:
        if path.name.startswith(".tmp-"):
            assert path.parent.is_dir()
            full_disk()
        make(path)

    monkeypatch.setattr(seam.disk, "make_folder", fails_below)
    with pytest.raises(StorageError):
        fill(tmp_path / "a" / "b" / "out")
    assert names(tmp_path) == []


def test_new_folder_link_to_empty_folder_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "disk" / "target").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "target")
    with new_folder(link) as folder:
        assert folder.parent == (tmp_path / "disk").resolve()
        (folder / "file").write_text("content")
    assert link.is_symlink()
    assert names(tmp_path / "disk" / "target") == ["file"]


def never() -> None:
    pytest.fail("the work was begun")


def test_new_folder_current_folder_raises_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path(), tmp_path):
        with pytest.raises(StorageError, match="is the current folder: choose a folder inside"):
            fill(path, then=never)
    fill(Path("inside"))
    assert names(tmp_path) == ["inside"]


def test_new_folder_mount_point_raises_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path.resolve())
    with pytest.raises(StorageError, match="mount point: choose a folder inside"):
        fill(tmp_path, then=never)


def test_new_folder_below_file_raises_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Not a directory.*file"):
        fill(tmp_path / "file" / "out", then=never)
    with pytest.raises(StorageError):
        write_file(tmp_path / "file" / "out", "")


def test_remove_folder_removes_everything_and_names_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    remove_folder(tmp_path / "a")
    assert names(tmp_path) == []
    with pytest.raises(StorageError, match="No such file"):
        remove_folder(tmp_path / "a")


def test_remove_file_removes_existing_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remove_file(tmp_path / "file")
    remove_file(tmp_path / "file")
    assert names(tmp_path) == []
    with pytest.raises(StorageError):
        remove_file(tmp_path)


def test_new_folder_leftover_that_resists_deletion_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_text("")
    unlink = seam.disk.unlink

    def refuses_b(path: Path) -> None:
        if path.name == "b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(seam.disk, "unlink", refuses_b)
        remove_folder(tmp_path / "folder")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-folder-")
    assert names(left) == ["b"]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_remove_leftovers_removes_temporary_names_only(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    folder = tmp_path / "run"
    (folder / ".tmp-step-1-abcd" / "deep").mkdir(parents=True)
    (folder / ".tmp-step-1-abcd" / "deep" / "file").write_text("half")
    (folder / ".tmp-metrics-1234").write_text("half")
    (folder / ".tmp-link").symlink_to(outside)
    (folder / "nested").mkdir()
    (folder / "nested" / ".tmp-not-ours").write_text("")
    (folder / "step-1").mkdir()
    (folder / ".hidden").write_text("")
    remove_leftovers(folder)
    assert names(folder) == [".hidden", "nested", "step-1"]
    assert names(folder / "nested") == [".tmp-not-ours"]
    assert names(outside) == ["kept"]
    remove_leftovers(tmp_path / "missing")


def test_new_folder_after_a_killed_process_removes_only_its_own_leftovers(tmp_path: Path) -> None:
    others = [".tmp-out-2-0123abcd", ".tmp-out-aside-0123abcd", ".tmp-out2-0123abcd"]
    for abandoned in (".tmp-out-0123abcd", *others):
        (tmp_path / abandoned).mkdir()
        (tmp_path / abandoned / "file").write_text("half")
    with new_folder(tmp_path / "out") as active:
        (active / "file").write_text("half")
        # A second process that writes the same folder does not delete the temporary folder of the
        # first.
        fill(tmp_path / "out")
        assert active.is_dir()
        (tmp_path / "out" / "file").unlink()
    assert names(tmp_path) == [*others, "out"]


def test_new_folder_while_it_is_synced_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_folder = seam.disk.sync_folder
    is_first = True

    def another_process(path: Path) -> None:
        nonlocal is_first
        if is_first and path.name.startswith(".tmp-out-"):
            is_first = False
            fill(tmp_path / "out")
            (tmp_path / "out" / "file").unlink()
        sync_folder(path)

    monkeypatch.setattr(seam.disk, "sync_folder", another_process)
    fill(tmp_path / "out", "whole")
    assert not is_first
    assert names(tmp_path / "out") == ["whole"]


def test_require_writable_folder_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_writable(tmp_path)
    assert names(tmp_path) == []

    def denied(path: Path) -> FileIO:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(seam.disk, "create", denied)
    with pytest.raises(StorageError, match=f"permission denied at {tmp_path}: change its"):
        require_writable(tmp_path)


def test_write_probe_on_a_full_disk_names_the_folder_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_probe(tmp_path, 1 << 24)
    assert names(tmp_path) == []
    monkeypatch.setattr(seam.disk, "write", full_disk)
    with pytest.raises(StorageError, match=f"the disk is full at {tmp_path}"):
        write_probe(tmp_path, 1 << 24)
    assert names(tmp_path) == []


def test_write_file_killed_process_leaves_removable_leftover(tmp_path: Path) -> None:
    manager = new_folder(tmp_path / "out")
    (manager.__enter__() / "file").write_text("half")
    assert len(names(tmp_path)) == 1
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_require_free_accepts_missing_and_empty_folders_only(tmp_path: Path) -> None:
    require_free(tmp_path / "missing", "move it")
    require_free(tmp_path, "move it")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(InputError, match=r"^folder .* already exists .*: move it$"):
            require_free(path, "move it")


def test_sha256_of_matches_hashlib(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": {"x": 1, "y": 2, "x": 1}}', "is not valid JSON: key 'x' occurs twice"),
        (b"[" + b"9" * 5000 + b"]", "is not valid JSON"),
    ],
)
def test_read_json_names_a_damaged_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "value.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"value\.json {message}"):
        read_json(path)


def test_read_json_stops_at_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_text("[1, 2]")
    assert read_json(path, max_bytes=6) == [1, 2]
    with pytest.raises(InputError, match=r"value\.json is longer than the limit of 5 bytes"):
        read_json(path, max_bytes=5)


# --- writing files ------------------------------------------------------------------


def test_output_file_buffers_small_writes_and_passes_large_ones_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "_GATHERED_BYTES", 8)
    sizes: list[int] = []

    class Recorded(Disk):
        def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
            sizes.append(len(data))
            return super().write(file, data)

    monkeypatch.setattr(seam, "disk", Recorded())
    parts = [b"ab", b"cde", b"fg", b"hi", b"0123456789", b"", b"j"]
    with HashedFile(tmp_path / "file") as file:
        for part in parts:
            file.write(part)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert sizes == [7, 2, 10, 1]
    assert file.size == 20
    assert file.sha256 == hashlib.sha256(b"".join(parts)).hexdigest()


def test_write_start_of_file_overwrites_only_start(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "file") as file:
        file.write(bytes(4))
        file.write(b"content")
        file.write_over_start(b"head")
    assert (tmp_path / "file").read_bytes() == b"headcontent"


def test_output_file_never_replaces_existing_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(FileExistsError):
        OutputFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "theirs"


class Short(Disk):
    """Disk that writes at most three bytes per call, and nothing after a given number of bytes."""

    def __init__(self, room: int, *, says_so: bool) -> None:
        self.room, self.says_so = room, says_so

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        count = min(3, self.room, len(data))
        if not count and self.says_so:
            full_disk()
        self.room -= count
        return super().write(file, memoryview(data)[:count]) if count else 0


def test_output_file_completes_short_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "disk", Short(10, says_so=True))
    write_file(tmp_path / "file", "0123456789")
    assert (tmp_path / "file").read_text() == "0123456789"


@pytest.mark.parametrize("says_so", [False, True])
@pytest.mark.parametrize("room", range(10))
def test_write_file_partial_disk_write_keeps_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, says_so: bool
) -> None:
    write_file(tmp_path / "file", "old")
    monkeypatch.setattr(seam, "disk", Short(room, says_so=says_so))
    with pytest.raises(StorageError):
        write_file(tmp_path / "file", "0123456789")
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("room", range(10))
def test_append_partial_write_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    file = AppendedFile(tmp_path / "file")
    file.append(b"first")
    with monkeypatch.context() as patch:
        patch.setattr(seam, "disk", Short(room, says_so=True))
        with pytest.raises(OSError, match="No space left"):
            file.append(b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"first"
    file.append(b"second")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"firstsecond"


def test_append_syncs_folder_before_first_byte(tmp_path: Path, disk: list[str]) -> None:
    AppendedFile(tmp_path / "file").close()
    assert disk == ["sync folder"]
    AppendedFile(tmp_path / "file").close()
    assert disk == ["sync folder"]


def test_append_folder_sync_error_closes_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam.disk, "sync_folder", full_disk)
    # A file that is left open would cause a warning, which is an error in tests.
    with pytest.raises(OSError, match="No space left"):
        AppendedFile(tmp_path / "file")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_replace_file_non_regular_file_raises_storage_error(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """This protects /dev/null, for example, which all programs use."""
    make(tmp_path / "thing")
    before = (tmp_path / "thing").stat()
    with pytest.raises(StorageError, match="thing is not a regular file and can't be replaced"):
        write_file(tmp_path / "thing", "content")
    assert (tmp_path / "thing").stat() == before
    assert names(tmp_path) == ["thing"]


def test_replace_file_creates_new_inode(tmp_path: Path) -> None:
    """A memory-mapped file keeps its old content."""
    write_file(tmp_path / "file", "old")
    with open(tmp_path / "file", "rb") as reader:
        with replacing(tmp_path / "file") as file:
            file.write(b"new")
        assert reader.read() == b"old"
    assert (tmp_path / "file").read_bytes() == b"new"


def test_read_json_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json does not exist"):
        read_json(tmp_path / "none.json")
    with pytest.raises(InputError, match="can't be read: it is a folder"):
        read_json(tmp_path)


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.ENOSPC, "the disk is full at /x: free some space or choose another folder"),
        (errno.EDQUOT, "the disk is full at /x: free some space or choose another folder"),
        (errno.EROFS, "the file system is read-only at /x: choose another folder"),
        (errno.EACCES, "permission denied at /x: change its permissions, or choose another folder"),
        (errno.EIO, f"{os.strerror(errno.EIO)} at /x"),
    ],
)
def test_storage_errors_raises_error_with_advice(number: int, words: str) -> None:
    with pytest.raises(StorageError) as caught, storage_errors(Path("somewhere")):
        raise OSError(number, os.strerror(number), "/x")
    assert str(caught.value) == words
    assert isinstance(caught.value, FirstlightError)


def test_describe_os_error_without_errno_returns_message() -> None:
    assert describe_os_error(OSError("strange")) == "strange"
    # For a copy, the file that could not be written is named.
    copied = OSError(errno.EFBIG, "File too large", "source", None, "out/.tmp-target-0123abcd")
    assert "reached at out/target: raise it (ulimit -f)" in describe_os_error(copied)


@pytest.mark.parametrize("make", [lambda: InputError("mine"), lambda: ValueError("theirs")])
def test_storage_errors_lets_other_errors_pass(make: Callable[[], Exception]) -> None:
    error = make()
    with pytest.raises(type(error)) as caught, storage_errors(Path("somewhere")):
        raise error
    assert caught.value is error


def test_storage_errors_without_filename_names_given_place() -> None:
    with pytest.raises(StorageError, match="the disk is full at somewhere: "):  # noqa: SIM117
        with storage_errors(Path("somewhere")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
