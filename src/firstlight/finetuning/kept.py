"""Prepare the text that a fine-tuned model should not forget.

The user names this text with --keep. Otherwise, it is a control set that needs no network: prose
and code that ship with Python, and texts that the model itself wrote before it was trained. The
bits per byte of a model's own texts measure directly how far training moves it away: their rise is
an estimate of the KL divergence from the initial model.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from firstlight.console import counted, human_bytes
from firstlight.data.corpus import TokenDataset
from firstlight.data.records import digest_of
from firstlight.data.shards import MANIFEST_NAME, read_manifest
from firstlight.data.sources import (
    STANDARD_LIBRARY,
    DataSource,
    distinct_inputs,
    find_sources,
    limited_sources,
)
from firstlight.errors import ConfigError, InputError, TokenizerError
from firstlight.files.atomic import MAX_JSON_BYTES, make_folder, read_file, sha256_of, write_file
from firstlight.from_texts.run_folder import CONTROL_NAME, DATA_FOLDER, KEPT_FOLDER, RECIPE_NAME
from firstlight.planner.advise import defaults
from firstlight.recipe.load import parse_yaml

if TYPE_CHECKING:
    from firstlight.from_texts.request import Request
    from firstlight.from_texts.run_folder import RunCall
    from firstlight.tokenizer import Tokenizer

#: Number of UTF-8 bytes of prose and of code in the control set, and maximum bytes of a document.
_PYTHON_BYTES, _DOCUMENT_BYTES = 240_000, 40_000
#: Number of texts that the model writes, and maximum number of tokens in each.
_OWN_TEXTS, _OWN_TOKENS = 32, 128
#: One in this number of Python's documents is held out, and one in two of the model's own texts.
_HELD_OUT = 8
#: Message for kept text that is the new text.
SAME_TEXT = "--keep {} is the new text: keep text that the model already knows, or omit --keep"
#: Number of held-out tokens below which the kept text is refused, and below which the user is
#: warned.
_LEAST_TOKENS, _FEW_TOKENS = 50, 1000


class KeptText:
    """The text that a fine-tuned model should not forget.

    Args:
        request: the user's request. Its kept text is files, folders, a prepared corpus or a run,
            which stands for the data of the run; empty for the control set.
        model: folder of the initial model.
        tokenizer: tokenizer of the initial model.

    Raises:
        InputError: a file can't be found, or a prepared corpus holds out too little text.
        DataError: a prepared corpus is not text, or has no training split.
        ConfigError: the files are those of the new text, or a prepared corpus was prepared with a
            different tokenizer, or is one of several inputs.
    """

    def __init__(self, request: Request, model: Path, tokenizer: Tokenizer) -> None:
        keep = request.keep
        self._request = request
        self._model, self._tokenizer = model, tokenizer
        self._prepared = next(filter(None, map(_prepared_folder, keep)), None)
        self._sources: list[DataSource] = []
        #: Text that changes with the kept text; "" for the control set.
        self._key = ""
        if self._prepared is not None:
            if len(keep) > 1:
                raise ConfigError(
                    f"--keep {self._prepared} is a prepared corpus: use it as the only --keep"
                )
            manifest = read_manifest(self._prepared)
            if manifest["tokenizer_sha256"] != tokenizer.fingerprint:
                raise ConfigError(
                    f"--keep {self._prepared} was prepared with a different tokenizer than the "
                    "model's: name the text files instead"
                )
            _require_tokens(manifest)
            for split in ("train", "val"):  # Raises an error if it is not such a split of text.
                TokenDataset(self._prepared, split, verify=False)
            self._key = json.dumps(manifest, sort_keys=True)
        elif keep:
            try:
                self._sources = find_sources(keep, as_is=request.as_is)
            except InputError as error:
                raise InputError(f"--keep {shlex.join(keep)}: {error}") from error
            if _same_content(self._sources, request):
                raise ConfigError(SAME_TEXT.format(shlex.join(keep)))
            paths = [one.path for one in self._sources if one.path is not None]
            stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
            self._key = json.dumps([list(keep), stats])

    def prepare(self, call: RunCall) -> Path:
        """Return the folder of the prepared kept text. In the run folder, it is prepared only once.

        Raises:
            InputError: the kept text is too short; see also `data.prepare.prepare`.
            StorageError, TokenizerError: see `data.prepare.prepare`.
        """
        from firstlight.data.prepare import prepare

        if self._prepared is not None:
            return self._prepared
        folder = call.folder / KEPT_FOLDER
        key = hashlib.sha256(f"{self._key} {self._tokenizer.fingerprint}".encode()).hexdigest()
        if call.state.get("kept_key") == key and (folder / MANIFEST_NAME).is_file():
            return folder
        if self._sources:
            sources = limited_sources(self._sources, defaults.PREPARED_BYTES)
            try:
                prepare(
                    sources,
                    self._tokenizer,
                    folder,
                    text_key=self._request.text_key,
                    overwrite=True,
                    progress=call.progress,
                )
            except (InputError, TokenizerError) as error:
                place = shlex.join(self._request.keep)
                raise type(error)(f"--keep {place}: {error}") from error
        else:
            self._prepare_control_set(folder, call)
        manifest = read_manifest(folder)
        size = sum(split["text_bytes"] for split in manifest["splits"].values())
        held = _held_out_tokens(manifest)
        call.tell(f"kept text: {human_bytes(size)}, {counted(held, 'token')} held out")
        if self._sources:
            _require_tokens(manifest)
        if held < _FEW_TOKENS:
            call.tell("the kept text is short, so its bits per byte are not exact: keep more text")
        call.remember(kept_key=key)
        return folder

    def _prepare_control_set(self, folder: Path, call: RunCall) -> None:
        from firstlight.data.prepare import prepare

        call.tell(
            "kept text: none given with --keep, so Python's documentation and code and texts that "
            "the model writes now are the control set"
        )
        device = self._request.fixed.get("run.device") or "auto"
        own = list(own_texts(self._model, device))
        is_own = {digest_of(text) for text in own}
        is_new = STANDARD_LIBRARY in distinct_inputs(self._request.inputs)
        python = [*_prose()] if is_new else [*_prose(), *_code()]
        # Some of Python's files are the same.
        texts = dict.fromkeys([*filter(self._encodes, python), *own])

        def split_of(text: str) -> Literal["train", "val"]:
            digest = digest_of(text)
            one_in = 2 if digest in is_own else _HELD_OUT
            return "train" if digest[0] % one_in else "val"

        make_folder(call.folder)
        path = call.folder / CONTROL_NAME
        write_file(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
        source = DataSource(name=str(path), path=path, as_is=True)
        prepare([source], self._tokenizer, folder, split_of=split_of, overwrite=True)

    def _encodes(self, text: str) -> bool:
        """Return False if the tokenizer has no tokens for a character of the text."""
        try:
            self._tokenizer.encode(text)
        except TokenizerError:
            return False
        return True


def _held_out_tokens(manifest: Mapping[str, Any]) -> int:
    return int(manifest["splits"].get("val", {"tokens": 0})["tokens"])


def _require_tokens(manifest: Mapping[str, Any]) -> None:
    if (held := _held_out_tokens(manifest)) < _LEAST_TOKENS:
        raise InputError(
            f"only {counted(held, 'token')} of the kept text can be held out, too few to measure "
            "what is lost: add text to --keep"
        )


def _same_content(sources: Sequence[DataSource], request: Request) -> bool:
    """Return True if the kept text and the new text have the same files, under any names."""
    try:
        new = find_sources(request.inputs, as_is=request.as_is)
    except InputError:  # Conversations can be in files that are not text files.
        return False
    # Few files have the same sizes and must be read.
    for read in (lambda path: str(path.stat().st_size), sha256_of):
        kept_facts, new_facts = (
            sorted(one.name if one.path is None else read(one.path) for one in several)
            for several in (sources, new)
        )
        if kept_facts != new_facts:
            return False
    return True


def _prepared_folder(name: str) -> Path | None:
    """Return the prepared corpus that an input names: the folder itself, or the data of a run.

    Raises:
        ConfigError: the run was not trained on a prepared corpus.
    """
    place = Path(name).expanduser()
    for folder in (place, place / DATA_FOLDER):
        if _is_corpus(folder):
            return folder
    if not (place / RECIPE_NAME).is_file():
        return None
    data = parse_yaml((place / RECIPE_NAME).read_text(encoding="utf-8")).get("data", {}).get("dir")
    if data is None or not _is_corpus(Path(data)):
        raise ConfigError(
            f"--keep {name} is a run whose data is not a prepared corpus on this machine: name the "
            "text files instead"
        )
    return Path(data)


def _is_corpus(folder: Path) -> bool:
    """Return True for a prepared corpus. Folders of text can contain another manifest.json."""
    path = folder / MANIFEST_NAME
    return path.is_file() and b'"tokenizer_sha256"' in read_file(path, MAX_JSON_BYTES)


def _prose() -> Iterator[str]:
    """Yield sections of Python's language reference, which `help()` shows."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # Some Linux distributions install it separately.
        return
    yield from _spread([text for text in topics.values() if len(text) <= _DOCUMENT_BYTES])


def _code() -> Iterator[str]:
    """Yield files of Python's standard library."""
    try:
        found = find_sources([STANDARD_LIBRARY])
    except InputError:
        return
    paths = [one.path for one in found if one.path is not None]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    yield from _spread([text for text in texts if 0 < len(text) <= _DOCUMENT_BYTES])


def _spread(texts: Sequence[str]) -> list[str]:
    """Return about `_PYTHON_BYTES` of the texts, evenly spaced."""
    every = max(round(sum(map(len, texts)) / _PYTHON_BYTES), 1)
    return list(texts[::every])


def own_texts(model: Path, device: str = "auto") -> Iterator[str]:
    """Yield texts that a model writes without a prompt, at temperature 1.

    Args:
        model: folder of the model.
        device: device of the model.

    Raises:
        ModelError, CheckpointError: the model can't be used.
    """
    from firstlight.generation.batch import BatchDecoder
    from firstlight.generation.config import SamplingConfig
    from firstlight.generation.engine import continuation, load, pieces_of_many, tokenizer_of
    from firstlight.hardware.device import find_hardware

    loaded = load(model, find_hardware(device).device)
    context = loaded.model.config.max_position_embeddings
    ids = tokenizer_of(loaded).encode_prompt("")
    tokens = min(_OWN_TOKENS, context - len(ids))
    decoder = BatchDecoder(loaded.model, _OWN_TEXTS, len(ids) + tokens)
    configs = [SamplingConfig(tokens, temperature=1.0, top_k=0, seed=n) for n in range(_OWN_TEXTS)]
    pieces: list[list[str]] = [[] for _ in configs]
    texts = [continuation(loaded, ids, config) for config in configs]
    for index, piece in pieces_of_many(texts, decoder):
        pieces[index].append(piece)
    yield from filter(None, map("".join, pieces))
