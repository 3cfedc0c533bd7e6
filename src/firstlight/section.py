"""The base of every section of a recipe and of every model configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen keys; an unknown key, a wrong type and a number that is not finite are errors.

    The text below a key is its documentation: `model_fields[key].description`, which
    `firstlight train --help-all` prints.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
