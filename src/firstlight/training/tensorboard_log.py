"""RUN/tensorboard/: the recipe and the content of metrics.jsonl and samples.jsonl as an event file
of TensorBoard.

The event file is derived from these logs. A start, a resumption and a rollback rewrite it from the
lines that are kept, and each step then appends one event. So no step is in it twice, whenever a
process was killed, and the tracker can be switched on in the middle of a run. The file is written
by `files/disk.py`, one record at a time; only the contents of the records come from tensorboard's
own classes. A file system error ends this log with a message, but not the run.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from firstlight.console import say
from firstlight.errors import MissingDependencyError, StorageError
from firstlight.files import disk as seam
from firstlight.files.atomic import (
    make_folder,
    remove_file,
    remove_leftovers,
    replacing,
    storage_errors,
)
from firstlight.files.disk import AppendedFile
from firstlight.report.records import RECIPE_NAME

TENSORBOARD_NAME = "tensorboard"

#: events.out.tfevents.SECONDS.NUMBER.firstlight: Unix time of the run's start, and the number of
#: times that the file was begun. Each rewriting takes a new name, so that an open TensorBoard sees
#: that it is another file, and drops the events that it has read.
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10,12})\.(\d{6,9})\.firstlight")


def require_tensorboard() -> None:
    """Refuse the tracker `tensorboard` if its package is missing.

    Raises:
        MissingDependencyError: tensorboard is not installed.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("tensorboard", "dash", "run.trackers: tensorboard") from error


class TensorBoardLog:
    """The event file of a run.

    Scalars have their names in metrics.jsonl, and are fp32. The sample texts of a step have the
    names `samples/0`, `samples/1` and so on. The wall time of an event is the start of the run plus
    the training time up to the event, without pauses before a run was resumed.

    Args:
        folder: RUN/tensorboard, which is made if it is missing.

    Raises:
        MissingDependencyError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        require_tensorboard()
        self._folder = folder
        self._file: AppendedFile | None = None
        self._began, self._seconds = 0, 0.0
        self._refused = False

    def begin(
        self, records: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Rewrite the file with these lines of metrics.jsonl and samples.jsonl, and no others."""
        self.close()
        if self._refused:
            return
        try:
            with storage_errors(self._folder):
                self._begin(records, samples)
        except StorageError as error:
            self._refuse(error)

    def write(self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> None:
        """Append a step's metrics and its sample texts."""
        if self._file is None:
            return
        try:
            with storage_errors(self._folder):
                self._file.append(self._event(record, samples))
        except StorageError as error:
            self.close()
            self._refuse(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(
        self, records: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        make_folder(self._folder)
        remove_leftovers(self._folder)
        own = [found for path in self._folder.iterdir() if (found := _NAME.fullmatch(path.name))]
        times = sorted((int(name[1]), int(name[2])) for name in own)
        self._began, number = times[-1] if times else (int(time.time()), 0)
        # Before the new file is written: two files with the same steps would show them twice.
        for path in sorted(self._folder / name[0] for name in own):
            _forget(path, is_last=path.name == _name(*times[-1]))
        path = self._folder / _name(self._began, number + 1)
        texts = {step: list(lines) for step, lines in groupby(samples, lambda line: line["step"])}
        self._seconds = 0.0
        with replacing(path) as file:
            file.write(_beginning(self._began, self._folder.parent / RECIPE_NAME))
            for record in records:
                file.write(self._event(record, texts.get(record["step"], [])))
        self._file = AppendedFile(path)

    def _event(self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> bytes:
        """A step as one record of the file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name in ("seconds", "save_stall_seconds"):
            self._seconds += record.get(name) or 0.0
        values = [
            Summary.Value(tag=key, simple_value=value)
            for key, value in record.items()
            if key != "step" and type(value) in (int, float) and math.isfinite(value)
        ]
        values += [
            _text(f"samples/{number}", f"{line['prompt']}{line['text']}")
            for number, line in enumerate(samples)
        ]
        when = self._began + self._seconds
        return _framed(Event(step=record["step"], wall_time=when, summary=Summary(value=values)))

    def _refuse(self, error: StorageError) -> None:
        self._refused = True
        say(
            f"warning: {self._folder} is not written any more: {error} (the run continues; its "
            "metrics are in metrics.jsonl, and --resume writes all of them again)"
        )


def _name(began: int, number: int) -> str:
    return f"events.out.tfevents.{began}.{number:06d}.firstlight"


def _forget(path: Path, *, is_last: bool) -> None:
    """Delete an event file. The last file is only emptied, because an open TensorBoard goes on to
    the next file at the end of the file that it reads, but not if that file is deleted."""
    # A link or a pipe is deleted: emptying would change the link's target, or wait for a reader.
    if not is_last or path.is_symlink() or not path.is_file():
        remove_file(path)
        return
    with storage_errors(path), seam.disk.append(path) as file:
        seam.disk.truncate(file, 0)


def _beginning(began: int, recipe: Path) -> bytes:
    """The entries before the first step: the recipe, if its file is there."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    # SessionLog.START makes TensorBoard drop the events of earlier files of the run.
    start = SessionLog(status=SessionLog.START)
    events = [
        Event(wall_time=began, file_version="brain.Event:2"),
        Event(wall_time=began, session_log=start),
    ]
    if recipe.is_file():
        text = _text("recipe", recipe.read_text(encoding="utf-8", errors="replace"))
        events.append(Event(wall_time=began, summary=Summary(value=[text])))
    return b"".join(map(_framed, events))


def _text(tag: str, text: str) -> Any:
    """A text entry. TensorBoard shows texts as Markdown, so the text is in a code fence, which is
    longer than any run of backticks in it."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    fence = "`" * max([3, *(len(found) + 1 for found in re.findall("`+", text))])
    content = f"{fence}\n{text}\n{fence}".encode(errors="replace")
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype=DT_STRING, string_val=[content]),
    )


def _framed(event: Any) -> bytes:
    """An event as a TFRecord: with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
