"""The card (README.md) of a model: metadata for the hub, and a description from the facts in the
files of the model and its run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from firstlight.console import compact, loss_text, plain, rounded
from firstlight.conversion.gguf.shape import ARCHITECTURES
from firstlight.data.remote import is_url
from firstlight.evaluation.scores import with_error
from firstlight.report.page import duration, memory_unit
from firstlight.sharing.facts import DataFacts, ModelFacts
from firstlight.weights.hub import is_hub_id

#: File names of the card, of the picture of the loss and of the recipe, in a shared folder.
CARD_NAME, PICTURE_NAME, RECIPE_NAME = "README.md", "loss.png", "recipe.yaml"
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
    repository = repository or (facts.run or facts.folder).name
    name = repository.rpartition("/")[2]
    blocks = [
        f"---\n{_metadata(facts, name, licence)}\n---",
        f"# {name}",
        _summary(facts),
        _section("Model", table(_model_rows(facts))),
        _section("Data", *_data_blocks(facts)),
        _section("Training", table(_training_rows(facts)), *_recipe_note(facts)),
        _section("Results", *_result_blocks(facts)),
        _section("Memory and speed", table(_speed_rows(facts))),
        _section("Use", *_use_blocks(facts, repository, gguf)),
        _section("Train it again", *_command_blocks(facts, repository)),
        _section("Licence", licence or "No licence was given."),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _metadata(facts: ModelFacts, name: str, licence: str | None) -> str:
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
    ).to_yaml()


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
    # Later entries replace earlier ones.
    losses: dict[tuple[str, str], tuple[float, float | None]] = {}
    corpus = "all data"
    if len(facts.data) == 1:
        corpus = ", ".join(facts.data[0].sources) or facts.data[0].name
    for key in _LOSSES:
        value = facts.numbers.get("val/loss" if key == "loss" else key)
        if value is not None:
            losses[f"{corpus}, validation split", key] = value, None
    for key, value in facts.numbers.items():
        if key.endswith(("/acc", "/acc_norm")) and value is not None:
            task, _, metric = key.rpartition("/")
            losses[task, metric] = value, facts.numbers.get(f"{key}_stderr")
    for one in facts.evaluations:
        place = f"{one.get('data') or corpus}, {_SPLITS.get(one.get('split', ''), 'text')}"
        for key in _LOSSES:
            if isinstance(one.get(key), float):
                losses[place, key] = one[key], one.get(f"{key}_stderr")
        for task, figures in one.get("tasks", {}).items():
            for metric, value in figures.items():
                if metric != "items" and not metric.endswith("_stderr") and value is not None:
                    losses[task, metric] = value, figures.get(f"{metric}_stderr")
    for (place, metric), (value, error) in losses.items():
        if math.isfinite(value):
            yield place, metric, value, error


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


def _recipe_note(facts: ModelFacts) -> list[str]:
    if facts.run is None or not facts.run.recipe:
        return []
    return [f"[{RECIPE_NAME}]({RECIPE_NAME}) has every setting."]


def _result_blocks(facts: ModelFacts) -> Iterator[str]:
    rows = [
        (f"{place}: {_LOSSES.get(metric, metric)}", with_error(value, error))
        for place, metric, value, error in _measured(facts)
    ]
    if rows:
        yield table(rows)
        if any(error is not None for *_, error in _measured(facts)):
            yield "± is one standard error."
    if facts.numbers.get("val/loss") is not None and facts.run is not None:
        metrics = facts.run.metrics.series("val/loss")
        value, step = loss_text(float(metrics.y[-1])), int(metrics.x[-1])
        rows_used = (facts.run.recipe.get("evaluation") or {}).get("max_rows")
        limit = f" on at most {rows_used:,} rows of it" if rows_used else ""
        yield f"The run's own evaluation at step {step:,}{limit}: {value} nats a token."
    gzip = facts.numbers.get("gzip_bits_per_byte")
    if gzip is not None:
        yield f"For comparison, gzip -9 takes {gzip:.3f} bits per byte of the validation text."
    if facts.run is not None:
        yield f"![Loss of the run by steps]({PICTURE_NAME})"


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


def _use_blocks(facts: ModelFacts, repository: str, gguf: str | None) -> Iterator[str]:
    if facts.tokenizer is None:
        yield "There is no tokenizer beside the weights."
        return
    is_chat = facts.tokenizer.chat_template is not None
    yield f"transformers:\n\n{code(_transformers(repository, is_chat=is_chat), language='python')}"
    name = repository.rpartition("/")[2]
    command: list[str] = []
    if gguf is not None:
        command = [f"llama-cli --hf-repo {repository} --hf-file {gguf}"]
    elif facts.config.model_type in ARCHITECTURES:
        command = [
            f"firstlight convert {repository} --to gguf --dtype f16 --out {name}-gguf",
            f"llama-cli -m {name}-gguf/{name}-f16.gguf",
        ]
    if command:
        yield f"llama.cpp:\n\n{code(*command)}"
    commands = [f'firstlight generate {repository} --prompt "Once upon a time"']
    commands += [f"firstlight chat {repository}", f"firstlight serve {repository}"]
    yield f"firstlight:\n\n{code(*commands)}"


def _transformers(repository: str, *, is_chat: bool) -> str:
    begin = (
        f"from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{repository}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{repository}")\n'
    )
    if is_chat:
        begin += (
            'messages = [{"role": "user", "content": "Hello!"}]\n'
            "inputs = tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)\n'
        )
    else:
        begin += 'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
    return begin + (
        "output = model.generate(**inputs, max_new_tokens=64)\nprint(tokenizer.decode(output[0]))"
    )


def _command_blocks(facts: ModelFacts, repository: str) -> Iterator[str]:
    if facts.run is None or not facts.run.recipe:
        return
    name = repository.rpartition("/")[2]
    if facts.request:
        yield f"It was made by\n\n{code(_call_on_texts(facts))}"
        yield f"The settings that this call chose on its machine are in `{RECIPE_NAME}`."
        return
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
    yield f"With the same data, this remakes the run:\n\n{code(*lines)}"


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


def _section(title: str, *blocks: str) -> str:
    found = [block for block in blocks if block]
    return "\n\n".join([f"## {title}", *found]) if found else ""


def table(rows: Iterable[tuple[str, str]]) -> str:
    """(name, value) rows as a Markdown table without a header; "" without rows."""
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines]) if lines else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(*lines: str, language: str = "sh") -> str:
    """Lines as a Markdown code block."""
    return "\n".join([f"```{language}", *lines, "```"])
