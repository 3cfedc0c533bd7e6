"""Define `Corpus`, a split of prepared data for training, evaluation and planning.

The class of a corpus depends on its data:

    text                `TokenDataset`, or `packing.AlignedDataset` if rows start at document
                        boundaries
    conversations       `packing.ExampleDataset`
    preference pairs    `packing.PreferenceDataset`
    a mix of corpora    `MixedDataset`

The files of a prepared folder are described in `shards` and written by `shards.CorpusWriter`.

A split of text is one long stream of tokens. With rows of T positions, row i predicts tokens i*T+1
... i*T+T, each from the token before it. Every token except the very first is therefore predicted
exactly once, and the last row may be shorter. Conversations are instead packed into rows (see
`packing`).

With document masking, each token of a row is assigned the number of its document, and a token is
predicted only from tokens of the same document. The details depend on which special tokens surround
the text of a document:

    bos text eos | bos text eos     The eos is the last label of a document. The label after it,
                                    the next document's bos, is masked.
    text eos | text eos             The eos between two documents is a label of the first document.
                                    It is also the input at position 0 of the second document,
                                    from which that document's first token is predicted. No label
                                    is masked, and the model learns how documents begin.
    text | text                     The first token of a document is not predicted.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from firstlight.data.shards import (
    ADVICE,
    LABELLED_VERSION,
    VERSION,
    manifest_digest,
    open_shard,
    read_manifest,
    require_known,
)
from firstlight.errors import ConfigError, DataError

#: Arrays for one row of a batch, with shape [seq_len]. `RowIds` contains token ids or labels, and
#: `DocumentIds` contains the document number of each position.
RowIds = npt.NDArray[np.int64]
DocumentIds = npt.NDArray[np.int32]
#: Kind of data in a prepared folder (a value of `data.kind`), or "mix".
Kind = Literal["text", "chat", "preference", "mix"]


def num_rows(num_tokens: int, seq_len: int) -> int:
    """Return the number of rows of `seq_len` positions in a stream of `num_tokens` tokens."""
    return -(-max(num_tokens - 1, 0) // seq_len)


def row_span(row: int, seq_len: int) -> slice:
    """Return the range of a row's tokens in the stream. It covers `seq_len` inputs and one more
    token, the label of the last input. The range may extend beyond the end of the stream.
    """
    return slice(row * seq_len, row * seq_len + seq_len + 1)


def separate_documents(
    starts: npt.NDArray[np.int64], num_inputs: int, *, eos_opens: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Assign a document number to each input of a row. Also find the labels that must be masked
    because they belong to a different document than their inputs.

    Args:
        starts: positions of the documents' first tokens among the row's num_inputs + 1 tokens,
            ascending, int64 [documents].
        num_inputs: number of inputs in the row.
        eos_opens: True if the eos immediately before the first token of a document counts as part
            of that document.

    Returns:
        Two arrays: the zero-based document number of each input within the row, int32 [num_inputs],
        and the positions of the labels to mask, int64 [masked labels].
    """
    inner = starts[starts > 0]
    masked = inner[:0] if eos_opens else inner - 1
    first_inputs = inner - 1 if eos_opens else inner
    begins = np.zeros(num_inputs, dtype=np.int32)
    begins[first_inputs[(first_inputs > 0) & (first_inputs < num_inputs)]] = 1
    return np.cumsum(begins, dtype=np.int32), masked


def shuffled_index(position: int, length: int, seed: int, epoch: int) -> int:
    """Return element `position` of a random permutation of `range(length)`, in O(1) memory.

    Each (seed, epoch) gives a different permutation. A 4-round Feistel network permutes all b-bit
    numbers, where b is the smallest even number of bits that can represent every index. The network
    is applied repeatedly until the result is below `length` (cycle walking: Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002).
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
    """Apply the 64-bit finalizer of splitmix64 (Steele et al. 2014), which makes every bit of the
    result depend on every bit of `value`.
    """
    value &= 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


@dataclass(frozen=True)
class CorpusPart:
    """One corpus of a mix, or a corpus used alone.

    Attributes:
        name: name of the corpus, which is part of the names of its metrics; "" for a corpus used
            alone.
        dataset: the split of the corpus from which rows are read.
        weight: number of rows that the corpus contributes to each period of the mix (see `Turns`).
    """

    name: str
    dataset: TokenDataset
    weight: int


class Corpus(Protocol):
    """A split of prepared data, read in rows of `seq_len` positions. The default implementations of
    the methods are for text.

    Attributes:
        kind: type of the data, such as text or conversations.
        has_examples: True if some rows are packed conversations, which require document masking.
        folder: the prepared folder, which contains the tokenizer.
        split: "train" or "val".
        manifest: the folder's manifest; for a mix, the manifests of all corpora with their weights.
        vocab_size: number of tokens in the tokenizer's vocabulary.
        num_tokens: number of tokens in the split.
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
        """The corpora of a mix; for a single corpus, the corpus itself as the only part."""
        ...

    @property
    def gzip_bits_per_byte(self) -> float | None:
        """Size of the text after compression with gzip -9, in bits per byte of the original text.
        This is a baseline for the bits per byte of a model. None if the size was not recorded.
        """
        return None

    def num_rows(self, seq_len: int) -> int:
        """Return the number of rows per epoch. Raise a DataError if a conversation doesn't fit into
        a row.
        """
        ...

    def require_row(self, seq_len: int) -> None:
        """Raise a DataError if the text is too short for a single row, or if a conversation is too
        long for a row.
        """
        ...

    def row_at(self, position: int, seq_len: int, seed: int) -> tuple[TokenDataset, int]:
        """Return the row that a run with this seed reads at `position`, as (split, index of the row
        in the split). Positions are counted across all epochs.
        """
        ...

    def label_share(self, seq_len: int) -> float:
        """Return the fraction of positions that have a label. It is 1 for text. For conversations,
        it is lower, because prompts and padding have no labels.
        """
        return 1.0

    def describe(self, seq_len: int) -> Iterator[str]:
        """Yield lines of output that describe the rows of a split: for example, the fraction of
        positions occupied by examples, and the number of examples that were dropped or truncated.
        """
        return iter(())

    def describe_run(self, rows: int, seq_len: int) -> Iterator[str]:
        """Yield lines of output that show how much each corpus contributes to the first `rows` rows
        of a mix.
        """
        return iter(())

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        """Return the entries for the run log, as one dict for each corpus of conversations."""
        return []

    def identity(self) -> dict[str, Any]:
        """Return a dict of the settings that affect the training data. Together with the manifest,
        they identify the data of a run.
        """
        return {}

    def epochs_by_corpus(self, rows_seen: int, seq_len: int) -> dict[str, float]:
        """Return a dict with the number of epochs that each corpus of a mix has completed after the
        first `rows_seen` rows. The numbers include fractions of an epoch, and the keys are the
        names of the corpora.
        """
        return {}


class TokenDataset(Corpus):
    """One split of prepared text, which can be sliced like a long array of token ids. Every block
    of a shard is checked as it is read. If a shard changes while it is in use, an error is
    therefore raised (see `shards`).

    Args:
        folder: a folder written by `prepare`.
        split: "train" or "val".
        verify: True to check every shard against the sha256 in the manifest, and all ids against
            the vocabulary, when the split is opened. This takes about one second per GB. Sizes,
            headers and document offsets are always checked, and each id is checked when it is read.

    Raises:
        DataError: the folder is not a prepared corpus, lacks the split, is damaged, or contains
            conversations (use `packing.ExampleDataset`).

    Attributes:
        text_bytes: number of UTF-8 bytes in the split's text.
        gzip_bytes: size of the text in bytes after compression with gzip -9; None if it was not
            recorded.
    """

    #: Format version of the prepared folders that this class can read.
    version = VERSION

    def __init__(self, folder: str | Path, split: str, *, verify: bool = True) -> None:
        self.folder, self.split = Path(folder).expanduser(), split
        self.manifest = read_manifest(self.folder)
        if self.manifest["version"] != self.version:
            kinds = {VERSION: "text", LABELLED_VERSION: "conversations"}
            raise DataError(
                f"{folder} contains {kinds[self.manifest['version']]}, not {kinds[self.version]}"
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
            raise DataError(f"{folder}: the manifest lists a shard of '{split}' twice: {ADVICE}")
        self._shards = [
            open_shard(self.folder, shard, self.version, self.vocab_size, verify=verify)
            for shard in entry["shards"]
        ]
        self._starts = list(accumulate((one.num_tokens for one in self._shards), initial=0))
        self.num_tokens = self._starts[-1]
        documents = sum(shard.num_documents for shard in self._shards)
        if (self.num_tokens, documents) != (entry["tokens"], entry["documents"]):
            raise DataError(f"{folder}: the shards of '{split}' don't match its manifest")

    def __getitem__(self, span: slice) -> npt.NDArray[np.int64]:
        """Return the token ids `start:stop`, int64 [stop - start]. As with any slice, the result is
        shorter if `stop` is beyond the end.

        Raises:
            DataError: a shard was changed or truncated since it was opened, or contains an id
                beyond the vocabulary.
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
        """Return the positions, relative to `start`, at which documents begin among the tokens
        `start:stop`, ascending, int64 [documents]. An empty document has the same position as the
        following document.

        Raises:
            DataError: a shard was changed or truncated since it was opened.
        """
        start, stop, step = span.indices(self.num_tokens)
        assert step == 1
        stop = max(start, stop)  # `stop` can be less than `start`, which selects no tokens.
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
        """True if the split begins with a bos token. In this case, every document begins with a bos
        token.
        """
        first = self[0:1].tolist()
        return bool(first == [self.manifest.get("bos_token_id")])

    @property
    def eos_separates(self) -> bool:
        """True if documents are separated by eos tokens and do not begin with a bos token, as for
        GPT-2. The first token of a document is then predicted from the eos before it.
        """
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
        """Write a row to the arrays of a batch.

        Args:
            row: index of the row.
            input_ids: inputs of the row, int64 [seq_len]; positions after the end of a short row
                are left unchanged.
            labels: labels of the row, int64 [seq_len]; positions without a label are left
                unchanged.
            document_ids: document number of each position, int32 [seq_len], written at every
                position; None without document masking.
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
        """Return the value of `loader.Batch.references` for the given rows, fp64 [rows, documents].
        Return None for data other than preference pairs.
        """
        return None

    def predicts_first(self, first_id: int | None) -> bool:
        """Return True if the very first token of the split is predicted when `first_id` is inserted
        before it. A bos token at the beginning of the split is never predicted, because it does not
        represent any text. The first token of a conversation is not predicted either.
        """
        return first_id is not None and int(self[0:1][0]) != first_id

    def bits_a_nat(self, *, document_masking: bool, first_id: int | None = None) -> float:
        """Return the factor that converts a loss in nats per token to bits per byte of text."""
        predicted = self._num_predicted(document_masking=document_masking, first_id=first_id)
        return predicted / self.text_bytes / math.log(2)

    def _num_predicted(self, *, document_masking: bool, first_id: int | None = None) -> int:
        """Return the number of tokens that are predicted in one epoch."""
        if document_masking and self.documents_begin_with_bos:
            return self.num_tokens - self.num_documents
        return self.num_tokens - (not self.predicts_first(first_id))


# Mixes of several corpora. Each corpus contributes rows in exact proportion to its weight.
#
# Which corpus provides a row depends only on the row's position in the run. The weights are
# interpreted as exact fractions (0.7 is 7/10) and scaled to the smallest integers in the same
# ratio. The sum of these integers is the period of the mix: with weights 7 and 3, the order of the
# corpora repeats every ten rows.
#
# Positions and the rows of each corpus are counted from 0 within a period. For a corpus that
# provides a fraction w of all rows, the earliest position of its row j is j / w, rounded down. The
# deadline of this row is (j + 1) / w, rounded up: the row must be provided before this position.
# Each position is given to the available row with the earliest deadline. With this rule, all
# deadlines are met (Baruah et al., "Proportionate progress", 1996). For any n, the first n rows
# therefore contain more than n * w - 1 and fewer than n * w + 1 rows of the corpus.
#
# Each corpus provides its rows in the same order as if it were used alone, and reshuffles them in
# each epoch over the corpus.

#: Maximum period in rows. It is limited because the order of the corpora in a period is kept in
#: memory.
MAX_PERIOD = 1_000_000


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same ratio as the weights. The decimal notation of the
    weights is treated as exact: [0.7, 0.3] gives [7, 3].

    Raises:
        ConfigError: there are no weights, a weight is not finite and positive, or the sum of the
            integers exceeds `MAX_PERIOD`.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"the weights of a mix must be above 0, not {list(weights)}")
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(
        math.gcd(*(share.numerator for share in exact)),
        math.lcm(*(share.denominator for share in exact)),
    )
    # `unit` is the greatest common divisor of the fractions, all of which are in lowest terms.
    whole = [int(share / unit) for share in exact]
    if sum(whole) > MAX_PERIOD:
        total = sum(exact)
        rounded = [max(round(1000 * share / total), 1) for share in exact]
        raise ConfigError(
            f"a mix with the weights ({', '.join(map(repr, weights))}) has a period of "
            f"{sum(whole):,} rows, more than the limit of {MAX_PERIOD:,}: round the weights, for "
            f"example to {', '.join(map(str, rounded))}"
        )
    return whole


class Turns:
    """Maps the position of a row in the run to the corpus that provides this row.

    Args:
        parts: number of rows of each corpus per period, from `whole_weights`.

    Attributes:
        period: number of rows per period.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts, self.period = tuple(parts), sum(parts)
        self._corpus = _corpora_of_period(self.parts)
        self._positions = [np.flatnonzero(self._corpus == i) for i in range(len(self.parts))]

    def at(self, position: int) -> tuple[int, int]:
        """Return the index of the corpus that provides the row at `position`, and the number of
        rows that this corpus has provided before `position`.
        """
        periods, within = divmod(position, self.period)
        corpus = int(self._corpus[within])
        before = int(np.searchsorted(self._positions[corpus], within))
        return corpus, periods * self.parts[corpus] + before

    def counts(self, position: int) -> list[int]:
        """Return how many of the first `position` rows each corpus provides."""
        periods, within = divmod(position, self.period)
        return [
            periods * part + int(np.searchsorted(positions, within))
            for part, positions in zip(self.parts, self._positions, strict=True)
        ]


def _corpora_of_period(parts: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return the index of the corpus that provides each row of one period, uint32 [period]. The
    algorithm is described in the comment above `MAX_PERIOD`.

    Each corpus is in one of two queues: `waiting` contains (earliest position of its next row,
    corpus), and `ready` contains (deadline of its next row, corpus).
    """
    period = sum(parts)
    corpora = np.empty(period, dtype=np.uint32)
    given = [0] * len(parts)
    waiting = [(0, corpus) for corpus in range(len(parts))]
    ready: list[tuple[int, int]] = []
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, corpus = heapq.heappop(waiting)
            deadline = -(-(given[corpus] + 1) * period // parts[corpus])
            heapq.heappush(ready, (deadline, corpus))
        deadline, corpus = heapq.heappop(ready)
        assert position < deadline
        corpora[position] = corpus
        given[corpus] += 1
        heapq.heappush(waiting, (given[corpus] * period // parts[corpus], corpus))
    return corpora


class MixedDataset(Corpus):
    """A mix of several corpora, all with the same split ("train" or "val"). Rows are drawn from
    each corpus in proportion to its weight.

    An epoch has as many rows as all corpora together. If the weights are proportional to the sizes
    of the corpora, each corpus is seen once per epoch. Otherwise, a corpus with a larger weight is
    seen more than once per epoch, and one with a smaller weight only partially.

    Args:
        parts: the corpora.

    Attributes:
        turns: schedule that specifies which corpus provides each row.
        has_examples: True if at least one corpus consists of conversations.
        folder: folder from which the tokenizer is read. This is the folder of the first corpus of
            conversations. If there are no conversations, it is the folder of the first corpus. All
            corpora have the same tokenizer.
        manifest: manifests of all corpora, with their weights.
        num_tokens: total number of tokens in all corpora.

    Raises:
        DataError: a corpus occurs twice in the mix, or the corpora have different tokenizers or
            chat templates.
    """

    kind: Kind = "mix"

    def __init__(self, parts: Sequence[CorpusPart]) -> None:
        self._parts = tuple(parts)
        self.turns = Turns([one.weight for one in parts])
        datasets = [one.dataset for one in parts]
        first = datasets[0]
        for number, dataset in enumerate(datasets):
            assert dataset.split == first.split
            require_same_tokenizer(first, dataset)
            if dataset.manifest in [other.manifest for other in datasets[:number]]:
                raise DataError(
                    f"{dataset.folder} is in the mix twice: list it once, with the sum of the "
                    "weights"
                )
        chats = [one for one in datasets if one.has_examples]
        _require_same_template(chats)
        self.has_examples = bool(chats)
        self.split, self.vocab_size = first.split, first.vocab_size
        self.folder = (chats or datasets)[0].folder
        self.num_tokens = sum(dataset.num_tokens for dataset in datasets)
        self.manifest: dict[str, Any] = {
            **{key: first.manifest[key] for key in ("vocab_size", "tokenizer_sha256")},
            "mix": [{"part": one.weight, "manifest": one.dataset.manifest} for one in parts],
        }

    @property
    def parts(self) -> tuple[CorpusPart, ...]:
        return self._parts

    def num_rows(self, seq_len: int) -> int:
        return sum(one.dataset.num_rows(seq_len) for one in self.parts)

    def require_row(self, seq_len: int) -> None:
        for one in self.parts:
            one.dataset.require_row(seq_len)

    def row_at(self, position: int, seq_len: int, seed: int) -> tuple[TokenDataset, int]:
        corpus, given = self.turns.at(position)
        return self.parts[corpus].dataset.row_at(given, seq_len, seed)

    def label_share(self, seq_len: int) -> float:
        shares = (one.weight * one.dataset.label_share(seq_len) for one in self.parts)
        return sum(shares) / self.turns.period

    def describe(self, seq_len: int) -> Iterator[str]:
        for one in self.parts:
            yield from one.dataset.describe(seq_len)

    def describe_run(self, rows: int, seq_len: int) -> Iterator[str]:
        counts, epochs = self.turns.counts(rows), self.epochs_by_corpus(rows, seq_len)
        shares = ", ".join(
            f"{one.name} {one.weight / self.turns.period:.1%} ({count:,} rows, "
            f"epochs: {epochs[one.name]:.3g})"
            for one, count in zip(self.parts, counts, strict=True)
        )
        yield f"data: {rows:,} rows from a mix of {self.num_rows(seq_len):,} rows: {shares}"

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        return [record for one in self.parts for record in one.dataset.records(seq_len)]

    def identity(self) -> dict[str, Any]:
        # The weights are written as a ratio, such as "7:3".
        ratio = {"mix": ":".join(str(one.weight) for one in self.parts)}
        return ratio | {key: v for one in self.parts for key, v in one.dataset.identity().items()}

    def epochs_by_corpus(self, rows_seen: int, seq_len: int) -> dict[str, float]:
        return {
            one.name: count / one.dataset.num_rows(seq_len)
            for one, count in zip(self.parts, self.turns.counts(rows_seen), strict=True)
        }


#: Shares of kept text among which a run chooses, and the share with which it starts.
REPLAY_SHARES = (0.0, 0.05, 0.1, 0.25)
FIRST_REPLAY_SHARE = 0.1


@dataclass(frozen=True)
class _Stage:
    """Part of a run in which kept text has a constant share of the rows.

    Attributes:
        start: position of the first row of the stage.
        turns: schedule of the stage. Its corpora are the new text and, if the share of kept text
            is above 0, the kept text.
        before: number of rows of each corpus before the stage.
    """

    start: int
    turns: Turns
    before: tuple[int, int]

    def counts(self, position: int) -> list[int]:
        counts = self.turns.counts(position - self.start)
        return [n + more for n, more in zip(self.before, [*counts, 0][:2], strict=True)]


class ReplayedDataset(MixedDataset):
    """Rows of new text, some of which are replaced with rows of kept text ("replay"), so that the
    model does not forget the kept text. See Ibrahim et al., "Simple and Scalable Strategies to
    Continually Pre-train Large Language Models" (2024, arXiv:2403.08763), who replay 5% of old
    text if the new text is similar to it, and 25% or more if it is not. The share of kept text can
    change during a run.

    An epoch has as many rows as the new text. A larger share of kept text therefore does not make
    the run longer, but shows the model less of the new text.

    Args:
        new: split of the new text, conversations included.
        kept: split of the kept text.
        share: fraction of the rows that are kept text, at least 0 and below 1. None starts with
            `FIRST_REPLAY_SHARE`; `change_share` then sets the share of the remaining rows.

    Attributes:
        is_open: True until the share is set.

    Raises:
        DataError: see `MixedDataset`.
    """

    def __init__(self, new: TokenDataset, kept: TokenDataset, share: float | None) -> None:
        super().__init__([CorpusPart("new", new, 1), CorpusPart("kept", kept, 1)])
        # The new text identifies the data of the run, as without replay.
        self.manifest = new.manifest
        self._given, self.is_open = share, share is None
        first = FIRST_REPLAY_SHARE if share is None else share
        self._stages = [_Stage(0, _replay_turns(first), (0, 0))]

    def change_share(self, position: int, share: float) -> None:
        """Set the share of kept text for all rows from `position` on."""
        new, kept = self._stages[-1].counts(position)
        self._stages.append(_Stage(position, _replay_turns(share), (new, kept)))
        self.is_open = False

    def _stage_at(self, position: int) -> _Stage:
        return next(stage for stage in reversed(self._stages) if stage.start <= position)

    def num_rows(self, seq_len: int) -> int:
        return self.parts[0].dataset.num_rows(seq_len)

    def require_row(self, seq_len: int) -> None:
        self.parts[0].dataset.require_row(seq_len)
        # A shorter row of kept text is padded.
        self.parts[1].dataset.require_row(1)

    def row_at(self, position: int, seq_len: int, seed: int) -> tuple[TokenDataset, int]:
        stage = self._stage_at(position)
        corpus, given = stage.turns.at(position - stage.start)
        return self.parts[corpus].dataset.row_at(given + stage.before[corpus], seq_len, seed)

    def label_share(self, seq_len: int) -> float:
        turns = self._stages[-1].turns
        shares = (one.dataset.label_share(seq_len) for one in self.parts)
        return sum(n * x for n, x in zip(turns.parts, shares, strict=False)) / turns.period

    def describe_run(self, rows: int, seq_len: int) -> Iterator[str]:
        return iter(())

    def identity(self) -> dict[str, Any]:
        kept = manifest_digest(self.parts[1].dataset.manifest)
        return super().identity() | {"mix": f"kept text {kept[:16]}, replay {self._given}"}

    def epochs_by_corpus(self, rows_seen: int, seq_len: int) -> dict[str, float]:
        counts = self._stage_at(rows_seen).counts(rows_seen)
        return {
            one.name: count / one.dataset.num_rows(seq_len)
            for one, count in zip(self.parts, counts, strict=True)
        }


def _replay_turns(share: float) -> Turns:
    return Turns(whole_weights([1 - share, share]) if share else [1])


def require_same_tokenizer(first: TokenDataset, other: TokenDataset) -> None:
    """Raise a DataError if two corpora were prepared with different tokenizers."""
    keys = ("tokenizer_sha256", "vocab_size", "bos_token_id", "eos_token_id")
    if any(first.manifest.get(key) != other.manifest.get(key) for key in keys):
        raise DataError(
            f"{other.folder} can't be mixed with {first.folder}: they were prepared with "
            f"different tokenizers; prepare {other.folder} again with --tokenizer {first.folder}"
        )


def _require_same_template(chats: Sequence[TokenDataset]) -> None:
    for other in chats[1:]:
        templates = [one.manifest["chat"]["template_sha256"] for one in (chats[0], other)]
        if templates[0] != templates[1]:
            raise DataError(
                f"{other.folder} can't be mixed with {chats[0].folder}: they were prepared with "
                "different chat templates; prepare them again with the same --template"
            )
