"""Tests of the kernel for few rows: sums, rounding, and the cases in which it is not used."""

from __future__ import annotations

import copy
import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from firstlight.generation import few_rows
from firstlight.generation.few_rows import (
    FewRowsConv1D,
    FewRowsLinear,
    Int8Linear,
    few_rows_linear,
    lay_out,
    quantize_int8,
    rounded,
    takes_few_rows,
    use_few_rows,
    use_large_pages,
)
from firstlight.methods import can_compile
from firstlight.models import GPT2Config, LlamaConfig, Model, empty_model

needs_compiler = pytest.mark.skipif(
    not can_compile(torch.device("cpu")), reason="there is no C++ compiler"
)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _model(family: str, dtype: torch.dtype = torch.float32) -> Model:
    config: GPT2Config | LlamaConfig
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=67,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=32,
        )
    else:
        config = LlamaConfig(
            vocab_size=67,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=32,
        )
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.to(dtype).eval()


@needs_compiler
@given(
    rows=st.integers(1, few_rows.MOST_ROWS),
    k_size=st.sampled_from([1, 3, 15, 16, 63, 64, 65, 130, 1000]),
    o_size=st.integers(1, 40),
    kind=st.sampled_from(["float32", "bfloat16", "int8"]),
    with_bias=st.booleans(),
)
def test_few_rows_linear_matches_float64(
    rows: int, k_size: int, o_size: int, kind: str, with_bias: bool
) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x, weight = _drawn(1, rows, k_size).to(dtype), _drawn(2, o_size, k_size).to(dtype)
    bias = _drawn(3, o_size).to(dtype) if with_bias else None
    scale = None
    if kind == "int8":
        weight, scale = rounded(weight)
    with torch.inference_mode():
        found = few_rows_linear(x, weight, scale, bias)
    exact = x.double() @ weight.double().T
    most = x.double().abs() @ weight.double().abs().T
    if scale is not None:
        exact, most = exact * scale.double(), most * scale.double()
    if bias is not None:
        exact, most = exact + bias.double(), most + bias.double().abs()
    assert found.dtype == dtype
    # Sums are exact except for the fp32 rounding of their terms, including the bias; in bf16, the
    # result is rounded once more.
    bound = most * (k_size + with_bias) * 2**-24 + 1e-30
    if dtype == torch.bfloat16:
        bound = bound + exact.abs() * 2**-8
    assert ((found.double() - exact).abs() <= bound).all()


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_few_rows_linear_row_is_bitwise_equal_for_any_batch_and_threads(kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x, weight = _drawn(1, few_rows.MOST_ROWS, 200).to(dtype), _drawn(2, 77, 200).to(dtype)
    scale = None
    if kind == "int8":
        weight, scale = rounded(weight)
    together = few_rows_linear(x, weight, scale, None)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for row in range(len(x)):
                alone = few_rows_linear(x[row : row + 1], weight, scale, None)
                assert torch.equal(alone[0], together[row])
            assert torch.equal(few_rows_linear(x[:5], weight, scale, None), together[:5])
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_few_rows_bf16_results_are_rounded_like_torch() -> None:
    bits = torch.arange(0, 2**32, 65537, dtype=torch.int64)
    values = torch.cat([bits, bits ^ 0x8000, torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF])])
    wanted = values.clamp(max=2**32 - 1).to(torch.uint32).view(torch.float32)
    # Each value is the sum of a leading part and a remainder, both of which are exact in bf16.
    high = (wanted.view(torch.int32) & -65536).view(torch.float32)
    rest = torch.where(wanted.isfinite(), wanted - high, 0.0)
    fits = (rest.bfloat16().float() == rest) & wanted.isfinite()
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.stack([high, rest], 1).bfloat16()
    found = few_rows_linear(x, weight, None, None)[0]
    assert fits.sum() > 1000
    assert torch.equal(found[fits], (high + rest).bfloat16()[fits])
    special = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [-torch.inf, torch.inf]])
    found = few_rows_linear(x, special.bfloat16(), None, None)[0].float()
    assert found[0] == torch.inf
    assert found[1:].isnan().all()


@needs_compiler
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_model_keeps_names_values_and_logits(family: str, dtype: torch.dtype) -> None:
    plain = _model(family, dtype)
    model = copy.deepcopy(plain)
    use_few_rows(model)
    lay_out(model)
    kinds = [type(module) for module in model.modules()]
    assert FewRowsLinear in kinds
    assert (FewRowsConv1D in kinds) == (family == "gpt2")
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name], tensor), name
    input_ids = torch.tensor([[5], [6], [7]])
    with torch.inference_mode():
        found, expected = model(input_ids).float(), plain(input_ids).float()
    assert not torch.equal(found, torch.zeros_like(found))
    close = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


def _pages(folder: Path, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "enabled").write_text(setting)
    monkeypatch.setattr(few_rows, "_LARGE_PAGES", folder / "enabled")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux")
@pytest.mark.parametrize("int8", [False, True])
def test_few_rows_weights_in_huge_pages_keep_values_and_ties(
    int8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pages(tmp_path, "always [madvise] never", monkeypatch)
    model = _model("llama", torch.bfloat16)
    model.lm_head.weight = model.embedding.weight
    if int8:
        quantize_int8(model)
    use_few_rows(model)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    use_large_pages(model, is_mapped=int8)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in values.items())
    moved = {name for name, place in places.items() if found[name].data_ptr() != place}
    layers = [n for n, m in model.named_modules() if isinstance(m, FewRowsLinear | Int8Linear)]
    own = {f"{name}.weight_int8" if int8 else f"{name}.weight" for name in layers}
    assert moved == (own if int8 else {*own, "model.embed_tokens.weight"})
    assert int8 or model.lm_head.weight is model.embedding.weight
    assert all(found[name].data_ptr() % 64 == 0 for name in moved)


@pytest.mark.parametrize(
    ("setting", "is_mapped"),
    [("always madvise [never]", False), (None, False), ("always [madvise] never", True)],
)
def test_few_rows_weights_without_huge_pages_or_mapped_are_not_moved(
    setting: str | None, is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "_LARGE_PAGES", tmp_path / "enabled")
    if setting is not None:
        _pages(tmp_path, setting, monkeypatch)
    model = _model("llama")
    use_few_rows(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    use_large_pages(model, is_mapped=is_mapped)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


@needs_compiler
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_few_rows_kernel_is_called_by_every_layer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(family)
    use_few_rows(model)
    lay_out(model)
    calls = []
    real = few_rows.few_rows_linear

    def counted(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        calls.append(weight)
        return real(x, weight, scale, bias)

    monkeypatch.setattr(few_rows, "few_rows_linear", counted)
    with torch.inference_mode():
        model(torch.tensor([[5]]))
    layers = sum(isinstance(m, FewRowsLinear | FewRowsConv1D) for m in model.modules())
    assert len(calls) == layers > 8


@needs_compiler
def test_few_rows_gradients_many_rows_and_autocast_use_torch() -> None:
    weight = torch.ones(4, 8)
    row, rows = torch.ones(1, 8), torch.ones(few_rows.MOST_ROWS + 1, 8)
    assert not takes_few_rows(row, weight)
    with torch.inference_mode():
        assert takes_few_rows(row, weight)
        assert takes_few_rows(rows[1:], weight)
        assert not takes_few_rows(rows, weight)
        assert not takes_few_rows(row, weight.half())
        assert not takes_few_rows(row.half(), weight.half())
        assert not takes_few_rows(row.double(), weight.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert not takes_few_rows(row, weight)


@needs_compiler
def test_few_rows_model_passes_gradients() -> None:
    plain = _model("gpt2")
    model = copy.deepcopy(plain)
    use_few_rows(model)
    lay_out(model)
    for one in (plain, model):
        one(torch.tensor([[5, 6]])).sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-5)


def test_few_rows_subclasses_of_linear_are_unchanged() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = _model("llama")
    model.lm_head.__class__ = Doubled
    use_few_rows(model)
    assert type(model.lm_head) is Doubled


def test_few_rows_without_compiler_uses_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _no_kernels_yet(monkeypatch, tmp_path)
    model = _model("gpt2")
    expected = model(torch.tensor([[5]])).detach()
    use_few_rows(model)
    lay_out(model)
    with torch.inference_mode():
        assert not takes_few_rows(torch.ones(1, 8), torch.ones(4, 8))
        assert torch.equal(model(torch.tensor([[5]])), expected)


def _no_kernels_yet(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(cache))
    for name in ("_library", "_products"):
        monkeypatch.setattr(few_rows, name, functools.cache(getattr(few_rows, name).__wrapped__))
    # On a loaded machine, the compiler takes minutes with optimisation, which is not needed here.
    monkeypatch.setattr(few_rows, "_COMPILER_SECONDS", 550.0)
    monkeypatch.setattr(few_rows, "_FLAGS", ("-O0", *few_rows._FLAGS[2:]))


@needs_compiler
def test_few_rows_kernels_are_compiled_once_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_kernels_yet(monkeypatch, tmp_path / "own")
    assert few_rows._products()
    (library,) = (tmp_path / "own").iterdir()
    before = library.stat().st_mtime_ns
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    _no_kernels_yet(monkeypatch, tmp_path / "own")
    assert few_rows._products()
    assert library.stat().st_mtime_ns == before


@needs_compiler
def test_few_rows_cache_writable_by_others_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(tmp_path, 0o777)
    _no_kernels_yet(monkeypatch, tmp_path)
    assert not few_rows._products()


@needs_compiler
def test_few_rows_damaged_library_is_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_kernels_yet(monkeypatch, tmp_path)
    few_rows._compiled().write_bytes(b"cut off")
    assert not few_rows._products()


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_few_rows_linear_works_in_compiled_graph(kind: str) -> None:
    weight, scale = _drawn(2, 30, 64), None
    x = _drawn(1, 2, 64)
    if kind == "int8":
        x, (weight, scale) = x.bfloat16(), rounded(weight)
    compiled = torch.compile(
        lambda x: few_rows_linear(x, weight, scale, None) + 1, backend="aot_eager", fullgraph=True
    )
    with torch.inference_mode():
        assert torch.equal(compiled(x), few_rows_linear(x, weight, scale, None) + 1)
