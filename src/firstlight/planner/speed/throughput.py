"""The speed of a training step on a GPU, from the operators that a trace counted.

Two hardware models: a GPU by its data sheet or by fitted constants (`gpu.py`), and the links
between several GPUs (`Exchange`). On this machine steps are timed instead, see `timed.py`.

The trace of a step has no kernels of torch.compile, which fuse everything between matrix products
and attention. Operands and results of those still pass through memory: `fused_bytes` counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from firstlight.hardware.gpus import GPU
from firstlight.planner.memory.kernels import OperatorCount, total_bytes
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.speed.exchange import Exchange, bubble, exchange_seconds
from firstlight.planner.speed.gpu import (
    DEFAULT_SHARES,
    ZERO,
    Range,
    Shares,
    kernel_seconds,
    larger,
    multiprocessors,
    shares_for,
)
from firstlight.planner.speed.operators import (
    KINDS,
    is_free,
    kind_of,
    streamed_bytes,
)

Bound = Literal["compute", "memory bandwidth", "launching", "communication"]

#: Phases that torch.compile compiles, and in which a pipeline's stages wait for each other.
_COMPILED_PHASES = ("forward", "loss", "backward of loss", "backward")
#: Look-ups of rows and the sums of their gradients count as separate kernels in compiled code too.
_NOT_FUSED = ("embedding", "embedding_dense_backward")


@dataclass(frozen=True)
class Workload:
    """Properties of a training step that its speed depends on, besides the operators.

    Attributes:
        global_batch_tokens: tokens of a step, all processes together.
        flops_per_token: see `models.accounting.train_flops_per_token`.
        precision: the recipe's `efficiency.precision`, resolved.
        compiled: True if torch.compile compiles the forward and the backward pass.
        cuda_graphs: True if a step is launched as one CUDA graph.
        dispatches: True if Python sees each operator of the layers (selective checkpointing).
        updates: number of calls of torch optimizers in a step.
        exchange: communication of several processes.
    """

    global_batch_tokens: int
    flops_per_token: float
    precision: str = "bf16"
    compiled: bool = False
    cuda_graphs: bool = False
    dispatches: bool = False
    updates: int = 1
    exchange: Exchange = field(default_factory=Exchange)


@dataclass(frozen=True)
class SpeedPrediction:
    """Predicted speed of training.

    Attributes:
        step_seconds: seconds of an optimizer step; `slow` is the largest value.
        tokens_per_second, mfu: speed of all processes together; `slow` is the smallest value. MFU
            is relative to a GPU's data sheet, or to the rate of products measured here.
        phases: expected seconds by phase of the step.
        kinds: expected seconds by the names in `KINDS`; {} for steps that were timed.
        bound: the resource that takes most of the time; None for steps that were timed.
        source: origin of the rates, as text for the user.
        notes: assumptions of the prediction, as text for the user.
    """

    step_seconds: Range
    tokens_per_second: Range
    mfu: Range
    phases: dict[str, float]
    kinds: dict[str, float] = field(default_factory=dict)
    bound: Bound | None = None
    source: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The prediction as JSON values; ranges as "low", "expected", "high"."""
        values = asdict(self)
        for name in ("tokens_per_second", "mfu"):
            found: Range = getattr(self, name)
            values[name] = {"low": found.slow, "expected": found.expected, "high": found.fast}
        step = self.step_seconds
        values["step_seconds"] = {"low": step.fast, "expected": step.expected, "high": step.slow}
        values["notes"] = list(self.notes)
        return values


@dataclass
class _Sums:
    """Seconds added up so far, by phase, by kind of operator and by limiting resource."""

    phases: dict[str, Range] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    compute: float = 0.0
    memory: float = 0.0

    def add(self, phase: str, kind: str, seconds: Range) -> None:
        self.phases[phase] = self.phases.get(phase, ZERO) + seconds
        self.kinds[kind] += seconds.expected

    @property
    def total(self) -> Range:
        return sum(self.phases.values(), ZERO)


def predict_speed(
    prediction: MemoryPrediction,
    work: Workload,
    gpu: GPU,
    shares: Shares | None = None,
) -> SpeedPrediction:
    """Predict the speed of the step whose operators were counted.

    Args:
        prediction: prediction for one process, with the operators of an optimizer step.
        work: the step's tokens, precision and communication.
        gpu: a GPU of the table.
        shares: fractions of the GPU's rates that are reached; None takes those of its type.
    """
    shares = shares or shares_for(gpu)
    sums, peak, notes = _on_gpu(prediction.operators, work, gpu, shares)
    exchange = work.exchange
    if waits := bubble(exchange):
        # Stages wait in the passes only: each updates its own parameters without the others.
        for phase in filter(sums.phases.__contains__, _COMPILED_PHASES):
            sums.add(phase, "communication", sums.phases[phase] * waits)
    sent = exchange_seconds(exchange, gpu.link, sums.phases.get("backward", ZERO), shares)
    if sent.slow:
        sums.add("communication", "communication", sent)
    step = sums.total
    devices = exchange.processes * exchange.tensor_parallel * exchange.stages
    # The slowest step has the lowest rate, so `slow` stays the first value.
    rates = Range(*(work.global_batch_tokens / max(s, 1e-12) for s in step))
    mfu = Range(*(rate * work.flops_per_token / (peak * devices) for rate in rates))
    return SpeedPrediction(
        step_seconds=step,
        tokens_per_second=rates,
        mfu=mfu,
        phases={name: found.expected for name, found in sums.phases.items()},
        kinds=sums.kinds,
        bound=_bound(sums),
        source=shares.source,
        notes=tuple(notes),
    )


def _bound(sums: _Sums) -> Bound:
    by: dict[Bound, float] = {"compute": sums.compute, "memory bandwidth": sums.memory}
    by |= {"launching": sums.kinds["launching"], "communication": sums.kinds["communication"]}
    return max(by, key=lambda name: by[name])


def _fuses(entry: OperatorCount, work: Workload) -> bool:
    """True if torch.compile fuses the operator into one of its own kernels."""
    one = entry.operator
    return (
        work.compiled
        and one.phase in _COMPILED_PHASES
        and kind_of(one) == "elementwise"
        and one.base_name not in _NOT_FUSED
    )


def fused_bytes(counts: Iterable[OperatorCount]) -> dict[str, float]:
    """Bytes of the operands and results of matrix products and attention, by phase.
    torch.compile's fused kernels move about `Shares.fused_traffic` times as many."""
    found: dict[str, float] = {}
    for entry in counts:
        one = entry.operator
        if one.phase in _COMPILED_PHASES and kind_of(one) in ("matrix_products", "attention"):
            size = total_bytes((*one.inputs, *one.outputs))
            found[one.phase] = found.get(one.phase, 0.0) + entry.count * size
    return found


def _on_gpu(
    counts: Sequence[OperatorCount], work: Workload, gpu: GPU, shares: Shares
) -> tuple[_Sums, float, list[str]]:
    sums = _Sums()
    launches: dict[str, float] = {}
    for entry in counts:
        one = entry.operator
        # Fused operators are counted below, by `fused_bytes`.
        if is_free(one) or _fuses(entry, work):
            continue
        seconds = kernel_seconds(one, gpu, work.precision, shares) * entry.count
        kind = kind_of(one)
        sums.add(one.phase, kind, seconds)
        launches[one.phase] = launches.get(one.phase, 0.0) + entry.count
        memory = entry.count * streamed_bytes(one) / (shares.bandwidth.expected * gpu.bandwidth)
        # By the roofline model, a product is memory-bound if its traffic takes all of its time.
        if kind in ("matrix_products", "attention") and memory < seconds.expected:
            sums.compute += seconds.expected
        else:
            sums.memory += seconds.expected
    for phase, size in fused_bytes(counts).items() if work.compiled else ():
        pairs = zip(shares.fused_traffic, shares.bandwidth, strict=True)
        # `slow` pairs the most traffic with the lowest bandwidth.
        traffic = Range(*(size * moved / (gpu.bandwidth * rate) for moved, rate in pairs))
        sums.add(phase, "elementwise", traffic)
        sums.memory += traffic.expected
    if work.dispatches and not work.compiled:
        # In the forward pass, and when the backward pass computes it again.
        seen = sum(entry.count for entry in counts if entry.operator.phase == "forward")
        for phase in ("forward", "backward"):
            launches[phase] = launches.get(phase, 0.0) + shares.dispatch_launches * seen
    if "optimizer" in launches:
        launches["optimizer"] += shares.update_launches * work.updates
    _add_launching(sums, launches, work, shares)
    # Two int64 a token: its id and its label.
    copied = 16.0 * work.global_batch_tokens / work.exchange.processes / work.exchange.host_link
    sums.add("data", "data", Range.exact(copied))
    is_measured = shares.source != DEFAULT_SHARES.source
    unmeasured = "worked out from its data sheet and a measured H100, and was not measured"
    notes = [
        f"speed on a {gpu.name} is {shares.source if is_measured else unmeasured}: "
        f"{multiprocessors(gpu)} multiprocessors, {shares.products.slow:.0%} to "
        f"{shares.products.fast:.0%} of the peak in large matrix products, "
        f"{shares.bandwidth.slow:.0%} to {shares.bandwidth.fast:.0%} of the bandwidth"
    ]
    if work.precision == "fp8":
        notes.append("fp8 is counted as bf16: the table has no rates for it")
    return sums, gpu.peak_flops(work.precision), notes


def _add_launching(sums: _Sums, launches: dict[str, float], work: Workload, shares: Shares) -> None:
    """Add each phase's seconds in which the GPU is idle until the host launches the next kernel."""
    if work.cuda_graphs:
        return
    for phase, count in launches.items():
        compiled = work.compiled and phase in _COMPILED_PHASES
        # Assumed: one fused kernel after each product or attention kernel.
        number = 2 * count if compiled else count
        each = shares.compiled_launch_seconds if compiled else shares.launch_seconds
        busy = sums.phases.get(phase, ZERO)
        waited = larger(busy, each * number)
        # Only the time beyond the kernels: while they run, launching the next ones is free.
        extra = Range(*(a - b for a, b in zip(waited, busy, strict=True)))
        sums.add(phase, "launching", extra)
