"""Runs with sharded checkpoints: the same training, the same values on disk, and any engine can
resume from them.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from plain_recipe import plain_recipe
from spawned import free_port, run_ranks
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import firstlight
from firstlight.checkpoint.checkpoint import is_sharded_checkpoint, load_trainer_state
from firstlight.checkpoint.selection import newest_checkpoint
from firstlight.checkpoint.sharded import MOMENTS, read_full_tensors
from firstlight.conversion.convert import convert
from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError, ModelError
from firstlight.hardware.device import find_hardware
from firstlight.lora.loading import load_model
from firstlight.recipe.conflicts import require_combination
from firstlight.tokenizer import Tokenizer
from firstlight.training import loop
from firstlight.training.checkpoints import captured
from firstlight.training.run import Run
from firstlight.training.start import open_run

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("trains_driver.py")

_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "intermediate_size": 32, "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral",
        "intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    draw = random.Random(0)
    words = "the a cat dog sees runs home and then sleeps under old trees".split()
    text = " ".join(draw.choice(words) for _ in range(4000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text.txt"], tokenizer, folder / "out", workers=1)
    return folder / "out"


def _recipe(shards: Path, run: Path, *, sharded: bool, family: str = "llama", **more: Any) -> Any:
    return {
        "run": {"dir": str(run), "device": "cpu"},
        "model": {**_SIZES, **_MODELS[family]},
        "data": {"dir": str(shards), "seq_len": 16},
        "batch": {"micro_batch_size": 1, "global_batch_tokens": 128},
        "schedule": {"max_steps": 6},
        "evaluation": {"every_steps": 3, "max_rows": 7, "sample_tokens": 4, "on_start": False},
        "checkpoint": {"every_steps": 3, "keep_last": 10, "sharded": sharded},
        # The vocabulary has padding rows.
        "efficiency": {"precision": "fp32", "compile": False, "vocab_multiple": 64},
        **more,
    }


def _train(requests: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    """Return the metrics of each run, from the main process."""
    # Each run has its own port: a fast process must not join the rendezvous of the run before.
    requests = [{**request, "port": free_port()} for request in requests]
    results = run_ranks(_DRIVER, [json.dumps(requests)], size)
    for rank, result in enumerate(results):
        assert result.returncode == 0, f"rank {rank}: {result.stderr}"
    runs: list[list[dict[str, Any]]] = [[]]
    for line in results[0].stdout.splitlines():
        if line[:1] == "{":
            record = json.loads(line)
            if "end" in record:
                runs.append([])
            else:
                runs[-1].append(record)
    return runs[:-1]


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def _without_last(run: Path, copy: Path) -> Path:
    """Copy a run as if it had been stopped after its first checkpoint."""
    shutil.copytree(run, copy)
    shutil.rmtree(_checkpoint(copy, 6))
    return copy


def _whole(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    names = ("model.safetensors", "optimizer.safetensors")
    return {name: safetensors.torch.load_file(folder / name) for name in names}


def _consolidated(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a sharded checkpoint, with the weights merged by torch."""
    parts = out.with_name(f"{out.name}-parts")
    parts.mkdir()
    # torch's function does not support integers, such as the random states among the other tensors.
    for path in folder.glob("model.shard-*"):
        shutil.copy(path, parts)
    out.mkdir()
    names = {name: 1 for path in parts.iterdir() for name in safetensors.torch.load_file(path)}
    consolidate_safetensors_files(str(parts), str(out), names)
    (file,) = out.glob("*.safetensors")
    return {**safetensors.torch.load_file(file), **read_full_tensors(folder, MOMENTS)}


def _require_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name


def _captured(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state that one process has loaded, in the format of its checkpoint."""
    found = {}

    def open_and_look(run: Run, *, shown: bool) -> Any:
        state = captured(run)
        for name, tensors in (("model", state.model), ("optimizer", state.optimizer)):
            found[f"{name}.safetensors"] = {n: t.clone() for n, t in tensors.items()}
        return open_run(run, shown=shown)

    # The loader is at its start position only after it has been opened.
    class Loader:
        rows_per_epoch = 1

        def state_dict(self) -> dict[str, int]:
            return {"rows_seen": 0}

    with monkeypatch.context() as patch:
        patch.setattr(loop, "open_run", open_and_look)
        patch.setattr(Run, "loader", Loader(), raising=False)
        firstlight.train(recipe, resume=True)
    return found


@pytest.fixture(scope="module", params=["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shards: Path
) -> tuple[Path, str]:
    """Train the same run with sharded and with regular checkpoints, in two processes."""
    folder, family = tmp_path_factory.mktemp("runs"), request.param
    fsdp = {"distributed": {"engine": "fsdp"}, "family": family}
    pieces = _recipe(shards, folder / "pieces", sharded=True, **fsdp)
    whole = _recipe(shards, folder / "whole", sharded=False, **fsdp)
    one, two = _train([{"recipe": pieces}, {"recipe": whole}], 2)
    assert len(one) == 6
    for name in ("train/loss", "grad_norm", "val/loss"):
        assert [line.get(name) for line in one] == [line.get(name) for line in two]
    return folder, family


def test_sharded_checkpoint_holds_same_state_as_whole_one(
    runs: tuple[Path, str], tmp_path: Path
) -> None:
    folder, family = runs
    early, last = (_checkpoint(folder / "pieces", step) for step in (3, 6))
    assert is_sharded_checkpoint(early)
    assert not (early / "model.safetensors").exists()
    assert {p.name for p in early.glob("*.safetensors")} == {
        f"{kind}.shard-0000{n}-of-00002.safetensors"
        for kind in ("model", "optimizer")
        for n in (1, 2)
    }
    # For the last checkpoint, a model folder is saved, too.
    for step, model in ((3, None), (6, last)):
        expected = _whole(_checkpoint(folder / "whole", step))
        if model is None:
            convert(early, tmp_path / "hf")
            model = tmp_path / "hf"
        found = safetensors.torch.load_file(model / "model.safetensors")
        _require_same(expected["model.safetensors"], found)
        assert load_model(model).model.config == load_model(last).model.config
        moments = _consolidated(_checkpoint(folder / "pieces", step), tmp_path / str(step))
        for name, tensor in expected["optimizer.safetensors"].items():
            assert torch.equal(moments.pop(name), tensor), name
        if family == "llama":  # its tensors have the same names in a file
            for name, tensor in expected["model.safetensors"].items():
                assert torch.equal(moments.pop(name)[: len(tensor)], tensor), name
            assert not moments
    states = [load_trainer_state(_checkpoint(folder / name, 6)) for name in ("pieces", "whole")]
    for state in states:
        for key in ("recipe", "pending", "events"):
            del state[key]
    assert states[0] == states[1]


def test_load_sharded_checkpoint_names_convert_command(runs: tuple[Path, str]) -> None:
    early = _checkpoint(runs[0] / "pieces", 3)
    with pytest.raises(ModelError, match=f"firstlight convert {early} --out DIR"):
        load_model(early)


def test_sharded_checkpoint_resumes_on_one_process(
    runs: tuple[Path, str], tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, family = runs
    expected = _whole(_checkpoint(folder / "whole", 3))
    run = _without_last(folder / "pieces", tmp_path / "run")
    recipe = _recipe(shards, run, sharded=False, family=family)
    found = _captured(recipe, monkeypatch)
    for name, tensors in expected.items():
        own = {n: t for n, t in tensors.items() if not n.startswith("rng.rank1.")}
        _require_same(own, found[name])
    newest, problems = newest_checkpoint(run)
    assert newest == _checkpoint(run, 6)
    assert not problems


def test_sharded_checkpoint_resumes_on_same_processes(
    runs: tuple[Path, str], tmp_path: Path, shards: Path
) -> None:
    folder, family = runs
    again = _without_last(folder / "pieces", tmp_path / "again")
    other = _without_last(folder / "pieces", tmp_path / "other")
    captured = tmp_path / "captured"
    fsdp = _recipe(shards, again, sharded=True, family=family, distributed={"engine": "fsdp"})
    ddp = _recipe(shards, other, sharded=False, family=family, distributed={"engine": "ddp"})
    _train(
        [
            {"recipe": fsdp, "resume": True},
            {"recipe": ddp, "resume": True, "captured": str(captured)},
        ],
        2,
    )
    # With the same engine, the run is identical to one that was not interrupted.
    _require_same(
        _consolidated(_checkpoint(folder / "pieces", 6), tmp_path / "one"),
        _consolidated(_checkpoint(again, 6), tmp_path / "two"),
    )
    expected, found = _whole(_checkpoint(folder / "whole", 3)), _whole(captured)
    for name, tensors in expected.items():
        _require_same(tensors, found[name])


@pytest.mark.slow
def test_sharded_last_checkpoints_are_averaged_by_every_engine(
    tmp_path: Path, shards: Path
) -> None:
    engines: dict[str, dict[str, Any]] = {
        "ddp": {"engine": "ddp"},
        "fsdp": {"engine": "fsdp"},
        "tensor": {"tensor_parallel": 2},
    }
    kept = {"every_steps": 2, "keep_last": 3, "keep_best": 0, "average_last": 3}
    recipes = {
        name: _recipe(shards, tmp_path / name, sharded=False, distributed=engine)
        | {"checkpoint": kept}
        for name, engine in engines.items()
    }
    _train([{"recipe": recipe} for recipe in recipes.values()], 2)
    losses = []
    for name in engines:
        found = safetensors.torch.load_file(tmp_path / name / "averaged" / "model.safetensors")
        weights = [
            _whole(_checkpoint(tmp_path / name, step))["model.safetensors"] for step in (2, 4, 6)
        ]
        for key, tensor in found.items():
            mean = torch.stack([one[key] for one in weights]).mean(0)
            torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-8)
        written = (tmp_path / name / "averaged" / "averaged.json").read_text(encoding="utf-8")
        losses.append(json.loads(written)["val/loss"])
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


@pytest.mark.slow
def test_sharded_muon_run_resumes(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum is sharded; the neurons' second moments and the counters are replicated on each
    rank.
    """
    muon = {
        "name": "muon",
        "learning_rate": 2e-3,
        "muon_beta2": 0.95,
        "muon_momentum_warmup_steps": 4,
        "embedding_weight_decay": 0.0,
    }
    more: dict[str, Any] = {"optimizer": muon, "distributed": {"engine": "fsdp"}}
    pieces = _recipe(shards, tmp_path / "pieces", sharded=True, **more)
    whole = _recipe(shards, tmp_path / "whole", sharded=False, **more)
    _train([{"recipe": pieces}, {"recipe": whole}], 2)
    moments = _consolidated(_checkpoint(tmp_path / "pieces", 3), tmp_path / "one")
    expected = _whole(_checkpoint(tmp_path / "whole", 3))["optimizer.safetensors"]
    for name, tensor in expected.items():
        assert torch.equal(moments[name], tensor), name
    assert expected["model.layers.0.mlp.down_proj.weight.second_moment"].shape == (16, 1)
    again = _without_last(tmp_path / "pieces", tmp_path / "again")
    other = _without_last(tmp_path / "whole", tmp_path / "other")
    resumed = [
        _recipe(shards, run, sharded=s, **more) for run, s in ((again, True), (other, False))
    ]
    _train([{"recipe": recipe, "resume": True} for recipe in resumed], 2)
    _require_same(
        _consolidated(_checkpoint(tmp_path / "pieces", 6), tmp_path / "two"),
        _consolidated(_checkpoint(again, 6), tmp_path / "three"),
    )
    last = [_whole(_checkpoint(run, 6)) for run in (tmp_path / "whole", other)]
    _require_same(last[0]["model.safetensors"], last[1]["model.safetensors"])
    # A single process reads the same moments from the shards.
    alone = _without_last(tmp_path / "pieces", tmp_path / "alone")
    found = _captured(_recipe(shards, alone, sharded=False, optimizer=muon), monkeypatch)
    for name, tensor in expected.items():
        assert name.startswith("rng.") or torch.equal(found["optimizer.safetensors"][name], tensor)


@pytest.mark.slow
def test_sharded_checkpoint_of_two_resumes_on_four_processes(
    runs: tuple[Path, str], tmp_path: Path, shards: Path
) -> None:
    folder, family = runs
    expected = _whole(_checkpoint(folder / "whole", 3))
    run = _without_last(folder / "pieces", tmp_path / "run")
    hybrid = {"engine": "fsdp", "shard": 2}
    whole = _recipe(shards, run, sharded=False, family=family, distributed=hybrid)
    captured = tmp_path / "captured"
    _train([{"recipe": whole, "resume": True, "captured": str(captured)}], 4)
    for name, tensors in expected.items():
        found = _whole(captured)[name]
        _require_same(tensors, {n: t for n, t in found.items() if n in tensors})
        assert all(n.startswith("rng.rank") for n in found.keys() - tensors.keys())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model.shard-00002-of-00002.safetensors", "is missing"),
        ("optimizer.shard-00001-of-00002.safetensors", "is damaged"),
    ],
)
def test_sharded_checkpoint_with_bad_shard_is_skipped(
    runs: tuple[Path, str], tmp_path: Path, name: str, problem: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[0] / "pieces", run)
    path = _checkpoint(run, 6) / name
    if problem == "is missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    newest, problems = newest_checkpoint(run)
    assert newest == _checkpoint(run, 3)
    assert len(problems) == 1
    assert problem in problems[0]


def test_sharded_unsupported_settings_raise_config_error(tmp_path: Path, shards: Path) -> None:
    recipe = _recipe(shards, tmp_path / "run", sharded=True)
    with pytest.raises(ConfigError, match=r"distributed\.engine none does not shard"):
        firstlight.train(recipe)
    parsed = plain_recipe({**recipe, "lora": {"rank": 2}})
    with pytest.raises(ConfigError, match="checkpoints are small"):
        require_combination(parsed, find_hardware("cpu"), "fsdp")
    with pytest.raises(ConfigError, match=r"not support distributed\.tensor_parallel"):
        require_combination(plain_recipe(recipe), find_hardware("cpu"), "fsdp", 2)
