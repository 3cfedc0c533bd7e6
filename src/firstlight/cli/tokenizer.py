"""The commands `firstlight tokenizer train`, `extend`, `encode` and `decode`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import as_is_option, out_option, text_key_option
from firstlight.cli.output import show, with_json
from firstlight.console import counted, human_bytes, say

if TYPE_CHECKING:
    from firstlight.data.cleaning import ChangeCounts
    from firstlight.data.records import Record
    from firstlight.tokenizer import Tokenizer


@click.group("tokenizer")
def tokenizer_group() -> None:
    """Train or extend a tokenizer, and encode and decode text."""


@tokenizer_group.command("train")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--vocab-size", type=int, required=True, help="Number of tokens, at least 257.")
@out_option
@text_key_option
@as_is_option
@with_json
def train_command(
    inputs: tuple[str, ...], vocab_size: int, out: Path, text_key: str, as_is: bool, as_json: bool
) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on a corpus, and write tokenizer.json to --out.

    INPUT is a file, folder or glob, the word `stdlib`, or hf:NAME[:CONFIG[:SPLIT]]. Files can be
    text or code with any file name extension or none, .jsonl, .ndjson, .csv or .tsv (all of these
    also compressed as .gz, .bz2, .xz or .zst), or .parquet.
    """
    from firstlight.data.cleaning import ChangeCounts, change_lines
    from firstlight.data.records import read_documents, with_words
    from firstlight.data.sources import find_sources
    from firstlight.files.atomic import new_folder, require_free
    from firstlight.tokenizer import train_tokenizer

    sources = find_sources(inputs, as_is=as_is)
    require_free(out, "choose another --out")
    counts = {"documents": 0, "rejected": 0, "text_bytes": 0}
    rejections: list[str] = []
    changes = ChangeCounts()
    records = with_words(read_documents(sources, text_key))
    texts = _count_texts(records, counts, rejections, changes)
    with new_folder(out) as folder:
        tokenizer = train_tokenizer(texts, vocab_size)
        tokenizer.save_pretrained(folder)
    for line in change_lines(changes.record(), changes.names()):
        say(line)
    if rejections:
        number = counted(counts["rejected"], "document")
        say(f"skipped {number} (firstlight prepare lists them all); first: {rejections[0]}")
    if tokenizer.vocab_size < vocab_size:
        say(f"the corpus yielded only {tokenizer.vocab_size} of {vocab_size} tokens")
    show(
        f"{out}: {tokenizer.vocab_size} tokens from {counted(counts['documents'], 'document')}, "
        f"{human_bytes(counts['text_bytes'])}"
    )
    return {
        "out": out,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.fingerprint,
        **counts,
    }


def _count_texts(
    records: Iterable[Record],
    counts: dict[str, int],
    rejections: list[str],
    changes: ChangeCounts,
) -> Iterator[str]:
    """Yield the text of each valid document, and count all documents.

    Args:
        records: documents.
        counts: counts to update in place. The keys are "documents" for the number of valid
            documents, "rejected" for the number of rejected documents, and "text_bytes".
        rejections: list to which the location of the first rejected document and the error in it
            are appended.
        changes: counts of the changes made to the documents. They are updated in place.

    Raises:
        InputError: there are no valid documents.
    """
    from firstlight.data.records import nothing_read
    from firstlight.errors import InputError

    reasons: Counter[str] = Counter()
    for record in records:
        if record.error is None:
            counts["documents"] += 1
            counts["text_bytes"] += len(record.value.encode("utf-8"))
            changes.add(record.origin, record.changes)
            yield record.value
        else:
            counts["rejected"] += 1
            reasons[record.error.reason] += 1
            rejections[:] = rejections or [f"{record.place}: {record.error}"]
    if not counts["documents"]:
        raise InputError(nothing_read(reasons, "".join(rejections)))


class _ManyTokens(click.Command):
    """A command whose option --add accepts several tokens. `--add A B` is equivalent to `--add A
    --add B`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        adding = False
        for word, following in zip_longest(args, args[1:]):
            if word == "--add" and (following is None or following.startswith("-")):
                raise click.UsageError(
                    "--add needs a token; write a token that begins with - as --add=-x"
                )
            if word.startswith("-"):
                adding = word.split("=")[0] == "--add"
            elif adding and spread[-1] != "--add":
                spread.append("--add")
            spread.append(word)
        return super().parse_args(ctx, spread)


@tokenizer_group.command("extend", cls=_ManyTokens)
@click.argument("source", type=click.Path(path_type=Path), required=False, metavar="DIR")
@click.option("--add", multiple=True, metavar="TOKEN...", help="New special tokens.")
@click.option(
    "--chat-template",
    metavar="NAME",
    help="Chat template: chatml, hermes, llama2, llama3, alpaca or a file.",
)
@out_option
@with_json
def extend_command(
    source: Path | None, add: tuple[str, ...], chat_template: str | None, out: Path, as_json: bool
) -> dict[str, Any]:
    """Add special tokens, a chat template or both to a tokenizer, and write it to --out.

    DIR is a tokenizer folder or file, a run, a model folder or a hub id. It must precede --add. New
    tokens get the ids after the last existing id, and existing ids do not change. If a built-in
    chat template requires additional tokens, they are added too.
    """
    from firstlight.checkpoint.selection import resolve_tokenizer
    from firstlight.files.atomic import new_folder, require_free
    from firstlight.tokenizer import Tokenizer

    if source is None:
        raise click.UsageError(
            "DIR is missing: put it before --add, because every word after --add is a token"
        )
    if not add and chat_template is None:
        raise click.UsageError("nothing to do: give --add TOKEN..., --chat-template or both")
    require_free(out, "choose another --out")
    place = resolve_tokenizer(source)
    before = Tokenizer.from_pretrained(place)
    template, needed = _chat_template(chat_template, before, add)
    after = before.extended([*add, *needed], template)
    if template is not None:
        _try_out(after)
    with new_folder(out) as folder:
        after.save_pretrained(folder)
    if needed:
        show(f"added the tokens that the chat template {chat_template} needs: {' '.join(needed)}")
    added = {token: after.special_tokens[token] for token in [*add, *needed]}
    show(f"{out}: {after.vocab_size} tokens, {len(added)} of them new")
    if (place / "config.json").is_file():
        say(
            "only the tokenizer was written: to extend the model, run `firstlight train "
            f"--init-from {source}` on data prepared with --tokenizer {out}"
        )
    return {
        "out": out,
        "vocab_size": after.vocab_size,
        "added": added,
        "chat_template": after.chat_template is not None,
        "tokenizer_sha256": after.fingerprint,
    }


_tokenizer_argument = click.argument("source", type=click.Path(path_type=Path), metavar="DIR")


@tokenizer_group.command("encode")
@_tokenizer_argument
@click.argument("text", required=False)
@click.option(
    "--special-tokens",
    is_flag=True,
    help="Encode names of special tokens in TEXT, such as <|endoftext|>, as special tokens.",
)
@with_json
def encode_command(
    source: Path, text: str | None, special_tokens: bool, as_json: bool
) -> dict[str, Any]:
    """Print the token ids of TEXT or, without TEXT, those of the text on stdin.

    DIR is a tokenizer folder or file, a run, a model folder or a hub id.
    """
    from firstlight.checkpoint.selection import resolve_tokenizer
    from firstlight.errors import InputError
    from firstlight.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(resolve_tokenizer(source))
    if text is None:
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not UTF-8: {error}") from error
    ids = tokenizer.encode(text, special_tokens=special_tokens)
    show(" ".join(map(str, ids)))
    return {"ids": ids, "text": text}


@tokenizer_group.command("decode")
@_tokenizer_argument
@click.argument("ids", nargs=-1, type=click.IntRange(min=0), metavar="ID...")
@click.option(
    "--special-tokens",
    is_flag=True,
    help="Write the names of special tokens instead of omitting them.",
)
@with_json
def decode_command(
    source: Path, ids: tuple[int, ...], special_tokens: bool, as_json: bool
) -> dict[str, Any]:
    """Print the text that the token ids ID... represent. Without ID, the token ids are read from
    stdin.

    DIR is a tokenizer folder or file, a run, a model folder or a hub id.
    """
    from firstlight.checkpoint.selection import resolve_tokenizer
    from firstlight.errors import InputError
    from firstlight.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(resolve_tokenizer(source))
    words = list(map(str, ids)) or sys.stdin.read().replace(",", " ").strip("[] \n").split()
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) < tokenizer.vocab_size):
            raise InputError(
                f"'{word}' is not a token id of {source}: its ids are whole numbers from 0 to "
                f"{tokenizer.vocab_size - 1}"
            )
    found = [int(word) for word in words]
    text = tokenizer.decode(found, skip_special_tokens=not special_tokens)
    show(text)
    return {"ids": found, "text": text}


def _try_out(tokenizer: Tokenizer) -> None:
    """Render a simple conversation with the tokenizer's chat template, and print the result.

    Many errors in a template are not noticed until the template is rendered.

    Raises:
        TokenizerError: the template is invalid, or the rendered text is empty.
    """
    from firstlight.errors import InputError, TokenizerError

    conversation = [
        {"role": "user", "content": "When does the sun rise?"},
        {"role": "assistant", "content": "At six."},
    ]
    try:
        text = tokenizer.apply_chat_template(conversation)
    except InputError as error:  # The template may not support this particular conversation.
        say(f"warning: the chat template rejects an ordinary conversation: {error}")
        return
    if not text.strip():
        raise TokenizerError("the chat template renders a conversation as an empty text")
    show("the chat template is set; it renders a question and its answer as:")
    show(f"  {text!r}")


def _chat_template(
    name: str | None, tokenizer: Tokenizer, add: tuple[str, ...]
) -> tuple[str | None, list[str]]:
    """Return the template specified by --chat-template, and the tokens that must be added for this
    template.

    Args:
        name: name of a built-in template, or path of a file. None for no template.
        tokenizer: tokenizer to extend.
        add: tokens specified by --add.

    Raises:
        InputError: the template does not exist, or the file can't be read.
    """
    if name is None:
        return None, []
    from firstlight.errors import InputError, describe_os_error
    from firstlight.tokenizer.chat_template import CHAT_TEMPLATES, required_tokens

    if name in CHAT_TEMPLATES:
        there = {*tokenizer.special_tokens, *add}
        return CHAT_TEMPLATES[name], [t for t in required_tokens(name) if t not in there]
    try:
        return Path(name).read_text(encoding="utf-8"), []
    except FileNotFoundError:
        raise InputError(
            f"--chat-template {name} is neither {', '.join(CHAT_TEMPLATES)} nor a file"
        ) from None
    except OSError as error:
        raise InputError(
            f"--chat-template {name} can't be read: {describe_os_error(error)}"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"--chat-template {name} is not UTF-8: {error}") from error
