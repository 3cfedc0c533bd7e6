"""Write the report of one or several runs, which consists of an HTML page and a PNG picture, and
the HTML page that compares two models.

A page is a single self-contained file, rendered from the templates in `pages/`. It does not load
any other files. Its Content-Security-Policy allows only the inline style and script, which are
identified by their hashes, and the styles in the markup of charts. JavaScript is used only to show
the values under the pointer. All strings from a run are escaped.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import math
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from firstlight.console import (
    counted,
    gib,
    human_bytes,
    loss_text,
    own_version,
    plain,
    rounded,
    visible,
)
from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import write_file
from firstlight.report.charts import (
    COLOURS,
    LINE_COLOURS,
    NOTE_INCHES,
    PICTURE_ORIGIN,
    Chart,
    Line,
    Mark,
    data_of,
    draw_in_picture,
    draw_title,
    plain_text,
    png,
    svg,
)
from firstlight.report.compare import (
    AXES,
    RunComparison,
    compare,
    compared_charts,
    number_table,
    warnings_of,
)
from firstlight.report.summary import (
    MOSTLY_LEARNED,
    Finding,
    accuracies,
    duration,
    final_numbers,
    findings_of,
    kept_result,
    memory_kind,
)
from firstlight.run_log.names import HTML_NAME, REPORT_NAME
from firstlight.run_log.reader import Metrics, RunRecord, Series, read_run, require_run, smoothed

if TYPE_CHECKING:
    from firstlight.data.contents import Contents, Document
    from firstlight.evaluation.comparison import ModelComparison, Segment

#: HTML element by which a page is recognized as a report.
GENERATOR = b'<meta name="generator" content="firstlight report">'
#: `GENERATOR` is searched for in this number of bytes at the beginning of a file.
_HEAD_BYTES = 2000
#: Default file name for the comparison of several runs.
COMPARISON_NAME = "comparison.html"


def draw_report(run_folder: Path) -> Path:
    """Write report.png and report.html of a run to its folder. Return the path of report.png. The
    run may still be in progress.

    Args:
        run_folder: run folder of `train`, which contains metrics.jsonl.

    Raises:
        StorageError: a file can't be written.
        CheckpointError: a file of the run is damaged.
    """
    run = read_run(run_folder)
    write_run(run, run_folder / HTML_NAME, run_folder / REPORT_NAME)
    return run_folder / REPORT_NAME


def write_run(run: RunRecord, html: Path, picture: Path) -> None:
    """Write the page and the picture of a run. Each file is written atomically.

    Args:
        run: the run.
        html, picture: paths of the page and the picture.

    Raises:
        StorageError: a file can't be written.
    """
    for path, content in ((picture, picture_of(run)), (html, run_page(run))):
        write_file(path, content)


@dataclass(frozen=True)
class WrittenReport:
    """A report that has been written.

    Attributes:
        page, picture: paths of the HTML page and the PNG picture.
        comparison: the run or runs shown in the report.
    """

    page: Path
    picture: Path
    comparison: RunComparison


def write_report(folders: Sequence[Path], out: Path | None = None) -> WrittenReport:
    """Write the report of one or several runs, which may still be in progress.

    Args:
        folders: one or more run folders.
        out: path of the HTML page. The picture has the same name with the suffix .png. If it is
            None, the page is report.html in the run folder or, for several runs, comparison.html in
            the current folder.

    Raises:
        InputError: a folder is missing or is not a run folder, or `out` is a file that is not a
            report.
        CheckpointError: a file of a run is damaged.
        ConfigError: a folder is listed twice, or `out` does not end in .html or .htm.
        StorageError: a file system error.
    """
    for folder in folders:
        require_run(folder)
    if out is None and len(folders) > 1:
        out = Path(COMPARISON_NAME)
    page, picture = folders[0] / HTML_NAME, folders[0] / REPORT_NAME
    if out is not None:
        page, picture = out, out.with_suffix(".png")
        require_replaceable(page, picture)
    found = compare([read_run(folder) for folder in folders])
    if len(folders) == 1:
        write_run(found.runs[0], page, picture)
    else:
        write_file(picture, comparison_picture(found))
        write_file(page, comparison_page(found))
    return WrittenReport(page, picture, found)


def require_replaceable(page: Path, picture: Path | None = None, *, option: str = "--out") -> None:
    """Raise an error if the name of a page does not end in .html or .htm, or if the page or picture
    would overwrite a file that is not a report.

    Args:
        page, picture: paths of the page and the picture; `picture` is None if there is no picture.
        option: name of the command-line option that sets the page's path, for the error messages.
    """
    if page.suffix.lower() not in (".html", ".htm"):
        also = "" if picture is None else ": the picture gets the same name with .png"
        raise ConfigError(f"{option} {page} must end in .html{also}")
    files = [(page, GENERATOR)]
    if picture is not None:
        files.append((picture, f"Software\0{PICTURE_ORIGIN}".encode()))
    for path, mark in files:
        if (path.exists() or path.is_symlink()) and not (path.is_file() and mark in _head(path)):
            raise InputError(f"{path} already exists and is not a report: choose another {option}")


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)


#: Types of JSON values, except null.
_JSON = (str, int, float, bool, list, dict)


def as_json(report: WrittenReport) -> dict[str, Any]:
    """Return a report as a JSON object. It contains the paths of the report's files. For each run,
    it contains the label, the `final_numbers` and the findings. It also contains the recipe keys
    whose values differ between the runs. Each key is mapped to a list with its value in each run,
    or null for runs whose recipe lacks the key.
    """
    found = report.comparison
    named = zip(found.labels, found.numbers, found.findings, strict=True)
    return {
        "report": str(report.page),
        "picture": str(report.picture),
        "runs": [
            {"label": label, **numbers, "findings": [one.as_json() for one in findings]}
            for label, numbers, findings in named
        ],
        "differences": {
            key: [value if isinstance(value, _JSON) else None for value in values]
            for key, values in found.differences.items()
        },
    }


# HTML pages


@functools.cache
def _templates() -> tuple[Environment, Mapping[str, str]]:
    """Return the compiled templates in the folder pages/, and the content of each file in this
    folder.
    """
    folder = resources.files("firstlight.report") / "pages"
    files = {one.name: one.read_text(encoding="utf-8") for one in folder.iterdir() if one.is_file()}
    environment = Environment(
        loader=DictLoader(files),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "visible": visible,
        "explained": explained,
        "plain": plain,
        "shortened": shortened,
        "kind_of": _kind_of,
        "happening": _happening,
    }
    return environment, files


def _page(template: str, values: Mapping[str, Any]) -> str:
    """Render a template in the folder pages/.

    Args:
        template: file name of the template.
        values: variables of the template. All values except `Markup` are escaped.
    """
    environment, files = _templates()
    light, dark = (
        " ".join(f"--{name}: {colours[mode]};" for name, colours in COLOURS.items())
        for mode in (0, 1)
    )
    style = (
        f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        + files["style.css"]
    )
    script = files["readout.js"]
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; style-src-attr 'unsafe-inline'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(template).render(
        policy=policy,
        generator=Markup(GENERATOR.decode()),
        version=own_version(),
        # The style and script are not escaped. They are part of this package and do not contain
        # "</".
        style=Markup(style),
        script=Markup(script),
        **values,
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


#: Explanations of technical terms, which are shown when the reader points at a term.
_TERMS = {
    "nats": "Unit of the loss, which is the mean of -ln(p), where p is the probability that the "
    "model assigned to the correct token. One bit is 0.693 nats. Lower is better.",
    "bits per byte": "Bits that the model needs per byte of text: the loss in bits, per byte "
    "instead of per token. It makes models with different tokenizers comparable. Lower is better.",
    "MFU": "Model FLOPs utilization: the FLOPs that the model needs, as a share of the hardware's "
    "peak. Higher is better.",
    "perplexity": "e to the power of the loss: the number of equally likely tokens among which "
    "the model chooses on average. Lower is better.",
}
_TERM = re.compile(rf"\b({'|'.join(_TERMS)})\b", re.IGNORECASE)
_MEANINGS = {name.lower(): meaning for name, meaning in _TERMS.items()}


def explained(text: object) -> Markup:
    """Escape a string, and add explanations to the technical terms in `_TERMS`. An explanation is
    shown when the reader points at the term, taps it or moves the keyboard focus to it.
    """
    term = Markup('<span class="term" tabindex="0">{}<span class="meaning">{}</span></span>')
    # Because the pattern contains a group, `split` returns the terms at the odd indices.
    parts = enumerate(_TERM.split(visible(text)))
    return Markup("").join(
        term.format(part, _MEANINGS[part.lower()]) if number % 2 else part for number, part in parts
    )


# Charts

#: Width and height of a chart in pixels before it is scaled by the page. The second size is used
#: for the additional drawing of charts that span a wide page.
_SIZE, _WIDE_SIZE = (420, 225), (1060, 330)
#: Number of buckets per pixel of a drawing into which `thin` divides curves.
_BUCKETS_PER_PIXEL = 0.7


def _figure(
    identity: str, chart: Chart, *, switch: bool = False, log: bool = False, wide: bool = False
) -> dict[str, Any]:
    """Return the arguments for the `figure` macro of the templates.

    Args:
        identity: id of the HTML element. It must be unique within the page.
        chart: the chart.
        switch: True to let the reader switch between a linear and a logarithmic axis.
        log: True to show the logarithmic axis initially if there is a switch.
        wide: True for a chart that spans the page.
    """
    switch = switch and chart.has_log
    marks = dict.fromkeys(mark.kind for mark in chart.marks)
    legend = [
        *((f"key {line.style}", line.name) for line in chart.lines if not line.faint),
        *((f"key mark {kind}", kind.replace("-", " ")) for kind in marks),
    ]
    return {
        "id": identity,
        "chart": chart,
        "drawings": _drawings(chart, both=switch, wide=wide),
        # CSS class and name of each legend entry. There is an entry for each curve that is not
        # faint and for each kind of event.
        "legend": legend,
        "log": log and switch,
        "switch": switch,
        "wide": wide,
    }


def _drawings(chart: Chart, *, both: bool, wide: bool) -> Markup:
    """Return the drawings of a chart and the data for its read-out.

    Args:
        chart: the chart.
        both: True to draw both a linear and a logarithmic version, so that the page can switch
            between them.
        wide: True to also draw a wide version. The style sheet selects the version based on the
            width of the page, so that text is shown at approximately its nominal size.
    """
    sizes = (_WIDE_SIZE, _SIZE) if wide else (_SIZE,)
    thinned = [chart.thinned(round(width * _BUCKETS_PER_PIXEL)) for width, _ in sizes]
    drawn = Markup("").join(
        Markup('<div class="plot {} w{}">{}</div>').format(
            "log" if log else "linear", size[0], svg(one, *size, log=log)
        )
        for log in ((False, True) if both else (False,))
        for one, size in zip(thinned, sizes, strict=True)
    )
    return Markup('<div class="data" data-curves="{}">{}</div>').format(data_of(thinned[0]), drawn)


# Writing the page of a run

#: Maximum number of events in the list. If there are more, only the last ones are shown.
_MAX_EVENTS = 500

#: Keys of metrics that are omitted from the section with additional metrics, because they are shown
#: elsewhere on the page or are derived from other metrics.
_SHOWN = {
    "train/loss",
    "val/loss",
    "train_eval/loss",
    "learning_rate",
    "global_batch_tokens",
    "grad_norm",
    "tokens_per_second",
    "learned_tokens_per_second",
    "samples_per_second",
    "memory_bytes",
    "reserved_bytes",
    "device_used_bytes",
    "gpu_utilization",
    "tokens_seen",
    "epoch",
    "seconds",
    "perplexity",
    "skipped",
    "skipped_steps",
    "kept/bits_per_byte",
}
#: Maximum number of charts in the section with additional metrics.
_MAX_FURTHER = 40


def run_page(run: RunRecord) -> str:
    """Return the HTML page of a run."""
    numbers, findings = final_numbers(run), findings_of(run)
    samples, samples_note = chosen_samples(run.samples)
    shown = {*_SHOWN, *accuracies(run.metrics)}
    further = [k for k in run.metrics.columns if k not in shown and not k.endswith("_stderr")]
    machine = run.start.get("machine")
    return _page(
        "run.html",
        {
            "run": run,
            **_progress(run, findings),
            "findings": findings,
            "facts": _facts(run, numbers),
            "cards": [*key_figures(numbers), *_kept_figures(run)],
            "figures": _figures(run, findings),
            "further": [
                _figure(f"more{number}", Chart(key, "", [Line(key, run.metrics.series(key), 7)]))
                for number, key in enumerate(further[:_MAX_FURTHER])
            ],
            "further_count": len(further),
            "accuracies": accuracies(run.metrics),
            "evaluation_figure": _evaluation_figure(run.metrics),
            "samples": samples,
            "samples_note": samples_note,
            "events": run.what_happened,
            "max_events": _MAX_EVENTS,
            "numbers": numbers,
            "machine": machine if isinstance(machine, dict) else {},
        },
    )


def _progress(run: RunRecord, findings: Sequence[Finding]) -> dict[str, str]:
    """Return the template variables `state` (a CSS class) and `progress` (text)."""
    step, most = run.last_step, run.max_steps
    kinds = [one.kind for one in findings]
    if "diverged" in kinds:
        of = "" if most is None or step >= most else f" of {most:,}"
        return {"state": "diverged", "progress": f"diverged: {step:,}{of} steps"}
    if most is None:
        return {"state": "", "progress": counted(step, "step")}
    if step >= most:
        # The class "complete" is shown in green, so it is used only for runs without findings.
        state = "" if findings else "complete"
        complete = f"complete: {counted(step, 'step')}"
        return {"state": state, "progress": ", ".join([complete, *kinds])}
    return {"state": "", "progress": f"step {step:,} of {most:,}"}


def _facts(run: RunRecord, numbers: Mapping[str, Any]) -> list[str]:
    """Return the facts that are shown in the line below the name of the run."""
    model = run.recipe.get("model")
    family = model.get("model_type") if isinstance(model, dict) else None
    facts = []
    if numbers["parameters"]:
        facts.append(f"{family or 'a model'} of {rounded(numbers['parameters'])} parameters")
    machine = run.start.get("machine")
    if isinstance(machine, dict) and isinstance(machine.get("name"), str):
        facts.append(machine["name"])
    began = run.starts[0].get("time") if run.starts else None
    if isinstance(began, str):
        facts.append(f"started {_when(began)}")
    if run.length:
        used, most = (
            run.length.get("seconds_used", 0.0) / 60,
            run.length.get("max_minutes", math.nan),
        )
        facts.append(f"{used:.2f} of {most:g} minutes")
    return facts


def _when(text: str) -> str:
    try:
        return f"{datetime.datetime.fromisoformat(text):%d %B %Y, %H:%M %Z}"
    except ValueError:
        return text


@dataclass(frozen=True)
class KeyFigure:
    """A key figure that is shown in large type, with its name, its unit and a note."""

    name: str
    value: str
    unit: str = ""
    note: str = ""


def key_figures(numbers: Mapping[str, Any]) -> list[KeyFigure]:
    """Return the key figures that are shown at the top of the page, based on the result of
    `final_numbers`. Unknown figures are omitted.
    """
    cards = []
    if numbers["val/loss"] is not None:
        best = (
            f"best {loss_text(numbers['best_val/loss'])} at step {numbers['best_val/loss_step']:,}"
        )
        cards.append(KeyFigure("validation loss", loss_text(numbers["val/loss"]), "nats", best))
    elif numbers["train/loss"] is not None:
        cards.append(KeyFigure("training loss", loss_text(numbers["train/loss"]), "nats"))
    if numbers["bits_per_byte"] is not None:
        gzip = numbers["gzip_bits_per_byte"]
        note = "" if gzip is None else f"gzip -9: {gzip:.3f} on all validation text"
        cards.append(KeyFigure("bits per byte", loss_text(numbers["bits_per_byte"], 3), "", note))
    if numbers["tokens_seen"] is not None:
        epochs = "" if numbers["epoch"] is None else counted(numbers["epoch"], "epoch", ".3g")
        cards.append(KeyFigure("tokens seen", rounded(numbers["tokens_seen"]), "", epochs))
    if numbers["tokens_per_second"] is not None:
        rate = rounded(numbers["tokens_per_second"])
        cards.append(KeyFigure("throughput", rate, "tokens/s", _beside_throughput(numbers)))
    if numbers["memory_bytes"] is not None:
        size, unit = gib(numbers["memory_bytes"]).split()
        cards.append(KeyFigure("peak memory", size, unit, memory_kind(numbers)))
    if numbers["hours"]:
        cards.append(KeyFigure("training time", *duration(numbers["hours"]), "steps and saves"))
    return cards


def _kept_figures(run: RunRecord) -> Iterator[KeyFigure]:
    """Yield a key figure with the change of the kept text, if the run has one."""
    kept = kept_result(run.folder)
    if kept is not None:
        before, after = kept.kept
        change = 100 * (after / before - 1)
        yield KeyFigure("kept text", f"{change:+.1f}", "% bits", str(kept))


def _beside_throughput(numbers: Mapping[str, Any]) -> str:
    found = []
    learned = numbers["learned_tokens_per_second"]
    if learned is not None and learned < MOSTLY_LEARNED * numbers["tokens_per_second"]:
        found.append(f"{rounded(learned)} learned tokens/s")
    if numbers["samples_per_second"] is not None:
        found.append(f"{rounded(numbers['samples_per_second'])} samples/s")
    if numbers["mfu"] is not None:
        found.append(f"MFU {numbers['mfu']:.1%}")
    return f"{', '.join(found)}; medians" if found else ""


def loss_chart(run: RunRecord, findings: Sequence[Finding]) -> Chart:
    """Return the chart of a run's losses and events. It shows the training loss per step, the
    smoothed training loss, the validation loss, and the loss on a fixed sample of the training
    split.
    """
    raw = run.metrics.series("train/loss")
    lines = [
        Line("train/loss, each step", raw, 0, faint=True),
        Line("train/loss, smoothed", smoothed(raw), 0),
        Line("val/loss", run.metrics.series("val/loss"), 1),
        Line("train_eval/loss", run.metrics.series("train_eval/loss"), 6),
    ]
    marks = [Mark(event["step"], _kind_of(event)) for event in run.what_happened]
    marks += [
        Mark(one.since_step, "lowest-validation-loss")
        for one in findings
        if one.kind == "overfitting"
    ]
    of = "pair" if run.recipe.get("preference") is not None else "token"
    return Chart(
        "Loss",
        f"nats per {of}",
        [line for line in lines if len(line.series)],
        marks=marks,
        below=("tokens seen", run.metrics.series("tokens_seen")),
        above=("epochs", run.metrics.series("epoch")),
    )


def further_charts(metrics: Metrics) -> dict[str, Chart]:
    """Return the charts of the new and kept text, learning rate, batch size, gradient norm,
    throughput, GPU utilization and memory, keyed by id. Charts without any values are omitted.
    """
    memory = [(metrics.series(key), name, colour) for key, name, colour in _MEMORY]
    used = [Line(n, Series(s.x, s.y / 2**30), colour) for s, n, colour in memory if len(s)]
    busy = metrics.series("gpu_utilization")
    charts = {}
    if len(metrics.series("kept/bits_per_byte")):
        lines = [
            Line("new text", metrics.series("bits_per_byte"), 1),
            Line("kept text", metrics.series("kept/bits_per_byte"), 6),
        ]
        charts["kept"] = Chart(
            "New and kept text",
            "bits per byte, held out",
            [one for one in lines if len(one.series)],
        )
    for identity, title, unit_name, series, colour in (
        ("rate", "Learning rate", "", metrics.series("learning_rate"), 2),
        ("batch", "Tokens per step", "", metrics.series("global_batch_tokens"), 6),
        ("norm", "Gradient norm", "before clipping", metrics.series("grad_norm"), 3),
        ("speed", "Throughput", "tokens/s", metrics.series("tokens_per_second"), 5),
        ("gpu", "GPU utilization", "%, reported by the driver", Series(busy.x, 100 * busy.y), 1),
    ):
        if len(series):
            line = Line(title.lower(), series, colour)
            charts[identity] = Chart(title, unit_name, [line], zero=True)
    if used:
        charts["memory"] = Chart("Memory", "GiB, peak so far", used, zero=True)
    return charts


#: Memory metrics, as (key, name in the chart, colour).
_MEMORY = (
    ("memory_bytes", "memory", 4),
    ("reserved_bytes", "reserved by the allocator", 6),
    ("device_used_bytes", "used on the GPU, all processes", 7),
)


def _figures(run: RunRecord, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    loss = loss_chart(run, findings)
    figures = [_figure("loss", loss, switch=True, wide=True, log=loss.needs_log)]
    for identity, chart in further_charts(run.metrics).items():
        is_norm = identity == "norm"
        figures.append(_figure(identity, chart, switch=is_norm, log=is_norm))
    return figures


def _evaluation_figure(metrics: Metrics) -> dict[str, Any] | None:
    """Return a chart of the benchmark accuracies by step, or None if there
    were fewer than two evaluations."""
    lines = []
    for number, key in enumerate(accuracies(metrics)):
        series = metrics.series(key)
        by_step = metrics.series(f"{key}_stderr")
        errors = dict(zip(by_step.x.tolist(), by_step.y.tolist(), strict=True))
        known = np.array([abs(errors.get(x, 0.0)) for x in series.x.tolist()])
        lines.append(Line(key, series, number, errors=known if known.any() else None))
    if max((len(line.series) for line in lines), default=0) < 2:
        return None
    shown = lines[: 2 * LINE_COLOURS]
    note = "± one standard error"
    if len(shown) < len(lines):
        note += f"; the first {len(shown)} of {len(lines)}"
    return _figure("accuracy", Chart("Accuracy", note, shown), wide=True)


#: CSS class and description of each kind of event in the list of events, keyed by the event's name.
_EVENTS = {
    "rollback": ("rollback", "back to step {to_step}: {reason}"),
    "out of memory": (
        "out-of-memory",
        "micro-batch size {micro_batch_rows} instead of {before}",
    ),
    "resumed": ("resumed", "from the checkpoint of step {step}, {time}"),
    "branched": ("resumed", "from {branched_from}, {time}"),
    "diverged": ("diverged", "{reason}"),
    "length": ("decision", "{max_steps:,} steps fit into {max_minutes} minutes"),
    "early stop": ("decision", "no new lowest validation loss in {evaluations} evaluations"),
    "replay": ("decision", "share of kept text in the following rows: {share}"),
    "correction": (
        "decision",
        "{max_steps:,} steps instead of {before:,}, because the speed changed",
    ),
}


def _kind_of(event: Mapping[str, Any]) -> str:
    """Return the CSS class of an event on a page."""
    return _EVENTS.get(event["event"], ("event", ""))[0]


def _happening(event: Mapping[str, Any]) -> str:
    """Return the description of an event for the list of events."""
    if event["event"] not in _EVENTS:
        details = (f"{k} {v}" for k, v in event.items() if k not in ("step", "event"))
        return f"{event['event']} {', '.join(details)}"
    values = {**event, "time": _when(str(event.get("time", "")))}
    return _EVENTS[event["event"]][1].format_map(values)


# Writing the page that compares several runs


def comparison_page(found: RunComparison) -> str:
    """Return the HTML page that compares several runs."""
    charts = compared_charts(found)
    figures = []
    for number, by_axis in enumerate(charts):
        # If the number of charts is odd, the first chart spans the page.
        wide = len(charts) % 2 == 1 and number == 0
        drawn = [(axis, _drawings(one, both=True, wide=wide)) for axis, one in by_axis.items()]
        figures.append({"chart": by_axis["step"], "by_axis": drawn, "wide": wide})
    lines = charts[0]["step"].lines
    return _page(
        "comparison.html",
        {
            "log": any(by_axis["step"].needs_log for by_axis in charts),
            "title": f"{len(found.runs)} runs",
            "labels": [(line.name, f"key {line.style}") for line in lines],
            "axes": AXES,
            "figures": figures,
            "numbers": number_table(found),
            "differences": found.differences,
            "recipes": sum(bool(run.recipe) for run in found.runs),
            "samples": [
                (label, *(chosen_samples(run.samples)[0] or [("", [])])[0])
                for label, run in zip(found.labels, found.runs, strict=True)
            ],
            "warnings": warnings_of(found),
        },
    )


# Samples

#: Maximum total size in bytes of all samples on a page after escaping, and maximum number of
#: characters of a single sample.
_MAX_SAMPLES, _MAX_TEXT = 1_500_000, 100_000


def chosen_samples(
    samples: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[str, list[tuple[str, str]]]], str]:
    """Return the samples to show, with the newest first.

    If the samples exceed `_MAX_SAMPLES` bytes in total, only the samples of every second step are
    shown, counting back from the last step. If they are still too large, only every fourth step is
    shown, and so on.

    Args:
        samples: lines of samples.jsonl.

    Returns:
        A tuple of two values. The first value contains, for each step, the step number as a string
        and the list of (prompt, text) pairs. The second value is a note about omitted steps, or ""
        if no steps are omitted.
    """
    steps = [
        (f"{step:,}", [(shortened(line["prompt"]), shortened(line["text"])) for line in lines])
        for step, lines in groupby(samples, key=lambda line: line["step"])
    ][::-1]
    sizes = [
        sum(len(str(Markup.escape(visible(text))).encode()) for pair in pairs for text in pair)
        for _, pairs in steps
    ]
    every = 1
    while every < len(steps) and sum(sizes[::every]) > _MAX_SAMPLES:
        every *= 2
    shown = steps[::every]
    note = "" if len(shown) == len(steps) else f"{len(shown)} of {len(steps)} evaluations"
    return shown, note


def shortened(text: str) -> str:
    """Truncate a string to `_MAX_TEXT` characters."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} […]"


# Pictures

#: Heights in inches of a chart beside the loss chart, of a title, and of a line in a sample.
_CHART_INCHES = 2.6
_TITLE_INCHES = 0.4
_LINE_INCHES = 0.14
#: Layout of the samples in a picture: the number of characters in a line that spans the picture,
#: the maximum number of lines in a column, and the minimum number of lines per column if there are
#: several columns.
_CHARACTERS = 160
_MAX_LINES = 18
_FEWEST_LINES = 6
#: Number of characters to which a sample in a picture is truncated.
_MAX_PICTURE_TEXT = 10_000


def picture_of(run: RunRecord) -> bytes:
    """Return the picture of a run as PNG bytes."""
    # Use Figure instead of pyplot, because pyplot looks for a window system and keeps global state.
    from matplotlib.figure import Figure

    findings = findings_of(run)
    notes = [
        plain_text(line)
        for one in findings
        for text in (f"{one.text}.", f"What helps: {one.advice}.")
        for line in textwrap.wrap(text, _CHARACTERS)
    ]
    samples = _sample_columns(run.samples)
    rows = max((len(column) for column in samples), default=0)
    charts = further_charts(run.metrics)
    beside = [name for name in ("kept", "rate", "norm", "speed", "batch") if name in charts]
    heights = [_CHART_INCHES] * max(len(beside), 2)
    mosaic = [["loss", "loss", name] for name in beside] or [["loss"], ["loss"]]
    if rows:
        heights.append(_TITLE_INCHES + rows * _LINE_INCHES)
        mosaic.append(["text"] * len(mosaic[0]))
    height = sum(heights) + 2 * _TITLE_INCHES + NOTE_INCHES * len(notes)
    figure = Figure(figsize=(13, height), layout="constrained")
    grid: dict[str, Any] = figure.subplot_mosaic(mosaic, height_ratios=heights[: len(mosaic)])
    draw_in_picture(grid["loss"], loss_chart(run, findings))
    for name in beside:
        draw_in_picture(grid[name], charts[name], log=charts[name].has_log and name == "norm")
    if rows:
        _draw_samples(grid["text"], samples, run.samples[-1]["step"])
    figures = [f"{one.name} {one.value} {one.unit}" for one in key_figures(final_numbers(run))]
    title = f"firstlight · {plain_text(run.name)}\n{'  ·  '.join(figures)}"
    draw_title(figure, title, notes)
    return png(figure)


def loss_picture(run: RunRecord) -> bytes:
    """Return the chart of a run's losses as PNG bytes. The chart is intended for publishing. It
    does not contain the samples or findings of the run, because they may include paths on this
    machine.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    draw_in_picture(figure.subplots(), loss_chart(run, ()))
    return png(figure)


def comparison_picture(found: RunComparison) -> bytes:
    """Draw the losses of several runs as functions of steps, tokens and hours, and return the
    picture as PNG bytes.
    """
    from matplotlib.figure import Figure

    charts = compared_charts(found)[:2]
    notes = [plain_text(line) for text in warnings_of(found) for line in textwrap.wrap(text, 170)]
    height = 4 * len(charts) + NOTE_INCHES * len(notes)
    figure = Figure(figsize=(15, height), layout="constrained")
    grid: Any = figure.subplots(len(charts), 3, squeeze=False)
    for row, by_axis in zip(grid, charts, strict=True):
        for axes, chart in zip(row, by_axis.values(), strict=True):
            draw_in_picture(axes, chart)
    draw_title(figure, "firstlight · runs side by side", notes)
    return png(figure)


def _sample_columns(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the lines of the last step's samples, arranged in as many columns as fit side by side.
    There are at most four columns.
    """
    lines: list[str] = []
    for sample in samples:
        if sample["step"] != samples[-1]["step"]:
            continue
        # Discard text that can't fit in the picture in any case.
        text = (sample["prompt"] + sample["text"])[:_MAX_PICTURE_TEXT].expandtabs(4)
        for line in text.splitlines():
            lines += textwrap.wrap(line, _CHARACTERS, drop_whitespace=False) or [""]
        lines.append("")
    lines = lines[:-1]
    longest = max((_width(line) for line in lines), default=0)
    columns = next(n for n in (4, 3, 2, 1) if n == 1 or n * (longest + 3) <= _CHARACTERS)
    # If there are only a few lines, fewer columns are used, because they are easier to read.
    columns = min(columns, -(-len(lines) // _FEWEST_LINES))
    height = min(-(-len(lines) // columns), _MAX_LINES) if lines else 0
    return [lines[i * height : (i + 1) * height] for i in range(columns)] if height else []


def _width(line: str) -> int:
    """Return the width of a line in character cells of a monospaced font. Wide East Asian
    characters take two cells.
    """
    return len(line) + sum(unicodedata.east_asian_width(c) in "WF" for c in line)


def _draw_samples(axes: Any, columns: Sequence[Sequence[str]], step: int) -> None:
    axes.axis("off")
    axes.set_title(f"sample at step {step:,}", loc="left", fontsize="medium")
    for number, column in enumerate(columns):
        text, place = plain_text("\n".join(column)), number / len(columns)
        axes.text(
            place, 1, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes
        )


def write_model_comparison(comparison: ModelComparison, path: Path) -> None:
    """Write the HTML page that compares two models.

    Raises:
        StorageError: the file can't be written.
    """

    def strength(segment: Segment) -> int:
        # The intensity of the colour is the difference in bits, rounded and limited to 4.
        return min(round(abs(segment.after - segment.before)), 4)

    write_file(path, _page("models.html", {"found": comparison, "strength": strength}))


def write_contents(
    name: str, found: Contents | None, documents: Sequence[Document], path: Path
) -> None:
    """Write the HTML page of what was read of an input, or of the text of one of its files.

    Args:
        name: the input or the file.
        found: contents of the input; None to show only `documents`.
        documents: documents of the file.
        path: path of the page.

    Raises:
        StorageError: the file can't be written.
    """
    values = {"name": name, "found": found, "documents": documents, "human_bytes": human_bytes}
    write_file(path, _page("contents.html", values))
