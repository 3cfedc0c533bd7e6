"""Send the metrics of a run to experiment trackers: TensorBoard, Weights & Biases, MLflow and
trackio. Each tracker has a thread that follows the run's logs and passes new steps to the tracker's
library.

The logs are the queue between the training loop and the trackers. The loop never waits for a
tracker, and a slow tracker does not miss any steps. If a tracker fails, the failure is reported
once, and the tracker is dropped. Data leaves the machine only if the library's environment
variables enable this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from firstlight.errors import MissingDependencyError
from firstlight.recipe.load import yaml_text
from firstlight.run_log.names import HTML_NAME, METRICS_NAME, REPORT_NAME, SAMPLES_NAME
from firstlight.run_log.reader import LineFollower, StepFollower

#: Project name of runs (experiment name in MLflow), unless an environment variable sets a different
#: one.
PROJECT = "firstlight"

#: Metrics of a step, and the sample texts that were generated after the step.
Step = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]


class Tracker(Protocol):
    """Interface of a tracker. Its methods can raise any error that the tracker's library raises.

    Attributes:
        is_mirror: True if the tracker mirrors the run's logs. Such a tracker is reopened at each
            start of the run and after each rollback, and then receives all steps in the logs again.
            False if the tracker receives each step once.
    """

    is_mirror: bool

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        """Begin or resume a run.

        Args:
            run_id: the tracker's id of the run to resume; None for a new run.
            folder: the run folder.
            config: the resolved recipe.

        Returns:
            The tracker's id of the run, which is required for resuming the run.
        """

    def write(self, steps: Sequence[Step]) -> None:
        """Add steps, in ascending order."""

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        """End the run.

        Args:
            files: files of the reports to store with the run.
            checkpoint: folder of the checkpoint to store with the run, or None.
            failed: True if the run ended with an error.
        """


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among a step's metrics, except the step number."""
    return {
        key: value
        for key, value in record.items()
        if key != "step" and type(value) in (int, float) and math.isfinite(value)
    }


def sample_text(sample: Mapping[str, Any]) -> str:
    """Return a sample's prompt and continuation. Lone surrogates, which a log may contain, are
    replaced.
    """
    return f"{sample.get('prompt', '')}{sample.get('text', '')}".encode(errors="replace").decode()


def fenced(text: str) -> str:
    """Return text as a Markdown code block with a fence that is longer than any run of backticks in
    the text.
    """
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall("`+", text))])
    return f"{fence}\n{text}\n{fence}"


#: Name of TensorBoard's folder in a run folder.
TENSORBOARD_NAME = "tensorboard"


class TensorboardTracker:
    """TensorBoard event file in the `tensorboard/` folder of the run folder.

    Scalars are stored in fp32. The sample texts of a step are named `samples/0`, `samples/1` and so
    on. The wall time of an event is the start time of the run plus the training time up to the
    event. The time between stopping and resuming a run is not counted.
    """

    is_mirror = True
    _file: io.BufferedWriter | None = None

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is not None:
            self._file.close()
        place = folder / TENSORBOARD_NAME
        place.mkdir(exist_ok=True)
        earlier = sorted(place.glob("events.out.tfevents.[0-9]*.[0-9]*.firstlight"))
        for path in earlier:
            # Truncate the file rather than delete it. A running TensorBoard continues with the next
            # file when it reaches the end of a file, but not if that file has been deleted.
            if path.is_file() and not path.is_symlink():
                os.truncate(path, 0)
        began, number = str(int(time.time())), 0
        if earlier:
            began, last = earlier[-1].name.split(".")[3:5]
            number = int(last)
        name = f"events.out.tfevents.{began}.{number + 1:06d}.firstlight"
        self._file = open(place / name, "wb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        self._seconds = float(began)
        self._add(Event(file_version="brain.Event:2"))
        # Make TensorBoard discard the steps that it has read from earlier files of the run.
        self._add(Event(session_log=SessionLog(status=SessionLog.START)))
        recipe = yaml_text(dict(config))
        self._add(Event(summary=text_pb("recipe", fenced(recipe))))
        self._file.flush()
        return TENSORBOARD_NAME

    def write(self, steps: Sequence[Step]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        assert self._file is not None
        for record, samples in steps:
            for key in ("seconds", "save_stall_seconds"):
                self._seconds += record.get(key) or 0.0
            summary = Summary()
            for key, value in numbers(record).items():
                summary.value.add(tag=key, simple_value=value)
            for number, sample in enumerate(samples):
                summary.MergeFrom(text_pb(f"samples/{number}", fenced(sample_text(sample))))
            self._add(Event(step=record["step"], summary=summary))
        self._file.flush()

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        assert self._file is not None
        self._file.close()

    def _add(self, event: Any) -> None:
        event.wall_time = self._seconds
        self._records.write(event.SerializeToString())


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a library, and restore their previous values on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class WandbTracker:
    """Weights & Biases run in the `wandb/` folder of the run folder (or of WANDB_DIR).

    The run is offline and can be uploaded with `wandb sync`, unless WANDB_MODE sets a different
    mode.
    """

    is_mirror = False

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        # These variables have no equivalent among the settings of a run. Without them, wandb prints
        # messages about artifacts and sends error reports.
        variables = {"WANDB_SILENT": os.environ.get("WANDB_SILENT", "true")}
        if mode != "online":
            variables["WANDB_ERROR_REPORTING"] = "false"
        with _environment(variables):
            import wandb

            self._folder = folder
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=run_id or secrets.token_hex(4),
                name=folder.name,
                dir=os.environ.get("WANDB_DIR", str(folder)),
                config=dict(config),
                mode=mode,
                # Without this setting, wandb would end a run that the caller has opened.
                reinit="create_new",
                resume="allow",
                settings=wandb.Settings(console="off"),
            )
        return str(self._run.id)

    def write(self, steps: Sequence[Step]) -> None:
        import wandb

        for record, samples in steps:
            values: dict[str, Any] = dict(numbers(record))
            if samples:
                rows = [[sample["prompt"], sample_text(sample)] for sample in samples]
                values["samples"] = wandb.Table(columns=["prompt", "text"], data=rows)
            self._run.log(values, step=record["step"])

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        import wandb

        for path in files:
            self._run.save(str(path), base_path=str(self._folder), policy="now")
        if checkpoint is not None:
            artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
            artifact.add_dir(str(checkpoint))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(failed))


#: Characters that MLflow does not allow in the names of metrics. The constants below it are
#: MLflow's limits on the number of metrics and parameters per call and on the length of a
#: parameter's value.
_MLFLOW_NAME = re.compile(r"[^\w\-. :/]")
_MLFLOW_METRICS = 1000
_MLFLOW_PARAMETERS = 100
_MLFLOW_LENGTH = 6000


class MlflowTracker:
    """MLflow run in the store given by MLFLOW_TRACKING_URI, by default the file mlflow.db in the
    current folder.
    """

    is_mirror = False

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        # If a folder mlruns/ of an earlier version exists, MLflow selects it as a file store, but
        # rejects it unless MLFLOW_ALLOW_FILE_STORE is set. MLflow reads both variables when it is
        # imported and when it creates its store.
        names = "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"
        with _environment({name: os.environ.get(name, "true") for name in names}):
            from mlflow import MlflowClient
            from mlflow.entities import Param

            self._client = MlflowClient()
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = str(self._client.create_run(number, run_name=folder.name).info.run_id)
        parameters = [Param(key, text[:_MLFLOW_LENGTH]) for key, text in _leaves(config)]
        for start in range(0, len(parameters), _MLFLOW_PARAMETERS):
            part = parameters[start : start + _MLFLOW_PARAMETERS]
            self._client.log_batch(self._id, params=part, synchronous=True)
        return self._id

    def write(self, steps: Sequence[Step]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_MLFLOW_NAME.sub("_", key), value, now, record["step"])
            for record, _ in steps
            for key, value in numbers(record).items()
        ]
        for start in range(0, len(metrics), _MLFLOW_METRICS):
            part = metrics[start : start + _MLFLOW_METRICS]
            self._client.log_batch(self._id, metrics=part, synchronous=True)
        for record, samples in steps:
            if samples:
                text = "\n\n".join(f"# {n}\n{sample_text(s)}" for n, s in enumerate(samples))
                self._client.log_text(self._id, text, f"samples/step-{record['step']:08}.txt")

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        for path in files:
            self._client.log_artifact(self._id, str(path))
        if checkpoint is not None:
            self._client.log_artifacts(self._id, str(checkpoint), f"checkpoints/{checkpoint.name}")
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _leaves(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name, in the form `section.key`, and the value as text of each key of a recipe."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


class TrackioTracker:
    """A trackio run. It is stored locally in TRACKIO_DIR, which defaults to a folder in Hugging
    Face's cache, or on the server given by TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.
    """

    is_mirror = False

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        import trackio

        is_remote = any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")))
        # trackio identifies runs by name, and other run folders may have the same name.
        self._name = run_id or f"{folder.name}-{secrets.token_hex(3)}"
        with contextlib.nullcontext() if is_remote else _hub_offline():
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=self._name,
                config=dict(config),
                resume="never" if run_id is None else "must",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return self._name

    def write(self, steps: Sequence[Step]) -> None:
        import trackio

        for record, samples in steps:
            values: dict[str, Any] = dict(numbers(record))
            for number, sample in enumerate(samples):
                values[f"samples/{number}"] = trackio.Markdown(fenced(sample_text(sample)))
            self._run.log(values, step=record["step"])

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        for path in files:
            self._run.log_artifact(path, name=f"{self._name}-{path.name}", type="report")
        if checkpoint is not None:
            self._run.log_artifact(checkpoint, name=f"{self._name}-checkpoint", type="model")
        self._run.finish()


@contextlib.contextmanager
def _hub_offline() -> Iterator[None]:
    """Prevent requests to the Hugging Face hub. Otherwise, trackio would request the user's name
    from the hub.
    """
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


#: Tracker classes, keyed by their names in `run.trackers`.
LIBRARIES: dict[str, type[Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


TRACKERS_NAME = "trackers"

#: Maximum number of seconds that a tracker can take after the end of a run. The first limit applies
#: without a checkpoint to store, and the second with one.
_SECONDS, _SECONDS_WITH_CHECKPOINT = 60.0, 900.0
#: Seconds to wait for a tracker before showing a message.
_SECONDS_UNSAID = 3.0
#: Seconds between two reads of the run's logs.
_SECONDS_BETWEEN = 1.0
#: Maximum number of steps in one call to `Tracker.write`.
_STEPS_AT_ONCE = 50
#: Maximum number of characters of an error that are included in a message.
_MAX_ERROR = 500

#: Names of trackers that had not finished when the run stopped waiting for them. Exit hooks and
#: threads of their libraries may also hang, so the command line ends this process without waiting
#: for them.
GIVEN_UP: set[str] = set()


def require_trackers(names: Sequence[str]) -> None:
    """Raise an error unless the packages of all trackers in `run.trackers` are installed.

    Raises:
        MissingDependencyError: a tracker's package is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            extra = "dash" if name == "tensorboard" else name
            raise MissingDependencyError(name, extra, f"run.trackers: {name}")


def destination(name: str, folder: Path) -> str:
    """Describe where a tracker writes and how to view the result, as text for messages."""
    env = os.environ.get
    if name == "tensorboard":
        return f"{folder / 'tensorboard'} (tensorboard --logdir {folder})"
    if name == "wandb":
        place = env("WANDB_DIR", str(folder))
        if env("WANDB_MODE", "offline") != "offline":
            return f"mode {env('WANDB_MODE')} of WANDB_MODE"
        return f"offline in {place}/wandb (wandb sync {place}/wandb/offline-run-*)"
    if name == "mlflow":
        return env("MLFLOW_TRACKING_URI") or "MLflow's store in the current folder (mlflow ui)"
    return (
        env("TRACKIO_SPACE_ID")
        or env("TRACKIO_SERVER_URL")
        or "trackio's store on this machine (trackio show)"
    )


@dataclass(frozen=True)
class TrackerProgress:
    """Progress of a tracker through a run.

    Attributes:
        run_id: the tracker's id of the run, or None before the run is opened.
        begun: last step for which a write to the tracker was started, or -1.
        done: last step for which the write to the tracker was completed, or -1.
    """

    run_id: str | None = None
    begun: int = -1
    done: int = -1


def read_progress(path: Path) -> TrackerProgress:
    """Read the progress from a tracker's state file. Each line of the file is a JSON object with
    fields of `TrackerProgress`.
    """
    follower, found = LineFollower(path), TrackerProgress()
    for line in follower.new()[0]:
        found = dataclasses.replace(found, **{k: v for k, v in line.items() if k in _KEYS})
    follower.close()
    return found


_KEYS = {one.name for one in dataclasses.fields(TrackerProgress)}


class _TrackerThread(threading.Thread):
    """Thread that follows the logs of a run for one tracker. It is a daemon thread, so that Python
    does not wait for it if the tracker hangs. For the exit hooks and threads of the library, see
    `GIVEN_UP`.

    Args:
        name: name of the tracker, as in `run.trackers`.
        folder: the run folder.
        config: the resolved recipe.
        is_new: True to begin a new run in the tracker; False to resume the recorded one.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], *, is_new: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.state = folder / TRACKERS_NAME / f"{name}.jsonl"
        self.error: str | None = None
        self.checkpoint: Path | None = None
        self.has_failed_run = False
        self.run_is_over = threading.Event()
        self._folder = folder
        self._config = config
        self._is_new = is_new

    def run(self) -> None:
        """Pass the run's steps to the tracker until `run_is_over` is set. If the tracker fails, set
        `error`.
        """
        try:
            self._follow(LIBRARIES[self.name]())
        except BaseException as error:  # noqa: BLE001 -- a tracker must not end the run
            text = " ".join(str(error).split())[:_MAX_ERROR]
            self.error = f"{type(error).__name__}: {text}" if text else type(error).__name__

    def _follow(self, tracker: Tracker) -> None:
        folder = self._folder.resolve()
        follower = StepFollower(folder / METRICS_NAME, folder / SAMPLES_NAME)
        self.state.parent.mkdir(exist_ok=True)
        if self._is_new:
            self.state.unlink(missing_ok=True)
        with contextlib.closing(follower), open(self.state, "ab", buffering=0) as state:
            progress = read_progress(self.state)
            run_id = tracker.open(progress.run_id, folder, self._config)
            _note(state, run_id=run_id)
            begun = -1 if tracker.is_mirror else progress.begun
            is_over = False
            while not is_over:
                is_over = self.run_is_over.wait(_SECONDS_BETWEEN)
                steps = follower.new()
                if tracker.is_mirror and steps and steps[0][0]["step"] <= begun:
                    # The run has rolled back to a checkpoint and has therefore rewritten the logs.
                    tracker.open(run_id, folder, self._config)
                    begun = -1
                for part in _parts(steps, begun):
                    begun = part[-1][0]["step"]
                    # Record the last step before writing. If this process is killed after recording
                    # and before writing, these steps are missing from the tracker, but no step is
                    # written twice.
                    _note(state, begun=begun)
                    tracker.write(part)
                    _note(state, done=begun)
            files = [path for name in (HTML_NAME, REPORT_NAME) if (path := folder / name).is_file()]
            tracker.close(files, self.checkpoint, failed=self.has_failed_run)


def _note(state: FileIO, **values: object) -> None:
    state.write(json.dumps(values).encode() + b"\n")


def _parts(steps: Sequence[Step], begun: int) -> Iterator[list[Step]]:
    """Yield the steps after `begun` in lists of at most 50 steps. A resumed run repeats the steps
    after its checkpoint. The repeated steps are skipped, so that no step is sent to a tracker
    twice.
    """
    rising: list[Step] = []
    for step in steps:
        if step[0]["step"] > begun:
            rising.append(step)
            begun = step[0]["step"]
    for start in range(0, len(rising), _STEPS_AT_ONCE):
        yield rising[start : start + _STEPS_AT_ONCE]


class _OwnStdout:
    """Replacement for sys.stdout that writes to stdout only in the thread that creates this object.
    In other threads, it writes to stderr, so that messages printed by the trackers' libraries are
    not mixed with results on stdout.
    """

    def __init__(self) -> None:
        self._stdout, self._owner = sys.stdout, threading.current_thread()

    def __getattr__(self, name: str) -> Any:
        is_owner = threading.current_thread() is self._owner
        return getattr(self._stdout if is_owner else sys.stderr, name)


class Trackers:
    """Trackers of a run. Used as a context manager, it waits on exit until each tracker has
    received all steps. After a time limit, it stops waiting.

    Args:
        names: names of the trackers, as in `run.trackers`; empty except in the main process.
        folder: the run folder, which contains the logs.
        config: the resolved recipe.
        tell: called with each message to the user.
        is_new: True to begin new runs in the trackers, because the run starts at its first step.
        with_checkpoint: True to store the run's last checkpoint in the trackers.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        config: Mapping[str, Any],
        tell: Callable[[str], None],
        *,
        is_new: bool,
        with_checkpoint: bool,
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._with_checkpoint = with_checkpoint
        self._threads = [_TrackerThread(name, folder, config, is_new=is_new) for name in names]
        self._reported: set[str] = set()
        self._redirected = contextlib.ExitStack()

    def __enter__(self) -> Trackers:
        if self._threads:
            stdout: Any = _OwnStdout()
            self._redirected.enter_context(contextlib.redirect_stdout(stdout))
        for thread in self._threads:
            thread.start()
            self._tell(f"{thread.name}: {destination(thread.name, self._folder)}")
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.has_failed_run = error is not None
            # Tell all trackers that the run is over before waiting for the first one, so that they
            # finish concurrently.
            thread.run_is_over.set()
        with self._redirected:
            try:
                self._wait()
            finally:  # Abandon the remaining trackers even if Ctrl-C interrupts the wait.
                GIVEN_UP.update(thread.name for thread in self._threads if thread.is_alive())

    def give_checkpoint(self, checkpoint: Path) -> None:
        """Set the checkpoint for the trackers to store, if the recipe enables this."""
        if self._with_checkpoint:
            for thread in self._threads:
                thread.checkpoint = checkpoint.resolve()

    def check(self) -> None:
        """Report each failed tracker once."""
        for thread in self._threads:
            if thread.error is not None and thread.name not in self._reported:
                self._reported.add(thread.name)
                self._tell(f"warning: {thread.name} has failed: {thread.error} ({_has(thread)})")

    def _wait(self) -> None:
        """Wait for the trackers to finish, and abandon trackers that take too long."""
        with_checkpoint = any(thread.checkpoint is not None for thread in self._threads)
        limit = _SECONDS_WITH_CHECKPOINT if with_checkpoint else _SECONDS
        began = time.monotonic()
        if running := self._running_at(began + min(limit, _SECONDS_UNSAID)):
            names = ", ".join(thread.name for thread in running)
            self._tell(f"waiting for {names}, at most {limit:.0f} s")
        for thread in self._running_at(began + limit):
            self._reported.add(thread.name)
            self._tell(
                f"warning: {thread.name} has not finished after {limit:.0f} s and is "
                f"abandoned ({_has(thread)})"
            )
        self.check()

    def _running_at(self, end: float) -> list[_TrackerThread]:
        """Wait until a given time or until all trackers have finished, and return the trackers that
        are still running.
        """
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return [thread for thread in self._threads if thread.is_alive()]


def _has(thread: _TrackerThread) -> str:
    """Describe the steps that a tracker has received, as text for messages."""
    done = read_progress(thread.state).done
    steps = "no step" if done < 0 else f"the steps up to {done:,}"
    return f"it has {steps}; --resume adds the missing steps"
