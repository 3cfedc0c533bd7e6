"""The parts of a tokenizer: its files, its configuration and chat template, its backend's steps and
special tokens, and the errors of the `tokenizers` library.

The library is written in Rust. On unexpected input its code may panic: it writes a page to stderr,
and raises a PanicException, which in Python is not a subclass of Exception.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers, processors

from firstlight.errors import FirstlightError, InputError, TokenizerError
from firstlight.files.atomic import (
    plain_lines,
    read_file,
    read_json_object,
    require_few_values,
)

T = TypeVar("T")

#: Usual names of padding tokens. Qwen pads with `<|endoftext|>`, because its turns end with another
#: token.
_PAD_TOKENS = (
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<PAD>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
    "<|endoftext|>",
)

#: Name of the threads of `in_thread`, and seconds that the end of the process waits for them.
_THREAD, _LONGEST_WAIT = "tokenizers", 2.0

#: Most bytes of a chat template's file.
MAX_TEMPLATE_BYTES = 4_000_000

#: Largest file of a tokenizer that is read.
LARGEST_FILE_BYTES = 100_000_000
#: Most bytes to process when every token is cut in two in every possible way, which is the sum of
#: the squared token lengths; 10^7 for Llama 3.
_MOST_CUT_BYTES = 200_000_000
#: Most tokens of a vocabulary, about 600 bytes each in the library; the largest has 262,144.
_MOST_TOKENS = 500_000
#: Most colons in a JSON file (one for each entry of an object), or lines of another file. Each
#: takes 100 bytes of memory or more once parsed. The largest published merges have 580,000 lines.
_MOST_ENTRIES = 1_000_000


def read_tokenizer(path: Path) -> bytes:
    """Return the bytes of a tokenizer's file.

    Raises:
        TokenizerError: the path can't be read, is not a file, or has more bytes, values or lines
            than a tokenizer's file may have.
    """
    try:
        content = read_file(path, LARGEST_FILE_BYTES)
        require_few_values(path, content)
    except InputError as error:
        raise TokenizerError(f"tokenizer {error}") from error
    is_json = content.lstrip()[:1] == b"{"
    entries = content.count(b":") if is_json else content.count(b"\n")
    if entries > _MOST_ENTRIES:
        what = "entries" if is_json else "lines"
        raise TokenizerError(
            f"tokenizer {path} has {entries:,} {what}, and {_MOST_ENTRIES:,} are read at most"
        )
    return content


def require_few_tokens(path: Path, count: int) -> None:
    """Refuse a vocabulary with more tokens than any model has.

    Args:
        path: the tokenizer's file, for the message.
        count: number of tokens.

    Raises:
        TokenizerError: the vocabulary has more than 500,000 tokens.
    """
    if count > _MOST_TOKENS:
        raise TokenizerError(
            f"tokenizer {path} has {count:,} tokens, more than the {_MOST_TOKENS:,} that are read"
        )


def require_short(path: Path, tokens: Iterable[bytes | str]) -> None:
    """Refuse tokens so long that cutting each in two in every way would take too much time.

    Args:
        path: the tokenizer's file, for the message.
        tokens: the vocabulary's tokens.

    Raises:
        TokenizerError: the tokens are too long.
    """
    if sum(len(token) ** 2 for token in tokens) > _MOST_CUT_BYTES:
        raise TokenizerError(f"tokenizer {path} holds tokens that are longer than any text's words")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json` in `folder`; {} if there is no such file.

    Raises:
        TokenizerError: the file can't be read, or is not a JSON object.
    """
    return _read_object(folder / "tokenizer_config.json")


def read_chat_template(folder: Path) -> dict[str, Any]:
    """Return `{"chat_template": ...}` from the files in which transformers looks for it; {} if
    there is none.

    The order is `chat_template.jinja`, the entry in `tokenizer_config.json`, the entry in
    `chat_template.json`; the first one found is returned.

    Raises:
        TokenizerError: a file can't be read, or is not UTF-8 or a JSON object.
    """
    jinja = folder / "chat_template.jinja"
    try:
        if jinja.is_file():
            content = read_file(jinja, MAX_TEMPLATE_BYTES).decode("utf-8")
            return {"chat_template": plain_lines(content)}
    except InputError as error:
        raise TokenizerError(str(error)) from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{jinja} is not UTF-8: {error}") from error
    for config in (read_config(folder), _read_object(folder / "chat_template.json")):
        if config.get("chat_template") is not None:
            return {"chat_template": config["chat_template"]}
    return {}


def _read_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, TokenizerError) if path.is_file() else {}


def chat_template_of(config: dict[str, Any]) -> str | None:
    """Return the chat template in a config. If the config has a list of named templates, this is
    the one named "default"; None if there is none."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {t.get("name"): t.get("template") for t in named}.get("default")
    return template if isinstance(template, str) else None


def named_tokens(config: dict[str, Any], bos: str | None, eos: str | None) -> dict[str, str]:
    """Return the tokens in a config by name, which chat templates use as variables.

    Args:
        config: content of tokenizer_config.json; its `bos_token` and `eos_token` are not used.
        bos: `bos_token`; None if there is none.
        eos: `eos_token`; None if there is none.
    """
    further = config.get("extra_special_tokens")
    entries = {name: token for name, token in config.items() if name.endswith("_token")}
    entries |= further if isinstance(further, dict) else {}
    entries |= {"bos_token": bos, "eos_token": eos}
    texts = {name: token_text(token) for name, token in entries.items()}
    return {name: text for name, text in texts.items() if text is not None}


def natural_pad_token(
    special_tokens: Collection[str], ends: Collection[str | None], *, byte_fallback: bool
) -> str | None:
    """Return the special token that can serve for padding, because no training text contains it;
    None if there is none.

    Args:
        special_tokens: special tokens of the vocabulary.
        ends: bos and eos, which are never used for padding. They are labels, and a collator that
            masks padding would mask them everywhere.
        byte_fallback: the tokenizer encodes unknown characters as bytes, so `<unk>` is in no text.
    """
    names = [*_PAD_TOKENS, *(["<unk>"] if byte_fallback else [])]
    return next((name for name in names if name in special_tokens and name not in ends), None)


def token_text(token: Any) -> str | None:
    """Return the text of a token in a config, where a token is a string or an object with
    `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def extended_backend(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], first_id: int
) -> tokenizers.Tokenizer:
    """Return a copy of `backend` with further special tokens, ids `first_id`, `first_id + 1`, ...

    Args:
        backend: the tokenizer, which encodes special tokens in texts as plain text.
        tokens: the new tokens.
        first_id: the highest id of `backend` plus one.

    Raises:
        TokenizerError: a token is empty, given twice or already in the vocabulary; or the ids of
            `backend` have gaps, which the library would give to the new tokens.
    """
    for number, token in enumerate(tokens):
        _require_new(backend, token)
        if token in tokens[:number]:
            raise TokenizerError(f"the new token '{token}' is given twice")
    extended = tokenizers.Tokenizer.from_str(backend.to_str())
    add_special_tokens(extended, tokens)
    if any(extended.token_to_id(t) != i for i, t in enumerate(tokens, start=first_id)):
        raise TokenizerError(
            f"no token can be added to this tokenizer: not every id below {first_id} has a token"
        )
    return extended


def _require_new(backend: tokenizers.Tokenizer, token: str) -> None:
    if not token:
        raise TokenizerError("a new token is empty")
    require_unicode(token)
    if any(added.content == token for added in backend.get_added_tokens_decoder().values()):
        raise TokenizerError(f"'{token}' is an added token of this tokenizer already")
    # The vocabulary may hold the word in another form, such as Ġthe or ▁the.
    with library_errors(f"the tokenizer can't encode '{token}'", muted=True):
        ids = backend.encode(token, add_special_tokens=False).ids
        is_word = len(ids) == 1 and backend.decode(ids) == token
    if is_word or backend.token_to_id(token) is not None:
        raise TokenizerError(
            f"'{token}' is an ordinary word of the vocabulary already: "
            "choose one that texts don't hold, such as <|name|>"
        )


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """The arguments of `Tokenizer`, as a reader of files returns them."""

    backend: tokenizers.Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def require_unicode(text: str) -> None:
    """Refuse lone surrogates, which Python makes of invalid UTF-8 in file names and arguments.

    Raises:
        InputError: the text has a lone surrogate, which is not a character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid Unicode at character {error.start}: "
            f"{text[max(error.start - 10, 0) : error.start + 1]!a}"
        ) from None


def prepend_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Set a post-processor that puts `bos` before every text, so that transformers does so, too."""
    bos_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


@contextlib.contextmanager
def library_errors(problem: str, *, muted: bool = False) -> Iterator[None]:
    """Turn an error or panic of the library into a `TokenizerError` with one line.

    Args:
        problem: the beginning of the line.
        muted: also suppress the page that the library writes to stderr when it panics.
    """
    try:
        with _muted_library() if muted else contextlib.nullcontext():
            yield
    except BaseException as error:
        # By its name, because KeyboardInterrupt is a BaseException, too, and must pass.
        is_of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_of_library or isinstance(error, FirstlightError | MemoryError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(f"{problem}: {reason} ({_remedy(reason)})") from error


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Start a long call of the library in another thread; return its outcome, to wait for.

    A signal's handler runs in the main thread, once a call of the library returns there. Waiting
    for the other thread is interrupted at once. If the handler raises an exception, the call
    continues in its thread, and its result is dropped.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - a panic is not an Exception
            outcome.set_exception(error)

    # A daemon: the process can end without waiting for it. A thread, because a child process would
    # need a `__main__` guard in users' scripts.
    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    return outcome


def threads_of_library() -> list[threading.Thread]:
    """Return the running threads of `in_thread`."""
    return [thread for thread in threading.enumerate() if thread.name == _THREAD]


@atexit.register
def _wait_for_threads() -> None:
    """Wait for the threads of `in_thread`, for `_LONGEST_WAIT` seconds at most.

    A thread that returns from the library while Python shuts down is ended by Python in the middle
    of Rust code, which aborts the process.
    """
    end = time.monotonic() + _LONGEST_WAIT
    for thread in threads_of_library():
        thread.join(max(end - time.monotonic(), 0))


def _remedy(reason: str) -> str:
    """Return advice for the message about an error of the library."""
    if re.search(r"[Mm]issing .* token from the vocabulary", reason):
        return "add the token that its unk_token names to the vocabulary in tokenizer.json"
    return "mend its tokenizer.json, or take another tokenizer"


_MUTED = threading.Lock()


@contextlib.contextmanager
def _muted_library() -> Iterator[None]:
    """Drop what is written to stderr in the block if the library panics; otherwise write it at the
    end of the block, since it may come from other threads. Beside another such block of the
    process, this does nothing, since a text must not wait for another one."""
    with contextlib.ExitStack() as stack:
        if not _MUTED.acquire(blocking=False):
            yield
            return
        stack.callback(_MUTED.release)
        # File descriptor 2 is redirected, because the library does not write through `sys.stderr`.
        try:
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            held = stack.enter_context(_unnamed_file())
            os.dup2(held.fileno(), 2)
        except OSError:  # there is no stderr, or the unnamed file can't be created
            yield
            return
        stack.callback(os.dup2, stderr, 2)
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                _pass_on(held, stderr)
            raise
        _pass_on(held, stderr)


def _unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stderr"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _pass_on(held: IO[bytes], stderr: int) -> None:
    held.seek(0)
    with contextlib.suppress(OSError):
        os.write(stderr, held.read())


def byte_level_split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that splits a text by each pattern, and writes each byte as a
    character."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def add_special_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> None:
    """Make `tokens` special tokens; tokens that are already in the vocabulary keep their ids."""
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
