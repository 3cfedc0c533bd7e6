"""Runs that train adapters: what they write, how they go on, what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from builders import say, with_template, write_lines
from firstlight.checkpoint.manifest import MANIFEST_NAME
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.conversion.convert import convert
from firstlight.data.chat import prepare_chat
from firstlight.errors import CheckpointError, ConfigError
from firstlight.generation.engine import generate
from firstlight.lora.files import ADAPTER_WEIGHTS_NAME, is_adapter
from firstlight.lora.loading import load_model
from firstlight.recipe import parse_recipe
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.weights.stored import WEIGHTS_NAME


@pytest.fixture
def base(recipe: dict[str, Any], tmp_path: Path) -> Path:
    """A run of all weights to start from."""
    train(parse_recipe({**recipe, "run": {**recipe["run"], "dir": str(tmp_path / "base")}}))
    return tmp_path / "base"


def lora_recipe(recipe: dict[str, Any], **lora: Any) -> dict[str, Any]:
    recipe = {key: values for key, values in recipe.items() if key != "model"}
    recipe["evaluation"] = {"every_steps": 0, "max_rows": 4, "sample_prompts": []}
    return {**recipe, "lora": {"rank": 4, "dropout": 0.1, **lora}}


def losses(run: str) -> list[float]:
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [entry["val/loss"] for line in lines if "val/loss" in (entry := json.loads(line))]


WIDE = {"modules_to_save": ["norm", "embed_tokens"], "targets": ["q_proj", "lm_head"]}
ROWS = {"trainable_token_indices": [5, 3], "targets": ["v_proj"]}


@pytest.mark.parametrize(
    "lora, precision",
    [
        ({}, "bf16"),
        ({"dora": True}, "bf16_params"),
        (WIDE, "bf16_params"),
        (ROWS, "bf16"),
        ({"targets": ["embed_tokens", "up_proj"]}, "fp32"),
    ],
)
def test_lora_run_resumed_equals_uninterrupted_run(
    lora: dict[str, Any], precision: str, recipe: dict[str, Any], base: Path
) -> None:
    settings = lora_recipe(recipe, **lora)
    settings["efficiency"] = {"precision": precision}
    settings["optimizer"] = {"learning_rate": 0.02}
    whole = train(parse_recipe(settings), init_from=base).checkpoint
    assert whole is not None
    expected = (whole / ADAPTER_WEIGHTS_NAME).read_bytes()
    shutil.rmtree(whole)
    assert train(parse_recipe(settings), resume=True).checkpoint == whole
    assert (whole / ADAPTER_WEIGHTS_NAME).read_bytes() == expected


def test_lora_checkpoint_loads_as_model(recipe: dict[str, Any], base: Path, tmp_path: Path) -> None:
    settings = lora_recipe(recipe, dropout=0.0)
    settings["optimizer"] = {"learning_rate": 0.02}
    settings["schedule"] = {**recipe["schedule"], "max_steps": 24}
    result = train(parse_recipe(settings), init_from=base)
    folder = result.checkpoint
    assert folder is not None
    assert is_adapter(folder)
    # With either of them, transformers would take it for a whole model.
    assert not (folder / WEIGHTS_NAME).exists()
    assert not (folder / "config.json").exists()
    content = json.loads((folder / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == str(resolve_model_folder(base))
    tensors = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS_NAME)
    assert all(tensor.dtype == torch.float32 and tensor.any() for tensor in tensors.values())
    assert losses(recipe["run"]["dir"])[-1] < losses(str(base))[-1] - 0.002
    assert generate(tmp_path / "run", "the", max_new_tokens=3, seed=0).text is not None
    merged, plain = (
        load_model(folder).model.state_dict(),
        load_model(resolve_model_folder(base)).model.state_dict(),
    )
    changed = {name for name in plain if not torch.equal(plain[name], merged[name])}
    assert changed == {n for n in plain if "_proj" in n}
    again = {**settings, "run": {**recipe["run"], "dir": str(tmp_path / "again")}}
    train(parse_recipe({**again, "lora": None}), init_from=folder)


def test_lora_run_keeps_generation_config_through_resume_and_export(
    recipe: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    convert(base, start)
    path = start / "generation_config.json"
    own = {"do_sample": True, "temperature": 0.6, "eos_token_id": [7, 9], "bos_token_id": 3}
    path.write_text(json.dumps(own))
    expected = {"do_sample": True, "temperature": 0.6, "eos_token_id": [0, 7, 9], "bos_token_id": 3}
    settings = lora_recipe(recipe)
    settings["schedule"] = {**recipe["schedule"], "max_steps": 2}
    train(parse_recipe(settings), init_from=start)
    path.unlink()
    settings["schedule"]["max_steps"] = 3
    folder = train(parse_recipe(settings), resume=True).checkpoint
    assert folder is not None
    convert(folder, tmp_path / "exported")
    for place in (folder, tmp_path / "exported"):
        assert json.loads((place / "generation_config.json").read_text()) == expected
    assert load_model(tmp_path / "exported").eos_token_ids == (0, 7, 9)
    plain = {k: v for k, v in recipe.items() if k != "model"}
    plain["run"] = {**recipe["run"], "dir": str(tmp_path / "all")}
    folder = train(parse_recipe(plain), init_from=tmp_path / "exported").checkpoint
    assert folder is not None
    assert load_model(folder).generation == expected


def test_lora_run_requires_unchanged_base(
    recipe: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="pass the model with --init-from"):
        train(parse_recipe({**lora_recipe(recipe), "model": recipe["model"]}))
    train(parse_recipe(lora_recipe(recipe)), init_from=base)
    with pytest.raises(CheckpointError, match="belongs to a run with lora: restore"):
        train(parse_recipe(recipe), resume=True)
    run = {**recipe["run"], "dir": str(base)}
    with pytest.raises(CheckpointError, match="belongs to a run without lora: remove"):
        train(parse_recipe({**lora_recipe(recipe), "run": run}), resume=True)
    weights = resolve_model_folder(base) / WEIGHTS_NAME
    # Without it, a model folder like any other, and not a checkpoint that is damaged.
    (weights.parent / MANIFEST_NAME).unlink()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its base .* has changed"):
        train(parse_recipe(lora_recipe(recipe)), resume=True)


@pytest.mark.parametrize("lora", [{"targets": ["q_proj"], "use_rslora": True}, WIDE, ROWS])
def test_lora_adapter_trained_further_keeps_base_and_settings(
    lora: dict[str, Any],
    recipe: dict[str, Any],
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = lora_recipe(recipe, rank=3, alpha=5.0, **lora)
    settings["optimizer"] = {"learning_rate": 0.01}
    one = train(parse_recipe(settings), init_from=base).checkpoint
    assert one is not None
    expected = load_model(one).model.state_dict()
    run = {**recipe["run"], "dir": str(tmp_path / "again")}
    further = {**settings, "lora": {"rank": 8, "dropout": 0.25}, "run": run}
    still = {**further, "schedule": {"max_steps": 0}}
    same = train(parse_recipe(still), init_from=one).checkpoint
    assert same is not None
    assert all(torch.equal(p, expected[n]) for n, p in load_model(same).model.state_dict().items())
    shutil.rmtree(tmp_path / "again")
    two = train(parse_recipe(further), init_from=one).checkpoint
    assert two is not None
    files = [json.loads((folder / "adapter_config.json").read_text()) for folder in (one, two)]
    assert files[1] == {**files[0], "lora_dropout": 0.25}
    assert files[0]["r"] == 3
    tensors = [safetensors.torch.load_file(f / ADAPTER_WEIGHTS_NAME) for f in (one, two)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(not torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    # Resumed with the adapter's settings, not with those of the recipe.
    shutil.rmtree(two)
    train(parse_recipe(further), resume=True)
    again = safetensors.torch.load_file(two / ADAPTER_WEIGHTS_NAME)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors[1].items())
    shutil.rmtree(two)
    further["lora"] = {"rank": 9, "dropout": 0.5}
    capsys.readouterr()
    train(parse_recipe(further), resume=True, progress=True)
    assert "warning: ignored: lora.rank\n" in "".join(capsys.readouterr())
    assert json.loads((two / "adapter_config.json").read_text())["lora_dropout"] == 0.5


@pytest.mark.filterwarnings("ignore")  # PEFT's
@pytest.mark.parametrize(
    "lora, tied",
    [({}, False), ({}, True), ({"modules_to_save": ["embed_tokens", "lm_head"]}, True)],
)
def test_lora_run_trains_rows_of_tokens_missing_in_base(
    lora: dict[str, Any],
    tied: bool,
    recipe: dict[str, Any],
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    start = {**recipe, "run": {**recipe["run"], "dir": str(tmp_path / "base")}}
    start["model"] = {**recipe["model"], "tie_word_embeddings": tied}
    base = train(parse_recipe(start)).checkpoint
    assert base is not None
    count = tokenizer.vocab_size
    extended = with_template(tokenizer, "chatml")
    new = range(count, extended.vocab_size)
    assert len(new) == 2
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": say("the", "a river")}] * 40)
    prepare_chat([chats], extended, tmp_path / "more")
    settings = lora_recipe(recipe, **lora)
    settings["data"] = {**settings["data"], "dir": str(tmp_path / "more")}
    settings["optimizer"] = {"learning_rate": 0.01}
    folder = train(parse_recipe(settings), init_from=base).checkpoint
    assert folder is not None
    model = load_model(folder).model
    assert model.config.vocab_size == extended.vocab_size
    assert model.config.tie_word_embeddings == (tied and not lora)
    old = load_model(base).model
    for now, before in ((model.embedding, old.embedding), (model.lm_head, old.lm_head)):
        moved = now.weight[new] - before.weight.mean(0)
        assert moved.abs().amax(1).gt(0.005).all()
        assert torch.equal(now.weight[:count], before.weight) == (not lora)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[5, count, 9, count + 1]])
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    expected = (folder / ADAPTER_WEIGHTS_NAME).read_bytes()
    shutil.rmtree(folder)
    train(parse_recipe(settings), resume=True)
    assert (folder / ADAPTER_WEIGHTS_NAME).read_bytes() == expected
    convert(folder, tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    assert torch.equal(merged.model(ids), load_model(folder).model(ids))


def test_lora_run_in_4_bits_learns_and_resumes(recipe: dict[str, Any], base: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = lora_recipe(recipe, quantize="nf4", dropout=0.0)
    settings["schedule"] = {**recipe["schedule"], "max_steps": 24}
    settings["optimizer"] = {"learning_rate": 0.006}
    train(parse_recipe(settings), init_from=base)
    assert losses(recipe["run"]["dir"])[-1] < losses(str(base))[-1] - 0.02
    settings["schedule"]["max_steps"] = 26
    train(parse_recipe(settings), resume=True)
