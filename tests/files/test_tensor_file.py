"""Tests that tensor files have the same bytes as files written by the safetensors library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firstlight.errors import StorageError
from firstlight.files import tensor_file
from firstlight.files.disk import HashedFile
from firstlight.files.tensor_file import write_tensors

_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint64,
]


def written(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    path.unlink(missing_ok=True)
    with HashedFile(path) as file:
        write_tensors(file, tensors, metadata)
    data = path.read_bytes()
    assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    return data


def drawn(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """Return a tensor with random bits, including NaN, infinities and denormals."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    size = 1 if dtype == torch.bool else dtype.itemsize
    bits = torch.randint(limit, (count * size,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


_TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter("__metadata__".__ne__),
    st.builds(
        drawn,
        st.sampled_from(_DTYPES),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(0, 1 << 30),
    ),
    max_size=6,
)


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


# The library writes metadata entries in arbitrary order.
@given(_TENSORS, st.none() | st.dictionaries(_TEXTS, _TEXTS, min_size=1, max_size=1))
def test_tensor_file_bytes_equal_those_of_safetensors(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.safetensors"
    assert written(path, tensors, metadata) == safetensors.torch.save(tensors, metadata)


def test_tensor_file_orders_dtypes_like_safetensors(tmp_path: Path) -> None:
    tensors = {f"{n:02d}": torch.zeros(3, dtype=dtype) for n, dtype in enumerate(_DTYPES)}
    reverse = {f"{-n % 15:02d}": torch.zeros(3, dtype=dtype) for n, dtype in enumerate(_DTYPES)}
    for some in (tensors, reverse):
        assert written(tmp_path / "file", some) == safetensors.torch.save(some)


def test_tensor_file_stores_values_of_views_shared_memory_and_scalars(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "whole": base,
        "again": base,
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.tensor(2.0).expand(3, 2),
        "offset": base[1:],
        "scalar": torch.tensor(7),
        "gradient": torch.ones(2, requires_grad=True),
    }
    written(tmp_path / "file", tensors, {"format": "pt"})
    read = safetensors.torch.load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor.detach()), name


def test_tensor_file_writes_large_tensors_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.randn(1000, 3), "b": torch.randn(7, 11).bfloat16()}
    monkeypatch.setattr(tensor_file, "_CHUNK_BYTES", 100)
    assert written(tmp_path / "file", tensors) == safetensors.torch.save(tensors)


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("complex", torch.zeros(2, dtype=torch.complex128)),
        ("sparse", torch.eye(3).to_sparse()),
        ("__metadata__", torch.zeros(2)),
    ],
)
def test_tensor_file_unsupported_tensor_is_named(tmp_path: Path, name: str, tensor: Tensor) -> None:
    with pytest.raises(StorageError, match=f"safetensors format does not support tensor '{name}'"):
        written(tmp_path / "file", {"good": torch.ones(1), name: tensor})
