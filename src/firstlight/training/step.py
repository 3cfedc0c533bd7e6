"""Run a single optimizer step with any loss function, optimizer and number of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.errors import DIVERGED_REMEDY, TrainingError
from firstlight.hardware.device import download, is_out_of_memory
from firstlight.methods import LossFunction
from firstlight.optim.optimizer import Optimizer
from firstlight.parallel.engine import Engine, one_process
from firstlight.training.guard import DivergedError, LossScaler


class MicroBatchTooLargeError(MemoryError):
    """Raised when memory runs out before the update. Parameters and moments are unchanged, and the
    gradients have been freed.
    """


@dataclass(frozen=True)
class StepResult:
    """Measurements of one step.

    Attributes:
        loss: mean loss before the update over the step's valid tokens (cross-entropy in nats) or
            preference pairs. For models with experts, the load-balancing loss times its coefficient
            is included.
        grad_norm: L2 norm of the gradient before clipping.
        tokens: number of valid tokens in the step, over all processes.
        skipped: True if the step was rejected or the scaled gradients overflowed. In this case,
            parameters and moments are unchanged.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False


@dataclass(frozen=True)
class Passes:
    """Result of the forward and backward passes over the micro-batches of one step, before gradient
    clipping and the update.

    Attributes:
        loss_sum: loss summed over all valid tokens or pairs, as a scalar tensor on the device.
        tokens: number of valid tokens in the step, over all processes.
        terms: number of valid tokens or pairs in all processes.
        scale: factor by which the loss was multiplied before the backward pass.
    """

    loss_sum: Tensor
    tokens: int
    terms: int
    scale: float


def train_step(
    loss_sum: LossFunction,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    scaler: LossScaler | None = None,
    accepts: Callable[[float, float], bool] | None = None,
    engine: Engine | None = None,
    *,
    skips_only_infinite: bool = False,
    passes: Passes | None = None,
    run_ahead: Callable[[], bool] | None = None,
) -> StepResult:
    """Run forward and backward passes over the micro-batches of one global batch, clip the
    gradients, and update the parameters.

    The summed loss of the global batch is divided by its number of valid tokens or pairs. The
    gradient is therefore the same for any number of micro-batches and processes.

    Args:
        loss_sum: loss function of a batch, summed over its valid tokens or pairs.
        optimizer: the optimizer.
        batches: this process's micro-batches, each `[micro_batch, seq_len]`, on the device.
        scaler: the fp16 loss scaler, or None to leave the loss unscaled.
        accepts: called with the loss and gradient norm before the update. If it returns False, the
            update is skipped. It is not called for a step that the scaler skips.
        engine: the engine that connects several processes; None for a single process. All processes
            get the same result.
        skips_only_infinite: True if `accepts` returns True for every finite step. A GPU then
            applies the update while the host waits for the loss and gradient norm, and `accepts` is
            called afterwards.
        passes: result of the forward and backward passes over `batches` if they have already been
            run; None to run them.
        run_ahead: called after all work of the step has been submitted to a GPU and before the host
            waits for the loss. It may run the forward and backward passes of the next step. If it
            did, it must return True.

    Raises:
        DivergedError: the loss or gradient is not finite, and neither `scaler` nor `accepts` can
            skip the step. Parameters are unchanged, unless the backward pass updates them.
        MicroBatchTooLargeError: memory ran out in a forward or backward pass. The step can be
            repeated with smaller micro-batches. If the backward pass updates parameters, the
            original error is raised instead.
        TrainingError: the global batch has no labels, or memory ran out in one of several
            processes.
    """
    engine = engine or one_process()
    if passes is None:
        passes = run_passes(loss_sum, optimizer, batches, scaler, engine)
    try:
        norm = optimizer.clip_gradients(passes.scale, engine.joined_norm)
    except (RuntimeError, MemoryError) as error:
        problem = _repeatable_problem(error, optimizer, engine)
    else:
        if engine.world.size > 1:
            mean = engine.sums(float(passes.loss_sum))[0] / passes.terms
            result = StepResult(mean, float(norm), passes.tokens)
            return _update(optimizer, result, scaler, accepts)
        loss = passes.loss_sum / passes.terms
        is_begun = optimizer.reads_found_inf and (skips_only_infinite or accepts is None)
        is_ahead = False
        if is_begun:
            numbers = torch.stack((loss.double(), norm.double()))
            # Check on the GPU that the loss and the gradient norm are finite. `_update` makes the
            # same check on the host.
            optimizer.step(found_inf=(~numbers.isfinite().all()).float())
            read = numbers.tolist if run_ahead is None else download(numbers)
            is_ahead = run_ahead is not None and run_ahead()
            mean, length = read()
        else:
            mean, length = float(loss), float(norm)
        result = StepResult(mean, length, passes.tokens)
        return _update(optimizer, result, scaler, accepts, is_begun=is_begun, is_ahead=is_ahead)
    # Raise the error outside the except block, where the traceback would keep the tensors of the
    # passes in memory.
    optimizer.zero_grad()
    raise MicroBatchTooLargeError(problem)


def run_passes(
    loss_sum: LossFunction,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    scaler: LossScaler | None,
    engine: Engine,
) -> Passes:
    """Run the forward and backward passes of one step. Gradients of an earlier step are discarded.
    For arguments and errors, see `train_step`.
    """
    batches = list(batches)
    counts = engine.sums(
        sum(batch.num_valid for batch in batches), sum(batch.num_terms for batch in batches)
    )
    tokens, terms = map(int, counts)
    if tokens == 0:
        raise TrainingError(
            "a global batch does not contain any labels: check the data's loss mask"
        )
    scale = 1.0 if scaler is None else scaler.scale
    optimizer.zero_grad()
    try:
        # An engine for pipeline parallelism schedules the passes of its stages itself.
        total = engine.run_schedule(loss_sum, batches, terms / scale)
        for number, batch in enumerate(batches if total is None else [], start=1):
            # Gradients are reduced across processes only in the last backward pass.
            with engine.backward_pass(last=number == len(batches)):
                loss = loss_sum(*batch.inputs)  # forward
                scaled = loss * engine.loss_factor / (terms / scale)
                engine.backward(scaled)
            optimizer.accumulate()
            # Clone the loss, because CUDA graphs write the next loss to the same memory.
            total = loss.detach().clone() if total is None else total + loss.detach()
            del loss, scaled  # Free the autograd graph before the next forward pass or the update.
        assert total is not None
        return Passes(total, tokens, terms, scale)
    except (RuntimeError, MemoryError) as error:
        problem = _repeatable_problem(error, optimizer, engine)
    # Raise the error outside the except block, as in `train_step`.
    optimizer.zero_grad()
    raise MicroBatchTooLargeError(problem)


def _update(
    optimizer: Optimizer,
    result: StepResult,
    scaler: LossScaler | None,
    accepts: Callable[[float, float], bool] | None,
    *,
    is_begun: bool = False,
    is_ahead: bool = False,
) -> StepResult:
    """Apply the update if the loss and gradient norm are accepted. Return `result` with `skipped`
    set. See `train_step`.

    Args:
        is_begun: True if the update has already been submitted to a GPU, which applies it unless
            the loss or norm is not finite.
        is_ahead: True if the gradients already belong to the next step and must be kept.
    """
    # The sum of the absolute values is infinite or NaN if either value is not finite, so a single
    # comparison covers all cases.
    finite = abs(result.loss) + abs(result.grad_norm) < math.inf
    # Do not pass a step whose scaled gradients overflow to the guard, because the loss scale causes
    # such overflows.
    if scaler is not None and not finite:
        accepted = False
    else:
        accepted = finite if accepts is None else accepts(result.loss, result.grad_norm)
    assert not is_begun or accepted == finite, "a refused step was applied"
    if not accepted:
        if is_begun:
            optimizer.take_back_counts()
        if not is_ahead:
            optimizer.zero_grad()
        if optimizer.in_backward or (scaler is None and accepts is None):
            raise DivergedError(
                f"loss {result.loss}, gradient norm {result.grad_norm}: "
                f"{'out of the ordinary' if finite else 'not finite'}; {DIVERGED_REMEDY}"
            )
    if scaler is not None:
        scaler.update(finite)
    if accepted and not is_begun:
        optimizer.step()
    return replace(result, skipped=not accepted)


def _repeatable_problem(error: Exception, optimizer: Optimizer, engine: Engine) -> str:
    """If `error` is an out-of-memory error and the step can be repeated, return its message.
    Otherwise, raise the error.
    """
    # If the backward pass updates parameters, some updates may have been applied. With several
    # processes, the other processes may be waiting for the gradients of this process. In both
    # cases, the step can't be repeated.
    if optimizer.in_backward or not is_out_of_memory(error):
        raise error
    if not engine.can_repeat_step:
        raise TrainingError(
            f"out of memory on rank {engine.world.rank} "
            f"({' '.join(str(error).split())[:200]}): lower batch.micro_batch_size"
        ) from None
    return str(error)
