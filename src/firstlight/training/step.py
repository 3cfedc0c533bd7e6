"""One optimizer step, for any loss function, optimizer and batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.efficiency import LossFunction
from firstlight.errors import TrainingError
from firstlight.hardware.device import is_out_of_memory
from firstlight.optim.optimizer import Optimizer
from firstlight.parallel.engine import Engine
from firstlight.training.guard import DIVERGED, DivergedError
from firstlight.training.scaling import LossScaler


class MicroBatchTooLargeError(MemoryError):
    """Memory ran out before the update; parameters and moments are as before, gradients gone."""


@dataclass(frozen=True)
class StepResult:
    """What one step measured.

    Attributes:
        loss: what `loss_sum` gave, over the step's valid tokens or pairs, before the update: the
            mean cross-entropy (nats), and with experts the balancing loss times its coefficient.
        grad_norm: L2 norm of the gradient before clipping.
        tokens: valid tokens.
        skipped: whether parameters and moments are as before, because the step was refused or
            scaled gradients overflowed.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False


def train_step(
    loss_sum: LossFunction,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    scaler: LossScaler | None = None,
    accepts: Callable[[float, float], bool] | None = None,
    engine: Engine | None = None,
) -> StepResult:
    """Forward, backward and update over the micro-batches of one global batch.

    The loss is the sum over the whole global batch divided by its valid tokens, or pairs, so that
    any cut into micro-batches, and over processes, gives the gradient of one large batch.

    Args:
        batches: of this process.
        scaler: for fp16; None leaves the loss as it is.
        accepts: called with the loss and the gradient's norm before the update; False skips it.
            Not called for a step that the scaler skips.
        engine: what several processes share the global batch by: all of them call this, and get
            the same result.

    Raises:
        DivergedError: the loss or gradient is not finite and nothing was given to skip the step;
            or the optimizer updates in the backward pass, and has made what should have been
            skipped. But for that, the parameters are as before.
        MicroBatchTooLargeError: memory ran out in a forward or backward pass; the step can be
            repeated with smaller micro-batches. An optimizer that updates in the backward pass
            raises the error itself.
    """
    batches = list(batches)
    tokens = sum(batch.num_valid for batch in batches)
    terms = sum(batch.num_terms for batch in batches)
    if engine is not None:
        tokens, terms = int(engine.sum(tokens)), int(engine.sum(terms))
    if tokens == 0:
        raise TrainingError("a global batch has no token to learn from")
    scale = 1.0 if scaler is None else scaler.scale
    optimizer.zero_grad()
    total, norm = _gradients(loss_sum, optimizer, batches, terms, scale, engine)
    mean, grad_norm = _mean(total, terms, engine), float(norm)
    # inf - inf and 0 * inf are NaN: one comparison finds every non-finite value.
    finite = abs(mean) + abs(grad_norm) < math.inf
    if scaler is not None and not finite:
        accepted = False
    else:
        accepted = finite if accepts is None else accepts(mean, grad_norm)
    if not accepted:
        optimizer.zero_grad()
        if optimizer.in_backward or (scaler is None and accepts is None):
            raise DivergedError(
                f"loss {mean}, gradient norm {grad_norm}: "
                f"{'out of the ordinary' if finite else 'not finite'}; {DIVERGED}"
            )
    if scaler is not None:
        scaler.update(finite)
    if accepted:
        optimizer.step()
    return StepResult(mean, grad_norm, tokens, skipped=not accepted)


def _mean(total: Tensor, terms: int, engine: Engine | None) -> float:
    if engine is None or engine.world.size == 1:
        return float(total / terms)
    return engine.sum(float(total)) / terms


def _gradients(
    loss_sum: LossFunction,
    optimizer: Optimizer,
    batches: list[Batch],
    terms: int,
    scale: float,
    engine: Engine | None,
) -> tuple[Tensor, Tensor]:
    """Fill in the clipped gradients; return the summed loss and their norm before clipping."""
    try:
        return _passes(loss_sum, optimizer, batches, terms, scale, engine)
    except (RuntimeError, MemoryError) as error:
        # Updates in the backward pass may have been made: nothing can be repeated there. Nor where
        # other processes wait for this one's gradients.
        if optimizer.in_backward or not is_out_of_memory(error):
            raise
        if engine is not None and not engine.can_repeat_step:
            raise TrainingError(
                f"out of memory on rank {engine.world.rank} "
                f"({' '.join(str(error).split())[:200]}): lower batch.micro_batch_size"
            ) from None
        message = str(error)
    # Outside of the handler: the error's traceback holds what the passes had in memory.
    optimizer.zero_grad()
    raise MicroBatchTooLargeError(message)


def _passes(
    loss_sum: LossFunction,
    optimizer: Optimizer,
    batches: list[Batch],
    terms: int,
    scale: float,
    engine: Engine | None,
) -> tuple[Tensor, Tensor]:
    joined = None if engine is None else engine.joined_norm
    total = None if engine is None else engine.run_schedule(loss_sum, batches, terms / scale)
    if total is not None:
        return total, optimizer.clip_gradients(scale, joined)
    factor = 1 if engine is None else engine.loss_factor
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        with contextlib.nullcontext() if engine is None else engine.backward_pass(last=last):
            loss = loss_sum(*batch.inputs)
            scaled = loss * factor / (terms / scale)
            if engine is None:
                scaled.backward()  # type: ignore[no-untyped-call]
            else:
                engine.backward(scaled)
        optimizer.accumulate()
        # CUDA graphs write the next loss into the same memory.
        total = loss.detach().clone() if total is None else total + loss.detach()
    assert total is not None
    return total, optimizer.clip_gradients(scale, joined)
