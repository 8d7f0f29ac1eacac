"""The state of each writer on each link.

Theory of operation: a *link* lasts from ``new_connection`` to ``lost_connection`` of
one connection. State that is valid only if all of a writer's messages were received is
stored on the link, by (stream, writer), and is dropped with the link: unfinished
batches, whether a POSITION was handled, the running catch-up. The state of different
writers or links is therefore never mixed.

A writer is added to a link when the first of the following is handled on that link: a
POSITION; an epoch, if rows of the writer may have been received before; a drain; a
report at or above the reader's position; or a summary of items that a full queue
dropped (:class:`.items.DroppedRange`), if a POSITION was among them. From then on, the
writer's complete batches are delivered as they arrive, except during a catch-up and
after lost rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Sequence

import attrs

from synapse_replication.handlers.interfaces import DelayedCall, ReplicationConnection
from synapse_replication.streams.stream import StreamUpdateResult

__all__ = ["CatchUpState", "Link", "LinkedWriter", "ReadAhead"]


#: The largest number of claims that are stored for one catch-up. A claim is a token
#: that the writer is said to have reached; the source may refute it.
MAX_CLAIMS = 100


@attrs.define(eq=False)
class ReadAhead:
    """The next page of a catch-up, fetched while the current page is delivered.

    :ivar from_token: the token above which the page begins.
    :ivar upto_token: the upper bound of the request for the page.
    :ivar process: an awaitable that never fails, and fires when ``answer`` or ``error``
        is set.
    :ivar answer: the rows, and whether they come from the writer's backlog.
    :ivar error: the error with which the fetch failed.
    """

    from_token: int
    upto_token: int
    process: Awaitable[object] | None = None
    answer: tuple[StreamUpdateResult, bool] | None = None
    error: Exception | None = None


@attrs.define(eq=False)
class CatchUpState:
    """A catch-up that is running or waiting for a retry.

    :ivar cursor: the token up to which rows were delivered.
    :ivar target: the token up to which to fetch. It can grow when rows or positions
        arrive, and shrinks when the source refutes the greatest claim.
    :ivar restart_token: the position to rewind to first; ``None`` if no rewind is
        needed, or after the rewind.
    :ivar epoch: the writer's new epoch, if that is the reason for the rewind.
    :ivar attempts: the number of failures since the last progress.
    :ivar retry: the scheduled next attempt, if any.
    :ivar is_queued: whether one of its steps is in the stream's queue.
    :ivar has_fetched: whether any page was fetched.
    :ivar is_full: whether the stream was rewound, or any page came from the database
        instead of the writer's backlog.
    :ivar is_drain: whether its writer was removed, and therefore announces nothing.
    :ivar ahead: the page that is being read ahead, if any.
    :ivar claims: the tokens that the writer is said to have reached, in ascending
        order. The target is the greatest remaining claim, or the cursor if that is
        greater or no claim remains.
    :ivar is_incomplete: whether claims were omitted from ``claims``. If the source
        refutes the greatest claim, an omitted claim may be true.
    :ivar is_refuted: whether the source refuted all claims.
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

    def add_claim(self, token: int) -> None:
        """Record a claim, and raise the target to at least ``token``."""
        if self.ahead is not None and token <= self.ahead.upto_token:
            # Request the page again: if its upper bound was false, the claimed row may
            # have been committed after the request.
            self.ahead = None
        index = bisect_left(self.claims, token)
        if index < len(self.claims) and self.claims[index] == token:
            return
        # Record smaller claims, too, because the greatest claim may be refuted.
        self.claims.insert(index, token)
        self.target = max(self.cursor, self.claims[-1])
        self.is_refuted = False
        if len(self.claims) > MAX_CLAIMS:
            del self.claims[0]
            self.is_incomplete = True

    def refute(self, last_token: int, tolerance: int = 0) -> None:
        """Drop all claims that are more than ``tolerance`` above ``last_token``.

        The target becomes the greatest remaining claim. If no claim remains, no more
        rows are fetched. Fetching up to ``last_token`` instead could skip rows, because
        rows below ``last_token`` may not have been committed yet.
        """
        limit = last_token + tolerance
        self.claims = [claim for claim in self.claims if claim <= limit]
        self.is_refuted = not self.claims
        self.target = max([self.cursor, *self.claims[-1:]])

    def cancel_retry(self) -> None:
        """Cancel the scheduled retry, if any."""
        if self.retry is not None and self.retry.active():
            self.retry.cancel()
        self.retry = None


@attrs.define(eq=False)
class LinkedWriter:
    """One writer of one stream on one link.

    :ivar pending: the rows of an unfinished batch, as JSON text.
    :ivar has_lost_rows: whether rows of the next batch, or rows before it, were dropped
        or never received, so that all rows up to the end of that batch must be fetched.
    :ivar catch_up: the current catch-up; ``None`` if there is none.
    :ivar is_connected: whether a POSITION, or a report or an epoch that preceded it,
        has been handled completely.
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
        """Whether rows are delivered as they arrive, and none is missing."""
        return self.catch_up is None and not self.has_lost_rows and not self.pending

    def gather(
        self, tokens: Sequence[int | None], rows: Sequence[bytes]
    ) -> list[tuple[int, list[bytes]]]:
        """Add rows, and return the batches that are now complete.

        The rows of an unfinished batch are retained.
        """
        complete = []
        pending = self.pending
        for token, row in zip(tokens, rows, strict=True):
            pending.append(row)
            if token is not None:
                complete.append((token, pending))
                pending = []
        self.pending = pending
        return complete

    def drop_pending(self) -> int:
        """Drop an unfinished batch and return the number of its rows.

        The batch is fetched later.
        """
        count = len(self.pending)
        if count:
            self.pending = []
            self.has_lost_rows = True
        return count

    def mark_rows_lost(self, ends_in_batch: bool | None) -> None:
        """Record that items that followed the rows in ``pending`` were lost.

        The rows in ``pending`` are dropped. If ``has_lost_rows`` is already true, it
        stays true even if the lost rows end a batch: that batch may be at or below the
        reader's position. The rows lost earlier are then still missing.

        :param ends_in_batch: whether the last lost rows belong to an unfinished batch;
            ``None`` if only items without rows, such as POSITION, were dropped from the
            queue.
        """
        if ends_in_batch is None:
            self.drop_pending()
        else:
            self.pending = []
            self.has_lost_rows |= ends_in_batch

    def forget(self) -> None:
        """Remove the writer, so that its queued rows are not delivered past a gap."""
        self.link.writers.pop((self.stream_name, self.instance_name), None)


@attrs.define(eq=False)
class Link:
    """A connection, from its establishment to its loss, with its writers' state.

    :ivar writers: the state of each writer, by (stream, writer).
    :ivar is_lost: whether the connection is lost; rows from it that are still queued
        are handled nevertheless.
    """

    connection: ReplicationConnection
    writers: dict[tuple[str, str], LinkedWriter] = attrs.Factory(dict)
    is_lost: bool = False

    def writer(self, stream_name: str, instance_name: str) -> LinkedWriter:
        """Return a writer; add it if it is new."""
        key = stream_name, instance_name
        writer = self.writers.get(key)
        if writer is None:
            writer = self.writers[key] = LinkedWriter(self, stream_name, instance_name)
        return writer

    def forget_writer(self, stream_name: str, instance_name: str) -> None:
        """Remove a writer, unless it is catching up."""
        writer = self.writers.get((stream_name, instance_name))
        if writer is not None and writer.catch_up is None:
            writer.forget()

    def mark_lost(self) -> None:
        """Mark the link as lost; drop its catch-ups and the state of their writers."""
        self.is_lost = True
        for writer in list(self.writers.values()):
            if writer.catch_up is not None:
                writer.catch_up.cancel_retry()
                writer.forget()
