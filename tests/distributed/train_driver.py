"""`firstlight.train` in one process of a run. Prints each step's loss and the end of the run. With
`until`, the run gets SIGTERM after that step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import firstlight
import firstlight.training.loop
from firstlight.training import loop
from firstlight.training.checkpoints import captured
from firstlight.training.run import Run
from firstlight.training.start import open_run


def main(request: dict[str, Any]) -> None:
    torch.set_num_threads(1)

    def tell(record: Any) -> None:
        sys.stdout.write(json.dumps(dict(record)) + "\n")
        sys.stdout.flush()
        if record["step"] == request.get("until"):
            os.kill(os.getpid(), signal.SIGTERM)

    setattr(firstlight.training.loop, "draw_report", _note_report)  # noqa: B010 - mypy
    if "captured" in request:
        _capture_first(Path(request["captured"]))
    if "dies" in request and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        _die_at(**request["dies"])
    result = firstlight.train(
        request["recipe"],
        # The launcher adds this option when it restarts a run.
        resume=request.get("resume", False) or "--resume" in sys.argv,
        init_from=request.get("init_from"),
        on_step=tell,
    )
    sys.stdout.write(json.dumps({"end": result.step, "stopped": result.stopped_by}) + "\n")


def _note_report(run: Path) -> None:
    """Record the process that draws the report, without drawing it: that would take longer than
    these runs.
    """
    with open(run / "drawn-by", "a", encoding="utf-8") as file:
        file.write(os.environ.get("RANK", "0"))


def _die_at(rank: int, step: int, how: str) -> None:
    """Make one rank exit or hang when it is about to take a step."""
    plain = Run.begin_step

    def stepped(run: Run) -> float:
        if run.engine.world.rank == rank and run.state.step == step - 1:
            if how == "error":
                raise RuntimeError("the ceiling fell down")
            os.kill(os.getpid(), signal.Signals[how])
        return plain(run)

    Run.begin_step = stepped  # type: ignore[assignment]


def _capture_first(folder: Path) -> None:
    """Write the loaded state to a file before the first step, like a checkpoint."""

    @contextlib.contextmanager
    def opened(run: Run, *, shown: bool) -> Iterator[None]:
        with open_run(run, shown=shown):
            state = captured(run)
            if run.engine.is_main:
                folder.mkdir()
                for name, tensors in (("model", state.model), ("optimizer", state.optimizer)):
                    own = {key: tensor.clone() for key, tensor in tensors.items()}
                    safetensors.torch.save_file(own, folder / f"{name}.safetensors")
                loader = json.dumps(state.trainer_state["loader"])
                (folder / "loader.json").write_text(loader, encoding="utf-8")
            yield

    loop.open_run = opened  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
