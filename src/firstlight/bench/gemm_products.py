"""The matrix products that `firstlight bench gemm` measures: C [M, N] = A [M, K] @ B [K, N].

The layout of a product is two letters as in BLAS, one for A and one for B: "n" lies in memory
row by row as it is written, "t" is stored the other way round. A linear layer with weight W
[out, in], input x [tokens, in] and gradient g [tokens, out] has three products a step:

    forward             x @ W.T   "nt"
    gradient of input   g @ W     "nn"
    gradient of weight  g.T @ x   "tn"

GPT-2's Conv1D stores W as [in, out]: x @ W "nn", g @ W.T "nt", x.T @ g "tn".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["nn", "nt", "tn"]
Part = Literal["size", "model", "alignment", "tile", "wave"]

#: The parts whose products are there to be compared with each other.
COMPARED = ("alignment", "tile", "wave")
#: The multiples to which sizes are padded.
MULTIPLES = (8, 64, 128)
#: The size of a tile's edge around which products are measured in steps.
TILE_EDGE = 256
#: Tokens of the step whose products are added up: 4 rows of 1024.
STEP_TOKENS = 4096


@dataclass(frozen=True)
class GemmProduct:
    """One matrix product.

    Attributes:
        part: part of the benchmark.
        group: group of products that are compared: the dimension that varies, or how weights are
            stored.
        value: the size that varies within the group.
        name: name in tables.
        m: rows of A and C.
        n: columns of B and C.
        k: columns of A, rows of B.
        layout: layout of A and B in memory.
        count: number of such products in a training step; 0 outside the part "model".
    """

    part: Part
    group: str
    value: int
    name: str
    m: int
    n: int
    k: int
    layout: Layout = "nt"
    count: int = 0

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class GPT2Shape:
    """The sizes of a GPT-2 that its matrix products depend on."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int = 50257


MODELS = {
    "gpt2-124m": GPT2Shape(768, 12),
    "gpt2-355m": GPT2Shape(1024, 24),
    "gpt2-774m": GPT2Shape(1280, 36),
    "gpt2-1558m": GPT2Shape(1600, 48),
}


@dataclass(frozen=True)
class GemmPlan:
    """Amount of measuring.

    Attributes:
        sizes: sizes of the square products.
        base: the aligned size of the products of the part "alignment" and "tile".
        tokens: rows of the model's products: some of a step's 4096, to save time on CPUs.
        tile_sizes: values of N around TILE_EDGE.
        measure_seconds: approximate duration of a measurement, which repeats its product.
        budget_seconds: approximate duration of all rounds.
        min_rounds: rounds at least.
        max_rounds: rounds at most.
        turns: measurements of the products of COMPARED in a round; they are small, and so are
            their differences.
    """

    sizes: tuple[int, ...]
    base: int
    tokens: int
    tile_sizes: tuple[int, ...]
    measure_seconds: float
    budget_seconds: float
    min_rounds: int = 3
    max_rounds: int = 9
    turns: int = 3


_EDGES = (248, 255, 256, 257, 264)
_STEPS = tuple(sorted({*range(128, 401, 16), *_EDGES}))
_QUICK_STEPS = tuple(sorted({*range(192, 321, 32), *_EDGES}))


def plan_for(device_type: str, quick: bool) -> GemmPlan:
    """The plan for "cuda" or for anything slower."""
    if device_type == "cuda":
        sizes = (128, 256, 512, 1024, 2048, 4096, 8192)
        if quick:
            return GemmPlan(sizes, 4096, STEP_TOKENS, _QUICK_STEPS, 0.02, 30)
        return GemmPlan((*sizes, 16384), 4096, STEP_TOKENS, _STEPS, 0.05, 150)
    if quick:
        return GemmPlan((128, 256, 512, 1024, 2048), 1024, 128, _QUICK_STEPS, 0.02, 35, 2, turns=2)
    return GemmPlan((128, 256, 512, 1024, 2048, 4096), 1024, 1024, _STEPS, 0.03, 210)


def paddings(size: int) -> dict[int, int]:
    """`size` padded to each of MULTIPLES; two may lead to the same size."""
    return {multiple: -(-size // multiple) * multiple for multiple in MULTIPLES}


def unaligned(shape: GPT2Shape, base: int) -> dict[str, int]:
    """The sizes whose padding is measured, by group."""
    return {
        "M": base + 1,
        "N": base + 1,
        "K": base + 1,
        "hidden": shape.hidden_size + 1,
        "vocabulary": shape.vocab_size,
    }


def layer_products(
    name: str, tokens: int, inputs: int, outputs: int, *, conv1d: bool = False
) -> list[tuple[str, int, int, int, Layout]]:
    """The three products of a layer in a training step: name, M, N, K, layout."""
    forward: Layout = "nn" if conv1d else "nt"
    gradient: Layout = "nt" if conv1d else "nn"
    rows, columns = (inputs, outputs) if conv1d else (outputs, inputs)
    return [
        (f"{name} forward", tokens, outputs, inputs, forward),
        (f"{name} grad input", tokens, inputs, outputs, gradient),
        (f"{name} grad weight", rows, columns, tokens, "tn"),
    ]


def model_products(shape: GPT2Shape, tokens: int) -> list[GemmProduct]:
    """The products of one training step (attention's own between queries, keys and values are
    left out): the layers as Conv1D and as linear layers, the head for each vocabulary."""
    C = shape.hidden_size
    layers = {
        "qkv": (C, 3 * C),
        "attention out": (C, C),
        "mlp up": (C, 4 * C),
        "mlp down": (4 * C, C),
    }
    products = [
        GemmProduct("model", group, 0, *one, count=shape.num_hidden_layers)
        for group in ("conv1d", "linear")
        for name, (inputs, outputs) in layers.items()
        for one in layer_products(name, tokens, inputs, outputs, conv1d=group == "conv1d")
    ]
    vocabulary = shape.vocab_size
    heads = {
        rows: layer_products(f"head {rows}", tokens, C, rows)
        for rows in sorted({vocabulary, *paddings(vocabulary).values()})
    }
    # Same products of different sizes beside each other: the load of the machine drifts.
    products += [
        GemmProduct("model", "vocabulary", rows, *heads[rows][one], count=1)
        for one in range(3)
        for rows in heads
    ]
    return products


def alignment_products(shape: GPT2Shape, base: int, tokens: int) -> list[GemmProduct]:
    """Sizes on and off multiples: each dimension alone, in the layout "nt", where K is the inner
    dimension of A and B in memory, and N of C; and a model's hidden size in its MLP."""
    off = unaligned(shape, base)
    products = []
    for group in ("M", "N", "K"):
        for size in (base, off[group], *paddings(off[group]).values()):
            m, n, k = (size if group == which else base for which in ("M", "N", "K"))
            products.append(GemmProduct("alignment", group, size, f"{group} = {size}", m, n, k))
    hidden = off["hidden"]
    layers = {
        size: layer_products(f"hidden = {size}: up", tokens, size, 4 * size)
        for size in (hidden - 1, hidden, *paddings(hidden).values())
    }
    products += [
        GemmProduct("alignment", "hidden", size, *layers[size][one])
        for one in range(3)
        for size in layers
    ]
    return products


def tile_products(base: int, sizes: Sequence[int]) -> list[GemmProduct]:
    """N in steps around a tile's edge."""
    return [GemmProduct("tile", "N", n, f"N = {n}", base, n, base) for n in sizes]


def wave_products(multiprocessors: int) -> list[GemmProduct]:
    """As many tiles of 128 x 256 as a GPU has multiprocessors (SMs), first, and one fewer or more,
    and twice as many."""
    one, two = multiprocessors, 2 * multiprocessors
    return [
        GemmProduct("wave", "tiles", count, f"{count} tiles", 128 * count, 256, 4096)
        for count in (one, one - 1, one + 1, two, two + 1)
    ]


def all_products(shape: GPT2Shape, plan: GemmPlan, multiprocessors: int = 0) -> list[GemmProduct]:
    """Everything that a plan measures, in its order."""
    squares = [GemmProduct("size", "", size, str(size), size, size, size) for size in plan.sizes]
    products = [
        *squares,
        *model_products(shape, plan.tokens),
        *alignment_products(shape, plan.base, plan.tokens),
        *tile_products(plan.base, plan.tile_sizes),
    ]
    return products + wave_products(multiprocessors) if multiprocessors else products
