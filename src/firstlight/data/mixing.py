"""Mixes of several corpora. Each corpus contributes rows in exact proportion to its weight.

The corpus of a row is a pure function of the row's position in the run. The weights are interpreted
as exact fractions (0.7 is 7/10) and scaled to the smallest integers in the same ratio. Their sum is
the period: weights 7 and 3 repeat every ten rows.

Positions, and the rows j of each corpus, are counted from 0 within a period. A corpus with a
fraction w of the rows may provide its row j at position j / w (rounded down) at the earliest, and
must provide it before position (j + 1) / w (rounded up). At each position, the row with the
earliest deadline is drawn. All deadlines are then met (Baruah et al., "Proportionate progress",
1996), so after any n rows a corpus has provided more than n * w - 1 and fewer than n * w + 1 of
them.

In a mix, a corpus provides its rows in the same order as it would alone: reshuffled in each of its
epochs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.data.corpus import Corpus, CorpusPart, Kind, TokenDataset
from firstlight.errors import ConfigError, DataError

#: Maximum period in rows. The corpus of each row in a period is computed and kept in memory.
MAX_PERIOD = 1_000_000


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same ratio as the weights, whose decimal notation is
    taken as exact: [0.7, 0.3] gives [7, 3].

    Raises:
        ConfigError: there are no weights, a weight is not finite and above 0, or the integers add
            up to more than `MAX_PERIOD`.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"the weights of a mix must be above 0, not {list(weights)}")
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(
        math.gcd(*(share.numerator for share in exact)),
        math.lcm(*(share.denominator for share in exact)),
    )
    # `unit` is the greatest common divisor of the fractions, which are in lowest terms.
    whole = [int(share / unit) for share in exact]
    if sum(whole) > MAX_PERIOD:
        total = sum(exact)
        rounded = [max(round(1000 * share / total), 1) for share in exact]
        raise ConfigError(
            f"the weights of a mix ({', '.join(map(repr, weights))}) repeat only after "
            f"{sum(whole):,} rows, more than the limit of {MAX_PERIOD:,}: round them, for "
            f"example to {', '.join(map(str, rounded))}"
        )
    return whole


class Turns:
    """Maps the position of a row in the run to the corpus that provides it.

    Args:
        parts: number of rows of each corpus in a period, from `whole_weights`.

    Attributes:
        period: number of rows in a period.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts, self.period = tuple(parts), sum(parts)
        self._corpus = _corpora_of_period(self.parts)
        self._positions = [np.flatnonzero(self._corpus == i) for i in range(len(self.parts))]

    def at(self, position: int) -> tuple[int, int]:
        """Return (index of the corpus that provides the row at `position`, number of rows that this
        corpus has provided before)."""
        periods, within = divmod(position, self.period)
        corpus = int(self._corpus[within])
        before = int(np.searchsorted(self._positions[corpus], within))
        return corpus, periods * self.parts[corpus] + before

    def counts(self, position: int) -> list[int]:
        """Return the number of rows of each corpus among the first `position` rows."""
        periods, within = divmod(position, self.period)
        return [
            periods * part + int(np.searchsorted(positions, within))
            for part, positions in zip(self.parts, self._positions, strict=True)
        ]


def _corpora_of_period(parts: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return the index of the corpus of each row of one period, uint32 [period]; see the module's
    docstring.

    `waiting` contains (earliest position of the corpus's next row, corpus), `ready` contains
    (deadline of the corpus's next row, corpus).
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
    """The same split of several corpora, from which rows are drawn by weight.

    An epoch has as many rows as all corpora together. If the weights are proportional to the
    corpora's sizes, each corpus is seen once per epoch; otherwise, a corpus with a larger weight is
    seen more than once, and a corpus with a smaller weight only in part.

    Args:
        parts: the corpora.

    Attributes:
        turns: assignment of rows to corpora.
        has_examples: True if at least one corpus consists of conversations.
        folder: folder of the first corpus of conversations, or of the first corpus if there are no
            conversations. The tokenizer is read from it; all corpora have the same tokenizer.
        manifest: manifests of all corpora, with their weights.
        num_tokens: total number of tokens in all corpora.

    Raises:
        DataError: a corpus is in the mix twice, or tokenizers or chat templates differ.
    """

    kind: Kind = "mix"

    def __init__(self, parts: Sequence[CorpusPart]) -> None:
        self._parts = tuple(parts)
        self.turns = Turns([one.weight for one in parts])
        datasets = [one.dataset for one in parts]
        first = datasets[0]
        for number, dataset in enumerate(datasets):
            assert dataset.split == first.split
            _require_same_tokenizer(first, dataset)
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
            f"{epochs[one.name]:.3g} of its epochs)"
            for one, count in zip(self.parts, counts, strict=True)
        )
        yield f"data: {rows:,} rows of a mix of {self.num_rows(seq_len):,}: {shares}"

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        return [record for one in self.parts for record in one.dataset.records(seq_len)]

    def identity(self) -> dict[str, Any]:
        # The weights, written as a ratio: "7:3".
        ratio = {"mix": ":".join(str(one.weight) for one in self.parts)}
        return ratio | {key: v for one in self.parts for key, v in one.dataset.identity().items()}

    def epochs_by_corpus(self, rows_seen: int, seq_len: int) -> dict[str, float]:
        return {
            one.name: count / one.dataset.num_rows(seq_len)
            for one, count in zip(self.parts, self.turns.counts(rows_seen), strict=True)
        }


def _require_same_tokenizer(first: TokenDataset, other: TokenDataset) -> None:
    keys = ("tokenizer_sha256", "vocab_size", "bos_token_id", "eos_token_id")
    if any(first.manifest.get(key) != other.manifest.get(key) for key in keys):
        raise DataError(
            f"{other.folder} can't be mixed with {first.folder}: they were prepared with "
            f"different tokenizers; prepare it again with --tokenizer {first.folder}"
        )


def _require_same_template(chats: Sequence[TokenDataset]) -> None:
    for other in chats[1:]:
        templates = [one.manifest["chat"]["template_sha256"] for one in (chats[0], other)]
        if templates[0] != templates[1]:
            raise DataError(
                f"{other.folder} can't be mixed with {chats[0].folder}: they were prepared with "
                "different chat templates; prepare them again with one --template"
            )
