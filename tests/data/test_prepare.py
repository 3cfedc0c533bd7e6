"""Tests of preparing a corpus: every document is at its position for any number of workers."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers

from dying_worker import work_or_die
from firstlight.cli.main import main
from firstlight.data import encoding
from firstlight.data import prepare as module
from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import cut_tail, prepare
from firstlight.data.records import Record, read_documents, read_records
from firstlight.data.shards import CorpusWriter, Shard, ShardWriter
from firstlight.data.sources import SOURCES_NAME, find_sources
from firstlight.errors import (
    ConfigError,
    DataError,
    InputError,
    StorageError,
    TokenizerError,
)
from firstlight.files import disk as seam
from firstlight.tokenizer import (
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    Tokenizer,
    formats,
    train_tokenizer,
)
from tokenizer_files import TEXTS, tiny

TOKENIZER = tiny("tokenizer.json")
EOS = 0


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a prepared folder, without the names of its inputs."""
    files = (path for path in folder.iterdir() if path.name != SOURCES_NAME)
    return {path.name: path.read_bytes() for path in files}


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """Return the tokens of each document in a split, according to the offsets in its shards."""
    found = []
    for path in sorted(folder.glob(f"{split}-*.bin")):
        tokens, offsets = Shard(path).tokens(), Shard(path).offsets()
        spans = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        found += [tokens[start:stop].tolist() for start, stop in spans]
    return found


def texts_of(folder: Path, split: str, tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    return [tokenizer.decode(ids) for ids in documents_of(folder, split)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Output


def test_manifest_records_exactly_what_was_written(tmp_path: Path) -> None:
    texts = ["ab ab", "é 日本", "the light\n", "x"]
    source = write_jsonl(tmp_path / "a.jsonl", [*texts, "", "  "])
    out = tmp_path / "deep" / "out"
    manifest = prepare([source], TOKENIZER, out, val_fraction=0.25)
    ids = [[*TOKENIZER.encode(text), EOS] for text in texts]
    # A document is held out when validation is below its share: here only after the first document.
    train, val = [ids[0], ids[2], ids[3]], [ids[1]]
    val_bytes = texts[1].encode()
    train_bytes = "".join([texts[0], texts[2], texts[3]]).encode()

    def shard(split: str, documents: list[list[int]]) -> dict[str, Any]:
        entry = manifest["splits"][split]["shards"][0]
        return {
            "file": f"{split}-00000.bin",
            "tokens": sum(map(len, documents)),
            "documents": len(documents),
            "bytes": (out / f"{split}-00000.bin").stat().st_size,
            "sha256": entry["sha256"],
        }

    assert manifest == {
        "format": "firstlight-tokens",
        "version": 1,
        "dtype": "uint16",
        "vocab_size": TOKENIZER.vocab_size,
        "tokenizer_sha256": TOKENIZER.fingerprint,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "documents": {"read": 6, "written": 4, "rejected": {"empty": 2}},
        "val_fraction": 0.25,
        "split_by": "document",
        "unread_files": {},
        "splits": {
            "train": {
                "documents": 3,
                "tokens": sum(map(len, train)),
                "text_bytes": len(train_bytes),
                "shards": [shard("train", train)],
            },
            "val": {
                "documents": 1,
                "tokens": len(val[0]),
                "text_bytes": len(val_bytes),
                "gzip_bytes": len(gzip.compress(val_bytes, 9)),
                "shards": [shard("val", val)],
            },
        },
    }
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8")) == manifest
    assert documents_of(out, "train") == train
    assert documents_of(out, "val") == val
    assert Tokenizer.from_pretrained(out).fingerprint == TOKENIZER.fingerprint
    assert names(out) == [
        "manifest.json",
        "rejected.jsonl",
        "sources.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train-00000.bin",
        "val-00000.bin",
    ]
    sources = json.loads((out / "sources.json").read_text(encoding="utf-8"))
    assert sources == {"inputs": ["a.jsonl"], "options": [], "cleaned": True}


def test_prepare_every_document_is_written_or_rejected_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"eins\nGr\xfcn\n")
    lines = [b'{"text": "gut"}', b"kaputt", b"", b'{"titel": "x"}', b'{"text": " "}', b""]
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "c.md").write_text("auch gut", encoding="utf-8")
    (tmp_path / "d.py").write_text("", encoding="utf-8")
    out = tmp_path / "out"
    manifest = prepare([tmp_path], TOKENIZER, out, val_fraction=0)
    rejected = {"bad_utf8": 1, "broken_json": 1, "empty": 3, "no_text": 1}
    assert manifest["documents"] == {"read": 8, "written": 2, "rejected": rejected}
    assert texts_of(out, "train") == ["gut", "auch gut"]
    log = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(Path(entry["file"]).name, entry["line"], entry["reason"]) for entry in log] == [
        ("a.txt", 2, "bad_utf8"),
        ("b.jsonl", 2, "broken_json"),
        ("b.jsonl", 3, "empty"),
        ("b.jsonl", 4, "no_text"),
        ("b.jsonl", 5, "empty"),
        ("d.py", 1, "empty"),
    ]
    assert all(entry["detail"] for entry in log)


def test_prepare_files_of_other_types_are_counted_and_listed(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "pictures").mkdir(parents=True)
    (folder / "a.txt").write_text("some text", encoding="utf-8")
    others = [folder / "b.PPT", folder / "c.ppt", folder / "pictures" / "d"]
    for file in others:
        file.write_bytes(bytes(range(32)))
    manifest = prepare([folder], TOKENIZER, tmp_path / "out", val_fraction=0)
    assert manifest["unread_files"] == {".ppt": 2, "": 1}
    listed = (tmp_path / "out" / "unread.txt").read_text(encoding="utf-8")
    lines = [line.split("\t") for line in listed.splitlines()]
    assert [path for path, _ in lines] == [str(file) for file in others]
    assert lines[-1][1] == "a binary file: exclude it"


def test_prepare_without_rejections_writes_no_rejection_list(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a text", "b text"])
    prepare([source], TOKENIZER, tmp_path / "out")
    assert not (tmp_path / "out" / "rejected.jsonl").exists()


def test_prepare_rejects_file_with_non_unicode_name(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    try:
        Path(os.fsdecode(path)).write_bytes(b"\xff")
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    (tmp_path / "good.txt").write_text("good", encoding="utf-8")
    prepare([tmp_path], TOKENIZER, tmp_path / "out", val_fraction=0)
    line = json.loads((tmp_path / "out" / "rejected.jsonl").read_text(encoding="utf-8"))
    assert os.fsencode(line["file"]) == path


@pytest.mark.parametrize("kind", ["tokenizer.json", "ranks", "pieces"])
def test_prepare_documents_are_enclosed_in_bos_and_eos_of_tokenizer(
    tmp_path: Path, kind: str
) -> None:
    tokenizer = tiny(kind)
    texts = ["ab ab", "the <|endoftext|> <s> text", "é"]
    out = tmp_path / "out"
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = prepare([source], tokenizer, out, val_fraction=0)
    before = [tokenizer.bos_token_id] if kind != "tokenizer.json" else []
    assert documents_of(out, "train") == [
        [*before, *tokenizer.encode(text), tokenizer.eos_token_id] for text in texts
    ]
    assert manifest["bos_token_id"] == tokenizer.bos_token_id


def test_prepare_tokenizer_without_end_token_writes_none(tmp_path: Path) -> None:
    bare = train_tokenizer(["ab"], 256, special_tokens=())
    source = write_jsonl(tmp_path / "a.jsonl", ["x", "yz"])
    prepare([source], bare, tmp_path / "out", val_fraction=0)
    assert documents_of(tmp_path / "out", "train") == [bare.encode("x"), bare.encode("yz")]


def test_prepare_accepts_tokenizer_path(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    source = write_jsonl(tmp_path / "a.jsonl", ["the light", "ab"])
    prepare([source], TOKENIZER, tmp_path / "object")
    prepare([str(source)], str(tmp_path / "tokenizer"), str(tmp_path / "path"))
    assert contents(tmp_path / "object") == contents(tmp_path / "path")


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """Words w0, w1, ...; the last id is the highest."""
    words = {f"w{number}": number for number in range(vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, eos_token="w1")


@pytest.mark.parametrize(
    "vocab_size, dtype", [(65536, "uint16"), (65537, "uint32"), (70000, "uint32")]
)
def test_prepare_ids_above_65535_are_kept(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [number for number in (5, 65535, 65536, 69999) if number < vocab_size]
    source = write_jsonl(tmp_path / "a.jsonl", [" ".join(f"w{number}" for number in ids)])
    manifest = prepare(
        [source], word_tokenizer(vocab_size), tmp_path / "out", val_fraction=0, workers=2
    )
    assert manifest["dtype"] == dtype
    assert documents_of(tmp_path / "out", "train") == [[*ids, 1]]
    dataset = TokenDataset(tmp_path / "out", "train")
    assert dataset[0 : dataset.num_tokens].tolist() == [*ids, 1]


def test_prepare_several_shards_equal_one_shard(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus], TOKENIZER, tmp_path / "one")
    manifest = prepare([corpus], TOKENIZER, tmp_path / "many", shard_tokens=1000)
    for split in ("train", "val"):
        shards = manifest["splits"][split]["shards"]
        assert len(shards) > 1
        assert all(shard["tokens"] >= 1000 for shard in shards[:-1])
        assert documents_of(tmp_path / "many", split) == documents_of(tmp_path / "one", split)
        one, many = (TokenDataset(tmp_path / name, split) for name in ("one", "many"))
        assert one.num_tokens == many.num_tokens
        assert np.array_equal(one[0 : one.num_tokens], many[0 : many.num_tokens])


def test_prepare_hub_dataset_equals_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda *_, **__: [{"text": text} for text in texts]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    prepare(["hf:owner/name"], TOKENIZER, tmp_path / "hub", progress=True)
    prepare([write_jsonl(tmp_path / "a.jsonl", texts)], TOKENIZER, tmp_path / "file", progress=True)
    assert contents(tmp_path / "hub") == contents(tmp_path / "file")


# Workers


def test_prepare_output_does_not_depend_on_worker_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    # Use many batches, and documents with many pieces, even for such a small corpus.
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 700)
    monkeypatch.setattr(formats, "_PIECE_CHARACTERS", 100)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(b'{"text": "good"}\nbroken\n{"text": "\xff"}\n{"text": "also good"}\n')
    for workers in (1, 2, 3):
        prepare([corpus, mixed], TOKENIZER, tmp_path / f"{workers}", workers=workers)
    one = contents(tmp_path / "1")
    assert set(one) >= {"train-00000.bin", "val-00000.bin", "rejected.jsonl", "manifest.json"}
    assert contents(tmp_path / "2") == one
    assert contents(tmp_path / "3") == one


def test_prepare_twice_gives_identical_bytes(tmp_path: Path, corpus: Path) -> None:
    for name in ("first", "second"):
        prepare([corpus], TOKENIZER, tmp_path / name)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_prepare_workers_start_with_special_tokens_disabled(tmp_path: Path) -> None:
    tokenizer, text = tiny("ranks"), "ab <|begin_of_text|><|eot_id|> the"
    source = write_jsonl(tmp_path / "a.jsonl", [text])
    prepare([source], tokenizer, tmp_path / "out", val_fraction=0, workers=2)
    ids = [tokenizer.bos_token_id, *tokenizer.encode(text), tokenizer.eos_token_id]
    assert documents_of(tmp_path / "out", "train") == [ids]


@pytest.mark.parametrize("megabytes, cpus, workers", [(15, 8, 1), (17, 8, 8), (17, 1, 1)])
def test_prepare_worker_count_follows_corpus_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megabytes: int, cpus: int, workers: int
) -> None:
    seen: list[int] = []

    def encode(pieces: Any, tokenizer: Any, workers: int, max_tokens: int | None) -> Iterator[Any]:
        seen.append(workers)
        yield from ()

    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(megabytes << 20)
    monkeypatch.setattr(module, "encode_in_order", encode)
    monkeypatch.setattr(module, "usable_cpus", lambda: cpus)
    with pytest.raises(InputError):
        prepare([tmp_path / "a.txt"], TOKENIZER, tmp_path / "out")
    assert seen == [workers]


def killing(after: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill an encoding process whenever the given number of documents has been read; return the
    list of killed processes.

    Each batch is one document. Once 3 batches for each of the 2 processes are submitted, reading
    continues only when encoded batches are returned.
    """
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 1)
    killed: list[int] = []

    def documents(*arguments: Any) -> Iterator[Any]:
        for number, entry in enumerate(read_documents(*arguments), start=1):
            if number in after:
                process = multiprocessing.active_children()[0]
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                killed.append(process.pid)
            yield entry

    monkeypatch.setattr(module, "read_documents", documents)
    return killed


def test_prepare_killed_workers_do_not_change_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, capsys: Any
) -> None:
    prepare([corpus], TOKENIZER, tmp_path / "one", workers=1)
    # Twice in the middle, and once after the last batches were submitted.
    killed = killing((20, 60, 120), monkeypatch)
    prepare([corpus], TOKENIZER, tmp_path / "killed", workers=2)
    assert len(set(killed)) == 3
    assert contents(tmp_path / "killed") == contents(tmp_path / "one")
    line = "a tokenizing process was killed: encoding its documents again\n"
    # A process that is idle when it is killed is replaced when it gets its next batch.
    said = capsys.readouterr().err
    assert said == said.count("\n") * line
    assert said.count("\n") in (1, 2, 3)
    assert multiprocessing.active_children() == []


def test_prepare_batch_killing_every_worker_raises_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    texts = [*(f"document {number}" for number in range(20)), "fatal", "last"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 1)
    monkeypatch.setattr(encoding, "_work", work_or_die)
    with pytest.raises(
        DataError,
        match=(
            r"process was killed, .* because memory ran out: use "
            r"fewer --workers"
        ),
    ):
        prepare([source], TOKENIZER, tmp_path / "new" / "out", workers=2)
    assert names(tmp_path) == ["a.jsonl"]
    assert capsys.readouterr().err.count("encoding its documents again") >= 2
    assert multiprocessing.active_children() == []


class Panic(BaseException):
    """An error like a Rust panic: it is not an Exception and can't be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("can't be pickled")


def test_prepare_tokenizer_error_is_not_reported_as_killed_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise Panic("index out of\nrange")

    monkeypatch.setattr(encoding, "encode", fail)
    is_good, error = encoding._answer(["text"], TOKENIZER)
    assert not is_good
    assert isinstance(error, DataError)
    expected = "the tokenizer failed (Panic: index out of range): its files may be damaged"
    assert str(error) == expected


def exit_at_once(_: Any) -> None:
    """End the process immediately, as if it belonged to a script without the `__main__` guard."""
    os._exit(1)


@pytest.mark.timeout(60)
def test_prepare_worker_killed_during_start_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    """The arguments of the process exceed the capacity of a pipe that nobody would read."""
    draw = random.Random(6)
    words = ("".join(draw.choices("abcdefghij", k=7)) for _ in range(9000))
    tokenizer = train_tokenizer([" ".join(words)], 4000)
    assert len(tokenizer.backend.to_str()) > 1 << 16
    killed: list[int] = []
    spawn = multiprocessing.util.spawnv_passfds

    def spawned(path: Any, arguments: Any, descriptors: Any) -> int:
        process: int = spawn(path, arguments, descriptors)
        if not killed and "spawn_main" in str(arguments):
            os.kill(process, signal.SIGKILL)
            killed.append(process)
        return process

    prepare([corpus], tokenizer, tmp_path / "one", workers=1)
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawned)
    prepare([corpus], tokenizer, tmp_path / "two", workers=2)
    assert len(killed) == 1
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_prepare_workers_that_never_start_are_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, capsys: Any
) -> None:
    monkeypatch.setattr(encoding, "_work", exit_at_once)
    with pytest.raises(
        DataError, match=r"ended with exit code 1: call .* `if __name__ ==.*--workers 1"
    ):
        prepare([corpus], TOKENIZER, tmp_path / "out", workers=2)
    assert names(tmp_path) == []
    assert capsys.readouterr().err == ""


def test_prepare_input_changed_during_read_raises_input_error(tmp_path: Path) -> None:
    sources = [write_jsonl(tmp_path / f"{name}.jsonl", ["one", "two", "three"]) for name in "ab"]
    documents = read_documents(find_sources(sources))
    assert next(documents).value == "one"
    with open(sources[0], "a", encoding="utf-8") as file:
        file.write('{"text": "four"}\n')
    with pytest.raises(
        InputError,
        match=(
            r"a\.jsonl was changed while it was being read: run "
            r"the command again"
        ),
    ):
        list(documents)
    documents = read_documents(find_sources(sources[1:]))
    assert next(documents).value == "one"
    before = sources[1].stat()
    # Wait until the system's clock has advanced.
    while sources[1].stat().st_ctime_ns == before.st_ctime_ns:
        sources[1].write_text(sources[1].read_text().replace("three", "eerht"))
        os.utime(sources[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sources[1].stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(InputError, match=r"b\.jsonl was changed"):
        list(documents)
    documents = read_documents(find_sources(sources[1:]))
    assert next(documents).value == "one"
    sources[1].unlink()
    with pytest.raises(InputError, match=r"b\.jsonl was changed"):
        list(documents)


def test_prepare_records_truncated_during_read_raise_input_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    records = read_records(find_sources([path]))
    assert next(records).value == {"text": "one"}
    os.truncate(path, 20)
    with pytest.raises(InputError, match=r"a\.jsonl was changed while it was being read"):
        list(records)


def test_prepare_input_changed_after_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])

    def split_of(text: str) -> Literal["train", "val"]:
        if text == "three":
            os.truncate(path, 0)
        return "train"

    later = write_jsonl(tmp_path / "b.jsonl", ["three"])
    manifest = prepare([path, later], TOKENIZER, tmp_path / "out", split_of=split_of)
    assert manifest["documents"]["written"] == 3
    assert "a.jsonl changed while the corpus was being prepared, so " in capsys.readouterr().err


# Long documents


def trained(pattern: str) -> Tokenizer:
    text = "the light\n  falls\r\n\n\tan é\n日本\n日本語\n\n1234\n ½\n'll don't x_1()\n"
    return train_tokenizer([text * 3, "a\nb\n"], 330, pattern=pattern)


TRAINED = {pattern: trained(pattern) for pattern in (GPT2_PATTERN, LLAMA3_PATTERN)}
LINES = st.tuples(
    st.lists(
        TEXTS | st.sampled_from(["word", "日本", " \n", "a\n", "é\n \n", "1\n", "½\n", "x_ ", "²"]),
        max_size=12,
    ),
    st.sampled_from(["\n", " ", "  ", "\n ", " \n", "-", "'", ", "]),
).map(lambda drawn: drawn[1].join(drawn[0]))


@pytest.mark.parametrize("pattern", TRAINED, ids=["gpt2", "llama3"])
@given(text=LINES, size=st.integers(1, 20))
def test_encode_long_document_in_pieces_equals_whole(pattern: str, text: str, size: int) -> None:
    tokenizer = TRAINED[pattern]
    assert tokenizer.encodes_in_pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_PIECE_CHARACTERS", size)
        found = formats.cut_long(text)
    assert "".join(found) == text
    assert all(len(piece) >= size for piece in found[:-1])
    joined = [token_id for piece in found for token_id in tokenizer.encode(piece)]
    assert joined == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("after", "every"),
    [(" ", 16), *(pytest.param(c, 1, marks=pytest.mark.slow) for c in "\n -'_")],
)
@pytest.mark.parametrize("pattern", TRAINED, ids=["gpt2", "llama3"])
def test_cut_long_at_any_boundary_starts_new_piece(pattern: str, after: str, every: int) -> None:
    """Test all of Unicode. New letters are added in blocks of at least 16, and Python and the
    tokenizer library may support different versions of Unicode.
    """
    codes = itertools.chain(range(0x3400), range(0x3400, 0x110000, every))
    everything = (chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    before = [c for c in everything if formats._BOUNDARY.search(c + after)]
    assert len(before) > 100_000 // every
    splitter = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    joined = after.join([*before, ""])
    parts = [part for part, _ in splitter.pre_tokenize_str(joined)]
    assert "".join(parts) == joined
    assert not any(after in part[1:] for part in parts)


def test_cut_long_run_without_boundary_gives_bounded_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "_PIECE_CHARACTERS", 10)
    monkeypatch.setattr(formats, "_BOUNDARY_CHARACTERS", 5)
    assert formats.cut_long("a" * 12 + " " + "b" * 40) == [
        "a" * 12,
        " " + "b" * 9,
        *["b" * 10] * 2,
        "b" * 11,
    ]
    assert formats.cut_long("a" * 15) == ["a" * 15]
    assert formats.cut_long("\n" * 25) == ["\n" * 10, "\n" * 15]


@pytest.mark.parametrize("pattern", TRAINED, ids=["gpt2", "llama3"])
def test_prepare_document_in_pieces_equals_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], pattern: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["".join(texts), "short", "\n".join(texts[:40])])
    prepare([source], TRAINED[pattern], tmp_path / "whole")
    cuts: list[int] = []

    whole_cut_long = formats.cut_long

    def counted(text: str) -> list[str]:
        found = whole_cut_long(text)
        cuts.append(len(found))
        return found

    monkeypatch.setattr(module, "cut_long", counted)
    monkeypatch.setattr(formats, "_PIECE_CHARACTERS", 200)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 500)
    prepare([source], TRAINED[pattern], tmp_path / "pieces")
    assert max(cuts) > 50
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")


def test_prepare_unknown_tokenizer_receives_whole_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    monkeypatch.setattr(module, "cut_long", lambda text: pytest.fail("cut"))
    text = "".join(texts)
    source = write_jsonl(tmp_path / "a.jsonl", [text])
    prepare([source], tiny("pieces"), tmp_path / "out", val_fraction=0)
    assert documents_of(tmp_path / "out", "train") == [[1, *tiny("pieces").encode(text), 2]]


# Splits


@given(
    sizes=st.lists(st.integers(1, 60), min_size=20, max_size=80),
    percent=st.integers(5, 95),
)
def test_prepare_validation_fraction_is_met_with_whole_documents(
    sizes: list[int], percent: int
) -> None:
    fraction = Fraction(percent, 100)
    documents = [Record("", 1, "x" * size) for size in sizes]
    run = _preparation(fraction)
    found = list(run._pieces(iter(documents)))
    assert [len(piece.text) for piece in found] == sizes
    assert all(piece.first and piece.last for piece in found)
    assert found[0].split == "train"
    held_out = sum(len(piece.text) for piece in found if piece.split == "val")
    # Validation is never behind by more than the share of one document, and never ahead by more
    # than one document.
    assert fraction * (sum(sizes) - max(sizes)) <= held_out <= fraction * sum(sizes) + max(sizes)


def test_prepare_fraction_one_tenth_takes_every_tenth_equal_document() -> None:
    found = list(_preparation(Fraction("0.1"))._pieces(Record("", 1, "x" * 10) for _ in range(42)))
    assert [i for i, piece in enumerate(found) if piece.split == "val"] == [1, 11, 21, 31, 41]


def test_prepare_document_too_short_to_split_goes_to_one_split(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x", "0123456789" * 2])
    manifest = prepare([source], TOKENIZER, tmp_path / "out")
    assert texts_of(tmp_path / "out", "train") == ["012345678901234567"]
    assert texts_of(tmp_path / "out", "val") == ["x", "89"]
    assert manifest["documents"]["written"] == 2


def _preparation(fraction: Fraction) -> Any:
    writer = CorpusWriter(Path(), TOKENIZER, 1000)
    return module._Preparation(writer, fraction, None, max_documents=None, max_tokens=None)


@pytest.mark.parametrize(
    "documents, fraction, split_by",
    [
        (10, 0.1, "document"),
        (9, 0.1, "tail"),
        (2, 0.5, "document"),
        (1, 0.5, "tail"),
        (1, 0, "none"),
    ],
)
def test_prepare_splits_by_document_if_there_are_enough(
    tmp_path: Path, documents: int, fraction: float, split_by: str
) -> None:
    texts = [f"document {number}\n" * 20 for number in range(documents)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = prepare([source], TOKENIZER, tmp_path / "out", val_fraction=fraction)
    assert manifest["split_by"] == split_by
    assert manifest["documents"]["written"] == documents
    train = texts_of(tmp_path / "out", "train")
    val = texts_of(tmp_path / "out", "val")
    if split_by == "document":
        assert sorted(train + val) == texts
        assert val
    elif split_by == "tail":
        assert [a + b for a, b in zip(train, val, strict=True)] == texts
    else:
        assert (train, val) == (texts, [])


def test_prepare_without_validation_writes_no_val_split(tmp_path: Path, corpus: Path) -> None:
    manifest = prepare([corpus], TOKENIZER, tmp_path / "out", val_fraction=0)
    assert list(manifest["splits"]) == ["train"]
    assert manifest["split_by"] == "none"
    assert manifest["splits"]["train"]["documents"] == 120
    with pytest.raises(DataError, match="has no 'val' split"):
        TokenDataset(tmp_path / "out", "val")


@pytest.mark.parametrize(
    "text, fraction, tail",
    [
        ("one\n" * 20, "1/10", "one\n" * 2),
        ("one\n" * 20 + "x", "1/10", "one\n" * 2 + "x"),
        ("x" * 100, "1/10", "x" * 10),
        ("title\n" + "x" * 94, "1/10", "x" * 10),
        ("x" * 79 + "\n" + "y" * 20, "1/10", "y" * 10),
        ("x" * 80 + "\n" + "y" * 19, "1/10", "y" * 19),
        ("ab", "1/2", "b"),
        ("a\nb\n", "1/2", "b\n"),
    ],
)
def test_cut_tail_starts_at_nearby_line_break(text: str, fraction: str, tail: str) -> None:
    assert cut_tail(text, Fraction(fraction)) == (text[: len(text) - len(tail)], tail)


@given(text=LINES, percent=st.integers(1, 99))
def test_cut_tail_loses_no_text_and_stays_within_twice_its_share(text: str, percent: int) -> None:
    fraction = Fraction(percent, 100)
    head, tail = cut_tail(text, fraction)
    assert head + tail == text
    assert math.floor(len(text) * fraction) <= len(tail) <= 2 * math.ceil(len(text) * fraction)


def test_prepare_corpus_too_large_to_buffer_is_split_by_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOKAHEAD_CHARACTERS", 1000)
    source = write_jsonl(tmp_path / "a.jsonl", ["line\n" * 100] * 30)
    manifest = prepare([source], TOKENIZER, tmp_path / "out", val_fraction=0.05)
    assert manifest["split_by"] == "tail"
    assert manifest["documents"] == {"read": 30, "written": 30, "rejected": {}}


def test_prepare_text_bytes_and_gzip_bytes_match_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    monkeypatch.setattr(formats, "_PIECE_CHARACTERS", 150)
    manifest = prepare([corpus], TOKENIZER, tmp_path / "out")
    for split in ("train", "val"):
        text = "".join(texts_of(tmp_path / "out", split)).encode()
        assert manifest["splits"][split]["text_bytes"] == len(text)
    whole = zlib.compressobj(9, wbits=31)
    assert manifest["splits"]["val"]["gzip_bytes"] == len(whole.compress(text) + whole.flush())
    assert manifest["splits"]["val"]["gzip_bytes"] == len(gzip.compress(text, 9))
    assert "gzip_bytes" not in manifest["splits"]["train"]


# Errors, after which no files remain


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"val_fraction": 1}, "val_fraction must be at least 0 and below 1, not 1"),
        ({"val_fraction": -0.1}, "val_fraction must be at least 0 and below 1, not -0.1"),
        ({"val_fraction": float("nan")}, "val_fraction must be at least 0 and below 1, not nan"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"shard_tokens": 0}, "shard_tokens must be at least 1, not 0"),
        ({"engine": "spark"}, "engine must be one of local, ray, not spark"),
        (
            {"engine": "ray", "workers": 2},
            "workers applies only to the local engine: omit it with engine ray",
        ),
        (
            {"ray_address": "auto"},
            "ray_address requires engine ray: set engine to ray, or omit ray_address",
        ),
    ],
)
def test_prepare_arguments_out_of_range_raise_config_error(
    tmp_path: Path, corpus: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare([corpus], TOKENIZER, tmp_path / "out", **arguments)
    assert str(caught.value) == message
    assert names(tmp_path) == []


def test_prepare_missing_input_or_tokenizer_raises(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(InputError, match="none does not exist"):
        prepare([tmp_path / "none"], TOKENIZER, tmp_path / "out")
    with pytest.raises(TokenizerError, match="none does not exist"):
        prepare([corpus], tmp_path / "none", tmp_path / "out")
    assert names(tmp_path) == []


def _empty(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"")


def _all_rejected(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"\n{}\n{\n")


def _damaged_after_good_documents(folder: Path) -> None:
    (folder / "a.txt").write_text("good " * 100, encoding="utf-8")
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-5])


@pytest.mark.parametrize(
    "make, message",
    [
        (_empty, "the corpus is empty: the inputs contain no documents"),
        (
            _all_rejected,
            r"the corpus is empty: all 3 documents read were rejected \(1 empty or only "
            r"whitespace, 1 no text in the text field, 1 not a valid JSON line\); first: "
            r".*a\.jsonl:1: blank",
        ),
        (_damaged_after_good_documents, r"b\.txt\.gz is damaged"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_empty_or_damaged_inputs_leave_nothing(
    tmp_path: Path, make: Callable[[Path], None], message: str, workers: int
) -> None:
    (tmp_path / "in").mkdir()
    make(tmp_path / "in")
    with pytest.raises(InputError, match=message):
        prepare([tmp_path / "in"], TOKENIZER, tmp_path / "new" / "out", workers=workers)
    assert names(tmp_path) == ["in"]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("refused", ["create", "write", "sync", "rename"])
def test_prepare_on_full_disk_raises_storage_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, refused: str
) -> None:
    monkeypatch.setattr(seam.disk, refused, full_disk)
    with pytest.raises(StorageError, match=r"the disk is full at .*out"):
        prepare([corpus], TOKENIZER, tmp_path / "new" / "out")
    assert names(tmp_path) == []


def test_prepare_text_of_one_repeated_character_raises_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("b" * 20_000 + "\n")
    said = r"100\.0% of the text is the single character 'b'"
    with pytest.raises(InputError, match=said):
        prepare([tmp_path / "a.txt"], TOKENIZER, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # Any other document makes the corpus acceptable.
    (tmp_path / "b.txt").write_text("a text with words\n" * 10)
    assert prepare([tmp_path], TOKENIZER, tmp_path / "out")


def test_train_tokenizer_on_one_repeated_character_fails_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("b" * 20_000)
    out = str(tmp_path / "out")
    words = ["tokenizer", "train", str(tmp_path / "a.txt"), "--vocab-size", "300", "--out", out]
    assert main(words) == 1
    assert "of the text is the single character 'b'" in capsys.readouterr().err
    assert not Path(out).exists()


def test_prepare_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare([corpus], TOKENIZER, tmp_path / "out")
    assert names(tmp_path) == []


# Overwriting


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    source = write_jsonl(tmp_path / "old.jsonl", ["old text", "more old text"])
    prepare([source], TOKENIZER, tmp_path / "out")
    return tmp_path / "out"


def test_prepare_existing_corpus_is_overwritten_only_when_asked(
    prepared: Path, corpus: Path
) -> None:
    before = contents(prepared)
    with pytest.raises(InputError, match=r"out already exists .* or add --overwrite"):
        prepare([corpus], TOKENIZER, prepared)
    assert contents(prepared) == before
    prepare([corpus], TOKENIZER, prepared, overwrite=True)
    assert len(documents_of(prepared, "train")) > 100
    assert names(prepared.parent) == ["old.jsonl", "out"]


def test_prepare_overwrite_removes_old_corpus_completely(prepared: Path, corpus: Path) -> None:
    prepare([corpus], TOKENIZER, prepared, overwrite=True, shard_tokens=1000)
    assert (prepared / "train-00003.bin").exists()
    prepare([corpus], TOKENIZER, prepared, overwrite=True, val_fraction=0)
    assert names(prepared) == [
        "manifest.json",
        "sources.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train-00000.bin",
    ]


@pytest.mark.parametrize("refused", ["create", "write", "sync", "rename"])
def test_prepare_failed_overwrite_keeps_old_corpus(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, refused: str
) -> None:
    before = contents(prepared)
    monkeypatch.setattr(seam.disk, refused, full_disk)
    with pytest.raises(StorageError):
        prepare([corpus], TOKENIZER, prepared, overwrite=True)
    assert contents(prepared) == before
    assert names(prepared.parent) == ["old.jsonl", "out"]


def test_prepare_corpus_from_its_own_folder_requires_text(prepared: Path) -> None:
    before = contents(prepared)
    with pytest.raises(InputError, match="contains no text files"):
        prepare([prepared], TOKENIZER, prepared, overwrite=True)
    assert contents(prepared) == before


@pytest.mark.parametrize("content", [None, "{}", '{"format": "firstlight-tokens", "version": 9}'])
def test_prepare_overwrite_keeps_folder_that_is_not_a_corpus(
    tmp_path: Path, corpus: Path, content: str | None
) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.txt").write_text("years of work", encoding="utf-8")
    if content is not None:
        (out / "manifest.json").write_text(content, encoding="utf-8")
    before = contents(out)
    with pytest.raises(InputError, match="thesis is not a prepared corpus, so it is not"):
        prepare([corpus], TOKENIZER, out, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_prepare_overwrite_keeps_file_but_uses_empty_folder(
    tmp_path: Path, corpus: Path, overwrite: bool
) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="file"):
        prepare([corpus], TOKENIZER, tmp_path / "file", overwrite=overwrite)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    (tmp_path / "empty").mkdir()
    prepare([corpus], TOKENIZER, tmp_path / "empty", overwrite=overwrite)
    assert (tmp_path / "empty" / "manifest.json").exists()
    assert names(tmp_path) == ["empty", "file"]
