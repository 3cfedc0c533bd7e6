"""Loading and saving weights: three modes that must give the same values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest
import safetensors.torch
import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.files.atomic import write_file
from firstlight.lora.loading import load_model
from firstlight.models import (
    DeepseekConfig,
    GPT2Config,
    GptOssConfig,
    Llama,
    LlamaConfig,
    Model,
    ModelConfig,
    MoEConfig,
    Qwen3NextConfig,
    build_model,
    empty_model,
)
from firstlight.weights.loading import (
    LOADING_MODES,
    LoadingMode,
    embedding_name,
    file_tensors,
    weights_to_save,
)
from firstlight.weights.stored import (
    INDEX_NAME,
    WEIGHTS_NAME,
    save_tensors,
    save_weights,
    stored_tensors,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
    "llama": LlamaConfig(**_SIZES),
    "tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "mixtral": MoEConfig(**_SIZES, num_experts=3),
    "qwen3_moe": MoEConfig(
        **_SIZES,
        model_type="qwen3_moe",
        num_experts=3,
        moe_intermediate_size=9,
        mlp_only_layers=[0],
    ),
    "gpt_oss": GptOssConfig(**_SIZES, num_experts=3),
    "deepseek_v3": DeepseekConfig(**_SIZES | {"num_key_value_heads": 4}, num_experts=4),
    "qwen3_next": Qwen3NextConfig(**_SIZES, head_dim=8, num_experts=3, moe_intermediate_size=9),
}
FAMILIES = list(CONFIGS)
_STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def some_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    model = empty_model(config, vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(7))
    return model.eval()


def write(folder: Path, model: Model, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    save_weights({n: t.to(dtype) for n, t in weights_to_save(model).items()}, folder, **save)
    return folder


def logits(model: Model) -> Tensor:
    ids = torch.arange(24).view(2, 12) % 37
    with torch.no_grad():
        found: Tensor = model(ids)
    return found


@pytest.mark.parametrize("mode", LOADING_MODES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [10**9, 2000])
def test_load_model_every_mode_gives_saved_values(
    name: str, mode: LoadingMode, shard_bytes: int, tmp_path: Path
) -> None:
    model = some_model(CONFIGS[name])
    folder = write(tmp_path / "m", model, max_shard_bytes=shard_bytes)
    assert (folder / INDEX_NAME).is_file() == (shard_bytes == 2000)
    loaded = load_model(folder, mode=mode).model
    assert torch.equal(logits(loaded), logits(model))
    own, theirs = loaded.state_dict(), model.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[key], theirs[key]) for key in own)
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stored", _STORED)
def test_load_model_casts_values_like_torch(name: str, stored: torch.dtype, tmp_path: Path) -> None:
    model, exact = some_model(CONFIGS[name]), empty_model(CONFIGS[name])
    folder = write(tmp_path / "m", model, stored)
    # The families together cover every mode with every option.
    first, wishes = (
        FAMILIES.index(name) + _STORED.index(stored),
        (None, torch.float32, torch.bfloat16),
    )
    for number, mode in enumerate(LOADING_MODES, first):
        asked = wishes[number % 3]
        loaded = load_model(folder, dtype=asked, mode=mode).model
        assert {p.dtype for p in loaded.parameters()} == {asked or stored}
        for key, tensor in loaded.state_dict().items():
            expected = model.state_dict()[key].to(stored).to(asked or stored)
            assert torch.equal(tensor, expected), (mode, asked, key)
        if isinstance(loaded, Llama):
            assert isinstance(exact, Llama)
            # 1/theta**(i/D) is not exact in bf16: rounding it would give wrong rotations at late
            # positions.
            assert loaded.rotary.frequencies.dtype == torch.float32
            assert torch.equal(loaded.rotary.frequencies, exact.rotary.frequencies)


@pytest.mark.parametrize("mode", LOADING_MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_load_model_padded_vocabulary_gives_same_logits_and_is_not_saved(
    name: str, mode: LoadingMode, tmp_path: Path
) -> None:
    model = some_model(CONFIGS[name])
    folder = write(tmp_path / "m", model)
    padded = load_model(folder, mode=mode, vocab_multiple=64).model
    embedding = padded.get_parameter(embedding_name(padded))
    assert embedding.shape[0] == padded.lm_head.weight.shape[0] == 64
    assert embedding[37:].count_nonzero() == 0
    assert padded.lm_head.weight[37:].count_nonzero() == 0
    assert logits(padded).shape[-1] == 37
    torch.testing.assert_close(logits(padded), logits(model), atol=1e-6, rtol=0)
    again = write(tmp_path / "again", padded)
    assert (again / WEIGHTS_NAME).read_bytes() == (folder / WEIGHTS_NAME).read_bytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_vocabulary_changes_no_initial_weight_and_no_gradient(name: str) -> None:
    plain, padded = some_model(CONFIGS[name]), some_model(CONFIGS[name], 64)
    ids = torch.arange(24).view(2, 12) % 37
    for model in (plain, padded):
        (model.train()(ids, ids.roll(-1, 1)) / ids.numel()).backward()
    gradients = {}
    for label, model in (("plain", plain), ("padded", padded)):
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad
        gradients[label] = file_tensors(model)
        if model is padded:
            assert model.lm_head.weight[37:].count_nonzero() == 0
    for key, gradient in gradients["plain"].items():
        torch.testing.assert_close(gradients["padded"][key], gradient, atol=1e-6, rtol=1e-4)


def test_load_model_mapped_mode_shares_memory_with_file(tmp_path: Path) -> None:
    """The parameters are views of the file, so changes to the file appear in the model."""
    folder = write(tmp_path / "m", some_model(CONFIGS["llama"]))
    mapped, copied = (load_model(folder, mode=mode).model for mode in ("mmap", "sequential"))
    place = stored_tensors(folder)["model.norm.weight"]
    with open(place.path, "r+b") as file:
        file.seek(place.offset)
        file.write(torch.full((16,), 3.0).numpy().tobytes())
    assert mapped.state_dict()["model.norm.weight"].tolist() == [3.0] * 16
    assert copied.state_dict()["model.norm.weight"].tolist() == [1.0] * 16


@pytest.mark.parametrize("mode", ["auto", "mmap"])
def test_load_model_mapped_file_modified_in_place_raises(mode: LoadingMode, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", some_model(CONFIGS["llama"]))
    loaded = load_model(folder, mode=mode)
    loaded.require_unchanged()
    content = (folder / WEIGHTS_NAME).read_bytes()
    # under another name, then renamed, which is harmless
    write_file(folder / WEIGHTS_NAME, content)
    loaded.require_unchanged()
    (folder / WEIGHTS_NAME).unlink()
    loaded.require_unchanged()
    (folder / WEIGHTS_NAME).write_bytes(content)
    again = load_model(folder, mode=mode)
    os.truncate(folder / WEIGHTS_NAME, len(content) - 4)
    with pytest.raises(ModelError, match=r"model\.safetensors was modified in place"):
        again.require_unchanged()


@pytest.mark.parametrize(
    "name, options, mapped",
    [
        ("llama", {}, True),
        ("tied", {}, True),
        ("gpt2", {}, True),
        ("llama", {"dtype": torch.bfloat16}, False),
        ("llama", {"vocab_multiple": 64}, False),
        ("llama", {"mode": "sequential"}, False),
        ("mixtral", {}, False),
        ("gpt_oss", {}, True),
    ],
)
def test_load_model_maps_whole_file_if_possible(
    name: str, options: dict[str, Any], mapped: bool, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", some_model(CONFIGS[name]))
    assert [f.path.name for f in load_model(folder, **options).mapped] == [WEIGHTS_NAME] * mapped


def test_loading_mode_names_match_type() -> None:
    assert get_args(LoadingMode) == LOADING_MODES


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_file_tensors_experts_are_views_of_stacked_weights(name: str) -> None:
    """The table is used in both directions, so its names must cover every element exactly once."""
    model = some_model(CONFIGS[name])
    tensors = file_tensors(model)
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())
    for tensor in tensors.values():
        tensor.fill_(5.0)
    assert all((p == 5).all() for p in model.parameters())


@pytest.mark.parametrize("mode", LOADING_MODES)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_load_model_stacked_experts_are_read_unchanged(
    name: str, mode: LoadingMode, tmp_path: Path
) -> None:
    model = some_model(CONFIGS[name])
    folder = write(tmp_path / "m", model)
    save_tensors(file_tensors(model, stacked=True), folder / WEIGHTS_NAME)
    found = load_model(folder, mode=mode)
    assert bool(found.mapped) == (mode in ("auto", "mmap"))
    assert torch.equal(logits(found.model), logits(model))
    cut = {n: t[:2] if "gate_up" in n else t for n, t in file_tensors(model, stacked=True).items()}
    save_tensors(cut, folder / WEIGHTS_NAME)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj is \[2, .*expected \[3, "):
        load_model(folder, mode=mode)


def test_load_model_more_stacked_experts_than_tensors_are_read(tmp_path: Path) -> None:
    sizes = {**_SIZES, "num_hidden_layers": 1, "hidden_size": 8, "moe_intermediate_size": 2}
    model = some_model(MoEConfig(**sizes, model_type="qwen3_moe", num_experts=300))
    folder = write(tmp_path / "m", model)
    save_tensors(file_tensors(model, stacked=True), folder / WEIGHTS_NAME)
    assert torch.equal(logits(load_model(folder).model), logits(model))


def test_load_model_every_kind_of_damaged_tensor_is_named(tmp_path: Path) -> None:
    model = some_model(CONFIGS["mixtral"])
    tensors = weights_to_save(model)
    expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    for change, said in (
        ({expert: None}, f"lacks tensors: {expert}"),
        ({"model.extra": torch.ones(2)}, "has unknown tensors: model.extra"),
        (
            {expert: torch.ones(3, 4)},
            f"has misshapen tensors: {expert} is [3, 4], expected [64, 16]",
        ),
        ({expert: torch.ones(64, 16, dtype=torch.int8)}, f"has quantised tensors ({expert} (I8)"),
    ):
        folder = write(tmp_path / "m", model)
        changed = {**tensors, **change}
        save_tensors({n: t for n, t in changed.items() if t is not None}, folder / WEIGHTS_NAME)
        with pytest.raises(ModelError) as caught:
            load_model(folder)
        assert said in str(caught.value)


@pytest.mark.parametrize("mode", LOADING_MODES)
def test_load_model_stored_tied_head_is_accepted_only_if_equal(
    mode: LoadingMode, tmp_path: Path
) -> None:
    model = some_model(CONFIGS["tied"])
    folder = write(tmp_path / "m", model)
    tensors = weights_to_save(model)
    head = tensors["model.embed_tokens.weight"].clone()
    save_tensors({**tensors, "lm_head.weight": head}, folder / WEIGHTS_NAME)
    assert torch.equal(logits(load_model(folder, mode=mode).model), logits(model))
    head[36, 15] += 1e-3
    save_tensors({**tensors, "lm_head.weight": head}, folder / WEIGHTS_NAME)
    with pytest.raises(ModelError, match=r"ties lm_head\.weight to .*, but their values differ"):
        load_model(folder, mode=mode)
    save_tensors({**tensors, "lm_head.weight": head[:5].clone()}, folder / WEIGHTS_NAME)
    with pytest.raises(ModelError, match=r"misshapen tensors: lm_head\.weight is \[5, 16\]"):
        load_model(folder, mode=mode)


def test_load_model_large_tensors_are_converted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.weights.stored._CHUNK_BYTES", 40)
    model = some_model(CONFIGS["llama"])
    folder = write(tmp_path / "m", model, torch.bfloat16)
    loaded = load_model(folder, dtype=torch.float32).model
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key].bfloat16().float()), key


def test_load_model_quantised_tied_head_is_named(tmp_path: Path) -> None:
    model = some_model(CONFIGS["tied"])
    folder = write(tmp_path / "m", model)
    head = torch.ones(37, 16, dtype=torch.float8_e4m3fn)
    save_tensors({**weights_to_save(model), "lm_head.weight": head}, folder / WEIGHTS_NAME)
    with pytest.raises(ModelError, match=r"quantised tensors \(lm_head\.weight \(F8_E4M3\)"):
        load_model(folder)


def test_load_model_tied_head_is_compared_before_rounding(tmp_path: Path) -> None:
    """The comparison is not made after rounding, so the requested dtype does not decide whether
    loading raises an error.
    """
    model = some_model(CONFIGS["tied"])
    folder = write(tmp_path / "m", model)
    tensors = weights_to_save(model)
    head = tensors["model.embed_tokens.weight"].clone()
    head[3, 3] *= 1 + 1e-6
    save_tensors({**tensors, "lm_head.weight": head}, folder / WEIGHTS_NAME)
    for dtype in (None, torch.bfloat16):
        with pytest.raises(ModelError, match="but their values differ"):
            load_model(folder, dtype=dtype)
    rounded = {n: t.bfloat16().float() for n, t in tensors.items()}
    head = rounded["model.embed_tokens.weight"].bfloat16()
    save_tensors({**rounded, "lm_head.weight": head}, folder / WEIGHTS_NAME)
    load_model(folder)


@pytest.mark.parametrize("mode", LOADING_MODES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_load_model_works_inside_inference_mode(
    mode: LoadingMode, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", some_model(CONFIGS["mixtral"]))
    expected = load_model(folder, dtype=dtype).model
    with torch.inference_mode():
        found = load_model(folder, dtype=dtype, mode=mode).model
        assert torch.equal(logits(found), logits(expected))


@pytest.mark.parametrize("mode", LOADING_MODES)
@pytest.mark.parametrize("what", ["other content", "gone"])
def test_load_model_file_changed_during_read_raises(
    mode: LoadingMode, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a training run deletes the checkpoint that is being loaded."""
    model = some_model(CONFIGS["llama"])
    folder = write(tmp_path / "m", model)

    def then_change(folder: Path) -> Any:
        found = stored_tensors(folder)
        (folder / WEIGHTS_NAME).unlink()
        if what == "other content":
            save_tensors(dict(sorted(weights_to_save(model).items())[:3]), folder / WEIGHTS_NAME)
        return found

    monkeypatch.setattr("firstlight.weights.loading.stored_tensors", then_change)
    with pytest.raises(ModelError, match=r"was changed while it was being read|can't be read"):
        load_model(folder, mode=mode)


def test_load_model_index_not_matching_files_raises(tmp_path: Path) -> None:
    model = some_model(CONFIGS["llama"])
    folder = write(tmp_path / "m", model, max_shard_bytes=3000)
    index = json.loads((folder / INDEX_NAME).read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    name = next(n for n, file in index["weight_map"].items() if file == first)
    shard = safetensors.torch.load_file(folder / last)
    save_tensors({**shard, name: torch.zeros(2)}, folder / last)
    with pytest.raises(
        ModelError, match=f"{last} contains tensor {name}, which .* places in {first}"
    ):
        load_model(folder)
    save_tensors(shard, folder / last)
    index["weight_map"]["model.lost"] = last
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"{last} lacks tensor model\.lost"):
        load_model(folder)


@pytest.mark.parametrize("mode", LOADING_MODES)
def test_load_model_truncated_file_raises(mode: LoadingMode, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", some_model(CONFIGS["llama"]))
    content = (folder / WEIGHTS_NAME).read_bytes()
    (folder / WEIGHTS_NAME).write_bytes(content[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or truncated"):
        load_model(folder, mode=mode)


@pytest.mark.parametrize("length", [0, 1 << 40])
def test_load_model_impossible_header_length_raises_before_mapping(
    length: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "m", some_model(CONFIGS["llama"])) / WEIGHTS_NAME
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match=rf"{path}.*declares a header of {length:,} bytes"):
        load_model(path.parent)


def test_saved_shards_are_listed_in_transformers_index(tmp_path: Path) -> None:
    model = some_model(CONFIGS["llama"])
    folder = write(tmp_path / "m", model, max_shard_bytes=3000)
    index = json.loads((folder / INDEX_NAME).read_text())
    assert index["weight_map"].keys() == weights_to_save(model).keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights_to_save(model).values())
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load_file(folder / file)
    assert not (folder / WEIGHTS_NAME).exists()


def test_file_tensors_of_meta_model_allocates_nothing() -> None:
    with torch.device("meta"):
        model = build_model(CONFIGS["qwen3_moe"])
    assert {t.device.type for t in file_tensors(model).values()} == {"meta"}


def test_load_model_header_with_too_many_tensors_raises(tmp_path: Path) -> None:
    """Empty tensors take only 65 bytes of the file each, but 1.5 KB of memory."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(number): entry for number in range(100_001)}).encode()
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors has 100,002 tensors"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_hidden_layers": 10_000}, "num_hidden_layers 10000"),
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 200, "num_experts": 10_000},
            "num_experts 10000 in 200 layers",
        ),
    ],
)
def test_load_model_sizes_unlike_weights_raise_before_creating_model(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write(tmp_path, some_model(CONFIGS["llama"]))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=f"config.json specifies {said}, but the files have"):
        load_model(tmp_path)
