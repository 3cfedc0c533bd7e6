"""Define the schema of a recipe. A recipe contains all settings of a run, in strictly validated
sections.

A section that configures a specific part of firstlight is defined in the module of that part. All
other sections are defined here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from firstlight.checkpoint.retention import CheckpointConfig
from firstlight.data.loader import DataConfig
from firstlight.lora.layers import LoraConfig
from firstlight.methods import EfficiencyConfig, LossConfig
from firstlight.models import ModelConfig
from firstlight.models.language_model import InitConfig
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.schedule import ScheduleConfig
from firstlight.parallel.engine import DistributedConfig
from firstlight.recipe.micro_batch import BatchConfig
from firstlight.section import Section


class RunConfig(Section):
    """The `run` section."""

    dir: str | None = Field(None, min_length=1)
    """folder for the run's metrics, report and checkpoints. null means runs/NAME, where NAME is the
    name of the recipe's file.
    """
    seed: int = Field(1337, ge=0, lt=2**63)
    """seed of the random numbers for the initial weights, the order of the training rows and
    dropout.
    """
    device: str = "auto"
    """device on which the model is trained, such as "cpu", "cuda", "cuda:1" or "mps". "auto"
    selects a CUDA GPU if there is one, and the CPU otherwise.
    """
    check_device: bool = True
    """true compares the results of a GPU with the results of the CPU before a run, unless the GPU
    has passed `firstlight info --check`. The check takes a second or two, and wrong results stop
    the run. A GPU that has passed is checked again if the driver, torch version, precision or
    attention backend changes.
    """
    deterministic: bool = False
    """true gives bit-identical results on a CUDA GPU, so that a resumed run equals an uninterrupted
    run. Training is then slower, especially in the backward pass of attention. On a CPU, results
    are always bit-identical.
    """
    max_minutes: float | None = Field(None, gt=0)
    """number of minutes after which the run saves a checkpoint and stops. The run always completes
    at least one step. null means that there is no limit.
    """
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(default=[])
    """experiment trackers that also receive the run's metrics, samples, recipe and reports.
    "tensorboard" writes only metrics and samples, to the folder tensorboard/ in the run folder.
    "wandb" runs offline. "mlflow" and "trackio" write to their local stores. No data leaves the
    machine unless the environment variables of a tracker enable uploads.
    """
    tracker_checkpoints: bool = False
    """true makes wandb, mlflow and trackio also store the run's last checkpoint."""

    @model_validator(mode="before")
    @classmethod
    def _with_tensorboard(cls, values: object) -> object:
        """Convert the key `tensorboard: true` of older recipes to an entry in `trackers`."""
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
            raise ValueError(f"trackers has a duplicate: {', '.join(self.trackers)}")
        return self


class EvaluationConfig(Section):
    """The `evaluation` section."""

    every_steps: int = Field(200, ge=0)
    """number of steps between evaluations (validation loss and sample texts); 0 evaluates only at
    the end."""
    on_start: bool = True
    """true also evaluates the losses before the first step, as step 0 of metrics.jsonl, unless
    every_steps is 0."""
    patience: int = Field(0, ge=0)
    """number of consecutive evaluations without a new lowest validation loss after which the run
    ends as complete. The loss is the one by which checkpoint.keep_best keeps a checkpoint. 0 always
    trains to the last step.
    """
    max_rows: int = Field(256, ge=0)
    """number of rows of the validation split that are evaluated. The rows are spread evenly over
    the split. 0 evaluates all rows.
    """
    train_rows: int = Field(0, ge=0)
    """number of rows of the training split (of each corpus in a mix) that are also evaluated. The
    rows are spread evenly over the split, and are the same each time. The result is logged as
    train_eval/loss. Like val/loss, it is computed without dropout. 0 disables this evaluation.
    """
    sample_prompts: list[str] = Field(default=[""])
    """prompts that the model continues at each evaluation (see samples_at). If the data consists of
    conversations, they are messages that the model answers."""
    samples_at: Literal["evaluation", "epoch"] = "evaluation"
    """when sample texts are generated. "evaluation" generates them at each evaluation except the
    evaluation before the first step. "epoch" generates them after the last step of each pass over
    the training split. In both cases, samples are also generated after the last step of the run.
    """
    sample_tokens: int = Field(64, ge=1)
    """maximum number of tokens that are generated for a sample."""
    temperature: float = Field(0.8, ge=0)
    """temperature at which samples are generated; 0 uses greedy decoding."""
    tasks: list[str] = Field(default=[])
    """tasks on which the model is scored, as with `firstlight eval --tasks`: "hellaswag",
    "hellaswag,FILE.jsonl" or "lm-eval:NAME"."""
    tasks_every_steps: int = Field(0, ge=0)
    """number of steps between task evaluations; 0 scores the tasks at each evaluation. Tasks are
    also scored at the end of the run."""
    task_items: int = Field(0, ge=0)
    """number of items to score in each task, starting with the first item; 0 scores all items."""
    task_folder: str | None = None
    """folder with additional tasks for lm-evaluation-harness."""


#: Minimum number of earlier steps for a z-score. With fewer steps, the standard deviation is too
#: uncertain.
FEWEST_STEPS = 16


class GuardConfig(Section):
    """The `guard` section. A step is skipped if its loss or gradient is not finite or spikes. The
    weights and moments then stay unchanged. With efficiency.optimizer_in_backward, a step can't be
    skipped, because the parameters have already been updated when the loss is checked. In this
    case, on_divergence applies after a single such step.
    """

    max_skipped_steps: int = Field(5, ge=1)
    """number of consecutive skipped steps after which on_divergence applies. Steps that are skipped
    in fp16 to adapt the loss scale do not count.
    """
    on_divergence: Literal["rollback", "stop"] = "rollback"
    """"rollback" restores weights, moments and random states from the newest good checkpoint and
    continues with data that has not been used yet (Chowdhery et al. 2022, section 5.1). "stop" ends
    the run.
    """
    max_rollbacks: int = Field(2, ge=0)
    """maximum number of rollbacks; after that, the next divergence ends the run."""
    spike_z_score: float | None = Field(None, gt=0)
    """number of standard deviations by which a step's loss or gradient norm can exceed the mean of
    earlier steps before the step is skipped. null disables this check.
    """
    spike_window: int = Field(128, ge=FEWEST_STEPS)
    """number of earlier steps from which the mean and the standard deviation for spike_z_score are
    computed. The first 16 steps of a run are never skipped as spikes.
    """


class PreferenceConfig(Section):
    """The `preference` section, for runs on preference pairs."""

    objective: Literal["dpo"] = "dpo"
    """"dpo" (Rafailov et al. 2023): -log sigmoid(beta * ((chosen - its reference) - (rejected - its
    reference))), where each term is the log-probability of an answer, summed over its tokens. The
    references are log-probabilities under the model from which the run starts."""
    beta: float = Field(0.1, gt=0)
    """strength of the pull towards the model from which the run starts. A larger value keeps the
    trained model closer to the starting model.
    """
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """assumed fraction of pairs in which the chosen and the rejected answer are swapped
    (conservative DPO).
    """


#: Model configuration of any family. The value of `model_type` selects the class.
AnyModelConfig = Annotated[ModelConfig, Field(discriminator="model_type")]


class PlanningConfig(Section):
    """The `planning` section. It contains facts that `firstlight plan` needs if the data or the
    weights do not exist yet. Training ignores this section and reads these facts from the prepared
    data and the weights.
    """

    vocab_size: int | None = Field(None, ge=1)
    """vocabulary size of the tokenizer that will be used to prepare the data."""
    model: AnyModelConfig | None = None
    """configuration of the model that will be passed with --init-from. It is used if the recipe
    does not have a `model` section.
    """


class Recipe(Section):
    """All settings of a run, as written by the user.

    `model` can be null if the run starts from existing weights. `lora` is null if all weights are
    trained. `preference` applies only to data that consists of preference pairs.
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
                "init.head_std applies to an untied head, but model.tie_word_embeddings is true: "
                "set init.embedding_std, or model.tie_word_embeddings to false"
            )
        return self

    def with_keys(self, section: str, **values: Any) -> Self:
        """Return a copy of the recipe with new values for some keys of a section. The new values
        are not validated.
        """
        changed = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})

    @model_validator(mode="after")
    def _patience_keeps_best(self) -> Self:
        config, checkpoint = self.evaluation, self.checkpoint
        needed = {
            "evaluation.every_steps": config.every_steps,
            "checkpoint.every_steps": checkpoint.every_steps,
            "checkpoint.keep_best": checkpoint.keep_best,
        }
        if config.patience and 0 in needed.values():
            key = next(key for key, value in needed.items() if not value)
            raise ValueError(
                f"evaluation.patience {config.patience} ends a run after its best checkpoint, "
                f"which needs {key} above 0: set it, or set patience to 0"
            )
        return self

    @model_validator(mode="after")
    def _falling_rate(self) -> Self:
        peak = self.optimizer.learning_rate
        for key in ("min_learning_rate", "initial_learning_rate"):
            value = getattr(self.schedule, key)
            if value is not None and value > peak:
                raise ValueError(
                    f"schedule.{key} {value:g} is above optimizer.learning_rate {peak:g}: lower it"
                )
        return self


class ResolvedData(DataConfig):
    """The `data` section with `seq_len` resolved."""

    seq_len: int = Field(gt=0)


class ResolvedBatch(BatchConfig):
    """The `batch` section with the micro-batch size resolved."""

    micro_batch_size: int = Field(gt=0)


class ResolvedEfficiency(EfficiencyConfig):
    """The `efficiency` section, in which "auto" has been replaced in every key."""

    loss_chunk_tokens: int = Field(ge=0)
    compile: bool

    @model_validator(mode="after")
    def _without_auto(self) -> Self:
        if "auto" in (self.precision, self.attention):
            raise ValueError("precision and attention must not be auto")
        return self


class ResolvedRecipe(Recipe):
    """All settings of a run after `resolve` has set the open keys. None of these keys is null or
    "auto".
    """

    model: AnyModelConfig
    data: ResolvedData
    batch: ResolvedBatch
    efficiency: ResolvedEfficiency
