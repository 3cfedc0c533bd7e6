from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from firstlight.errors import CheckpointError, ConfigError, MissingDependencyError
from firstlight.models import GPT2Config, LlamaConfig, ModelConfig, empty_model
from firstlight.optim import eight_bit
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer
from optimizer_models import (
    LLAMA,
    full_weights,
    make,
    new_model,
    one_thread,
    same,
    steps,
    weights,
)

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

#: Large enough for 8-bit state: embedding, head and MLP.
CONFIG = LlamaConfig(
    vocab_size=80,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
)
TIED_GPT2 = GPT2Config(
    vocab_size=80,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=64,
)
each = pytest.mark.parametrize(
    "library", ["bitsandbytes", pytest.param("torchao", marks=pytest.mark.slow)]
)


def eight_bits(library: str, **values: Any) -> OptimizerConfig:
    pytest.importorskip(library)
    return make("adamw8bit", eight_bit_library=library, **values)


def trained(config: OptimizerConfig) -> float:
    """Return the loss after 20 steps on one sequence."""
    model = new_model(CONFIG)
    optimizer = Optimizer(model, config)
    ids = torch.randint(0, 80, (4, 32), generator=torch.Generator().manual_seed(1))
    for _ in range(20):
        optimizer.zero_grad()
        (model(ids, ids) / ids.numel()).backward()
        optimizer.clip_gradients()
        optimizer.step()
    return float(model(ids, ids).detach()) / ids.numel()


@each
def test_adamw8bit_loss_falls_as_with_32_bits(library: str) -> None:
    start = trained(make("adamw", learning_rate=1e-30))
    expected, found = trained(make("adamw")), trained(eight_bits(library))
    assert expected < start - 1
    assert found == pytest.approx(expected, abs=0.02 * (start - expected))
    assert found != expected


@each
def test_adamw8bit_state_takes_two_bytes_per_parameter(library: str) -> None:
    model = nn.Linear(512, 512)
    optimizer = Optimizer(model, eight_bits(library))
    expected = optimizer.state_bytes
    steps(model, optimizer, range(1))
    found = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    assert found == expected
    # 2 bytes for the codes, 2 * 4 / 256 for the scales, two tables of 1 KiB, and the small bias.
    assert found / sum(p.numel() for p in model.parameters()) == pytest.approx(2.05, abs=0.02)


@each
def test_adamw8bit_small_tensors_stay_in_32_bits(library: str) -> None:
    model = new_model(CONFIG)
    optimizer = Optimizer(model, eight_bits(library, embeddings_in_32_bits=False))
    steps(model, optimizer, range(1))
    state = optimizer.state_tensors()
    bits = {
        name: {t.dtype for key, t in state.items() if key.startswith(f"{name}.")}
        for name in ("model.norm.weight", "model.embed_tokens.weight")
    }
    assert torch.uint8 not in bits["model.norm.weight"]
    assert torch.uint8 in bits["model.embed_tokens.weight"]


@each
@pytest.mark.parametrize("model_config", [CONFIG, TIED_GPT2], ids=["llama", "tied gpt2"])
def test_adamw8bit_embeddings_in_32_bits_are_updated_like_adamw(
    library: str, model_config: ModelConfig
) -> None:
    wide = eight_bits(library, embeddings_in_32_bits=True)
    models = []
    narrow = eight_bits(library, embeddings_in_32_bits=False)
    for config in (wide, make("adamw"), narrow):
        model = new_model(model_config)
        optimizer = Optimizer(model, config)
        size = optimizer.state_bytes
        steps(model, optimizer, range(4))
        state = optimizer.state_tensors()
        assert sum(tensor.nbytes for tensor in state.values()) == size
        models.append((weights(model), state))
    (found, state), (plain, _), (in_8_bits, _) = models
    tables = {n for n in found if any(part in n for part in ("embed_tokens", "wte", "wpe"))}
    assert len(tables) == (2 if model_config is TIED_GPT2 else 1)
    for name in found:
        assert torch.equal(found[name], (plain if name in tables else in_8_bits)[name]), name
        bits = {t.dtype for key, t in state.items() if key.startswith(f"{name}.")}
        assert name not in tables or torch.uint8 not in bits
    assert any(tensor.dtype == torch.uint8 for tensor in state.values())


@each
def test_adamw8bit_embeddings_are_in_32_bits_by_default(library: str) -> None:
    sizes = [
        Optimizer(new_model(CONFIG), eight_bits(library, **said)).state_bytes
        for said in ({}, {"embeddings_in_32_bits": True}, {"embeddings_in_32_bits": False})
    ]
    assert sizes[0] == sizes[1] > sizes[2]


def test_adamw8bit_embeddings_setting_for_other_optimizers_raises() -> None:
    with pytest.raises(ValidationError, match="applies only to adamw8bit or paged_adamw8bit"):
        make("adamw", embeddings_in_32_bits=True)


@each
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_backward", [False, True])
def test_adamw8bit_run_resumes_bit_for_bit(
    library: str, dtype: torch.dtype, in_backward: bool, wide: bool
) -> None:
    config = eight_bits(library, max_grad_norm=0.0, embeddings_in_32_bits=wide)
    model = new_model(CONFIG, dtype=dtype)
    optimizer = Optimizer(model, config, in_backward=in_backward)
    steps(model, optimizer, range(3))
    saved = {key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}
    values = full_weights(model, optimizer)
    steps(model, optimizer, range(3, 6))

    resumed = empty_model(CONFIG).to(dtype)
    again = Optimizer(resumed, config, in_backward=not in_backward)
    with again.master_weights():
        resumed.load_state_dict(values)
    again.load_state_tensors(saved)
    assert same(again.state_tensors(), saved)
    steps(resumed, again, range(3, 6))
    assert same(full_weights(resumed, again), full_weights(model, optimizer))
    assert same(again.state_tensors(), optimizer.state_tensors())


@each
def test_adamw8bit_weight_decay_applies_to_matrices_only(library: str) -> None:
    model = new_model(CONFIG)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    Optimizer(model, eight_bits(library, weight_decay=0.5)).step()
    for value in weights(model).values():
        expected = 0.995 if value.dim() > 1 else 1.0
        torch.testing.assert_close(value, torch.full_like(value, expected), atol=1e-6, rtol=0)


@each
def test_adamw8bit_refused_state_leaves_optimizer_unchanged(library: str) -> None:
    model = new_model(CONFIG)
    optimizer = Optimizer(model, eight_bits(library))
    steps(model, optimizer, range(1))
    before = {key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}
    codes = next(key for key, tensor in before.items() if tensor.dtype == torch.uint8)
    bad = {key: torch.zeros_like(tensor) for key, tensor in before.items()}
    bad[codes] = bad[codes].float()
    with pytest.raises(CheckpointError, match=f"{codes}' is .* torch.float32, exp"):
        optimizer.load_state_tensors(bad)
    assert same(optimizer.state_tensors(), before)


@pytest.mark.slow
def test_adamw8bit_state_of_other_library_raises_checkpoint_error() -> None:
    model = new_model(CONFIG)
    optimizer = Optimizer(model, eight_bits("bitsandbytes"))
    steps(model, optimizer, range(1))
    with pytest.raises(CheckpointError, match="is in only one of them"):
        Optimizer(model, eight_bits("torchao")).load_state_tensors(optimizer.state_tensors())


@pytest.mark.parametrize(
    "installed, chosen",
    [
        ({"bitsandbytes", "torchao"}, "bitsandbytes"),
        ({"torchao"}, "torchao"),
        (set(), "bitsandbytes"),
    ],
)
def test_adamw8bit_auto_uses_bitsandbytes_if_installed(
    installed: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: object() if n in installed else None)
    assert eight_bit.installed_library("auto") == chosen


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_adamw8bit_missing_library_names_install_command(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"{library}.optim", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[8bit\]'"):
        Optimizer(new_model(LLAMA), make("adamw8bit", eight_bit_library=library))


def test_paged_adamw8bit_without_cuda_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="device is cpu: set it to adamw8bit"):
        Optimizer(new_model(LLAMA), make("paged_adamw8bit"))


def test_adamw8bit_library_without_kernels_for_device_raises_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optim = pytest.importorskip("bitsandbytes.optim")

    def missing(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(optim.AdamW8bit, "update_step", missing)
    with pytest.raises(ConfigError, match=r"does not support 8-bit AdamW on cpu.* to torchao"):
        Optimizer(new_model(LLAMA), make("adamw8bit", eight_bit_library="bitsandbytes"))


@each
@pytest.mark.usefixtures("forked_processes")
def test_adamw8bit_import_writes_nothing_to_stderr(library: str) -> None:
    """Both libraries print messages about kernels that they can't load."""
    pytest.importorskip(library)
    program = (
        "import torch\n"
        "from firstlight.optim.config import OptimizerConfig\n"
        "from firstlight.optim.optimizer import Optimizer\n"
        "model = torch.nn.Linear(64, 64)\n"
        f"config = OptimizerConfig(name='adamw8bit', eight_bit_library='{library}')\n"
        "optimizer = Optimizer(model, config)\n"
        "model(torch.ones(1, 64)).sum().backward()\n"
        "optimizer.step()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
