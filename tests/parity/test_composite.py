"""Folders of models with an image encoder: the text model is read and trained, and everything else
is written back unchanged. transformers opens the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from drawn import some_ids
from torch import Tensor

from firstlight.cli.main import main
from firstlight.conversion.convert import convert
from firstlight.errors import ConfigError, ModelError
from firstlight.lora.loading import load_model
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.weights.composite import is_composite, read_carried
from firstlight.weights.huggingface import config_from_hf, read_config
from firstlight.weights.stored import WEIGHTS_NAME

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
_SIGLIP = {**_TOWER, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "num_position_embeddings": 4,
}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
}
_LONG_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 16,
}
#: Text config, config of the tower, and other keys of each kind of folder.
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {**_SIZES, "sliding_window": 16, "query_pre_attn_scalar": 8},
        _SIGLIP,
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": ({**_SIZES, "model_type": "mistral", "sliding_window": None}, _SIGLIP, {}),
    "ministral3": (
        {**_SIZES, "model_type": "ministral3", "rope_parameters": _LONG_QUERIES},
        *(_SIGLIP, {}),
    ),
    "qwen3_5": ({**_SIZES, **_LINEAR}, _QWEN_TOWER, {}),
    "qwen3_5_moe": ({**_SIZES, **_LINEAR, **_EXPERTS}, _QWEN_TOWER, {}),
}


def composite(
    kind: str, folder: Path, tokenizer: Tokenizer, *, original: bool = True, tied: bool = False
) -> Any:
    """Write a folder of a small random model with an image encoder, and return the model.

    Args:
        original: True for the tensor names of published folders, False for those of transformers 5.
    """
    own, tower, outer = _KINDS[kind]
    is_mistral = kind in ("mistral3", "ministral3")
    vision, kind = ({"model_type": "pixtral"}, "mistral3") if is_mistral else ({}, kind)
    sizes = {"vocab_size": tokenizer.vocab_size + 8, **own, "tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(
        kind, text_config=sizes, vision_config={**vision, **tower}, tie_word_embeddings=tied,
        **outer,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, experts_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, save_original_format=original)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.25]}', "utf-8")
    return model


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=some_ids(0)).logits  # type: ignore[no-any-return]


def opened(folder: Path) -> Any:
    """Open a folder in transformers, and check that no tensor is missing or unknown."""
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], problem
    return model.eval()


def tower_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors that do not belong to the text model."""
    found = safetensors.torch.load_file(folder / WEIGHTS_NAME)
    names = [n for n in found if "language_model." not in n and not n.startswith("lm_head")]
    assert names
    return {n: found[n].contiguous().view(torch.uint8).numpy().tobytes() for n in names}


@pytest.fixture
def run(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the tiny run, without a model, whose weights change a lot."""
    del recipe["model"]
    recipe |= {"schedule": {"max_steps": 3, "warmup_steps": 0}, "checkpoint": {"every_steps": 2}}
    recipe |= {"optimizer": {"learning_rate": 0.01}, "efficiency": {"precision": "fp32"}}
    return recipe


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("kind", _KINDS)
def test_text_model_is_read_and_trained_and_the_rest_is_written_back(
    kind: str, original: bool, tmp_path: Path, tokenizer: Tokenizer, run: dict[str, Any]
) -> None:
    folder = tmp_path / "source"
    theirs = composite(kind, folder, tokenizer, original=original)
    names = set(safetensors.torch.load_file(folder / WEIGHTS_NAME))
    assert any(n.startswith("model.language_model.") for n in names) is (
        not original or kind.startswith("qwen")
    )
    own = load_model(folder).model
    torch.testing.assert_close(own(some_ids(0)), logits_of(theirs), atol=1e-5, rtol=0)

    checkpoint = train(run, init_from=folder).checkpoint
    assert tower_of(checkpoint) == tower_of(folder)
    assert (checkpoint / "preprocessor_config.json").read_bytes() == (
        folder / "preprocessor_config.json"
    ).read_bytes()
    trained = load_model(checkpoint).model
    assert (trained(some_ids(0)) - own(some_ids(0))).abs().max() > 0.1
    expected = logits_of(opened(checkpoint))
    torch.testing.assert_close(trained(some_ids(0)), expected, atol=1e-5, rtol=0)
    before, now = (json.loads((one / "config.json").read_text()) for one in (folder, checkpoint))
    for content in (before, now):
        for part in (content, content["text_config"]):
            part.pop("dtype", None), part.pop("torch_dtype", None)
    assert now == before

    # The converted folder holds the tower as well, and an interrupted run resumes bit for bit.
    convert(checkpoint, tmp_path / "converted", to="hf")
    assert tower_of(tmp_path / "converted") == tower_of(folder)
    torch.testing.assert_close(logits_of(opened(tmp_path / "converted")), expected, atol=0, rtol=0)
    weights = (checkpoint / WEIGHTS_NAME).read_bytes()
    assert set(safetensors.torch.load_file(checkpoint / WEIGHTS_NAME)) == names or "moe" in kind
    for file in checkpoint.iterdir():
        file.unlink()
    checkpoint.rmdir()
    assert train(run, resume=True).checkpoint == checkpoint
    assert (checkpoint / WEIGHTS_NAME).read_bytes() == weights


@pytest.mark.parametrize(
    ("kind", "quantize"), [("gemma3", "none"), ("gemma3", "nf4"), ("qwen3_5_moe", "none")]
)
def test_adapter_is_merged_into_folder_with_tower(
    kind: str, quantize: str, tmp_path: Path, tokenizer: Tokenizer, run: dict[str, Any]
) -> None:
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    folder = tmp_path / "source"
    composite(kind, folder, tokenizer)
    run["lora"] = {"rank": 2, "quantize": quantize}
    checkpoint = train(run, init_from=folder).checkpoint
    assert not (checkpoint / "config.json").exists()
    convert(checkpoint, tmp_path / "merged", to="hf")
    assert tower_of(tmp_path / "merged") == tower_of(folder)
    expected = load_model(checkpoint).model(some_ids(0))
    torch.testing.assert_close(logits_of(opened(tmp_path / "merged")), expected, atol=1e-5, rtol=0)


def test_averaged_weights_are_written_with_tower(
    tmp_path: Path, tokenizer: Tokenizer, run: dict[str, Any]
) -> None:
    folder = tmp_path / "source"
    composite("gemma3", folder, tokenizer)
    run["checkpoint"] = {"every_steps": 1, "average_last": 2}
    averaged = train(run, init_from=folder).run_folder / "averaged"
    assert tower_of(averaged) == tower_of(folder)
    expected = load_model(averaged).model(some_ids(0))
    torch.testing.assert_close(logits_of(opened(averaged)), expected, atol=1e-5, rtol=0)


def test_gguf_of_folder_with_tower_contains_text_model(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    pytest.importorskip("gguf")
    composite("gemma3", tmp_path / "source", tokenizer, tied=True)
    found = convert(tmp_path / "source", tmp_path / "out", to="gguf")
    assert (found.model_type, found.largest_difference < 1e-3) == ("gemma3_text", True)


def test_info_names_parts_that_are_carried(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "source"
    theirs = composite("gemma3", folder, tokenizer)
    assert main(["info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model_type"] == "gemma3_text"
    size = sum(
        one.nbytes
        for name, one in theirs.named_parameters()
        if "language_model" not in name and not name.startswith("lm_head")
    )
    assert found["carried"] == {"parts": ["multi_modal_projector", "vision_tower"], "bytes": size}
    assert main(["info", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not used multi_modal_projector, vision_tower" in said


def test_folder_without_tower_carries_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    composite("gemma3", tmp_path / "source", tokenizer)
    convert(tmp_path / "source", tmp_path / "again", to="hf")
    assert is_composite(tmp_path / "again")
    text = {**json.loads((tmp_path / "again" / "config.json").read_text())["text_config"]}
    text |= {"model_type": "gemma3_text"}
    (tmp_path / "again" / "config.json").write_text(json.dumps(text))
    assert read_carried(tmp_path / "again", read_config(tmp_path / "again")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_kind": 1}, "router_kind is not understood, and could change the outputs"),
        ({"text_config": {"hidden_size": 32, "gate": "x"}}, "text_config: gate is not understood"),
        ({"text_config": {"model_type": "llama"}}, "model_type 'llama' is not supported in a gemm"),
        (
            {"text_config": {"attn_logit_softcapping": 3.0}},
            "attn_logit_softcapping 3.0 is not supported: only None is",
        ),
        ({"text_config": 3}, "model_type 'None' is not supported in a gemma3 model"),
    ],
)
def test_composite_config_with_unknown_key_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf({"model_type": "gemma3", **changes}, "config.json")


def test_sharded_checkpoints_with_tower_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, run: dict[str, Any]
) -> None:
    composite("gemma3", tmp_path / "source", tokenizer)
    run["checkpoint"] = {"sharded": True}
    with pytest.raises(
        ConfigError, match=r"checkpoint\.sharded does not support models with multi"
    ):
        train(run, init_from=tmp_path / "source")
