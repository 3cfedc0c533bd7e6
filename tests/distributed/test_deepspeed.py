"""With DeepSpeed, a model takes the same steps as in one process, and its state is saved in
firstlight's format.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_recipe import plain_recipe
from spawned import run_ranks

from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.hardware.device import find_hardware
from firstlight.parallel import World
from firstlight.parallel.deepspeed import import_deepspeed, require_asynchronous_io
from firstlight.parallel.engine import DistributedConfig
from firstlight.parallel.engine_choice import make_engine
from firstlight.recipe.conflicts import require_combination

# The processes started by the tests import it.
pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no deepspeed"),
    pytest.mark.usefixtures("forked_processes"),
]

_DRIVER = Path(__file__).with_name("deepspeed_driver.py")


def _case(stage: int, **more: Any) -> dict[str, Any]:
    sharing = {"engine": "deepspeed", "zero_stage": stage}
    return {
        "micro": 2,
        "accumulation": 2,
        "masks": "partial",
        "family": "tied",
        "optimizer": "adamw",
        **more,
        "distributed": {**sharing, **more.get("distributed", {})},
    }


def _lines(
    cases: list[dict[str, Any]], size: int, timeout: float = 400
) -> list[list[dict[str, Any]]]:
    """Return the output of each rank."""
    found = []
    for result in run_ranks(_DRIVER, [json.dumps(cases)], size, timeout=timeout):
        assert result.returncode == 0, result.stderr
        # Nothing else is printed to stdout.
        found.append([json.loads(line) for line in result.stdout.splitlines()])
        assert len(found[-1]) == len(cases)
    return found


def _require_equal(cases: list[dict[str, Any]], size: int, timeout: float = 400) -> None:
    for lines in _lines(cases, size, timeout):
        _require_equal_lines(lines)


def _require_equal_lines(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        in_files = line["distributed"].get("offload") == "nvme"
        assert (line["bytes_in_files"] > 0) == in_files, line
        assert line["gradients"] < 1e-5, line
        assert line["norms"] < 1e-5, line
        assert line["losses"] < 1e-6, line
        # AdamW divides by gradients, so the result for gradients near zero is uncertain. In one
        # process, splitting the same rows into other micro-batches changes weights by 2e-4 and
        # moments by 6e-5.
        assert line["weights"] < 1e-3, line
        assert line["state"] < 1e-3, line
        for name in ("refused", "restored", "goes_on"):
            assert line[name], (name, line)


def _require_equal_in_fp16(line: dict[str, Any]) -> None:
    """Check that the steps are those of fp16 without DeepSpeed, and that a step whose gradients
    overflow is skipped.
    """
    assert line["gradients"] < 1e-2, line
    assert line["norms"] < 1e-3, line
    assert line["losses"] < 1e-3, line
    assert line["refused"], line
    assert line["restored"], line


def test_deepspeed_two_processes_match_one_process() -> None:
    cases = [
        _case(2, family="gpt2", masks="unequal", optimizer="sgd"),
        _case(3, accumulation=3, micro=1),
        _case(2, family="llama", optimizer="groups"),
    ]
    fp16 = _case(3, efficiency={"precision": "fp16"}, distributed={"offload": "cpu"})
    # In one world, because importing DeepSpeed takes longer than the steps.
    for *lines, last in _lines([*cases, fp16], 2):
        _require_equal_lines(lines)
        _require_equal_in_fp16(last)


@pytest.mark.slow
def test_deepspeed_all_stages_match_one_process() -> None:
    cases = [
        _case(stage, optimizer=optimizer, family=family, masks=masks, distributed=offload, **cut)
        for stage in (1, 2, 3)
        for offload in ({}, {"offload": "cpu"})
        for optimizer, family, masks, cut in (
            ("adamw", "llama", "unequal", {"micro": 1, "accumulation": 1}),
            ("sgd", "gpt2", "partial", {"micro": 1, "accumulation": 3}),
            ("adamw", "moe", "unequal", {"micro": 2, "accumulation": 2}),
        )
    ]
    checkpointing = {"activation_checkpointing": "full", "loss_chunk_tokens": 8}
    cases += [_case(stage, efficiency=checkpointing) for stage in (2, 3)]
    cases += [_case(3, family="llama", optimizer="groups")]
    _require_equal(cases, 2)
    _require_equal(cases[::3], 4)


@pytest.mark.slow
def test_deepspeed_one_process_supports_offloading() -> None:
    _require_equal([_case(stage, distributed={"offload": "cpu"}) for stage in (2, 3)], 1)


@pytest.mark.slow
def test_deepspeed_one_process_scales_fp16_loss() -> None:
    fp16 = {"precision": "fp16"}
    cases = [_case(2, efficiency=fp16), _case(3, efficiency=fp16, distributed={"offload": "cpu"})]
    (lines,) = _lines(cases, 1)
    for line in lines:
        _require_equal_in_fp16(line)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_deepspeed_below_fp32_matches_one_process(precision: str) -> None:
    """Products in bf16 differ from those of one process only by rounding."""
    less = {"precision": precision}
    cases = [_case(stage, efficiency=less, masks="unequal") for stage in (2, 3)]
    for line in _lines(cases, 2)[0]:
        assert 1e-7 < line["gradients"] < 3e-2, line
        assert line["losses"] < 1e-3, line
        assert line["refused"]
        assert line["restored"]
        assert line["goes_on"]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/usr/include/libaio.h").is_file(), reason="libaio-dev is not installed"
)
def test_deepspeed_optimizer_state_may_be_offloaded_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library is compiled for this test. A killed build would leave a lock file.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    nvme = {"offload": "nvme", "nvme_path": str(tmp_path / "disk")}
    cases = [_case(3, family="large", distributed=nvme)]
    _require_equal(cases, 2, timeout=580)
    assert not any((tmp_path / "disk").iterdir())


def test_deepspeed_nvme_offload_without_libaio_raises_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_, **__: False)
    with pytest.raises(ConfigError, match="needs libaio and a C"):
        require_asynchronous_io(0)


def test_deepspeed_missing_package_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[deepspeed\]'"):
        import_deepspeed(torch.device("cpu"))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"engine": "ddp", "zero_stage": 2}, "zero_stage 2 requires distributed.engine deepspeed"),
        (
            {"engine": "fsdp", "offload": "nvme"},
            "offload nvme requires distributed.engine deepspeed",
        ),
        ({"engine": "ddp", "offload": "cpu"}, "requires distributed.engine fsdp or deepspeed"),
        ({"engine": "deepspeed", "shard": 2}, "shard 2 requires distributed.engine fsdp"),
        ({"engine": "deepspeed", "tensor_parallel": 2}, "tensor_parallel does not support"),
        ({"engine": "deepspeed", "pipeline": 2}, "be combined with distributed.engine deepspeed"),
        (
            {"engine": "deepspeed", "offload": "nvme", "nvme_path": "x"},
            "offload nvme needs distributed.zero_stage 3",
        ),
        (
            {"engine": "deepspeed", "offload": "nvme", "zero_stage": 3},
            "as distributed.nvme_path",
        ),
        ({"engine": "deepspeed", "nvme_path": "x"}, "nvme_path requires distributed.offload nvme"),
    ],
)
def test_deepspeed_keys_unsupported_by_engine_raise_config_error(
    keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        make_engine(DistributedConfig(**keys), World(0, 2, 0, 2), torch.device("cpu"))


@pytest.mark.parametrize(
    ("section", "values", "problem"),
    [
        ("efficiency", {"precision": "fp8"}, "precision fp8"),
        ("efficiency", {"precision": "bf16_params"}, "precision bf16_params"),
        ("efficiency", {"compile": True}, "does not support efficiency.compile"),
        ("efficiency", {"activation_offload": True}, "efficiency.activation_offload"),
        ("efficiency", {"optimizer_in_backward": True}, "efficiency.optimizer_in_backward"),
        ("optimizer", {"name": "muon"}, "optimizer.name muon"),
        ("optimizer", {"name": "adafactor"}, "optimizer.name adafactor"),
        ("optimizer", {"clip_after_warmup": True}, "optimizer.clip_after_warmup"),
        ("lora", {"rank": 2}, "distributed.engine deepspeed does not support lora"),
        ("checkpoint", {"sharded": True}, "checkpoint.sharded"),
    ],
)
def test_deepspeed_unsupported_features_raise_config_error(
    section: str, values: dict[str, Any], problem: str
) -> None:
    recipe: dict[str, Any] = {
        "model": {"model_type": "llama", "hidden_size": 16, "vocab_size": 32},
        "data": {"dir": "none", "seq_len": 16},
        section: values,
    }
    with pytest.raises(ConfigError, match=re.escape(problem)):
        require_combination(plain_recipe(recipe), find_hardware("cpu"), "deepspeed")
