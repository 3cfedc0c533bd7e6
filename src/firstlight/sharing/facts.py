"""Facts for the card of a shared model, read from its folder and its run's files.

A fact that is in no file is None or empty, and the card leaves it out. Paths of this machine are
reduced to their last part ("neutral" paths), since a card is public.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.checkpoint.checkpoint import STATE_NAME, load_trainer_state
from firstlight.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME, read_manifest
from firstlight.checkpoint.selection import read_model_folder
from firstlight.data import shards
from firstlight.data.remote import is_url
from firstlight.data.sources import neutral_name, read_sources
from firstlight.errors import FirstlightError
from firstlight.files.atomic import write_file
from firstlight.from_texts.run_folder import read_state
from firstlight.lora.files import config_folder
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.recipe.load import parse_yaml
from firstlight.report.summary import final_numbers
from firstlight.run_log.names import METRICS_NAME, RECIPE_NAME
from firstlight.run_log.reader import Metrics, RunRecord, read_json_lines, read_run
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import read_config, tokenizer_of

#: Results of `firstlight eval`, in the run folder.
EVALUATIONS_NAME = "evaluations.jsonl"


@dataclass(frozen=True)
class DataFacts:
    """A corpus that a run was trained on.

    Attributes:
        name: last part of the folder's path, the URL, or the name of a file of conversations.
        sources: names of the inputs that the corpus was prepared from.
        splits: the manifest's entries of its splits, by name; empty if the folder is missing or
            has changed since the training.
        options: options of `firstlight prepare` for this corpus, except inputs and tokenizer.
        weight: weight of the corpus in a mix; None if the run's data are not a mix.
    """

    name: str
    sources: Sequence[str] = ()
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Sequence[str] = ()
    weight: float | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model that is shared.

    Attributes:
        folder: the folder of the checkpoint, or of a model without a run.
        config: the model's config.
        parameters: number of parameters.
        tokenizer: the model's tokenizer, if any.
        run: record of the run up to the step of the checkpoint; None for a model without a run.
        step: step of the checkpoint; None for a model without a run.
        max_steps: number of steps of the whole run; None if unknown.
        numbers: `final_numbers` of the run up to `step`; empty for a model without a run.
        data: the corpora that the run was trained on.
        init_from: the model that the run was initialised from: a hub id, or the last part of a
            path; else None.
        request: options and inputs of the call, if the run was made by `firstlight train TEXTS`;
            else empty.
        evaluations: results of `firstlight eval` of exactly these weights, the newest last.
    """

    folder: Path
    config: ModelConfig
    parameters: int
    tokenizer: Tokenizer | None
    run: RunRecord | None = None
    step: int | None = None
    max_steps: int | None = None
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Sequence[DataFacts] = ()
    init_from: str | None = None
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()

    @property
    def is_unfinished(self) -> bool:
        """True for a checkpoint that was saved before the run's last step."""
        return self.max_steps is not None and self.step is not None and self.step < self.max_steps


def read_facts(source: str | Path, *, best: bool = False) -> ModelFacts:
    """Read the facts about a run's checkpoint, or about a model without a run.

    Args:
        source: a run folder, a checkpoint folder, a Hugging Face model folder or a hub id.
        best: take a run folder's checkpoint with the lowest validation loss, not the newest.

    Raises:
        ConfigError, CheckpointError, ModelError, TokenizerError: the model or a file of its run
            can't be read.
    """
    return read_model_folder(source, facts_of, best=best)


def facts_of(folder: Path) -> ModelFacts:
    """The facts about a model folder. A checkpoint must have been verified already.

    Raises:
        ModelError, CheckpointError, TokenizerError: see `read_facts`.
    """
    folder = Path(os.path.abspath(folder))
    config = read_config(config_folder(folder))
    model = ModelFacts(
        folder=folder,
        config=config,
        parameters=count_parameters(meta_model(config)).total,
        tokenizer=tokenizer_of(folder),
    )
    run_folder = run_of(folder)
    return model if run_folder is None else _with_run(model, run_folder)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder of a checkpoint folder; None for any other folder."""
    checkpoint = Path(os.path.abspath(checkpoint))
    run = checkpoint.parent.parent
    is_run = any((run / name).is_file() for name in (METRICS_NAME, RECIPE_NAME))
    is_checkpoint = checkpoint.parent.name == CHECKPOINTS and (checkpoint / MANIFEST_NAME).is_file()
    return run if is_checkpoint and is_run else None


def _with_run(model: ModelFacts, run_folder: Path) -> ModelFacts:
    manifest, run = read_manifest(model.folder), read_run(run_folder)
    step, max_steps = manifest["step"], run.max_steps
    events = [event for event in run.events if event["step"] <= step]
    run = dataclasses.replace(run, metrics=_until(run.metrics, step), events=events)
    evaluations = read_json_lines(run_folder / EVALUATIONS_NAME)
    init_from = run.start.get("init_from")
    return dataclasses.replace(
        model,
        run=run,
        step=step,
        max_steps=max_steps,
        numbers=final_numbers(run),
        data=_data_of(run, model.folder),
        init_from=neutral_name(init_from) if isinstance(init_from, str) else None,
        request=_request_of(run_folder),
        evaluations=[
            one for one in evaluations if one.get("checkpoint_sha256") == manifest["sha256"]
        ],
    )


def _until(metrics: Metrics, step: int) -> Metrics:
    """The metrics up to and including a step."""
    count = int(np.searchsorted(metrics.steps, step, side="right"))
    columns = {
        key: (lines[lines < count], values[lines < count])
        for key, (lines, values) in metrics.columns.items()
    }
    return Metrics(
        metrics.steps[:count], {key: found for key, found in columns.items() if len(found[0])}
    )


def _request_of(run_folder: Path) -> Mapping[str, Any]:
    """The options of the call `firstlight train TEXTS` that made a run, with "inputs" and
    "overrides" whose paths are neutral; empty for other runs."""
    state = read_state(run_folder)
    request, inputs = state.get("request"), state.get("inputs")
    if not isinstance(request, dict) or not isinstance(inputs, list):
        return {}
    return {
        **request,
        "inputs": [neutral_name(str(one)) for one in inputs],
        "overrides": [
            (key, _neutral_override(key, str(value))) for key, value in request.get("overrides", ())
        ],
    }


def _neutral_override(key: str, text: str) -> str:
    """An override's value as text for the command line, with neutral paths."""
    if key.endswith("sample_prompts"):
        return text
    try:
        value = parse_yaml(text.encode())
    except ValueError:
        value = text
    neutral = neutral_recipe(value)
    if neutral == value:
        return text
    return neutral if isinstance(neutral, str) else json.dumps(neutral, ensure_ascii=False)


def _data_of(run: RunRecord, checkpoint: Path) -> list[DataFacts]:
    """The corpora in a run's recipe. Facts are read from a corpus' folder if its manifest is still
    the one that the run was trained on; of a mix, if its tokenizer is still the run's."""
    data = run.recipe.get("data")
    if not isinstance(data, dict):
        return []
    if data.get("files"):
        return [DataFacts(neutral_name(str(name))) for name in data["files"]]
    if data.get("mix"):
        tokenizer = run.start.get("tokenizer_sha256")
        return [
            dataclasses.replace(
                _corpus(str(one["dir"]), lambda found: found["tokenizer_sha256"] == tokenizer),
                weight=one.get("weight"),
            )
            for one in data["mix"]
        ]
    if not data.get("dir"):
        return []
    state = load_trainer_state(checkpoint) if (checkpoint / STATE_NAME).is_file() else {}
    wanted = (state.get("data") or {}).get("manifest_sha256")

    def is_the_same(manifest: Mapping[str, Any]) -> bool:
        content = json.dumps(manifest, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest() == wanted

    found = _corpus(str(data["dir"]), is_the_same)
    request = _request_of(run.folder)
    if request and not found.sources:
        found = dataclasses.replace(found, sources=request["inputs"])
    return [found]


def _corpus(location: str, is_the_same: Any) -> DataFacts:
    """The facts about a corpus; only its name if it is a URL, can't be read, or has changed.

    Args:
        location: the corpus' folder or URL.
        is_the_same: function from the folder's manifest to True if the corpus is unchanged.
    """
    if is_url(location):
        return DataFacts(location)
    folder = Path(location).expanduser()
    try:
        manifest = shards.read_manifest(folder)
    except FirstlightError:
        return DataFacts(neutral_name(location))
    if not is_the_same(manifest):
        return DataFacts(neutral_name(location))
    return corpus_facts(folder, manifest)


def corpus_facts(folder: Path, manifest: Mapping[str, Any]) -> DataFacts:
    """The facts about a prepared corpus, from its manifest and the list of its inputs.

    Args:
        folder: the corpus' folder.
        manifest: the manifest in it.
    """
    names, read_by, are_cleaned = read_sources(folder)
    options = [*_prepare_options(manifest, own_val="--val-input" in read_by), *read_by]
    is_text = manifest["version"] != shards.LABELLED_VERSION
    if is_text and not are_cleaned and "gutenberg_stripped" not in manifest:
        options.append("--as-is")
    return DataFacts(Path(os.path.abspath(folder)).name, names, manifest["splits"], options)


def _prepare_options(manifest: Mapping[str, Any], *, own_val: bool) -> list[str]:
    """Options of `firstlight prepare` for a corpus, as far as they differ from the defaults.

    Args:
        manifest: the corpus' manifest.
        own_val: True if the validation split has inputs of its own (`--val-input`).
    """
    options = []
    if manifest["version"] == shards.LABELLED_VERSION:
        kind = "preference" if manifest.get("pairs") else "chat"
        options += ["--kind", kind]
        if manifest.get("chat", {}).get("train_on") == "all":
            options += ["--train-on", "all"]
    if manifest.get("val_fraction") not in (None, 0.1) and not own_val:
        options += ["--val-fraction", f"{manifest['val_fraction']:g}"]
    for name in ("max_documents", "max_tokens"):
        if manifest.get(name) is not None:
            options += [f"--{name.replace('_', '-')}", str(manifest[name])]
    return options


def neutral_recipe(values: Any) -> Any:
    """A recipe's values with neutral paths. Sample prompts are texts, and do not change."""
    if isinstance(values, Mapping):
        return {
            key: value if key == "sample_prompts" else neutral_recipe(value)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [neutral_recipe(value) for value in values]
    if not isinstance(values, str):
        return values
    # Split at commas, since evaluation tasks are written NAME,FILE.
    return ",".join(
        neutral_name(part.strip()) if "/" in part else part for part in values.split(",")
    )


def record_evaluation(checkpoint: Path, result: Mapping[str, Any]) -> None:
    """Add a result of `firstlight eval` to the evaluations.jsonl of the checkpoint's run, with the
    SHA-256 of the checkpoint. Nothing is done for a model without a run.

    Args:
        checkpoint: the folder of the evaluated model.
        result: the result as a JSON object.

    Raises:
        StorageError: the file can't be written.
        CheckpointError: the file or the checkpoint is damaged.
    """
    run = run_of(checkpoint)
    if run is None:
        return
    manifest, path = read_manifest(checkpoint), run / EVALUATIONS_NAME
    opened = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Without the lock, two evaluations that end at the same time would each write the file
        # without the other's line.
        fcntl.flock(opened, fcntl.LOCK_EX)
        lines = [
            *read_json_lines(path),
            {"step": manifest["step"], "checkpoint_sha256": manifest["sha256"], **result},
        ]
        write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    finally:
        os.close(opened)
