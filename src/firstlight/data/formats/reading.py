"""Read documents that are not plain text in child processes with limits, and cache their text.

The text of a file is stored in the cache folder (`files/cache.py`) until the file or the version of
the readers changes. It consists of two files: the documents, one JSON list per line, and a summary,
which is written last. Mails in a folder are read one after another by the same process, because
what an earlier one contains is left out of a later one. All of them are read again if any changes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from rich.progress import TextColumn

from firstlight.console import counted, progress_bar
from firstlight.data.formats.nonsense import nonsense_in
from firstlight.data.formats.registry import format_of, installed_packages
from firstlight.data.opening import require_unpacked_size
from firstlight.errors import FirstlightError, InputError, describe_read_error, first_line
from firstlight.files.atomic import read_json, storage_errors
from firstlight.files.cache import cache_folder
from firstlight.files.limits import LimitedProcess, LimitExceededError, allow_more
from firstlight.hardware.environment import usable_cpus

#: Version of the readers. It is increased when any of them returns different text.
_VERSION = 6
#: Limits for a file: memory in bytes, CPU time in seconds, and CPU time for each further MB of the
#: file, which may be compressed, and of its text.
_MEMORY = 300 << 20
_SECONDS = 2
_SECONDS_PER_MB = 4
#: Maximum number of files left out that a message names.
_SHOWN = 3
#: Numbers the parts of a document, in the place of its last part: "pages 1 to 12", "chapter 3".
_LAST_PART = re.compile(r"\A(page|chapter|message)s?(?: 1 to)? ([\d,]+)")


def documents_in(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (place, text, problem) of each document in a file. If the problem is not "", there is
    no text, and the problem is the reason.

    Raises:
        InputError: the file can't be read.
        StorageError: the cache can't be written.
    """
    summary = _cached(path)
    if summary is None:
        summary = _read(path, _process([path]))
    if summary["documents"]:
        with open(_cache_file(path, ".jsonl"), encoding="utf-8") as file:
            for line in file:
                place, text = json.loads(line)
                yield ("", "", place) if not text else (place, text, "")
    if summary["problem"]:
        yield "", "", summary["problem"]


def text_bytes_in(path: Path) -> int:
    """Return the size of a file's text in bytes, or the size of the file if it was not read yet."""
    summary = _cached(path)
    return path.stat().st_size if summary is None else int(summary["bytes"])


def read_all(paths: Sequence[Path | None], *, progress: bool = False) -> list[str]:
    """Read the documents that are not plain text among the files, in several processes, and store
    their text in the cache. Return a message that counts them, or no message if there are none.

    Args:
        paths: the files. None stands for a dataset.
        progress: True to show a progress bar on stderr.

    Raises:
        InputError: a file can't be read, or an installed package can't be imported.
        StorageError: the cache can't be written.
    """
    documents = [path for path in paths if path is not None and format_of(path) is not None]
    waiting = _unread_groups(documents)
    if waiting:
        files = [path for _, group in waiting for path in group]
        workers = min(usable_cpus(), len(waiting))
        processes = [_process(files) for _ in range(workers)]
        idle: SimpleQueue[LimitedProcess] = SimpleQueue()
        for process in processes:
            idle.put(process)

        def read(mark: str, group: Sequence[Path]) -> None:
            process = idle.get()
            try:
                for path in group:
                    _read(path, process, mark, stopped)
                    done.put(None)
                    bar.update(task, advance=1, done=counted(done.qsize(), "file"))
            finally:
                idle.put(process)

        done: SimpleQueue[None] = SimpleQueue()
        stopped = Event()
        pool = ThreadPoolExecutor(workers)
        futures = []
        try:
            with progress_bar(TextColumn("{task.fields[done]}"), shown=progress) as bar:
                task = bar.add_task("reading documents", total=len(files), done="")
                futures += [pool.submit(read, *group) for group in waiting]
                for future in futures:
                    future.result()
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            # A thread may be starting a child, so interrupt them until all threads end.
            while running := [future for future in futures if not future.done()]:
                for process in processes:
                    process.interrupt()
                wait(running, timeout=0.1)
            for process in processes:
                process.close()
    line = _described(documents)
    # If the only file can't be read, an error names it.
    is_alone = len(paths) == 1 and line.startswith("read no")
    return [line] if line and not is_alone else []


def _unread_groups(paths: Iterable[Path]) -> list[tuple[str, list[Path]]]:
    """Return the files that are not in the cache, in groups that are read in order by one process:
    the mails of a folder, or one file. Each group has a mark that changes with its files."""
    groups: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        found = format_of(path)
        groups.setdefault(path.parent if found and found.order else path, []).append(path)
    waiting = []
    for group in groups.values():
        names = sorted(_cache_file(path, "").name for path in group)
        mark = _digest(names) if group[1:] else ""
        summaries = [_cached(path) for path in group]
        if any(summary is None or summary["group"] != mark for summary in summaries):
            found = format_of(group[0])
            waiting.append((mark, sorted(group, key=found.order if found else None)))
    return waiting


def _described(paths: Sequence[Path]) -> str:
    """Return the message about documents that were read, or "" if there are none."""
    files: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    units: dict[str, str] = {}
    problems: list[str] = []
    left_out = 0
    for path in paths:
        found, summary = format_of(path), _cached(path)
        if found is None or summary is None:  # The file was changed since it was read.
            continue
        left_out += summary["left_out"]
        problems += [f"{path}: {one}" for one in summary["problems"]]
        if not summary["bytes"]:
            continue
        files[found.name] += 1
        # An .eml file counts as one message, like a mail in an mbox file.
        parts[found.name] += _part_number(summary["last"]) or summary["documents"]
        if (last := _LAST_PART.match(summary["last"])) is not None:
            units[found.name] = last[1]
    if not files and not problems:
        return ""
    named = []
    for name, count in files.items():
        inner = f" ({counted(parts[name], units[name])})" if name in units else ""
        named.append(f"{counted(count, name)}{inner}")
    line = f"read {', '.join(named) or 'no documents'}"
    if problems:
        more = "; ..." if left_out > _SHOWN else ""
        line += f"; left out {left_out:,}: {'; '.join(problems[:_SHOWN])}{more}"
    return line


def _part_number(place: str) -> int:
    """Return the number of the part in the place of a document; 0 if it is not numbered."""
    found = _LAST_PART.match(place)
    return int(found[2].replace(",", "")) if found else 0


def _cache_file(path: Path, suffix: str) -> Path:
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"{path} can't be read: {describe_read_error(error)}") from error
    # Programs can set the mtime, but not the ctime. What is read of mails and archives also depends
    # on the installed packages.
    file = (str(path.resolve()), found.st_ino, found.st_size, found.st_ctime_ns)
    mark = (*file, _VERSION, installed_packages())
    key = _digest(mark)
    return cache_folder() / "documents" / key[:2] / (key + suffix)


def _digest(value: Any) -> str:
    text = repr(value).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _cached(path: Path) -> dict[str, Any] | None:
    try:
        file = _cache_file(path, ".json")
        summary = read_json(file)
        # If the machine stopped while the cache was written, the text may be incomplete.
        is_whole = file.with_suffix(".jsonl").stat().st_size == summary["stored"]
    except FileNotFoundError:
        is_whole = summary["documents"] == 0
    except (InputError, KeyError, TypeError):
        return None
    return summary if is_whole else None


def _process(paths: Sequence[Path]) -> LimitedProcess:
    """Create a process that reads files of the same formats as `paths`.

    Raises:
        InputError: an installed package can't be imported.
    """
    formats = {format_of(path): None for path in paths}
    for package in (name for one in formats if one for name in one.packages):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise InputError(
                f"{package} can't be imported ({first_line(error)}): reinstall it with pip install "
                f"--force-reinstall {package}"
            ) from error
    names = [module for one in formats if one for module in (*one.packages, one.module)]
    return LimitedProcess(f"{__name__}:reader", (names,), memory=_MEMORY)


def _read(
    path: Path, process: LimitedProcess, group: str = "", stopped: Event | None = None
) -> dict[str, Any]:
    """Read a file in a child process, write its text to the cache, and return the summary.

    Args:
        path: the file.
        process: the child.
        group: mark of the files that are read one after another; "" if the file is read alone.
        stopped: set if the child was interrupted rather than stopped by a limit.
    """
    found = format_of(path)
    assert found is not None
    texts = _cache_file(path, ".jsonl")
    partial = texts.with_name(f"{texts.name}.{os.getpid()}")
    seconds = _SECONDS + _SECONDS_PER_MB * path.stat().st_size // 1_000_000
    with storage_errors(texts):
        texts.parent.mkdir(parents=True, exist_ok=True)
        try:
            summary = process.call([found.module, str(path), str(partial), group], seconds=seconds)
            os.replace(partial, texts)
            summary["stored"] = texts.stat().st_size
        except LimitExceededError as error:
            if stopped is not None and stopped.is_set():
                raise
            summary = _kept(partial, str(error))
            if summary["documents"]:
                os.replace(partial, texts)
                summary["stored"] = texts.stat().st_size
        finally:
            partial.unlink(missing_ok=True)
        summary["group"] = group
        # Syncing the files in the cache would take longer than reading a short document.
        partial.write_text(json.dumps(summary), encoding="utf-8")
        os.replace(partial, texts.with_suffix(".json"))
    assert isinstance(summary, dict)
    return summary


def _kept(partial: Path, limit: str) -> dict[str, Any]:
    """Keep the whole documents in the output of a child that exceeded a limit, and return the
    summary of the file."""
    documents = size = end = 0
    last = ""
    problems = []
    with open(partial, "a+b") as file:
        file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                break
            place, text = json.loads(line)
            documents += 1
            size += len(text.encode())
            end += len(line)
            last = max(last, place, key=_part_number) if text else last
            problems += [] if text else [place]
        file.truncate(end)
    problem = f"reading it takes {limit}: it may be damaged, so export it again"
    if size:
        problem = f"only its beginning was read, because the whole takes {limit}: split it"
    return {
        "problem": problem,
        "documents": documents,
        "bytes": size,
        "last": last,
        "left_out": len(problems) + 1,
        "problems": [problem, *problems][:_SHOWN],
    }


# In the child


def reader(modules: Sequence[str]) -> Any:
    """Import modules before the memory of the process is limited, and return the function that
    reads a file."""
    for module in modules:
        importlib.import_module(module)
    return _write_documents


@functools.lru_cache(maxsize=1)
def _seen_in(group: str) -> set[int]:
    """Return the set to which the readers of a group of files add what they have read."""
    return set()


def _write_documents(request: tuple[str, str, str, str]) -> dict[str, Any]:
    module, name, out, group = request
    path = Path(name)
    documents = size = left_out = allowed = 0
    problem = last = ""
    problems: list[str] = []
    # Each document is written at once, because a limit may end this process.
    with open(out, "w", encoding="utf-8", buffering=1) as file:
        try:
            read = importlib.import_module(module).read
            for place, text in read(path, _seen_in(group)) if group else read(path):
                text = text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")
                if nonsense := nonsense_in(text):
                    place, text = f"{place}: {nonsense}" if place else nonsense, ""
                documents += 1
                if not text:
                    left_out += 1
                    problems += [place][: _SHOWN - len(problems)]
                size += len(text.encode("utf-8"))
                # The mails in an mbox file are ordered by date, and not by their numbers.
                last = max(last, place, key=_part_number) if text else last
                require_unpacked_size(path, size)
                if _SECONDS_PER_MB * (size - allowed) >= 1_000_000:  # one second
                    allow_more(_SECONDS_PER_MB * (size - allowed) / 1_000_000)
                    allowed = size
                file.write(json.dumps([place, text], ensure_ascii=False) + "\n")
        except MemoryError:
            raise
        except FirstlightError as error:
            problem = str(error)
        # Libraries raise many kinds of errors for damaged files.
        except Exception as error:  # noqa: BLE001
            problem = f"it is damaged ({first_line(error)}): replace it"
    if not documents and not problem:
        problem = "it contains no documents: exclude it"
    if problem:
        left_out += 1
        problems = [problem, *problems][:_SHOWN]
    return {
        "problem": problem,
        "documents": documents,
        "bytes": size,
        "last": last,
        "left_out": left_out,
        "problems": problems,
    }
