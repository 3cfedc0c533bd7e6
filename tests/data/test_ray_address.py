"""Tests of the Ray engine with an unreachable cluster, and without Ray."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.tokenizer import Tokenizer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    "address, message",
    [
        (
            "127.0.0.1:{port}",
            r"'127\.0\.0\.1:\d+' can't be used \(.*refused\): start one with `ray start --head`",
        ),
        ("nonsense", r"'nonsense' can't be used \(it is not auto, local or HOST:PORT\)"),
        (
            "ray://127.0.0.1:{port}",
            (
                r"preparing through a Ray Client \(ray://\) is not "
                r"supported: run"
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # A warning that Ray causes itself.
@pytest.mark.parametrize("by", ["argument", "RAY_ADDRESS"])
def test_prepare_unreachable_ray_cluster_raises_immediately(
    tmp_path: Path,
    tokenizer: Tokenizer,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    message: str,
    by: str,
) -> None:
    pytest.importorskip("ray")
    address = address.format(port=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address if by == "RAY_ADDRESS" else "127.0.0.1:1")
    given = address if by == "argument" else None
    with pytest.raises(ConfigError, match=message):
        prepare([corpus], tokenizer, tmp_path / "out", engine="ray", ray_address=given)
    assert names(tmp_path) == []


def test_prepare_without_ray_names_install_command(
    tmp_path: Path,
    tokenizer: Tokenizer,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError) as caught:
        prepare([corpus], tokenizer, tmp_path / "out", engine="ray")
    assert str(caught.value) == (
        "preparing with engine ray needs the 'ray' package: pip install 'firstlight[ray]'"
    )
    assert names(tmp_path) == []
