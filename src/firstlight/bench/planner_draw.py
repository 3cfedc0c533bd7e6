"""The pictures of `firstlight bench planner`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

_GIB = 2**30


def draw_memory(results: Sequence[Mapping[str, Any]]) -> bytes:
    """Predicted against measured peaks, and how the errors are spread, as a PNG.

    Args:
        results: see `planner_memory.bench_memory`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [one for one in results if not one["reason"]]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left: Any = figure.add_subplot(1, 2, 1)
    measured = [one["peak_bytes"] / _GIB for one in good]
    predicted = [one["predicted_bytes"] / _GIB for one in good]
    ends = [min(measured, default=0.1) / 1.3, 1.3 * max(measured, default=1.0)]
    left.plot(ends, ends, color="tab:gray", linewidth=0.8)
    left.scatter(measured, predicted, s=14, color="tab:blue")
    left.set(xscale="log", yscale="log", xlabel="measured peak, GiB", ylabel="predicted peak, GiB")
    right: Any = figure.add_subplot(1, 2, 2)
    errors = sorted(100 * one["error"] for one in good)
    right.step(errors, [(i + 1) / len(errors) for i in range(len(errors))], where="post")
    right.axvspan(-2, 5, color="tab:green", alpha=0.12)
    right.set(xlabel="error, % of the measured peak", ylabel="share of configurations")
    figure.suptitle(f"memory: {len(good)} configurations; green is what is allowed")
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()
