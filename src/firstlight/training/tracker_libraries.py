"""The trackers that need their own library: Weights & Biases, MLflow and trackio.

A tracker runs in a separate process (`tracker_process.py`), which alone imports its library: this
module imports none of them, and no torch. Nothing leaves the machine unless the environment
variables of the library say so.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

#: Project (or experiment) of runs, where the environment names none.
PROJECT = "firstlight"

#: A step's metrics and the sample texts written after it.
Step = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]


class Tracker(Protocol):
    """A program that shows runs. Any method may raise whatever its library raises."""

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        """Begin a run, or go on with one.

        Args:
            run_id: the run that is resumed; None for a new one.
            folder: the run folder.
            config: the resolved recipe.

        Returns:
            the id by which the run is found again.
        """

    def write(self, steps: Sequence[Step]) -> None:
        """Add steps, rising."""

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        """End the run.

        Args:
            files: the reports.
            checkpoint: folder of the checkpoint to be stored with the run; None for none.
            failed: the run ended in an error.
        """


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a step's metrics, without the step."""
    return {
        key: value
        for key, value in record.items()
        if key != "step" and type(value) in (int, float) and math.isfinite(value)
    }


def sample_text(sample: Mapping[str, Any]) -> str:
    """A sample's prompt and its continuation, which a log may hold with halves of characters."""
    return f"{sample.get('prompt', '')}{sample.get('text', '')}".encode(errors="replace").decode()


class WandbTracker:
    """A run of Weights & Biases, in the folder `wandb/` of the run folder (or of WANDB_DIR).

    It stays offline, for `wandb sync`, unless WANDB_MODE says otherwise.
    """

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        if mode != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else errors of wandb are sent
        import wandb

        self._folder = folder
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id or secrets.token_hex(4),
            name=folder.name,
            dir=os.environ.get("WANDB_DIR", str(folder)),
            config=dict(config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
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


#: Characters that names of metrics may have in MLflow, and the metrics of one of its calls.
_MLFLOW_NAME = re.compile(r"[^\w\-. :/]")
_MLFLOW_METRICS, _MLFLOW_PARAMETERS, _MLFLOW_LENGTH = 1000, 100, 6000


class MlflowTracker:
    """A run of MLflow, in the store that MLFLOW_TRACKING_URI names: without it in MLflow's own
    default, the file mlflow.db of the current folder."""

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # A folder mlruns/ of an earlier MLflow is what MLflow would go on with, and then refuse.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
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
    """`section.key` and the text of each value."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


class TrackioTracker:
    """A run of trackio, in its local store (TRACKIO_DIR, by default in Hugging Face's cache).

    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL send it elsewhere.
    """

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        if not any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))):
            os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks the hub for the name of the user
        import trackio

        # trackio knows runs by name, and run folders of several places have the same name.
        self._name = run_id or f"{folder.name}-{secrets.token_hex(3)}"
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
                fence = "`" * max(
                    [3, *(len(run) + 1 for run in re.findall("`+", sample_text(sample)))]
                )
                values[f"samples/{number}"] = trackio.Markdown(
                    f"{fence}\n{sample_text(sample)}\n{fence}"
                )
            self._run.log(values, step=record["step"])

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        for path in files:
            self._run.log_artifact(path, name=f"{self._name}-{path.name}", type="report")
        if checkpoint is not None:
            self._run.log_artifact(checkpoint, name=f"{self._name}-checkpoint", type="model")
        self._run.finish()


#: Tracker classes by their names in `run.trackers`.
LIBRARIES: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
