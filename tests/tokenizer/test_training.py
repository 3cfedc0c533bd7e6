"""Training a tokenizer is deterministic and gives the requested size, or raises an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tokenizers import Regex, pre_tokenizers

from firstlight.errors import InputError, TokenizerError
from firstlight.tokenizer import (
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    train_tokenizer,
)
from firstlight.tokenizer.parts import in_thread


def test_train_tokenizer_is_deterministic(texts: list[str]) -> None:
    first = train_tokenizer(texts, 400).files()
    assert train_tokenizer(iter(texts), 400).files() == first
    assert train_tokenizer(texts[::-1], 400).files() == first


def test_train_tokenizer_merges_most_frequent_pair_first() -> None:
    trained = train_tokenizer(["ab" + " ab" * 9 + " cd" * 3], 259)
    alphabet = 1 + 256
    merged = [trained.backend.id_to_token(i) for i in range(alphabet, trained.vocab_size)]
    assert merged == ["ab", "Ġab"]
    assert trained.encode(" ab") == [alphabet + 1]


def test_train_tokenizer_gives_exactly_requested_size(texts: list[str]) -> None:
    for size in (257, 258, 300, 400):
        trained = train_tokenizer(texts, size)
        assert trained.vocab_size == size
        assert trained.eos_token_id == 0
        assert trained.bos_token_id is None
        assert sorted(trained.backend.get_vocab().values()) == list(range(size))


def test_train_tokenizer_small_corpus_gives_smaller_vocabulary_with_all_bytes() -> None:
    trained = train_tokenizer(["aaaa"], 1000)
    assert 257 < trained.vocab_size < 260
    text = "".join(map(chr, range(0x300)))
    assert trained.decode(trained.encode(text)) == text


def test_train_tokenizer_no_token_crosses_split_pattern(texts: list[str]) -> None:
    for pattern in (GPT2_PATTERN, LLAMA3_PATTERN):
        trained = train_tokenizer(texts, 600, pattern=pattern)
        splitter = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for token_id in range(257, trained.vocab_size):
            token = trained.decode([token_id])
            if "\ufffd" not in token:
                assert len(splitter.pre_tokenize_str(token)) == 1


def test_train_tokenizer_special_tokens_come_first_and_first_ends_documents(
    texts: list[str],
) -> None:
    trained = train_tokenizer(texts, 300, special_tokens=("<end>", "<user>"))
    assert [trained.backend.id_to_token(i) for i in range(2)] == ["<end>", "<user>"]
    assert trained.eos_token == "<end>"
    assert trained.special_token_ids == {0, 1}
    bare = train_tokenizer(texts, 300, special_tokens=())
    assert (bare.eos_token, bare.vocab_size) == (None, 300)
    assert not bare.special_token_ids


@pytest.mark.parametrize("size", [-1, 0, 256])
def test_train_tokenizer_vocabulary_too_small_for_bytes_raises(size: int) -> None:
    with pytest.raises(TokenizerError, match=rf"vocab_size {size} is too small: .* at least 257"):
        train_tokenizer(["text"], size)
    assert train_tokenizer(["text"], 257).vocab_size == 257


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_train_tokenizer_empty_corpus_raises(texts: list[str]) -> None:
    with pytest.raises(TokenizerError, match="the corpus is empty"):
        train_tokenizer(texts, 300)


def test_train_tokenizer_error_of_texts_is_unchanged() -> None:
    def broken() -> Iterator[str]:
        yield "fine"
        raise InputError("file x is damaged")

    with pytest.raises(InputError, match=r"^file x is damaged$"):
        train_tokenizer(broken(), 300)


# Long runs without a space, and signals


def test_train_tokenizer_long_run_of_characters_gives_bounded_tokens() -> None:
    trained = train_tokenizer(["a" * 5000, "-" * 300], 300)
    longest = max(len(token) for token in trained.backend.get_vocab())
    assert longest == 256
    # The limit is not part of the tokenizer: a whole run of letters is merged.
    assert trained.backend.pre_tokenizer is not None
    assert len(trained.backend.pre_tokenizer.pre_tokenize_str("a" * 300)) == 1
    assert len(trained.encode("a" * 1024)) == 4


def test_train_tokenizer_failing_texts_raise_and_end_thread() -> None:
    def failing() -> Iterator[str]:
        yield "a word " * 200_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(failing(), 300)
    for thread in threading.enumerate():
        if thread.name == "tokenizers":
            thread.join(60)
            assert not thread.is_alive()


def test_train_tokenizer_library_call_is_left_on_signal() -> None:
    resume, ended = threading.Event(), threading.Event()

    def call() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        resume.wait(60)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_thread(call).result()
    assert not ended.is_set()
    resume.set()
    assert ended.wait(60)


#: A thread of the library runs while the process exits, and returns during Python's shutdown, which
#: `Late` extends.
_ENDS_DURING_WORK = """
import sys, threading, time
import tokenizers
from tokenizers import models, trainers
from firstlight.tokenizer.parts import in_thread

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

def texts():
    working.set()
    for _ in range(20):
        time.sleep(0.001)
        yield "word"

late, working = Late(), threading.Event()
backend, trainer = tokenizers.Tokenizer(models.BPE()), trainers.BpeTrainer(show_progress=False)
in_thread(lambda: backend.train_from_iterator(texts(), trainer))
working.wait()
sys.exit(143)
"""


def test_train_tokenizer_ended_process_keeps_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS_DURING_WORK], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (143, "")


#: A signal ends a command while a thread of the library runs for a minute.
_COMMAND_ENDS_DURING_WORK = """
import os, signal, sys, time
from firstlight.cli import main
from firstlight.tokenizer import parts

def work(*arguments, **options):
    parts.in_thread(lambda: time.sleep(60))
    sys.stdout.write("unflushed")
    signal.raise_signal(signal.SIGTERM)

main.firstlight.main = work
parts._LONGEST_WAIT = None  # a wait would print an error
sys.exit(main.main())
"""


def test_train_tokenizer_terminated_command_does_not_wait_for_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND_ENDS_DURING_WORK],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (143, "unflushed")
    assert done.stderr == "firstlight: error: terminated\n"


def test_train_tokenizer_library_failure_leaves_other_texts_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: Future[None] = Future()
    failed.set_exception(TokenizerError("failed"))
    monkeypatch.setattr("firstlight.tokenizer.in_thread", lambda call: failed)
    texts = iter(["a word " * 100_000] * 3)
    with pytest.raises(TokenizerError, match="failed"):
        train_tokenizer(texts, 300)
    assert len(list(texts)) == 2


def test_train_tokenizer_library_error_in_other_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 // 0).result()
