"""The base class of all sections of a recipe and of all model configurations."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """An immutable pydantic model that rejects unknown keys, wrong types, NaN and infinity.

    The docstring below a key becomes `model_fields[key].description`, which is shown by
    `firstlight train --help-all` and on the reference pages.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
