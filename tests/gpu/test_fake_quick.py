"""Items of `benchmarks.gpu.quick` on fake CUDA tensors: where the host waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu import items
from benchmarks.gpu.items import ITEMS, Bench, random_bf16_model
from firstlight.generation.batch import BatchDecoder, RecordedSteps
from firstlight.models import Model, ModelConfig, build_model

from .fake_cuda import FakeCuda, fake_cuda
from .no_gpu import hardware, needs_no_gpu

pytestmark = [pytest.mark.gpu, needs_no_gpu]


class _Event:
    def record(self) -> None:
        """Replaces torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait only for the work of an earlier step."""


def _made(config: ModelConfig, device: torch.device, vocab_multiple: int = 1) -> Model:
    return build_model(config, vocab_multiple).to(device)


def _rows(cuda: FakeCuda, name: str, patch: pytest.MonkeyPatch) -> tuple[dict[str, int], int]:
    """Return the host's reads in the timed call of each row without an error, and the number of
    recorded calls, which must not read anything.
    """
    reads: list[int] = []
    recordings: list[int] = []

    def timed(call: Callable[[], object], *_: Any, **__: Any) -> float:
        before = cuda.reads
        call()
        reads.append(cuda.reads - before)
        return 1.0

    def recorded(call: Callable[[], object], _: torch.device) -> Callable[[], object]:
        before = cuda.reads
        call()
        recordings.append(cuda.reads - before)
        return call

    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(items, "random_model", _made)
    patch.setattr(items, "milliseconds", timed)
    patch.setattr(items, "recorded", recorded)
    patch.setattr(items, "kernels", lambda *_: {"kernels_ms": 0.5})
    (item,) = [item for item in ITEMS if item.name == name]
    found = {}
    for row in item.rows(Bench(hardware(), dry=True)):
        assert "error" not in row, row
        found[row["row"]] = sum(reads)
        reads.clear()
    assert not any(recordings), "a recorded call reads a value on the host"
    return found, len(recordings)


@pytest.mark.parametrize("name", ["D-124m", "D-1b", "K"])
def test_recorded_calls_read_nothing_on_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda() as (cuda, _):
        reads, recordings = _rows(cuda, name, monkeypatch)
    assert recordings >= 6
    on_device = {row: count for row, count in reads.items() if "on the device" in row}
    assert set(on_device.values()) <= {0}
    assert len(on_device) == (0 if name == "K" else 4)


def test_model_for_generation_decodes_in_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a loaded model, whose rate is measured."""
    with fake_cuda():
        monkeypatch.setattr(items, "random_model", _made)
        model = random_bf16_model(Bench(hardware(), dry=True), "gpt2-124m")
        assert isinstance(BatchDecoder(model, 2, 32)._ragged, RecordedSteps)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_step_with_deferred_loss_read_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda() as (cuda, _):
        reads, _ = _rows(cuda, "E", monkeypatch)
    assert reads.pop("as it is") > 0
    assert reads == dict.fromkeys(reads, 0)
    assert len(reads) == 2
