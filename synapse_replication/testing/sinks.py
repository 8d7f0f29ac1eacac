"""A row sink for tests of a service with real servers."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime


class CollectingSink:
    """A row sink that collects rows, and lets a test wait for them.

    :param reactor: continues the test, after the delivery of a row.
    :ivar rows: the rows in the order of arrival.
    :ivar tokens: the token of each row.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self.rows: list[Any] = []
        self.tokens: list[int] = []
        self._waiting: list[tuple[int, Deferred[None]]] = []

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Collect the rows."""
        self.rows += rows
        self.tokens += [token] * len(rows)
        reached = [item for item in self._waiting if item[0] <= len(self.rows)]
        self._waiting = [item for item in self._waiting if item not in reached]
        for _, deferred in reached:
            self._reactor.callLater(0, deferred.callback, None)

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Ignore the position."""

    async def wait_for(self, count: int) -> list[Any]:
        """Return all rows as soon as there are ``count`` of them."""
        if len(self.rows) < count:
            deferred: Deferred[None] = Deferred()
            self._waiting.append((count, deferred))
            await deferred
        return self.rows
