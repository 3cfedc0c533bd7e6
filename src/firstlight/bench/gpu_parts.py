"""Parts of `firstlight bench gpu`, and the pages that are made of their results.

How a part is declared: a module `bench/gpu_NAME.py` with one `Part`, listed in `bench/gpu.py`.

    _MODULE = "firstlight.bench.gpu_NAME"          # or a module that measures already

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

Rows (`runner.Row`): `seconds` counts the start of the process (about 10 s with torch and CUDA).
`value` is their place in the order across all parts: 1 the few figures without which the page says
nothing (all rows of 1 together in at most 4 minutes), 2 the main figures, 3 to 5 the rest of them,
6 and more what could be missing. Rows that compare with each other have the same value and turns:
then they take turns. Turns after the first come with the rows of the next value (those of 1 at
once). What a machine can't run gets `skip=reason` (`BenchMachine.lacks`,
`.capability`); a refusal (FirstlightError) or a crash of a measurement is recorded as the row's.
`_rows` depends on the machine's facts alone: it is called again to make the pages, on another
machine. A dry row takes at most 10 s on two cores, and goes through the same code.

Measurements: the last key "line" of a result is said while the benchmark runs. Results are kept
in one JSON file of a few MB for all rows: no long lists. request["work"] is a folder for files that
further rows of the same call can use (a corpus, a model): a row makes missing files itself.

`_page` is only called when at least one row of the part has a result, and must live with any
subset of its rows. The frame adds the title, the machine, the command, and the rows that have no
figure with their reasons. Pictures are referred to as `../images/gpu-NAME.png`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from firstlight.bench.runner import Outcomes, Row, RowOutcome
from firstlight.errors import ConfigError
from firstlight.hardware.device import find_hardware
from firstlight.hardware.environment import usable_cpus
from firstlight.hardware.gpus import GPU, find_gpu

_GIB = 2**30


@dataclass(frozen=True)
class Page:
    """The page of a part's results.

    Attributes:
        summary: Markdown for the part's section in docs/gpu.md: the main figures beside their
            goals, in a few lines.
        text: Markdown of the part's own page, below its head.
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
        outcomes: outcomes of each part's rows, by name; rows that were never tried have none.
        rows: each part's rows, in the order of their declaration.
        folder: the folder of the results; None writes nothing there.
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
    """One part of the benchmark; see the module's head.

    Attributes:
        name: name for `--parts`, and in the page's file name.
        title: heading of the page.
        about: subject of the figures, in Markdown: a sentence or two.
        rows: the rows for a machine.
        page: the page of results.
    """

    name: str
    title: str
    about: str
    rows: Callable[[BenchMachine], Sequence[Row]]
    page: Callable[[Findings], Page]


#: Packages whose versions matter for figures.
_PACKAGES = (
    *("triton", "transformers", "accelerate", "peft", "bitsandbytes", "torchao"),
    *("tokenizers", "safetensors", "nvidia-ml-py"),
)


@dataclass(frozen=True)
class BenchMachine:
    """Facts of a machine, as JSON values.

    Attributes:
        device: "cuda", or "cpu" of a dry run.
        dry: tiny models on the CPU: figures without meaning.
        name: the GPU's, by its driver; the CPU's of a dry run.
        memory_bytes: memory of the device.
        bf16: True if the device multiplies bf16 in hardware.
        capability: CUDA's compute capability; (0, 0) of a CPU.
        multiprocessors: number of the GPU's multiprocessors; 0 of a CPU.
        driver: the GPU driver's version; "" where it is not known.
        cuda: version of CUDA that torch was built with; "" without.
        torch: its version.
        python: its version.
        packages: versions of installed packages by name.
        cpu: the CPU's name.
        cpus: cores that this process may use.
        cpu_memory_bytes: memory of the machine.
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
        """The GPU's data sheet; None where the table doesn't have it, and of a CPU."""
        if self.device != "cuda":
            return None
        with contextlib.suppress(ConfigError):
            return find_gpu(self.name, self.memory_bytes)
        return None

    def lacks(self, *packages: str) -> str:
        """A reason to skip a row that needs packages: those that are missing; "" if none is."""
        missing = [name for name in packages if name not in self.packages]
        return f"{' and '.join(missing)} not installed" if missing else ""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look at the machine.

    Returns:
        `BenchMachine.to_json`.

    Raises:
        ConfigError: there is no CUDA GPU, and the run is not dry.
    """
    dry = bool(request["dry"])
    if not dry and not torch.cuda.is_available():
        raise ConfigError(
            "bench gpu measures a CUDA GPU, and torch sees none on this machine: --dry runs every "
            "part on tiny models on the CPU"
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
        driver=_driver_version() if on_gpu else "",
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


def _driver_version() -> str:
    """By NVML, or by nvidia-smi where nvidia-ml-py is not installed."""
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
