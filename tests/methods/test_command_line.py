"""Every row of docs/methods.md, run with `firstlight train`, with a forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_documentation import _rows

import firstlight
from firstlight.cli.main import main
from firstlight.hardware.device import Hardware
from firstlight.planner.plan.automatic import forecast_run
from firstlight.recipe import Recipe, ResolvedRecipe
from firstlight.run_log.names import FORECAST_NAME
from firstlight.training.forecast import Forecast

#: Values for keys whose rows do not name a value.
_VALUES: dict[str, Any] = {
    "batch.micro_batch_size": 2,
    "batch.gradient_accumulation_steps": 2,
    "batch.divide_micro_batch": True,
    "batch.global_batch_tokens": 256,
    "efficiency.matmul_precision": "medium",
    "efficiency.bf16_residual": True,
    "efficiency.activation_memory_budget": 0.5,
    "efficiency.activation_offload": True,
    "efficiency.loss_chunk_tokens": 24,
    "efficiency.optimizer_in_backward": True,
    "efficiency.empty_cache_steps": 1,
    "efficiency.vocab_multiple": 64,
    "efficiency.compile": True,
    "efficiency.compile_regional": True,
    "lora.rank": 4,
    "lora.dora": True,
    "optimizer.embeddings_in_32_bits": True,
    "data.document_masking": True,
    "data.workers": 2,
    "data.prefetch": 3,
    "data.pin_memory": True,
}
#: Settings that a row requires.
_COMPILED = {"efficiency.compile": True}
_BESIDE: dict[str, dict[str, Any]] = {
    "batch.micro_batch_size: auto": {"batch.global_batch_tokens": 64},
    "efficiency.activation_checkpointing: budget": _COMPILED,
    "efficiency.activation_memory_budget": {
        **_COMPILED,
        "efficiency.activation_checkpointing": "budget",
    },
    "efficiency.optimizer_in_backward": {"optimizer.max_grad_norm": 0.0},
    "efficiency.compile_regional": _COMPILED,
    **{
        f"efficiency.compile_backend: {n}": _COMPILED
        for n in ("inductor", "cudagraphs", "aot_eager", "eager")
    },
    "efficiency.matmul_precision": {"efficiency.precision": "fp32"},
    "efficiency.bf16_residual": {"efficiency.precision": "bf16"},
    **{
        f"efficiency.compile_mode: {n}": _COMPILED
        for n in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    },
    "optimizer.eight_bit_library: auto": {"optimizer.name": "adamw8bit"},
    "optimizer.embeddings_in_32_bits": {"optimizer.name": "adamw8bit"},
    "optimizer.eight_bit_library: bitsandbytes": {"optimizer.name": "adamw8bit"},
    "optimizer.eight_bit_library: torchao": {"optimizer.name": "adamw8bit"},
    "lora.dora": {"lora.rank": 4},
    "lora.quantize: none": {"lora.rank": 4},
    "lora.quantize: nf4": {"lora.rank": 4},
}
#: Not available on a CPU.
_REFUSED = {
    "efficiency.precision: fp8",
    "efficiency.attention: efficient",
    "efficiency.attention: cudnn",
    "efficiency.attention: flex",
    "optimizer.name: paged_adamw8bit",
    "data.pin_memory",
}
#: Values of the plain recipe, values that other rows need or `test_methods` also trains, and values
#: for which a C++ compiler, several processes or fp16 on a CPU take many seconds.
_SLOW = (
    "precision: fp32",
    "attention: auto",
    "checkpointing: none",
    "compile: auto",
    "implementation: auto",
    "library: auto",
    "quantize: none",
    "name: adamw",
    "batch.divide_micro_batch",
    "matmul_precision",
    "data.prefetch",
    "implementation: foreach",
    "implementation: for-loop",
    "name: adamw8bit",
    "library: bitsandbytes",
    "precision: tf32",
    "attention: math",
    "aot_eager",
    "backend: cudagraphs",
    "precision: fp16",
    "torchao",
    "inductor",
    "budget",
    "size: auto",
    "efficiency.compile",
    "compile_regional",
    "compile_mode: default",
    "compile_mode: reduce-overhead",
    "max-autotune",
    "no-cudagraphs",
)


class _Here:
    """A forecaster that works in this process, which saves importing torch in another one."""

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None:
        """Do nothing: there is no process to start."""

    def forecast(self, recipe: Recipe, hardware: Hardware, processes: int) -> Forecast | None:
        assert isinstance(recipe, ResolvedRecipe)
        return forecast_run(recipe, hardware, processes)

    def advise(self, *_: object) -> None:
        return None


@pytest.fixture
def forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.planner.plan.processes.RunForecaster", _Here)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Train a model to start from."""
    recipe = tmp_path_factory.mktemp("base") / "recipe.yaml"
    values = _recipe(data, recipe.parent / "run", {"evaluation.every_steps": 0})
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    return firstlight.train(recipe).checkpoint


def _recipe(data: Path, run: Path, settings: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "run": {"dir": str(run), "device": "cpu"},
        "model": {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
        },
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 2},
        "schedule": {"max_steps": 2},
        "evaluation": {"max_rows": 1, "sample_prompts": [], "on_start": False},
        "efficiency": {"precision": "fp32", "compile": False},
    }
    for name, value in settings.items():
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return values


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] if row.endswith(_SLOW) else []) for row in _rows()],
)
@pytest.mark.usefixtures("forecast")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_every_method_trains_from_command_line(
    row: str, data: Path, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key, _, value = row.partition(": ")
    settings = {**_BESIDE.get(row, {}), key: value or _VALUES[key]}
    values = _recipe(data, tmp_path / "run", settings)
    recipe = tmp_path / "recipe.yaml"
    start: list[str] = []
    if "lora" in values:
        del values["model"]
        start = ["--init-from", str(base)]
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    code = main(["train", str(recipe), *start])
    said = capfd.readouterr().err
    if row in _REFUSED:
        assert code == 2, said
        assert said.count("error:") == 1
        return
    assert code == 0, said
    assert "can't be predicted" not in said
    found = json.loads((tmp_path / "run" / FORECAST_NAME).read_text(encoding="utf-8"))
    assert found["predicted"]["peak_bytes"] > 0
