"""The average of a run's last weights (Izmailov et al. 2018, arXiv 1803.05407; of checkpoints:
Kaddour 2022, arXiv 2209.14981).

It is computed from the checkpoints on the disk when the run is complete, so that it takes no memory
during training. Checkpoints that a stop or a request saved between two regular ones are left out,
so that a resumed run has the same average as one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from firstlight.checkpoint.checkpoint import verify_checkpoint
from firstlight.checkpoint.manifest import Saved, own_past, saved_checkpoints
from firstlight.checkpoint.retention import averaged_checkpoints
from firstlight.errors import CheckpointError, ModelError
from firstlight.files.atomic import new_folder, write_json
from firstlight.training.processes import wait_for_main
from firstlight.training.run import Run
from firstlight.training.state import set_weights
from firstlight.training.validation import evaluate_dataset
from firstlight.weights.huggingface import model_files
from firstlight.weights.stored import WEIGHTS_NAME, StoredTensor, read_header, save_tensors

#: Folder of the averaged weights in a run folder, a Hugging Face model folder.
AVERAGED_NAME = "averaged"
_EVALUATION_NAME = "averaged.json"


def write_average(run: Run) -> None:
    """Average the weights of a finished run's last checkpoints, evaluate and write them. Afterwards
    the model has the averaged weights.

    Raises:
        CheckpointError: a checkpoint is damaged.
        StorageError: the averaged weights can't be written.
    """
    config = run.recipe.checkpoint
    if not config.average_last or run.goes_on:
        return
    # Every process reads the checkpoints: all see run.dir, which resuming needs too.
    past = own_past(saved_checkpoints(run.folder))
    found = averaged_checkpoints(past, config)
    average = mean_weights(found)
    set_weights(run.program, average)
    steps = [saved.step for saved in found]
    text = f"averaged weights of steps {', '.join(map(str, steps))}"
    if len(steps) < config.average_last:
        text += f" (average_last is {config.average_last}, and there are no more)"
    losses: dict[str, float] = {}
    if run.validation is not None:
        run.program.model.eval()
        evaluation, _ = evaluate_dataset(
            run.program,
            run.validation,
            run.seq_len,
            lambda: None,
            key="val/loss",
            max_rows=run.recipe.evaluation.max_rows,
        )
        losses["val/loss"] = evaluation.loss
        last = "" if run.evaluation is None else f" (the last weights: {run.evaluation.loss:.4f})"
        text += f": val/loss {evaluation.loss:.4f}{last}"
    run.tell(text)
    wait_for_main(run.engine, lambda: _write(run, average, {"steps": steps, **losses}))


def mean_weights(checkpoints: Sequence[Saved]) -> dict[str, Tensor]:
    """The mean of each tensor over checkpoints, in the tensor's shape and in fp32, added up in
    fp64. Tensors are read in parts, so that only the means take memory.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    for saved in checkpoints:
        verify_checkpoint(saved.folder)
    try:
        stored = [read_header(saved.folder / WEIGHTS_NAME) for saved in checkpoints]
        return {name: StoredTensor.mean([one[name] for one in stored]) for name in stored[0]}
    except ModelError as error:
        raise CheckpointError(f"weights can't be averaged: {error}") from error


def _write(run: Run, average: dict[str, Tensor], record: dict[str, object]) -> None:
    run.require_folder()
    with new_folder(run.folder / AVERAGED_NAME, replace=True) as folder:
        for name, text in model_files(run.program.model.config, run.tokenizer).items():
            (folder / name).write_text(text, encoding="utf-8")
        save_tensors(average, folder / WEIGHTS_NAME)
        write_json(folder / _EVALUATION_NAME, record)
