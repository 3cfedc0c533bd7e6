"""Whether what the server is built on is installed."""

from __future__ import annotations

import importlib.util

from firstlight.errors import MissingDependencyError


def require_packages() -> None:
    """To be called before anything else of this package is imported.

    Raises:
        MissingDependencyError: one of them is missing.
    """
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(name, "serve", "the server")
