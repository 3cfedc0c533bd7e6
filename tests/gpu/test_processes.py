"""Several processes compared with one, on a device: NCCL with one process, gloo with two on one
GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from plain_recipe import plain_recipe
from small import LLAMA, SEQ_LEN, batch_of, new_model
from spawned import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from firstlight.checkpoint.selection import list_checkpoints
from firstlight.cli.main import main
from firstlight.hardware.device import Hardware
from firstlight.optim.dtensors import full_tensor
from firstlight.parallel import World
from firstlight.parallel.engine import DDPEngine, DistributedConfig, Engine
from firstlight.parallel.group import group_of_one
from firstlight.parallel.sharding import FSDPEngine
from firstlight.run_log.reader import read_json_lines
from firstlight.training.program import TrainingProgram

_DISTRIBUTED = Path(__file__).parents[1] / "distributed"


class FSDPOfOne(FSDPEngine):
    """FSDP2 with one process, whose mesh would have no dimension."""

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (1,), mesh_dim_names=("shard",))


#: Engines for several processes, used with one, which `make_engine` rejects as useless.
_ENGINES: dict[str, type[Engine]] = {"ddp": DDPEngine, "fsdp": FSDPOfOne}


def steps(
    hardware: Hardware, engine: Engine | None, precision: str
) -> tuple[list[float], dict[str, Any]]:
    """Run six steps of two micro-batches, and return losses, norms and the final weights."""
    recipe = plain_recipe(
        {
            "model": LLAMA.model_dump(),
            "data": {"dir": "none", "seq_len": SEQ_LEN},
            "batch": {"micro_batch_size": 2},
            "optimizer": {"learning_rate": 1e-3},
            "efficiency": {"precision": precision, "compile": False, "loss_chunk_tokens": 0},
        }
    )
    program = TrainingProgram(recipe, new_model(LLAMA), hardware, engine)
    found: list[float] = []
    for number in range(6):
        batches = [batch_of([SEQ_LEN, 5], 2 * number + i).to(hardware.device) for i in range(2)]
        result = program.step(batches, 1.0)
        found += [result.loss, result.grad_norm]
    parameters = program.optimizer.parameters
    assert {p.device.type for p in parameters.values()} == {hardware.device.type}
    return found, {name: full_tensor(p.detach()).float().cpu() for name, p in parameters.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_engine_with_one_process_trains_like_plain_loop(
    name: str, precision: str, hardware: Hardware
) -> None:
    expected, weights = steps(hardware, None, precision)
    with group_of_one(hardware.device):
        found, own = steps(
            hardware,
            _ENGINES[name](DistributedConfig(), World(0, 1, 0, 1), hardware.device),
            precision,
        )
    assert not dist.is_initialized()
    # With bf16, fsdp rounds each layer's weights, and autocast each product's inputs.
    assert found == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 3e-2)
    if precision == "fp32":
        for key, weight in weights.items():
            torch.testing.assert_close(own[key], weight, rtol=0, atol=1e-4)


def test_process_group_has_backend_for_each_tensor_device(device: torch.device) -> None:
    with group_of_one(device):
        for place in {device.type, "cpu"}:
            tensor = torch.arange(5.0, device=place)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
            gathered = [torch.empty_like(tensor)]
            dist.all_gather(gathered, tensor)
            assert torch.equal(gathered[0], tensor)
        found = dist.get_backend_config()
    assert found == f"cpu:gloo,cuda:{'nccl' if device.type == 'cuda' else 'gloo'}"


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_on_one_device_match_gradient_of_one(
    engine: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL does not support two processes on one GPU, so gloo sends the GPU's tensors."""
    if engine == "fsdp" and device.type == "cuda":
        pytest.skip("torch 2.11's gloo ends with a segmentation fault where it gathers GPU shards")
    monkeypatch.setenv("RANKS_DEVICE", device.type)
    cases = [
        {
            "distributed": {"engine": engine},
            "micro": micro,
            "accumulation": accumulation,
            "masks": masks,
            "family": family,
            "dtype": "float64" if family == "llama" else "float32",
        }
        for micro, accumulation, masks, family in (
            (1, 1, "unequal", "llama"),
            (2, 3, "partial", "gpt2"),
            (2, 2, "unequal", "tied"),
        )
    ]
    driver = _DISTRIBUTED / "gradient_driver.py"
    for result in run_ranks(driver, [json.dumps(cases)], 2, timeout=120):
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"]
        assert len(lines) == len(cases)
        for line in lines:
            bound = 1e-12 if line["dtype"] == "float64" else 2e-5
            assert line["difference"] < bound, line
            assert line["loss"] < bound, line
            assert line["norm"] < bound, line


def recipe_of(run: Path, data: Path, device: str) -> dict[str, Any]:
    return {
        "run": {"dir": str(run), "device": device, "deterministic": True},
        "model": LLAMA.model_dump() | {"vocab_size": 0, "max_position_embeddings": 16},
        "data": {"dir": str(data), "seq_len": 16},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 4, "warmup_steps": 1},
        "evaluation": {"every_steps": 0, "max_rows": 2, "sample_tokens": 1},
        "efficiency": {"precision": "fp32", "compile": False},
    }


@pytest.mark.cuda_only("processes on CPUs share them")
def test_two_processes_on_one_gpu_fail_with_one_line(tmp_path: Path, data: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has several GPUs")
    recipe = recipe_of(tmp_path / "run", data, "cuda")
    request = json.dumps({"recipe": recipe})
    for result in run_ranks(_DISTRIBUTED / "train_driver.py", [request], 2, timeout=120):
        assert result.returncode != 0
        assert "ranks 0 and 1 on" in result.stderr
        assert "share one GPU" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_nproc_auto_starts_one_process_per_gpu(
    tmp_path: Path, data: Path, device: torch.device
) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has several GPUs")
    weights, losses = [], []
    for name, more in (("auto", ["--nproc", "auto"]), ("plain", [])):
        path = tmp_path / f"{name}.yaml"
        run = tmp_path / name
        path.write_text(yaml.safe_dump(recipe_of(run, data, device.type)), encoding="utf-8")
        assert main(["train", str(path), *more]) == 0
        weights.append((list_checkpoints(run)[-1] / "model.safetensors").read_bytes())
        losses.append([r["train/loss"] for r in read_json_lines(run / "metrics.jsonl")])
        assert len(read_json_lines(run / "starts.jsonl")) == 1
    assert weights[0] == weights[1]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
