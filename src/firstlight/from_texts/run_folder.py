"""Manage one call to `train_texts`: its run folder, its time budget, and the state that it saves in
the run folder for later calls."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.console import time_text
from firstlight.data.shards import UNREAD_NAME
from firstlight.data.sources import find_sources, unread_lines
from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import (
    make_folder,
    remove_folder,
    storage_errors,
    write_file,
    write_json,
)
from firstlight.from_texts.plan import Choices
from firstlight.from_texts.request import Request
from firstlight.from_texts.scan import first_names
from firstlight.planner.advise.law import Length

if TYPE_CHECKING:
    from firstlight.recipe import Recipe

#: File in the run folder with the inputs and options of the run, and with the state of the
#: preparation.
STATE_NAME = "pipeline.json"
#: Subfolder of the run folder with the tokenizer and shards.
DATA_FOLDER = "data"
#: Subfolder of the run folder with the prepared kept text, and file with the texts of the control
#: set; see `finetuning.kept`.
KEPT_FOLDER, CONTROL_NAME = "kept", "control.jsonl"
#: File in the run folder that lists conversations that are longer than a row.
TOO_LONG_NAME = "too-long.txt"
#: Lock file in the run folder, which is locked during a call to `train_texts`.
LOCK_NAME = ".pipeline.lock"
#: File name of a run's recipe. It is also defined in another module, which is not imported here
#: because it imports torch.
RECIPE_NAME = "recipe.yaml"
#: Minimum and maximum number of seconds that are reserved for the report. Between these limits, the
#: reserved time is the time before training multiplied by _RESERVED_SHARE. The time before training
#: shows how busy the machine is, and the report also takes longer on a busy machine.
_RESERVED_SECONDS, _MOST_RESERVED = 4.0, 12.0
_RESERVED_SHARE = 1 / 8
#: Minimum duration of the training loop in seconds. Shorter training would not be worthwhile.
_LEAST_SECONDS = 10.0
#: When a budget is suggested for a second call, the time that the first call took for the same work
#: is multiplied by this factor.
_SLOWER = 1.25
#: Attributes of a request that are saved in the run folder's state in addition to the overrides.
_LENGTHS = ("seconds", "tokens", "steps")
_LENGTH_AND_SIZE = (*_LENGTHS, "size")
#: Maximum number of input files whose size and modification time are recorded.
_KNOWN_FILES = 1000
#: Reason that is written to the recipe for settings that were chosen without a specific reason.
_MEASURED = "new models learned best with this value: docs/learning.md"
#: Width of comment lines in the recipe, in characters.
_WIDTH = 100


#: Callback for each step's metrics; see `train`.
OnStep = Callable[[Mapping[str, Any]], None]


class RunCall:
    """State of one call to `train_texts`: its run folder, time and messages.

    Args:
        folder: run folder.
        began: value of `time.time()` at which the budget starts.
        tell: callback for each message to the user.
        progress: True to show progress bars.
        explain: True to show the table of all choices with their reasons.
        on_step: callback for each step's metrics; see `train`.

    Attributes:
        state: contents of the folder's state file (`STATE_NAME`).
        choices: all settings, available once the recipe is written; None for a resumed run.
        preparing_seconds: seconds that this call has spent preparing texts.
        measured: `time.time()` at which the remaining time was last computed; initially `began`.
    """

    def __init__(
        self,
        folder: Path,
        began: float,
        tell: Callable[[str], None],
        *,
        progress: bool,
        explain: bool = False,
        on_step: OnStep | None = None,
    ) -> None:
        self.folder = folder
        self.explain = explain
        self.began = began
        self.tell = tell
        self.progress = progress
        self.on_step = on_step
        self.state = read_state(folder)
        self.choices: Choices | None = None
        self.preparing_seconds = 0.0
        self.measured = began

    def remember(self, **values: Any) -> None:
        """Add values to the state and write the state to the run folder for later calls.

        Raises:
            StorageError: a file system error.
        """
        self.state |= values
        make_folder(self.folder)
        write_json(self.folder / STATE_NAME, self.state)

    def forget(self) -> None:
        """Delete the state file of a run that has not started and does not have its own data. A
        folder without a state file is not treated as a run folder."""
        if self.state.get("begun"):
            return
        data, kept = (self.folder / name for name in (DATA_FOLDER, KEPT_FOLDER))
        if kept.is_dir():  # The next call may be given other kept text.
            remove_folder(kept)
        if self.state.get("has_linked_data") and data.is_dir():
            # These files are only links to another run's data. If the folder contains its own data,
            # the state is kept, because unfinished shards would otherwise be left in a folder that
            # does not belong to any run.
            remove_folder(data)
        if not data.exists():
            self.state = {}
            with storage_errors(self.folder):
                for name in (CONTROL_NAME, STATE_NAME):
                    (self.folder / name).unlink(missing_ok=True)

    def write_unread(self, names: Sequence[str]) -> None:
        """Write a list of the files that were not read, and the reasons, to the run folder. Do
        nothing if all files were read.

        Raises:
            StorageError: a file system error.
        """
        if names:
            write_file(self.folder / UNREAD_NAME, unread_lines(names))

    def length(self, request: Request) -> Length:
        """Return the length of the training loop. With a time budget, this is the remaining time
        minus the time reserved for the report.

        Raises:
            ConfigError: less than `_LEAST_SECONDS` remain.
        """
        if request.seconds is None:
            return Length(None, request.tokens, request.steps)
        self.measured = time.time()
        taken = self.measured - self.began
        start = taken - self.preparing_seconds
        reserved = min(max(_RESERVED_SECONDS, _RESERVED_SHARE * start), _MOST_RESERVED)
        left = request.seconds - taken - reserved
        if left < _LEAST_SECONDS:
            rest = reserved + _LEAST_SECONDS
            # A second call would read the text again but reuse the prepared data.
            again = _SLOWER * start + rest <= request.seconds
            use = ", or run the command again, which uses the prepared texts" if again else ""
            raise ConfigError(
                f"the budget of {time_text(request.seconds)} is too short: reading and preparing "
                f"the texts took {time_text(taken)}, training takes at least {_LEAST_SECONDS:.0f} "
                f"s, and {reserved:.0f} s are reserved for the report; use --budget "
                f"{math.ceil(_SLOWER * taken + rest)}s{use}"
            )
        return Length(left)

    def write_recipe(self, recipe: Recipe, choices: Choices, request: Request) -> None:
        """Write the recipe to the run folder, with the reason for each choice as a comment, and set
        `choices`.

        Raises:
            StorageError: a file system error.
        """
        self.choices = choices
        reasons = {choice.key: choice.reason or _MEASURED for choice in choices.choices}
        start = [] if request.init_from is None else ["--init-from", request.init_from]
        command = command_of(request, length_options(request) + own_options(request))
        again = shlex.join(["firstlight", "train", str(self.folder / RECIPE_NAME), *start])
        header = (
            f"Chosen by `{command}`. Each comment gives the reason for the key below it.",
            f"To train with this recipe again, edited or not: {again} --run.dir ANOTHER_FOLDER",
        )
        write_file(self.folder / RECIPE_NAME, commented_yaml(recipe, reasons, header))


def commented_yaml(recipe: Recipe, reasons: Mapping[str, str], header: Iterable[str] = ()) -> str:
    """Return a recipe as YAML text with comments.

    Args:
        recipe: recipe to write, with all of its keys.
        reasons: reasons for the chosen keys, keyed by `section.key`. Each reason is written above
            its key.
        header: lines of the comment at the beginning of the file.
    """
    from firstlight.recipe.load import yaml_text  # imports torch, which is already loaded here

    text = yaml_text(recipe.model_dump())
    # File names may contain line breaks.
    lines = [f"# {' '.join(line.split())}" for line in header]
    section = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.partition(":")[0]
        elif line[2:3] not in (" ", "-", ""):
            reason = reasons.get(f"{section}.{line.strip().partition(':')[0]}", "")
            lines += textwrap.wrap(reason, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def length_options(request: Request) -> list[str]:
    """Return the command-line option that sets the length of the run, or [] if it is not set."""
    if request.seconds is not None:
        whole = request.seconds % 60 == 0
        return ["--budget", f"{request.seconds / 60:g}m" if whole else f"{request.seconds:g}s"]
    if request.tokens is not None:
        return ["--tokens", f"{request.tokens:.0f}"]
    return [] if request.steps is None else ["--steps", str(request.steps)]


def own_options(request: Request) -> list[str]:
    """Return the command-line options for the model size and recipe values set by the user."""
    size = [] if request.size is None else ["--size", request.size]
    # --replay is the short form of this key.
    names = {"data.replay": "--replay"}
    return size + [
        word
        for key, value in request.overrides
        if key != "run.dir"
        for word in (names.get(key, f"--{key}"), value)
    ]


def command_of(request: Request, options: Sequence[str]) -> str:
    """Return the command that trains on the inputs of a request.

    Args:
        request: the inputs, the initial model, and the options for reading the inputs.
        options: additional options, as a list of command-line arguments.
    """
    start = [] if request.init_from is None else ["--init-from", request.init_from]
    reading = [] if request.text_key == "text" else ["--text-key", request.text_key]
    reading += [word for name in request.val_inputs for word in ("--val-input", name)]
    reading += ["--as-is"] if request.as_is else []
    reading += [word for name in request.keep for word in ("--keep", name)]
    return shlex.join(["firstlight", "train", *request.inputs, *options, *start, *reading])


def place_of_run(
    request: Request,
    content_key: str,
    run_dir: str | Path | None,
    tell: Callable[[str], None],
) -> Path:
    """Return the run folder of an earlier call with the same content and options, or a new run
    folder if there is none.

    Args:
        request: inputs, length and overrides of the run.
        content_key: hash of the inputs' content.
        run_dir: folder set by the user; None for runs/NAME, runs/NAME-2 and so on.
        tell: callback for a message if runs/NAME contains another run.

    Raises:
        ConfigError: the folder set by the user contains another run.
    """
    base, is_given = _base_folder(request, run_dir)
    for folder in _numbered(base):
        # A folder that contains only a lock file may belong to a call that has just started. This
        # is detected when the folder is locked.
        if not folder.is_dir() or all(one.name.startswith(".") for one in folder.iterdir()):
            break
        state = read_state(folder)
        if _is_of(state, content_key):
            # If the earlier call only prepared the texts, for example because its budget was too
            # short, the corrected command may use the folder.
            has_begun = state.get("begun")
            ignored = () if has_begun else _LENGTHS
            earlier, wanted = (
                {name: value for name, value in one.items() if name not in ignored}
                for one in (state["request"], remembered(request))
            )
            if earlier == wanted or (is_given and not has_begun):
                break
        if is_given:
            changed = "".join(
                f"{one}; " for one in _changes_since(state, folder, request, content_key)
            )
            raise ConfigError(
                f"{folder} holds a run with other texts or options: {changed}choose another "
                "--run.dir, or omit it"
            )
    if folder != base:
        changes = _changes_since(read_state(base), base, request, content_key)
        changed = "".join(f"; {one}" for one in changes)
        tell(f"{base} holds a run with other texts or options: this run is in {folder}{changed}")
    return folder


def facts_of_files(request: Request) -> dict[str, list[int]]:
    """Return the size in bytes and the modification time in nanoseconds of each text file, keyed by
    path. The validation files come first, followed by the training files, up to a maximum
    number of files. A later call uses these values to find out which files have changed.
    """
    inputs = [*request.val_inputs, *request.inputs]
    try:
        paths = [source.path for source in find_sources(inputs) if source.path is not None]
    except InputError:
        return {}  # The inputs are conversations in files that are not text files.
    stats = {str(path): path.stat() for path in paths[:_KNOWN_FILES]}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _changes_since(
    state: Mapping[str, Any], folder: Path, request: Request, content_key: str
) -> Iterator[str]:
    """Yield messages that list the files that have changed since an earlier run on the same inputs,
    and the command that continues the earlier run. Yield nothing if the earlier run has different
    inputs, or if its inputs are unchanged.

    Args:
        state: state of the run folder.
        folder: run folder.
        request: inputs of this call.
        content_key: hash of the inputs' content.
    """
    if state.get("inputs") != list(request.inputs) or "content_key" not in state:
        return
    if state["content_key"] == content_key:
        return
    is_chat = state.get("kind") == "chat"
    model = state.get("request", {}).get("init_from")
    before, now = state.get("files", {}), facts_of_files(request)
    kinds = {
        "changed": [name for name in now if name in before and before[name] != now[name]],
        "new": [name for name in now if name not in before] if before else [],
        "missing": [name for name in before if name not in now],
    }
    shown = [f"{kind}: {first_names(names)}" for kind, names in kinds.items() if names]
    if shown:
        yield f"the texts have changed since the run in {folder} ({'; '.join(shown)})"
    elif "files" not in state or (is_chat and model == request.init_from):
        # The files are unchanged. The run was started with an earlier version of firstlight, which
        # read fewer kinds of files or prepared conversations differently.
        yield f"the texts have changed, or are read differently, since the run in {folder}"
    else:
        return
    # A run on conversations reads the original files, so it can't be continued once they have
    # changed.
    if state.get("begun") and not state.get("complete") and not (is_chat and shown):
        start = [] if model is None else ["--init-from", model]
        command = ["firstlight", "train", str(folder / RECIPE_NAME), "--resume", *start]
        texts = "" if is_chat else " with the old texts"
        yield f"{shlex.join(command)} continues that run{texts}"


def earlier_initial_model(request: Request, run_dir: str | Path | None) -> str | None:
    """Return the initial model of the newest unfinished run on the same inputs. If all runs are
    complete, return the one of the newest run. None stands for a new model, or for no run.
    """
    _, state = _newest_run(request, run_dir)
    model: str | None = state.get("request", {}).get("init_from")
    return model


def key_without_model(request: Request, run_dir: str | Path | None) -> str:
    """Return the content key of the newest run on the same inputs and initial model, if it can be
    resumed without this model: it has a checkpoint, and its inputs have not changed. Otherwise,
    return "".
    """
    from firstlight.checkpoint.selection import list_checkpoints

    folder, state = _newest_run(request, run_dir)
    is_same = state.get("request", {}).get("init_from") == request.init_from
    is_same = is_same and state.get("files") == facts_of_files(request)
    return str(state["content_key"]) if is_same and list_checkpoints(folder) else ""


def _newest_run(request: Request, run_dir: str | Path | None) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the state of the newest unfinished run on the same inputs. If all runs
    are complete, return those of the newest run. Without a run, the state is {}.
    """
    base, is_given = _base_folder(request, run_dir)
    found: dict[tuple[bool, float], tuple[Path, dict[str, Any]]] = {}
    for folder in itertools.takewhile(Path.is_dir, [base] if is_given else _numbered(base)):
        state = read_state(folder)
        if state.get("inputs") == list(request.inputs) and "request" in state:
            changed = (folder / STATE_NAME).stat().st_mtime
            found[not state.get("complete"), changed] = folder, state
    return found[max(found)] if found else (base, {})


def earlier_request(request: Request, content_key: str, run_dir: str | Path | None) -> Request:
    """Return the request of the newest unfinished run with the same content. If all runs are
    complete, return the request of the newest run.

    Args:
        request: inputs of the run. If the length, size or overrides are set, they must be equal to
            those of the earlier call.
        content_key: hash of the inputs' content.
        run_dir: folder set by the user; None to search runs/NAME, runs/NAME-2 and so on.

    Raises:
        ConfigError: there is no such run.
    """
    base, is_given = _base_folder(request, run_dir)
    wanted = remembered(request)
    is_bare = not (request.has_length or request.size or wanted["overrides"] or request.keep)
    found: dict[tuple[bool, float], dict[str, Any]] = {}
    changes: list[str] = []
    for folder in itertools.takewhile(Path.is_dir, [base] if is_given else _numbered(base)):
        state = read_state(folder)
        # If there are several runs, show the messages about a run that can be continued.
        changes = max(changes, list(_changes_since(state, folder, request, content_key)), key=len)
        if _is_of(state, content_key) and (is_bare or state["request"] == wanted):
            changed = (folder / STATE_NAME).stat().st_mtime
            found[not state.get("complete"), changed] = state["request"]
    if not found:
        raise ConfigError(
            f"{base if is_given else base.parent} has no run with these inputs"
            f"{'' if is_bare else ' and options'}: "
            + "".join(f"{one}; " for one in changes)
            + "omit --resume to start one"
        )
    earlier = found[max(found)]
    length = {name: earlier[name] for name in _LENGTH_AND_SIZE}
    own = [one for one in request.overrides if one[0] == "run.dir"]
    overrides = (*map(tuple, earlier["overrides"]), *own)
    # The new call may specify the folder of the initial model with a different path.
    return replace(
        request,
        **length,
        init_from=earlier.get("init_from"),
        keep=tuple(earlier.get("keep", ())),
        overrides=overrides,
    )


def has_run(request: Request, content_key: str) -> bool:
    """Return True if one of the folders runs/NAME, runs/NAME-2 and so on contains a run with the
    same content and options."""
    base, _ = _base_folder(request, None)
    states = map(read_state, itertools.takewhile(Path.is_dir, _numbered(base)))
    wanted = remembered(request)
    return any(_is_of(state, content_key) and state["request"] == wanted for state in states)


def _is_of(state: Mapping[str, Any], content_key: str) -> bool:
    """Return True if the state was saved by a run with this content."""
    return state.get("content_key") == content_key and "request" in state


def _numbered(base: Path) -> Iterator[Path]:
    """Yield FOLDER, FOLDER-2, FOLDER-3, ..."""
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")


def run_name(inputs: Sequence[str]) -> str:
    """Return a name for a run folder, based on the name of the first input."""
    first = inputs[0].removeprefix("hf:").partition(":")[0]
    stem = Path(first).expanduser().resolve().name if Path(first).exists() else Path(first).name
    name = stem.partition(".")[0] or stem.strip(".")
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-")
    return kept or "texts"


def _base_folder(request: Request, run_dir: str | Path | None) -> tuple[Path, bool]:
    """Return the first candidate for the run folder, and whether the user has set the folder
    explicitly."""
    given = run_dir or request.fixed.get("run.dir")
    return Path(given or Path("runs") / run_name(request.inputs)).expanduser(), bool(given)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the contents of a run folder's state file (`STATE_NAME`), or {} if the file is missing
    or damaged."""
    try:
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def remembered(request: Request) -> dict[str, Any]:
    """Return the options that later calls compare to find the same run, as a JSON object."""
    overrides = [list(one) for one in request.overrides if one[0] != "run.dir"]
    kept = {name: getattr(request, name) for name in _LENGTH_AND_SIZE}
    if request.init_from is not None:
        kept["init_from"] = request.init_from
    if request.keep:
        kept["keep"] = list(request.keep)
    return {**kept, "overrides": overrides}
