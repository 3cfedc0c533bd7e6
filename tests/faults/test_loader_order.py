"""The order of the data, for any shards, ranks, workers and interruptions, against a reference
that is a plain list: every row once an epoch, none twice, none lost, and each in its place."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scale import cases

from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import Batch, TokenLoader
from firstlight.data.shards import ShardWriter
from firstlight.files.atomic import write_json

#: Splits of documents and shards of drawn sizes, made when they are first drawn.
_NUM_LAYOUTS = 96
_EOS, _BOS = 1, 2


@dataclass(frozen=True)
class Layout:
    """A split on the disk, and the same as lists."""

    dataset: TokenDataset
    tokens: list[int]
    documents: list[int]  # the number of each token's document
    eos_opens: bool


@functools.cache
def layout(number: int) -> Layout:
    """Split `number`: a few documents in shards of at least so many tokens.

    Every token but eos and bos is another, so that none can be taken for its neighbour.
    """
    draw = random.Random(number)
    kind = ("bare", "eos", "bos")[number % 3]
    fresh = itertools.count(10)
    documents = []
    for _ in range(draw.randint(2, 14)):
        text = [next(fresh) for _ in range(draw.choice((0, 1, 1, 2, 3, 5, 8, 13)))]
        before, after = [_BOS] * (kind == "bos"), [_EOS] * (kind != "bare")
        documents.append([*before, *text, *after])
    documents.append([next(fresh) for _ in range(3)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shard_tokens = draw.choice((1, 2, 5, 9, 30, 1000))
        with ShardWriter(folder, "train", np.dtype("<u2"), shard_tokens) as writer:
            for document in documents:
                writer.write(np.array(document, "<u2"))
        tokens = [token for document in documents for token in document]
        split = {
            "documents": len(documents),
            "tokens": len(tokens),
            "text_bytes": len(tokens),
            "shards": writer.shards,
        }
        manifest = {
            "format": "firstlight-tokens",
            "version": 1,
            "vocab_size": next(fresh),
            "tokenizer_sha256": "",
            "bos_token_id": _BOS if kind == "bos" else None,
            "eos_token_id": None if kind == "bare" else _EOS,
            "splits": {"train": split},
        }
        write_json(folder / "manifest.json", manifest)
        # The mapped files stay readable after their names are gone.
        dataset = TokenDataset(folder, "train")
    owners = [i for i, document in enumerate(documents) for _ in document]
    return Layout(dataset, tokens, owners, kind == "eos")


# The reference: no threads, no ranks, no numpy, nothing of firstlight


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a 4-round Feistel network that is walked until it lands inside."""
    digest = hashlib.sha256(f"firstlight row order {seed} {epoch}".encode()).digest()
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(4)]
    half = 1
    while 1 << 2 * half < length:
        half += 1

    def mixed(value: int) -> int:
        value %= 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    def walked(place: int) -> int:
        left, right = divmod(place, 1 << half)
        for key in keys:
            left, right = right, left ^ mixed(right ^ key) % (1 << half)
        return (left << half) + right

    order = []
    for position in range(length):
        place = walked(position)
        while place >= length:
            place = walked(place)
        order.append(place)
    return order


Row = tuple[list[int], list[int], list[int]]


def reference_row(layout: Layout, row: int, seq_len: int, masking: bool) -> Row:
    """(input ids, labels, document numbers) of a row; no numbers without masking."""
    first = row * seq_len
    last = min(first + seq_len, len(layout.tokens) - 1)
    inputs, labels, numbers = [], [], []
    for place in range(first, last):
        own, next_ones = layout.documents[place], layout.documents[place + 1]
        inputs.append(layout.tokens[place])
        leaves_out = masking and own != next_ones and not layout.eos_opens
        labels.append(-100 if leaves_out else layout.tokens[place + 1])
        numbers.append(next_ones if layout.eos_opens else own)
    missing = seq_len - len(inputs)
    known = list(dict.fromkeys(numbers))
    numbers = [known.index(number) for number in numbers] + [len(known)] * missing
    return inputs + [0] * missing, labels + [-100] * missing, numbers if masking else []


class Reference:
    """All rows of a split in the order of every epoch, one after the other."""

    def __init__(self, layout: Layout, seq_len: int, seed: int, masking: bool) -> None:
        count = -(-(len(layout.tokens) - 1) // seq_len)
        self.rows = [reference_row(layout, row, seq_len, masking) for row in range(count)]
        self.order = functools.cache(lambda epoch: permutation(count, seed, epoch))

    def __getitem__(self, place: int) -> Row:
        epoch, position = divmod(place, len(self.rows))
        return self.rows[self.order(epoch)[position]]


# The loader, in pieces


@dataclass(frozen=True)
class Part:
    """A run between two starts: on so many ranks, saved after `kept` steps, killed `lost` later."""

    world_size: int
    workers: int
    prefetch: int
    kept: int
    lost: int


def rows_of(batch: Batch) -> list[Row]:
    """The rows of a batch, as the reference gives them."""
    inputs, labels = batch.input_ids.tolist(), batch.labels.tolist()
    numbers = [[]] * len(inputs) if batch.document_ids is None else batch.document_ids.tolist()
    assert batch.num_valid == sum(label != -100 for row in labels for label in row)
    return list(zip(inputs, labels, numbers, strict=True))


def run_part(
    open_loader: Callable[[Part, int, int], TokenLoader], part: Part, seen: int
) -> tuple[list[Row], list[Row], int]:
    """Rows up to the save, rows after it, and the position that was saved."""
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(open_loader(part, rank, seen)) for rank in range(part.world_size)
        ]

        def step() -> list[Row]:
            return [row for loader in loaders for row in rows_of(loader.next_batch())]

        kept = [row for _ in range(part.kept) for row in step()]
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        lost = [row for _ in range(part.lost) for row in step()]
    assert all(state == states[0] for state in states), states
    return kept, lost, states[0]["rows_seen"]


@dataclass(frozen=True)
class Case:
    """A run in parts: it starts `before_edge` rows before the end of an epoch, or at row 0."""

    number: int
    seq_len: int
    micro_batch_size: int
    seed: int
    epoch: int
    before_edge: int
    masking: bool
    parts: list[Part]


PARTS = st.builds(
    Part,
    world_size=st.sampled_from((1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 11, 16)),
    workers=st.sampled_from((0, 0, 0, 0, 1, 2, 3, 4)),
    prefetch=st.integers(1, 4),
    kept=st.integers(0, 5),
    lost=st.sampled_from((0, 0, 0, 1, 2)),
)
CASES = st.builds(
    Case,
    number=st.integers(0, _NUM_LAYOUTS - 1),
    seq_len=st.sampled_from((1, 2, 3, 4, 6, 9, 14)),
    micro_batch_size=st.integers(1, 4),
    seed=st.sampled_from((0, 1, 1337, 2**63 - 1)) | st.integers(0, 2**63 - 1),
    epoch=st.sampled_from((0, 0, 0, 1, 2, 10**9)),
    before_edge=st.integers(0, 5),
    masking=st.booleans(),
    parts=st.lists(PARTS, min_size=1, max_size=3),
)


def check_order(case: Case) -> None:
    """All parts of a run hand out what the reference says, and save where they stand."""
    split = layout(case.number)
    seq_len = min(case.seq_len, len(split.tokens) - 1)
    reference = Reference(split, seq_len, case.seed, case.masking)
    epoch_rows = len(reference.rows)

    def open_loader(part: Part, rank: int, seen: int) -> TokenLoader:
        return TokenLoader(
            split.dataset,
            seq_len,
            case.micro_batch_size,
            case.seed,
            rows_seen=seen,
            document_masking=case.masking,
            rank=rank,
            world_size=part.world_size,
            workers=part.workers,
            prefetch=part.prefetch,
        )

    start = seen = max(case.epoch * epoch_rows - case.before_edge, 0)
    found: list[Row] = []
    for part in case.parts:
        kept, lost, saved = run_part(open_loader, part, seen)
        assert len(kept) == part.kept * part.world_size * case.micro_batch_size
        assert saved == seen + len(kept)
        assert kept == [reference[seen + i] for i in range(len(kept))]
        assert lost == [reference[saved + i] for i in range(len(lost))]
        found += kept
        seen = saved
    # Whatever whole epochs went by held every row once.
    for begin in range(-start % epoch_rows, len(found) - epoch_rows + 1, epoch_rows):
        whole = Counter(map(repr, found[begin : begin + epoch_rows]))
        assert whole == Counter(map(repr, reference.rows))


def test_loader_any_shards_ranks_workers_and_resumes_keep_one_order(
    record_property: Callable[[str, object], None],
) -> None:
    count, tried = cases(100, 10_000), 0

    @settings(max_examples=count)
    @given(case=CASES)
    def each(case: Case) -> None:
        nonlocal tried
        check_order(case)
        tried += 1

    each()
    assert tried >= count, f"{tried} of {count} cases were tried"
    record_property("cases", ("orders of the data like the one-process reference's", tried))


def test_reference_order_is_distinct_permutation_per_epoch() -> None:
    """What the reference itself says: each epoch every row once, and no epoch like another."""
    orders = [permutation(57, 3, epoch) for epoch in range(20)]
    assert all(sorted(order) == list(range(57)) for order in orders)
    assert len({tuple(order) for order in orders}) == 20
    assert permutation(10, 0, 0) == [7, 6, 8, 2, 9, 5, 0, 4, 1, 3]
