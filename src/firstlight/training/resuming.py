"""Going on from a checkpoint: what must be as it was, and what may have been changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.checkpoint.checkpoint import (
    OPTIMIZER_NAME,
    is_in_shards,
    load_checkpoint,
    resolve_model_folder,
)
from firstlight.errors import CheckpointError, ConfigError
from firstlight.training.job import Job
from firstlight.training.state import TrainState, restore

#: Keys of the optimizer with whose values the tensors of its state change.
_STATE_KEYS: Sequence[str] = ("name", "eight_bit_library", "embeddings_in_32_bits")

#: Values of keys that a checkpoint of an older version lacks.
_BEFORE_THE_KEY = {"embeddings_in_32_bits": False, "adafactor_variant": "torch"}


def take_up(job: Job, folder: Path, tell: Callable[[str], None]) -> None:
    """Put a checkpoint's state into the job.

    Raises:
        CheckpointError: the data, its order or the optimizer is another than the checkpoint's.
    """
    checkpoint = load_checkpoint(folder, verify=False)  # `newest_checkpoint` did
    saved, identity = checkpoint.trainer_state, job.data_identity
    for key in ("seq_len", "mix", "long", "manifest_sha256", "tokenizer_sha256"):
        before, is_now = saved.get("data", {}).get(key), identity.get(key)
        if before != is_now:
            raise CheckpointError(
                f"{folder} can't be resumed: the data's {key} was {before} and is {is_now} "
                "now (--init-from starts a new run from its weights)"
            )
    before, now = saved.get("recipe", {}), job.recipe.model_dump()
    _require_same_optimizer(folder, before, job)
    _require_same_seed(folder, before, job)
    job.take_up(checkpoint)
    job.init_from = saved.get("init_from")
    if before.get("batch", {}).get("micro_batch_size") != job.recipe.batch.micro_batch_size:
        job.state.micro_batch_rows = 0
    tell(f"resuming from {folder} (step {job.state.step})")
    changed = [
        f"{section}.{key}"
        for section, values in now.items()
        if isinstance(values, dict) and isinstance(before.get(section), dict)
        for key in changed_keys(before[section], values)
        # What a checkpoint of an older version lacks was not changed.
        if key != "dir" and key in before[section]
    ]
    if changed:
        tell(f"warning: changed since the checkpoint: {', '.join(changed)}")
    if not job.goes_on:
        tell(f"the run is complete: step {job.state.step} of {job.max_steps}")


def continue_schedule(job: Job, init_from: str | Path | None, tell: Callable[[str], None]) -> None:
    """Put into a new run what another had come to at its checkpoint, for `schedule.resume`:
    weights, moments, random numbers, and its place in the schedule; the data begin at their first
    row.

    Args:
        init_from: see `train`.

    Raises:
        ConfigError: there is nothing to go on from, or no step is left.
        CheckpointError: it is no checkpoint, or of another model or optimizer.
    """
    if init_from is None:
        raise ConfigError("schedule.resume goes on in another run's: name that (--init-from)")
    if job.recipe.lora is not None:
        raise ConfigError("schedule.resume goes on with all of a model: leave it out, or lora")
    folder = resolve_model_folder(init_from)
    if not (folder / OPTIMIZER_NAME).is_file() and not is_in_shards(folder):
        raise CheckpointError(
            f"{init_from} has no optimizer state, which schedule.resume goes on with: name a run "
            "or one of its checkpoints, or leave schedule.resume out"
        )
    checkpoint = load_checkpoint(folder, verify=False)  # finding it did
    keys = _STATE_KEYS
    if job.recipe.optimizer.name == "adafactor":
        keys = (*keys, "adafactor_variant")
    saved = checkpoint.trainer_state.get("recipe", {})
    for key, before, now in _changed_of_optimizer(saved, job, keys):
        raise CheckpointError(
            f"{folder} has the state of optimizer.{key} {before}, and schedule.resume goes on with "
            f"it: set that instead of {now}, or leave schedule.resume out"
        )
    found = restore(checkpoint, job.program)
    if found.step >= job.max_steps:
        raise ConfigError(
            f"schedule.resume goes on at step {found.step} of {init_from}, and schedule.max_steps "
            f"is {job.max_steps}, counted from that run's beginning: set it higher"
        )
    job.state = TrainState(
        step=found.step, tokens_seen=found.tokens_seen, skipped_steps=found.skipped_steps
    )
    tell(f"going on in the schedule of {folder} (step {found.step} of {job.max_steps})")


def _require_same_optimizer(folder: Path, saved: Mapping[str, Any], job: Job) -> None:
    for key, before, now in _changed_of_optimizer(saved, job, _STATE_KEYS):
        raise CheckpointError(
            f"{folder} can't be resumed: its optimizer state is that of optimizer.{key} "
            f"{before}, not {now}: set it back, or start a new run in another "
            f"run.dir with --init-from {folder}"
        )


def _changed_of_optimizer(
    saved: Mapping[str, Any], job: Job, keys: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """(key, value in the checkpoint's recipe, value now) of the keys whose values differ."""
    before, now = _BEFORE_THE_KEY | saved.get("optimizer", {}), job.recipe.optimizer.model_dump()
    return ((key, before[key], now[key]) for key in keys if before.get(key, now[key]) != now[key])


def _require_same_seed(folder: Path, saved: Mapping[str, Any], job: Job) -> None:
    before, now = saved.get("run", {}).get("seed"), job.recipe.run.seed
    if before not in (None, now):
        raise CheckpointError(
            f"{folder} can't be resumed with another seed: run.seed was {before} and is {now} now, "
            "and the data would come in another order: set it back, or start a new run in "
            f"another run.dir with --init-from {folder}"
        )


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, or that only one has."""
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
