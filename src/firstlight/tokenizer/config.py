"""What stands beside a tokenizer: `tokenizer_config.json`, and the chat template wherever it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from firstlight.errors import InputError, TokenizerError
from firstlight.files.atomic import plain_lines, read_file, read_json

__all__ = [
    "chat_template_of",
    "named_tokens",
    "natural_pad_token",
    "read_chat_template",
    "read_config",
    "token_text",
]

#: What vocabularies call their padding; Qwen's is `<|endoftext|>`, where turns end otherwise.
_PAD_TOKENS = (
    *("<pad>", "<|pad|>", "[PAD]", "<PAD>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "<|endoftext|>",
)

#: Of a template's file; what is rendered may have a million characters.
_MAX_TEMPLATE_BYTES = 4_000_000


def read_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`; empty where there is none.

    Raises:
        TokenizerError: it can't be read, or is not a JSON object.
    """
    return _read_object(folder / "tokenizer_config.json")


def read_chat_template(folder: Path) -> dict[str, Any]:
    """`{"chat_template": ...}` from where transformers looks for it, or `{}`.

    `chat_template.jinja` wins over the entry of `tokenizer_config.json`, and that one over
    `chat_template.json`.

    Raises:
        TokenizerError: one of them can't be read, or is not what its name says.
    """
    jinja = folder / "chat_template.jinja"
    try:
        if jinja.is_file():
            content = read_file(jinja, _MAX_TEMPLATE_BYTES).decode("utf-8")
            return {"chat_template": plain_lines(content)}
    except InputError as error:
        raise TokenizerError(str(error)) from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{jinja} is not UTF-8: {error}") from error
    for config in (read_config(folder), _read_object(folder / "chat_template.json")):
        if config.get("chat_template") is not None:
            return {"chat_template": config["chat_template"]}
    return {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path) if path.is_file() else {}
    except InputError as error:
        raise TokenizerError(str(error)) from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return config


def chat_template_of(config: dict[str, Any]) -> str | None:
    """The chat template of a config: a text, or of a list by name the one called "default"."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {t.get("name"): t.get("template") for t in named}.get("default")
    return template if isinstance(template, str) else None


def named_tokens(config: dict[str, Any], bos: str | None, eos: str | None) -> dict[str, str]:
    """The tokens that a config names, by name: what chat templates may write.

    Args:
        config: the config without bos and eos.
        bos: `bos_token`, if there is one.
        eos: `eos_token`, likewise.
    """
    further = config.get("extra_special_tokens")
    entries = {name: token for name, token in config.items() if name.endswith("_token")}
    entries |= further if isinstance(further, dict) else {}
    entries |= {"bos_token": bos, "eos_token": eos}
    texts = {name: token_text(token) for name, token in entries.items()}
    return {name: text for name, text in texts.items() if text is not None}


def natural_pad_token(
    special_tokens: Collection[str], ends: Collection[str | None], *, byte_fallback: bool
) -> str | None:
    """The token that a vocabulary has for padding, which no text that a model learns contains.

    Args:
        special_tokens: of the vocabulary.
        ends: bos and eos, which are learned: a collator that pads with one of them leaves it out
            of the loss everywhere.
        byte_fallback: every text has tokens, so that `<unk>` is in none.
    """
    names = [*_PAD_TOKENS, *(["<unk>"] if byte_fallback else [])]
    return next((name for name in names if name in special_tokens and name not in ends), None)


def token_text(token: Any) -> str | None:
    """A token in a config: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
