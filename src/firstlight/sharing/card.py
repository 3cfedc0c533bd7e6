"""The cards (README.md) of a model and of a prepared corpus: metadata for the hub, and a
description from the facts in their files. The folder cards/ has their templates."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from firstlight.console import compact, loss_text, plain, rounded
from firstlight.conversion.gguf.architectures import ARCHITECTURES
from firstlight.data.remote import is_url
from firstlight.evaluation.scores import with_error
from firstlight.report.summary import duration, memory_unit
from firstlight.sharing.facts import DataFacts, ModelFacts
from firstlight.weights.hub import is_hub_id

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

#: File names of the card, of the picture of the loss and of the recipe, in a shared folder.
CARD_NAME = "README.md"
PICTURE_NAME = "loss.png"
RECIPE_NAME = "recipe.yaml"
_URL_OF_DATASETS = "hf://datasets/"
#: Recipe keys (section, key) in the card's table on training -> their names there.
_RECIPE_ROWS = {
    ("data", "seq_len"): "tokens a sequence",
    ("batch", "global_batch_tokens"): "tokens a step",
    ("optimizer", "name"): "optimizer",
    ("optimizer", "learning_rate"): "peak learning rate",
    ("optimizer", "weight_decay"): "weight decay",
    ("schedule", "kind"): "schedule",
    ("efficiency", "precision"): "precision",
}
#: Keys of an evaluation or of a metrics line -> their names in the card.
_LOSSES = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}


def model_card(
    facts: ModelFacts,
    repository: str | None = None,
    *,
    licence: str | None = None,
    gguf: str | None = None,
) -> str:
    """The text of a model's card. The card of a run includes the picture `PICTURE_NAME`, which must
    be in the same folder.

    Args:
        facts: facts about the model.
        repository: USER/NAME on the hub; None takes the name of the run's or the model's folder.
        licence: the hub's id of the licence, such as "apache-2.0"; None if no licence was given.
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
    """The text of a corpus' card.

    Args:
        facts: names of the corpus' inputs, its splits, and the options that it was prepared with.
        manifest: the corpus' manifest.
        repository: USER/NAME on the hub.
        licence: the hub's id of the licence, such as "cc-by-4.0"; None if no licence was given.
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
        # The hub's viewer shows tables, which shards are not.
        viewer=False,
    )
    rejected = manifest["documents"].get("rejected") or {}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
    left_out = [f"- left out: {sum(rejected.values()):,} documents ({reasons})"] if rejected else []
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


#: The hub's size categories by their upper bound in documents (exclusive).
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
    """A card without the empty lines of parts that its template leaves out."""
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
    # In the hub's metadata, repositories have no revision.
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
    """OWNER/NAME of each dataset on the hub that is an input or the location of a corpus in `data`,
    without repetitions."""
    names = [source for one in data for source in one.sources if source.startswith("hf:")]
    found = [name[3:].partition(":")[0] for name in names]
    urls = [one.name for one in data if one.name.startswith(_URL_OF_DATASETS)]
    found += ["/".join(url.removeprefix(_URL_OF_DATASETS).split("/")[:2]) for url in urls]
    return list(dict.fromkeys(found))


def _measured(facts: ModelFacts) -> Iterator[tuple[str, str, float, float | None]]:
    """All results as (dataset or task, metric, value, standard error or None).

    A result is from the run's own evaluation at or before this step, unless `firstlight eval` has
    measured the same metric: then the newest of its results.
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


#: (dataset or task, metric) -> (value, standard error or None).
_Results = dict[tuple[str, str], tuple[float, float | None]]


def _measured_in_run(facts: ModelFacts, corpus: str) -> _Results:
    """The results of the run's own evaluation."""
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
    """The results of one `firstlight eval`."""
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
    kind = f"{facts.config.model_type} model of {rounded(facts.parameters)} parameters"
    if facts.run is None:
        return f"A {kind}."
    start = f"on from {_linked(facts.init_from)}" if facts.init_from else "from random weights"
    text = f"A {kind}, trained {start} with firstlight {_version(facts)}".rstrip() + "."
    if facts.is_unfinished:
        text += (
            f" This is step {facts.step:,} of {facts.max_steps:,}: the run was not finished when "
            "it was taken, and its learning-rate schedule was not complete."
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
        ("hidden_size", "width"),
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
    """A line of a Markdown list for each split of a manifest: tokens, documents, bytes of text.

    Args:
        splits: entries of a manifest by the split's name.
    """
    return [
        f"- {_SPLITS.get(name, name)}: {split['tokens']:,} tokens of {split['documents']:,} "
        f"documents ({split['text_bytes']:,} bytes of text)"
        for name, split in splits.items()
    ]


def source_link(name: str) -> str:
    """The name of a corpus' input as Markdown; a dataset on the hub is a link."""
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
        yield "tokens seen", f"{tokens:,}" + ("" if epochs is None else f" ({epochs:.3g} epochs)")
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
    """A sentence on the run's own evaluation; None if there is none."""
    if facts.numbers.get("val/loss") is None or facts.run is None:
        return None
    metrics = facts.run.metrics.series("val/loss")
    value, step = loss_text(float(metrics.y[-1])), int(metrics.x[-1])
    rows_used = (facts.run.recipe.get("evaluation") or {}).get("max_rows")
    limit = f" on at most {rows_used:,} rows of it" if rows_used else ""
    return f"The run's own evaluation at step {step:,}{limit}: {value} nats a token."


def _speed_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    numbers = facts.numbers
    machine = facts.run.start.get("machine") if facts.run is not None else None
    if isinstance(machine, dict) and machine.get("name"):
        yield "machine", f"{machine['name']} ({machine.get('device', '')})"
    if numbers.get("tokens_per_second") is not None:
        yield "speed of training", f"{numbers['tokens_per_second']:,.0f} tokens/s (median)"
    if numbers.get("mfu") is not None:
        yield "model FLOPs utilization", f"{numbers['mfu']:.1%}"
    if numbers.get("memory_bytes") is not None:
        size, unit = memory_unit(numbers["memory_bytes"])
        yield "peak memory of training", f"{numbers['memory_bytes'] / size:,.3g} {unit}"
    if numbers.get("hours"):
        yield "time of training", " ".join(duration(numbers["hours"]))


def _commands(facts: ModelFacts, repository: str) -> list[str]:
    """The shell commands that repeat a run."""
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
        # A run limited by minutes is repeated with its number of steps: on another machine, the
        # same minutes are another number of steps.
        steps = facts.run.length["max_steps"]
        options += ["--schedule.max_steps", str(steps), "--schedule.max_minutes", "null"]
        options += ["--schedule.epochs", "null"]
    if facts.init_from:
        options += ["--init-from", facts.init_from]
    options += ["--run.dir", f"{name}-run"]
    lines.append(f"firstlight train {name}/{RECIPE_NAME} {shlex.join(options)}")
    return lines


def _call_on_texts(facts: ModelFacts) -> str:
    """The call `firstlight train TEXTS` that made the run, as a shell command."""
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
