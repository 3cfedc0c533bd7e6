"""`ShardedSaver` in one process of a run, with disk errors and non-finite values in one of the
processes. Prints one JSON line per scenario.
"""

from __future__ import annotations

import errno
import json
import sys
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from firstlight.checkpoint.checkpoint import Checkpoint, verify_checkpoint
from firstlight.checkpoint.saver import ShardedSaver
from firstlight.checkpoint.selection import newest_checkpoint
from firstlight.checkpoint.sharded import MOMENTS, WEIGHTS, read_full_tensors, read_shards
from firstlight.errors import FirstlightError
from firstlight.files import disk
from firstlight.parallel import World, barrier, find_world, process_group
from firstlight.parallel.engine import DistributedConfig
from firstlight.parallel.engine_choice import make_engine
from firstlight.recipe import CheckpointConfig

#: Rows that are not evenly divisible, fewer rows than processes, and one dimension.
SHAPES = {"seven": (7, 3), "one": (1, 4), "vector": (5,), "stack": (4, 2, 3)}


def wholes(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class BrokenDisk(disk.Disk):
    """A disk without space for tensors."""

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        if "shard" in str(file.name):
            raise OSError(errno.ENOSPC, "No space left on device", file.name)
        return super().write(file, data)


class Scenarios:
    """Scenarios, one per method, which returns the results."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self.engine = make_engine(DistributedConfig(engine="fsdp"), world, torch.device("cpu"))
        self.meshes: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
            "all": ((world.size,), [Shard(0)])
        }
        if world.size == 4:
            self.meshes["hybrid"] = ((2, 2), [Replicate(), Shard(0)])

    def cut(self, tensors: dict[str, Tensor], mesh: str = "all") -> dict[str, Tensor]:
        sizes, placements = self.meshes[mesh]
        made = init_device_mesh("cpu", sizes)
        return {n: distribute_tensor(t.clone(), made, placements) for n, t in tensors.items()}

    def checkpoint(self, tensors: dict[str, Tensor], moments: dict[str, Tensor]) -> Checkpoint:
        if self.world.rank == 0:
            moments = {**moments, "seven.step": torch.tensor(3.0)}
        own = {f"rng.rank{self.world.rank}": torch.tensor([self.world.rank])}
        return Checkpoint({"config.json": "{}"}, tensors, {**moments, **own}, {})

    def saver(self, name: str, asynchronous: bool) -> ShardedSaver:
        config = CheckpointConfig(asynchronous=asynchronous, sharded=True, keep_last=1)
        return ShardedSaver(self.folder / name, config, self.engine, lambda step: step == 99)

    def said(self, saver: ShardedSaver, step: int, checkpoint: Checkpoint) -> str:
        """Return the error of a save."""
        try:
            saver.save(step, lambda: checkpoint)
            saver.wait()
        except FirstlightError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def whole(self) -> dict[str, Any]:
        """Tensors are restored bit for bit with any sharding, and values changed later are not
        written.
        """
        found: dict[str, Any] = {}
        for mesh in self.meshes:
            for asynchronous in (False, True):
                name = f"{mesh}-{asynchronous}"
                saver = self.saver(name, asynchronous)
                for step in (1, 2):
                    weights = self.cut(wholes(step), mesh)
                    moments = self.cut({f"{n}.m": t for n, t in wholes(step + 9).items()}, mesh)
                    parts = (weights, moments)
                    saver.save(step, lambda parts=parts: self.checkpoint(*parts))  # type: ignore[misc]
                    for tensor in weights.values():
                        assert isinstance(tensor, DTensor)
                        tensor.to_local().fill_(float("nan"))
                    while saver._writing is not None:
                        saver.require_written()
                    assert saver.saved_step == step
                saver.close()
                barrier()
                newest, problems = newest_checkpoint(self.folder / name)
                assert newest is not None
                found[name] = [newest.name, problems, self.differences(newest)]
        return found

    def differences(self, newest: Path) -> list[str]:
        expected = {WEIGHTS: wholes(2), MOMENTS: {f"{n}.m": t for n, t in wholes(11).items()}}
        expected[MOMENTS]["seven.step"] = torch.tensor(3.0)
        for rank in range(self.world.size):
            expected[MOMENTS][f"rng.rank{rank}"] = torch.tensor([rank])
        wrong = []
        for kind, tensors in expected.items():
            read = read_full_tensors(newest, kind)
            wrong += list(read.keys() ^ tensors.keys())
            wrong += [n for n, t in tensors.items() if not torch.equal(t, read[n])]
            cut = {n: t for n, t in tensors.items() if t.numel() > 1}
            for mesh in self.meshes:
                own = self.cut({n: torch.zeros_like(t) for n, t in cut.items()}, mesh)
                read_shards(newest, kind, own)
                for name, tensor in own.items():
                    assert isinstance(tensor, DTensor)
                    if not torch.equal(tensor.full_tensor(), cut[name]):
                        wrong.append(f"{mesh} {name}")
        return wrong

    def faults(self) -> dict[str, Any]:
        """All processes report an error of the last process, which leaves no files; the next save
        succeeds.
        """
        found: dict[str, Any] = {}
        is_last = self.world.rank == self.world.size - 1
        for asynchronous in (False, True):
            saver = self.saver(f"faults-{asynchronous}", asynchronous)
            tensors = self.cut(wholes(0))
            good = self.checkpoint(tensors, {})
            if is_last:
                disk.disk = BrokenDisk()
            full = self.said(saver, 1, good)
            disk.disk = disk.Disk()
            bad = self.cut(wholes(0))
            if is_last:
                seven = bad["seven"]
                assert isinstance(seven, DTensor)
                seven.to_local()[0, 0] = float("inf")
            infinite = self.said(saver, 2, self.checkpoint(bad, {}))
            folder = self.folder / f"faults-{asynchronous}" / "checkpoints"
            barrier()
            left = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
            barrier()
            saver.save(3, lambda good=good: good)  # type: ignore[misc]
            saver.wait()
            barrier()
            verify_checkpoint(folder / "step-00000003")
            # If a run ends during a save, no checkpoint appears. Partial files may remain, as after
            # a kill, if one process still writes while another one deletes.
            if asynchronous:
                saver.save(4, lambda good=good: good)  # type: ignore[misc]
            saver.close()
            barrier()
            names = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".tmp-"))
            found[str(asynchronous)] = [full, infinite, left, names]
        return found


def main(folder: str) -> None:
    world = find_world()
    with process_group(world, torch.device("cpu"), 60):
        scenarios = Scenarios(Path(folder), world)
        for name in ("whole", "faults"):
            line = {"scenario": name, "found": getattr(scenarios, name)()}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
