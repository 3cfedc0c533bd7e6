"""The `data` section of a recipe: the training data, and how they become rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from firstlight.data.conversations import PAIRS_ARE_SELF_DESCRIBING, ChatForm
from firstlight.data.examples import LongPolicy
from firstlight.data.mixing import whole_weights
from firstlight.section import Section


class MixedCorpus(Section):
    """One corpus of `data.mix`."""

    dir: str = Field(min_length=1)
    """a folder that `firstlight prepare` wrote, or its URL."""
    weight: float = Field(gt=0)
    """number of rows it gives in relation to the others' weights."""
    name: str | None = Field(None, pattern=r"^[\w.-]+$")
    """name in val/loss/NAME and epoch/NAME; null is the last part of `dir`."""

    @property
    def label(self) -> str:
        """Its name."""
        return self.name or self.dir.rstrip("/").rpartition("/")[2] or self.dir


class DataConfig(Section):
    """The `data` section. One of `dir`, `mix` and `files` is given."""

    kind: Literal["text", "chat", "preference"] | None = None
    """kind of the data: chat for conversations, preference for pairs of answers, text for text;
    null is the kind of `dir`."""
    dir: str | None = Field(min_length=1)
    """a folder that `firstlight prepare` wrote, or its URL (s3://, gs://, hf://datasets/...,
    https://), from which it is fetched into a cache."""
    mix: list[MixedCorpus] | None = Field(None, min_length=1)
    """several prepared folders with one tokenizer: a list of {dir, weight}. Each gives rows in
    proportion to its weight, exactly, in its own shuffled order, again and again. An epoch is as
    many rows as the corpora have together. val/loss is the mean of their losses by weight; each
    corpus's own loss stands beside it."""
    files: list[str] | None = Field(None, min_length=1)
    """conversations (with kind preference, pairs) that are prepared when the run starts, and kept
    in the cache: .jsonl, .json and .parquet files, folders, globs, hf:NAME[:CONFIG]."""
    val_files: list[str] | None = Field(None, min_length=1)
    """files to validate on, beside `files`; null holds val_fraction of the conversations out."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """share of `files` that is held out for validation; 0 is none."""
    format: ChatForm = "auto"
    """format of the records of `files`: alpaca, messages, sharegpt; auto tells each by its keys."""
    template: str | None = Field(None, min_length=1)
    """the chat template of `files`: chatml, llama2, llama3, alpaca or a .jinja file; null is the
    tokenizer's own. It is saved with the model."""
    tokenizer: str | None = Field(None, min_length=1)
    """tokenizer of `files`, a folder or file; null is that of --init-from."""
    train_on: Literal["assistant", "all"] = "assistant"
    """labels of `files`: the assistant's tokens with the ends of its turns, or all tokens."""
    on_bad: Literal["refuse", "skip"] = "refuse"
    """treatment of records of `files` that are no conversations: refuse all, or skip the record."""
    long: LongPolicy = "refuse"
    """treatment of conversations longer than a row: refuse them all, drop them, or cut their ends
    off."""
    seq_len: int | None = Field(None, gt=0)
    """tokens a training row; null is the model's max_position_embeddings."""
    verify: bool = True
    """comparison of the shards with their sha256 before the first step."""
    document_masking: bool = False
    """attention within documents: tokens see only their own document; positions start anew in each.
    Always so with conversations."""
    workers: int = Field(1, ge=0, le=64)
    """threads that read rows ahead; the order of the rows does not depend on them. 0 reads them
    when a step needs them."""
    prefetch: int = Field(2, ge=1, le=1024)
    """micro-batches that are read ahead; at least those of one step."""
    pin_memory: bool | None = None
    """page-locked batches, from which a GPU copies while it computes; null is where there is a CUDA
    GPU."""

    @model_validator(mode="before")
    @classmethod
    def _without_dir(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        # One file needs no list.
        values = {
            name: [value] if name in ("files", "val_files") and isinstance(value, str) else value
            for name, value in values.items()
        }
        if values.get("kind") in ("chat", "preference"):
            values = {"document_masking": True, **values}
        # `dir` is required, but where there is something in its place.
        if values.get("mix") is not None or values.get("files") is not None:
            return {"dir": None, **values}
        return values

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if sum(place is not None for place in (self.dir, self.mix, self.files)) != 1:
            raise ValueError(
                "give either dir, a prepared folder, or mix, several with weights, or files, "
                "conversations with kind chat"
            )
        if self.files is not None and self.kind not in ("chat", "preference"):
            raise ValueError(
                "files are conversations: add kind chat, or kind preference for pairs (text is "
                "prepared before)"
            )
        if self.kind == "preference":
            self._require_for_pairs()
        if self.kind in ("chat", "preference") and not self.document_masking:
            raise ValueError(NO_MASKING)
        given = [name for name in _OF_FILES if name in self.model_fields_set]
        changed = [n for n in given if getattr(self, n) != type(self).model_fields[n].default]
        if self.files is None and changed:
            raise ValueError(
                f"{', '.join(changed)}: only of files; a prepared folder is as it was prepared"
            )
        if self.val_files is not None and "val_fraction" in changed and self.val_fraction:
            raise ValueError("give either val_files or val_fraction")
        if self.mix is not None:
            whole_weights([corpus.weight for corpus in self.mix])
        labels = [corpus.label for corpus in self.mix or ()]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"two corpora of mix are called '{twice}': give each a name")
        return self

    def _require_for_pairs(self) -> None:
        if self.mix is not None:
            raise ValueError("preference pairs can't be mixed: give dir or files")
        if self.long == "cut":
            raise ValueError("long cut is not for preference pairs: half of one says nothing")
        if self.train_on != "assistant" or self.format != "auto":
            raise ValueError(PAIRS_ARE_SELF_DESCRIBING)


#: Keys of `data` that say how `files` are prepared.
_OF_FILES = ("val_files", "val_fraction", "format", "template", "tokenizer", "train_on", "on_bad")
NO_MASKING = "document_masking can't be off with conversations: examples never see each other"
