"""Tests of checkpoints that are written while training continues."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.checkpoint import saver as saving
from firstlight.checkpoint.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from firstlight.checkpoint.manifest import checkpoint_folder
from firstlight.checkpoint.saver import CheckpointSaver
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.errors import CheckpointError, StorageError
from firstlight.files import disk as seam
from firstlight.files.disk import Disk
from firstlight.recipe import CheckpointConfig
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")


class Gate(Disk):
    """A disk that creates no folder until it is released; it can then be full."""

    def __init__(self) -> None:
        self.open, self.reached, self.full = threading.Event(), threading.Event(), False

    def make_folder(self, path: Path) -> None:
        self.reached.set()
        wait_until("the opened gate", self.open.is_set)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().make_folder(path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(seam, "disk", gate)
    yield gate
    gate.open.set()


def checkpoint(tensors: dict[str, Tensor], state: dict[str, Any] | None = None) -> Checkpoint:
    return Checkpoint(
        {"config.json": "{}"}, {"w": torch.zeros(1), **tensors}, {**tensors}, state or {}
    )


def saver(run: Path, asynchronous: bool | None = True, **keep: Any) -> CheckpointSaver:
    return CheckpointSaver(run, CheckpointConfig(asynchronous=asynchronous, **keep))


def weights(run: Path, step: int) -> dict[str, Any]:
    return dict(load_checkpoint(checkpoint_folder(run, step)).model)


def test_background_save_writes_state_at_time_of_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, trained = threading.Event(), threading.Event()

    def late(*arguments: Any, **options: Any) -> Path:
        started.set()
        wait_until("the end of the training", trained.is_set)
        return save_checkpoint(*arguments, **options)

    monkeypatch.setattr(saving, "save_checkpoint", late)
    tensor, events = torch.arange(6.0), [{"step": 1}]
    files, state = {"config.json": "{}"}, {"step": 4, "events": events}
    with closing(saver(tmp_path)) as saves:
        saves.save(4, lambda: Checkpoint(files, {"a": tensor}, {"a": tensor}, state))
        # Nothing is on the disk yet, and training continues.
        wait_until("the beginning of the save", started.is_set)
        tensor.mul_(-7)
        events.append({"step": 5})
        state["step"] = 5
        files["config.json"] = "later"
        assert list_checkpoints(tmp_path) == []
        trained.set()
        saves.wait()
        assert saves.saved_step == 4
    loaded = load_checkpoint(checkpoint_folder(tmp_path, 4))
    assert torch.equal(loaded.model["a"], torch.arange(6.0))
    assert torch.equal(loaded.optimizer["a"], torch.arange(6.0))
    assert loaded.trainer_state == {"step": 4, "events": [{"step": 1}]}
    assert (checkpoint_folder(tmp_path, 4) / "config.json").read_text() == "{}"


def test_background_save_during_pending_write_waits(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the copy is in use until the pending write is complete."""
    tensor, waited = torch.zeros(3), threading.Event()
    with closing(saver(tmp_path, keep_last=9)) as saves:
        wait = saves.wait

        def open_and_wait() -> None:
            if saves._writing is not None and not waited.is_set():
                assert list_checkpoints(tmp_path) == []
                waited.set()
                gate.open.set()
            wait()

        monkeypatch.setattr(saves, "wait", open_and_wait)
        saves.save(1, lambda: checkpoint({"a": tensor}))
        wait_until("a write at the gate", gate.reached.is_set)
        assert not waited.is_set()

        def later() -> Checkpoint:
            # The state is captured only when the first checkpoint is complete.
            assert saves.saved_step == 1
            return checkpoint({"a": tensor + 1})

        saves.save(2, later)
        assert waited.is_set()
    assert [weights(tmp_path, step)["a"].tolist() for step in (1, 2)] == [[0.0] * 3, [1.0] * 3]


def test_background_save_existing_copy_is_not_copied_again(tmp_path: Path) -> None:
    state = {"events": [1]}
    copy = dataclasses.replace(checkpoint({"a": torch.ones(3)}, state), is_copy=True)
    with closing(saver(tmp_path)) as saves:
        snapshot = saves._snapshot(copy)
        assert snapshot.model["a"] is copy.model["a"]
        state["events"].append(2)
        assert snapshot.trainer_state == {"events": [1]}
        saves.save(1, lambda: copy)
        saves.wait()
        assert saves._copies._buffers == {}
    assert weights(tmp_path, 1)["a"].tolist() == [1.0] * 3


def test_background_save_reuses_copy_memory(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2, 3, dtype=torch.int8)}
    with closing(saver(tmp_path)) as saves:
        saves.save(1, lambda: checkpoint(tensors))
        saves.wait()
        before = {name: buffer.data_ptr() for name, buffer in saves._copies._buffers.items()}
        assert len(before) == 5
        saves.save(2, lambda: checkpoint({name: t + 1 for name, t in tensors.items()}))
        saves.wait()
        assert {
            name: buffer.data_ptr() for name, buffer in saves._copies._buffers.items()
        } == before
        # A tensor of a different shape gets new memory.
        saves.save(3, lambda: checkpoint({"a": torch.ones(5), "b": torch.ones(2, 3)}))
    assert weights(tmp_path, 3)["a"].tolist() == [1.0] * 5
    assert weights(tmp_path, 2)["b"].tolist() == [[1] * 3] * 2
    assert saves._copies._buffers == {}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_background_save_stores_values_of_views_shared_memory_and_scalars(
    tmp_path: Path, asynchronous: bool
) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": base,
        "tied": base,
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "parameter": torch.nn.Parameter(base[1]),
        "bf16": base.bfloat16(),
    }
    with closing(saver(tmp_path, asynchronous)) as saves:
        saves.save(1, lambda: checkpoint(tensors))
    found = weights(tmp_path, 1)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach()), name


def test_background_save_failed_write_is_raised_once_at_next_step(
    tmp_path: Path, gate: Gate
) -> None:
    gate.full = True
    with closing(saver(tmp_path)) as saves:
        saves.save(4, lambda: checkpoint({}))
        wait_until("a write at the gate", gate.reached.is_set)
        saves.require_written()  # The error has not been reported yet.
        gate.open.set()
        assert saves._writing is not None
        saves._writing.exception(60)
        with pytest.raises(StorageError, match="the disk is full"):
            saves.require_written()
        saves.require_written()
        assert saves.saved_step == -1
        gate.full = False
        saves.save(5, lambda: checkpoint({}))
        saves.wait()
        assert saves.saved_step == 5
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("call", [CheckpointSaver.wait, CheckpointSaver.close])
def test_background_save_wait_raises_write_error(
    tmp_path: Path, gate: Gate, call: Callable[[CheckpointSaver], None]
) -> None:
    gate.full = True
    gate.open.set()
    saves = saver(tmp_path)
    saves.save(4, lambda: checkpoint({}))
    with pytest.raises(StorageError, match="the disk is full"):
        call(saves)
    saves.close()


def test_background_save_next_save_raises_write_error(tmp_path: Path, gate: Gate) -> None:
    gate.full = True
    gate.open.set()
    saves = saver(tmp_path)
    saves.save(4, lambda: checkpoint({}))
    with pytest.raises(StorageError, match="the disk is full"):
        saves.save(5, lambda: pytest.fail("asked for the state"))
    saves.close()


def test_synchronous_save_failure_raises_immediately(tmp_path: Path, gate: Gate) -> None:
    gate.full = True
    gate.open.set()
    with (
        closing(saver(tmp_path, asynchronous=False)) as saves,
        pytest.raises(StorageError, match="the disk is full"),
    ):
        saves.save(4, lambda: checkpoint({}))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_save_non_finite_value_is_never_published(
    tmp_path: Path, asynchronous: bool, value: float, dtype: torch.dtype
) -> None:
    bad = torch.zeros(70, 70)
    bad[31, 7] = value
    good = checkpoint({})
    with closing(saver(tmp_path, asynchronous)) as saves:
        saves.save(4, lambda: good)
        for broken in (
            Checkpoint(good.files, {"w": bad.to(dtype)}, {}, {}),
            Checkpoint(good.files, good.model, {"w.exp_avg": bad.to(dtype)}, {}),
            Checkpoint(good.files, good.model, {}, {"scale": value}),
        ):
            with pytest.raises(CheckpointError, match=r"step 8: .*no checkpoint was written"):
                _save_and_wait(saves, broken)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def _save_and_wait(saves: CheckpointSaver, broken: Checkpoint) -> None:
    saves.save(8, lambda: broken)
    saves.wait()


def test_save_finite_values_with_overflowing_sum_are_accepted(tmp_path: Path) -> None:
    large = torch.full((9,), torch.finfo(torch.float32).max)
    assert large.sum().isinf()
    with closing(saver(tmp_path)) as saves:
        saves.save(4, lambda: checkpoint({"a": large, "h": torch.full((99,), 6e4).half()}))
    assert torch.equal(weights(tmp_path, 4)["a"], large)


@pytest.mark.parametrize("free, expected", [(10**6, True), (2, False)])
def test_background_save_chooses_copying_once_by_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: bool
) -> None:
    asked: list[torch.device] = []

    def free_memory(device: torch.device) -> int:
        asked.append(device)
        return free

    monkeypatch.setattr(saving, "free_memory_bytes", free_memory)
    with closing(saver(tmp_path, asynchronous=None)) as saves:
        for step in (1, 2):
            saves.save(step, lambda: checkpoint({"a": torch.zeros(5)}))
            saves.wait()
        assert (len(saves._copies._buffers) > 0) == expected
    assert asked == [torch.device("cpu")]


def test_checkpoints_saved_after_rollback_belong_to_new_branch(tmp_path: Path) -> None:
    with closing(saver(tmp_path, keep_last=2)) as saves:
        for step in (4, 8, 12):
            saves.save(step, lambda: checkpoint({}))
        saves.wait()
        # Roll back to 8 although 12 exists; the next checkpoint has a later step than all others.
        saves.saved_step = 8
        saves.save(16, lambda: checkpoint({}))
    assert [path.name[-2:] for path in list_checkpoints(tmp_path)] == ["08", "16"]
    assert newest_checkpoint(tmp_path) == (checkpoint_folder(tmp_path, 16), [])


_EXIT = """
import sys, threading, torch
from pathlib import Path
from firstlight.files import disk as seam
from firstlight.checkpoint.checkpoint import Checkpoint
from firstlight.files.disk import Disk
from firstlight.recipe import CheckpointConfig
from firstlight.checkpoint.saver import CheckpointSaver

ending = threading.Event()
threading._register_atexit(ending.set)  # called when the main thread has nothing left to do

class Late(Disk):
    def sync(self, file):
        assert ending.wait(300), "waited 300 s for the end of the main thread"
        super().sync(file)

seam.disk = Late()
saver = CheckpointSaver(Path(sys.argv[1]), CheckpointConfig(asynchronous=True))
saver.save(4, lambda: Checkpoint({"config.json": "{}"}, {"w": torch.ones(3)}, {}, {}))
raise SystemExit(3)
"""


def test_process_exit_waits_for_pending_write(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXIT, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert weights(tmp_path, 4)["w"].tolist() == [1.0] * 3


#: Program that counts this process's threads before and after a save. torch's operators use two
#: cores.
COUNT_THREADS = """
import os, sys, torch
from pathlib import Path
from firstlight.checkpoint.checkpoint import Checkpoint
from firstlight.checkpoint.saver import CheckpointSaver
from firstlight.recipe import CheckpointConfig
large = torch.zeros(1 << 20)
large + large
count = lambda: len(os.listdir("/proc/self/task"))
saver = CheckpointSaver(Path(sys.argv[1]), CheckpointConfig(asynchronous=True))
before = count()
saver.save(1, lambda: Checkpoint({"config.json": "{}"}, {"w": large}, {"w": large}, {}))
saver.wait()
print(count() - before, torch.get_num_threads())
saver.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are not listed here")
def test_saving_thread_starts_no_extra_openmp_threads(tmp_path: Path) -> None:
    """With more OpenMP threads than cores, all threads of the process sleep between two
    operators."""
    command = [sys.executable, "-c", COUNT_THREADS, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["1", "2"]
