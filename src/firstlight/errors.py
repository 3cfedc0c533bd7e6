"""Error classes for errors that users can fix.

Each message describes what is wrong, where it is, and how to fix it. The command line prints the
message as one line, and exits with the code `exit_code`.

    FirstlightError            base class of the others, derived from ValueError
    ├── InputError             a path or an input text that is missing or unreadable
    ├── ConfigError            an invalid recipe, option or combination of options
    ├── TokenizerError         damaged or mismatched tokenizer files
    ├── DataError              token shards that are damaged, empty or don't fit the model
    ├── ModelError             a model folder whose weights or config.json can't be used
    ├── CheckpointError        a run folder or checkpoint that can't be resumed from
    ├── HubError               an upload that fails or that the Hugging Face hub rejects
    ├── StorageError           a file system error when writing: disk full, read-only, no permission
    ├── TrainingError          a run that can't continue, for instance because its loss is NaN
    └── MissingDependencyError an optional package that is not installed
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable

#: Exit code of `firstlight train` for a run that was stopped early and saved a checkpoint.
#: Repeating the command resumes the run. The number is EX_TEMPFAIL in sysexits.h.
STOPPED_EXIT_CODE = 75
#: Exit code of `firstlight train` for a run that diverged.
DIVERGED_EXIT_CODE = 76
#: Advice that is part of every message about a diverged run.
DIVERGED_REMEDY = "lower optimizer.learning_rate or lengthen schedule.warmup_steps"

#: Maximum number of characters in a message. Longer messages are truncated. A message can quote a
#: name from a damaged file, and such a name can have any length.
_MAX_CHARS = 2000


class FirstlightError(ValueError):
    """Base class of all errors that are shown to users.

    The message is converted to one line of printable characters, so it can't contain terminal
    control sequences.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(_shown(message))


class InputError(FirstlightError):
    """A path does not exist or can't be read, or its content can't be used."""


class ConfigError(FirstlightError):
    """A recipe or an option is invalid, or options contradict each other."""

    exit_code = 2


class TokenizerError(FirstlightError):
    """Tokenizer files are missing, damaged or of an unknown kind."""


class DataError(FirstlightError):
    """Token shards are missing, damaged, empty or too short, or were prepared with a different
    tokenizer.
    """


class ModelError(FirstlightError):
    """The config.json or the weights of a model folder can't be used."""


class CheckpointError(FirstlightError):
    """A run folder or checkpoint can't be used or would be overwritten."""


class HubError(FirstlightError):
    """An upload failed or was rejected by the Hugging Face hub."""


class StorageError(FirstlightError):
    """A file can't be written, for example because the disk is full."""


class TrainingError(FirstlightError):
    """A training run can't continue. Its last good checkpoint is kept."""


class RunReplacedError(Exception):
    """Raised by the `on_step` callback to end a run that will be replaced by another run.

    If a signal has already stopped the run, this exception is ignored, and the run saves a
    checkpoint and ends as usual.
    """


class MissingDependencyError(FirstlightError):
    """An optional package is required but not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the '{package}' package: pip install 'firstlight[{extra}]'"
        )
        self._asked = (package, extra, purpose)

    def __reduce__(self) -> tuple[type[MissingDependencyError], tuple[str, str, str]]:
        # Without this method, unpickling the error in another process would fail, because the
        # constructor would be called with the message as its only argument.
        return type(self), self._asked


def _shown(text: str) -> str:
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS * 3 // 4]} ... {text[-_MAX_CHARS // 4 :]}"
    if text.isprintable():
        return text
    line = " ".join(part.strip() for part in text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def nearest(word: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """Return a suggestion such as `" (did you mean 'x'?)"` with the known name that is most similar
    to `word`. Return `""` if no known name is similar enough.

    Args:
        word: unknown name.
        known: known names.
        likeness: minimum similarity of the two names, as a `difflib` ratio from 0 to 1.
    """
    names = list(known)
    # For the word "every", suggest "every_steps", although the edit distance to "keep_every" is
    # smaller.
    begun = [name for name in names if name.startswith(f"{word}_")]
    match = difflib.get_close_matches(word, begun or names, n=1, cutoff=likeness)
    return f" (did you mean '{match[0]}'?)" if match else ""


def describe_os_error(error: OSError) -> str:
    """Describe an error in one line that includes the reason and the path. For common errors, such
    as a full disk or a denied permission, the line also includes advice.
    """
    # Report the name of the final file rather than that of the temporary file that
    # `files/atomic.py` writes, because users do not know about temporary files. For a copy,
    # `filename2` is the target.
    path = error.filename2 or error.filename or ""
    name = re.sub(r"\.tmp-([^/]+)-[0-9a-f]{8}", r"\1", str(path))
    where = f" at {name}" if name else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}: free some space or choose another folder"
    if error.errno == errno.EFBIG:
        return (
            f"the file size limit was reached{where}: raise it (ulimit -f) or choose another disk"
        )
    if error.errno == errno.EROFS:
        return f"the file system is read-only{where}: choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"permission denied{where}: change its permissions, or choose another folder"
    if "No usable temporary directory" in str(error):
        return f"{error.strerror}: free some space, raise `ulimit -f`, or set TMPDIR"
    return f"{error.strerror or error}{where}"


def describe_read_error(error: OSError) -> str:
    """Describe an error that occurred while reading an input file.

    The description is the same as that of `describe_os_error`, except that if permission was
    denied, the advice is to make the file readable.
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        where = f" at {error.filename}" if error.filename else ""
        return f"permission denied{where}: make it readable (chmod u+rX), or exclude it"
    return describe_os_error(error)


#: Phrases that occur in out-of-memory errors of torch, C++, cuBLAS, cuDNN, oneDNN and the dynamic
#: linker, in lower case.
_LACK_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "_alloc_failed",
    "could not create a primitive",
    "failed to map segment",
)


def lacks_memory(error: BaseException) -> bool:
    """Return True if an error means that a device ran out of memory. This function does not import
    torch.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        # Check only the error number, because the error message can contain a file name.
        return error.errno == errno.ENOMEM
    # oneDNN reports errors about a "primitive descriptor" for unsupported operators or dtypes, not
    # for a lack of memory.
    text = str(error).lower().replace("primitive descriptor", "")
    return isinstance(error, RuntimeError | ImportError | OSError) and any(
        part in text for part in _LACK_OF_MEMORY
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error message from a library, or the name of the error's class if
    the message is empty.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
