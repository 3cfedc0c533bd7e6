"""A split of a prepared corpus, as training, evaluation and planning see it: a `Corpus`, whether

    text                `TokenDataset`; in aligned rows, `alignment.AlignedDataset`
    conversations       `examples.ExampleDataset`
    preference pairs    `examples.PreferenceDataset`
    a mix of corpora    `mixing.MixedDataset`

`writer.CorpusWriter` writes the folders of all of them, and `shards` describes the files.

A split of text is one long stream of tokens. Row i predicts tokens i*T+1 ... i*T+T from the token
before each, so that every token but the very first is predicted exactly once; the last row may be
shorter. (Rows of examples are packed otherwise: see `examples`.) With document masking, a row's
tokens are numbered by document, and a token is predicted only from its own document:

    bos text eos | bos text eos     the eos is the last prediction of a document; the label
                                    after it, the next document's bos, is masked
    text eos | text eos             without bos, an eos opens the document after it: it is
                                    predicted as the end of the one and stands, as an input, at
                                    position 0 of the other, whose first token is predicted
                                    from it. No label is masked, and a model learns how
                                    documents begin.
    text | text                     the first token of a document is not predicted
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from firstlight.data.shards import (
    ADVICE,
    LABELLED_VERSION,
    VERSION,
    open_shard,
    read_manifest,
    require_known,
)
from firstlight.errors import DataError

#: A row of a batch, [seq_len]: token ids or labels, and the number of each position's document.
RowIds = npt.NDArray[np.int64]
DocumentIds = npt.NDArray[np.int32]
#: The content of a prepared folder, by the names of `data.kind`, or a mix of several.
Kind = Literal["text", "chat", "preference", "mix"]


def num_rows(num_tokens: int, seq_len: int) -> int:
    """Number of rows of `seq_len` predictions in a stream of `num_tokens`."""
    return -(-max(num_tokens - 1, 0) // seq_len)


def row_span(row: int, seq_len: int) -> slice:
    """The tokens of a row: its inputs and, one further, its labels (cut at the stream's end)."""
    return slice(row * seq_len, row * seq_len + seq_len + 1)


def separate_documents(
    starts: npt.NDArray[np.int64], num_inputs: int, *, eos_opens: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Number the documents of a row's inputs, and find the labels that lie in another document.

    Args:
        starts: positions of documents' first tokens among the row's num_inputs + 1 tokens,
            ascending, int64 [documents].
        num_inputs: inputs of the row.
        eos_opens: the token before a start is, as an input, the first of the document.

    Returns:
        The number of each input's document, from 0 within the row, int32 [num_inputs]; and the
        positions of the labels to mask, int64.
    """
    inner = starts[starts > 0]
    masked = inner[:0] if eos_opens else inner - 1
    first_inputs = inner - 1 if eos_opens else inner
    begins = np.zeros(num_inputs, dtype=np.int32)
    begins[first_inputs[(first_inputs > 0) & (first_inputs < num_inputs)]] = 1
    return np.cumsum(begins, dtype=np.int32), masked


def shuffled_index(position: int, length: int, seed: int, epoch: int) -> int:
    """Element `position` of a random permutation of `range(length)`, in O(1) memory.

    Each (seed, epoch) gives another permutation. It is a 4-round Feistel network over the
    smallest even number of bits that holds `length`, walked until it lands inside the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    assert 0 <= position < length
    half_bits = max((length - 1).bit_length() + 1, 2) // 2
    mask = (1 << half_bits) - 1
    keys = _round_keys(seed, epoch)
    index = position
    while True:
        left, right = index >> half_bits, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = left << half_bits | right
        if index < length:
            return index


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.sha256(f"firstlight row order {seed} {epoch}".encode()).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele et al. 2014): mixes every bit into every other."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


@dataclass(frozen=True)
class CorpusPart:
    """One corpus of a mix, or a corpus alone.

    Attributes:
        name: name in its metrics; "" of a corpus alone.
        dataset: the split.
        weight: rows in a period of the mix: see `mixing.whole_weights`.
    """

    name: str
    dataset: TokenDataset
    weight: int


class Corpus(Protocol):
    """A split of prepared data, in rows of `seq_len` predictions. The defaults are those of text.

    Attributes:
        kind: the kind of the data.
        has_examples: some rows are packed examples, which need document masking.
        folder: the prepared folder, with the tokenizer.
        split: "train" or "val".
        manifest: the folder's manifest, or those of all corpora with their weights.
        vocab_size: ids of the tokenizer.
        num_tokens: tokens of the split.
    """

    kind: Kind = "text"
    has_examples: bool = False
    folder: Path
    split: str
    manifest: dict[str, Any]
    vocab_size: int
    num_tokens: int

    @property
    def parts(self) -> tuple[CorpusPart, ...]:
        """The corpora of a mix, or the corpus alone."""
        ...

    @property
    def gzip_bits_per_byte(self) -> float | None:
        """Bits per byte of gzip -9 on the text; None where not recorded."""
        return None

    def num_rows(self, seq_len: int) -> int:
        """The number of rows, which are an epoch; a DataError if examples don't fit into rows."""
        ...

    def require_row(self, seq_len: int) -> None:
        """Raise a DataError if the split is shorter than a row, or examples don't fit into rows."""
        ...

    def row_at(self, position: int, seq_len: int, seed: int) -> tuple[TokenDataset, int]:
        """(split, row in it) that comes after `position` others: the order of a run."""
        ...

    def label_share(self, seq_len: int) -> float:
        """The share of labels among the tokens of a run's sequences: 1 for text; of conversations,
        the assistant's tokens beside prompts and padding."""
        return 1.0

    def describe(self, seq_len: int) -> Iterator[str]:
        """Lines for people about the conversations that a run sees and leaves out."""
        return iter(())

    def describe_run(self, rows: int, seq_len: int) -> Iterator[str]:
        """Lines for people about the first `rows` rows of a mix."""
        return iter(())

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        """A run's record of its conversations: see `Packing.record`."""
        return []

    def identity(self) -> dict[str, Any]:
        """Entries that tell a run's data from others, beside manifest and folder."""
        return {}

    def epochs_by_corpus(self, rows_seen: int, seq_len: int) -> dict[str, float]:
        """Epochs of each corpus of a mix in the first rows, by its name."""
        return {}


class TokenDataset(Corpus):
    """The tokens of one split, as if they were one long array. Each block of a shard is checked
    when it is read: a shard that changes while it is in use is an error (see `shards`).

    Args:
        folder: a folder that `prepare` wrote.
        split: "train" or "val".
        verify: compare every shard with the sha256 in the manifest, and its ids with the
            vocabulary, first: about a second for each GB. Sizes, headers and document offsets
            are checked in any case, and so is each token when it is read.

    Raises:
        DataError: the folder is no prepared corpus, lacks the split, or is damaged; or it holds
            conversations, which are read by `examples.ExampleDataset`.

    Attributes:
        text_bytes: UTF-8 bytes of the split's text.
        gzip_bytes: bytes of the text after gzip -9; None where not recorded.
    """

    #: Version of the folders that this class reads.
    version = VERSION

    def __init__(self, folder: str | Path, split: str, *, verify: bool = True) -> None:
        self.folder, self.split = Path(folder).expanduser(), split
        self.manifest = read_manifest(self.folder)
        if self.manifest["version"] != self.version:
            kinds = {VERSION: "text", LABELLED_VERSION: "conversations"}
            raise DataError(
                f"{folder} holds {kinds[self.manifest['version']]}, not {kinds[self.version]}"
            )
        entry = self.manifest["splits"].get(split)
        if entry is None:
            known = ", ".join(self.manifest["splits"])
            raise DataError(
                f"{folder} has no '{split}' split (it has: {known}): "
                "prepare it again with --val-fraction above 0"
            )
        self.text_bytes: int = entry["text_bytes"]
        self.gzip_bytes: int | None = entry.get("gzip_bytes")
        self.num_documents: int = entry["documents"]
        self.vocab_size = self.manifest["vocab_size"]
        names = [shard["file"] for shard in entry["shards"]]
        if len(set(names)) != len(names):
            raise DataError(f"{folder}: the manifest names a shard of '{split}' twice: {ADVICE}")
        self._shards = [
            open_shard(self.folder, shard, self.version, self.vocab_size, verify)
            for shard in entry["shards"]
        ]
        self._starts = list(accumulate((one.num_tokens for one in self._shards), initial=0))
        self.num_tokens = self._starts[-1]
        documents = sum(shard.num_documents for shard in self._shards)
        if (self.num_tokens, documents) != (entry["tokens"], entry["documents"]):
            raise DataError(f"{folder}: the shards of '{split}' don't add up to its manifest")

    def __getitem__(self, span: slice) -> npt.NDArray[np.int64]:
        """Tokens `start:stop` as int64 [stop - start] (cut at the end, like any slice).

        Raises:
            DataError: a shard was changed or cut short since it was opened, or holds an id beyond
                the vocabulary.
        """
        start, stop, step = span.indices(self.num_tokens)
        assert step == 1
        result = np.empty(max(stop - start, 0), dtype=np.int64)
        filled, position = 0, start
        while position < stop:
            index = bisect_right(self._starts, position) - 1
            offset = position - self._starts[index]
            part = self._shards[index].tokens(offset, offset + stop - position)
            result[filled : filled + len(part)] = part
            filled += len(part)
            position += len(part)
        require_known(result, self.vocab_size, f"the '{self.split}' split of {self.folder}")
        return result

    def document_starts(self, span: slice) -> npt.NDArray[np.int64]:
        """Positions among the tokens `start:stop` at which documents begin, counted from `start`,
        ascending; twice the same where an empty document precedes another.

        Raises:
            DataError: a shard was changed or cut short since it was opened.
        """
        start, stop, step = span.indices(self.num_tokens)
        assert step == 1
        parts = [np.empty(0, dtype=np.int64)]
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._shards)):
            base, shard = self._starts[index], self._shards[index]
            if base >= stop:
                break
            first, last = (shard.documents_before(max(key - base, 0)) for key in (start, stop))
            parts.append(shard.offsets(first, last).astype(np.int64) + (base - start))
        return np.concatenate(parts)

    @functools.cached_property
    def documents_begin_with_bos(self) -> bool:
        """Each document begins with a bos; without it, the eos before a document is the input
        that its first token is predicted from."""
        first = self[0:1].tolist()
        return bool(first == [self.manifest.get("bos_token_id")])

    @property
    def eos_separates(self) -> bool:
        """The stream is text, eos, text, eos, ... without bos, as GPT-2's."""
        return self.manifest.get("eos_token_id") is not None and not self.documents_begin_with_bos

    @property
    def parts(self) -> tuple[CorpusPart, ...]:
        return (CorpusPart("", self, 1),)

    @property
    def gzip_bits_per_byte(self) -> float | None:
        return 8 * self.gzip_bytes / self.text_bytes if self.gzip_bytes else None

    def num_rows(self, seq_len: int) -> int:
        return num_rows(self.num_tokens, seq_len)

    def require_row(self, seq_len: int) -> None:
        if self.num_tokens < seq_len + 1:
            raise DataError(
                f"the '{self.split}' split of {self.folder} has {self.num_tokens} tokens, "
                f"fewer than one row of data.seq_len {seq_len} needs ({seq_len + 1}): "
                "lower data.seq_len or prepare more text"
            )

    def row_at(self, position: int, seq_len: int, seed: int) -> tuple[TokenDataset, int]:
        rows = self.num_rows(seq_len)
        epoch, index = divmod(position, rows)
        return self, shuffled_index(index, rows, seed, epoch)

    def fill_row(
        self, row: int, input_ids: RowIds, labels: RowIds, document_ids: DocumentIds | None
    ) -> None:
        """Write a row into the arrays of a batch.

        Args:
            row: the row's number.
            input_ids: inputs of the row, int64 [seq_len]; positions beyond a short row stay.
            labels: labels of the row, int64 [seq_len]; positions without a label stay.
            document_ids: document of each position, int32 [seq_len], all of them written; None
                without document masking.
        """
        span = row_span(row, len(input_ids))
        tokens = self[span]
        length = len(tokens) - 1
        input_ids[:length] = tokens[:-1]
        loss_mask = np.ones(length, dtype=bool)
        if document_ids is not None:
            numbers, masked = separate_documents(
                self.document_starts(span), length, eos_opens=self.eos_separates
            )
            document_ids[:length] = numbers
            document_ids[length:] = numbers[-1] + 1
            loss_mask[masked] = False
        labels[:length][loss_mask] = tokens[1:][loss_mask]

    def references_of(self, rows: Sequence[int], seq_len: int) -> npt.NDArray[np.float64] | None:
        """`loader.Batch.references` of the rows [rows, documents]; None without pairs."""
        return None

    def predicts_first(self, first_id: int | None) -> bool:
        """The very first token is predicted from `first_id`, except a leading bos, which has no
        text and nothing to be predicted from, and an example's first token."""
        return first_id is not None and int(self[0:1][0]) != first_id

    def bits_a_nat(self, *, document_masking: bool, first_id: int | None = None) -> float:
        """Bits per byte of the text for each nat per token; see `evaluate_split`."""
        predicted = self._num_predicted(document_masking=document_masking, first_id=first_id)
        return predicted / self.text_bytes / math.log(2)

    def _num_predicted(self, *, document_masking: bool, first_id: int | None = None) -> int:
        """The number of tokens that are predicted in an epoch."""
        if document_masking and self.documents_begin_with_bos:
            return self.num_tokens - self.num_documents
        return self.num_tokens - (not self.predicts_first(first_id))
