"""Makes earlier.tar.xz beside this file (see README.md), with the tree whose files are to be kept.

PYTHONPATH=src python tests/earlier/make.py
"""

from __future__ import annotations

import json
import os
import random
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from firstlight.data.chat import ChatOptions, prepare_chat
from firstlight.data.prepare import prepare
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES, required_tokens
from firstlight.training.loop import train

_HERE = Path(__file__).resolve().parent
_WORDS = "the light dawn star river stone bird green small old sings runs over 1 22 é".split()
_MODEL = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 8,
    "tie_word_embeddings": True,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
}


class StoppedError(Exception):
    """Ends a run in the middle."""


def recipe(place: Path, name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A run of 6 steps on prepared folders of `place`, with checkpoints at steps 3 and 6."""
    return {
        "run": {"dir": str(place / f"{name}-run"), "device": "cpu"},
        **({} if name == "pairs" else {"model": _MODEL}),
        "data": {"seq_len": 96, **data},
        "batch": {"micro_batch_size": 2},
        "schedule": {"max_steps": 6, "warmup_steps": 1},
        "evaluation": {"every_steps": 3, "max_rows": 4, "sample_tokens": 2},
        "checkpoint": {"every_steps": 3, "keep_last": 1},
        # A machine whose bf16 is faster would choose that.
        "efficiency": {"precision": "fp32", "compile": False},
    }


def data_of(place: Path, name: str) -> dict[str, Any]:
    """The data section of a run: on text, conversations, pairs or a mix."""
    if name == "mix":
        parts = (("text", 0.7), ("chat", 0.3))
        return {"mix": [{"dir": str(place / part), "weight": weight} for part, weight in parts]}
    return {"dir": str(place / name)}


def draw(generator: random.Random, count: int) -> str:
    """A few words."""
    return " ".join(generator.choices(_WORDS, k=count))


def write_sources(place: Path) -> None:
    """Files of text, conversations and preference pairs."""
    generator = random.Random(0)
    texts = [{"text": draw(generator, 40)} for _ in range(24)]
    chats = [{"instruction": draw(generator, 3), "output": draw(generator, 5)} for _ in range(24)]
    pairs = [
        {"prompt": f"{n} {draw(generator, 2)}", "chosen": "dawn star", "rejected": "old stone"}
        for n in range(24)
    ]
    for name, records in (("text", texts), ("chat", chats), ("pairs", pairs)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (place / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def prepare_one(place: Path, name: str, tokenizer: Tokenizer) -> None:
    """Prepare the text, the conversations or the pairs."""
    source, out = [place / f"{name}.jsonl"], place / name
    if name == "text":
        prepare(source, tokenizer, out, val_fraction=0.2, shard_tokens=800)
        return
    options = ChatOptions("preference" if name == "pairs" else "chat", val_fraction=0.2)
    prepare_chat(source, tokenizer, out, options=options)


def make(place: Path) -> dict[str, list[float]]:
    """Fill a folder; return the training losses of runs that were not interrupted."""
    write_sources(place)
    tokenizer = train_tokenizer([(place / "text.jsonl").read_text(encoding="utf-8")], 270)
    tokenizer = tokenizer.extended(required_tokens("chatml"), CHAT_TEMPLATES["chatml"])
    for name in ("text", "chat", "pairs"):
        prepare_one(place, name, tokenizer)
    losses: dict[str, list[float]] = {}
    for name in ("text", "chat", "mix", "pairs"):
        start = place / "chat-run" if name == "pairs" else None
        own = recipe(place, name, data_of(place, name))
        whole = {**own, "run": {"dir": str(place / "whole" / name), "device": "cpu"}}
        losses[name] = []
        train(whole, init_from=start, on_step=partial(note, losses[name]))
        with suppress(StoppedError):
            train(own, init_from=start, on_step=stop)
    return losses


def note(losses: list[float], record: Mapping[str, Any]) -> None:
    """Keep a step's loss."""
    losses.append(record["train/loss"])


def stop(record: Mapping[str, Any]) -> None:
    """End a run in its fifth step."""
    if record["step"] == 5:
        raise StoppedError


def main() -> None:
    with TemporaryDirectory() as name:
        place = Path(name).resolve()
        os.environ["FIRSTLIGHT_CACHE"] = str(place / "cache")
        losses = make(place)
        (place / "losses.json").write_text(json.dumps(losses, indent=1), encoding="utf-8")
        kept = ("text", "chat", "pairs", *(f"{n}-run" for n in losses), "cache/references")
        with tarfile.open(_HERE / "earlier.tar.xz", "w:xz") as archive:
            for entry in (*kept, "losses.json"):
                archive.add(place / entry, entry)


if __name__ == "__main__":
    main()
