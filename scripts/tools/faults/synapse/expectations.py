"""Compares accepted changes with those that users saw: pure logic, thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import attrs


@attrs.frozen
class _Promise:
    stream: str
    key: Hashable
    value: Hashable


class Expectations:
    """The changes that the homeserver accepted, and those that ``/sync`` has shown.

    A *promise* states that ``/sync`` will show a value for a key. A later promise for
    the same key replaces it, as a second read receipt replaces the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, Hashable], _Promise] = {}
        self._overdue: list[_Promise] = []
        self._failed_reads: list[_Promise] = []
        self._seen: set[_Promise] = set()

    def promise(self, stream: str, key: Hashable, value: Hashable = True) -> None:
        """Record that a request was accepted.

        :param stream: the stream whose row causes ``/sync`` to show the value.
        """
        promise = _Promise(stream, key, value)
        with self._lock:
            if promise in self._seen:
                self._open.pop((stream, key), None)
            else:
                self._open[stream, key] = promise

    def withdraw(self, stream: str, key: Hashable) -> None:
        """Remove the promise for a key, unless it was already shown."""
        with self._lock:
            self._open.pop((stream, key), None)

    def forget(self, stream: str, key: Hashable, value: Hashable = True) -> None:
        """Ignore that a value was shown earlier."""
        with self._lock:
            self._seen.discard(_Promise(stream, key, value))

    def see(self, stream: str, key: Hashable, value: Hashable = True) -> None:
        """Record that a user saw a value, perhaps before it was promised."""
        promise = _Promise(stream, key, value)
        with self._lock:
            self._seen.add(promise)
            if self._open.get((stream, key)) == promise:
                del self._open[stream, key]
            for given_up in (self._overdue, self._failed_reads):
                if promise in given_up:
                    given_up.remove(promise)

    def is_fulfilled(self) -> bool:
        """Return whether all promises were shown, except for those given up."""
        with self._lock:
            return not self._open

    def give_up(
        self, has_failed_read: Callable[[str, Hashable], bool] | None = None
    ) -> list[str]:
        """Stop waiting for the promises that were not shown yet.

        :param has_failed_read: returns whether the homeserver failed to read the rows
            of a stream for the response that should have shown a key.
        :return: these promises, as ``stream key value``.
        """
        with self._lock:
            overdue = list(self._open.values())
            for promise in overdue:
                failed = has_failed_read and has_failed_read(
                    promise.stream, promise.key
                )
                (self._failed_reads if failed else self._overdue).append(promise)
            self._open.clear()
        return sorted(f"{each.stream} {each.key} {each.value}" for each in overdue)

    def never_shown(self) -> Counter[str]:
        """Return the number of promises that were never shown, by stream.

        Promises that were not shown because of a failed read are not counted.
        """
        with self._lock:
            promises = [*self._overdue, *self._open.values()]
        return Counter(promise.stream for promise in promises)

    def failed_reads(self) -> Counter[str]:
        """Return the number of promises that failed reads left unshown, by stream."""
        with self._lock:
            return Counter(promise.stream for promise in self._failed_reads)


def shown_in(answer: Mapping[str, Any]) -> Iterator[tuple[str, Hashable, Hashable]]:
    """Yield the values in a ``/sync`` response, as for :meth:`Expectations.see`."""
    for event in answer.get("to_device", {}).get("events", []):
        yield "to_device", event["content"].get("body"), True
    for event in answer.get("account_data", {}).get("events", []):
        yield "account_data", event["type"], event["content"].get("number")
    for room_id, room in answer.get("rooms", {}).get("join", {}).items():
        for event in room.get("timeline", {}).get("events", []):
            yield "events", event["content"].get("body"), True
        for event in room.get("ephemeral", {}).get("events", []):
            content = event["content"]
            if event["type"] == "m.typing":
                yield "typing", room_id, tuple(sorted(content["user_ids"]))
            elif event["type"] == "m.receipt":
                for event_id, kinds in content.items():
                    for user_id in kinds.get("m.read", {}):
                        yield "receipts", (room_id, user_id), event_id
