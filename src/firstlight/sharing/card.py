"""Write cards (README.md) for models and prepared corpora.

A card consists of metadata for the hub and a description. Both are generated from information in
the files of the model or corpus. The templates for the cards are in the folder cards/.

Information that is not in the files is None or empty, and it is omitted from the card. Because
cards are public, only the last component of local paths is shown. Paths that have been shortened in
this way are called neutral.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from firstlight.checkpoint.checkpoint import STATE_NAME, load_trainer_state
from firstlight.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME, read_manifest
from firstlight.checkpoint.selection import read_model_folder
from firstlight.console import compact, counted, gib, loss_text, plain, rounded
from firstlight.data import shards
from firstlight.data.remote import is_url
from firstlight.data.sources import neutral_name, read_sources
from firstlight.errors import FirstlightError
from firstlight.evaluation.scores import with_error
from firstlight.files.atomic import write_file
from firstlight.from_texts.run_folder import read_state
from firstlight.lora.files import config_folder
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.recipe.load import parse_yaml
from firstlight.report.summary import duration, final_numbers, memory_kind
from firstlight.run_log.names import METRICS_NAME, RECIPE_NAME
from firstlight.run_log.reader import Metrics, RunRecord, read_json_lines, read_run
from firstlight.tokenizer import Tokenizer
from firstlight.weights.gguf.metadata import ARCHITECTURES
from firstlight.weights.hub import is_hub_id
from firstlight.weights.huggingface import read_config, tokenizer_of

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData


#: File names of the card and the loss plot in the folder that is uploaded.
CARD_NAME = "README.md"
PICTURE_NAME = "loss.png"
_URL_OF_DATASETS = "hf://datasets/"
#: Names under which recipe keys appear in the training table of the card, keyed by (section, key).
_RECIPE_ROWS = {
    ("data", "seq_len"): "tokens per sequence",
    ("batch", "global_batch_tokens"): "tokens per step",
    ("optimizer", "name"): "optimizer",
    ("optimizer", "learning_rate"): "peak learning rate",
    ("optimizer", "weight_decay"): "weight decay",
    ("schedule", "kind"): "schedule",
    ("efficiency", "precision"): "precision",
}
#: Names under which losses appear on the card, keyed by their names in an evaluation or in the
#: metrics of a run.
_LOSSES = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
#: File in the run folder with the results of `firstlight eval`.
EVALUATIONS_NAME = "evaluations.jsonl"


@dataclass(frozen=True)
class DataFacts:
    """A corpus that was used in a training run.

    Attributes:
        name: name of the folder, URL of the corpus, or name of a file with conversations.
        sources: names of the inputs from which the corpus was prepared.
        splits: entries of the splits in the manifest, keyed by split name. Empty if the folder of
            the corpus is missing or has changed since training.
        options: options of `firstlight prepare` with which the corpus was prepared, without the
            inputs and the tokenizer.
        weight: sampling weight of the corpus if the run used several corpora, otherwise None.
    """

    name: str
    sources: Sequence[str] = ()
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Sequence[str] = ()
    weight: float | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Information about a model to share.

    Attributes:
        folder: folder of the checkpoint. For a model that does not belong to a run, folder of the
            model.
        config: config of the model.
        parameters: number of parameters.
        tokenizer: tokenizer of the model, if any.
        run: record of the run up to the step of the checkpoint. None for a model without a run.
        step: step of the checkpoint. None for a model without a run.
        max_steps: total number of steps in the run, or None if unknown.
        numbers: result of `final_numbers` for the run up to `step`. Empty for a model without a
            run.
        data: corpora on which the model was trained.
        init_from: model from which the weights were initialised, as a hub id or the last component
            of a path. None if the weights were initialised randomly.
        request: options and inputs of the `firstlight train TEXTS` command that created the run.
            Empty for all other runs.
        evaluations: results of `firstlight eval` for exactly these weights. The newest result is
            last.
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
        """True if the model is a checkpoint that was saved before the last step of the run."""
        return self.max_steps is not None and self.step is not None and self.step < self.max_steps


def read_facts(source: str | Path, *, best: bool = False) -> ModelFacts:
    """Read the information about a model to share.

    Args:
        source: a run folder, a checkpoint folder, a Hugging Face model folder or a hub id.
        best: True to use the checkpoint with the lowest validation loss if the source is a run
            folder. False to use the newest checkpoint.

    Raises:
        ConfigError, CheckpointError, ModelError, TokenizerError: the model or a file of its run
            can't be read.
    """
    return read_model_folder(source, facts_of, best=best)


def facts_of(folder: Path) -> ModelFacts:
    """Return the information about a model folder. If the folder is a checkpoint, the caller must
    already have verified it.

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
    """Return the run folder that contains a checkpoint folder, or None for any other folder."""
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
    """Return the metrics of a run, up to and including a step."""
    count = int(np.searchsorted(metrics.steps, step, side="right"))
    columns = {
        key: (lines[lines < count], values[lines < count])
        for key, (lines, values) in metrics.columns.items()
    }
    return Metrics(
        metrics.steps[:count], {key: found for key, found in columns.items() if len(found[0])}
    )


def _request_of(run_folder: Path) -> Mapping[str, Any]:
    """Return the options of the `firstlight train TEXTS` command that created a run. They include
    the "inputs" and the "overrides", and all paths in them are neutral. For all other runs, return
    an empty mapping.
    """
    state = read_state(run_folder)
    request, inputs = state.get("request"), state.get("inputs")
    if not isinstance(request, dict) or not isinstance(inputs, list):
        return {}
    return {
        **request,
        "inputs": [neutral_name(str(one)) for one in inputs],
        "keep": [neutral_name(str(one)) for one in request.get("keep", ())],
        "overrides": [
            (key, _neutral_override(key, str(value))) for key, value in request.get("overrides", ())
        ],
    }


def _neutral_override(key: str, text: str) -> str:
    """Return the value of an override as it is written on the command line, with neutral paths."""
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
    """Return the information about all corpora in the recipe of a run.

    The folder of a corpus is read only if its manifest has not changed since the run. If the run
    used several corpora, the tokenizer of the corpus must also still match that of the run.
    """
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
    """Return the information about a corpus. If the corpus is given as a URL, can't be read or has
    changed, only its name is included.

    Args:
        location: folder or URL of the corpus.
        is_the_same: function that is called with the current manifest, and returns True if the
            corpus has not changed.
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
    """Return the information about a prepared corpus that is stored in its manifest and in its list
    of inputs.

    Args:
        folder: folder of the corpus.
        manifest: manifest of the corpus.
    """
    names, read_by, are_cleaned = read_sources(folder)
    options = [*_prepare_options(manifest, own_val="--val-input" in read_by), *read_by]
    is_text = manifest["version"] != shards.LABELLED_VERSION
    if is_text and not are_cleaned and "gutenberg_stripped" not in manifest:
        options.append("--as-is")
    return DataFacts(Path(os.path.abspath(folder)).name, names, manifest["splits"], options)


def _prepare_options(manifest: Mapping[str, Any], *, own_val: bool) -> list[str]:
    """Return the options of `firstlight prepare` with which a corpus was prepared. Options with
    default values are omitted.

    Args:
        manifest: manifest of the corpus.
        own_val: True if the validation split was prepared from separate inputs, which `--val-input`
            specifies.
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
    """Return the values in a recipe with neutral paths. Sample prompts are not changed, because
    they are not paths.
    """
    if isinstance(values, Mapping):
        return {
            key: value if key == "sample_prompts" else neutral_recipe(value)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [neutral_recipe(value) for value in values]
    if not isinstance(values, str):
        return values
    # Split the value at commas, because an evaluation task with a file has the form NAME,FILE.
    return ",".join(
        neutral_name(part.strip()) if "/" in part else part for part in values.split(",")
    )


def record_evaluation(checkpoint: Path, result: Mapping[str, Any]) -> None:
    """Append a result of `firstlight eval` to the file evaluations.jsonl in the run folder. If the
    model does not belong to a run, do nothing.

    The SHA-256 hash of the checkpoint is stored with the result.

    Args:
        checkpoint: folder of the evaluated model.
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
        # Lock the folder. Otherwise, two evaluations that end at the same time could overwrite each
        # other's results.
        fcntl.flock(opened, fcntl.LOCK_EX)
        lines = [
            *read_json_lines(path),
            {"step": manifest["step"], "checkpoint_sha256": manifest["sha256"], **result},
        ]
        write_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    finally:
        os.close(opened)


# The cards


def model_card(
    facts: ModelFacts,
    repository: str | None = None,
    *,
    licence: str | None = None,
    gguf: str | None = None,
) -> str:
    """Return the content of a model card. If the model belongs to a run, the card shows the image
    `PICTURE_NAME`, which must be in the same folder as the card.

    Args:
        facts: information about the model.
        repository: USER/NAME on the hub. None to use the name of the run folder or model folder.
        licence: licence as an id of the hub, such as "apache-2.0", or None if no licence was
            specified.
        gguf: name of a GGUF file in the same folder as the card. None if there is no such file.
    """
    from huggingface_hub import ModelCard

    repository = repository or (facts.run or facts.folder).name
    name = repository.rpartition("/")[2]
    run, measured = facts.run, list(_measured(facts))
    has_recipe = run is not None and bool(run.recipe)
    card = ModelCard.from_template(
        _metadata(facts, name, licence),
        template_str=_template("model.md"),
        name=name,
        repository=repository,
        summary=_summary(facts),
        model_rows=list(_model_rows(facts)),
        data=list(_data_blocks(facts)),
        training_rows=list(_training_rows(facts)),
        recipe_name=RECIPE_NAME if has_recipe else None,
        results=[
            (f"{place}: {_LOSSES.get(metric, metric)}", with_error(value, error))
            for place, metric, value, error in measured
        ],
        has_errors=any(error is not None for *_, error in measured),
        run_evaluation=_run_evaluation(facts),
        gzip=facts.numbers.get("gzip_bits_per_byte"),
        picture_name=None if run is None else PICTURE_NAME,
        speed_rows=list(_speed_rows(facts)),
        has_tokenizer=facts.tokenizer is not None,
        is_chat=facts.tokenizer is not None and facts.tokenizer.chat_template is not None,
        gguf=gguf,
        has_gguf_layout=facts.config.model_type in ARCHITECTURES,
        call=_call_on_texts(facts) if has_recipe and facts.request else None,
        commands="\n".join(_commands(facts, repository)) if has_recipe else None,
        licence=licence,
    )
    return _tidied(str(card))


def corpus_card(
    facts: DataFacts, manifest: Mapping[str, Any], repository: str, licence: str | None
) -> str:
    """Return the content of a dataset card for a corpus.

    Args:
        facts: information about the corpus: the names of its inputs, its splits, and the options
            with which it was prepared.
        manifest: manifest of the corpus.
        repository: USER/NAME on the hub.
        licence: licence as an id of the hub, such as "cc-by-4.0", or None if no licence was
            specified.
    """
    from huggingface_hub import DatasetCard, DatasetCardData

    name = repository.rpartition("/")[2]
    documents = sum(split["documents"] for split in facts.splits.values())
    metadata = DatasetCardData(
        license=licence,
        task_categories=["text-generation"],
        size_categories=next((text for most, text in _SIZES.items() if documents < most), "n>1B"),
        source_datasets=hub_datasets([facts]) or None,
        tags=["firstlight", "tokenized"],
        # Disable the dataset viewer of the hub, because it supports tables but not shards.
        viewer=False,
    )
    rejected = manifest["documents"].get("rejected") or {}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
    left_out = [f"- rejected: {sum(rejected.values()):,} documents ({reasons})"] if rejected else []
    command = ["prepare", *facts.sources, "--tokenizer", name, "--out", f"{name}-again"]
    card = DatasetCard.from_template(
        metadata,
        template_str=_template("corpus.md"),
        name=name,
        repository=repository,
        sources=", ".join(map(source_link, facts.sources)),
        content="\n".join([*split_lines(facts.splits), *left_out]),
        manifest=manifest,
        command=f"firstlight {shlex.join([*command, *facts.options])}" if facts.sources else None,
        licence=licence,
    )
    return _tidied(str(card))


#: Size categories of the hub, keyed by their exclusive upper limits on the number of documents.
_SIZES = {
    1_000: "n<1K",
    10_000: "1K<n<10K",
    100_000: "10K<n<100K",
    1_000_000: "100K<n<1M",
    10_000_000: "1M<n<10M",
    100_000_000: "10M<n<100M",
    1_000_000_000: "100M<n<1B",
}


def _template(name: str) -> str:
    return (resources.files("firstlight.sharing") / "cards" / name).read_text(encoding="utf-8")


def _tidied(card: str) -> str:
    """Remove superfluous empty lines, which are left behind where parts of the template are
    omitted.
    """
    return re.sub(r"\n{3,}", "\n\n", card).strip() + "\n"


def _metadata(facts: ModelFacts, name: str, licence: str | None) -> ModelCardData:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_name=dataset,
            dataset_type=dataset,
            metric_type=metric,
            metric_value=value,
            metric_args=None if error is None else {"stderr": error},
        )
        for dataset, metric, value, error in _measured(facts)
    ]
    base = facts.init_from if facts.init_from and is_hub_id(facts.init_from) else None
    # Remove the revision, because the metadata of the hub does not support revisions.
    base = None if base is None else base.partition("@")[0]
    return ModelCardData(
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["firstlight", facts.config.model_type],
        base_model=base,
        datasets=hub_datasets(facts.data) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def hub_datasets(data: Sequence[DataFacts]) -> list[str]:
    """Return the ids OWNER/NAME of all hub datasets that are inputs or locations of corpora in
    `data`, without duplicates.
    """
    names = [source for one in data for source in one.sources if source.startswith("hf:")]
    found = [name[3:].partition(":")[0] for name in names]
    urls = [one.name for one in data if one.name.startswith(_URL_OF_DATASETS)]
    found += ["/".join(url.removeprefix(_URL_OF_DATASETS).split("/")[:2]) for url in urls]
    return list(dict.fromkeys(found))


def _measured(facts: ModelFacts) -> Iterator[tuple[str, str, float, float | None]]:
    """Yield all results of evaluations. Each is a tuple of the dataset or task, the metric, the
    value, and the standard error or None.

    The value of a metric is taken from the newest result of `firstlight eval` that contains it. If
    there is none, it is taken from the last evaluation during the training run, at or before the
    step of the checkpoint.
    """
    corpus = "all data"
    if len(facts.data) == 1:
        corpus = ", ".join(facts.data[0].sources) or facts.data[0].name
    # Results of later evaluations replace those of earlier ones.
    found = _measured_in_run(facts, corpus)
    for one in facts.evaluations:
        found |= _measured_by_eval(one, corpus)
    for (place, metric), (value, error) in found.items():
        if math.isfinite(value):
            yield place, metric, value, error


#: Results of evaluations, keyed by (dataset or task, metric). Each result is a pair of the value
#: and the standard error, which can be None.
_Results = dict[tuple[str, str], tuple[float, float | None]]


def _measured_in_run(facts: ModelFacts, corpus: str) -> _Results:
    """Return the results of the last evaluation during the training run."""
    found: _Results = {}
    for key in _LOSSES:
        value = facts.numbers.get("val/loss" if key == "loss" else key)
        if value is not None:
            found[f"{corpus}, validation split", key] = value, None
    for key, value in facts.numbers.items():
        if key.endswith(("/acc", "/acc_norm")) and value is not None:
            task, _, metric = key.rpartition("/")
            found[task, metric] = value, facts.numbers.get(f"{key}_stderr")
    return found


def _measured_by_eval(evaluation: Mapping[str, Any], corpus: str) -> _Results:
    """Return the results of an evaluation with `firstlight eval`."""
    found: _Results = {}
    split = _SPLITS.get(evaluation.get("split", ""), "text")
    place = f"{evaluation.get('data') or corpus}, {split}"
    for key in _LOSSES:
        if isinstance(evaluation.get(key), float):
            found[place, key] = evaluation[key], evaluation.get(f"{key}_stderr")
    for task, figures in evaluation.get("tasks", {}).items():
        for metric, value in figures.items():
            if metric != "items" and not metric.endswith("_stderr") and value is not None:
                found[task, metric] = value, figures.get(f"{metric}_stderr")
    return found


_SPLITS = {"val": "validation split", "train": "training split"}


def _summary(facts: ModelFacts) -> str:
    kind = f"{facts.config.model_type} model with {rounded(facts.parameters)} parameters"
    if facts.run is None:
        return f"A {kind}."
    start = "trained from random weights"
    if facts.init_from:
        start = f"fine-tuned from {_linked(facts.init_from)}"
    text = f"A {kind}, {start} with firstlight {_version(facts)}".rstrip() + "."
    if facts.is_unfinished:
        text += (
            f" This is a checkpoint of step {facts.step:,} of {facts.max_steps:,}: the run and its "
            "learning-rate schedule were not finished."
        )
    return text


def _version(facts: ModelFacts) -> str:
    machine = facts.run.start.get("machine") if facts.run is not None else None
    return str(machine.get("firstlight", "")) if isinstance(machine, dict) else ""


def _linked(name: str) -> str:
    if not is_hub_id(name):
        return f"`{name}`"
    return f"[{name}](https://huggingface.co/{name.partition('@')[0]})"


def _model_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    config, tokenizer = facts.config, facts.tokenizer
    yield "family", config.model_type
    yield "parameters", f"{facts.parameters:,}"
    for key, name in (
        ("num_hidden_layers", "layers"),
        ("hidden_size", "hidden size"),
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key and value heads"),
        ("num_experts", "experts"),
        ("max_position_embeddings", "context (tokens)"),
        ("vocab_size", "vocabulary (tokens)"),
    ):
        if (value := getattr(config, key, None)) is not None:
            yield name, f"{value:,}"
    if tokenizer is not None:
        yield "chat template", "no" if tokenizer.chat_template is None else "yes"


def _data_blocks(facts: ModelFacts) -> Iterator[str]:
    for one in facts.data:
        weight = "" if one.weight is None else f", weight {one.weight:g} of the mix"
        lines = [f"`{one.name}`{weight}"]
        if one.sources:
            lines.append(f"- prepared from {', '.join(map(source_link, one.sources))}")
        lines += split_lines(one.splits)
        yield "\n".join(lines)
    start = facts.run.start if facts.run is not None else {}
    for one in start.get("conversations", ()):
        counts = [
            f"{one[key]:,} {key}" for key in ("examples", "rows") if type(one.get(key)) is int
        ]
        if counts:
            yield f"- {one.get('split', 'split')}: {', '.join(counts)}"


def split_lines(splits: Mapping[str, Any]) -> list[str]:
    """Return a Markdown list of the splits in a manifest. Each item shows the number of tokens,
    documents and bytes of text in the split.

    Args:
        splits: manifest entries, keyed by split name.
    """
    return [
        f"- {_SPLITS.get(name, name)}: {split['tokens']:,} tokens in {split['documents']:,} "
        f"documents ({split['text_bytes']:,} bytes of text)"
        for name, split in splits.items()
    ]


def source_link(name: str) -> str:
    """Return the name of an input in Markdown. The name of a hub dataset is a link."""
    if not name.startswith("hf:"):
        return f"`{name}`"
    dataset, _, rest = name[3:].partition(":")
    link = f"[{dataset}](https://huggingface.co/datasets/{dataset})"
    return f"{link} (`{rest}`)" if rest else link


def _training_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    if facts.run is None:
        return
    of = f" of {facts.max_steps:,}" if facts.is_unfinished else ""
    yield "steps", f"{facts.step:,}{of}"
    if (tokens := facts.numbers.get("tokens_seen")) is not None:
        epochs = facts.numbers.get("epoch")
        read = "" if epochs is None else f" ({counted(epochs, 'epoch', '.3g')})"
        yield "tokens seen", f"{tokens:,}{read}"
    for (section, key), name in _RECIPE_ROWS.items():
        values = facts.run.recipe.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        if value is not None:
            is_count = type(value) is int
            yield name, f"{value:,}" if is_count else plain(value)
    lora = facts.run.recipe.get("lora")
    if isinstance(lora, dict):
        yield "adapter", f"LoRA of rank {lora.get('rank')}, merged into the weights"


def _run_evaluation(facts: ModelFacts) -> str | None:
    """Return a sentence about the last evaluation during the training run, or None if there was no
    such evaluation.
    """
    if facts.numbers.get("val/loss") is None or facts.run is None:
        return None
    metrics = facts.run.metrics.series("val/loss")
    value, step = loss_text(float(metrics.y[-1])), int(metrics.x[-1])
    rows_used = (facts.run.recipe.get("evaluation") or {}).get("max_rows")
    limit = f" on at most {rows_used:,} rows of the validation split" if rows_used else ""
    return f"The run's own evaluation at step {step:,}{limit}: {value} nats per token."


def _speed_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    numbers = facts.numbers
    machine = facts.run.start.get("machine") if facts.run is not None else None
    if isinstance(machine, dict) and machine.get("name"):
        yield "machine", f"{machine['name']} ({machine.get('device', '')})"
    if numbers.get("tokens_per_second") is not None:
        yield "training speed", f"{numbers['tokens_per_second']:,.0f} tokens/s (median)"
    if numbers.get("mfu") is not None:
        yield "MFU", f"{numbers['mfu']:.1%}"
    if numbers.get("memory_bytes") is not None:
        yield "peak memory", f"{gib(numbers['memory_bytes'])} ({memory_kind(numbers)})"
    if numbers.get("hours"):
        yield "training time", " ".join(duration(numbers["hours"]))


def _commands(facts: ModelFacts, repository: str) -> list[str]:
    """Return the shell commands that reproduce a run."""
    assert facts.run is not None
    name = repository.rpartition("/")[2]
    lines, options = [f"hf download {repository} --local-dir {name}"], []
    corpus = facts.data[0] if len(facts.data) == 1 else None
    if corpus is not None and not (facts.run.recipe.get("data") or {}).get("files"):
        folder = corpus.name
        if not is_url(folder) and corpus.sources:
            folder = f"{name}-data"
            sources = shlex.join(corpus.sources)
            more = f" {shlex.join(corpus.options)}" if corpus.options else ""
            lines.append(f"firstlight prepare {sources} --tokenizer {name} --out {folder}{more}")
        options += ["--data.dir", folder]
    if facts.run.length.get("max_steps"):
        # Specify the number of steps even if the run had a time budget. Within the same time, a
        # different machine would complete a different number of steps.
        steps = facts.run.length["max_steps"]
        options += ["--schedule.max_steps", str(steps), "--schedule.max_minutes", "null"]
        options += ["--schedule.epochs", "null"]
    if facts.init_from:
        options += ["--init-from", facts.init_from]
    options += ["--run.dir", f"{name}-run"]
    lines.append(f"firstlight train {name}/{RECIPE_NAME} {shlex.join(options)}")
    return lines


def _call_on_texts(facts: ModelFacts) -> str:
    """Return the shell command `firstlight train TEXTS` that created the run."""
    request = facts.request
    words = ["firstlight", "train", *request["inputs"]]
    for key, option in (("tokens", "--tokens"), ("steps", "--steps"), ("size", "--size")):
        if request.get(key) is not None:
            words += [option, compact(request[key]) if key != "size" else str(request[key])]
    if request.get("seconds") is not None:
        words += ["--budget", f"{request['seconds']:g}s"]
    if facts.init_from:
        words += ["--init-from", facts.init_from]
    words += [word for name in request.get("keep", ()) for word in ("--keep", name)]
    for key, value in request.get("overrides", ()):
        words += [f"--{key}", str(value)]
    return shlex.join(words)
