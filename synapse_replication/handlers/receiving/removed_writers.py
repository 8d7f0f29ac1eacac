"""Draining of removed writers, that is, fetching their last rows.

Theory of operation: for each writer that a
:class:`~synapse_replication.handlers.receiving.removed_writer_search.RemovedWriterSearch`
has found, a catch-up to the token that the search returned is begun. No catch-up is
begun if the reader has reached that token, if a drain of the writer is in progress, or
if the writer is connected and its stored position was not deleted. If another catch-up
with the writer is running or waiting for a retry on the link, the token becomes a claim
of that catch-up instead, that is, a token that the writer is said to have reached.
"""

from __future__ import annotations

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.items import FoundRemoved
from synapse_replication.handlers.receiving.writer_state import (
    CatchUpState,
    Link,
)

__all__ = ["RemovedWriterDrains"]


class RemovedWriterDrains:
    """The drains of one stream's removed writers.

    Use it in the reactor's thread only.
    """

    def __init__(self, context: StreamContext, catch_ups: CatchUpRunner) -> None:
        self._context = context
        self._catch_ups = catch_ups
        self._reported: set[str] = set()
        self._running: dict[str, tuple[Link, CatchUpState]] = {}

    async def run(self, link: Link, item: FoundRemoved) -> None:
        """Fetch the rows that the removed writers have committed."""
        for instance_name, removed in item.writers.items():
            if link.is_lost:
                return
            await self._drain(
                link, instance_name, removed.upto_token, removed.is_deleted
            )

    async def _drain(
        self, link: Link, instance_name: str, upto_token: int, is_deleted: bool
    ) -> None:
        if self._is_draining(instance_name):
            return
        known = link.writers.get((self._context.name, instance_name))
        if known is not None and known.catch_up is not None:
            known.catch_up.add_claim(upto_token)
            return
        if known is not None and known.is_connected and not is_deleted:
            # The writer is connected, so it will announce its rows itself.
            return
        current = self._context.stream.current_token(instance_name)
        if upto_token <= current:
            self._report_drained(link, instance_name, current)
            return
        writer = link.writer(self._context.name, instance_name)
        self._context.discard(
            instance_name, DiscardReason.SUPERSEDED_BY_POSITION, writer.drop_pending()
        )
        self._reported.add(instance_name)
        run = CatchUpState(current, upto_token, is_drain=True)
        self._running[instance_name] = link, run
        self._context.observer.removed_writer_found(
            self._context.name, instance_name, current, upto_token
        )
        await self._catch_ups.run(writer, run)

    def _report_drained(self, link: Link, instance_name: str, token: int) -> None:
        """Report that a removed writer is drained, and remove its state from the link.

        A writer without state on the link is reported only once.
        """
        writer = link.writers.pop((self._context.name, instance_name), None)
        if writer is not None or instance_name not in self._reported:
            self._reported.add(instance_name)
            self._context.observer.removed_writer_drained(
                self._context.name, instance_name, token
            )

    def _is_draining(self, instance_name: str) -> bool:
        """Return whether a drain of the writer is running or scheduled."""
        link, run = self._running.get(instance_name, (None, None))
        if link is None or link.is_lost:
            return False
        writer = link.writers.get((self._context.name, instance_name))
        return writer is not None and writer.catch_up is run
