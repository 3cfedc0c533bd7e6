"""Recipes: everything that decides a run, in one YAML file of strict sections.

Precedence: defaults < file < `--section.key value`. Every mistake is reported at once, with
the nearest real name; the resolved recipe is saved with the run and in each checkpoint.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from firstlight.data.conversations import ChatForm
from firstlight.data.examples import LongPolicy
from firstlight.data.mixing import whole_weights
from firstlight.efficiency import EfficiencyConfig
from firstlight.efficiency.engine_config import DistributedConfig
from firstlight.errors import ConfigError, InputError, nearest
from firstlight.files import read_file
from firstlight.lora.config import LoraConfig
from firstlight.models import GPT2Config, LlamaConfig, MoEConfig
from firstlight.optim.optimizer import OptimizerConfig
from firstlight.optim.schedule import ScheduleConfig
from firstlight.training.guard import GuardConfig
from firstlight.training.preference import PreferenceConfig
from firstlight.training.yaml_text import MAX_RECIPE_BYTES, parse_yaml


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RunConfig(_Section):
    """The `run` section.

    dir: the run folder: metrics, report, checkpoints. null is runs/<the recipe's name>.
    seed: decides the initial weights, the order of the rows and dropout.
    device: "auto" (a CUDA GPU if there is one, else the CPU), "cpu", "cuda", "cuda:1", "mps".
    max_minutes: save and stop once so much time has passed since the start, but not before a
        step is done; null is no limit.
    tensorboard: write metrics and samples into the run folder's tensorboard/, too.
    """

    dir: str | None = Field(None, min_length=1)
    seed: int = Field(1337, ge=0, lt=2**63)
    device: str = "auto"
    max_minutes: float | None = Field(None, gt=0)
    tensorboard: bool = False


class MixedCorpus(_Section):
    """One corpus of `data.mix`.

    dir: a folder that `firstlight prepare` wrote, or its URL.
    weight: how many rows it gives in relation to the others' weights.
    name: of its val/loss/NAME and epoch/NAME; null is the last part of `dir`.
    """

    dir: str = Field(min_length=1)
    weight: float = Field(gt=0)
    name: str | None = Field(None, pattern=r"^[\w.-]+$")

    @property
    def label(self) -> str:
        """Its name."""
        return self.name or self.dir.rstrip("/").rpartition("/")[2] or self.dir


class DataConfig(_Section):
    """The `data` section. One of `dir`, `mix` and `files` is given.

    kind: chat for conversations, preference for pairs of answers, text for text; null is what
        `dir` holds.
    dir: a folder that `firstlight prepare` wrote, or its URL (s3://, gs://, hf://datasets/...,
        https://), from which it is fetched into a cache.
    mix: several of them, prepared with one tokenizer: a list of {dir, weight}. Each gives rows
        in proportion to its weight, exactly, in its own shuffled order, again and again. An
        epoch is as many rows as the corpora have together. val/loss is the mean of their
        losses by weight; each one's stands beside it.
    files: with kind chat, conversations (with kind preference, pairs) that are prepared when the
        run starts, and kept in the cache: .jsonl, .json and .parquet files, folders, globs,
        hf:NAME[:CONFIG].
    val_files: of `files`, those to validate on; null holds val_fraction of the conversations out.
    val_fraction: of `files`: the share that is held out for validation; 0 is none.
    format: of the records of `files`: alpaca, messages, sharegpt; auto tells each by its keys.
    template: the chat template of `files`: chatml, llama2, llama3, alpaca or a .jinja file; null is
        the tokenizer's own. It is saved with the model.
    tokenizer: of `files`: a folder or file; null is that of --init-from.
    train_on: of `files`: assistant learns what the assistant says and where it ends, all every
        token.
    on_bad: of `files`: whether to refuse or skip records that are no conversations.
    long: of conversations that are longer than a row: refuse them all, drop them, or cut their
        ends off.
    seq_len: tokens a training row; null is the model's max_position_embeddings.
    verify: compare the shards with their sha256 before the first step.
    document_masking: tokens see only their own document; positions start anew in each. Always so
        with conversations.
    workers: threads that read rows ahead; the order of the rows does not depend on them. 0
        reads them when a step needs them.
    prefetch: micro-batches that are read ahead; at least those of one step.
    pin_memory: page-locked batches, from which a GPU copies while it computes; null is where
        there is a CUDA GPU.
    """

    kind: Literal["text", "chat", "preference"] | None = None
    dir: str | None = Field(min_length=1)
    mix: list[MixedCorpus] | None = Field(None, min_length=1)
    files: list[str] | None = Field(None, min_length=1)
    val_files: list[str] | None = Field(None, min_length=1)
    val_fraction: float = Field(0.1, ge=0, lt=1)
    format: ChatForm = "auto"
    template: str | None = Field(None, min_length=1)
    tokenizer: str | None = Field(None, min_length=1)
    train_on: Literal["assistant", "all"] = "assistant"
    on_bad: Literal["refuse", "skip"] = "refuse"
    long: LongPolicy = "refuse"
    seq_len: int | None = Field(None, gt=0)
    verify: bool = True
    document_masking: bool = False
    workers: int = Field(1, ge=0, le=64)
    prefetch: int = Field(2, ge=1, le=1024)
    pin_memory: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_dir(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        # One file needs no list.
        values = {
            name: [value] if name in ("files", "val_files") and isinstance(value, str) else value
            for name, value in values.items()
        }
        if values.get("kind") in ("chat", "preference"):
            values = {"document_masking": True, **values}
        # `dir` is required, but where there is something in its place.
        if values.get("mix") is not None or values.get("files") is not None:
            return {"dir": None, **values}
        return values

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if sum(place is not None for place in (self.dir, self.mix, self.files)) != 1:
            raise ValueError(
                "give either dir, a prepared folder, or mix, several with weights, or files, "
                "conversations with kind chat"
            )
        if self.files is not None and self.kind not in ("chat", "preference"):
            raise ValueError(
                "files are conversations: add kind chat, or kind preference for pairs (text is "
                "prepared before)"
            )
        if self.kind == "preference":
            self._require_for_pairs()
        if self.kind in ("chat", "preference") and not self.document_masking:
            raise ValueError(NO_MASKING)
        given = [name for name in _OF_FILES if name in self.model_fields_set]
        changed = [n for n in given if getattr(self, n) != type(self).model_fields[n].default]
        if self.files is None and changed:
            raise ValueError(
                f"{', '.join(changed)}: only of files; a prepared folder is as it was prepared"
            )
        if self.val_files is not None and "val_fraction" in changed and self.val_fraction:
            raise ValueError("give either val_files or val_fraction")
        if self.mix is not None:
            whole_weights([corpus.weight for corpus in self.mix])
        labels = [corpus.label for corpus in self.mix or ()]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"two corpora of mix are called '{twice}': give each a name")
        return self

    def _require_for_pairs(self) -> None:
        if self.mix is not None:
            raise ValueError("preference pairs can't be mixed: give dir or files")
        if self.long == "cut":
            raise ValueError("long cut is not for preference pairs: half of one says nothing")
        if self.train_on != "assistant" or self.format != "auto":
            raise ValueError(
                "of preference pairs the answers are learned, and each record's form is told by "
                "its keys: leave train_on and format out"
            )


#: Keys of `data` that say how `files` are prepared.
_OF_FILES = ("val_files", "val_fraction", "format", "template", "tokenizer", "train_on", "on_bad")
NO_MASKING = "document_masking can't be off with conversations: examples never see each other"

DEFAULT_ROWS = 8


def _number_of_rows(value: object) -> object:
    if value in (None, "auto") or (type(value) is int and value > 0):
        return value
    raise ValueError(f"must be a whole number above 0, or auto (given: {value!r})")


class BatchConfig(_Section):
    """The `batch` section. An optimizer step sees micro_batch_size x accumulation rows of each
    process.

    micro_batch_size: rows a forward pass: more keep the hardware busier, and take more memory
        for activations. "auto" is the largest that fits: found before the run by trying the
        whole of global_batch_tokens, then half of it, and so on, in a process of its own. null
        is 8; but on a CPU, which some 1,024 tokens keep busy, no more than that where
        global_batch_tokens says how large a step is.
    gradient_accumulation_steps: forward passes a step: the step of a large batch in the memory
        of a small one, with the same gradient.
    global_batch_tokens: tokens a step; decides the accumulation instead of it.
    """

    micro_batch_size: Annotated[int | Literal["auto"] | None, PlainValidator(_number_of_rows)] = (
        None
    )
    gradient_accumulation_steps: int | None = Field(None, gt=0)
    global_batch_tokens: int | None = Field(None, gt=0)

    @property
    def rows(self) -> int:
        """The micro-batch size, once it is decided."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size or DEFAULT_ROWS

    def global_rows(self, seq_len: int) -> int:
        """Rows a step where the micro-batch size is to be found.

        Raises:
            ConfigError: the batch of a step is not given, or no whole number of rows.
        """
        if self.global_batch_tokens is None or self.gradient_accumulation_steps is not None:
            raise ConfigError(
                "batch.micro_batch_size auto needs batch.global_batch_tokens, the batch that a "
                "step sees however it is cut, and no batch.gradient_accumulation_steps: set "
                f"global_batch_tokens to a multiple of data.seq_len, {seq_len}"
            )
        rows, rest = divmod(self.global_batch_tokens, seq_len)
        if rest:
            below = f"{rows * seq_len} or " if rows else ""
            raise ConfigError(
                f"batch.global_batch_tokens {self.global_batch_tokens} is not a multiple of "
                f"data.seq_len {seq_len}: take {below}{(rows + 1) * seq_len}"
            )
        return rows

    def accumulation(self, seq_len: int, processes: int = 1) -> int:
        """Forward passes an optimizer step, of each of so many processes.

        Raises:
            ConfigError: global_batch_tokens does not come out even.
        """
        if self.global_batch_tokens is None:
            return self.gradient_accumulation_steps or 1
        micro_tokens = self.rows * seq_len * processes
        steps, rest = divmod(self.global_batch_tokens, micro_tokens)
        if rest:
            below = f"{steps * micro_tokens} or " if steps else ""
            share = f" x {processes} processes" if processes > 1 else ""
            raise ConfigError(
                f"batch.global_batch_tokens {self.global_batch_tokens} is not a multiple of "
                f"micro_batch_size x seq_len{share} = {micro_tokens}: "
                f"take {below}{(steps + 1) * micro_tokens}"
            )
        if self.gradient_accumulation_steps not in (None, steps):
            raise ConfigError(
                f"batch.gradient_accumulation_steps {self.gradient_accumulation_steps} and "
                f"global_batch_tokens (which makes it {steps}) disagree: leave one out"
            )
        return steps


class EvaluationConfig(_Section):
    """The `evaluation` section.

    every_steps: validation loss and sample texts after every so many steps; 0 is at the end only.
    max_rows: rows of the validation split that are evaluated, spread evenly; 0 is all.
    train_rows: rows of the training split that are evaluated beside it, spread evenly and the same
        each time (of each corpus of a mix): train_eval/loss has what val/loss has, without
        dropout and without a batch's luck; 0 is none.
    sample_prompts: texts to be continued at each evaluation; with conversations, messages to be
        answered.
    sample_tokens: tokens a sample.
    temperature: how the samples are drawn; 0 is greedy.
    tasks: what the model is scored in, as with `firstlight eval --tasks`, each one text:
        "hellaswag,FILE.jsonl", "lm-eval:NAME".
    tasks_every_steps: the tasks after every so many steps, and at the end; 0 is at each evaluation.
    task_items: items of each task, the first so many; 0 is all.
    task_folder: further tasks for lm-evaluation-harness.
    """

    every_steps: int = Field(200, ge=0)
    max_rows: int = Field(256, ge=0)
    train_rows: int = Field(0, ge=0)
    sample_prompts: list[str] = [""]
    sample_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.8, ge=0)
    tasks: list[str] = []
    tasks_every_steps: int = Field(0, ge=0)
    task_items: int = Field(0, ge=0)
    task_folder: str | None = None


class CheckpointConfig(_Section):
    """The `checkpoint` section. One is always written at the end.

    every_steps: a checkpoint after every so many steps; 0 is at the end only.
    keep_last: how many of the newest are kept.
    keep_every: those of steps that are multiples of it are kept for good; 0 is none.
    keep_best: how many with the lowest val/loss at their step are kept beside, and each new lowest
        val/loss is saved, unless every_steps is 0; 0 is none. Without validation there are none.
    asynchronous: copy the state and write the copy while training goes on; null is where memory
        for the copy is free at the first save.
    sharded: with distributed.engine fsdp, each process writes the pieces that it holds, and nothing
        is put together: for models that are too large for that. Any engine goes on from it, with
        any number of processes. The last checkpoint of a run is a Hugging Face model folder too;
        `firstlight convert` makes one of an earlier one.
    """

    every_steps: int = Field(200, ge=0)
    keep_last: int = Field(2, ge=1)
    keep_every: int = Field(0, ge=0)
    keep_best: int = Field(1, ge=0)
    asynchronous: bool | None = None
    sharded: bool = False


class PlanningConfig(_Section):
    """The `planning` section: facts for `firstlight plan` before data and weights are there.
    Training doesn't read it: the prepared data and the weights themselves decide.

    vocab_size: number of tokens of the tokenizer that the data is to be prepared with.
    model: shape of the weights that --init-from is to name, for a recipe without a `model` section.
    """

    vocab_size: int | None = Field(None, ge=1)
    model: (
        Annotated[GPT2Config | LlamaConfig | MoEConfig, Field(discriminator="model_type")] | None
    ) = None


class Recipe(_Section):
    """A whole run. `model` may be left out when weights are given to start from, `lora` when all of
    them are trained, and `preference` always: it is for data of kind preference."""

    run: RunConfig = RunConfig()
    model: (
        Annotated[GPT2Config | LlamaConfig | MoEConfig, Field(discriminator="model_type")] | None
    ) = None
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    efficiency: EfficiencyConfig = EfficiencyConfig()
    distributed: DistributedConfig = DistributedConfig()
    lora: LoraConfig | None = None
    preference: PreferenceConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    planning: PlanningConfig = PlanningConfig()

    @model_validator(mode="after")
    def _falling_rate(self) -> Self:
        lowest, peak = self.schedule.min_learning_rate, self.optimizer.learning_rate
        if lowest is not None and lowest > peak:
            raise ValueError(
                f"schedule.min_learning_rate {lowest:g} is above optimizer.learning_rate {peak:g}: "
                "lower it"
            )
        return self


def load_recipe(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """Read a recipe file.

    Args:
        path: the file.
        overrides: (`section.key`, value as YAML text) pairs that are set after reading.

    Raises:
        ConfigError: the file is missing or not YAML, or keys or values are wrong: all of
            them in one message.
    """
    path = Path(path)
    if not path.exists():
        siblings = [str(p) for p in path.parent.glob("*.y*ml")]
        raise ConfigError(f"recipe {path} does not exist{nearest(str(path), siblings)}")
    try:
        values = parse_yaml(read_file(path, MAX_RECIPE_BYTES))
    except InputError as error:
        raise ConfigError(f"recipe {error}") from error
    except ValueError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {path} must consist of sections such as `data:` and `model:`")
    for name, text in overrides:
        _override(values, name, text)
    recipe = parse_recipe(values, str(path))
    if recipe.run.dir is None:
        run = recipe.run.model_copy(update={"dir": str(Path("runs") / path.stem)})
        recipe = recipe.model_copy(update={"run": run})
    return recipe


#: Mistakes that are told at once.
_MAX_PROBLEMS = 20


def parse_recipe(values: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Validate nested values as a recipe.

    Raises:
        ConfigError: keys or values are wrong: all of them in one message.
    """
    model = values.get("model")
    if isinstance(model, Mapping):
        # A resolved recipe of --init-from may leave the family out; "llama" is the default one.
        values = {**values, "model": {"model_type": "llama", **model}}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        entries = error.errors()
        problems = [_describe(entry) for entry in entries[:_MAX_PROBLEMS]]
        if len(entries) > _MAX_PROBLEMS:
            problems.append(f"and {len(entries) - _MAX_PROBLEMS} more")
        raise ConfigError(f"{where}: {'; '.join(problems)}") from None


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set `section.key` (or `section.key.inner`) to a value given as text."""
    *sections, key = name.split(".")
    if not sections:
        raise ConfigError(f"option --{name} is unknown{nearest(name, known_keys())}")
    place = values
    for section in sections:
        inner = place.setdefault(section, {})
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"option --{name}: {section} is not a section")
        place = inner
    if _takes_text(name) and text not in ("null", "~"):
        place[key] = text
        return
    try:
        place[key] = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"option --{name}: '{text}' is not a valid value: {error}") from error


def _takes_text(name: str) -> bool:
    """Whether a key holds a string, so that `--data.dir 2024` is a folder and not a number."""
    section: type[BaseModel] = Recipe
    *sections, key = name.split(".")
    for part in sections:
        inner = (
            _section_types(section.model_fields[part].annotation)
            if part in section.model_fields
            else []
        )
        if not inner:
            return False
        section = inner[0]
    field = section.model_fields.get(key)
    return field is not None and field.annotation in (str, str | None)


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    """The config classes that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (Union, types.UnionType, Annotated, list):
        return [kind for part in typing.get_args(annotation) for kind in _section_types(part)]
    return []


def key_of_other_name(name: str) -> str | None:
    """The `section.key` of what another program calls `name`, or of a key without section."""
    key = _OTHER_NAMES.get(name, name)
    return next((full for full in known_keys() if full.split(".")[1] == key), None)


def known_keys() -> list[str]:
    """Every `section.key` there is."""
    return sorted({f"{section}.{key}" for section, _, key in recipe_fields()})


def recipe_fields() -> Iterator[tuple[str, type[BaseModel], str]]:
    """(section, its class, key) of everything a recipe can hold, in order."""
    for section, field in Recipe.model_fields.items():
        for kind in _section_types(field.annotation):
            for key in kind.model_fields:
                yield section, kind, key


def key_documentation(section: type[BaseModel]) -> dict[str, str]:
    """What a section's docstring says of each key: its `key: text` paragraphs."""
    paragraphs = re.findall(
        r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", inspect.cleandoc(section.__doc__ or ""), re.MULTILINE
    )
    return {key: " ".join(text.split()) for keys, text in paragraphs for key in keys.split(", ")}


#: What other programs call our keys.
_OTHER_NAMES = {
    "dpo_beta": "beta",
    "pref_beta": "beta",
    "loss_type": "objective",
    "n_embd": "hidden_size",
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "block_size": "max_position_embeddings",
    "max_seq_length": "seq_len",
    "batch_size": "micro_batch_size",
    "lr": "learning_rate",
    "max_iters": "max_steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "warmup_iters": "warmup_steps",
    "lr_decay_iters": "decay_steps",
    "min_lr": "min_learning_rate",
    "grad_clip": "max_grad_norm",
    "out_dir": "dir",
    "path": "dir",
    "datasets": "files",
    "data_files": "files",
    "val_set_size": "val_fraction",
    "chat_template": "template",
    "train_on_inputs": "train_on",
    "assistant_only_loss": "train_on",
    "sequence_len": "seq_len",
    "max_length": "seq_len",
    "cutoff_len": "seq_len",
    "excess_length_strategy": "long",
}


def _describe(entry: Any) -> str:
    """One validation error for a person."""
    location, owners = _locate([str(part) for part in entry["loc"]])
    name = ".".join(location)
    kind = entry["type"]
    if kind == "extra_forbidden":
        known = sorted({key for owner in owners for key in owner.model_fields})
        return f"unknown key {name}{_suggest(location[-1], known)}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "union_tag_invalid":
        context = {key: str(value).replace("'", "") for key, value in entry["ctx"].items()}
        hint = nearest(context["tag"], context["expected_tags"].split(", "))
        return (
            f"{name}.{context['discriminator']} '{context['tag']}' is unknown{hint} "
            f"(known: {context['expected_tags']})"
        )
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name} must be a section with keys of its own, not {entry['input']!r}"
    message = entry["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if kind == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message} (given: {entry['input']!r})"


def _locate(location: list[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """A key's location without the union tags that pydantic puts in, and the section's classes."""
    names: list[str] = []
    owners: list[type[BaseModel]] = [Recipe]
    for position, part in enumerate(location):
        fields = [owner.model_fields[part] for owner in owners if part in owner.model_fields]
        tagged = [owner for owner in owners if part in _tags(owner)]
        if not fields and tagged and len(owners) > 1:
            owners = tagged
            continue
        names.append(part)
        if fields and position < len(location) - 1:
            owners = [kind for field in fields for kind in _section_types(field.annotation)]
    return names, owners


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    """The values that mark this class in a union: ("llama",) for LlamaConfig."""
    for field in section.model_fields.values():
        if typing.get_origin(field.annotation) is typing.Literal:
            return typing.get_args(field.annotation)
    return ()


def _suggest(key: str, known: Sequence[str]) -> str:
    """Which key was most likely meant: of this section, or the same name in another."""
    other = _OTHER_NAMES.get(key, key)
    if other in known:
        return f" (did you mean '{other}'?)"
    hint = nearest(key, known)
    if hint:
        return hint
    elsewhere = [name for name in known_keys() if name.split(".")[1] == other]
    return f" (did you mean '{elsewhere[0]}'?)" if elsewhere else f" (known: {', '.join(known)})"
