"""Find sources of text and records: files, folders, globs, Python's standard library, and Hugging
Face datasets.

This module only finds the sources; `records` reads them. `unread_files` lists the files in folders
and globs that can't be read because of their type.
"""

from __future__ import annotations

import glob
import os
import shlex
import stat
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from firstlight.data.formats.reading import text_bytes_in
from firstlight.data.formats.registry import FORMATS, format_of
from firstlight.data.kinds import (
    COMPRESSED,
    OTHER_TEXT,
    FileKind,
    kind_by_ending,
    kind_of,
    kind_of_content,
)
from firstlight.data.opening import head_of
from firstlight.errors import InputError, MissingDependencyError, describe_read_error, nearest
from firstlight.files.atomic import read_json, write_json

#: Suffixes of source code (`_CODE_SUFFIXES`), and of all text files (`TEXT_SUFFIXES`). A file with
#: any other suffix is read if its content is text.
_CODE_SUFFIXES = tuple(
    ".py .pyi .c .h .cc .cpp .hpp .cs .f90 .go .hs .java .jl .js .jsx .kt .lua .ml .php .pl .r .rb "
    ".rs .scala .sh .sql .swift .ts .tsx".split()
)
TEXT_SUFFIXES = (
    *".txt .md .text .markdown .rst .adoc .org .tex .log .srt .vtt".split(),
    *_CODE_SUFFIXES,
)
COMPRESSIONS = ("", ".gz", ".zst", ".bz2", ".xz")


def compressed(*suffixes: str) -> tuple[str, ...]:
    """Return a list that contains each suffix, followed by the corresponding suffixes of compressed
    files.
    """
    return tuple(suffix + compression for suffix in suffixes for compression in COMPRESSIONS)


#: Suffixes of tables, and of files with one record per line.
LINES_SUFFIXES, TABLE_SUFFIXES = compressed(".jsonl", ".ndjson"), compressed(".csv", ".tsv")
#: Suffixes of files that contain several documents.
_MANY_DOCUMENTS = (*LINES_SUFFIXES, *TABLE_SUFFIXES, ".parquet")
SUFFIXES = (*compressed(*TEXT_SUFFIXES), *_MANY_DOCUMENTS)
#: Descriptions, for messages, of the file types that can be read as text (`READ_KINDS`) and as
#: records (`_RECORD_KINDS`).
READ_KINDS = (
    "plain text and code with any suffix or none, .jsonl, .ndjson, .csv, .tsv (all may be "
    f"compressed as .gz, .bz2, .xz or .zst), .parquet, and documents ({', '.join(FORMATS)})"
)
_RECORD_KINDS = (
    ".jsonl, .ndjson, .json, .csv, .tsv (all may be compressed as .gz, .bz2, .xz or .zst), "
    ".parquet and .arrow"
)
#: Name of the file in a prepared folder that lists the inputs from which it was prepared.
SOURCES_NAME = "sources.json"
#: Name of the INPUT for the source code of Python's standard library.
STANDARD_LIBRARY = "stdlib"
#: Maximum number of suffixes, and maximum number of commands for converting files to text, that are
#: listed in a message.
_SHOWN_ENDINGS, _SHOWN_WAYS = 8, 3

#: Names of folders that are not searched, because they contain files that the user did not write.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
#: Files whose presence identifies a run folder.
_RUN_FILES = frozenset({"recipe.yaml", "metrics.jsonl"})
#: Files without records in the folders that `Dataset.save_to_disk` of the datasets package writes.
_DATASET_FILES = frozenset({"dataset_dict.json", "dataset_info.json", "state.json"})
#: Subfolders of the standard library that are not included in the `stdlib` input.
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

#: Estimated number of bytes of text per byte of a compressed file.
_UNPACKED = 3.0
#: Maximum size of a small text file in bytes. `limited_sources` includes a small text file either
#: completely or not at all.
_WHOLE_BYTES = 1 << 20


@dataclass(frozen=True)
class DataSource:
    """A file or a Hugging Face dataset that contains documents or records.

    Attributes:
        name: name used in messages.
        path: the file, or None for a dataset.
        dataset: NAME[:CONFIG[:SPLIT]] of the dataset, or None for a file.
        most_bytes: number of UTF-8 bytes of text after which reading stops; None means no limit.
        as_is: True to read text without splitting it at separators or cleaning it (see `cleaning`).
    """

    name: str
    path: Path | None = None
    dataset: str | None = None
    most_bytes: int | None = None
    as_is: bool = False

    @property
    def key(self) -> str:
        """Key that identifies the file or dataset. It is the same for all names of a file."""
        return self.name if self.path is None else str(self.path.resolve())

    @property
    def size(self) -> int:
        """Size on disk in bytes; 0 for datasets."""
        return self.path.stat().st_size if self.path is not None else 0


def find_sources(
    inputs: Sequence[str | Path], suffixes: tuple[str, ...] = SUFFIXES, *, as_is: bool = False
) -> list[DataSource]:
    """Resolve INPUTs to files and datasets. Return them in a deterministic order, with each file
    listed only once.

    An INPUT is one of:

        a file
        a folder                        searched recursively, without hidden files and folders
        a glob                          `**` matches any number of folders
        stdlib                          source code of Python's standard library, without tests
                                        (write `./stdlib` for a folder of that name)
        hf:NAME[:CONFIG[:SPLIT]]        a Hugging Face dataset; SPLIT defaults to "train", and an
                                        empty CONFIG, as in `hf:NAME::SPLIT`, selects the default
                                        configuration

    Args:
        inputs: the INPUTs.
        suffixes: suffixes of the files to find. With the default suffixes, `stdlib` and text files
            with any other suffix are also found.
        as_is: see `DataSource`.

    Raises:
        InputError: an input does not exist, matches nothing, or has an unknown type.
    """
    if not inputs:
        raise InputError("there is no input: specify files, folders, globs, `stdlib` or `hf:NAME`")
    sources: dict[str, DataSource] = {}
    for item in inputs:
        try:
            found = _resolve(str(item), suffixes)
        # `Path.expanduser` raises RuntimeError for the home folder of an unknown user.
        except (OSError, RuntimeError) as error:
            reason = describe_read_error(error) if isinstance(error, OSError) else error
            raise InputError(f"input {item} can't be found: {reason}") from error
        for source in found:
            sources.setdefault(source.key, replace(source, as_is=as_is))
    return list(sources.values())


def distinct_inputs(inputs: Sequence[str | Path]) -> list[str]:
    """Return the INPUTs, omitting any that refer to the same file or folder as an earlier one."""
    found: dict[str, str] = {}
    for item in map(str, inputs):
        # Unlike `Path.expanduser`, this does not raise for an unknown user's home folder.
        place = os.path.realpath(os.path.expanduser(item))
        found.setdefault(item if item == STANDARD_LIBRARY else place, item)
    return list(found.values())


def note_on_inputs(inputs: Sequence[str | Path]) -> str:
    """Return a message about INPUTs that may not mean what the user intended, or "" if there are
    none.

    There are three such cases. First, several INPUTs name the same file or folder. Second, the
    INPUT is "stdlib", and there is also a file or folder with this name. Third, a folder contains
    links to other folders. The linked folders are searched only if they are INPUTs themselves.
    """
    notes = []
    distinct = distinct_inputs(inputs)
    if repeated := len(inputs) - len(distinct):
        notes.append(f"inputs that repeat an earlier one, read once: {repeated} of {len(inputs)}")
    if STANDARD_LIBRARY in distinct and Path(STANDARD_LIBRARY).exists():
        notes.append(
            "stdlib means Python's standard library; use ./stdlib for the file or folder of "
            "that name"
        )
    folders = [os.path.expanduser(item) for item in distinct if item != STANDARD_LIBRARY]
    named = {os.path.realpath(folder) for folder in folders}
    if linked := [link for folder in folders for link in _linked_folders(folder, named)]:
        more = f" and {len(linked) - 1:,} more" if len(linked) > 1 else ""
        notes.append(
            f"{linked[0]}{more}: links to folders are not searched; add the folders as inputs"
        )
    return "; ".join(notes)


def _resolve(item: str, suffixes: tuple[str, ...]) -> list[DataSource]:
    if not item:
        raise InputError(
            "an input is empty: specify a file, a folder, a glob, `stdlib` or `hf:NAME`"
        )
    if item == STANDARD_LIBRARY and suffixes == SUFFIXES:
        return _standard_library()
    if item.startswith("hf:"):
        if not item[3:].partition(":")[0]:
            raise InputError(
                "hf: requires the name of a dataset, such as hf:roneneldan/TinyStories"
            )
        return [DataSource(name=item, dataset=item[3:])]
    if item.startswith("random:"):
        raise InputError(
            f"{item} stands for random tokens, not text: use it as the only input of firstlight "
            "prepare"
        )
    path = Path(item).expanduser()
    if path.is_dir():
        read = (file for file in _files_under(path) if _is_read(file, suffixes))
        found = sorted(read, key=lambda file: file.relative_to(path).as_posix())
        if not found:
            raise InputError(_nothing_in(item, path, suffixes))
        return [DataSource(name=str(file), path=file) for file in found]
    if path.is_file():
        if not _is_read(path, suffixes):
            raise InputError(_unread(path, suffixes))
        return [DataSource(name=item, path=path)]
    if any(character in item for character in "*?["):
        names = [name for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
        files = [path for path in map(Path, sorted(names)) if _is_read(path, suffixes)]
        if not files:
            raise InputError(f"{item} matches no {_kinds(suffixes)}")
        return [DataSource(name=str(file), path=file) for file in files]
    raise InputError(missing_input(item))


def missing_input(item: str) -> str:
    """Return the error message for an INPUT that is neither an existing path nor any other valid
    kind of INPUT.
    """
    path = Path(item).expanduser()
    if kind := special_kind(path):
        return special_input(item, kind)
    if "://" in item:
        return url_input(item)
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return (
        f"{item} does not exist{nearest(path.name, [*siblings, 'stdlib'])}: specify files, "
        "folders, globs, `stdlib` or `hf:NAME`"
    )


def url_input(item: str) -> str:
    """Return the error message for an INPUT that is a URL."""
    return (
        f"{item} is a URL: download it with curl -LO {shlex.quote(item)} and use the file as input"
    )


def special_input(item: str, kind: str) -> str:
    """Return the error message for an INPUT that is a pipe, socket, device or broken link.

    Args:
        item: the INPUT.
        kind: type of the INPUT, as returned by `special_kind`.
    """
    text = shlex.quote(f"{Path(item).name}.txt")
    advice = "specify a file or a folder of texts"
    if kind == "pipe":
        advice = (
            "inputs are read more than once, so write its text to a file with cat "
            f"{shlex.quote(item)} > {text}, and use that file"
        )
    return f"{item} is a {kind}, neither a file nor a folder: {advice}"


def special_kind(path: Path) -> str:
    """Return "pipe", "socket", "device" or "broken link", or "" for a file, a folder or a missing
    path."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return "broken link" if os.path.islink(path) else ""
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    kinds |= {stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "")


def _nothing_in(item: str, folder: Path, suffixes: tuple[str, ...]) -> str:
    """Return the error message for a folder without any supported files."""
    others = unread_files([folder], suffixes)
    if not others:
        return f"folder {item} contains no {_kinds(suffixes)}: add some"
    counts = by_ending(others)
    first = next(file for file in others if _unread_kind(file) == next(iter(counts)))
    what = _kinds(suffixes).partition(" (")[0]
    there = f"folder {item} contains no {what}; it has {_counted(counts, {})}"
    return f"{there}: {'add some texts' if special_kind(first) else _unread(first, suffixes)}"


def _unread(path: Path, suffixes: tuple[str, ...]) -> str:
    """Return the error message for a file of an unsupported type. It contains advice on how to
    convert the file.
    """
    if suffixes != SUFFIXES:
        return f"{path} has an unknown type: the supported types are {_RECORD_KINDS}"
    kind = _file_kind(path)
    return f"{path} is {kind.name}: {kind.advice(path)} (firstlight reads {READ_KINDS})"


def _kinds(suffixes: tuple[str, ...]) -> str:
    texts = f"text files (firstlight reads {READ_KINDS})"
    return texts if suffixes == SUFFIXES else f"files of records ({_RECORD_KINDS})"


def unread_files(inputs: Sequence[str | Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Return the files in folders and globs among the INPUTs that are of an unsupported type.
    Pipes, sockets, devices and broken links are included; hidden files are not.

    Raises:
        InputError: a folder can't be read.
    """
    found: list[Path] = []
    for path in (Path(item).expanduser() for item in inputs if str(item) != STANDARD_LIBRARY):
        if path.is_dir():
            found += _files_under(path)
        elif not path.exists() and any(character in str(path) for character in "*?["):
            names = glob.glob(str(path), recursive=True)
            found += (Path(name) for name in names if not os.path.isdir(name))
    others: dict[str, Path] = {}
    for file in found:
        if not _is_read(file, suffixes):
            # Unlike `Path.resolve`, `os.path.realpath` does not raise for cyclic links.
            others.setdefault(os.path.realpath(file), file)
    return sorted(others.values())


def neutral_name(item: str) -> str:
    """Return the name of an INPUT without the names of local folders and without secrets.

    For an absolute path, a path that begins with `~`, `..` or `./`, or a file:// URL, return only
    the last component. For any other URL, remove the user, password, query and fragment. Dataset
    names and other relative paths are returned unchanged.
    """
    if "://" in item:
        url = urlsplit(item)
        if url.scheme != "file":
            return urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
        item = url.path
    elif not item.startswith(("/", "~", "..", "./")):
        return item
    return Path(item).name or "data"


def write_sources(folder: Path, inputs: Sequence[str | Path], options: Sequence[str] = ()) -> None:
    """Write `sources.json`, which contains the `neutral_name` of each INPUT of a prepared corpus.
    The file is not written if there are no inputs.

    The names are not stored in the manifest, because the manifest identifies the data and the data
    does not depend on names. If the "cleaned" key is missing, the file was written by an earlier
    version that never cleaned text, so the corpus was prepared as if --as-is had been specified.

    Args:
        folder: the folder of the corpus.
        inputs: the INPUTs (see `find_sources`).
        options: options of `firstlight prepare` that affect how inputs are read and are not in the
            manifest.

    Raises:
        StorageError: the file can't be written.
    """
    if inputs:
        names = [neutral_name(item) for item in distinct_inputs(inputs)]
        content = {"inputs": names, "options": list(options), "cleaned": True}
        write_json(folder / SOURCES_NAME, content)


def read_sources(folder: Path) -> tuple[list[str], list[str], bool]:
    """Read the file written by `write_sources`, and return (names, options, cleaned). `cleaned` is
    False if the file was written by a version that never cleaned text. If the file does not exist,
    return ([], [], True).
    """
    try:
        found = read_json(folder / SOURCES_NAME)
    except InputError:
        return [], [], True
    if not isinstance(found, dict):
        return [], [], True
    lists = (found.get("inputs"), found.get("options"))
    names, options = ([str(x) for x in one] if isinstance(one, list) else [] for one in lists)
    return names, options, bool(found.get("cleaned"))


def by_ending(files: Sequence[Path]) -> dict[str, int]:
    """Count files by type, most frequent first. For a special file such as a pipe, the type is the
    result of `special_kind`. For an ordinary file, the type is its suffix in lower case, or "" if
    it has no suffix.
    """
    counts = Counter(map(_unread_kind, files))
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _unread_kind(file: Path) -> str:
    """Return the type of an unread file: the suffix of an ordinary file, or the result of
    `special_kind` for any other file.
    """
    return special_kind(file) or _ending(file.name.lower())


def _ending(name: str) -> str:
    """Return the suffix of a file name. For a compressed file, include the preceding suffix if it
    is known, as in .tar.gz. In changelog.Debian.gz, for example, the suffix is only .gz.
    """
    stem, dot, last = name.rpartition(".")
    if not stem or not dot or not last.isalnum() or len(last) > 10:
        return ""
    if f".{last}" in COMPRESSIONS:
        before = _ending(stem)
        is_known = before in (*SUFFIXES, ".json") or kind_by_ending(before) is not None
        return f"{before}.{last}" if is_known else f".{last}"
    return f".{last}"


def listed(unread: Mapping[str, int]) -> str:
    """Return a description of unread files, such as "7 .pdf, 2 without a suffix". If a command can
    convert files of a type to text, the type is followed by this command. Only the first few
    commands are included. One command that installs missing readers of documents follows.

    Args:
        unread: number of files of each type, as returned by `by_ending`.
    """
    ways: dict[FileKind, str] = {}
    for end in unread:
        kind = kind_by_ending(end)
        if kind is not None and "{text}" in kind.remedy and len(ways) < _SHOWN_WAYS:
            ways.setdefault(kind, end)
    waiting = sum(count for end, count in unread.items() if end in FORMATS)
    reader = f"; pip install 'firstlight[documents]' reads {waiting:,} of them" if waiting else ""
    advice = {
        end: f" ({kind.advice(Path(f'FILE{end}'), unread[end])})" for kind, end in ways.items()
    }
    return _counted(unread, advice) + reader


def _counted(counts: Mapping[str, int], advice: Mapping[str, str]) -> str:
    shown = [
        f"{count:,} {end or 'without a suffix'}{advice.get(end, '')}"
        for end, count in counts.items()
    ]
    rest = [f"{len(shown) - _SHOWN_ENDINGS} more kinds"] if len(shown) > _SHOWN_ENDINGS else []
    return ", ".join([*shown[:_SHOWN_ENDINGS], *rest])


def _is_read(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return True if a file has one of the suffixes. With the default suffixes, also return True
    for any other file that contains text.
    """
    # Do not open a pipe, because this would block until another process writes to it.
    if not path.is_file():
        return False
    name = path.name.lower()
    if name.endswith(suffixes):
        return True
    if (found := format_of(path)) is not None:
        return suffixes == SUFFIXES and found.is_installed
    try:
        return suffixes == SUFFIXES and _file_kind(path) is OTHER_TEXT
    except OSError:
        return False


def _file_kind(path: Path) -> FileKind:
    """Return the type of an ordinary file whose suffix is not supported. The type of compressed
    text, such as README.gz, is that of the uncompressed text.

    Raises:
        OSError: the file can't be read.
    """
    name = path.name.lower()
    kind = kind_of(path, _ending(name))
    if kind.name != COMPRESSED or not name.endswith(COMPRESSIONS[1:]):
        return kind
    inner = _ending(name.rpartition(".")[0])
    if kind_by_ending(inner) is not None:
        return kind
    try:
        content = kind_of_content(head_of(path), inner)
    except (OSError, EOFError, MissingDependencyError):
        return kind  # The content can't be decompressed.
    return OTHER_TEXT if content is OTHER_TEXT else kind


def unread_lines(files: Sequence[str | Path]) -> str:
    """Return the lines that list the files that were not read. Each line contains the path of a
    file, a tab, and the reason why the file was not read.
    """
    return "".join(f"{file}\t{_reason_unread(Path(file))}\n" for file in files)


def _reason_unread(path: Path) -> str:
    if special := special_kind(path):
        return f"a {special}"
    try:
        # Text in a supported format is skipped only when conversations are prepared.
        if _is_read(path, SUFFIXES) or (kind := _file_kind(path)) is OTHER_TEXT:
            return "no conversations"
    except OSError as error:
        return describe_read_error(error)
    return f"{kind.name}: {kind.advice(path)}"


def _files_under(folder: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise InputError(f"folder {folder} can't be read: {describe_read_error(error)}")

    for root, folders, names in os.walk(folder, onerror=unreadable):
        if set(names) >= _RUN_FILES:
            # This is a run folder. Its samples and metrics are JSONL files, but not meant for
            # training.
            folders.clear()
            continue
        folders[:] = _searched(folders)
        is_saved = {"dataset_info.json", "state.json"} <= set(names) or "dataset_dict.json" in names
        for name in names:
            file = Path(root) / name
            is_about = name in _DATASET_FILES or name.startswith("cache-")
            # Word keeps the owner of an open document in a file such as ~$letter.docx.
            if not name.startswith((".", "~$")) and not (is_about and is_saved):
                yield file


def _searched(folders: Sequence[str]) -> list[str]:
    """Return the names of the subfolders that should be searched."""
    return [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]


def _linked_folders(folder: str, named: Collection[str]) -> Iterator[Path]:
    """Yield the links in a folder that point to other folders, except links to the folders in
    `named`. `_files_under` does not follow such links, because they may be cyclic.
    """
    for root, folders, _ in os.walk(folder):
        folders[:] = _searched(folders)
        links = (Path(root) / name for name in folders if (Path(root) / name).is_symlink())
        yield from (link for link in links if os.path.realpath(link) not in named)


def _standard_library() -> list[DataSource]:
    """Return the .py files of the running interpreter's standard library, excluding tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _STDLIB_LEFT_OUT | _SKIPPED_FOLDERS]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    if not files:
        raise InputError(f"the standard library's source is not installed at {root}")
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return [
        DataSource(name=f"stdlib/{file.relative_to(root).as_posix()}", path=file) for file in files
    ]


def holds_one_document(source: DataSource) -> bool:
    """Return True if a source is a text file, which is read as a single document."""
    if source.path is None or format_of(source.path) is not None:
        return False
    return not source.name.lower().endswith(_MANY_DOCUMENTS)


def without(sources: Sequence[DataSource], others: Sequence[DataSource]) -> list[DataSource]:
    """Return the sources that are not in `others`. A file is recognised even if it has different
    names in the two lists.
    """
    known = {source.key for source in others}
    return [source for source in sources if source.key not in known]


def is_code(source: DataSource) -> bool:
    """Return True if a source is a file of source code."""
    return source.path is not None and source.name.lower().endswith(compressed(*_CODE_SUFFIXES))


def is_subtitles(source: DataSource) -> bool:
    """Return True if a source is a file of subtitles."""
    return source.path is not None and source.name.lower().endswith(compressed(".srt", ".vtt"))


def limited_sources(
    sources: Sequence[DataSource], most_bytes: int, kept: Sequence[DataSource] = ()
) -> list[DataSource]:
    """Limit sources to about `most_bytes` bytes of text in total.

    If the files contain more text than that, the fraction of the text to read is computed. An
    evenly spaced subset of the small text files is kept according to this fraction, and the same
    fraction is read from the beginning of every other file. A dataset is limited to `most_bytes`,
    because its size is unknown.

    Args:
        sources: the sources to limit.
        most_bytes: number of bytes of text to read in total.
        kept: sources that are always included, with their limits unchanged.
    """
    as_kept = {source.name: source for source in kept}
    known = [text_size(source) for source in sources]
    total = sum(known)
    if total <= most_bytes and all(source.dataset is None for source in sources):
        return [as_kept.get(source.name, source) for source in sources]
    share = min(most_bytes / total, 1.0) if total else 1.0
    limited: list[DataSource] = []
    # For example, if one fifth of the text is needed, every fifth small file is included, starting
    # with the first.
    due = 1.0 - share
    for source, size in zip(sources, known, strict=True):
        if holds_one_document(source) and 0 < size <= _WHOLE_BYTES:
            due += share
            if due >= 1.0 or source.name in as_kept:
                limited.append(as_kept.get(source.name, source))
            due %= 1.0
        elif source.name in as_kept:
            limited.append(as_kept[source.name])
        else:
            limit = max(int(size * share), 1) if size else most_bytes
            limited.append(replace(source, most_bytes=limit))
    return limited


def text_size(source: DataSource) -> float:
    """Estimate the size of the text in a file in bytes; 0 for a dataset."""
    if source.path is not None and format_of(source.path) is not None:
        return text_bytes_in(source.path)
    packed = (*COMPRESSIONS[1:], ".parquet")
    return source.size * (_UNPACKED if source.name.lower().endswith(packed) else 1.0)


def text_bytes(sources: Sequence[DataSource]) -> int | None:
    """Return the total size of the files in bytes. Return None if any source is a compressed file,
    a table or a dataset, because its size differs from the size of its text.
    """
    plain = (*TEXT_SUFFIXES, ".jsonl")
    if all(s.path is not None and s.path.suffix in plain for s in sources):
        return sum(source.size for source in sources)
    return None
