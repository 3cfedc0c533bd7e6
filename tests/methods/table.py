"""The table in docs/methods.md of how close each method stays to the plain fp32 run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runs import Difference
from switches import Switch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
BEGIN = "<!-- nearness: written by tests/methods -->"
END = "<!-- end of nearness -->"


def bounds_table(switches: Iterable[Switch]) -> str:
    """Return one row per class and bounds, with the recipe keys that have them."""
    rows: dict[str, list[str]] = {}
    for switch in switches:
        if switch.kind in ("plain", "mathematics") or not switch.settings:
            continue
        keys = " with ".join(
            f"`{name}: {_yaml(value)}`"
            for name, value in switch.settings
            if name != "optimizer.learning_rate"
        )
        keys += {"any": "", "cpu": " on a CPU", "cuda": " on a GPU"}[switch.on]
        bounds = f"{switch.kind} | {switch.loss:.6g} | {100 * switch.weights:g}%"
        rows.setdefault(bounds, []).append(keys)
    return "\n".join(
        [
            "| class | any step's loss, nats | trained weights | recipe keys |",
            "|---|---|---|---|",
            *(f"| {bounds} | {', '.join(keys)} |" for bounds, keys in rows.items()),
        ]
    )


def _yaml(value: object) -> str:
    return {"True": "true", "False": "false", "None": "null"}.get(str(value), str(value))


def with_table(page: str, table: str) -> str:
    """Return the page with the table between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, rest = page.split(f"{BEGIN}\n", 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def measured_table(measured: dict[tuple[str, str], Difference]) -> list[str]:
    """Return lines for the terminal with the differences measured on this machine."""
    lines = [f"{'method':32}{'loss, nats':>12}{'weights':>12}"]
    for (name, model), found in measured.items():
        lines.append(f"{name + ' ' + model:32}{found.loss:>12.1e}{found.weights:>12.1e}")
    return lines
