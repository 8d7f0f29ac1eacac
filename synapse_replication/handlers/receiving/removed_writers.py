"""Draining of removed writers: nobody announces their rows, so they are looked for.

Theory of operation: a stream's source is asked for removed writers when a link comes up
and whenever a process has started, since a writer that starts is what removes another.
The answer goes through the stream's queue and becomes a catch-up of each of them, as
if it had announced its last row. The source may take its time: rows that arrive are
handled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from synapse_replication.backoff import Backoff
from synapse_replication.handlers.interfaces import BackgroundRunner, Clock
from synapse_replication.handlers.observer import DiscardReason, ReplicationObserver
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.writer_state import (
    CatchUpState,
    FoundRemoved,
    Link,
    WriterState,
)
from synapse_replication.streams.stream import DrainableStream, Stream

__all__ = ["RemovedWriterDrains"]


class RemovedWriterDrains:
    """The drains of one stream.

    Used in the reactor's thread only.

    :param put: puts what was found at the end of the stream's queue.
    """

    def __init__(
        self,
        stream: Stream,
        clock: Clock,
        run_as_background_process: BackgroundRunner,
        observer: ReplicationObserver,
        backoff: Backoff,
        catch_ups: CatchUpRunner,
        put: Callable[[Link, FoundRemoved], None],
    ) -> None:
        self._stream = stream
        self._name = stream.description.name
        self._source = stream if isinstance(stream, DrainableStream) else None
        self._clock = clock
        self._run_as_background_process = run_as_background_process
        self._observer = observer
        self._backoff = backoff
        self._catch_ups = catch_ups
        self._put = put
        # The links on whose behalf the next look is, in order.
        self._waiting: dict[Link, None] = {}
        self._is_looking = False
        self._attempts = 0
        self._reported: set[str] = set()
        self._running: dict[str, tuple[Link, CatchUpState]] = {}

    def look(self, link: Link) -> None:
        """Look for removed writers, on behalf of a link."""
        if self._source is None or link.is_lost:
            return
        self._waiting[link] = None
        if not self._is_looking:
            self._is_looking = True
            self._start()

    def _start(self) -> None:
        self._run_as_background_process(
            f"replication_removed_writers_{self._name}", self._look
        )

    async def _look(self) -> None:
        assert self._source is not None
        while self._waiting:
            # A link that asks from now on asks for another look.
            links, self._waiting = self._waiting, {}
            links = {link: None for link in links if not link.is_lost}
            if not links:
                continue
            try:
                found = await self._source.find_removed_writers()
            except Exception as error:  # noqa: BLE001 -- the observer is told
                self._observer.failure(
                    f"looking for removed writers of {self._name}", error
                )
                self._waiting = links | self._waiting
                self._attempts += 1
                self._clock.call_later(self._backoff.delay(self._attempts), self._start)
                return
            self._attempts = 0
            if found:
                for link in links:
                    self._put(link, FoundRemoved(found))
        self._is_looking = False

    async def run(self, link: Link, item: FoundRemoved) -> None:
        """Fetch what the removed writers have committed."""
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
        current = self._stream.current_token(instance_name)
        if upto_token <= current:
            self._report_drained(link, instance_name, current)
            return
        state = link.writers.get((self._name, instance_name))
        if state is not None and state.is_connected and not is_deleted:
            # It announces its rows itself, unknown as it is here.
            return
        if state is None:
            state = link.writers[self._name, instance_name] = WriterState()
        if state.catch_up is not None:
            state.catch_up.want(upto_token)
            return
        if state.pending:
            self._observer.discarded(
                self._name,
                instance_name,
                DiscardReason.SUPERSEDED_BY_POSITION,
                len(state.pending),
            )
            state.pending = []
            state.has_lost_rows = True
        self._reported.add(instance_name)
        run = CatchUpState(current, upto_token, is_drain=True)
        state.catch_up = run
        self._running[instance_name] = link, run
        self._observer.removed_writer_found(
            self._name, instance_name, current, upto_token
        )
        await self._catch_ups.run(link, instance_name, state, run)

    def _report_drained(self, link: Link, instance_name: str, token: int) -> None:
        """Report a writer of which no row is missing, once for each of its lives."""
        state = link.writers.pop((self._name, instance_name), None)
        if state is not None or instance_name not in self._reported:
            self._reported.add(instance_name)
            self._observer.removed_writer_drained(self._name, instance_name, token)

    def _is_draining(self, instance_name: str) -> bool:
        """Return whether a drain of the writer runs, or waits for its next step."""
        link, run = self._running.get(instance_name, (None, None))
        if link is None or link.is_lost:
            return False
        state = link.writers.get((self._name, instance_name))
        return state is not None and state.catch_up is run
