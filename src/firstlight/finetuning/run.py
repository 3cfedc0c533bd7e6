"""Fine-tune an existing model on conversations or text documents. Either adapters or all weights
are trained.

Conversations are tokenized and stored in the cache, like for any recipe with `data.files`. Text
documents are tokenized with the tokenizer of the model and stored in the run folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from firstlight.console import counted, gib, rounded
from firstlight.data.conversations import (
    BadRecordError,
    record_fields,
    to_conversation,
    to_pair,
)
from firstlight.data.formats.registry import format_of
from firstlight.data.records import (
    RECORD_SUFFIXES,
    find_records,
    find_splits,
    kind_of_records,
    read_records,
)
from firstlight.data.shards import REJECTED_NAME, read_manifest
from firstlight.data.sources import DataSource, note_on_inputs
from firstlight.errors import ConfigError, FirstlightError, InputError
from firstlight.files.atomic import write_file
from firstlight.finetuning.choices import (
    Method,
    TuningData,
    TuningFacts,
    check_given,
    choose_tuning,
    row_of,
    starting_model,
)
from firstlight.finetuning.kept import SAME_TEXT, KeptText
from firstlight.from_texts.plan import Choice, Row, RunPlan, given_batch, given_unit
from firstlight.from_texts.preparation import Preparation, fitting_prompts, prepared_texts
from firstlight.from_texts.request import AS_CHAT, Request
from firstlight.from_texts.run_folder import DATA_FOLDER, TOO_LONG_NAME, RunCall
from firstlight.from_texts.scan import (
    Scan,
    conversations_in,
    estimated_text,
    file_names,
    first_names,
    other_files,
    reading_line,
    scan_texts,
)
from firstlight.planner.advise.defaults import USUAL_SHARE
from firstlight.planner.advise.law import Length, TextFacts

if TYPE_CHECKING:
    from firstlight.data.corpus import Corpus
    from firstlight.data.packing import ExampleDataset
    from firstlight.models import ModelConfig
    from firstlight.planner.plan.machine import Machine
    from firstlight.recipe import ResolvedRecipe
    from firstlight.tokenizer import Tokenizer
    from firstlight.training.loop import TrainResult


@dataclass(frozen=True, kw_only=True)
class TuningPlan(RunPlan):
    """The plan of a fine-tuning run.

    Attributes:
        facts: information from which the settings are chosen.
        template: name of the chat template and the reason for choosing it. None for text documents.
        too_long: messages that report how many conversations are longer than a row.
    """

    facts: TuningFacts
    template: tuple[str, str] | None
    too_long: Sequence[str]

    @property
    def data_name(self) -> str:
        return self.facts.data.name

    @property
    def held_out_tokens(self) -> float:
        return self.facts.val_tokens

    @property
    def recorded(self) -> dict[str, Any]:
        return {"data": asdict(self.facts.data), "method": asdict(self.facts.method)}

    def choose_again(self, length: Length) -> TuningPlan:
        """See `RunPlan.choose_again`."""
        return replace(self, choices=choose_tuning(self.facts, length, self.request.fixed))

    def model_lines(self) -> Iterator[str]:
        method = self.facts.method
        yield from self.too_long
        parameters = rounded(self.choices.parameters)
        yield f"model: {self.request.init_from}, {parameters} parameters"
        yield f"method: {method.name} ({method.reason})"

    def first_rows(self) -> list[Row]:
        method = self.facts.method
        rows = [("method", method.name, method.reason)]
        rows += [] if self.template is None else [("template", *self.template)]
        replay = self.request.fixed.get("data.replay", self.data.get("replay"))
        share = (
            "chosen after a tenth of the run" if replay is None else f"{100 * replay:g}% of rows"
        )
        kept = ", ".join(self.request.keep) or "control set"
        return [*rows, ("kept text", kept, f"measured from step 0 on; replayed: {share}")]


class FineTuning:
    """A fine-tuning run. It reads the model and the data, chooses the settings and trains the
    model.

    This class implements the interface `from_texts.run.Work`.

    Args:
        request: the user's request, which specifies the inputs, the length, the overrides and the
            initial model.
        tell: function that is called with each message to the user.
        progress: True to show a progress bar.

    Attributes:
        content_key: hash of the data and the path of the model.

    Raises:
        InputError: the inputs can't be read, or mix conversations and preference pairs.
        ConfigError: an override is invalid, or the model has no tokenizer.
        ModelError, CheckpointError: the model does not exist or can't be used.
        DataError, TokenizerError: see `prepare_chat`.
    """

    def __init__(self, request: Request, tell: Callable[[str], None], *, progress: bool) -> None:
        is_given = AS_CHAT in request.overrides
        found = (
            find_records(request.inputs)
            if is_given
            else conversations_in(request.inputs, request.text_key)
        )
        if found and request.val_inputs:
            names = shlex.join(["--data.val_files", *request.val_inputs])
            raise ConfigError(f"--val-input is only for texts: for conversations, use {names}")
        if found and request.as_is:
            raise ConfigError("--as-is is only for texts: omit it for conversations")
        kinds = {kind_of_records(one, request.text_key): one.name for one in found if not is_given}
        if len(kinds) > 1:
            raise InputError(
                f"{kinds['preference']} contains preference pairs and {kinds['chat']} "
                "conversations: train on the conversations first, then on the pairs with "
                "--init-from RUN"
            )
        self._unread: Sequence[str] = ()
        if not found:
            _require_readable(request.inputs, request.text_key)
        else:
            tell(reading_line(request.inputs, found))
            if note := note_on_inputs(request.inputs):
                tell(note)
            self._unread = other_files(request.inputs, found)
            if self._unread:
                count = counted(len(self._unread), "file")
                tell(f"skipped {count} without conversations: {first_names(self._unread)}")
            check_given(request, conversations=True)
        from firstlight.checkpoint.selection import read_model_folder, resolve_tokenizer
        from firstlight.lora.files import config_folder
        from firstlight.tokenizer import Tokenizer
        from firstlight.weights.huggingface import read_config

        assert request.init_from is not None

        def read(folder: Path) -> tuple[Path, ModelConfig, Tokenizer]:
            tokenizer = Tokenizer.from_pretrained(resolve_tokenizer(folder))
            return folder, read_config(config_folder(folder)), tokenizer

        self._folder, self._config, self._tokenizer = read_model_folder(request.init_from, read)
        # Reject unsuitable kept text before the new text is read.
        KeptText(request, self._folder, self._tokenizer)
        # If the model is a run folder, store the path of the run folder. An active run may delete
        # the checkpoint, so the path of the checkpoint is not stored. For a hub model, store the
        # path of the downloaded folder.
        is_here = Path(request.init_from).expanduser().exists()
        self._start = request.init_from if is_here else str(self._folder)
        self._model = starting_model(self._folder, self._config)
        self._has_keep = bool(request.keep)
        self._chats: Conversations | None = None
        self._scan: Scan | None = None
        if found:
            self._chats = Conversations(
                request,
                found,
                self._folder,
                self._tokenizer,
                kind="preference" if "preference" in kinds else "chat",
                tell=tell,
                progress=progress,
            )
            self._data, key = self._chats.facts, self._chats.train.folder.name
        else:
            self._scan = scan_texts(request, tell, check_given, progress=progress)
            self._unread = self._scan.unread
            self._data = TuningData("text", self._scan.facts.documents)
            key = self._scan.facts.content_key
        place = str(self._folder.resolve())
        self.content_key = hashlib.sha256(f"{key} {place}".encode()).hexdigest()[:16]

    # The plan

    def plan(self, request: Request, gpu: str | None = None) -> RunPlan:
        """Choose the method and the settings.

        Args:
            request: the user's request, which specifies the inputs, the overrides and the length of
                the run. Without a length, `DEFAULT_SECONDS` is used.
            gpu: name of a GPU to plan for; None to plan for this machine.

        Raises:
            ConfigError: an option is invalid, no method fits in memory, or the budget is too short.
            DataError: no conversation fits in a row, or `data.long` is "refuse" and at least one
                conversation does not fit.
        """
        from firstlight.from_texts.machine import facts_for_model
        from firstlight.planner.plan.machine import find_machine

        fixed = request.fixed
        machine = find_machine(gpu, device=fixed.get("run.device") or "auto")
        row = row_of(self._data, self._model, fixed)
        too_long = [] if self._chats is None else self._chats.too_long(row.value)
        prompts = self._prompts(row.value)
        recipe, method = self._fitting_method(request, machine, row, prompts)
        speed = facts_for_model(recipe, machine)
        epoch, held = self._tokens(row.value)
        facts = TuningFacts(
            self._data,
            self._model,
            method,
            speed,
            epoch_tokens=epoch,
            val_tokens=held,
            row=row,
        )
        size = 0.0 if self._scan is None else self._scan.facts.total_bytes
        length = request.training_length(size)
        plan = TuningPlan(
            request=request,
            machine=machine,
            speed=speed,
            facts=facts,
            template=None if self._chats is None else self._chats.template,
            too_long=too_long,
            choices=choose_tuning(facts, length, fixed),
            prompts=prompts,
            start=self._start,
            data=self._section(),
        )
        plan.require_time(length)
        return plan

    def _section(self, **places: str) -> dict[str, Any]:
        """Return the recipe's `data` section. Until the text is prepared, its places are unknown.

        Args:
            places: folders of the prepared text (`dir`) and of the kept text (`keep`).
        """
        data = {"dir": "unused", "keep": "unused"}
        if self._chats is not None:
            data = self._chats.section
        is_text = self._data.kind == "text"
        # Text in the middle of conversations is a change of method, which the user has to ask for.
        replay = None if is_text or (self._has_keep and self._data.kind == "chat") else 0.0
        return {**data, "replay": replay, **places}

    def _tokens(self, seq_len: int) -> tuple[float, float]:
        """Return the number of tokens in the training split and the number of tokens in the
        validation split.
        """
        if self._chats is not None:
            return self._chats.tokens(seq_len)
        assert self._scan is not None
        text = self._estimated(self._scan)
        return text.train_tokens, text.val_tokens

    def _estimated(self, scan: Scan) -> TextFacts:
        return estimated_text(scan.facts, self._tokenizer.vocab_size, scan.val_bytes)

    def _fitting_method(
        self, request: Request, machine: Machine, row: Choice, prompts: Sequence[str]
    ) -> tuple[ResolvedRecipe, Method]:
        """Return the resolved recipe and the method for the first of `_methods` that fits in memory
        with a micro-batch of one sequence.

        Raises:
            ConfigError: no method fits in memory.
        """
        from firstlight.lora.files import config_folder
        from firstlight.planner.plan.estimate import estimate
        from firstlight.planner.plan.machine import resolve_for
        from firstlight.recipe import parse_recipe
        from firstlight.recipe.load import changed_recipe

        free, fixed = gib(machine.usable_bytes), request.fixed
        unit = given_unit(fixed, row.value)
        values: dict[str, Any] = {
            "data": {**self._section(), "seq_len": row.value},
            # These settings have not been chosen yet. Assume that the run accumulates gradients and
            # saves checkpoints during training, because this takes the most memory.
            "batch": {
                "micro_batch_size": 1,
                "global_batch_tokens": given_batch(fixed, row.value) or 2 * unit,
            },
            "schedule": {"max_steps": 1000},
            "efficiency": {"compile": False},
            "evaluation": {"sample_prompts": prompts},
        }
        needed: dict[str, str] = {}
        for method in self._methods(request, machine):
            chosen = {one.key: one.value for one in method.choices()}
            recipe = parse_recipe(
                changed_recipe(values, chosen), "the chosen recipe", _of_run(request)
            )
            resolved = resolve_for(recipe, machine, self._start)
            found = estimate(resolved, machine)
            if found.problem:
                raise ConfigError(found.problem)
            if not found.fits:
                needed[method.name] = gib(found.needed_bytes)
                continue
            reason = f"fits into {free} of free memory"
            if "all weights" in needed:
                reason += f"; training all weights would need {needed['all weights']}"
            if any(name.startswith("lora.") for name, _ in request.overrides):
                reason = "given"
            elif config_folder(self._folder) != self._folder:
                reason += "; the adapter of the starting model is merged first (--lora.rank N "
                reason += "trains the adapter itself)"
            return resolved, replace(method, reason=reason)
        name, least = next(reversed(needed.items()))
        lightest = f"{least} with {name}"
        raise ConfigError(
            f"{request.init_from} does not fit in the memory of {machine.name} (it needs "
            f"{lightest}, but {free} is free): start from a smaller model, or lower --data.seq_len"
        )

    def _methods(self, request: Request, machine: Machine) -> Iterator[Method]:
        """Yield the methods to try. The methods with the highest capacity to learn come first."""
        if not any(name.startswith("lora.") for name, _ in request.overrides):
            yield Method()
        yield Method(adapters=True)
        yield Method(adapters=True, checkpointing=True)
        if machine.target.kind == "cuda":
            yield Method(adapters=True, checkpointing=True, quantized=True)

    # The run

    def begin(self, plan: RunPlan, request: Request, call: RunCall) -> TrainResult:
        """Prepare the text and train the model. Before training, the settings are chosen again from
        the actual number of tokens and the remaining time.
        """
        from firstlight.from_texts.machine import train_plan

        assert isinstance(plan, TuningPlan)
        plan = replace(plan, request=request)
        kept = KeptText(request, self._folder, self._tokenizer)
        places = {"keep": str(kept.prepare(call))}
        if self._scan is not None:
            plan = self._with_texts(plan, self._scan, call)
            places |= {"dir": str(call.folder / DATA_FOLDER)}
            kept_data, new_data = (read_manifest(Path(one)) for one in places.values())
            if kept_data == new_data:
                raise ConfigError(SAME_TEXT.format(shlex.join(request.keep)))
        else:
            assert self._chats is not None
            call.remember(data=str(self._chats.train.folder), kind="chat")
            rejected = self._chats.train.folder / REJECTED_NAME
            if rejected.is_file():
                write_file(call.folder / REJECTED_NAME, rejected.read_bytes())
            if long := self._chats.too_long_places(plan.facts.row.value):
                write_file(call.folder / TOO_LONG_NAME, "".join(f"{one}\n" for one in long))
        call.write_unread(self._unread)
        plan = replace(plan, data=self._section(**places))
        length = call.length(request)
        plan = plan.choose_again(length)
        plan.require_time(length)
        return train_plan(plan, call)

    def _with_texts(self, plan: TuningPlan, scan: Scan, call: RunCall) -> TuningPlan:
        """Prepare the text documents. Return a copy of the plan that contains the actual numbers
        of tokens.
        """
        text = self._estimated(scan)
        needed = plan.choices.tokens * text.bytes_per_token
        key = self._tokenizer.fingerprint[:16]
        texts = Preparation(
            scan, plan.request.text_key, needed, key, tokenizer=lambda: self._tokenizer
        )
        data = prepared_texts(texts, call)
        splits = read_manifest(data)["splits"]
        held = splits.get("val", {"tokens": 0})["tokens"]
        facts = replace(plan.facts, epoch_tokens=splits["train"]["tokens"], val_tokens=held)
        return replace(plan, facts=facts)

    def _prompts(self, seq_len: int) -> list[str]:
        """Return prompts for sample texts. Each prompt takes at most half of the context."""
        if self._chats is not None:
            return self._chats.prompts(self._model.context // 2)
        assert self._scan is not None
        return fitting_prompts(self._scan.prompts, self._tokenizer, seq_len // 2)


def _require_readable(inputs: Sequence[str], text_key: str) -> None:
    """Raise an error if a file with records is damaged. If there is only one input file, also raise
    an error if its records are neither conversations nor text documents.

    If such an input file were treated as text, the resulting error message would advise the user to
    run the same command again.

    Raises:
        InputError: a file is damaged, or its records are unsuitable.
    """
    for item in inputs:
        path = Path(item).expanduser()
        if not item.lower().endswith(RECORD_SUFFIXES) or not path.is_file():
            continue
        if format_of(path) is not None:  # An archive, or a chat between people, is read as text.
            continue
        with closing(read_records(find_records([item]))) as records:
            first = next(records, None)
        if first is None or not isinstance(first.value, dict) or text_key in first.value:
            continue
        try:
            to_conversation(first.value)
        except BadRecordError as error:
            if len(inputs) == 1:
                raise InputError(
                    f"{first.place}: not a text, since it has no '{text_key}' field (set another "
                    f"with --text-key), and not a conversation: {error}"
                ) from error


def _of_run(request: Request) -> list[tuple[str, str]]:
    """Return the overrides that affect the memory use of the run.

    Overrides that set the length of the run or the number of micro-batches are omitted. The methods
    are tried with a micro-batch of one sequence, for which the user's number of micro-batches would
    be wrong.
    """
    left_out = ("schedule.", "run.", "batch.gradient_accumulation_steps")
    return [one for one in request.overrides if not one[0].startswith(left_out)]


# The conversations

#: `_LOOKED_AT` is the maximum number of conversations that are searched for tools, and of held-out
#: conversations that are searched for sample questions. `_SAMPLES` is the maximum number of sample
#: questions.
_LOOKED_AT, _SAMPLES = 40, 3
#: Maximum number of characters in a sample question.
_MOST_QUESTION = 400


class Conversations:
    """Conversations or preference pairs, prepared for a model.

    Args:
        request: inputs and overrides of the run.
        sources: files with conversations or preference pairs.
        folder: folder of the model.
        tokenizer: tokenizer of the model.
        kind: "chat" for conversations, "preference" for preference pairs.
        tell: function that is called with each message to the user.
        progress: True to show a progress bar.

    Attributes:
        section: the `data` section of the recipe.
        template: name of the chat template and the reason for choosing it.
        train, val: training split and validation split. `val` is None if there are no held-out
            conversations.
        facts: properties of the data, from which the settings are chosen.

    Raises:
        InputError, DataError, TokenizerError, StorageError: see `cached_chat`.
    """

    def __init__(
        self,
        request: Request,
        sources: Sequence[DataSource],
        folder: Path,
        tokenizer: Tokenizer,
        *,
        kind: Literal["chat", "preference"],
        tell: Callable[[str], None],
        progress: bool,
    ) -> None:
        # Import these modules here. They import torch, which would delay the first line of output.
        from firstlight.checkpoint.selection import resolve_tokenizer
        from firstlight.data.packing import ExampleDataset, chat_notes
        from firstlight.recipe import parse_recipe
        from firstlight.training.datasets import open_splits

        name, self.template = _chat_template(request, tokenizer, sources)
        self.section: dict[str, Any] = {
            "kind": kind,
            "files": file_names(request.inputs, sources),
            "template": name,
            "on_bad": "skip",
            "long": "drop",
            "keep": "unused",  # until the kept text is prepared
        }
        own = [one for one in request.overrides if one[0].startswith("data.")]
        config = parse_recipe({"data": self.section}, "the chosen recipe", own).data
        splits = find_splits(request.inputs, config.val_files or (), sources)
        if splits.note:
            tell(splits.note)
            self.section["files"] = [source.name for source in splits.train]
        if splits.val and not config.val_files:
            self.section["val_files"] = [source.name for source in splits.val]
        config = parse_recipe({"data": self.section}, "the chosen recipe", own).data
        self._sources = splits.val or splits.train
        train, self.val = open_splits(
            config,
            tell,
            tokenizer=lambda: resolve_tokenizer(folder),
            progress=progress,
            reports_missing=False,  # A missing split is reported later, when the run starts.
        )
        assert isinstance(train, ExampleDataset)
        self.train, lengths = train, _unit_lengths(train)
        usual = int(np.quantile(lengths, USUAL_SHARE, method="higher"))
        self.facts = TuningData(kind, len(lengths), int(lengths.max()), usual)
        held = len(_unit_lengths(self.val)) if isinstance(self.val, ExampleDataset) else 0
        tell(
            f"{counted(len(lengths), self.facts.unit)} to train on, {held:,} held out; "
            f"{lengths.mean():,.0f} tokens on average"
        )
        for line in chat_notes(train.folder, train.manifest):
            tell(line)

    def tokens(self, seq_len: int) -> tuple[float, float]:
        """Return the number of tokens in the training split and the number of tokens in the
        validation split. Padding to rows of `seq_len` tokens is included.
        """

        def of(split: Corpus | None) -> float:
            return 0.0 if split is None else float(split.num_rows(seq_len) * seq_len)

        return of(self.train), of(self.val)

    def too_long(self, seq_len: int) -> list[str]:
        """Return messages that report how many conversations are dropped or truncated because they
        are longer than a row of `seq_len` tokens. If all conversations fit, return [].

        Raises:
            DataError: no conversation fits, or `data.long` is "refuse" and at least one
                conversation does not fit.
        """
        lines = []
        for split, kind in self._splits():
            packing, total = split.packing(seq_len), len(_unit_lengths(split))
            # The two answers of a preference pair can't be cut.
            is_chat = self.facts.kind == "chat"
            whole = " (--data.long cut would keep their beginnings)" if is_chat else ""
            for count, fate, hint in (
                (packing.dropped, "left out", whole),
                (packing.cut, "cut", ""),
            ):
                if count:
                    what = f"{count:,} of {total:,} {kind} {self.facts.unit}s"
                    lines.append(f"{fate}: {what}, longer than {seq_len:,} tokens{hint}")
        return lines

    def too_long_places(self, seq_len: int) -> list[str]:
        """Describe each conversation that is longer than a row of `seq_len` tokens. A description
        consists of the file, the line and the length in tokens.
        """
        from firstlight.data.packing import ORIGINS_NAME

        places = []
        for split, _ in self._splits():
            path = split.folder / ORIGINS_NAME.format(split=split.split)
            origins = path.read_text(encoding="utf-8").splitlines()
            # An example with n tokens takes n - 1 positions in a row, because the inputs and
            # targets are shifted by one token.
            lengths = _unit_lengths(split)
            for index in np.flatnonzero(lengths - 1 > seq_len):
                place = origins[index * split.together]
                places.append(f"{place}: {lengths[index]:,} tokens")
        return places

    def _splits(self) -> Iterator[tuple[ExampleDataset, str]]:
        """Yield each split and its name, for messages."""
        from firstlight.data.packing import ExampleDataset

        yield self.train, "training"
        if isinstance(self.val, ExampleDataset):
            yield self.val, "held-out"

    def prompts(self, most_tokens: int) -> list[str]:
        """Return up to three different questions from the held-out conversations. Each question has
        fewer than `most_tokens` tokens.
        """
        from firstlight.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_pretrained(self.train.folder)
        found: list[str] = []
        for question in self._questions():
            message = {"role": "user", "content": question}
            try:
                ids = tokenizer.encode_chat([message], add_generation_prompt=True)
            except FirstlightError:
                continue
            if len(ids) < most_tokens and question not in found:
                found.append(question)
            if len(found) == _SAMPLES:
                break
        return found

    def _questions(self) -> Iterator[str]:
        """Yield the first user message of each held-out conversation. Messages that are too long
        are omitted.
        """
        from firstlight.data.packing import ExampleDataset

        if not isinstance(self.val, ExampleDataset):
            return
        count = min(self.val.num_documents, _LOOKED_AT)
        wanted = {self.val.origin(i) for i in range(count)}
        with closing(read_records(self._sources)) as records:
            for record in records:
                if record.place not in wanted:
                    continue
                wanted.discard(record.place)
                with contextlib.suppress(BadRecordError):
                    is_pair = self.facts.kind == "preference"
                    messages = (
                        to_pair(record.value).chosen if is_pair else to_conversation(record.value)
                    ).messages
                    asked = [one["content"] for one in messages if one["role"] == "user"]
                    yield from (text for text in asked[:1] if len(text) <= _MOST_QUESTION)
                if not wanted:
                    return


def _unit_lengths(split: ExampleDataset) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the length in tokens of each conversation or preference pair. The length of a
    preference pair is the sum of two lengths: that of the prompt with the chosen answer, and that
    of the prompt with the rejected answer.
    """
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]] = (split.lengths - 1).reshape(
        -1, split.together
    ).sum(1) + 1
    return lengths


def _chat_template(
    request: Request, tokenizer: Tokenizer, sources: Sequence[DataSource]
) -> tuple[str | None, tuple[str, str]]:
    """Choose the chat template.

    Returns:
        The value of `data.template`, and a pair of the name of the template and the reason for
        choosing it. The pair is shown in the printed table.
    """
    given = request.fixed.get("data.template")
    if given is not None:
        return str(given), (str(given), "given")
    if tokenizer.chat_template is not None:
        return None, ("the model's own", "part of the tokenizer")
    from firstlight.tokenizer.chat_template import required_tokens

    for name in ("chatml", "llama3"):
        if all(token in tokenizer.special_tokens for token in required_tokens(name)):
            if name == "chatml" and _have_tools(sources):
                return "hermes", ("hermes", "ChatML with tools, which the conversations use")
            return name, (name, "the tokenizer has its special tokens")
    return "alpaca", ("alpaca", "plain text: the tokenizer has no special tokens for turns")


def _have_tools(sources: Sequence[DataSource]) -> bool:
    """Return True if any of the first `_LOOKED_AT` conversations uses tools."""
    from firstlight.tokenizer.messages import template_options

    with closing(read_records(sources)) as records:
        for record in itertools.islice(records, _LOOKED_AT):
            with contextlib.suppress(BadRecordError, ValueError):
                messages = to_conversation(record.value).messages
                fields = record_fields(record.value) if isinstance(record.value, dict) else {}
                if "tools" in template_options(fields, messages):
                    return True
    return False
