"""The id generators of a host, for those who compare positions with their sequences.

A host's streams do not lead to the generators of their ids; these put themselves here.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol
from weakref import WeakValueDictionary

__all__ = ["SequenceReader", "generators"]


class SequenceReader(Protocol):
    """An id generator that compares what it announces with its sequence."""

    def get_announceable_token(self) -> int:
        """Return what may be announced as this process's position."""
        ...

    def get_max_allocated_token(self) -> Awaitable[int]:
        """Return the last id that the sequence has given out."""
        ...


#: By instance and sequence.
generators: WeakValueDictionary[tuple[str, str], SequenceReader] = WeakValueDictionary()
