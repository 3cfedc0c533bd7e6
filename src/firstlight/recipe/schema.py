"""The keys of a recipe: everything that decides a run, in strict sections.

A section that configures one part of firstlight is in that part's module; the others are here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from firstlight.checkpoint.retention import CheckpointConfig
from firstlight.data.loader import DataConfig
from firstlight.efficiency import EfficiencyConfig, LossConfig
from firstlight.errors import ConfigError
from firstlight.lora.layers import LoraConfig
from firstlight.models import ModelConfig
from firstlight.models.language_model import InitConfig
from firstlight.optim.batch_schedule import BatchSchedule
from firstlight.optim.registry import OptimizerConfig
from firstlight.optim.schedule import ScheduleConfig
from firstlight.parallel.engine import DistributedConfig
from firstlight.section import Section


class RunConfig(Section):
    """The `run` section."""

    dir: str | None = Field(None, min_length=1)
    """the run folder: metrics, report, checkpoints. null is runs/<the recipe's name>."""
    seed: int = Field(1337, ge=0, lt=2**63)
    """seed of the initial weights, the order of the rows and dropout."""
    device: str = "auto"
    """device to run on: "auto" (a CUDA GPU if there is one, else the CPU), "cpu", "cuda", "cuda:1",
    "mps"."""
    deterministic: bool = False
    """compute the same bits each time on a CUDA GPU, so that a resumed run is bit for bit the one
    that was not stopped; costs speed, in attention's backward pass above all. On a CPU the bits are
    always the same."""
    max_minutes: float | None = Field(None, gt=0)
    """minutes after which the run saves and stops, but not before a step is done; null is no
    limit."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(default=[])
    """programs that get metrics, samples, recipe and reports, too: tensorboard (in the run folder's
    tensorboard/; metrics and samples), wandb (offline), mlflow and trackio (their local stores).
    Nothing leaves the machine unless the program's own environment variables say so."""
    tracker_checkpoints: bool = False
    """have wandb, mlflow and trackio store the run's last checkpoint, too."""

    @model_validator(mode="before")
    @classmethod
    def _with_tensorboard(cls, values: object) -> object:
        """Take `tensorboard: true` of earlier recipes as one of the trackers."""
        if not isinstance(values, dict) or type(values.get("tensorboard")) is not bool:
            return values
        others = {key: value for key, value in values.items() if key != "tensorboard"}
        trackers = others.get("trackers", [])
        if not values["tensorboard"] or not isinstance(trackers, list):
            return others
        return {**others, "trackers": [*trackers, "tensorboard"]}

    @model_validator(mode="after")
    def _each_tracker_once(self) -> Self:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers names one twice: {', '.join(self.trackers)}")
        return self


DEFAULT_ROWS = 8


def _number_of_rows(value: object) -> object:
    if value in (None, "auto") or (type(value) is int and value > 0):
        return value
    raise ValueError(f"must be a whole number above 0, or auto (given: {value!r})")


class BatchConfig(Section):
    """The `batch` section. An optimizer step sees micro_batch_size x accumulation rows of each
    process.
    """

    micro_batch_size: Annotated[int | Literal["auto"] | None, PlainValidator(_number_of_rows)] = (
        None
    )
    """rows of a forward pass on a device: more keep the hardware busier, and take more memory for
    activations. "auto" is the largest that fits: found before the run by trying the whole of
    global_batch_tokens, then half of it, and so on, in a process of its own. null is 8; on a CPU
    with global_batch_tokens, at most some 1,024 tokens, which keep it busy."""
    gradient_accumulation_steps: int | None = Field(None, gt=0)
    """forward passes a step: the step of a large batch in the memory of a small one, with the same
    gradient."""
    global_batch_tokens: int | None = Field(None, gt=0)
    """tokens a step; decides the accumulation instead of it."""
    ramp_start_tokens: int | None = Field(None, gt=0)
    """tokens of the first steps, a divisor of global_batch_tokens: the tokens of a step rise to it
    in equal parts of this size, by accumulation; null is no ramp."""
    ramp_steps: int | None = Field(None, gt=0)
    """steps over which the tokens of a step rise: global_batch_tokens from there on."""

    @model_validator(mode="after")
    def _whole_ramp(self) -> Self:
        start, whole = self.ramp_start_tokens, self.global_batch_tokens
        if (start is None) != (self.ramp_steps is None):
            raise ValueError("ramp_start_tokens and ramp_steps belong together: set both, or none")
        if start is None:
            return self
        if whole is None:
            raise ValueError("ramp_start_tokens needs global_batch_tokens, where the ramp ends")
        if whole % start or whole == start:
            raise ValueError(
                f"global_batch_tokens {whole} is no multiple (2 or more times) of "
                f"ramp_start_tokens {start}: change one of them"
            )
        return self

    @property
    def rows(self) -> int:
        """The micro-batch size, once it is decided."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size or DEFAULT_ROWS

    def global_rows(self, seq_len: int) -> int:
        """Rows of a step if the micro-batch size is not decided yet.

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
        """Forward passes of each of `processes` processes in an optimizer step.

        Raises:
            ConfigError: global_batch_tokens does not come out even.
        """
        if self.global_batch_tokens is None:
            return self.gradient_accumulation_steps or 1
        if self.ramp_start_tokens is not None:
            self._passes("ramp_start_tokens", self.ramp_start_tokens, seq_len, processes)
        steps = self._passes("global_batch_tokens", self.global_batch_tokens, seq_len, processes)
        if self.gradient_accumulation_steps not in (None, steps):
            raise ConfigError(
                f"batch.gradient_accumulation_steps {self.gradient_accumulation_steps} and "
                f"global_batch_tokens (which makes it {steps}) disagree: leave one out"
            )
        return steps

    def _passes(self, key: str, tokens: int, seq_len: int, processes: int) -> int:
        """Forward passes of each process for a step of this number of tokens."""
        micro_tokens = self.rows * seq_len * processes
        steps, rest = divmod(tokens, micro_tokens)
        if rest:
            below = f"{steps * micro_tokens} or " if steps else ""
            share = f" x {processes} processes" if processes > 1 else ""
            raise ConfigError(
                f"batch.{key} {tokens} is not a multiple of "
                f"micro_batch_size x seq_len{share} = {micro_tokens}: "
                f"take {below}{(steps + 1) * micro_tokens}"
            )
        return steps

    def schedule(self, seq_len: int, processes: int = 1) -> BatchSchedule:
        """The rows of each optimizer step of all `processes` processes together.

        Raises:
            ConfigError: see `accumulation`.
        """
        size = self.rows * self.accumulation(seq_len, processes) * processes
        start = size if self.ramp_start_tokens is None else self.ramp_start_tokens // seq_len
        return BatchSchedule(size, start, self.ramp_steps or 0)


class EvaluationConfig(Section):
    """The `evaluation` section."""

    every_steps: int = Field(200, ge=0)
    """steps between evaluations (validation loss and sample texts); 0 is at the end only."""
    on_start: bool = True
    """evaluate the losses of the model before the first step, too, as step 0 of metrics.jsonl; with
    every_steps 0 they are not."""
    max_rows: int = Field(256, ge=0)
    """rows of the validation split that are evaluated, spread evenly; 0 is all."""
    train_rows: int = Field(0, ge=0)
    """rows of the training split that are evaluated beside it, spread evenly and the same each time
    (of each corpus of a mix): train_eval/loss is computed like val/loss, without dropout and over
    more than one batch; 0 is off."""
    sample_prompts: list[str] = Field(default=[""])
    """texts to be continued at each evaluation; with conversations, messages to be answered."""
    sample_tokens: int = Field(64, ge=1)
    """tokens a sample."""
    temperature: float = Field(0.8, ge=0)
    """temperature of the samples; 0 is greedy."""
    tasks: list[str] = Field(default=[])
    """tasks that the model is scored in, as with `firstlight eval --tasks`, each one text:
    "hellaswag,FILE.jsonl", "lm-eval:NAME"."""
    tasks_every_steps: int = Field(0, ge=0)
    """steps between scores of the tasks, which are also computed at the end; 0 is at each
    evaluation."""
    task_items: int = Field(0, ge=0)
    """number of items of each task, the first ones; 0 is all."""
    task_folder: str | None = None
    """further tasks for lm-evaluation-harness."""


#: A z-score of fewer values says nothing.
FEWEST_STEPS = 16


class GuardConfig(Section):
    """The `guard` section: steps whose loss or gradient is not finite, or leaps up, are skipped,
    and weights and moments stay as they were. With efficiency.optimizer_in_backward, which has made
    the update by then, one such step counts as too many.
    """

    max_skipped_steps: int = Field(5, ge=1)
    """number of skipped steps in a row after which on_divergence applies. fp16's own skipped steps,
    which end when the loss scale fits, don't count."""
    on_divergence: Literal["rollback", "stop"] = "rollback"
    """"rollback" restores the newest good checkpoint's weights, moments and random states and
    continues with the next data (Chowdhery et al. 2022, section 5.1), "stop" ends the run."""
    max_rollbacks: int = Field(2, ge=0)
    """number of rollbacks after which the next one ends the run."""
    spike_z_score: float | None = Field(None, gt=0)
    """skip a step whose loss or gradient norm is more than this number of standard deviations above
    the mean of the steps before; null is never."""
    spike_window: int = Field(128, ge=FEWEST_STEPS)
    """number of earlier steps that are compared with; the first 16 are never skipped for it."""


class PreferenceConfig(Section):
    """The `preference` section, of runs on preference pairs."""

    objective: Literal["dpo"] = "dpo"
    """dpo: -log sigmoid(beta * ((chosen - its reference) - (rejected - its reference))), of the
    answers' log-probabilities, each the sum over its tokens. The references are those of the model
    that the run starts from."""
    beta: float = Field(0.1, gt=0)
    """strength of the pull towards the starting model: the greater, the closer."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """assumed share of pairs with swapped answers (conservative DPO)."""


#: Model configuration, told apart by `model_type`.
AnyModelConfig = Annotated[ModelConfig, Field(discriminator="model_type")]


class PlanningConfig(Section):
    """The `planning` section: facts for `firstlight plan` before data and weights are there.
    Training doesn't read it: the prepared data and the weights themselves decide.
    """

    vocab_size: int | None = Field(None, ge=1)
    """number of tokens of the tokenizer that the data is to be prepared with."""
    model: AnyModelConfig | None = None
    """shape of the weights that --init-from is to name, for a recipe without a `model` section."""


class Recipe(Section):
    """A whole run as a person wrote it.

    `model` may be left out when weights are given to start from, `lora` when all of them are
    trained, and `preference` always: it is for data of kind preference.
    """

    run: RunConfig = RunConfig()
    model: AnyModelConfig | None = None
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    init: InitConfig = InitConfig()
    loss: LossConfig = LossConfig()
    efficiency: EfficiencyConfig = EfficiencyConfig()
    distributed: DistributedConfig = DistributedConfig()
    lora: LoraConfig | None = None
    preference: PreferenceConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    planning: PlanningConfig = PlanningConfig()

    @model_validator(mode="after")
    def _one_head(self) -> Self:
        if self.model is not None and self.model.tie_word_embeddings and self.init.head_std:
            raise ValueError(
                "init.head_std is for a head of its own, and model.tie_word_embeddings is true: "
                "set init.embedding_std, or model.tie_word_embeddings to false"
            )
        return self

    def with_keys(self, section: str, **values: Any) -> Self:
        """The recipe with some keys of a section set, which are not checked again."""
        changed = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})

    @model_validator(mode="after")
    def _falling_rate(self) -> Self:
        lowest, peak = self.schedule.min_learning_rate, self.optimizer.learning_rate
        if lowest is not None and lowest > peak:
            raise ValueError(
                f"schedule.min_learning_rate {lowest:g} is above optimizer.learning_rate {peak:g}: "
                "lower it"
            )
        return self


class ResolvedData(DataConfig):
    """The `data` section with the row length decided."""

    seq_len: int = Field(gt=0)


class ResolvedBatch(BatchConfig):
    """The `batch` section with the micro-batch size decided."""

    micro_batch_size: int = Field(gt=0)


class ResolvedEfficiency(EfficiencyConfig):
    """The `efficiency` section without "auto"."""

    loss_chunk_tokens: int = Field(ge=0)
    compile: bool

    @model_validator(mode="after")
    def _without_auto(self) -> Self:
        if "auto" in (self.precision, self.attention):
            raise ValueError("precision and attention are undecided")
        return self


class ResolvedRecipe(Recipe):
    """A whole run with all decisions made: no key that `resolve` decides is null or "auto"."""

    model: AnyModelConfig
    data: ResolvedData
    batch: ResolvedBatch
    efficiency: ResolvedEfficiency
