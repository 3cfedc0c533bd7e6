"""Tools for the parts of a tokenizer: files, configuration, chat template, special tokens and the
steps of the backend. This module also handles errors of the `tokenizers` library.

The library is written in Rust and may panic on unexpected input. A panic writes a long message to
stderr and raises a PanicException, which is not a subclass of Exception.
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

#: Common names of padding tokens. Qwen pads with `<|endoftext|>`, because its turns end with a
#: different token.
_PAD_TOKENS = (
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<PAD>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
    "<|endoftext|>",
)

#: Name of the threads that `in_thread` starts, and maximum time to wait for these threads when the
#: process exits, in seconds.
_THREAD, _LONGEST_WAIT = "tokenizers", 2.0

#: Maximum size of a chat template file in bytes.
MAX_TEMPLATE_BYTES = 4_000_000

#: Maximum size of a tokenizer file in bytes.
LARGEST_FILE_BYTES = 100_000_000
#: Maximum number of bytes to process when every token is split into two parts in every possible
#: way. The number for a vocabulary is the sum of its squared token lengths, for example 10^7 for
#: Llama 3.
_MOST_CUT_BYTES = 200_000_000
#: Maximum number of tokens in a vocabulary. Each token takes about 600 bytes in the library. The
#: largest known vocabulary has 262,144 tokens.
_MOST_TOKENS = 500_000
#: Maximum number of object entries in a JSON file (measured as the number of colons), or of lines
#: in any other file. Each entry or line takes at least 100 bytes of memory after parsing. The
#: largest published merges file has 580,000 lines.
_MOST_ENTRIES = 1_000_000


def read_tokenizer(path: Path) -> bytes:
    """Return the bytes of a tokenizer file.

    Raises:
        TokenizerError: the path can't be read, is not a file, or exceeds the limits on bytes,
            entries or lines.
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
            f"tokenizer {path} has {entries:,} {what}, more than the limit of {_MOST_ENTRIES:,}"
        )
    return content


def require_few_tokens(path: Path, count: int) -> None:
    """Reject a vocabulary that is larger than that of any known model.

    Args:
        path: the tokenizer's file, for the message.
        count: number of tokens.

    Raises:
        TokenizerError: the vocabulary has more than 500,000 tokens.
    """
    if count > _MOST_TOKENS:
        raise TokenizerError(
            f"tokenizer {path} has {count:,} tokens, more than the limit of {_MOST_TOKENS:,}"
        )


def require_short(path: Path, tokens: Iterable[bytes | str]) -> None:
    """Reject a vocabulary with very long tokens, for which it would take too much time to split
    each token into two parts in every possible way.

    Args:
        path: the tokenizer's file, for the message.
        tokens: tokens of the vocabulary.

    Raises:
        TokenizerError: the tokens are too long.
    """
    if sum(len(token) ** 2 for token in tokens) > _MOST_CUT_BYTES:
        raise TokenizerError(f"tokenizer {path} contains unreasonably long tokens")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json` in `folder`, or {} if the file does not exist.

    Raises:
        TokenizerError: the file can't be read, or is not a JSON object.
    """
    return _read_object(folder / "tokenizer_config.json")


def read_chat_template(folder: Path) -> dict[str, Any]:
    """Return `{"chat_template": ...}` from the files that transformers would read, or {} if there
    is no template.

    The template is searched for in this order: `chat_template.jinja`, the entry in
    `tokenizer_config.json`, the entry in `chat_template.json`.

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
    """Return the chat template in a config, or None. If the config has a list of named templates,
    return the one named "default".
    """
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {t.get("name"): t.get("template") for t in named}.get("default")
    return template if isinstance(template, str) else None


def named_tokens(config: dict[str, Any], bos: str | None, eos: str | None) -> dict[str, str]:
    """Return the named tokens in a config, which are available to chat templates as variables.

    Args:
        config: content of tokenizer_config.json; its `bos_token` and `eos_token` are ignored.
        bos: value for `bos_token`, or None.
        eos: value for `eos_token`, or None.
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
    """Return a special token that can be used for padding because it does not occur in training
    data, or None if there is no such token.

    Args:
        special_tokens: special tokens in the vocabulary.
        ends: the bos and eos tokens. They are never used for padding, because a data collator that
            masks padding would also mask them where they are labels.
        byte_fallback: True if the tokenizer encodes unknown characters as bytes, so that `<unk>`
            never occurs in text.
    """
    names = [*_PAD_TOKENS, *(["<unk>"] if byte_fallback else [])]
    return next((name for name in names if name in special_tokens and name not in ends), None)


def token_text(token: Any) -> str | None:
    """Return the text of a token in a config. The config contains the token either as a string or
    as an object with the key `content`.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def extended_backend(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], first_id: int
) -> tokenizers.Tokenizer:
    """Return a copy of `backend` with additional special tokens, which get the ids `first_id`,
    `first_id + 1`, ...

    Args:
        backend: the tokenizer, which must be configured to encode special tokens in text as plain
            text.
        tokens: the new tokens.
        first_id: highest id of `backend` plus one.

    Raises:
        TokenizerError: a token is empty, repeated or already in the vocabulary; or there are gaps
            in the ids of `backend`, which the library would fill with the new tokens.
    """
    for number, token in enumerate(tokens):
        _require_new(backend, token)
        if token in tokens[:number]:
            raise TokenizerError(f"the new token '{token}' is repeated")
    extended = tokenizers.Tokenizer.from_str(backend.to_str())
    add_special_tokens(extended, tokens)
    if any(extended.token_to_id(t) != i for i, t in enumerate(tokens, start=first_id)):
        raise TokenizerError(
            f"no token can be added to this tokenizer because some ids below {first_id} have no "
            "token"
        )
    return extended


def _require_new(backend: tokenizers.Tokenizer, token: str) -> None:
    if not token:
        raise TokenizerError("a new token is empty")
    require_unicode(token)
    if any(added.content == token for added in backend.get_added_tokens_decoder().values()):
        raise TokenizerError(f"'{token}' is already an added token of this tokenizer")
    # The word may be in the vocabulary in a different form, such as Ġthe or ▁the.
    with library_errors(f"the tokenizer can't encode '{token}'", muted=True):
        ids = backend.encode(token, add_special_tokens=False).ids
        is_word = len(ids) == 1 and backend.decode(ids) == token
    if is_word or backend.token_to_id(token) is not None:
        raise TokenizerError(
            f"'{token}' is already an ordinary word in the vocabulary: choose a name that does "
            "not occur in texts, such as <|name|>"
        )


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """Arguments for creating a `Tokenizer`, returned by the readers of tokenizer files."""

    backend: tokenizers.Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def require_unicode(text: str) -> None:
    """Reject text with lone surrogates, which Python produces for invalid UTF-8 in file names and
    command-line arguments.

    Raises:
        InputError: the text contains a lone surrogate, which is not a character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid Unicode at character {error.start}: "
            f"{text[max(error.start - 10, 0) : error.start + 1]!a}"
        ) from None


def prepend_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Set a post-processor that adds `bos` at the beginning of every sequence, so that transformers
    also adds it.
    """
    bos_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


@contextlib.contextmanager
def library_errors(problem: str, *, muted: bool = False) -> Iterator[None]:
    """Convert an error or panic of the library to a `TokenizerError` with a message of one line.

    Args:
        problem: beginning of the message.
        muted: True to suppress the output that the library writes to stderr when it panics.
    """
    try:
        with _muted_library() if muted else contextlib.nullcontext():
            yield
    except BaseException as error:
        # Recognise a panic by its class name, because KeyboardInterrupt is also a BaseException and
        # must propagate.
        is_of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_of_library or isinstance(error, FirstlightError | MemoryError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(f"{problem}: {reason} ({_remedy(reason)})") from error


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a long library call in a separate thread, and return a future for its result.

    Python runs signal handlers in the main thread, but only after the current library call in the
    main thread returns. If the main thread only waits for another thread, signals are handled
    immediately. If a handler raises an exception, the call continues in the other thread, and its
    result is dropped.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - a panic is not an Exception
            outcome.set_exception(error)

    # Use a daemon thread, so that the process can exit without waiting for it. A child process
    # would require a `__main__` guard in users' scripts.
    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    return outcome


def threads_of_library() -> list[threading.Thread]:
    """Return the running threads that were started by `in_thread`."""
    return [thread for thread in threading.enumerate() if thread.name == _THREAD]


@atexit.register
def _wait_for_threads() -> None:
    """Wait for the threads started by `in_thread`, for at most `_LONGEST_WAIT` seconds.

    If the library returned to Python while the interpreter is shutting down, Python would end the
    thread in the middle of Rust code, which would abort the process.
    """
    end = time.monotonic() + _LONGEST_WAIT
    for thread in threads_of_library():
        thread.join(max(end - time.monotonic(), 0))


def _remedy(reason: str) -> str:
    """Return advice to append to the error message when a library call fails."""
    if re.search(r"[Mm]issing .* token from the vocabulary", reason):
        return "add the token that its unk_token names to the vocabulary in tokenizer.json"
    return "fix its tokenizer.json, or use another tokenizer"


_MUTED = threading.Lock()


@contextlib.contextmanager
def _muted_library() -> Iterator[None]:
    """Capture stderr during the `with` block. If the library panics, the captured output is
    dropped. Otherwise, it is written to stderr at the end of the block, because it may come from
    other threads.

    If another thread is already in such a block, do not capture anything, so that threads never
    wait for each other.
    """
    with contextlib.ExitStack() as stack:
        if not _MUTED.acquire(blocking=False):
            yield
            return
        stack.callback(_MUTED.release)
        # Redirect file descriptor 2, because the library does not write through `sys.stderr`.
        try:
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            held = stack.enter_context(_unnamed_file())
            os.dup2(held.fileno(), 2)
        except OSError:  # The process has no stderr, or the temporary file can't be created.
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
    """Return a pre-tokenizer that splits text with each of the patterns, and then represents each
    byte as a character.
    """
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def add_special_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> None:
    """Register `tokens` as special tokens. Tokens that are already in the vocabulary keep their
    ids.
    """
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
