"""What the tests of reports share."""

from __future__ import annotations

import pytest
from markupsafe import Markup

from firstlight.report import report


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have an empty drawing in each chart's place: drawing takes a second for a page, and
    most of a page's texts and all of its data stand beside the drawings."""
    monkeypatch.setattr(report, "svg", lambda *_, **__: Markup("<svg></svg>"))
