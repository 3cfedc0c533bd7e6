"""Training on a mix of corpora and on data from a URL: trained, resumed, evaluated, and refused."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from builders import make_texts
from firstlight.cli.main import main
from firstlight.data.corpus import TokenDataset, num_rows
from firstlight.data.prepare import prepare
from firstlight.errors import CheckpointError, ConfigError, DataError
from firstlight.evaluation.perplexity import Evaluation, evaluate
from firstlight.recipe import parse_recipe
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.training.loop import train
from firstlight.training.validation import mixed_evaluation


class StoppedError(Exception):
    """Ends a run in the middle."""


def prepared(folder: Path, texts: list[str], tokenizer: Tokenizer, **options: Any) -> Path:
    texts_folder = folder.with_name(f"{folder.name}-texts")
    texts_folder.mkdir()
    for number, text in enumerate(texts):
        (texts_folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    prepare([texts_folder], tokenizer, folder, **options)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Prepare a second corpus, a quarter of the size of `data`, with the same tokenizer."""
    return prepared(tmp_path_factory.mktemp("mix") / "small", make_texts(30, seed=5), tokenizer)


@pytest.fixture
def mixed(recipe: dict[str, Any], data: Path, small: Path) -> dict[str, Any]:
    """Return the tiny run on a mix of 7 : 3."""
    mix = [{"dir": str(data), "weight": 0.7}, {"dir": str(small), "weight": 0.3}]
    recipe["data"] = {"mix": mix, "seq_len": 32}
    return recipe


def run_folder(recipe: dict[str, Any]) -> Path:
    return Path(recipe["run"]["dir"])


def records(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics without those that depend on the clock."""
    timed = ("second", "mfu", "memory_bytes")
    return [
        {k: v for k, v in line.items() if not any(name in k for name in timed)}
        for line in read_json_lines(run_folder(recipe) / "metrics.jsonl")
    ]


def stop_after(recipe: dict[str, Any], step: int) -> None:
    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, on_step=on_step)


def with_weights(recipe: dict[str, Any], *weights: float) -> dict[str, Any]:
    result = copy.deepcopy(recipe)
    for entry, weight in zip(result["data"]["mix"], weights, strict=True):
        entry["weight"] = weight
    return result


def rows_in(folder: Path) -> int:
    return num_rows(TokenDataset(folder, "train").num_tokens, 32)


def test_mixed_run_resumed_equals_uninterrupted_run(mixed: dict[str, Any], tmp_path: Path) -> None:
    whole = train(mixed)
    again = copy.deepcopy(mixed)
    again["run"]["dir"] = str(tmp_path / "again")
    stop_after(again, 6)  # the checkpoint is from step 4, in the middle of the mix's period
    resumed = train(again, resume=True)
    assert records(again) == records(mixed)
    assert len({record["train/loss"] for record in records(mixed)}) == 12
    weights = [run.checkpoint / "model.safetensors" for run in (whole, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_mixed_run_trains_on_both_corpora_and_reports_shares(
    mixed: dict[str, Any], data: Path, small: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(mixed, progress=True)
    last = records(mixed)[-1]
    # 12 steps of 4 rows: 4 full periods of 10, and 8 more rows.
    assert last["epoch/prepared"] * rows_in(data) == pytest.approx(34)
    assert last["epoch/small"] * rows_in(small) == pytest.approx(14)
    assert last["epoch"] == 48 / (rows_in(data) + rows_in(small))
    told = " ".join(capfd.readouterr().err.split())
    assert (
        f"data: 48 rows from a mix of {rows_in(data) + rows_in(small)} rows: prepared 70.0% (34 row"
        in told
    )
    assert re.search(r"small 30\.0% \(14 rows, epochs: 0\.\d+\)", told)


def test_mixed_run_validation_loss_is_weighted_mean(mixed: dict[str, Any]) -> None:
    mixed["evaluation"]["train_rows"] = 2
    train(mixed)
    evaluated = [record for record in records(mixed) if "val/loss" in record]
    assert [record["step"] for record in evaluated] == [6, 12]
    for record in evaluated:
        mean = 0.7 * record["val/loss/prepared"] + 0.3 * record["val/loss/small"]
        assert record["val/loss"] == pytest.approx(mean, rel=1e-12)
        assert record["perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
        assert record["val/loss/prepared"] != record["val/loss/small"]
        parts = [record[f"train_eval/loss/{name}"] for name in ("prepared", "small")]
        mean = 0.7 * parts[0] + 0.3 * parts[1]
        assert record["train_eval/loss"] == pytest.approx(mean, rel=1e-12)
        assert parts[0] != parts[1]


def test_mixed_run_corpus_without_validation_split_is_left_out_of_loss(
    mixed: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = prepared(tmp_path / "bare", make_texts(9, seed=6), tokenizer, val_fraction=0)
    mixed["data"]["mix"].append({"dir": str(folder), "weight": 0.5})
    train(mixed, progress=True)
    assert f"not included in val/loss, without a validation split: {folder}" in " ".join(
        capfd.readouterr().err.split()
    )
    last = records(mixed)[-1]
    assert "val/loss/bare" not in last
    mean = 0.7 * last["val/loss/prepared"] + 0.3 * last["val/loss/small"]
    assert last["val/loss"] == pytest.approx(mean, rel=1e-12)
    assert last["epoch/bare"] > 0


def test_mixed_run_without_max_steps_covers_all_rows(
    mixed: dict[str, Any], data: Path, small: Path
) -> None:
    mixed["schedule"] = {}
    mixed["batch"]["micro_batch_size"] = 64
    assert train(mixed).step == math.ceil((rows_in(data) + rows_in(small)) / 64)


def test_mixed_run_resumed_with_other_weights_raises(mixed: dict[str, Any]) -> None:
    stop_after(mixed, 5)
    with pytest.raises(CheckpointError, match=r"the data's mix was 7:3 and is now 1:1"):
        train(with_weights(mixed, 1, 1), resume=True)
    turned = copy.deepcopy(mixed)
    turned["data"]["mix"].reverse()
    with pytest.raises(CheckpointError, match=r"the data's mix was 7:3 and is now 3:7"):
        train(turned, resume=True)
    alone = copy.deepcopy(mixed)
    alone["data"] = {"dir": mixed["data"]["mix"][0]["dir"], "seq_len": 32}
    with pytest.raises(CheckpointError, match=r"the data's mix was 7:3 and is now None"):
        train(alone, resume=True)
    # The same ratio with other numbers is the same data.
    assert train(with_weights(mixed, 70, 30), resume=True).step == 12


def test_mixed_run_resumed_with_other_corpora_raises(
    mixed: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    stop_after(mixed, 5)
    other = prepared(tmp_path / "small", make_texts(30, seed=9), tokenizer)
    mixed["data"]["mix"][1]["dir"] = str(other)
    with pytest.raises(CheckpointError, match="the data's manifest_sha256 was"):
        train(mixed, resume=True)


def test_mixed_run_corpora_with_different_tokenizers_raise_data_error(
    mixed: dict[str, Any], tmp_path: Path, texts: list[str], data: Path
) -> None:
    other = prepared(tmp_path / "other", make_texts(20), train_tokenizer(texts, 300))
    mixed["data"]["mix"][1]["dir"] = str(other)
    with pytest.raises(DataError, match="different tokenizers") as caught:
        train(mixed)
    assert f"{other} can't be mixed with {data}" in str(caught.value)
    assert not run_folder(mixed).exists()


def test_mixed_run_checkpoint_is_evaluated_on_named_corpus(
    mixed: dict[str, Any], data: Path, small: Path
) -> None:
    run = train(mixed)
    with pytest.raises(DataError, match=f"was trained on a mix of {data}, {small}: choose one"):
        evaluate(run.checkpoint, device="cpu")
    assert math.isfinite(evaluate(run.checkpoint, small, device="cpu").loss)
    assert main(["info", str(run.checkpoint)]) == 0


def test_run_on_data_behind_url_equals_run_on_local_data(
    recipe: dict[str, Any],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    here = train(recipe)
    expected = evaluate(here.checkpoint, device="cpu").loss
    far = copy.deepcopy(recipe)
    far["run"]["dir"] = str(tmp_path / "far")
    far["data"]["dir"] = f"file://{data}"
    there = train(far)
    assert records(far) == records(recipe)
    # The recorded training data is the URL, wherever the cache is.
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "another"))
    assert evaluate(there.checkpoint, device="cpu").loss == expected
    assert (tmp_path / "another").is_dir()
    capfdbinary.readouterr()
    arguments = ["eval", here.checkpoint, "--data", f"file://{data}", "--device", "cpu", "--json"]
    assert main([*map(str, arguments)]) == 0
    assert json.loads(capfdbinary.readouterr().out)["loss"] == expected


def test_mixed_run_corpora_may_lie_in_different_locations(
    mixed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    train(mixed)
    far = copy.deepcopy(mixed)
    far["run"]["dir"] = str(tmp_path / "far")
    here, there = (entry["dir"] for entry in far["data"]["mix"])
    far["data"]["mix"][1]["dir"] = f"file://{there}"
    run = train(far)
    assert records(far) == records(mixed)
    with pytest.raises(DataError, match=f"on a mix of {here}, file://{there}: choose one"):
        evaluate(run.checkpoint, device="cpu")


def evaluation(loss: float, bits_per_byte: float, tokens: int) -> Evaluation:
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=bits_per_byte,
        gzip_bits_per_byte=1.0,
        tokens=tokens,
        rows=2,
        total_rows=5,
        split="val",
        seq_len=8,
        document_masking=False,
    )


def test_mixed_evaluation_matches_known_values() -> None:
    # Corpora with 4 and 2 bytes per token, which is 1 / (4 ln 2) and 1 / (2 ln 2) bits per byte and
    # nat.
    bits = [1 / (4 * math.log(2)), 1 / (2 * math.log(2))]
    found = mixed_evaluation(
        [3, 1], [evaluation(2.0, 2 * bits[0], 16), evaluation(4.0, 4 * bits[1], 1600)], bits
    )
    assert found.loss == 2.5
    assert found.perplexity == math.exp(2.5)
    # A token of the mix has a loss of 2.5 nats and 3.5 bytes.
    assert found.bits_per_byte == pytest.approx(2.5 / math.log(2) / 3.5, rel=1e-15)
    assert (found.tokens, found.rows, found.total_rows) == (1616, 4, 10)
    assert found.gzip_bits_per_byte is None
    one = mixed_evaluation([7], [evaluation(2.0, 2 * bits[0], 16)], bits[:1])
    assert one.loss == 2.0
    assert one.bits_per_byte == pytest.approx(2 * bits[0], rel=1e-15)


ONE = {"dir": "a", "weight": 1}


@pytest.mark.parametrize(
    "data, said",
    [
        ({}, "data.dir is missing"),
        ({"dir": None}, "data: set exactly one of dir (a prepared folder), mix"),
        ({"dir": "d", "mix": [ONE]}, "data: set exactly one of dir (a prepared folder), mix"),
        ({"mix": []}, "data.mix: list should have at least 1 item"),
        ({"mix": {"dir": "a"}}, "data.mix: input should be a valid list"),
        ({"mix": ["a"]}, "data.mix.0 must be a section with keys, not 'a'"),
        ({"mix": [{"dir": "a"}]}, "data.mix.0.weight is missing"),
        ({"mix": [ONE, {"weight": 1}]}, "data.mix.1.dir is missing"),
        ({"mix": [{**ONE, "wieght": 1}]}, "key data.mix.0.wieght (did you mean 'weight'?)"),
        ({"mix": [{**ONE, "weight": 0}]}, "data.mix.0.weight: input should be greater than 0"),
        ({"mix": [{**ONE, "weight": True}]}, "data.mix.0.weight: input should be a valid number"),
        ({"mix": [{**ONE, "weight": "1"}]}, "data.mix.0.weight: input should be a valid number"),
        ({"mix": [{**ONE, "weight": math.inf}]}, "data.mix.0.weight: input should be a finite"),
        ({"mix": [{**ONE, "name": "a/b"}]}, "data.mix.0.name: string should match pattern"),
        (
            {"mix": [{"dir": "a", "weight": 0.3333333333}, {"dir": "b", "weight": 0.6666666667}]},
            "data: a mix with the weights (0.3333333333, 0.6666666667) has a period",
        ),
        (
            {"mix": [{"dir": "x/a", "weight": 1}, {"dir": "y/a/", "weight": 1}]},
            "data: two corpora in mix are called 'a': set a different name for each",
        ),
    ],
)
def test_mixed_run_invalid_mixes_raise_config_error(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_recipe({"data": data})


@pytest.mark.parametrize(
    "entry, label",
    [
        ({"dir": "x/a"}, "a"),
        ({"dir": "s3://bucket/text/"}, "text"),
        ({"dir": "x/a", "name": "web"}, "web"),
        ({"dir": "/"}, "/"),
    ],
)
def test_mix_corpora_are_labelled_by_folder(entry: dict[str, Any], label: str) -> None:
    mix = parse_recipe({"data": {"mix": [{**entry, "weight": 2}]}}).data.mix
    assert mix is not None
    assert [corpus.label for corpus in mix] == [label]


def test_mixed_run_mix_is_accepted_on_command_line(
    mixed: dict[str, Any],
    tmp_path: Path,
    data: Path,
    small: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    del mixed["data"]["mix"]
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(mixed))
    mix = f"[{{dir: {data}, weight: 7}}, {{dir: {small}, weight: 3, name: other}}]"
    assert main(["train", str(path), "--data.mix", mix, "--schedule.max_steps", "2", "--json"]) == 0
    assert "epoch/other" in records(mixed)[-1]
    # The resolved recipe contains a mix, too.
    again = ["train", str(run_folder(mixed) / "recipe.yaml"), "--resume", "--json"]
    assert main([*again]) == 0
    capfdbinary.readouterr()
    assert main(["train", str(path), "--data.mix", mix, "--data.dir", "x"]) == 2
    assert b"data: set exactly one of dir" in capfdbinary.readouterr().err
