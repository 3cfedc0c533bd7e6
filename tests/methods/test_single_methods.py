"""Each method alone, on tensors: its results, the tensors it saves, and its cleanup."""

from __future__ import annotations

import copy
import functools
import itertools
import platform
import sysconfig
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_recipe import plain_recipe
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from builders import slow_but
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, bf16_is_faster, find_hardware
from firstlight.methods import (
    EfficiencyConfig,
    apply_methods,
    compilation,
    loss_function,
    precision,
    same_bits,
)
from firstlight.methods.attention import (
    choose_attention,
    flex_mask,
    resolve_attention,
    varying_lengths,
)
from firstlight.methods.compilation import (
    compile_time_recorder,
    find_compiler,
    keep_results,
    require_compiler,
    uses_cuda_graphs,
)
from firstlight.methods.memory import (
    _DROPOUT_AT,
    _linear_cross_entropy,
    chunk_loss,
    chunked_head_loss,
    keeps_result,
    offloaded_activations,
)
from firstlight.methods.precision import (
    convert_to_fp8,
    fp8_layers,
    matmul_precision,
    require_fp8,
    resolve_precision,
)
from firstlight.models import (
    FAMILIES,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Model,
    MoEConfig,
    empty_model,
    ops,
)
from firstlight.models.gpt2 import Conv1D
from firstlight.models.llama import LlamaAttention, RMSNorm
from firstlight.models.ops import (
    AttentionOptions,
    _grouped_attention,
    attention,
    causal_mask,
    dense_mask,
    document_positions,
    head_loss,
    plain_attention,
)
from firstlight.parallel import World
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.parallel.sharding import TensorParallelEngine
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach
from gpu.usual import usual_config

CPU = find_hardware("cpu")


def small_model(kind: str = "llama", **changes: Any) -> Model:
    config: GPT2Config | LlamaConfig
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=131,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            **changes,
        )
    else:
        config = LlamaConfig(
            vocab_size=131,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **changes,
        )
    model = empty_model(config, 64)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def batch(rows: int = 3, length: int = 24) -> tuple[Tensor, Tensor]:
    input_ids = torch.randint(131, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = input_ids.roll(-1, 1)
    labels[0, :5] = -100
    return input_ids, labels


def gradients(model: Model, config: EfficiencyConfig) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    apply_methods(model, config, CPU)
    loss_sum = loss_function(model, config, CPU)
    model.train()
    torch.manual_seed(3)
    loss = loss_sum(*batch())
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 9),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_plain_attention_matches_reference(
    groups: int, heads: int, new: int, before: int, windowed: bool
) -> None:
    generator = torch.Generator().manual_seed(new * 100 + before)
    total = new + before

    def drawn(*shape: int) -> Tensor:
        return torch.randn(2, *shape, 4, dtype=torch.float64, generator=generator)

    q, k, v = drawn(heads * groups, new), drawn(heads, total), drawn(heads, total)
    mask = dense_mask(torch.arange(before, total), total, 3 if windowed else None, None)
    options = AttentionOptions(mask)
    expected = attention(q, k, v, options)
    torch.testing.assert_close(plain_attention(q, k, v, options), expected)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 9), (5, 5), (5, 9)])
@pytest.mark.parametrize("kind", ["causal", "one mask", "a mask for each row"])
def test_grouped_attention_without_group_kernels_matches_plain_attention(
    groups: int, new: int, total: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.models.ops._takes_groups", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 4, dtype=torch.float64, generator=generator)
        for heads, length in ((3 * groups, new), (3, total), (3, total))
    )
    mask = causal_mask(new, total, q.device)
    if kind == "a mask for each row":
        seen = torch.rand(2, 1, new, total, generator=generator) < 0.5
        mask = mask & (seen | torch.eye(new, total).bool().roll(total - new, -1))
    options = AttentionOptions(None if kind == "causal" else mask, scale=0.3)
    # `attention` itself creates the mask for tokens that continue a text.
    asked = options if total == new or new == 1 else options._replace(mask=mask)
    found = _grouped_attention(q, k, v, asked)
    assert found.shape == (2, 3 * groups, new, 4)
    torch.testing.assert_close(found, plain_attention(q, k, v, options))


def test_grouped_queries_use_only_enabled_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: hopper)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    q = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16)
    causal, masked = AttentionOptions(), AttentionOptions(torch.ones(8, 8, dtype=torch.bool))

    def taken() -> tuple[bool, bool]:
        return ops._takes_groups(q, causal), ops._takes_groups(q, masked)

    assert taken() == (True, True)
    with varying_lengths():
        assert taken() == (True, False)
    cuda: Any = torch.backends.cuda
    cuda.enable_flash_sdp(False)
    try:
        # cuDNN supports both.
        assert taken() == (True, True)
        with varying_lengths():
            assert taken() == (False, False)
    finally:
        cuda.enable_flash_sdp(True)
    monkeypatch.setattr(ops, "_CUDNN_IS_LAST", True)
    assert taken() == (True, False)
    monkeypatch.setattr(ops, "_CUDNN_IS_LAST", False)
    hopper.major, hopper.minor = 8, 9
    assert taken() == (True, False)
    # On this GPU, flash attention does not have a backward pass for this head dimension.
    q = torch.empty(1, 4, 8, 208, dtype=torch.bfloat16, requires_grad=True)
    assert taken() == (False, False)
    with torch.no_grad():
        assert taken() == (True, False)


def test_document_positions_restart_in_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]])
    expected = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])
    assert torch.equal(document_positions(documents), expected)


def test_document_mask_shows_own_document_up_to_token_and_window() -> None:
    mask = dense_mask(torch.arange(4), 4, 2, torch.tensor([[0, 0, 0, 1]]))
    assert mask is not None
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    assert torch.equal(mask[0, 0].int(), expected.int())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [False, True])
def test_flex_block_mask_equals_dense_mask(window: int | None, documents: bool) -> None:
    document_ids = torch.arange(40).div(7, rounding_mode="floor").int().expand(2, -1)
    ids = document_ids if documents else None
    positions = torch.arange(40)
    block_mask = flex_mask(positions, 40, window, ids)
    dense = dense_mask(positions, 40, window, ids)
    if window is None and not documents:
        assert block_mask is None
        assert dense is None
        return
    from torch.nn.attention.flex_attention import create_mask

    seen = create_mask(block_mask.mask_mod, 2, 1, 40, 40, device="cpu")
    assert dense is not None
    assert torch.equal(seen, dense.expand_as(seen))


@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.sampled_from([1, 7, 64]),
    st.sampled_from([None, 0.4, 3.0]),
)
@settings(max_examples=30, deadline=None)
def test_chunked_loss_matches_plain_loss_and_gradients(
    tokens: int, chunk: int, multiple: int, softcap: float | None
) -> None:
    vocab_size = 13
    generator = torch.Generator().manual_seed(tokens)
    head = nn.Linear(6, -(-vocab_size // multiple) * multiple, bias=False, dtype=torch.float64)
    x = torch.randn(1, tokens, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab_size, (1, tokens), generator=generator)
    labels[0, ::3] = -100

    def found(loss_of: Any) -> list[Tensor]:
        x_leaf = x.clone().requires_grad_()
        head.zero_grad()
        loss = loss_of(x_leaf, head, vocab_size, labels, softcap)
        (loss / 7).backward()
        assert x_leaf.grad is not None
        assert head.weight.grad is not None
        return [loss.detach(), x_leaf.grad, head.weight.grad.clone()]

    plain, chunked = found(head_loss), found(chunked_head_loss(chunk))
    for one, other in zip(chunked, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        without = chunked_head_loss(chunk)(x, head, vocab_size, labels, softcap)
    torch.testing.assert_close(without, plain[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [0, 3, 50])
def test_z_loss_matches_squared_log_partition_function(chunk: int) -> None:
    """Compare loss and gradients in fp64 with autograd on the plain formula. Only valid labels, the
    true vocabulary and training mode count.
    """
    vocab_size, tokens, coefficient = 13, 10, 0.3
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(6, 16, bias=False, dtype=torch.float64)
    x = 3 * torch.randn(1, tokens, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab_size, (1, tokens), generator=generator)
    labels[0, ::3] = -100

    def formula(x_leaf: Tensor, *_: Any) -> Tensor:
        logits = (x_leaf @ head.weight.T)[0, :, :vocab_size][labels[0] != -100]
        divisor = logits.exp().sum(-1)
        chosen = logits.gather(1, labels[labels != -100][:, None])[:, 0]
        return (divisor.log() - chosen + coefficient * divisor.log() ** 2).sum()

    def found(loss_of: Any) -> list[Tensor]:
        x_leaf = x.clone().requires_grad_()
        head.zero_grad()
        loss = loss_of(x_leaf, head, vocab_size, labels)
        (loss / 7).backward()
        assert x_leaf.grad is not None
        assert head.weight.grad is not None
        return [loss.detach(), x_leaf.grad, head.weight.grad.clone()]

    own = (
        chunked_head_loss(chunk, coefficient)
        if chunk
        else functools.partial(head_loss, z_loss_coef=coefficient)
    )
    for one, other in zip(found(own), found(formula), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        without = head_loss(x, head, vocab_size, labels)
        torch.testing.assert_close(own(x, head, vocab_size, labels), without)


@pytest.mark.parametrize("chunk", [0, 4])
def test_z_loss_of_model_uses_configured_coefficient(chunk: int) -> None:
    model = small_model()
    config = EfficiencyConfig(precision="fp32", loss_chunk_tokens=chunk)
    inputs = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(0))
    plain = model(inputs, inputs)
    z = model(inputs).logsumexp(-1).square().sum()
    apply_methods(model, config, CPU, z_loss_coef=0.25)
    torch.testing.assert_close(model(inputs, inputs), plain + 0.25 * z)


class _Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor that an operation creates."""

    largest = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_chunked_loss_never_holds_all_logits() -> None:
    weight, x = torch.randn(1000, 8), torch.randn(512, 8)
    labels = torch.zeros(512, dtype=torch.int64)
    with _Watch() as watch:  # type: ignore[no-untyped-call]
        # The function inside the operator: from outside, it is a single operation.
        _linear_cross_entropy._init_fn(x, weight, labels, 1000, 32, torch.float32, True, 1e-4)
    assert watch.largest == 32 * 1000


def test_chunked_loss_in_bf16_is_as_accurate_as_plain() -> None:
    """Compared with fp64, the error is at most twice that of autocast."""
    torch.manual_seed(0)
    head = nn.Linear(64, 500, bias=False)
    x, labels = torch.randn(2, 50, 64), torch.randint(500, (2, 50))

    def found(loss_of: Any, dtype: torch.dtype) -> list[Tensor]:
        wide = copy.deepcopy(head).to(dtype)
        leaf = x.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = loss_of(leaf, wide, 500, labels)
        loss.backward()
        assert leaf.grad is not None
        assert wide.weight.grad is not None
        return [loss.detach().double(), leaf.grad.double(), wide.weight.grad.double()]

    exact = found(head_loss, torch.float64)
    plain, chunked = found(head_loss, torch.float32), found(chunked_head_loss(16), torch.float32)
    for truth, one, other in zip(exact, plain, chunked, strict=True):
        scale = truth.abs().max()
        assert (other - truth).abs().max() / scale <= 2 * (one - truth).abs().max() / scale + 1e-6


def test_chunked_loss_with_adapted_head_raises_config_error() -> None:
    model = small_model()
    model.lm_head = nn.Sequential(model.lm_head)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="remove lm_head from lora"):
        chunk_loss(model, 8)


def test_offloading_keeps_parameters_in_place_and_copies_activations() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = weight
    x = torch.randn(64, 64, requires_grad=True)
    with offloaded_activations(layer):
        y = layer(x).relu()
    saved = y.grad_fn.next_functions[0][0]
    assert saved is not None
    kept_weight = saved._saved_mat2 if hasattr(saved, "_saved_mat2") else saved._saved_self
    assert kept_weight.untyped_storage().data_ptr() in (
        weight.untyped_storage().data_ptr(),
        kept_weight.untyped_storage().data_ptr(),
    )
    # A copy is saved: changing the original does not change the gradient.
    before = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    with torch.no_grad():
        y.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], before)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_with_dropout_gives_same_bits(kind: str, mode: str) -> None:
    changes = {"resid_pdrop": 0.2} if kind == "gpt2" else {}
    model = small_model(kind, **changes)
    plain = EfficiencyConfig(precision="fp32")
    loss, expected = gradients(model, plain)
    other_loss, found = gradients(
        model, plain.model_copy(update={"activation_checkpointing": mode})
    )
    assert other_loss == loss
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


class _Scaled(nn.Linear):
    """A head that computes more than a matrix product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["plain", "bias", "class", "hook before", "hook after"])
def test_padded_vocabulary_rows_kept_give_same_loss_as_removed(
    softcap: float | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, torch.compile gets the padded logits. Padding rows get no probability and no
    gradient.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator)
    labels = torch.randint(13, (2, 5), generator=generator).index_fill_(1, torch.tensor([3]), -100)
    head = (_Scaled if kind == "class" else nn.Linear)(8, 16, bias=kind == "bias")
    if kind == "hook before":
        head.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    if kind == "hook after":
        head.register_forward_hook(lambda *call: 2 * call[-1])
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for on_gpu in (False, True):
        monkeypatch.setattr(ops, "_is_compiled_for_gpu", lambda _, answer=on_gpu: answer)
        logits = ops.logits_without_padding(x, head, 13, softcap)
        assert logits.shape[-1] == (16 if on_gpu else 13)
        loss = head_loss(x, head, 13, labels, softcap, z_loss_coef=0.1)
        (gradient,) = torch.autograd.grad(loss, [head.weight])
        assert not gradient[13:].any()
        found.append((loss.detach(), gradient))
    torch.testing.assert_close(found[1], found[0])


def test_attention_with_dropout_is_recomputed() -> None:
    """If attention's result were kept on a GPU, the recomputation would draw no random numbers for
    it, and later dropout layers would draw different ones.
    """
    aten = torch.ops.aten
    q = torch.zeros(1, 1, 1, 1)
    kept, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    flash = aten._scaled_dot_product_flash_attention.default
    assert keeps_result(None, flash, q, q, q) == kept
    assert keeps_result(None, flash, q, q, q, 0.0, True) == kept
    assert keeps_result(None, flash, q, q, q, 0.1, True) == again
    assert keeps_result(None, flash, q, q, q, dropout_p=0.1) == again
    for one in (
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ):
        assert keeps_result(None, one, q, q, q, None, True) == kept
        assert keeps_result(None, one, q, q, q, None, True, 0.1) == again
    assert keeps_result(None, aten.mm.default, q, q) == kept
    assert keeps_result(None, aten.native_dropout.default, q, 0.1, True) == again
    for operator, place in _DROPOUT_AT.items():
        assert operator._schema.arguments[place].name == "dropout_p"


def test_activation_checkpointing_saves_fewer_elements() -> None:
    """Count the elements that autograd saves in the forward pass."""

    def saved_elements(mode: str) -> int:
        model = small_model()
        config = EfficiencyConfig.model_validate(
            {"precision": "fp32", "activation_checkpointing": mode}
        )
        apply_methods(model, config, CPU)
        model.train()
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_function(model, config, CPU)(*batch())
        return count

    assert saved_elements("full") < 0.5 * saved_elements("none")


def test_checkpointed_layer_outside_training_computes_same_result() -> None:
    model = small_model().eval()
    input_ids, _ = batch()
    with torch.no_grad():
        expected = model(input_ids)
    apply_methods(model, EfficiencyConfig(precision="fp32", activation_checkpointing="full"), CPU)
    with torch.no_grad():
        assert torch.equal(model(input_ids), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_methods_keep_parameter_names() -> None:
    model = small_model()
    names = list(model.state_dict())
    config = EfficiencyConfig(
        precision="fp32", activation_checkpointing="full", compile=True, compile_regional=True
    )
    apply_methods(model, config, CPU)
    loss_function(model, config, CPU)
    assert list(model.state_dict()) == names


def test_compile_time_is_recorded_for_default_backend_and_empty_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("firstlight.hardware.compiling.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)
    counters: Counter[str] = Counter(fxgraph_cache_miss=2, fxgraph_cache_hit=1)
    monkeypatch.setitem(torch._dynamo.utils.counters, "inductor", counters)
    model = small_model().config

    def record(config: EfficiencyConfig, *, misses: int, hits: int) -> None:
        recorder = compile_time_recorder(config, CPU, model)
        counters.update(fxgraph_cache_miss=misses, fxgraph_cache_hit=hits)
        recorder(99.0)

    usual = EfficiencyConfig(compile=True, compile_regional=True)
    record(EfficiencyConfig(compile=False), misses=1, hits=0)
    record(EfficiencyConfig(compile=True, compile_backend="aot_eager"), misses=1, hits=0)
    record(EfficiencyConfig(compile=True, compile_mode="max-autotune"), misses=1, hits=0)
    record(usual, misses=1, hits=1)
    record(usual, misses=0, hits=0)
    assert not list(tmp_path.iterdir())
    record(usual, misses=1, hits=0)
    compiler = find_compiler(CPU)
    assert compiler is not None
    assert compiler.modes((77, 77))[0].seconds == pytest.approx(99.0)  # as slow for all models


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("sizes", slow_but([(0.1, 8)], itertools.product((0.0, 0.1), (0, 8))))
def test_regional_compilation_equals_whole_graph(
    sizes: tuple[float, int],
) -> None:
    """The graphs run in eager mode; `test_methods.py` compares inductor's kernels."""
    z_loss_coef, chunk = sizes

    def found(regional: bool) -> tuple[Tensor, list[Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = small_model()
        config = EfficiencyConfig(
            precision="fp32",
            loss_chunk_tokens=chunk,
            compile=True,
            compile_regional=regional,
            compile_backend="aot_eager",
        )
        apply_methods(model, config, CPU, z_loss_coef=z_loss_coef)
        loss = loss_function(model, config, CPU)(*batch())
        loss.backward()  # type: ignore[no-untyped-call]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], graphs

    whole, gradients, graphs = found(regional=False)
    regional, same_gradients, more_graphs = found(regional=True)
    assert torch.equal(whole, regional)
    assert len(gradients) == len(same_gradients)
    assert all(map(torch.equal, gradients, same_gradients))
    # One graph for the layers, which are alike, and one for head and loss.
    assert (graphs, more_graphs) == (1, 2)


def test_attention_setting_selects_named_kernel() -> None:
    model = small_model()
    choose_attention(model, "math")
    with torch.profiler.profile(acc_events=True) as profile:
        model(batch()[0])
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_attention_math" in names
    choose_attention(model, "flash")
    with torch.profiler.profile(acc_events=True) as profile:
        model(batch()[0])
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names


@pytest.mark.parametrize(
    "device, dtype, heads, documents, dropout, seq_len, expected",
    [
        ("cpu", torch.float32, 4, False, 0.0, 1024, "sdpa"),
        ("cpu", torch.bfloat16, 4, False, 0.0, 1024, "blockwise"),
        ("cpu", torch.bfloat16, 4, False, 0.0, 1025, "sdpa"),
        ("cpu", torch.bfloat16, 4, True, 0.1, 1025, "blockwise"),
        ("cpu", torch.bfloat16, 8, False, 0.0, 1024, "sdpa"),
        ("cpu", torch.bfloat16, 8, False, 0.1, 1024, "blockwise"),
        ("cpu", torch.float32, 4, False, 0.1, 1024, "blockwise"),
        ("cpu", torch.float32, 8, False, 0.1, 1024, "sdpa"),
        ("cpu", torch.float16, 4, False, 0.0, 1024, "sdpa"),
        ("cuda", torch.bfloat16, 4, False, 0.0, 1024, "sdpa"),
        ("cuda", torch.bfloat16, 4, True, 0.0, 1024, "flex"),
        ("cuda", torch.bfloat16, 4, True, 0.1, 1024, "sdpa"),
    ],
)
def test_attention_auto_resolves_to_expected_backend(
    device: str,
    dtype: torch.dtype,
    heads: int,
    documents: bool,
    dropout: float,
    seq_len: int,
    expected: str,
) -> None:
    model = GPT2Config(attn_pdrop=dropout, hidden_size=256, num_attention_heads=heads)
    for attention_, expected_ in (("auto", expected), ("math", "math")):
        config = EfficiencyConfig.model_validate({"attention": attention_})
        found = resolve_attention(
            config, device, dtype, model, seq_len, documents=documents, compiles=True
        )
        assert found == expected_


def test_precision_auto_resolves_to_faster_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 1.0, torch.bfloat16: 1.1}
    monkeypatch.setattr(
        "firstlight.hardware.device.measured_matmul_flops", lambda device, dtype: rates[dtype]
    )
    hardware = Hardware(torch.device("cpu"), "a CPU", 2**30, bf16=True)
    bf16_is_faster.cache_clear()
    assert resolve_precision(EfficiencyConfig(), hardware) == torch.float32
    rates[torch.bfloat16] = 1.3
    bf16_is_faster.cache_clear()
    assert resolve_precision(EfficiencyConfig(), hardware) == torch.bfloat16
    without = Hardware(torch.device("cpu"), "a CPU", 2**30, bf16=False)
    assert resolve_precision(EfficiencyConfig(), without) == torch.float32
    bf16_is_faster.cache_clear()


def test_cuda_graph_memory_does_not_hold_gradients() -> None:
    model = small_model().train()
    model(*batch()).backward()
    recorded = [p.grad for p in model.parameters() if p.grad is not None]
    expected = [tensor.clone() for tensor in recorded]
    assert expected
    keep_results(model)
    for tensor in recorded:
        tensor.fill_(float("nan"))
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(one, other)


def test_matmul_precision_is_set_in_context_and_restored_afterwards() -> None:
    before = torch.get_float32_matmul_precision()
    for keys, expected, products in (
        ({"precision": "fp32", "matmul_precision": "medium"}, "medium", "tf32"),
        ({"precision": "fp32", "matmul_precision": "high"}, "high", "tf32"),
        ({"precision": "fp32", "matmul_precision": "highest"}, "highest", "fp32"),
        ({"precision": "tf32"}, "high", "tf32"),
        ({"precision": "bf16"}, before, "bf16"),
    ):
        config = EfficiencyConfig.model_validate(keys)
        with matmul_precision(config):
            assert torch.get_float32_matmul_precision() == expected
        assert torch.get_float32_matmul_precision() == before
        assert config.products == products
    with pytest.raises(ValidationError, match="tf32 implies matmul_precision high, not medium"):
        EfficiencyConfig(precision="tf32", matmul_precision="medium")


def test_cudnn_attention_is_restored_after_last_overlapping_context() -> None:
    cuda: Any = torch.backends.cuda
    assert cuda.cudnn_sdp_enabled()
    first, second = varying_lengths(), varying_lengths()
    first.__enter__()
    second.__enter__()
    # As in two threads: the first one that enters is the first one that leaves.
    first.__exit__(None, None, None)
    assert not cuda.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert cuda.cudnn_sdp_enabled()


def test_uses_cuda_graphs_only_for_two_modes_and_one_backend_on_gpu() -> None:
    gpu, cpu = (Hardware(torch.device(name), "a test's", 2**34, True) for name in ("cuda", "cpu"))
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        config = EfficiencyConfig(compile=True, compile_mode=mode)
        assert uses_cuda_graphs(config, gpu) == (mode in ("reduce-overhead", "max-autotune"))
        assert not uses_cuda_graphs(config, cpu)
    assert uses_cuda_graphs(EfficiencyConfig(compile=True, compile_backend="cudagraphs"), gpu)
    assert not uses_cuda_graphs(EfficiencyConfig(compile=False), gpu)


def test_fp8_without_matrix_units_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"compute capability 8\.9.*use bf16"):
        require_fp8(CPU, small_model())


def test_fp8_layers_are_large_ones_without_head_and_routers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "FP8_LAYER_WEIGHTS", 32 * 48)
    # The layers with 32 x 48 weights.
    expected = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    model = empty_model(small_model().config.model_copy(update={"num_hidden_layers": 1}))
    assert set(fp8_layers(model)) == expected
    monkeypatch.setattr(precision, "FP8_LAYER_WEIGHTS", 32 * 48 + 1)
    assert not fp8_layers(model)
    routed = MoEConfig(**usual_config("mixtral").model_dump() | {"num_experts": 16})
    monkeypatch.setattr(precision, "FP8_LAYER_WEIGHTS", 1)
    found = {name.rpartition(".")[2] for name in fp8_layers(empty_model(routed))}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_fp8_gpt2_equals_same_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    torchao = pytest.importorskip("torchao.float8")
    monkeypatch.setattr(precision, "FP8_LAYER_WEIGHTS", 1)
    # A CPU does not have fp8 matrix units.
    emulated, convert = torchao.Float8LinearConfig(emulate=True), torchao.convert_to_float8_training
    monkeypatch.setattr(torchao, "Float8LinearConfig", lambda: emulated)
    emulating = functools.partial(convert, config=emulated)
    monkeypatch.setattr(torchao, "convert_to_float8_training", emulating)
    linear = nn.Linear(32, 48)
    layer = Conv1D(32, 48)
    layer.load_state_dict({"weight": linear.weight.T, "bias": linear.bias})
    x = torch.randn(2, 5, 32, requires_grad=True)

    def results(module: nn.Linear | Conv1D) -> tuple[Tensor, ...]:
        holder = nn.Sequential(module)
        convert_to_fp8(holder)
        y = holder(x)
        return y, *torch.autograd.grad(y.square().sum(), (x, module.weight))

    plain = linear(x)
    y, of_input, of_weight = results(linear)
    found, found_of_input, found_of_weight = results(layer)
    assert torch.equal(found, y)
    assert torch.equal(found_of_input, of_input)
    assert torch.equal(found_of_weight.T, of_weight)
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_residual_keeps_stream_of_each_family_in_bf16(family: str) -> None:
    config = EfficiencyConfig(precision="bf16", bf16_residual=True, attention="plain")
    model = empty_model(usual_config(family))
    model.init_weights(torch.Generator().manual_seed(0))
    apply_methods(model, config, CPU)
    dtypes: list[torch.dtype] = []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda _layer, inputs, y: dtypes.extend((inputs[0].dtype, _first(y).dtype))
        )
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | RMSNorm):
            module.register_forward_hook(lambda _norm, _inputs, y: dtypes.append(y.dtype))
    ids = torch.randint(384, (2, 24), generator=torch.Generator().manual_seed(1))
    loss = loss_function(model, config, CPU)(ids, ids)
    loss.backward()  # type: ignore[no-untyped-call]
    assert len(dtypes) >= 2 * 3
    assert set(dtypes) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert {g.dtype for g in gradients} == {torch.float32}
    assert all(g.isfinite().all() for g in gradients)
    # Without autocast, as in generation after training, nothing is rounded.
    dtypes.clear()
    model(ids)
    assert set(dtypes) == {torch.float32}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def test_compile_without_compiler_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.methods.compilation.shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="install g\\+\\+ or clang"):
        require_compiler(EfficiencyConfig(compile=True), CPU)
    require_compiler(EfficiencyConfig(compile=True, compile_backend="aot_eager"), CPU)


@pytest.mark.parametrize(
    ("system", "headers", "openmp", "missing"),
    [
        ("Linux", True, False, ""),
        ("Linux", False, False, "install python3-dev"),
        ("Darwin", True, False, "brew install libomp"),
        ("Darwin", True, True, ""),
    ],
)
def test_compile_without_headers_or_openmp_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    system: str,
    headers: bool,
    openmp: bool,
    missing: str,
) -> None:
    monkeypatch.setattr("firstlight.methods.compilation.shutil.which", str)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("OMP_PREFIX", str(tmp_path))
    (tmp_path / "include").mkdir()
    for path, is_there in ((tmp_path / "Python.h", headers), (tmp_path / "include/omp.h", openmp)):
        if is_there:
            path.touch()
    assert compilation.can_compile(CPU.device) is not bool(missing)
    if missing:
        with pytest.raises(ConfigError, match=missing):
            require_compiler(EfficiencyConfig(compile=True), CPU)


def test_deterministic_mode_ends_with_the_step() -> None:
    with same_bits(EfficiencyConfig(compile=True), CPU):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with same_bits(EfficiencyConfig(compile=False), CPU):
        assert not torch.are_deterministic_algorithms_enabled()


def test_frozen_head_receives_no_gradient() -> None:
    head = nn.Linear(6, 13, bias=False).requires_grad_(False)
    x, labels = torch.randn(1, 9, 6), torch.randint(13, (1, 9))

    def gradient(loss_of: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        loss_of(leaf, head, 13, labels).backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(chunked_head_loss(4)), gradient(head_loss))
    assert head.weight.grad is None


@pytest.mark.parametrize(
    "cut, before",
    [
        ({"engine": "ddp"}, "meta"),
        ({"engine": "fsdp"}, "cpu"),
        ({"tensor_parallel": 2}, "cpu"),
    ],
    ids=["ddp", "fsdp", "tensor"],
)
def test_sharded_model_is_moved_to_device_in_shards(
    cut: dict[str, Any], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsharded, the model may not fit. The meta device stands for any device other than the
    CPU.
    """
    seen: set[str] = set()

    def share(_: Engine, model: Any, precision: str) -> Any:
        seen.update(p.device.type for p in model.parameters())
        return model

    model = small_model()
    recipe = plain_recipe(
        {
            "model": model.config.model_dump(),
            "data": {"dir": "data", "seq_len": 24},
            "efficiency": {"precision": "fp32", "attention": "sdpa", "compile": False},
            "distributed": cut,
        }
    )
    elsewhere = Hardware(torch.device("meta"), "elsewhere", 2**40, bf16=True)
    engine = make_engine(recipe.distributed, World(0, 2, 0, 2), elsewhere.device)
    monkeypatch.setattr(type(engine), "share", share)
    TrainingProgram(recipe, model, elsewhere, engine)
    assert seen == {before}


def test_tensor_parallel_unsharded_tensors_are_moved_to_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorParallelEngine, "_mesh", lambda _: {"tensor": None})
    monkeypatch.setattr("firstlight.parallel.sharding.shard_tensors", lambda *_: None)
    model = empty_model(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8))
    config = DistributedConfig(tensor_parallel=2)
    assert len(list(model.buffers())) == 1
    make_engine(config, World(0, 2, 0, 2), torch.device("meta")).share(model, "fp32")
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


@pytest.mark.parametrize("precision", ["bf16", "bf16_params"])
def test_frozen_weights_stay_16_bit_with_32_bit_adapters(precision: str) -> None:
    model = small_model()
    recipe = plain_recipe(
        {
            "model": model.config.model_dump(),
            "data": {"dir": "data", "seq_len": 24},
            "lora": {"rank": 2},
            "efficiency": {"precision": precision, "vocab_multiple": 64, "compile": False},
        }
    )
    attach(model, recipe, CPU)
    # Before the move to the device: where 4-bit weights are trained, embedding and head in fp32
    # would not fit.
    assert model.embedding.weight.dtype == (
        torch.bfloat16 if precision == "bf16_params" else torch.float32
    )
    program = TrainingProgram(recipe, model, CPU)
    for name, parameter in program.model.named_parameters():
        if name.endswith("base_layer.weight"):
            assert parameter.dtype == torch.bfloat16, name
        if "lora_" in name:
            assert parameter.dtype == torch.float32, name


def test_capped_scores_agree_in_supporting_backends_and_others_raise() -> None:
    generator = torch.Generator().manual_seed(0)
    heads = ((2, 6, 9, 4), (2, 3, 9, 4), (2, 3, 9, 4))
    q, k, v = (4 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in heads)
    scores = q @ k.repeat_interleave(2, 1).transpose(-2, -1) * 0.5
    capped = 3 * torch.tanh(scores / 3)
    weights = capped.masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf).softmax(-1)
    expected = weights @ v.repeat_interleave(2, 1)
    config = LlamaConfig(
        model_type="gemma2", vocab_size=31, num_hidden_layers=1, attn_logit_softcapping=3.0
    )
    model = empty_model(config)
    attention_layer = model.layers[0].self_attn
    assert isinstance(attention_layer, LlamaAttention)
    for way in ("plain", "blockwise"):
        choose_attention(model, way)
        attend = attention_layer.attend
        found = attend(q, k, v, AttentionOptions(scale=0.5, softcap=3.0))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for way in ("sdpa", "flash", "efficient", "cudnn", "math"):
        with pytest.raises(ConfigError, match=f"attention '{way}' can't cap the scores of gemma2"):
            choose_attention(model, way)
    for device, compiles, way in (("cpu", True, "blockwise"), ("cuda", True, "flex")):
        assert way == resolve_attention(
            EfficiencyConfig(),
            device,
            torch.float32,
            config,
            2048,
            documents=False,
            compiles=compiles,
        )


def test_attention_sinks_agree_in_supporting_backends_and_others_raise() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    sinks = torch.tensor([-3.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    scores = (q @ k.transpose(-2, -1) * 0.5).exp() * torch.ones(9, 9).tril()
    expected = scores / (scores.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ v
    config = GptOssConfig(vocab_size=31, num_hidden_layers=1)
    model = empty_model(config)
    attention_layer = model.layers[0].self_attn
    assert isinstance(attention_layer, LlamaAttention)
    for way in ("plain", "blockwise"):
        choose_attention(model, way)
        attend = attention_layer.attend
        found = attend(q, k, v, AttentionOptions(scale=0.5, sinks=sinks))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for way in ("sdpa", "flash", "efficient", "cudnn", "math"):
        said = f"attention '{way}' can't compute the attention sinks of gpt_oss models: use blockw"
        with pytest.raises(ConfigError, match=said):
            choose_attention(model, way)
    for device in ("cpu", "cuda"):
        assert (
            resolve_attention(
                EfficiencyConfig(),
                device,
                torch.float32,
                config,
                2048,
                documents=False,
                compiles=True,
            )
            == "blockwise"
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("window", [None, 5], ids=["causal", "window"])
def test_flex_attention_computes_sinks_and_gradients_from_log_sum_exp(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import flex_attention as of_torch

    # Without compilation and without the check that forbids gradients on CPUs: only torch's
    # formulas.
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    monkeypatch.setattr(
        "firstlight.methods.attention._compiled_flex", lambda: of_torch.flex_attention
    )
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 40, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 40, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    sinks = torch.tensor([-3.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    weights = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    model = empty_model(GptOssConfig(vocab_size=31, num_hidden_layers=1))
    attention_layer = model.layers[0].self_attn
    assert isinstance(attention_layer, LlamaAttention)
    results = []
    for way in ("plain", "flex"):
        choose_attention(model, way)
        mask = model.make_mask(torch.arange(40), 40, window, None)
        attend = attention_layer.attend
        found = attend(q, k, v, AttentionOptions(mask, scale=0.5, sinks=sinks))
        results.append((found, *torch.autograd.grad((found * weights).sum(), inputs)))
    assert not isinstance(mask, torch.Tensor | None), "no block mask: another backend was taken"
    for expected, one in zip(*results, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["plain", "blockwise", "flash", "math"])
def test_attention_backends_all_use_scale_of_family(way: str) -> None:
    config = LlamaConfig(
        model_type="granite",
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_multiplier=1.5,
        initializer_range=0.2,
    )
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    ids = torch.arange(20)[None] % 31
    expected = model(ids)
    choose_attention(model, way)
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    usual = config.model_copy(update={"attention_multiplier": None})
    other = empty_model(usual)
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(other(ids), expected, atol=1e-2)
