"""Tokenizer files that are damaged, or would give other ids than their library, raise an error."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from builders import slow_but
from firstlight.errors import TokenizerError
from firstlight.files.limits import LimitedProcess
from firstlight.tokenizer import SPLIT_PATTERNS, Tokenizer, formats, parts, train_tokenizer
from tokenizer_files import (
    KINDS,
    MERGED,
    NORMALIZER,
    RANKED,
    TRAINER,
    block,
    change_json,
    load_bytes,
    number,
    piece,
    piece_file,
    rank_file,
    tiny,
    write_gpt2_files,
)


def test_load_tokenizer_missing_path_names_expected_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer .*none does not exist"):
        Tokenizer.from_pretrained(tmp_path / "none")
    message = r"no tokenizer in .*: expected tokenizer\.json, vocab\.json \+ merges\.txt"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a sentencepiece BPE model with byte fallback"),
        (b"{", "is not valid JSON"),
        (b'{"model": "\xff"}', "is not valid JSON"),
        (b'{"a": ' * 100_000, "is not valid JSON"),
        (b'{"model": {}}', "can't be loaded"),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}', "can't be loaded"),
        (b'{"a": 0}', r"needs merges\.txt in the same folder"),
        (b"[1, 2]", "is neither"),
        (b"just some words\n", "is neither"),
        (bytes(100), "is not a sentencepiece BPE model"),
        (random.Random(0).randbytes(1000), "is neither"),
        (b"\xff" * 30, "is neither"),
        (b"\x10\0" * 600_001, "is neither"),  # more fields than any model has pieces
        (b"\x0a\x2d\x0a\x01a" + b"\x20\0" * 21, "is neither"),
    ],
)
def test_load_tokenizer_invalid_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=rf"thing\.model {message}"):
        load_bytes(tmp_path, content, "thing.model")


def test_load_tokenizer_with_bpe_dropout_raises(tmp_path: Path) -> None:
    state = json.loads(tiny("tokenizer.json").backend.to_str())
    state["model"]["dropout"] = 0.1
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"has a BPE dropout of 0\.1, .* to null in the file"):
        Tokenizer.from_pretrained(path)
    state["model"]["dropout"] = 0.0
    path.write_text(json.dumps(state), encoding="utf-8")
    Tokenizer.from_pretrained(path)


@pytest.mark.parametrize("kind", [models.WordPiece, models.WordLevel])
def test_load_tokenizer_without_unknown_token_raises_with_advice(kind: Any) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(kind({"a": 0}, unk_token="[UNK]")))
    advice = r"\(add the token that its unk_token names to the vocabulary in tokenizer\.json\)$"
    for call in (lambda: tokenizer.encode("b"), lambda: tokenizer.extended(["b"])):
        with pytest.raises(TokenizerError, match=advice):
            call()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_load_tokenizer_file_truncated_anywhere_raises_or_is_whole(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
) -> None:
    content = {
        "tokenizer.json": tiny("tokenizer.json").backend.to_str().encode(),
        "ranks": rank_file([b"%d" % number for number in range(10, 40)]),
        "pieces": piece_file(MERGED),
    }[kind]
    cut = content[: data.draw(st.integers(0, len(content) - 3))]
    # A rank file may end after any line: if it contains every byte, it is just a smaller one.
    at_line_end = cut.endswith(b"\n") or content[len(cut) :].startswith(b"\n")
    path = tmp_path_factory.getbasetemp() / "cut.model"
    path.write_bytes(cut)
    if kind == "ranks" and at_line_end and len(cut.splitlines()) >= 256:
        assert Tokenizer.from_pretrained(path).vocab_size == len(cut.splitlines()) + 256
        return
    with pytest.raises(TokenizerError, match=r"cut\.model"):
        Tokenizer.from_pretrained(path)


@pytest.mark.parametrize(
    "merges, message",
    [
        (b"a b c\n", r"merges\.txt has a line that does not consist of two tokens"),
        (b"ab\n", r"merges\.txt has a line that does not consist of two tokens"),
        (b"a x\n", r"vocab\.json and .*merges\.txt don't belong together"),
        (b"b a\n", r"vocab\.json and .*merges\.txt don't belong together"),
        (b"\xff\xfe\n", r"merges\.txt is not UTF-8"),
    ],
)
def test_load_tokenizer_damaged_merges_are_named(
    tmp_path: Path, merges: bytes, message: str
) -> None:
    write_gpt2_files(tmp_path, merges)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_pretrained(tmp_path)


def test_load_tokenizer_folder_named_merges_raises(tmp_path: Path) -> None:
    write_gpt2_files(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"vocab\.json needs merges\.txt in the same folder"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: [*lines, b"YWJj"], "is a damaged tiktoken file: not enough values"),
        (lambda lines: [*lines, b"a=b 300"], "is a damaged tiktoken file: "),
        (lambda lines: [*lines, b"YWJj x"], "is a damaged tiktoken file: "),
        (lambda lines: [*lines, b"YWJj 999"], "is a damaged tiktoken file: a rank is missing"),
        (lambda lines: [*lines, b"YWJj 5"], "is a damaged tiktoken file: a rank is missing"),
        (lambda lines: lines[1:], "is a damaged tiktoken file: a rank is missing"),
        (lambda lines: lines[:200], "is a damaged tiktoken file: a byte has no token"),
    ],
)
def test_load_tokenizer_damaged_ranks_are_named(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    lines = rank_file(RANKED).splitlines()
    with pytest.raises(TokenizerError, match=rf"tokenizer\.model {message}"):
        load_bytes(tmp_path, b"\n".join(change(lines)))


@pytest.mark.parametrize(
    "content, message",
    [
        (piece_file(MERGED, trainer=number(3, 1)), "a model type other than BPE"),
        (piece_file(MERGED, trainer=b""), "a model type other than BPE"),
        (piece_file(MERGED, trainer=TRAINER + number(24, 1)), "white space at the end of words"),
        (piece_file(MERGED, normalizer=NORMALIZER + block(2, b"map")), "a character map"),
        (piece_file(MERGED, normalizer=NORMALIZER + number(3, 0)), "no space before the text"),
        (piece_file(MERGED, normalizer=b""), "merging of repeated spaces"),
        (piece_file(MERGED, extra=piece("<mask>", 0, 4)), "user-defined symbols"),
    ],
)
def test_load_sentencepiece_model_with_different_ids_raises(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(TokenizerError, match=rf"is a sentencepiece model with .*{message}"):
        load_bytes(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [
        piece_file(MERGED, num_bytes=0),
        piece_file(MERGED, num_bytes=255),
        piece_file(MERGED, extra=piece("ab", 0, 1)),
        piece("a", 0, 1),
    ],
)
def test_load_sentencepiece_model_without_bytes_or_with_duplicates_raises(
    tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(TokenizerError, match="is not a sentencepiece BPE model with byte fallback"):
        load_bytes(tmp_path, content)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'"x"'])
def test_load_tokenizer_damaged_config_is_named(
    tmp_path: Path, tokenizer: Tokenizer, content: bytes
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_load_tokenizer_config_with_unknown_token_raises(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    change_json(tmp_path / "tokenizer_config.json", lambda c: c.update({name: "<nowhere>"}))
    with pytest.raises(TokenizerError, match=rf"{name} '<nowhere>' is not in the tokenizer's voc"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", slow_but(["tokenizer.model"], ["tokenizer.json", "vocab.json", "tokenizer.model"])
)
def test_load_tokenizer_with_millions_of_tokens_raises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token takes about 600 bytes of memory."""
    (tmp_path / "merges.txt").write_text("")

    def write(count: int) -> None:
        vocabulary = {f"{number:x}": number for number in range(count)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"}
        ranks = b"".join(b"YWFh %d\n" % number for number in range(count))
        contents = {"tokenizer.json": {"model": model}, "vocab.json": vocabulary}
        content = json.dumps(contents[name]).encode() if name in contents else ranks
        (tmp_path / name).write_bytes(content)

    write(1_000_001)
    with pytest.raises(TokenizerError, match=r"has 1,000,\d+ (entries|lines), more than the limit"):
        Tokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(parts, "_MOST_TOKENS", 1_000)
    write(1_001)
    with pytest.raises(TokenizerError, match="has 1,001 tokens, more than the limit of 1,000"):
        Tokenizer.from_pretrained(tmp_path)


# A tokenizer.json that may be harmful is first tried in a child process


def _rewritten(folder: Path, **sections: Any) -> Path:
    """Return a tokenizer.json with other sections."""
    state = json.loads(tiny("tokenizer.json").backend.to_str())
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**state, **sections}), encoding="utf-8")
    return path


def _steps(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return a normalizer that replaces strings."""
    steps = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in pairs]
    return {"type": "Sequence", "normalizers": steps}


def _replaced(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return a normalizer that replaces matches of regular expressions."""
    steps = [{"type": "Replace", "pattern": {"Regex": a}, "content": b} for a, b in pairs]
    return {"type": "Sequence", "normalizers": steps}


def test_load_tokenizer_harmless_foreign_file_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _rewritten(tmp_path, normalizer=_steps(("ä", "ae")))
    assert (
        Tokenizer.from_pretrained(path).decode(Tokenizer.from_pretrained(path).encode("ä")) == "ae"
    )
    monkeypatch.setattr(formats, "LimitedProcess", None)
    Tokenizer.from_pretrained(path)
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(TypeError):
        Tokenizer.from_pretrained(path)


@pytest.mark.parametrize("pattern", SPLIT_PATTERNS.values(), ids=SPLIT_PATTERNS)
def test_load_tokenizer_own_file_starts_no_process(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "LimitedProcess", None)
    tokenizer = train_tokenizer(["a text"], 300, pattern=pattern).extended(["<|im_end|>"])
    parts.prepend_bos(tokenizer.backend, "<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).encode("a text") == tokenizer.encode("a text")


@pytest.mark.parametrize(
    "sections, message",
    [
        # A text that occurs only in the file itself.
        (
            {"normalizer": _steps(*[("xyzzy", "xyzzy" * 9)] * 3)},
            r"turns a text of 45 characters into [\d,]+ tokens or characters, which no real "
            r"tokenizer does",
        ),
        (
            {"normalizer": _steps(*[("a", "a" * 9)] * 9)},
            r"takes more than 1 s of CPU time or 48 MiB of memory to load and to encode",
        ),
        # A character that occurs only in one trial text.
        (
            {"normalizer": _replaced((r"\x68", "y" * 16), (r"\x79", "z" * 16))},
            r"turns a text of 64 characters into [\d,]+ tokens or characters",
        ),
        # A character that occurs in no trial text, but in a repeated text of the file.
        (
            {
                "normalizer": _replaced(
                    (r"\x{0416}", "ж" * 16), (r"\x{0436}", "ф" * 4), (r"\x{0444}", "ю" * 8)
                )
            },
            r"turns a text of 944 characters into [\d,]+ tokens or characters",
        ),
        (
            {"decoder": {"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63}},
            "fails on .*index out of bounds",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "nowhere", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                }
            },
            "can't be loaded: no entry found for key",
        ),
    ],
)
def test_load_tokenizer_harmful_file_raises_and_prints_nothing(
    sections: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer .*tokenizer\.json {message}"):
        Tokenizer.from_pretrained(_rewritten(tmp_path, **sections))
    assert capfd.readouterr().err == ""


def test_load_tokenizer_file_changed_during_trial_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _rewritten(tmp_path, normalizer=_steps(*[("a", "a" * 9)] * 9))
    call = LimitedProcess.call

    def change_and_call(self: LimitedProcess, request: Any, *, seconds: float) -> Any:
        _rewritten(tmp_path)
        return call(self, request, seconds=seconds)

    monkeypatch.setattr(LimitedProcess, "call", change_and_call)
    with pytest.raises(TokenizerError, match="was changed while it was read: try again"):
        Tokenizer.from_pretrained(path)


def test_encode_text_that_makes_pattern_panic_raises_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = json.loads(parts.byte_level_split("(一+)+x|.").__getstate__())
    tokenizer = Tokenizer.from_pretrained(_rewritten(tmp_path, pre_tokenizer=stage))
    for text in ("一" * 60 + "y", "一" * 60 + "y" * 20_000):  # the second one, in a thread
        with pytest.raises(TokenizerError, match="the tokenizer can't encode this text"):
            tokenizer.encode(text)
    assert capfd.readouterr().err == ""
    assert tokenizer.decode(tokenizer.encode("一x")) == "一x"


def test_muted_library_passes_on_other_output(capfd: pytest.CaptureFixture[str]) -> None:
    with parts.library_errors("fails", muted=True):
        os.write(2, b"kept")
        with parts.library_errors("fails", muted=True):  # as in another thread
            os.write(2, b" too")
    assert capfd.readouterr().err == "kept too"


def test_load_tokenizer_without_named_unknown_token_loads(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
    tokenizer = Tokenizer.from_pretrained(_rewritten(tmp_path, model=model, pre_tokenizer=None))
    assert tokenizer.encode("b") == [1]
    with pytest.raises(TokenizerError, match="add the token that its unk_token names"):
        tokenizer.encode("c")
