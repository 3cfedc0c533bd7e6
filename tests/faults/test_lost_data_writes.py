"""A power cut that loses what was not synced: shards and caches are whole, refused or made again,
in every state that a disk may be left in."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lost_writes import ALL, State, tried
from recorded_disk import read_tree, recording
from scale import cases

from benchmarks.planner_constants import save_measured
from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import prepare
from firstlight.data.remote import local_folder
from firstlight.errors import DataError
from firstlight.generation import few_rows
from firstlight.planner.speed.gpu import BOUNDS, MeasuredGpu, read_measured
from firstlight.tokenizer import Tokenizer

Record = Callable[[str, object], None]


# Shards


def test_prepared_shards_after_power_cut_are_whole_or_rejected(
    tmp_path: Path, tokenizer: Tokenizer, texts: list[str], record_property: Record
) -> None:
    place, source = tmp_path / "place", tmp_path / "texts"
    place.mkdir()
    source.mkdir()
    for number, text in enumerate(texts[:12]):
        (source / f"{number}.txt").write_text(text, encoding="utf-8")
    out = place / "deep" / "prepared"
    wanted = {}
    possible = {None: ["first"], "first": ["first", "second"], "second": ["second"]}
    with recording(place) as record:
        for name, fraction in (("first", 0.2), ("second", 0.4)):
            prepare(
                [source], tokenizer, out, val_fraction=fraction, shard_tokens=500, overwrite=True
            )
            record.mark(name)
            wanted[name] = read_tree(out)

    def check(state: State) -> None:
        if out.exists():
            is_possible = read_tree(out) in [wanted[name] for name in possible[state.promise]]
            assert is_possible
            for split in ("train", "val"):
                TokenDataset(out, split)
        else:
            # Also while a new one takes the place of an old one.
            assert state.promise != "second"
            with pytest.raises(DataError, match=re.escape(f"{out} does not exist")):
                TokenDataset(out, "train")
        prepare([source], tokenizer, out, val_fraction=0.4, shard_tokens=500, overwrite=True)
        is_new = read_tree(out) == wanted["second"]
        assert is_new

    tried(record, check, cases(20, ALL), "shards", record_property)


# Caches


def test_shard_cache_after_power_cut_never_returns_other_data(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(cache))
    url = data.as_uri()
    with recording(cache) as record:
        wanted = read_tree(local_folder(url))
        record.mark("fetched")
    del wanted[".lock"]

    def check(state: State) -> None:
        # Also where the sizes alone are looked at.
        found = read_tree(local_folder(url, verify=False))
        is_same = {name: found[name] for name in wanted} == wanted
        assert is_same

    tried(record, check, cases(20, ALL), "fetched shards", record_property)


def test_measured_gpus_after_power_cut_are_whole_or_measured_again(
    tmp_path: Path, record_property: Record
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    path = cache / "calibration" / "gpus.json"
    measured = MeasuredGpu({name: low for name, (low, _) in BOUNDS.items()}, 0.1, 10, 5, "2.0")
    with recording(cache) as record:
        for number in range(2):
            save_measured(path, f"gpu {number}", measured)
            record.mark(number)
    complete = read_measured(path)

    def check(state: State) -> None:
        done = -1 if state.promise is None else state.promise
        assert len(read_measured(path)) in (done + 1, done + 2)
        for number in range(2):
            save_measured(path, f"gpu {number}", measured)
        assert read_measured(path) == complete

    tried(record, check, cases(20, ALL), "measured GPUs", record_property)


def test_compiled_kernel_after_power_cut_is_whole_or_recompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/c++")
    compiled = b"\x7fELF" + bytes(range(1, 200))

    def run(command: list[str], **_: Any) -> None:
        Path(command[-1]).write_bytes(compiled)

    monkeypatch.setattr(subprocess, "run", run)
    with recording(home) as record:
        few_rows._compiled()
        record.mark("compiled")

    def check(state: State) -> None:
        is_same = few_rows._compiled().read_bytes() == compiled
        assert is_same

    tried(record, check, cases(20, ALL), "compiled kernels", record_property)
