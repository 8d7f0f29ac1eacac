"""A registry of a host's id generators, for comparing positions with sequences.

A host's streams have no reference to their id generators, so the generators register
themselves here.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol
from weakref import WeakValueDictionary


class SequenceReader(Protocol):
    """An id generator that can read its sequence."""

    def get_announceable_token(self, *, follows_others: bool = True) -> int:
        """Return the position that this process may announce.

        :param follows_others: whether to read the sequence if another writer announced
            an id beyond the sequence's known value. The position then soon follows that
            id.
        """
        ...

    def get_mark(self) -> tuple[int | None, ...]:
        """Return a value that changes as ids of this process become announceable."""
        ...

    def get_max_allocated_token(self) -> Awaitable[int]:
        """Return the last id that the sequence has allocated."""
        ...


#: The generators by instance name and sequence name.
generators: WeakValueDictionary[tuple[str, str], SequenceReader] = WeakValueDictionary()
