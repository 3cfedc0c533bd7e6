"""Compare two models on the same text, tasks and prompts.

Both models read the same rows of text. A row is a sequence of consecutive bytes that fits into the
contexts of both models. It is divided into segments. A segment extends from one position that is a
token boundary for both tokenizers to the next such position. If the tokenizers are the same, each
segment is a single token (or all tokens of a single character). The loss of a segment is exact for
both models, so all sums are compared in bits per byte.

The standard error of a difference is paired, because both models find the same documents hard. It
is computed from the differences for individual documents. If there are only a few documents, the
differences for individual rows are used instead. See Miller, "Adding Error Bars to Evals" (2024,
arXiv:2411.00640), and `standard_error` for units of different lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import torch.nn.functional as F

from firstlight.console import counted, say
from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import IGNORE_INDEX
from firstlight.data.packing import kind_of
from firstlight.data.records import read_documents
from firstlight.data.remote import is_url, local_folder
from firstlight.data.shards import MANIFEST_NAME, read_manifest
from firstlight.data.sources import find_sources
from firstlight.errors import ConfigError, InputError, TokenizerError
from firstlight.evaluation.perplexity import (
    loaded_for_evaluation,
    require_context,
    require_finite,
    row_length,
    training_data,
)
from firstlight.evaluation.scores import (
    Metric,
    Progress,
    RowLoss,
    TaskResult,
    change_text,
    mean_and_error,
    mean_loss,
    sampled_rows,
    standard_error,
    token_losses,
    with_error,
)
from firstlight.evaluation.tasks import evaluate_tasks
from firstlight.generation.chat import ChatSession, ConversationDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import tokenizer_of, with_model_settings
from firstlight.hardware.environment import sharing_cores
from firstlight.lora.loading import LoadedModel
from firstlight.methods.attention import varying_lengths
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.formats import cut_long

#: Minimum number of documents in a text for computing standard errors over documents instead of
#: rows.
_MANY_DOCUMENTS = 30
#: Maximum length of a passage, and minimum length after which a passage ends at the next line
#: break. Both are in characters.
_PASSAGE, _SHORT_PASSAGE = 320, 160

IntArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ComparedValue:
    """The bits per byte on a text, or the score on a task, for both models.

    Attributes:
        name: name of the text, or names of the task and its metric.
        before, after: values for the first and the second model, each with a standard error.
        difference: `after` minus `before`, with its paired standard error. The error is None if
            there is only one unit, or if the score is not a mean over items.
        unit: kind of the units from which the paired error is computed: "document", "row" or
            "item".
        units: number of units; None for a group of tasks.
        bytes: size of the compared text in UTF-8 bytes; None for a task.
    """

    name: str
    before: Metric
    after: Metric
    difference: Metric
    unit: str
    units: int | None
    bytes: int | None = None

    def cells(self) -> list[str]:
        """Return the cells of a table row: name, before, after, difference, units."""
        own = self.before, self.after, self.difference
        before, after, difference = (with_error(one.value, one.stderr) for one in own)
        return [
            self.name if self.bytes is None else f"{self.name} ({self.bytes:,} bytes)",
            before,
            after,
            f"{'+' if self.difference.value > 0 else ''}{difference}",
            "" if self.units is None else counted(self.units, self.unit),
        ]

    @property
    def in_words(self) -> str:
        """The change on a text in words, and whether it may be due to the choice of the text."""
        change, error = change_text(self.before.value, self.after.value), self.difference.stderr
        doubt = ""
        if error is None:
            doubt = f" (a single {self.unit}, too little to know the error)"
        elif "same" not in change and abs(self.difference.value) <= 2 * error:
            doubt = " (within twice the standard error)"
        return f"{change} for {self.name}{doubt}"


@dataclass(frozen=True)
class Segment:
    """A piece of text between two neighbouring positions that are token boundaries for both
    tokenizers.

    Attributes:
        text: text of the segment.
        before, after: loss of each model on the segment, in bits.
        marked: True if the segment is one of the main contributors to the difference between the
            models in its passage. These are the segments with the largest increases in loss (or
            decreases, for a passage that got better). Together, they account for at least half of
            the total increase (or decrease) in the passage.
    """

    text: str
    before: float
    after: float
    marked: bool


@dataclass(frozen=True)
class Passage:
    """Consecutive segments of a document.

    Attributes:
        text: name of the text.
        document: number of the document in the text, counted from 1.
        difference: loss of the second model minus loss of the first model, in bits.
        segments: the segments.
    """

    text: str
    document: int
    difference: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ComparedAnswer:
    """The responses of both models to a prompt.

    Attributes:
        prompt: the prompt.
        before, after: responses of the first and the second model.
    """

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class ModelComparison:
    """The result of `compare`.

    Attributes:
        before, after: names of the models.
        same_tokenizer: True if both models encode text as the same tokens.
        texts: bits per byte of both models on each text.
        worse, better: passages with the largest increases and with the largest decreases in loss
            from the first to the second model.
        tasks: scores of both models on each task.
        answers: responses of both models to each prompt.
    """

    before: str
    after: str
    same_tokenizer: bool
    texts: list[ComparedValue]
    worse: list[Passage]
    better: list[Passage]
    tasks: list[ComparedValue]
    answers: list[ComparedAnswer]


@dataclass(frozen=True)
class Row:
    """A row, which consists of consecutive segments of a document.

    Attributes:
        document: zero-based index of the document in its text.
        text: text of the row.
        edges: positions of the segment boundaries in the text, int32 [segments + 1].
        ids: token ids of each model, int32 [tokens].
        counts: number of tokens before each segment boundary, one array int32 [segments + 1]
            per model.
        bits: loss of each segment in bits, one array per model, fp64 [segments]; empty until
            `score_rows` is called.
    """

    document: int
    text: str
    edges: IntArray
    ids: list[IntArray] = field(default_factory=list)
    counts: list[IntArray] = field(default_factory=list)
    bits: list[npt.NDArray[np.float64]] = field(default_factory=list)

    @property
    def segments(self) -> list[str]:
        """The segments, as strings."""
        return [self.text[start:stop] for start, stop in itertools.pairwise(self.edges.tolist())]

    @property
    def difference(self) -> npt.NDArray[np.float64]:
        """Loss of the second model minus loss of the first model in bits, fp64 [segments]."""
        return self.bits[1] - self.bits[0]


@sharing_cores()
def compare(
    before: str | Path | LoadedModel,
    after: str | Path | LoadedModel,
    *,
    texts: str | Path | Sequence[str | Path] = (),
    tasks: str | Sequence[str] = (),
    prompts: str | Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
    seq_len: int | None = None,
    passages: int = 3,
    items: int | None = None,
    task_folder: str | Path | None = None,
    chat_template: bool | None = None,
    max_new_tokens: int = 128,
    batch_size: int | None = None,
    device: str = "auto",
    on_progress: Progress | None = None,
) -> ModelComparison:
    """Compare two models, in fp32: their losses on the same bytes of text, their scores on tasks,
    and their answers to prompts. If no texts, tasks or prompts are specified, they are compared on
    the validation text of the data that they were trained on.

    Args:
        before, after: the models, specified as for `firstlight.evaluate`. They can have different
            tokenizers.
        texts: inputs as for `firstlight.prepare`, or prepared folders, whose validation split is
            used. The documents of an entry are evaluated together as one text.
        tasks, items, task_folder, chat_template: see `firstlight.evaluate_tasks`.
        prompts: messages to answer, rendered with each model's chat template. A model without a
            template continues them. Decoding is greedy.
        sample: number of rows to draw at random from each text; None uses all rows.
        seed: random seed of the sample.
        seq_len: maximum number of tokens per row. If None, each model uses the value from its
            training. If this value is unknown, the model uses its context length, up to a maximum
            of 1,024.
        passages: maximum number of passages with an increased loss to return. The number of
            passages with a decreased loss has the same limit.
        max_new_tokens: maximum number of tokens per answer.
        batch_size: number of sequences per forward pass; None uses 4 for rows of text and 32 for
            tasks.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays on its device.
        on_progress: function that is called after each batch with the number of completed sequences
            and the total number of sequences.

    Raises:
        ConfigError: an argument is invalid, or there is nothing to compare the models on.
        InputError, DataError: an input is missing or damaged, or contains text that a model can't
            encode.
        MissingDependencyError: see `firstlight.evaluate_tasks`.
        ModelError, CheckpointError: a model is unusable.
    """
    for name, value, minimum in (
        ("sample", sample, 1),
        ("seed", seed, 0),
        ("seq_len", seq_len, 1),
        ("passages", passages, 0),
        ("batch_size", batch_size, 1),
    ):
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, not {value}")
    on_texts = bool(texts) or not (tasks or prompts)
    for name, is_given, kind, used in (
        ("sample", sample is not None, "texts", on_texts),
        ("seq_len", seq_len is not None, "texts", on_texts),
        ("items", items is not None, "tasks", bool(tasks)),
        ("task_folder", task_folder is not None, "tasks", bool(tasks)),
        ("chat_template", chat_template is not None, "tasks", bool(tasks)),
    ):
        if is_given and not used:
            raise ConfigError(f"{name} applies to {kind}, and none are given: omit it")
    settings = SamplingConfig(max_new_tokens=max_new_tokens, temperature=0.0)
    documents = {name: documents_of(name) for name in map(str, _listed(texts))}
    models = loaded_for_evaluation(before, device), loaded_for_evaluation(after, device)
    if on_texts and not documents:
        for name, folder in _held_out(models).items():
            held_out = documents_of(folder)
            # Two runs on the same texts hold out the same documents.
            if held_out not in documents.values():
                documents[name] = held_out
    rows: dict[str, list[Row]] = {}
    for name, own in documents.items():
        found = rows_of(name, own, models, seq_len)
        drawn = range(len(found)) if sample is None else sampled_rows(len(found), sample, seed)
        rows[name] = [found[index] for index in drawn]
    # Errors in the input are raised above or in the next line, before the slow computations begin.
    answers = [_answers(one, _listed(prompts), settings) for one in models]
    scored_tasks = [
        evaluate_tasks(
            one,
            tasks,
            items=items,
            task_folder=task_folder,
            batch_size=batch_size or 32,
            chat_template=chat_template,
            on_texts=on_progress,
        )
        for one in models
        if tasks
    ]
    for loaded in models:
        everything = [row for own in rows.values() for row in own]
        score_rows(loaded, everything, batch_size=batch_size or 4, on_progress=on_progress)
    names = [str(one.folder if isinstance(one, LoadedModel) else one) for one in (before, after)]
    return ModelComparison(
        before=names[0],
        after=names[1],
        same_tokenizer=any(
            one.extends(other) for one, other in itertools.permutations(map(tokenizer_of, models))
        ),
        texts=[compare_rows(name, own) for name, own in rows.items()],
        worse=passages_of(rows, passages, sign=1),
        better=passages_of(rows, passages, sign=-1),
        tasks=compare_scores(*scored_tasks) if scored_tasks else [],
        answers=list(map(ComparedAnswer, _listed(prompts), *answers)),
    )


def _listed(values: Any) -> list[Any]:
    """Convert an argument to a list of values. A single string or path is also accepted."""
    return [values] if isinstance(values, str | Path) else list(values)


# Texts


def _held_out(models: Collection[LoadedModel]) -> dict[str, str]:
    """Return the prepared folders with the training data and with the kept text of the models,
    keyed by the names of the texts. Folders without validation text are omitted. The user is told
    which folders do not exist any more.

    Raises:
        ConfigError: neither model has a folder with validation text.
    """
    found: dict[str, str] = {}
    gone: dict[str, None] = {}
    for loaded in models:
        for name, place in _texts_of_run(loaded):
            folder = local_folder(place, ("val",))
            if not (folder / MANIFEST_NAME).is_file():
                gone[name] = None
                continue
            manifest = read_manifest(folder)
            if kind_of(manifest) == "text" and "val" in manifest["splits"]:
                found[name] = place
    missing = f"the held-out text of {', '.join(gone)} was moved or deleted"
    if not found:
        raise ConfigError(
            f"{missing if gone else 'neither model is a run with held-out text'}: add data to "
            "compare the models on with --text FILE, --tasks TASK or --prompt TEXT"
        )
    if gone:
        say(f"not compared: {missing}; name it with --text to include it")
    return found


def _texts_of_run(loaded: LoadedModel) -> Iterator[tuple[str, str]]:
    """Yield the name and the prepared folder or URL of each text that a model's run evaluates."""
    trained = training_data(loaded)
    for place in (trained.get("dir"), *(trained.get("corpora") or {}).values()):
        if place is not None:
            yield place, place
    # The run may have been moved. Older checkpoints do not name the kept text.
    own = loaded.folder.parent.parent / "kept"
    kept = str(own) if trained and (own / MANIFEST_NAME).is_file() else trained.get("keep")
    if kept is not None:
        yield f"kept text in {kept}", kept


def documents_of(name: str) -> list[str]:
    """Return the documents of an input, which is specified in the same way as for `compare`.

    Raises:
        InputError: the input is missing or contains no text, or a part can't be read.
        DataError: the prepared folder is damaged or does not contain text.
    """
    if is_url(name) or (Path(name).expanduser() / MANIFEST_NAME).is_file():
        found = list(_prepared_documents(local_folder(name, ("val",))))
    else:
        found = []
        for record in read_documents(find_sources([name])):
            if record.error is None:
                found.append(record.value)
            elif record.error.reason == "conversation":
                raise InputError(
                    f"{record.place}: conversations, not text: ask both models questions with "
                    "--prompts FILE, or name a text"
                )
            elif record.error.reason != "empty":
                raise InputError(f"{record.place}: {record.error}")
    if not (found := [text for text in found if text.strip()]):
        raise InputError(f"{name} contains no text to compare the models on")
    return found


def _prepared_documents(folder: Path) -> Iterator[str]:
    dataset = TokenDataset(folder, "val")
    tokenizer = Tokenizer.from_pretrained(folder)
    everything = slice(0, dataset.num_tokens)
    edges = [*dataset.document_starts(everything).tolist(), dataset.num_tokens]
    for start, stop in itertools.pairwise(edges):
        yield tokenizer.decode(dataset[start:stop].tolist())


def rows_of(
    name: str, documents: Sequence[str], models: Sequence[LoadedModel], seq_len: int | None
) -> list[Row]:
    """Divide the documents of a text into rows that fit into the contexts of both models.

    Args:
        name: name of the text, for error messages.
        documents: the documents.
        models: the models to compare.
        seq_len: see `compare`.

    Raises:
        InputError: a tokenizer can't encode a document.
        DataError: the rows are longer than a model's context.
    """
    limits = [row_length(loaded, seq_len) for loaded in models]
    for loaded, limit in zip(models, limits, strict=True):
        require_context(loaded, limit)
    encoders = [_encoder(tokenizer_of(loaded)) for loaded in models]
    # Encode long documents in pieces if possible, because encodings take a lot of memory.
    cuttable = all(tokenizer.encodes_in_pieces for tokenizer in encoders)
    rows: list[Row] = []
    for number, document in enumerate(documents):
        place = f"{name}: document {number + 1}"
        for text in cut_long(document) if cuttable else [document]:
            ids, ends = [], []
            for loaded, tokenizer in zip(models, encoders, strict=True):
                try:
                    encoding = tokenizer.encoding(text)
                    ends.append(_token_ends(tokenizer, encoding, text))
                except (TokenizerError, InputError) as error:
                    raise InputError(
                        f"{place} can't be encoded by {loaded.folder}: {error}"
                    ) from error
                ids.append(np.array(encoding.ids, np.int32))
            edges = np.array([end for end in ends[0] if end in ends[1]], np.int32)
            counts = [np.array([own[end] for end in edges.tolist()], np.int32) for own in ends]
            for start, stop in _row_edges(counts, limits, place):
                own_edges = edges[start : stop + 1]
                own_ids = [
                    own[count[start] : count[stop]].copy()
                    for own, count in zip(ids, counts, strict=True)
                ]
                own_counts = [count[start : stop + 1] - count[start] for count in counts]
                own_text = text[own_edges[0] : own_edges[-1]]
                rows.append(Row(number, own_text, own_edges - own_edges[0], own_ids, own_counts))
    return rows


def _row_edges(
    counts: Sequence[IntArray], limits: Sequence[int], place: str
) -> Iterator[tuple[int, int]]:
    """Yield the index of the first and of the last segment boundary of each row. A row contains as
    many segments as fit into the limits.

    Args:
        counts: number of tokens before each segment boundary, one array per model.
        limits: maximum number of tokens per row, one number per model.
        place: name of the document, for the error message.

    Raises:
        InputError: a segment is longer than a row.
    """
    start, last = 0, len(counts[0]) - 1
    while start < last:
        stop = min(
            int(np.searchsorted(own, own[start] + limit, side="right")) - 1
            for own, limit in zip(counts, limits, strict=True)
        )
        if stop == start:
            length = max(int(own[start + 1] - own[start]) for own in counts)
            raise InputError(
                f"{place} has a piece of {length:,} tokens in which the tokenizers have no common "
                "edge, longer than a row: raise --seq-len or choose another text"
            )
        yield start, stop
        start = stop


def _encoder(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer whose token offsets include leading spaces. The copy has no
    post-processor, because GPT-2's post-processor excludes these spaces from the offsets. A
    post-processor is otherwise only needed to add special tokens.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = None
    return Tokenizer(backend)


def _token_ends(tokenizer: Tokenizer, encoding: tokenizers.Encoding, text: str) -> dict[int, int]:
    """Return the number of tokens before each token boundary, keyed by the position of the boundary
    in the text. Boundaries within a character are omitted. The edges of the text are included.

    Raises:
        InputError: the tokens do not cover the whole text.
    """
    unknown_token = getattr(tokenizer.backend.model, "unk_token", None)
    unknown_id = None if unknown_token is None else tokenizer.backend.token_to_id(unknown_token)
    ends = {0: 0}
    reached = 0
    # Check the text before the first token in the same way as the text after each token.
    ids, offsets = [-1, *encoding.ids], [(0, 0), *encoding.offsets]
    starts = [*(start for start, _ in encoding.offsets), len(text)]
    for count, (token_id, (start, end), following) in enumerate(
        zip(ids, offsets, starts, strict=True)
    ):
        reached = max(reached, end)
        unknown = text[start:end] if token_id == unknown_id else ""
        rest = text[reached:following].strip()
        # A normalizer may have composed the rest with the preceding character.
        if unknown or (rest and not tokenizer.encode(rest)):
            raise InputError(f"its tokenizer has no token for {(unknown or rest)[:20]!r}")
        if rest:
            reached = following
        if 0 < reached <= following:
            ends[reached] = count
    # Tokenizers may drop spaces at the end of a string.
    return {end: n for end, n in ends.items() if end < reached} | {len(text): len(encoding.ids)}


# Losses


@torch.no_grad()
@varying_lengths()
def score_rows(
    loaded: LoadedModel, rows: Sequence[Row], *, batch_size: int, on_progress: Progress | None
) -> None:
    """Compute the losses of a model, and append them to `Row.bits` of each row. The first token of
    a row is predicted from the tokenizer's separator.

    Args:
        loaded: the model.
        rows: the rows. If there are earlier models, their losses must already have been computed.
        batch_size: number of rows per forward pass.
        on_progress: see `compare`.

    Raises:
        ModelError: a loss is not finite.
    """
    device = next(loaded.model.parameters()).device
    separator = tokenizer_of(loaded).separator_id
    # Group rows of similar length into batches, longest first.
    waiting = sorted(rows, key=lambda row: -len(row.ids[len(row.bits)]))
    for start in range(0, len(waiting), batch_size):
        batch = waiting[start : start + batch_size]
        ids = [row.ids[len(row.bits)] for row in batch]
        labels = torch.full((len(ids), len(ids[0])), IGNORE_INDEX)
        input_ids = torch.full_like(labels, separator)
        for place, own in enumerate(ids):
            labels[place, : len(own)] = torch.from_numpy(own)
            input_ids[place, 1 : len(own)] = torch.from_numpy(own[:-1])
        losses = token_losses(loaded.model, input_ids.to(device), labels.to(device), None)
        require_finite(loaded, finite=bool(losses.isfinite().all()))
        sums = F.pad(losses.cpu().double().cumsum(1), (1, 0)).numpy() / math.log(2)
        for row, own_sums in zip(batch, sums, strict=True):
            row.bits.append(np.diff(own_sums[row.counts[len(row.bits)]]))
        if on_progress is not None:
            on_progress(start + len(batch), len(rows))


# Differences


def compare_rows(name: str, rows: Sequence[Row]) -> ComparedValue:
    """Compare the bits per byte of both models on one text.

    Args:
        name: name of the text.
        rows: rows of the text, for which `score_rows` has computed the losses.
    """
    by_document = len({row.document for row in rows}) >= _MANY_DOCUMENTS
    units: dict[int, list[Row]] = {}
    for index, row in enumerate(rows):
        units.setdefault(row.document if by_document else index, []).append(row)
    sizes = [sum(len(row.text.encode()) for row in own) for own in units.values()]

    def ratio(bits_of: Callable[[Row], npt.NDArray[np.float64]]) -> Metric:
        # `RowLoss` is used with bits in place of the loss, and with bytes in place of tokens.
        bits = [math.fsum(itertools.chain(*map(bits_of, own))) for own in units.values()]
        losses = list(map(RowLoss, range(len(sizes)), bits, sizes))
        error = standard_error(losses, math.inf) if len(losses) > 1 else None
        return Metric(mean_loss(losses), error)

    return ComparedValue(
        name,
        before=ratio(lambda row: row.bits[0]),
        after=ratio(lambda row: row.bits[1]),
        difference=ratio(lambda row: row.difference),
        unit="document" if by_document else "row",
        units=len(sizes),
        bytes=sum(sizes),
    )


def passages_of(rows: Mapping[str, Sequence[Row]], count: int, *, sign: int) -> list[Passage]:
    """Return the passages with the largest differences, largest first.

    Args:
        rows: rows of each text.
        count: maximum number of passages.
        sign: 1 for passages that got worse, -1 for passages that got better.
    """
    found: list[tuple[float, str, Row, slice]] = []
    for text, own in rows.items():
        for row in own:
            difference = sign * row.difference
            for part in _parts(row.segments):
                if (total := float(difference[part].sum())) > 0:
                    found.append((total, text, row, part))
        # Keep only the passages with the largest differences, because there may be millions of
        # passages.
        found = sorted(found, key=lambda one: -one[0])[:count]
    return [
        Passage(text, row.document + 1, sign * total, _marked(row, part, sign))
        for total, text, row, part in found
    ]


def _parts(segments: Sequence[str]) -> Iterator[slice]:
    """Divide a row into passages. If possible, passages end at line breaks."""
    start, length = 0, 0
    for index, segment in enumerate(segments, start=1):
        length += len(segment)
        ends = length >= _SHORT_PASSAGE and "\n" in segment
        if ends or length >= _PASSAGE or index == len(segments):
            yield slice(start, index)
            start, length = index, 0


def _marked(row: Row, part: slice, sign: int) -> tuple[Segment, ...]:
    """Return the segments of a passage, with `Segment.marked` set."""
    share = np.maximum(sign * row.difference[part], 0.0)
    order = np.argsort(-share, kind="stable")
    # Mark segments in descending order of their contribution, until the marked segments make up
    # half of the total.
    earlier = np.cumsum(share[order]) - share[order]
    marked = set(order[(earlier < share.sum() / 2) & (share[order] > 0)].tolist())
    before, after = (own[part].tolist() for own in row.bits)
    values = zip(row.segments[part], before, after, strict=True)
    return tuple(Segment(*one, marked=index in marked) for index, one in enumerate(values))


def compare_scores(
    before: Sequence[TaskResult], after: Sequence[TaskResult]
) -> list[ComparedValue]:
    """Compare the results of two models on the same tasks."""
    found: list[ComparedValue] = []
    for one, other in zip(before, after, strict=True):
        for name in [name for name in one.metrics if name in other.metrics]:
            first, second = one.metrics[name], other.metrics[name]
            difference, error = second.value - first.value, None
            scores = one.item_scores.get(name, []), other.item_scores.get(name, [])
            differences = [b - a for a, b in zip(*scores, strict=False)]
            if len(scores[0]) == len(scores[1]) > 0:
                mean, paired = mean_and_error(differences)
                # Some metrics, such as perplexity, are not means over items.
                error = paired if math.isclose(mean, difference, abs_tol=1e-9) else None
            found.append(
                ComparedValue(
                    f"{one.task} {name}",
                    first,
                    second,
                    Metric(difference, error),
                    unit="item",
                    units=one.items,
                )
            )
    return found


def _answers(loaded: LoadedModel, prompts: Sequence[str], settings: SamplingConfig) -> list[str]:
    """Return a model's responses to prompts, generated as described in `compare`."""
    decoder = ConversationDecoder(loaded.model)
    own = with_model_settings(settings, loaded, ["temperature"])
    return [
        "".join(ChatSession(loaded, settings=own, decoder=decoder).answer(prompt))
        for prompt in prompts
    ]
