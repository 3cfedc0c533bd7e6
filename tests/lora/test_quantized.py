"""Linear layers in 4 bits and their adapters (QLoRA)."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.lora.layers import (
    LoraConfig,
    LoraLinear,
    adapter_tensors,
    add_lora,
    fill_adapter,
    lora_parameters,
    merge_lora,
)
from firstlight.lora.quantized import NF4Linear, require_nf4
from firstlight.models import GPT2, GPT2Config, LlamaConfig, Model, ModelConfig, empty_model
from firstlight.models.gpt2 import Conv1D

#: The 16 quantiles of a normal distribution, from the appendix of Dettmers et al. 2023.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(vocab_size=37, hidden_size=80, num_hidden_layers=2, num_attention_heads=2),
    "llama": LlamaConfig(
        vocab_size=37,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    ),
}
IDS = torch.arange(24).view(2, 12) * 5 % 37


@pytest.fixture
def bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")


needs_bitsandbytes = pytest.mark.usefixtures("bitsandbytes")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(out: int, width: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(width, out, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator(out)))
    return layer


def some_model(name: str) -> Model:
    model = empty_model(CONFIGS[name])
    model.init_weights(generator(7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator(1)) * 0.05)
    return model.eval()


def adapted(name: str, **settings: Any) -> Model:
    model = some_model(name)
    config = LoraConfig(**{"rank": 4, "alpha": 8.0, "quantize": "nf4", **settings})
    add_lora(model, config, generator(2))
    return model


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS)
    return found


@needs_bitsandbytes
@pytest.mark.parametrize("shape", [(64, 128), (96, 80), (64, 48), (33, 96), (7, 5), (1, 200)])
def test_nf4_values_are_nearest_quantile_of_their_block(shape: tuple[int, int]) -> None:
    """Rows of 80 or 96 values end within a block."""
    layer = linear(*shape)
    weight = layer.weight.detach().clone()
    # bitsandbytes compiles its code for odd numbers of weights, which takes 12 s of C++
    # compilation.
    with torch.compiler.set_stance("force_eager"):
        found = NF4Linear(layer).weight_in(torch.float32)
    assert found.shape == shape
    flat = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    largest = flat.abs().amax(1, keepdim=True)
    nearest = NF4[(flat[..., None] / largest[..., None] - NF4).abs().argmin(-1)] * largest
    expected = nearest.flatten()[: weight.numel()].view(shape)
    # The largest value of each block is stored in 8 bits, as the difference from their mean.
    limit = 0.02 * float(largest.max())
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)
    gap = float((NF4[1] - NF4[0]) / 2)
    assert (found - weight).abs().max() <= gap * largest.max() + limit


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nf4_layer_multiplies_with_dequantized_weight(dtype: torch.dtype) -> None:
    layer = NF4Linear(linear(96, 80))
    x = torch.randn(2, 5, 80, generator=generator(1)).to(dtype).requires_grad_()
    weight = layer.weight_in(dtype)
    assert weight.dtype == dtype
    y = layer(x)
    assert layer.bias is not None
    expected = F.linear(x.detach(), weight) + layer.bias.to(dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y.detach(), expected.detach())
    gradient = torch.randn(y.shape, generator=generator(3)).to(dtype)
    y.backward(gradient)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, gradient @ weight)


@needs_bitsandbytes
def test_nf4_gpt2_layer_is_transposed() -> None:
    plain = linear(96, 80)
    theirs = Conv1D(80, 96)
    assert theirs.bias is not None
    with torch.no_grad():
        theirs.weight.copy_(plain.weight.T)
        theirs.bias.copy_(plain.bias)
    one, two = NF4Linear(plain), NF4Linear(theirs)
    assert torch.equal(one.weight_in(torch.float32), two.weight_in(torch.float32))
    assert (one.is_conv1d, two.is_conv1d) == (False, True)


@needs_bitsandbytes
def test_nf4_stores_half_a_byte_per_weight_and_adds_no_backward_memory() -> None:
    layer = NF4Linear(linear(256, 512, bias=False))
    stored = sum(buffer.nbytes for buffer in layer.buffers())
    assert stored == 256 * 512 // 2 + 2048 + 4 * (256 + 1 + 8)
    assert not list(layer.parameters())
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    x = torch.ones(1, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert kept
    assert sum(kept) <= stored + x.nbytes


@needs_bitsandbytes
def test_nf4_model_dtype_change_keeps_dequantized_weight() -> None:
    layer = NF4Linear(linear(96, 80))
    before = layer.weight_in(torch.float32)
    assert torch.equal(layer.to(torch.bfloat16).weight_in(torch.float32), before)


@needs_bitsandbytes
def test_nf4_autocast_determines_product_dtype() -> None:
    layer = NF4Linear(linear(96, 80))
    x = torch.randn(3, 80, generator=generator(1), requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@needs_bitsandbytes
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_nf4_quantizes_every_linear_layer_but_head_for_any_targets(name: str, dora: bool) -> None:
    target = "c_attn" if name == "gpt2" else "q_proj"
    model = adapted(name, targets=[target, "lm_head"], dora=dora)
    linears = [m for m in some_model(name).modules() if isinstance(m, nn.Linear | Conv1D)]
    assert sum(isinstance(m, NF4Linear) for m in model.modules()) == len(linears) - 1
    assert isinstance(model.lm_head, LoraLinear)
    assert isinstance(model.lm_head.base_layer, nn.Linear)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == lora_parameters(model).keys()
    assert {p.dtype for p in lora_parameters(model).values()} == {torch.float32}


@needs_bitsandbytes
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_nf4_training_lowers_loss_and_adapter_fits_full_base(name: str, dora: bool) -> None:
    model = adapted(name, dora=dora).train()
    bits = {n: b.clone() for n, b in model.named_buffers()}
    optimizer = torch.optim.AdamW(lora_parameters(model).values(), lr=0.02)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(IDS, IDS)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    assert all(torch.equal(b, bits[n]) for n, b in model.named_buffers())

    whole = adapted(name, dora=dora, quantize="none")
    fill_adapter(whole, adapter_tensors(model), "the adapter")
    # The quantized model's base is the full base rounded to 4 bits.
    with torch.no_grad():
        assert float(whole.train()(IDS, IDS)) == pytest.approx(losses[-1], rel=0.5)


@needs_bitsandbytes
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_nf4_merge_gives_plain_model_with_dequantized_weights(name: str, dora: bool) -> None:
    model, plain = adapted(name, dora=dora), some_model(name)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator(5)) * 0.1)
    before = logits(model)
    merge_lora(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@needs_bitsandbytes
def test_nf4_forward_pass_compiles_without_graph_break() -> None:
    model = adapted("gpt2", targets=["c_attn"], dora=True)
    assert isinstance(model, GPT2)
    del model.transformer.h[1]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS, IDS), model(IDS, IDS))
    found = {}
    for forward in (model, compiled):
        model.zero_grad()
        forward(IDS, IDS).backward()
        found[forward] = [p.grad for p in lora_parameters(model).values()]
    torch.testing.assert_close(found[model], found[compiled], rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


def test_nf4_without_supported_device_or_package_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="device is mps: set lora"):
        require_nf4(torch.device("mps"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[8bit\]'"):
        adapted("llama")
