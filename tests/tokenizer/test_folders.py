"""Finding tokenizers in folders and detecting their kinds from their content."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from firstlight.errors import TokenizerError
from firstlight.tokenizer import END_OF_TEXT, Tokenizer
from tokenizer_files import MERGED, RANKED, piece_file, rank_file, tiny, write_gpt2_files

CONTENTS = {
    "tokenizer.json": tiny("tokenizer.json").backend.to_str().encode(),
    "ranks": rank_file(RANKED),
    "pieces": piece_file(MERGED),
}


def write_other_files(folder: Path) -> None:
    """Write the other files of a model folder, none of them a tokenizer."""
    (folder / "README.md").write_text("# words\n", encoding="utf-8")
    (folder / "NOTICE").write_bytes(b"\n\nbegins with an empty line")
    for name, value in {
        "config.json": {"model_type": "llama", "vocab_size": 7},
        "added_tokens.json": {"<x>": 320, "<y>": 321},
        "special_tokens_map.json": {"bos_token": "<s>"},
        "run.json": {"model": {"hidden_size": 3}},
        "list.json": [1, 2],
        "none.json": {},
    }.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / "broken.json").write_bytes(b'{"model": {"vocab"')
    # Weights, data and hidden files are not opened, whatever their content.
    for name in ("model.safetensors", "model.gguf", "pytorch_model.bin", "x.pt", ".hidden"):
        (folder / name).write_bytes(CONTENTS["ranks"])
    (folder / "folder.model").mkdir()


@pytest.mark.parametrize(
    "kind, name",
    [
        ("ranks", "llama3.tiktoken"),
        ("pieces", "spm.model"),
        ("tokenizer.json", "tokenizer.model"),
        ("pieces", "tokenizer.json"),
    ],
)
def test_tokenizer_folder_single_tokenizer_is_found(tmp_path: Path, kind: str, name: str) -> None:
    write_other_files(tmp_path)
    (tmp_path / name).write_bytes(CONTENTS[kind])
    assert Tokenizer.from_pretrained(tmp_path).fingerprint == tiny(kind).fingerprint


@pytest.mark.parametrize(
    "vocabulary, merges, given",
    [
        ("encoder.json", "vocab.bpe", ""),
        ("encoder.json", "vocab.bpe", "encoder.json"),
        ("encoder.json", "vocab.bpe", "vocab.bpe"),
        ("vocab.json", "vocab.bpe", ""),
    ],
)
def test_tokenizer_folder_gpt2_pair_is_found_under_other_names(
    tmp_path: Path, vocabulary: str, merges: str, given: str
) -> None:
    write_gpt2_files(tmp_path)
    expected = Tokenizer.from_pretrained(tmp_path).fingerprint
    (tmp_path / "vocab.json").rename(tmp_path / vocabulary)
    (tmp_path / "merges.txt").rename(tmp_path / merges)
    write_other_files(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path / given).fingerprint == expected


def test_tokenizer_folder_with_two_pairs_reads_matching_files(tmp_path: Path) -> None:
    write_gpt2_files(tmp_path)
    (tmp_path / "vocab.json").rename(tmp_path / "encoder.json")
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    write_gpt2_files(tmp_path, b"#version: 0.2\na b\n")
    for name, ids in [
        ("", [4, 2]),
        ("merges.txt", [4, 2]),
        ("encoder.json", [5]),
        ("vocab.bpe", [5]),
    ]:
        assert Tokenizer.from_pretrained(tmp_path / name).encode("abc") == ids


def test_tokenizer_merges_without_vocabulary_raise(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_bytes(b"#version: 0.2\na b\n")
    with pytest.raises(TokenizerError, match=r"some\.txt needs vocab\.json in the same folder"):
        Tokenizer.from_pretrained(tmp_path / "some.txt")


def test_tokenizer_folder_with_several_tokenizers_names_them(tmp_path: Path) -> None:
    (tmp_path / "a.tiktoken").write_bytes(CONTENTS["ranks"])
    (tmp_path / "spm.model").write_bytes(CONTENTS["pieces"])
    (tmp_path / "._spm.model").write_bytes(b"of macOS")
    message = r"contains several tokenizers \(a\.tiktoken, spm\.model\): specify one of the files"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path / "spm.model").eos_token == "</s>"


def test_tokenizer_folder_without_tokenizer_raises(tmp_path: Path) -> None:
    write_other_files(tmp_path)
    with pytest.raises(TokenizerError, match=r"no tokenizer in .*: expected tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)


# Rank files


def many_ranks(count: int) -> bytes:
    """Return ranks of every byte, followed by tokens of three bytes."""
    tokens = (number.to_bytes(3, "big") for number in range(count - 256))
    return rank_file(list(tokens))


def test_tokenizer_ranks_as_many_as_gpt2_are_taken_for_gpt2(tmp_path: Path) -> None:
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(many_ranks(50_256))
    loaded = Tokenizer.from_pretrained(path)
    assert loaded.special_tokens == {END_OF_TEXT: 50_256}
    assert (loaded.vocab_size, loaded.bos_token_id, loaded.eos_token_id) == (50_257, 50_256, 50_256)
    assert not loaded.add_bos
    assert loaded.encodes_in_pieces
    # Llama 3's pattern would give "!\n" and split the number after three digits.
    split = loaded.backend.pre_tokenizer
    assert split is not None
    assert [piece for piece, _ in split.pre_tokenize_str("!\na 1234")] == ["!", "Ċ", "a", "Ġ1234"]


@pytest.mark.parametrize(
    "count, name",
    [(50_280, "p50k_base"), (100_256, "cl100k_base"), (151_643, "Qwen"), (199_998, "o200k_base")],
)
def test_tokenizer_ranks_of_other_known_vocabularies_raise(
    tmp_path: Path, count: int, name: str
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(many_ranks(count))
    with pytest.raises(TokenizerError, match=rf"contains the ranks of {name}, whose split pattern"):
        Tokenizer.from_pretrained(path)
    # p50k_base skips the id of <|endoftext|>, which must not count as damage.
    lines = path.read_bytes().splitlines()
    lines[-1] = base64.b64encode(b"last one") + b" %d" % count
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(TokenizerError, match=f"contains the ranks of {name}"):
        Tokenizer.from_pretrained(path)


@pytest.mark.parametrize("name", ["", "tokenizer.pkl"])
def test_tokenizer_nanochat_pickle_raises_with_alternative(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(b"\x80\x04.")
    (tmp_path / "token_bytes.pt").write_bytes(b"PK")
    with pytest.raises(TokenizerError, match=r"is a pickle, which could run code, and is not read"):
        Tokenizer.from_pretrained(tmp_path / name)
    # A readable tokenizer next to it is loaded.
    tiny("tokenizer.json").save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).vocab_size == tiny("tokenizer.json").vocab_size
