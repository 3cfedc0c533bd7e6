"""Tests of task scores: of a model, in the command, and during training."""

from __future__ import annotations

import copy
import json
import math
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from builders import draw_weights
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.cli.main import main
from firstlight.errors import (
    ConfigError,
    FirstlightError,
    InputError,
    MissingDependencyError,
    ModelError,
    TrainingError,
)
from firstlight.evaluation import tasks as hellaswag
from firstlight.evaluation.scores import TokenPair, encode_choices, likelihoods
from firstlight.evaluation.tasks import (
    Item,
    accuracies,
    answer_items,
    encode_items,
    evaluate_tasks,
    hub_hellaswag,
    item_of,
    read_hellaswag,
)
from firstlight.lora.loading import LoadedModel
from firstlight.models import (
    GPT2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    MoEConfig,
    empty_model,
)
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.training.loop import train
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import WEIGHTS_NAME

CONTEXT = 32
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
_CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(**_SIZES),
    "llama": LlamaConfig(**_SIZES, num_key_value_heads=2),
    "sliding window": LlamaConfig(**_SIZES, sliding_window=7, model_type="mistral"),
    "experts": MoEConfig(
        **_SIZES, model_type="mixtral", num_experts=4, num_experts_per_tok=2, intermediate_size=16
    ),
}


def random_model(config: ModelConfig) -> Model:
    model = empty_model(config).eval()
    draw_weights(model, 0, 0.4)
    return model


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(_CONFIGS["llama"])


@pytest.fixture
def loaded(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> LoadedModel:
    return LoadedModel(model, tokenizer, (), tmp_path)


@torch.no_grad()
def slow_logprob(model: Model, pair: TokenPair) -> tuple[float, bool]:
    """Score each token in a separate forward pass over as many preceding tokens as fit in the
    context.
    """
    total, greedy = 0.0, True
    ids = (*pair.context, *pair.continuation)[-(CONTEXT + 1) :]
    for place in range(len(ids) - len(pair.continuation), len(ids)):
        logits = model(torch.tensor([ids[:place]]))[0, -1].double()
        total += float(logits.log_softmax(-1)[ids[place]])
        greedy &= int(logits.argmax()) == ids[place]
    return total, greedy


def some_pairs() -> list[TokenPair]:
    """Return pairs whose contexts are shared, single, equally long, one token long, truncated, and
    as long as the model's context.
    """
    generator = random.Random(4)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(generator.choices(range(320), k=count))

    contexts = [ids(n) for n in (1, 1, 5, 5, 5, 12, 25, CONTEXT, CONTEXT + 1, 80)]
    pairs = [TokenPair(c, ids(n)) for c in contexts for n in generator.choices(range(1, 9), k=3)]
    pairs += [TokenPair(ids(9), ids(CONTEXT)), TokenPair(ids(1), ids(CONTEXT))]
    generator.shuffle(pairs)
    return pairs


# Log-likelihoods


@pytest.mark.parametrize("name", _CONFIGS)
def test_likelihoods_match_slow_loop(name: str) -> None:
    model, pairs = random_model(_CONFIGS[name]), some_pairs()
    found = likelihoods(model, pairs, batch_size=4)
    expected = [slow_logprob(model, pair) for pair in pairs]
    assert [f.logprob for f in found] == pytest.approx([p for p, _ in expected], abs=1e-4)


def test_likelihood_is_greedy_if_every_token_is_most_likely(model: Model) -> None:
    ids = [5, 6, 7]
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    best, other = TokenPair((5, 6, 7), tuple(ids[3:])), TokenPair((5, 6, 7), (*ids[3:6], 1))
    found = likelihoods(model, [best, other, TokenPair((5, 6, 7), tuple(ids[3:5]))], batch_size=8)
    assert [f.is_greedy for f in found] == [True, False, True]
    assert [slow_logprob(model, pair)[1] for pair in (best, other)] == [True, False]


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_likelihoods_do_not_depend_on_batch_size(model: Model, batch_size: int) -> None:
    pairs = some_pairs()
    expected = likelihoods(model, pairs, batch_size=8)
    found = likelihoods(model, pairs, batch_size=batch_size)
    assert [f.logprob for f in found] == pytest.approx([f.logprob for f in expected], abs=1e-4)
    assert [f.is_greedy for f in found] == [f.is_greedy for f in expected]


def test_likelihoods_progress_counts_each_text_once(model: Model) -> None:
    seen: list[tuple[int, int]] = []
    likelihoods(model, some_pairs(), batch_size=4, on_pairs=lambda *now: seen.append(now))
    assert [total for _, total in seen] == [32] * len(seen)
    assert sorted({done for done, _ in seen}) == [done for done, _ in seen]
    assert seen[-1] == (32, 32)
    assert len(seen) > 8


def test_likelihoods_without_pairs_returns_empty_list(model: Model) -> None:
    assert likelihoods(model, [], batch_size=4) == []


def test_likelihoods_model_with_nan_weights_raises_model_error(model: Model) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match="outputs are not finite"):
        likelihoods(broken, some_pairs(), batch_size=4)


# Encoding


def test_token_pair_continuation_is_tokens_after_context(tokenizer: Tokenizer) -> None:
    found = encode_choices(tokenizer, "the star", [" sings", " falls under"])
    context = tuple(tokenizer.encode("the star"))
    for pair, whole in zip(found, ["the star sings", "the star falls under"], strict=True):
        assert pair.context == context
        assert pair.context + pair.continuation == tuple(tokenizer.encode(whole))


def test_token_pair_trailing_whitespace_of_context_moves_to_continuation(
    tokenizer: Tokenizer,
) -> None:
    (found,) = encode_choices(tokenizer, "the star \n", ["sings"])
    assert found.context == tuple(tokenizer.encode("the star"))
    assert tokenizer.decode(found.continuation) == " \nsings"


def test_token_pair_shifted_token_boundary_is_counted_from_context(
    tokenizer: Tokenizer,
) -> None:
    """`ste` + `ps`: the tokens of the two parts can differ from the tokens of the whole text."""
    alone, whole = tokenizer.encode("the st"), tokenizer.encode("the stone")
    assert whole[: len(alone)] != alone
    (found,) = encode_choices(tokenizer, "the st", ["one"])
    assert found.context == tuple(alone)
    assert found.continuation == tuple(whole[len(alone) :])


def test_token_pair_context_starts_with_bos_if_model_expects_it(texts: list[str]) -> None:
    backend = train_tokenizer(texts, 320, special_tokens=("</s>", "<s>")).backend
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", add_bos=True)
    (found,) = encode_choices(tokenizer, "the star", [" sings"])
    assert found.context == (1, *tokenizer.encode("the star"))
    assert tokenizer.decode(found.continuation) == " sings"


def test_token_pair_empty_context_becomes_separator(tokenizer: Tokenizer) -> None:
    (found,) = encode_choices(tokenizer, " ", ["the"])
    assert found == TokenPair((tokenizer.separator_id,), tuple(tokenizer.encode(" the")))


# Choice of the ending


def uniform(model: Model) -> Model:
    """Return a model for which all tokens are equally likely, so that only lengths matter."""
    flat = copy.deepcopy(model)
    with torch.no_grad():
        flat.lm_head.weight.zero_()
    return flat


def test_acc_uses_sum_and_acc_norm_sum_per_character(model: Model, tokenizer: Tokenizer) -> None:
    """Among three endings with equally likely tokens, acc chooses the ending with the fewest
    tokens, and acc_norm the ending with the fewest tokens per character; wide characters count as
    one.
    """
    choices = ("日本", "the stone", "a small old river")
    items = [Item("the star", choices, gold) for gold in range(3)]
    pairs = encode_items(items, tokenizer, CONTEXT, "")
    lengths = [len(pair.continuation) for pair in pairs[:3]]
    answers = answer_items(uniform(model), items, pairs, batch_size=8)
    assert answers[0].logprobs == pytest.approx([-n * math.log(320) for n in lengths], rel=1e-5)
    best = lengths.index(min(lengths))
    per_character = [n / len(c) for n, c in zip(lengths, choices, strict=True)]
    best_norm = per_character.index(min(per_character))
    assert best != best_norm
    assert [a.acc for a in answers] == [gold == best for gold in range(3)]
    assert [a.acc_norm for a in answers] == [gold == best_norm for gold in range(3)]


def test_answer_items_equal_endings_choose_first(model: Model, tokenizer: Tokenizer) -> None:
    items = [Item("the star", ("sings", "sings"), gold) for gold in (0, 1)]
    pairs = encode_items(items, tokenizer, CONTEXT, "")
    assert [a.acc for a in answer_items(model, items, pairs, batch_size=8)] == [True, False]


def test_accuracy_error_matches_proportion(model: Model, tokenizer: Tokenizer) -> None:
    items = [Item("the star", ("sings", "sings"), gold) for gold in (0, 0, 1, 0)]
    pairs = encode_items(items, tokenizer, CONTEXT, "")
    found = accuracies(answer_items(model, items, pairs, batch_size=8))
    assert found["acc"].value == 0.75
    assert found["acc"].stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_answer_items_ending_too_long_for_context_raises_input_error(tokenizer: Tokenizer) -> None:
    items = [Item("a", ("b", "c"), 0), Item("the star", ("sings", "日本 " * 40), 0)]
    said = r"here: an ending of item 2 has \d+ tokens, but must have 1 to 32"
    with pytest.raises(InputError, match=said):
        encode_items(items, tokenizer, CONTEXT, "here")


# HellaSwag's files

ROW = {"activity_label": "Dawn", "ctx": "The star", "endings": ["a", "b"], "label": 1}


def write(path: Path, *rows: object) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_read_hellaswag_item_joins_label_and_context(tmp_path: Path) -> None:
    without = {key: value for key, value in ROW.items() if key != "activity_label"}
    path = write(tmp_path / "x.jsonl", ROW, "", without, {**ROW, "label": "0"})
    assert read_hellaswag(path) == [
        Item("Dawn: The star", ("a", "b"), 1),
        Item("The star", ("a", "b"), 1),
        Item("Dawn: The star", ("a", "b"), 0),
    ]


def test_read_hellaswag_original_data_capitalizes_second_part() -> None:
    row = {**ROW, "ctx_a": "A [title] cat.", "ctx_b": "then  the DOG", "ctx": "not this"}
    assert item_of(row).context == "Dawn: A.  cat. Then the dog".replace(".  ", ". ")


def test_read_hellaswag_removes_wikihow_brackets() -> None:
    row = {**ROW, "ctx": " [header] How to [title] Sing [step] Well ", "endings": [" a [b] c", "d"]}
    item = item_of(row)
    assert item.context == "Dawn:  How to. Sing Well"
    assert item.choices == ("a c", "d")


def test_read_hellaswag_limit_reads_only_first_items(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROW, ROW, "damaged")
    assert len(read_hellaswag(path, 2)) == 2


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "is not a HellaSwag item: Expecting property name"),
        ("[1]", "it is not a JSON object"),
        ({**ROW, "ctx": 5}, "ctx must be a string"),
        ({"endings": ["a", "b"], "label": 0}, "ctx is missing"),
        ({**ROW, "ctx_a": "x"}, "ctx_b is missing"),
        ({"ctx_a": "x", "ctx_b": "y", "endings": ["a", "b"], "label": 0}, "activity_label is miss"),
        ({**ROW, "endings": "ab"}, "endings must be a list"),
        ({**ROW, "endings": ["a"]}, "endings must be a list of 2 to 100 texts"),
        ({**ROW, "endings": ["a"] * 101}, "endings must be a list of 2 to 100 texts"),
        ({**ROW, "endings": ["a", 2]}, "endings must be texts"),
        ({**ROW, "endings": ["a", "[x]"]}, "the context or an ending is empty"),
        ({**ROW, "label": 2}, "label must be a number from 0 to 1, not 2"),
        ({**ROW, "label": True}, "label must be a number"),
        ({**ROW, "label": ""}, "label must be a number from 0 to 1, not ''"),
        ({**ROW, "label": "-1"}, "label must be a number"),
        ('{"ctx": "\\ud800", "endings": ["a", "b"], "label": 0}', "ctx must be a string"),
        ("[" * 60_000, "is not a HellaSwag item"),
        ({**ROW, "ctx": "a" * 70_000}, "bytes, more than 65,536"),
    ],
)
def test_read_hellaswag_bad_line_is_named(line: object, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROW, line, ROW)
    with pytest.raises(InputError) as raised:
        read_hellaswag(path)
    assert f"{path}:2 is not a HellaSwag item: " in str(raised.value)
    assert said in str(raised.value)


def test_read_hellaswag_invalid_utf8_raises_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n\xff\xfe\n")
    with pytest.raises(InputError, match=r"x\.jsonl:2 is not a HellaSwag item"):
        read_hellaswag(path)


def test_read_hellaswag_empty_or_missing_files_raise_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no items"):
        read_hellaswag(write(tmp_path / "x.jsonl", "", " "))
    with pytest.raises(InputError, match="nowhere does not exist"):
        read_hellaswag(tmp_path / "nowhere")
    with pytest.raises(InputError, match="it is a folder"):
        read_hellaswag(tmp_path)


def test_hub_hellaswag_without_hub_suggests_local_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Datasets:
        @staticmethod
        def load_dataset(name: str, *, split: str) -> Any:
            raise OSError(f"no route to {name} {split}")

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    said = r"Rowan/hellaswag could not be .*\(OSError: no route to Rowan/hellaswag validation\)"
    with pytest.raises(InputError, match=said + ".*--tasks hellaswag,FILE.jsonl"):
        hub_hellaswag()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"firstlight\[data\]"):
        hub_hellaswag()


def test_hub_hellaswag_rows_become_items(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list[Any]):
        def select(self, numbers: range) -> Rows:
            return Rows(self[number] for number in numbers)

    class Datasets:
        @staticmethod
        def load_dataset(name: str, *, split: str) -> Any:
            return Rows([{**ROW, "label": "1"}, {**ROW, "label": "0"}])

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert [item.gold for item in hub_hellaswag()] == [1, 0]
    assert [item.gold for item in hub_hellaswag(1)] == [1]


# Tasks by name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write 20 items with four endings each."""
    generator = random.Random(3)
    words = "the a light first dawn star river stone bird green small old sings".split()

    def text(count: int) -> str:
        return " ".join(generator.choices(words, k=count))

    rows = [
        {
            "activity_label": "Dawn",
            "ctx": text(generator.randint(2, 30)),
            "endings": [text(generator.randint(1, 5)) for _ in range(4)],
            "label": generator.randrange(4),
        }
        for _ in range(20)
    ]
    return write(tmp_path / "items.jsonl", *rows)


def test_evaluate_tasks_scores_task_by_name(loaded: LoadedModel, file: Path) -> None:
    (result,) = evaluate_tasks(loaded, f"hellaswag,{file}")
    items = read_hellaswag(file)
    assert loaded.tokenizer is not None
    pairs = encode_items(items, loaded.tokenizer, CONTEXT, "")
    expected = accuracies(answer_items(loaded.model, items, pairs, batch_size=32))
    assert (result.task, result.items, result.metrics) == ("hellaswag", 20, expected)
    figures = result.figures()
    assert list(figures) == ["acc", "acc_stderr", "acc_norm", "acc_norm_stderr"]
    assert 0 < figures["acc"] < 1  # type: ignore[operator]
    assert evaluate_tasks(loaded, [f"hellaswag,{file}"], items=7)[0].items == 7


@pytest.mark.parametrize(
    "tasks, said",
    [
        (["hellasvag"], r"task 'hellasvag' is unknown \(did you mean 'hellaswag'\?\)"),
        (["x.jsonl"], r"known: hellaswag, hellaswag,FILE\.jsonl, and lm-eval:NAME"),
        (["hellaswag,"], "has no file name: use"),
        (["lm-eval:"], "has no task name"),
        (["lm-eval:a,,b"], "has no task name"),
        (["hellaswag,x", "hellaswag,y"], "two tasks are called hellaswag"),
        (["lm-eval:a,b", "lm-eval:b"], "two tasks are called b"),
        (["hellaswag,x", "lm-eval:hellaswag"], "two tasks are called hellaswag"),
    ],
)
def test_evaluate_tasks_invalid_names_raise_config_error(
    loaded: LoadedModel, tasks: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate_tasks(loaded, tasks)


@pytest.mark.parametrize("name", ["items", "batch_size"])
def test_evaluate_tasks_counts_below_one_raise_config_error(
    loaded: LoadedModel, file: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        evaluate_tasks(loaded, f"hellaswag,{file}", **{name: 0})  # type: ignore[arg-type]


def test_evaluate_tasks_without_lm_eval_names_install_command(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(MissingDependencyError, match=r"needs the 'lm_eval' package.*\[eval\]"):
        evaluate_tasks(loaded, "lm-eval:arc_easy")


def test_evaluate_tasks_model_without_tokenizer_raises_model_error(
    model: Model, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        evaluate_tasks(LoadedModel(model, None, (), tmp_path), f"hellaswag,{file}")


# The command


@pytest.fixture
def folder(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    for name, content in model_files(model.config, tokenizer).items():
        (place / name).write_text(content, encoding="utf-8")
    save_file(weights_to_save(model), place / "model.safetensors", {"format": "pt"})
    return place


def test_eval_command_prints_task_scores_with_errors(
    folder: Path, file: Path, loaded: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder), "--tasks", f"hellaswag,{file}", "--json"]) == 0
    answer = capfd.readouterr()
    (result,) = evaluate_tasks(loaded, f"hellaswag,{file}")
    assert json.loads(answer.out) == {
        "checkpoint": str(folder),
        "folder": str(folder),
        "tasks": {"hellaswag": {"items": 20, **result.figures()}},
    }
    acc = result.metrics["acc"]
    assert acc.stderr is not None
    shown = f"{acc.value:.3f} ± {acc.stderr:.3f} (standard error, 20 items)"
    assert f"hellaswag acc       {shown}\n" in answer.err


def test_eval_command_with_tasks_and_data_also_prints_loss(
    folder: Path, file: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--tasks", f"hellaswag,{file}", "--items", "3", "--data", str(data), "--json"]
    assert main(["eval", str(folder), *options]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["tasks"]["hellaswag"]["items"] == 3
    assert found["loss"] > 1


def test_eval_command_names_bad_task_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "bad.jsonl", ROW, "{")
    assert main(["eval", str(folder), "--tasks", f"hellaswag,{path}", "--json"]) == 1
    answer = capfd.readouterr()
    assert answer.err.startswith(f"firstlight: error: {path}:2 is not a HellaSwag item")
    assert json.loads(answer.out)["error"]["type"] == "InputError"


# In training


def with_tasks(recipe: dict[str, Any], file: Path, **values: Any) -> dict[str, Any]:
    """Train the recipe with dropout and task scores at steps 6 and 12 in a separate folder."""
    changed = copy.deepcopy(recipe)
    changed["run"]["dir"] += "-scored"
    changed["evaluation"] |= {"tasks": [f"hellaswag,{file}"], **values}
    return changed


@pytest.fixture
def recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Train with dropout, which draws random numbers at each step."""
    recipe["model"] = {
        "model_type": "gpt2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "resid_pdrop": 0.2,
    }
    recipe["evaluation"]["sample_prompts"] = []
    return recipe


def metrics(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return read_json_lines(Path(recipe["run"]["dir"]) / "metrics.jsonl")


def scored(recipe: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the task scores, keyed by step."""
    return {
        record["step"]: {k: v for k, v in record.items() if k.startswith("hellaswag/")}
        for record in metrics(recipe)
        if any(key.startswith("hellaswag/") for key in record)
    }


def weights(recipe: dict[str, Any]) -> bytes:
    folder = list_checkpoints(Path(recipe["run"]["dir"]))[-1]
    return (folder / WEIGHTS_NAME).read_bytes()


def test_train_with_tasks_learns_same_weights_as_without(
    recipe: dict[str, Any], file: Path
) -> None:
    train(recipe)
    other = with_tasks(recipe, file)
    train(other)
    assert weights(other) == weights(recipe)
    for plain, line in zip(metrics(recipe), metrics(other), strict=True):
        assert plain["train/loss"] == line["train/loss"]
        assert plain.get("val/loss") == line.get("val/loss")


def test_train_task_scores_are_logged_with_their_steps(recipe: dict[str, Any], file: Path) -> None:
    recipe = with_tasks(recipe, file)
    train(recipe)
    found = scored(recipe)
    assert list(found) == [6, 12]
    assert set(found[12]) == {
        "hellaswag/acc",
        "hellaswag/acc_stderr",
        "hellaswag/acc_norm",
        "hellaswag/acc_norm_stderr",
    }
    (after,) = evaluate_tasks(recipe["run"]["dir"], f"hellaswag,{file}", device="cpu")
    assert found[12] == {f"hellaswag/{name}": value for name, value in after.figures().items()}


def test_train_tasks_may_run_less_often_than_validation(recipe: dict[str, Any], file: Path) -> None:
    recipe = with_tasks(recipe, file, every_steps=2, tasks_every_steps=8, task_items=5)
    train(recipe)
    assert list(scored(recipe)) == [8, 12]
    assert all(found["hellaswag/acc"] * 5 % 1 == 0 for found in scored(recipe).values())
    assert sum("val/loss" in record for record in metrics(recipe)) == 6


@pytest.mark.parametrize("every_steps, validated", [(4, [4, 8, 12]), (0, [12])])
def test_train_tasks_follow_their_own_interval(
    recipe: dict[str, Any], file: Path, every_steps: int, validated: list[int]
) -> None:
    recipe = with_tasks(recipe, file, every_steps=every_steps, tasks_every_steps=5, task_items=5)
    train(recipe)
    assert list(scored(recipe)) == [5, 10, 12]
    assert [r["step"] for r in metrics(recipe) if "val/loss" in r] == validated


def test_train_without_validation_split_still_scores_tasks(
    recipe: dict[str, Any], file: Path, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from firstlight.data.prepare import prepare

    prepare([corpus], tokenizer, tmp_path / "all", val_fraction=0)
    recipe = with_tasks(recipe, file)
    recipe["data"]["dir"] = str(tmp_path / "all")
    train(recipe)
    assert list(scored(recipe)) == [6, 12]


def test_train_stopped_during_scoring_scores_on_resume(
    recipe: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = with_tasks(recipe, file), with_tasks(recipe, file)
    broken["run"]["dir"] += "-broken"
    train(whole)
    score, done_when_stopped = answer_items, []

    def stopped_in_the_middle(*args: Any, on_pairs: Any, **options: Any) -> Any:
        def on_some(done: int, total: int) -> None:
            done_when_stopped.append((done, total))
            signal.raise_signal(signal.SIGTERM)
            on_pairs(done, total)

        return score(*args, on_pairs=on_some, **options)

    with monkeypatch.context() as patch:
        patch.setattr("firstlight.evaluation.tasks.answer_items", stopped_in_the_middle)
        result = train(broken)
    assert (result.stopped_by, result.step) == ("SIGTERM", 6)
    ((done, total),) = done_when_stopped
    assert 0 < done < total == 80
    assert metrics(broken)[-1]["step"] == 5
    train(broken, resume=True)
    assert weights(broken) == weights(whole)
    assert scored(broken) == scored(whole)
    assert [r["step"] for r in metrics(broken)] == list(range(1, 13))


def test_train_killed_and_resumed_has_same_task_scores(recipe: dict[str, Any], file: Path) -> None:
    class KilledError(Exception):
        pass

    whole, broken = with_tasks(recipe, file), with_tasks(recipe, file)
    broken["run"]["dir"] += "-broken"
    train(whole)

    def kill(record: Mapping[str, Any]) -> None:
        if record["step"] == 7:
            raise KilledError

    with pytest.raises(KilledError):
        train(broken, on_step=kill)
    train(broken, resume=True)
    assert weights(broken) == weights(whole)
    assert scored(broken) == scored(whole)


@pytest.mark.parametrize(
    "values, kind, said",
    [
        ({"tasks": ["hellaswag,nowhere.jsonl"]}, InputError, "nowhere.jsonl does not exist"),
        ({"tasks": ["hellaswag", "hellaswag"]}, ConfigError, "two tasks are called hellaswag"),
        ({"tasks": ["swag"]}, ConfigError, "task 'swag' is unknown"),
    ],
)
def test_train_unscorable_tasks_raise_before_first_step(
    recipe: dict[str, Any],
    file: Path,
    values: dict[str, Any],
    kind: type[FirstlightError],
    said: str,
) -> None:
    recipe = with_tasks(recipe, file, **values)
    with pytest.raises(kind, match=said):
        train(recipe, on_step=lambda _: pytest.fail("a step was made"))
    assert not Path(recipe["run"]["dir"]).exists()


def test_train_bad_task_line_raises_before_first_step(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    bad = write(tmp_path / "bad.jsonl", ROW, {**ROW, "label": 4})
    with pytest.raises(InputError, match=r"bad\.jsonl:2 is not a HellaSwag item"):
        train(with_tasks(recipe, bad))
    long = write(tmp_path / "long.jsonl", {**ROW, "endings": ["a", "日本 " * 40]})
    with pytest.raises(InputError, match=r"long\.jsonl: an ending of item 1 has .* 1 to 64"):
        train(with_tasks(recipe, long))


def test_train_non_finite_weights_at_task_scoring_raise_training_error(
    recipe: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_numbers(*_: Any, **__: Any) -> None:
        raise ModelError("the model's outputs are not finite")

    monkeypatch.setattr("firstlight.evaluation.tasks.answer_items", no_numbers)
    recipe = with_tasks(recipe, file)
    recipe["guard"] = {"on_divergence": "stop"}
    with pytest.raises(TrainingError, match="step 6: the model's outputs are not finite"):
        train(recipe)


def test_train_restores_maskless_attention_after_samples_and_tasks(
    recipe: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU kernels without mask support can't continue from a cached context, and cuDNN creates a
    plan for each length of a sample text.
    """
    chosen: list[str] = []
    monkeypatch.setattr(
        "firstlight.training.validation.choose_attention", lambda _, way: chosen.append(way)
    )
    recipe = with_tasks(recipe, file)
    recipe["model"]["attn_pdrop"] = 0.0
    recipe["efficiency"] = {"attention": "flash"}
    recipe["evaluation"]["sample_prompts"] = ["a"]
    train(recipe)
    assert chosen == ["sdpa", "flash"] * 4


def test_hellaswag_hub_id_matches_lm_eval() -> None:
    assert hellaswag.HUB_ID == "Rowan/hellaswag"
