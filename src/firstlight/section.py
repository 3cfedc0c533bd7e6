"""Base class of all recipe sections and all model configs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """An immutable pydantic model that rejects unknown keys, wrong types, NaN and infinity.

    The docstring below a key is used as `model_fields[key].description`. It is shown by `firstlight
    train --help-all` and on the reference pages.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
