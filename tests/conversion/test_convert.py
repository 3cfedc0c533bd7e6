"""Tests of `convert`: the result equals the source, and a result that differs is rejected before it
is visible.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from torch import Tensor

from firstlight.conversion import check
from firstlight.conversion import convert as conversion
from firstlight.conversion.convert import Conversion, convert, read_folder
from firstlight.errors import (
    ConfigError,
    InputError,
    MissingDependencyError,
    ModelError,
    TokenizerError,
)
from firstlight.lora.loading import load_model
from firstlight.models import FAMILIES, empty_model
from firstlight.models.accounting import count_parameters
from firstlight.tokenizer import Tokenizer
from firstlight.weights.gguf.metadata import ARCHITECTURES
from firstlight.weights.gguf.reader import read_gguf
from firstlight.weights.gguf.writer import write_gguf
from firstlight.weights.huggingface import read_config, tokenizer_of
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights
from foreign_files import LLAMA_CONFIG, book_gpt, book_llama, nanogpt, save

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def config_of(family: str, vocab_size: int, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a model with two layers and sizes that are multiples of 32."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 96,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
    }
    if family in ("phi3", "olmo2", "olmo3"):
        shape |= {"head_dim": 16, "rope_theta": 500_000.0}
    if family == "lfm2":
        shape |= {"head_dim": 16, "layer_types": ["conv", "full_attention"], "norm_eps": 1e-5}
        shape |= {"block_auto_adjust_ff_dim": False}
    if family.startswith("gemma"):
        shape |= {"query_pre_attn_scalar": 32}
    if family == "gpt2":
        shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96, "n_ctx": 96}
        shape["layer_norm_epsilon"] = 1e-5
    if family.startswith("deepseek"):
        # Heads that share one compressed vector, and expert groups that divide 8 experts.
        shape |= {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
        shape |= {"moe_intermediate_size": 32}
        shape |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        shape |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        shape |= {"layer_types": ["linear_attention", "full_attention"]}
        shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    if family in ("mixtral", "gpt_oss"):
        shape |= {"num_local_experts": 6, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        shape |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        shape |= {"norm_topk_prob": True}
    return {"model_type": family, "vocab_size": vocab_size, **shape, **changes}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of the model's file, with values as large as in a trained model where that
    matters.
    """
    model = empty_model(FAMILIES[config["model_type"]].config.from_hf(config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.2 * parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.normal_(0.8, 0.3, generator=generator)
    return weights_to_save(model)


Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Folder:
    """Write a model folder with all the files of a downloaded model."""

    def write(
        family: str = "llama",
        *,
        dtype: torch.dtype = torch.float32,
        shard_bytes: int = 10**9,
        with_template: bool = False,
        **changes: Any,
    ) -> Path:
        path = tmp_path / "source"
        path.mkdir()
        config = config_of(family, tokenizer.vocab_size + 8, **changes)
        tensors = random_weights(config)
        save_weights({n: t.to(dtype) for n, t in tensors.items()}, path, shard_bytes)
        tokenizer.save_pretrained(path)
        config |= {"dtype": str(dtype).removeprefix("torch."), "eos_token_id": [0, 7]}
        if not FAMILIES[family].spec.requires_known_keys:
            config |= {"a_key_of_tomorrow": {"nested": [1, 2.5, None]}, "name": "früh"}
        (path / "config.json").write_text(json.dumps(config, indent=4))
        (path / "generation_config.json").write_text('{"eos_token_id": [0, 7], "top_p": 0.9}')
        (path / "special_tokens_map.json").write_text('{"eos_token":   "<|endoftext|>"}')
        if with_template:
            (path / "chat_template.jinja").write_text(TEMPLATE)
        return path

    return write


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {n: t for file in files for n, t in safetensors.torch.load_file(file).items()}


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def other_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".safetensors" not in path.name
    }


def config_json(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def gguf_file(result: Conversion) -> Path:
    assert result.file is not None
    return result.file


def assert_nothing_written(tmp_path: Path) -> None:
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.rglob(".tmp-*")) == []


# --- Hugging Face to Hugging Face --------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_model_folder_keeps_files_unchanged(
    family: str, tmp_path: Path, folder: Folder
) -> None:
    source = folder(family, with_template=True)
    result = convert(source, tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))
    assert other_files(tmp_path / "out") == other_files(source)
    again = convert(tmp_path / "out", tmp_path / "again")
    assert other_files(tmp_path / "again") == other_files(source)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert weights[0] == weights[1]
    assert (result.largest_difference, again.largest_difference) == (0.0, 0.0)
    assert result.largest_logit > 0.5
    assert result.parameters == sum(t.numel() for t in tensors_of(source).values())
    assert (result.program, result.model_type, result.dtype) == ("Hugging Face", family, "f32")
    assert result.has_chat_template
    assert result.file is None


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_convert_auto_keeps_dtype(dtype: str, tmp_path: Path, folder: Folder) -> None:
    source = folder(dtype={**DTYPES, "f64": torch.float64}[dtype])
    result = convert(source, tmp_path / "out")
    assert (result.dtype, result.largest_difference) == (dtype, 0.0)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))
    assert config_json(tmp_path / "out") == config_json(source)


def test_convert_mixed_dtypes_are_kept(tmp_path: Path, folder: Folder) -> None:
    source = folder()
    tensors = tensors_of(source)
    mixed = {n: t.bfloat16() if t.dim() > 1 else t for n, t in tensors.items()}
    save_weights(mixed, source)
    result = convert(source, tmp_path / "out")
    assert (result.dtype, result.largest_difference) == ("mixed", 0.0)
    assert_same_bytes(tensors_of(tmp_path / "out"), mixed)
    result = convert(source, tmp_path / "gguf", to="gguf")
    assert (result.dtype, result.largest_difference) == ("f32", 0.0)


def test_convert_shards_become_one_file(tmp_path: Path, folder: Folder) -> None:
    source = folder("mixtral", shard_bytes=50_000)
    assert len(list(source.glob("*.safetensors"))) > 3
    convert(source, tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, ("f16", "bf16")[number % 2]) for number, family in enumerate(FAMILIES)],
)
def test_convert_rounds_weights_to_requested_dtype(
    family: str, dtype: str, tmp_path: Path, folder: Folder
) -> None:
    source = folder(family)
    result = convert(source, tmp_path / "out", dtype=dtype)
    expected = {name: t.to(DTYPES[dtype]) for name, t in tensors_of(source).items()}
    assert_same_bytes(tensors_of(tmp_path / "out"), expected)
    name = str(DTYPES[dtype]).removeprefix("torch.")
    assert config_json(tmp_path / "out") == {
        **config_json(source),
        "dtype": name,
        "torch_dtype": name,
    }
    assert result.dtype == dtype
    assert result.largest_difference > 0


def test_convert_accepts_long_dtype_names(tmp_path: Path, folder: Folder) -> None:
    assert convert(folder(), tmp_path / "out", dtype="bfloat16").dtype == "bf16"


def test_convert_to_wider_dtype_keeps_logits_exactly(tmp_path: Path, folder: Folder) -> None:
    source = folder(dtype=torch.bfloat16)
    assert convert(source, tmp_path / "out", dtype="f32").largest_difference == 0.0
    tensors = tensors_of(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_convert_adds_no_files_to_folder(tmp_path: Path, folder: Folder) -> None:
    """An additional generation_config.json would hide the end tokens in config.json."""
    source = folder()
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (source / name).unlink()
    convert(source, tmp_path / "out")
    assert sorted(other_files(tmp_path / "out")) == ["config.json", "tokenizer.json"]


def test_convert_copies_all_tokenizer_files_and_no_others(tmp_path: Path, folder: Folder) -> None:
    source = folder()
    (source / "additional_chat_templates").mkdir()
    kept = (
        *("tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt"),
        *("chat_template.json", "additional_chat_templates/tools.jinja"),
    )
    for name in kept:
        (source / name).write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "modeling.py").write_text("code")
    convert(source, tmp_path / "out")
    found = other_files(tmp_path / "out")
    assert set(kept) < set(found)
    assert set(other_files(source)) - set(found) == {"pytorch_model.bin", "modeling.py"}


def test_convert_given_tokenizer_replaces_source_tokenizer(
    tmp_path: Path, folder: Folder, tokenizer: Tokenizer
) -> None:
    source = folder(with_template=True)
    other = tokenizer.extended(["<|start|>", "<|end|>"])
    Tokenizer(other.backend, bos_token="<|start|>", eos_token="<|end|>").save_pretrained(
        tmp_path / "other"
    )
    result = convert(source, tmp_path / "out", tokenizer=tmp_path / "other")
    assert not result.has_chat_template
    written = Tokenizer.from_pretrained(tmp_path / "out")
    assert written.fingerprint == other.fingerprint
    special = {"bos_token_id": 320, "eos_token_id": 321}
    assert special.items() <= config_json(tmp_path / "out").items()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"top_p": 0.9, **special}
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_convert_gguf_file_is_named_after_run(tmp_path: Path, folder: Folder) -> None:
    pytest.importorskip("gguf")
    run = tmp_path / "my first run" / "checkpoints" / "step-00000012"
    run.parent.mkdir(parents=True)
    folder().rename(run)
    result = convert(run, tmp_path / "out", to="gguf")
    assert gguf_file(result) == tmp_path / "out" / "my-first-run-f32.gguf"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("llama 3 (new)", "llama-3-new"),
        (".hidden", "hidden"),
        ("Qwen2.5-0.5B_x", "Qwen2.5-0.5B_x"),
        ("早い", "早い"),
        ("...", "model"),
        ("n" * 200, "n" * 60),
    ],
)
def test_convert_gguf_file_names_contain_only_plain_characters(
    name: str, expected: str, tmp_path: Path, folder: Folder
) -> None:
    pytest.importorskip("gguf")
    source = folder().rename(tmp_path / name)
    assert gguf_file(convert(source, tmp_path / "out", to="gguf")).name == f"{expected}-f32.gguf"


# --- to GGUF -----------------------------------------------------------------------------------


def test_convert_gguf_file_restores_original_folder(tmp_path: Path, folder: Folder) -> None:
    pytest.importorskip("gguf")
    source = folder(with_template=True)
    made = convert(source, tmp_path / "made", to="gguf")
    result = convert(gguf_file(made), tmp_path / "out")
    assert (result.program, result.model_type, result.dtype) == ("GGUF", "llama", "f32")
    assert result.has_chat_template
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))
    own, found = Tokenizer.from_pretrained(source), Tokenizer.from_pretrained(tmp_path / "out")
    assert found.chat_template == own.chat_template
    assert found.encode("the light, the dark\n\n12") == own.encode("the light, the dark\n\n12")
    assert read_config(tmp_path / "out") == read_config(source)
    with pytest.raises(ConfigError, match="has its own config: omit --config"):
        convert(gguf_file(made), tmp_path / "other", config=source / "config.json")


SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.mark.parametrize("sampling", [{"do_sample": True, **SAMPLING}, {"do_sample": False}])
def test_convert_writes_sampling_and_end_tokens_to_gguf_and_modelfile(
    sampling: dict[str, Any], tmp_path: Path, folder: Folder
) -> None:
    pytest.importorskip("gguf")
    source = folder()
    generation = {"eos_token_id": [0, 7, 8, 9], **sampling}
    (source / "generation_config.json").write_text(json.dumps(generation))
    made = convert(source, tmp_path / "made", to="ollama")
    assert made.notes[0].startswith("a GGUF file can list at most three end tokens: llama.cpp does")
    convert(gguf_file(made), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {**generation, "eos_token_id": [0, 7, 8], "bos_token_id": 0}
    lines = (tmp_path / "made" / "Modelfile").read_text().splitlines()
    token = Tokenizer.from_pretrained(source).backend.id_to_token
    parameters = {k.replace("repetition", "repeat"): v for k, v in SAMPLING.items()}
    parameters = parameters if sampling["do_sample"] else {"temperature": 0.0}
    expected = [f'stop "{token(token_id)}"' for token_id in (0, 7, 8, 9)]
    expected += [f"{name} {value}" for name, value in parameters.items()]
    assert [line.removeprefix("PARAMETER ") for line in lines[2:-1]] == expected


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ARCHITECTURES.keys()))
def test_convert_family_without_gguf_raises_one_line_error(
    family: str, tmp_path: Path, folder: Folder
) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(
        ModelError,
        match=f"model_type '{family}' can't be converted to GGUF: .*supported: gpt2",
    ):
        convert(folder(family), tmp_path / "out", to="gguf")


# Every family in fp32 and in one other format: rounding to a format is the same for all families,
# and test_gguf.py writes each family in each format.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        for number, family in enumerate(ARCHITECTURES)
        for dtype in ("f32", ("f16", "bf16", "q8_0")[number % 3])
    ],
)
def test_convert_to_gguf_changes_values_unless_dtype_is_f32(
    family: str, dtype: str, tmp_path: Path, folder: Folder
) -> None:
    pytest.importorskip("gguf")
    result = convert(folder(family, with_template=True), tmp_path / "out", to="gguf", dtype=dtype)
    assert result.dtype == dtype
    # Gemma's norms are stored with 1 added, which causes rounding.
    rounding = 1e-5 if family.startswith("gemma") else 0
    assert (result.largest_difference <= rounding) == (dtype == "f32")
    assert gguf_file(result) == tmp_path / "out" / f"source-{dtype}.gguf"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [gguf_file(result).name]
    assert read_gguf(gguf_file(result)).metadata["tokenizer.chat_template"] == TEMPLATE


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_convert_gguf_auto_keeps_dtype_and_every_value(
    dtype: str, tmp_path: Path, folder: Folder
) -> None:
    pytest.importorskip("gguf")
    source = folder(dtype=DTYPES[dtype])
    result = convert(source, tmp_path / "out", to="gguf")
    assert (result.dtype, result.largest_difference) == (dtype, 0.0)
    found = read_gguf(gguf_file(result)).tensors
    expected = {name: tensor.float() for name, tensor in tensors_of(source).items()}
    assert_same_bytes(found, expected)


# --- files of other programs ---------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize(
    "content, config",
    [(nanogpt(), None), (book_gpt(), None), (book_llama(), LLAMA_CONFIG)],
    ids=["nanoGPT", "book-gpt", "book-llama"],
)
def test_convert_files_of_other_programs_become_models(
    to: Any, content: Any, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    path = save(tmp_path / "ckpt.pt", content)
    given = None
    if config is not None:
        given = tmp_path / "given.json"
        given.write_text(json.dumps(config))
    result = convert(path, tmp_path / "out", to=to, config=given)
    assert result.largest_difference <= 2e-5 * result.largest_logit
    assert result.dtype == "f32"
    assert "there is no tokenizer: specify one with --tokenizer" in result.notes
    if to == "gguf":
        assert gguf_file(result).name == "ckpt-f32.gguf"
        return
    written = config_json(tmp_path / "out")
    special = {"bos_token_id": None, "eos_token_id": None}
    assert {"dtype": "float32", **special}.items() <= written.items()
    assert sorted(p.name for p in result.out.iterdir()) == ["config.json", "model.safetensors"]
    # Afterwards the result is an ordinary model folder.
    again = convert(tmp_path / "out", tmp_path / "again")
    assert again.largest_difference == 0.0
    written.pop("qkv_bias", None)  # The zero biases were written.
    assert config_json(tmp_path / "again") == written


def book_gpt_of(vocab_size: int) -> dict[str, Tensor]:
    """Return a GPT whose padding rows are untrained and therefore have ordinary logits."""
    content = book_gpt()
    for seed, name in enumerate(("tok_emb.weight", "out_head.weight")):
        content[name] = torch.randn(vocab_size, 64, generator=torch.Generator().manual_seed(seed))
    return content


def test_convert_drops_padding_rows_beyond_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "tok")
    content = book_gpt_of(384)
    path = save(tmp_path / "model.pth", content)
    result = convert(path, tmp_path / "out", tokenizer=tmp_path / "tok")
    assert "64 padding rows of the vocabulary were removed" in result.notes
    written, tensors = config_json(tmp_path / "out"), tensors_of(tmp_path / "out")
    assert written["vocab_size"] == tokenizer.vocab_size == 320
    assert written["eos_token_id"] == tokenizer.eos_token_id == 0
    assert written["bos_token_id"] is None
    assert torch.equal(tensors["lm_head.weight"], content["out_head.weight"][:320])
    assert torch.equal(tensors["transformer.wte.weight"], content["tok_emb.weight"][:320])
    assert Tokenizer.from_pretrained(tmp_path / "out").fingerprint == tokenizer.fingerprint
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": 0
    }


def test_convert_keeps_many_rows_beyond_tokenizer_with_note(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.save_pretrained(tmp_path / "tok")
    path = save(tmp_path / "model.pth", book_gpt_of(320 + 128))
    result = convert(path, tmp_path / "out", tokenizer=tmp_path / "tok")
    assert config_json(tmp_path / "out")["vocab_size"] == 448
    assert any("128 ids of the model have no token" in note for note in result.notes)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_convert_dtype_of_other_program_is_kept_and_reported(
    kind: torch.dtype, tmp_path: Path
) -> None:
    content = {name: tensor.to(kind) for name, tensor in book_gpt().items()}
    result = convert(save(tmp_path / "model.pth", content), tmp_path / "out")
    name = str(kind).removeprefix("torch.")
    assert config_json(tmp_path / "out")["dtype"] == name
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {kind}
    assert result.largest_difference <= 2e-5 * result.largest_logit


# --- the check ---------------------------------------------------------------------------------

Damage = Callable[[dict[str, Tensor]], None]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def _one_number(tensors: dict[str, Tensor]) -> None:
    """Change the row of a token that is not in the prompt."""
    tensors["model.embed_tokens.weight"][325, 3] += 0.5


def _swapped(tensors: dict[str, Tensor]) -> None:
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def _permuted(tensors: dict[str, Tensor]) -> None:
    """Reorder Llama's rotary pairs as in llama.cpp, where Hugging Face's order is expected."""
    heads = tensors[QUERY].view(4, 2, 16, 64)
    tensors[QUERY] = heads.transpose(1, 2).reshape(128, 64)


def _not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][0] = torch.nan


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize("dtype", ["auto", "bf16"])
@pytest.mark.parametrize(
    "damage, named",
    [
        (_one_number, "model.embed_tokens.weight"),
        (_swapped, "model.layers.0.mlp.gate_proj.weight"),
        (_permuted, QUERY),
        (_not_a_number, "model.norm.weight"),
    ],
)
def test_convert_writer_damaging_tensors_raises_model_error(
    to: Any,
    dtype: str,
    damage: Damage,
    named: str,
    tmp_path: Path,
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    source = folder()

    def damaged_folder(path: Path) -> Any:
        config, tensors = read_folder(path)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if path != source:
            damage(tensors)
        return config, tensors

    def damaged_gguf(path: Path) -> Any:
        result = read_gguf(path)
        damage(result.tensors)
        return result

    monkeypatch.setattr(conversion, "read_folder", damaged_folder)
    monkeypatch.setattr(conversion, "read_gguf", damaged_gguf)
    with pytest.raises(
        ModelError, match=(f"differs from the source: values of {named} differ by up to")
    ):
        convert(source, tmp_path / "out", to=to, dtype=dtype)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "f32"])
def test_convert_without_rounding_allows_no_difference(
    dtype: str, tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(dtype=torch.bfloat16)

    def save_rounded(tensors: dict[str, Tensor], path: Path) -> None:
        # Less than bf16's rounding error of the largest number, but more than the rounding error of
        # this number.
        changed = tensors[QUERY].clone()
        changed[0, 0] += tensors[QUERY].abs().max() / 2**9
        assert not torch.equal(changed, tensors[QUERY])
        save_weights({**tensors, QUERY: changed}, path)

    monkeypatch.setattr(conversion, "save_weights", save_rounded)
    with pytest.raises(ModelError, match=f"values of {QUERY} differ"):
        convert(source, tmp_path / "out", dtype=dtype)
    assert_nothing_written(tmp_path)


def test_convert_file_written_wrongly_raises_model_error(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder()

    def save_wrongly(tensors: dict[str, Tensor], path: Path) -> None:
        save_weights({**tensors, QUERY: tensors[QUERY].flip(0)}, path)

    monkeypatch.setattr(conversion, "save_weights", save_wrongly)
    with pytest.raises(ModelError, match=f"values of {QUERY} differ"):
        convert(source, tmp_path / "out")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_convert_lost_setting_is_detected_in_logits(
    family: str, dtype: str, tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    source = folder(family, rope_theta=100.0)

    def write_without(path: Path, config: dict[str, Any], *args: Any, **options: Any) -> None:
        write_gguf(path, {**config, "rope_theta": 10_000.0}, *args, **options)

    monkeypatch.setattr(conversion, "write_gguf", write_without)
    with pytest.raises(ModelError, match="on a fixed prompt, the logits differ") as caught:
        convert(source, tmp_path / "out", to="gguf", dtype=dtype)
    assert ("at half of all positions" in str(caught.value)) == (
        family == "mixtral" and dtype != "f32"
    )
    assert_nothing_written(tmp_path)


def test_convert_logits_outside_tolerance_raise_model_error(tmp_path: Path, folder: Folder) -> None:
    source = folder()
    result = convert(source, tmp_path / "free", dtype="f16")
    share = result.largest_difference / result.largest_logit
    assert 0 < share < 0.01
    with pytest.raises(ModelError, match=r"logits differ by up to .* of the largest logit "):
        convert(source, tmp_path / "out", dtype="f16", tolerance=0.99 * share)
    assert_nothing_written(tmp_path)
    convert(source, tmp_path / "out", dtype="f16", tolerance=1.01 * share)


@pytest.mark.parametrize(
    "program, setting, message",
    [
        # The book's code does not support such scaling.
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 2000.0, "factor": 2.0}},
            "LLMs-from-scratch does not support rotary positions of type 'linear'",
        ),
        ("llama", {"rms_norm_eps": 1e-2}, "has rms_norm_eps 1e-05, but the config specifies 0.01"),
        ("gpt", {"activation_function": "gelu"}, "its program supports only 'gelu_new' or 'relu'"),
        ("gpt", {"layer_norm_epsilon": 1e-2}, "has layer_norm_epsilon 1e-05"),
        ("nanogpt", {"layer_norm_epsilon": 1e-2}, "has layer_norm_epsilon 1e-05"),
    ],
)
def test_convert_setting_unsupported_by_target_raises_model_error(
    program: str, setting: dict[str, Any], message: str, tmp_path: Path
) -> None:
    contents: dict[str, Any] = {"llama": book_llama(), "gpt": book_gpt(), "nanogpt": nanogpt()}
    path = save(tmp_path / "model.pth", contents[program])
    given = tmp_path / "given.json"
    base = LLAMA_CONFIG if program == "llama" else {"n_head": 1} if program == "gpt" else {}
    given.write_text(json.dumps({**base, **setting}))
    with pytest.raises(ModelError, match=message):
        convert(path, tmp_path / "out", config=given)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_convert_changed_chat_template_raises_model_error(
    to: Any, tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    source = folder(with_template=True)

    def damaged(path: Path) -> Tokenizer | None:
        if path != source:
            (path / "chat_template.jinja").write_text(TEMPLATE.upper().replace("{%", "{#"))
        return tokenizer_of(path)

    def write_other(path: Path, config: Any, tensors: Any, own: Tokenizer, **options: Any) -> None:
        other = Tokenizer(own.backend, eos_token=own.eos_token, config={"chat_template": "hello"})
        write_gguf(path, config, tensors, other, **options)

    monkeypatch.setattr(conversion, "tokenizer_of", damaged)
    monkeypatch.setattr(conversion, "write_gguf", write_other)
    with pytest.raises(ModelError, match=r"the chat template of .* renders a conversation as"):
        convert(source, tmp_path / "out", to=to)
    assert_nothing_written(tmp_path)


def test_convert_lost_chat_template_raises_model_error(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(with_template=True)
    names = [n for n in conversion._TOKENIZER_FILES if n != "chat_template.jinja"]
    monkeypatch.setattr(conversion, "_TOKENIZER_FILES", names)
    with pytest.raises(ModelError, match="renders a conversation as None, but the source's"):
        convert(source, tmp_path / "out")
    assert_nothing_written(tmp_path)


def test_convert_lost_tokenizer_raises_model_error(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder()
    monkeypatch.setattr(conversion, "_TOKENIZER_FILES", ())
    with pytest.raises(ModelError, match="the tokenizer of the converted folder differs"):
        convert(source, tmp_path / "out")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("template", ["{{ raise_exception('only for poets') }}", "{{ 1 / 0 }}"])
def test_convert_template_rejecting_test_conversation_is_still_copied(
    template: str, tmp_path: Path, folder: Folder
) -> None:
    source = folder()
    (source / "chat_template.jinja").write_text(template)
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_convert_non_finite_weights_raises_and_names_tensor(
    to: Any, value: float, tmp_path: Path, folder: Folder
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    source = folder()
    tensors = tensors_of(source)
    # The row of a token that is not in the prompt.
    tensors["model.embed_tokens.weight"][325, 0] = value
    save_weights(tensors, source)
    problem = r"source has tensors with NaN or infinity \(model\.embed_tokens\.weight\): use"
    with pytest.raises(ModelError, match=problem):
        convert(source, tmp_path / "out", to=to)
    assert_nothing_written(tmp_path)


def test_convert_values_too_large_for_f16_raises_and_names_tensor(
    tmp_path: Path, folder: Folder
) -> None:
    source = folder()
    tensors = tensors_of(source)
    tensors[QUERY][0, 0] = 1e6
    save_weights(tensors, source)
    with pytest.raises(ModelError, match=f"{QUERY} contains a number too large for f16"):
        convert(source, tmp_path / "out", dtype="f16")
    assert_nothing_written(tmp_path)


def test_convert_check_without_memory_for_fp32_computes_both_in_bf16(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    logits_of = check.logits_of

    def watched(config: Any, tensors: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(dtype)
        return logits_of(config, tensors, ids, dtype)

    monkeypatch.setattr(conversion, "logits_of", watched)
    source = folder()
    convert(source, tmp_path / "one")
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    convert(source, tmp_path / "two")
    assert seen == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("context, count", [(5, 5), (64, 64), (1000, 64)])
def test_convert_check_prompt_fills_context(context: int, count: int, tokenizer: Tokenizer) -> None:
    for own in (tokenizer, None):
        ids = check.prompt_ids(own, 320, context)
        assert ids.shape == (1, count)
        assert ids.dtype == torch.int64
        assert int(ids.max()) < 320
    prompt = tokenizer.encode(check.PROMPT)
    assert check.prompt_ids(tokenizer, 320, context)[0, :5].tolist() == prompt[:5]


def test_logit_difference_ignores_only_common_offset() -> None:
    source = torch.randn(1, 8, 50, generator=torch.Generator().manual_seed(0))
    difference, largest = check.require_same_logits(source, source + 100, 1e-4)
    assert difference < 1e-4
    assert largest < 5
    with pytest.raises(ModelError):
        # 2 % of the offset of 100, but nearly all of the remaining values.
        check.require_same_logits(source - 100, source.roll(1, -1) - 100, 0.12)


def test_logit_difference_few_tokens_may_switch_experts_but_not_most() -> None:
    source = torch.randn(1, 9, 50, generator=torch.Generator().manual_seed(0))
    result = source.clone()
    result[0, :4] = source[0, :4].roll(1, -1)
    with pytest.raises(ModelError, match=r"the logits differ by up to"):
        check.require_same_logits(source, result, 0.12)
    difference, largest = check.require_same_logits(source, result, 0.12, is_routed=True)
    assert difference > 0.12 * largest
    result[0, :5] = source[0, :5].roll(1, -1)
    with pytest.raises(ModelError, match="the logits differ at half of all positions by up to"):
        check.require_same_logits(source, result, 0.12, is_routed=True)


def test_compare_tensors_present_on_one_side_are_named() -> None:
    one, two = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2)}
    for source, result in ((one, two), (two, one)):
        with pytest.raises(ModelError, match="b exists in only one of the two"):
            check.require_same_tensors(source, result, "f32")
    with pytest.raises(ModelError, match="values of a differ by up to inf"):
        check.require_same_tensors({"a": torch.ones(3)}, two, "f32")


@pytest.mark.parametrize("row", [0, 9999])
def test_compare_tensors_new_nan_value_raises(row: int) -> None:
    source = torch.ones(10_000, 2)
    result = source.clone()
    result[row, 1] = float("nan")
    with pytest.raises(ModelError, match="values of a differ by up to nan"):
        check.require_same_tensors({"a": source}, {"a": result}, "f32")


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("scale", [1e4, 1.0, 1e-5, 1e-7])
def test_compare_tensors_rounding_alone_is_accepted(dtype: str, scale: float) -> None:
    source = scale * torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    result = source.to(DTYPES[dtype]).float()
    assert not torch.equal(source, result)
    check.require_same_tensors({"a": source}, {"a": result}, dtype)
    result[4500, 1] += scale / 30
    if scale > 1e-7:
        with pytest.raises(ModelError, match="values of a differ"):
            check.require_same_tensors({"a": source}, {"a": result}, dtype)


@pytest.mark.parametrize("scale", [1e4, 1.0, 1e-5, 1e-7])
def test_compare_tensors_q8_0_rounding_alone_is_accepted(scale: float) -> None:
    gguf = pytest.importorskip("gguf")
    source = scale * torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(source.numpy(), kind)
    result = torch.from_numpy(gguf.quants.dequantize(packed, kind))
    assert not torch.equal(source, result)
    check.require_same_tensors({"a": source}, {"a": result}, "q8_0")


# --- invalid arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"to": "ggfu"}, r"to 'ggfu' is unknown \(did you mean 'gguf'\?\)"),
        ({"dtype": "q8_0"}, "hf does not support dtype 'q8_0': choose one of auto, f32, f16, bf16"),
        (
            {"dtype": "int4", "to": "gguf"},
            "gguf does not support dtype 'int4': choose one of auto, f32, f16, bf16",
        ),
        ({"tolerance": -0.1}, "tolerance -0.1 is invalid"),
        ({"tolerance": float("nan")}, "tolerance nan is invalid"),
        ({"config": "given.json"}, "--config applies only to other programs"),
    ],
)
def test_convert_invalid_options_raise_config_error(
    options: dict[str, Any], problem: str, tmp_path: Path, folder: Folder
) -> None:
    source = folder()
    with pytest.raises(ConfigError, match=problem):
        convert(source, tmp_path / "out", **options)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("inside", [".", "new", "a/b", "../source"])
def test_convert_into_source_raises_and_leaves_source_unchanged(
    inside: str, tmp_path: Path, folder: Folder
) -> None:
    source = folder()
    before = other_files(source)
    with pytest.raises(InputError, match="is the source or is inside it"):
        convert(source, source / inside)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(InputError, match="is the source or is inside it"):
        convert(source, tmp_path / "link" / inside)
    assert other_files(source) == before


def test_convert_into_non_empty_folder_raises_and_leaves_it_unchanged(
    tmp_path: Path, folder: Folder
) -> None:
    source = folder()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"folder .*out already exists and is not overwritten"):
        convert(source, tmp_path / "out")
    with pytest.raises(InputError, match="already exists"):
        convert(source, tmp_path / "out" / "letter.txt")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["letter.txt"]


def test_convert_into_empty_folder_writes_model(tmp_path: Path, folder: Folder) -> None:
    (tmp_path / "out").mkdir()
    convert(folder(), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "source, error, problem",
    [
        ("sourc", ModelError, r"does not exist \(did you mean '.*/source'\?\)"),
        ("ckp.pt", InputError, r"checkpoint .*ckp.pt does not exist \(did you mean 'ckpt.pt'\?\)"),
        ("nowhere/ckpt.pt", InputError, "checkpoint .* does not exist$"),
        ("source/model.safetensors", InputError, "only one file of a model: use .*source$"),
        ("source/config.json", InputError, "only one file of a model: use .*source$"),
        ("model.GGUF", ModelError, "this is not a GGUF file"),
        ("notes.txt", ModelError, "is not a PyTorch checkpoint"),
        ("empty", ModelError, "is not a model folder: it does not contain config.json"),
    ],
)
def test_convert_invalid_source_raises(
    source: str, error: type[Exception], problem: str, tmp_path: Path, folder: Folder
) -> None:
    folder()
    (tmp_path / "empty").mkdir()
    for name in ("ckpt.pt", "model.GGUF", "notes.txt"):
        (tmp_path / name).write_text("something")
    with pytest.raises(error, match=problem):
        convert(tmp_path / source, tmp_path / "out")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    "content, error, problem",
    [
        (None, InputError, "given.json does not exist"),
        ("{", InputError, "is not valid JSON"),
        ("[1]", ConfigError, "is not a JSON object"),
        ('{"n_haed": 1}', ModelError, r"no key 'n_haed' \(did you mean 'n_head'\?\)"),
        ('{"n_head": 7}', ModelError, "n_head is 7, but must be a divisor"),
    ],
)
def test_convert_unusable_config_raises(
    content: str | None, error: type[Exception], problem: str, tmp_path: Path
) -> None:
    given = tmp_path / "given.json"
    if content is not None:
        given.write_text(content)
    path = save(tmp_path / "model.pth", book_gpt())
    with pytest.raises(error, match=problem):
        convert(path, tmp_path / "out", config=given)
    assert_nothing_written(tmp_path)


def test_convert_tokenizer_of_other_model_raises_model_error(
    tmp_path: Path, folder: Folder, tokenizer: Tokenizer
) -> None:
    source = folder()
    tokenizer.save_pretrained(tmp_path / "tok")
    checkpoint = save(tmp_path / "ckpt.pt", nanogpt())
    with pytest.raises(ModelError, match="has 320 tokens, more than the 7 of ckpt: use"):
        convert(checkpoint, tmp_path / "out", tokenizer=tmp_path / "tok")
    with pytest.raises(TokenizerError, match="does not exist"):
        convert(source, tmp_path / "out", tokenizer=tmp_path / "nowhere")
    tokenizer.extended([f"<|{i}|>" for i in range(9)]).save_pretrained(source)
    with pytest.raises(ModelError, match="has 329 tokens, more than the 328 of source"):
        convert(source, tmp_path / "out")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks tensors: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "unknown tensors: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight is \[3\], expected \[64\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            r"ties lm_head\.weight to model\.embed_tokens\.weight, but their values differ",
        ),
    ],
    ids=["missing", "extra", "misshapen", "wrongly tied"],
)
def test_convert_tensors_not_matching_config_raise_and_are_named(
    change: Callable[[dict[str, Tensor]], Any], problem: str, tmp_path: Path, folder: Folder
) -> None:
    source = folder(tie_word_embeddings=True)
    tensors = tensors_of(source)
    change(tensors)
    save_weights(tensors, source)
    with pytest.raises(ModelError, match=problem):
        convert(source, tmp_path / "out")
    assert_nothing_written(tmp_path)


def test_convert_without_gguf_package_names_install_command(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[interop\]'"):
        convert(source, tmp_path / "out", to="gguf")
    assert_nothing_written(tmp_path)
    convert(source, tmp_path / "out")


def test_gpt2_without_qkv_biases_is_read_trained_and_exported(tmp_path: Path) -> None:
    """A book's file is read unchanged; its export has zero biases, which transformers and llama.cpp
    require.
    """
    weights = book_gpt()
    source = save(tmp_path / "model.pth", weights)
    read = convert(source, tmp_path / "read")
    assert any("have no biases" in note for note in read.notes)
    folder = tmp_path / "read"
    assert json.loads((folder / "config.json").read_text())["qkv_bias"] is False
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    model = load_model(folder).model
    for names in (tensors, model.state_dict(), dict(model.named_parameters())):
        assert not any("c_attn.bias" in name for name in names)
    assert count_parameters(model).total == read.parameters
    ids = torch.arange(4)[None]
    model.train()(ids, ids).backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        expected = model.eval()(ids)
    for to in ("hf", "gguf"):
        result = convert(folder, tmp_path / to, to=to)
        assert any("zero biases were written" in note for note in result.notes)
        assert result.parameters == read.parameters + 2 * 3 * model.config.hidden_size
    exported = load_model(tmp_path / "hf").model
    assert exported.config == model.config.model_copy(update={"qkv_bias": True})
    with torch.no_grad():
        torch.testing.assert_close(exported(ids), expected)
