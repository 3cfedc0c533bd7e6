from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked_processes")

# Sends itself the signal after the third document, in the middle of the work.
_DRIVER = """
import os, signal, sys
import firstlight.data.prepare as prepare
from firstlight.cli.main import main
from firstlight.data.records import Record

def documents(sources, text_key):
    for number in range(10):
        if number == 3:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        yield Record("made", number, "stone and river " * 10_000)

prepare.read_documents = documents
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("signal_name, code", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_prepare_terminated_leaves_nothing_and_reports_it(
    tmp_path: Path, tokenizer: Tokenizer, corpus: Path, signal_name: str, code: int, workers: int
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    driver = tmp_path / "driver.py"
    driver.write_text(_DRIVER, encoding="utf-8")
    verb = ["prepare", str(corpus), "--tokenizer", str(tmp_path / "tokenizer"), "--json"]
    place = ["--out", str(tmp_path / "made" / "data"), "--workers", str(workers)]
    done = subprocess.run(
        [sys.executable, str(driver), signal_name, *verb, *place],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    word = "interrupted" if signal_name == "SIGINT" else "terminated"
    # click ends the terminal's line that shows ^C.
    assert done.stderr.lstrip("\n").splitlines() == [f"firstlight: error: {word}"]
    assert json.loads(done.stdout)["error"]["message"] == word
    assert sorted(path.name for path in tmp_path.iterdir()) == ["driver.py", "tokenizer"]


def test_ctrl_c_during_interpreter_exit_prints_nothing() -> None:
    script = (
        "import atexit, os, signal, sys\n"
        "from firstlight.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['firstlight', '--version']\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
