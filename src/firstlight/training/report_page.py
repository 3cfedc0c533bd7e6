"""What all HTML reports share: one self-contained file, texts from a run made harmless, charts.

A page loads nothing and runs nothing but its own inline script, which its Content-Security-Policy
names by hash; without JavaScript only the read-out under the pointer is missing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from firstlight.training.report_svg import Chart, data_of, svg, thinned
from firstlight.training.report_text import visible

#: By which a page of ours is told from other files.
GENERATOR = b'<meta name="generator" content="firstlight report">'
_HEAD_BYTES = 2000


def is_page(path: Path) -> bool:
    """Whether a file is an HTML report."""
    with open(path, "rb") as file:
        return GENERATOR in file.read(_HEAD_BYTES)


def page(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template of pages/ in; everything in `values` but Markup is escaped."""
    folder = resources.files("firstlight.training") / "pages"
    names = ("base.html", "figure.html", "run.html", "comparison.html")
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    environment = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    style = (folder / "style.css").read_text(encoding="utf-8")
    script = (folder / "readout.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # Both are written by us, and hold no "</".
    inline = {"style": Markup(style), "script": Markup(script)}
    return environment.get_template(template).render(
        policy=policy, generator=Markup(GENERATOR.decode()), **inline, **values
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


def plots(chart: Chart, buckets: int, *, both: bool) -> Markup:
    """A chart and the data for its read-out.

    Args:
        buckets: see `thin`.
        both: with a linear and with a logarithmic axis, of which the page's switch shows one.
    """
    chart = thinned(chart, buckets)
    drawn = Markup('<div class="plot linear">{}</div>').format(svg(chart))
    if both:
        drawn += Markup('<div class="plot log">{}</div>').format(svg(chart, log=True))
    return Markup('<div class="data" data-curves="{}">{}</div>').format(data_of(chart), drawn)


def legend(chart: Chart) -> list[tuple[str, str]]:
    """(class, name) of each curve that stands in the legend, and of each kind of mark."""
    marks = dict.fromkeys(mark.kind for mark in chart.marks)
    return [
        *((f"key {line.style}", line.name) for line in chart.lines if not line.faint),
        *((f"key mark {kind}", kind.replace("-", " ")) for kind in marks),
    ]
