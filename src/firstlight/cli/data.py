"""The command `firstlight data show`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import as_is_option, path_option, text_key_option
from firstlight.cli.output import show, show_table, with_json
from firstlight.console import human_bytes

if TYPE_CHECKING:
    from firstlight.data.contents import Contents

#: Maximum number of lines about documents that were left out.
_SHOWN = 20


@click.group("data")
def data_group() -> None:
    """Look at texts before training on them."""


@data_group.command("show")
@click.argument("input_", metavar="INPUT")
@click.argument("file", required=False)
@click.option(
    "--passages",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Number of random passages of each kind.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the passages.")
@path_option("--out", metavar="PAGE.html", help="Also write what is shown to this HTML page.")
@text_key_option
@as_is_option
@with_json
def show_command(
    input_: str,
    file: str | None,
    passages: int,
    seed: int,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> dict[str, Any]:
    """Show what is read of INPUT: the kinds of files, passages, and what is left out and why.

    INPUT is a file, folder, glob, `stdlib` or hf:NAME[:CONFIG[:SPLIT]], as in `prepare`. With FILE,
    which is a path, a file in the folder INPUT or a file in an archive, print the whole text of
    this file.
    """
    from firstlight.data.contents import contents_of, documents_of

    if out is not None:
        # The import takes seconds.
        from firstlight.report.report import require_replaceable

        require_replaceable(out)
    if file is not None:
        found = None
        documents = list(documents_of(input_, file, **options))
        result: dict[str, Any] = {
            "file": file,
            "documents": list(map(dataclasses.asdict, documents)),
        }
        for one in documents:
            show(f"{one.place}: left out: {one.left_out}" if one.left_out else f"{one.place}:")
            show(f"{one.text}\n" if one.text else "")
    else:
        documents = []
        found = contents_of(input_, seed=seed, passages=passages, progress=True, **options)
        result = dataclasses.asdict(found)
        _show(found)
    if out is not None:
        from firstlight.report.report import write_contents

        write_contents(file or input_, found, documents, out)
        show(f"page: {out}")
        result["page"] = out
    return result


def _show(found: Contents) -> None:
    if found.kinds:
        rows = [["kind", "files", "documents", "text", "share"]]
        for kind in found.kinds:
            numbers = [f"{kind.files:,}", f"{kind.documents:,}", human_bytes(kind.text_bytes)]
            rows.append([kind.kind, *numbers, f"{kind.share:.1%}"])
        if len(found.kinds) > 1:
            files, documents, size = (
                sum(getattr(kind, name) for kind in found.kinds)
                for name in ("files", "documents", "text_bytes")
            )
            rows.append(["all", f"{files:,}", f"{documents:,}", human_bytes(size), "100.0%"])
        show_table(rows)
    if found.left_out:
        show(f"\nleft out: {len(found.left_out):,}")
        for one in found.left_out[:_SHOWN]:
            show(f"  {one.place}: {one.left_out}")
        if len(found.left_out) > _SHOWN:
            show("  ... --json lists all of them")
    for kind in found.kinds:
        for passage in kind.passages:
            show(f"\n{passage.place}:")
            for line in passage.text.splitlines():
                show(f"  {line}")
