"""The options of `firstlight bench ...`, which the command line reads without importing torch.

The text of an attribute is the help of its option; the values that stand for None are in brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.errors import ConfigError, nearest

#: Result of a benchmark as JSON object; function that is called with the result so far.
Result = dict[str, Any]
Keep = Callable[[Result], None]


@dataclass(frozen=True)
class StepsBench:
    """Options of the benchmarks that train for some steps.

    Attributes:
        seq_len: tokens of a sequence. [1024, 256 with --quick; at most the context]
        micro_batch_size: sequences of a step of the plain run. [4 on a CPU, 16 on a GPU]
        steps: timed steps of a run. [4 on a CPU, 20 on a GPU]
        repeats: turns of all rows. [3; 1 with --quick]
        device: device to run on: auto, cpu, cuda or cuda:1.
    """

    model: str | None = None
    seq_len: int | None = None
    micro_batch_size: int | None = None
    steps: int | None = None
    repeats: int | None = None
    device: str = "auto"
    quick: bool = False


@dataclass(frozen=True)
class MethodsBench(StepsBench):
    """Options of `bench methods`.

    Attributes:
        model: model to train: gpt2-124m, gpt2-355m, gpt2-774m, llama-110m, llama-1b, small, or
            the model of a recipe. [gpt2-124m; small with --quick]
        rows: only these rows, as the tables name them (a rung of the ladder brings those below
            it), or `alone` or `ladder` for a whole table.
        quick: a small model, one turn, fewer rows, and an end after five minutes at most.
    """

    rows: Sequence[str] = ()


@dataclass(frozen=True)
class GemmBench:
    """Options of `bench gemm`.

    Attributes:
        device: device to run on: auto, cpu, cuda, cuda:1, mps.
        dtype: number formats: fp32, tf32, bf16, fp16. [all that the hardware multiplies]
        model: model with the shapes: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m.
        quick: smaller products, fewer rounds: under a minute.
    """

    device: str = "auto"
    dtype: Sequence[str] = ()
    model: str = "gpt2-124m"
    quick: bool = False


def require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check names given by the user.

    Args:
        kind: noun for the names in error messages, such as "row".
        names: the given names.
        known: all valid names.

    Raises:
        ConfigError: a name is unknown.
    """
    known = list(known)
    for name in names:
        if name not in known:
            hint = nearest(name, known) or f": use {', '.join(known)}"
            raise ConfigError(f"{kind} '{name}' is unknown{hint}")


def require_positive(least: int = 1, **values: int) -> None:
    """Check numbers given by the user.

    Args:
        least: minimum of the numbers.
        values: the numbers by name.

    Raises:
        ConfigError: a number is below `least`.
    """
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} is {value}: at least {least} is needed")
