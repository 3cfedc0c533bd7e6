"""Special tokens: encoding them in a text, and adding them to a tokenizer, from Python and the
shell.
"""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers

from firstlight.cli.main import main
from firstlight.errors import InputError, TokenizerError
from firstlight.tokenizer import END_OF_TEXT, Tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES
from tokenizer_files import KINDS, TEXTS, tiny, write_gpt2_files

NEW = ("<|user|>", "<two words>", "[é日本]")


# Special tokens in a text


@pytest.mark.parametrize("kind", KINDS)
def test_encode_special_tokens_option_gives_special_ids(kind: str) -> None:
    tokenizer = tiny(kind)
    for token, token_id in tokenizer.special_tokens.items():
        assert tokenizer.encode(token, special_tokens=True) == [token_id]
        text = f"the{token}ab{token}"
        ids = [*tokenizer.encode("the"), token_id, *tokenizer.encode("ab"), token_id]
        assert tokenizer.encode(text, special_tokens=True) == ids
        assert tokenizer.encode_batch([text, "the"], special_tokens=True) == [
            ids,
            tokenizer.encode("the"),
        ]
        assert token_id not in tokenizer.encode(text)
        assert tokenizer.encode_batch([text]) == [tokenizer.encode(text)]


def test_encode_special_tokens_option_adds_no_bos_and_validates_text() -> None:
    ranks = tiny("ranks")
    assert ranks.encode("the", special_tokens=True) == ranks.encode("the")
    assert ranks.encode("", special_tokens=True) == []
    for call in (
        lambda: ranks.encode("\ud800", special_tokens=True),
        lambda: ranks.encode_batch(["\ud800"], special_tokens=True),
    ):
        with pytest.raises(InputError, match="the text is not valid Unicode"):
            call()


def test_encode_special_tokens_option_is_thread_safe() -> None:
    tokenizer = tiny("ranks").extended(["<x>"])
    text, wrong = "the <x> ab" * 20, []
    expected = {
        False: tokenizer.encode(text),
        True: Tokenizer(tokenizer.backend).encode(text, special_tokens=True),
    }

    def work(special_tokens: bool) -> None:
        for _ in range(200):
            if tokenizer.encode(text, special_tokens=special_tokens) != expected[special_tokens]:
                wrong.append(special_tokens)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected[True] != expected[False]
    assert wrong == []


# Extending


@pytest.mark.parametrize("kind", KINDS)
def test_extend_gives_new_tokens_next_ids_and_keeps_everything_else(
    tmp_path: Path, kind: str
) -> None:
    before = tiny(kind)
    before_files = before.files()
    before.config = {"model_max_length": 7}
    after = before.extended(NEW)
    before.config = {}
    assert before.files() == before_files
    after.save_pretrained(tmp_path)
    for tokenizer in (after, Tokenizer.from_pretrained(tmp_path)):
        first = before.vocab_size
        assert tokenizer.vocab_size == first + 3
        assert tokenizer.special_tokens == before.special_tokens | {
            token: first + i for i, token in enumerate(NEW)
        }
        for i, token in enumerate(NEW):
            assert tokenizer.encode(token, special_tokens=True) == [first + i]
            assert tokenizer.decode([first + i]) == ""
        for name in ("bos_token_id", "eos_token_id", "add_bos"):
            assert getattr(tokenizer, name) == getattr(before, name)
        assert tokenizer.config["model_max_length"] == 7
        assert tokenizer.extends(before)
        assert not before.extends(tokenizer)
        assert tokenizer.fingerprint != before.fingerprint
        splits = tokenizer.encodes_in_pieces
        assert splits is before.encodes_in_pieces


_EXTENDED = {kind: tiny(kind).extended(NEW) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(TEXTS | st.sampled_from(NEW), max_size=4))
def test_extended_tokenizer_keeps_ids_of_every_text(kind: str, texts: list[str]) -> None:
    text = "".join(texts)
    assert _EXTENDED[kind].encode(text) == tiny(kind).encode(text)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([END_OF_TEXT], r"'<\|endoftext\|>' is already an added token of this tokenizer"),
        (["<a>", ""], "a new token is empty"),
        (["<a>", "<b>", "<a>"], "the new token '<a>' is repeated"),
        (["the"], "'the' is already an ordinary word in the vocabulary: choose"),
        ([" light"], "' light' is already an ordinary word in the vocabulary: choose"),
        (["Ġlight"], "'Ġlight' is already an ordinary word in the vocabulary: choose"),
        (["a"], "'a' is already an ordinary word in the vocabulary: choose"),
    ],
)
def test_extend_existing_tokens_raises_tokenizer_error(tokens: list[str], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tiny("tokenizer.json").extended(tokens)


def test_extend_non_unicode_tokens_raises_input_error() -> None:
    with pytest.raises(InputError, match="the text is not valid Unicode"):
        tiny("ranks").extended(["<\udcff>"])


def test_extend_sentencepiece_word_raises_tokenizer_error() -> None:
    with pytest.raises(TokenizerError, match="'ab' is already an ordinary word"):
        tiny("pieces").extended(["ab"])


def test_extend_added_ordinary_token_raises_tokenizer_error() -> None:
    backend = tokenizers.Tokenizer.from_str(tiny("ranks").backend.to_str())
    backend.add_tokens([AddedToken("<x>", special=False)])
    with pytest.raises(TokenizerError, match="'<x>' is already an added token of this tokenizer"):
        Tokenizer(backend).extended(["<x>"])


def test_extend_tokenizer_with_id_gaps_raises() -> None:
    gaps = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 41}, merges=[])))
    with pytest.raises(TokenizerError, match="because some ids below 42 have no token"):
        gaps.extended(["<x>"])
    assert gaps.extended([]).vocab_size == 42


def test_extend_twice_equals_extending_once() -> None:
    once = tiny("ranks").extended(["<a>", "<b>"])
    twice = tiny("ranks").extended(["<a>"]).extended(["<b>"])
    assert twice.files() == once.files()


def test_extend_replaces_template_which_must_compile(tokenizer: Tokenizer) -> None:
    first = tokenizer.extended([], "one")
    assert (first.chat_template, tokenizer.chat_template) == ("one", None)
    assert first.extended(["<x>"]).chat_template == "one"
    assert first.extended([], "two").chat_template == "two"
    with pytest.raises(TokenizerError, match="the chat template doesn't compile: line 1"):
        first.extended([], "{% for %}")


def _changed(**parts: Any) -> Tokenizer:
    state = json.loads(_EXTENDED["tokenizer.json"].backend.to_str()) | parts
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))


def test_extends_requires_same_ids_and_special_tokens() -> None:
    before, after = tiny("tokenizer.json"), _EXTENDED["tokenizer.json"]
    assert before.extends(before)
    assert after.extends(before)
    assert _changed().extends(before)
    assert _changed(decoder=None, post_processor=None).extends(before)
    assert not after.extends(tiny("ranks"))
    assert not before.extended(["<other>"]).extends(after)
    added = json.loads(after.backend.to_str())["added_tokens"]
    plain = [{**token, "special": token["content"] != NEW[1]} for token in added]
    assert not _changed(added_tokens=plain).extends(before)
    stripping = [{**token, "lstrip": token["content"] == END_OF_TEXT} for token in added]
    assert not _changed(added_tokens=stripping).extends(before)
    assert not _changed(added_tokens=[]).extends(before)
    assert not _changed(pre_tokenizer=None).extends(before)
    backend = tokenizers.Tokenizer.from_str(after.backend.to_str())
    backend.normalizer = normalizers.NFC()
    assert not Tokenizer(backend).extends(before)
    # A word that becomes special takes an id that was used in texts.
    backend = tokenizers.Tokenizer.from_str(before.backend.to_str())
    backend.add_special_tokens(["the"])
    assert not Tokenizer(backend).extends(before)


# On the command line


@pytest.fixture
def source(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize(
    "order",
    [
        "SOURCE --add <a> --add <b> --out OUT --json",
        "SOURCE --add <a> <b> --out OUT --json",
        "SOURCE --add=<a> <b> --json --out OUT",
        "--out OUT --json SOURCE --add <a> <b>",
        "--add <a> --out OUT --add <b> --json SOURCE",
        "--add <a> <b> --out OUT --json -- SOURCE",
    ],
)
def test_extend_command_accepts_tokens_in_every_common_form(
    source: Path, tmp_path: Path, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [str({"SOURCE": source, "OUT": out}.get(word, word)) for word in order.split()]
    assert main(["tokenizer", "extend", *words]) == 0
    captured = capsys.readouterr()
    loaded = Tokenizer.from_pretrained(out)
    assert json.loads(captured.out) == {
        "out": str(out),
        "vocab_size": 322,
        "added": {"<a>": 320, "<b>": 321},
        "chat_template": False,
        "tokenizer_sha256": loaded.fingerprint,
    }
    assert loaded.special_tokens == {END_OF_TEXT: 0, "<a>": 320, "<b>": 321}
    assert captured.err == f"{out}: 322 tokens, 2 of them new\n"


def test_encode_and_decode_commands_round_trip_special_tokens(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def output(*words: str, stdin: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        assert main(["tokenizer", words[0], str(source), *words[1:]]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    text = f"the cat {END_OF_TEXT} the"
    ids = Tokenizer.from_pretrained(source).encode(text, special_tokens=True)
    assert 0 in ids
    assert output("encode", text, "--special-tokens") == " ".join(map(str, ids))
    assert output("encode", "--special-tokens", stdin=text) == " ".join(map(str, ids))
    assert json.loads(output("encode", text, "--json"))["ids"] != ids
    words = list(map(str, ids))
    assert output("decode", *words, "--special-tokens") == text
    assert output("decode", "--special-tokens", stdin=str(ids)) == text
    assert output("decode", *words) == text.replace(END_OF_TEXT, "")
    assert main(["tokenizer", "decode", str(source), "320"]) == 1
    assert "'320' is not a token id of" in capsys.readouterr().err


def test_extend_command_built_in_template_adds_its_tokens(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--chat-template", "chatml", "--out", str(out)]
    assert main(["tokenizer", "extend", str(source), "--add", "<a>", "<|im_end|>", *options]) == 0
    needed = "added the tokens that the chat template chatml needs: <|im_start|>\n"
    assert needed in capsys.readouterr().out
    loaded = Tokenizer.from_pretrained(out)
    assert list(loaded.special_tokens) == [END_OF_TEXT, "<a>", "<|im_end|>", "<|im_start|>"]
    assert loaded.chat_template == CHAT_TEMPLATES["chatml"]
    for name in ("llama2", "chatml"):
        options = ["--chat-template", name, "--out", str(tmp_path / name)]
        assert main(["tokenizer", "extend", str(out), *options]) == 0
        again = Tokenizer.from_pretrained(tmp_path / name)
        assert again.chat_template == CHAT_TEMPLATES[name]
        assert again.fingerprint == loaded.fingerprint


def test_extend_command_accepts_template_file_and_model_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gpt2_files(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    template = tmp_path / "mine.jinja"
    template.write_text("é {{ messages[0].content }}", encoding="utf-8")
    out = tmp_path / "out"
    options = ["--chat-template", str(template), "--out", str(out)]
    assert main(["tokenizer", "extend", str(tmp_path), *options]) == 0
    error = capsys.readouterr().err
    assert f"to extend the model, run `firstlight train --init-from {tmp_path}` on data" in error
    assert sorted(path.name for path in out.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    messages = [{"role": "user", "content": "hi"}]
    assert Tokenizer.from_pretrained(out).apply_chat_template(messages) == "é hi"


@pytest.mark.parametrize(
    "words, code, message",
    [
        ("", 2, "Missing option '--out'"),
        ("SOURCE --out OUT", 2, "nothing to do: give --add TOKEN..., --chat-template or both"),
        ("--add <a> SOURCE --out OUT", 2, "DIR is missing: put it before --add"),
        (
            "SOURCE --add --out OUT",
            2,
            "--add needs a token; write a token that begins with - as --add=-x",
        ),
        ("SOURCE --out OUT --add", 2, "--add needs a token"),
        ("SOURCE --add <a>", 2, "Missing option '--out'"),
        ("SOURCE --add <a> --out SOURCE", 1, "already exists and is not overwritten: choose ano"),
        ("SOURCE --add the <a> <a> --out OUT", 1, "the new token '<a>' is repeated"),
        ("OUT --add <a> --out OUT", 1, "does not exist"),
        ("SOURCE --chat-template chatlm --out OUT", 1, "chatlm is neither chatml, hermes, llama2"),
        ("SOURCE --chat-template SOURCE --out OUT", 1, "source can't be read: Is a directory"),
        ("SOURCE --chat-template BAD --out OUT", 1, "bad.jinja is not UTF-8"),
        ("SOURCE --chat-template WRONG --out OUT", 1, "the chat template doesn't compile: line 1"),
    ],
)
def test_extend_command_impossible_request_fails_and_writes_nothing(
    source: Path,
    tmp_path: Path,
    words: str,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    (tmp_path / "wrong.jinja").write_bytes(b"{% for %}")
    paths = {
        "SOURCE": source,
        "OUT": tmp_path / "out",
        "BAD": tmp_path / "bad.jinja",
        "WRONG": tmp_path / "wrong.jinja",
    }
    before = sorted(tmp_path.rglob("*"))
    arguments = [str(paths.get(word, word)) for word in words.split()]
    assert main(["tokenizer", "extend", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_extend_command_token_may_begin_with_dash(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["tokenizer", "extend", str(source), "--add=--x", "--out", str(out)]) == 0
    assert Tokenizer.from_pretrained(out).special_tokens["--x"] == 320


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% for m in messages %}{{ m.wrong.thing }}{% endfor %}", "UndefinedError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("", "renders a conversation as an empty text"),
    ],
)
def test_extend_command_template_rendering_no_conversation_fails(
    template: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such errors would otherwise appear only when the tokenizer is used."""
    tiny("tokenizer.json").save_pretrained(tmp_path / "t")
    (tmp_path / "bad.jinja").write_text(template)
    arguments = ["tokenizer", "extend", str(tmp_path / "t"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--chat-template", str(tmp_path / "bad.jinja")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_extend_command_template_may_refuse_ordinary_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("tokenizer.json").save_pretrained(tmp_path / "t")
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('a system message, please') }}")
    arguments = ["tokenizer", "extend", str(tmp_path / "t"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--chat-template", str(tmp_path / "strict.jinja")]) == 0
    assert "rejects an ordinary conversation: " in capsys.readouterr().err
