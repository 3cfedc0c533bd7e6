"""The tasks of lm-evaluation-harness (Gao et al. 2024), scored with firstlight's own models.

The harness reads the tasks, lays out the texts and computes the metrics; what a text's
log-likelihood is and how it goes on comes from here. Texts are encoded as the harness' own
transformers backend (`HFLM`) does it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstlight.errors import ConfigError, InputError, MissingDependencyError, nearest
from firstlight.evaluation.results import Metric, Progress, TaskResult
from firstlight.weights.huggingface import LoadedModel

#: The seeds of `lm_eval.simple_evaluate`: of Python; of numpy, torch and the few-shot examples.
_RANDOM_SEED, _OTHER_SEED = 0, 1234
#: Of standard errors that have no formula; the harness' own 100,000 take minutes.
_BOOTSTRAP_ITERATIONS = 1_000


@dataclass(frozen=True)
class HarnessTasks:
    """Tasks that the harness has loaded. See `results.Task`."""

    loaded_tasks: Mapping[str, Any]
    items: int | None

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """All metrics of all tasks and groups, under the harness' names; a metric of another filter
        than "none" is `METRIC,FILTER`."""
        import lm_eval

        from firstlight.evaluation.harness_model import harness_model

        with _by_itself():
            # simple_evaluate would do the same, and then collect for seconds what it can find out
            # about the machine.
            found = lm_eval.evaluate(
                harness_model(loaded, batch_size, on_texts),
                self.loaded_tasks,
                limit=self.items,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=False,
            )
        assert found is not None
        counts = {name: count["effective"] for name, count in found["n-samples"].items()}
        return [
            TaskResult(name, _metrics(figures), counts.get(name))
            for name, figures in found["results"].items()
        ]


def ready_harness(
    names: Sequence[str], *, items: int | None, task_folder: str | Path | None
) -> HarnessTasks:
    """Load tasks, groups or tags of the harness, with their data.

    Args:
        names: of tasks.
        items: only the first so many of each; None is all.
        task_folder: of further tasks, in the harness' YAML. Where it has all of them, those that
            come with the harness, which take seconds to list, are not looked at. A folder of tasks
            may hold Python code, which the harness runs.

    Raises:
        MissingDependencyError: the harness is not installed.
        ConfigError: a name is unknown.
        InputError: a task's data can't be had, or it asks for what can't be done here.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingDependencyError("lm_eval", "eval", "a task lm-eval:NAME") from error
    if task_folder is not None and not Path(task_folder).expanduser().is_dir():
        raise ConfigError(f"the folder of tasks {task_folder} does not exist")
    folder = None if task_folder is None else str(Path(task_folder).expanduser())
    with _by_itself():
        manager = TaskManager(include_path=folder, include_defaults=folder is None)
        if folder is not None and not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder)
        for name in names:
            if name not in manager.all_tasks:
                raise ConfigError(
                    f"task lm-eval:{name} is unknown{nearest(name, manager.all_tasks)}: "
                    "`lm-eval ls tasks` lists those of the harness, --task-folder adds your own"
                )
        try:
            found = manager.load(list(names))
        except Exception as error:
            # Whatever a task's files and the library that loads its data run into.
            raise InputError(
                f"lm-eval:{','.join(names)} can't be loaded: {type(error).__name__}: "
                f"{str(error)[:300]}"
            ) from error
    for name, task in found["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise InputError(
                f"task lm-eval:{name} runs code that the model wrote, or shows it pictures, which "
                "is not done here: take it out"
            )
        # As simple_evaluate does it.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_OTHER_SEED)
    return HarnessTasks(found, items)


def _metrics(figures: Mapping[str, Any]) -> dict[str, Metric]:
    """The harness' `{"acc,none": ..., "acc_stderr,none": ...}` by name. What is no finite number
    is left out."""
    found: dict[str, Metric] = {}
    for key, value in figures.items():
        name, comma, kind = key.partition(",")
        if not comma or name.endswith("_stderr") or not _is_finite(value):
            continue
        error = figures.get(f"{name}_stderr,{kind}", math.nan)
        shown = name if kind == "none" else key
        found[shown] = Metric(float(value), float(error) if _is_finite(error) else None)
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """The harness seeded as by itself, its prints on stderr, in one process; afterwards the random
    numbers of Python, numpy and torch go on as if nothing had been."""
    states = random.getstate(), np.random.get_state()
    before = os.environ.get("DISABLE_MULTIPROC")
    # Its bootstrap would fork a process that computes in threads.
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with torch.random.fork_rng(), contextlib.redirect_stdout(sys.stderr):
            random.seed(_RANDOM_SEED)
            np.random.seed(_OTHER_SEED)
            torch.manual_seed(_OTHER_SEED)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
