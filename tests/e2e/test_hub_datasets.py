"""Datasets of the hub are streamed: read as far as they are needed, and kept nowhere.

The hub is that of dataset_hub.py; the client is the `datasets` library as it is, in a process
of its own.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dataset_hub import DatasetHub

from firstlight.data.prepare import prepare
from firstlight.data.sources import SOURCES_NAME
from firstlight.tokenizer import Tokenizer

pytest.importorskip("datasets")

pytestmark = pytest.mark.usefixtures("forked_processes")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

#: Two configurations, of which one is the default.
README = """---
configs:
- config_name: all
  data_files: data/*.parquet
  default: true
- config_name: last
  data_files:
  - split: train
    path: data/*-00007-*.parquet
  - split: other
    path: data/*-00003-*.parquet
---
"""
ROWS, PARTS = 100, 8
LINE = json.dumps({"text": "stone and river " * 60}) + "\n"

#: Prints the first documents of an input, and stops reading.
FIRST = """
import contextlib, itertools, json, sys
from firstlight.data.records import read_documents
from firstlight.data.sources import find_sources
with contextlib.closing(read_documents(find_sources([sys.argv[1]]))) as documents:
    print(json.dumps([record.value for record in itertools.islice(documents, 3)]))
"""

# What this machine itself knows of a hub must not count.
_FOREIGN = ("HF_", "HUGGING", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def parts() -> list[list[str]]:
    """The texts of each Parquet file: they can't be compressed to much less."""
    generator = random.Random(0)
    return [
        [f"{part} {row} {generator.randbytes(1000).hex()}" for row in range(ROWS)]
        for part in range(PARTS)
    ]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    files = {"README.md": README.encode()}
    for number, texts in enumerate(parts()):
        buffer = io.BytesIO()
        parquet.write_table(arrow.table({"text": texts}), buffer, row_group_size=100)
        files[f"data/train-{number:05d}-of-{PARTS:05d}.parquet"] = buffer.getvalue()
    return files


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[DatasetHub]:
    with DatasetHub(files) as hub:
        yield hub


def run(hub: DatasetHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a machine that knows the hub, and caches in `home`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def kept(home: Path) -> int:
    """How many bytes lie in a folder."""
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


# The library reads the names of a split's columns in the first split.
@pytest.mark.parametrize(
    "config, part, read", [("", 0, [0]), (":last", 7, [7]), (":last:other", 3, [3, 7])]
)
def test_hub_dataset_first_documents_need_no_other_files(
    tmp_path: Path, hub: DatasetHub, config: str, part: int, read: list[int]
) -> None:
    done = run(hub, tmp_path / "home", "-c", FIRST, f"hf:owner/name{config}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == parts()[part][:3]
    touched = {name for name in hub.sent if name.endswith(".parquet")}
    assert touched == {f"data/train-{number:05d}-of-{PARTS:05d}.parquet" for number in read}
    assert kept(tmp_path / "home") < 100_000


def test_hub_dataset_first_lines_need_only_start_of_file(tmp_path: Path) -> None:
    # The library reads some 30 MB ahead.
    with DatasetHub({"lines.jsonl": LINE.encode() * 80_000}) as hub:
        done = run(hub, tmp_path / "home", "-c", FIRST, "hf:owner/name")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [json.loads(LINE)["text"]] * 3
    assert 0 < hub.sent["lines.jsonl"] < len(hub.files["lines.jsonl"]) / 2
    assert kept(tmp_path / "home") < 100_000


def test_hub_dataset_streamed_is_prepared_like_its_files(
    tmp_path: Path, hub: DatasetHub, tokenizer: Tokenizer
) -> None:
    for name in [name for name in hub.files if name.endswith(".parquet")]:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(hub.files[name])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepare([tmp_path / "files"], tokenizer, tmp_path / "one", workers=1)
    place = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "hub")]
    command = ["-m", "firstlight", "prepare", "hf:owner/name", *place]
    done = run(hub, tmp_path / "home", *command, "--workers", "1")
    assert done.returncode == 0, done.stderr
    one, streamed = tmp_path / "one", tmp_path / "hub"
    # The names of the inputs alone differ.
    assert (streamed / SOURCES_NAME).read_bytes() != (one / SOURCES_NAME).read_bytes()
    assert {p.name: p.read_bytes() for p in streamed.iterdir() if p.name != SOURCES_NAME} == {
        p.name: p.read_bytes() for p in one.iterdir() if p.name != SOURCES_NAME
    }
    assert kept(tmp_path / "home") < 100_000


def test_hub_dataset_part_is_prepared_without_the_rest(
    tmp_path: Path, hub: DatasetHub, tokenizer: Tokenizer
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    place = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
    command = ["-m", "firstlight", "prepare", "hf:owner/name", *place]
    done = run(hub, tmp_path / "home", *command, "--max-documents", "30", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["documents"] == {"read": 30, "written": 30, "rejected": {}}
    parquet_files = {name for name in hub.sent if name.endswith(".parquet")}
    assert parquet_files == {f"data/train-00000-of-{PARTS:05d}.parquet"}
    done = run(hub, tmp_path / "home", *command[:-1], str(tmp_path / "2"), "--max-tokens", "5k")
    assert done.returncode == 0, done.stderr
    splits = json.loads((tmp_path / "2" / "manifest.json").read_text())["splits"]
    assert {name: entry["tokens"] for name, entry in splits.items()} == {"train": 4500, "val": 500}
    parquet_files = {name for name in hub.sent if name.endswith(".parquet")}
    assert parquet_files == {f"data/train-00000-of-{PARTS:05d}.parquet"}


def test_hub_dataset_missing_split_is_named_with_existing_ones(
    tmp_path: Path, hub: DatasetHub, tokenizer: Tokenizer
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    place = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
    done = run(
        hub, tmp_path / "home", "-m", "firstlight", "prepare", "hf:owner/name:last:x", *place
    )
    assert done.returncode == 1
    message = "dataset hf:owner/name:last:x can't be read: Bad split: x. Available splits: "
    assert done.stderr.startswith(f"firstlight: error: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_hub_dataset_missing_prints_one_line(
    tmp_path: Path, hub: DatasetHub, tokenizer: Tokenizer
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    place = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
    done = run(hub, tmp_path / "home", "-m", "firstlight", "prepare", "hf:owner/other", *place)
    assert done.returncode == 1
    message = "dataset hf:owner/other can't be read: Dataset 'owner/other' doesn't exist on the Hub"
    assert done.stderr.startswith(f"firstlight: error: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


#: Prepares a dataset as a run does; prints the folder and what it told.
CACHED = """
import json, sys
from firstlight.data.chat import ChatOptions
from firstlight.data.chat import cached_chat
from firstlight.tokenizer import Tokenizer
told = []
tokenizer = Tokenizer.from_pretrained(sys.argv[2])
options = ChatOptions(val_fraction=0)
folder = cached_chat([sys.argv[1]], [], tokenizer, "alpaca", options, told.append)
print(json.dumps([str(folder), told]))
"""


def test_hub_conversations_are_prepared_once(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    records = [{"instruction": f"stone {n}", "output": "river"} for n in range(5)]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    command = ["-c", CACHED, "hf:owner/name", str(tmp_path / "tokenizer")]
    with DatasetHub({"lines.jsonl": content}) as hub:
        first = run(hub, tmp_path / "home", *command)
        read = hub.sent["lines.jsonl"]
        second = run(hub, tmp_path / "home", *command)
        assert read > 0
        assert hub.sent["lines.jsonl"] == read
    assert first.returncode == 0, first.stderr
    folder, told = json.loads(first.stdout)
    assert told == ["preparing the conversations of hf:owner/name"]
    assert json.loads(second.stdout) == [folder, []]
    places = (Path(folder) / "train-examples.txt").read_text().splitlines()
    assert places == [f"hf:owner/name record {n}" for n in range(1, 6)]
    third = run(hub, tmp_path / "home", *command)  # which has gone
    assert third.returncode == 1
    assert "dataset hf:owner/name is not available" in third.stderr.splitlines()[-1]
