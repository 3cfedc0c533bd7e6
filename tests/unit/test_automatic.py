from __future__ import annotations

from typing import Any

import pytest
import torch

from firstlight.hardware import Hardware
from firstlight.training import automatic
from firstlight.training.automatic import decide
from firstlight.training.config import Recipe, parse_recipe

_CPU = Hardware(torch.device("cpu"), "the CPU of a test", 2**33, bf16=True)


def recipe_of(**sections: Any) -> Recipe:
    return parse_recipe(
        {
            "model": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 30,
                "max_position_embeddings": 16,
            },
            "data": {"dir": "data", "seq_len": 16},
            **sections,
        }
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is found out about the machine, to be set: the matrix rate (FLOP/s), the dtype of auto,
    a compiler, the rows that fit."""
    found: dict[str, Any] = {
        "rate": 1e12,
        "dtype": torch.bfloat16,
        "compiler": True,
        "rows": 4,
        "tries": 0,
    }

    def largest(*_: object) -> int:
        found["tries"] += 1
        return int(found["rows"])

    def dtype(config: Any, hardware: Hardware) -> torch.dtype:
        given = {"fp32": torch.float32, "bf16": torch.bfloat16}
        chosen: torch.dtype = given.get(config.precision, found["dtype"])
        return chosen

    monkeypatch.setattr(automatic, "peak_flops", lambda *_: found["rate"])
    monkeypatch.setattr(automatic, "resolve_precision", dtype)
    monkeypatch.setattr(automatic, "can_compile", lambda _: found["compiler"])
    monkeypatch.setattr(automatic, "largest_micro_batch", largest)
    return found


def decided(recipe: Recipe, saved: Recipe | None = None, tokens: int = 10**6) -> Recipe:
    before = {} if saved is None else saved.model_dump()
    return decide(recipe, before, _CPU, tokens, lambda _: None)


def test_everything_automatic_becomes_a_value(machine: dict[str, Any]) -> None:
    recipe = recipe_of(batch={"micro_batch_size": "auto", "global_batch_tokens": 128})
    found = decided(recipe)
    assert found.efficiency.precision == "bf16"
    assert found.efficiency.attention == "sdpa"
    assert found.efficiency.compile is False
    assert found.efficiency.loss_chunk_tokens == 0
    assert found.batch.micro_batch_size == 4
    # And nothing else.
    keys = {"precision", "attention", "compile", "loss_chunk_tokens"}
    assert found.efficiency.model_dump(exclude=keys) == recipe.efficiency.model_dump(exclude=keys)
    sections = {"efficiency", "batch"}
    assert found.model_dump(exclude=sections) == recipe.model_dump(exclude=sections)


def test_large_heads_in_bf16_have_an_attention_of_their_own(machine: dict[str, Any]) -> None:
    model = recipe_of().model
    assert model is not None
    recipe = recipe_of(model={**model.model_dump(), "hidden_size": 128, "head_dim": 64})
    assert decided(recipe).efficiency.attention == "blockwise"
    machine["dtype"] = torch.float32
    assert decided(recipe).efficiency.attention == "sdpa"


def test_what_is_given_is_left_alone(machine: dict[str, Any]) -> None:
    recipe = recipe_of(
        efficiency={
            "precision": "fp32",
            "attention": "math",
            "compile": True,
            "loss_chunk_tokens": 7,
        },
        batch={"micro_batch_size": 2},
    )
    told: list[str] = []
    assert decide(recipe, {}, _CPU, 10**6, told.append) == recipe
    assert told == []
    assert machine["tries"] == 0


def test_a_resumed_run_keeps_what_auto_came_to(machine: dict[str, Any]) -> None:
    model = recipe_of().model
    assert model is not None
    recipe = recipe_of(
        model={**model.model_dump(), "hidden_size": 128, "head_dim": 64},
        batch={"micro_batch_size": "auto", "global_batch_tokens": 128},
    )
    first = decided(recipe)
    assert first.efficiency.attention == "blockwise"
    machine |= {"dtype": torch.float32, "rate": 1.0, "rows": 8}
    # A new run would be another one today.
    assert decided(recipe) != first
    tries = machine["tries"]
    assert decided(recipe, first) == first
    assert machine["tries"] == tries


def test_attention_for_cpus_is_not_kept_on_a_gpu(machine: dict[str, Any]) -> None:
    recipe, gpu = recipe_of(), Hardware(torch.device("cuda"), "a GPU", 2**40, bf16=True)
    before = decided(recipe_of(efficiency={"attention": "blockwise"})).model_dump()
    found = decide(recipe, before, gpu, 10**6, lambda _: None)
    assert found.efficiency.attention == "sdpa"
    assert decide(recipe, before, _CPU, 10**6, lambda _: None).efficiency.attention == "blockwise"


def test_a_resumed_run_takes_what_the_recipe_says_now(machine: dict[str, Any]) -> None:
    first = decided(recipe_of())
    given = {"precision": "fp32", "attention": "plain", "compile": True, "loss_chunk_tokens": 7}
    recipe = recipe_of(efficiency=given)
    found = decided(recipe, first)
    assert found.efficiency == recipe.efficiency


def test_a_run_compiles_where_that_pays_and_can_be_done(machine: dict[str, Any]) -> None:
    machine["rate"] = 1e3
    found = decided(recipe_of())
    assert found.efficiency.compile is True
    machine["compiler"] = False
    assert decided(recipe_of()).efficiency.compile is False


def test_the_length_of_a_run_is_that_of_its_steps(machine: dict[str, Any]) -> None:
    machine["rate"] = 1e9

    def compiles(steps: int | None, **batch: Any) -> Any:
        recipe = recipe_of(schedule={"max_steps": steps}, batch=batch)
        return decided(recipe, tokens=10**9).efficiency.compile

    assert compiles(None) is True
    assert compiles(1) is False
    assert compiles(10**7) is True
    assert compiles(1, global_batch_tokens=16 * 10**8) is True


def test_choices_are_told(machine: dict[str, Any]) -> None:
    told: list[str] = []
    decide(recipe_of(), {}, _CPU, 10**6, told.append)
    assert told == ["chosen for this machine: bf16, attention sdpa, not compiled"]


def test_the_loss_is_chunked_where_that_costs_nothing(machine: dict[str, Any]) -> None:
    large = {**recipe_of().model_dump()["model"], "vocab_size": 50257}
    machine["dtype"] = torch.float32
    assert decided(recipe_of(model=large)).efficiency.loss_chunk_tokens == 512
    assert decided(recipe_of()).efficiency.loss_chunk_tokens == 0
    machine["dtype"] = torch.bfloat16
    assert decided(recipe_of(model=large)).efficiency.loss_chunk_tokens == 0


def test_a_step_on_a_cpu_is_cut_into_rows_that_keep_it_busy(machine: dict[str, Any]) -> None:
    def rows(**batch: Any) -> Any:
        recipe = recipe_of(
            batch={"micro_batch_size": None, **batch}, data={"dir": "data", "seq_len": 512}
        )
        return decided(recipe).batch.micro_batch_size

    assert rows(global_batch_tokens=16 * 512) == 2
    assert rows(global_batch_tokens=15 * 512) == 1
    assert rows(global_batch_tokens=16 * 512, gradient_accumulation_steps=4) == 4
    assert rows() == 8


def test_a_run_that_torchs_adafactor_began_goes_on_with_it(machine: dict[str, Any]) -> None:
    """A checkpoint from before there was the key is one."""
    recipe = recipe_of(optimizer={"name": "adafactor"}, batch={"micro_batch_size": 2})
    assert decided(recipe).optimizer.adafactor_variant == "paper"
    assert decided(recipe, decided(recipe)).optimizer.adafactor_variant == "paper"
    saved = decided(recipe).model_dump()
    del saved["optimizer"]["adafactor_variant"]
    told: list[str] = []
    found = decide(recipe, saved, _CPU, 10**6, told.append)
    assert found.optimizer.adafactor_variant == "torch"
    assert any("goes on with it" in line for line in told)
    asked = recipe_of(
        optimizer={"name": "adafactor", "adafactor_variant": "paper"}, batch={"micro_batch_size": 2}
    )
    found = decide(asked, saved, _CPU, 10**6, told.append)
    assert found.optimizer.adafactor_variant == "paper"
