from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from firstlight.errors import ConfigError
from firstlight.models import FAMILIES
from firstlight.recipe import (
    BatchConfig,
    Recipe,
    hint_for_other_name,
    known_keys,
    load_recipe,
    parse_recipe,
    recipe_fields,
)
from firstlight.recipe.load import _override, other_names

_RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
_SECTIONS = {section: kind for section, kind, _ in recipe_fields() if section != "model"}


def refusal(values: dict[str, Any]) -> str:
    """Return the error message for a recipe."""
    with pytest.raises(ConfigError) as caught:
        parse_recipe({"data": {"dir": "d"}, **values})
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused_text(folder: Path, text: str, overrides: Sequence[tuple[str, str]] = ()) -> str:
    """Return the error message for a recipe file, which is always one line."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(folder, text), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- precedence ------------------------------------------------------------------------------


def test_load_recipe_overrides_take_precedence_over_file_and_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "data: {dir: corpus}\noptimizer: {learning_rate: 0.5, weight_decay: 0.25}\n",
    )
    recipe = load_recipe(path, [("optimizer.learning_rate", "3e-4"), ("run.seed", "5")])
    assert recipe.optimizer.learning_rate == 3e-4  # an override wins over the file
    assert recipe.optimizer.weight_decay == 0.25  # the file wins over the default
    assert recipe.optimizer.eps == 1e-8  # default
    assert recipe.run.seed == 5  # an override in a section that the file does not have
    assert recipe.data.dir == "corpus"


def test_load_recipe_overrides_accept_python_values(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {dir: corpus}\n")
    values = {
        "data.dir": tmp_path / "other",
        "run.dir": "2026",
        "optimizer.learning_rate": 3e-4,
        "optimizer.betas": (0.9, 0.99),
        "optimizer.weight_decay": "1e-2",
        "efficiency.compile": False,
        "schedule.max_steps": None,
    }
    for overrides in (values, list(values.items())):
        recipe = load_recipe(path, overrides)
        assert (recipe.data.dir, recipe.run.dir) == (str(tmp_path / "other"), "2026")
        assert recipe.optimizer.learning_rate == 3e-4
        assert recipe.optimizer.betas == [0.9, 0.99]
        assert recipe.optimizer.weight_decay == 0.01
        assert recipe.efficiency.compile is False
        assert recipe.schedule.max_steps is None


def test_load_recipe_last_of_repeated_overrides_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {dir: d}\n")
    overrides = [("schedule.max_steps", "5"), ("schedule.max_steps", "7")]
    assert load_recipe(path, overrides).schedule.max_steps == 7


def test_load_recipe_override_of_unsupported_type_raises_and_names_key(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {dir: d}")
    with pytest.raises(ConfigError, match=r"override run.seed is \{1\}, which a recipe can't"):
        load_recipe(path, {"run.seed": {1}})


def test_load_recipe_override_reaches_nested_and_empty_sections(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {dir: d}\nmodel:\n")
    recipe = load_recipe(
        path,
        [("model.rope_scaling.rope_type", "linear"), ("model.rope_scaling.factor", "2.0")],
    )
    assert recipe.model is not None
    assert recipe.model.model_dump()["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_load_recipe_override_can_reset_value(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {dir: d, seq_len: 8}\nrun: {dir: r}\n")
    recipe = load_recipe(path, [("data.seq_len", "null"), ("run.dir", "null")])
    assert recipe.data.seq_len is None
    assert recipe.run.dir == str(Path("runs") / "my")


def test_load_recipe_default_run_folder_is_named_after_file(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "data: {dir: d}\n")).run.dir == str(Path("runs") / "my")


@pytest.mark.parametrize("name", ["data.dir", "run.dir", "run.device"])
def test_load_recipe_text_keys_keep_numbers_and_booleans_as_text(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "data: {dir: d}\n")
    section, key = name.split(".")
    for text in ("2024", "1e5", "true", "[x", "a: b", "  "):
        assert getattr(getattr(load_recipe(path, [(name, text)]), section), key) == text


def test_load_recipe_override_lists_and_booleans_are_yaml(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, "data: {dir: d}\n"),
        [
            ("optimizer.betas", "[0.5, 0.75]"),
            ("evaluation.sample_prompts", '["a, b", ""]'),
            ("efficiency.compile", "true"),
        ],
    )
    assert recipe.optimizer.betas == [0.5, 0.75]
    assert recipe.evaluation.sample_prompts == ["a, b", ""]
    assert recipe.efficiency.compile is True


def test_parse_recipe_and_load_recipe_give_equal_recipes(tmp_path: Path) -> None:
    values = {"data": {"dir": "d"}, "run": {"dir": "r"}, "model": {"model_type": "gpt2"}}
    text = "data: {dir: d}\nrun: {dir: r}\nmodel: {model_type: gpt2}\n"
    assert parse_recipe(values) == load_recipe(write(tmp_path, text))


def test_parse_recipe_accepts_resolved_recipe() -> None:
    recipe = parse_recipe(
        {
            "data": {"dir": "d"},
            "model": {
                "model_type": "llama",
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        }
    )
    assert parse_recipe(recipe.model_dump()) == recipe


# --- numbers ---------------------------------------------------------------------------------


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_parse_yaml_reads_every_float_notation(number: float) -> None:
    for text in (repr(number), f"{number:.17e}", f"{number:.17E}"):
        values: dict[str, Any] = {"optimizer": {}}
        _override(values, "optimizer.learning_rate", text)
        assert values == {"optimizer": {"learning_rate": number}}


@pytest.mark.parametrize(
    "text, number", [("3e-4", 3e-4), ("3E-4", 3e-4), ("6.e-4", 6e-4), (".5e-3", 5e-4), ("1", 1.0)]
)
def test_load_recipe_float_without_decimal_point_is_number(
    tmp_path: Path, text: str, number: float
) -> None:
    recipe = load_recipe(write(tmp_path, f"data: {{dir: d}}\noptimizer: {{learning_rate: {text}}}"))
    assert recipe.optimizer.learning_rate == number
    overridden = load_recipe(write(tmp_path, "data: {dir: d}"), [("optimizer.learning_rate", text)])
    assert overridden.optimizer.learning_rate == number


@pytest.mark.parametrize("text", ["1e-", "e-4", "3e-4x", "v3e-4", "'3e-4'"])
def test_recipe_number_lookalike_raises_config_error(tmp_path: Path, text: str) -> None:
    message = refused_text(tmp_path, f"data: {{dir: d}}\noptimizer: {{learning_rate: {text}}}")
    assert "optimizer.learning_rate: input should be a valid number (given: " in message


def test_recipe_fractional_step_count_raises_config_error(tmp_path: Path) -> None:
    message = refused_text(tmp_path, "data: {dir: d}\nschedule: {max_steps: 3e2}\n")
    assert "schedule.max_steps: input should be a valid integer (given: 300.0)" in message


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_recipe_infinite_or_nan_settings_raise_config_error(value: float) -> None:
    # An infinite metric can't be saved in a checkpoint: the run would end at its first one.
    numbers = [
        f"{section}.{key}"
        for section, kind, key in recipe_fields()
        if "float" in str(kind.model_fields[key].annotation)
        and kind.model_fields[key].annotation is not list[float]
        and not str(kind.model_fields[key].annotation).startswith("dict")
    ]
    assert {"optimizer.max_grad_norm", "evaluation.temperature", "model.rope_theta"} <= set(numbers)
    for name in numbers:
        section, key = name.split(".")
        families = tuple(FAMILIES) if section == "model" else ("",)
        said = [
            refusal({section: {"model_type": f, key: value} if f else {key: value}})
            for f in families
        ]
        assert any(f"{name}: input should be" in message for message in said)


# --- errors and their messages ---------------------------------------------------------------


@pytest.mark.parametrize(
    "values, said",
    [
        (
            {"optimizer": {"learning_rat": 1.0}},
            "optimizer.learning_rat (did you mean 'learning_rate'?)",
        ),
        ({"optimizer": {"lr": 1.0}}, "optimizer.lr (did you mean 'learning_rate'?)"),
        ({"model": {"n_embd": 8}}, "model.n_embd (did you mean 'hidden_size'?)"),
        (
            {"model": {"block_size": 8}},
            "model.block_size (did you mean 'max_position_embeddings'?)",
        ),
        ({"batch": {"batch_size": 8}}, "batch.batch_size (did you mean 'micro_batch_size'?)"),
        ({"checkpoint": {"every": 8}}, "checkpoint.every (did you mean 'every_steps'?)"),
        ({"optimiser": {}}, "optimiser (did you mean 'optimizer'?)"),
        (
            {"data": {"dir": "d", "max_steps": 1}},
            "data.max_steps (did you mean 'schedule.max_steps'?)",
        ),
        ({"max_steps": 1}, "max_steps (did you mean 'schedule.max_steps'?)"),
        (
            {"run": {"zzz": 1}},
            "run.zzz (known: check_device, deterministic, device, dir, max_minutes, seed, "
            "tracker_checkpoints, trackers)",
        ),
        (
            {"model": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "factr": 2.0}}},
            "model.rope_scaling.factr (did you mean 'factor'?)",
        ),
        (
            {"model": {"model_type": "gpt2", "gpt2": 1}},
            "model.gpt2 (known: activation_function, attn_pdrop,",
        ),
    ],
)
def test_recipe_unknown_key_is_named_with_nearest(values: dict[str, Any], said: str) -> None:
    assert f"unknown key {said}" in refusal(values)


@pytest.mark.parametrize(
    ("key", "value", "families"),
    [
        ("scale_attn_weights", False, "gpt2"),
        ("swiglu_limit", 3.0, "gpt_oss"),
        (
            "num_experts",
            4,
            "deepseek_v2, deepseek_v3, gpt_oss, mixtral, qwen3_5_moe_text, qwen3_moe, qwen3_next",
        ),
        ("final_logit_softcapping", 3.0, "gemma2, gemma3_text, nanochat"),
        ("use_parallel_residual", True, "gpt_neox, stablelm"),
    ],
)
def test_recipe_key_of_other_families_is_named_with_them(
    key: str, value: Any, families: str
) -> None:
    said = refusal({"model": {"model_type": "granite", key: value}, "data": {"dir": "d"}})
    assert said.endswith(f"model: {key} is not a key of granite models (it is a key of {families})")


def test_recipe_key_missing_in_few_families_names_those() -> None:
    said = refusal({"model": {"model_type": "gpt2", "rope_theta": 3.0}, "data": {"dir": "d"}})
    assert said.endswith(
        "model: rope_theta is not a key of gpt2 models (it is a key of all but gpt2)"
    )


@given(st.sampled_from(known_keys()), st.data())
def test_recipe_every_key_with_a_typo_suggests_original(name: str, data: st.DataObject) -> None:
    section, key = name.split(".")
    place = data.draw(st.integers(0, len(key)))
    typo = key[:place] + "q" + key[place:]
    family = next(
        kind.model_fields["model_type"].default if section == "model" else None
        for s, kind, k in recipe_fields()
        if (s, k) == (section, key)
    )
    values: dict[str, Any] = {section: {"dir": "d"} if section == "data" else {}}
    if family:
        values[section]["model_type"] = family
    values[section][typo] = 1
    assert f"unknown key {section}.{typo} (did you mean '{key}'?)" in refusal(values)


def test_recipe_reports_all_mistakes_at_once() -> None:
    message = refusal(
        {
            "data": {"seq_len": "long"},
            "optimizer": {"name": "tiger", "betas": [0.9], "lr": 1.0},
            "schedule": {"max_steps": -1},
            "model": {"model_type": "llama", "hidden_size": -1},
            "extra": {},
        }
    )
    for part in (
        "data.dir is missing",
        "data.seq_len: input should be a valid integer (given: 'long')",
        "optimizer.name: input should be 'adamw', 'adamw8bit', 'paged_adamw8bit', 'adafactor', "
        "'muon', 'sgd' or 'lion' (given: 'tiger')",
        "optimizer.betas: ",
        "unknown key optimizer.lr",
        "schedule.max_steps: input should be greater than or equal to 0 (given: -1)",
        "model.hidden_size: input should be greater than 0 (given: -1)",
        "unknown key extra",
    ):
        assert part in message
    assert message.count(";") == 7


@pytest.mark.parametrize(
    "values, said",
    [
        ({"run": {"seed": 1.0}}, "run.seed: input should be a valid integer (given: 1.0)"),
        ({"run": {"seed": True}}, "run.seed: input should be a valid integer (given: True)"),
        ({"run": {"seed": "1"}}, "run.seed: input should be a valid integer (given: '1')"),
        ({"run": {"seed": 2**63}}, f"run.seed: input should be less than {2**63}"),
        ({"data": {"dir": 7}}, "data.dir: input should be a valid string (given: 7)"),
        ({"data": {"dir": "d", "verify": 1}}, "data.verify: input should be a valid boolean"),
        ({"data": None}, "data must be a section with keys, not None"),
        ({"evaluation": []}, "evaluation must be a section with keys, not []"),
        ({"model": 3}, "model must be a section with keys, not 3"),
        ({"model": {"model_type": "gpt3"}}, "'gpt3' is unknown (did you mean 'gpt2'?)"),
        (
            {"model": {"model_type": 3}},
            f"model.model_type '3' is unknown (known: {', '.join(FAMILIES)})",
        ),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas [0.9, 1.0] must each be at least 0"),
        ({"evaluation": {"sample_prompts": "a"}}, "evaluation.sample_prompts: input should be"),
        ({"evaluation": {"sample_prompts": [1]}}, "evaluation.sample_prompts.0: input should"),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last: input should be greater than or"),
        (
            {"model": {"model_type": "gpt2", "hidden_size": 10, "num_attention_heads": 3}},
            "model: hidden_size 10 must be a multiple of num_attention_heads 3",
        ),
        (
            {"model": {"model_type": "qwen3", "hidden_size": 50, "num_attention_heads": 3}},
            "must be a multiple of num_attention_heads 3 (or set head_dim)",
        ),
        (
            {"model": {"hidden_size": 50, "num_attention_heads": 3, "head_dim": 16}},
            "num_attention_heads 3 (or set model_type mistral with head_dim)",
        ),
    ],
)
def test_recipe_wrong_values_are_named_with_given_value(values: dict[str, Any], said: str) -> None:
    assert said in refusal(values)


def test_load_recipe_missing_file_suggests_nearest(tmp_path: Path) -> None:
    write(tmp_path, "data: {dir: shards}\n")
    (tmp_path / "my.yal.yaml").write_text("site_name: no recipe\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"my\.yml does not exist \(did you mean '.*/my\.yaml'\?\)"
    ):
        load_recipe(tmp_path / "my.yml")
    with pytest.raises(ConfigError, match=r"recipe .* can't be read"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    "text, said",
    [
        ("data: {dir: a}\ndata: {dir: b}\n", "key 'data' is given twice, in lines 1 and 2"),
        ("data:\n  dir: a\n  dir: b\n", "key 'dir' is given twice, in lines 2 and 3"),
        ("a: b: c", "is not valid YAML"),
        ("\tdata:", "is not valid YAML"),
        ("data: {dir: d, seq_len: 2001-99-99}", "is not valid YAML"),
        ("data: [" * 3000, "is not valid YAML"),
        ("[1, 2]", "must consist of sections"),
        ("just words", "must consist of sections"),
        ("", "data is missing"),
        ("1: {}\ndata: {dir: d}\n", "keys should be strings"),
        ("? [a]\n: b\n", "is not valid YAML"),
        ("x: !!python/object/apply:os.system ['exit 1']\n", "is not valid YAML"),
        ("x: !!python/name:os.system\n", "is not valid YAML"),
        ("x: !anything y\n", "is not valid YAML"),
    ],
)
def test_load_recipe_invalid_files_raise_config_error(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused_text(tmp_path, text)


def test_load_recipe_yaml_tag_executes_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    call = f"!!python/object/apply:os.mkdir ['{canary}']"
    refused_text(tmp_path, f"data: {{dir: d}}\nrun: {call}\n")
    refused_text(tmp_path, "data: {dir: d}\n", [("run.seed", call)])
    assert not canary.exists()


def test_load_recipe_invalid_utf8_raises_config_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("data: {dir: è}".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_recipe(path)


def test_load_recipe_yaml_anchors_share_keys_between_sections(tmp_path: Path) -> None:
    text = (
        "data: {dir: d}\nevaluation: &often {every_steps: 5}\n"
        "checkpoint:\n  <<: *often\n  keep_last: 9\n"
    )
    recipe = load_recipe(write(tmp_path, text))
    assert (recipe.checkpoint.every_steps, recipe.checkpoint.keep_last) == (5, 9)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("seed", "1", "option --seed is unknown (did you mean "),
        ("data.dir.inner", "1", "option --data.dir.inner: dir is not a section"),
        ("run.seed", "{", "option --run.seed: '{' is not a valid value"),
        ("run.seed", "2001-99-99", "option --run.seed: '2001-99-99' is not a valid value"),
        ("run.seeds", "1", "unknown key run.seeds (did you mean 'seed'?)"),
        ("rum.seed", "1", "unknown key rum (did you mean 'run'?)"),
    ],
)
def test_load_recipe_invalid_overrides_raise_config_error(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    assert said in refused_text(tmp_path, "data: {dir: d}\n", [(name, text)])


# --- batch arithmetic ------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 64))
def test_batch_accumulation_gives_exactly_the_global_batch(
    micro: int, seq_len: int, steps: int
) -> None:
    tokens = micro * seq_len * steps
    batch = BatchConfig(micro_batch_size=micro, global_batch_tokens=tokens)
    assert batch.accumulation(seq_len) == steps
    both = BatchConfig(
        micro_batch_size=micro, global_batch_tokens=tokens, gradient_accumulation_steps=steps
    )
    assert both.accumulation(seq_len) == steps


def test_batch_accumulation_defaults_to_one() -> None:
    assert BatchConfig().accumulation(128) == 1
    assert BatchConfig(gradient_accumulation_steps=3).accumulation(128) == 3


@pytest.mark.parametrize(
    "tokens, said",
    [
        (1000, "is not a multiple of micro_batch_size x seq_len = 256: use 768 or 1024"),
        (100, "is not a multiple of micro_batch_size x seq_len = 256: use 256"),
    ],
)
def test_batch_indivisible_global_batch_raises_with_nearest_values(tokens: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchConfig(micro_batch_size=8, global_batch_tokens=tokens).accumulation(32)
    assert str(caught.value).endswith(said)


def test_batch_global_batch_contradicting_accumulation_raises_config_error() -> None:
    batch = BatchConfig(micro_batch_size=8, global_batch_tokens=512, gradient_accumulation_steps=3)
    with pytest.raises(ConfigError, match="which implies 2"):
        batch.accumulation(32)


# --- recipes and documentation ---------------------------------------------------------------


def test_project_recipes_are_not_empty() -> None:
    assert _RECIPES


@pytest.mark.parametrize("path", _RECIPES, ids=lambda path: str(path.stem))
def test_project_recipes_all_parse(path: Path) -> None:
    recipe = load_recipe(path)
    if recipe.model is None:  # as with --init-from
        assert recipe.data.seq_len is not None
        assert recipe.batch.accumulation(recipe.data.seq_len) >= 1
        return
    seq_len = recipe.data.seq_len or recipe.model.max_position_embeddings
    assert seq_len <= recipe.model.max_position_embeddings
    if recipe.batch.micro_batch_size is None:
        assert recipe.batch.global_rows(seq_len) >= 1
    else:
        assert recipe.batch.accumulation(seq_len) >= 1


@pytest.mark.parametrize("section", _SECTIONS)
def test_recipe_keys_of_every_section_are_documented(section: str) -> None:
    kind: type[BaseModel] = _SECTIONS[section]
    assert all(field.description for field in kind.model_fields.values())


@pytest.mark.parametrize(
    "values, hint",
    [
        (
            {"schedule": {"lr_decay_style": "linear"}},
            "schedule.lr_decay_style (did you mean 'kind'?)",
        ),
        (
            {"optimizer": {"lr_scheduler_type": "linear"}},
            "lr_scheduler_type (did you mean 'schedule.kind'?)",
        ),
        ({"fp16": True}, "unknown key fp16 (did you mean 'efficiency.precision: fp16'?)"),
        ({"efficiency": {"bf16": True}}, "efficiency.bf16 (did you mean 'precision: bf16'?)"),
        ({"tf32": True}, "(did you mean 'efficiency.precision: tf32'?)"),
        ({"optimizer": {"optim": "adamw_torch"}}, "optimizer.optim (did you mean 'name'?): adamw_"),
        ({"evaluation": {"eval_freq": 5}}, "evaluation.eval_freq (did you mean 'every_steps'?)"),
        (
            {"evaluation": {"eval_iter": 5}},
            "evaluation.eval_iter (did you mean 'max_rows'?): rows, which are batches times their",
        ),
        (
            {"optimizer": {"adam_beta1": 0.9}},
            "optimizer.adam_beta1 (did you mean 'betas'?): a list, such as [0.9, 0.95]",
        ),
        ({"model": {"model_type": "gpt2", "drop_rate": 0.1}}, "(did you mean 'resid_pdrop'?): the"),
        ({"model": {"emb_dim": 8}}, "model.emb_dim (did you mean 'hidden_size'?)"),
        ({"model": {"context_length": 8}}, "(did you mean 'max_position_embeddings'?): rows of"),
        ({"n_embd": 8}, "unknown key n_embd (did you mean 'model.hidden_size'?)"),
        ({"run": {"max_steps": 8}}, "run.max_steps (did you mean 'schedule.max_steps'?)"),
        (
            {"use_cache": False},
            "unknown key use_cache: training keeps no cache of keys and values",
        ),
        (
            {"training": {"eval_freq": 5, "seed": 1, "zz": 2}},
            "unknown key training.eval_freq (did you mean 'evaluation.every_steps'?); "
            "unknown key training.seed (did you mean 'run.seed'?); unknown key training.zz",
        ),
    ],
)
def test_recipe_key_of_other_program_gives_hint(values: dict[str, Any], hint: str) -> None:
    assert hint in refusal(values)


def test_override_key_of_other_program_gives_hint(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {dir: d}")
    for name, hint in (
        ("train.eval_freq", r"unknown key train.eval_freq \(did you mean 'evaluation.every_steps'"),
        ("fp16", r"option --fp16 is unknown \(did you mean '--efficiency.precision fp16'\?\)"),
    ):
        with pytest.raises(ConfigError, match=hint):
            load_recipe(path, {name: 5})


def test_other_names_table_refers_to_existing_keys() -> None:
    sections = "|".join(Recipe.model_fields)
    for name, text in other_names().items():
        named = re.findall(rf"\b(?:{sections})\.\w+", text.replace("metrics.jsonl", ""))
        assert set(named) <= set(known_keys()), name
        assert named or "firstlight " in text or hint_for_other_name(name).startswith(": ")


def test_other_names_table_values_are_valid() -> None:
    for name, text in other_names().items():
        match = re.fullmatch(r"(\w+)\.(\w+): ([^;]+)(?:;.*)?", text)
        if match and match[1] != "data":
            parse_recipe({"data": {"dir": "x"}}, overrides=[(f"{match[1]}.{match[2]}", match[3])])
        assert name not in {key.split(".")[1] for key in known_keys()} - {"dropout"}


#: Settings and training loops from nanoGPT's train.py and from LLMs-from-scratch's GPT_CONFIG_124M.
_NANOGPT = """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint
init_from wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size
block_size n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2
grad_clip
decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile"""
_BOOK = """vocab_size context_length emb_dim n_heads n_layers drop_rate qkv_bias learning_rate
num_epochs batch_size weight_decay eval_freq eval_iter start_context warmup_steps initial_lr min_lr
peak_lr n_epochs max_length stride print_sample_iter save_ckpt_freq train_ratio hidden_dim
n_kv_groups rope_base rope_freq dtype"""


def test_other_names_table_covers_nanogpt_and_book_settings() -> None:
    for name in (_NANOGPT + " " + _BOOK).split():
        assert hint_for_other_name(name), name


def test_other_names_table_covers_transformers_training_arguments() -> None:
    # Read from the source, because the import takes many seconds.
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    source = Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8")
    [arguments] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    ]
    names = [
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert len(names) > 80
    assert [name for name in names if not hint_for_other_name(name)] == []
