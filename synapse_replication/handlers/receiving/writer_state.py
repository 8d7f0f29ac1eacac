"""What a process remembers of each writer on each connection.

Theory of operation: a *link* is the life of one connection, from
``new_connection`` to ``lost_connection``. Everything that depends on having heard
the writer without a break lives on it, by (stream, writer), and dies with it:
unfinished batches, whether a POSITION was handled, a running catch-up. So neither
a second writer, nor a second connection, nor a reconnection can mix them up.

A writer of which no POSITION was handled on the link is not among its writers. One
that is there is either *live*, its rows are delivered as they come, or it catches up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Sequence

import attrs

from synapse_replication.handlers.interfaces import DelayedCall, ReplicationConnection
from synapse_replication.streams.stream import StreamUpdateResult

__all__ = ["CatchUpState", "Link", "LinkedWriter", "ReadAhead"]


#: Claims that are remembered of one catch-up.
MAX_CLAIMS = 100


@attrs.define(eq=False)
class ReadAhead:
    """The next page of a catch-up, on its way while the one before is delivered.

    :ivar from_token: the rows asked for are those above it, up to ``upto_token``.
    :ivar process: ends, without failing, when one of the following is there.
    :ivar answer: the source's answer, and whether it is only what the writer sent last.
    :ivar error: why there is none.
    """

    from_token: int
    upto_token: int
    process: Awaitable[object] | None = None
    answer: tuple[StreamUpdateResult, bool] | None = None
    error: Exception | None = None


@attrs.define(eq=False)
class CatchUpState:
    """A catch-up that is under way, or waits for its next attempt.

    :ivar cursor: rows up to here were delivered.
    :ivar target: rows up to here are wanted; grows while new rows arrive.
    :ivar restart_token: go back to this position first; ``None`` if not, or done.
    :ivar epoch: of the writer, if that is why it goes back.
    :ivar attempts: failures since the last progress.
    :ivar retry: the next attempt, if one is due later.
    :ivar is_queued: a step of it waits in the stream's queue.
    :ivar has_fetched: something was fetched.
    :ivar is_full: not all of it came from what its writer sent last.
    :ivar is_drain: its writer was removed and announces nothing.
    :ivar ahead: the page after the one that is being delivered, if it was asked for.
    :ivar claims: the tokens that made up the target, ascending; the source may refute
        the greatest of them.
    :ivar is_incomplete: lesser claims are not among them.
    :ivar is_refuted: none of them was true.
    """

    cursor: int
    target: int
    restart_token: int | None = None
    epoch: str | None = None
    attempts: int = 0
    retry: DelayedCall | None = None
    is_queued: bool = False
    has_fetched: bool = False
    is_full: bool = False
    is_drain: bool = False
    ahead: ReadAhead | None = None
    claims: list[int] = attrs.field(init=False, factory=list)
    is_incomplete: bool = False
    is_refuted: bool = False

    def __attrs_post_init__(self) -> None:
        self.claims.append(self.target)

    def want(self, token: int) -> None:
        """Want rows up to ``token``, too."""
        if self.ahead is not None and token <= self.ahead.upto_token:
            # If the target was false, rows of that page may be newer than the page.
            self.ahead = None
        index = bisect_left(self.claims, token)
        if index < len(self.claims) and self.claims[index] == token:
            return
        # Also a lesser one: the greatest may be refuted.
        self.claims.insert(index, token)
        self.target = max(self.cursor, self.claims[-1])
        self.is_refuted = False
        if len(self.claims) > MAX_CLAIMS:
            del self.claims[0]
            self.is_incomplete = True

    def refute(self, last_token: int, tolerance: int = 0) -> None:
        """Want nothing that is more than ``tolerance`` above ``last_token``.

        What remains is the greatest other claim. If there is none, nothing is wanted,
        unless a lesser claim may have been dropped.
        """
        limit = last_token + tolerance
        self.claims = [claim for claim in self.claims if claim <= limit]
        if not self.claims and self.is_incomplete:
            self.claims.append(last_token)
        self.is_refuted = not self.claims
        self.target = max([self.cursor, *self.claims[-1:]])

    def cancel_retry(self) -> None:
        """Make no later attempt: one is made now, or none ever."""
        if self.retry is not None and self.retry.active():
            self.retry.cancel()
        self.retry = None


@attrs.define(eq=False)
class LinkedWriter:
    """One writer of one stream on one link.

    :ivar pending: the rows of a batch that is not finished, as JSON text.
    :ivar has_lost_rows: rows of the batch that arrives next were dropped or never
        seen, so its token is fetched rather than taken.
    :ivar catch_up: ``None`` while live.
    :ivar is_connected: a POSITION was handled to its end.
    """

    link: Link
    stream_name: str
    instance_name: str
    pending: list[bytes] = attrs.Factory(list)
    has_lost_rows: bool = False
    catch_up: CatchUpState | None = None
    is_connected: bool = False

    @property
    def is_live(self) -> bool:
        """Rows are delivered as they come, and none is missing."""
        return self.catch_up is None and not self.has_lost_rows and not self.pending

    def gather(
        self, tokens: Sequence[int | None], rows: Sequence[bytes]
    ) -> list[tuple[int, list[bytes]]]:
        """Take out the batches that these rows finish; keep what is unfinished."""
        whole = []
        pending = self.pending
        for token, row in zip(tokens, rows, strict=True):
            pending.append(row)
            if token is not None:
                whole.append((token, pending))
                pending = []
        self.pending = pending
        return whole

    def drop_pending(self) -> int:
        """Drop an unfinished batch, so that it is fetched; return its rows."""
        count = len(self.pending)
        if count:
            self.pending = []
            self.has_lost_rows = True
        return count

    def lose_rows(self, ends_in_batch: bool | None) -> None:
        """Record that rows were dropped, behind those of an unfinished batch.

        :param ends_in_batch: the last of them are of a batch that is not finished
            either; ``None`` if there were no rows.
        """
        self.drop_pending()
        if ends_in_batch is not None:
            self.has_lost_rows = ends_in_batch

    def forget(self) -> None:
        """Forget the writer: what still waits of its rows must not pass a gap."""
        self.link.writers.pop((self.stream_name, self.instance_name), None)


@attrs.define(eq=False)
class Link:
    """One life of a connection.

    :ivar writers: by (stream, writer).
    :ivar is_lost: the connection is gone; what arrived on it is still handled.
    """

    connection: ReplicationConnection
    writers: dict[tuple[str, str], LinkedWriter] = attrs.Factory(dict)
    is_lost: bool = False

    def writer(self, stream_name: str, instance_name: str) -> LinkedWriter:
        """Return a writer; it is added if it is not there."""
        key = stream_name, instance_name
        writer = self.writers.get(key)
        if writer is None:
            writer = self.writers[key] = LinkedWriter(self, stream_name, instance_name)
        return writer

    def forget_writer(self, stream_name: str, instance_name: str) -> None:
        """Forget a writer, unless a catch-up of it runs."""
        writer = self.writers.get((stream_name, instance_name))
        if writer is not None and writer.catch_up is None:
            writer.forget()

    def lose(self) -> None:
        """Forget what cannot go on without the connection."""
        self.is_lost = True
        for writer in list(self.writers.values()):
            if writer.catch_up is not None:
                writer.catch_up.cancel_retry()
                writer.forget()
