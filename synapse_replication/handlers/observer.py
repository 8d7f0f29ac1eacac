"""The observer interface, from whose events metrics, logs and traces are produced.

Handlers and connections do not use loggers, metrics or tracers; they notify a
:class:`ReplicationObserver`. Its methods do nothing: the observers in
``instrumentation/`` override the methods that they need, and
:class:`~synapse_replication.instrumentation.composite.CompositeObserver` notifies
several of them.

No method may raise, block, or call the object that notifies it. Rows and commands that
are read or written together are usually reported together, with a count.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

import attrs

from synapse_replication.errors import ProtocolError, ReplicationError
from synapse_replication.wire.connection import CloseReason

#: A context that does nothing; shared, because the handling of rows often needs one.
_NOTHING: Final = contextlib.nullcontext()


class AnnouncedBy(enum.Enum):
    """What announced a writer's position to this process."""

    POSITION = "POSITION"
    ROW = "row"
    HEARTBEAT = "heartbeat"
    DATABASE = "database"  #: or another source of fetched rows


class DiscardReason(enum.Enum):
    """The reason why a received row or command was not delivered."""

    UNKNOWN_STREAM = "unknown_stream"
    UNDECLARED_WRITER = "undeclared_writer"  #: the writer is not configured
    NOT_CONNECTED = "not_connected"  #: no POSITION of this writer on this link yet
    OWN_ECHO = "own_echo"  #: sent by this instance and received again
    OLD_TOKEN = "old_token"
    REDUNDANT_POSITION = "redundant_position"
    SUPERSEDED_BY_POSITION = "superseded_by_position"  #: an unfinished batch
    #: The row cannot be decoded; its batch is fetched from the source.
    UNDECODABLE = "undecodable"
    UNPARSABLE = "unparsable"  #: a row in a line that cannot be parsed
    #: The source itself returned a row that is not valid JSON or cannot be decoded.
    SKIPPED = "skipped"
    #: The writer does not have the rows any more; ``count`` is the number of tokens.
    LOST = "lost"
    CATCHING_UP = "catching_up"  #: the row will be fetched instead
    HANDLER_FAILED = "handler_failed"  #: the sink failed; the row will be fetched
    IMPLAUSIBLE = "implausible"  #: beyond the last token that exists
    NOT_RESPONSIBLE = "not_responsible"  #: USER_IP where client IPs are not stored
    REPEATED = "repeated"  #: an unchanged USER_SYNC, or a copy from another link


class CommandDropReason(enum.Enum):
    """The reason why a command of this process was not sent."""

    QUEUE_FULL = "queue_full"  #: too many commands were waiting for a link
    STOPPED = "stopped"  #: the process stopped while it had no link
    FAILED = "failed"  #: sending it raised an exception; see the log


class Resync(enum.Enum):
    """The source of a catch-up's rows."""

    PARTIAL = "partial"  #: only the writer's backlog or memory
    FULL = "full"  #: also the database, or the position was rewound
    FAILED = "failed"  #: no source: an attempt failed


@attrs.frozen
class CatchUpEvent:
    """A catch-up, which fetches a writer's rows in ``(from_token, upto_token]``."""

    stream_name: str
    instance_name: str
    from_token: int
    upto_token: int


@attrs.frozen
class ConnectionBuffers:
    """Fill levels of one connection's buffers, read for a scrape or the status.

    :ivar connection: the connection's name.
    :ivar pending_commands: the number of commands that wait for the transport.
    :ivar send_buffer: bytes that the transport has not passed to the kernel.
    :ivar kernel_send_buffer: bytes that the peer has not acknowledged.
    :ivar kernel_read_buffer: bytes that this process has not read.
    """

    connection: str
    pending_commands: int
    send_buffer: int
    kernel_send_buffer: int
    kernel_read_buffer: int


@attrs.frozen
class PeerHeartbeat:
    """A peer's hello, heartbeat or goodbye.

    :ivar epoch: the peer's random id, chosen at each start.
    :ivar version: the version of this package that the peer runs; empty if not stated.
    :ivar where: the peer's location, for display; empty if not stated.
    :ivar is_leaving: whether this is a goodbye.
    :ivar positions: pairs by stream name, for the streams that the peer writes: the
        reported token, and the time in s for which the peer had been at that token when
        it sent the message.
    """

    instance_name: str
    epoch: str
    version: str
    where: str
    is_leaving: bool
    positions: Mapping[str, tuple[int, float]]


class ReplicationObserver:
    """Base class of observers. Its methods do nothing."""

    # -- commands ------------------------------------------------------------------

    def commands_received(self, connection: str, command: str, count: int) -> None:
        """Record ``count`` received commands of one name."""

    def commands_sent(self, connection: str, command: str, count: int) -> None:
        """Record ``count`` sent commands of one name."""

    def line_refused(self, connection: str, error: ProtocolError) -> None:
        """Record a line that was rejected because it is invalid or not allowed."""

    def request_refused(self, status: int, why: str) -> None:
        """Record an HTTP request or connection that was refused.

        A request is refused, for instance, for a wrong secret; a connection, because
        too many others are busy.

        :param why: the reason; it contains no unchecked text of the request.
        """

    # -- rows -----------------------------------------------------------------------

    def rows_received(self, stream_name: str, count: int) -> None:
        """Record ``count`` received rows that were added to their stream's queue."""

    def discarded(
        self, stream_name: str, instance_name: str, reason: DiscardReason, count: int
    ) -> None:
        """Record rows, a position or a repeated command that was not delivered.

        For a repeated command, ``stream_name`` is the command's name. If the reason is
        ``UNKNOWN_STREAM``, the peer chose ``stream_name``, which must not become a
        metric label.
        """

    def extra_fields(self, stream_name: str, count: int) -> None:
        """Record ``count`` rows with unknown additional fields, from a newer peer."""

    def queue_changed(self, stream_name: str, length: int) -> None:
        """Record that a stream's queue has ``length`` rows and other items."""

    def position_announced(
        self,
        stream_name: str,
        instance_name: str,
        token: int,
        connection: str,
        by: AnnouncedBy,
    ) -> None:
        """Record that ``token`` arrived in a writer's rows or POSITION.

        For rows that arrived together, only the last token of each writer is reported.
        The rows up to the token may still be queued, or may be discarded.

        :param connection: the name of the link on which it arrived.
        """

    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that a writer's rows were delivered up to ``token``."""

    def stream_connected(
        self, connection: str, stream_name: str, instance_name: str
    ) -> None:
        """Record that a writer became connected on a link.

        Its first POSITION, or a report or an epoch that preceded it, was handled.
        """

    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        """Record that this process's position was rewound to ``to_token``.

        The reason is that the writer has (or may have) restarted, or that a position
        that it had announced proved false.
        """

    def position_refuted(
        self, stream_name: str, instance_name: str, token: int, last_token: int
    ) -> None:
        """Record that the source refuted a token that a writer seemed to have reached.

        :param token: the token in a POSITION, a row or a report.
        :param last_token: the last token that exists in the source.
        """

    def ahead_of_writer(
        self, stream_name: str, instance_name: str, position: int, announced: int
    ) -> None:
        """Record that this process's position exceeds the writer's reported position.

        The writer's next rows would be discarded, up to this process's position.
        """

    # -- catch-up ---------------------------------------------------------------------

    def catch_up(self, event: CatchUpEvent) -> AbstractContextManager[object]:
        """Record a step of a catch-up. The step lasts until the context ends.

        A catch-up that yields or is retried has several steps.
        """
        return contextlib.nullcontext()

    def catch_up_page(self, event: CatchUpEvent, rows: int, upto_token: int) -> None:
        """Record that a page of a catch-up was delivered."""

    def catch_up_failed(
        self, event: CatchUpEvent, error: BaseException, attempt: int, retry_in: float
    ) -> None:
        """Record the ``attempt``-th failure of a catch-up since its last progress.

        :param retry_in: the delay before the next attempt, in s.
        """

    def removed_writer_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        """Record that a removed writer must be drained up to ``upto_token``."""

    def removed_writer_drained(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that a removed writer's rows up to ``token`` were delivered."""

    def resynced(self, stream_name: str, instance_name: str, kind: Resync) -> None:
        """Record the end of a catch-up that fetched pages, or a failed attempt."""

    def backlog_requested(
        self, stream_name: str, instance_name: str, error: ReplicationError | None
    ) -> None:
        """Record that rows were requested from a writer's backlog.

        :param error: the failure of the request; ``None`` if rows were returned.
        """

    def requesting_rows(
        self, stream_name: str, instance_name: str, headers: MutableMapping[str, str]
    ) -> AbstractContextManager[object]:
        """Record a request for a writer's rows. It lasts until the context ends.

        An observer may add ``headers``. At the writer, they are passed to
        :meth:`serving_rows`.
        """
        return contextlib.nullcontext()

    def serving_rows(
        self, stream_name: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        """Record a reader's request for rows. It lasts until the context ends.

        :param headers: the request's headers, by name in lower case.
        """
        return contextlib.nullcontext()

    # -- the extension --------------------------------------------------------------

    def gap_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        """Record that rows did not arrive although the writer reported their tokens.

        The rows are fetched.
        """

    def unannounced_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        """Record that a writer persisted a position that it did not announce.

        The rows are fetched.
        """

    def rows_unannounced(
        self, stream_name: str, instance_name: str, tokens: Sequence[int]
    ) -> None:
        """Record committed rows that their writer did not announce."""

    def late_rows_delivered(
        self, stream_name: str, instance_name: str, tokens: Sequence[int]
    ) -> None:
        """Record that rows were delivered after rows with greater tokens.

        :meth:`rows_unannounced` has reported their tokens.
        """

    def heartbeat_received(self, heartbeat: PeerHeartbeat) -> None:
        """Record a hello, a heartbeat or a goodbye of a peer."""

    def epoch_changed(self, instance_name: str) -> None:
        """Record a new current epoch of an instance, usually because it restarted."""

    def duplicate_instance(self, instance_name: str, places: str) -> None:
        """Record that two processes seem to have the same instance name.

        :param places: their locations, as text for display; empty if unknown.
        """

    def unknown_fields(self, connection: str, count: int) -> None:
        """Record unknown fields in an extension message, from a newer peer."""

    # -- sending --------------------------------------------------------------------

    def stream_updates_sent(self, stream_name: str, count: int) -> None:
        """Record ``count`` rows that the streamer sends, even if there is no link."""

    def sending_failed(self, stream_name: str, error: BaseException) -> None:
        """Record a failure to fetch or send this instance's rows.

        Fetching is retried. If sending fails, a POSITION replaces the rows.
        """

    def commands_dropped(
        self, command: str, reason: CommandDropReason, count: int
    ) -> None:
        """Record ``count`` commands of one name that will never be sent."""

    def position_write(
        self, stream_name: str, instance_name: str, token: int
    ) -> AbstractContextManager[object]:
        """Record a write of a position to the database, until the context ends.

        The function that exits the context may differ from the one that entered it.
        """
        return contextlib.nullcontext()

    def position_persisted(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that this process's position was persisted in the database."""

    def position_persist_failed(
        self, stream_name: str, instance_name: str, token: int, error: BaseException
    ) -> None:
        """Record a failure to persist the position. The write is retried.

        :meth:`failure` is also called.
        """

    # -- connections ------------------------------------------------------------------

    def connection_made(self, connection: str) -> None:
        """Record that a link is up; see ``ConnectionHandler.new_connection``."""

    def connection_lost(self, connection: str, reason: CloseReason, why: str) -> None:
        """Record that a link went down."""

    def connection_failed(self, connection: str, why: str, retry_in: float) -> None:
        """Record a failed attempt to connect, or that a lost link is retried.

        :param why: why it failed; empty if an established link was lost.
        :param retry_in: the delay before the next attempt, in s.
        """

    def connections_changed(self, count: int) -> None:
        """Record the number of links of this process."""

    def feature_unavailable(self, feature: str, why: str) -> None:
        """Record that an optional feature is not used, because a server rejects it."""

    # -- external cache ---------------------------------------------------------------

    def external_cache_set(self, cache_name: str, seconds: float) -> None:
        """Record a write to the external cache, and its duration in s."""

    def external_cache_get(self, cache_name: str, hit: bool, seconds: float) -> None:
        """Record a read of the external cache, and its duration in s."""

    # -- work -------------------------------------------------------------------------

    def background_process(self, description: str) -> AbstractContextManager[object]:
        """Record a background task. It lasts until the context ends."""
        return _NOTHING

    def failure(self, what: str, error: BaseException) -> None:
        """Record an error that cannot be raised to any caller.

        :param what: the activity that failed, for instance ``serving rows over HTTP``.
        """
