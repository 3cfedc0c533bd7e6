"""A rank of a test: steps of an exchange between the ranks, and something that goes wrong.

    python rank_driver.py PLAN [--resume]

PLAN is JSON: `folder`, where ranks leave files; `steps`; `timeout` in seconds; `fault`: what
happens (`kind`) on which `rank` after which `step` (-1 is before the ranks meet, 0 before the
first), and with `once` in the first start only; `fingerprints`, by rank; `pause`, in seconds,
after step 2; with `endless`, steps go on until a signal comes. SIGUSR1 raises an
error wherever the main thread is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from firstlight.console import say
from firstlight.errors import DataError, FirstlightError
from firstlight.parallel import (
    agree,
    all_reduce_sum,
    broadcast_object,
    find_world,
    gather_objects,
    process_group,
)

_stop = False


def _hear(_: int, __: FrameType | None) -> None:
    global _stop
    _stop = True


def _raise(*_: object) -> None:
    raise DataError("row 7 of shard 3 is damaged")


def _raise_unexpected() -> None:
    raise KeyError("nobody thought of this")


_FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "unexpected": _raise_unexpected,
    "exit": lambda: os._exit(3),
    # Longer than any test: the others are not in an exchange.
    "sleep": lambda: time.sleep(1000),
}


def _fault(plan: dict[str, Any], rank: int, step: int) -> None:
    for fault in plan.get("faults", ()):
        if fault["rank"] == rank and fault["step"] == step:
            mark = Path(plan["folder"], f"fault-{rank}-{step}")
            if not fault.get("once") or not mark.exists():
                mark.touch()
                _FAULTS[fault["kind"]]()


def _run(plan: dict[str, Any]) -> int:
    world = find_world()
    folder = Path(plan["folder"])
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    saved = folder / "saved"
    step = int(saved.read_text()) if "--resume" in sys.argv and saved.exists() else 0
    if world.rank == 0:
        say(f"progress: from step {step}")
    else:
        say(f"noise of rank {world.rank}")
    _fault(plan, world.rank, -1)
    fingerprint = plan.get("fingerprints", {}).get(str(world.rank), "")
    with process_group(world, torch.device("cpu"), plan["timeout"], fingerprint=fingerprint):
        _fault(plan, world.rank, 0)
        while step < plan["steps"]:
            step += 1
            total = all_reduce_sum(torch.tensor([world.rank + 1.0]))
            assert total.item() == world.size * (world.size + 1) / 2
            _fault(plan, world.rank, step)
            time.sleep(plan.get("pause", 0) if step == 2 else 0)
            if world.rank == 0:
                saved.write_text(str(step))
            if plan.get("endless"):
                step -= 1
                (folder / f"ready-{world.rank}").touch()
            if agree(_stop):
                return 75
        assert broadcast_object({"rank": world.rank}) == {"rank": 0}
        assert gather_objects(["x" * world.rank]) == [["x" * rank] for rank in range(world.size)]
    (folder / f"done-{world.rank}").touch()
    return 0


def main(plan: dict[str, Any]) -> int:
    """As the command line does: an error is one line, and an exit code."""
    signal.signal(signal.SIGTERM, _hear)
    signal.signal(signal.SIGINT, _hear)
    signal.signal(signal.SIGUSR1, _raise)
    torch.set_num_threads(1)
    try:
        return _run(plan)
    except FirstlightError as error:
        say(f"firstlight: error: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
