from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firstlight.errors import FirstlightError, ModelError, TokenizerError
from firstlight.lora.loading import load_model
from firstlight.models import FAMILIES, GPT2Config, LlamaConfig, ModelConfig, empty_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.hub import find_model_folder
from firstlight.weights.huggingface import config_from_hf, model_files, read_config, training_notes
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import stored_tensors

LLAMA = LlamaConfig(
    vocab_size=330,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
GPT2 = GPT2Config(
    vocab_size=330,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=32,
)
TIED = LLAMA.model_copy(update={"tie_word_embeddings": True})


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensors_of(folder: Path) -> dict[str, Tensor]:
    # Read as bytes, because the tests overwrite the file itself.
    return safetensors.torch.load((folder / "model.safetensors").read_bytes())


@pytest.fixture
def write(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[ModelConfig], Path]:
    """Write a valid model folder of a config, with weights and tokenizer."""

    def write_folder(config: ModelConfig) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        model = empty_model(config)
        model.init_weights(torch.Generator().manual_seed(0))
        for name, content in model_files(config, tokenizer).items():
            (folder / name).write_text(content, encoding="utf-8")
        save_tensors(folder, weights_to_save(model))
        return folder

    return write_folder


def refusal(folder: Path | str) -> str:
    """Return the message of the error raised by loading, which is a single line."""
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Valid folders


@pytest.mark.parametrize("config", [LLAMA, TIED, GPT2], ids=["llama", "tied", "gpt2"])
def test_load_model_folder_restores_model_tokenizer_and_end_token(
    config: ModelConfig, write: Callable[[ModelConfig], Path], tokenizer: Tokenizer
) -> None:
    folder = write(config)
    loaded = load_model(folder)
    assert loaded.model.config == config
    assert loaded.folder == folder
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.eos_token_ids == (tokenizer.eos_token_id,)
    assert not loaded.model.training
    assert all(p.requires_grad and p.is_leaf for p in loaded.model.parameters())
    stored = tensors_of(folder)
    assert weights_to_save(loaded.model).keys() == stored.keys()
    assert all(torch.equal(t, stored[n]) for n, t in weights_to_save(loaded.model).items())


def test_load_model_tied_head_is_not_stored_and_tied_on_load(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(TIED)
    assert "lm_head.weight" not in tensors_of(folder)
    model = load_model(folder).model
    assert model.lm_head.weight is dict(model.named_parameters())["model.embed_tokens.weight"]


def test_weights_to_save_are_contiguous_for_any_shared_memory(tmp_path: Path) -> None:
    model = empty_model(TIED)
    model.init_weights(torch.Generator().manual_seed(0))
    saved = weights_to_save(model)
    save_tensors(tmp_path, saved)
    assert all(t.is_contiguous() and not t.requires_grad for t in saved.values())


def test_load_model_weights_do_not_change_with_file(write: Callable[[ModelConfig], Path]) -> None:
    """Overwriting the loaded file with another checkpoint must not change the model."""
    folder = write(LLAMA)
    model = load_model(folder, mode="sequential").model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    path = folder / "model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_load_model_folder_without_tokenizer_files_has_none(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(LLAMA)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert load_model(folder).tokenizer is None


def test_load_model_damaged_tokenizer_raises(write: Callable[[ModelConfig], Path]) -> None:
    folder = write(LLAMA)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        (7, 8, (7,)),
        ([7, 9], 8, (7, 9)),
        (None, 8, (8,)),
        (None, [8, 2], (8, 2)),
        (None, None, (0,)),  # the tokenizer's
        ([], None, (0,)),
    ],
)
def test_load_model_end_tokens_come_from_generation_config_then_config_then_tokenizer(
    generation: Any, config: Any, expected: tuple[int, ...], write: Callable[[ModelConfig], Path]
) -> None:
    folder = write(LLAMA)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        content = json.loads((folder / name).read_text())
        content["eos_token_id"] = value
        (folder / name).write_text(json.dumps(content))
    assert load_model(folder).eos_token_ids == expected


def test_stored_tensors_report_dtypes_of_file(write: Callable[[ModelConfig], Path]) -> None:
    folder = write(LLAMA)
    assert sorted({t.kind for t in stored_tensors(folder).values()}) == ["F32"]
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    save_tensors(folder, tensors)
    assert sorted({t.kind for t in stored_tensors(folder).values()}) == ["BF16", "F32"]
    (folder / "model.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(ModelError, match="damaged"):
        sorted({t.kind for t in stored_tensors(folder).values()})


# Mismatched tensors are named


def test_load_model_missing_tensor_is_named(write: Callable[[ModelConfig], Path]) -> None:
    folder = write(LLAMA)
    tensors = tensors_of(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_tensors(folder, tensors)
    assert "lacks tensors: model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_load_model_missing_untied_head_is_not_replaced_by_embedding(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(LLAMA)
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    save_tensors(folder, tensors)
    assert "lacks tensors: lm_head.weight" in refusal(folder)


def test_load_model_missing_tied_embedding_is_named(write: Callable[[ModelConfig], Path]) -> None:
    folder = write(TIED)
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_tensors(folder, tensors)
    assert "lacks tensors: model.embed_tokens.weight" in refusal(folder)


@pytest.mark.parametrize(
    "extra",
    ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"],
)
def test_load_model_extra_tensor_is_named(extra: str, write: Callable[[ModelConfig], Path]) -> None:
    folder = write(LLAMA)
    save_tensors(folder, {**tensors_of(folder), extra: torch.zeros(16)})
    assert f"has unknown tensors: {extra}" in refusal(folder)


def test_load_model_tensor_with_wrong_shape_is_named_with_both_shapes(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(LLAMA)
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = torch.ones(17)
    save_tensors(folder, tensors)
    assert "has misshapen tensors: model.norm.weight is [17], expected [16]" in refusal(folder)


def test_load_model_transposed_tensor_is_rejected(write: Callable[[ModelConfig], Path]) -> None:
    folder = write(GPT2)
    tensors = tensors_of(folder)
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_tensors(folder, tensors)
    assert f"has misshapen tensors: {name} is [36, 12], expected [12, 36]" in refusal(folder)


def test_load_model_integer_weights_are_rejected_as_quantised(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(LLAMA)
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_tensors(folder, tensors)
    assert "has quantised tensors (lm_head.weight" in refusal(folder)


def test_load_model_many_wrong_tensors_are_counted_not_listed(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(LLAMA)
    save_tensors(folder, {"model.norm.weight": torch.ones(16)})
    # 2 x 9 in the layers, the embedding and the head are missing
    assert refusal(folder).endswith(
        "lacks tensors: lm_head.weight, model.embed_tokens.weight, "
        "model.layers.0.input_layernorm.weight and 17 more"
    )


def test_load_model_tied_head_differing_from_embedding_is_rejected(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(TIED)
    tensors = tensors_of(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    save_tensors(folder, {**tensors, "lm_head.weight": head})
    assert load_model(folder).model.config.tie_word_embeddings
    head[3, 5] += 1e-3
    save_tensors(folder, {**tensors, "lm_head.weight": head})
    assert "ties lm_head.weight to model.embed_tokens.weight, but their values differ" in refusal(
        folder
    )


# Folders without a model


def test_load_model_folder_without_config_json_is_rejected(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is not a model folder: it does not contain config.json"


@pytest.mark.parametrize("family", ["mamba", "LLAMA", None, ["llama"], {}])
def test_load_model_unknown_family_is_named_with_supported_ones(
    family: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert refusal(tmp_path) == (
        f"{tmp_path / 'config.json'}: model_type '{family}' is not supported "
        f"(supported: {', '.join(FAMILIES)}, and the text models of mistral3, gemma3, qwen3_5, "
        "qwen3_5_moe)"
    )


def test_load_model_unsupported_type_is_named_with_architecture(tmp_path: Path) -> None:
    content = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert "model_type 'mamba' (MambaForCausalLM) is not supported (supported: " in refusal(
        tmp_path
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
def test_load_model_invalid_config_json_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path / "config.json") in refusal(tmp_path)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"rope_scaling": {"type": "axial", "factor": 4.0}}, "rope type 'axial'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.*factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.*factor"),
        ({"rope_scaling": [1]}, "config.json"),
        ({"rope_scaling": None, "rope_parameters": None, "rope_theta": "big"}, "config.json"),
        ({"hidden_size": "16"}, "hidden_size: Input should be a valid integer"),
        ({"hidden_size": 15}, "hidden_size 15 must be a multiple of num_attention_heads 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: Input should be greater than 0"),
    ],
)
def test_load_model_config_that_changes_outputs_raises_model_error(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA.to_hf(), **change}))
    with pytest.raises(ModelError, match=problem):
        read_config(tmp_path)


def test_load_model_gpt2_config_that_changes_outputs_raises_model_error(tmp_path: Path) -> None:
    change = {"activation_function": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**GPT2.to_hf(), **change}))
    with pytest.raises(ModelError, match="activation_function 'silu' is not supported"):
        read_config(tmp_path)


def test_gpt2_later_keys_appear_in_recipe_and_hash_only_if_set() -> None:
    assert "scale_attn" not in GPT2.model_dump_json()
    scaled = GPT2Config.from_hf({**GPT2.to_hf(), "scale_attn_by_inverse_layer_idx": True})
    assert scaled.model_dump()["scale_attn_by_inverse_layer_idx"] is True
    assert GPT2Config.from_hf(scaled.to_hf()) == scaled
    halved, whole = scaled.attention_spec(1).scale, scaled.attention_spec(0).scale
    assert halved is not None
    assert whole is not None
    assert halved == whole / 2 == scaled.head_dim**-0.5 / 2


_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "windows", "rotated"),
    [
        # As in transformers, the list of layers takes precedence over the switch.
        ({"layer_types": _WINDOWS}, [True, False, True], [True, True, True]),
        ({}, [False] * 3, [True] * 3),
        ({"no_rope_layer_interval": 2}, [False] * 3, [True, False, True]),
        (
            {"no_rope_layer_interval": 2, "use_sliding_window": True},
            [False, True, False],
            [True, False, True],
        ),
        (
            {"no_rope_layer_interval": 2, "no_rope_layers": [0, 1, 1]},
            [False] * 3,
            [False, True, True],
        ),
    ],
)
def test_smollm3_layers_match_transformers(
    change: dict[str, Any], windows: list[bool], rotated: list[bool]
) -> None:
    shape = {"model_type": "smollm3", "num_hidden_layers": 3, "sliding_window": 4}
    config = FAMILIES["smollm3"].config.from_hf({**shape, "use_sliding_window": False, **change})
    assert isinstance(config, LlamaConfig)
    assert [config.has_window(i) for i in range(3)] == windows
    assert [config.has_rope(i) for i in range(3)] == rotated


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "lfm2", "router": 1}, "router is not understood, and could change"),
        ({"model_type": "lfm2", "conv_bias": True}, "conv_bias True is not supported: only False"),
        ({"model_type": "ministral3", "gate": 2}, "gate is not understood"),
        (
            {"model_type": "qwen3_5_moe_text", "attn_output_gate": False},
            "attn_output_gate False is not supported: only True is",
        ),
        (
            {"model_type": "qwen3_5_moe_text", "norm_topk_prob": False},
            "have normalised routing weights and experts in every layer",
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"mlp_only_layers": [0]}},
            r"mlp_only_layers \[0\] is not supported: only \[\] is",
        ),
        ({"model_type": "lfm2", "layer_types": ["conv"] * 32}, "no layer has full_attention"),
        ({"model_type": "lfm2", "block_ff_dim": "x"}, "block_ff_dim can't be computed"),
        (
            {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta requires rope_scaling with original_max_position_embeddings",
        ),
    ],
)
def test_config_that_would_be_read_in_part_is_refused_by_name(
    content: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(content, "config.json")


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"block_ff_dim": 6656}, 4608),  # LFM2-350M
        ({"block_ff_dim": 12288, "block_multiple_of": 256}, 8192),  # LFM2-1.2B
        ({"intermediate_size": 96, "block_auto_adjust_ff_dim": False}, 96),
        ({"intermediate_size": 300, "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 8}, 304),
    ],
)
def test_lfm2_inner_width_is_that_of_transformers(keys: dict[str, Any], width: int) -> None:
    found = config_from_hf({"model_type": "lfm2", **keys}, "config.json")
    assert getattr(found, "intermediate_size") == width  # noqa: B009 - mypy


@pytest.mark.parametrize("like", ["gemma3_text", "qwen3_next", "smollm3"])
def test_load_model_excessive_layer_count_raises_before_allocating_lists(like: str) -> None:
    many = {"model_type": like, "num_hidden_layers": 10**15, "sliding_window_pattern": 6}
    with pytest.raises(ModelError, match="num_hidden_layers 1000000000000000 is more than 10,000"):
        config_from_hf({**many, "no_rope_layer_interval": 2}, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", "3"), ("num_hidden_layers", 3.0), ("no_rope_layer_interval", "x")],
)
def test_load_model_non_integer_layer_counts_raise_model_error(key: str, value: object) -> None:
    content = {"model_type": "smollm3", "no_rope_layer_interval": 2, key: value}
    with pytest.raises(ModelError, match=f"{key} is {value!r}, but must be an integer: correct"):
        config_from_hf(content, "config.json")


def test_phi3_dropout_is_noted(tmp_path: Path) -> None:
    content = {"model_type": "phi3", "resid_pdrop": 0.1, "embd_pdrop": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(content))
    said = f"{tmp_path / 'config.json'} has resid_pdrop 0.1, which is ignored"
    assert training_notes(tmp_path) == [said]
    (tmp_path / "config.json").write_text(json.dumps({**GPT2.to_hf(), "resid_pdrop": 0.1}))
    assert training_notes(tmp_path) == []


@given(
    key=st.sampled_from(sorted(LLAMA.to_hf())),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner, max_size=2)
        ),
        max_leaves=3,
    ),
)
@settings(max_examples=150)
def test_load_model_any_config_json_value_gives_config_or_clear_error(
    key: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA.to_hf(), key: value}))
    problem = ""
    try:
        read_config(folder)
    except ModelError as error:
        problem = str(error)
    assert not problem or problem.startswith(str(folder / "config.json"))


# Weight files


def test_load_model_folder_with_only_pickled_weights_is_rejected_unopened(
    write: Callable[[ModelConfig], Path], tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "opened"),)

    folder = write(LLAMA)
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    message = refusal(folder)
    assert "does not contain model.safetensors" in message
    assert "could run code" in message
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_load_model_truncated_safetensors_file_is_named(
    kept: int, write: Callable[[ModelConfig], Path]
) -> None:
    folder = write(LLAMA)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is damaged or truncated" in refusal(folder)


def index_of(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/w.safetensors"])
def test_load_model_index_with_path_outside_folder_is_rejected(
    name: str, write: Callable[[ModelConfig], Path]
) -> None:
    folder = write(LLAMA)
    (folder / "model.safetensors").replace(folder.parent / "model.safetensors")
    index_of(folder, {"weight_map": {"lm_head.weight": name}})
    assert f"names a file outside its folder: {name}" in refusal(folder)


@pytest.mark.parametrize("name", ["..", ".", "", "gone.safetensors", "config.json"])
def test_load_model_index_without_weights_is_rejected(
    name: str, write: Callable[[ModelConfig], Path]
) -> None:
    folder = write(LLAMA)
    index_of(folder, {"weight_map": {"lm_head.weight": name}})
    refusal(folder)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": ["b"]}}])
def test_load_model_index_without_weight_map_is_rejected(
    content: Any, write: Callable[[ModelConfig], Path]
) -> None:
    folder = write(LLAMA)
    index_of(folder, content)
    assert "model.safetensors.index.json" in refusal(folder)


def test_load_model_shard_listed_in_index_but_missing_is_named(
    write: Callable[[ModelConfig], Path],
) -> None:
    folder = write(LLAMA)
    tensors = tensors_of(folder)
    first = {name: t for name, t in tensors.items() if "layers.0" in name}
    second = {name: t for name, t in tensors.items() if "layers.0" not in name}
    files = {"a.safetensors": first, "b.safetensors": second}
    for name, part in files.items():
        safetensors.torch.save_file(part, folder / name)
    index_of(folder, {"weight_map": {t: name for name, part in files.items() for t in part}})
    assert load_model(folder).model.config == LLAMA
    (folder / "b.safetensors").unlink()
    assert refusal(folder) == (
        f"{folder / 'b.safetensors'} is missing, although model.safetensors.index.json lists it: "
        "download it again"
    )


# Paths and hub ids


def test_load_model_missing_path_suggests_nearest(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    message = refusal(tmp_path / "shakespear")
    near = tmp_path / "shakespeare"
    told = f"model folder {tmp_path / 'shakespear'} does not exist (did you mean '{near}'?)"
    assert message == told


def test_load_model_file_instead_of_folder_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    assert refusal(path).startswith(
        f"model folder {path} is a file, not a folder (specify the model's folder"
    )


@pytest.mark.parametrize("name", ["nothing", "./nothing", "~/nothing/here", "a/b/c", "/nowhere/x"])
def test_find_model_folder_only_hub_like_ids_are_looked_up_on_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> str:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    assert "does not exist" in refusal(name)


class HTTPLibraryError(Exception):
    """An error of huggingface_hub's HTTP library that huggingface_hub passes on."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        ConnectionError("offline mode is enabled\nsee the documentation"),
        ValueError("Repo id must be in the form 'namespace/name'"),
        HTTPLibraryError("the proxy refused"),
        HTTPLibraryError(),
    ],
)
def test_find_model_folder_failed_hub_download_gives_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = refusal("someone/some-model")
    assert message.startswith(
        "someone/some-model is not a local folder, and it can't be downloaded from the hub: "
    )
    assert not message.endswith(": ")


def test_find_model_folder_offline_hub_client_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With huggingface_hub's own error, not a replacement."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "can't be downloaded" in refusal("someone/some-model")


def test_find_model_folder_hub_download_excludes_pickled_files(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[ModelConfig], Path]
) -> None:
    folder = write(LLAMA)
    asked: dict[str, Any] = {}

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(repo_id=repo_id, patterns=allow_patterns, left_out=ignore_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model_folder("someone/some-model") == folder
    assert asked["repo_id"] == "someone/some-model"
    assert not any(
        Path(name).match(pattern)
        for name in ("pytorch_model.bin", "model.pt", "modeling_llama.py", "x.pkl")
        for pattern in asked["patterns"]
    )


def test_find_model_folder_prefers_local_folder_to_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "some-model").mkdir(parents=True)
    assert find_model_folder("someone/some-model") == Path("someone/some-model")


@pytest.mark.parametrize(
    "names, said",
    [
        (["checkpoint-90/", "checkpoint-500/"], "Trainer, .*; the newest is .*/checkpoint-500$"),
        (["training_args.bin", "model.safetensors"], "Trainer without config.json: copy"),
    ],
)
def test_load_model_transformers_trainer_folder_gives_advice(
    names: list[str], said: str, tmp_path: Path
) -> None:
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text(json.dumps(LLAMA.to_hf()))
    with pytest.raises(ModelError, match=said):
        load_model(tmp_path)


# Written files


def test_saved_config_json_has_special_tokens_and_format(
    tokenizer: Tokenizer,
) -> None:
    files = model_files(LLAMA, tokenizer)
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads(files["config.json"])
    assert config["eos_token_id"] == 0
    assert config["bos_token_id"] is None
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": 0}


def test_model_error_is_firstlight_error() -> None:
    assert issubclass(ModelError, FirstlightError)
