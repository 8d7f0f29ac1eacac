"""A dictionary with a limited number of entries, for keys that peers choose."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

from typing_extensions import override

K = TypeVar("K")
V = TypeVar("V")


class RecentDict(OrderedDict[K, V]):
    """Retains the entries that were written last.

    :param limit: the maximum number of entries; one more evicts the entry that was
        written longest ago.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class GroupedRecentDict(RecentDict[tuple[Any, ...], V]):
    """Retains the entries that were written last, in groups that can be removed.

    The keys are tuples; those with the same first item are a group.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._groups: dict[Any, set[tuple[Any, ...]]] = {}

    @override
    def __setitem__(self, key: tuple[Any, ...], value: V) -> None:
        self._groups.setdefault(key[0], set()).add(key)
        super().__setitem__(key, value)

    @override
    def __delitem__(self, key: tuple[Any, ...]) -> None:
        super().__delitem__(key)
        group = self._groups[key[0]]
        group.remove(key)
        if not group:
            del self._groups[key[0]]

    @override
    def popitem(self, last: bool = True) -> tuple[tuple[Any, ...], V]:
        key = next(reversed(self) if last else iter(self))
        value = self[key]
        del self[key]
        return key, value

    def remove_group(self, first: Any) -> None:
        """Remove all entries whose key begins with ``first``."""
        for key in list(self._groups.get(first, ())):
            del self[key]
