"""What speed work needs to know of a GPU, in one process and less than ten minutes.

    python -m benchmarks.gpu.quick --out DIR                  # measures, or continues
    python -m benchmarks.gpu.quick --out DIR --device cpu     # a dry run: every item, tiny shapes
    python -m benchmarks.gpu.quick --report DIR [DIR...]      # prints the tables

DIR/lines.jsonl has one line for each item of `items.ITEMS`, written as soon as it is measured: its
rows, the commit, and the machine. The same command continues where it stopped: an item that has a
line of this source is skipped, one that failed is tried again. No item starts if less time is left
than it is expected to take. Code that torch.compile made is kept in DIR/inductor.cache, so that
later calls on the same GPU with the same torch don't compile again.

`--report` sets the lines of several commits beside each other, with the medians of several runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

from benchmarks.__main__ import find_benchmarks_in_processes
from benchmarks.gpu.calls import free_memory
from benchmarks.gpu.items import ITEMS, Bench, Item, Row, in_words
from benchmarks.gpu.parts import driver_version
from benchmarks.pages import markdown_table
from firstlight.hardware.device import find_hardware, synchronize

ROOT = Path(__file__).resolve().parents[2]
LINES_NAME, CACHE_NAME = "lines.jsonl", "inductor.cache"

#: Default of --seconds: a machine that is lent for ten minutes needs some to copy the results.
_SECONDS = 530.0

#: An item is stopped after this multiple of its expected seconds, and a minute.
_MOST_EXCESS = 2.0

#: Keys of a row that are not columns of its table.
_NO_COLUMNS = ("row", "kernels")


class OutOfTimeError(BaseException):
    """An item's time is over. No Exception: a row's own errors end only that row."""


def source_digest() -> str:
    """Hash of the package's source: figures of another source are other figures."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src" / "firstlight").rglob("*.py")):
        found.update(str(path.relative_to(ROOT)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _git(*arguments: str) -> str:
    """The output of git; "" without git or a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def facts(bench: Bench, commit: str) -> dict[str, Any]:
    """The keys that all lines of a call share.

    Args:
        bench: the device.
        commit: name of the commit, for a machine without git; "" asks git.
    """
    on_gpu = bench.device.type == "cuda"
    return {
        "commit": commit or _git("rev-parse", "HEAD"),
        "describe": commit or _git("describe", "--always", "--dirty"),
        "source": source_digest(),
        "torch": str(torch.__version__),
        "driver": driver_version() if on_gpu else "",
        "device": bench.hardware.name,
        "dry": bench.dry,
    }


def measure(
    items: Sequence[Item],
    bench: Bench,
    out: Path,
    end: float,
    shared: dict[str, Any],
    clock: Callable[[], float] = time.time,
) -> list[str]:
    """Measure the items that have no line of this source yet, as far as the time allows.

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
    done = {
        line["item"]
        for line in lines
        if "error" not in line
        and all(line.get(key) == shared[key] for key in ("source", "device", "torch", "dry"))
    }
    left = []
    for number, item in enumerate(items):
        if item.name in done:
            continue
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
        except RuntimeError as error:  # after an illegal access every call fails
            print(f"the device is lost: {error}", file=sys.stderr)
            return left + [one.name for one in items[number + 1 :] if one.name not in done]
        save_cache(out / CACHE_NAME)
    return left


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """A context that raises `OutOfTimeError` after some seconds, in the main thread only."""

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
    """The lines of a file; [] without it. A line that a killed process cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON, which is on the disk when this returns. An incomplete last line, which
    a killed process leaves, is ended first."""
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
    """Leave nothing of an item behind that would change the next.

    Raises:
        RuntimeError: the device does not answer any more.
    """
    torch._dynamo.reset()
    synchronize(bench.device)
    free_memory(bench.device)


def save_cache(path: Path) -> None:
    """Write what torch.compile made in this process so far, if anything."""
    found = torch.compiler.save_cache_artifacts()
    if found is not None:
        partial = path.with_suffix(".part")
        partial.write_bytes(found[0])
        partial.replace(path)


def load_cache(path: Path) -> None:
    """Give torch.compile what earlier calls made; code of another torch or GPU is not used."""
    if path.is_file():
        torch.compiler.load_cache_artifacts(path.read_bytes())


def _say(item: Item, line: dict[str, Any]) -> None:
    failed = sum("error" in row for row in line["rows"])
    said = f"{len(line['rows'])} rows" + (f", {failed} failed" if failed else "")
    problem = f": {line['error']}" if "error" in line else ""
    text = f"{item.name:<10} {line['seconds']:>6.1f} of {item.seconds:.0f} s  {said}{problem}"
    print(text, file=sys.stderr, flush=True)


# The tables


def report(folders: Sequence[Path]) -> str:
    """The tables of all lines in some folders, in Markdown. Each row is shown for each commit that
    measured it, with the medians of its runs."""
    lines = [line for folder in folders for line in read_lines(folder / LINES_NAME)]
    if not lines:
        return "Nothing is measured.\n"
    parts = [_machines(lines)]
    for item in ITEMS:
        own = [line for line in lines if line["item"] == item.name]
        if own:
            parts.append(f"## {item.name}: {item.title}\n\n{_table(own)}")
            parts += _profiles(own)
    return "\n".join(parts)


def _machines(lines: Sequence[dict[str, Any]]) -> str:
    found = dict.fromkeys(
        f"- {line['describe'] or line['source']}: {line['device']}, driver "
        f"{line['driver'] or 'none'}, torch {line['torch']}; {line['date'][:10]}"
        + ("; a dry run, whose figures mean nothing" if line["dry"] else "")
        for line in lines
    )
    return "# GPU: quick figures\n\n" + "\n".join(found) + "\n"


#: (row, commit)
_Key = tuple[str, str]


def _runs(lines: Sequence[dict[str, Any]]) -> dict[_Key, list[Row]]:
    """All runs of each row by commit; the commits of a row stand beside each other."""
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
    """The median of a figure over the runs of a row, or the text of its last run."""
    found = [row[key] for row in rows if row.get(key) is not None]
    if not found:
        return ""
    if isinstance(found[-1], str):
        return str(found[-1])
    value = statistics.median(found)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _profiles(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The kernels of each row's last run."""
    for (name, commit), rows in _runs(lines).items():
        if rows[-1].get("kernels"):
            table = [(kernel, f"{ms:.3f}", calls) for kernel, ms, calls in rows[-1]["kernels"]]
            text = markdown_table((f"{name}: kernel", "ms", "calls"), table)
            yield f"<details><summary>{name}, {commit}</summary>\n\n{text}\n</details>\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print the tables."""
    began = psutil.Process().create_time() if arguments is None else time.time()
    find_benchmarks_in_processes()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.quick",
        description="Measure a GPU for speed work in one process; or print the tables.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the lines")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help="longest duration [%(default).0f]"
    )
    parser.add_argument("--items", default="", help="only these, such as A,C,D-124m")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run [cuda]"
    )
    parser.add_argument("--commit", default="", help="name of the commit [that of git]")
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="DIR", help="print the tables of these folders"
    )
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.report is None):
        parser.error("give --out DIR to measure, or --report DIR to print the tables")
    if options.report is not None:
        missing = [folder for folder in options.report if not (folder / LINES_NAME).is_file()]
        if missing:
            parser.error(f"{missing[0]} has no {LINES_NAME}: name the --out of an earlier call")
        print(report(options.report), end="")
        return
    names = [name for name in options.items.split(",") if name]
    known = [item.name for item in ITEMS]
    # "D" stands for D-124m and D-1b.
    chosen = [
        item for item in ITEMS if not names or {item.name, item.name.split("-")[0]} & {*names}
    ]
    for name in names:
        if not any(one == name or one.startswith(f"{name}-") for one in known):
            parser.error(f"no item {name}: {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} finds no CUDA GPU: --device cpu runs every item on the CPU"
        )
    bench = Bench(find_hardware(options.device), dry=options.device == "cpu")
    if not bench.dry:
        load_cache(options.out / CACHE_NAME)
    shared = facts(bench, options.commit)
    left = measure(chosen, bench, options.out, began + options.seconds, shared)
    print(f"left for the next call: {', '.join(left)}" if left else "all is measured")


if __name__ == "__main__":
    main()
