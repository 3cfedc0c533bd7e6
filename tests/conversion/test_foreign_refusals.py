"""Tests of pickled checkpoints of other programs that are rejected."""

from __future__ import annotations

import functools
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from firstlight.conversion.foreign.model import read_foreign
from firstlight.errors import ModelError
from foreign_files import LLAMA_CONFIG, book_gpt, book_llama, draw, nanogpt, save

Save = Callable[[Any], Path]


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    """Return a function that saves an object with torch.save and returns the file's path."""
    return functools.partial(save, tmp_path / "model.pth")


class Trap:
    """An object whose unpickling creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_read_foreign_code_in_pickle_raises_and_is_not_run(tmp_path: Path, zipped: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / "ckpt.pt"
    checkpoint = {**nanogpt(), "config": Trap(marker)}
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match=r"contains more than weights \(\w+\.mkdir\).*state_dict"):
        read_foreign(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the trap is none"


def test_read_foreign_bare_pickle_raises_and_is_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "ckpt.pt"
    path.write_bytes(pickle.dumps(Trap(marker), protocol=2))
    with pytest.raises(ModelError, match=r"it was not written by torch\.save"):
        read_foreign(path)
    assert not marker.exists()


def test_read_foreign_pickled_model_object_raises(saved: Save) -> None:
    with pytest.raises(ModelError, match=r"\(torch\.nn\.modules\.linear\.Linear\).*state_dict"):
        read_foreign(saved(torch.nn.Linear(2, 2)))


def test_read_foreign_environment_cannot_disable_safe_unpickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    test_read_foreign_code_in_pickle_raises_and_is_not_run(tmp_path, zipped=True)


def _safetensors(path: Path) -> None:
    safetensors.torch.save_file(draw({"tok_emb.weight": (3, 4)}), path)


def _other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "nothing")


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda path: path.write_bytes(b""), "not a PyTorch checkpoint: it is empty"),
        (lambda path: path.write_text("hello there, all"), r"it was not written by torch\.save"),
        (_safetensors, r"it was not written by torch\.save"),
        (lambda path: path.mkdir(), "is a folder: use the checkpoint file in it"),
        (lambda path: None, "No such file"),
        (_other_zip, "is damaged, truncated or not a checkpoint with only weights"),
    ],
    ids=["empty", "text", "safetensors", "folder", "missing", "zip"],
)
def test_read_foreign_not_a_checkpoint_raises_one_line_error(
    tmp_path: Path, write: Callable[[Path], Any], message: str
) -> None:
    path = tmp_path / "model.pth"
    write(path)
    with pytest.raises(ModelError, match=message) as caught:
        read_foreign(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_read_foreign_truncated_file_raises(tmp_path: Path, zipped: bool, share: float) -> None:
    path = tmp_path / "ckpt.pt"
    torch.save(nanogpt(), path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="is damaged, truncated"):
        read_foreign(path)


@pytest.mark.parametrize(
    "content, message",
    [
        ([torch.zeros(2)], "contains a list, not a state_dict"),
        (torch.zeros(2), "contains a Tensor, not a state_dict"),
        ({}, "no named tensors"),
        ({"model": {}}, "no named tensors"),
        ({3: torch.zeros(2)}, "no named tensors"),
        ({"encoder.weight": torch.zeros(2)}, r"the first tensor is 'encoder\.weight'"),
        ({"epoch": 3}, "the first tensor is 'epoch'"),
    ],
)
def test_read_foreign_checkpoints_of_other_programs_raise_model_error(
    saved: Save, content: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_foreign(saved(content))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"trf_blocks.0.att.q_norm.scale": torch.ones(8)},
            r"LLMs-from-scratch's model doesn't have: trf_blocks\.0\.att\.q_norm\.scale$",
        ),
        ({"out_head.bias": torch.ones(7)}, r"doesn't have: out_head\.bias$"),
        ({"pos_emb.weight": None}, r"lacks tensors: pos_emb\.weight$"),
        ({"trf_blocks.1.norm2.shift": None}, r"lacks tensors: trf_blocks\.1\.norm2\.shift$"),
        (
            {"trf_blocks.9.norm2.shift": torch.ones(64)},
            r"doesn't have: trf_blocks\.9\.norm2\.shift$",
        ),
        (
            {"trf_blocks.1.att.W_key.weight": torch.ones(32, 64)},
            r"tensors with wrong shapes: trf_blocks\.1\.att\.W_key\.weight is \[32, 64\], "
            r"expected \[64, 64\]$",
        ),
        (
            {"trf_blocks.0.ff.layers.2.weight": torch.ones(256, 64)},
            r"trf_blocks\.0\.ff\.layers\.2\.weight is \[256, 64\], expected \[64, 256\]$",
        ),
        (
            {"tok_emb.weight": torch.ones(7)},
            (
                r"tok_emb\.weight has shape \[7\], but must be a "
                r"matrix"
            ),
        ),
        (
            {"tok_emb.weight": torch.ones(0, 64)},
            (
                r"tok_emb\.weight has shape \[0, 64\], but must "
                r"be a matrix"
            ),
        ),
        (
            {"out_head.weight": torch.ones(7, 64, dtype=torch.int8)},
            r"not plain floating point: out_head\.weight is int8$",
        ),
        (
            {"out_head.weight": torch.ones(7, 64).to(torch.float8_e4m3fn)},
            r"not plain floating point: out_head\.weight is float8_e4m3fn$",
        ),
        ({"out_head.weight": 3.5}, r"not plain floating point: out_head\.weight is not a tensor$"),
    ],
)
def test_read_foreign_mismatched_tensors_raise_and_are_named(
    saved: Save, change: dict[str, Any], message: str
) -> None:
    weights = {**book_gpt(), **change}
    with pytest.raises(ModelError, match=message):
        read_foreign(saved({name: t for name, t in weights.items() if t is not None}))


def test_read_foreign_pickled_hugging_face_gpt2_is_not_taken_for_nanogpt(saved: Save) -> None:
    weights = nanogpt()["model"]
    for name in list(weights):
        if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            weights[name] = weights[name].t().contiguous()
    with pytest.raises(ModelError, match=r"c_attn\.weight is \[64, 192\], expected \[192, 64\]"):
        read_foreign(saved(weights))


def test_read_foreign_invalid_rotary_tables_raise_or_are_ignored(saved: Save) -> None:
    weights: dict[str, Any] = {**book_llama(), "trf_blocks.0.att.sin": torch.ones(12, 5)}
    with pytest.raises(ModelError, match=r"rotary tables have the impossible shape \[12, 5\]"):
        read_foreign(saved(weights), config=LLAMA_CONFIG)
    weights["trf_blocks.0.att.sin"] = "none"
    foreign = read_foreign(saved(weights), config=LLAMA_CONFIG)
    assert foreign.config["num_attention_heads"] == 8


def test_read_foreign_tensors_smaller_than_their_shape_raise(saved: Save) -> None:
    content = {n: torch.zeros(1).expand(t.shape) for n, t in nanogpt()["model"].items()}
    with pytest.raises(ModelError, match="fewer elements than their shape requires: transformer"):
        read_foreign(saved({"model": content}))


def test_read_foreign_oversized_pickle_raises(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02(" + b"]" * 2_000_000 + b"l.")
    with pytest.raises(ModelError, match="not a checkpoint with only weights"):
        read_foreign(path)


def test_read_foreign_long_pickle_before_pytorch_1_6_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examining each of its opcodes would take long."""
    monkeypatch.setattr("firstlight.conversion.pickled._MAX_PICKLE_BYTES", 10_000)
    path = tmp_path / "model.pth"
    torch.save([1] * 10_000, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"model\.pth is damaged, truncated or not a checkpoint"):
        read_foreign(path)


def test_read_foreign_settings_with_nested_lists_raise(saved: Save) -> None:
    """Each list contains another list twice, and so on: a few bytes per list would give an endless
    message.
    """
    value: Any = 1
    for _ in range(21):
        value = [value, value]
    with pytest.raises(ModelError, match=r"model\.pth is damaged, truncated or not a checkpoint"):
        read_foreign(saved(nanogpt(n_layer=value)))
