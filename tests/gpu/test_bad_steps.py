"""Steps that do not fit into memory, and steps that would do harm."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_recipe import plain_recipe
from small import LLAMA, SEQ_LEN, batch_of, new_model
from test_bad_gradients import Spoiler
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware, peak_flops
from firstlight.methods import loss_function
from firstlight.optim.new_model import NEW_MODEL
from firstlight.recipe import GuardConfig, parse_recipe
from firstlight.run_log.reader import read_json_lines
from firstlight.training.guard import DivergedError, Guard
from firstlight.training.loop import train
from firstlight.training.program import TrainingProgram

_STEPS = 6


class Memory:
    """Runs out of memory in chosen forward or backward passes, by requesting a tensor that fits on
    no device.

    Attributes:
        rows: rows of every forward pass so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        self.rows: list[int] = []
        self.raised: list[type[BaseException]] = []
        self._device, self._failures = device, dict[int, str]()
        monkeypatch.setattr("firstlight.training.program.loss_function", self._watched)

    def runs_out(self, failures: dict[int, str]) -> None:
        """Run out of memory from now on, in the "forward" or "backward" part of the passes with
        these numbers.
        """
        self.rows.clear()
        self._failures = dict(failures)

    def _ask_for_too_much(self) -> None:
        try:
            torch.empty(1 << 55, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            self.raised.append(type(error))
            raise

    def _watched(self, *arguments: Any, **options: Any) -> Any:
        loss_sum = loss_function(*arguments, **options)

        def watched(*batch: Any) -> Tensor:
            self.rows.append(len(batch[0]))
            where = self._failures.pop(len(self.rows), "")
            loss: Tensor = loss_sum(*batch)
            if where == "forward":
                self._ask_for_too_much()
            if where == "backward":
                loss.register_hook(lambda _: self._ask_for_too_much())  # type: ignore[no-untyped-call]
            return loss

        return watched


def run_of(recipe: dict[str, Any], device: torch.device, run: Path, rows: int = 8) -> list[float]:
    """Train, and return the losses."""
    values = copy.deepcopy(recipe)
    values |= {
        "run": {"dir": str(run), "device": device.type},
        "batch": {"micro_batch_size": rows, "global_batch_tokens": 8 * 32},
        "schedule": {"max_steps": _STEPS, "warmup_steps": 2},
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
        "evaluation": {"every_steps": 0, "max_rows": 1, "sample_tokens": 1},
    }
    train(parse_recipe(values))
    return [record["train/loss"] for record in read_json_lines(run / "metrics.jsonl")]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_on_device_halves_micro_batch_and_training_continues(
    where: str,
    recipe: dict[str, Any],
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(monkeypatch, device)
    whole = run_of(recipe, device, tmp_path / "whole")
    memory.runs_out({3: where, 5: where})
    short = run_of(recipe, device, tmp_path / "short")
    # The third pass fails, and then, in the third step's second attempt, the second of two passes.
    assert memory.rows == [8] * 3 + [4] * 2 + [2] * (4 * (_STEPS - 2))
    assert short == pytest.approx(whole, rel=1e-5)
    events = read_json_lines(tmp_path / "short" / "events.jsonl")
    assert [(event["step"], event["micro_batch_rows"]) for event in events] == [(3, 4), (3, 2)]
    if device.type == "cuda":
        assert memory.raised == [torch.OutOfMemoryError] * 2


@pytest.fixture
def whole_memory() -> Iterator[None]:
    """Restore the limit of this process's GPU memory afterwards."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda_only("a CPU's memory has no limit for one process's tensors")
@pytest.mark.usefixtures("whole_memory")
def test_batch_larger_than_device_memory_is_split_until_it_fits(
    recipe: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    """Set the allocator's limit between the memory of 32 rows and of 16 rows."""
    recipe["model"] |= {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    recipe["data"]["seq_len"] = 64
    recipe |= {
        "schedule": {"max_steps": 3, "warmup_steps": 1},
        "efficiency": {"precision": "fp32", "compile": False, "attention": "plain"},
        "evaluation": {"every_steps": 0, "max_rows": 1, "sample_tokens": 1},
    }

    def losses(name: str, rows: int) -> tuple[list[float], int]:
        gc.collect()  # the model of the previous run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        recipe["run"] = {"dir": str(tmp_path / name), "device": "cuda"}
        recipe["batch"] = {"micro_batch_size": rows, "global_batch_tokens": 32 * 64}
        train(parse_recipe(recipe))
        records = read_json_lines(tmp_path / name / "metrics.jsonl")
        return [r["train/loss"] for r in records], torch.cuda.max_memory_reserved(device)

    peak_flops(device, torch.float32)  # measured once, with matrix products
    expected, most = losses("whole", 32)
    _, least = losses("halves", 16)
    assert most > 1.2 * least, "the limit would be a matter of luck"
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((0.4 * most + 0.6 * least) / total)
    found, _ = losses("short", 32)
    assert found == pytest.approx(expected, rel=1e-5)
    events = read_json_lines(tmp_path / "short" / "events.jsonl")
    assert [event["event"] for event in events] == ["out of memory"] * len(events)
    assert events[-1]["micro_batch_rows"] in (8, 16)


_SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "fused": {"optimizer": {"implementation": "fused"}},
    "muon": {"optimizer": {"name": "muon"}},
    "muon of new models": {"optimizer": {**NEW_MODEL["optimizer"], "weight_decay": 0.1}},
    "lion": {"optimizer": {"name": "lion", "cautious_weight_decay": True}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "bf16": {"efficiency": {"precision": "bf16"}},
    "bf16_params": {"efficiency": {"precision": "bf16_params"}},
    "fp16": {"efficiency": {"precision": "fp16"}},
}
_MICRO_BATCHES, _BAD_STEPS = 3, 6


def program_of(settings: dict[str, Any], hardware: Hardware) -> TrainingProgram:
    recipe = plain_recipe(
        {
            "model": LLAMA.model_dump(),
            "data": {"dir": "none", "seq_len": SEQ_LEN},
            "batch": {"micro_batch_size": 2},
            "optimizer": {"learning_rate": 1e-3, **settings.get("optimizer", {})},
            "efficiency": {
                "precision": "fp32",
                "compile": False,
                "loss_chunk_tokens": 0,
                "attention": "sdpa",
                **settings.get("efficiency", {}),
            },
        }
    )
    return TrainingProgram(recipe, new_model(LLAMA), hardware)


def everything(program: TrainingProgram) -> dict[str, bytes]:
    """Return all weights, master weights and moments as bytes."""
    with program.optimizer.master_weights():
        tensors = {name: p.detach().clone() for name, p in program.model.state_dict().items()}
    tensors |= {f"{name} rounded": p.detach() for name, p in program.model.state_dict().items()}
    tensors |= program.optimizer.state_tensors()
    return {
        name: tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def batches_of(generator: random.Random, device: torch.device) -> list[Batch]:
    rows = [SEQ_LEN, 5]
    return [batch_of(rows, generator.getrandbits(32)).to(device) for _ in range(_MICRO_BATCHES)]


@pytest.mark.parametrize("name", _SETTINGS)
def test_non_finite_loss_or_gradient_on_device_changes_no_bit(
    name: str, hardware: Hardware
) -> None:
    generator = random.Random(f"bad gradients {name}")
    program = program_of(_SETTINGS[name], hardware)
    assert {p.device.type for p in program.model.parameters()} == {hardware.device.type}
    guard = Guard(GuardConfig(spike_z_score=8.0))
    spoiler = Spoiler(program, generator)
    for _ in range(20):  # from then on, a loss jump is a spike
        program.step(batches_of(generator, hardware.device), 1.0, guard.accepts)
    for _ in range(_BAD_STEPS):
        if program.scaler is not None:
            program.scaler.scale = 1024.0  # halved by each non-finite one
        before = everything(program)
        said = spoiler.draw()
        bad = program.step(batches_of(generator, hardware.device), 1.0, guard.accepts)
        assert bad.skipped, said
        assert everything(program) == before, said
        if spoiler.kind != "leap":
            # Without a guard, a GPU's update starts before the host knows if the step is finite.
            spoiler.micro_batch = 1
            if program.scaler is not None:
                assert program.step(batches_of(generator, hardware.device), 1.0).skipped
            else:
                with pytest.raises(DivergedError):
                    program.step(batches_of(generator, hardware.device), 1.0)
            assert everything(program) == before, said
        good = program.step(batches_of(generator, hardware.device), 1.0, guard.accepts)
        assert not good.skipped, said
        assert everything(program) != before, said
