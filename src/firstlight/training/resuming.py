"""Going on from a checkpoint: what must be as it was, and what may have been changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from firstlight.checkpoint import load_checkpoint
from firstlight.errors import CheckpointError
from firstlight.training.job import Job


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


def _require_same_optimizer(folder: Path, saved: Mapping[str, Any], job: Job) -> None:
    before, now = saved.get("optimizer", {}), job.recipe.optimizer.model_dump()
    for key in ("name", "eight_bit_library"):
        if key in before and before[key] != now[key]:
            raise CheckpointError(
                f"{folder} can't be resumed: its optimizer state is that of optimizer.{key} "
                f"{before[key]}, not {now[key]}: set it back, or start a new run in another "
                f"run.dir with --init-from {folder}"
            )


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
