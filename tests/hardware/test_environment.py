"""The environment variables of torch's threads: set by commands, by `import firstlight`, and in a
program that imported torch earlier.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from firstlight.cli import main as cli_main
from firstlight.hardware import environment

_SPIN, _BY_IMPORT = "GOMP_SPINCOUNT", "FIRSTLIGHT_SPINCOUNT"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (_SPIN, _BY_IMPORT, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def set_busy(monkeypatch: pytest.MonkeyPatch, *, busy: bool) -> None:
    monkeypatch.setattr(environment, "cores_are_busy", lambda: busy)


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in (_SPIN, _BY_IMPORT) if name in os.environ}


def after_import(code: str, given: Mapping[str, str]) -> list[str]:
    """Return the variable in a new Python process that has run `code`, and whether it imported
    torch.
    """
    show = f"import os, sys; print(os.environ.get({_SPIN!r}), 'torch' in sys.modules)"
    command = [sys.executable, "-c", f"{code}\n{show}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **given}
    )
    return done.stdout.split()


@pytest.mark.parametrize(("given", "spin"), [({}, "5000"), ({_SPIN: "7"}, "7")])
def test_import_sets_spin_count_unless_user_did(given: Mapping[str, str], spin: str) -> None:
    assert after_import("import firstlight", given) == [spin, "False"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["dev/nvidiactl"], True),
        (["dev/nvidiactl", "proc/driver/nvidia/capabilities/gpu0/mig/config"], True),
        ([], False),
        (["dev/dxg"], False),  # WSL2
        (["dev/kfd"], False),  # ROCm
        (["dev/nvidiactl", "dev/nvmap"], False),
        (["dev/nvidiactl", "etc/nv_tegra_release"], False),
        (["dev/nvidiactl", "proc/driver/nvidia/capabilities/gpu0/mig/gi3/access"], False),
    ],
)
def test_expandable_segments_require_whole_gpu_on_linux(
    files: list[str], expected: bool, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert environment.takes_expandable_segments(tmp_path) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A40-48C", False),
        ("GRID T4-8Q", False),
        ("NVIDIA A100-SXM4-80GB", True),
        ("Tesla V100-PCIE-16GB", True),
        ("NVIDIA GeForce RTX 4090", True),
    ],
)
def test_expandable_segments_require_non_virtual_gpu(
    name: str, expected: bool, tmp_path: Path
) -> None:
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 145\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert environment.takes_expandable_segments(tmp_path) is expected


@pytest.mark.parametrize(
    ("given", "imported", "able", "expected"),
    [
        ({}, False, True, "expandable_segments:True"),
        ({}, False, False, None),
        ({}, True, True, None),  # torch has read the variable
        ({"PYTORCH_ALLOC_CONF": ""}, False, True, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, False, True, None),
        ({_SPIN: "7"}, False, True, "expandable_segments:True"),
    ],
)
def test_import_enables_expandable_segments_unless_user_set_allocator(
    given: dict[str, str],
    imported: bool,
    able: bool,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "takes_expandable_segments", lambda: able)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "torch", sys)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment.set_at_import()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


@pytest.mark.parametrize(
    ("code", "begin"),
    [
        ("import firstlight.cli.main", "firstlight: error: firstlight needs Linux or macOS"),
        ("import firstlight; firstlight.train", "ImportError: firstlight needs Linux or macOS"),
    ],
)
def test_import_on_windows_suggests_wsl2(code: str, begin: str) -> None:
    command = [sys.executable, "-c", f"import os; del os.fork; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith(begin), "install it in WSL2" in last) == (
        1,
        True,
        True,
    )
    # The error is printed as one line.
    assert last == done.stderr.strip() or begin.startswith("ImportError")


def test_spin_count_after_torch_import_is_set_by_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    environment.set_at_import()
    assert variables() == {_BY_IMPORT: ""}
    # In a child process, which imports firstlight before torch.
    monkeypatch.delitem(sys.modules, "torch")
    environment.set_at_import()
    assert variables() == {_SPIN: "5000", _BY_IMPORT: "5000"}


@pytest.mark.parametrize(
    ("inherited", "spin"),
    [
        ({}, "30000"),
        ({_SPIN: "5000", _BY_IMPORT: "5000"}, "30000"),
        ({_BY_IMPORT: ""}, "30000"),
        ({_SPIN: "7"}, "7"),
        ({_SPIN: "7", _BY_IMPORT: "5000"}, "7"),
    ],
)
def test_command_replaces_spin_count_of_import_but_not_of_user(
    monkeypatch: pytest.MonkeyPatch, inherited: Mapping[str, str], spin: str
) -> None:
    set_busy(monkeypatch, busy=False)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    environment.set_at_import()
    assert cli_main.main(["chat", "--help"]) == 0
    assert variables() == {_SPIN: spin}


def test_call_with_busy_cores_before_torch_uses_spin_count_of_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment.set_at_import()
    set_busy(monkeypatch, busy=False)
    with environment.sharing_cores():
        assert variables() == {_SPIN: "5000", _BY_IMPORT: "5000"}
    set_busy(monkeypatch, busy=True)
    with environment.sharing_cores():
        assert variables() == {_SPIN: "100", _BY_IMPORT: "100"}
    monkeypatch.setenv(_SPIN, "7")
    with environment.sharing_cores():
        assert variables()[_SPIN] == "7"


def own_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is used on Linux")
@pytest.mark.parametrize("spin", [None, "5000"])
def test_call_with_busy_cores_uses_more_threads_than_cores_temporarily(
    monkeypatch: pytest.MonkeyPatch, spin: str | None
) -> None:
    import torch

    monkeypatch.setattr(environment, "usable_cpus", lambda: torch.get_num_threads() + 1)
    if spin is not None:
        monkeypatch.setenv(_SPIN, spin)
    monkeypatch.setenv(_BY_IMPORT, spin or "")
    set_busy(monkeypatch, busy=True)
    before = own_threads()
    with environment.sharing_cores():
        # A Python thread with a team of three OpenMP threads: one more than torch would use on a
        # machine with one more core.
        assert own_threads() == before + 3
        with environment.sharing_cores():
            assert own_threads() == before + 3
    # Wait until the kernel has removed the ended threads.
    while own_threads() != before:
        os.sched_yield()
    set_busy(monkeypatch, busy=False)
    with environment.sharing_cores():
        assert own_threads() == before
    # Like a command, which decides at its start.
    monkeypatch.delenv(_BY_IMPORT)
    set_busy(monkeypatch, busy=True)
    with environment.sharing_cores():
        assert own_threads() == before
