"""The page of `firstlight dashboard`: which runs it has, when it is drawn anew, who may read it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from report_runs import record, write_lines, write_run

from firstlight.errors import ConfigError, InputError
from firstlight.report.dashboard import Dashboard, serve
from waiting import PATIENCE_SECONDS


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs and of something else."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("oaks", "elms"):
        write_run(folder / name, [record(step) for step in (1, 2, 3)])
    (folder / "notes").mkdir()
    return folder


@contextmanager
def running(dashboard: Dashboard) -> Iterator[int]:
    """The port of a dashboard that answers."""
    with serve(dashboard, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str = "/", **headers: str) -> tuple[int, dict[str, str], str]:
    """(status, headers, text) of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_the_page_changes_when_a_run_goes_on_or_a_new_one_begins(runs: Path) -> None:
    dashboard = Dashboard([runs])
    tag, page = dashboard.page("")
    assert b"oaks" in page
    assert b"elms" in page
    assert b"notes" not in page
    assert dashboard.page("") == (tag, page)
    write_lines(runs / "oaks" / "metrics.jsonl", [record(step) for step in (1, 2, 4321)])
    later, changed = dashboard.page("")
    assert later != tag
    assert b"4,321" in changed
    assert b"4,321" not in page
    write_run(runs / "third", [record(1)])
    assert b"third" in dashboard.page("")[1]


def test_a_search_chooses_runs_by_the_words_of_their_names(runs: Path) -> None:
    dashboard = Dashboard([runs])
    found = dashboard.page("S el")[1].decode()  # both names have an s
    assert "elms" in found
    assert "oaks" not in found
    nothing = dashboard.page("<b>none</b>")[1].decode()
    assert "oaks" not in nothing
    assert "<b>none</b>" not in nothing


def test_losses_are_drawn_by_flops_where_the_recipe_is_known(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [record(step) for step in (1, 2, 3)])
    text = Dashboard([tmp_path / "a"]).page("")[1].decode()
    assert ">FLOPs<" in text


def test_one_page_is_served_to_this_machine_alone(runs: Path) -> None:
    with running(Dashboard([runs])) as port:
        status, headers, text = ask(port)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert "connect-src &#39;self&#39;" in text
        assert ask(port, **{"If-None-Match": headers["ETag"]})[::2] == (304, "")
        assert ask(port, "/?q=elms")[1]["ETag"] != headers["ETag"]
        assert ask(port, "/etc/passwd")[0] == 404
        with pytest.raises(ConfigError, match=f"port {port}: .* another one with --port"):
            serve(Dashboard([runs]), port)
        # A name of somebody else's that leads to this machine.
        assert ask(port, Host=f"evil.example:{port}")[0] == 421
        (runs / "elms" / "metrics.jsonl").write_text('{"step": 2}\n{"step": 1}\n')
        status, _, said = ask(port)
        assert status == 503
        assert "is damaged" in said
        assert "\n" not in said
        write_lines(runs / "elms" / "metrics.jsonl", [record(1)])
        assert ask(port)[0] == 200


def test_folders_that_are_no_runs_are_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        Dashboard([tmp_path / "none"])
    with pytest.raises(InputError, match="is no run folder"):
        Dashboard([runs / "notes"])
    with pytest.raises(ConfigError, match="is named twice"):
        Dashboard([runs / "oaks", runs / "oaks"])
