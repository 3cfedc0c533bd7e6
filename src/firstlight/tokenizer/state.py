"""What the serialized state of a tokenizer (its `tokenizer.json`) says of the ids it gives.

Pure functions over the parsed JSON, whose fields are those of huggingface/tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from firstlight.tokenizer.formats import GPT2_PATTERN, LLAMA3_PATTERN

__all__ = ["extends", "fingerprint", "splits_at_newline_after_letter"]

#: What ids come from, besides the added tokens.
_DECIDING = ("normalizer", "pre_tokenizer", "model")


def fingerprint(state: Mapping[str, Any]) -> str:
    """SHA-256 over all that decides which ids a text gets; equal for equal tokenizers."""
    deciding = [state.get(key) for key in ("added_tokens", *_DECIDING)]
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def extends(state: Mapping[str, Any], other: Mapping[str, Any], first_new_id: int) -> bool:
    """Whether a tokenizer is another one and special tokens from `first_new_id` on, if any."""
    if any(state.get(key) != other.get(key) for key in _DECIDING):
        return False
    old = {token["id"]: token for token in other["added_tokens"]}
    now = {token["id"]: token for token in state["added_tokens"]}
    new = [token for token_id, token in now.items() if token_id not in old]
    return all(now.get(token_id) == token for token_id, token in old.items()) and all(
        token["special"] and token["id"] >= first_new_id for token in new
    )


def splits_at_newline_after_letter(state: Mapping[str, Any]) -> bool:
    """Whether `a + b` always encodes to `a`'s ids and then `b`'s; see `Tokenizer`."""
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
