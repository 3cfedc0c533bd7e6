"""The examples for other programs are what those read, and what firstlight reads in them."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from example_files import (
    EXAMPLES,
    ROOT,
    commands_of,
    instructions_of,
    parsed_train,
    require_launch,
    train_arguments,
)
from firstlight.errors import ConfigError
from firstlight.recipe import parse_recipe

_SBATCH = EXAMPLES / "slurm" / "train.sbatch"
_POD = EXAMPLES / "kubernetes" / "pytorchjob.yaml"
_SKY = EXAMPLES / "skypilot" / "train.yaml"
_DOCKERFILES = sorted((EXAMPLES / "containers").glob("Dockerfile.*"))
_FOR_OTHERS = [_SBATCH, _POD, _SKY, *_DOCKERFILES]


@pytest.mark.parametrize("path", _FOR_OTHERS, ids=lambda path: path.name)
def test_example_header_states_usage_checks_and_untested_parts(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    start = 1 if lines[0].startswith("#!") else 0
    end = next(n for n, line in enumerate(lines[start:], start) if not line.startswith("#"))
    head = " ".join(line.lstrip("# ") for line in lines[start:end])
    test = re.search(r"Checked: (tests/\w+/test_\w+\.py)", head)
    assert test
    assert (ROOT / test[1]).is_file()
    assert "Not run here: " in head
    assert str(path.relative_to(ROOT)) in head


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_python_examples_compile(path: Path) -> None:
    compile(path.read_text(encoding="utf-8"), str(path), "exec")


@pytest.mark.parametrize(
    "section, message",
    [
        (
            {"optimizer": {"cautious_weight_decay": True}},
            r"know no optimizer\.cautious_weight_decay: leave it",
        ),
        # Accelerate and the Trainer would train in fp32 there, and say nothing.
        ({"efficiency": {"precision": "fp16"}}, r"fp16 needs a GPU .*; take bf16"),
    ],
)
def test_python_examples_unsupported_settings_raise_config_error(
    section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    recipe = parse_recipe(
        {
            "run": {"device": "cpu"},
            "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            "data": {"dir": "data"},
            "batch": {"micro_batch_size": 2},
            "schedule": {"max_steps": 2},
            **section,
        }
    )
    with pytest.raises(ConfigError, match=message):
        importlib.import_module("parts").parts_of(recipe)


# --- Kubernetes ------------------------------------------------------------------------------


def test_pytorchjob_has_kinds_replicas_and_one_shared_volume() -> None:
    claim, job = yaml.safe_load_all(_POD.read_text(encoding="utf-8"))
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    # With nprocPerNode, the operator would set WORLD_SIZE to that many times the pods.
    assert job["spec"].keys() == {"runPolicy", "pytorchReplicaSpecs"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    for spec in replicas.values():
        assert spec.keys() == {"replicas", "restartPolicy", "template"}
        assert spec["restartPolicy"] == "OnFailure"
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == set(volumes)
        shared = volumes[mounts["/shared"]]["persistentVolumeClaim"]["claimName"]
        assert shared == claim["metadata"]["name"]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("pod, rank", [("Master", 0), ("Worker", 1)])
def test_pod_commands_are_valid_firstlight_commands(pod: str, rank: int) -> None:
    _, job = yaml.safe_load_all(_POD.read_text(encoding="utf-8"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas[pod]["template"]["spec"]["containers"]
    assert container["command"][0] == "firstlight"
    assert container["workingDir"] == "/opt/firstlight"
    values = {"$(RANK)": str(rank), "$(MASTER_ADDR)": "job-master-0", "$(MASTER_PORT)": "23456"}
    context, recipe = parsed_train(train_arguments(container["command"], values))
    require_launch(context.params, sum(spec["replicas"] for spec in replicas.values()))
    assert int(context.params["nproc"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounted = tuple(mount["mountPath"] + "/" for mount in container["volumeMounts"])
    for folder in (recipe.run.dir, recipe.data.dir):
        assert folder is not None
        assert folder.startswith(mounted)


# --- SkyPilot --------------------------------------------------------------------------------


def test_sky_task_restarts_stopped_run_with_valid_firstlight_command() -> None:
    task = yaml.safe_load(_SKY.read_text(encoding="utf-8"))
    known = {"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run"}
    assert task.keys() == known
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    ((mounted, storage),) = task["file_mounts"].items()
    assert storage["mode"] == "MOUNT_CACHED"
    for script in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[script], text=True, check=True)
    (words,) = [line for line in commands_of(task["run"]) if "train" in line]
    assert words[1].endswith("/bin/firstlight")
    _, gpus = task["resources"]["accelerators"].split(":")
    values = {
        "$SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "$SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "$SKYPILOT_NODE_RANK": "1",
        "$head_node": "10.0.0.1",
    }
    context, recipe = parsed_train(train_arguments(words, values))
    require_launch(context.params, task["num_nodes"])
    for folder in (recipe.run.dir, recipe.data.dir):
        assert folder is not None
        assert folder.startswith(mounted + "/")


# --- Containers ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", _DOCKERFILES, ids=lambda path: path.name)
def test_container_file_copies_existing_files_and_installs_existing_extras(path: Path) -> None:
    instructions = list(instructions_of(path))
    names = [name for name, _ in instructions]
    assert names.count("FROM") == 1
    assert set(names[: names.index("FROM")]) <= {"ARG"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied: set[str] = set()
    installed: list[str] = []
    for name, rest in instructions:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            copied |= set(sources)
        elif name == "RUN":
            subprocess.run(["bash", "-n"], input=rest, text=True, check=True)
            if match := re.search(r"'\.\[([\w,-]+)\]'", rest):
                # What pip builds from is there by then.
                assert copied >= {"pyproject.toml", "src", project["readme"], "LICENSE"}
                installed = match[1].split(",")
        elif name == "CMD":
            assert yaml.safe_load(rest)[0] in project["scripts"]
    assert installed
    assert set(installed) <= set(project["optional-dependencies"])
    assert "--constraint" in next(rest for name, rest in instructions if "'.[" in rest)


def test_dev_extra_contains_packages_of_all_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        extra: {re.split(r"[\[<>=; ]", requirement)[0] for requirement in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    packages = set().union(*extras.values())
    # One is built from source for minutes, and no test has a store of the other.
    assert packages - extras["dev"] == {"llama-cpp-python", "gcsfs"}


def test_constraints_pin_every_package_but_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        re.split(r"[\[<>=; ]", requirement)[0].lower().replace("_", "-")
        for requirements in (project["dependencies"], *project["optional-dependencies"].values())
        for requirement in requirements
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[^ ]+( ; .+)?", line) for line in pins)
    assert asked - {line.split("==")[0] for line in pins} == {"torch"}


def test_gpu_image_keeps_its_torch() -> None:
    (install,) = [
        rest
        for name, rest in instructions_of(EXAMPLES / "containers/Dockerfile.gpu")
        if "pip" in rest
    ]
    before, pip, after = (part.strip() for part in install.split("&&"))
    asks = before.split(">")[0].strip()
    found = subprocess.run(
        ["bash", "-c", asks.replace("python", shlex.quote(sys.executable), 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"torch==\d+\.\d+.*\n", found.stdout)
    constraint = before.split(">")[-1].strip()
    assert f"--constraint {constraint} " in pip
    assert after.startswith(asks)
    assert after.endswith(f"diff {constraint} -")
