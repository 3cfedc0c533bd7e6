"""The time that communication adds to a training step: between GPUs, and with the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.planner.speed.gpu import DEFAULT_SHARES, Range, Shares

#: PCIe 4.0 with 16 lanes, bytes a second in one direction.
PCIE_BANDWIDTH = 32e9


@dataclass(frozen=True)
class Exchange:
    """Communication of one optimizer step.

    Attributes:
        gathers_weights: True if weights are all-gathered in each pass, and gradients
            reduce-scattered once a step (FSDP); False if gradients are all-reduced once (DDP).
        processes: number of processes that share the batch.
        weight_bytes: bytes of these processes' weights, in the dtype that is sent.
        gradient_bytes: bytes of their gradients, in the dtype that is sent.
        micro_batches: number of micro-batches of a step.
        tensor_parallel: number of processes that share each layer; multiplies `processes`.
        hidden_bytes: bytes of a micro-batch's hidden states.
        layers: number of layers of a pipeline stage. With tensor parallelism, each sums the hidden
            states four times a micro-batch (Shoeybi et al. 2019, arXiv 1909.08053).
        stages: number of pipeline stages; multiplies `processes`.
        offloaded_bytes: bytes moved between CPU and GPU memory in a step, both directions.
        link: bytes a second between GPUs, in one direction; 0 takes the GPU table's bandwidth.
        host_link: bytes a second between CPU and GPU, in one direction.
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
    """Bytes of weights and gradients that each process sends in a step, overlapped with computing.
    In a ring of n processes, an all-gather or reduce-scatter sends (n - 1) / n of the data, an
    all-reduce twice as much (Patarasuk and Yuan 2009)."""
    share = (exchange.processes - 1) / exchange.processes
    if exchange.gathers_weights:
        # Gradients add up unsharded until the last micro-batch; see `FSDPEngine.backward_pass`.
        gathered = 2 * exchange.weight_bytes * exchange.micro_batches
        return share * (gathered + exchange.gradient_bytes)
    return 2 * share * exchange.gradient_bytes


def waiting_bytes(exchange: Exchange) -> float:
    """Bytes of activations and their gradients that each process sends in a step, not overlapped
    with computing."""
    count = exchange.tensor_parallel
    # After attention and after the MLP, in the forward and in the backward pass.
    sums = 4 * exchange.layers * exchange.micro_batches
    passed = 2 * exchange.micro_batches * exchange.hidden_bytes if exchange.stages > 1 else 0.0
    return 2 * (count - 1) / count * exchange.hidden_bytes * sums + passed


def bubble(exchange: Exchange) -> float:
    """Idle time of a pipeline's stages at the start and end of a step, as a fraction of the
    computing: (stages - 1) / micro-batches (Narayanan et al. 2021, arXiv 2104.04473)."""
    return (exchange.stages - 1) / exchange.micro_batches


def exchange_seconds(
    exchange: Exchange, link: float, beside: Range, shares: Shares = DEFAULT_SHARES
) -> Range:
    """Seconds that communication adds to a step.

    Args:
        exchange: communication of the step.
        link: bytes a second between GPUs, in one direction, unless `exchange` has a rate.
        beside: seconds of computing that communication can overlap with.
        shares: fractions of the links' rates and of the overlap that are reached.
    """
    rate = exchange.link or link
    overlapping, waiting = overlapping_bytes(exchange), waiting_bytes(exchange)

    def seconds(share: float, overlap: float, computing: float) -> float:
        sent, waited = ((size / (rate * share) if rate else 0.0) for size in (overlapping, waiting))
        moved = exchange.offloaded_bytes / (exchange.host_link * share)
        return max(0.0, sent + moved - overlap * computing) + waited

    return Range(*map(seconds, shares.link, shares.overlap, beside))
