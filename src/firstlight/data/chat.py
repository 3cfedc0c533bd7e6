"""Prepare conversations as token shards: read, check, render, encode, split and write them.

The result depends only on the records, the tokenizer with its chat template, and the options. The
loss mask is computed in `tokenizer/chat_labels.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import TextColumn

from firstlight.console import progress_bar
from firstlight.data.conversations import (
    PAIRS_ARE_SELF_DESCRIBING,
    REASONS,
    BadRecordError,
    ChatForm,
    Conversation,
    control_tokens,
    record_fields,
    to_conversation,
    to_pair,
    unused_fields,
)
from firstlight.data.opening import optional
from firstlight.data.packing import ORIGINS_NAME, open_split
from firstlight.data.records import RECORD_SUFFIXES, Record, Splits, find_splits, read_records
from firstlight.data.shards import (
    LABELLED_VERSION,
    MANIFEST_NAME,
    CorpusWriter,
    read_manifest,
    require_one_split,
    require_replaceable,
)
from firstlight.data.sources import DataSource, neutral_name, unread_files, write_sources
from firstlight.errors import (
    ConfigError,
    DataError,
    InputError,
    TokenizerError,
    describe_read_error,
    first_line,
)
from firstlight.files.atomic import make_folder, new_folder, remove_file, remove_folder, sha256_of
from firstlight.files.cache import cache_folder, held
from firstlight.files.disk import OutputFile
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_labels import (
    ChatEncoder,
    LabelledChat,
    TrainOn,
    require_end,
    with_chat_template,
)
from firstlight.tokenizer.chat_template import required_tokens
from firstlight.tokenizer.messages import LOST, normalize_message, template_options

#: Number of tokens per shard. Shards of conversations are smaller than shards of text, because the
#: loss mask of a whole shard is kept in memory.
_SHARD_TOKENS = 10_000_000
#: Maximum number of distinct unused fields that are counted by name.
_MOST_FIELDS = 1000


#: How error messages refer to the `on_bad` option, in training and in `prepare`.
_ON_BAD = "--data.on_bad {0}, or --on-bad {0} of prepare,"


@dataclass(frozen=True)
class ChatOptions:
    """Options for converting records to examples.

    Attributes:
        kind: type of data in the records: "chat" for conversations, or "preference" for records
            with a preferred and a rejected answer to one prompt. Each preference record becomes two
            examples, the preferred answer first.
        form: format of the records, such as "sharegpt". "auto" detects the format of each record
            from its keys.
        train_on: tokens to use as labels. "assistant" selects everything that the assistant writes
            (answers, tool calls and reasoning) and the end-of-turn tokens. "last" selects only the
            assistant's last message. "answers" selects the same tokens as "assistant" except the
            reasoning. "all" selects every token except the first token of each example.
        on_bad: how to handle bad records. A record is bad if it is not a conversation or if it
            contains text that the chat template omits. "refuse" raises an error, and "skip" drops
            the record. "keep" trains on the part of the record that the template renders. It raises
            an error only if the record is not a conversation.
        val_fraction: fraction of the examples to hold out for validation. An example is held out
            whenever the validation split contains less than this fraction of the examples written
            so far. All examples with the same question (see `Conversation.question`) are assigned
            to the same split.
    """

    kind: Literal["chat", "preference"] = "chat"
    form: ChatForm = "auto"
    train_on: TrainOn = "assistant"
    on_bad: Literal["refuse", "skip", "keep"] = "refuse"
    val_fraction: float = 0.1


def prepare_chat(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    val_inputs: Sequence[str | Path] = (),
    template: str | None = None,
    options: ChatOptions = ChatOptions(),
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Write conversations as token shards to the `out` folder and return the manifest.

    Args:
        inputs: files that contain records, folders, globs, or datasets as
            "hf:NAME[:CONFIG[:SPLIT]]". If the name of a file in a folder contains the name of a
            split, the file is assigned to that split (see `find_splits`).
        tokenizer: a tokenizer, or a folder or file that contains one.
        out: the folder to write.
        val_inputs: inputs for validation. If they are specified, no part of `inputs` is held out. A
            conversation in `inputs` is excluded if the validation data contains a conversation with
            the same question.
        template: chat template: "chatml", "hermes", "llama2", "llama3", "alpaca" or a .jinja file;
            None uses the tokenizer's template.
        options: see `ChatOptions`.
        overwrite: True to replace `out` if it is a prepared folder.
        progress: True to show a progress bar on stderr.

    Raises:
        InputError: an input is missing or unreadable, or does not contain a conversation.
        DataError: `on_bad` is "refuse", and a record is not a conversation or contains text that
            the template omits.
        TokenizerError: the tokenizer or the template is unusable, or they are incompatible.
        ConfigError: an option is out of range.
        MissingDependencyError: a package that the inputs need is not installed.
        StorageError: the disk is full or not writable; no incomplete folder remains.
    """
    if not 0 <= options.val_fraction < 1:
        raise ConfigError(
            f"val_fraction must be at least 0 and below 1, not {options.val_fraction}"
        )
    require_one_split(val_inputs, options.val_fraction)
    if options.kind == "preference" and (options.train_on, options.form) != ("assistant", "auto"):
        raise ConfigError(PAIRS_ARE_SELF_DESCRIBING)
    out = Path(out).expanduser()
    sources = find_splits(inputs, val_inputs)
    if not isinstance(tokenizer, Tokenizer):
        name = str(tokenizer)
        tokenizer = with_chat_template(Tokenizer.from_pretrained(tokenizer), template, name)
    else:
        tokenizer = with_chat_template(tokenizer, template)
    require_replaceable(out, overwrite)
    with (
        new_folder(out, replace=overwrite, synced=True) as folder,
        progress_bar(TextColumn("{task.fields[done]}"), shown=progress) as bar,
    ):
        task = bar.add_task("rendering", total=None, done="")
        preparation = _ChatPreparation(tokenizer, options, folder, own_val=bool(sources.val))
        for done in preparation.run(sources):
            bar.update(task, done=f"{done:,} examples")
        flags = [word for one in val_inputs for word in ("--val-input", neutral_name(str(one)))]
        flags += ["--format", options.form] if options.form != "auto" else []
        flags += ["--on-bad", options.on_bad] if options.on_bad != "refuse" else []
        write_sources(folder, inputs, flags)
        return preparation.manifest(unread_files([*inputs, *val_inputs], RECORD_SUFFIXES))


class _ChatPreparation:
    """State of a single `prepare_chat` call."""

    def __init__(
        self, tokenizer: Tokenizer, options: ChatOptions, folder: Path, *, own_val: bool
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._writer = CorpusWriter(folder, tokenizer, _SHARD_TOKENS, labelled=True)
        self._own_val = own_val
        self._fraction = Fraction(0) if own_val else Fraction(str(options.val_fraction))
        self._encoder = ChatEncoder(tokenizer)
        self._writes_calls = "tool_calls" in (tokenizer.chat_template or "")
        self._splits_of: dict[bytes, str] = {}
        self._seen: set[bytes] = set()
        self._duplicates = self._with_control_tokens = self._torn = 0
        self._lost: dict[str, dict[str, Any]] = {}
        self._unused: dict[str, int] = {}
        self._warning = self._encoder.prompt_warning()

    def run(self, sources: Splits) -> Iterator[int]:
        """Write the examples from all records. After each record, yield the number of examples
        written so far.

        Args:
            sources: files and datasets that contain the records, grouped by split.

        Raises:
            DataError, InputError: see `prepare_chat`.
        """
        places = {
            split: self._writer.folder / ORIGINS_NAME.format(split=split)
            for split in self._writer.counts
        }
        with self._writer.open(), ExitStack() as stack:
            logs = {split: stack.enter_context(OutputFile(path)) for split, path in places.items()}
            # Process the validation data first, so that its questions can be excluded from
            # training.
            for given, found in (("val", sources.val), ("train", sources.train)):
                records = stack.enter_context(closing(read_records(found)))
                for record, conversations, chats in self._encoded(records):
                    question = conversations[0].question
                    split = self._split_of(question, given)
                    if split == "val" and given == "train" and self._own_val:
                        problem = f"'{question[:40]}' also occurs in the validation data"
                        self._writer.reject(record, BadRecordError("held_out", problem))
                        continue
                    self._count(record, conversations)
                    # Escape the record's location, because a file name may contain a newline.
                    place = json.dumps(record.place)[1:-1] + "\n"
                    for chat in chats:
                        self._write(split, chat)
                        logs[split].write(place.encode())
                    yield self._written
        for split, path in places.items():
            if not self._documents(split):
                remove_file(path)
        self._require_examples()

    def _documents(self, split: str) -> int:
        return self._writer.counts[split]["documents"]

    @property
    def _written(self) -> int:
        return self._documents("train") + self._documents("val")

    def _encoded(
        self, records: Iterable[Record]
    ) -> Iterator[tuple[Record, list[Conversation], list[LabelledChat]]]:
        """Yield each accepted record, together with its conversations and the training examples
        made from them.
        """
        for record in records:
            try:
                conversations = self._conversations(record)
                examples = self._examples(conversations)
                self._count_lost(record, examples)
                yield record, conversations, examples
            except BadRecordError as error:
                if self._options.on_bad != "skip":
                    advice = f"{_ON_BAD.format('skip')} drops such records"
                    if error.reason in LOST:
                        advice += f", keep trains on the rest; {self._other_template(error.reason)}"
                    raise DataError(f"{record.place}: {error} ({advice})") from error
                self._writer.reject(record, error)

    def _conversations(self, record: Record) -> list[Conversation]:
        """Return the conversation in a record, or both conversations of a preference pair."""
        if record.error is not None:
            raise record.error
        if self._options.kind == "preference":
            pair = to_pair(record.value)
            return [self._with_tools(one, record) for one in (pair.chosen, pair.rejected)]
        return [self._with_tools(to_conversation(record.value, self._options.form), record)]

    def _with_tools(self, conversation: Conversation, record: Record) -> Conversation:
        """Add a record's tools to its conversation and convert its tool calls to transformers'
        format.

        Raises:
            BadRecordError: the tools or the tool calls are not valid.
        """
        messages = conversation.messages
        fields = record_fields(record.value) if isinstance(record.value, dict) else {}
        try:
            options = template_options(fields, messages)
            writes_calls = "tools" in options and self._writes_calls
            messages = [normalize_message(one, writes_calls=writes_calls) for one in messages]
        except ValueError as error:
            raise BadRecordError("wrong_type", str(error)) from error
        return Conversation(messages, conversation.masked, options)

    def _examples(self, conversations: Sequence[Conversation]) -> list[LabelledChat]:
        examples = [self._example(conversation) for conversation in conversations]
        if len(examples) == 2 and examples[0].ids == examples[1].ids:
            raise BadRecordError(
                "no_pair", ("both answers are the same once rendered by the chat template")
            )
        return examples

    def _count(self, record: Record, conversations: Sequence[Conversation]) -> None:
        """Update the counts of duplicate records, of records whose text contains control tokens,
        and of each unused field.
        """
        for field in unused_fields(record.value, conversations[0]):
            if field in self._unused or len(self._unused) < _MOST_FIELDS:
                self._unused[field] = self._unused.get(field, 0) + 1
        messages = [one.messages for one in conversations]
        content = [messages, dict(conversations[0].options)]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()[:16]
        self._duplicates += digest in self._seen
        self._seen.add(digest)
        texts = (message["content"] for own in messages for message in own)
        self._with_control_tokens += any(map(control_tokens, texts))

    def _count_lost(self, record: Record, examples: Sequence[LabelledChat]) -> None:
        """Check whether the chat template omits part of a record's text, and count the record if it
        does.

        Raises:
            BadRecordError: the template omits part of the text, and either `on_bad` is not "keep"
                or the examples of the record have no labels.
        """
        lost = dict(one for example in examples for one in example.lost)
        if lost and self._options.on_bad != "keep":
            raise BadRecordError(*next(iter(lost.items())))
        if not all(any(example.loss_mask[1:]) for example in examples):
            raise BadRecordError("not_learned", "the rendered text contains no assistant tokens")
        for reason, detail in lost.items():
            first = {"records": 0, "first": f"{record.place}: {detail}"}
            self._lost.setdefault(reason, first)["records"] += 1

    def _example(self, conversation: Conversation) -> LabelledChat:
        try:
            return self._encoder.encode(
                conversation.messages,
                options=conversation.options,
                masked=conversation.masked,
                train_on=self._options.train_on,
            )
        except (InputError, TokenizerError) as error:
            raise BadRecordError("template", str(error)) from error

    def _split_of(self, question: str, given: str) -> str:
        """Return the split to which a record's examples are assigned. All records with the same
        question are assigned to the same split.

        Args:
            question: see `Conversation.question`.
            given: split of the input that contains the record, "train" or "val".
        """
        if not self._own_val and not self._fraction:
            return "train"
        key = hashlib.sha256(question.encode()).digest()[:16]
        if key not in self._splits_of:
            behind = self._documents("val") < self._fraction * self._written
            self._splits_of[key] = given if self._own_val else "val" if behind else "train"
        return self._splits_of[key]

    def _write(self, split: str, chat: LabelledChat) -> None:
        loss_mask = np.array(chat.loss_mask)
        loss_mask[0] = False  # The first token can't be predicted because no token precedes it.
        # Count at least one byte of text, because bits per byte are computed by dividing by this
        # number. An example whose only label is an end token does not contain any text.
        ids, text_bytes = np.array(chat.ids, dtype=self._writer.dtype), max(chat.text_bytes, 1)
        self._writer.write(split, ids, loss_mask, text_bytes=text_bytes)
        self._torn += chat.torn
        if self._warning is None:
            self._warning = require_end(chat.ids, chat.loss_mask, self._tokenizer) or ""

    def _other_template(self, *reasons: str) -> str:
        """Return advice, for an error message, on choosing a chat template that includes the
        omitted text.

        Args:
            reasons: kinds of omitted text, as keys of `LOST`.
        """
        known = self._tokenizer.special_tokens
        is_chatml = all(token in known for token in required_tokens("hermes"))
        if is_chatml and {"lost_tools", "lost_calls", "lost_results"}.intersection(reasons):
            return "the built-in template hermes includes tools"
        return "another template may include the omitted part"

    def _require_examples(self) -> None:
        if not self._documents("train"):
            found = "the inputs contain no records"
            if self._writer.rejected:
                found = f"{self._writer.rejections(REASONS)}; first: {self._writer.first_rejected}"
            if lost := LOST.keys() & self._writer.rejected.keys():
                found += f" ({_ON_BAD.format('keep')} trains on the rest of such records; "
                found += f"{self._other_template(*lost)})"
            what = "preference pair" if self._options.kind == "preference" else "conversation"
            raise InputError(f"there is no {what} to train on: {found}")
        if self._own_val and not self._documents("val"):
            raise InputError("the validation inputs contain no conversations: choose other inputs")

    def manifest(self, unread: Sequence[Path]) -> dict[str, Any]:
        """Write the remaining files of the prepared folder, and return the manifest.

        Args:
            unread: files in the inputs that were not read.
        """
        template = self._tokenizer.chat_template or ""
        pairs = self._options.kind == "preference"
        chat = {
            "train_on": self._options.train_on,
            "template_sha256": hashlib.sha256(template.encode()).hexdigest(),
            "torn_answers": self._torn,
            "duplicates": self._duplicates,
            "control_tokens": self._with_control_tokens,
            **({"lost": self._lost} if self._lost else {}),
            **({"unused_fields": self._unused} if self._unused else {}),
            **({"warning": self._warning} if self._warning else {}),
        }
        return self._writer.finish(
            self._written // 2 if pairs else self._written,
            self._fraction,
            "files" if self._own_val else "example" if self._fraction else "none",
            unread,
            **({"pairs": True} if pairs else {}),
            chat=chat,
        )


#: Version of the cached folders. Increase it when a change in the code affects the result.
_VERSION = 5


def cached_chat(
    files: Sequence[str],
    val_files: Sequence[str],
    tokenizer: Tokenizer,
    template: str | None,
    options: ChatOptions,
    tell: Callable[[str], None],
    *,
    where: str = "DIR",
    verify: bool = True,
    progress: bool = False,
) -> Path:
    """Return the cache folder that contains the prepared conversations. If the folder does not
    exist, prepare the conversations first. If several processes call this function at the same
    time, one of them prepares the conversations and the others wait.

    Args:
        files: the `inputs` of `prepare_chat`.
        val_files: the `val_inputs` of `prepare_chat`.
        tokenizer, template, options: see `prepare_chat`.
        tell: function that is called with each message to the user.
        where: the folder that contains the tokenizer; it is shown in error messages.
        verify: True to verify a cached folder against the SHA-256 in its manifest.
        progress: True to show a progress bar on stderr.

    Raises:
        InputError, DataError, TokenizerError, MissingDependencyError: see `prepare_chat`.
        StorageError: the cache can't be written.
    """
    # Set the template first, because it is part of the cache key.
    tokenizer = with_chat_template(tokenizer, template, where)
    sources = find_splits(files, val_files)
    if sources.note:
        tell(sources.note)
    folder = cache_folder() / "chat" / _key(sources, tokenizer, options)
    if not _is_whole(folder, verify):
        make_folder(folder.parent)
        lock = folder.with_name(f"{folder.name}.lock")
        with held(lock, "preparing the same conversations", progress):
            if not _is_whole(folder, verify):
                what = "preference pairs" if options.kind == "preference" else "conversations"
                tell(f"preparing the {what} of {', '.join(map(str, files))}")
                # A folder that exists at this point has failed the check above, so it is incomplete
                # or damaged.
                if folder.exists():
                    remove_folder(folder)
                prepare_chat(
                    files,
                    tokenizer,
                    folder,
                    val_inputs=val_files,
                    options=options,
                    progress=progress,
                )
    return folder


def _key(sources: Splits, tokenizer: Tokenizer, options: ChatOptions) -> str:
    content: dict[str, Any] = {
        "version": [_VERSION, LABELLED_VERSION],
        "options": asdict(options),
        "tokenizer": tokenizer.files(),
        "sources": {
            split: [[source.name, _fingerprint(source)] for source in found]
            for split, found in (("train", sources.train), ("val", sources.val))
        },
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _fingerprint(source: DataSource) -> str:
    """Return a fingerprint of a source's current content: the SHA-256 of a file or the commit hash
    of a dataset."""
    if source.path is not None:
        try:
            return sha256_of(source.path)
        except OSError as error:
            raise InputError(
                f"{source.name} can't be read: {describe_read_error(error)}"
            ) from error
    assert source.dataset is not None
    hub = optional("huggingface_hub", f"reading {source.name}")
    try:
        return str(hub.HfApi().dataset_info(source.dataset.partition(":")[0]).sha)
    # The libraries behind this call raise different errors for unknown names and for problems with
    # the network or the server.
    except Exception as error:
        raise InputError(
            f"dataset {source.name} is not available: {first_line(error)}; without a connection, "
            "train on a folder (data.dir) prepared with `firstlight prepare --kind chat`"
        ) from error


def _is_whole(folder: Path, verify: bool) -> bool:
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        for split in read_manifest(folder)["splits"]:
            open_split(folder, split, verify=verify)
    except DataError:
        return False
    return True
