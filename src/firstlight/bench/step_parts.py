"""Breakdown of a training step's time by phases (forward, backward, update) and by operators.

Phases and operators are measured in separate steps after the timed ones, because waiting for the
GPU between phases, and the profiler, would slow down the timed steps.

- The phase backward is the time in the call of `backward`. Forward is the time from the start of
  the step, or from the end of the previous micro-batch's backward, to this call. Update is the
  rest: clipping and the optimizer. Layers that are recomputed (activation checkpointing) and an
  optimizer that updates inside the backward pass count as backward. The program waits for the GPU
  before and after each backward pass.
- Operators are those of torch.profiler. An operator's time is its self time, without that of
  operators that it calls: processor time on a CPU, time of its kernels on a GPU. Operators that the
  optimizer, an attention kernel or a normalisation calls are counted in its class. Kernels made by
  torch.compile are a separate class ("compiled"), because one kernel may do the work of several
  classes.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from firstlight.bench.memory import peaks
from firstlight.bench.pictures import Panel, draw_panels
from firstlight.bench.reference_programs import StepClock
from firstlight.hardware.device import synchronize

PHASES = ("forward", "backward", "update")

#: Pattern of `_plain_name` for each class of operators; the first class that matches counts.
CLASSES = {
    "communication": r"c10d|nccl|gloo|all_?reduce|all_?gather|reduce_scatter|broadcast_tensors",
    "optimizer": r"optimizer|foreach|fused_(adam|sgd)|vector_norm|clip_grad",
    "attention": r"attention",
    "compiled": r"compil|cudagraph|^triton|cpp_fused|inductor",
    "loss": r"cross_?entropy|log_softmax|nll_loss|logsumexp",
    "normalisation": r"(layer|rms|batch|group)_?norm",
    "embedding": r"embedding",
    "matrix products": r"^(add|b|badd|scaled_|grouped_)?mm$|^(linear|matmul|mv|dot|einsum|outer)$"
    r"|^mkldnn_linear|_linear_pointwise$|^mkl_linear$",
    "views": r"^(view|view_as|unsafe_view|reshape|reshape_alias|transpose|t|permute|expand"
    r"|expand_as|slice|select|split|split_with_sizes|chunk|squeeze|unsqueeze|as_strided|detach"
    r"|alias|narrow|unbind|movedim|flatten|unflatten|resolve_conj|resolve_neg|lift_fresh|resize"
    r"|set|empty|empty_like|empty_strided|new_empty|new_empty_strided|item|local_scalar_dense"
    r"|is_nonzero|result_type|promote_types|to|contiguous|zeros|zeros_like|ones|ones_like|new_zeros|full"
    r"|full_like|scalar_tensor|numpy_t|mt|swapaxes|diff_view|graph_root)$",
    "element-wise": r"^(add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|exp|log|abs|tanh|sigmoid|gelu|silu"
    r"|relu|softmax|native_dropout|dropout|bernoulli|copy|copy_backwards|clone|to_copy|cat|stack"
    r"|fill|zero|where|masked_fill|masked_select|sum|mean|max|min|amax|amin|var|std|eq|ne|lt|le|gt"
    r"|ge|logical_and|logical_or|logical_not|bitwise_and|bitwise_or|bitwise_not|isfinite|isnan"
    r"|isinf|all|any|sin|cos|arange|gather|scatter|scatter_add|index|index_select|index_put"
    r"|index_add|index_copy|cumsum|tril|triu|clamp|clamp_min|clamp_max|square|reciprocal|sort"
    r"|topk|argmax|nonzero|roll|flip|repeat|erf|lerp|addcmul|addcdiv|maximum|minimum|sign|floor"
    r"|accumulate_grad|norm|constant_pad_nd|pad|resolve)$",
}
OTHER = "other"

#: Classes whose operators include the operators that they call. Matrix products that a loss calls
#: (a chunked loss computes the head's) stay in their own class.
_SCOPES = ("communication", "optimizer", "attention", "normalisation", "embedding", "loss")


def operator_class(name: str) -> str:
    """The class of an operator, autograd node or annotation of torch.profiler, by its name."""
    plain = _plain_name(name)
    found = (kind for kind, pattern in CLASSES.items() if re.search(pattern, plain))
    return next(found, OTHER)


def _plain_name(name: str) -> str:
    """The name without namespace and backward suffix, in snake case: 'softmax' for 'aten::softmax',
    'aten::_softmax_backward_data' and 'autograd::engine::evaluate_function: SoftmaxBackward0'."""
    plain = name.split(": ")[-1].split("::")[-1]
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()
    return re.sub(r"_?backward(_data|s)?\d*$", "", plain).strip("_")


def count_operators(events: Iterable[Any], *, on_gpu: bool) -> dict[str, dict[str, float]]:
    """Seconds and number of calls of each class that occurs.

    Args:
        events: `torch.profiler.profile.events()`.
        on_gpu: True counts the time of GPU kernels, False processor time.

    Returns:
        "seconds" and "calls" by class.
    """
    found: dict[str, dict[str, float]] = {}
    for event in events:
        # Kernels are counted with the operator that started them.
        if event.device_type != DeviceType.CPU or event.is_async:
            continue
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        entry = found.setdefault(_class_in_scope(event), {"seconds": 0.0, "calls": 0})
        entry["seconds"] += micros / 1e6
        entry["calls"] += 1
    return found


def _class_in_scope(event: Any) -> str:
    """The class of the outermost calling operator whose class is in `_SCOPES`; without such an
    operator, the event's own class."""
    own = operator_class(event.name)
    scope, parent = None, event.cpu_parent
    while parent is not None:
        kind = operator_class(parent.name)
        if kind in _SCOPES and not (kind == "loss" and own == "matrix products"):
            scope = kind
        parent = parent.cpu_parent
    return scope or own


class PartsClock(StepClock):
    """A clock that also breaks down the steps after the timed ones.

    Args:
        device: device of the steps.
        level: memory level of `begin_peak`.
        timed: number of steps at the start that are only timed.
        phase_steps: number of steps after the timed ones that are divided into phases; all later
            steps are profiled.

    Attributes:
        peaks: `memory.peaks` at the end of the timed steps; None before their end.
        phases: seconds by phase of each divided step.
        operators: `count_operators` of each profiled step.
    """

    def __init__(self, device: torch.device, level: int, timed: int, phase_steps: int) -> None:
        super().__init__(device)
        self.peaks: tuple[int, int] | None = None
        self.phases: list[dict[str, float]] = []
        self.operators: list[dict[str, dict[str, float]]] = []
        self._level, self._timed, self._phase_steps = level, timed, phase_steps
        self._stack = contextlib.ExitStack()
        self._passes: list[tuple[float, float]] = []
        self._profiler: Any = None

    def start(self) -> None:
        """Begin a step."""
        number = len(self.seconds) - self._timed
        if 0 <= number < self._phase_steps:
            self._passes.clear()
            self._stack.enter_context(_noted_passes(self._passes, self._device))
        elif number >= self._phase_steps:
            self._profiler = self._stack.enter_context(torch.profiler.profile(acc_events=True))
        super().start()

    def stop(self) -> None:
        """End a step."""
        super().stop()
        self._stack.close()
        if len(self.seconds) == self._timed:
            self.peaks = peaks(self._device, self._level)
        if self._profiler is not None:
            on_gpu = self._device.type == "cuda"
            self.operators.append(count_operators(self._profiler.events(), on_gpu=on_gpu))
            self._profiler = None
        elif len(self.seconds) > self._timed:
            self.phases.append(self._divided())

    def _divided(self) -> dict[str, float]:
        """Seconds by phase of the last step."""
        seconds = dict.fromkeys(PHASES, 0.0)
        before, end = self._start[0], self._start[0] + self.seconds[-1]
        for begin, done in self._passes:
            seconds["forward"] += begin - before
            seconds["backward"] += done - begin
            before = done
        seconds["update"] = end - before
        return seconds


@contextlib.contextmanager
def _noted_passes(passes: list[tuple[float, float]], device: torch.device) -> Iterator[None]:
    """Record (start, end) of each backward pass inside the block in `passes`, in seconds.

    `torch.autograd.backward` is replaced for this, since `Tensor.backward` calls it in every
    program.
    """
    real, depth = torch.autograd.backward, 0

    def noted(*args: Any, **options: Any) -> None:
        nonlocal depth
        # Activation checkpointing may call `backward` inside a backward pass.
        if depth:
            real(*args, **options)
            return
        synchronize(device)
        begin, depth = time.perf_counter(), 1
        try:
            real(*args, **options)
        finally:
            depth = 0
        synchronize(device)
        passes.append((begin, time.perf_counter()))

    torch.autograd.backward = noted
    try:
        yield
    finally:
        torch.autograd.backward = real


def phase_shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Fraction of a step's time by phase, over the divided steps of all turns; None if there are no
    such steps."""
    steps = [step for run in runs for step in run.get("phases", ())]
    total = sum(sum(step.values()) for step in steps)
    return (
        {phase: sum(step[phase] for step in steps) / total for phase in PHASES} if steps else None
    )


def operator_shares(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The classes of operators over the profiled steps of all turns, the slowest class first.

    Returns:
        For each class that occurs "class", its name; "share", its fraction of the time of all
        operators; "seconds" and "calls" per step.
    """
    steps = [step for run in runs for step in run.get("operators", ())]
    total = sum(entry["seconds"] for step in steps for entry in step.values())
    rows = []
    for kind in (*CLASSES, OTHER):
        found = [step[kind] for step in steps if kind in step]
        if found:
            seconds, calls = (sum(one[key] for one in found) for key in ("seconds", "calls"))
            row = {"class": kind, "share": seconds / total if total else 0.0}
            rows.append(row | {"seconds": seconds / len(steps), "calls": calls / len(steps)})
    return sorted(rows, key=lambda row: -row["share"])


def draw_operators(title: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG of the seconds per step of each class, a panel for each row of `benchmarks training`."""
    panels = [
        Panel(
            "seconds a step",
            [one["class"] for one in row["operators"]],
            [one["seconds"] for one in row["operators"]],
            [f"{one['share']:.0%}" for one in row["operators"]],
            title=row["name"],
        )
        for row in rows
        if row.get("operators")
    ]
    return draw_panels(title, [[panel] for panel in panels])
