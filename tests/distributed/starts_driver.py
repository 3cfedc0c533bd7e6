"""Runs started in different ways, one after another, in one process without a launcher: `firstlight
train` with only the variables of each launcher. Prints the exit codes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import firstlight.training.loop
from firstlight.cli.main import main

_OF_LAUNCHERS = ("SLURM", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "MASTER_", "DS_")
_OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def variables(way: str, rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher sets for a process.

    Args:
        port: a free port. Launchers that do not pass a port derive it from a job id, and this
            becomes the job id.
    """
    place = (str(rank), str(size), str(rank), str(size))
    meeting_point = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    open_mpi = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    slurm = {"SLURM_JOB_ID": str(port), "SLURM_NTASKS": str(size), "SLURM_LOCALID": str(rank)}
    slurm |= {"SLURM_PROCID": str(rank), "SLURM_NODELIST": "localhost"}
    return {
        "plain": {},
        "torchrun": {
            **dict(zip(_OF_TORCH, place, strict=True)),
            **meeting_point,
            "TORCHELASTIC_RUN_ID": "none",
        },
        "by hand": {**dict(zip(_OF_TORCH, place, strict=True)), **meeting_point},
        "rank and size alone": {"RANK": str(rank), "WORLD_SIZE": str(size)},
        "Slurm": {**slurm, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size)},
        "a batch script of Slurm": slurm,
        "Open MPI": {
            **dict(zip(open_mpi, place, strict=True)),
            "PMIX_NAMESPACE": f"prterun-{port}",
            "PMIX_RANK": str(rank),
        },
        "MPICH": {
            **dict(
                zip(
                    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
                    place,
                    strict=True,
                )
            ),
            **meeting_point,
        },
    }[way]


def run(rank: int, size: int, starts: list[dict[str, Any]]) -> None:
    """Run each start, and report the environment variables that it leaves behind."""
    torch.set_num_threads(1)
    setattr(firstlight.training.loop, "draw_report", lambda _: None)  # noqa: B010 - mypy
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_TORCH
    }
    for start in starts:
        own = variables(start["way"], rank, size, start["port"])
        os.environ.clear()
        os.environ.update(clean | own)
        code = main(["train", *start["arguments"]])
        left = {name for name in os.environ if name in _OF_TORCH} - own.keys()
        sys.stdout.write(json.dumps({"code": code, "left": sorted(left)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
