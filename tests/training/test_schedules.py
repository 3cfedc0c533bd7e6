"""Learning-rate and batch-size schedules in runs, which resume bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import slow_but
from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import TokenLoader
from firstlight.errors import ConfigError
from firstlight.models import empty_model
from firstlight.optim.schedule import BatchSchedule
from firstlight.recipe import parse_recipe
from firstlight.report.report import picture_of, run_page
from firstlight.run_log.reader import read_json_lines, read_run
from firstlight.training.loop import train

MEASURED = ("second", "mfu", "memory_bytes")
RAMP = {"global_batch_tokens": 512, "ramp_start_tokens": 128, "ramp_steps": 6}
ROWS = [4, 4, 8, 8, 12, 12, 16, 16, 16]

SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"min_lr_ratio": 0},
    "linear": {"kind": "linear", "min_learning_rate": 1e-5},
    "wsd": {"kind": "wsd", "decay_fraction": 0.5, "decay_shape": "1-sqrt"},
    "constant": {"kind": "constant"},
    "inverse_sqrt": {"kind": "inverse_sqrt"},
    "initial rate": {"initial_learning_rate": 1e-4},
}


class StoppedError(Exception):
    """Ends a run from within."""


@pytest.fixture
def recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of 9 steps with dropout and a batch-size ramp."""
    recipe["model"] = {
        "model_type": "gpt2",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "embd_pdrop": 0.2,
    }
    recipe["batch"] = {"micro_batch_size": 2, **RAMP}
    recipe["schedule"] = {"max_steps": 9, "warmup_steps": 2}
    recipe["checkpoint"] = {"every_steps": 2, "keep_last": 9}
    recipe["efficiency"] = {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0}
    return recipe


def named(recipe: dict[str, Any], name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a run with another name and some keys changed."""
    changed = copy.deepcopy(recipe)
    changed["run"]["dir"] = str(Path(recipe["run"]["dir"]).with_name(name))
    for section, values in sections.items():
        changed[section] = {**changed.get(section, {}), **values}
    return changed


def metrics(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not any(part in k for part in MEASURED)}
        for line in read_json_lines(Path(recipe["run"]["dir"]) / "metrics.jsonl")
    ]


def end(recipe: dict[str, Any]) -> dict[str, Any]:
    folder = list_checkpoints(Path(recipe["run"]["dir"]))[-1]
    state = load_trainer_state(folder)
    del state["recipe"]["run"]["dir"]
    names = ("model.safetensors", "optimizer.safetensors")
    return {"state": state, **{name: (folder / name).read_bytes() for name in names}}


def stop_after(recipe: dict[str, Any], step: int, *, resume: bool) -> None:
    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, resume=resume, on_step=on_step)


@pytest.mark.parametrize("kind", slow_but(("cosine", "wsd", "initial rate"), SCHEDULES))
def test_schedule_run_of_any_kind_resumes_bit_for_bit(recipe: dict[str, Any], kind: str) -> None:
    whole = named(recipe, "whole", schedule=SCHEDULES[kind])
    broken = named(recipe, "broken", schedule=SCHEDULES[kind])
    train(whole)
    for number, step in enumerate((1, 3, 5, 6, 8)):
        stop_after(broken, step, resume=number > 0)
    train(broken, resume=True)
    assert metrics(broken) == metrics(whole)
    assert [line["step"] for line in metrics(broken)] == list(range(1, 10))
    assert end(broken) == end(whole)


def test_run_with_book_appendix_settings_matches_its_loop(recipe: dict[str, Any]) -> None:
    """The loop of appendix D of "Build a Large Language Model (From Scratch)": a warm-up from
    `initial_lr`, half a cosine to `min_lr`, and clipping only after the warm-up. The run is stopped
    in the warm-up and after it, and resumed."""
    peak_lr, initial_lr, min_lr, warmup_steps, steps = 0.02, 3e-5, 1e-6, 4, 12
    recipe["model"]["embd_pdrop"] = 0.0
    recipe["batch"] = {"micro_batch_size": 2}
    recipe["schedule"] = {
        "max_steps": steps,
        "warmup_steps": warmup_steps,
        "initial_learning_rate": initial_lr,
        "min_learning_rate": min_lr,
    }
    recipe["optimizer"] = {
        "name": "adamw",
        "learning_rate": peak_lr,
        "betas": [0.9, 0.999],
        "vector_weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "clip_after_warmup": True,
    }
    stop_after(recipe, 2, resume=False)
    stop_after(recipe, 7, resume=True)
    train(recipe, resume=True)

    dataset = TokenDataset(recipe["data"]["dir"], "train")
    parsed = parse_recipe(recipe)
    assert parsed.model is not None
    model = empty_model(parsed.model.model_copy(update={"vocab_size": dataset.vocab_size}))
    model.init_weights(torch.Generator().manual_seed(parsed.run.seed), parsed.init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.1)
    losses, rates, norms = [], [], []
    with TokenLoader(dataset, 32, 2, parsed.run.seed) as loader:
        for step in range(steps):
            batch = loader.next_batch()
            optimizer.zero_grad()
            if step < warmup_steps:
                lr = initial_lr + step * (peak_lr - initial_lr) / warmup_steps
            else:
                progress = (step - warmup_steps) / (steps - warmup_steps)
                lr = min_lr + (peak_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = model(batch.input_ids, batch.labels) / batch.num_valid
            loss.backward()
            limit = math.inf if step < warmup_steps else 0.05
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
            optimizer.step()
            rates.append(lr)
            losses.append(loss.item())

    found = metrics(recipe)
    assert [line["learning_rate"] for line in found] == pytest.approx(rates, rel=1e-14, abs=0)
    assert [line["train/loss"] for line in found] == pytest.approx(losses, rel=1e-6, abs=0)
    assert [line["grad_norm"] for line in found] == pytest.approx(norms, rel=1e-4, abs=0)
    assert min(norms) > 0.05  # clipping changes every step


def test_batch_ramp_data_position_depends_only_on_step(recipe: dict[str, Any]) -> None:
    train(recipe)
    batch = BatchSchedule(16, 4, 6)
    for folder in list_checkpoints(Path(recipe["run"]["dir"])):
        state = load_trainer_state(folder)
        assert state["loader"]["rows_seen"] == batch.before(state["step"])
    found = metrics(recipe)
    assert [line["global_batch_tokens"] for line in found] == [32 * rows for rows in ROWS]
    assert [line["tokens_seen"] for line in found] == [32 * sum(ROWS[:n]) for n in range(1, 10)]


def test_batch_ramp_step_equals_that_of_run_with_its_batch_size(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe["model"]["embd_pdrop"] = 0.0
    seen: list[torch.Tensor] = []
    real = TokenLoader.next_batch

    def next_batch(loader: TokenLoader) -> Any:
        batch = real(loader)
        seen.append(batch.input_ids)
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(TokenLoader, "next_batch", next_batch)
        train(recipe)
        ramped = torch.cat(seen)
        seen.clear()
        wide = named(recipe, "wide")
        wide["batch"] = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
        wide["schedule"] = {"max_steps": 24, "warmup_steps": 2}
        train(wide)
    # The same rows in the same order, each exactly once.
    assert torch.equal(ramped, torch.cat(seen))
    # The first two steps, before the batch grows, are identical.
    assert [x["grad_norm"] for x in metrics(recipe)[:2]] == [
        x["grad_norm"] for x in metrics(wide)[:2]
    ]


def test_batch_ramp_epoch_has_more_steps(recipe: dict[str, Any]) -> None:
    recipe["schedule"] = {"epochs": 1}
    result = train(recipe)
    rows = -(-result.tokens_seen // 32)
    assert BatchSchedule(16, 4, 6).before(result.step - 1) < rows
    resolved = parse_recipe(recipe)
    assert resolved.batch.schedule(32).before(result.step) >= rows


@pytest.mark.slow
def test_report_draws_learning_rate_and_batch_size(recipe: dict[str, Any]) -> None:
    plain = named(recipe, "plain")
    plain["batch"] = {"micro_batch_size": 2}
    for one in (recipe, plain):
        train(one)
    page = run_page(read_run(Path(recipe["run"]["dir"])))
    assert "Tokens per step" in page
    assert "Learning rate" in page
    other = read_run(Path(plain["run"]["dir"]))
    assert "Tokens per step" not in run_page(other)
    assert len(picture_of(read_run(Path(recipe["run"]["dir"])))) > len(picture_of(other))


@pytest.mark.parametrize(
    "batch, says",
    [
        ({"ramp_steps": None}, "ramp_start_tokens and ramp_steps require each other"),
        ({"ramp_start_tokens": None}, "ramp_start_tokens and ramp_steps require each other"),
        ({"global_batch_tokens": None}, "ramp_start_tokens needs global_batch_tokens"),
        ({"ramp_start_tokens": 192}, "global_batch_tokens 512 must be a multiple of ramp_start"),
        ({"ramp_start_tokens": 512}, "global_batch_tokens 512 must be a multiple of ramp_start"),
        ({"ramp_start_tokens": 1024}, "global_batch_tokens 512 must be a multiple of ramp_start"),
        ({"ramp_start_tokens": 32}, "ramp_start_tokens 32 is not a multiple of micro_batch_size"),
        ({"micro_batch_size": 8}, "ramp_start_tokens 128 is not a multiple of micro_batch_size"),
    ],
)
def test_batch_ramp_indivisible_sizes_raise_config_error(
    recipe: dict[str, Any], batch: dict[str, Any], says: str
) -> None:
    recipe["batch"] |= batch
    with pytest.raises(ConfigError, match=says) as error:
        train(recipe)
    assert "\n" not in str(error.value)


def test_batch_ramp_with_optimizer_in_backward_raises_config_error(recipe: dict[str, Any]) -> None:
    recipe["efficiency"]["optimizer_in_backward"] = True
    recipe["optimizer"] = {"max_grad_norm": 0.0}
    with pytest.raises(ConfigError, match=r"batch\.ramp_start_tokens raises the number of passes"):
        train(recipe)


@pytest.mark.usefixtures("forked_processes")
def test_batch_ramp_auto_micro_batch_divides_first_step(recipe: dict[str, Any]) -> None:
    for size in (None, "auto"):
        again = named(recipe, f"open-{size}", batch={"micro_batch_size": size})
        train(again)
        assert [line["global_batch_tokens"] for line in metrics(again)] == [32 * n for n in ROWS]
