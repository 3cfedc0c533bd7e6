"""Files made to do harm: nothing is executed, nothing written elsewhere, and each is refused in
one line, within a second and 100 MB. Those made to eat time and memory are refused within two
seconds and 300 MB, plus what the trial of a large tokenizer.json is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hostile_bombs import BOMBS
from hostile_folders import FOLDERS
from hostile_place import Place
from hostile_texts import DAMAGED_LOGS, HARMLESS, TEXTS
from scale import cases

from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("hostile_driver.py")
_MAX_SECONDS, _MAX_MEGABYTES = 1.0, 100.0
_BOMB_SECONDS, _BOMB_MEGABYTES = 2.0, 300.0
#: Added for each megabyte of a large tokenizer.json: its limits grow with its size.
_SECONDS_PER_MEGABYTE, _MEMORY_PER_BYTE = 0.25, 40
_ALL = {**FOLDERS, **TEXTS}
#: In a sample, each fifth of every kind, and of bombs, which take longer, each twelfth.
_HOSTILE = dict([*list(_ALL.items())[:: cases(5, 1)], *list(BOMBS.items())[:: cases(12, 1)]])

Report = Mapping[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything lies: the sound material, the cases, and what is outside of them."""
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def recipe_of_run(base: Path, data: Path) -> dict[str, Any]:
    """A run of two steps."""
    return {
        "run": {"dir": str(base / "sound" / "run"), "device": "cpu"},
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 2, "warmup_steps": 1},
        "evaluation": {"every_steps": 0, "max_rows": 1, "sample_tokens": 1},
    }


@pytest.fixture(scope="module")
def reports(
    base: Path, data: Path, tokenizer: Tokenizer, recipe_of_run: dict[str, Any]
) -> dict[str, Report]:
    """What opening each of the files did, by name."""
    result = train(recipe_of_run)
    tokenizer.save_pretrained(base / "sound" / "tokenizer")
    sound = {
        "run": result.run_folder,
        "model": result.checkpoint,
        "data": data,
        "tokenizer": base / "sound" / "tokenizer",
    }
    outside = base / "outside"
    outside.mkdir()
    for name in ("secret", "elsewhere"):
        (outside / name).write_text(f"{name}\n")
    opened_files = {}
    for number, (name, build) in enumerate({**_HOSTILE, **HARMLESS}.items()):
        folder = base / f"case-{number}"
        folder.mkdir()
        place = Place(folder, outside, sound, recipe_of_run)
        opened = build(place)
        opened_files[name] = {
            "call": opened.call,
            "path": str(opened.path),
            "folder": str(folder),
            "secret": str(place.secret),
        }
    done = subprocess.run(
        [sys.executable, str(_DRIVER)],
        input=json.dumps(list(opened_files.values())),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    folders = [Path(opened["folder"]) for opened in opened_files.values()]
    return {
        name: {**report, "folder": folder}
        for name, folder, report in zip(opened_files, folders, reports, strict=True)
    }


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_file_is_rejected_and_does_nothing(
    name: str, reports: dict[str, Report], record_property: Callable[[str, object], None]
) -> None:
    report = reports[name]
    assert report["forbidden"] == [], report
    assert report["refused"], report["traceback"] or report
    message = report["message"]
    assert message
    assert message.isprintable(), message
    seconds, megabytes = _MAX_SECONDS, _MAX_MEGABYTES
    if name in BOMBS:
        files = (path for path in report["folder"].rglob("tokenizer.json") if path.is_file())
        large = max((path.stat().st_size / 1e6 for path in files), default=0.0)
        seconds = _BOMB_SECONDS + _SECONDS_PER_MEGABYTE * large
        megabytes = _BOMB_MEGABYTES + _MEMORY_PER_BYTE * large
    assert report["seconds"] <= seconds, report
    assert report["megabytes"] <= megabytes, report
    record_property("cases", ("hostile files refused", 1))


@pytest.mark.parametrize("name", HARMLESS)
def test_hostile_link_beside_checkpoints_is_not_written_through(
    name: str, reports: dict[str, Report], record_property: Callable[[str, object], None]
) -> None:
    report = reports[name]
    assert report["forbidden"] == [], report
    assert report["refused"] or not report["error"], report
    record_property("cases", ("hostile files refused", 1))


@pytest.mark.parametrize("name", DAMAGED_LOGS)
def test_hostile_damaged_log_is_set_aside_and_run_resumes(
    name: str, reports: dict[str, Report]
) -> None:
    report = reports[name]
    assert not report["error"], report
    folder = report["folder"] / "run"
    assert (folder / "metrics.jsonl.damaged").read_bytes() == DAMAGED_LOGS[name]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3]


def test_hostile_files_wrote_nothing_elsewhere_and_executed_nothing(
    base: Path, reports: dict[str, Report]
) -> None:
    assert reports
    found = {path.name: path.read_text() for path in (base / "outside").iterdir()}
    assert found == {"secret": "secret\n", "elsewhere": "elsewhere\n"}


def test_hostile_file_driver_detects_forbidden_actions(base: Path, tmp_path: Path) -> None:
    """The driver itself: what is forbidden is reported, and so are time and memory."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "folder").mkdir()
    program = tmp_path / "program.py"
    program.write_text(_FORBIDDEN)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(_DRIVER.parent)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, report in found.items():
        assert bool(report["forbidden"]) == (name not in ("time", "memory", "pipe")), report
    assert found["time"]["seconds"] > _MAX_SECONDS
    assert found["memory"]["megabytes"] > _MAX_MEGABYTES
    assert found["pipe"]["error"] == "killed by SIGALRM"


_FORBIDDEN = """
import json, os, pickle, signal, socket, subprocess, sys, time

folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])
import hostile_driver


def spin(_):
    end = time.process_time() + 1.2
    while time.process_time() < end:
        pass


def wait(_):
    os.mkfifo(folder + "/folder/pipe")
    signal.alarm(1)
    open(folder + "/folder/pipe").read()


calls = {
    "system": lambda _: os.system("true"),
    "process": lambda _: subprocess.Popen(["true"]).wait(),
    "socket": lambda _: socket.socket().close(),
    "pickle": lambda _: pickle.loads(b"cos\\nsystem\\n."),
    "exec": lambda _: exec("1"),
    "write": lambda _: open(folder + "/elsewhere", "w").close(),
    "rename": lambda _: os.rename(folder + "/program.py", folder + "/folder/program.py"),
    "through a link": lambda _: (
        os.symlink(folder + "/elsewhere", folder + "/folder/link"),
        open(folder + "/folder/link", "w").close(),
    ),
    "secret": lambda _: open(folder + "/secret").close(),
    "time": spin,
    "pipe": wait,
    "memory": lambda _: bytearray(150_000_000).replace(b"1", b"2"),
}
reports = {}
for name, call in calls.items():
    hostile_driver._CALLS["it"] = call
    case = {"call": "it", "path": "", "folder": folder + "/folder", "secret": folder + "/secret"}
    reports[name] = hostile_driver.in_child(case)
json.dump(reports, sys.stdout)
"""
