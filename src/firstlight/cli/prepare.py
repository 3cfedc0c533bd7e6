"""`firstlight prepare`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import click

from firstlight.cli.options import as_is_option, out_option, text_key_option
from firstlight.cli.output import show, with_json
from firstlight.console import counted, human_bytes, parse_count, say
from firstlight.errors import ConfigError

#: Default values of the options that can be used only with --kind text, keyed by parameter name.
_OF_TEXT = {
    "workers": None,
    "engine": "local",
    "ray_address": None,
    "text_key": "text",
    "max_documents": None,
    "max_tokens": None,
    "as_is": False,
}


@click.command("prepare")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--tokenizer", required=True, help="Tokenizer folder or file, or a hub id.")
@out_option
@click.option(
    "--val-fraction",
    type=float,
    default=0.1,
    show_default=True,
    help="Fraction of the text to hold out for "
    "validation, in whole documents; 0 holds out nothing.",
)
@click.option(
    "--workers", type=int, help="Number of processes.  [default: depends on the size of the corpus]"
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default=_OF_TEXT["engine"],
    show_default=True,
    help="Where to encode: in processes on this machine, or "
    "on a Ray cluster. The shards are the same.",
)
@click.option(
    "--ray-address",
    metavar="auto|local|HOST:PORT",
    help="Address of the Ray cluster: auto for a running cluster, local for a new one.  [default: "
    "chosen by Ray]",
)
@text_key_option
@click.option("--max-documents", metavar="N", help="Read only the first N documents, such as 10k.")
@click.option(
    "--max-tokens",
    metavar="N",
    help="Stop after N tokens of both splits together, such as 10M. The last document of a split "
    "is cut between two characters, so the split can be a few tokens short.",
)
@as_is_option
# The licence of Project Gutenberg is removed by default. The hidden option exists for compatibility
# with older commands.
@click.option("--strip-gutenberg", is_flag=True, expose_value=False, hidden=True)
@click.option(
    "--kind",
    type=click.Choice(["text", "chat", "preference"]),
    default="text",
    show_default=True,
    help="Kind of data: text; chat, for conversations with labels for the tokens "
    "to train on; or preference, for pairs of answers to a prompt.",
)
@click.option(
    "--val-input",
    "val_inputs",
    multiple=True,
    metavar="INPUT",
    help="Texts or conversations to validate on, instead of --val-fraction.",
)
@click.option(
    "--template",
    metavar="NAME",
    help="With --kind chat: chatml, hermes, llama2, llama3, alpaca or a .jinja file.  [default: "
    "the tokenizer's]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", "alpaca", "messages", "sharegpt"]),
    help="With --kind chat: format of the records; auto recognizes each record by its keys.  "
    "[default: auto]",
)
@click.option(
    "--train-on",
    type=click.Choice(["assistant", "last", "answers", "all"]),
    help="With --kind chat: train on all messages of the assistant, "
    "its last message, its messages without reasoning, or everything.  [default: assistant]",
)
@click.option(
    "--on-bad",
    type=click.Choice(["refuse", "skip", "keep"]),
    help="With --kind chat: what to do with invalid records, and with records from which "
    "the chat template omits a part (keep: train on the rest).  [default: refuse]",
)
@click.option("--overwrite", is_flag=True, help="Replace --out if it is a prepared corpus.")
@with_json
def prepare_command(
    inputs: tuple[str, ...],
    tokenizer: str,
    out: Path,
    val_fraction: float,
    val_inputs: tuple[str, ...],
    kind: str,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> dict[str, Any]:
    """Tokenize a corpus, and write it to --out as shards.

    INPUT is a file, folder or glob, the word `stdlib`, or hf:NAME[:CONFIG[:SPLIT]]. The default
    split is "train". To select a different split, use hf:NAME::validation, for example. Files can
    be text or code with any file name extension or none, .jsonl, .ndjson, .csv or .tsv (all of
    these also compressed as .gz, .bz2, .xz or .zst), or .parquet. Each text file, each line of a
    JSONL file and each row of a table is one document. Text files can also contain several
    documents that are separated by <|endoftext|> or a similar separator. Text must be encoded as
    UTF-8, or as UTF-16 or UTF-32 with a byte-order mark. Documents that can't be read are listed in
    OUT/rejected.jsonl. Files of other kinds are only counted. If random:TOKENS[:SEED] is the only
    input, the corpus consists of uniformly random tokens, which are useful for measurements.

    With --kind chat, INPUT is a .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow or .txt file,
    or hf:NAME[:CONFIG[:SPLIT]], and each record is a conversation. A record can have the keys
    {messages} or {conversations}. It can consist of a question and its answer, as in {instruction,
    input, output} or {prompt, completion}. It can also be a string that contains the names of the
    speakers. With --kind preference, the keys of each record are {prompt, chosen, rejected}. If a
    folder contains train, validation and test files, they are used as the splits, and the test
    files are ignored.
    """
    of_text = {name: options.pop(name) for name in _OF_TEXT}
    of_chat = {name: value for name, value in options.items() if value not in (None, ())}
    from firstlight.checkpoint.selection import resolve_tokenizer
    from firstlight.data.sources import note_on_inputs

    folders = (resolve_tokenizer(tokenizer), out)
    if note := note_on_inputs(inputs):
        say(note)
    shared: dict[str, Any] = {"val_fraction": val_fraction, "val_inputs": val_inputs}
    shared["overwrite"] = overwrite
    if kind == "text":
        if of_chat:
            raise ConfigError(
                "--template, --format, --train-on and --on-bad are for conversations: add --kind "
                "chat"
            )
        manifest = _prepare_text(inputs, *folders, **shared, **of_text)
    else:
        if of_text != _OF_TEXT:
            raise ConfigError(
                "--workers, --engine, --ray-address, --text-key, --max-documents, --max-tokens and "
                "--as-is are for text: omit them with --kind chat"
            )
        manifest = _prepare_chat(inputs, *folders, kind=kind, **shared, **of_chat)
    _show_summary(out, manifest)
    return {"out": out, **manifest}


def _prepare_text(inputs: tuple[str, ...], *folders: Path, **options: Any) -> dict[str, Any]:
    """Prepare text documents. The options are arguments of `firstlight.data.prepare.prepare`."""
    from firstlight.data.prepare import prepare

    for name in ("max_documents", "max_tokens"):
        if options[name] is not None:
            options[name] = int(parse_count(options[name]))
    return prepare(inputs, *folders, progress=True, **options)


def _prepare_chat(inputs: tuple[str, ...], *folders: Path, **options: Any) -> dict[str, Any]:
    """Prepare conversations or preference pairs. The options are arguments of `prepare_chat` and
    fields of `ChatOptions`.
    """
    from firstlight.data.chat import ChatOptions, prepare_chat
    from firstlight.data.records import find_splits

    if note := find_splits(inputs, options["val_inputs"]).note:
        say(note)
    fields = {field.name for field in dataclasses.fields(ChatOptions)}
    of_records = ChatOptions(**{name: options.pop(name) for name in fields & options.keys()})
    return prepare_chat(inputs, *folders, options=of_records, progress=True, **options)


def _show_summary(out: Path, manifest: dict[str, Any]) -> None:
    from firstlight.data import records, sources
    from firstlight.data.cleaning import change_lines
    from firstlight.data.packing import chat_notes
    from firstlight.data.shards import REJECTED_NAME, UNREAD_NAME

    documents, chat = manifest["documents"], manifest.get("chat")
    for split, entry in manifest["splits"].items():
        part = "document" if manifest["split_by"] != "tail" else "cut document"
        if chat is not None:
            number, what = entry["documents"], "conversation"
            if manifest.get("pairs"):
                number, what = number // 2, "preference pair"
            show(
                f"{out}: {split}: {counted(number, what)}, "
                f"{entry['tokens']:,} tokens, {entry['learned']:,} of them to train on"
            )
            continue
        show(
            f"{out}: {split}: {counted(entry['documents'], part)}, {entry['tokens']:,} tokens, "
            f"{human_bytes(entry['text_bytes'])} of text, {counted(len(entry['shards']), 'shard')}"
        )
    for line in change_lines(manifest.get("cleaned", {}), total=documents["read"]):
        say(line)
    for line in chat_notes(out, manifest) if chat is not None else ():
        say(line)
    rejected = documents["rejected"] if chat is None else {}
    for reason, count in rejected.items():
        say(f"{count:,} of {documents['read']:,} documents rejected: {records.REASONS[reason]}")
    if rejected:
        with open(out / REJECTED_NAME, encoding="utf-8") as lines:
            for entry in map(json.loads, itertools.islice(lines, 5)):
                say(f"  {entry['file']}:{entry['line']}: {entry['detail']}")
        if sum(rejected.values()) > 5:
            say(f"  ... see {out / REJECTED_NAME} for all of them")
    if manifest["unread_files"]:
        count = sum(manifest["unread_files"].values())
        say(
            f"skipped {counted(count, 'file')} of an unsupported kind: "
            f"{sources.listed(manifest['unread_files'])}; listed in {out / UNREAD_NAME}"
        )
