"""What is told to metrics, logs and traces.

The handlers and adapters know no logger, metric or tracer; they tell a
:class:`ReplicationObserver`. Every method here does nothing: an observer
overrides what it wants (``instrumentation/``), and
:class:`~synapse_replication.instrumentation.composite.CompositeObserver` fans out.

No method may raise, wait or call back. What is told of rows and commands is told
once a chunk with a count, never once a row.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Final

import attrs

from synapse_replication.errors import ProtocolError, ReplicationError
from synapse_replication.wire.connection import CloseReason

__all__ = [
    "CatchUpEvent",
    "CloseReason",
    "CommandDropReason",
    "ConnectionBuffers",
    "DiscardReason",
    "PeerHeartbeat",
    "ReplicationObserver",
    "Resync",
]


#: One for all: it is made for each chunk of rows.
_NOTHING: Final = contextlib.nullcontext()


class DiscardReason(enum.Enum):
    """Why a received row, POSITION or USER_SYNC was not delivered."""

    UNKNOWN_STREAM = "unknown_stream"
    UNDECLARED_WRITER = "undeclared_writer"  #: the configuration does not name it
    NOT_CONNECTED = "not_connected"  #: no POSITION of this writer seen on this link
    OWN_ECHO = "own_echo"  #: it is our own, come back from Redis
    OLD_TOKEN = "old_token"
    REDUNDANT_POSITION = "redundant_position"
    SUPERSEDED_BY_POSITION = "superseded_by_position"  #: an unfinished batch
    UNDECODABLE = "undecodable"  #: the range is fetched again
    CATCHING_UP = "catching_up"  #: the queue was full; the range is fetched instead
    HANDLER_FAILED = "handler_failed"  #: the host's sink raised; fetched again
    IMPLAUSIBLE = "implausible"  #: beyond the last token that exists
    REPEATED = "repeated"  #: a USER_SYNC that says nothing new, or a relayed copy


class CommandDropReason(enum.Enum):
    """Why a command of this process was never sent."""

    QUEUE_FULL = "queue_full"  #: too many commands wait for a link
    STOPPED = "stopped"  #: the process stopped before there was a link
    FAILED = "failed"  #: a link raised; see the log


class Resync(enum.Enum):
    """Where a catch-up got its rows from."""

    PARTIAL = "partial"  #: the memory of their writer
    FULL = "full"  #: the database, or all that a writer which started again has
    FAILED = "failed"  #: nowhere, this time


@attrs.frozen
class CatchUpEvent:
    """One catch-up: a writer's rows in ``(from_token, upto_token]`` are fetched."""

    stream_name: str
    instance_name: str
    from_token: int
    upto_token: int


@attrs.frozen
class ConnectionBuffers:
    """What lies in the buffers of one connection, asked for now and then.

    :ivar connection: its name.
    :ivar pending_commands: commands that wait because the transport is paused.
    :ivar send_buffer: bytes that the transport has not given to the kernel.
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
    """What another process told of itself on the extension.

    :ivar epoch: random, made anew at each start.
    :ivar version: of its software; empty if it does not say.
    :ivar where: for people; empty if it does not say.
    :ivar is_leaving: it said goodbye.
    :ivar positions: of each stream that it writes, by name, how far it told the
        others, and how long before the message it got there, s.
    """

    instance_name: str
    epoch: str
    version: str
    where: str
    is_leaving: bool
    positions: Mapping[str, tuple[int, float]]


class ReplicationObserver:
    """Hears of everything; does nothing."""

    # -- commands, counted a chunk at a time --------------------------------------

    def commands_received(self, connection: str, command: str, count: int) -> None:
        """``count`` commands of one name arrived on a connection."""

    def commands_sent(self, connection: str, command: str, count: int) -> None:
        """``count`` commands of one name were written to a connection."""

    def line_refused(self, connection: str, error: ProtocolError) -> None:
        """Record that a line was skipped: it did not parse, or is forbidden here."""

    def request_refused(self, status: int, why: str) -> None:
        """Record that an HTTP request was refused, for its parameters, its secret, ...

        :param why: holds nothing that a stranger said.
        """

    # -- rows -----------------------------------------------------------------------

    def rows_received(self, stream_name: str, count: int) -> None:
        """``count`` RDATA of a known stream arrived."""

    def discarded(
        self, stream_name: str, instance_name: str, reason: DiscardReason, count: int
    ) -> None:
        """Rows (or one POSITION) were not delivered.

        ``stream_name`` comes from the peer if the reason is ``UNKNOWN_STREAM``:
        no metric label may be made of it.
        """

    def extra_fields(self, stream_name: str, count: int) -> None:
        """``count`` rows had more fields than we know: a newer peer."""

    def queue_changed(self, stream_name: str, length: int) -> None:
        """Record that the queue of a stream holds ``length`` rows and positions."""

    def position_announced(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that a writer is at ``token``; once a chunk, or by a POSITION.

        What is announced may still be dropped, or wait.
        """

    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that a writer's stream was handled up to ``token``."""

    def stream_connected(
        self, connection: str, stream_name: str, instance_name: str
    ) -> None:
        """Record that a writer's POSITION was handled: its rows are live now."""

    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        """Record that a stream was reset.

        Its writer started again, or may have, or it was announced further than it is.
        """

    def position_refuted(
        self, stream_name: str, instance_name: str, token: int, last_token: int
    ) -> None:
        """Record that a writer was announced at a token that does not exist."""

    def ahead_of_writer(
        self, stream_name: str, instance_name: str, position: int, announced: int
    ) -> None:
        """Record that this process is further than the writer itself says to be.

        Rows that the writer has yet to write, up to there, would be discarded.
        """

    # -- catch-up ---------------------------------------------------------------------

    def catch_up(self, event: CatchUpEvent) -> AbstractContextManager[object]:
        """Record a catch-up, which lasts until the context ends."""
        return contextlib.nullcontext()

    def catch_up_page(self, event: CatchUpEvent, rows: int, upto_token: int) -> None:
        """Record that a page of a catch-up was delivered."""

    def catch_up_failed(
        self, event: CatchUpEvent, error: BaseException, attempt: int, retry_in: float
    ) -> None:
        """Record the ``attempt``-th failure of a catch-up; next in ``retry_in`` s."""

    def removed_writer_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        """Record that rows of a removed writer are fetched, up to ``upto_token``."""

    def removed_writer_drained(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that rows of a removed writer up to ``token`` were handled."""

    def resynced(self, stream_name: str, instance_name: str, kind: Resync) -> None:
        """Record that a catch-up that fetched something ended, or failed."""

    def backlog_asked(
        self, stream_name: str, instance_name: str, error: ReplicationError | None
    ) -> None:
        """Record that a writer was asked for its last rows; ``None`` if it had them."""

    def asking_for_rows(
        self, stream_name: str, instance_name: str, headers: MutableMapping[str, str]
    ) -> AbstractContextManager[object]:
        """Record a request to a writer for rows, which lasts until the context ends.

        An observer may add ``headers``, which the writer's :meth:`serving_rows` is
        told.
        """
        return contextlib.nullcontext()

    def serving_rows(
        self, stream_name: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        """Record a reader's request for rows, answered when the context ends.

        :param headers: of its request, by their names in lower case.
        """
        return contextlib.nullcontext()

    # -- the extension --------------------------------------------------------------

    def gap_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        """Record that a writer reported rows which did not come; they are fetched."""

    def peer_heard(self, heartbeat: PeerHeartbeat) -> None:
        """Record that an instance came, left, or sent a heartbeat."""

    def epoch_changed(self, instance_name: str) -> None:
        """Record that a process started again."""

    def duplicate_instance(self, instance_name: str, places: str) -> None:
        """Two processes run under one name; ``places`` says where, for people."""

    def unknown_fields(self, connection: str, count: int) -> None:
        """Messages of the extension had fields that are not known: a newer peer."""

    # -- sending --------------------------------------------------------------------

    def stream_updates_sent(self, stream_name: str, count: int) -> None:
        """``count`` rows of ours were sent."""

    def sending_failed(self, stream_name: str, error: BaseException) -> None:
        """Rows of ours could not be fetched or sent; tried again later."""

    def commands_dropped(
        self, command: str, reason: CommandDropReason, count: int
    ) -> None:
        """``count`` commands of one name were not sent and never will be."""

    def position_write(
        self, stream_name: str, instance_name: str, token: int
    ) -> AbstractContextManager[object]:
        """Record a write of this position, which lasts until the context ends.

        It may end elsewhere than in the code that began it.
        """
        return contextlib.nullcontext()

    def position_persisted(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that this process's position was persisted in the database."""

    def position_persist_failed(
        self, stream_name: str, instance_name: str, token: int, error: BaseException
    ) -> None:
        """Record that the position was not persisted, and is retried.

        :meth:`failure` is called, too.
        """

    # -- connections ------------------------------------------------------------------

    def connection_made(self, connection: str) -> None:
        """Record that a link is up (SERVER seen, or the subscription confirmed)."""

    def connection_lost(self, connection: str, reason: CloseReason, why: str) -> None:
        """Record that a link went down."""

    def connection_failed(self, connection: str, why: str, retry_in: float) -> None:
        """Record that a link did not come up; it is retried in ``retry_in`` s."""

    def connections_changed(self, count: int) -> None:
        """Record the number of links of this process."""

    def feature_unavailable(self, feature: str, why: str) -> None:
        """Something that a server refuses is done without, for as long as it does."""

    # -- external cache ---------------------------------------------------------------

    def external_cache_set(self, cache_name: str, seconds: float) -> None:
        """Record a write to the external cache, which took ``seconds``."""

    def external_cache_get(self, cache_name: str, hit: bool, seconds: float) -> None:
        """Record a read of the external cache, which took ``seconds``."""

    # -- work -------------------------------------------------------------------------

    def background_process(self, description: str) -> AbstractContextManager[object]:
        """Record a background process of ours, which lasts until the context ends."""
        return _NOTHING

    def failure(self, what: str, error: BaseException) -> None:
        """Something failed where nobody waits for the answer."""
