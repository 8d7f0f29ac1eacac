"""Base classes and types that the sections of the configuration share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def invalid(problem: str, hint: str) -> PydanticCustomError:
    """Return a validator's error that includes a hint."""
    return PydanticCustomError(
        "invalid", "{problem}", {"problem": problem, "hint": hint}
    )


#: The docstring of a field is its description in the manual.
_COMMON = ConfigDict(
    frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
)


class ForeignSection(BaseModel):
    """A section that Synapse defines: this model ignores unknown keys."""

    model_config = ConfigDict(extra="ignore", **_COMMON)


class StrictSection(BaseModel):
    """A section of this package: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", **_COMMON)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


T = TypeVar("T")
#: A section or mapping that may be written without any key.
OrEmpty = Annotated[T, BeforeValidator(lambda value: {} if value is None else value)]
#: A list that may be written without any entry.
ListOf = Annotated[
    list[T], BeforeValidator(lambda value: [] if value is None else value)
]
#: A port number.
Port = Annotated[int, Field(ge=1, le=65535)]
#: A list of names; a single name is converted to a list.
Names = Annotated[list[str], BeforeValidator(_one_or_many)]
