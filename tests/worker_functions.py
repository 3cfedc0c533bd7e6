"""Functions that tests have processes of their own call, which import this module by its name."""

from __future__ import annotations

import os
import weakref

from firstlight.errors import ConfigError, MissingDependencyError


def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def refused(number: int) -> int:
    if number:
        raise ConfigError(f"{number} can't be")
    return number


class Cycle:
    """Needs the garbage collector."""

    def __init__(self) -> None:
        self.own = self


CYCLES: weakref.WeakSet[Cycle] = weakref.WeakSet()


def cycles_alive(_: int) -> int:
    CYCLES.add(Cycle())
    return len(CYCLES)


class StubbornError(Exception):
    """One that can't be sent."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")
        self.held = lambda: None


class ForgetfulError(Exception):
    """One that can be sent and not made anew from what was."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} or {other}")


def stubborn(number: int) -> int:
    raise StubbornError(number, 2) if number == 1 else ForgetfulError(number, 2)


def lacking(number: int) -> int:
    raise MissingDependencyError("x", "y", f"number {number}")


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
