"""The base class of all sections of a recipe and of all model configurations."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """An immutable pydantic model. Unknown keys, wrong types and numbers that are not finite are
    errors.

    The text below a key is its documentation: `model_fields[key].description`, which
    `firstlight train --help-all` and the reference pages show.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
