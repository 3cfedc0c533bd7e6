"""Forecasts of runs and advice, from a process of their own.

Whatever goes wrong there, a crash or an endless wait included, is a missing forecast and never
the end of a run; and what planning leaves in memory is not the run's. This module imports no
torch, so that the process can start, and import it, while the command line does the same.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from firstlight.errors import TrainingError

if TYPE_CHECKING:
    from firstlight.hardware.device import Hardware
    from firstlight.recipe import Recipe
    from firstlight.training.forecast import Forecast

_COMMAND = [sys.executable, "-P", "-m", "firstlight.planner.automatic"]

#: The most that a run waits for a forecast.
_MOST_SECONDS = 90.0


class RunForecaster:
    """Predicts the runs of this machine; see `training.forecast.Forecaster`. A context that ends
    the process with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RunForecaster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end()

    def start(self) -> None:
        """Start the process ahead of the first question."""
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )

    def forecast(self, recipe: Recipe, hardware: Hardware, processes: int) -> Forecast | None:
        """See `Forecaster`.

        Raises:
            TrainingError: the process failed, or took too long.
        """
        from firstlight.training.forecast import Forecast

        found = self._ask("forecast", recipe, hardware, processes)
        if found is None:
            return None
        rates = found["tokens_per_second"]
        return Forecast(**{**found, "tokens_per_second": tuple(rates) if rates else None})

    def advise(self, recipe: Recipe, hardware: Hardware, processes: int) -> str | None:
        """See `Forecaster`.

        Raises:
            TrainingError: the process failed, or took too long.
        """
        found = self._ask("advice", recipe, hardware, processes)
        return None if found is None else str(found)

    def _ask(self, what: str, recipe: Recipe, hardware: Hardware, processes: int) -> Any:
        """The answer, as JSON values. The process ends with it."""
        request = {
            "what": what,
            "recipe": recipe.model_dump(mode="json"),
            "device": str(hardware.device),
            "processes": processes,
        }
        # Other processes wait for this one, and take it for gone after their timeout.
        patience = min(_MOST_SECONDS, recipe.distributed.timeout_seconds / 2)
        if self._process is None:
            self.start()
        assert self._process is not None
        try:
            said, _ = self._process.communicate(json.dumps(request), timeout=patience)
            code = self._process.returncode
        except subprocess.TimeoutExpired:
            raise TrainingError(
                f"the process that predicts took more than {patience:.0f} s"
            ) from None
        finally:
            self._end()
        if code != 0:
            raise TrainingError(f"the process that predicts {_ending(code)}")
        return json.loads(said.splitlines()[-1])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was to be written has no reader now
                    pipe.close()
        process.wait()


def _ending(code: int) -> str:
    if code > 0:
        return f"failed (exit code {code})"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
