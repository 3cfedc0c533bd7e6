"""Fixtures shared by the tests of reports."""

from __future__ import annotations

import pytest
from markupsafe import Markup

from firstlight.report import report


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace each chart by an empty drawing. Drawing takes a second per page, and most of a page's
    texts and all of its data are outside of the drawings.
    """
    monkeypatch.setattr(report, "svg", lambda *_, **__: Markup("<svg></svg>"))
