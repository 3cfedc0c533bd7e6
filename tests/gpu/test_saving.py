"""Checkpoints written while a device continues training."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.checkpoint import saver as saving
from firstlight.checkpoint.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from firstlight.checkpoint.manifest import checkpoint_folder
from firstlight.checkpoint.retention import CheckpointConfig
from firstlight.checkpoint.saver import CheckpointSaver, Snapshot
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.recipe import parse_recipe
from firstlight.training.loop import train
from waiting import wait_until

_ELEMENTS = 1 << 22
#: GPU cycles: about a quarter of a second.
_BUSY_CYCLES = 500_000_000


def keep_busy(device: torch.device) -> None:
    """Keep the device busy for a while, so that later work has not run when its call returns."""
    if device.type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]


def test_snapshot_on_device_is_complete_when_taken(device: torch.device) -> None:
    """This fails if the copies to page-locked memory are not waited for."""
    tensors = {"a": torch.zeros(_ELEMENTS, device=device), "b": torch.zeros(7, device=device)}
    snapshot = Snapshot()
    snapshot.take(tensors)  # the memory is allocated from now on, filled with zeros
    keep_busy(device)
    for tensor in tensors.values():
        tensor.add_(3)
    found = snapshot.take(tensors)
    sums = {name: float(tensor.sum()) for name, tensor in found.items()}
    assert sums == {"a": 3.0 * _ELEMENTS, "b": 21.0}


def test_snapshot_does_not_change_with_tensors(device: torch.device) -> None:
    tensor = torch.arange(1000.0, device=device)
    found = Snapshot().take({"a": tensor, "tied": tensor, "turned": tensor.view(10, 100).t()})
    tensor.mul_(-7)
    if device.type == "cuda":
        torch.cuda.synchronize()
        assert all(copy.is_pinned() for copy in found.values())
    assert all(copy.device.type == "cpu" for copy in found.values())
    assert torch.equal(found["a"], torch.arange(1000.0))
    assert torch.equal(found["tied"], found["a"])
    assert torch.equal(found["turned"], torch.arange(1000.0).view(10, 100).t())


def test_snapshot_taken_again_reuses_memory(device: torch.device) -> None:
    snapshot, tensor = Snapshot(), torch.ones(100, dtype=torch.bfloat16, device=device)
    first = snapshot.take({"a": tensor})["a"]
    second = snapshot.take({"a": tensor * 2})["a"]
    assert first.data_ptr() == second.data_ptr()
    assert second.tolist() == [2.0] * 100
    assert snapshot.take({"a": tensor.float()})["a"].dtype == torch.float32


def test_saved_file_holds_state_at_save_while_training_continues(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, trained = threading.Event(), threading.Event()

    def late(*arguments: Any, **options: Any) -> Path:
        started.set()
        wait_until("the end of the training", trained.is_set)
        return save_checkpoint(*arguments, **options)

    monkeypatch.setattr(saving, "save_checkpoint", late)
    weight = torch.zeros(_ELEMENTS, device=device)
    with closing(CheckpointSaver(tmp_path, CheckpointConfig(asynchronous=True))) as saver:
        for step in (1, 2):
            trained.clear()
            keep_busy(device)
            weight.add_(1)
            tensors = {"w": weight}
            saver.save(step, lambda t=tensors: Checkpoint({"config.json": "{}"}, t, t, {}))  # type: ignore[misc]
            wait_until("the beginning of the save", started.is_set)
            weight.fill_(99)  # like the next steps, while the writer waits
            trained.set()
            saver.wait()
            weight.fill_(step)
    for step in (1, 2):
        loaded = load_checkpoint(checkpoint_folder(tmp_path, step))
        for written in (loaded.model, loaded.optimizer):
            assert torch.equal(written["w"], torch.full((_ELEMENTS,), float(step)))


def run_of(recipe: dict[str, Any], device: torch.device, run: Path, **keys: Any) -> list[float]:
    """Train with a save after every second step, and return the seconds during which training
    paused.
    """
    stalls: list[float] = []
    recipe = {
        **recipe,
        "run": {"dir": str(run), "device": device.type, "deterministic": True},
        "schedule": {"max_steps": 7, "warmup_steps": 1},
        "evaluation": {"every_steps": 0, "max_rows": 1, "sample_tokens": 1},
        "checkpoint": {"every_steps": 2, "keep_last": 9, "keep_best": 0, **keys},
    }
    train(parse_recipe(recipe), on_step=lambda record: stalls.append(record["save_stall_seconds"]))
    return stalls[2::2]


def test_checkpoints_are_equal_for_every_way_of_saving(
    recipe: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    """With -s, the pauses of training are printed."""
    recipe["model"] |= {"hidden_size": 256, "intermediate_size": 1024}
    recipe["efficiency"] = {"precision": "fp32", "compile": False, "attention": "plain"}
    means: dict[str, float] = {}
    for name, asynchronous in (("waited for", False), ("asynchronous", True)):
        begun = time.perf_counter()
        stalls = run_of(recipe, device, tmp_path / name, asynchronous=asynchronous)
        means[name] = sum(stalls) / len(stalls)
        took = time.perf_counter() - begun
        print(f"{name}: {1e3 * means[name]:.1f} ms a save, run of {took:.1f} s")  # noqa: T201
    share = means["asynchronous"] / means["waited for"]
    print(f"an asynchronous save stops training for {share:.0%} of one that is waited for")  # noqa: T201
    one, other = (list_checkpoints(tmp_path / name) for name in means)
    assert [folder.name for folder in one] == [folder.name for folder in other]
    assert len(one) == 4
    for folder, same in zip(one, other, strict=True):
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (folder / file).read_bytes() == (same / file).read_bytes(), (folder, file)
