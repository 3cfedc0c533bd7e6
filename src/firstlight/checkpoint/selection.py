"""Find the checkpoint or model folder that the user specifies. Also select the checkpoint from
which a run resumes, or to which it rolls back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from firstlight.checkpoint.checkpoint import (
    STATE_NAME,
    load_trainer_state,
    verify_checkpoint,
)
from firstlight.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST_NAME,
    READING_ERRORS,
    Saved,
    best_saved,
    foreign_checkpoints,
    own_past,
    reading_checkpoint,
    require_kept,
    saved_checkpoints,
)
from firstlight.console import say
from firstlight.errors import (
    CheckpointError,
    ConfigError,
    nearest,
)
from firstlight.lora.files import adapter_chain, is_adapter
from firstlight.weights.hub import find_model_folder, is_gguf
from firstlight.weights.huggingface import CONFIG_NAME, has_tokenizer, require_not_trainer

T = TypeVar("T")


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run in the order in which they were saved."""
    return [saved.folder for saved in saved_checkpoints(run_folder)]


def newest_checkpoint(run_folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint of a run that passes `verify_checkpoint`.

    A checkpoint of a dead branch (see manifest.py) is used only if all checkpoints that do not
    belong to a dead branch are damaged.

    Returns: The folder of the checkpoint, or None if the run has no checkpoints, and a list of
    messages. The messages report damaged newer checkpoints and checkpoints of other runs.

    Raises:
        CheckpointError: the run has checkpoints, but none of them is usable.
    """

    def newest_first() -> list[Saved]:
        saved = saved_checkpoints(run_folder)
        past = own_past(saved)
        dead = [one for one in saved if one.sequence and one not in past]
        # Include checkpoints with a damaged manifest in order to report them.
        return [*reversed([one for one in saved if one not in dead]), *reversed(dead)]

    folder, problems = _first_sound(newest_first)
    problems = [*foreign_checkpoints(run_folder), *problems]
    if folder is None and problems:
        raise CheckpointError(
            f"no checkpoint of {run_folder} can be used: {'; '.join(problems)} (start a new run "
            "in another run.dir; --init-from starts from the weights of another run)"
        )
    return folder, problems


def _first_sound(candidates: Callable[[], Iterable[Saved]]) -> tuple[Path | None, list[str]]:
    """Return the folder of the first candidate that passes `verify_checkpoint`, or None, and the
    error messages for all candidates before it.

    If a candidate is deleted during the search, the run must have saved a newer checkpoint, so the
    search is repeated with an updated list of candidates.
    """
    while True:
        problems: list[str] = []
        for one in candidates():
            try:
                verify_checkpoint(one.folder)
            except CheckpointError as error:
                if not one.folder.exists():
                    break
                problems.append(str(error))
                continue
            return one.folder, problems
        else:
            return None, problems


def read_model_folder(
    name: str | Path,
    read: Callable[[Path], T],
    *,
    pickled: bool = False,
    best: bool = False,
) -> T:
    """Select a model folder with `resolve_model_folder`, call `read` on it, and return the result.

    A run may delete the selected checkpoint while it is being read. If `name` is the run folder,
    the checkpoint that is now the newest or best one is read instead. If `name` is the path of the
    checkpoint itself, an error is raised.

    Args:
        name, pickled, best: see `resolve_model_folder`.
        read: function that reads a model folder.

    Raises:
        ConfigError, CheckpointError, ModelError: see `resolve_model_folder` and `read`.
    """
    while True:
        folder = resolve_model_folder(name, pickled=pickled, best=best)
        try:
            result = read(folder)
        except READING_ERRORS:
            if folder.exists():
                raise
        else:
            # If the folder was deleted during the call to `read`, optional files such as the
            # tokenizer may be missing from the result, so check that it still exists.
            if folder.exists():
                return result


def best_checkpoint(run_folder: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint with the lowest validation loss among those that pass
    `verify_checkpoint`, and messages about damaged checkpoints with lower losses.

    Raises:
        CheckpointError: no checkpoint has a validation loss, or all checkpoints with a validation
            loss are damaged.
    """
    folder, problems = _first_sound(lambda: best_saved(run_folder))
    if folder is not None:
        return folder, problems
    why = "; ".join(problems) or "no checkpoint has a validation loss"
    raise CheckpointError(
        f"{run_folder} has no best checkpoint ({why}): omit --best to use the newest"
    )


def resolve_model_folder(name: str | Path, *, pickled: bool = False, best: bool = False) -> Path:
    """Return the model folder for the CHECKPOINT argument of a command. If the folder is a
    checkpoint, verify it.

    Args:
        name: a run folder, a checkpoint folder, any Hugging Face model folder, a GGUF file, or the
            id of a model on the Hugging Face hub. In a run folder, the newest checkpoint is used.
        pickled: True to download pickled weights if a model on the hub has no other weights.
        best: True to use the checkpoint with the lowest validation loss in the run folder instead
            of the newest one.

    Raises:
        ConfigError: `best` is set for a path that is not a run folder.
        CheckpointError: the run folder has no usable checkpoint, or the checkpoint is damaged or
            was deleted.
        ModelError: neither the folder nor a model with this id on the hub exists.
    """
    path = Path(name).expanduser()
    is_run = path.is_dir() and not (path / CONFIG_NAME).is_file() and (path / CHECKPOINTS).is_dir()
    if best and not is_run:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = "" if path.exists() else nearest(path.name, siblings)
        raise ConfigError(f"--best requires a run folder, but {name} is not one{hint}")
    if is_run:
        newest, problems = best_checkpoint(path) if best else newest_checkpoint(path)
        for problem in problems:
            say(f"warning: {problem}: {'the next best' if best else 'an older'} checkpoint is used")
        if newest is None:
            raise CheckpointError(f"run folder {path} has no complete checkpoint yet")
        return newest
    require_kept(path)
    folder = find_model_folder(name, pickled=pickled)
    if (folder / MANIFEST_NAME).is_file() and (folder / STATE_NAME).is_file():
        with reading_checkpoint(folder):
            verify_checkpoint(folder)
    return folder


def resolve_tokenizer(name: str | Path) -> Path:
    """Return the file or folder of a tokenizer. The user specifies either the tokenizer itself or a
    model that includes it.

    Args:
        name: file or folder of a tokenizer, or a model as for `resolve_model_folder`. For an
            adapter without a tokenizer, the tokenizer of the base model is used.

    Raises:
        CheckpointError, ModelError: see `resolve_model_folder`.
    """
    path = Path(name).expanduser()
    if is_gguf(path):
        return resolve_model_folder(path)
    if path.is_file() or has_tokenizer(path):
        return path
    if not path.is_dir() and str(name).partition("@")[0].count("/") != 1:
        # The name is neither an existing path nor a hub id. The caller will raise an error when it
        # tries to read the path.
        return path
    if path.is_dir() and not (path / CHECKPOINTS).is_dir() and not is_adapter(path):
        require_not_trainer(path)
        return path
    # Do not download the weights of a hub model.
    is_here = path.is_dir()
    folder = resolve_model_folder(name) if is_here else find_model_folder(name, weights=False)
    return next(filter(has_tokenizer, adapter_chain(folder)), folder)


def trained_on(folder: Path) -> dict[str, Any]:
    """Return the `data` entry of a checkpoint's state, which contains `dir`, `seq_len` and
    `document_masking` of the training data. Return {} for a folder that is not a checkpoint.
    """
    if not (folder / STATE_NAME).is_file():
        require_kept(folder)
        return {}
    data = load_trainer_state(folder).get("data")
    return data if isinstance(data, dict) else {}


def checkpoint_before(
    run_folder: Path, step: int, saved_step: int, every_steps: int
) -> Path | None:
    """Return the folder of the checkpoint to which a run should roll back, or None if there is
    none. In general, this is the newest checkpoint before `step` that passes `verify_checkpoint`.

    However, checkpoints whose last step was not skipped are preferred. Among them, checkpoints at
    regular steps, which are multiples of `every_steps`, are preferred. A run that was stopped and
    resumed has an additional checkpoint at the step at which it was stopped. Because of the
    preference for regular steps, such a run rolls back to the same step as an uninterrupted run.

    Args:
        run_folder: the run's folder.
        step: step that failed, or the target of the previous rollback if no step has succeeded
            since then.
        saved_step: step of the newest checkpoint of the run. Checkpoints at later steps belong to a
            dead branch.
        every_steps: the recipe's `checkpoint.every_steps`.
    """
    found = []
    for one in own_past(saved_checkpoints(run_folder)):
        if one.step < step and one.step <= saved_step:
            with contextlib.suppress(CheckpointError):
                state = load_trainer_state(one.folder)
                # If all steps before a checkpoint were skipped, it only contains the initial state
                # of the run.
                if state.get("skipped_steps", 0) < one.step:
                    found.append((*_merits(state, one.step, every_steps), one.sequence, one.folder))
    for *_, folder in sorted(found, reverse=True):
        with contextlib.suppress(CheckpointError):
            verify_checkpoint(folder)
            return folder
    return None


def _merits(state: Mapping[str, Any], step: int, every_steps: int) -> tuple[bool, bool]:
    """Return the sort key of a checkpoint as two booleans. The first one is True if the last step
    was not skipped. The second one is True if the checkpoint was saved at a regular step.
    """
    is_calm = not state.get("skipped")
    was_due = every_steps > 0 and step % every_steps == 0 and state.get("pending") is None
    return is_calm, was_due
