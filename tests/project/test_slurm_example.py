"""examples/slurm/train.sbatch, run with stand-ins for Slurm's programs: what it asks for, what it
starts, and when it comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from example_files import EXAMPLES, ROOT, parsed_train, require_launch
from waiting import PATIENCE_SECONDS, wait_until

_SBATCH = EXAMPLES / "slurm" / "train.sbatch"

#: What of Slurm the script needs: `srun` starts the tasks of a step with Slurm's variables, passes
#: signals on to them, and ends with the largest of their exit codes.
_SRUN = """\
import os, signal, subprocess, sys
options = []
command = sys.argv[1:]
while command[0].startswith("--"):
    options.append(command.pop(0))
open(os.environ["CALLS"], "a").write(f"srun {options} {command}\\n")
given = dict(option.removeprefix("--").split("=") for option in options)
size = int(given.get("ntasks", os.environ["SLURM_NTASKS"]))
nodes = int(os.environ["SLURM_NNODES"])
tasks = []
signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
for rank in range(size):
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": f"{size // nodes}(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % (size // nodes)),
        "SLURM_NODEID": str(rank // (size // nodes)),
    }
    tasks.append(subprocess.Popen(command, env=os.environ | variables))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

_SCONTROL = """\
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print(sys.argv[3])
else:
    open(os.environ["CALLS"], "a").write(f"scontrol {sys.argv[1:]}\\n")
"""


class _Slurm:
    """A stand-in for an allocation of Slurm, in a folder.

    Args:
        folder: for its programs.
        tasks, nodes: of the job.
        programs: further ones, by name, as Python code.
    """

    def __init__(self, folder: Path, tasks: int, nodes: int, **programs: str) -> None:
        self.calls = folder / "calls"
        # The script derives a port from it.
        self.job = _free_port(range(20_000, 30_000)) - 20_000
        bin_folder = folder / "env" / "bin"
        bin_folder.mkdir(parents=True)
        for name, code in {"srun": _SRUN, "scontrol": _SCONTROL, **programs}.items():
            program = bin_folder / name
            program.write_text(f"#!{sys.executable}\n{code}")
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.environment = os.environ | {
            "FIRSTLIGHT_ENV": str(folder / "env"),
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": str(self.job),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": str(tasks),
            "SLURM_NTASKS_PER_NODE": str(tasks // nodes),
            "SLURM_NNODES": str(nodes),
            "SLURM_CPUS_PER_TASK": "1",
        }

    def start(self, *arguments: str, way: str = "tasks") -> subprocess.Popen[str]:
        """The batch script."""
        return subprocess.Popen(
            ["bash", str(_SBATCH), *arguments],
            env=self.environment | {"WAY": way},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, way: str = "tasks") -> tuple[int, str]:
        """(exit code, what was said)."""
        process = self.start(*arguments, way=way)
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            _end(process)
        return process.returncode, said

    @property
    def requeue(self) -> str:
        """The call that puts the job back into the queue."""
        return f"scontrol {['requeue', str(self.job)]}"

    @property
    def said(self) -> str:
        """What srun and scontrol were asked for."""
        return self.calls.read_text()


def _free_port(among: range) -> int:
    for port in among:
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def _end(process: subprocess.Popen[str]) -> None:
    """And whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_slurm_script_is_bash_and_requests_resources_it_uses() -> None:
    subprocess.run(["bash", "-n", str(_SBATCH)], check=True)
    asked = re.findall(r"^#SBATCH --(.*)$", _SBATCH.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"requeue", "signal=B:USR1@300", "open-mode=append"} <= set(asked)
    names = {line.split("=")[0] for line in asked}
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"} <= names


@pytest.mark.parametrize(
    "ends_with, requeued", [(0, False), (1, False), (2, False), (75, True), (137, False)]
)
def test_slurm_script_requeues_only_stopped_and_saved_run(
    ends_with: int, requeued: bool, tmp_path: Path
) -> None:
    slurm = _Slurm(tmp_path, 2, 1, firstlight=f"raise SystemExit({ends_with})")
    code, said = slurm.run()
    assert code == ends_with, said
    assert (slurm.requeue in slurm.said) is requeued


def test_slurm_script_time_limit_signal_reaches_ranks_and_job_requeues(
    tmp_path: Path,
) -> None:
    waits = """
import os, pathlib, signal, sys
ready = pathlib.Path(os.environ["CALLS"] + "-ready-" + os.environ["SLURM_PROCID"])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
ready.touch()
while True:
    signal.pause()
"""
    slurm = _Slurm(tmp_path, 2, 1, firstlight=waits)
    process = slurm.start()
    try:

        def ready() -> list[Path]:
            assert process.poll() is None, process.communicate()
            return list(tmp_path.glob("calls-ready-*"))

        wait_until("two tasks that wait", ready, lambda files: len(files) == 2)
        process.send_signal(signal.SIGUSR1)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        _end(process)
    assert process.returncode == 75, said
    assert slurm.said.count(slurm.requeue) == 1


@pytest.mark.parametrize("way", ["tasks", "launcher", "torchrun"])
def test_slurm_script_each_launch_mode_uses_existing_options(way: str, tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    torchruns_help = get_args_parser().format_help()
    slurm = _Slurm(tmp_path, 16, 2, firstlight="", torchrun=f"print({torchruns_help!r})")
    given = ("recipes/llama-110m.yaml", "--schedule.max_steps", "5")
    code, said = slurm.run(*given, way=way)
    assert code == 0, said
    options, command = re.fullmatch(r"srun (\[.*?\]) (\[.*\])\n", slurm.said).groups()  # type: ignore[union-attr]
    words = yaml.safe_load(command)
    assert ("--ntasks=2" in options) is (way != "tasks")
    # What bash is given as its arguments comes after its own text.
    arguments = words[len(words) - 1 - words[::-1].index("train") + 1 :]
    if way == "launcher":
        arguments += ["--node-rank", "1"]
    context, recipe = parsed_train(arguments)
    assert context.params["resume"] is True
    assert recipe.schedule.max_steps == 5
    assert recipe.run.dir == "runs/llama-110m"
    if way == "launcher":
        require_launch(context.params, 2)
        assert context.params["nproc"] == "8"
    if way == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "8")
        assert (parsed.module, parsed.training_script) == (True, "firstlight")
        assert parsed.signals_to_handle.endswith("SIGUSR1")
        # torch 2.11 has no such option.
        assert getattr(parsed, "shutdown_timeout", 270) == 270


@pytest.mark.parametrize("has_option", [True, False])
def test_slurm_script_torchrun_waits_for_save_if_option_exists(
    has_option: bool, tmp_path: Path
) -> None:
    help_text = "usage: torchrun" + " [--shutdown-timeout SECONDS]" * has_option
    slurm = _Slurm(tmp_path, 2, 1, firstlight="", torchrun=f"print({help_text!r})")
    code, said = slurm.run(way="torchrun")
    assert code == 0, said
    assert ("'--shutdown-timeout', '270', '-m'" in slurm.said) is has_option
    assert ("ends ranks 30 s after the signal" in said) is not has_option


def test_slurm_script_rejects_unknown_mode_and_has_default_recipe(
    tmp_path: Path,
) -> None:
    slurm = _Slurm(tmp_path, 2, 1, firstlight="")
    code, said = slurm.run(way="mpi")
    assert (code, said.strip()) == (2, "WAY is 'mpi': it has to be tasks, launcher or torchrun")
    assert slurm.run()[0] == 0
    assert "'recipes/llama-1b-fsdp.yaml', '--resume'" in slurm.said


#: The recipe for many GPUs, made small enough for two processes on a CPU.
_SMALL = {
    "run.device": "cpu",
    "data.seq_len": "32",
    "model.hidden_size": "32",
    "model.intermediate_size": "48",
    "model.num_hidden_layers": "2",
    "model.num_attention_heads": "4",
    "model.num_key_value_heads": "2",
    "model.max_position_embeddings": "32",
    "batch.global_batch_tokens": "256",
    "schedule.max_steps": "4",
    "schedule.warmup_steps": "1",
    "evaluation.max_rows": "4",
    "evaluation.sample_tokens": "4",
    "distributed.timeout_seconds": "120",
}


def _small(folder: Path, data: Path, **settings: str) -> list[str]:
    """The script's arguments for the small recipe."""
    whole = _SMALL | {"data.dir": str(data), "run.dir": str(folder / "run")} | settings
    options = [word for key, value in whole.items() for word in (f"--{key}", value)]
    return ["recipes/llama-1b-fsdp.yaml", *options]


def _real(folder: Path, way: str) -> _Slurm:
    """An allocation for two processes whose firstlight is the real one."""
    python = repr(sys.executable)
    return _Slurm(
        folder,
        2,
        # Two machines, which have to find each other; torchrun guesses from host names which is
        # the first, and would find itself in both.
        2 if way == "launcher" else 1,
        **{
            name: f"import os, sys; os.execv({python}, [{python}, '-m', '{module}', *sys.argv[1:]])"
            for name, module in (
                ("firstlight", "firstlight"),
                ("torchrun", "torch.distributed.run"),
            )
        },
    )


#: Keeps how it was started.
_KEEPING = """
import json, os, sys
with open(os.environ["CALLS"] + "-task-" + os.environ["SLURM_PROCID"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""


@pytest.mark.usefixtures("forked_processes")
def test_slurm_script_two_tasks_train_example_recipe(tmp_path: Path, data: Path) -> None:
    slurm = _Slurm(tmp_path, 2, 1, firstlight=_KEEPING)
    code, said = slurm.run(*_small(tmp_path, data))
    assert code == 0, said
    tasks = [json.loads((tmp_path / f"calls-task-{rank}").read_text()) for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "firstlight", *arguments],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments, environment in tasks
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            with process:
                process.kill()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert (tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tasks", "launcher", "torchrun"])
def test_slurm_script_each_launch_mode_saves_near_time_limit_and_resumes(
    way: str, tmp_path: Path, data: Path
) -> None:
    settings = {"schedule.max_steps": "100000", "evaluation.every_steps": "0"}
    slurm, arguments = _real(tmp_path, way), _small(tmp_path, data, **settings)
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = slurm.start(*arguments, way=way)
    try:

        def logged() -> list[str]:
            assert process.poll() is None, process.communicate()
            return metrics.read_text().splitlines() if metrics.is_file() else []

        wait_until("the metrics of three steps", logged, lambda lines: len(lines) >= 3)
        process.send_signal(signal.SIGUSR1)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        _end(process)
    # torchrun knows no other exit code.
    assert process.returncode == (1 if way == "torchrun" else 75), said
    assert slurm.said.count(slurm.requeue) == 1
    done = len(metrics.read_text().splitlines())
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").is_dir()
    code, said = slurm.run(*arguments, "--schedule.max_steps", str(done + 2), way=way)
    assert code == 0, said
    steps = [yaml.safe_load(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, done + 3))
