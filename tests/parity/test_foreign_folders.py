"""Models of OpenAI, Meta, litgpt, torchtune and nanochat compute the same after they are converted.

The program's own logits, computed from its own tensors, must agree with those of transformers and
of this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from foreign_folders import (
    CONTEXT,
    GROUPS,
    HEADS,
    LAYERS,
    LITGPT_CONFIG,
    VOCABULARY,
    litgpt_model,
    meta_llama,
    nanochat_model,
    openai_gpt2,
    torchtune_llama,
    write_bundle,
)
from foreign_forward import (
    META_NAMES,
    TORCHTUNE_NAMES,
    litgpt_logits,
    nanochat_logits,
    openai_logits,
    pairs_llama_logits,
)
from foreign_programs import in_transformers
from torch import Tensor

from firstlight.cli.main import main
from firstlight.conversion.foreign.model import ForeignModel, read_foreign
from firstlight.errors import InputError, ModelError
from firstlight.lora.loading import load_model

IDS = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(5))
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_seq_len": 8,
}


@torch.no_grad()
def assert_computes_the_same(foreign: ForeignModel, folder: Path, expected: Tensor) -> None:
    """Check that transformers and firstlight compute the program's own logits from the tensors."""
    assert expected.std() > 0.1
    limit = 1e-5 * float(expected.abs().max())
    theirs = in_transformers(foreign)(IDS).logits
    torch.testing.assert_close(theirs, expected, rtol=0, atol=limit)
    (folder / "config.json").write_text(json.dumps(foreign.config))
    safetensors.torch.save_file(foreign.tensors, folder / "model.safetensors")
    ours = load_model(folder).model.float()(IDS)
    torch.testing.assert_close(ours, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["", "model.ckpt.index", "model.ckpt.data-00000-of-00001"])
def test_openai_gpt2_computes_same_logits(tmp_path: Path, name: str) -> None:
    tensors = openai_gpt2(tmp_path)
    foreign = read_foreign(tmp_path / name)
    assert foreign.program == "OpenAI's GPT-2 (TensorFlow)"
    assert foreign.config["activation_function"] == "gelu_new"
    assert (foreign.config["n_head"], foreign.config["n_positions"]) == (HEADS, CONTEXT)
    assert foreign.config["tie_word_embeddings"] is True
    assert foreign.notes == ()
    assert torch.equal(foreign.tensors["transformer.wte.weight"], tensors["model/wte"])
    assert_computes_the_same(foreign, tmp_path, openai_logits(tensors, HEADS, IDS))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("cuts_vocabulary", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_meta_llama_computes_same_logits(
    tmp_path: Path, parts: int, cuts_vocabulary: bool, scaled: bool
) -> None:
    tensors = meta_llama(tmp_path, parts, cuts_vocabulary=cuts_vocabulary, use_scaled_rope=scaled)
    foreign = read_foreign(tmp_path)
    assert foreign.config["num_key_value_heads"] == GROUPS
    assert foreign.config["max_position_embeddings"] == (131_072 if scaled else 8192)
    assert foreign.config["rope_parameters"]["rope_type"] == ("llama3" if scaled else "default")
    assert_computes_the_same(
        foreign, tmp_path, pairs_llama_logits([tensors], META_NAMES, foreign.config, IDS)
    )


def test_read_meta_parts_are_merged_into_whole_model(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    meta_llama(tmp_path / "a", 1)
    meta_llama(tmp_path / "b", 2)
    whole, parts = read_foreign(tmp_path / "a"), read_foreign(tmp_path / "b")
    assert whole.config == parts.config
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, parts.tensors[name]), name


@pytest.mark.parametrize(
    "params, context, factor",
    [
        ({"rope_theta": None, "norm_eps": 1e-6, "vocab_size": -1}, 2048, None),
        ({"rope_theta": None, "vocab_size": -1, "n_kv_heads": 2}, 4096, None),
        ({"rope_theta": 1e6}, 16_384, None),
        ({"use_scaled_rope": True, "rope_scaling_factor": 32}, 131_072, 32.0),
    ],
)
def test_read_meta_context_length_follows_from_settings(
    tmp_path: Path, params: dict[str, Any], context: int, factor: float | None
) -> None:
    meta_llama(tmp_path, **params)
    foreign = read_foreign(tmp_path)
    assert foreign.config["max_position_embeddings"] == context
    assert foreign.config["rope_parameters"].get("factor") == factor
    assert f"The context is assumed to be {context:,}" in foreign.notes[-1]
    given = read_foreign(tmp_path, config={"max_position_embeddings": 77})
    assert given.config["max_position_embeddings"] == 77
    assert len(given.notes) == len(foreign.notes) - 1


@pytest.mark.parametrize("tied", [True, False])
def test_torchtune_llama_computes_same_logits(tmp_path: Path, tied: bool) -> None:
    tensors = torchtune_llama(tmp_path / "model.pt", tied=tied)
    given = {"num_attention_heads": HEADS, "max_position_embeddings": CONTEXT}
    with pytest.raises(ModelError, match=r"does not specify rope_parameters"):
        read_foreign(tmp_path / "model.pt", config=given)
    foreign = read_foreign(tmp_path / "model.pt", config={**given, "rope_theta": 3000.0})
    assert foreign.config["tie_word_embeddings"] is tied
    assert foreign.notes == ("The norms' epsilon is assumed to be 1e-05, as in torchtune.",)
    if tied:
        tensors["output.weight"] = tensors["tok_embeddings.weight"]
    expected = pairs_llama_logits([tensors], TORCHTUNE_NAMES, foreign.config, IDS)
    assert_computes_the_same(foreign, tmp_path, expected)


@pytest.mark.parametrize(
    "changed, family",
    [
        ({}, "llama"),
        ({"rope_adjustments": SCALED}, "llama"),
        ({"sliding_window_size": 5}, "mistral"),
        ({"attn_bias": True}, "qwen2"),
        ({"norm_qk": True}, "qwen3"),
    ],
)
def test_litgpt_models_compute_same_logits(
    tmp_path: Path, changed: dict[str, Any], family: str
) -> None:
    tensors = litgpt_model(tmp_path, **changed)
    foreign = read_foreign(tmp_path / "lit_model.pth")
    assert (foreign.program, foreign.config["model_type"]) == ("litgpt", family)
    assert foreign.notes == ()
    assert_computes_the_same(foreign, tmp_path, litgpt_logits(tensors, foreign.config, IDS))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"parallel_residual": True}, r"parallel_residual is True.*litgpt convert_from_litgpt"),
        ({"mlp_class_name": "GemmaMLP"}, "mlp_class_name is 'GemmaMLP'"),
        ({"rope_adjustments": {"factor": 2.0}}, "rope_adjustments other than Llama 3's"),
        ({"norm_qk": True, "attn_bias": True}, "no supported family combines"),
        ({"n_head": 0}, "must be integers"),
        ({"rope_base": None}, "model_config.yaml: rope_base is not a number"),
        ({"rope_base": "x"}, "model_config.yaml: rope_base is not a number"),
        ({"norm_eps": 10**400}, r"model_config.yaml is not valid YAML \(a number of more than 64"),
        ({"norm_eps": float("nan")}, "model_config.yaml: norm_eps is not finite"),
        (
            {"sliding_window_size": 8, "sliding_window_indices": 3},
            "model_config.yaml: sliding_window_indices is not a list",
        ),
        ({"block_size": None}, "has no block_size"),
        ({"n_embd": 50}, "its settings specify hidden_size 50, but its tensors have 48"),
        ({"n_query_groups": 1}, r"has shape \[96, 48\], but model_config.yaml requires 72"),
    ],
)
def test_read_litgpt_inconsistent_settings_raise_model_error(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    litgpt_model(tmp_path)
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump({**LITGPT_CONFIG, **changed}))
    with pytest.raises(ModelError, match=message):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"moe_args": {"num_experts": 16}}, "has moe_args: this kind of model is not supported"),
        ({"dim": "wide"}, "params.json: dim is not a number"),
        ({"vocab_size": None}, "params.json: vocab_size is not a number"),
        ({"rope_theta": 10**400}, "params.json: rope_theta is not finite or is 2\\^63 or more"),
        ({"n_heads": 5}, "num_attention_heads is 5, but must be a divisor"),
        ({"n_kv_heads": 4}, "its settings specify num_key_value_heads 4, but its tensors have 2"),
        ({"n_layers": 3}, "its settings specify num_hidden_layers 3, but its tensors have 2"),
        ({"vocab_size": 63}, "its settings specify vocab_size 63, but its tensors have 64"),
    ],
)
def test_read_meta_inconsistent_settings_raise_model_error(
    tmp_path: Path, params: dict[str, Any], message: str
) -> None:
    meta_llama(tmp_path, **params)
    with pytest.raises(ModelError, match=message):
        read_foreign(tmp_path)


def test_read_meta_missing_or_differing_parts_raise_model_error(tmp_path: Path) -> None:
    meta_llama(tmp_path, 2)
    first, second = (tmp_path / f"consolidated.{i:02}.pth" for i in range(2))
    shard = torch.load(second, weights_only=True)
    torch.save({**shard, "norm.weight": torch.ones(48)}, second)
    with pytest.raises(ModelError, match=r"norm\.weight differs between"):
        read_foreign(tmp_path)
    torch.save({**shard, "layers.0.attention.wo.weight": torch.ones(48, 8)}, second)
    with pytest.raises(ModelError, match="are not parts of the same model: their shapes differ"):
        read_foreign(tmp_path)
    second.rename(tmp_path / "consolidated.02.pth")
    with pytest.raises(ModelError, match=r"lacks consolidated\.01\.pth"):
        read_foreign(tmp_path)
    first.unlink()
    with pytest.raises(ModelError, match=r"lacks consolidated\.00\.pth"):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    "hparams, message",
    [
        ({"n_head": 5}, "n_head is 5, but must be a divisor of the width 48"),
        ({"n_ctx": 12}, "hparams.json specify block_size 12, but its tensors have 24"),
        ({"n_layer": 3}, "hparams.json specify n_layer 3, but its tensors have 2"),
    ],
)
def test_read_openai_inconsistent_settings_raise_model_error(
    tmp_path: Path, hparams: dict[str, Any], message: str
) -> None:
    openai_gpt2(tmp_path, **hparams)
    with pytest.raises(ModelError, match=message):
        read_foreign(tmp_path)


def test_read_foreign_invalid_settings_files_raise_model_error(tmp_path: Path) -> None:
    openai_gpt2(tmp_path)
    (tmp_path / "hparams.json").write_text("[]")
    with pytest.raises(ModelError, match="has no n_head"):
        read_foreign(tmp_path)
    (tmp_path / "hparams.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_foreign(tmp_path)
    (tmp_path / "lit_model.pth").write_bytes(b"")
    (tmp_path / "model_config.yaml").write_text("n_layer: [1\n")
    with pytest.raises(ModelError, match=r"config\.yaml is not valid YAML .*: copy it again$"):
        read_foreign(tmp_path)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 4)])
def test_read_openai_inconsistent_weights_raise_model_error(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    openai_gpt2(tmp_path)
    write_bundle(tmp_path / "model.ckpt", {"model/h0/attn/c_attn/w": torch.zeros(shape)})
    expected = rf"c_attn/w is \[{shape[0]}, 3, 4\], expected \[1, inputs, outputs\]"
    with pytest.raises(ModelError, match=expected):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("transformer.h.0.attn.c_q.weight", "is a nanochat file, but its settings are missing"),
        ("transformer.h.0.attn.qkv.weight", "is a litgpt file: use the folder"),
        ("layers.0.attention.wq.weight", "is a file of Meta's Llama: use the folder"),
    ],
)
def test_read_foreign_file_without_settings_names_missing_file(
    tmp_path: Path, name: str, message: str
) -> None:
    torch.save({name: torch.ones(4, 4)}, tmp_path / "model.pt")
    with pytest.raises(ModelError, match=message):
        read_foreign(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["", "model_000650.pt"])
@pytest.mark.parametrize("groups", [1, GROUPS, HEADS])
def test_nanochat_first_format_computes_same_logits(tmp_path: Path, name: str, groups: int) -> None:
    tensors = nanochat_model(tmp_path, n_kv_head=groups)
    foreign = read_foreign(tmp_path / name)
    assert (foreign.program, foreign.config["model_type"]) == ("nanochat", "nanochat")
    assert foreign.config["num_key_value_heads"] == groups
    assert foreign.config["max_position_embeddings"] == CONTEXT
    assert foreign.config["final_logit_softcapping"] == 15
    assert foreign.notes == ()
    assert torch.equal(foreign.tensors["lm_head.weight"], tensors["lm_head.weight"])
    assert_computes_the_same(foreign, tmp_path, nanochat_logits(tensors, HEADS, IDS))


def test_read_nanochat_folder_uses_last_step(tmp_path: Path) -> None:
    nanochat_model(tmp_path, 90)
    last = nanochat_model(tmp_path, 1_000_000)
    torch.save({"state": {}}, tmp_path / "optim_1000000_rank0.pt")
    last = {name: -tensor for name, tensor in last.items()}
    torch.save(last, tmp_path / "model_1000000.pt")
    weight = read_foreign(tmp_path).tensors["model.embed_tokens.weight"]
    assert torch.equal(weight, last["transformer.wte.weight"])
    weight = read_foreign(tmp_path / "model_000090.pt").tensors["model.embed_tokens.weight"]
    assert torch.equal(weight, -last["transformer.wte.weight"])


@pytest.mark.parametrize(("write", "base"), [(nanochat_model, 10_000.0), (meta_llama, 500_000.0)])
def test_read_foreign_rotary_base_contradicting_file_raises_model_error(
    tmp_path: Path, write: Callable[[Path], object], base: float
) -> None:
    write(tmp_path)
    assert read_foreign(tmp_path, config={"rope_theta": base}).config["rope_theta"] == base
    with pytest.raises(ModelError, match=f"has rope_theta {base}, .* 77: remove rope_theta"):
        read_foreign(tmp_path, config={"rope_theta": 77})


def test_read_nanochat_missing_settings_raise_and_are_named(tmp_path: Path) -> None:
    nanochat_model(tmp_path)
    meta = tmp_path / "meta_000650.json"
    content = json.loads(meta.read_text())
    del content["model_config"]["n_kv_head"]
    meta.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"meta_000650.json: model_config has no n_kv_head: copy"):
        read_foreign(tmp_path)
    meta.unlink()
    (tmp_path / "model_000700.pt").mkdir()
    with pytest.raises(
        ModelError,
        match=r"model_000650.pt is a nanochat file, but its settings are m",
    ):
        read_foreign(tmp_path)


def test_read_nanochat_drops_padding_and_widens_bf16_embedding(tmp_path: Path) -> None:
    tensors = nanochat_model(tmp_path, vocab_size=60)
    path, embedding = tmp_path / "model_000650.pt", "transformer.wte.weight"
    tensors[embedding] = tensors[embedding].bfloat16()
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}, path)
    foreign = read_foreign(path)
    assert {tensor.dtype for tensor in foreign.tensors.values()} == {torch.float32}
    assert torch.equal(foreign.tensors["model.embed_tokens.weight"], tensors[embedding][:60])
    ids = IDS % 60
    theirs = in_transformers(foreign)(ids).logits.detach()
    expected = nanochat_logits(tensors, HEADS, ids)[..., :60]
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-4)
    torch.save({name: tensor.bfloat16() for name, tensor in tensors.items()}, path)
    assert {t.dtype for t in read_foreign(path).tensors.values()} == {torch.bfloat16}


def test_convert_nanochat_folder_explains_tokenizer_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d2").mkdir()
    nanochat_model(tmp_path / "d2")
    (tmp_path / "d2" / "tokenizer.pkl").write_bytes(b"not opened")
    assert main(["convert", str(tmp_path / "d2"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "nanochat, nanochat" in printed.out
    assert "tokenizer.pkl is a pickle" in printed.err
    assert load_model(tmp_path / "out").model.config.num_hidden_layers == LAYERS


def test_read_nanochat_later_formats_raise_and_name_unknown_parts(tmp_path: Path) -> None:
    tensors = nanochat_model(tmp_path, window_pattern="SSSL")
    more = {f"transformer.h.{i}.attn.ve_gate.weight": torch.ones(2, 12) for i in range(LAYERS)}
    more |= {f"value_embeds.{i}.weight": torch.ones(VOCABULARY, 24) for i in range(LAYERS)}
    more |= {"resid_lambdas": torch.ones(LAYERS)}
    torch.save({**tensors, **more}, tmp_path / "model_000650.pt")
    with pytest.raises(ModelError) as caught:
        read_foreign(tmp_path)
    message = str(caught.value)
    assert "is from a later nanochat version, which no Hugging Face class supports" in message
    assert message.endswith(
        "it also has transformer.h.*.attn.ve_gate.weight, value_embeds.*.weight, resid_lambdas, "
        "window_pattern; use it with nanochat"
    )
    assert "\n" not in message


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"n_head": "6"}, "meta_000650.json: n_head is not an integer"),
        ({"n_kv_head": None}, "meta_000650.json: n_kv_head is not an integer"),
        ({"n_layer": 10**30}, r"meta_000650\.json: n_layer is not finite or is 2\^63 or more"),
        ({"n_layer": 3}, "its settings specify num_hidden_layers 3, but its tensors have 2"),
        ({"n_head": 5}, "num_attention_heads is 5, but must be a divisor of the width 48"),
        ({"vocab_size": 65}, "its settings specify vocab_size 65, but its tensors have 64"),
    ],
)
def test_read_nanochat_inconsistent_settings_raise_model_error(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    nanochat_model(tmp_path)
    content = json.loads((tmp_path / "meta_000650.json").read_text())
    content["model_config"] |= changed
    (tmp_path / "meta_000650.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        read_foreign(tmp_path)
    (tmp_path / "meta_000650.json").write_text("{}")
    with pytest.raises(ModelError, match="has no model_config: it is not a nanochat file"):
        read_foreign(tmp_path)


def test_convert_openai_folder_includes_tokenizer(
    tmp_path: Path, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "124M"
    source.mkdir()
    gpt2 = shared / "models" / "gpt2-tokenizer"
    (source / "encoder.json").write_bytes((gpt2 / "vocab.json").read_bytes())
    (source / "vocab.bpe").write_bytes((gpt2 / "merges.txt").read_bytes())
    openai_gpt2(source)
    # The tokenizer has 50,257 tokens, so it does not belong to a model with 64.
    assert main(["convert", str(source), "--out", str(tmp_path / "out")]) == 1
    assert "the tokenizer has 50257 tokens" in capsys.readouterr().err
    (source / "vocab.bpe").unlink()
    (source / "encoder.json").unlink()
    assert main(["convert", str(source), "--out", str(tmp_path / "out")]) == 0
    assert "OpenAI's GPT-2 (TensorFlow), gpt2" in capsys.readouterr().out
    assert load_model(tmp_path / "out").model.config.num_hidden_layers == 2
