"""Implement `train_texts`, which trains a model on text or conversations within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from firstlight.console import say, time_text
from firstlight.errors import CheckpointError, ConfigError, ModelError
from firstlight.from_texts.plan import RunPlan
from firstlight.from_texts.request import DEFAULT_SECONDS, Request, request_of
from firstlight.from_texts.run_folder import (
    LOCK_NAME,
    RECIPE_NAME,
    OnStep,
    RunCall,
    earlier_initial_model,
    earlier_request,
    facts_of_files,
    key_without_model,
    place_of_run,
    remembered,
)
from firstlight.hardware.environment import sharing_cores

if TYPE_CHECKING:
    from firstlight.from_texts.result import TextRun
    from firstlight.training.loop import TrainResult

#: Function that shows a plan to the user, asks for the length of the run, and returns this length
#: in seconds.
Ask = Callable[[RunPlan], float]


class Work(Protocol):
    """Interface for carrying out the user's request. `NewModel` trains a new model, and
    `FineTuning` fine-tunes an existing model.

    Attributes:
        content_key: hash of the inputs' content.
    """

    @property
    def content_key(self) -> str: ...

    def plan(self, request: Request, gpu: str | None = None) -> RunPlan:
        """Return a plan based on estimated facts.

        Args:
            request: inputs, length and overrides of the run.
            gpu: name of a GPU to plan for; None to plan for this machine.
        """
        ...

    def begin(self, plan: RunPlan, request: Request, call: RunCall) -> TrainResult:
        """Prepare the data, choose the settings again based on the prepared data, and train.

        Args:
            plan: plan based on estimated facts.
            request: inputs, length and overrides of the run.
            call: run folder, time and messages.
        """
        ...


def work_of(request: Request, tell: Callable[[str], None], *, progress: bool) -> Work:
    """Read the inputs of a request and return the object that performs the requested work.

    Args:
        request: inputs, length and overrides of the run.
        tell: callback for each message to the user.
        progress: True to show a progress bar.

    Raises:
        InputError: the inputs can't be read, or contain neither texts nor conversations.
        ConfigError: an override is invalid.
        ModelError, CheckpointError: the initial model does not exist or can't be used.
    """
    from firstlight.from_texts.new_model import NewModel
    from firstlight.from_texts.scan import require_texts

    if request.init_from is not None:
        from firstlight.finetuning.run import FineTuning

        return FineTuning(request, tell, progress=progress)
    require_texts(request.inputs, request.text_key)
    return NewModel(request, tell, progress=progress)


@sharing_cores()
def train_texts(
    inputs: str | Path | Sequence[str | Path],
    *,
    budget: str | float | None = None,
    tokens: str | float | None = None,
    steps: int | None = None,
    size: str | None = None,
    init_from: str | Path | None = None,
    run_dir: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    text_key: str = "text",
    val_inputs: str | Path | Sequence[str | Path] = (),
    as_is: bool = False,
    keep: str | Path | Sequence[str | Path] = (),
    replay: float | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    progress: bool = True,
    explain: bool = False,
    ask: Ask | None = None,
    began: float | None = None,
) -> TextRun:
    """Train a model on text or conversations. The call includes all steps from the tokenizer and
    token shards to the evaluation and the report.

    A second call with the same inputs and options resumes an unfinished run. A call with different
    options starts a new run. The new run reuses the existing tokenizer and shards if the options do
    not affect them.

    Args:
        inputs: files, folders, globs, "stdlib" or "hf:NAME[:CONFIG[:SPLIT]]"; see `find_sources`.
            With `init_from`, the files may also contain conversations; see `prepare_chat`.
        budget: wall-clock time of the whole call, as text such as "30m" or as a number of seconds.
            At most one of `budget`, `tokens` and `steps` can be set. If none of them is set, the
            budget is ten minutes.
        tokens: number of tokens to train on, such as "10M".
        steps: number of optimizer steps.
        size: "tiny", "small", "medium", "large", "xl", or a parameter count such as "10M"; None to
            choose the size.
        init_from: folder, run or hub id of a model to fine-tune; None to train a new model.
        run_dir: run folder; None for runs/NAME, where NAME is the first input's name.
        overrides: recipe values, keyed by `section.key`. The remaining settings are chosen to match
            these values.
        text_key: field that holds the text in JSONL lines, tables and datasets.
        val_inputs: validation data, in the same form as `inputs`. If it is empty, a part of the
            inputs is held out.
        as_is: True to read text unchanged; see `prepare`.
        keep: text that a model from `init_from` should not forget, as files like those in `inputs`,
            a prepared corpus or a run. It is evaluated together with the new text. If it is empty,
            a control set is used; see `finetuning.kept`.
        replay: fraction of the training rows that are taken from the kept text. None chooses it
            after a tenth of the run if the new data is text, and means 0 for conversations without
            `keep` and for preference pairs.
        resume: True to continue the newest unfinished run on these inputs. The other options of
            that run need not be repeated. If all runs are complete, the newest run is selected.
        on_step: callback for each step's metrics; see `train`. Steps restart at 1 if a different
            model is chosen after the first seconds of training.
        progress: True to show messages and progress on stderr.
        explain: True to show every chosen setting with its reason before training. The reasons are
            also written to the run's recipe.yaml as comments.
        ask: function that asks the user for the length of the run if it is not set.
        began: `time.time()` at which the budget starts; None to start it now.

    Raises:
        InputError: the inputs can't be read, or do not contain text.
        ConfigError: an argument is invalid, the budget is too short, `run_dir` contains another
            run, or there is no run to resume.
        CheckpointError, ModelError, TrainingError, StorageError, DataError: see `train`.
    """
    began = time.time() if began is None else began
    tell = say if progress else _silent
    request = request_of(
        inputs,
        budget,
        tokens,
        steps,
        size=size,
        overrides=overrides,
        text_key=text_key,
        init_from=init_from,
        val_inputs=val_inputs,
        as_is=as_is,
        keep=keep,
        replay=replay,
    )
    if resume and init_from is None:
        request = replace(request, init_from=earlier_initial_model(request, run_dir))
    work: Work | None = None
    try:
        work = work_of(request, tell, progress=progress)
        content_key = work.content_key
    except (CheckpointError, ModelError):
        content_key = key_without_model(request, run_dir) if resume else ""
        if not content_key:
            raise
        tell(f"{request.init_from} can't be read: the run continues from its own checkpoint")
    # These modules are imported after the first message, because they import torch, which takes
    # several seconds.
    from firstlight.checkpoint.run_folder import held
    from firstlight.from_texts.result import result_of

    if resume:
        request = earlier_request(request, content_key, run_dir)
    request, plan, waited = _with_length(request, work, ask, tell)
    notes: list[str] = []
    folder = place_of_run(request, content_key, run_dir, notes.append)
    with held(folder, LOCK_NAME):
        call = RunCall(
            folder,
            began + waited,
            tell,
            progress=progress,
            explain=explain,
            on_step=on_step,
        )
        return result_of(call, _result(work, plan, request, call, notes=notes), request)


def _with_length(
    request: Request, work: Work | None, ask: Ask | None, tell: Callable[[str], None]
) -> tuple[Request, RunPlan | None, float]:
    """Ask the user for the length of the run if it is not set. Return the request with its length,
    the plan that was shown to the user, and the number of seconds spent waiting for the user. These
    seconds do not count towards the budget. If the user is not asked, the plan is None and the
    number of seconds is 0.
    """
    if request.has_length:
        return request, None, 0.0
    if ask is None:
        tell(f"no --budget given: using {time_text(DEFAULT_SECONDS)}")
        return replace(request, seconds=DEFAULT_SECONDS), None, 0.0
    asked = time.time()
    assert work is not None  # A run that is continued without its initial model has a length.
    plan = work.plan(request)
    seconds = ask(plan)
    return replace(request, seconds=seconds), plan, time.time() - asked


def _result(
    work: Work | None, plan: RunPlan | None, request: Request, call: RunCall, notes: Sequence[str]
) -> TrainResult | None:
    """Start or resume the run. Return None if it is already complete.

    Args:
        work: object that performs the requested work; None to resume a run whose initial model does
            not exist any more.
        plan: plan that was shown to the user; None if no plan was shown.
        request: inputs, length and overrides of the run.
        call: run folder, time and messages.
        notes: messages about the run folder, which are printed if a new run starts.
    """
    if call.state.get("complete"):
        call.tell(f"{call.folder} is complete: nothing to do")
        return None
    if call.state.get("begun") and (call.folder / RECIPE_NAME).is_file():
        result = _go_on(request, call)
    else:
        assert work is not None
        call.remember(
            request=remembered(request),
            inputs=list(map(str, request.inputs)),
            files=facts_of_files(request),
            content_key=work.content_key,
        )
        try:
            plan = plan or work.plan(request)
            for note in notes:  # Print the notes only after planning, because planning may fail.
                call.tell(note)
            result = work.begin(plan, request, call)
        except BaseException:
            call.forget()
            raise
    if result.stopped_by is None and not result.diverged:
        call.remember(complete=True)
    return result


def _go_on(request: Request, call: RunCall) -> TrainResult:
    """Resume the run of an earlier call."""
    from firstlight.planner.plan.processes import RunForecaster
    from firstlight.recipe import load_recipe
    from firstlight.training.loop import train

    recipe = load_recipe(call.folder / RECIPE_NAME)
    for data in (call.state.get("data"), recipe.data.keep):
        if data is not None and not Path(data).is_dir():
            raise ConfigError(
                f"{call.folder} can't be resumed: its shards in {data} were deleted; restore them, "
                "or start a new run on the same texts with another --run.dir"
            )
    call.tell(f"resuming {call.folder}")
    # `began` is not passed, so that the start of this command does not count towards the budget a
    # second time. The run trains for the time that was left when it was stopped.
    with RunForecaster() as forecaster:
        return train(
            recipe,
            resume=True,
            init_from=request.init_from,
            on_step=call.on_step,
            progress=call.progress,
            forecaster=forecaster,
            is_announced=True,  # by the call that started the run
        )


def _silent(_: str) -> None:
    pass
