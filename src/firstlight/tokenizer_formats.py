"""The kinds of tokenizer files there are, each turned into the same parts.

Which kind a file is of is told by its content: names such as `tokenizer.model` stand for two.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from firstlight.errors import InputError, TokenizerError, describe_os_error
from firstlight.files import read_json

END_OF_TEXT = "<|endoftext|>"

#: The split of GPT-2: a word with the space before it, runs of spaces, contractions.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

#: The split of the Llama 3 tokenizer (meta-llama/llama3 `llama/tokenizer.py`).
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """What a `Tokenizer` is made of; see there."""

    backend: tokenizers.Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_tokenizer_file(path: Path) -> TokenizerParts:
    """Read `tokenizer.json`, `vocab.json` (with `merges.txt`), tiktoken ranks or sentencepiece.

    Raises:
        TokenizerError: it is none of them, damaged, or would give other ids than its own library.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = describe_os_error(error)
        raise TokenizerError(f"tokenizer {path} can't be read: {reason}") from error
    if content.lstrip()[:1] == b"{":
        return _from_json(path, content)
    if _looks_like_tiktoken(content):
        return _from_tiktoken_ranks(path, content)
    if path.name == "merges.txt":
        return read_tokenizer_file(path.with_name("vocab.json"))
    return _from_sentencepiece(path, content)


def _from_json(path: Path, content: bytes) -> TokenizerParts:
    """A `tokenizer.json`, or GPT-2's `vocab.json` with `merges.txt` beside it."""
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer {path} is not valid JSON: {error}") from error
    # "model" is also an ordinary word of GPT-2's vocabulary.
    if not isinstance(state.get("model"), dict):
        return _from_vocab_and_merges(path, state)
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise TokenizerError(f"tokenizer {path} can't be loaded: {error}") from error
    config_path = path.with_name("tokenizer_config.json")
    try:
        config = read_json(config_path) if config_path.is_file() else {}
    except InputError as error:
        raise TokenizerError(str(error)) from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{config_path} is not a JSON object")
    leading = _leading_token(backend)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    bos = _token_text(config.pop("bos_token", None)) or leading
    eos = _token_text(config.pop("eos_token", None))
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
    """The special token that the post-processor puts before a text, if it does."""
    backend.no_truncation()
    backend.no_padding()
    # Against a text of one letter: before nothing, a token that ends texts would come first.
    encoding = backend.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    return encoding.tokens[0] if mask and mask[0] and not all(mask) else None


def _token_text(token: Any) -> str | None:
    """A special token of `tokenizer_config.json`: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _from_vocab_and_merges(path: Path, vocabulary: dict[str, int]) -> TokenizerParts:
    """GPT-2's pair of files (openai/gpt-2 `encoder.json`, `vocab.bpe`)."""
    merges_path = path.with_name("merges.txt")
    if not merges_path.is_file():
        raise TokenizerError(f"{path} needs merges.txt beside it")
    try:
        lines = merges_path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise TokenizerError(f"{merges_path} can't be read: {describe_os_error(error)}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{merges_path} is not UTF-8: {error}") from error
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise TokenizerError(f"{merges_path} holds a line that is not two tokens")
    try:
        model = models.BPE(
            vocab=vocabulary, merges=cast(list[tuple[str, str]], list(map(tuple, pairs)))
        )
    except Exception as error:
        raise TokenizerError(f"{path} and {merges_path} don't fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocabulary:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    eos = END_OF_TEXT if END_OF_TEXT in vocabulary else None
    return TokenizerParts(backend, bos_token=eos, eos_token=eos)


def _looks_like_tiktoken(content: bytes) -> bool:
    """Whether the first line is `BASE64 RANK`, as in tiktoken's rank files."""
    parts = content[:4096].split(b"\n", 1)[0].split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        base64.b64decode(parts[0], validate=True)
    except binascii.Error:
        return False
    return True


def _from_tiktoken_ranks(path: Path, content: bytes) -> TokenizerParts:
    """A tiktoken rank file with the split and special tokens of Llama 3.

    tiktoken joins, again and again, the adjacent pair whose joined bytes have the lowest
    rank. The same ids come from BPE merges that list every way to cut a token into two
    tokens, ordered by the token's rank.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(f"tokenizer {path} is a damaged tiktoken file: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"tokenizer {path} is a damaged tiktoken file: a rank is missing")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"tokenizer {path} is a damaged tiktoken file: a byte has no token")
    characters = _byte_characters()
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        halves.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[a], text[b]) for a, b in halves]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    # tiktoken looks a whole piece up before it merges: that is ignore_merges.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _LLAMA3_SPECIAL_TOKENS]
    )
    bos, eos = _LLAMA3_SPECIAL_TOKENS[:2]
    _prepend_bos(backend, bos)
    return TokenizerParts(backend, bos_token=bos, eos_token=eos, add_bos=True)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE files (openai/gpt-2 `encoder.py`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _prepend_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Make transformers, too, begin every text with `bos`."""
    bos_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def _from_sentencepiece(path: Path, content: bytes) -> TokenizerParts:
    """A sentencepiece BPE model with byte fallback, as Llama 2's `tokenizer.model`."""
    try:
        pieces = list(_sentencepiece_pieces(content))
        unsupported = _unsupported_sentencepiece(content)
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
    scores = {piece: score for piece, score, _ in pieces}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in pieces:
        if kind != 1:
            continue
        for i in range(1, len(piece)):
            left, right = piece[:i], piece[i:]
            if left in scores and right in scores:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, _, left, right in merges],
            unk_token=names[2][0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    control = [*names[2], *names[3]]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    bos = "<s>" if "<s>" in vocabulary else None
    eos = "</s>" if "</s>" in vocabulary else None
    if bos is not None:
        _prepend_bos(backend, bos)
    return TokenizerParts(backend, bos_token=bos, eos_token=eos, add_bos=bos is not None)


def _sentencepiece_pieces(content: bytes) -> Iterator[tuple[str, float, int]]:
    """(piece, score, type) of each entry of a sentencepiece `ModelProto`.

    Read from the wire format alone (field 1 = pieces; in each 1 = text, 2 = score, 3 = type),
    so that no protobuf runtime is needed. Types: 1 normal, 2 unknown, 3 control,
    4 user-defined, 6 byte.
    """
    for field, value in _protobuf_fields(content):
        if field == 1 and isinstance(value, bytes):
            entry = dict(_protobuf_fields(value))
            text, score, kind = entry.get(1), entry.get(2, b"\0\0\0\0"), entry.get(3, 1)
            if not isinstance(text, bytes) or not isinstance(score, bytes) or kind not in range(7):
                raise ValueError("not a sentencepiece entry")
            yield text.decode("utf-8"), struct.unpack("<f", score)[0], cast(int, kind)


def _unsupported_sentencepiece(content: bytes) -> list[str]:
    """What the `ModelProto` asks for that would give other ids here than in sentencepiece.

    Field 2 = trainer: 3 model type (1 unigram, 2 BPE), 24 white space at the end of words;
    field 3 = normalizer: 2 character map, 3 space before the text, 4 join repeated spaces.
    An absent field means what sentencepiece's own default is.
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
    return [what for what, asked in checks.items() if asked]


def _protobuf_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) pairs of one protobuf message."""
    position = 0

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
