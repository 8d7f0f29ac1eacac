"""Base class and types that the sections of the configuration share.

A section is an attrs class. :func:`~synapse_replication.config.validation.read_value`
creates it from a mapping, and reports everything in the mapping that its annotations do
not allow. The descriptions of its fields are those of the manual. A field without a
representation (``repr=False``) may contain a secret.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import attrs
from msgspec import Meta


@attrs.frozen
class StrictSection:
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


def not_empty(values: list[str]) -> list[str]:
    """Return a list.

    :raises InvalidValueError: if it is empty.
    """
    if not values:
        raise InvalidValueError("is empty", "write at least one entry")
    return values
