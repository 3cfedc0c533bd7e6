"""The page of every HTML report: one self-contained file, texts from a run made harmless, charts.

A page loads nothing and runs nothing but its own inline script, which its Content-Security-Policy
names by hash; without JavaScript only the read-out under the pointer is missing.
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

#: Mark by which a report is recognised.
GENERATOR = b'<meta name="generator" content="firstlight report">'
_HEAD_BYTES = 2000


def is_page(path: Path) -> bool:
    """True if a file is an HTML report."""
    with open(path, "rb") as file:
        return GENERATOR in file.read(_HEAD_BYTES)


def page(template: str, values: Mapping[str, Any], scripts: Sequence[str] = ("readout.js",)) -> str:
    """Fill a template of pages/ in; everything in `values` but Markup is escaped.

    Args:
        scripts: files of pages/ that are put into the page. With more than one, they may also ask
            the server of the page.
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
    # Both are written by us, and hold no "</".
    inline = {"style": Markup(style), "script": Markup(script)}
    return environment.get_template(template).render(
        policy=policy, generator=Markup(GENERATOR.decode()), **inline, **values
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


#: Explanations of words of a report; each is shown beside its word.
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
    """A text, escaped, in which each technical term shows its meaning when it is pointed at, tapped
    or reached by the keyboard."""
    term = Markup('<span class="term" tabindex="0">{}<span class="meaning">{}</span></span>')
    # At the odd places stand the terms.
    parts = enumerate(_TERM.split(visible(text)))
    return Markup("").join(
        term.format(part, _MEANINGS[part.lower()]) if number % 2 else part for number, part in parts
    )


#: (width, height) of the drawings for narrower places than the chart's own; the page's style shows
#: the one whose letters have about their own size.
_NARROWER = ((680, 300), (360, 230))


def plots(chart: Chart, buckets: int, *, both: bool) -> Markup:
    """A chart in the sizes that a page may have room for, and the data for its read-out.

    Args:
        buckets: see `thin`.
        both: draw a linear and a logarithmic axis; the page's switch shows one of them.
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
    """(class, name) of each curve that stands in the legend, and of each kind of mark."""
    marks = dict.fromkeys(mark.kind for mark in chart.marks)
    return [
        *((f"key {line.style}", line.name) for line in chart.lines if not line.faint),
        *((f"key mark {kind}", kind.replace("-", " ")) for kind in marks),
    ]


#: Characters of samples on a page, escaped; and of one text.
_MAX_SAMPLES, _MAX_TEXT = 1_500_000, 100_000


def chosen_samples(
    samples: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[str, list[tuple[str, str]]]], str]:
    """([(step, [(prompt, text)])], note): all samples, the newest first. If there are more than a
    page can hold, those of the last step, of the first, and of steps evenly in between."""
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
    """Bytes that a sample may take on the page."""
    texts = (shortened(line["prompt"]), shortened(line["text"]))
    return sum(len(str(Markup.escape(visible(text))).encode()) for text in texts)


def shortened(text: str) -> str:
    """A text cut to the most characters that a page shows of one."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} […]"


def duration(hours: float) -> tuple[str, str]:
    """(figure, unit) of a time: ("12.3", "min")."""
    for unit, length in (("h", 1.0), ("min", 1 / 60), ("s", 1 / 3600)):
        if hours >= length or unit == "s":
            return (
                f"{hours / length:,.3g}" if hours < 100 * length else f"{hours / length:,.0f}",
                unit,
            )
    raise AssertionError("unreachable")


def memory_unit(most: float) -> tuple[int, str]:
    """(bytes, name) of the unit to write `most` bytes in."""
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def loss_unit(run: RunRecord) -> str:
    """The unit of the loss; preference pairs have one loss a pair."""
    return f"nats a {'pair' if run.recipe.get('preference') is not None else 'token'}"
