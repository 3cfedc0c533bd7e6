"""Every engine starts in every way that docs/scaling.md lists, or gives a one-line error."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from spawned import free_port

from firstlight.planner.plan import estimate as estimating
from firstlight.planner.plan.machine import find_machine, resolve_for
from firstlight.recipe import load_recipe

# The processes started by the tests import it.
pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no deepspeed"),
    pytest.mark.usefixtures("forked_processes"),
]

_DRIVER = Path(__file__).with_name("starts_driver.py")

#: The name of the launcher, its options, and the name of the engine.
Way = tuple[str, tuple[str, ...], str]

#: Ways to start one process: the launcher whose variables are set, and options.
_ONE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plain", ()),
    ("plain", ("--nproc", "1")),
    ("torchrun", ()),
    ("by hand", ()),
    ("rank and size alone", ()),
    ("Slurm", ()),
    ("a batch script of Slurm", ("--nproc", "1")),
    ("Open MPI", ()),
    ("MPICH", ()),
)
_TWO = ("torchrun", "by hand", "Slurm", "Open MPI", "MPICH")
_ENGINES: dict[str, tuple[str, ...]] = {
    "auto": (),
    "ddp": ("--distributed.engine", "ddp"),
    "fsdp": ("--distributed.engine", "fsdp"),
    "tensor parallel": ("--distributed.tensor_parallel", "2"),
    "pipeline": ("--distributed.pipeline", "2", "--batch.gradient_accumulation_steps", "2"),
    "zero": ("--distributed.engine", "deepspeed"),
    "zero, offloaded": (
        *("--distributed.engine", "deepspeed", "--distributed.zero_stage", "3"),
        *("--distributed.offload", "cpu"),
    ),
}


@pytest.fixture
def recipe_file(tmp_path: Path, recipe: dict[str, Any]) -> Path:
    recipe["model"] |= {"hidden_size": 16, "num_attention_heads": 2}
    recipe |= {"batch": {"micro_batch_size": 1}, "checkpoint": {"every_steps": 0}}
    recipe["efficiency"] = {"precision": "fp32", "compile": False}
    recipe["schedule"] = {"max_steps": 1}
    recipe["evaluation"] |= {"max_rows": 1, "sample_prompts": []}
    # If a start fails in one process, the timeout ends the other process, too.
    recipe["distributed"] = {"timeout_seconds": 60}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def _start(recipe_file: Path, ways: list[Way], size: int) -> list[tuple[list[int], str]]:
    """Return the exit codes of all processes for each start, and the last message of the first
    process.
    """
    starts = [
        {
            "way": way,
            "port": free_port(),
            "arguments": [
                *(str(recipe_file), "--run.dir", str(recipe_file.parent / f"run-{number}")),
                *options,
                *_ENGINES[engine],
            ],
        }
        for number, (way, options, engine) in enumerate(ways)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, str(_DRIVER), str(rank), str(size), json.dumps(starts)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        # Read all outputs at the same time: a process whose output is not read blocks, and the
        # others wait for it.
        with ThreadPoolExecutor(size) as pool:
            said = list(pool.map(lambda process: process.communicate(timeout=400), processes))
    finally:
        for process in processes:
            process.kill()
    # Results are printed to stdout, too.
    found = [
        [json.loads(line) for line in out.splitlines() if line.startswith('{"code"')]
        for out, _ in said
    ]
    for lines, (_, err) in zip(found, said, strict=True):
        assert "Traceback" not in err, err
        assert len(lines) == len(starts), err
        assert all(line["left"] == [] for line in lines)
    codes = [[line["code"] for line in lines] for lines in found]
    errors = [line for line in said[0][1].splitlines() if line.startswith("firstlight: error")]
    return [(list(one), errors.pop(0) if one[0] else "") for one in zip(*codes, strict=True)]


def _offered(recipe_file: Path) -> tuple[str, ...]:
    """Return the options that `plan` suggests for a GPU on which nothing fits."""
    machine = find_machine("V100 16GB")
    recipe = resolve_for(load_recipe(recipe_file, [("model.vocab_size", "320")]), machine)
    ways = {name: changes for name, changes, _ in estimating._fallbacks(recipe, machine)}
    changes = estimating._LEAST | ways["offloading moments to the CPU (DeepSpeed)"]
    return tuple(part for key, x in changes.items() for part in (f"--{key}", str(x).lower()))


@pytest.mark.slow
def test_start_one_process_succeeds_with_every_launcher(recipe_file: Path) -> None:
    ways = [(way, options, "zero") for way, options in _ONE]
    ways += [("plain", _offered(recipe_file), "auto"), ("plain", (), "zero, offloaded")]
    ways += [("plain", (), "auto"), ("Slurm", (), "auto")]
    for way, (codes, said) in zip(ways, _start(recipe_file, ways, 1), strict=True):
        assert codes == [0], (way, said)


def test_start_one_process_with_multi_process_engine_fails_with_advice(recipe_file: Path) -> None:
    ways: list[Way] = [
        ("plain", ("--nproc", "1"), engine) for engine in ("ddp", "fsdp", "tensor parallel")
    ]
    for (codes, said), count in zip(_start(recipe_file, ways, 1), (2, 2, 2), strict=True):
        assert codes == [2]
        assert f"start it with --nproc {count}" in said


def test_start_two_processes_succeeds_with_every_launcher(recipe_file: Path) -> None:
    # DeepSpeed's import takes longer than all of these starts, so it is tested in the slow tests.
    ways: list[Way] = [(way, (), "auto") for way in _TWO]
    ways += [("torchrun", (), engine) for engine in ("ddp", "fsdp", "tensor parallel", "pipeline")]
    for way, (codes, said) in zip(ways, _start(recipe_file, ways, 2), strict=True):
        assert codes == [0, 0], (way, said)


@pytest.mark.slow
def test_start_two_processes_succeeds_with_every_engine_and_launcher(recipe_file: Path) -> None:
    ways: list[Way] = [(way, (), engine) for way in _TWO for engine in _ENGINES]
    for way, (codes, said) in zip(ways, _start(recipe_file, ways, 2), strict=True):
        assert codes == [0, 0], (way, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        (("-m", "firstlight"), ("--nproc", "2")),
        (("-m", "firstlight"), ("--nproc", "1", "--max-restarts", "1")),
        (("-m", "torch.distributed.run", "--standalone", "-m", "firstlight"), ()),
        (
            *(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),),
            *((),),
        ),
        (("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"), ()),
    ],
)
def test_start_deepspeed_succeeds_with_real_launchers(
    recipe_file: Path, launcher: tuple[str, ...], processes: tuple[str, ...]
) -> None:
    module = () if "firstlight" in launcher else ("-m", "firstlight")
    names = ("PATH", "HOME", "PYTHONPATH")
    done = subprocess.run(
        [
            *(sys.executable, *launcher, *module, "train", str(recipe_file)),
            *(*processes, *_ENGINES["zero"]),
        ],
        env={name: os.environ[name] for name in names if name in os.environ}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
