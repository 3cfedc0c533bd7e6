"""Read tokenizer files of all supported formats. Each reader returns `TokenizerParts`.

The format of a file is detected from its content, because names such as `tokenizer.model` are used
for more than one format.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from firstlight.errors import TokenizerError, describe_os_error
from firstlight.files.atomic import plain_lines
from firstlight.files.limits import LimitedProcess, LimitExceededError
from firstlight.tokenizer.parts import (
    TokenizerParts,
    add_special_tokens,
    byte_level_split,
    library_errors,
    prepend_bos,
    read_chat_template,
    read_config,
    read_tokenizer,
    require_few_tokens,
    require_short,
    token_text,
)

END_OF_TEXT = "<|endoftext|>"

#: Split pattern of GPT-2 (openai/gpt-2 `encoder.py`). It matches contractions and runs of
#: whitespace. It also matches words, numbers and punctuation together with the space before them.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

#: Split pattern of Llama 3 (meta-llama/llama3 `llama/tokenizer.py`).
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Split pattern of Qwen2: like that of Llama 3, but numbers are split into single digits.
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

#: Split pattern of Qwen3.5: like that of Qwen2, but combining marks belong to words.
QWEN35_PATTERN = QWEN2_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)

#: Split patterns, keyed by name.
SPLIT_PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "qwen3_5": QWEN35_PATTERN,
}

_LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)),
)
#: Size of tiktoken's r50k_base, which is GPT-2's vocabulary.
_NUM_GPT2_RANKS = 50_256
#: Limits of the child process in which an unknown tokenizer.json is tested: CPU time in seconds and
#: memory in bytes. Each limit consists of a constant and a part that is proportional to the file
#: size. For example, XLM-R's file (9 MB, with 250,000 tokens that are stored as a tree) takes 32
#: bytes of memory per byte of the file.
_TRIAL_SECONDS, _BYTES_PER_SECOND = 1.0, 4_000_000
_TRIAL_MEMORY, _MEMORY_PER_BYTE = 48 << 20, 40
#: Limits on the output of a tokenizer, in tokens or characters. `_MOST_GROWTH` is the maximum
#: number for one input character, because some tokenizers replace a newline with "<|newline|>".
#: `_MOST_PREPENDED` is the maximum number that a tokenizer can add before and after a string.
_MOST_GROWTH, _MOST_PREPENDED = 16, 1000
#: Maximum accepted token id. It is larger than the ids in any real vocabulary.
_HIGHEST_ID = 1 << 26
#: Maximum size of the list of added tokens in a tokenizer that is considered safe, in characters of
#: JSON.
_MOST_KNOWN_CHARS = 500_000

#: Names of other vocabularies in tiktoken format, keyed by number of ranks. They are rejected,
#: because they would otherwise be read with Llama 3's split pattern without any warning.
_OTHER_RANKS = {50_280: "p50k_base", 100_256: "cl100k_base", 151_643: "Qwen", 199_998: "o200k_base"}

_USUAL_NAMES = ("tokenizer.json", "vocab.json", "encoder.json", "tokenizer.model")
#: Suffixes of tiktoken and sentencepiece files whose names are not standard.
_USUAL_ENDINGS = (".tiktoken", ".model")
#: Name of nanochat's tokenizer file, which is only recognised to give advice.
_PICKLED_NAME = "tokenizer.pkl"
PICKLED_TOKENIZER = (
    "nanochat's tokenizer.pkl is a pickle, which could run code, and is not read: if you trust it, "
    "run `pip install tiktoken blobfile transformers`, then "
    """`python -c "import pickle; from transformers.integrations.tiktoken import """
    """convert_tiktoken_to_fast as f; f(pickle.load(open('tokenizer.pkl', 'rb')), 'tok')"`, """
    "and pass the folder tok with --tokenizer"
)

#: Mapping from the two common names of GPT-2's vocabulary file to the names of the corresponding
#: merges files.
_MERGES_NAMES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}


def find_tokenizer_file(folder: Path) -> Path:
    """Return the tokenizer file in a folder. If no file has a standard name, return the file with a
    tokenizer suffix, provided that there is only one such file.

    Raises:
        TokenizerError: the folder contains no tokenizer file or several of them, or it can't be
            read.
    """
    try:
        files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError as error:
        reason = describe_os_error(error)
        raise TokenizerError(f"tokenizer {folder} can't be read: {reason}") from error
    usual = next((name for name in _USUAL_NAMES if name in files), None)
    if usual is not None:
        return files[usual]
    # Ignore hidden files, because macOS adds a hidden file for each file in an archive.
    found = [n for n in files if n.endswith(_USUAL_ENDINGS) and not n.startswith(".")]
    if len(found) > 1:
        names = ", ".join(found)
        raise TokenizerError(
            f"{folder} contains several tokenizers ({names}): specify one of the files"
        )
    if not found and _PICKLED_NAME not in files:
        raise TokenizerError(
            f"no tokenizer in {folder}: expected tokenizer.json, vocab.json + merges.txt, "
            "or tokenizer.model (train one with `firstlight tokenizer train`)"
        )
    return files[found[0] if found else _PICKLED_NAME]


def read_tokenizer_file(path: Path) -> TokenizerParts:
    """Read a tokenizer.json, a vocab.json with its merges.txt, a tiktoken rank file or a
    sentencepiece model.

    Raises:
        TokenizerError: the file has an unknown format, is damaged, or uses features for which the
            token ids would differ from those of the original library.
    """
    if path.name == _PICKLED_NAME:
        raise TokenizerError(f"{path} can't be read: {PICKLED_TOKENIZER}")
    content = read_tokenizer(path)
    if content.lstrip()[:1] == b"{":
        parts = _from_json(path, content)
    elif _looks_like_tiktoken(content):
        parts = _from_tiktoken_ranks(path, content)
    elif path.name in _MERGES_NAMES.values() or content.startswith(b"#version"):
        vocabulary_path = _other_of_pair(path, {m: v for v, m in _MERGES_NAMES.items()})
        if vocabulary_path is None:
            raise TokenizerError(f"{path} needs vocab.json in the same folder")
        return read_tokenizer_file(vocabulary_path)
    else:
        parts = _from_sentencepiece(path, content)
    return dataclasses.replace(parts, config=parts.config | read_chat_template(path.parent))


def _from_json(path: Path, content: bytes) -> TokenizerParts:
    """Read a `tokenizer.json`, or GPT-2's `vocab.json` with `merges.txt` in the same folder."""
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer {path} is not valid JSON: {error}") from error
    # In GPT-2's vocab.json, the key "model" is an ordinary token with an integer id.
    if not isinstance(state.get("model"), dict):
        return _from_vocab_and_merges(path, state)
    _require_usable(path, content, state)
    with library_errors(f"tokenizer {path} can't be loaded"):
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        leading = _leading_token(backend)
    config = read_config(path.parent)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    # The library assigns a different id to an added token if the id in the file would leave a gap.
    ids = [*vocabulary.values(), *(token["id"] for token in state.get("added_tokens") or [])]
    if (highest := max(ids, default=0)) > _HIGHEST_ID:
        raise TokenizerError(
            f"tokenizer {path} has a token with id {highest:,}, which is larger than in any real "
            "tokenizer"
        )
    bos = token_text(config.pop("bos_token", None)) or leading
    eos = token_text(config.pop("eos_token", None))
    if eos is None:
        usual = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
        eos = next((token for token in usual if token in vocabulary), None)
    add_bos = config.pop("add_bos_token", None)
    if add_bos is None:
        add_bos = leading is not None and leading == bos
    return TokenizerParts(
        backend, bos_token=bos, eos_token=eos, add_bos=bool(add_bos), config=config
    )


def _leading_token(backend: tokenizers.Tokenizer) -> str | None:
    """Return the special token that the post-processor adds before any text, or None."""
    backend.no_truncation()
    backend.no_padding()
    # Encode one letter, because the first token for an empty string could be a token that is added
    # at the end.
    encoding = backend.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    return encoding.tokens[0] if mask and mask[0] and not all(mask) else None


def _from_vocab_and_merges(path: Path, vocabulary: dict[str, int]) -> TokenizerParts:
    """Read GPT-2's pair of files (openai/gpt-2 `encoder.json`, `vocab.bpe`)."""
    require_few_tokens(path, len(vocabulary))
    merges_path = _other_of_pair(path, _MERGES_NAMES)
    if merges_path is None:
        raise TokenizerError(f"{path} needs merges.txt in the same folder")
    try:
        lines = plain_lines(read_tokenizer(merges_path).decode("utf-8")).split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{merges_path} is not UTF-8: {error}") from error
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise TokenizerError(f"{merges_path} has a line that does not consist of two tokens")
    try:
        model = models.BPE(
            vocab=vocabulary, merges=cast(list[tuple[str, str]], list(map(tuple, pairs)))
        )
    except Exception as error:
        raise TokenizerError(f"{path} and {merges_path} don't belong together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocabulary:
        add_special_tokens(backend, [END_OF_TEXT])
    eos = END_OF_TEXT if END_OF_TEXT in vocabulary else None
    return TokenizerParts(backend, bos_token=eos, eos_token=eos)


def _other_of_pair(path: Path, names: dict[str, str]) -> Path | None:
    """Return the file that forms a pair with `path` and is in the same folder, or None.

    Args:
        path: one file of the pair.
        names: mapping from the name of one file of a pair to the name of the other file. The entry
            for `path` is tried first.
    """
    for name in dict.fromkeys([names.get(path.name, ""), *names.values()]):
        if name and path.with_name(name).is_file():
            return path.with_name(name)
    return None


def _looks_like_tiktoken(content: bytes) -> bool:
    """Return True if the first line is `BASE64 RANK`, as in tiktoken's rank files."""
    parts = content[:4096].split(b"\n", 1)[0].split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        base64.b64decode(parts[0], validate=True)
    except binascii.Error:
        return False
    return True


def _from_tiktoken_ranks(path: Path, content: bytes) -> TokenizerParts:
    """Read a tiktoken rank file for GPT-2, or for a tokenizer with Llama 3's split pattern and
    special tokens.

    The file contains neither the split pattern nor the special tokens, so known vocabularies are
    recognised by their number of ranks. tiktoken repeatedly joins the adjacent pair of tokens whose
    joined bytes have the lowest rank. BPE merges produce the same ids if they contain all possible
    ways to split each token into two other tokens, ordered by the rank of the token that is split.
    """
    require_few_tokens(path, content.count(b"\n"))
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(f"tokenizer {path} is a damaged tiktoken file: {error}") from error
    if len(ranks) in _OTHER_RANKS:
        raise TokenizerError(
            f"tokenizer {path} contains the ranks of {_OTHER_RANKS[len(ranks)]}, whose split "
            "pattern is not supported: convert it to tokenizer.json with transformers"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"tokenizer {path} is a damaged tiktoken file: a rank is missing")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"tokenizer {path} is a damaged tiktoken file: a byte has no token")
    require_short(path, ranks)
    characters = byte_characters()
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        halves.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[a], text[b]) for a, b in halves]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    # Set `ignore_merges`, because tiktoken looks up the entire pre-token in the vocabulary before
    # it applies merges.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.decoder = decoders.ByteLevel()
    if len(ranks) == _NUM_GPT2_RANKS:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        add_special_tokens(backend, [END_OF_TEXT])
        return TokenizerParts(backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    backend.pre_tokenizer = byte_level_split(LLAMA3_PATTERN)
    add_special_tokens(backend, _LLAMA3_SPECIAL_TOKENS)
    bos, eos = _LLAMA3_SPECIAL_TOKENS[:2]
    prepend_bos(backend, bos)
    return TokenizerParts(backend, bos_token=bos, eos_token=eos, add_bos=True)


def byte_characters() -> list[str]:
    """Return the printable character that represents each byte in byte-level BPE files
    (openai/gpt-2 `encoder.py`).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


# sentencepiece
#
# Only a few fields of a sentencepiece model are needed (google/sentencepiece
# `sentencepiece_model.proto`). These fields are read from protobuf's wire format by field number,
# without the protobuf package.

#: Maximum number of fields in a model and in a piece. A model has one field per piece (the largest
#: models have 262,144 pieces), and a piece has three fields.
_MOST_FIELDS, _MOST_PIECE_FIELDS = 600_000, 20


def _sentencepiece_pieces(content: bytes) -> Iterator[tuple[str, float, int]]:
    """Yield (text, score, type) for each piece of a sentencepiece `ModelProto`.

    Field 1 of the message is a piece. The fields of a piece are 1 = text, 2 = score and 3 = type.
    The types are 1 = normal, 2 = unknown, 3 = control, 4 = user-defined, 5 = unused and 6 = byte.

    Raises:
        ValueError, IndexError: the bytes are not a `ModelProto`.
    """
    for field, value in _protobuf_fields(content):
        if field == 1 and isinstance(value, bytes):
            entry = dict(_protobuf_fields(value, _MOST_PIECE_FIELDS))
            text = entry.get(1)
            score = entry.get(2, b"\0\0\0\0")
            kind = entry.get(3, 1)
            is_score = isinstance(score, bytes) and len(score) == 4
            if not isinstance(text, bytes) or not is_score or kind not in range(7):
                raise ValueError("not a sentencepiece entry")
            yield text.decode("utf-8"), struct.unpack("<f", cast(bytes, score))[0], cast(int, kind)


def _unsupported_features(content: bytes) -> list[str]:
    """Return the features of a `ModelProto` that are not supported because they would make the
    token ids differ from those of sentencepiece.

    Field 2 of the message is the trainer's specification. Its field 3 is the model type (1 =
    unigram, 2 = BPE), and its field 24 specifies whether whitespace is treated as a suffix of
    words. Field 3 of the message is the normalizer's specification. Its field 2 is a character map,
    its field 3 specifies whether a space is added before the text, and its field 4 specifies
    whether repeated spaces are collapsed. If a field is missing, sentencepiece's default value is
    used.

    Raises:
        ValueError, IndexError: the bytes are not a `ModelProto`.
    """
    parts = dict(_protobuf_fields(content))
    trainer, normalizer = (
        dict(_protobuf_fields(part)) if isinstance(part, bytes) else {}
        for part in (parts.get(2), parts.get(3))
    )
    checks = {
        "a model type other than BPE": trainer.get(3, 1) != 2,
        "white space at the end of words": trainer.get(24, 0) != 0,
        "a character map": normalizer.get(2, b"") != b"",
        "no space before the text": normalizer.get(3, 1) != 1,
        "merging of repeated spaces": normalizer.get(4, 1) != 0,
    }
    return [feature for feature, asked in checks.items() if asked]


def _protobuf_fields(content: bytes, most: int = _MOST_FIELDS) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) for each field of a protobuf message.

    Args:
        content: the message.
        most: maximum number of fields.

    Raises:
        ValueError, IndexError: the bytes are not a valid message, or it has more than `most`
            fields.
    """
    position = count = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("varint too long")

    while position < len(content):
        count += 1
        if count > most:
            raise ValueError("too many fields")
        key = varint()
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            yield field, varint()
            continue
        sizes = {1: 8, 5: 4}
        size = varint() if wire_type == 2 else sizes.get(wire_type)
        if size is None or position + size > len(content):
            raise ValueError("not a protobuf message")
        yield field, content[position : position + size]
        position += size


def _from_sentencepiece(path: Path, content: bytes) -> TokenizerParts:
    """Read a sentencepiece BPE model with byte fallback, such as Llama 2's `tokenizer.model`.

    Args:
        path: path of the file, for messages.
        content: content of the file.

    Raises:
        TokenizerError: the file is not such a model, or it has a feature for which the token ids
            would differ from those of sentencepiece.
    """
    try:
        pieces = list(_sentencepiece_pieces(content))
        unsupported = _unsupported_features(content)
    except (IndexError, ValueError) as error:
        raise TokenizerError(
            f"tokenizer {path} is neither tokenizer.json, vocab.json + merges.txt, "
            "a tiktoken rank file nor a sentencepiece model"
        ) from error
    vocabulary = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    names = {kind: [p for p, _, k in pieces if k == kind] for kind in (1, 2, 3, 6)}
    if not names[1] or not names[2] or len(names[6]) != 256 or len(vocabulary) != len(pieces):
        raise TokenizerError(
            f"tokenizer {path} is not a sentencepiece BPE model with byte fallback"
        )
    if any(kind == 4 for _, _, kind in pieces):
        unsupported.append("user-defined symbols")
    if unsupported:
        raise TokenizerError(
            f"tokenizer {path} is a sentencepiece model with {' and '.join(unsupported)}, which "
            "is not supported: convert it to tokenizer.json with transformers"
        )
    require_short(path, vocabulary)
    backend = sentencepiece_backend(pieces, vocabulary, unknown=names[2][0])
    add_special_tokens(backend, [*names[2], *names[3]])
    bos = "<s>" if "<s>" in vocabulary else None
    eos = "</s>" if "</s>" in vocabulary else None
    if bos is not None:
        prepend_bos(backend, bos)
    return TokenizerParts(backend, bos_token=bos, eos_token=eos, add_bos=bos is not None)


def sentencepiece_backend(
    pieces: list[tuple[str, float, int]],
    vocabulary: dict[str, int],
    *,
    unknown: str | None,
    space_prefix: bool = True,
    leftmost: bool = False,
) -> tokenizers.Tokenizer:
    """Build a BPE tokenizer with byte fallback that produces the same ids as sentencepiece.

    Args:
        pieces: (text, score, type) of each piece; see `_sentencepiece_pieces`.
        vocabulary: mapping from the text of each piece to its id.
        unknown: text of the unknown token, or None if there is none.
        space_prefix: True to add a space before the text that is encoded.
        leftmost: True to merge the leftmost pair first if several pieces have the same score, as
            llama.cpp does for runs of spaces.
    """

    def order(merge: tuple[float, str, str]) -> tuple[float, ...]:
        score, left, right = merge
        ids = vocabulary[left], vocabulary[right]
        # Longer left parts come first, so that runs of spaces are merged from left to right.
        return (-score, -len(left), *ids) if leftmost else (-score, *ids)

    # List all ways to split a normal piece into two pieces, in descending order of score.
    merges = [
        (score, piece[:i], piece[i:])
        for piece, score, kind in pieces
        if kind == 1
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, left, right in sorted(merges, key=order)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if not space_prefix:
        backend.normalizer, backend.decoder = spaces, decoders.Sequence(to_text)
        return backend
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    backend.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
    return backend


# An untrusted tokenizer.json


def _require_usable(path: Path, content: bytes, state: dict[str, Any]) -> None:
    """Reject a tokenizer.json if it takes too much memory or time, fails on short strings, or is
    not deterministic.

    A tokenizer.json is a small program, with steps that rewrite text, patterns that split it and
    templates that add tokens around it. The library runs this program without limits. Unless all of
    its steps are known from common byte-level BPE tokenizers, it is therefore tested in a child
    process first.

    Args:
        path: path of the file.
        content: content of the file.
        state: parsed content, in which "model" is an object.

    Raises:
        TokenizerError: the tokenizer is unusable.
    """
    vocabulary, dropout = state["model"].get("vocab"), state["model"].get("dropout")
    require_few_tokens(path, len(vocabulary) if isinstance(vocabulary, dict | list) else 0)
    if dropout:
        raise TokenizerError(
            f"tokenizer {path} has a BPE dropout of {dropout!r:.100}, which encodes the same "
            "text differently each time: set model.dropout to null in the file"
        )
    key = hashlib.sha256(content).digest()
    if key in _TRIED or _is_known(state):
        return
    seconds = _TRIAL_SECONDS + len(content) // _BYTES_PER_SECOND
    memory = _TRIAL_MEMORY + len(content) * _MEMORY_PER_BYTE
    child = LimitedProcess("firstlight.tokenizer.formats:trial", memory=memory)
    try:
        child.call([str(path), key.hex()], seconds=seconds)
    except LimitExceededError as error:
        raise TokenizerError(
            f"tokenizer {path} takes {error} to load and to encode short texts: use another one"
        ) from error
    finally:
        child.close()
    _TRIED.add(key)


#: SHA-256 hashes of the files that have already been tested by this process.
_TRIED: set[bytes] = set()


def may_panic(backend: tokenizers.Tokenizer) -> bool:
    """Return True if the library may panic on some strings, and False if all steps of the tokenizer
    are known to be safe.
    """
    steps = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    fixes = ("continuing_subword_prefix", "end_of_word_suffix")
    model = {name: getattr(backend.model, name, None) for name in fixes}
    state = {
        name: None if step is None else json.loads(step.__getstate__())
        for name, step in steps.items()
    }
    return not _is_known({**state, "model": {**model, "type": type(backend.model).__name__}})


def _is_known(state: dict[str, Any]) -> bool:
    """Return True for a byte-level BPE tokenizer if the time and memory of all its steps are
    proportional to the length of the text. This is the case for the tokenizers of firstlight,
    GPT-2, Llama 3 and Qwen.
    """
    splits = [byte_level_split(pattern) for pattern in SPLIT_PATTERNS.values()]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    model = state["model"]
    decoder = state.get("decoder")
    added = state.get("added_tokens")
    return (
        state.get("normalizer") in (None, {"type": "NFC"})
        and state.get("pre_tokenizer") in [json.loads(split.__getstate__()) for split in splits]
        and isinstance(decoder, dict)
        and decoder.get("type") == "ByteLevel"
        and model.get("type") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and _is_known_frame(state.get("post_processor"))
        and len(json.dumps(added)) < _MOST_KNOWN_CHARS
    )


def _is_known_frame(step: Any) -> bool:
    """Return True if a post-processor adds only tokens that it defines, or no tokens at all. The
    library panics if a post-processor adds an undefined token.
    """
    if not isinstance(step, dict) or step.get("type") != "TemplateProcessing":
        return step is None or (isinstance(step, dict) and step.get("type") == "ByteLevel")
    content, tokens = json.dumps(step), step.get("special_tokens")
    names = re.findall(r'"SpecialToken": {"id": ("(?:[^"\\]|\\.)*")', content)
    return isinstance(tokens, dict) and {json.loads(name) for name in names} <= tokens.keys()


def trial() -> Callable[[tuple[str, str]], None]:
    """Create the function with which a `LimitedProcess` tests a tokenizer.json."""
    return _try_out


def _try_out(request: tuple[str, str]) -> None:
    """Test a tokenizer.json: load it, and encode and decode short strings with it.

    Args:
        request: (name of the file, SHA-256 of the content to test).

    Raises:
        TokenizerError: the library fails, the output of the tokenizer is far longer than its input,
            or the content of the file has changed.
    """
    name, key = request
    with library_errors(f"tokenizer {name} can't be loaded"):
        content = Path(name).read_bytes()
        if hashlib.sha256(content).hexdigest() != key:
            raise TokenizerError(f"tokenizer {name} was changed while it was read: try again")
        backend = tokenizers.Tokenizer.from_buffer(content)
        del content
        _leading_token(backend)
    normalizer = backend.normalizer
    steps = (normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    states = [json.loads(step.__getstate__()) for step in steps if step is not None]
    looked_for = list(_strings(states))
    # Also test repetitions of each string, because the allowance of `_MOST_PREPENDED` hides how
    # much a short string grows.
    repeated = (text * (1 + _MOST_PREPENDED // (len(text) + 1)) for text in looked_for)
    for text in (*looked_for, *repeated, *_trial_texts()):
        with library_errors(f"tokenizer {name} fails on {text[:8]!r}..."):
            try:
                encoding = backend.encode(text)
                decoded = backend.decode(encoding.ids, skip_special_tokens=False)
                normal = text if normalizer is None else normalizer.normalize_str(text)
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 - the library raises plain exceptions
                # This happens, for example, if there is no token for a word. Such an error is
                # reported later, when text that contains the word is encoded.
                continue
        longest = max(len(encoding.ids), len(decoded), len(normal))
        if longest > _MOST_GROWTH * len(text) + _MOST_PREPENDED:
            raise TokenizerError(
                f"tokenizer {name} turns a text of {len(text)} characters into {longest:,} "
                "tokens or characters, which no real tokenizer does"
            )


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings that the steps of a tokenizer search for. The character map of
    sentencepiece, which is a long base64 string, is omitted.
    """
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            rest.extend(part)
        elif isinstance(part, dict):
            rest.extend(v for name, v in part.items() if name != "precompiled_charsmap")


def _trial_texts() -> Iterator[str]:
    """Yield repetitions of short strings, in increasing lengths. Each repetition is yielded once
    unchanged and once with an ending that prevents a match. Also yield repetitions of single
    characters, for steps that search for a character.
    """
    for length in (*range(8, 42, 2), 300, 2000):
        for run in ("a", "A", "1", " ", "\n", "!", "ab", "a ", "1a", "é"):
            text = run * (length // len(run))
            yield from (text, text + "\0!")
    yield from (chr(code) * 64 for code in range(1, 0x250))


# Long documents


def encodes_in_pieces(state: dict[str, Any]) -> bool:
    """Return True if splitting text at a match of `_BOUNDARY` never changes its token ids: `a + b`
    encodes to the ids of `a` followed by the ids of `b`.

    This holds for byte-level BPE with the split pattern of GPT-2 or Llama 3: no match of these
    patterns contains such a boundary, and the patterns do not use look-behind. With such a
    tokenizer, a long document can be encoded in pieces, which is several times faster and takes a
    limited amount of memory.

    Args:
        state: content of tokenizer.json.
    """
    stage = state.get("pre_tokenizer") or {}
    *splits, last = stage.get("pretokenizers") or [stage]
    patterns = {(step.get("pattern") or {}).get("Regex") for step in splits}
    if last.get("use_regex", True):
        patterns.add(GPT2_PATTERN)
    return (
        state.get("normalizer") is None
        and state["model"].get("type") == "BPE"
        # Added tokens that are not special tokens are also matched in text, and they may contain a
        # space.
        and all(token["special"] for token in state["added_tokens"])
        and last.get("type") == "ByteLevel"
        and not last.get("add_prefix_space")
        and all(step.get("type") == "Split" for step in splits)
        and all(step["behavior"] == "Isolated" and not step["invert"] for step in splits)
        and bool(patterns)
        and patterns <= {GPT2_PATTERN, LLAMA3_PATTERN}
    )


#: Number of characters per piece. A longer document is encoded in pieces of about this size.
_PIECE_CHARACTERS = 1 << 18
#: Number of characters after the end of a piece that are searched for a boundary.
_BOUNDARY_CHARACTERS = 1 << 18

#: Pattern for a boundary between pieces. The boundary is before a space that follows a character
#: other than whitespace, or before a newline or ASCII punctuation that follows a letter or digit.
_BOUNDARY = re.compile(r"(?<=\S) |(?<=[^\W_])[\n!-/:-@\[-`{-~]")


def cut_long(text: str) -> list[str]:
    """Split a string into pieces of about `_PIECE_CHARACTERS` characters at matches of `_BOUNDARY`.

    For tokenizers for which `encodes_in_pieces` is True, encoding the pieces one by one gives the
    same ids as encoding the entire string. There is one exception: if no boundary is found within
    `_BOUNDARY_CHARACTERS`, as in a genome on one line, the string is split at an arbitrary
    position, and the tokens next to the split may differ. A piece is therefore never longer than
    `_PIECE_CHARACTERS` + `_BOUNDARY_CHARACTERS`.
    """
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        if (match := _BOUNDARY.search(text, end, end + _BOUNDARY_CHARACTERS)) is not None:
            end = match.start()
        elif len(text) - end <= _BOUNDARY_CHARACTERS:
            break
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
