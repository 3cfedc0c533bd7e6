"""Tokenizers: load any of the usual files, train one's own, stream ids back to text.

Whatever the file, what comes out is one `Tokenizer` around the `tokenizers` library, and
what is saved is always `tokenizer.json` + `tokenizer_config.json`, the layout that
transformers reads.

Text is always plain text: a document that happens to hold `<|endoftext|>` becomes the
ordinary tokens of those characters, never the control token.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from firstlight.errors import InputError, TokenizerError, describe_os_error
from firstlight.files import read_json, write_file

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

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Text to token ids and back, with the special tokens that a model folder names.

    Args:
        backend: the `tokenizers.Tokenizer` that does the work.
        bos_token: the token that begins every text, if the model expects one.
        eos_token: the token that ends a document, if there is one.
        add_bos: whether documents and prompts begin with `bos_token`.
        config: further entries of `tokenizer_config.json` (chat template and the like),
            kept as they are.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
        config: dict[str, Any] | None = None,
    ) -> None:
        # A tokenizer.json may carry truncation to some length: it would cut documents silently.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.config = dict(config or {})
        self.bos_token_id = self._id_of(bos_token, "bos_token")
        self.eos_token_id = self._id_of(eos_token, "eos_token")
        self.add_bos = add_bos and self.bos_token_id is not None

    def _id_of(self, token: str | None, name: str) -> int | None:
        if token is None:
            return None
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"{name} '{token}' is not in the tokenizer's vocabulary")
        return token_id

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer from a folder or a file; its kind is told by its content.

        Accepted: `tokenizer.json`, a folder with one, GPT-2's `vocab.json` + `merges.txt`,
        a tiktoken rank file (Llama 3's `tokenizer.model`), a sentencepiece BPE model
        (Llama 2's `tokenizer.model`).

        Raises:
            TokenizerError: nothing readable is there, or what is there is damaged.
        """
        path = Path(path)
        if not path.exists():
            raise TokenizerError(f"tokenizer {path} does not exist")
        if path.is_file():
            return cls._from_file(path)
        for name in ("tokenizer.json", "vocab.json", "tokenizer.model"):
            if (path / name).is_file():
                return cls._from_file(path / name)
        raise TokenizerError(
            f"no tokenizer in {path}: expected tokenizer.json, vocab.json + merges.txt, "
            "or tokenizer.model (train one with `firstlight tokenizer train`)"
        )

    @classmethod
    def _from_file(cls, path: Path) -> Tokenizer:
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
            return cls._from_file(path.with_name("vocab.json"))
        return _from_sentencepiece(path, content)

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one: what a model's embedding must hold."""
        return self._max_token_id + 1

    @functools.cached_property
    def _max_token_id(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which decoding leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def separator_id(self) -> int:
        """The token that stands before the first token of a text: bos, or else eos.

        Raises:
            TokenizerError: the tokenizer has neither.
        """
        token_id = self.bos_token_id if self.bos_token_id is not None else self.eos_token_id
        if token_id is None:
            raise TokenizerError(
                "the tokenizer names neither bos_token nor eos_token: "
                "set one of them in tokenizer_config.json"
            )
        return token_id

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides which ids a text gets; equal for equal tokenizers."""
        state = json.loads(self.backend.to_str())
        deciding = ("added_tokens", "normalizer", "pre_tokenizer", "model")
        canonical = json.dumps([state.get(key) for key in deciding], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, without any special token.

        Raises:
            InputError: the text holds half of a surrogate pair, which is no character.
        """
        _require_unicode(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once."""
        for text in texts:
            _require_unicode(text)
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids a model continues from: bos where the model expects it, then the text.

        An empty text without bos gives the document separator, which is what a model
        trained on separated documents has seen before the beginning of each.
        """
        ids = self.encode(text)
        if self.add_bos or not ids:
            return [self.separator_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    @functools.cached_property
    def splits_at_newline_after_letter(self) -> bool:
        """Whether `a + b` always encodes to `a`'s ids and then `b`'s, where `a` ends with a
        letter and `b` begins with a newline.

        True of byte-level BPE with the GPT-2 or Llama 3 split: no piece of either joins a
        letter to a following newline, and nothing in them looks back. It lets a long document
        be encoded in parts, several times faster and with bounded memory.
        """
        state = json.loads(self.backend.to_str())
        if state.get("normalizer") is not None or state["model"].get("type") != "BPE":
            return False
        # Added tokens that are not special are looked for in the text, across any newline.
        if any(not token["special"] for token in state["added_tokens"]):
            return False
        stage = state.get("pre_tokenizer") or {}
        *splits, last = stage.get("pretokenizers") or [stage]
        if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
            return False
        if any(
            step.get("type") != "Split" or step["behavior"] != "Isolated" or step["invert"]
            for step in splits
        ):
            return False
        patterns = {step["pattern"].get("Regex") for step in splits}
        if last.get("use_regex", True):
            patterns.add(GPT2_PATTERN)
        return bool(patterns) and patterns <= {GPT2_PATTERN, LLAMA3_PATTERN}

    @functools.cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Ids of the `<0xNN>` tokens of tokenizers with byte fallback; empty for others."""
        if not getattr(self.backend.model, "byte_fallback", False):
            return frozenset()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    def files(self) -> dict[str, str]:
        """The contents of `tokenizer.json` and `tokenizer_config.json`, by file name."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.config,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "add_bos_token": self.add_bos,
        }
        config = {key: value for key, value in config.items() if value is not None}
        return {
            "tokenizer.json": self.backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
        for name, content in self.files().items():
            write_file(Path(folder) / name, content)


class TextStream:
    """Turn token ids into text one at a time, never emitting half a character.

    The pieces that `push` returns, and at the end `finish`, concatenate to exactly the text
    that decoding everything at once would have added after `prompt_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = [i for i in prompt_ids if i not in tokenizer.special_token_ids]
        text = tokenizer.decode(self._ids)
        self._emitted = len(text)
        # A prompt that ends inside a character is kept whole until the character is.
        if not text.endswith("\ufffd"):
            self._shrink()

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is now certain (often a word, sometimes nothing)."""
        if token_id in self._tokenizer.special_token_ids:
            return ""
        self._ids.append(token_id)
        # With byte fallback a whole run of byte tokens decodes together: all good or all bad.
        if token_id in self._tokenizer.byte_token_ids:
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        piece = text[self._emitted :]
        self._shrink()
        return piece

    def finish(self) -> str:
        """Return what was held back. Bytes that never became a character show as U+FFFD."""
        piece = self._tokenizer.decode(self._ids)[self._emitted :]
        self._shrink()
        return piece

    def _shrink(self) -> None:
        """Keep only the ids that still matter: the last token that is no byte token, so that
        a decoder which strips the first space of a text does not strip later ones."""
        start = max(len(self._ids) - 1, 0)
        while start > 0 and self._ids[start] in self._tokenizer.byte_token_ids:
            start -= 1
        self._ids = self._ids[start:]
        self._emitted = len(self._tokenizer.decode(self._ids))


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    pattern: str = GPT2_PATTERN,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
) -> Tokenizer:
    """Train a byte-level BPE tokenizer, as GPT-2's (Sennrich et al. 2016, Radford et al. 2019).

    Args:
        texts: the corpus, in pieces of any length.
        vocab_size: number of tokens, special ones and the 256 bytes included. A small corpus
            can run out of pairs to merge; the tokenizer is then smaller.
        pattern: the regular expression whose matches are never merged across.
        special_tokens: control tokens, ids 0, 1, ...; the first one, if any, ends documents.

    Raises:
        TokenizerError: `vocab_size` is too small, or the texts are empty.
        InputError: a text holds half of a surrogate pair.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte-level BPE needs at least {smallest} "
            f"(256 bytes and {len(special_tokens)} special)"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = 0

    def count(pieces: Iterable[str]) -> Iterator[str]:
        nonlocal seen
        for piece in pieces:
            seen += len(piece)
            _require_unicode(piece)
            yield piece

    backend.train_from_iterator(count(texts), trainer)
    if seen == 0:
        raise TokenizerError("the corpus is empty: there is nothing to train a tokenizer on")
    return Tokenizer(backend, eos_token=special_tokens[0] if special_tokens else None)


def _require_unicode(text: str) -> None:
    """Refuse what Python makes of bytes that are not UTF-8 in file names and arguments."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid Unicode at character {error.start}: "
            f"{text[max(error.start - 10, 0) : error.start + 1]!a}"
        ) from None


def _from_json(path: Path, content: bytes) -> Tokenizer:
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
    return Tokenizer(backend, bos_token=bos, eos_token=eos, add_bos=bool(add_bos), config=config)


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


def _from_vocab_and_merges(path: Path, vocabulary: dict[str, int]) -> Tokenizer:
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
    return Tokenizer(backend, bos_token=eos, eos_token=eos)


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


def _from_tiktoken_ranks(path: Path, content: bytes) -> Tokenizer:
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
    return Tokenizer(backend, bos_token=bos, eos_token=eos, add_bos=True)


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


def _from_sentencepiece(path: Path, content: bytes) -> Tokenizer:
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
    return Tokenizer(backend, bos_token=bos, eos_token=eos, add_bos=bos is not None)


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
