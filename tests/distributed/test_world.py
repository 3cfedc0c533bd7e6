"""Rank and size from the variables of launchers; incomplete variables raise an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import ConfigError
from firstlight.parallel.world import World, find_world

pytestmark = pytest.mark.usefixtures("forked_processes")

PLAIN = World(0, 1, 0, 1)

MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | MEETING
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODELIST": "node[07-08]",
}
#: The variables in a batch script, and in a shell within an allocation.
ALLOCATION = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}


@pytest.mark.parametrize(
    "variables, world",
    [
        ({}, PLAIN),
        # Exported by scripts for the processes that they start.
        (MEETING, PLAIN),
        (TORCH, World(3, 4, 1, 2, "node1", 29500)),
        # One process per machine, as set by Kubernetes' PyTorchJob.
        ({"RANK": "1", "WORLD_SIZE": "2"} | MEETING, World(1, 2, 0, 1, "node1", 29500)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"} | MEETING,
            World(1, 2, 1, 2, "node1", 29500),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, PLAIN),
        (OPEN_MPI | MEETING, World(1, 2, 1, 2, "node1", 29500)),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
            | MEETING,
            World(2, 3, 0, 1, "node1", 29500),
        ),
        (SLURM | MEETING, World(5, 8, 1, 4, "node1", 29500)),
        (ALLOCATION, PLAIN),
        (ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, PLAIN),
        # salloc's shell may be a separate step.
        (ALLOCATION | {"SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFF_FFFA)}, PLAIN),
        (
            SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
            PLAIN,
        ),
        # torchrun, started once per machine by srun: its variables take precedence.
        (
            SLURM
            | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "x"}
            | TORCH,
            World(3, 4, 1, 2, "node1", 29500),
        ),
        # A script that copies srun's variables.
        (
            SLURM | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"} | MEETING,
            World(5, 8, 1, 2, "node1", 29500),
        ),
        (OPEN_MPI | {"PMIX_RANK": "1"} | MEETING, World(1, 2, 1, 2, "node1", 29500)),
    ],
)
def test_find_world_understands_each_launcher(variables: dict[str, str], world: World) -> None:
    assert find_world(variables) == world
    assert world.is_main == (world.rank == 0)


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[07-09,12],other", "node07"),
        ("node[3,5]-ib,x[1-2]", "node3-ib"),
        ("rack[1-2]n[4-5]", "rack1n4"),
    ],
)
def test_find_world_slurm_first_machine_is_rendezvous(nodes: str, host: str) -> None:
    world = find_world(SLURM | {"SLURM_NODELIST": nodes})
    assert world.host == host
    assert 10_000 <= world.port < 30_000


def test_find_world_slurm_steps_use_distinct_ports_unless_set() -> None:
    ports = {find_world(SLURM | {"SLURM_STEP_ID": str(step)}).port for step in range(20)}
    assert len(ports) == 20
    assert len({find_world(SLURM | {"SLURM_PROCID": str(rank)}).port for rank in (2, 7)}) == 1
    assert find_world(SLURM | {"MASTER_ADDR": "me"}).host == "me"
    assert find_world(SLURM | {"MASTER_PORT": "12"}).port == 12


def test_find_world_slurm_gives_process_count_per_machine() -> None:
    counts = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_LOCALID": "0"}
    sizes = [find_world(counts | {"SLURM_NODEID": str(n)}).local_size for n in (0, 1, 2, 3)]
    assert sizes == [3, 3, 2, 1]


def test_find_world_mpirun_on_one_machine_needs_no_rendezvous() -> None:
    job = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-1@1"}
    world = find_world(job)
    assert (world.host, world.rank, world.size) == ("127.0.0.1", 1, 2)
    assert find_world(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-2@1"}).port != world.port
    with pytest.raises(
        ConfigError, match=r"the rendezvous address is unknown: set MASTER_ADDR .* -x "
    ):
        find_world(job | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    with pytest.raises(ConfigError, match="the rendezvous address is unknown"):
        find_world(OPEN_MPI)


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, but RANK is not"),
        (
            TORCH | {"RANK": "4"},
            "RANK is 4, but WORLD_SIZE is 4: the ranks of 4 processes are 0 to",
        ),
        (TORCH | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
        (TORCH | {"LOCAL_WORLD_SIZE": "8"}, "have more processes than all machines together"),
        (TORCH | {"RANK": "-1"}, "RANK is '-1': it must be a whole number"),
        (TORCH | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (TORCH | {"WORLD_SIZE": "0"}, "RANK is 3, but WORLD_SIZE is 0"),
        (TORCH | {"MASTER_PORT": "99999"}, "MASTER_PORT is 99999: it must be from 1 to 65535"),
        (TORCH | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (TORCH | {"MASTER_ADDR": ""}, "WORLD_SIZE is 4 without MASTER_ADDR"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | MEETING,
            "LOCAL_WORLD_SIZE is 2, but LOCAL_RANK is not set",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 without MASTER_ADDR and MASTER_PORT"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is 1, but no variable gives the number"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not"),
        # Variables left in a shell profile would silently start many runs of one process each.
        (
            SLURM | {"RANK": "0", "WORLD_SIZE": "1"},
            "WORLD_SIZE is 1, but Slurm started 8 processes, and this process has SLURM_PROCID 5",
        ),
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "2"} | MEETING,
            "RANK is 0 and WORLD_SIZE is 2, but Open MPI started 2 processes, and this process has "
            "OMPI_COMM_WORLD_RANK 1",
        ),
    ],
)
def test_find_world_incomplete_or_conflicting_variables_are_named(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_world(variables)
    assert message in str(caught.value)


_TEXTS = st.one_of(st.integers(-1, 5).map(str), st.sampled_from(["", "x", "1.0", "٣"]))


@given(
    variables=st.dictionaries(
        st.sampled_from([*TORCH, *OPEN_MPI, *SLURM, "PMI_RANK", "PMI_SIZE", "PMIX_RANK"]), _TEXTS
    )
)
def test_find_world_any_variables_give_valid_world_or_named_error(
    variables: dict[str, str],
) -> None:
    try:
        world = find_world(variables)
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert any(name in message for name in variables)
        return
    assert 0 <= world.rank < world.size
    assert 0 <= world.local_rank < world.local_size
    assert world.local_rank <= world.rank
    assert (world == PLAIN) == (world.size == 1)
    assert (world.size == 1) == (world.host == "") == (world.port == 0)
    if "RANK" in variables:
        assert (str(world.rank), str(world.size)) == (variables["RANK"], variables["WORLD_SIZE"])


@given(size=st.integers(2, 64), data=st.data())
def test_find_world_torch_variables_are_kept(size: int, data: st.DataObject) -> None:
    local_size = data.draw(st.integers(1, size))
    local_rank = data.draw(st.integers(0, local_size - 1))
    rank = data.draw(st.integers(local_rank, size - 1))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = (rank, size, local_rank, local_size)
    variables = {name: str(number) for name, number in zip(names, numbers, strict=True)}
    assert find_world(variables | MEETING) == World(*numbers, "node1", 29500)
