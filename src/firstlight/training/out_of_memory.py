"""Recover from a failed step. If memory ran out, the step is repeated with smaller micro-batches.
If the compilation failed, it is repeated without torch.compile.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator

import torch

from firstlight.errors import TrainingError
from firstlight.hardware.device import is_out_of_memory
from firstlight.methods.compilation import is_compile_failure
from firstlight.optim.eight_bit import compiles_update
from firstlight.training.guard import DivergedError
from firstlight.training.micro_batch_trials import fewer_rows
from firstlight.training.run import Run
from firstlight.training.state import restore_torch_random_states, torch_random_states
from firstlight.training.step import MicroBatchTooLargeError


@contextlib.contextmanager
def repeated_step(run: Run) -> Iterator[None]:
    """Run one attempt at a step. If memory runs out, reduce the run's micro-batch size. If
    torch.compile fails and the user did not choose to compile, continue without torch.compile.
    After a failure, reset the random states, so that the next attempt draws the same random
    numbers.

    Raises:
        TrainingError: not even a single row fits in memory, memory ran out during the update, or
            torch.compile failed in a run whose recipe requires it.
    """
    # Save the random states, because an attempt may draw random numbers for dropout before it
    # fails.
    random = torch_random_states()
    size = run.micro_batch_size
    step = run.state.step
    try:
        yield
        return
    except MicroBatchTooLargeError as error:
        problem = str(error)
        # Clear the frames of the traceback, which would otherwise keep the tensors of the failed
        # forward and backward passes in memory.
        traceback.clear_frames(error.__traceback__)
    except DivergedError:
        raise
    except TrainingError as error:
        raise TrainingError(f"step {step}: {error}") from None
    except (RuntimeError, MemoryError) as error:
        if is_compile_failure(error):
            _continue_uncompiled(run, error)
            restore_torch_random_states(random)
            return
        # If memory ran out during the update, the update may have been partly applied, so the step
        # can't be repeated.
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"step {step}: out of memory in the update, with a micro-batch of {size} rows "
            f"({_short(str(error))}): lower batch.micro_batch_size or data.seq_len"
            f"{_after('; ', run.advise())}"
        ) from error
    _halve_micro_batch(run, problem)
    restore_torch_random_states(random)


@contextlib.contextmanager
def uncompiled_after_failure(run: Run) -> Iterator[None]:
    """When the context exits, enable torch.compile again if it failed during the run (see
    `repeated_step`)."""
    chose_compiling = run.chose_compiling
    try:
        yield
    finally:
        if run.chose_compiling != chose_compiling:
            torch.compiler.set_stance("default")


def _continue_uncompiled(run: Run, error: Exception) -> None:
    """Disable torch.compile for the rest of this call to `train`, because it has failed.

    Raises:
        TrainingError: the user chose to compile, or the step can't be repeated.
    """
    problem = _short(str(error).split("\n\n")[0])  # Omit torch's advice.
    # With several processes, the step can't be repeated, because the other processes may be waiting
    # for the gradients of this process.
    can_repeat = run.engine.world.size == 1 and not run.program.optimizer.in_backward
    # If the optimizer update is compiled, it may have been partly applied before the error.
    can_repeat = can_repeat and not compiles_update(run.recipe.optimizer)
    if not (run.chose_compiling and can_repeat):
        raise TrainingError(
            f"step {run.state.step}: torch.compile failed ({problem}): set efficiency.compile to "
            "false"
        ) from error
    run.tell(
        f"torch.compile failed ({problem}): the run continues without it (to resume the run, add "
        "--efficiency.compile false)"
    )
    torch.compiler.set_stance("force_eager")
    run.chose_compiling = False
    run.program.forget_statistics()


def _halve_micro_batch(run: Run, problem: str) -> None:
    """Reduce the micro-batch size for the rest of this run, including after it is resumed.

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
    # Discard the router statistics and preference rewards of the failed attempt.
    run.program.forget_statistics()
    gc.collect()
    if run.program.hardware.device.type == "cuda":
        torch.cuda.empty_cache()


def _short(problem: str) -> str:
    return " ".join(problem.split())[:200]


def _after(separator: str, advice: str | None) -> str:
    return f"{separator}{advice}" if advice else ""
