"""The common parts of all HTML reports: templates, explanations, charts in several sizes, samples.

A page is one self-contained file. It loads no other files, and its Content-Security-Policy allows
only its own inline style and script, by their hashes. Without JavaScript, only the read-out under
the pointer is missing. Texts from a run are escaped.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from firstlight.console import visible
from firstlight.report.charts import Chart, data_of, svg, thinned
from firstlight.report.records import RunRecord

#: Element by which an HTML report is recognised.
GENERATOR = b'<meta name="generator" content="firstlight report">'
#: Bytes from the beginning of a file in which it is searched.
_HEAD_BYTES = 2000


def is_page(path: Path) -> bool:
    """True if a file is an HTML report."""
    with open(path, "rb") as file:
        return GENERATOR in file.read(_HEAD_BYTES)


def page(template: str, values: Mapping[str, Any], scripts: Sequence[str] = ("readout.js",)) -> str:
    """Render a template of the folder pages/.

    Args:
        template: file name of the template.
        values: variables of the template; everything but `Markup` is escaped.
        scripts: files of pages/ that are inlined. With more than one, the page may also connect to
            the server that it comes from.
    """
    folder = resources.files("firstlight.report") / "pages"
    names = ("base.html", "macros.html", "run.html", "comparison.html", "dashboard.html")
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    environment = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    environment.filters["explained"] = explained
    style = (folder / "style.css").read_text(encoding="utf-8")
    script = "".join((folder / name).read_text(encoding="utf-8") for name in scripts)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    if len(scripts) > 1:
        policy += "; connect-src 'self'"
    # Not escaped: both are files of this package, and don't contain "</".
    inline = {"style": Markup(style), "script": Markup(script)}
    return environment.get_template(template).render(
        policy=policy, generator=Markup(GENERATOR.decode()), **inline, **values
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


#: Explanations of technical terms, which are shown at the terms.
_TERMS = {
    "nats": "Unit of the loss: -ln of the probability that the model gave to the right token, on "
    "average. One bit is 0.693 nats. Lower is better.",
    "bits per byte": "Bits that the model needs for each byte of the text: the loss divided by "
    "ln 2, per byte instead of per token. It compares models with different tokenizers. Lower is "
    "better.",
    "MFU": "Model FLOPs utilization: the share of the hardware's peak arithmetic that the model's "
    "own computation takes. Higher is better.",
    "perplexity": "e to the power of the loss: the number of equally likely tokens that the model "
    "hesitates between on average. Lower is better.",
}
_TERM = re.compile(rf"\b({'|'.join(_TERMS)})\b", re.IGNORECASE)
_MEANINGS = {name.lower(): meaning for name, meaning in _TERMS.items()}


def explained(text: object) -> Markup:
    """An escaped text in which each technical term of `_TERMS` shows its explanation when the
    reader points at it, taps it, or reaches it by the keyboard."""
    term = Markup('<span class="term" tabindex="0">{}<span class="meaning">{}</span></span>')
    # `split` by a pattern with a group puts the terms at the odd indices.
    parts = enumerate(_TERM.split(visible(text)))
    return Markup("").join(
        term.format(part, _MEANINGS[part.lower()]) if number % 2 else part for number, part in parts
    )


#: (width, height) in pixels of additional drawings for narrow screens. The page's style shows the
#: drawing that is scaled least, so that its letters have about their real size.
_NARROWER = ((680, 300), (360, 230))


def plots(chart: Chart, buckets: int, *, both: bool) -> Markup:
    """The drawings of a chart for several widths of the page, with the data for its read-out.

    Args:
        chart: the chart.
        buckets: see `thin`.
        both: True draws a linear and a logarithmic version, between which the page can switch.
    """
    chart = thinned(chart, buckets)
    sizes = [chart]
    for width, height in _NARROWER:
        if width < chart.width:
            fewer = thinned(chart, buckets * width // chart.width)
            sizes.append(replace(fewer, width=width, height=height))
    drawn = Markup("").join(
        Markup('<div class="plot {} w{}">{}</div>').format(
            "log" if log else "linear", one.width, svg(one, log=log)
        )
        for log in ((False, True) if both else (False,))
        for one in sizes
    )
    return Markup('<div class="data" data-curves="{}">{}</div>').format(data_of(chart), drawn)


def legend(chart: Chart) -> list[tuple[str, str]]:
    """CSS class and name of each entry of the legend: the curves that are not faint, and the kinds
    of marks."""
    marks = dict.fromkeys(mark.kind for mark in chart.marks)
    return [
        *((f"key {line.style}", line.name) for line in chart.lines if not line.faint),
        *((f"key mark {kind}", kind.replace("-", " ")) for kind in marks),
    ]


#: Largest number of bytes of all samples on a page, after escaping; and of characters of one text.
_MAX_SAMPLES, _MAX_TEXT = 1_500_000, 100_000


def chosen_samples(
    samples: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[str, list[tuple[str, str]]]], str]:
    """The samples to show, the newest first.

    If there are more than `_MAX_SAMPLES`, only those of the last step, the first step, and some
    steps evenly in between are taken.

    Args:
        samples: lines of samples.jsonl.

    Returns:
        For each step its number as text, and pairs (prompt, text); and a note on left-out steps, ""
        if there are none.
    """
    steps = [(step, list(lines)) for step, lines in groupby(samples, key=lambda line: line["step"])]
    steps.reverse()
    sizes = [sum(_size(line) for line in lines) for _, lines in steps]
    count, chosen = len(steps), list(range(len(steps)))
    while len(chosen) > 1 and sum(sizes[i] for i in chosen) > _MAX_SAMPLES:
        count = max(1, min(count // 2, len(chosen) - 1))
        chosen = sorted({round(i * (len(steps) - 1) / max(count - 1, 1)) for i in range(count)})
    shown = [
        (f"{steps[i][0]:,}", [(shortened(s["prompt"]), shortened(s["text"])) for s in steps[i][1]])
        for i in chosen
    ]
    note = "" if len(chosen) == len(steps) else f"{len(chosen)} of {len(steps)} evaluations"
    return shown, note


def _size(line: Mapping[str, Any]) -> int:
    """Size of a sample on the page after escaping, in bytes."""
    texts = (shortened(line["prompt"]), shortened(line["text"]))
    return sum(len(str(Markup.escape(visible(text))).encode()) for text in texts)


def shortened(text: str) -> str:
    """A text truncated to `_MAX_TEXT` characters."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} […]"


def duration(hours: float) -> tuple[str, str]:
    """Number and unit of a time, as texts: ("12.3", "min")."""
    for unit, length in (("h", 1.0), ("min", 1 / 60), ("s", 1 / 3600)):
        if hours >= length or unit == "s":
            return (
                f"{hours / length:,.3g}" if hours < 100 * length else f"{hours / length:,.0f}",
                unit,
            )
    raise AssertionError("unreachable")


def memory_unit(most: float) -> tuple[int, str]:
    """Size in bytes and name of a unit (MiB or GiB) that is suitable for `most` bytes."""
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def loss_unit(run: RunRecord) -> str:
    """The unit of a run's loss, which for preference pairs is per pair."""
    return f"nats a {'pair' if run.recipe.get('preference') is not None else 'token'}"
