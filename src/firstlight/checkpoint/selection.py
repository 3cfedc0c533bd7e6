"""Select a checkpoint or model folder: by the user's argument, or for a run that resumes or rolls
back (the newest, the best, or the newest before a step).
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

    A checkpoint on a dead branch (see manifest.py) is used only if all others are damaged.

    Returns:
        The checkpoint's folder (None if the run has no checkpoint), and messages about damaged
        newer checkpoints and about checkpoints of other runs.

    Raises:
        CheckpointError: there are checkpoints, but none of them is usable.
    """

    def newest_first() -> list[Saved]:
        saved = saved_checkpoints(run_folder)
        past = own_past(saved)
        dead = [one for one in saved if one.sequence and one not in past]
        # `saved` also includes checkpoints with a damaged manifest, which only cause messages.
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
    error messages for the candidates before it.

    If the run deletes a candidate during the search, it has saved a newer checkpoint, so the search
    is repeated with new candidates.
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
    """Select a model folder with `resolve_model_folder`, and return the result of calling `read` on
    it.

    If `name` is a run folder and the run deletes the checkpoint while it is being read, the
    checkpoint that is newest or best at that time is read instead. If `name` is the path of the
    deleted checkpoint itself, an error is raised.

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
            # In a deleted folder, optional files such as the tokenizer would silently be missing.
            if folder.exists():
                return result


def best_checkpoint(run_folder: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint with the lowest validation loss that passes `verify_checkpoint`, and
    messages about damaged checkpoints with lower losses.

    Raises:
        CheckpointError: no checkpoint has a validation loss, or all that have one are damaged.
    """
    folder, problems = _first_sound(lambda: best_saved(run_folder))
    if folder is not None:
        return folder, problems
    why = "; ".join(problems) or "no checkpoint has a validation loss"
    raise CheckpointError(
        f"{run_folder} has no best checkpoint ({why}): omit --best to use the newest"
    )


def resolve_model_folder(name: str | Path, *, pickled: bool = False, best: bool = False) -> Path:
    """Return the model folder for a command's CHECKPOINT argument. If it is a checkpoint, verify
    it.

    Args:
        name: a run folder (whose newest checkpoint is used), a checkpoint folder, any Hugging Face
            model folder, a GGUF file, or the id of a model on the Hugging Face hub.
        pickled: True to download pickled weights if the model on the hub has no others.
        best: True to use the run folder's checkpoint with the lowest validation loss instead of the
            newest.

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
    """Return the file or folder of a tokenizer, which may be part of a model.

    Args:
        name: a tokenizer's file or folder, or a model as in `resolve_model_folder`, whose tokenizer
            is used. For an adapter without a tokenizer, the tokenizer of its base model is used.

    Raises:
        CheckpointError, ModelError: see `resolve_model_folder`.
    """
    path = Path(name).expanduser()
    if is_gguf(path):
        return resolve_model_folder(path)
    if path.is_file() or has_tokenizer(path):
        return path
    if not path.is_dir() and str(name).partition("@")[0].count("/") != 1:
        # Neither a path nor a hub id; the caller raises an error when it reads the path.
        return path
    if path.is_dir() and not (path / CHECKPOINTS).is_dir() and not is_adapter(path):
        require_not_trainer(path)
        return path
    # The weights of a hub model are not downloaded.
    is_here = path.is_dir()
    folder = resolve_model_folder(name) if is_here else find_model_folder(name, weights=False)
    return next(filter(has_tokenizer, adapter_chain(folder)), folder)


def trained_on(folder: Path) -> dict[str, Any]:
    """Return the `data` entry in a checkpoint's state, with `dir`, `seq_len` and `document_masking`
    of its training data, or {} for a folder that is not a checkpoint.
    """
    if not (folder / STATE_NAME).is_file():
        require_kept(folder)
        return {}
    data = load_trainer_state(folder).get("data")
    return data if isinstance(data, dict) else {}


def checkpoint_before(
    run_folder: Path, step: int, saved_step: int, every_steps: int
) -> Path | None:
    """Return the folder of the checkpoint to which a run rolls back, or None: the newest checkpoint
    before `step` that passes `verify_checkpoint`.

    Checkpoints at regular steps (multiples of `every_steps`) and before the first skipped step are
    preferred. A run that was stopped and resumed has an additional checkpoint, but it thus rolls
    back to the same step as an uninterrupted run.

    Args:
        run_folder: the run's folder.
        step: step that failed, or step of an earlier rollback that did not help.
        saved_step: step of the run's newest checkpoint; later ones are on a dead branch.
        every_steps: the recipe's `checkpoint.every_steps`.
    """
    found = []
    for one in own_past(saved_checkpoints(run_folder)):
        if one.step < step and one.step <= saved_step:
            with contextlib.suppress(CheckpointError):
                state = load_trainer_state(one.folder)
                # If all steps were skipped, the checkpoint is simply the run's initial state.
                if state.get("skipped_steps", 0) < one.step:
                    found.append((*_merits(state, one.step, every_steps), one.sequence, one.folder))
    for *_, folder in sorted(found, reverse=True):
        with contextlib.suppress(CheckpointError):
            verify_checkpoint(folder)
            return folder
    return None


def _merits(state: Mapping[str, Any], step: int, every_steps: int) -> tuple[bool, bool]:
    """Return the sort key of a checkpoint: (True if its last step was not skipped, True if it was
    saved at a regular step).
    """
    is_calm = not state.get("skipped")
    was_due = every_steps > 0 and step % every_steps == 0 and state.get("pending") is None
    return is_calm, was_due
