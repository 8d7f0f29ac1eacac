"""Base classes and types that the sections of the configuration share.

:func:`~synapse_replication.config.validation.read_value` creates a section from a
mapping, and reports everything in the mapping that the annotations of its fields do not
allow. The descriptions of its fields are those of the manual.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct
from typing_extensions import override


class Section(Struct, frozen=True):
    """A section that Synapse defines: unknown keys are ignored."""

    @override
    def __repr__(self) -> str:
        # Without the values: some are secrets.
        return f"{type(self).__name__}(...)"

    @override
    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the values that rich shows, for instance in a traceback: none."""
        return []


class StrictSection(Section, frozen=True, forbid_unknown_fields=True):
    """A section of this package: an unknown key is an error."""


class InvalidValueError(ValueError):
    """A value is invalid, or the values of a section do not fit together.

    :ivar problem: what is wrong.
    :ivar hint: what to do.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"{problem}; {hint}")
        self.problem = problem
        self.hint = hint


Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
"""A port number."""
Secret: TypeAlias = Annotated[str, Meta(extra={"is_secret": True})]
"""A text that is never logged."""


def not_empty(values: list[str]) -> list[str]:
    """Return a list.

    :raises InvalidValueError: if it is empty.
    """
    if not values:
        raise InvalidValueError("is empty", "write at least one entry")
    return values
