"""The events that an observer is notified of.

Each is a value. Rows and commands that are read or written together are usually
reported together, with a count.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, MutableMapping
from typing import TypeAlias

import attrs

from synapse_replication.errors import ProtocolError, ReplicationError
from synapse_replication.wire.close_reason import CloseReason


class AnnouncedBy(enum.Enum):
    """The kind of message that announced a writer's position to this process."""

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
class Event:
    """A momentary event."""


@attrs.frozen
class WriterEvent(Event):
    """An event that concerns the rows of one writer of one stream."""

    stream_name: str
    instance_name: str


@attrs.frozen
class RangeEvent(WriterEvent):
    """An event that concerns a writer's rows in ``(from_token, upto_token]``."""

    from_token: int
    upto_token: int


@attrs.frozen
class CatchUpEvent(RangeEvent):
    """A catch-up, which fetches a writer's rows in ``(from_token, upto_token]``."""


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
class PeerHeartbeat(Event):
    """A peer's hello, heartbeat or goodbye.

    :ivar epoch: the peer's random id, chosen at each start.
    :ivar version: the version of this package that the peer runs; empty if not stated.
    :ivar where: the peer's location, for display; empty if not stated.
    :ivar is_leaving: whether this is a goodbye.
    :ivar positions: pairs by stream name, for the streams that the peer writes and this
        process follows: the reported token, and the time in s for which the peer had
        been at that token when it sent the message.
    :ivar every: the interval of the peer's heartbeats while its positions do not
        advance, in s.
    :ivar answers: whether the peer answers each hello.
    """

    instance_name: str
    epoch: str
    version: str
    where: str
    is_leaving: bool
    positions: Mapping[str, tuple[int, float]]
    every: int = 5
    answers: bool = False


@attrs.frozen
class PeerSilent(Event):
    """A peer that is watched by another has fallen silent.

    :ivar seconds: for how long nothing has arrived from it, in s.
    """

    instance_name: str
    epoch: str
    seconds: float


@attrs.frozen
class LineRefused(Event):
    """A line that was rejected because it is invalid or not allowed."""

    connection: str
    error: ProtocolError


@attrs.frozen
class RequestRefused(Event):
    """An HTTP request or connection that was refused.

    A request is refused, for instance, for a wrong secret; a connection, because
    too many others are busy.

    :ivar why: the reason; it contains no unchecked text of the request.
    """

    status: int
    why: str


@attrs.frozen
class Discarded(WriterEvent):
    """Rows, a position or a command that was not delivered.

    For a command, ``stream_name`` is the command's name. If the reason is
    ``UNKNOWN_STREAM``, the peer chose ``stream_name``, which must not become a
    metric label.

    :ivar lost_by: the name of the link whose peer has no other link on which the
        command might reach its destination; empty if there is none.
    """

    reason: DiscardReason
    count: int
    lost_by: str = ""


@attrs.frozen
class ExtraFields(Event):
    """``count`` rows with unknown additional fields, from a newer peer."""

    stream_name: str
    count: int


@attrs.frozen
class StreamConnected(Event):
    """A writer became connected on a link.

    Its first POSITION, or a report or an epoch that preceded it, was handled.
    """

    connection: str
    stream_name: str
    instance_name: str


@attrs.frozen
class StreamAbsent(Event):
    """The database has no table of a stream, which is therefore not replicated.

    This happens only if the configuration does not list streams: a homeserver's
    database has the streams of its version.
    """

    stream_name: str


@attrs.frozen
class PositionMovedBack(WriterEvent):
    """This process's position moved back; each subclass says why."""

    from_token: int
    to_token: int


@attrs.frozen
class StreamReset(PositionMovedBack):
    """This process's position moved back below rows that were delivered.

    The writer, which holds its rows in memory, has (or may have) restarted, or the
    stream is idempotent. Later rows may have the tokens of earlier, different rows:
    discard everything that was cached from this writer's rows. Any other stream moves
    back only as :class:`PositionLowered` says.
    """


@attrs.frozen
class PositionLowered(PositionMovedBack):
    """This process's position moved back, but not below rows that were delivered.

    The writer had been announced at a position that, as it seems now, it had not
    reached: rows may follow above ``to_token``. What was delivered stays valid.
    """


@attrs.frozen
class PositionRefuted(WriterEvent):
    """The source, or the writer, refuted a token that a writer seemed to have reached.

    :ivar token: the token in a POSITION, a row or a report.
    :ivar last_token: the last token that exists, as the source or the writer says.
    """

    token: int
    last_token: int


@attrs.frozen
class DatabaseSetBack(WriterEvent):
    """The database was set back below this process's position.

    :ivar stored: the writer's position in the database.
    :ivar position: the position up to which this process had delivered rows.
    """

    stored: int
    position: int


@attrs.frozen
class AheadOfWriter(WriterEvent):
    """This process's position exceeds the writer's reported position.

    The writer's next rows would be discarded, up to this process's position.
    """

    position: int
    announced: int


@attrs.frozen
class CatchUpPage(Event):
    """A page of a catch-up was delivered."""

    catch_up: CatchUpEvent
    rows: int
    upto_token: int


@attrs.frozen
class CatchUpStepEnded(Event):
    """A step of a catch-up ended or failed.

    :ivar seconds: its duration, in s.
    """

    catch_up: CatchUpEvent
    seconds: float


@attrs.frozen
class CatchUpFailed(Event):
    """The ``attempt``-th failure of a catch-up since its last progress.

    :ivar retry_in: the delay before the next attempt, in s.
    """

    catch_up: CatchUpEvent
    error: BaseException
    attempt: int
    retry_in: float


@attrs.frozen
class RemovedWriterFound(RangeEvent):
    """A removed writer must be drained up to ``upto_token``."""


@attrs.frozen
class RemovedWriterDrained(WriterEvent):
    """A removed writer's rows up to ``token`` were delivered."""

    token: int


@attrs.frozen
class Resynced(WriterEvent):
    """A catch-up that fetched pages ended, or an attempt failed; see ``kind``."""

    kind: Resync


@attrs.frozen
class BacklogRequested(WriterEvent):
    """Rows were requested from a writer's backlog.

    :ivar error: the failure of the request; ``None`` if rows were returned.
    """

    error: ReplicationError | None


@attrs.frozen
class RowsRequest:
    """A request for a writer's rows.

    An observer may add ``headers``. At the writer, they are part of
    :class:`RowsServed`.
    """

    stream_name: str
    instance_name: str
    headers: MutableMapping[str, str]


@attrs.frozen
class RowsServed:
    """A reader's request for rows.

    :ivar headers: the request's headers, by name in lower case.
    """

    stream_name: str
    headers: Mapping[str, str]


@attrs.frozen
class GapFound(RangeEvent):
    """Rows did not arrive although the writer reported their tokens.

    The rows are fetched.
    """


@attrs.frozen
class UnannouncedFound(RangeEvent):
    """A writer persisted a position that it did not announce.

    The rows are fetched.
    """


@attrs.frozen
class RowsUnannounced(WriterEvent):
    """Committed rows that their writer did not announce."""

    tokens: tuple[int, ...]


@attrs.frozen
class LateRows(WriterEvent):
    """Rows were delivered after rows with greater tokens.

    :class:`RowsUnannounced` has reported their tokens.
    """

    tokens: tuple[int, ...]


@attrs.frozen
class EpochChanged(Event):
    """A new current epoch of an instance, usually because it restarted."""

    instance_name: str


@attrs.frozen
class DuplicateInstance(Event):
    """Two processes seem to have the same instance name.

    :ivar places: their locations, as text for display; empty if unknown.
    """

    instance_name: str
    places: str


@attrs.frozen
class UnknownFields(Event):
    """Unknown fields in an extension message, from a newer peer."""

    connection: str
    count: int


@attrs.frozen
class RowsSent(Event):
    """``count`` rows that the streamer sends, even if there is no link."""

    stream_name: str
    count: int


@attrs.frozen
class SendingFailed(Event):
    """A failure to fetch or send this instance's rows.

    Fetching is retried. If sending fails, a POSITION replaces the rows.
    """

    stream_name: str
    error: BaseException


@attrs.frozen
class CommandsDropped(Event):
    """``count`` commands of one name that will never be sent."""

    command: str
    reason: CommandDropReason
    count: int


@attrs.frozen
class PositionWrite:
    """A write of a position to the database."""

    stream_name: str
    instance_name: str
    token: int


@attrs.frozen
class PositionPersistBegun(WriterEvent):
    """The database was asked to persist the position of this process as a writer."""

    token: int


@attrs.frozen
class PositionPersisted(WriterEvent):
    """The database has persisted the position of this process as a writer."""

    token: int


@attrs.frozen
class PositionPersistFailed(WriterEvent):
    """A failure to persist the position of this process. The write is retried.

    An :class:`OperationFailed` is also reported.
    """

    token: int
    error: BaseException


@attrs.frozen
class LinkUp(Event):
    """A link is up; see ``ConnectionHandler.new_connection``.

    :ivar address: the peer's address if it connected to this process; otherwise empty.
    """

    connection: str
    address: str = ""


@attrs.frozen
class PeerNamed(Event):
    """The first message of the extension on a direct link states the peer's name.

    A client states its name before its link is up; a server otherwise never does.
    """

    connection: str
    instance_name: str


@attrs.frozen
class LinkDown(Event):
    """A link went down; ``why`` is text for display.

    :ivar address: as in :class:`LinkUp`.
    """

    connection: str
    reason: CloseReason
    why: str
    address: str = ""


@attrs.frozen
class ConnectFailed(Event):
    """A failed attempt to connect, or that a lost link is retried.

    :ivar why: why it failed; empty if an established link was lost.
    :ivar retry_in: the delay before the next attempt, in s.
    """

    connection: str
    why: str
    retry_in: float


@attrs.frozen
class LinksChanged(Event):
    """The number of links of this process."""

    count: int


@attrs.frozen
class FeatureUnavailable(Event):
    """An optional feature is not used, because a server rejects it."""

    feature: str
    why: str


@attrs.frozen
class ExternalCacheSet(Event):
    """A write to the external cache, and its duration in s."""

    cache_name: str
    seconds: float


@attrs.frozen
class ExternalCacheGet(Event):
    """A read of the external cache, and its duration in s."""

    cache_name: str
    hit: bool
    seconds: float


@attrs.frozen
class BackgroundTask:
    """A background task."""

    description: str


@attrs.frozen
class OperationFailed(Event):
    """An error that cannot be raised to any caller.

    :ivar what: the activity that failed, for instance ``serving rows over HTTP``.
    """

    what: str
    error: BaseException


#: Work with a duration, of which an observer may make a span.
Work: TypeAlias = (
    CatchUpEvent | RowsRequest | RowsServed | PositionWrite | BackgroundTask
)
