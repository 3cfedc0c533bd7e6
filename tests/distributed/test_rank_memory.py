"""The arithmetic of docs/scaling.md beside what processes really hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from spawned import run_ranks

from firstlight.models import LlamaConfig
from firstlight.models.accounting import rank_memory

_DRIVER = Path(__file__).with_name("memory_driver.py")

#: Nothing divides evenly by 2, so that pieces have to be rounded up.
_MODEL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 18,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "head_dim": 6,
}


def test_rank_0_of_two_holds_what_the_arithmetic_says() -> None:
    models = [{**_MODEL, "tie_word_embeddings": tied} for tied in (False, True)]
    engines: tuple[Literal["ddp", "fsdp"], ...] = ("ddp", "fsdp")
    cases = [(engine, model) for model in models for engine in engines]
    results = run_ranks(_DRIVER, [json.dumps(cases)], 2)
    for result in results:
        assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in results[0].stdout.splitlines() if line[:1] == "{"]
    for (engine, model), found in zip(cases, lines, strict=True):
        expected = asdict(rank_memory(LlamaConfig(**model), 8, engine, 2))
        assert found == {name: expected[name] for name in found}, (engine, model)
        assert found.keys() == {"weights", "gradients", "moments", "accumulating"}
    assert lines[0]["weights"] > 1.9 * lines[1]["weights"]
