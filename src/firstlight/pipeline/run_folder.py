"""The run folder of a run on texts: which one it is, and what it remembers for a later call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError
from firstlight.files.atomic import make_folder, write_json
from firstlight.pipeline.plan import Request, run_name
from firstlight.pipeline.scan import Scan

#: In the run folder: what the run was made for.
STATE_NAME = "pipeline.json"
#: In the run folder: tokenizer and shards.
DATA_FOLDER = "data"
#: The name of a run's recipe; the module that defines it imports torch.
RECIPE_NAME = "recipe.yaml"


def place_of_run(
    request: Request, scan: Scan, run_dir: str | Path | None
) -> tuple[Path, dict[str, Any]]:
    """The run folder, and what it remembers of an earlier call; {} where it is new.

    Raises:
        ConfigError: the folder that was asked for has another run.
    """
    given = run_dir or request.fixed.get("run.dir")
    base = Path(given or Path("runs") / run_name(request.inputs)).expanduser()
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.is_dir() or not any(folder.iterdir()):
            return folder, {}
        state = read_state(folder)
        if state.get("request") == remembered(request) and (
            state.get("content_key") == scan.facts.content_key
        ):
            return folder, state
        if given:
            raise ConfigError(
                f"{folder} has a run of other texts or options: choose another --run.dir, or "
                "leave it out"
            )
        number += 1


def read_state(folder: Path) -> dict[str, Any]:
    """What a run folder remembers of the texts and options that it was made for; {} if nothing."""
    try:
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def remembered(request: Request) -> dict[str, Any]:
    """The options that decide whether a second call means the same run, as JSON values."""
    overrides = [list(one) for one in request.overrides if one[0] != "run.dir"]
    kept = {name: getattr(request, name) for name in ("seconds", "tokens", "steps", "size")}
    return {**kept, "overrides": overrides}


def remember(folder: Path, state: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Write what a later call has to know into the run folder; return all of it.

    Raises:
        StorageError: the disk refuses.
    """
    state = {**state, **values}
    make_folder(folder)
    write_json(folder / STATE_NAME, state)
    return state
