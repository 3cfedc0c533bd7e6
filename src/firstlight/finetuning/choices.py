"""Choose the settings of a fine-tuning run based on the data, the initial model, the machine and
the length of the run.

Whether adapters or all weights are trained depends on the available memory and is decided in
`run.py`. The learning rates are defined in `planner/advise/defaults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from firstlight.console import counted, rounded
from firstlight.from_texts.plan import (
    STATE_BYTES,
    Choice,
    Choices,
    PartFacts,
    RunFacts,
    compile_ways,
    given_batch,
    given_keys,
    given_unit,
)
from firstlight.from_texts.request import Request
from firstlight.hardware.compiling import NOT_COMPILED, Compiling
from firstlight.planner.advise import defaults
from firstlight.planner.advise.defaults import finetuning_rate
from firstlight.planner.advise.law import Length, MachineFacts
from firstlight.planner.advise.model import batch_and_rate

if TYPE_CHECKING:
    from firstlight.models import ModelConfig


@dataclass(frozen=True)
class TuningData:
    """Properties of the fine-tuning data.

    Attributes:
        kind: "chat" for conversations, "preference" for preference pairs, "text" for text
            documents.
        count: number of conversations, pairs or documents.
        longest: length in tokens of the longest conversation or preference pair. 0 for text
            documents.
        usual: 99th percentile of the lengths of conversations or preference pairs, in tokens. 0 for
            text documents.
    """

    kind: Literal["chat", "preference", "text"]
    count: int
    longest: int = 0
    usual: int = 0

    @property
    def name(self) -> str:
        """Plural noun for the examples, for messages."""
        return "the text" if self.kind == "text" else f"the {self.unit}s"

    @property
    def unit(self) -> str:
        """Singular noun for an example, for messages."""
        return "preference pair" if self.kind == "preference" else "conversation"

    @property
    def most_epochs(self) -> float:
        """Maximum number of passes over the data. With more passes, the model would memorise the
        data. A small set of conversations can be repeated more often than a large one.
        """
        if self.kind == "text":
            return defaults.MOST_EPOCHS
        if self.kind == "preference":
            return defaults.PAIR_EPOCHS
        few = math.sqrt(defaults.MANY_CHATS / max(self.count, 1))
        most = defaults.CHAT_EPOCHS * max(few, 1.0)
        return float(round(min(most, defaults.CHAT_EPOCHS_OF_FEW)))


@dataclass(frozen=True)
class Method:
    """A fine-tuning method.

    Attributes:
        adapters: True to freeze the weights and train LoRA adapters. False to train all weights.
        checkpointing: True to save memory with activation checkpointing.
        quantized: True to quantise the frozen weights to 4 bits, as in QLoRA.
        reason: reason for choosing the method, which is shown in the printed table.
    """

    adapters: bool = False
    checkpointing: bool = False
    quantized: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of the method, for messages."""
        if not self.adapters:
            return "all weights"
        return "QLoRA" if self.quantized else "LoRA"

    def choices(self) -> Iterator[Choice]:
        """Yield the recipe keys that select this method, each with its value and the reason."""
        if self.adapters:
            yield Choice("lora.rank", defaults.ADAPTER_RANK, "rank of the adapters")
            yield Choice(
                "lora.alpha", defaults.ADAPTER_ALPHA, "adapters are scaled by alpha / rank"
            )
        if self.quantized:
            yield Choice("lora.quantize", "nf4", "frozen weights in 4 bits, to fit in memory")
        if self.checkpointing:
            reason = "activations are recomputed, to fit in memory"
            yield Choice("efficiency.activation_checkpointing", "full", reason)


@dataclass(frozen=True)
class StartingModel:
    """Properties of the model that is fine-tuned.

    Attributes:
        parameters: number of parameters.
        hidden_size, layers: hidden size and number of layers of the model.
        context: context length of the model in tokens.
        tokens: number of tokens that the model has read in all of its training; None if it is
            unknown, because another program has trained the model.
    """

    parameters: int
    hidden_size: int
    layers: int
    context: int
    tokens: int | None = None

    @property
    def is_young(self) -> bool:
        """True if the model is known to have been trained on few tokens."""
        return self.tokens is not None and self.tokens < defaults.YOUNG_TOKENS * self.parameters


def starting_model(folder: Path, config: ModelConfig) -> StartingModel:
    """Return the properties of the model in a checkpoint or model folder.

    Raises:
        CheckpointError, ModelError: a file is damaged.
    """
    from firstlight.checkpoint.checkpoint import tokens_read
    from firstlight.models.accounting import count_parameters, meta_model

    return StartingModel(
        count_parameters(meta_model(config)).total,
        config.hidden_size,
        config.num_hidden_layers,
        config.max_position_embeddings,
        tokens=tokens_read(folder),
    )


def row_of(data: TuningData, model: StartingModel, fixed: Mapping[str, Any]) -> Choice:
    """Choose `data.seq_len`, the number of tokens in a training row.

    For conversations, a row is long enough for the longest conversation or, if that is too long,
    for 99 % of the conversations. For text documents, the default row length for training large
    models from scratch is used. A row is never longer than the context length of the model.

    Args:
        data, model: properties of the training data and the initial model.
        fixed: values given by the user, keyed by `section.key`. A value for `data.seq_len` is used
            without being checked.
    """
    key, given = "data.seq_len", fixed.get("data.seq_len")
    if given is not None:
        return Choice(key, int(given), "given")
    if data.kind == "text":
        length = min(defaults.SEQ_LENS[-1][1], model.context)
        return Choice(key, length, f"the model's context is {model.context:,} tokens")
    # An example with n tokens takes n - 1 positions in a row, because the inputs and targets are
    # shifted by one token.
    longest, usual = data.longest - 1, data.usual - 1
    most = min(defaults.LONGEST_ROW, model.context)
    if longest <= most:
        length = min(max(_power_of_two(longest), 256), model.context)
        return Choice(key, length, f"the longest {data.unit} has {data.longest:,} tokens")
    length = min(max(_power_of_two(usual), most), model.context)
    if usual > length:
        return Choice(key, length, "the model's context")
    return Choice(key, length, f"99% of {data.name} have at most {data.usual:,} tokens")


def _power_of_two(count: float) -> int:
    return 1 << max(math.ceil(math.log2(max(count, 1))), 0)


@dataclass(frozen=True)
class TuningFacts:
    """All information from which the settings of a fine-tuning run are chosen.

    Attributes:
        data, model: properties of the training data and the initial model.
        method: fine-tuning method.
        machine: specification of the machine, including its training speed for this model.
        epoch_tokens: number of tokens in a single pass over the training split, including padding.
        val_tokens: number of tokens in the validation split, including padding.
        row: row length chosen by `row_of`.
    """

    data: TuningData
    model: StartingModel
    method: Method
    machine: MachineFacts
    epoch_tokens: float
    val_tokens: float
    row: Choice

    def reference_seconds(self, rate: float) -> float:
        """Return the time, in seconds, that it takes to score all preference pairs with the initial
        model before the first step.

        Args:
            rate: training speed in tokens per second.
        """
        from firstlight.training.time_budget import FORWARD_SHARE

        if self.data.kind != "preference":
            return 0.0
        return FORWARD_SHARE * (self.epoch_tokens + self.val_tokens) / rate

    def part_facts(self, fixed: Mapping[str, Any]) -> PartFacts:
        """Return the information from which the settings for evaluations, sample texts and
        checkpoints are chosen.

        Args:
            fixed: values given by the user, keyed by `section.key`.
        """
        trained, model = self.model.parameters, self.model
        if self.method.adapters:
            # In each layer, adapters are added to seven matrices. The four attention matrices have
            # the width of the model. The three MLP matrices are about three times as wide.
            rank = fixed.get("lora.rank", defaults.ADAPTER_RANK)
            trained = 20 * rank * model.hidden_size * model.layers
        size = STATE_BYTES * trained
        # The new data and the kept text are evaluated.
        return PartFacts(self.row.value, self.val_tokens, size, fixed, splits=2)


def choose_tuning(facts: TuningFacts, length: Length, fixed: Mapping[str, Any]) -> Choices:
    """Choose all settings of a fine-tuning run.

    Args:
        facts: information about the data, the model, the method and the machine.
        length: length of the run, as a time budget, a number of tokens or a number of steps.
        fixed: values given by the user, keyed by `section.key`.

    Raises:
        ConfigError: the batch settings given by the user contradict each other, or no learning rate
            is known for the optimizer given by the user.
    """
    data, machine = facts.data, facts.machine
    row = facts.row
    flops, rate = machine.rates[0]
    fixed = {key: value for key, value in fixed.items() if value is not None}
    most: float = fixed.get("schedule.epochs", data.most_epochs) * facts.epoch_tokens
    given = given_batch(fixed, row.value)

    part_facts = facts.part_facts(fixed)

    def tokens_at(rate: float, way: Compiling = NOT_COMPILED) -> float:
        if length.seconds is None:
            return length.tokens or most
        left = max(way.left_of(length.seconds) - facts.reference_seconds(rate), 0.0)
        return min(rate * left * (1 - part_facts.parts(rate, left, left).share), most)

    # Compute the batch size from the full speed of the machine. A lower speed would result in a
    # smaller batch, which would make training on a GPU even slower.
    unit = given_unit(fixed, row.value)
    batch = given or _batch_tokens(tokens_at(rate), row.value, unit)
    batch, rate, way = batch_and_rate(
        lambda step, way: machine.tokens_per_second(flops, step, way),
        tokens_at,
        lambda _: batch,
        compile_ways(machine, fixed, (facts.model.hidden_size, facts.model.layers)),
        length.steps,
    )
    tokens = tokens_at(rate, way)
    steps = length.steps or max(round(tokens / batch), 1)
    left = None
    if length.seconds is not None:
        left = max(way.left_of(length.seconds) - facts.reference_seconds(rate), 0.0)
    parts = part_facts.parts_of_run(rate, steps * batch, left)
    run = RunFacts(steps, batch, row.value, rate, parts, way)
    epochs = run.tokens / max(facts.epoch_tokens, 1.0)
    items = [
        row,
        *facts.method.choices(),
        run.micro_batch(machine, fixed),
        Choice("batch.global_batch_tokens", batch, _batch_reason(data, batch, facts.epoch_tokens)),
        *_optimizer_choices(facts, fixed),
        *_length_choices(run, length, epochs, data),
        *run.other_choices(machine, facts.val_tokens),
    ]
    if run.parts.saves > 1:
        reason = "also keep the checkpoint with the lowest sum of the losses of new and kept text"
        items.append(Choice("checkpoint.keep_best", 1, reason))
    rate = machine.tokens_per_second(flops, given or unit)
    return replace(
        run.choices(items, fixed, facts.model.parameters, epochs),
        least_seconds=part_facts.least_seconds(rate, most, given or unit)
        + facts.reference_seconds(rate),
    )


def _batch_tokens(tokens: float, seq_len: int, unit: int) -> int:
    """Choose the number of tokens per step.

    The number is chosen so that the run has about `defaults.TUNING_STEPS` steps. It is limited to a
    maximum and rounded to a whole number of micro-batches.

    Args:
        tokens: number of tokens in the run.
        seq_len: number of tokens per row.
        unit: the result is a multiple of this number of tokens, which depends on the micro-batch
            settings given by the user.
    """
    wanted = min(tokens / defaults.TUNING_STEPS, defaults.MOST_TUNING_BATCH)
    rows = 1 << max(round(math.log2(max(wanted / seq_len, 1.0))), 0)
    return -(-rows * seq_len // unit) * unit


def _batch_reason(data: TuningData, batch: int, epoch_tokens: float) -> str:
    if data.kind == "text":
        return f"the text has {rounded(round(epoch_tokens))} tokens"
    share = batch / max(epoch_tokens, 1.0) * data.count
    return f"about {counted(max(round(share), 1), data.unit)} per step"


def check_given(request: Request, *, conversations: bool = False) -> None:
    """Reject invalid values given by the user, before any data is prepared.

    Raises:
        ConfigError: a value is invalid (see `Request.check`), or no learning rate is known for the
            optimizer given by the user.
    """
    request.check(conversations=conversations)
    name = str(request.fixed.get("optimizer.name") or "adamw")
    finetuning_rate(name, 1, given_keys("optimizer", request.fixed), adapters=False)


def _optimizer_choices(facts: TuningFacts, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    model, method = facts.model, facts.method
    name = str(fixed.get("optimizer.name", "adamw"))
    own = given_keys("optimizer", fixed)
    rate = finetuning_rate(
        name,
        model.hidden_size,
        own,
        adapters=method.adapters,
        young=model.is_young,
        text=facts.data.kind == "text",
    )
    trained = "adapters" if method.adapters else "all weights"
    reason = f"for {trained} at hidden size {model.hidden_size:,}; higher for smaller models"
    if model.is_young:
        reason = f"for {trained} of a model that was trained on only {model.tokens:,} tokens"
    elif model.tokens is None:
        reason += "; how many tokens the model has read is unknown: rate of models that read much"
    if facts.data.kind == "preference" and "learning_rate" not in own:
        rate = float(f"{defaults.PAIR_MULTIPLE * rate:.2g}")
    yield Choice("optimizer.name", "adamw", "the usual optimizer for fine-tuning")
    yield Choice("optimizer.learning_rate", rate, reason)
    yield Choice(
        "optimizer.weight_decay",
        0.0,
        "no decay: it would pull the weights away from the starting model",
    )


def _length_choices(
    run: RunFacts, length: Length, epochs: float, data: TuningData
) -> Iterator[Choice]:
    passes = counted(epochs, "epoch", ".2g")
    if length.seconds is not None:
        minutes = round(length.seconds / 60, 3)
        yield Choice("schedule.max_minutes", minutes, "training time within the budget")
        most = data.most_epochs
        reason = f"at most {most:g} passes: more would memorise {data.name}"
        yield Choice("schedule.epochs", most, reason)
    else:
        yield Choice("schedule.max_steps", run.steps, f"{rounded(run.tokens)} tokens, {passes}")
    yield run.warmup(5)
    share = defaults.LAYOUT["schedule.decay_fraction"]
    yield Choice("schedule.kind", "wsd", "constant learning rate after the warm-up, then decay")
    decay = f"linear decay over the last {100 * share:.0f}% of steps"
    yield Choice("schedule.decay_fraction", share, decay)
    yield Choice("schedule.min_lr_ratio", 0.0, "decay to zero")
