"""Compare two models on the same texts, tasks and prompts.

Both models read the same rows of a text: consecutive bytes that fit into the contexts of both. A
row is divided into segments, the shortest pieces at whose edges both tokenizers have an edge
between tokens. With equal tokenizers, segments are tokens (or the tokens of one character). The
loss of a segment is exact for both models, so all sums are compared in bits per byte.

The error of a difference is paired: it is computed from the difference of each document (or each
row, if a text has few documents), as both models find the same documents hard. See Miller, "Adding
Error Bars to Evals" (2024, arXiv:2411.00640), sections 2.2 and 4.2, and `standard_error` for sums
over documents of different lengths.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import IGNORE_INDEX
from firstlight.data.packing import kind_of
from firstlight.data.records import read_documents
from firstlight.data.remote import is_url, local_folder
from firstlight.data.shards import MANIFEST_NAME, read_manifest
from firstlight.data.sources import find_sources
from firstlight.errors import ConfigError, InputError, ModelError, TokenizerError
from firstlight.evaluation.perplexity import loaded_for_evaluation
from firstlight.evaluation.scores import (
    Metric,
    Progress,
    RowLoss,
    TaskResult,
    mean_and_error,
    mean_loss,
    sampled_rows,
    standard_error,
    token_losses,
)
from firstlight.evaluation.tasks import evaluate_tasks
from firstlight.generation.chat import ChatSession, ConversationDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import tokenizer_of, with_model_settings
from firstlight.hardware.environment import sharing_cores
from firstlight.lora.loading import LoadedModel
from firstlight.methods.attention import varying_lengths
from firstlight.tokenizer import Tokenizer

#: Number of documents from which errors are computed over documents instead of rows.
_MANY_DOCUMENTS = 30
#: Maximum length of a passage in characters, and the length from which it ends at a line break.
_PASSAGE, _SHORT_PASSAGE = 320, 160

#: Values of the segments of a row, fp64 [segments].
_Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ComparedMetric:
    """A quantity of both models.

    Attributes:
        before, after: values of the models, each with its own standard error.
        difference: `after` minus `before`, with its paired standard error.
    """

    before: Metric
    after: Metric
    difference: Metric


@dataclass(frozen=True)
class ComparedText:
    """Losses of both models on a text.

    Attributes:
        text: name of the text.
        bytes: number of compared bytes (UTF-8).
        unit: "documents" or "rows": the units over which errors are computed.
        units: number of units.
        bits_per_byte: bits per byte of both models.
    """

    text: str
    bytes: int
    unit: str
    units: int
    bits_per_byte: ComparedMetric


@dataclass(frozen=True)
class Segment:
    """Shortest piece of text at whose edges both tokenizers have an edge between tokens.

    Attributes:
        text: the piece.
        before, after: bits that each model needs for it.
        marked: True for the segments that carry the difference of their passage: the fewest that
            together make up half of the bits by which segments got worse (or better).
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
        document: one-based number of the document in the text.
        difference: bits of the second model minus bits of the first one.
        segments: the segments.
    """

    text: str
    document: int
    difference: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ComparedTask:
    """A metric of a task.

    Attributes:
        task: name of the task.
        metric: name of the metric, such as `acc`.
        score: values of both models. The error of the difference is paired over the items. It is
            None for a metric that is not a mean over items.
    """

    task: str
    metric: str
    score: ComparedMetric


@dataclass(frozen=True)
class ComparedAnswer:
    """Answers of both models to a prompt.

    Attributes:
        prompt: the prompt.
        before, after: the answers.
    """

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class ModelComparison:
    """Result of `compare`.

    Attributes:
        before, after: names of the models.
        same_tokenizer: True if both models encode every text as the same tokens.
        texts: comparison of each text.
        total: comparison of all texts together, or None without texts.
        worse, better: passages for which the second model needs the most additional bits, and those
            for which it saves the most bits.
        tasks: comparison of each metric.
        answers: answers to each prompt.
    """

    before: str
    after: str
    same_tokenizer: bool
    texts: list[ComparedText]
    total: ComparedText | None
    worse: list[Passage]
    better: list[Passage]
    tasks: list[ComparedTask]
    answers: list[ComparedAnswer]


@dataclass(frozen=True)
class _Row:
    """Consecutive segments of a document that both models read as one row.

    Attributes:
        document: the document's number, from 0.
        segments: texts of the segments.
        ids: each model's token ids.
        counts: number of tokens before each edge of a segment, for each model, [segments + 1].
    """

    document: int
    segments: list[str]
    ids: list[list[int]]
    counts: list[list[int]]


@dataclass(frozen=True)
class ScoredRow:
    """Losses of both models on a row.

    Attributes:
        document: number of the document in its text, from 0.
        segments: texts of the segments.
        before, after: bits that each model needs for each segment, fp64 [segments].
    """

    document: int
    segments: list[str]
    before: _Values
    after: _Values


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
    passages: int = 5,
    items: int | None = None,
    task_folder: str | Path | None = None,
    chat_template: bool | None = None,
    max_new_tokens: int = 128,
    batch_size: int | None = None,
    device: str = "auto",
    on_progress: Progress | None = None,
) -> ModelComparison:
    """Compare two models on the same bytes of texts, on tasks, and by their answers to prompts, in
    fp32. Without texts, tasks and prompts, they are compared on the validation text of the data
    that they were trained on.

    Args:
        before, after: models as in `firstlight.evaluate`. Their tokenizers may differ.
        texts: inputs as in `firstlight.prepare`, or prepared folders, of which the validation split
            is used. Each entry is one text.
        tasks, items, task_folder, chat_template: see `firstlight.evaluate_tasks`.
        prompts: messages to answer, in the format of the model's chat template. A model without a
            template continues them. The most likely token is always chosen.
        sample: number of rows of each text to draw at random; None for all.
        seed: random seed of the sample.
        seq_len: maximum number of tokens per row. None uses the value from each model's training
            or, if it is unknown, the context length, but at most 1,024.
        passages: number of passages that got worse, and better, to return.
        max_new_tokens: maximum number of tokens per answer.
        batch_size: number of rows or of texts of a task per forward pass; None for 4 rows and 32
            texts.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays on its device.
        on_progress: called after each batch with the number of completed rows (or texts of a task)
            and the total number.

    Raises:
        ConfigError: an argument is invalid, or there is nothing to compare the models on.
        InputError, DataError: a text is missing or damaged, or a model can't encode it.
        MissingDependencyError: see `firstlight.evaluate_tasks`.
        ModelError, CheckpointError: a model is unusable.
    """
    given = {"sample": sample, "seq_len": seq_len, "batch_size": batch_size}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    for name, option in {"items": items, "task_folder": task_folder}.items():
        if option is not None and not tasks:
            raise ConfigError(f"{name} applies to tasks: add a task")
    settings = SamplingConfig(max_new_tokens=max_new_tokens, temperature=0.0)
    documents = {name: documents_of(name) for name in map(str, _listed(texts))}
    models = loaded_for_evaluation(before, device), loaded_for_evaluation(after, device)
    if not documents and not tasks and not prompts:
        documents = {name: documents_of(name) for name in _held_out(models)}
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
    rows: dict[str, list[_Row]] = {}
    for name, own in documents.items():
        found = rows_of(name, own, models, seq_len)
        drawn = range(len(found)) if sample is None else sampled_rows(len(found), sample, seed)
        rows[name] = [found[index] for index in drawn]
    scored = _scored(models, rows, batch_size=batch_size or 4, on_progress=on_progress)
    answers = [_answers(one, _listed(prompts), settings) for one in models]
    names = [str(one.folder if isinstance(one, LoadedModel) else one) for one in (before, after)]
    return ModelComparison(
        before=names[0],
        after=names[1],
        same_tokenizer=len({tokenizer_of(one).fingerprint for one in models}) == 1,
        texts=[compare_rows(name, {name: own}) for name, own in scored.items()],
        total=compare_rows("all texts", scored) if scored else None,
        worse=passages_of(scored, passages, sign=1),
        better=passages_of(scored, passages, sign=-1),
        tasks=compare_scores(*scored_tasks) if scored_tasks else [],
        answers=list(map(ComparedAnswer, _listed(prompts), *answers)),
    )


def _listed(values: Any) -> list[Any]:
    """Return a list of several values, or of a single text or path."""
    return [values] if isinstance(values, str | Path) else list(values)


# Texts


def _held_out(models: Collection[LoadedModel]) -> list[str]:
    """Return the prepared folders with validation text that the models were trained on.

    Raises:
        ConfigError: there is none.
    """
    found: dict[str, None] = {}
    for loaded in models:
        trained = loaded.trained_on or {}
        for place in (trained.get("dir"), *(trained.get("corpora") or {}).values()):
            folder = None if place is None else local_folder(place, ("val",))
            if folder is not None and (folder / MANIFEST_NAME).is_file():
                manifest = read_manifest(folder)
                if kind_of(manifest) == "text" and "val" in manifest["splits"]:
                    found[str(place)] = None
    if not found:
        raise ConfigError(
            "neither model is a run with held-out text: choose what to compare the models on with "
            "--text FILE, --tasks TASK or --prompt TEXT"
        )
    return list(found)


def documents_of(name: str) -> list[str]:
    """Return the documents of a text; see `compare`.

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
) -> list[_Row]:
    """Divide the documents of a text into rows that fit into the contexts of both models.

    Args:
        name: name of the text, for error messages.
        documents: the documents.
        models: the two models.
        seq_len: see `compare`.

    Raises:
        InputError: a tokenizer can't encode a document.
        ConfigError: `seq_len` exceeds a model's context.
    """
    limits = [_row_tokens(loaded, seq_len) for loaded in models]
    encoders = [_encoder(tokenizer_of(loaded)) for loaded in models]
    rows: list[_Row] = []
    for number, text in enumerate(documents):
        ids, ends = [], []
        for loaded, tokenizer in zip(models, encoders, strict=True):
            try:
                encoding = tokenizer.encoding(text)
                ends.append(_token_ends(tokenizer, encoding, text))
            except (TokenizerError, InputError) as error:
                raise InputError(
                    f"{name}: document {number + 1} can't be encoded by {loaded.folder}: {error}"
                ) from error
            ids.append(encoding.ids)
        edges = [0, *(end for end in ends[0] if end in ends[1])]
        counts = [[0, *(own[end] for end in edges[1:])] for own in ends]
        for start, stop in _row_edges(counts, limits):
            spans = [own[start : stop + 1] for own in counts]
            own_ids = [own[span[0] : span[-1]] for own, span in zip(ids, spans, strict=True)]
            if any(len(own) > limit for own, limit in zip(own_ids, limits, strict=True)):
                raise InputError(
                    f"{name}: document {number + 1} has a piece of {max(map(len, own_ids)):,} "
                    "tokens in which the tokenizers have no common edge, longer than a row: raise "
                    "--seq-len or choose another text"
                )
            segments = [text[a:b] for a, b in itertools.pairwise(edges[start : stop + 1])]
            relative = [[count - span[0] for count in span] for span in spans]
            rows.append(_Row(number, segments, own_ids, relative))
    return rows


def _row_edges(counts: Sequence[Sequence[int]], limits: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last edge of each row: as many segments as fit, but at least one.

    Args:
        counts: number of tokens before each edge, for each model.
        limits: maximum number of tokens per row, for each model.
    """
    start, last = 0, len(counts[0]) - 1
    while start < last:
        fits = [
            bisect.bisect_right(own, own[start] + limit) - 1
            for own, limit in zip(counts, limits, strict=True)
        ]
        stop = max(min(fits), start + 1)
        yield start, stop
        start = stop


def _row_tokens(loaded: LoadedModel, seq_len: int | None) -> int:
    limit = loaded.model.config.max_position_embeddings
    if seq_len is not None and seq_len > limit:
        raise ConfigError(
            f"seq_len {seq_len} exceeds the context of {limit} of {loaded.folder}: choose a "
            "smaller seq_len"
        )
    known: int | None = (loaded.trained_on or {}).get("seq_len")
    return seq_len or known or min(limit, 1024)


def _encoder(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer whose offsets include the spaces of each token. GPT-2's
    post-processor, which otherwise only adds special tokens, removes them from the offsets.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = None
    return Tokenizer(backend)


def _token_ends(tokenizer: Tokenizer, encoding: tokenizers.Encoding, text: str) -> dict[int, int]:
    """Return the number of tokens before each edge between tokens, keyed by the edge's position in
    the text. Edges within a character are omitted.

    Raises:
        InputError: the tokens do not cover the whole text.
    """
    unknown = getattr(tokenizer.backend.model, "unk_token", None)
    unknown_id = None if unknown is None else tokenizer.backend.token_to_id(unknown)
    ends: dict[int, int] = {}
    reached = 0
    starts = [*(start for start, _ in encoding.offsets[1:]), len(text)]
    tokens = zip(encoding.ids, encoding.offsets, starts, strict=True)
    for count, (token_id, (start, end), following) in enumerate(tokens, start=1):
        missing = text[start:end] if token_id == unknown_id else text[reached:start].strip()
        if missing:
            raise InputError(f"its tokenizer has no token for {missing[:20]!r}")
        reached = max(reached, end)
        if 0 < reached <= following:
            ends[reached] = count
    if text[reached:].strip():
        raise InputError(f"its tokenizer has no token for {text[reached:].strip()[:20]!r}")
    # Tokenizers may drop spaces at the end of a text.
    return {end: n for end, n in ends.items() if end < reached} | {len(text): len(encoding.ids)}


# Losses


def _scored(
    models: Sequence[LoadedModel],
    rows: Mapping[str, Sequence[_Row]],
    *,
    batch_size: int,
    on_progress: Progress | None,
) -> dict[str, list[ScoredRow]]:
    """Return the losses of both models on the rows of each text."""
    flat = [row for own in rows.values() for row in own]
    bits: list[list[_Values]] = []
    for number, loaded in enumerate(models):
        losses = _token_bits(
            loaded,
            [row.ids[number] for row in flat],
            batch_size=batch_size,
            done=number * len(flat),
            on_progress=on_progress,
        )
        # The running sum of the tokens' bits at each edge, and its differences between edges.
        bits.append(
            [
                np.diff(np.concatenate([[0.0], np.cumsum(own)])[row.counts[number]])
                for own, row in zip(losses, flat, strict=True)
            ]
        )
    scored = iter(
        [ScoredRow(row.document, row.segments, *own) for row, *own in zip(flat, *bits, strict=True)]
    )
    return {name: list(itertools.islice(scored, len(own))) for name, own in rows.items()}


@torch.no_grad()
@varying_lengths()
def _token_bits(
    loaded: LoadedModel,
    rows: Sequence[list[int]],
    *,
    batch_size: int,
    done: int,
    on_progress: Progress | None,
) -> list[_Values]:
    """Return the loss of each token in bits. The first token of a row is predicted from the
    tokenizer's separator.

    Args:
        loaded: the model.
        rows: token ids of the rows.
        batch_size: number of rows per forward pass.
        done: number of rows to add to the number that `on_progress` gets.
        on_progress: see `compare`; the total number is that of both models.

    Raises:
        ModelError: a loss is not finite.
    """
    device = next(loaded.model.parameters()).device
    separator = tokenizer_of(loaded).separator_id
    # Rows of similar length share a batch, the longest first.
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    found: dict[int, _Values] = {}
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        longest = len(rows[part[0]])
        labels = torch.full((len(part), longest), IGNORE_INDEX)
        input_ids = torch.full((len(part), longest), separator)
        for place, index in enumerate(part):
            labels[place, : len(rows[index])] = torch.tensor(rows[index])
            input_ids[place, 1 : len(rows[index])] = torch.tensor(rows[index][:-1])
        losses = token_losses(loaded.model, input_ids.to(device), labels.to(device), None)
        if not losses.isfinite().all():
            raise ModelError(
                f"the loss of {loaded.folder} is not finite: its weights are damaged or it has "
                "diverged, so use another checkpoint"
            )
        bits = losses.double().cpu().numpy() / math.log(2)
        found |= {index: bits[place, : len(rows[index])] for place, index in enumerate(part)}
        if on_progress is not None:
            on_progress(done + len(found), 2 * len(rows))
    return [found[index] for index in range(len(rows))]


# Differences


def compare_rows(name: str, rows: Mapping[str, Sequence[ScoredRow]]) -> ComparedText:
    """Compare the bits per byte of both models on one text or on several texts together.

    Args:
        name: name of the result.
        rows: rows of each text.
    """
    units: dict[tuple[str, int], list[ScoredRow]] = {}
    unit = "documents"
    for text, own in rows.items():
        by_document = len({row.document for row in own}) >= _MANY_DOCUMENTS
        unit = unit if by_document else "rows"
        for index, row in enumerate(own):
            units.setdefault((text, row.document if by_document else index), []).append(row)
    sizes = [
        sum(len(segment.encode()) for row in own for segment in row.segments)
        for own in units.values()
    ]
    bits = np.array(
        [
            [math.fsum(itertools.chain(*(row.before for row in own))) for own in units.values()],
            [math.fsum(itertools.chain(*(row.after for row in own))) for own in units.values()],
        ]
    )

    def ratio(values: _Values) -> Metric:
        # Bits and bytes of a unit take the places of loss and tokens.
        losses = list(map(RowLoss, range(len(sizes)), values.tolist(), sizes))
        error = standard_error(losses, math.inf) if len(losses) > 1 else None
        return Metric(mean_loss(losses), error)

    compared = ComparedMetric(ratio(bits[0]), ratio(bits[1]), ratio(bits[1] - bits[0]))
    return ComparedText(name, sum(sizes), unit, len(sizes), bits_per_byte=compared)


def passages_of(rows: Mapping[str, Sequence[ScoredRow]], count: int, *, sign: int) -> list[Passage]:
    """Return the passages with the largest differences, the largest first.

    Args:
        rows: rows of each text.
        count: maximum number of passages.
        sign: 1 for passages that got worse, -1 for passages that got better.
    """
    found: list[tuple[float, str, ScoredRow, slice]] = []
    for text, own in rows.items():
        for row in own:
            differences = sign * (row.after - row.before)
            for part in _parts(row.segments):
                if (total := float(differences[part].sum())) > 0:
                    found.append((total, text, row, part))
        # Keep only the largest ones: a text may have millions of passages.
        found = sorted(found, key=lambda one: -one[0])[:count]
    return [
        Passage(text, row.document + 1, sign * total, _marked(row, part, sign))
        for total, text, row, part in found
    ]


def _parts(segments: Sequence[str]) -> Iterator[slice]:
    """Divide a row into passages, which end at a line break if possible."""
    start, length = 0, 0
    for index, segment in enumerate(segments, start=1):
        length += len(segment)
        ends = length >= _SHORT_PASSAGE and "\n" in segment
        if ends or length >= _PASSAGE or index == len(segments):
            yield slice(start, index)
            start, length = index, 0


def _marked(row: ScoredRow, part: slice, sign: int) -> tuple[Segment, ...]:
    """Return the segments of a passage; see `Segment` for the marks."""
    before, after = row.before[part], row.after[part]
    share = np.maximum(sign * (after - before), 0.0)
    order = np.argsort(-share, kind="stable")
    # A segment is marked while those before it in the order make up less than half.
    earlier = np.cumsum(share[order]) - share[order]
    marked = set(order[(earlier < share.sum() / 2) & (share[order] > 0)].tolist())
    values = zip(row.segments[part], before.tolist(), after.tolist(), strict=True)
    return tuple(Segment(*one, index in marked) for index, one in enumerate(values))


def compare_scores(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> list[ComparedTask]:
    """Compare the results of two models on the same tasks."""
    found: list[ComparedTask] = []
    for one, other in zip(before, after, strict=True):
        for name in [name for name in one.metrics if name in other.metrics]:
            metrics = one.metrics[name], other.metrics[name]
            difference = metrics[1].value - metrics[0].value
            scores = [result.item_scores.get(name, ()) for result in (one, other)]
            error = None
            if len(scores[0]) == len(scores[1]) > 0:
                mean, paired = mean_and_error(
                    [b - a for a, b in zip(scores[0], scores[1], strict=True)]
                )
                # Some metrics are not means over items; perplexity, for example.
                error = paired if math.isclose(mean, difference, abs_tol=1e-9) else None
            compared = ComparedMetric(*metrics, Metric(difference, error))
            found.append(ComparedTask(one.task, name, compared))
    return found


def _answers(loaded: LoadedModel, prompts: Sequence[str], settings: SamplingConfig) -> list[str]:
    """Return a model's answers to prompts; see `compare`."""
    decoder = ConversationDecoder(loaded.model)
    own = with_model_settings(settings, loaded, ["temperature"])
    return [
        "".join(ChatSession(loaded, settings=own, decoder=decoder).answer(prompt))
        for prompt in prompts
    ]
