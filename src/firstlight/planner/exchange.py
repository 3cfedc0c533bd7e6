"""What the processes of a run send each other in a step, and what of it is waited for.

Rings (Patarasuk and Yuan 2009): summing B bytes over n processes sends 2 (n - 1) / n B through each
link, gathering or scattering half of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firstlight.planner.roofline import DEFAULT_SHARES, ZERO, Range, Shares

#: PCIe 4.0 with 16 lanes, bytes a second in one direction.
PCIE_BANDWIDTH = 32e9


@dataclass(frozen=True)
class Exchange:
    """A run of several processes.

    Attributes:
        engine: "ddp" sums gradients; "fsdp" gathers weights in both passes, and scatters sums of
            gradients; "none" sends neither.
        processes: that share the batch.
        weight_bytes: all weights, as they are sent.
        gradient_bytes: all gradients, as they are sent.
        micro_batches: of a step: fsdp gathers in each, ddp sums once.
        tensor_parallel: processes that share each layer; their number is beside `processes`.
        hidden_bytes: of the hidden states of a micro-batch.
        layers: of the model; with tensor parallel each sums the hidden states four times a step,
            in each pass after attention and after the MLP (Shoeybi et al. 2019).
        stages: of a pipeline; their number is beside `processes` too.
        offloaded_bytes: moved between the CPU's memory and the GPU's in a step.
        link: bytes a second in one direction between GPUs; 0 is the GPU's own.
        host_link: the same between CPU and GPU.
    """

    engine: Literal["none", "ddp", "fsdp"] = "none"
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
    """Through each link in a step, of what can be sent while something else is computed."""
    share = (exchange.processes - 1) / exchange.processes
    if exchange.engine == "ddp":
        return 2 * share * exchange.gradient_bytes
    if exchange.engine == "fsdp":
        gathered = 2 * exchange.weight_bytes + exchange.gradient_bytes
        return share * gathered * exchange.micro_batches
    return 0.0


def waiting_bytes(exchange: Exchange) -> float:
    """Through each link in a step, of what the next operator needs: tensor parallel's sums, and
    what a pipeline's stages pass on and back."""
    count = exchange.tensor_parallel
    sums = 4 * exchange.layers * exchange.micro_batches
    passed = 2 * exchange.micro_batches * exchange.hidden_bytes if exchange.stages > 1 else 0.0
    return 2 * (count - 1) / count * exchange.hidden_bytes * sums + passed


def bubble(exchange: Exchange) -> float:
    """How much longer a step takes because a pipeline's stages wait for the first micro-batch, and
    after the last: (stages - 1) / micro-batches (Narayanan et al. 2019)."""
    return (exchange.stages - 1) / exchange.micro_batches


def exchange_seconds(
    exchange: Exchange, link: float, beside: Range, shares: Shares = DEFAULT_SHARES
) -> Range:
    """That a step waits for the links.

    Args:
        exchange: what is sent.
        link: bytes a second in one direction.
        beside: seconds of computing that the sending can run beside.
        shares: of the links' rates, and of the computing that the sending really runs beside.
    """
    rate = exchange.link or link
    total = ZERO
    for name in ("slow", "expected", "fast"):
        share, overlap = getattr(shares.link, name), getattr(shares.overlap, name)
        sent = overlapping_bytes(exchange) / (rate * share) if rate else 0.0
        moved = exchange.offloaded_bytes / (exchange.host_link * share)
        hidden = overlap * getattr(beside, name)
        waited = waiting_bytes(exchange) / (rate * share) if rate else 0.0
        part = max(0.0, sent + moved - hidden) + waited
        total += Range(
            **{one: part if one == name else 0.0 for one in ("slow", "expected", "fast")}
        )
    return total
