"""`firstlight report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.output import say_findings, show_rows, show_table, with_json

if TYPE_CHECKING:
    from firstlight.report.report import WrittenReport


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    metavar="FILE.html",
    type=click.Path(path_type=Path),
    help="Where to write; the picture gets the same name with .png. [one run: report.html in its "
    "folder; several: comparison.html here]",
)
@with_json
def report_command(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> dict[str, Any]:
    """Draw a run as a web page and a picture, or lay several side by side.

    RUN is a run folder; the run may still be going on, or have been killed. The page is one file
    that loads nothing from elsewhere.
    """
    from firstlight.report import report as report_files

    report = report_files.write_report([run.expanduser() for run in runs], out)
    result = report_files.as_json(report)
    _show_numbers(report)
    show_rows([("report", report.page), ("picture", report.picture)])
    for label, findings in zip(report.comparison.labels, report.comparison.findings, strict=True):
        say_findings(findings, label if len(runs) > 1 else "")
    return result


def _show_numbers(report: WrittenReport) -> None:
    from firstlight.report.compare import number_table

    labels = report.comparison.labels
    rows = [(name, *texts) for name, texts, _ in number_table(report.comparison)]
    show_table([("", *labels), *rows])
