"""`python -m benchmarks gpu`: measures firstlight on one GPU, in one process and in calls of less
than ten minutes.

    python -m benchmarks gpu --out DIR                  # measures, or continues
    python -m benchmarks gpu --out DIR --device cpu     # a dry run: every item, tiny shapes
    python -m benchmarks gpu --report DIR               # prints the tables
    python -m benchmarks gpu --fit DIR                  # the planner's errors, and its constants

DIR/lines.jsonl has one line for each item of `ITEMS`, written as soon as it is measured: its rows,
the commit, and the machine. The same command resumes where it stopped: an item that has a line for
this version of the source is skipped, and an item that failed is retried. No item starts if less
time is left than it is expected to take. Code compiled by torch.compile is kept in
DIR/inductor.cache, so that later calls on the same GPU with the same torch don't compile again.

`--report` shows the lines of several commits side by side, with the medians of several runs.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.gpu import items, published
from benchmarks.gpu.calls import free_memory
from benchmarks.gpu.items import Bench, Item, Row, in_words
from benchmarks.options import GPUBench
from benchmarks.pages import markdown_table
from firstlight.bench.rows import Result, require_known
from firstlight.cli.output import show
from firstlight.console import say
from firstlight.errors import ConfigError, InputError
from firstlight.hardware.device import find_hardware, synchronize
from firstlight.hardware.environment import usable_cpus

ROOT = Path(__file__).resolve().parents[2]
LINES_NAME, CACHE_NAME = "lines.jsonl", "inductor.cache"

#: All items, starting with those for optimisation work, which a single call measures.
ITEMS: tuple[Item, ...] = (*items.ITEMS, *published.ITEMS)

#: An item is stopped after this multiple of its expected seconds, plus a minute.
_MOST_EXCESS = 2.0

#: Keys of a row that are not columns of its table.
_NO_COLUMNS = ("row", "kernels")


class OutOfTimeError(BaseException):
    """Raised when an item exceeds its time limit. It is not an Exception, because ordinary errors
    end only their row."""


def source_digest() -> str:
    """Return a hash of the package's source code, which identifies the version that was
    measured."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src" / "firstlight").rglob("*.py")):
        found.update(str(path.relative_to(ROOT)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _git(*arguments: str) -> str:
    """Return the output of git, or "" if there is no git or no repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def facts(bench: Bench, commit: str) -> dict[str, Any]:
    """Return the keys that all lines of a call share.

    Args:
        bench: the device.
        commit: name of the commit, for a machine without git; "" asks git.
    """
    on_gpu = bench.device.type == "cuda"
    cpu = find_hardware("cpu").name
    return {
        "commit": commit or _git("rev-parse", "HEAD"),
        "describe": commit or _git("describe", "--always", "--dirty"),
        "source": source_digest(),
        "torch": str(torch.__version__),
        "driver": driver_version() if on_gpu else "",
        "device": bench.hardware.name,
        "memory_bytes": bench.hardware.memory_bytes,
        "host": f"{usable_cpus()} cores of {cpu}; {', '.join(_software())}",
        "dry": bench.dry,
    }


def _software() -> Iterator[str]:
    """Yield the versions of software other than torch that affects the figures."""
    yield f"Python {platform.python_version()}"
    for name in ("triton", "transformers", "bitsandbytes", "torchao"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def driver_version() -> str:
    """Return the driver's version from NVML, or from nvidia-smi if NVML fails; "" if both fail."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:  # noqa: BLE001  (a version that is not known stops nothing)
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return said.stdout.splitlines()[0].strip() if said.stdout.strip() else ""
    return ""


def measure(
    items: Sequence[Item],
    bench: Bench,
    out: Path,
    end: float,
    shared: dict[str, Any],
    clock: Callable[[], float] = time.time,
) -> list[str]:
    """Measure the items that have no line for this version of the source yet, as far as time
    allows.

    Args:
        items: the items, in order.
        bench: the device.
        out: folder of the lines.
        end: time at which the last item must have ended, by `clock`.
        shared: keys of all lines, see `facts`.
        clock: clock in seconds.

    Returns:
        The names of the items that are left for the next call.
    """
    lines = read_lines(out / LINES_NAME)
    waiting = [item for item in items if not any(_is_of(item, line, shared) for line in lines)]
    left = []
    for number, item in enumerate(waiting):
        remaining = end - clock()
        if item.seconds > remaining and not bench.dry:
            left.append(item.name)
            continue
        start, rows = clock(), list[Row]()
        date = datetime.datetime.now(datetime.UTC).isoformat()
        line: dict[str, Any] = {"item": item.name, "date": date, **shared}
        limit = min(remaining, _MOST_EXCESS * item.seconds + 60)
        try:
            with _time_limit(limit):
                for row in item.rows(bench):
                    rows.append(row)
        except (Exception, OutOfTimeError) as error:  # noqa: BLE001  (the next items are measured)
            line["error"] = in_words(error)
        line |= {"seconds": round(clock() - start, 1), "rows": rows}
        append_line(out / LINES_NAME, line)
        _say(item, line)
        try:
            _clean_up(bench)
        except RuntimeError as error:  # After an illegal memory access, every call fails.
            say(f"the device is lost: {error}")
            return left + [one.name for one in waiting[number + 1 :]]
        save_cache(out / CACHE_NAME)
    return left


def _is_of(item: Item, line: dict[str, Any], shared: dict[str, Any]) -> bool:
    """Return True if a line has an item's figures for this machine and this version of the source
    (or any version, if the item does not depend on it)."""
    keys = ["device", "torch", "dry", "driver" if item.of_machine else "source"]
    is_same = all(line.get(key) == shared[key] for key in keys)
    return line["item"] == item.name and is_same and "error" not in line


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Context manager that raises `OutOfTimeError` after some seconds, in the main thread only."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, or [] if it does not exist. A line truncated by a killed process
    is skipped."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a JSON line and sync it to disk. An incomplete last line left by a killed process is
    terminated first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _clean_up(bench: Bench) -> None:
    """Remove all traces of an item that could affect the next item.

    Raises:
        RuntimeError: the device no longer responds.
    """
    torch._dynamo.reset()
    synchronize(bench.device)
    free_memory(bench.device)


def save_cache(path: Path) -> None:
    """Save the code that torch.compile has generated in this process, if any."""
    found = torch.compiler.save_cache_artifacts()
    if found is not None:
        partial = path.with_suffix(".part")
        partial.write_bytes(found[0])
        partial.replace(path)


def load_cache(path: Path) -> None:
    """Load code compiled by earlier calls for torch.compile; code for another torch version or GPU
    is not used."""
    if path.is_file():
        torch.compiler.load_cache_artifacts(path.read_bytes())


def _say(item: Item, line: dict[str, Any]) -> None:
    failed = sum("error" in row for row in line["rows"])
    said = f"{len(line['rows'])} rows" + (f", {failed} failed" if failed else "")
    problem = f": {line['error']}" if "error" in line else ""
    say(f"{item.name:<11} {line['seconds']:>6.1f} of {item.seconds:.0f} s  {said}{problem}")


# The tables


def report(folders: Sequence[Path]) -> str:
    """Return the tables of all lines in some folders, in Markdown. Each row is shown for each
    commit that measured it, with the medians of its runs.

    Raises:
        InputError: a folder has no lines.
    """
    lines = [line for folder in folders for line in known_lines(folder)]
    parts = [_machines(lines)]
    for item in ITEMS:
        own = [line for line in lines if line["item"] == item.name]
        if own:
            parts.append(f"## {item.name}: {item.title}\n\n{_table(own)}")
            parts += _profiles(own)
    return "\n".join(parts)


def _machines(lines: Sequence[dict[str, Any]]) -> str:
    return "# Figures of a GPU\n\n" + "\n".join(dict.fromkeys(map(_machine, lines))) + "\n"


def _machine(line: dict[str, Any]) -> str:
    """Return the commit, the machine and the day of a line."""
    dry = "; a dry run, whose figures are meaningless" if line["dry"] else ""
    return (
        f"- {line['describe'] or line['source']}: {line['device']}, driver "
        f"{line['driver'] or 'none'}, torch {line['torch']}, "
        f"{line.get('host') or 'unknown host'}; {line['date'][:10]}{dry}"
    )


#: (row, commit)
_Key = tuple[str, str]


def _runs(lines: Sequence[dict[str, Any]]) -> dict[_Key, list[Row]]:
    """Return all runs of each row by commit, with the commits of a row next to each other."""
    names = dict.fromkeys(row["row"] for line in lines for row in line["rows"])
    commits = dict.fromkeys(line["describe"] or line["source"] for line in lines)
    found: dict[_Key, list[Row]] = {(name, commit): [] for name in names for commit in commits}
    for line in lines:
        for row in line["rows"]:
            found[row["row"], line["describe"] or line["source"]].append(row)
    return {key: rows for key, rows in found.items() if rows}


def _table(lines: Sequence[dict[str, Any]]) -> str:
    runs = _runs(lines)
    keys = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    columns = [key for key in keys if key not in _NO_COLUMNS]
    columns.sort(key=lambda key: key == "error")  # last
    several = len({commit for _, commit in runs}) > 1
    header = ["row", *(["commit"] if several else []), *(key.replace("_", " ") for key in columns)]
    table = [
        [name, *([commit] if several else []), *(_cell(rows, key) for key in columns)]
        for (name, commit), rows in runs.items()
    ]
    failed = [f"\nFailed: {line['error']}\n" for line in lines if "error" in line]
    return (markdown_table(header, table) if table else "") + "".join(failed)


def _cell(rows: Sequence[Row], key: str) -> str:
    """Return the median of a figure over the runs of a row, or the text of its last run."""
    found = [row[key] for row in rows if row.get(key) is not None]
    if not found:
        return ""
    if isinstance(found[-1], str):
        return str(found[-1])
    value = statistics.median(found)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _profiles(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the kernels of each row's last run."""
    for (name, commit), rows in _runs(lines).items():
        if rows[-1].get("kernels"):
            table = [(kernel, f"{ms:.3f}", calls) for kernel, ms, calls in rows[-1]["kernels"]]
            text = markdown_table((f"{name}: kernel", "ms", "calls"), table)
            yield f"<details><summary>{name}, {commit}</summary>\n\n{text}\n</details>\n"


def bench_gpu(bench: GPUBench) -> Result:
    """Run the GPU benchmark for some minutes.

    Returns:
        - "lines": path of lines.jsonl
        - "left": names of the items that are left for the next call

    Raises:
        ConfigError: an option is invalid, or no GPU was found.
        StorageError: a file system error.
    """
    begun = time.time()
    if bench.seconds <= 0:
        raise ConfigError(f"--seconds {bench.seconds:g}: must be greater than 0")
    require_known("device", [bench.device], ["cuda", "cpu"])
    # "D" selects D-124m and D-1b.
    known = [name for item in ITEMS for name in (item.name, item.name.split("-")[0])]
    require_known("item", bench.items, list(dict.fromkeys(known)))
    chosen = [
        item
        for item in ITEMS
        if not bench.items or {item.name, item.name.split("-")[0]} & {*bench.items}
    ]
    if bench.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} does not find a CUDA GPU: use --device cpu to run every "
            "item on the CPU"
        )
    device = Bench(find_hardware(bench.device), dry=bench.device == "cpu", out=bench.folder)
    if not device.dry:
        load_cache(bench.folder / CACHE_NAME)
    end = begun + bench.seconds
    left = measure(chosen, device, bench.folder, end, facts(device, bench.commit))
    show(f"left for the next call: {', '.join(left)}" if left else "all items are measured")
    return {"lines": bench.folder / LINES_NAME, "left": left}


def known_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a folder.

    Raises:
        InputError: it has none.
    """
    lines = read_lines(folder / LINES_NAME)
    if not lines:
        raise InputError(f"{folder} has no {LINES_NAME}: use the --out of an earlier call")
    return lines


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["gpu", *sys.argv[1:]]))
