"""One run of `python -m benchmarks budget` in a process of its own: `measure`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.data.shards import read_manifest
from firstlight.evaluation.inputs import load_for_evaluation
from firstlight.evaluation.perplexity import evaluate
from firstlight.pipeline.run import train_texts
from firstlight.report.length import read_length

#: A random run is ended if its bits per byte exceed those of the chosen settings by more than a
#: fraction, at the same share of their steps: (share from which it counts, fraction). 41 of 138
#: runs of `benchmarks learning` were so far above the best recipe, and ended 7 % above it or more. The
#: last pair is for the training loss (`_EARLY`). It was tried in ten minutes of WikiText-2: of 20
#: random runs, 4 were more than 30 % above, and their first evaluations were hopeless, too. One
#: that was 29 % above ended 9 % above.
FAR_ABOVE = ((0.45, 0.1), (0.2, 0.15), (0.1, 0.3))

#: Shares of the steps between which the mean of the training loss is taken: there is no evaluation
#: so early. In the first pass over the text it is close to the held-out loss. In later passes it is
#: lower, so that it ends fewer runs.
_EARLY = (0.05, 0.1)

#: Share of the steps and held-out bits per byte of each evaluation of a run, in their order, after
#: the bits per byte of the training loss at `_EARLY`.
Curve = Sequence[Sequence[float]]


def is_hopeless(share: float, bits: float, chosen: Curve) -> bool:
    """True if a run is so far above the run of the chosen settings that it is ended.

    Args:
        share: share of the run's steps that are done.
        bits: its bits per byte there, of the kind that the curve has.
        chosen: curve of the run of the chosen settings. Between two of its points, the bits are
            taken to fall in a line.
    """
    fraction = next((most for start, most in FAR_ABOVE if share >= start), math.inf)
    shares, values = zip(*chosen, strict=True)
    return bits > (1 + fraction) * float(np.interp(share, shares, values))


def share_of_steps(record: Mapping[str, Any], length: Mapping[str, Any]) -> float:
    """Share of a run's steps that are done; an estimate until their number is decided.

    Args:
        record: metrics of the last step.
        length: result of `read_length`.
    """
    if "max_steps" in length:
        return float(record["step"] / length["max_steps"])
    by_time = record["elapsed_seconds"] / (60 * length["max_minutes"])
    return float(max(by_time, record["step"] / length.get("most_steps", math.inf)))


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train on a text within a budget, and evaluate on all held-out text.

    Args:
        request: "text", "budget", "settings" by key of the recipe, "run", the run folder, and
            "chosen", the curve of the run of the chosen settings, or an empty list.

    Returns:
        - "bits_per_byte": bits per byte of the held-out text by the model; None if the run was
          ended early
        - "step": optimizer steps
        - "curve": share of the steps and bits per byte; see `Curve`
        - "seconds": duration of `train_texts`, without the evaluation on all held-out text

        A run that was not ended early has also:

        - "gzip", "xz": bits per byte of the held-out text by the two compression programs
        - "expected": [low, high], the range of bits per byte that was predicted
        - "tokens", "parameters": training tokens and model size

    Raises:
        FirstlightError: see `train_texts`.
    """
    folder, began = Path(request["run"]), time.monotonic()
    watch = _Watch(folder, request["chosen"])
    try:
        run = train_texts(
            request["text"],
            budget=request["budget"],
            run_dir=folder,
            overrides=request["settings"],
            on_step=watch,
            progress=False,
        )
    except _Hopeless:
        seconds = time.monotonic() - began
        ended = {"bits_per_byte": None, "curve": watch.curve(), "seconds": seconds}
        return ended | {"step": watch.step}
    training, choices = run.training, run.choices
    assert training is not None
    assert choices is not None
    assert choices.bits_per_byte is not None
    found = evaluate(load_for_evaluation(training.checkpoint), folder / "data")
    return {
        "bits_per_byte": found.bits_per_byte,
        "curve": watch.curve(training.step),
        "seconds": run.seconds,
        "gzip": run.gzip_bits_per_byte,
        "xz": run.xz_bits_per_byte,
        "expected": list(choices.bits_per_byte),
        "step": training.step,
        "tokens": training.tokens_seen,
        "parameters": choices.parameters,
    }


class _Watch:
    """Records the evaluations of a run, and ends it if it is hopeless.

    Args:
        folder: the run folder, with the prepared text.
        chosen: curve of the run of the chosen settings; empty to end no run.
    """

    def __init__(self, folder: Path, chosen: Curve) -> None:
        self._folder, self._chosen = folder, chosen
        self._points: list[tuple[int, float]] = []
        self._early: list[float] = []
        self._share = 0.0

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a step's metrics.

        Raises:
            _Hopeless: the run is far above the run of the chosen settings.
        """
        bits = record.get("bits_per_byte")
        if self._points and bits is None:
            return
        self._share = share_of_steps(record, read_length(self._folder))
        if not self._points:
            bits = self._early_bits(record["train/loss"])
        if bits is None:
            return
        self._points.append((record["step"], bits))
        is_open = self._share < 1 and len(self._chosen) > 0
        if is_open and is_hopeless(self._share, bits, self._chosen):
            raise _Hopeless

    def _early_bits(self, loss: float) -> float | None:
        """The bits per byte of the training loss at `_EARLY`; None before."""
        start, end = _EARLY
        if self._share >= start:
            self._early.append(loss)
        if self._share < end:
            return None
        split = read_manifest(self._folder / "data")["splits"]["train"]
        tokens_per_byte: float = split["tokens"] / split["text_bytes"]
        return statistics.mean(self._early) / math.log(2) * tokens_per_byte

    @property
    def step(self) -> int:
        """The step of the curve's last point."""
        return self._points[-1][0]

    def curve(self, steps: int | None = None) -> Curve:
        """The curve of the run.

        Args:
            steps: steps of the run; None if it was ended early, and has an estimated share.
        """
        total = steps or self.step / self._share
        return [(step / total, bits) for step, bits in self._points]


class _Hopeless(Exception):  # noqa: N818 - no error
    """Raised to end a run that is far above the run of the chosen settings."""
