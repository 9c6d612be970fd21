"""The base of all settings: values that are checked when they are made, and never change."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every table: frozen, strict about types, finite, and closed to unknown keys.

    An integer is fine where a float is asked for; nothing else is converted.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
