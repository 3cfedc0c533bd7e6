"""Define the `batch` section of a recipe, and choose the micro-batch size if the recipe does not
specify it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from firstlight.errors import ConfigError
from firstlight.optim.schedule import BatchSchedule
from firstlight.section import Section

#: Default micro-batch size, in sequences.
DEFAULT_ROWS = 8

#: Number of tokens per forward pass at which a CPU reaches its full rate of matrix products.
_BUSY_TOKENS = 1024


def _number_of_rows(value: object) -> object:
    if value in (None, "auto") or (type(value) is int and value > 0):
        return value
    raise ValueError(f"must be a whole number above 0, or auto (given: {value!r})")


class BatchConfig(Section):
    """The `batch` section. In an optimizer step, each process computes micro_batch_size x
    gradient_accumulation_steps sequences of data.seq_len tokens.
    """

    micro_batch_size: Annotated[int | Literal["auto"] | None, PlainValidator(_number_of_rows)] = (
        None
    )
    """number of sequences per forward pass on one device. Larger values use the hardware better but
    need more memory for activations. "auto" is the largest number that fits in memory. It is
    determined before the run by trials in a separate process, which start with all sequences of a
    step and halve the number until it fits. null means 8. If global_batch_tokens is set, null
    instead means the largest number up to 8 that divides a step evenly. On a CPU, such a
    micro-batch also has at most about 1,024 tokens, which are enough to keep the CPU busy.
    """
    divide_micro_batch: bool = False
    """true lowers micro_batch_size to the largest number that divides a step's sequences evenly
    among the processes. For example, 8 is lowered to 4 if two processes share a step of 8
    sequences. firstlight sets this key if it chooses micro_batch_size itself. false keeps
    micro_batch_size.
    """
    gradient_accumulation_steps: int | None = Field(None, gt=0)
    """number of forward and backward passes per step. With several passes, the gradient of a large
    batch is computed with the memory of a small one."""
    global_batch_tokens: int | None = Field(None, gt=0)
    """total number of tokens per step on all devices. The number of accumulation steps is computed
    from this number.
    """
    ramp_start_tokens: int | None = Field(None, gt=0)
    """number of tokens per step at the start of the run; it must be a divisor of
    global_batch_tokens. The tokens per step increase to global_batch_tokens in increments of this
    size, by adding accumulation steps. null disables this ramp."""
    ramp_steps: int | None = Field(None, gt=0)
    """number of steps over which the tokens per step increase. Later steps have global_batch_tokens
    tokens."""

    @model_validator(mode="after")
    def _whole_ramp(self) -> Self:
        start, whole = self.ramp_start_tokens, self.global_batch_tokens
        if (start is None) != (self.ramp_steps is None):
            raise ValueError(
                "ramp_start_tokens and ramp_steps require each other: set both or neither"
            )
        if start is None:
            return self
        if whole is None:
            raise ValueError(
                "ramp_start_tokens needs global_batch_tokens, the end of the ramp: "
                "set global_batch_tokens"
            )
        if whole % start or whole == start:
            raise ValueError(
                f"global_batch_tokens {whole} must be a multiple of ramp_start_tokens {start}, and "
                "at least twice as large: change one of them"
            )
        return self

    @property
    def rows(self) -> int:
        """The micro-batch size in sequences. It must not be "auto"."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size or DEFAULT_ROWS

    def global_rows(self, seq_len: int) -> int:
        """Return the number of sequences per step in a recipe whose micro-batch size is "auto".

        Args:
            seq_len: number of tokens per sequence.

        Raises:
            ConfigError: `global_batch_tokens` is null or not a multiple of `seq_len`, or
                `gradient_accumulation_steps` is set.
        """
        if self.global_batch_tokens is None or self.gradient_accumulation_steps is not None:
            raise ConfigError(
                "batch.micro_batch_size auto requires a fixed number of tokens per step: set "
                "batch.global_batch_tokens instead of batch.gradient_accumulation_steps, to a "
                f"multiple of data.seq_len, {seq_len}"
            )
        rows, rest = divmod(self.global_batch_tokens, seq_len)
        if rest:
            below = f"{rows * seq_len} or " if rows else ""
            raise ConfigError(
                f"batch.global_batch_tokens {self.global_batch_tokens} is not a multiple of "
                f"data.seq_len {seq_len}: use {below}{(rows + 1) * seq_len}"
            )
        return rows

    def accumulation(self, seq_len: int, processes: int = 1) -> int:
        """Return the number of forward passes per optimizer step in each of `processes` processes.

        Raises:
            ConfigError: `global_batch_tokens` or `ramp_start_tokens` is not a multiple of the
                tokens of one forward pass of all processes, or contradicts
                `gradient_accumulation_steps`.
        """
        if self.global_batch_tokens is None:
            return self.gradient_accumulation_steps or 1
        if self.ramp_start_tokens is not None:
            self._passes("ramp_start_tokens", self.ramp_start_tokens, seq_len, processes)
        steps = self._passes("global_batch_tokens", self.global_batch_tokens, seq_len, processes)
        if self.gradient_accumulation_steps not in (None, steps):
            raise ConfigError(
                f"batch.gradient_accumulation_steps {self.gradient_accumulation_steps} "
                f"contradicts global_batch_tokens, which implies {steps}: set it to {steps}, or "
                "remove one of the two"
            )
        return steps

    def _passes(self, key: str, tokens: int, seq_len: int, processes: int) -> int:
        """Return the number of forward passes in each process for a step of this many tokens."""
        steps, rest = divmod(tokens, self.rows * seq_len * processes)
        if not rest:
            return steps
        # A micro-batch size that firstlight has chosen can be adapted to the number of tokens.
        unit = (1 if self.divide_micro_batch else self.rows) * seq_len * processes
        name = "seq_len" if self.divide_micro_batch else "micro_batch_size x seq_len"
        share = f" x {processes} processes" if processes > 1 else ""
        below = tokens // unit * unit
        raise ConfigError(
            f"batch.{key} {tokens} is not a multiple of {name}{share} = {unit}: "
            f"{self._same_tokens(seq_len, processes)}"
            f"use {f'{below} or ' if below else ''}{below + unit}"
        )

    def _same_tokens(self, seq_len: int, processes: int) -> str:
        """Return advice on how to divide a step evenly without changing its number of tokens. The
        advice is the start of a sentence, or "" if there is none."""
        assert self.global_batch_tokens is not None
        if rows := self.dividing_rows(seq_len, processes, self.rows):
            return f"set batch.micro_batch_size to {rows}, or "
        tokens = math.gcd(self.global_batch_tokens, self.ramp_start_tokens or 0)
        sequences, rest = divmod(tokens, seq_len)
        if rest or processes == 1:
            return ""
        even = [count for count in range(1, sequences + 1) if sequences % count == 0]
        near = [max(n for n in even if n < processes), *(n for n in even if n > processes)][:2]
        return f"start {' or '.join(map(str, near))} processes, or "

    def dividing_rows(self, seq_len: int, processes: int, most: int) -> int | None:
        """Return a micro-batch size with which the processes share each step evenly, or None if
        there is no such size.

        If `gradient_accumulation_steps` is set, return the size that results in this number of
        accumulation steps, if there is one. Otherwise, return the largest suitable size up to
        `most`.

        Args:
            seq_len: number of tokens per sequence.
            processes: number of processes that share a step.
            most: maximum micro-batch size in sequences.
        """
        assert self.global_batch_tokens is not None
        # If the number of tokens per step grows during the run, the micro-batch must also divide
        # the smallest steps evenly.
        first = self.ramp_start_tokens or self.global_batch_tokens
        whole, rest = divmod(self.global_batch_tokens, seq_len * processes)
        total, first_rest = divmod(first, seq_len * processes)
        if rest or first_rest:
            return None
        passes = self.gradient_accumulation_steps
        if passes and whole % passes == 0 and total % (whole // passes) == 0:
            return whole // passes
        return next(rows for rows in range(min(most, total), 0, -1) if total % rows == 0)

    def schedule(self, seq_len: int, processes: int = 1) -> BatchSchedule:
        """Return the schedule of the number of sequences per optimizer step. The number includes
        the sequences of all `processes` processes.

        Raises:
            ConfigError: see `accumulation`.
        """
        size = self.rows * self.accumulation(seq_len, processes) * processes
        start = size if self.ramp_start_tokens is None else self.ramp_start_tokens // seq_len
        return BatchSchedule(size, start, self.ramp_steps or 0)


def resolve_micro_batch(
    batch: BatchConfig,
    seq_len: int,
    *,
    device: str,
    processes: int,
    earlier: int | None,
    is_tried: bool,
    tell: Callable[[str], None],
) -> BatchConfig:
    """Return the section with the micro-batch size resolved. The size remains "auto" only if it
    must be determined by trials (`training/micro_batch_trials.py`).

    The default is the largest size up to a limit that divides the global batch evenly. The limit is
    8 sequences and, on a CPU, also about 1,024 tokens. That many tokens keep a CPU busy, and more
    would need more memory for activations without being faster. A size chosen by firstlight, for
    example in an earlier run, is lowered if this is necessary to divide a step evenly among the
    processes.

    Args:
        batch: the section as written by the user.
        seq_len: number of tokens per sequence.
        device: type of the device: "cpu", "cuda" or "mps".
        processes: number of processes that share each step.
        earlier: micro-batch size of the run that is resumed; None for a new run.
        is_tried: True if the size is determined by trials when it is "auto"; False to use the
            default size instead.
        tell: function that is called with a message if a chosen size is lowered.
    """
    rows, is_chosen = batch.micro_batch_size, batch.divide_micro_batch
    if not isinstance(rows, int):
        rows, is_chosen = earlier or rows, True
    if rows is None or (rows == "auto" and not is_tried):
        rows = _default_size(batch, seq_len, device, processes)
    elif rows != "auto" and is_chosen:
        rows = _divided(batch, seq_len, rows, processes, tell=tell)
    return batch.model_copy(update={"micro_batch_size": rows, "divide_micro_batch": is_chosen})


def _default_size(batch: BatchConfig, seq_len: int, device: str, processes: int) -> int:
    if batch.global_batch_tokens is None:
        return DEFAULT_ROWS
    most = DEFAULT_ROWS
    if device == "cpu":
        most = min(max(_BUSY_TOKENS // seq_len, 1), most)
    return batch.dividing_rows(seq_len, processes, most) or DEFAULT_ROWS


def _divided(
    batch: BatchConfig, seq_len: int, rows: int, processes: int, *, tell: Callable[[str], None]
) -> int:
    """Lower a chosen micro-batch size so that the processes share a step evenly. Return the new
    size. The size is unchanged if the recipe does not set the number of tokens per step, because
    that number then depends on the size. It is also unchanged if no size divides the step evenly.
    """
    if batch.global_batch_tokens is None:
        return rows
    fitting = batch.dividing_rows(seq_len, processes, rows) or rows
    if fitting != rows:
        shared = f"{processes} processes share" if processes > 1 else "one process has"
        tell(
            f"batch.micro_batch_size {fitting} instead of the chosen {rows}: {shared} a step of "
            f"{batch.global_batch_tokens // seq_len} sequences"
        )
    return fitting
