"""The conversations for fine-tuning: prepares and opens them, and collects facts about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.data.conversations import BadRecordError, to_conversation
from firstlight.data.corpus import Corpus
from firstlight.data.packing import ExampleDataset
from firstlight.data.records import find_records, read_records
from firstlight.data.sources import DataSource
from firstlight.errors import FirstlightError
from firstlight.finetuning.choices import TuningData
from firstlight.from_texts.request import Request
from firstlight.from_texts.scan import file_names
from firstlight.planner.advise.defaults import USUAL_SHARE
from firstlight.recipe import parse_recipe
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_template import required_tokens
from firstlight.training.datasets import open_splits

#: Number of held-out conversations in which sample questions are searched, and of samples.
_LOOKED_AT, _SAMPLES = 40, 3
#: Largest number of characters of a sample question.
_MOST_QUESTION = 400


class Conversations:
    """Conversations that are prepared for a model.

    Args:
        request: inputs and overrides of the run.
        sources: the files with conversations.
        folder: the model's folder.
        tokenizer: the model's tokenizer.
        tell: function that is called with each message for the user.
        progress: show a progress bar.

    Attributes:
        section: the recipe's section `data`: key -> value.
        template: name of the chat template, and the reason for it.
        train, val: the splits; `val` is None without held-out conversations.
        facts: facts from which settings are chosen.

    Raises:
        InputError, DataError, TokenizerError, StorageError: see `cached_chat`.
    """

    def __init__(
        self,
        request: Request,
        sources: Sequence[DataSource],
        folder: Path,
        tokenizer: Tokenizer,
        tell: Callable[[str], None],
        *,
        progress: bool,
    ) -> None:
        name, self.template = _chat_template(request, tokenizer)
        self.section: dict[str, Any] = {
            "kind": "chat",
            "files": file_names(request.inputs, sources),
            "template": name,
            "on_bad": "skip",
            "long": "drop",
        }
        own = [one for one in request.overrides if one[0].startswith("data.")]
        config = parse_recipe({"data": self.section}, "the chosen recipe", own).data
        self._sources = find_records(config.val_files) if config.val_files else sources
        train, self.val = open_splits(config, tell, tokenizer=lambda: folder, progress=progress)
        assert isinstance(train, ExampleDataset)
        self.train, lengths = train, train.lengths
        usual = int(np.quantile(lengths, USUAL_SHARE, method="higher"))
        self.facts = TuningData("chat", len(lengths), int(lengths.max()), usual)
        held = self.val.num_documents if isinstance(self.val, ExampleDataset) else 0
        tell(
            f"{len(lengths):,} conversations to train on, {held:,} held out; "
            f"{lengths.mean():,.0f} tokens each on average"
        )
        documents = train.manifest["documents"]
        if count := sum(documents["rejected"].values()):
            tell(
                f"{count:,} of {documents['read']:,} records are no conversations and are left out"
            )

    def tokens(self, seq_len: int) -> tuple[float, float]:
        """Tokens of one pass over the training split and of one over the validation split, with
        padding, if rows have `seq_len` tokens."""

        def of(split: Corpus | None) -> float:
            return 0.0 if split is None else float(split.num_rows(seq_len) * seq_len)

        return of(self.train), of(self.val)

    def too_long(self, seq_len: int) -> list[str]:
        """Texts with the numbers of training conversations that are left out and that are cut,
        because they are longer than a row of `seq_len` tokens; [] if all of them fit.

        Raises:
            DataError: no conversation fits, or `data.long` is "refuse" and one does not fit.
        """
        packing, total = self.train.packing(seq_len), self.facts.count
        fates = ((packing.dropped, "left out"), (packing.cut, "cut"))
        return [
            f"{count:,} of {total:,} conversations are longer and are {fate}"
            for count, fate in fates
            if count
        ]

    def prompts(self, most_tokens: int) -> list[str]:
        """Up to three different questions of held-out conversations, each with fewer than
        `most_tokens` tokens."""
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
        """The first messages of held-out conversations, if they are a user's and short."""
        if not isinstance(self.val, ExampleDataset):
            return
        count = min(self.val.num_documents, _LOOKED_AT)
        wanted = {self.val.origin(i) for i in range(count)}
        with closing(read_records(self._sources)) as records:
            for record in records:
                if record.place not in wanted:
                    continue
                wanted.discard(record.place)
                try:
                    first = to_conversation(record.value).messages[0]
                except BadRecordError:
                    first = {"role": "", "content": ""}
                if first["role"] == "user" and len(first["content"]) <= _MOST_QUESTION:
                    yield first["content"]
                if not wanted:
                    return


def _chat_template(request: Request, tokenizer: Tokenizer) -> tuple[str | None, tuple[str, str]]:
    """The value of `data.template`, and the template's name and reason for the printed table."""
    given = request.fixed.get("data.template")
    if given is not None:
        return str(given), (str(given), "given")
    if tokenizer.chat_template is not None:
        return None, ("the model's own", "it comes with the tokenizer")
    for name in ("chatml", "llama3"):
        if all(token in tokenizer.special_tokens for token in required_tokens(name)):
            return name, (name, "the tokenizer has its tokens for turns")
    return "alpaca", ("alpaca", "plain text: the tokenizer has no tokens for turns")
