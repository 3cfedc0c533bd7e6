"""Read this process's rank and world size from the environment variables of its launcher.

torchrun, `accelerate launch` and `firstlight train --nproc` set RANK and WORLD_SIZE; mpirun and
srun set other variables. Incomplete or contradictory variables are rejected. Otherwise, the run
could have a different number of processes than the user requested.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from firstlight.errors import ConfigError

#: Range of the ports derived from a job's id. The range ends below Linux's ephemeral ports, which
#: start at 32768.
_PORTS = range(10_000, 30_000)

#: Slurm uses step ids from this number upwards for steps that were not started by srun, such as a
#: batch script or an interactive shell.
_LARGEST_STEP = 0xFFFF_FFF0

#: Variables set by MPI launchers that identify a job. Their values are the same in all processes of
#: a job and differ between jobs.
_MPI_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")

_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """The position of this process among all processes of its run.

    Attributes:
        rank: number of the process, from 0 to `size` - 1; rank 0 writes files and messages.
        size: number of processes on all machines.
        local_rank: number of the process on its machine, starting at 0.
        local_size: number of processes on its machine, or a lower bound if the launcher does not
            report this number.
        host: name or address of the machine that hosts the rendezvous; "" in a world of one
            process.
        port: port of the rendezvous; 0 in a world of one process.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str = ""
    port: int = 0

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which writes files and messages."""
        return self.rank == 0


@dataclass(frozen=True)
class _Launcher:
    """A kind of launcher: its name in messages, and the names of the environment variables in which
    it passes the rank, world size, local rank and local size.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_TORCH = _Launcher("torch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Launcher(
    "Open MPI", *(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_MPICH = _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")


def find_world(variables: Mapping[str, str] | None = None) -> World:
    """Read the rank of this process and the world size from environment variables.

    If variables of several launchers are set, the innermost launcher takes precedence. RANK and
    WORLD_SIZE take precedence over the variables of MPI and Slurm, because srun or mpirun may start
    torchrun on each machine. In a Slurm allocation, a process that was not started by srun forms a
    world of one process.

    Args:
        variables: the environment variables; None means `os.environ`.

    Returns: The position of this process; World(0, 1, 0, 1) if there is no launcher.

    Raises:
        ConfigError: variables are incomplete, not numbers, or contradict each other.
    """
    variables = os.environ if variables is None else variables
    found = [
        (launcher, place)
        for launcher in (_TORCH, _OPEN_MPI, _MPICH, _SLURM)
        if (place := _world_from(launcher, variables)) is not None
    ]
    if not found:
        if "PMIX_RANK" in variables:
            raise ConfigError(
                f"PMIX_RANK is {variables['PMIX_RANK']}, but no variable gives the number of "
                "processes: set RANK and WORLD_SIZE"
            )
        return World(0, 1, 0, 1)
    launcher, place = found[0]
    if launcher is _TORCH and "TORCHELASTIC_RUN_ID" not in variables:
        for other, theirs in found[1:]:
            _require_same(place, other, theirs)
    if place.size == 1:
        return World(0, 1, 0, 1)
    host, port = _rendezvous_address(launcher, place, variables)
    return World(place.rank, place.size, place.local_rank, place.local_size, host, port)


def _world_from(launcher: _Launcher, variables: Mapping[str, str]) -> World | None:
    """Return the `World` that the variables of one kind of launcher describe, without host and
    port. Return None if this launcher's variables are not set.
    """
    if launcher is _SLURM:
        return _slurm_world(variables)
    names = (launcher.rank, launcher.size, launcher.local_rank, launcher.local_size)
    known = [name for name in names if name in variables]
    # Intel's libraries set MPICH's variables for the local rank even if there is no launcher.
    if not known or (launcher is _MPICH and launcher.rank not in known):
        return None
    for name in names[:2]:
        if name not in variables:
            raise ConfigError(
                f"{' and '.join(known)} {'is' if len(known) == 1 else 'are'} set, but {name} is "
                f"not: set {launcher.rank} and {launcher.size}, or neither"
            )
    rank, size = _number(launcher.rank, variables), _number(launcher.size, variables)
    alone = launcher.local_size in variables and launcher.local_rank not in variables
    if alone and _number(launcher.local_size, variables) > 1:
        raise ConfigError(
            f"{launcher.local_size} is {variables[launcher.local_size]}, but "
            f"{launcher.local_rank} is not set: set both"
        )
    local_rank = _number(launcher.local_rank, variables, 0)
    local_size = _number(launcher.local_size, variables, local_rank + 1)
    _require_in(launcher.rank, rank, launcher.size, size)
    _require_in(launcher.local_rank, local_rank, launcher.local_size, local_size)
    if local_size > size or local_rank > rank:
        raise ConfigError(
            f"{launcher.local_rank} is {local_rank} of {local_size} and {launcher.rank} is {rank} "
            f"of {size}: one machine can't have more processes than all machines together"
        )
    return World(rank, size, local_rank, local_size)


def _slurm_world(variables: Mapping[str, str]) -> World | None:
    """Return the `World` that srun's variables describe, or None if srun did not start this
    process. Most of srun's variables are also set in batch scripts and in shells within an
    allocation.
    """
    if "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables:
        return None
    if _number("SLURM_STEP_ID", variables) >= _LARGEST_STEP:
        return None
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    size_name = next((name for name in sizes if name in variables), None)
    if size_name is None:
        raise ConfigError("SLURM_PROCID is set, but SLURM_NTASKS is not: start the run with srun")
    rank, size = _number("SLURM_PROCID", variables), _number(size_name, variables)
    if size == 1 and rank == 0:
        return World(0, 1, 0, 1)
    if "SLURM_LOCALID" not in variables:
        raise ConfigError("SLURM_PROCID is set, but SLURM_LOCALID is not: start the run with srun")
    local_rank = _number("SLURM_LOCALID", variables)
    _require_in("SLURM_PROCID", rank, size_name, size)
    if local_rank > rank:
        raise ConfigError(
            f"SLURM_LOCALID is {local_rank} and SLURM_PROCID is {rank}: one machine "
            "can't have more processes than all machines together"
        )
    counts = variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", ""))
    node = _number("SLURM_NODEID", variables, 0)
    return World(rank, size, local_rank, max(_tasks_on(counts, node), local_rank + 1))


def _tasks_on(counts: str, node: int) -> int:
    """Return the number of tasks on a node according to Slurm's list, or 0 if the list does not
    contain the node. For example, node 2 (the third one) in the list "4(x2),3" has 3 tasks.
    """
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is not None:
            tasks += [int(match[1])] * int(match[2] or 1)
    return tasks[node] if node < len(tasks) else 0


def _number(name: str, variables: Mapping[str, str], default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,12}", text):
        raise ConfigError(f"{name} is '{text}': it must be a whole number of at least 0")
    return int(text)


def _require_in(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise ConfigError(
            f"{rank_name} is {rank}, but {size_name} is {size}: the ranks of {size} processes are "
            f"0 to {size - 1}"
        )


def _require_same(place: World, other: _Launcher, theirs: World) -> None:
    """Reject RANK and WORLD_SIZE values set by hand if another launcher started more processes or
    assigned a different rank to this process.
    """
    if theirs.size > place.size or (theirs.size == place.size and theirs.rank != place.rank):
        raise ConfigError(
            f"RANK is {place.rank} and WORLD_SIZE is {place.size}, but {other.name} started "
            f"{theirs.size} processes, and this process has {other.rank} {theirs.rank}: unset RANK "
            "and WORLD_SIZE"
        )


def _rendezvous_address(
    launcher: _Launcher, place: World, variables: Mapping[str, str]
) -> tuple[str, int]:
    """Return the host and port of the rendezvous from MASTER_ADDR and MASTER_PORT. If they are not
    set, derive them from Slurm's node list and job id or, on a single machine, from the job id of
    an MPI launcher.

    Raises:
        ConfigError: the address is invalid, or is not set and can't be derived.
    """
    given = [name for name in _ADDRESS_VARIABLES if variables.get(name)]
    host, port = variables.get("MASTER_ADDR", ""), 0
    if "MASTER_PORT" in given:
        port = _number("MASTER_PORT", variables)
        if not 0 < port < 65_536:
            raise ConfigError(f"MASTER_PORT is {port}: it must be from 1 to 65535")
    if len(given) == 2:
        return host, port
    if launcher is _TORCH:
        missing = " and ".join(name for name in _ADDRESS_VARIABLES if name not in given)
        raise ConfigError(
            f"WORLD_SIZE is {place.size} without {missing}: set MASTER_ADDR to the name of "
            "rank 0's machine and MASTER_PORT to a free port there"
        )
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST")
    nodes = nodes or variables.get("SLURM_JOB_NODELIST")
    job = variables.get("SLURM_JOB_ID")
    if nodes and job:
        job = f"{job}.{variables.get('SLURM_STEP_ID', '')}"
        return host or _first_host(nodes), port or _port_for(job)
    names = [variables[name] for name in _MPI_JOB_IDS if name in variables]
    if names and place.local_size == place.size:
        return host or "127.0.0.1", port or _port_for(names[0])
    raise ConfigError(
        f"{launcher.size} is {place.size}, but the rendezvous address is unknown: set MASTER_ADDR "
        "to the name of rank 0's machine and MASTER_PORT to a free port there "
        "(mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500)"
    )


def _port_for(job: str) -> int:
    """Return a port that is the same in all processes of a job and likely differs between jobs."""
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of nodes: "node[07-09,12]-a,other" -> "node07-a"."""
    # Split only at commas outside of brackets, which separate names. Commas inside brackets
    # separate numbers.
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
