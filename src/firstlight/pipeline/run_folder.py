"""One call of `train_texts`: its run folder, the state that it saves there for later calls, and its
time."""

from __future__ import annotations

import json
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from firstlight.errors import ConfigError
from firstlight.files.atomic import make_folder, storage_errors, write_file, write_json
from firstlight.pipeline.chosen import Choices
from firstlight.pipeline.facts import Length
from firstlight.pipeline.plan import Request, run_name, time_text

if TYPE_CHECKING:
    from firstlight.recipe import Recipe

#: File in the run folder with the run's inputs and options, and the state of its preparation.
STATE_NAME = "pipeline.json"
#: Folder in the run folder with tokenizer and shards.
DATA_FOLDER = "data"
#: Lock file in the run folder, locked during a call of `train_texts`.
LOCK_NAME = ".pipeline.lock"
#: File name of a run's recipe. Repeated here, because the module that defines it imports torch.
RECIPE_NAME = "recipe.yaml"
#: Seconds of the budget that are reserved for starting the run and for its report.
_RESERVED_SECONDS = 4.0
#: Fewest seconds of a training: a shorter one is not worth its start.
_LEAST_SECONDS = 10.0
#: Width of comment lines in the recipe, in characters.
_WIDTH = 100


class RunCall:
    """One call of `train_texts`: its run folder, its time, and its messages.

    Args:
        folder: the run folder.
        began: `time.time()` from which the budget counts.
        tell: function that is called with each message for the user.
        progress: show progress bars.
        on_step: called with each step's metrics; see `train`.

    Attributes:
        state: the contents of the folder's state file (`STATE_NAME`).
        choices: all settings, after the recipe is written; None for a resumed run.
    """

    def __init__(
        self,
        folder: Path,
        began: float,
        tell: Callable[[str], None],
        *,
        progress: bool,
        on_step: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.folder, self.began, self.tell, self.progress = folder, began, tell, progress
        self.on_step = on_step
        self.state = read_state(folder)
        self.choices: Choices | None = None

    def remember(self, **values: Any) -> None:
        """Add values to the state, and write it to the run folder for later calls.

        Raises:
            StorageError: a file system error.
        """
        self.state |= values
        make_folder(self.folder)
        write_json(self.folder / STATE_NAME, self.state)

    @property
    def is_prepared(self) -> bool:
        """True if the run's data are prepared, here or in another run folder."""
        return self.state.get("data") is not None

    def forget(self) -> None:
        """Delete the state of a run that prepared nothing, so that no folder is left of it."""
        if not self.is_prepared:
            self.state = {}
            with storage_errors(self.folder):
                (self.folder / STATE_NAME).unlink(missing_ok=True)

    def length(self, request: Request) -> Length:
        """The length of the training loop. For a time budget it is the time that remains now,
        without the seconds that are reserved for the other parts of the command.

        Raises:
            ConfigError: less than `_LEAST_SECONDS` remain.
        """
        if request.seconds is None:
            return Length(None, request.tokens, request.steps)
        taken = time.time() - self.began
        left = request.seconds - taken - _RESERVED_SECONDS
        if left < _LEAST_SECONDS:
            again = ", or call it again, which uses the prepared texts"
            raise ConfigError(
                f"the budget of {time_text(request.seconds)} is too short: reading and preparing "
                f"the texts has taken {time_text(taken)}, and {_RESERVED_SECONDS:.0f} s are kept "
                f"for the end; give more{again if self.is_prepared else ''}"
            )
        return Length(left)

    def write_recipe(self, recipe: Recipe, choices: Choices, request: Request) -> None:
        """Write the recipe with the reasons of the choices as comments, and set `choices`.

        Raises:
            StorageError: a file system error.
        """
        self.choices = choices
        reasons = {choice.key: choice.reason for choice in choices.choices}
        start = [] if request.init_from is None else ["--init-from", request.init_from]
        command = shlex.join(["firstlight", "train", *request.inputs, *start])
        again = shlex.join(["firstlight", "train", str(self.folder / RECIPE_NAME), *start])
        header = (
            f"Chosen by `{command}`. A comment gives the reason for the key below it.",
            f"Train it again, changed or not: {again} --run.dir ANOTHER_FOLDER",
        )
        write_file(self.folder / RECIPE_NAME, commented_yaml(recipe, reasons, header))


def commented_yaml(recipe: Recipe, reasons: Mapping[str, str], header: Iterable[str] = ()) -> str:
    """A recipe as YAML text with comments.

    Args:
        recipe: the recipe; all of its keys are written.
        reasons: reasons of chosen keys by `section.key`, written above the keys.
        header: lines of a comment at the top.
    """
    text = yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)
    lines = [f"# {line}" for line in header]
    section = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.partition(":")[0]
        elif line[2:3] not in (" ", "-", ""):
            reason = reasons.get(f"{section}.{line.strip().partition(':')[0]}", "")
            lines += textwrap.wrap(reason, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def place_of_run(request: Request, content_key: str, run_dir: str | Path | None) -> Path:
    """The run folder: that of an earlier call with the same content and options, or a new one.

    Args:
        request: inputs, length and overrides of the run.
        content_key: hash of the inputs' content.
        run_dir: the folder given by the user; None uses runs/NAME, runs/NAME-2 and so on.

    Raises:
        ConfigError: the folder given by the user has another run.
    """
    given = run_dir or request.fixed.get("run.dir")
    base = Path(given or Path("runs") / run_name(request.inputs)).expanduser()
    number = 1
    while True:
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        # A folder with only a lock file belongs to a call that has just begun: the lock decides.
        if not folder.is_dir() or all(one.name.startswith(".") for one in folder.iterdir()):
            return folder
        state = read_state(folder)
        if state.get("request") == remembered(request) and (
            state.get("content_key") == content_key
        ):
            return folder
        if given:
            raise ConfigError(
                f"{folder} has a run of other texts or options: choose another --run.dir, or "
                "leave it out"
            )
        number += 1


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of a run folder's state file (`STATE_NAME`); {} if it is missing or damaged."""
    try:
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def remembered(request: Request) -> dict[str, Any]:
    """The options by which a later call is recognised as one for the same run, as a JSON object."""
    overrides = [list(one) for one in request.overrides if one[0] != "run.dir"]
    kept = {name: getattr(request, name) for name in ("seconds", "tokens", "steps", "size")}
    if request.init_from is not None:
        kept["init_from"] = request.init_from
    return {**kept, "overrides": overrides}
