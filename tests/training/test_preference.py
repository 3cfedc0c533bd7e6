"""Preference pairs: reading, packing, their exact loss, and training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import draw_text, make_texts, say, with_template, write_lines
from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.manifest import saved_checkpoints
from firstlight.data.chat import ChatOptions, prepare_chat
from firstlight.data.conversations import BadRecordError, to_pair
from firstlight.data.loader import Batch, rows_to_batch
from firstlight.data.packing import PreferenceDataset, open_split
from firstlight.data.prepare import prepare
from firstlight.errors import CheckpointError, ConfigError, DataError
from firstlight.evaluation.perplexity import evaluate
from firstlight.lora.loading import LoadedModel, base_identity, load_model
from firstlight.models import LlamaConfig, Model, build_model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer
from firstlight.recipe import PreferenceConfig, parse_recipe
from firstlight.report.summary import kept_result
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.training.preference import PreferenceObjective
from firstlight.training.step import train_step

CONTEXT = 128


class StoppedError(Exception):
    """Ends a run in the middle."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an empty cache, and one thread, which is fastest for small models."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Generate records in all formats. Each preferred answer starts with "dawn"."""
    generator = random.Random(seed)
    records: list[dict[str, Any]] = []
    for number in range(count):
        prompt = f"{number} {draw_text(generator, 4)}"
        chosen, rejected = f"dawn {draw_text(generator, 3)}", f"stone {draw_text(generator, 3)}"
        if number % 3 == 0:
            records.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
            continue
        answers = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
        question = say(prompt)
        if number % 3 == 1:
            records.append({"prompt": question, "chosen": answers[0], "rejected": answers[1]})
        else:
            whole = [question + answer for answer in answers]
            records.append({"chosen": whole[0], "rejected": whole[1]})
    return records


# Records


def test_preference_record_formats_yield_same_pair() -> None:
    answers = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    forms: list[dict[str, Any]] = [
        {"prompt": "well?", "chosen": "yes", "rejected": "no"},
        {"prompt": say("well?"), "chosen": answers[0], "rejected": answers[1]},
        {"chosen": say("well?", "yes"), "rejected": say("well?", "no")},
        # The formats of UltraFeedback, Orca, HH, OpenAI and LLaMA-Factory
        {
            "prompt": "well?",
            "messages": say("well?", "yes"),
            "chosen": say("well?", "yes"),
            "rejected": say("well?", "no"),
        },
        {"system": "", "question": "well?", "chosen": "yes", "rejected": "no"},
        {"instruction": "well?", "chosen_response": "yes", "rejected_response": "no"},
        {
            "chosen": "\n\nHuman: well?\n\nAssistant: yes",
            "rejected": "\n\nHuman: well?\n\nAssistant: no",
        },
        {"prompt": "\n\nHuman: well?\n\nAssistant:", "chosen": " yes", "rejected": " no"},
        {
            "input": {"messages": say("well?")},
            "preferred_output": answers[0],
            "non_preferred_output": answers[1],
        },
        {
            "conversations": [{"from": "human", "value": "well?"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
    ]
    for record in forms:
        pair = to_pair(record)
        assert pair.chosen.messages == say("well?", "yes")
        assert pair.rejected.messages == say("well?", "no")
    pair = to_pair({**forms[0], "system": "Be short."})
    assert pair.rejected.messages == say("well?", "no", system="Be short.")


def test_preference_answers_within_prompt_are_not_learned() -> None:
    before = say("a", "b", "c")
    named = {"prompt": before, "chosen": "d", "rejected": "e"}
    for record in (named, {"chosen": say("a", "b", "c", "d"), "rejected": say("a", "b", "c", "e")}):
        pair = to_pair(record)
        assert pair.chosen.masked == pair.rejected.masked == {1}


@pytest.mark.parametrize(
    "record, message",
    [
        ([], "a list, not an object"),
        (
            {"prompt": "a", "response": "b"},
            r"a conversation: set the kind \(--kind, data.kind\) chat",
        ),
        ({"prompt": "a", "chosen": "b"}, "`rejected` is missing"),
        (
            {"prompt": "a", "chosen": "b", "rejected": 3},
            "`rejected` is a number, not a text or a list",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "`rejected` with its prompt: .* blank"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "`chosen` with its prompt: .* blank"),
        ({"chosen": "b", "rejected": "c"}, "`chosen` contains only an answer"),
        (
            {"chosen": say("a", "b"), "rejected": say("c", "b")},
            ("must each continue the same prompt"),
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": say("c", "d")},
            "the same prompt with an answer",
        ),
        (
            {"chosen": say("a", "b"), "rejected": say("a", "b", "c", "d")},
            "the same prompt with an answer",
        ),
        (
            {"prompt": say("a"), "chosen": say("b"), "rejected": say("c")},
            "there is no assistant message",
        ),
    ],
)
def test_preference_invalid_record_raises_bad_record_error(record: Any, message: str) -> None:
    with pytest.raises(BadRecordError, match=message):
        to_pair(record)


def prepared(
    folder: Path, tokenizer: Tokenizer, records: list[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    path = write_lines(folder.with_suffix(".jsonl"), records)
    chosen = ChatOptions(kind="preference", **options)
    return prepare_chat([path], with_template(tokenizer, "chatml"), folder, options=chosen)


def test_preference_malformed_pairs_raise_with_line_or_are_counted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = draw_pairs(6)
    records[3] = {"prompt": "a", "chosen": "b", "rejected": "b"}
    with pytest.raises(DataError, match=r"pairs.jsonl:4: `chosen` and `rejected` are the same"):
        prepared(tmp_path / "pairs", tokenizer, records)
    manifest = prepared(tmp_path / "pairs", tokenizer, records, on_bad="skip", val_fraction=0.0)
    assert manifest["documents"] == {"read": 6, "written": 5, "rejected": {"no_pair": 1}}
    [line] = (tmp_path / "pairs" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 4


def test_preference_pairs_stay_whole_and_only_answers_are_learned(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    prepared(tmp_path / "pairs", tokenizer, draw_pairs(30))
    dataset = open_split(tmp_path / "pairs", "train")
    assert isinstance(dataset, PreferenceDataset)
    tok = with_template(tokenizer, "chatml")
    seen = []
    for row in range(len(dataset.packing(CONTEXT))):
        batch = rows_to_batch(dataset, [row], CONTEXT, 0, document_masking=True)
        assert batch.document_ids is not None
        examples = dataset.examples_of_row(row, CONTEXT)
        seen += examples
        assert batch.num_terms == len(examples) / 2
        for number, example in enumerate(examples):
            own = batch.document_ids[0] == number
            answer = tok.decode(batch.labels[0][own & (batch.labels[0] != -100)].tolist())
            assert answer.startswith(("dawn", "stone")[number % 2])
            assert example % 2 == number % 2
    assert sorted(seen) == list(range(dataset.num_documents))


def test_preference_pairs_of_same_prompt_share_one_split(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = [
        {"prompt": f"question {n // 4}", "chosen": f"dawn {n}", "rejected": f"stone {n}"}
        for n in range(60)
    ]
    prepared(tmp_path / "pairs", tokenizer, records, val_fraction=0.3)
    sides = []
    tok = with_template(tokenizer, "chatml")
    for split in ("train", "val"):
        dataset = open_split(tmp_path / "pairs", split)
        assert isinstance(dataset, PreferenceDataset)
        texts = [tok.decode(dataset.example(i)[0].tolist()) for i in range(len(dataset.lengths))]
        sides.append({text[: text.index("assistant")] for text in texts})
    assert not sides[0] & sides[1]
    assert sides[1]


# The loss


def pair_model(seed: int = 0) -> Model:
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model = build_model(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.double()


def log_prob(model: Model, ids: Any, learned: Any) -> torch.Tensor:
    """Return an answer's log-probability, computed alone and token by token."""
    tokens = torch.from_numpy(ids)
    table = torch.log_softmax(model(tokens[None, :-1])[0], -1)
    terms = [table[i - 1, tokens[i]] for i in range(1, len(tokens)) if learned[i]]
    return torch.stack(terms).sum()


@pytest.fixture
def split(tmp_path: Path, tokenizer: Tokenizer) -> PreferenceDataset:
    """Return a split of 29 pairs with random references."""
    prepared(tmp_path / "pairs", tokenizer, draw_pairs(29), val_fraction=0.0)
    dataset = open_split(tmp_path / "pairs", "train")
    assert isinstance(dataset, PreferenceDataset)
    dataset.references = np.random.default_rng(0).normal(-40, 4, len(dataset.lengths))
    return dataset


def gradients(model: Model) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("rows", [8, 4, 1])
def test_preference_loss_and_gradient_match_formula_for_any_batch_split(
    split: PreferenceDataset, smoothing: float, rows: int
) -> None:
    model, beta = pair_model(), 0.3
    assert split.references is not None
    batch = rows_to_batch(split, list(range(8)), CONTEXT, 0, document_masking=True)
    terms = []
    for row in range(8):
        examples = split.examples_of_row(row, CONTEXT)
        for chosen, rejected in zip(examples[::2], examples[1::2], strict=True):
            ratios = [
                log_prob(model, *split.example(i)) - split.references[i] for i in (chosen, rejected)
            ]
            right = torch.sigmoid(beta * (ratios[0] - ratios[1]))
            wrong = torch.sigmoid(beta * (ratios[1] - ratios[0]))
            terms.append(-(1 - smoothing) * right.log() - smoothing * wrong.log())
    assert len(terms) == batch.num_terms > 8
    expected = torch.stack(terms).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    wanted = gradients(model)
    objective = PreferenceObjective(PreferenceConfig(beta=beta, label_smoothing=smoothing))
    seen: list[list[torch.Tensor]] = []
    optimizer = Optimizer(model, OptimizerConfig(name="sgd", max_grad_norm=0.0))
    step = optimizer.clip_gradients

    def watched(*arguments: Any) -> Any:
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return step(*arguments)

    optimizer.clip_gradients = watched  # type: ignore[method-assign, assignment]
    found = train_step(objective(model), optimizer, batch.split(rows))
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert found.tokens == batch.num_valid
    largest = max(float(one.abs().max()) for one in wanted)
    for one, other in zip(wanted, seen[0], strict=True):
        assert float((one - other).abs().max()) < 1e-12 * max(largest, 1)
    margins = objective.take("train")
    assert 0 <= margins["train/reward_accuracy"] <= 1
    assert objective.take("train") == {}


def test_preference_short_rows_are_weighted_by_their_pairs(split: PreferenceDataset) -> None:
    objective = PreferenceObjective(PreferenceConfig(beta=1.0))
    model = pair_model()

    def loss(batch: Batch) -> float:
        with torch.no_grad():
            return float(objective(model)(*batch.inputs))

    rows = len(split.packing(CONTEXT))
    whole = rows_to_batch(split, list(range(rows)), CONTEXT, 0, document_masking=True)
    assert whole.references is not None
    assert whole.references.isnan().any()
    assert whole.num_terms == 29
    alone = [
        loss(rows_to_batch(split, [row], CONTEXT, 0, document_masking=True)) for row in range(rows)
    ]
    assert loss(whole) == pytest.approx(sum(alone), rel=1e-12)
    counted = objective.take("val")
    loss(whole)
    # Computed by a process without data so that the other processes can continue.
    assert loss(whole.uncounted()) == 0
    assert whole.uncounted().num_terms == 0
    assert objective.take("val") == pytest.approx(counted, rel=1e-12)


# Runs


@pytest.fixture
def base(recipe: dict[str, Any], data: Path, tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Return a tiny Llama trained on ChatML."""
    tok = with_template(tokenizer, "chatml")
    records = [{"messages": say(draw_text(random.Random(n)), "dawn stone")} for n in range(40)]
    path = write_lines(tmp_path / "chats.jsonl", records)
    tok.save_pretrained(tmp_path / "tok")
    model = {**recipe["model"], "max_position_embeddings": CONTEXT}
    chat = {"kind": "chat", "files": [str(path)], "tokenizer": str(tmp_path / "tok")}
    run = {"dir": str(tmp_path / "base"), "device": "cpu"}
    return train({**recipe, "model": model, "data": chat, "run": run}).checkpoint


@pytest.fixture
def pairs(recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return the tiny run, on 40 pairs."""
    path = write_lines(tmp_path / "pairs.jsonl", draw_pairs(40))
    return {
        **{name: section for name, section in recipe.items() if name != "model"},
        "data": {"kind": "preference", "files": [str(path)], "seq_len": CONTEXT},
        "optimizer": {"name": "adamw", "learning_rate": 2e-3, "weight_decay": 0.0},
        "evaluation": {**recipe["evaluation"], "max_rows": 0},
        # A machine with faster bf16 would select it, which rounds a hundred times more.
        "efficiency": {"precision": "fp32"},
    }


def folder_of(recipe: Mapping[str, Any]) -> Path:
    return Path(recipe["run"]["dir"])


def records_of(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    timed = ("second", "mfu", "memory_bytes")
    return [
        {k: v for k, v in line.items() if not any(name in k for name in timed)}
        for line in read_json_lines(folder_of(recipe) / "metrics.jsonl")
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, dtype=torch.float32).model.state_dict())


def test_preference_run_starts_at_log_2_and_learns(
    pairs: dict[str, Any], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs["evaluation"] = {**pairs.get("evaluation", {}), "train_rows": 10**6}
    result = train(pairs, init_from=base, progress=True)
    told = " ".join(capsys.readouterr().err.split())
    assert "data: train: 36 preference pairs in" in told
    lines = records_of(pairs)
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[0]["train/reward_margin"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["train/reward_margin"] > 0.2
    assert lines[-1]["train/loss"] < 0.6
    assert lines[-1]["val/reward_accuracy"] > 0.9
    assert lines[-1]["val/loss"] < math.log(2) - 0.05
    assert lines[-1]["train_eval/loss"] < 0.6
    assert lines[-1]["train_eval/reward_accuracy"] > 0.9
    assert lines[-1]["val/loss"] != lines[-1]["train_eval/loss"]
    assert "perplexity" not in lines[-1]
    assert result.evaluation is not None
    assert result.evaluation.loss == lines[-1]["val/loss"]
    assert math.isnan(result.evaluation.perplexity)
    # The metrics of the held-out pairs agree with the log-probabilities of both models.
    dataset = open_split(load_trainer_state(result.checkpoint)["data"]["dir"], "val")
    assert isinstance(dataset, PreferenceDataset)
    models = [load_model(folder, dtype=torch.float32).model for folder in (result.checkpoint, base)]
    with torch.no_grad():
        change = [
            float(log_prob(models[0], *example) - log_prob(models[1], *example))
            for example in map(dataset.example, range(len(dataset.lengths)))
        ]
    margins = [0.1 * (a - b) for a, b in zip(change[::2], change[1::2], strict=True)]
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    assert lines[-1]["val/reward_margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert lines[-1]["val/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    with pytest.raises(DataError, match="contains preference pairs"):
        evaluate(folder_of(pairs))


def test_preference_run_ends_by_patience(pairs: dict[str, Any], base: Path) -> None:
    """The rate leaves every weight as it is, so the loss over pairs never falls below log 2."""
    pairs["optimizer"]["learning_rate"] = 1e-30
    pairs["evaluation"] |= {"every_steps": 2, "patience": 3}
    result = train(pairs, init_from=base)
    assert (result.step, result.stopped_by) == (8, None)


def test_preference_run_measures_kept_text(
    pairs: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    old = write_lines(tmp_path / "old.jsonl", [{"text": text} for text in make_texts(40)])
    prepare([old], base, tmp_path / "old")
    pairs["data"]["keep"] = str(tmp_path / "old")
    train(pairs, init_from=base)
    found = [line for line in records_of(pairs) if "kept/bits_per_byte" in line]
    assert [line["step"] for line in found] == [0, 6, 12]
    plain = evaluate(base, tmp_path / "old", seq_len=CONTEXT, document_masking=True)
    assert found[0]["kept/bits_per_byte"] == pytest.approx(plain.bits_per_byte, rel=0.01)
    sums = {one["step"]: one["val/loss"] + one["kept/bits_per_byte"] for one in found[1:]}
    result = kept_result(folder_of(pairs))
    assert result is not None
    assert result.new is not None
    assert result.step == min(sums, key=sums.__getitem__)
    # The log-probabilities of the chosen answers are those of both models.
    state = load_trainer_state(saved_checkpoints(folder_of(pairs))[-1].folder)
    dataset = open_split(state["data"]["dir"], "val")
    assert isinstance(dataset, PreferenceDataset)
    ends = [base, next(folder_of(pairs).glob(f"checkpoints/step-*{result.step}"))]
    with torch.no_grad():
        for bits, folder in zip(result.new, ends, strict=True):
            model = load_model(folder, dtype=torch.float32).model
            examples = [dataset.example(i) for i in range(0, len(dataset.lengths), 2)]
            mean = np.mean([float(log_prob(model, *one)) for one in examples])
            assert bits == pytest.approx(-mean / math.log(2), rel=1e-4)
    assert str(result).startswith("chosen answers: ")


def test_preference_accumulated_batches_give_same_run(
    pairs: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    pairs["schedule"]["max_steps"] = 4
    train(pairs, init_from=base)
    cut = {**pairs, "run": {**pairs["run"], "dir": str(tmp_path / "cut")}}
    cut["batch"] = {"micro_batch_size": 1, "gradient_accumulation_steps": 4}
    train(cut, init_from=base)
    for one, other in zip(records_of(pairs), records_of(cut), strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
        assert one["train/reward_margin"] == pytest.approx(other["train/reward_margin"], abs=1e-4)


@pytest.mark.parametrize(
    "efficiency, bound",
    [
        pytest.param(
            {"compile": True, "compile_backend": "aot_eager"}, 1e-4, marks=pytest.mark.slow
        ),
        ({"activation_checkpointing": "full", "vocab_multiple": 64}, 1e-4),
        ({"precision": "bf16"}, 0.03),
        ({"precision": "bf16_params", "activation_checkpointing": "selective"}, 0.05),
    ],
    ids=["compiled", "checkpointing", "bf16", "bf16_params"],
)
def test_preference_run_with_efficiency_methods_matches_run_without(
    pairs: dict[str, Any], base: Path, tmp_path: Path, efficiency: dict[str, Any], bound: float
) -> None:
    pairs["schedule"]["max_steps"] = 4
    train(pairs, init_from=base)
    other = {**pairs, "run": {**pairs["run"], "dir": str(tmp_path / "other")}}
    other["efficiency"] = {**pairs.get("efficiency", {}), **efficiency}
    train(other, init_from=base)
    found, plain = records_of(other), records_of(pairs)
    # The reference is computed with the same methods as the model, so they are equal in the first
    # step.
    assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=max(bound / 10, 1e-5))
    for one, line in zip(plain, found, strict=True):
        assert line["train/loss"] == pytest.approx(one["train/loss"], rel=bound)
        assert line["train/reward_margin"] == pytest.approx(one["train/reward_margin"], abs=bound)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_preference_run_resumed_equals_uninterrupted_run(
    pairs: dict[str, Any], base: Path, tmp_path: Path, lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs["lora"] = lora
    whole = {**pairs, "run": {**pairs["run"], "dir": str(tmp_path / "whole")}}
    expected = train(whole, init_from=base)

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 5:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(pairs, init_from=base, on_step=on_step)
    monkeypatch.setattr("firstlight.training.preference.reference_log_probs", None)
    found = train(pairs, resume=True)
    assert records_of(pairs) == records_of(whole)
    assert records_of(whole)[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert records_of(whole)[-1]["train/reward_margin"] > 0
    for name, tensor in weights(expected.checkpoint).items():
        assert torch.equal(tensor, weights(found.checkpoint)[name])


def test_preference_references_are_those_of_loaded_checkpoint(
    pairs: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the starting run saves a newer checkpoint meanwhile."""
    newer = base.rename(base.parents[2] / base.name)
    loaded: list[Path] = []

    def load(folder: Path, **options: Any) -> LoadedModel:
        loaded.append(folder)
        found = load_model(folder, **options)
        newer.rename(base)
        return found

    monkeypatch.setattr("firstlight.training.starting_model.load_model", load)
    pairs["schedule"]["max_steps"] = 1
    result = train(pairs, init_from=base.parents[1])
    (folder,) = loaded
    assert folder != base
    reference = load_trainer_state(result.checkpoint)["data"]["reference"]
    assert reference == {"name": str(folder), "sha256": base_identity(folder)}


def test_preference_references_are_cached_verified_and_recomputed(
    pairs: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    pairs["schedule"]["max_steps"] = 2
    train(pairs, init_from=base)
    kept = sorted((tmp_path / "cache" / "references").glob("*.json"))
    assert len(kept) == 2
    before = [path.read_bytes() for path in kept]
    # One file is damaged but valid JSON; the other is missing.
    content = json.loads(before[0])
    place = next(i for i, value in enumerate(content["log_probs"]) if value is not None)
    content["log_probs"][place] += 1.0
    kept[0].write_text(json.dumps(content))
    kept[1].unlink()
    pairs["schedule"]["max_steps"] = 3
    train(pairs, resume=True)
    assert [path.read_bytes() for path in kept] == before
    for path in kept:
        path.unlink()
    base.rename(base.with_name("gone"))
    pairs["schedule"]["max_steps"] = 4
    with pytest.raises(CheckpointError, match="which is needed again"):
        train(pairs, resume=True)


def test_preference_run_on_prepared_folder_equals_run_on_files(
    pairs: dict[str, Any], base: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    prepared(tmp_path / "folder", tokenizer, draw_pairs(40))
    pairs["schedule"]["max_steps"] = 2
    train(pairs, init_from=base)
    data = {"dir": str(tmp_path / "folder"), "seq_len": CONTEXT}
    run = {"dir": str(tmp_path / "again"), "device": "cpu"}
    result = train({**pairs, "data": data, "run": run}, init_from=base)
    assert records_of({"run": run}) == records_of(pairs)
    saved = load_trainer_state(result.checkpoint)["recipe"]
    assert saved["data"]["kind"] == "preference"
    assert saved["preference"] == {"objective": "dpo", "beta": 0.1, "label_smoothing": 0.0}


# Errors


@pytest.mark.parametrize(
    "change, message",
    [
        ({"efficiency": {"loss_chunk_tokens": 64}}, "loss_chunk_tokens computes the cross-entropy"),
        ({"loss": {"z_loss_coef": 1e-4}}, "z_loss_coef applies to cross-entropy only"),
        ({"batch": {"micro_batch_size": "auto", "global_batch_tokens": 512}}, "support preference"),
    ],
)
def test_preference_unsupported_settings_raise_config_error(
    pairs: dict[str, Any], base: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train({**pairs, **change}, init_from=base)


def test_preference_run_without_starting_model_raises_config_error(
    pairs: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    prepared(tmp_path / "folder", tokenizer, draw_pairs(9))
    pairs["data"] = {"dir": str(tmp_path / "folder"), "seq_len": CONTEXT}
    with pytest.raises(ConfigError, match="preference pairs need a model that can already answer"):
        train(pairs)


def test_preference_long_pairs_raise_or_are_dropped(pairs: dict[str, Any], base: Path) -> None:
    pairs["data"]["seq_len"] = 70
    with pytest.raises(DataError, match=r"pairs of '\w+' are longer than a row.*pairs.jsonl:\d+:"):
        train(pairs, init_from=base)
    pairs["data"]["long"] = "drop"
    pairs["schedule"]["max_steps"] = 1
    train(pairs, init_from=base)
    [start] = read_json_lines(folder_of(pairs) / "starts.jsonl")
    assert 0 < start["conversations"][0]["dropped"] < 36


def test_preference_section_without_pairs_raises_config_error(recipe: dict[str, Any]) -> None:
    recipe["preference"] = {"beta": 0.2}
    with pytest.raises(ConfigError, match="the preference section applies to pairs of answers"):
        train(recipe)


@pytest.mark.parametrize(
    "data, message",
    [
        ({"files": "a", "long": "cut"}, "long cut does not support preference pairs"),
        (
            {"files": "a", "train_on": "all"},
            (
                "train_on and format do not apply to preference pairs: training always uses the "
                "answers, and the format is detected from the keys. Omit train_on and format"
            ),
        ),
        ({"mix": [{"dir": "a", "weight": 1}]}, "can't be mixed"),
        (
            {"files": "a", "document_masking": False},
            ("can't be disabled for conversations, because"),
        ),
    ],
)
def test_preference_invalid_keys_raise_config_error(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe({"data": {"kind": "preference", **data}})
