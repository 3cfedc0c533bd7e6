"""Reader of sentencepiece model files.

The protobuf package is not needed: the few necessary fields (google/sentencepiece
`sentencepiece_model.proto`) are read by their number from protobuf's wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import decoders, models, normalizers

from firstlight.errors import TokenizerError
from firstlight.tokenizer.parts import (
    TokenizerParts,
    add_special_tokens,
    prepend_bos,
    require_short,
)

#: Most fields of a model, which has one for each piece (the largest have 262,144 pieces), and of a
#: piece, which has three.
_MOST_FIELDS, _MOST_PIECE_FIELDS = 600_000, 20


def sentencepiece_pieces(content: bytes) -> Iterator[tuple[str, float, int]]:
    """(text, score, type) of each piece of a sentencepiece `ModelProto`.

    Field 1 of the message is a piece. The fields of a piece are 1 = text, 2 = score, 3 = type. The
    types are 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.

    Raises:
        ValueError, IndexError: the bytes are not a `ModelProto`.
    """
    for field, value in _protobuf_fields(content):
        if field == 1 and isinstance(value, bytes):
            entry = dict(_protobuf_fields(value, _MOST_PIECE_FIELDS))
            text, score, kind = entry.get(1), entry.get(2, b"\0\0\0\0"), entry.get(3, 1)
            is_score = isinstance(score, bytes) and len(score) == 4
            if not isinstance(text, bytes) or not is_score or kind not in range(7):
                raise ValueError("not a sentencepiece entry")
            yield text.decode("utf-8"), struct.unpack("<f", cast(bytes, score))[0], cast(int, kind)


def unsupported_features(content: bytes) -> list[str]:
    """The features of a `ModelProto` with which the ids here would differ from sentencepiece's.

    Field 2 of the message is the trainer's specification: its field 3 is the model type (1 unigram,
    2 BPE), 24 puts white space at the end of words. Field 3 of the message is the normalizer's
    specification: its field 2 is a map of characters, 3 puts a space before the text, 4 joins
    repeated spaces. A missing field has sentencepiece's default.

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
        "a map of characters": normalizer.get(2, b"") != b"",
        "no space before the text": normalizer.get(3, 1) != 1,
        "repeated spaces joined": normalizer.get(4, 1) != 0,
    }
    return [feature for feature, asked in checks.items() if asked]


def _protobuf_fields(content: bytes, most: int = _MOST_FIELDS) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of each field of a protobuf message.

    Args:
        content: the message.
        most: largest number of fields.

    Raises:
        ValueError, IndexError: the bytes are not a message, or it has more than `most` fields.
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


def from_sentencepiece(path: Path, content: bytes) -> TokenizerParts:
    """Read a sentencepiece BPE model with byte fallback, such as Llama 2's `tokenizer.model`.

    Args:
        path: the file, for messages.
        content: the file's bytes.

    Raises:
        TokenizerError: the file is not such a model, or has a feature that would give other ids.
    """
    try:
        pieces = list(sentencepiece_pieces(content))
        unsupported = unsupported_features(content)
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
            f"tokenizer {path} is a sentencepiece model with {' and '.join(unsupported)}, "
            "which can't be read exactly: convert it to tokenizer.json with transformers"
        )
    require_short(path, vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces, vocabulary),
            unk_token=names[2][0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    add_special_tokens(backend, [*names[2], *names[3]])
    bos = "<s>" if "<s>" in vocabulary else None
    eos = "</s>" if "</s>" in vocabulary else None
    if bos is not None:
        prepend_bos(backend, bos)
    return TokenizerParts(backend, bos_token=bos, eos_token=eos, add_bos=bos is not None)


def _merges(
    pieces: list[tuple[str, float, int]], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """The BPE merges that give the same ids as sentencepiece: every way to cut a normal piece into
    two pieces, ordered by the score of the whole piece (highest first), then by the ids of the two
    pieces."""
    merges = [
        (-score, vocabulary[piece[:i]], vocabulary[piece[i:]], piece[:i], piece[i:])
        for piece, score, kind in pieces
        if kind == 1
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(merges, key=lambda merge: merge[:3])]
