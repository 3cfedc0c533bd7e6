"""The training data of benchmarks: the source of Python's standard library.

It is on every machine, it is real text, and it is the same for every row of a table. `bench gpu`
trains on shards that a tokenizer of its own was trained for (`library_corpus`). The others take
`write_tokens`, which needs no tokenizer: a word, a
run of blanks or a sign is a token; its id is its CRC-32 modulo the vocabulary, so that ids of the
whole vocabulary occur, as often as words do, whatever its size. A document is what lies between
two lines that begin a function, method or class.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch

from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import Batch, rows_to_batch
from firstlight.data.packing import row_span, separate_documents
from firstlight.data.prepare import prepare
from firstlight.data.records import read_documents
from firstlight.data.sources import find_sources
from firstlight.errors import InputError
from firstlight.files.atomic import write_file
from firstlight.tokenizer import train_tokenizer

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_DOCUMENT = re.compile(r"^(?= *(?:def|class) )", re.MULTILINE)


def write_tokens(path: Path, count: int, vocab_size: int) -> None:
    """Write `count` tokens of the standard library, from its start again where it is shorter.

    Args:
        path: safetensors file to write: "tokens" [count], and "starts" of the documents.
        count: number of tokens.
        vocab_size: size of the vocabulary, whose last id ends every document.

    Raises:
        InputError: the library's source is not there.
        StorageError: the disk refused.
    """
    tokens: list[int] = []
    starts: list[int] = []
    documents = _documents()
    while len(tokens) < count:
        document = next(documents, None)
        if document is None:
            documents = _documents()
            continue
        starts.append(len(tokens))
        tokens += [zlib.crc32(word.encode()) % (vocab_size - 1) for word in _WORD.findall(document)]
        tokens.append(vocab_size - 1)
    arrays = {
        "tokens": np.array(tokens[:count], dtype=np.int64),
        "starts": np.array(starts, dtype=np.int64),
    }
    write_file(path, safetensors.numpy.save(arrays))


def _documents() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError(
            f"the source of Python's standard library, which this benchmark trains on, is not in "
            f"{folder}: install a Python that has it"
        )
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        yield from (part for part in _DOCUMENT.split(text) if part)


def library_corpus(folder: Path, vocab_size: int) -> Path:
    """Train a tokenizer on the standard library and prepare its source as token shards, unless
    they are there: ten seconds for 50,257 tokens.

    Args:
        folder: parent of tokenizer/ and corpus/.
        vocab_size: vocabulary size of the tokenizer.

    Returns:
        The prepared corpus, with its splits "train" and "val".

    Raises:
        InputError: the library's source is not there.
        StorageError: the disk refused.
    """
    corpus = folder / "corpus"
    if not corpus.exists():
        found = read_documents(find_sources(["stdlib"]), "text")
        texts = (record.value for record in found if record.error is None)
        tokenizer = train_tokenizer(texts, vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        prepare(["stdlib"], tokenizer, corpus, workers=1)
    return corpus


class ShardRows:
    """The rows of a prepared corpus in their order, from its first again behind the last."""

    def __init__(self, folder: Path, seq_len: int) -> None:
        self.dataset, self.seq_len = TokenDataset(folder, "train"), seq_len
        # A last row that is short is left out.
        self.count = max(1, (self.dataset.num_tokens - 1) // seq_len)

    def batch(self, first: int, rows: int, documents: bool) -> Batch:
        """Rows `first` to `first + rows` as one batch; see `Tokens.batch`."""
        numbers = [row % self.count for row in range(first, first + rows)]
        return rows_to_batch(self.dataset, numbers, self.seq_len, 0, document_masking=documents)


def open_rows(path: Path, seq_len: int) -> Tokens | ShardRows:
    """The rows of a prepared corpus, or of a file of `write_tokens`."""
    return ShardRows(path, seq_len) if path.is_dir() else Tokens(path, seq_len)


class Tokens:
    """The rows of a file that `write_tokens` wrote."""

    def __init__(self, path: Path, seq_len: int) -> None:
        arrays = safetensors.numpy.load_file(path)
        self.tokens: npt.NDArray[np.int64] = arrays["tokens"]
        self.starts: npt.NDArray[np.int64] = arrays["starts"]
        self.seq_len = seq_len

    def batch(self, first: int, rows: int, documents: bool) -> Batch:
        """Rows `first` to `first + rows` as one batch.

        Args:
            documents: number the documents of each row, for masking. A document's end is, as an
                input, the begin of the next, so that no label is left out.
        """
        spans = [row_span(row, self.seq_len) for row in range(first, first + rows)]
        rows_BS = np.stack([self.tokens[span] for span in spans])
        input_ids, labels = rows_BS[:, :-1].copy(), rows_BS[:, 1:].copy()
        numbers = None
        if documents:
            numbers = torch.from_numpy(np.stack([self._document_numbers(span) for span in spans]))
        return Batch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            labels.size,
            numbers,
        )

    def _document_numbers(self, span: slice) -> npt.NDArray[np.int32]:
        first, last = np.searchsorted(self.starts, [span.start, span.stop])
        starts = self.starts[first:last] - span.start
        return separate_documents(starts, self.seq_len, eos_opens=True)[0]
