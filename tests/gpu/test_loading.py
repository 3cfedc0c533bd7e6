"""Loading directly to a device: the weights exist only once."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import cast

import pytest
import safetensors.torch
import torch

from firstlight.generation.engine import load
from firstlight.hardware.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from firstlight.models import LlamaConfig, empty_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import LoadingMode, weights_to_save

#: 70 million parameters, most of them in a few large tensors, as in a model with several layers.
CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=16,
    max_position_embeddings=64,
)
_MIB = 2**20


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer
) -> Path:
    """Write a model folder in a number format."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIG.model_copy(update={"vocab_size": tokenizer.vocab_size})
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model = model.to(getattr(torch, request.param))
    for name, content in model_files(config, tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    safetensors.torch.save_file(weights_to_save(model), folder / "model.safetensors")
    return folder


def warm_up(device: torch.device) -> None:
    """Let the process do its first work on the device, whose memory does not belong to the
    weights.
    """
    one = torch.ones(64, 64, device=device)
    assert float((one @ one).sum()) == 64**3
    gc.collect()


@pytest.mark.cuda_only("it measures the GPU's allocator")
@pytest.mark.parametrize("way", ["auto", "sequential", "mmap"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_load_peak_device_memory_is_little_more_than_weights(
    folder: Path, way: str, dtype: str, device: torch.device
) -> None:
    warm_up(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    loaded = load(folder, device, dtype=dtype, way=cast(LoadingMode, way))
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert weights > 100 * _MIB
    assert torch.cuda.memory_allocated(device) - before >= weights
    assert torch.cuda.max_memory_allocated(device) - before <= 1.1 * weights


def test_load_to_gpu_keeps_no_copy_on_host(folder: Path, device: torch.device) -> None:
    """On a CPU, the host holds the weights themselves, once."""
    first = load(folder, device, way="sequential")  # imports and memory pools come first
    weights = sum(parameter.nbytes for parameter in first.model.parameters())
    del first
    warm_up(device)
    reset_peak()
    before = resident_bytes()
    loaded = load(folder, device, way="sequential")
    grown = peak_resident_bytes() - before
    assert next(loaded.model.parameters()).device.type == device.type
    assert grown <= (1.1 if device.type == "cpu" else 0.1) * weights + 16 * _MIB


def test_load_every_way_gives_values_of_file(folder: Path, device: torch.device) -> None:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    ways: tuple[LoadingMode, ...] = ("auto", "sequential", "mmap", "straight")
    for way in ways:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            model = load(folder, device, dtype=name, way=way).model
            found = weights_to_save(model)
            assert found.keys() == stored.keys()
            for key, tensor in found.items():
                assert torch.equal(tensor, stored[key].to(dtype)), (way, name, key)


def test_load_to_device_computes_on_device(folder: Path, device: torch.device) -> None:
    """This includes tables and buffers, which are not in a file."""
    loaded = load(folder, device)
    tensors = (*loaded.model.parameters(), *loaded.model.buffers())
    assert {tensor.device.type for tensor in tensors} == {device.type}
    with torch.no_grad():
        logits = loaded.model(torch.arange(40, device=device)[None])
    assert logits.device.type == device.type
    assert bool(logits.isfinite().all())
