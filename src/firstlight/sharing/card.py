"""Cards (README.md) of models and prepared corpora.

A card consists of metadata for the hub and a description that is generated from facts in the files.
The templates are in the folder cards/.

Facts that are not in any file are None or empty, and are omitted from the card. Because cards are
public, local paths are reduced to their last part ("neutral" paths).
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


#: File names of the card and of the loss plot in a shared folder.
CARD_NAME = "README.md"
PICTURE_NAME = "loss.png"
_URL_OF_DATASETS = "hf://datasets/"
#: Names of recipe keys (section, key) in the card's table about training.
_RECIPE_ROWS = {
    ("data", "seq_len"): "tokens per sequence",
    ("batch", "global_batch_tokens"): "tokens per step",
    ("optimizer", "name"): "optimizer",
    ("optimizer", "learning_rate"): "peak learning rate",
    ("optimizer", "weight_decay"): "weight decay",
    ("schedule", "kind"): "schedule",
    ("efficiency", "precision"): "precision",
}
#: Names in the card of the losses in an evaluation or a line of metrics.
_LOSSES = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
#: File in the run folder with the results of `firstlight eval`.
EVALUATIONS_NAME = "evaluations.jsonl"


@dataclass(frozen=True)
class DataFacts:
    """A corpus on which a run was trained.

    Attributes:
        name: last part of the folder's path, the URL, or the name of a file with conversations.
        sources: names of the inputs from which the corpus was prepared.
        splits: manifest entries of the splits, keyed by name; empty if the folder is missing or was
            changed after training.
        options: options of `firstlight prepare` for this corpus, except the inputs and the
            tokenizer.
        weight: weight of the corpus in a mix, or None.
    """

    name: str
    sources: Sequence[str] = ()
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Sequence[str] = ()
    weight: float | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model to share.

    Attributes:
        folder: folder of the checkpoint, or of a model without a run.
        config: config of the model.
        parameters: number of parameters.
        tokenizer: tokenizer of the model, if any.
        run: record of the run up to the step of the checkpoint; None for a model without a run.
        step: step of the checkpoint; None for a model without a run.
        max_steps: total number of steps in the run, or None if unknown.
        numbers: result of `final_numbers` for the run up to `step`; empty for a model without a
            run.
        data: corpora on which the run was trained.
        init_from: model with which the run was initialised, as a hub id or the last part of a path;
            None for random weights.
        request: options and inputs of the command, if `firstlight train TEXTS` created the run;
            otherwise empty.
        evaluations: results of `firstlight eval` for exactly these weights, newest last.
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
        best: True to use a run folder's checkpoint with the lowest validation loss instead of the
            newest.

    Raises:
        ConfigError, CheckpointError, ModelError, TokenizerError: the model or a file of its run
            can't be read.
    """
    return read_model_folder(source, facts_of, best=best)


def facts_of(folder: Path) -> ModelFacts:
    """Return the facts about a model folder. If the folder is a checkpoint, it must have been
    verified before.

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
    """Return the run folder of a checkpoint folder, or None for any other folder."""
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
    """Return the metrics up to and including a step."""
    count = int(np.searchsorted(metrics.steps, step, side="right"))
    columns = {
        key: (lines[lines < count], values[lines < count])
        for key, (lines, values) in metrics.columns.items()
    }
    return Metrics(
        metrics.steps[:count], {key: found for key, found in columns.items() if len(found[0])}
    )


def _request_of(run_folder: Path) -> Mapping[str, Any]:
    """Return the options of the `firstlight train TEXTS` command that created a run, or an empty
    mapping for other runs. The "inputs" and "overrides" are included with neutral paths.
    """
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
    """Return the value of an override as command-line text, with neutral paths."""
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
    """Return the facts about the corpora in a run's recipe.

    Facts are read from the folder of a corpus only if its manifest has not changed since the run
    was trained. For a corpus of a mix, the tokenizer must still be the tokenizer of the run.
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
    """Return the facts about a corpus. If the corpus is a URL, can't be read or has changed, return
    only its name.

    Args:
        location: folder or URL of the corpus.
        is_the_same: function that returns True if a manifest shows that the corpus is unchanged.
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
    """Return the facts in the manifest and in the list of inputs of a prepared corpus.

    Args:
        folder: folder of the corpus.
        manifest: manifest in that folder.
    """
    names, read_by, are_cleaned = read_sources(folder)
    options = [*_prepare_options(manifest, own_val="--val-input" in read_by), *read_by]
    is_text = manifest["version"] != shards.LABELLED_VERSION
    if is_text and not are_cleaned and "gutenberg_stripped" not in manifest:
        options.append("--as-is")
    return DataFacts(Path(os.path.abspath(folder)).name, names, manifest["splits"], options)


def _prepare_options(manifest: Mapping[str, Any], *, own_val: bool) -> list[str]:
    """Return the options of `firstlight prepare` with which a corpus was prepared, except options
    with default values.

    Args:
        manifest: manifest of the corpus.
        own_val: True if the validation split has separate inputs (`--val-input`).
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
    """Return the values of a recipe with neutral paths. Sample prompts are not changed, because
    they are texts."""
    if isinstance(values, Mapping):
        return {
            key: value if key == "sample_prompts" else neutral_recipe(value)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [neutral_recipe(value) for value in values]
    if not isinstance(values, str):
        return values
    # Split the text at commas, because evaluation tasks have the form NAME,FILE.
    return ",".join(
        neutral_name(part.strip()) if "/" in part else part for part in values.split(",")
    )


def record_evaluation(checkpoint: Path, result: Mapping[str, Any]) -> None:
    """Append a result of `firstlight eval` to the file evaluations.jsonl in the run folder. Do
    nothing for a model without a run.

    The SHA-256 of the checkpoint is stored with the result.

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
        # Lock the folder: otherwise, two evaluations that end at the same time could overwrite each
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
    """Return the text of a model card. The card of a run includes the picture `PICTURE_NAME`, which
    must be in the same folder.

    Args:
        facts: facts about the model.
        repository: USER/NAME on the hub; None to use the name of the run folder or model folder.
        licence: licence as an id of the hub, such as "apache-2.0", or None if no licence was
            specified.
        gguf: name of a GGUF file in the same folder; None if there is none.
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
    """Return the text of a corpus card.

    Args:
        facts: facts about the corpus: the names of its inputs, its splits, and the options with
            which it was prepared.
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
        # Disable the hub's viewer, because it supports only tables and not shards.
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


#: Size categories of the hub, keyed by their exclusive upper limits in documents.
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
    """Remove the superfluous empty lines that omitted parts of the template leave in a card."""
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
    # Remove the revision, which the hub's metadata does not support.
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
    """Return the names (OWNER/NAME) of the hub datasets in `data`, without duplicates. A hub
    dataset can be an input or the location of a corpus.
    """
    names = [source for one in data for source in one.sources if source.startswith("hf:")]
    found = [name[3:].partition(":")[0] for name in names]
    urls = [one.name for one in data if one.name.startswith(_URL_OF_DATASETS)]
    found += ["/".join(url.removeprefix(_URL_OF_DATASETS).split("/")[:2]) for url in urls]
    return list(dict.fromkeys(found))


def _measured(facts: ModelFacts) -> Iterator[tuple[str, str, float, float | None]]:
    """Yield all results as (dataset or task, metric, value, standard error or None).

    The value of a metric is taken from the newest `firstlight eval` that measured it. If there is
    none, it is taken from the run's own evaluation at or before the step of the checkpoint.
    """
    corpus = "all data"
    if len(facts.data) == 1:
        corpus = ", ".join(facts.data[0].sources) or facts.data[0].name
    # Later entries replace earlier ones.
    found = _measured_in_run(facts, corpus)
    for one in facts.evaluations:
        found |= _measured_by_eval(one, corpus)
    for (place, metric), (value, error) in found.items():
        if math.isfinite(value):
            yield place, metric, value, error


#: Results as (value, standard error or None), keyed by (dataset or task, metric).
_Results = dict[tuple[str, str], tuple[float, float | None]]


def _measured_in_run(facts: ModelFacts, corpus: str) -> _Results:
    """Return the results of the run's own evaluation."""
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
    """Return the results of one `firstlight eval`."""
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
    """Return a Markdown list item for each split in a manifest, with the numbers of tokens,
    documents and bytes of text.

    Args:
        splits: manifest entries, keyed by split name.
    """
    return [
        f"- {_SPLITS.get(name, name)}: {split['tokens']:,} tokens in {split['documents']:,} "
        f"documents ({split['text_bytes']:,} bytes of text)"
        for name, split in splits.items()
    ]


def source_link(name: str) -> str:
    """Return the name of a corpus's input as Markdown, with a link if it is a hub dataset."""
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
    """Return a sentence about the run's own evaluation, or None if there was no evaluation."""
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
        # Specify the number of steps even if the run had a time budget, because another machine
        # would make a different number of steps in the same time.
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
    for key, value in request.get("overrides", ()):
        words += [f"--{key}", str(value)]
    return shlex.join(words)
