"""Base classes and types that the sections of the configuration share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def invalid(problem: str, hint: str) -> PydanticCustomError:
    """Return a validator's error that includes a hint."""
    return PydanticCustomError(
        "invalid", "{problem}", {"problem": problem, "hint": hint}
    )


class ForeignSection(BaseModel):
    """A section that Synapse defines: this model ignores unknown keys."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class StrictSection(BaseModel):
    """A section of this package: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def empty_if_none(value: Any) -> Any:
    """Return ``value``, or an empty mapping for a section without keys."""
    return {} if value is None else value


def list_if_none(value: Any) -> Any:
    """Return ``value``, or an empty list for a section without entries."""
    return [] if value is None else value


#: A port number.
Port = Annotated[int, Field(ge=1, le=65535)]
#: A list of names; a single name is converted to a list.
Names = Annotated[list[str], BeforeValidator(_one_or_many)]
