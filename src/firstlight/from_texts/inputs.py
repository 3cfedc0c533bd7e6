"""Detects by their first records which inputs are conversations, and lists the other files."""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.data.kinds import START_FROM
from firstlight.data.records import RECORD_SUFFIXES, find_records, kind_of_records
from firstlight.data.sources import STANDARD_LIBRARY, DataSource, find_sources, unread_files
from firstlight.errors import InputError
from firstlight.from_texts.scan import SHOWN_FILES


def conversations_in(inputs: Sequence[str], *, datasets: bool = True) -> list[DataSource]:
    """The files of conversations and preference pairs among the inputs.

    Args:
        inputs: files, folders, globs, "stdlib", "hf:NAME[:CONFIG[:SPLIT]]".
        datasets: True also looks into datasets on the Hugging Face hub.
    """
    found: dict[str, DataSource] = {}
    for item in inputs:
        # "stdlib" means Python's standard library, even if there is a file of this name.
        if item == STANDARD_LIBRARY:
            continue
        try:
            sources = find_records([item])
        except InputError:
            continue
        for source in sources:
            if (source.dataset is None or datasets) and kind_of_records(source) is not None:
                found.setdefault(source.name, source)
    return list(found.values())


def require_texts(inputs: Sequence[str]) -> None:
    """Refuse inputs that are mostly conversations or preference pairs, for a run that trains a new
    model.

    Raises:
        InputError: most of the inputs' bytes are conversations or preference pairs.
    """
    sources = conversations_in(inputs, datasets=False)
    if not sources:
        return
    try:
        others = find_sources(inputs)
    except InputError:
        others = []
    names = {source.name for source in sources}
    others = [source for source in others if source.name not in names]
    is_mostly_text = sum(one.size for one in others) >= sum(one.size for one in sources)
    if not (is_mostly_text or any(one.dataset for one in others)):
        kind = kind_of_records(sources[0])
        held = "conversations" if kind == "chat" else "preference pairs"
        advice = START_FROM[kind or "chat"]
        if others:
            advice += f"; for a new model, name the texts alone, such as {others[0].name}"
        raise InputError(f"{sources[0].name} holds {held}: {advice}")


def file_names(inputs: Sequence[str], sources: Sequence[DataSource]) -> list[str]:
    """The value of the recipe's `data.files` for `sources`: the inputs as they were given if they
    have no other files of records, else the names of `sources`.

    Args:
        inputs: files, folders, globs, "hf:NAME[:CONFIG[:SPLIT]]".
        sources: the sources among the inputs that contain conversations.
    """
    names = {source.name for source in sources}
    try:
        whole = {source.name for source in find_records(inputs)} == names
    except InputError:
        whole = False
    return list(inputs) if whole else [source.name for source in sources]


def other_files_line(inputs: Sequence[str], sources: Sequence[DataSource]) -> str:
    """A message with the files beside conversations that are not read; "" if there are none."""
    names = {source.name for source in sources}
    others = [str(path) for path in unread_files(inputs, RECORD_SUFFIXES)]
    for item in inputs:
        try:
            others += [one.name for one in find_records([item]) if one.name not in names]
        except InputError:
            continue
    if not others:
        return ""
    shown = ", ".join(others[:SHOWN_FILES]) + (", ..." if len(others) > SHOWN_FILES else "")
    count = f"{len(others):,} file{'s' if len(others) != 1 else ''}"
    return f"{count} beside the conversations not read: {shown}"
