"""Estimate the speed of a training step. The speed on a GPU is predicted from the operators in a
trace. Alternatively, steps are timed on this machine.

Predictions use two hardware models. The model of the GPU is based on its data sheet or on fitted
constants (`gpu.py`). The second model describes communication between GPUs and between GPU and CPU
(`Exchange`).

The trace of a step does not contain the kernels that torch.compile generates. These kernels fuse
all operators between matrix products and attention. Only the operands and results of matrix
products and attention are then read from and written to memory; `fused_bytes` returns their size.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from firstlight.hardware.device import Hardware, peak_flops, synchronize
from firstlight.hardware.gpus import GPU
from firstlight.methods.compilation import records_cuda_graphs
from firstlight.methods.precision import dtype_of, fp8_layers
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.optim.spec import LIST_VALUES, in_lists
from firstlight.parallel.engine import DistributedConfig
from firstlight.planner.memory.kernels import OperatorCount, total_bytes
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.memory.ranks import copies_of, engine_of
from firstlight.planner.memory.recipe import are_alike, with_layers
from firstlight.planner.plan.machine import Machine
from firstlight.planner.speed.gpu import (
    DEFAULT_SHARES,
    KINDS,
    ZERO,
    Range,
    Shares,
    is_free,
    kernel_seconds,
    kind_of,
    larger,
    multiprocessors,
    runs_in_fp8,
    shares_for,
    streamed_bytes,
)
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.resolve import USUAL_MFU
from firstlight.training.micro_batch_trials import trial_program

#: Bandwidth of PCIe 4.0 with 16 lanes, in bytes per second in one direction.
PCIE_BANDWIDTH = 32e9


@dataclass(frozen=True)
class Exchange:
    """Communication in one optimizer step.

    Attributes:
        gathers_weights: True for FSDP, which all-gathers weights in each pass and reduce-scatters
            gradients once per step. False for DDP, which all-reduces gradients once per step.
        processes: number of processes that share the batch.
        weight_bytes: size in bytes of the weights that these processes share, in the dtype in which
            they are sent.
        gradient_bytes: size in bytes of the gradients of these weights, in the dtype in which they
            are sent.
        micro_batches: number of micro-batches per step.
        tensor_parallel: number of processes over which each layer is sharded. The total number of
            processes is `processes` x `tensor_parallel` x `stages`.
        hidden_bytes: size in bytes of the hidden states of a micro-batch.
        layers: number of layers of a pipeline stage. With tensor parallelism, each layer sums the
            hidden states four times per micro-batch (Shoeybi et al. 2019, arXiv 1909.08053).
        stages: number of pipeline stages.
        offloaded_bytes: bytes moved between CPU and GPU memory per step, in both directions.
        link: bandwidth between GPUs in one direction, in bytes per second. If it is 0, the
            bandwidth in the GPU table is used.
        host_link: bandwidth between CPU and GPU in one direction, in bytes per second.
    """

    gathers_weights: bool = False
    processes: int = 1
    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    micro_batches: int = 1
    tensor_parallel: int = 1
    hidden_bytes: float = 0.0
    layers: int = 0
    stages: int = 1
    offloaded_bytes: float = 0.0
    link: float = 0.0
    host_link: float = PCIE_BANDWIDTH


def overlapping_bytes(exchange: Exchange) -> float:
    """Return the number of bytes of weights and gradients that each process sends per step. This
    communication overlaps with computation.

    In a ring of n processes, an all-gather or reduce-scatter sends (n - 1) / n of the data, and an
    all-reduce sends twice as much (Patarasuk and Yuan 2009).
    """
    share = (exchange.processes - 1) / exchange.processes
    if exchange.gathers_weights:
        # Gradients are accumulated without being sharded until the last micro-batch; see
        # `FSDPEngine.backward_pass`.
        gathered = 2 * exchange.weight_bytes * exchange.micro_batches
        return share * (gathered + exchange.gradient_bytes)
    return 2 * share * exchange.gradient_bytes


def waiting_bytes(exchange: Exchange) -> float:
    """Return the number of bytes of activations and activation gradients that each process sends
    per step. This communication does not overlap with computation."""
    count = exchange.tensor_parallel
    # Hidden states are summed over the processes after attention and after the MLP, in both the
    # forward and the backward pass.
    sums = 4 * exchange.layers * exchange.micro_batches
    passed = 2 * exchange.micro_batches * exchange.hidden_bytes if exchange.stages > 1 else 0.0
    return 2 * (count - 1) / count * exchange.hidden_bytes * sums + passed


def bubble(exchange: Exchange) -> float:
    """Return the time for which the stages of a pipeline are idle at the start and end of a step,
    as a fraction of the computation time. It is (stages - 1) / micro-batches (Narayanan et al.
    2021, arXiv 2104.04473)."""
    return (exchange.stages - 1) / exchange.micro_batches


def exchange_seconds(
    exchange: Exchange, link: float, beside: Range, shares: Shares = DEFAULT_SHARES
) -> Range:
    """Return the seconds that communication adds to a step.

    Args:
        exchange: communication of the step.
        link: bandwidth between GPUs in one direction, in bytes per second. It is ignored if
            `exchange.link` is set.
        beside: duration in seconds of the computation with which communication can overlap.
        shares: fractions of the bandwidth and of the possible overlap that are reached in practice.
    """
    rate = exchange.link or link
    overlapping, waiting = overlapping_bytes(exchange), waiting_bytes(exchange)

    def seconds(share: float, overlap: float, computing: float) -> float:
        sent, waited = ((size / (rate * share) if rate else 0.0) for size in (overlapping, waiting))
        moved = exchange.offloaded_bytes / (exchange.host_link * share)
        return max(0.0, sent + moved - overlap * computing) + waited

    return Range(*map(seconds, shares.link, shares.overlap, beside))


Bound = Literal["compute", "memory bandwidth", "launching", "communication"]

#: Phases of the forward and backward pass. They are compiled by torch.compile, and the stages of a
#: pipeline wait for each other in them.
_COMPILED_PHASES = ("forward", "loss", "backward of loss", "backward")
#: Embedding lookups and their backward operators, which are separate kernels even in compiled code.
_NOT_FUSED = ("embedding", "embedding_dense_backward")


@dataclass(frozen=True)
class Workload:
    """Properties of a training step that affect its speed, other than its operators.

    Attributes:
        global_batch_tokens: tokens per step, summed over all processes.
        flops_per_token: training FLOPs per token, as computed by
            `models.accounting.train_flops_per_token`.
        precision: resolved value of the recipe's `efficiency.precision`.
        compiled: True if torch.compile compiles the forward and the backward pass.
        cuda_graphs: True if a step is launched as one CUDA graph.
        dispatches: True if each operator of the layers is intercepted in Python (selective
            checkpointing).
        updates: number of torch optimizer steps per training step.
        fp8_products: sizes of the matrix products that are computed in fp8. Each entry is a sorted
            tuple of the number of tokens in a micro-batch and the two dimensions of a weight. The
            matrix products for the gradients have the same sizes.
        exchange: communication between processes and with the CPU.
    """

    global_batch_tokens: int
    flops_per_token: float
    precision: str = "bf16"
    compiled: bool = False
    cuda_graphs: bool = False
    dispatches: bool = False
    updates: int = 1
    fp8_products: frozenset[tuple[int, ...]] = frozenset()
    exchange: Exchange = field(default_factory=Exchange)


@dataclass(frozen=True)
class SpeedPrediction:
    """Predicted speed of training.

    Attributes:
        step_seconds: duration of an optimizer step in seconds; `slow` is the largest value.
        tokens_per_second, mfu: total speed of all processes, and model FLOPs utilization; `slow` is
            the smallest value. MFU is relative to the peak rate in the GPU's data sheet, or to the
            rate of matrix products that was measured on this machine.
        phases: expected seconds by phase of the step.
        kinds: expected seconds for each name in `KINDS`; {} for steps that were timed.
        bound: name of the resource that limits the speed for most of the time; None for steps that
            were timed.
        source: where the rates come from, as shown to the user.
        notes: assumptions of the prediction, as shown to the user.
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
        """Return the prediction as JSON values, with ranges as "low", "expected" and "high"."""
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
    """Total seconds in each phase, for each kind of operator and for each limiting resource."""

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
    """Predict the speed of a step from its operators.

    Args:
        prediction: prediction for one process, with the operators of an optimizer step.
        work: the step's tokens, precision and communication.
        gpu: a GPU of the table.
        shares: fractions of the GPU's rates that kernels reach; None to use the shares for its type
            of GPU.
    """
    shares = shares or shares_for(gpu)
    sums, peak, notes = _on_gpu(prediction.operators, work, gpu, shares)
    exchange = work.exchange
    if waits := bubble(exchange):
        # Stages wait for each other only during the forward and backward pass. Each stage updates
        # its own parameters independently.
        for phase in filter(sums.phases.__contains__, _COMPILED_PHASES):
            sums.add(phase, "communication", sums.phases[phase] * waits)
    sent = exchange_seconds(exchange, gpu.link, sums.phases.get("backward", ZERO), shares)
    if sent.slow:
        sums.add("communication", "communication", sent)
    step = sums.total
    devices = exchange.processes * exchange.tensor_parallel * exchange.stages
    # The slowest step has the lowest rate, so `slow` is the first value here as well.
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
    """Return True if torch.compile fuses the operator into one of its own kernels."""
    one = entry.operator
    return (
        work.compiled
        and one.phase in _COMPILED_PHASES
        and kind_of(one) == "elementwise"
        and one.base_name not in _NOT_FUSED
    )


def fused_bytes(counts: Iterable[OperatorCount]) -> dict[str, float]:
    """Return the total size in bytes of the operands and results of matrix products and attention,
    keyed by phase. The fused kernels of torch.compile read and write about `Shares.fused_traffic`
    times as many bytes."""
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
        fp8 = runs_in_fp8(one, work.fp8_products)
        seconds = kernel_seconds(one, gpu, work.precision, shares, fp8=fp8) * entry.count
        kind = kind_of(one)
        sums.add(one.phase, kind, seconds)
        launches[one.phase] = launches.get(one.phase, 0.0) + entry.count
        memory = entry.count * streamed_bytes(one) / (shares.bandwidth.expected * gpu.bandwidth)
        # According to the roofline model, a product is memory-bound if its memory traffic takes
        # longer than its FLOPs.
        if kind in ("matrix_products", "attention") and memory < seconds.expected:
            sums.compute += seconds.expected
        else:
            sums.memory += seconds.expected
    for phase, size in fused_bytes(counts).items() if work.compiled else ():
        pairs = zip(shares.fused_traffic, shares.bandwidth, strict=True)
        # The `slow` value combines the largest traffic with the lowest bandwidth.
        traffic = Range(*(size * moved / (gpu.bandwidth * rate) for moved, rate in pairs))
        sums.add(phase, "elementwise", traffic)
        sums.memory += traffic.expected
    if work.dispatches and not work.compiled:
        # Operators are intercepted in the forward pass and a second time when they are recomputed
        # in the backward pass.
        seen = sum(entry.count for entry in counts if entry.operator.phase == "forward")
        for phase in ("forward", "backward"):
            launches[phase] = launches.get(phase, 0.0) + shares.dispatch_launches * seen
    if "optimizer" in launches:
        launches["optimizer"] += shares.update_launches * work.updates
    _add_launching(sums, launches, work, shares)
    # Two int64 values are copied per token: its id and its label.
    copied = 16.0 * work.global_batch_tokens / work.exchange.processes / work.exchange.host_link
    sums.add("data", "data", Range.exact(copied))
    is_measured = shares.source != DEFAULT_SHARES.source
    unmeasured = "derived from its data sheet and measurements of an H100, not measured"
    notes = [
        f"speed on a {gpu.name} is {shares.source if is_measured else unmeasured}: "
        f"{multiprocessors(gpu)} multiprocessors, {shares.products.slow:.0%} to "
        f"{shares.products.fast:.0%} of the peak in large matrix products, "
        f"{shares.bandwidth.slow:.0%} to {shares.bandwidth.fast:.0%} of the bandwidth"
    ]
    if work.precision == "fp8":
        notes.append("fp8 is counted at twice the bf16 rate, including the casts of its inputs")
    return sums, gpu.peak_flops(work.precision), notes


def _add_launching(sums: _Sums, launches: dict[str, float], work: Workload, shares: Shares) -> None:
    """For each phase, add the time during which the GPU waits for the host to launch the next
    kernel."""
    if work.cuda_graphs:
        return
    for phase, count in launches.items():
        compiled = work.compiled and phase in _COMPILED_PHASES
        # Assume that each matrix product and each attention kernel is followed by one fused kernel.
        number = 2 * count if compiled else count
        each = shares.compiled_launch_seconds if compiled else shares.launch_seconds
        busy = sums.phases.get(phase, ZERO)
        waited = larger(busy, each * number)
        # Launching only takes additional time if it takes longer than the kernels themselves,
        # because the next kernels are launched while the current kernels run.
        extra = Range(*(a - b for a, b in zip(waited, busy, strict=True)))
        sums.add(phase, "launching", extra)


def workload_of(recipe: ResolvedRecipe, exchange: Exchange | None = None) -> Workload:
    """Return the properties of a recipe's step that affect its speed, other than its operators.

    Args:
        recipe: the resolved recipe.
        exchange: communication of the step; None for a single process.
    """
    model = recipe.model
    batch = recipe.batch
    seq_len = recipe.data.seq_len
    exchange = exchange or Exchange()
    is_fp8 = recipe.efficiency.precision == "fp8"
    in_fp8 = fp8_layers(meta_model(model)).values() if is_fp8 else ()
    return Workload(
        global_batch_tokens=batch.rows
        * seq_len
        * batch.accumulation(seq_len, exchange.processes)
        * exchange.processes,
        flops_per_token=train_flops_per_token(
            meta_model(model), seq_len, frozen=recipe.lora is not None
        ),
        precision=recipe.efficiency.products,
        # The "cudagraphs" backend records torch's kernels without fusing them.
        compiled=recipe.efficiency.compile and recipe.efficiency.compile_backend != "cudagraphs",
        cuda_graphs=records_cuda_graphs(recipe.efficiency),
        dispatches=recipe.efficiency.activation_checkpointing == "selective",
        updates=updates_of(recipe),
        fp8_products=frozenset(
            tuple(sorted((batch.rows * seq_len, *layer.weight.shape))) for layer in in_fp8
        ),
        exchange=exchange,
    )


def updates_of(recipe: ResolvedRecipe) -> int:
    """Return the number of torch optimizer steps per training step. If parameters are updated
    during the backward pass, there is one optimizer step for each list of parameters."""
    if not recipe.efficiency.optimizer_in_backward:
        return 1
    # The count is approximate with LoRA: adapters are not counted, and frozen weights are included.
    return sum(1 for _ in in_lists(meta_model(recipe.model).parameters(), LIST_VALUES))


#: Maximum number of micro-batches that `trace_memory` traces per step.
_TRACED_MICRO_BATCHES = 2
#: Phases that occur in each micro-batch.
_EACH_MICRO_BATCH = ("forward", "loss", "backward of loss", "backward")


def all_micro_batches(prediction: MemoryPrediction, count: int) -> MemoryPrediction:
    """Return the prediction with the operators of all micro-batches in a step, including
    micro-batches that were not traced.

    Args:
        prediction: prediction for a step of `count` micro-batches, of which at most two were
            traced.
        count: number of micro-batches in the step.
    """
    if count <= _TRACED_MICRO_BATCHES:
        return prediction
    operators = tuple(
        OperatorCount(entry.operator, round(entry.count * count / _TRACED_MICRO_BATCHES))
        if entry.operator.phase in _EACH_MICRO_BATCH
        else entry
        for entry in prediction.operators
    )
    return replace(prediction, operators=operators)


def exchange_of(
    recipe: ResolvedRecipe, parameters: int, processes: int, host_bytes: int = 0
) -> Exchange:
    """Return the communication of a recipe's step between processes, and between CPU and GPU.

    Args:
        recipe: the resolved recipe.
        parameters: number of the model's parameters.
        processes: number of processes.
        host_bytes: size in bytes of the activations of a micro-batch that are offloaded to CPU
            memory.
    """
    cut, copies = recipe.distributed, copies_of(recipe, processes)
    engine = engine_of(recipe, processes)
    micro_batches = recipe.batch.accumulation(recipe.data.seq_len, copies)
    half = recipe.efficiency.precision in ("bf16", "bf16_params")
    offloads = cut.offload != "none"
    own = parameters / (cut.tensor_parallel * cut.pipeline)
    state = 12.0 * own / copies
    tokens = recipe.batch.micro_batch_size * recipe.data.seq_len
    return Exchange(
        gathers_weights=engine.keeps_shards,
        processes=copies,
        weight_bytes=own * (2.0 if half else 4.0),
        gradient_bytes=4.0 * own,
        micro_batches=micro_batches,
        tensor_parallel=cut.tensor_parallel,
        hidden_bytes=tokens * recipe.model.hidden_size * (2.0 if half else 4.0),
        layers=recipe.model.num_hidden_layers // cut.pipeline,
        stages=cut.pipeline,
        # Offloading transfers 8 bytes per parameter in each step, because fp32 gradients are copied
        # to the CPU and updated fp32 weights are copied back. Offloaded activations are also copied
        # to the CPU and back.
        offloaded_bytes=(2 / 3 * state if offloads else 0.0) + 2.0 * host_bytes * micro_batches,
    )


def estimate_speed(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, machine: Machine
) -> SpeedPrediction | None:
    """Predict a recipe's training speed on GPUs in the table. Return None for other machines.

    Args:
        prediction: memory prediction for the training step of one process without torch.compile,
            including its operators.
        recipe: the resolved recipe.
        machine: the machine to run on.
    """
    if machine.gpu is None:
        return None
    copies = copies_of(recipe, machine.count)
    accumulation = recipe.batch.accumulation(recipe.data.seq_len, copies)
    counted = all_micro_batches(prediction, accumulation)
    parameters = count_parameters(meta_model(recipe.model)).total
    exchange = exchange_of(recipe, parameters, machine.count, prediction.host_bytes)
    return predict_speed(counted, workload_of(recipe, exchange), machine.gpu)


# Measuring the speed of training on this machine by timing steps of the real model
#
# The model, optimizer and methods of a recipe train for a few steps on random tokens. If that would
# take too long, a micro-batch of fewer sequences is timed. If even that would take too long, models
# with fewer layers are timed. The time of a full step is computed from these times, based on two
# assumptions. The time of the passes is proportional to the number of sequences, and each
# additional layer adds the same time to the passes and to the update.
#
# torch.compile is not timed, because compiling takes longer than an entire plan.

#: Number of timed steps. They follow a first step, which allocates memory and loads kernels. The
#: fastest timed step is used, because other programs can only make a step slower.
_STEPS = 2

#: Maximum time in seconds for timing the steps of a recipe. Even if it is exceeded, one step of a
#: two-layer model with one sequence is timed.
SECONDS = 3.0

#: Number of tokens in a micro-batch that is large enough to keep a device busy, by kind of device.
#: With fewer tokens, the time per token is longer.
BUSY_TOKENS = {"cpu": 1024, "cuda": 16384}

#: Assumed total time in seconds to create one parameter and to update it in all timed steps, by
#: kind of device.
_PARAMETER_SECONDS = {"cpu": 2e-8, "cuda": 1e-9}

#: Maximum relative error of the step time (docs/benchmarks/planner.md). _ERROR applies if a full
#: step was timed, and _SCALED_ERROR if the time was computed from smaller steps.
_ERROR = 0.15
_SCALED_ERROR = 0.2

#: Cached version of `hardware.device.peak_flops`, because measuring the rate takes some time.
_peak_flops = functools.cache(peak_flops)


@dataclass(frozen=True)
class StepTime:
    """The time of a training step, without torch.compile.

    Attributes:
        passes: duration in seconds of the forward and backward pass of a micro-batch.
        update: duration in seconds of gradient clipping and the optimizer update.
        peak_flops: FLOP/s of large matrix products in the recipe's precision; see
            `hardware.device.peak_flops`.
        timed: the part of the step that was timed, as shown to the user; "" if the full step was
            timed.
    """

    passes: float
    update: float
    peak_flops: float
    timed: str = ""

    def seconds(self, micro_batches: int) -> float:
        """Return the duration in seconds of a step with this number of micro-batches."""
        return micro_batches * self.passes + self.update


def time_step(recipe: ResolvedRecipe, hardware: Hardware, seconds: float = SECONDS) -> StepTime:
    """Time the training step of a recipe on this machine, in this process.

    Args:
        recipe: the resolved recipe of a run with one process.
        hardware: the device to run on.
        seconds: maximum time in seconds for timing.

    Raises:
        ConfigError: the recipe's methods can't be combined.
        RuntimeError, MemoryError: the step does not fit in memory.
    """
    recipe = uncompiled(recipe).model_copy(update={"distributed": DistributedConfig()})
    kind, rows = hardware.device.type, recipe.batch.rows
    depth, least = recipe.model.num_hidden_layers, min(2, recipe.model.num_hidden_layers - 1)
    peak = _peak_flops(hardware.device, dtype_of(recipe.efficiency.precision))

    def expected(rows: int, layers: int) -> float:
        model = meta_model(with_layers(recipe, layers).model)
        flops = train_flops_per_token(model, recipe.data.seq_len) * rows * recipe.data.seq_len
        made = _PARAMETER_SECONDS[kind] * count_parameters(model).total
        return (1 + _STEPS) * flops / (USUAL_MFU * peak) + made

    timed_rows = rows
    while timed_rows > 1 and expected(timed_rows, depth) > seconds:
        if timed_rows * recipe.data.seq_len <= BUSY_TOKENS[kind]:
            break
        timed_rows = -(-timed_rows // 2)
    share = rows / timed_rows
    of_rows = "" if timed_rows == rows else f"{timed_rows} of {rows} sequences"
    if least < 1 or not are_alike(recipe.model) or expected(timed_rows, depth) <= seconds:
        passes, update = _timed(recipe, hardware, timed_rows, seconds)
        return StepTime(share * passes, update, peak, of_rows)
    # Models of two depths are timed, and the difference between their times is the time of the
    # additional layers. `deep` is the number of layers of the deeper model.
    deep = next(
        (n for n in range(depth, least, -1) if expected(timed_rows, n) <= seconds / 2), least + 1
    )
    few = _timed(with_layers(recipe, least), hardware, timed_rows, seconds / 2)
    more = _timed(with_layers(recipe, deep), hardware, timed_rows, seconds / 2)
    further = (depth - deep) / (deep - least)
    passes, update = (b + further * max(b - a, 0.0) for a, b in zip(few, more, strict=True))
    of_layers = f"{least} and {deep} of {depth} layers"
    timed = f"{of_rows}, {of_layers}" if of_rows else of_layers
    return StepTime(share * passes, update, peak, timed)


def _timed(
    recipe: ResolvedRecipe, hardware: Hardware, rows: int, most_seconds: float
) -> tuple[float, float]:
    """Time a step that consists of one micro-batch of `rows` sequences. Return the duration of the
    forward and backward pass and the duration of the update, both in seconds.

    After `most_seconds`, no further step is started. This limit is necessary because the size of
    the step was chosen based on the speed of matrix products. On a CPU, steps in some precisions
    are much slower than this speed suggests.
    """
    batch: dict[str, Any] = {"micro_batch_size": rows, "gradient_accumulation_steps": 1}
    batch |= {"global_batch_tokens": None, "ramp_start_tokens": None, "ramp_steps": None}
    program, tokens = trial_program(recipe.with_keys("batch", **batch), hardware)
    optimizer = program.optimizer
    clip, passed = optimizer.clip_gradients, 0.0

    def clipped(*args: Any) -> Tensor:
        nonlocal passed
        synchronize(hardware.device)
        passed = time.perf_counter()
        return clip(*args)

    setattr(optimizer, "clip_gradients", clipped)  # noqa: B010  (a method of this object only)
    times: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(times) < 1 + _STEPS:
        if times and time.perf_counter() - begun > most_seconds:
            break
        synchronize(hardware.device)
        start = time.perf_counter()
        # An update with a learning rate of 0 takes as much time as any other update.
        program.step([tokens], lr_scale=0.0)
        synchronize(hardware.device)
        times.append((passed - start, time.perf_counter() - passed))
    return min(times[1:] or times, key=sum)


def timed_speed(recipe: ResolvedRecipe, step: StepTime, gain: float = 1.0) -> SpeedPrediction:
    """Return the speed of a recipe whose step was timed.

    Args:
        recipe: the resolved recipe of a run with one process.
        step: result of `time_step`.
        gain: expected speed with torch.compile, as a multiple of the speed without it.
    """
    micro_batches = recipe.batch.accumulation(recipe.data.seq_len)
    error = _SCALED_ERROR if step.timed else _ERROR
    seconds = Range.around(step.seconds(micro_batches) / gain, error)
    source = f"steps timed here{f' ({step.timed})' if step.timed else ''}"
    if recipe.efficiency.compile:
        source += f", without torch.compile; with it usually {gain:.2f} times as fast"
    phases = {"passes": micro_batches * step.passes / gain, "optimizer": step.update / gain}
    return _measured_speed(recipe, seconds, step.peak_flops, source, phases)


def usual_speed(recipe: ResolvedRecipe, rate: float, hardware: Hardware) -> SpeedPrediction:
    """Return the speed of a recipe whose steps can't be timed. It is derived from the speed of a
    new model of the same size.

    Args:
        recipe: the resolved recipe.
        rate: tokens per second of a new model of the same size on this machine.
        hardware: the device to run on.
    """
    seconds = Range.around(_step_tokens(recipe) / rate, _SCALED_ERROR)
    peak = _peak_flops(hardware.device, dtype_of(recipe.efficiency.precision))
    source = "new models of this size timed here, without DeepSpeed or offloading"
    return _measured_speed(recipe, seconds, peak, source, {})


def _step_tokens(recipe: ResolvedRecipe) -> int:
    seq_len = recipe.data.seq_len
    return recipe.batch.accumulation(seq_len) * recipe.batch.rows * seq_len


def _measured_speed(
    recipe: ResolvedRecipe, seconds: Range, peak: float, source: str, phases: dict[str, float]
) -> SpeedPrediction:
    """Return the speed of a single-process run.

    Args:
        recipe: the resolved recipe.
        seconds: seconds of an optimizer step.
        peak: peak FLOP/s from which `mfu` is computed.
        source, phases: attributes of the result; see `SpeedPrediction`.
    """
    frozen = recipe.lora is not None
    flops = train_flops_per_token(meta_model(recipe.model), recipe.data.seq_len, frozen=frozen)
    rates = Range(*(_step_tokens(recipe) / one for one in seconds))
    mfu = Range(*(rate * flops / peak for rate in rates))
    return SpeedPrediction(seconds, rates, mfu, phases, source=source)
