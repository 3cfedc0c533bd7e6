"""Tests of tensors in shards on the disk: complete shards are restored, and incomplete shards are
rejected.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firstlight.checkpoint.sharded import (
    MOMENTS,
    WEIGHTS,
    TensorShard,
    read_full_tensors,
    read_shards,
    shard_name,
    shard_names,
    stored_shapes,
    write_shards,
)
from firstlight.errors import CheckpointError


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, list[TensorShard]]:
    """Return a tensor, and its shards when it is split along any dimension."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    ends = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size))) | {0, size}
        ends.append(list(itertools.pairwise(sorted(inner))))
    boxes = itertools.product(*ends)
    shards = [
        TensorShard(tensor[tuple(slice(a, b) for a, b in box)], tuple(a for a, _ in box))
        for box in boxes
    ]
    return tensor, draw(st.permutations(shards))


def _write(folder: Path, shards: list[TensorShard]) -> None:
    for rank, shard in enumerate(shards):
        write_shards(folder / shard_name(WEIGHTS, rank, len(shards)), {"one": shard})


@given(cut_tensors())
def test_read_full_tensors_sharded_file_restores_tensor(
    cut: tuple[Tensor, list[TensorShard]],
) -> None:
    tensor, shards = cut
    with tempfile.TemporaryDirectory() as name:
        _write(Path(name), shards)
        assert torch.equal(read_full_tensors(Path(name), WEIGHTS)["one"], tensor)


@given(cut_tensors(), st.data())
def test_read_incomplete_shards_raises_and_leaves_target_unchanged(
    cut: tuple[Tensor, list[TensorShard]], data: st.DataObject
) -> None:
    tensor, shards = cut
    number = data.draw(st.integers(0, len(shards) - 1))
    double = data.draw(st.booleans())
    wrong = [*shards, shards[number]] if double else shards[:number] + shards[number + 1 :]
    with tempfile.TemporaryDirectory() as name:
        _write(Path(name), wrong)
        target = torch.full_like(tensor, -1)
        # Without its last rows, the tensor is still complete, but its shape differs from the
        # target's.
        with pytest.raises(CheckpointError, match=r"are incomplete|expected|lacks"):
            read_shards(Path(name), WEIGHTS, {"one": target})
        assert torch.equal(target, torch.full_like(tensor, -1))


def test_shards_overlapping_with_gap_raise_checkpoint_error(tmp_path: Path) -> None:
    places = [(0, 0), (0, 1), (2, 0)]
    _write(tmp_path, [TensorShard(torch.ones(2, 2), place) for place in places])
    with pytest.raises(CheckpointError, match="shards of 'one' are incomplete"):
        stored_shapes(tmp_path, WEIGHTS)


def test_sharded_tensors_differing_from_targets_raise_checkpoint_error(tmp_path: Path) -> None:
    _write(tmp_path, [TensorShard(torch.ones(2), (0,)), TensorShard(torch.ones(1), (2,))])
    for name, target, problem in (
        ("other", torch.ones(3), "lacks tensor 'other'"),
        ("one", torch.ones(4), r"'one' is \[3\] torch.float32, expected \[4\] torch.float32"),
        ("one", torch.ones(3).bfloat16(), r"expected \[3\] torch.bfloat16"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            read_shards(tmp_path, WEIGHTS, {name: target})
    with pytest.raises(CheckpointError, match="lacks tensor 'other'"):
        read_full_tensors(tmp_path, WEIGHTS, ["other"])


def _places(value: object) -> dict[str, str]:
    return {"DCP_SHARDING_INFO": json.dumps(value), "DCP_VERSION": "1.0"}


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"DCP_SHARDING_INFO": "{"},
        _places([]),
        _places({}),
        _places({"one": {"saved_offsets": [0, 0]}}),
        _places({"one": {"saved_offsets": [-1]}}),
        _places({"one": {"saved_offsets": ["0"]}}),
        _places({"one": {"saved_offsets": [True]}}),
        _places({"one": {"saved_offsets": 3}}),
    ],
)
def test_shard_file_with_invalid_offsets_raises_damaged(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    path = tmp_path / shard_name(WEIGHTS, 0, 1)
    safetensors.torch.save_file({"one": torch.ones(3)}, path, metadata)
    with pytest.raises(CheckpointError, match=f"{path} is damaged"):
        stored_shapes(tmp_path, WEIGHTS)


def test_sharded_tensor_with_two_dtypes_raises_damaged(tmp_path: Path) -> None:
    _write(
        tmp_path, [TensorShard(torch.ones(2), (0,)), TensorShard(torch.ones(2).bfloat16(), (2,))]
    )
    with pytest.raises(
        CheckpointError, match=r"'one' is torch.bfloat16 here, but torch.float32 in"
    ):
        stored_shapes(tmp_path, WEIGHTS)


def test_shard_file_names_contain_shard_count(tmp_path: Path) -> None:
    name = shard_name(MOMENTS, 1, 2)
    assert name == "optimizer.shard-00002-of-00002.safetensors"
    assert shard_names(["model.safetensors", "config.json"]) == []
    expected = [shard_name(kind, rank, 2) for kind in (MOMENTS, WEIGHTS) for rank in (0, 1)]
    assert shard_names([name]) == expected
    write_shards(tmp_path / name, {})
    with pytest.raises(CheckpointError, match=r"optimizer.shard-00001-of-00002.*is missing"):
        stored_shapes(tmp_path, MOMENTS)
