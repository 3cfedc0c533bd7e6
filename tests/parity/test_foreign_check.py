"""A conversion's check finds what is wrong: the source's own logits against the result's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_folders import nanochat_model
from foreign_programs import (
    CONTEXT,
    HEADS,
    IDS,
    VOCABULARY,
    WIDTH,
    BookGPT,
    BookLlama,
    NanoGPT,
    drawn,
    in_transformers,
    nanogpt_checkpoint,
)
from torch import Tensor, nn

from firstlight.conversion import foreign, foreign_files, foreign_forward
from firstlight.conversion.foreign import ForeignModel, read_foreign
from firstlight.conversion.foreign_layouts import LAYOUTS, TRANSPOSED

KINDS = ["nanoGPT", "GPT", "fast GPT", "Llama", "nanochat"]
LLAMA = {
    "num_attention_heads": 6,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_theta": 5000.0},
}


def saved(folder: Path, kind: str) -> Path:
    """A file of a random model in which every tensor differs from every other."""
    content: dict[str, Any]
    if kind == "nanochat":
        nanochat_model(folder, n_kv_head=4)
        return folder / "model_000650.pt"
    if kind == "nanoGPT":
        model = NanoGPT()
        model.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        content = nanogpt_checkpoint(drawn(model))
    elif kind == "Llama":
        content = drawn(BookLlama(kv_heads=6)).state_dict()
    else:
        content = drawn(BookGPT(qkv_bias=True, fast=kind == "fast GPT")).state_dict()
    torch.save(content, folder / "model.pth")
    return folder / "model.pth"


def read(folder: Path, kind: str) -> ForeignModel:
    configs: dict[str, dict[str, Any]] = {"nanoGPT": {}, "Llama": LLAMA, "nanochat": {}}
    return read_foreign(saved(folder, kind), config=configs.get(kind, {"n_head": HEADS}))


class Check:
    """The greatest difference between a source's logits and those of the result."""

    def __init__(self, model: ForeignModel) -> None:
        self.tensors = model.tensors
        self.expected = model.logits(IDS)
        self.result = in_transformers(model)

    @torch.no_grad()
    def difference(self, changed: Mapping[str, Tensor]) -> float:
        """Of the result with some tensors exchanged, as a share of the greatest logit."""
        self.result.load_state_dict({**self.tensors, **changed}, strict=True)
        logits = self.result(IDS).logits
        return float((logits - self.expected).abs().max() / self.expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_swapping_any_two_tensors_of_one_shape_shows(tmp_path: Path, kind: str) -> None:
    check = Check(read(tmp_path, kind))
    assert check.difference({}) < 1e-5
    differences = {
        (a, b): check.difference({a: check.tensors[b], b: check.tensors[a]})
        for a, b in itertools.combinations(check.tensors, 2)
        if check.tensors[a].shape == check.tensors[b].shape
    }
    assert len(differences) > 30
    assert min(differences.values()) > 1e-2, min(differences, key=differences.__getitem__)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_transpose_shows(tmp_path: Path, kind: str) -> None:
    check = Check(read(tmp_path, kind))
    square = {n: t for n, t in check.tensors.items() if t.dim() == 2 and len(t) == t.shape[1]}
    assert len(square) == (8 if kind in ("Llama", "nanochat") else 2)
    assert all(check.difference({name: square[name].t()}) > 1e-2 for name in square)


@pytest.mark.parametrize("kind", ["nanoGPT", "GPT", "fast GPT"])
def test_queries_keys_and_values_that_were_stacked_wrongly_show(tmp_path: Path, kind: str) -> None:
    check = Check(read(tmp_path, kind))
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"):
        q, k, v = check.tensors[name].chunk(3, 1)
        assert check.difference({name: torch.cat((q, k, v), 1)}) < 1e-5
        for wrong in ((k, q, v), (q, v, k), (q.t(), k, v), (q, k.t(), v), (q, k, v.t())):
            assert check.difference({name: torch.cat(wrong, 1)}) > 1e-2


@pytest.mark.parametrize(
    "kind, modules",
    [
        ("GPT", ("transformer.h.{}.ln_1", "transformer.h.{}.ln_2")),
        ("fast GPT", ("transformer.h.{}.ln_2", "transformer.h.{}.ln_1")),
        ("Llama", ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj")),
        ("nanochat", ("model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.o_proj")),
    ],
)
def test_a_mistake_in_a_table_of_names_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, modules: tuple[str, str]
) -> None:
    right = read(tmp_path, kind)
    a, b = (f"{module}.weight" for module in modules)
    wrong = [
        dataclasses.replace(one, names={**one.names, a: one.names[b], b: one.names[a]})
        if a in one.names
        else one
        for one in LAYOUTS
    ]
    monkeypatch.setattr(foreign_files, "LAYOUTS", wrong)
    mistaken = read(tmp_path, kind)
    assert torch.equal(mistaken.logits(IDS), right.logits(IDS))
    assert Check(mistaken).difference({}) > 1e-2


@pytest.mark.parametrize("kind", ["nanoGPT", "GPT", "fast GPT"])
def test_a_table_that_misses_a_transpose_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    right = read(tmp_path, kind)
    forgotten = {"transformer.h.{}.attn.c_proj.weight"}
    monkeypatch.setattr(foreign, "TRANSPOSED", TRANSPOSED - forgotten)
    mistaken = read(tmp_path, kind)
    assert torch.equal(mistaken.logits(IDS), right.logits(IDS))
    assert Check(mistaken).difference({}) > 1e-2


@pytest.mark.parametrize(
    "kind, given",
    [
        ("GPT", {"n_head": HEADS, "activation_function": "gelu"}),
        ("fast GPT", {"n_head": HEADS, "layer_norm_epsilon": 1e-2}),
        ("nanoGPT", {"layer_norm_epsilon": 1e-2}),
        ("Llama", {**LLAMA, "rms_norm_eps": 1e-2}),
        (
            "Llama",
            {**LLAMA, "rope_scaling": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}},
        ),
    ],
)
def test_a_config_that_says_what_the_program_doesnt_compute_shows(
    tmp_path: Path, kind: str, given: dict[str, Any]
) -> None:
    right = read(tmp_path, kind)
    mistaken = read_foreign(tmp_path / "model.pth", config=given)
    assert torch.equal(mistaken.logits(IDS), right.logits(IDS))
    assert Check(mistaken).difference({}) > 1e-4


def test_a_rotary_base_that_is_a_little_off_the_files_own_tables_shows(tmp_path: Path) -> None:
    model = drawn(BookLlama(saves_tables=True))
    torch.save(model.state_dict(), tmp_path / "model.pth")
    right, mistaken = (
        read_foreign(tmp_path / "model.pth", config={"rope_theta": theta})
        for theta in (5e3, 5.02e3)
    )
    assert torch.equal(mistaken.logits(IDS), right.logits(IDS))
    assert Check(right).difference({}) < 1e-5
    assert Check(mistaken).difference({}) > 1e-4


def test_tables_of_another_form_are_not_used(tmp_path: Path) -> None:
    model = drawn(BookLlama(kv_heads=6))
    tables = {
        "trf_blocks.0.att.cos": torch.ones(len(IDS[0]) - 1, 8),
        "trf_blocks.1.att.cos": torch.tensor(1.0),
        "trf_blocks.1.att.sin": "none",
    }
    torch.save({**model.state_dict(), **tables}, tmp_path / "model.pth")
    logits = read_foreign(tmp_path / "model.pth", config=LLAMA).logits(IDS)
    torch.testing.assert_close(logits, model(IDS).detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7, VOCABULARY, VOCABULARY + 1])
def test_a_head_in_parts_is_the_whole_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    logits = read(tmp_path, "GPT").logits
    whole = logits(IDS)
    monkeypatch.setattr(foreign_forward, "_HEAD_ROWS", rows)
    torch.testing.assert_close(logits(IDS), whole, rtol=0, atol=1e-5)


def test_logits_of_saved_parameters_need_no_gradient(tmp_path: Path) -> None:
    torch.save(dict(drawn(BookGPT()).named_parameters()), tmp_path / "model.pth")
    logits = read_foreign(tmp_path / "model.pth", config={"n_head": HEADS}).logits(IDS)
    assert not logits.requires_grad


@pytest.mark.parametrize("kind", ["nanoGPT", "GPT"])
def test_more_ids_than_positions_are_refused(tmp_path: Path, kind: str) -> None:
    logits = read(tmp_path, kind).logits
    assert logits(torch.zeros(1, CONTEXT, dtype=torch.int64)).shape == (1, CONTEXT, VOCABULARY)
    with pytest.raises(IndexError):
        logits(torch.zeros(1, CONTEXT + 1, dtype=torch.int64))
