"""Adapter folders: finding them, loading them with their base model, and converting them."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from firstlight.cli.main import main
from firstlight.conversion.convert import convert
from firstlight.errors import ModelError
from firstlight.generation.engine import generate
from firstlight.lora.files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    adapter_chain,
    adapter_files,
    base_name,
    config_folder,
    is_adapter,
)
from firstlight.lora.layers import (
    LoraConfig,
    adapter_tensors,
    add_lora,
    fill_adapter,
    lora_parameters,
)
from firstlight.lora.loading import base_identity, load_model
from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, empty_model
from firstlight.models.accounting import meta_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import read_config, training_notes
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import WEIGHTS_NAME, save_tensors, save_weights

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(vocab_size=320, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    "llama": LlamaConfig(**_SIZES),
    "tied": LlamaConfig(**_SIZES, model_type="qwen2", tie_word_embeddings=True),
}
IDS = torch.arange(24).view(2, 12) * 5 % 320


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_base(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    model = empty_model(CONFIGS[name])
    model.init_weights(generator(7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator(1)) * 0.1)
    folder.mkdir()
    content = {**CONFIGS[name].to_hf(), "eos_token_id": [5, 7], "attention_dropout": 0.5}
    (folder / "config.json").write_text(json.dumps(content))
    save_weights({n: t.to(dtype) for n, t in weights_to_save(model).items()}, folder)
    return folder


def write_adapter(folder: Path, base: Path, name: str | None = None, **settings: Any) -> Model:
    """Write an adapter that changes the base, and return the resulting model."""
    config = LoraConfig(**{"rank": 3, "alpha": 6.0, **settings})
    model = load_model(base, mode="sequential").model
    add_lora(model, config, generator(2))
    with torch.no_grad():
        for key, parameter in lora_parameters(model).items():
            parameter.add_(torch.randn(parameter.shape, generator=generator(len(key))) * 0.3)
    folder.mkdir()
    for file, text in adapter_files(model, config, name or str(base)).items():
        (folder / file).write_text(text, encoding="utf-8")
    save_tensors(adapter_tensors(model), folder / ADAPTER_WEIGHTS_NAME)
    return model


def change_config(folder: Path, **values: Any) -> None:
    path = folder / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS)
    return found


def test_adapter_files_have_names_and_shapes_of_peft(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "gpt2")
    write_adapter(tmp_path / "adapter", base, targets=["c_attn"], dora=True, dropout=0.5)
    assert sorted(os.listdir(tmp_path / "adapter")) == [ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME]
    tensors = safetensors.torch.load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS_NAME)
    layer = "base_model.model.transformer.h.0.attn.c_attn"
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        f"{layer}.lora_A.weight": [3, 16],
        f"{layer}.lora_B.weight": [48, 3],
        f"{layer}.lora_magnitude_vector": [48],
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert json.loads((tmp_path / "adapter" / ADAPTER_CONFIG_NAME).read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "revision": None,
        "r": 3,
        "lora_alpha": 6,
        "lora_dropout": 0.5,
        "target_modules": ["transformer.h.0.attn.c_attn"],
        "use_dora": True,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": True,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def test_base_name_is_usable_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert base_name("base", Path("base")) == str(base)
    # For a run, the checkpoint that was loaded.
    (tmp_path / "run").mkdir()
    assert base_name("run", base) == str(base)
    assert base_name("owner/name@v2", tmp_path / "cache" / "snapshot") == "owner/name@v2"


def test_adapter_config_stores_hub_id_and_revision_separately(tmp_path: Path) -> None:
    model = load_model(write_base(tmp_path / "base")).model
    for given, name, revision in (
        ("owner/name", "owner/name", None),
        ("owner/name@refs/pr/1", "owner/name", "refs/pr/1"),
        (str(tmp_path / "base"), str(tmp_path / "base"), None),
    ):
        (text,) = adapter_files(model, LoraConfig(), given).values()
        content = json.loads(text)
        assert (content["base_model_name_or_path"], content["revision"]) == (name, revision)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name, targets", [("gpt2", "all-linear"), ("tied", ["v_proj", "lm_head"])])
def test_load_adapter_folder_returns_merged_model(
    name: str, targets: Any, dora: bool, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", name)
    expected = logits(write_adapter(tmp_path / "adapter", base, targets=targets, dora=dora))
    before = (base / WEIGHTS_NAME).read_bytes()
    for mode in ("auto", "sequential", "mmap", "straight"):
        loaded = load_model(tmp_path / "adapter", mode=mode)
        torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-5)
        assert not lora_parameters(loaded.model)
        assert not loaded.model.training
    assert (base / WEIGHTS_NAME).read_bytes() == before
    assert (logits(load_model(base).model) - expected).abs().max() > 0.05
    padded = load_model(tmp_path / "adapter", vocab_multiple=128)
    torch.testing.assert_close(logits(padded.model), expected, rtol=1e-4, atol=1e-5)
    narrow = load_model(tmp_path / "adapter", dtype=torch.bfloat16).model
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


def test_is_adapter_folder_with_full_weights_is_false(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base)
    assert is_adapter(tmp_path / "adapter")
    assert not is_adapter(base)
    shutil.copy(tmp_path / "adapter" / ADAPTER_CONFIG_NAME, base)
    assert not is_adapter(base)
    assert adapter_chain(base) == [base]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_of_other_dtypes_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    narrow = {name: tensor.to(dtype) for name, tensor in adapter_tensors(model).items()}
    save_tensors(narrow, tmp_path / "adapter" / ADAPTER_WEIGHTS_NAME)
    fill_adapter(model, narrow, "the adapter")
    found = logits(load_model(tmp_path / "adapter").model)
    # A merged adapter rounds differently from a separate one; rounding by the file's dtype changes
    # a thousand times more.
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=5e-5)


def test_adapter_base_path_may_be_relative_to_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base")
    model = write_adapter(tmp_path / "adapter", base, "../base")
    monkeypatch.chdir("/")
    torch.testing.assert_close(logits(load_model(tmp_path / "adapter").model), logits(model))
    change_config(tmp_path / "adapter", base_model_name_or_path="base")
    with pytest.raises(ModelError, match="names a base model that can't be loaded"):
        load_model(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(logits(load_model(tmp_path / "adapter").model), logits(model))


def test_adapter_base_on_hub_is_requested_with_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base")
    model = write_adapter(tmp_path / "adapter", base, "owner/name@v2")
    asked: list[str] = []

    def find(name: str, typed: bool) -> Path:
        asked.append(name)
        return base

    monkeypatch.setattr("firstlight.lora.files.find_model_folder", find)
    torch.testing.assert_close(logits(load_model(tmp_path / "adapter").model), logits(model))
    assert set(asked) == {"owner/name@v2"}


def test_adapter_chain_applies_adapters_in_order(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "one", base, targets=["q_proj", "o_proj"])
    two = write_adapter(tmp_path / "two", tmp_path / "one", targets=["q_proj"], dora=True)
    assert adapter_chain(tmp_path / "two") == [tmp_path / "two", tmp_path / "one", base]
    found = logits(load_model(tmp_path / "two").model)
    torch.testing.assert_close(found, logits(two), rtol=1e-4, atol=1e-5)
    change_config(tmp_path / "one", base_model_name_or_path=str(tmp_path / "two"))
    with pytest.raises(ModelError, match="which is the adapter itself"):
        load_model(tmp_path / "two")


def test_adapter_missing_files_come_from_base(tmp_path: Path, tokenizer: Tokenizer) -> None:
    base, adapter = write_base(tmp_path / "base"), tmp_path / "adapter"
    write_adapter(adapter, base)
    assert load_model(adapter).tokenizer is None
    assert load_model(adapter).eos_token_ids == (5, 7)
    assert config_folder(adapter) == base
    assert read_config(base) == CONFIGS["llama"]
    assert training_notes(base) == [
        f"{base / 'config.json'} has attention_dropout 0.5, which is ignored"
    ]
    for name, text in tokenizer.files().items():
        (base / name).write_text(text)
    loaded = load_model(adapter)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.folder == adapter
    for name, text in tokenizer.files().items():
        (adapter / name).write_text(text)
        (base / name).unlink()
    loaded = load_model(adapter)
    assert loaded.tokenizer is not None
    assert loaded.eos_token_ids == (5, 7, tokenizer.eos_token_id)
    (adapter / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_model(adapter).eos_token_ids == (9,)


def _without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def _with_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **values)


def _with_tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    """`tensors` is keyed by the tensor's name within layer 1's query projection."""

    def change(folder: Path) -> None:
        path = folder / ADAPTER_WEIGHTS_NAME
        tensors = safetensors.torch.load_file(path)
        for key, tensor in changes.items():
            name = f"base_model.model.model.layers.1.self_attn.q_proj.{key}"
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor
        save_tensors(tensors, path)

    return change


def _with_text(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


@pytest.mark.parametrize(
    "change, problem",
    [
        (_with_config(base_model_name_or_path=None), "does not name a base model: set base_model"),
        (_with_config(base_model_name_or_path="../gone"), "can't be loaded: model folder ../gone"),
        (_with_config(base_model_name_or_path="x" * 300), "can't be loaded: .*File name too long"),
        (_with_config(base_model_name_or_path="x/" * 5000), "base_model_name_or_path: String"),
        (_with_config(base_model_name_or_path="."), "which is the adapter itself"),
        (_with_config(peft_type="IA3"), "peft_type: .*'IA3'.*only LoRA and DoRA"),
        (_with_config(task_type="SEQ_CLS"), "task_type: .*'SEQ_CLS'"),
        (_with_config(bias="all"), "bias: .*'all'"),
        (_with_config(r="eight"), "r: .*'eight'"),
        (_with_config(r=4), r"q_proj.lora_A.weight is \[3, 16\], expected \[4, 16\]"),
        (_with_config(use_dora=True), "lacks tensor .*lora_magnitude_vector"),
        (_with_config(init_lora_weights="pissa_niter_4"), "'pissa_niter_4' changed the base"),
        (_with_config(modules_to_save=["lm_head"]), "lacks the weights of lm_head"),
        (_with_config(trainable_token_indices=[3]), "lacks tensor .*trainable_tokens_delta"),
        (_with_config(trainable_token_indices=[320, 400]), "contains token 400, .* has 320 tokens"),
        (_with_config(trainable_token_indices={"norm": [3]}), "'norm' is not the embedding or"),
        (_with_config(lora_bias=True), "lora_bias is not supported"),
        (_with_config(what_comes_next={"a": 1}), "what_comes_next is not supported"),
        (_with_config(rank_pattern={"(": 1}), r"'\(' is not a pattern"),
        (_with_text(ADAPTER_CONFIG_NAME, "{"), "is not valid JSON"),
        (_with_text(ADAPTER_CONFIG_NAME, "[]"), "adapter_config.json: "),
        (_with_text(ADAPTER_WEIGHTS_NAME, "?"), "is damaged or truncated"),
        (_without(ADAPTER_WEIGHTS_NAME), "only safetensors weights are supported"),
        (_with_tensors(**{"lora_A.weight": None}), "lacks tensor .*1.self_attn.q_proj.lora_A"),
        (_with_tensors(**{"lora_B.weight": torch.ones(2)}), r"lora_B.weight is \[2\], expected"),
        (_with_tensors(**{"lora_B.weight": torch.ones(16, 3).int()}), "I32, not floating-point"),
        (
            _with_tensors(lora_magnitude_vector=torch.ones(16)),
            "in addition to the model's adapters, tensor",
        ),
        (
            _with_tensors(**{"base_layer.weight": torch.ones(16, 16)}),
            "belongs neither to an adapter nor to the",
        ),
        (
            _with_tensors(**{"x.lora_A.weight": torch.ones(3, 16)}),
            "q_proj.x, which is not a linear",
        ),
    ],
)
def test_adapter_unreadable_files_raise_model_error(
    change: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"), targets=["q_proj"])
    load_model(tmp_path / "adapter")
    change(tmp_path / "adapter")
    with pytest.raises(ModelError, match=problem) as caught:
        load_model(tmp_path / "adapter")
    assert str(tmp_path / "adapter") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapter_empty_file_raises_model_error(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    save_tensors({}, tmp_path / "adapter" / ADAPTER_WEIGHTS_NAME)
    with pytest.raises(ModelError, match="contains no adapter"):
        load_model(tmp_path / "adapter")


@pytest.mark.parametrize(
    "settings, scaling",
    [
        ({}, 6 / 3),
        ({"use_rslora": True}, 6 / math.sqrt(3)),
        ({"lora_alpha": 1.5}, 1.5 / 3),
        ({"alpha_pattern": {"q_proj": 12}}, 12 / 3),
        ({"alpha_pattern": {"_proj": 12, r"layers\.\d\.self_attn\.q_proj": 9}}, 9 / 3),
        ({"r": 8, "rank_pattern": {"q_proj": 3}}, 6 / 3),
    ],
)
def test_adapter_change_is_scaled_as_configured(
    settings: dict[str, Any], scaling: float, tmp_path: Path
) -> None:
    base, adapter = write_base(tmp_path / "base"), tmp_path / "adapter"
    tensors = adapter_tensors(write_adapter(adapter, base, targets=["q_proj"]))
    change_config(adapter, **settings)
    name = "model.layers.0.self_attn.q_proj"
    A, B = (tensors[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
    merged = load_model(adapter).model.get_parameter(f"{name}.weight")
    weight = load_model(base).model.get_parameter(f"{name}.weight")
    torch.testing.assert_close(merged - weight, scaling * B @ A, rtol=1e-4, atol=1e-6)


def test_base_identity_depends_on_values_and_shapes(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base"), tmp_path / "adapter"
    write_adapter(adapter, base)
    shutil.copytree(base, tmp_path / "copy")
    of_base, of_adapter = base_identity(base), base_identity(adapter)
    assert base_identity(tmp_path / "copy") == of_base != of_adapter
    (base / "README.md").write_text("not a part of the model")
    change_config(adapter, base_model_name_or_path=str(tmp_path / "copy"), lora_dropout=0.5)
    assert (base_identity(base), base_identity(adapter)) == (of_base, of_adapter)
    change_config(adapter, lora_alpha=7)
    assert base_identity(adapter) != of_adapter
    content = bytearray((base / WEIGHTS_NAME).read_bytes())
    content[-1] ^= 1
    (base / WEIGHTS_NAME).write_bytes(content)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert len({of_base, base_identity(base), base_identity(tmp_path / "copy")}) == 3


@pytest.mark.parametrize(
    "name, targets", [("llama", "all-linear"), ("tied", ["lm_head", "q_proj"])]
)
@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_convert_adapter_gives_plain_model(
    name: str, targets: Any, own_tokenizer: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    base, adapter = write_base(tmp_path / "base", name), tmp_path / "adapter"
    model = write_adapter(adapter, base, targets=targets)
    for file_name, text in tokenizer.files().items():
        ((adapter if own_tokenizer else base) / file_name).write_text(text)
    result = convert(adapter, tmp_path / "out")
    assert result.program == "adapter (PEFT)"
    assert result.notes[0] == f"the adapter was merged into its base, {base}"
    assert not (tmp_path / "out" / ADAPTER_CONFIG_NAME).exists()
    converted = load_model(tmp_path / "out")
    torch.testing.assert_close(logits(converted.model), logits(model), rtol=1e-4, atol=1e-5)
    assert converted.model.config.tie_word_embeddings == (
        name == "tied" and "lm_head" not in targets
    )
    assert converted.tokenizer is not None
    assert converted.tokenizer.fingerprint == tokenizer.fingerprint


def test_convert_adapter_keeps_bf16_of_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    write_adapter(tmp_path / "adapter", base)
    assert convert(tmp_path / "adapter", tmp_path / "out").dtype == "bf16"
    found = load_model(tmp_path / "out").model.state_dict()
    expected = load_model(tmp_path / "adapter").model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_commands_accept_adapter_folder(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = write_base(tmp_path / "base"), tmp_path / "adapter"
    for file_name, text in tokenizer.files().items():
        (base / file_name).write_text(text)
    write_adapter(adapter, base)
    assert main(["info", str(adapter), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["folder"], told["base"]) == (str(adapter), str(base))
    assert told["tokenizer"]["sha256"] == tokenizer.fingerprint
    assert main(["info", str(base), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["base"] is None
    assert generate(adapter, "the river", max_new_tokens=4, seed=0) == generate(
        _converted(adapter, tmp_path / "out"), "the river", max_new_tokens=4, seed=0
    )


def _converted(source: Path, out: Path) -> Path:
    convert(source, out)
    return out


def test_adapter_slow_patterns_raise_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pattern alone matches quickly, but all of them on the names of all layers are slow."""
    monkeypatch.setattr("firstlight.lora.files._MOST_MATCH_SECONDS", 0.01)
    write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    load_model(tmp_path / "adapter")
    change_config(tmp_path / "adapter", rank_pattern={f".*.*.*!{i}": 2 for i in range(2_990)})
    with pytest.raises(ModelError, match=r"adapter_config\.json: .*take too long to match names"):
        load_model(tmp_path / "adapter")


def test_info_adapter_with_untied_head_counts_both_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = write_base(tmp_path / "base", "tied"), tmp_path / "adapter"
    write_adapter(adapter, base, modules_to_save=["embed_tokens", "lm_head"])
    told = []
    for folder in (base, adapter):
        assert main(["info", str(folder), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [one["config"]["tie_word_embeddings"] for one in told] == [True, False]
    assert told[1]["parameters"] - told[0]["parameters"] == 320 * 16
    assert load_model(adapter).model.config.model_dump() == told[1]["config"]


def test_info_adapter_with_new_tokens_leaves_shared_model_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = write_base(tmp_path / "base", "tied"), tmp_path / "adapter"
    write_adapter(adapter, base, trainable_token_indices=[318, 319])
    change_config(adapter, trainable_token_indices={"embed_tokens": [320, 321]})
    assert main(["info", str(adapter), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["vocab_size"] == 322
    config = read_config(base)
    assert meta_model(config).config == config
