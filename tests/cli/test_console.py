"""Tests that control characters in texts and names are never sent to a terminal, but are written
unchanged to files.
"""

from __future__ import annotations

import errno
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.cli.main import firstlight, main
from firstlight.cli.output import show, write_out
from firstlight.console import gib, progress_bar, say
from firstlight.errors import lacks_memory

WILD = "a\x1b[31m\x9b2J\u202eb\tc\r\nd"
TAMED = "a⟨U+001B⟩[31m⟨U+009B⟩2J⟨U+202E⟩b\tc\nd"


class _Stream(io.TextIOWrapper):
    def __init__(self, *, terminal: bool) -> None:
        self.bytes = io.BytesIO()
        self._terminal = terminal
        super().__init__(self.bytes, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal, written", [(True, TAMED), (False, WILD)])
def test_stdout_escapes_control_characters_in_terminal_but_not_in_pipe(
    terminal: bool, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    write_out(WILD)
    show(WILD)
    assert stream.bytes.getvalue().decode() == f"{written}{written}\n"


@pytest.mark.parametrize(("total", "percentages"), [(None, set()), (4, {"25%"})])
def test_progress_bar_without_total_shows_no_percentage(
    total: int | None, percentages: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar() as bar:
        bar.update(bar.add_task("reading", total=total), advance=1)
    shown = stream.bytes.getvalue().decode()
    assert set(re.findall(r"\d+%", shown)) - {"0%"} == percentages
    assert ("0%" in shown) <= (total is not None)


@pytest.mark.parametrize("text", ["Wort\u00adteil", "\u0645\u200c\u06cc", "\u06dd1"])
def test_message_with_harmless_format_characters_keeps_them(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say(text)
    assert capsys.readouterr().err == f"{text}\n"


def test_message_with_control_characters_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    say(WILD)
    assert capsys.readouterr().err == f"{TAMED}\n"


def test_usage_error_with_control_characters_in_a_file_name_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[31m.txt"
    path.write_text("")
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert "⟨U+001B⟩[31m.txt" in error
    assert "\x1b" not in error


@pytest.mark.parametrize(
    "verb, advice",
    [
        ("serve", "lower --max-context-tokens or --max-batch-size"),
        ("generate", "lower --max-new-tokens"),
        ("eval", "lower --batch-size"),
        ("train", "lower batch.micro_batch_size"),
        ("convert", "stop other programs"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("could not create a primitive"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_command_out_of_memory_advice_depends_on_subcommand(
    verb: str,
    advice: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(firstlight, "main", fail)
    assert main([verb, "model"]) == 1
    assert capsys.readouterr().err.startswith(f"firstlight: error: out of memory: {advice}")


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a matmul primitive"), False),
        (FileNotFoundError(errno.ENOENT, "No such file", "out of memory.txt"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
    ],
)
def test_lacks_memory_distinguishes_out_of_memory_from_other_errors(
    error: Exception, expected: bool
) -> None:
    assert lacks_memory(error) is expected


def test_other_error_counts_as_out_of_memory_only_under_low_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("The size of tensor a (3) must match")

    monkeypatch.setattr(firstlight, "main", fail)
    monkeypatch.setattr("firstlight.cli.main._address_limit", lambda: 10**9)
    assert main(["info", "model"]) == 1
    assert "out of memory" in capsys.readouterr().err
    monkeypatch.setattr("firstlight.cli.main._address_limit", lambda: 61 * 10**9)
    with pytest.raises(RuntimeError, match="of tensor a"):
        main(["info", "model"])


@pytest.mark.slow
def test_command_out_of_memory_under_a_limit_names_the_limit(tmp_path: Path) -> None:
    """Libraries report a lack of memory with many different errors, or abort."""
    script = (
        "import resource, sys; limit = int(sys.argv.pop(1)); "
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); "
        "from firstlight.cli.main import main; sys.exit(main())"
    )
    if sys.platform != "linux":
        pytest.skip("macOS does not enforce the limit of the address space")
    for limit, said in (
        (10**9 // 2, "limits the address space to 0.50 GB"),
        (62 * 10**7, "0.62 GB"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", script, str(limit), "info"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1), ended.stderr
        assert said in ended.stderr
        assert "ulimit -v" in ended.stderr


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.0 MiB"),
        (1 << 20, "1.0 MiB"),
        (1 << 29, "512 MiB"),
        (3 << 29, "1.50 GiB"),
        (5 << 40, "5,120.00 GiB"),
    ],
)
def test_gib_formats_every_memory_size(size: int, text: str) -> None:
    assert gib(size) == text


def test_gib_beside_larger_size_has_same_unit() -> None:
    assert (gib(1 << 29, 3 << 29), gib(3 << 29, 1 << 29)) == ("0.50 GiB", "1.50 GiB")
    assert gib(1 << 20, 1 << 30) == "0.0010 GiB"
