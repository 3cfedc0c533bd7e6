"""Support for cooldowns. A cooldown is a run that branches off from a checkpoint of another run,
called the trunk, and decays the learning rate from there. The trunk's learning rate must be
constant at the checkpoint's step.

Several cooldowns from one trunk yield the losses of runs of different lengths without training each
of these runs from the start (Hu et al. 2024; Haegele et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.checkpoint.checkpoint import (
    OPTIMIZER_NAME,
    STATE_NAME,
    is_sharded_checkpoint,
    load_trainer_state,
)
from firstlight.checkpoint.manifest import CHECKPOINTS
from firstlight.checkpoint.selection import read_model_folder
from firstlight.errors import CheckpointError, ConfigError
from firstlight.optim.schedule import Schedule
from firstlight.recipe import Recipe, parse_recipe

#: Keys of the `schedule` section that a cooldown's overrides may set.
_FREE_KEYS = ("decay_shape", "decay_starts_at_peak", "min_lr_ratio", "min_learning_rate")


def cooldown_recipe(
    trunk: str | Path, steps: int, overrides: Sequence[tuple[str, str]] = ()
) -> tuple[Recipe, Path]:
    """Return the recipe of a cooldown and the checkpoint from which it branches off. Pass them to
    `train` as `recipe` and `branch_from`.

    The learning rate falls over `steps` steps, starting at the checkpoint's step. The shape and
    minimum of the decay are taken from the trunk's schedule if its kind is wsd; otherwise, the
    decay is linear and ends at 0. `overrides` can change the shape and the minimum. All other keys
    are copied from the trunk's recipe. The run folder is named after the trunk and the step.

    Args:
        trunk: a run folder or the folder of a checkpoint. In a run folder, the newest checkpoint is
            used.
        steps: optimizer steps of the cooldown.
        overrides: (`section.key`, value as YAML text) pairs.

    Raises:
        ConfigError: the trunk's learning rate is not constant at that step, or an override changes
            a key that the cooldown sets.
        CheckpointError, ModelError: the checkpoint does not exist or is damaged.
    """
    if Path(trunk).is_file():
        raise ConfigError(
            f"{trunk} is a file: pass the run folder from which to branch off, or one of its "
            "checkpoints"
        )

    def read(folder: Path) -> tuple[Path, dict[str, Any]]:
        if not (folder / STATE_NAME).is_file() or not (
            (folder / OPTIMIZER_NAME).is_file() or is_sharded_checkpoint(folder)
        ):
            raise CheckpointError(
                f"{trunk} does not contain optimizer state, which a cooldown needs: pass a run "
                "folder or one of its checkpoints"
            )
        return folder, load_trainer_state(folder)

    folder, state = read_model_folder(trunk, read)
    step, schedule = state["step"], _stable_schedule(folder, state)
    values = dict(state["recipe"])
    values["run"] = {**values["run"], "dir": str(_cooldown_folder(folder, step))}
    before = values["schedule"]
    section: dict[str, Any] = {
        "kind": "wsd",
        "max_steps": step + steps,
        "warmup_steps": schedule.warmup_steps,
        "initial_learning_rate": before.get("initial_learning_rate"),
        "cooldown_steps": steps,
    }
    if schedule.kind == "wsd":
        section |= {key: before[key] for key in _FREE_KEYS if before.get(key) is not None}
    values["schedule"] = section
    recipe = parse_recipe(values, f"cooldown of {folder}", overrides)
    decided = parse_recipe(values).schedule.model_dump(exclude=set(_FREE_KEYS))
    for key, value in recipe.schedule.model_dump(exclude=set(_FREE_KEYS)).items():
        if value != decided[key]:
            raise ConfigError(
                f"a cooldown sets schedule.{key} to {decided[key]} itself: remove the key"
            )
    return recipe, folder


def _stable_schedule(folder: Path, state: Mapping[str, Any]) -> Schedule:
    """Return the trunk's schedule.

    Raises:
        ConfigError: the checkpoint is not in the constant phase of the schedule.
        CheckpointError: the saved schedule is damaged.
    """
    # Older versions, which supported only "cosine", did not write a schedule into the trainer
    # state.
    saved = state.get("schedule") or {"kind": "cosine"}
    if saved.get("kind") not in ("wsd", "constant"):
        raise ConfigError(
            f"{folder} belongs to a run with schedule.kind {saved.get('kind')}, whose learning "
            "rate is never constant: use a run of kind wsd or constant"
        )
    try:
        schedule = Schedule(**saved)
    except TypeError as error:
        raise CheckpointError(f"{folder / STATE_NAME} is damaged: schedule: {error}") from None
    step = state["step"]
    if step < schedule.warmup_steps:
        raise ConfigError(
            f"step {step} of {folder} is in the warm-up, which ends at step "
            f"{schedule.warmup_steps}: use a later checkpoint"
        )
    if schedule.kind == "wsd" and step > schedule.decay_begin:
        raise ConfigError(
            f"step {step} of {folder} is in the decay, which begins after step "
            f"{schedule.decay_begin}: use an earlier checkpoint"
        )
    return schedule


def _cooldown_folder(checkpoint: Path, step: int) -> Path:
    """Return the run folder of a cooldown. It is next to the trunk's run folder and has the name
    TRUNK-cooldown-STEP.
    """
    is_in_run = checkpoint.parent.name == CHECKPOINTS
    trunk = checkpoint.parent.parent if is_in_run else checkpoint
    trunk = trunk if trunk.name not in ("", "..") else trunk.resolve()
    return trunk.with_name(f"{trunk.name}-cooldown-{step}")
