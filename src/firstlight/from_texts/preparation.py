"""Prepare the text for a run as token shards. Later calls with the same text reuse these shards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from firstlight.console import time_text
from firstlight.files.atomic import link_files, new_folder
from firstlight.from_texts.ngrams import xz_bits_per_byte
from firstlight.from_texts.run_folder import DATA_FOLDER, RunCall, read_state
from firstlight.from_texts.scan import Scan
from firstlight.planner.advise import defaults

if TYPE_CHECKING:
    from firstlight.tokenizer import Tokenizer

#: Maximum number of bytes of text on which a tokenizer is trained. More text would hardly change
#: the tokenizer.
_TOKENIZER_BYTES = 24 << 20
#: The amount of prepared text is at least this multiple of the text that the run is expected to
#: read.
_SPARE = 1.5
#: Maximum number of bytes of held-out text that are compressed with xz for comparison with the
#: model.
_XZ_BYTES = 8 << 20


@dataclass(frozen=True)
class Preparation:
    """The text to prepare for a run.

    Attributes:
        scan: result of scanning the text.
        text_key: field that holds the text in JSONL lines, tables and datasets.
        needed_bytes: bytes of text that the run is expected to read.
        tokenizer_key: hash or vocabulary size of the tokenizer. It is part of `key`.
        tokenizer: function that trains or loads the tokenizer.
    """

    scan: Scan
    text_key: str
    needed_bytes: float
    tokenizer_key: str
    tokenizer: Callable[[], Tokenizer]

    @property
    def limit(self) -> int:
        """Maximum number of bytes of text to prepare. It is `defaults.PREPARED_BYTES` multiplied by
        a power of two, so that runs with slightly different budgets use the same shards."""
        parts = _SPARE * self.needed_bytes / defaults.PREPARED_BYTES
        return defaults.PREPARED_BYTES << max(math.ceil(math.log2(max(parts, 1.0))), 0)

    @property
    def key(self) -> str:
        """Key that identifies the prepared data. Data with the same key has the same shards."""
        facts = self.scan.facts
        # The size of a dataset on the hub is unknown.
        known = all(source.dataset is None for source in self.scan.sources)
        whole = known and facts.total_bytes <= self.limit
        return f"{facts.content_key}-{self.tokenizer_key}-{0 if whole else self.limit}"


def prepared_texts(texts: Preparation, call: RunCall) -> Path:
    """Return the run's data folder, which contains the tokenizer and shards. If an earlier call has
    already prepared data with the same key, link its files. Otherwise, prepare the text. If another
    call is currently preparing the same text, wait until it has finished.

    Raises:
        InputError, StorageError: see `prepare`.
    """
    from firstlight.files.cache import held

    for folder in (call.folder, *sorted(call.folder.parent.glob("*"))):
        state = call.state if folder == call.folder else read_state(folder)
        if state.get("data_key") != texts.key:
            continue
        with held(folder / f".{DATA_FOLDER}.lock", "preparing the same texts", call.progress):
            data, state = folder / DATA_FOLDER, read_state(folder)
            # If an earlier call was killed, the state may contain that call's `data_key` even
            # though the folder still contains older shards.
            is_complete = state.get("prepared_key") == texts.key
            if is_complete and (data / "manifest.json").is_file():
                call.tell(f"reusing the tokenizer and shards of {data}")
                call.remember(data_key=texts.key, prepared_key=None)
                # The files are linked, so that this run keeps its data even if the other run is
                # deleted.
                own = call.folder / DATA_FOLDER
                if folder != call.folder:
                    with new_folder(own, replace=True, synced=True) as linked:
                        link_files(data, linked)
                call.remember(
                    data=str(own),
                    xz=state.get("xz"),
                    prepared_key=texts.key,
                    has_linked_data=folder != call.folder,
                )
                return own
    with held(call.folder / f".{DATA_FOLDER}.lock", "preparing the same texts", call.progress):
        begun = time.time()
        # `data_key` makes other calls wait for this call, and `prepared_key` marks complete shards.
        call.remember(data_key=texts.key, prepared_key=None)
        data = prepare_corpus(texts, call)
        call.remember(prepared_key=texts.key)
        call.preparing_seconds = time.time() - begun
        return data


def prepare_corpus(texts: Preparation, call: RunCall) -> Path:
    """Prepare the text in the run folder and replace any existing shards."""
    from firstlight.data.prepare import prepare

    data = call.folder / DATA_FOLDER
    tokenizer, split = texts.tokenizer(), texts.scan.split
    begun = time.time()
    manifest = prepare(
        texts.scan.limited(texts.limit),
        tokenizer,
        data,
        val_fraction=split.fraction,
        split_of=split.splitter(),
        text_key=texts.text_key,
        overwrite=True,
        progress=call.progress,
        # The scan knows the size even if the files are compressed.
        expected_bytes=min(texts.scan.facts.total_bytes, texts.limit),
    )
    tokens = {name: entry["tokens"] for name, entry in manifest["splits"].items()}
    call.tell(
        f"shards: {tokens.get('train', 0):,} training tokens, {tokens.get('val', 0):,} held-out "
        f"tokens ({time_text(time.time() - begun)})"
    )
    call.remember(data=str(data), xz=_xz_bits(data, tokenizer))
    return data


def train_tokenizer_on(
    scan: Scan, text_key: str, vocab_size: int, tell: Callable[[str], None]
) -> Tokenizer:
    """Train a tokenizer on the text without the held-out part.

    If the tokenizer were also trained on the held-out text, it would have tokens for the names and
    rare words in the held-out text. It would then encode the held-out text with fewer tokens than
    other text.

    Args:
        scan: result of scanning the text.
        text_key: field that holds the text in JSONL lines, tables and datasets.
        vocab_size: number of tokens.
        tell: callback for messages to the user.
    """
    from firstlight.data.prepare import cut_tail
    from firstlight.data.records import read_documents
    from firstlight.tokenizer import train_tokenizer

    begun = time.time()
    split_of = scan.split.splitter()
    records = read_documents(scan.limited(_TOKENIZER_BYTES), text_key)
    fraction = Fraction(str(scan.split.fraction))

    def kept() -> Iterator[str]:
        for text in (one.value for one in records if one.error is None):
            split = split_of(text)
            if split == "train":
                yield text
            elif split == "tail":
                yield cut_tail(text, fraction)[0]

    tokenizer = train_tokenizer(kept(), vocab_size)
    tell(f"tokenizer: {tokenizer.vocab_size:,} tokens ({time_text(time.time() - begun)})")
    return tokenizer


def fitting_prompts(prompts: Sequence[str], tokenizer: Tokenizer, most: int) -> list[str]:
    """Shorten prompts to at most `most` tokens each, and drop empty prompts. Return [""] if no
    prompts are left."""
    found = []
    for prompt in prompts:
        while len(tokenizer.encode_prompt(prompt)) > most:
            prompt = prompt[: len(prompt) // 2]
        found.append(prompt)
    return [one for one in found if one] or [""]


def held_out_gzip(data: Path) -> float | None:
    """Return the size of the held-out text in a folder of shards after compression with gzip -9, in
    bits per byte. Return None if the size is unknown."""
    from firstlight.data.shards import read_manifest

    held = read_manifest(data)["splits"].get("val", {})
    if "gzip_bytes" not in held:
        return None
    return float(8 * held["gzip_bytes"] / max(held["text_bytes"], 1))


def _xz_bits(data: Path, tokenizer: Tokenizer) -> float | None:
    """Return the size of the held-out text after compression with xz, in bits per byte. Return None
    if there is no held-out text."""
    from firstlight.data.corpus import TokenDataset
    from firstlight.data.shards import read_manifest

    if "val" not in read_manifest(data)["splits"]:
        return None
    held = TokenDataset(data, "val")
    text = tokenizer.decode(held[0 : held.num_tokens].tolist()).encode("utf-8")[:_XZ_BYTES]
    return xz_bits_per_byte(text)
