"""Setup of the GPU tests: their device, skipped tests by reason, and broken CUDA contexts.

They run on CUDA, or with FIRSTLIGHT_TEST_DEVICE=cpu on the CPU, where `cuda_only(why)` skips a test
whose method a CPU does not support. `needs(package, ...)` skips a test whose packages are missing.
Several processes share one GPU: a test that fills its memory first sets a limit
(`torch.cuda.set_per_process_memory_fraction`). FIRSTLIGHT_TEST_LOG=FILE appends each outcome to a
file as soon as it is known.

`--record FILE` runs only the tests that have not passed with the current source according to that
file, failed and new ones first, and writes each outcome to it; `--all` runs all. `--within SECONDS`
does not start a test after that time, and the next call continues.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from firstlight.data.prepare import prepare
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.methods import precision
from firstlight.tokenizer import train_tokenizer

from .record import Record, first_things_first

DEVICE = os.environ.get("FIRSTLIGHT_TEST_DEVICE", "cuda")
_ON_CUDA = torch.device(DEVICE).type == "cuda"
_FOLDER = Path(__file__).resolve().parent


_START = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the record."""
    group = parser.getgroup("tests on a GPU")
    group.addoption("--record", type=Path, metavar="FILE", help="run what has not passed yet")
    group.addoption("--all", action="store_true", help="run what has passed by --record, too")
    group.addoption("--within", type=float, metavar="SECONDS", help="begin no test later")


def _record(config: pytest.Config) -> Record | None:
    path = config.getoption("--record", None)
    return None if path is None else Record(path, DEVICE)


def pytest_configure(config: pytest.Config) -> None:
    """Report in one line that there is no GPU, before tests fail because of it."""
    record = _record(config)
    if record is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Outcomes(record))
    # cuBLAS reads it when it starts; without it, torch's deterministic mode rejects matrix
    # products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.option.markexpr == "gpu" and _ON_CUDA and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"the tests of the mark gpu need a CUDA GPU, and torch {torch.__version__} finds none: "
            "run them on a machine with one, or `make test-gpu DEVICE=cpu` for those that a CPU "
            "can run"
        )
    if config.option.markexpr == "gpu" and _ON_CUDA:
        # Imports during test collection also warn: for example sentencepiece, imported by
        # transformers, on Python 3.12. See `pytest_collection_modifyitems` for the tests
        # themselves.
        config.addinivalue_line("filterwarnings", "default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test of this folder as `gpu`, skip tests that this machine does not support, and
    omit tests that have passed according to the record.
    """
    record = _record(config)
    if record is not None:
        passed = [item for item in items if record.has_passed(item.nodeid)]
        if not config.getoption("--all"):
            config.hook.pytest_deselected(items=passed)
            items[:] = [item for item in items if item not in passed]
        workers = getattr(config, "workerinput", {}).get("workercount", 1)
        urgent = [record.has_failed(item.nodeid) for item in items]
        items[:] = first_things_first(items, urgent, workers)
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker(pytest.mark.gpu)
            if reason := _reason_to_skip(item):
                item.add_marker(pytest.mark.skip(reason=reason))
            if _ON_CUDA:
                # Other library versions than the developers' may give other warnings, which do not
                # affect the results: pytest's summary shows them.
                item.add_marker(pytest.mark.filterwarnings("default"))


def _reason_to_skip(item: pytest.Item) -> str | None:
    packages = [name for mark in item.iter_markers("needs") for name in mark.args]
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if _ON_CUDA:
        return None
    return next((f"CUDA only: {mark.args[0]}" for mark in item.iter_markers("cuda_only")), None)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Succeed if every test has already passed according to the record."""
    nothing_left = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if nothing_left and session.config.getoption("--record", None) is not None:
        session.exitstatus = pytest.ExitCode.OK


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would start after `--within`."""
    seconds = item.config.getoption("--within", None)
    if seconds is not None and time.monotonic() - _START > seconds:
        pytest.skip(f"not begun within {seconds:.0f} s")


class _Outcomes:
    """Writes each outcome to the record, in the only process that has all of them."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.when == "call" and report.passed):
            self._record.note(report.nodeid, passed=report.passed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append each outcome to the file FIRSTLIGHT_TEST_LOG, if that is set: pytest prints failures
    only at its end, and the machine may stop before.
    """
    path = os.environ.get("FIRSTLIGHT_TEST_LOG")
    if not path or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or not report.passed:
        with Path(path).open("a", encoding="utf-8") as log:
            log.write(f"{report.outcome} {report.duration:.1f} s {report.nodeid}\n")
            if report.failed:
                log.write(f"{report.longreprtext}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of skipped tests, and their names by reason."""
    names: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        if report.nodeid.startswith("tests/gpu/"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            names.setdefault(reason, []).append(report.nodeid.removeprefix("tests/gpu/"))
    if names:
        total = sum(map(len, names.values()))
        terminalreporter.section(f"{total} skipped on {DEVICE}, by reason")
        for reason, skipped in sorted(names.items()):
            terminalreporter.write_line(f"{len(skipped):4} {reason}")
            for name in sorted(skipped):
                terminalreporter.write_line(f"       {name}")


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    """The device under test and its properties."""
    return find_hardware(DEVICE)


@pytest.fixture(scope="session")
def device(hardware: Hardware) -> torch.device:
    """The device under test."""
    return hardware.device


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory, corpus: Path, texts: list[str]) -> Path:
    """Prepare the corpus with 300 tokens, which is not a multiple of 64: the data of runs of
    `tests/methods`.
    """
    folder = tmp_path_factory.mktemp("rows") / "data"
    prepare([corpus], train_tokenizer(texts, 300), folder)
    return folder


@pytest.fixture(autouse=True)
def _fp8_in_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the minimum size for fp8, because the layers of tests are smaller than those for which
    fp8 is worthwhile.
    """
    monkeypatch.setattr(precision, "FP8_LAYER_WEIGHTS", 1)


@pytest.fixture(autouse=True)
def _own_context() -> Iterator[None]:
    """Start each test with free GPU memory, and attribute a failed kernel to its own test.

    After an illegal access or a device-side assertion every later call of a process fails. Such a
    process ends: pytest-xdist reports this test as the one that crashed, and starts another
    process for those that follow.
    """
    yield
    if not (_ON_CUDA and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"the CUDA context is lost, and with it all later tests: {error}", 1)
    gc.collect()
    torch.cuda.empty_cache()
