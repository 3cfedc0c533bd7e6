"""Parts of `python -m benchmarks gpu`, and the pages that are made of their results.

How a part is declared: a module `NAME.py` with one `Part`, listed in `bench.py`.

    _MODULE = "benchmarks.gpu.NAME"          # or a module that measures already

    def _rows(machine: BenchMachine) -> list[Row]:
        if machine.dry:
            return [Row("tiny", _MODULE, {"device": "cpu", ...}, seconds=8)]
        return [Row("bert-large, batch 4", _MODULE, {"device": "cuda", ...}, seconds=40, value=2)]

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        ...
        return {"tokens_per_second": 1e5, "line": "100,000 tokens/s"}

    def _page(found: Findings) -> Page:
        names = [row.name for row in found.measured("NAME")]
        rows = [(name, f"{found.median('NAME', name, 'x'):.0f}") for name in names]
        table = markdown_table(("row", "x"), rows)
        return Page(summary="- x is ...", text=table, pictures={"gpu-NAME.png": draw_bars(...)})

    PART = Part("NAME", "Title of the page", "Subject of the figures.", _rows, _page)

Rows (`runner.Row`):

- `seconds` includes the start of the process, which takes about 10 s with torch and CUDA.
- `value` is the priority across all parts, lowest first: 1 for the few figures without which the
  page says nothing (all rows of 1 together take at most 4 minutes), 2 for the main figures, 3 to 5
  for the rest of them, 6 and more for figures that could be left out.
- A row that the machine can't run has `skip=reason` (`BenchMachine.lacks`, `.capability`). An error
  (FirstlightError) or a crash of a measurement is recorded as the row's result.
- `_rows` must depend only on the machine's facts: it is called again when the pages are written,
  which may happen on another machine.
- A row of a dry run takes at most 10 s on two cores, and runs the same code.

Measurements: the value of the key "line" of a result is printed while the benchmark runs. Results
are kept in one JSON file of a few MB for all rows, so they must not have long lists. Measurements
of one call share files (a corpus, a model) in the folder request["work"]; each makes missing files.

`_page` is only called when at least one row of the part has a result, and must work with any subset
of its rows. `bench.py` adds the title, the machine, the command, and the rows without a figure
with their reasons. The page refers to pictures as `../images/gpu-NAME.png`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from firstlight.bench.display import Panel, draw_panels
from firstlight.bench.runner import RowOutcome
from firstlight.console import say
from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import read_json, write_json
from firstlight.hardware.device import find_hardware
from firstlight.hardware.environment import usable_cpus
from firstlight.hardware.fresh_process import error_of
from firstlight.hardware.gpus import GPU, find_gpu

RESULTS_NAME = "results.json"

#: Seconds at the end of a call in which nothing is measured.
_MARGIN = 5.0

#: Version of the format of results.json.
_FORMAT = 1

#: Outcomes by name of the part and name of the row.
Outcomes = dict[str, dict[str, RowOutcome]]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: name in tables, unique within its part.
        module: module that measures; see `process.ask`.
        request: JSON values for the measurement. Two are added: "work", a folder for files that
            rows of the same call share, and "keep", the folder of the results, for small files.
        seconds: upper estimate of the duration, with the start of the process; three times as much
            and a minute is the time limit.
        value: priority across all parts; rows with lower values are measured first.
        skip: the reason why this machine can't measure the row; "" if it can.
    """

    name: str
    module: str
    request: Mapping[str, Any]
    seconds: float
    value: int = 5
    skip: str = ""

    @property
    def digest(self) -> str:
        """Hash of module and request: a row is measured again if they have changed."""
        content = json.dumps([self.module, self.request], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass
class Results:
    """The contents of results.json.

    Attributes:
        folder: folder of the file.
        machine: facts of the machine that measured; {} before the first call.
        calls: "date", "seconds" and "turns" (rows that were measured) of each call.
        outcomes: outcomes of all rows that were tried, by part and row.
    """

    folder: Path
    machine: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The results in a folder; empty results if it has no results.json.

        Raises:
            InputError: the file has another format.
        """
        path = folder / RESULTS_NAME
        if not path.exists():
            return cls(folder)
        content = read_json(path)
        try:
            if content["format"] != _FORMAT:
                raise ValueError
            outcomes = {
                part: {name: RowOutcome(**entry) for name, entry in rows.items()}
                for part, rows in content["outcomes"].items()
            }
            return cls(folder, dict(content["machine"]), list(content["calls"]), outcomes)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{path} is not a file of results of this version: choose another folder"
            ) from None

    def write(self) -> None:
        """Replace results.json.

        Raises:
            StorageError: a file system error.
        """
        content = asdict(self)
        write_json(content.pop("folder") / RESULTS_NAME, {"format": _FORMAT, **content})

    def outcome(self, part: str, row: Row, *, retry: bool = False) -> RowOutcome:
        """The row's outcome so far; a new one if the row's digest has changed, or if `retry` is
        True and it has failed."""
        rows = self.outcomes.setdefault(part, {})
        found = rows.get(row.name)
        if found is None or found.digest != row.digest or (retry and found.problem):
            found = rows[row.name] = RowOutcome(row.digest)
        return found


#: (row, request, time limit in seconds) -> the measurement's result; see `process.ask`.
Measure = Callable[[Row, dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """One call of `benchmarks gpu`.

    Attributes:
        minutes: duration of the call.
        work: folder for files that rows of the call share.
        measure: function that runs a measurement.
        begun: time at which the call began, by `clock`; None is now.
        clock: monotonic clock in seconds.
    """

    minutes: float
    work: Path
    measure: Measure
    begun: float | None = None
    clock: Callable[[], float] = time.monotonic


def run_rows(
    parts: Mapping[str, Sequence[Row]], results: Results, call: Call
) -> list[tuple[str, Row]]:
    """Measure the rows that have no result yet, by their value, as far as the call's time allows.

    Returns:
        The rows that are left for the next call, each with the name of its part.

    Raises:
        StorageError: a file system error.
    """
    begun = call.clock() if call.begun is None else call.begun
    end = begun + 60 * call.minutes - _MARGIN
    entry = results.calls[-1] if results.calls else {}
    rows = [(part, row) for part, these in parts.items() for row in these if not row.skip]
    rows.sort(key=lambda one: one[1].value)
    waiting = [(part, row) for part, row in rows if not results.outcome(part, row).is_done]
    left_over = []
    for number, (part, row) in enumerate(waiting, start=1):
        outcome, left = results.outcome(part, row), end - call.clock()
        expected = outcome.expected_seconds(row.seconds)
        if expected > left:
            left_over.append((part, row))
            continue
        clock = f"{max(0, int(left)) // 60}:{max(0, int(left)) % 60:02d} left"
        say(f"[{number}/{len(waiting)}] {part}: {row.name}: about {expected:.0f} s; {clock}")
        cut = _measure(row, outcome, results, call, left=left)
        if cut:
            left_over.append((part, row))
        entry["seconds"] = round(call.clock() - begun, 1)
        entry["turns"] = entry.get("turns", 0) + (not cut)
        results.write()
    return left_over


def _measure(row: Row, outcome: RowOutcome, results: Results, call: Call, *, left: float) -> bool:
    """Measure a row; True if the end of the call stopped it."""
    limit = 3 * row.seconds + 60
    request = {**row.request, "work": str(call.work), "keep": str(results.folder)}
    start = call.clock()
    found = call.measure(row, request, min(limit, left))
    seconds = round(call.clock() - start, 2)
    if found.get("error", {}).get("type") == "TimeoutError" and limit > left:
        outcome.cut_after = seconds
        say("    not done at the end of this call: it is tried again in the next")
        return True
    try:
        json.dumps(found, allow_nan=False)  # results.json can't hold NaN or infinity, either
    except ValueError:
        found = error_of("Failed", "a figure of its result is not a finite number")
    outcome.add(found, seconds)
    problem = f"failed: {outcome.problem}" if outcome.problem else found.get("line", "")
    say(f"    {seconds:.0f} s: {problem}")
    return False


_GIB = 2**30


@dataclass(frozen=True)
class Page:
    """The page of a part's results.

    Attributes:
        summary: Markdown for the part's section in docs/gpu.md: the main figures and their goals,
            in a few lines.
        text: Markdown of the part's own page, below the title and the facts of the machine.
        pictures: PNG files by name.
    """

    summary: str
    text: str
    pictures: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """Results of all parts.

    Attributes:
        machine: the machine that measured.
        outcomes: outcomes by name of the part and name of the row; a row that was never tried is
            missing.
        rows: rows by name of the part, in the order of their declaration.
        folder: folder of the results, into which pages may write files; None writes nothing.
    """

    machine: BenchMachine
    outcomes: Outcomes
    rows: Mapping[str, Sequence[Row]]
    folder: Path | None = None

    def outcome(self, part: str, row: str) -> RowOutcome:
        """The outcome of a row; an empty one if the row has no outcome."""
        return self.outcomes.get(part, {}).get(row, RowOutcome())

    def measured(self, part: str) -> list[Row]:
        """The part's rows with at least one result."""
        return [row for row in self.rows.get(part, ()) if self.outcome(part, row.name).runs]

    def median(self, part: str, row: str, key: str) -> float | None:
        """The median of a number over a row's turns; None if the row has no result."""
        return self.outcome(part, row).median(key)


@dataclass(frozen=True)
class Part:
    """One part of the benchmark; see the module's docstring.

    Attributes:
        name: name for `--parts`, and in the page's file name.
        title: heading of the page.
        about: subject of the figures, in Markdown: a sentence or two.
        rows: function from a machine to its rows.
        page: function from the results to the page.
    """

    name: str
    title: str
    about: str
    rows: Callable[[BenchMachine], Sequence[Row]]
    page: Callable[[Findings], Page]


#: Packages whose versions matter for figures.
_PACKAGES = (
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "torchao",
    "tokenizers",
    "safetensors",
    "nvidia-ml-py",
)


@dataclass(frozen=True)
class BenchMachine:
    """Facts of a machine, as JSON values.

    Attributes:
        device: "cuda", or "cpu" in a dry run.
        dry: True for a dry run, with tiny models on the CPU: its figures have no meaning.
        name: name of the GPU as the driver reports it; name of the CPU in a dry run.
        memory_bytes: memory of the device.
        bf16: True if the device multiplies bf16 in hardware.
        capability: CUDA's compute capability; (0, 0) for a CPU.
        multiprocessors: number of the GPU's multiprocessors; 0 for a CPU.
        driver: version of the GPU's driver; "" if unknown.
        cuda: version of CUDA that torch was built with; "" if torch was built without CUDA.
        torch: version of torch.
        python: version of Python.
        packages: versions by name of those packages of `_PACKAGES` that are installed.
        cpu: name of the CPU.
        cpus: number of cores that this process may use.
        cpu_memory_bytes: main memory of the machine.
    """

    device: str
    dry: bool
    name: str
    memory_bytes: int
    bf16: bool
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    cpus: int = 1
    cpu_memory_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return asdict(self) | {"capability": list(self.capability)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BenchMachine:
        """The inverse of `to_json`."""
        first, second = values["capability"]
        return cls(**{**values, "capability": (first, second)})

    @property
    def gpu(self) -> GPU | None:
        """The GPU's data sheet; None for a GPU that is not in the table, and for a CPU."""
        if self.device != "cuda":
            return None
        with contextlib.suppress(ConfigError):
            return find_gpu(self.name, self.memory_bytes)
        return None

    def lacks(self, *packages: str) -> str:
        """The reason to skip a row that needs `packages`, the missing ones; "" if all are there."""
        missing = [name for name in packages if name not in self.packages]
        return f"{' and '.join(missing)} not installed" if missing else ""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Read the facts of this machine.

    Args:
        request: "dry", True for the facts of a dry run.

    Returns:
        `BenchMachine.to_json`.

    Raises:
        ConfigError: there is no CUDA GPU, and the run is not dry.
    """
    dry = bool(request["dry"])
    if not dry and not torch.cuda.is_available():
        raise ConfigError(
            "benchmarks gpu measures a CUDA GPU, and torch sees none on this machine: --dry runs "
            "every part on tiny models on the CPU"
        )
    hardware, cpu = find_hardware("cpu" if dry else "cuda"), find_hardware("cpu")
    on_gpu = hardware.device.type == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    return BenchMachine(
        device=hardware.device.type,
        dry=dry,
        name=hardware.name,
        memory_bytes=hardware.memory_bytes,
        bf16=hardware.bf16,
        capability=hardware.capability or (0, 0),
        multiprocessors=properties.multi_processor_count if properties else 0,
        driver=driver_version() if on_gpu else "",
        cuda=torch.version.cuda or "",
        torch=str(torch.__version__),
        python=platform.python_version(),
        packages=_packages(),
        cpu=cpu.name,
        cpus=usable_cpus(),
        cpu_memory_bytes=psutil.virtual_memory().total,
    ).to_json()


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def driver_version() -> str:
    """The driver's version from NVML, or from nvidia-smi if NVML fails; "" if both fail."""
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


def draw_bars(
    title: str,
    xlabel: str,
    bars: Sequence[tuple[str, float]],
    line: tuple[str, float] | None = None,
) -> bytes:
    """A PNG of horizontal bars.

    Args:
        title: heading of the picture.
        xlabel: quantity and unit.
        bars: name and value of each bar, from the top.
        line: name and value of a vertical line, such as a goal or a ceiling.
    """
    names, values = [name for name, _ in bars], [value for _, value in bars]
    return draw_panels(title, [[Panel(xlabel, names, values, line=line)]])
