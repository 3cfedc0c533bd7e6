"""What all tests share: tiny corpora and recipes made here, and the optional shared material."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import forked
from builders import make_texts
from firstlight.data.prepare import prepare
from firstlight.tokenizer import Tokenizer, train_tokenizer
from waiting import processes_waited_for

# The same examples everywhere, and no limit on their time: other work may share the machine.
settings.register_profile("firstlight", deadline=None, derandomize=True)
settings.load_profile("firstlight")

_SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Machines with a GPU and no package registry may lack the plugin that pyproject.toml's
    `--timeout` is for: there tests have no time limit."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addoption("--timeout", help="no effect: pytest-timeout is not installed")


def pytest_configure() -> None:
    """A script's shell has what it starts in the background ignore SIGINT, which tests send."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and texts beside the checkout; skips where it is absent."""
    if not (_SHARED / "models").is_dir():
        pytest.skip("the shared material is not on this machine")
    return _SHARED


@pytest.fixture(scope="module")
def forked_processes() -> Iterator[None]:
    """The Python processes that a file's tests start are forks of one that has imported torch and
    firstlight: `pytestmark = pytest.mark.usefixtures("forked_processes")`. See forked.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.Popen)
        yield


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file with `forked_processes`, for a test of imports or of start-up."""
    monkeypatch.setattr(subprocess, "Popen", forked.RealPopen)


@pytest.fixture(scope="session", autouse=True)
def no_report() -> Iterator[None]:
    """A run's report is drawn in the tests of reports alone, and where `draw_report` is put back:
    that takes longer than most runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstlight.training.loop.draw_report", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_flush() -> Iterator[None]:
    """Files of the process that tests are not forced to the disk, which runs would wait for longer
    than they compute. Processes that it starts do it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_compile_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times of compiling are neither those of earlier runs on this machine nor kept for later ones.
    The other files of the cache, which take long to build, stay."""
    folder = tmp_path_factory.mktemp("compile-times")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstlight.hardware.compiling.cache_folder", lambda: folder)
        yield


class NoForecast:
    """A run's forecaster that forecasts nothing; see `planner.plan.processes.RunForecaster`."""

    def __enter__(self) -> NoForecast:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None:
        """Starts no process."""

    def forecast(self, *_: object) -> None:
        """No forecast."""

    def advise(self, *_: object) -> None:
        """No advice."""


@pytest.fixture(scope="session", autouse=True)
def no_forecast() -> Iterator[None]:
    """The command line forecasts runs in the tests of forecasts alone: the process that predicts
    takes longer than most runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstlight.planner.plan.processes.RunForecaster", NoForecast)
        yield


#: How many modules there were when what they hold was set aside; see `_no_search_of_modules`.
_set_aside = [0]


@pytest.fixture(autouse=True)
def _no_search_of_modules() -> None:
    """Python's garbage collector leaves alone what modules and collected tests hold: to look
    through these millions of objects took a second each time, and runs ask for that."""
    if len(sys.modules) > _set_aside[0] + 100:
        gc.collect()
        gc.freeze()
        _set_aside[0] = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def _no_count_of_frozen_objects() -> Iterator[None]:
    """Every run asks whether objects are frozen, and Python answers by counting all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.get_freeze_count", lambda: 1)
        yield


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """120 small documents."""
    return make_texts(120)


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of 320 tokens trained on `texts`."""
    return train_tokenizer(texts, 320)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """`texts` as a folder of .txt files."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Tokenizer) -> Path:
    """The corpus prepared: about 8,000 training tokens, a tenth held out."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    prepare([corpus], tokenizer, folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, data: Path) -> dict[str, Any]:
    """A run of 12 steps of a tiny Llama, not evaluated before the first; tests change what they are
    about."""
    return {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 12, "warmup_steps": 2},
        "evaluation": {"every_steps": 6, "max_rows": 4, "sample_tokens": 4, "on_start": False},
        "checkpoint": {"every_steps": 4},
    }


def _say_who_was_waited_for() -> Generator[None, Any, Any]:
    """Add to the error of a time that is over what the processes of the test said until then."""
    try:
        return (yield)
    except (subprocess.TimeoutExpired, TimeoutError, pytest.fail.Exception) as error:
        if not isinstance(error, pytest.fail.Exception) or "Timeout" in str(error):
            for words in processes_waited_for(error):
                error.add_note(words)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """See `_say_who_was_waited_for`."""
    return (yield from _say_who_was_waited_for())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """See `_say_who_was_waited_for`."""
    return (yield from _say_who_was_waited_for())


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Replace lone surrogates in a test's report: xdist sends reports as UTF-8 and ends the whole
    session, without naming the test, where it can't."""
    return _without_surrogates((yield))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_surrogates(held) for held in value)
    return value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many cases were tried: `record_property("cases", (what, how many))`."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "cases":
                counts[value[0]] += value[1]
    if counts:
        terminalreporter.section("faults")
        for what, number in sorted(counts.items()):
            terminalreporter.write_line(f"{number:7,} {what}")


@pytest.fixture(autouse=True)
def _known_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that the server draws without a seed are the same each time: one of them may meet an
    end token before what a test waits for."""
    if request.path.parent.name == "serving":
        seeds = itertools.count(1)
        monkeypatch.setattr(
            "firstlight.generation.continuation.secrets.randbits", lambda _: next(seeds)
        )
