"""A step that runs out of memory is done again with smaller micro-batches."""

from __future__ import annotations

import copy
import random
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import MEASURED, one_thread
from scale import FULL, cases
from torch import Tensor

from firstlight.checkpoint.selection import list_checkpoints
from firstlight.errors import TrainingError
from firstlight.methods import loss_function
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import train
from firstlight.weights.stored import WEIGHTS_NAME

_STEPS = 8


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


def no_memory_on_a_cpu() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)  # torch's own words


def no_memory_on_a_gpu() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB"
    )


def no_memory_in_python() -> None:
    raise MemoryError


_FAILURES: list[Callable[[], None]] = [no_memory_on_a_cpu, no_memory_on_a_gpu, no_memory_in_python]


class Memory:
    """Runs out at chosen forward or backward passes, counted over the whole run.

    Attributes:
        rows: of every forward pass so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self._failures: dict[int, tuple[str, Callable[[], None]]] = {}
        self._lost: weakref.ref[Tensor] | None = None
        monkeypatch.setattr("firstlight.training.program.loss_function", self._watched)

    def runs_out(self, failures: Mapping[int, tuple[str, Callable[[], None]]]) -> None:
        """From now on: at the passes of these numbers, in their "forward" or "backward" part."""
        self.rows.clear()
        self._failures = dict(failures)

    def _watched(self, *arguments: Any, **options: Any) -> Any:
        loss_sum = loss_function(*arguments, **options)

        def watched(*batch: Any) -> Tensor:
            # Nothing of the failed attempt is in the way of the next.
            assert self._lost is None or self._lost() is None
            self.rows.append(len(batch[0]))
            where, failure = self._failures.pop(len(self.rows), ("", None))
            loss: Tensor = loss_sum(*batch)
            if failure is not None:
                self._lost = weakref.ref(loss)
                if where == "forward":
                    failure()
                loss.register_hook(lambda _: failure())  # type: ignore[no-untyped-call]
            return loss

        return watched


@pytest.fixture(autouse=True)
def known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.training.run.peak_flops", lambda *_: 1e12)


class StoppedError(Exception):
    """Ends a run from within."""


def tiny(recipe: dict[str, Any], folder: Path, rows: int, **sections: Mapping[str, Any]) -> Any:
    """A run of global batches of 8 rows, with dropout."""
    values = copy.deepcopy(recipe)
    values |= {
        "run": {"dir": str(folder), "device": "cpu"},
        "model": {
            "model_type": "gpt2",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
        },
        "batch": {"micro_batch_size": rows, "global_batch_tokens": 8 * 32},
        "schedule": {"max_steps": _STEPS, "warmup_steps": 2},
        "optimizer": {"learning_rate": 1e-2},
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
        "evaluation": {"every_steps": 0, "max_rows": 1, "sample_tokens": 1},
        "checkpoint": {"every_steps": 1, "asynchronous": False},
    }
    for section, given in sections.items():
        before = {} if "model_type" in given else values.get(section, {})
        values[section] = {**before, **given}
    return values


def stop_after(recipe: Any, step: int) -> None:
    def on_step(record: Mapping[str, Any]) -> None:
        # The record of the step after is written, and its checkpoint is not.
        if record["step"] == step + 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, on_step=on_step)


def switched(recipe: dict[str, Any], folder: Path, step: int, before: int, rows: int) -> Path:
    """A run that is resumed by hand with other micro-batches from a step on."""
    if step > 1:
        stop_after(tiny(recipe, folder, before), step - 1)
    train(tiny(recipe, folder, rows), resume=True)
    return folder


def final(run: Path) -> tuple[list[Any], bytes, bytes]:
    """The metrics that are no measurements, the weights and the moments."""
    records = [
        {k: v for k, v in record.items() if k not in MEASURED and not k.startswith("val")}
        for record in read_json_lines(run / "metrics.jsonl")
    ]
    for record in records:
        for key in ("perplexity", "bits_per_byte"):
            record.pop(key, None)
    last = list_checkpoints(run)[-1]
    return (
        records,
        (last / WEIGHTS_NAME).read_bytes(),
        (last / "optimizer.safetensors").read_bytes(),
    )


def losses(run: Path) -> list[float]:
    return [record["train/loss"] for record in read_json_lines(run / "metrics.jsonl")]


def test_out_of_memory_step_equals_that_of_smaller_micro_batches(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    generator, memory = random.Random("out of memory"), Memory(monkeypatch)
    expected: dict[int, Any] = {}
    count = cases(2, 60)
    for number in range(count):
        step, part = generator.randint(1, _STEPS), generator.randint(1, 2)
        where, failure = generator.choice(("forward", "backward")), generator.choice(_FAILURES)
        said = f"step {step}, micro-batch {part}, {where}, {failure.__name__}"
        run, first = tmp_path / f"run-{number}", 2 * (step - 1) + part
        memory.runs_out({first: (where, failure)})
        train(tiny(recipe, run, 4))
        assert memory.rows == [4] * first + [2] * (4 * (_STEPS - step + 1)), said
        event = {"step": step, "event": "out of memory", "micro_batch_rows": 2, "before": 4}
        assert read_json_lines(run / "events.jsonl") == [event], said
        if step not in expected:
            expected[step] = final(switched(recipe, tmp_path / f"by-hand-{step}", step, 4, 2))
        assert final(run) == expected[step], said
    record_property("cases", ("micro-steps out of memory", count))


def test_out_of_memory_run_has_loss_curve_of_undisturbed_run(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch)
    no_dropout = {"model": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
    memory.runs_out({})
    train(tiny(recipe, tmp_path / "whole", 8, **no_dropout))
    memory.runs_out({3: ("backward", no_memory_on_a_cpu), 5: ("forward", no_memory_on_a_gpu)})
    train(tiny(recipe, tmp_path / "short", 8, **no_dropout))
    # The third pass fails, then in the third step's second attempt the second of two.
    assert memory.rows == [8] * 3 + [4] * 2 + [2] * (4 * (_STEPS - 2))
    assert losses(tmp_path / "short") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    events = read_json_lines(tmp_path / "short" / "events.jsonl")
    assert [(event["step"], event["micro_batch_rows"]) for event in events] == [(3, 4), (3, 2)]


def test_out_of_memory_resumed_run_keeps_smaller_micro_batches(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, failure = Memory(monkeypatch), {3: ("forward", no_memory_on_a_cpu)}
    memory.runs_out(failure)
    train(tiny(recipe, tmp_path / "whole", 4))
    memory.runs_out(failure)
    stop_after(tiny(recipe, tmp_path / "broken", 4), 4)
    (tmp_path / "broken" / "events.jsonl").unlink()  # it is made again
    memory.runs_out({})
    train(tiny(recipe, tmp_path / "broken", 4), resume=True)
    assert memory.rows == [2] * (4 * (_STEPS - 4))
    assert final(tmp_path / "broken") == final(tmp_path / "whole")
    both = [read_json_lines(tmp_path / name / "events.jsonl") for name in ("broken", "whole")]
    assert both[0] == both[1] != []
    # Who says another size gets it.
    memory.runs_out({})
    train(tiny(recipe, tmp_path / "broken", 8, schedule={"max_steps": _STEPS + 1}), resume=True)
    assert memory.rows == [8]


class Adviser:
    """Knows what would have saved the memory."""

    def forecast(self, *_: object) -> None:
        return None

    def advise(self, recipe: Any, hardware: object, processes: int) -> str:
        return f"with {recipe.batch.rows} rows, cheese fills it; without would be 0.5 of the speed"


def test_out_of_memory_message_names_cause_and_remedy(
    recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    memory = Memory(monkeypatch)
    memory.runs_out({3: ("forward", no_memory_on_a_cpu)})
    train(tiny(recipe, tmp_path / "run", 4), forecaster=Adviser(), progress=True)
    said = (
        "out of memory with a micro-batch of 4 rows: with 4 rows, cheese fills it; without would "
        "be 0.5 of the speed; the run continues with 2"
    )
    assert said in capfd.readouterr().err
    memory.runs_out(dict.fromkeys(range(1, 10), ("forward", no_memory_on_a_cpu)))
    with pytest.raises(TrainingError, match="to 512; with 1 rows, cheese fills it"):
        train(tiny(recipe, tmp_path / "none", 4), forecaster=Adviser())


def test_out_of_memory_with_one_row_raises_training_error_with_advice(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch)
    memory.runs_out(dict.fromkeys(range(3, 10), ("forward", no_memory_on_a_cpu)))
    said = r"step 2: out of memory with a micro-batch of one row .*lower data\.seq_len"
    with pytest.raises(TrainingError, match=said):
        train(tiny(recipe, tmp_path / "run", 4))
    assert memory.rows == [4, 4, 4, 2, 1]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000001"]


def test_out_of_memory_with_optimizer_in_backward_is_not_retried(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them are made by then."""
    memory = Memory(monkeypatch)
    values = tiny(
        recipe,
        tmp_path / "run",
        8,
        efficiency={"optimizer_in_backward": True},
        optimizer={"max_grad_norm": 0.0},
    )
    memory.runs_out({3: ("backward", no_memory_on_a_gpu)})
    said = "in the update, with a micro-batch of 8 rows .*seq_len; with 8 rows, cheese fills it"
    with pytest.raises(TrainingError, match=said):
        train(values, forecaster=Adviser())
    assert memory.rows == [8] * 3


@pytest.mark.parametrize("failure", _FAILURES)
def test_out_of_memory_in_update_raises_training_error_with_advice(
    failure: Callable[[], None],
    recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first makes the moments."""
    monkeypatch.setattr("torch.optim.AdamW.step", lambda *_, **__: failure())
    said = "step 1: out of memory in the update, .*seq_len; with 8 rows, cheese fills it"
    with pytest.raises(TrainingError, match=said):
        train(tiny(recipe, tmp_path / "run", 8), forecaster=Adviser())


_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "mixture of experts": {
        "model": {
            "model_type": "mixtral",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32,
        }
    },
    "compiled": {"efficiency": {"compile": True, "compile_backend": "aot_eager"}},
    "fp16": {"efficiency": {"precision": "fp16"}},
    "bf16_params": {"efficiency": {"precision": "bf16_params"}},
}


# Compiling takes half of the time of all.
@pytest.mark.parametrize("name", [name for name in _METHODS if FULL or name != "compiled"])
def test_out_of_memory_attempt_leaves_no_side_effects(
    name: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router statistics, fp32 gradients of masters, the loss scale."""
    memory = Memory(monkeypatch)
    memory.runs_out({2: ("backward", no_memory_on_a_cpu)})
    train(tiny(recipe, tmp_path / "run", 4, **_METHODS[name]))
    assert memory.rows[:4] == [4, 4, 2, 2]
    memory.runs_out({})
    train(tiny(recipe, tmp_path / "other", 2, **_METHODS[name]))
    assert final(tmp_path / "run") == final(tmp_path / "other")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("chose_compiling", [True, False])
def test_failed_compiling_is_left_out_only_if_run_chose_it(
    recipe: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chose_compiling: bool,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("the compiler\nis broken")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fails)
    recipe["schedule"] = {"max_steps": 2}
    recipe["efficiency"] = {"precision": "fp32", "compile": True}
    if not chose_compiling:
        with pytest.raises(TrainingError, match=r"^step 1: torch.compile failed \(.*broken\): set"):
            train(recipe)
        return
    result = train(recipe, chose_compiling=True, progress=True)
    told = capfd.readouterr().err
    assert re.search("torch.compile failed .*the compiler is broken.*: the run continues", told)
    plain = recipe | {
        "efficiency": {"precision": "fp32", "compile": False},
        "run": recipe["run"] | {"dir": str(tmp_path / "plain")},
    }
    assert train(plain).train_loss == result.train_loss
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
