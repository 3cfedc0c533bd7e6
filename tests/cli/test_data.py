"""Tests of `firstlight data show` from the command line to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstlight.cli.main import main


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/a.txt").write_text("A plain text <b>\nof two lines")
    Path("in/b.ipynb").write_text(json.dumps({"cells": [{"source": "A note"}]}))
    Path("in/c.ipynb").write_text(json.dumps({"cells": []}))


def test_data_show_prints_kinds_passages_and_reasons(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "in", "--out", "page.html"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines.pop(6).startswith("  in/c.ipynb: ")
    assert lines[:-1] == [
        "kind      files  documents      text   share",
        ".txt          1          1  29 bytes   82.9%",
        "notebook      1          1   6 bytes   17.1%",
        "all           2          2  35 bytes  100.0%",
        "",
        "left out: 1",
        "",
        "in/a.txt:1:",
        "  A plain text <b>",
        "  of two lines",
        "",
        "in/b.ipynb:",
        "  A note",
    ]
    page = Path("page.html").read_text()
    for text in ("A plain text &lt;b&gt;", "82.9%", "A note", "<bdi>in/c.ipynb</bdi>: "):
        assert text in page
    # The page of an earlier call can be replaced, but no other file.
    assert main(["data", "show", "in", "--out", "page.html"]) == 0
    Path("own.html").write_text("mine")
    assert main(["data", "show", "in", "--out", "own.html"]) != 0
    assert Path("own.html").read_text() == "mine"


def test_data_show_json_has_the_same_content(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["data", "show", "in", "--json", "--passages", "0", "--out", "page.html"]
    assert main(command) == 0
    found = json.loads(capfd.readouterr().out)
    numbers = {"files": 1, "documents": 1, "passages": []}
    assert found["kinds"] == [
        {"kind": ".txt", "text_bytes": 29, "share": 29 / 35, **numbers},
        {"kind": "notebook", "text_bytes": 6, "share": 6 / 35, **numbers},
    ]
    assert [one["place"] for one in found["left_out"]] == ["in/c.ipynb"]
    assert (found["input"], found["page"]) == ("in", "page.html")


def test_data_show_file_prints_its_whole_text(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "in", "a.txt", "--out", "page.html"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("in/a.txt:1:\nA plain text <b>\nof two lines\n")
    assert "A plain text &lt;b&gt;\nof two lines" in Path("page.html").read_text()
    assert main(["data", "show", "in", "b.ipynb", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "file": "b.ipynb",
        "documents": [{"place": "in/b.ipynb", "text": "A note", "left_out": ""}],
    }
    assert main(["data", "show", "in", "c.ipynb"]) == 0
    assert capfd.readouterr().out.startswith("in/c.ipynb: left out: ")
