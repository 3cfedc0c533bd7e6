"""One optimizer step, for any loss function, optimizer and batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from firstlight.data.loader import Batch
from firstlight.efficiency import LossFunction
from firstlight.errors import TrainingError
from firstlight.optim.optimizer import Optimizer
from firstlight.training.scaling import LossScaler

DIVERGED = "lower optimizer.learning_rate or lengthen schedule.warmup_steps"


@dataclass(frozen=True)
class StepResult:
    """What one step measured.

    Attributes:
        loss: what `loss_sum` gave, over the step's valid tokens, before the update: the mean
            cross-entropy (nats), and with experts the balancing loss times its coefficient.
        grad_norm: L2 norm of the gradient before clipping.
        tokens: valid tokens.
        skipped: whether the parameters are as before, because scaled gradients overflowed.
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
) -> StepResult:
    """Forward, backward and update over the micro-batches of one global batch.

    The loss is the sum over the whole global batch divided by its valid tokens, so that any
    cut into micro-batches gives the gradient of one large batch.

    Args:
        scaler: for fp16; None leaves the loss as it is.

    Raises:
        TrainingError: the loss or gradient is not finite, without a scaler to skip the step; the
            parameters are as before (but for an optimizer that updates them in the backward
            pass).
    """
    batches = list(batches)
    tokens = sum(batch.num_valid for batch in batches)
    if tokens == 0:
        raise TrainingError("a global batch has no token to learn from")
    scale = 1.0 if scaler is None else scaler.scale
    optimizer.zero_grad()
    total = None
    for batch in batches:
        loss = loss_sum(batch.input_ids, batch.labels, batch.document_ids)
        (loss / (tokens / scale)).backward()  # type: ignore[no-untyped-call]
        optimizer.accumulate()
        # CUDA graphs write the next loss into the same memory.
        total = loss.detach().clone() if total is None else total + loss.detach()
    grad_norm = float(optimizer.clip_gradients(scale))
    assert total is not None
    mean = float(total / tokens)
    # inf - inf and 0 * inf are NaN: one comparison finds every non-finite value.
    finite = abs(mean) + abs(grad_norm) < float("inf")
    if not finite:
        optimizer.zero_grad()
        if scaler is None:
            raise TrainingError(f"loss {mean}, gradient norm {grad_norm}: not finite; {DIVERGED}")
    if scaler is not None:
        scaler.update(finite)
    if finite:
        optimizer.step()
    return StepResult(mean, grad_norm, tokens, skipped=not finite)
