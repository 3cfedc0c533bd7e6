"""The Makefile: the torch that it installs or keeps, and the choice of the quick tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: A pip that writes down what it is called with.
_FAKE_PIP = """
import sys
with open("asked.txt", "a") as file:
    print(*sys.argv[1:], file=file)
"""


def _asked_of_pip(
    folder: Path, *, gpu: str = "", installed: str = "", index: str = ""
) -> list[str]:
    """The arguments of each call of pip while make prepares a virtual environment.

    Args:
        folder: an empty folder, which gets a copy of the Makefile and the environment.
        gpu: shell commands of a fake nvidia-smi; without them there is none.
        installed: version of torch that the environment has.
        index: an assignment of TORCH_INDEX for make.
    """
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(_ROOT / name, folder)
    packages = folder / ".venv/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")]
    subprocess.run(command, check=True)
    (packages / "pip").mkdir()
    (packages / "pip/__main__.py").write_text(_FAKE_PIP)
    if installed:
        metadata = packages / f"torch-{installed}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sh", "grep", "touch", "test"):
        (programs / name).symlink_to(shutil.which(name) or name)
    for name, script in {"uname": "echo Linux", "nvidia-smi": gpu}.items():
        if script:
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
    make = [shutil.which("make") or "make", ".venv/demo-ready", f"PYTHON={sys.executable}"]
    subprocess.run(
        [*make, *([index] if index else [])],
        cwd=folder,
        env={"PATH": str(programs)},
        capture_output=True,
        check=True,
    )
    return (folder / "asked.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "gpu, index, expected",
    [
        ("", "", _CPU_INDEX),
        ("echo No devices were found; exit 6", "", _CPU_INDEX),
        ("echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'", "", None),
        ("", "TORCH_INDEX=", None),
        (
            "echo 'GPU 0: NVIDIA H100'",
            "TORCH_INDEX=https://a.example/cu130",
            "https://a.example/cu130",
        ),
    ],
    ids=["no nvidia-smi", "no GPU", "GPU", "PyPI asked for", "index given"],
)
def test_makefile_installs_torch_from_index_for_machine(
    tmp_path: Path, gpu: str, index: str, expected: str | None
) -> None:
    torch, package = _asked_of_pip(tmp_path, gpu=gpu, index=index)
    assert re.search(r" torch==\d+\.\d+\.\d+$", torch)
    assert re.findall(r"index-url (\S+)", torch) == ([expected] if expected else [])
    assert package.endswith("--constraint constraints.txt --editable .")
    assert "index-url" not in package


@pytest.mark.parametrize(
    "installed, kept", [("2.14.1+cpu", True), ("2.11.0a0+git1f", True), ("2.9.1", False)]
)
def test_makefile_keeps_installed_supported_torch(
    tmp_path: Path, installed: str, kept: bool
) -> None:
    asked = _asked_of_pip(tmp_path, installed=installed)
    assert any(" torch==" in call for call in asked) is not kept


@pytest.mark.parametrize("target", ["demo", "tour"])
def test_makefile_says_how_to_run_the_printed_commands(tmp_path: Path, target: str) -> None:
    shutil.copy(_ROOT / "Makefile", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("firstlight", "python"):
        (programs / name).write_text("#!/bin/sh\necho done\n")
        (programs / name).chmod(0o755)
    for name in ("constraints.txt", "pyproject.toml", ".venv/demo-ready", ".venv/tour-ready"):
        (tmp_path / name).touch()
    made = subprocess.run(
        ["make", "--no-print-directory", target],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    *_, done, last = made.stdout.splitlines()
    assert done == "done"
    assert last == "to run these commands in this shell, first run: . .venv/bin/activate"


def test_torch_version_is_equal_in_all_files() -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    pinned = re.search(r"^TORCH := (\S+)$", makefile, re.M)
    assert pinned
    for path in ("examples/containers/Dockerfile.cpu", "examples/skypilot/train.yaml"):
        text = (_ROOT / path).read_text(encoding="utf-8")
        assert re.findall(r"torch==(\S+)", text) == [pinned[1]], path
    oldest = re.search(r">= \[(\d+), (\d+)\]", makefile)
    assert oldest
    assert f'"torch>={oldest[1]}.{oldest[2]}"' in (_ROOT / "pyproject.toml").read_text("utf-8")


def test_makefile_tests_excluded_from_quick_run_exist() -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    left_out = {
        name: re.search(rf"^{name} := (.*)$", makefile, re.M)[1].split()  # type: ignore[index]
        for name in ("QUICK", "SLOWER", "LONGEST")
    }
    tests = _ROOT / "tests"
    assert [one for one in left_out["QUICK"] if not (tests / one).exists()] == []
    assert [one for one in left_out["SLOWER"] if not (tests / f"{one}.py").exists()] == []
    for test in left_out["LONGEST"]:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (tests / file).read_text(encoding="utf-8"), test
