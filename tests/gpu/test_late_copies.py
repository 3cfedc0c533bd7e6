"""Copies between GPU and host that complete as late as CUDA allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn

from firstlight.checkpoint.checkpoint import Checkpoint, load_checkpoint
from firstlight.checkpoint.saver import CheckpointSaver, Snapshot
from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import Batch, TokenLoader
from firstlight.hardware.device import find_hardware
from firstlight.methods.memory import _copies, offloaded_activations
from firstlight.models import empty_model
from firstlight.recipe import CheckpointConfig
from firstlight.tokenizer import Tokenizer
from firstlight.training.checkpoints import captured
from firstlight.training.program import TrainingProgram
from firstlight.training.state import TrainState
from firstlight.weights.loading import weights_to_save

from .late_copies import Stream, late_copies
from .no_gpu import needs_no_gpu
from .test_fake_steps import GPT2, batch_of, recipe_of

pytestmark = [pytest.mark.gpu, needs_no_gpu]


def numbers(start: float = 0.0) -> dict[str, Tensor]:
    """Return tensors of several formats and layouts."""
    matrix = torch.arange(start, start + 12).view(3, 4)
    return {
        "matrix": matrix,
        "transposed": matrix.clone().t(),
        "half": matrix.to(torch.bfloat16),
        "count": torch.tensor([int(start)]),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("index", [0, 1])
def test_snapshot_is_complete_when_returned(index: int) -> None:
    """For any GPU: the current device is 0, even if the run is on another."""
    expected = {name: tensor.clone() for name, tensor in numbers().items()}
    tensors = numbers()
    with late_copies(index, devices=2) as gpu:
        copies = Snapshot().take(tensors)
        assert all(gpu.is_pinned(copy) for copy in copies.values())
        assert not gpu.waits, "all copies run at once, and are waited for together"
    for tensor in tensors.values():
        tensor.zero_()
    assert same(copies, expected)


def test_fake_gpu_unawaited_copy_is_noise() -> None:
    """Check the fake GPU itself, on which the other tests rely."""
    with late_copies() as gpu:
        source = torch.arange(4.0)
        host = torch.empty(4, device="cpu", pin_memory=True)
        host.copy_(source, non_blocking=True)
        assert host.isnan().all()
        other: Any = Stream()
        with torch.cuda.stream(other):
            late = source.to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        assert torch.equal(host, source)
        assert late.isnan().all()
        torch.cuda.current_stream().wait_stream(other)
        torch.cuda.synchronize()
        assert torch.equal(late, source)
        assert gpu.waits == []
        assert source.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert gpu.waits == [(4,)]


class LastMoment:
    """Runs work only when somebody waits for it, like a busy thread."""

    def submit(self, act: Callable[..., Any], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        future.result = lambda timeout=None: act(*args)  # type: ignore[method-assign]
        future.done = lambda: True  # type: ignore[method-assign]
        return future

    def shutdown(self) -> None:
        """Do nothing."""


def test_checkpoint_holds_state_at_save_while_training_continues(tmp_path: Path) -> None:
    """Its page-locked memory is reused only after the previous checkpoint is on disk."""
    tensors = numbers()
    expected = {}
    with late_copies() as gpu:
        saver = CheckpointSaver(tmp_path, CheckpointConfig(asynchronous=True, keep_last=9))
        saver._executor = LastMoment()  # type: ignore[assignment]
        for step in (1, 2, 3):
            expected[step] = {name: tensor.clone() for name, tensor in tensors.items()}
            found = Checkpoint({"config.json": "{}"}, dict(tensors), {"m": tensors["matrix"]}, {})
            saver.save(step, lambda found=found: found)  # type: ignore[misc]
            for tensor in tensors.values():
                tensor.add_(step)
        saver.close()
        assert not gpu.waits
    for step, values in expected.items():
        loaded = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert same(dict(loaded.model), values)
        assert torch.equal(loaded.optimizer["m"], values["matrix"])


def test_offloaded_activations_are_page_locked_and_restored() -> None:
    layer = nn.Linear(32, 64)
    large, small = torch.randn(64, 32), torch.randn(8)
    expected = large.clone()
    with late_copies() as gpu:
        _copies.cache_clear()  # streams of other tests
        hooks: Any = offloaded_activations(layer)
        packed = {name: hooks.pack_hook(t) for name, t in (("large", large), ("small", small))}
        packed["weight"] = hooks.pack_hook(layer.weight)
        assert gpu.is_pinned(packed["large"].kept)
        assert not gpu.waits, "the forward pass waits for no copy"
        for name, tensor in (("small", small), ("weight", layer.weight)):
            assert packed[name][1] is tensor
        # The GPU's memory is freed, and reused by the next layer.
        large.zero_()
        back = hooks.unpack_hook(packed["large"])
        assert not gpu.is_host(back)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(back, expected)


def test_offloaded_activations_are_copied_in_background_and_restored_in_time() -> None:
    tensors = [torch.randn(64, 32) for _ in range(6)]
    expected = [tensor.clone() for tensor in tensors]
    with late_copies() as gpu:
        _copies.cache_clear()
        stream: Any = _copies(gpu.device)._stream
        stream.wait_stream = Mock(side_effect=stream.wait_stream)
        hooks: Any = offloaded_activations(nn.Linear(32, 64))
        packed = [hooks.pack_hook(tensor) for tensor in tensors]
        compute = torch.cuda.current_stream()
        compute.synchronize()
        # The host waited for all copies but two, whose tensors are kept on the GPU until then.
        assert [bool(one.kept.isnan().any()) for one in packed] == [False] * 4 + [True] * 2
        leaving = [tensor for tensor, _ in _copies(gpu.device)._leaving]
        assert [one.data_ptr() for one in leaving] == [one.data_ptr() for one in tensors[4:]]
        for tensor in tensors:
            tensor.zero_()
        for number in (5, 3, 4, 2, 1, 0):
            back = hooks.unpack_hook(packed[number])
            compute.synchronize()
            assert torch.equal(back, expected[number])
            started = [i for i, one in enumerate(packed) if one.back is not None]
            assert started == {5: [3, 4], 3: [1, 2, 4], 4: [1, 2], 2: [0, 1], 1: [0], 0: []}[number]
            # At most these tensors wait on the GPU, and none after the last.
            assert len(_copies(gpu.device)._arriving) <= (2 if number else 0)
            assert not _copies(gpu.device)._leaving
        # Again, as with `retain_graph`.
        back = hooks.unpack_hook(packed[2])
        compute.synchronize()
        assert torch.equal(back, expected[2])
        assert not gpu.waits
        assert gpu.lates == len(tensors) + 1
        # Each copy comes after the operation that writes its tensor, or that used the memory
        # before.
        assert stream.wait_stream.call_args_list == [call(compute)] * (2 * len(tensors) + 1)


def test_loader_batches_are_page_locked_and_uploaded_without_wait(data: Path) -> None:
    dataset = TokenDataset(data, "train", verify=False)
    with (
        late_copies() as gpu,
        TokenLoader(dataset, 16, 2, 0, workers=0, pin_memory=True, document_masking=True) as loader,
    ):
        batch = loader.next_batch()
        fields = [f.name for f in dataclasses.fields(Batch)]
        tensors = {n: t for n in fields if isinstance(t := getattr(batch, n), Tensor)}
        assert tensors.keys() == {"input_ids", "labels", "document_ids"}
        assert all(gpu.is_pinned(tensor) for tensor in tensors.values())
        moved = batch.to(torch.device("cuda"))
        for name, tensor in tensors.items():
            assert getattr(moved, name).is_cuda
            assert torch.equal(getattr(moved, name), tensor)
        assert gpu.lates == len(tensors), "the host does not wait for a batch"


@pytest.mark.parametrize("precision", ["fp32", "bf16_params"])
def test_asynchronous_save_blocks_run_for_one_copy_of_state(
    precision: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Weights and moments are copied to page-locked memory together: a run does not wait for each
    of them.
    """
    model = GPT2 | {"vocab_size": tokenizer.vocab_size}
    recipe = recipe_of(model, efficiency__precision=precision, run__device="cpu")
    plain = empty_model(recipe.model)
    plain.init_weights(torch.Generator().manual_seed(0))
    program = TrainingProgram(recipe, plain, find_hardware("cpu"))
    program.step([batch_of(recipe)], lr_scale=1.0)
    with program.optimizer.master_weights():
        weights = {name: t.clone() for name, t in weights_to_save(program.model).items()}
    moments = {name: t.clone() for name, t in program.optimizer.state_tensors().items()}
    run: Any = SimpleNamespace(
        program=program,
        engine=program.engine,
        recipe=recipe,
        tokenizer=tokenizer,
        base=None,
        state=TrainState(step=1),
        loader=SimpleNamespace(rows_per_epoch=1),
        init_from=None,
        data_identity={},
        guard=SimpleNamespace(state_dict=dict),
        schedule=TrainState(),
        budget=None,
    )
    with late_copies() as gpu:
        saver = CheckpointSaver(tmp_path, CheckpointConfig(asynchronous=True))
        saver._executor = LastMoment()  # type: ignore[assignment]
        saver.save(1, lambda: captured(run))
        assert gpu.waits == []
        program.step([batch_of(recipe)], lr_scale=1.0)
        saver.close()
    loaded = load_checkpoint(tmp_path / "checkpoints" / "step-00000001")
    assert same(dict(loaded.model), weights)
    assert same({n: t for n, t in loaded.optimizer.items() if n in moments}, moments)
