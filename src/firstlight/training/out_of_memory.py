"""Recover from running out of memory by repeating the step with smaller micro-batches."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator

import torch

from firstlight.errors import TrainingError
from firstlight.hardware.device import is_out_of_memory
from firstlight.training.guard import DivergedError
from firstlight.training.micro_batch_trials import fewer_rows
from firstlight.training.run import Run
from firstlight.training.state import restore_torch_random_states, torch_random_states
from firstlight.training.step import MicroBatchTooLargeError


@contextlib.contextmanager
def smaller_micro_batches(run: Run) -> Iterator[None]:
    """Run one attempt at a step. If memory runs out, reduce the run's micro-batch size and reset
    the random states, so that the next attempt draws the same random numbers.

    Raises:
        TrainingError: not even a single row fits in memory, or memory ran out during the update.
    """
    # Saved, because an attempt may draw random numbers for dropout before it fails.
    random = torch_random_states()
    size = run.micro_batch_size
    step = run.state.step
    try:
        yield
        return
    except MicroBatchTooLargeError as error:
        problem = str(error)
        # Otherwise the traceback keeps the tensors of the failed passes in memory.
        traceback.clear_frames(error.__traceback__)
    except DivergedError:
        raise
    except TrainingError as error:
        raise TrainingError(f"step {step}: {error}") from None
    except (RuntimeError, MemoryError) as error:
        # Memory ran out during the update, which may be partly applied: the step can't be repeated.
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"step {step}: out of memory in the update, with a micro-batch of {size} rows "
            f"({_short(str(error))}): lower batch.micro_batch_size or data.seq_len"
            f"{_after('; ', run.advise())}"
        ) from error
    _halve_micro_batch(run, problem)
    restore_torch_random_states(random)


def _halve_micro_batch(run: Run, problem: str) -> None:
    """Reduce the micro-batch size for the rest of this run and for runs resumed from it.

    Raises:
        TrainingError: a micro-batch already has only one row.
    """
    size, step = run.micro_batch_size, run.state.step
    fewer, advice = fewer_rows(size), run.advise()
    if not fewer:
        raise TrainingError(
            f"step {step}: out of memory with a micro-batch of one row ({_short(problem)}): "
            "lower data.seq_len, or set efficiency.activation_checkpointing to full and "
            f"efficiency.loss_chunk_tokens to 512{_after('; ', advice)}"
        )
    run.tell(
        f"out of memory with a micro-batch of {size} rows{_after(': ', advice)}; "
        f"the run continues with {fewer}"
    )
    run.state.micro_batch_rows = fewer
    run.add_event("out of memory", step, micro_batch_rows=fewer, before=size)
    # Drop router statistics and preference rewards of the failed attempt.
    run.program.forget_statistics()
    gc.collect()
    if run.program.hardware.device.type == "cuda":
        torch.cuda.empty_cache()


def _short(problem: str) -> str:
    return " ".join(problem.split())[:200]


def _after(separator: str, advice: str | None) -> str:
    return f"{separator}{advice}" if advice else ""
