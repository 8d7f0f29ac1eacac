"""Log lines for operators.

Similar lines about failures are logged at most once a minute, with the number of lines
that were suppressed, so that a peer that sends garbage or a server that is down cannot
fill a disk. Changes of a connection's state have a higher limit. Lines about resets,
connected or removed writers, and the progress of catch-ups have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from twisted.logger import Logger
from twisted.python.failure import Failure

from synapse_replication.errors import excerpt
from synapse_replication.handlers.events import (
    BacklogRequested,
    CatchUpFailed,
    CatchUpPage,
    CommandDropReason,
    CommandsDropped,
    ConnectFailed,
    DatabaseSetBack,
    Discarded,
    DiscardReason,
    DuplicateInstance,
    EpochChanged,
    ExtraFields,
    FeatureUnavailable,
    GapFound,
    LateRows,
    LineRefused,
    LinkDown,
    LinkUp,
    OperationFailed,
    PositionRefuted,
    RemovedWriterDrained,
    RemovedWriterFound,
    RequestRefused,
    RowsUnannounced,
    SendingFailed,
    StreamConnected,
    StreamReset,
    UnannouncedFound,
    UnknownFields,
)
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.instrumentation.rate_limit import (
    MAX_KEYS,
    MAX_OF_GROUP,
    REPEAT_AFTER,
    RateLimit,
)
from synapse_replication.recent import RecentDict
from synapse_replication.text import counted
from synapse_replication.transport.failures import one_line
from synapse_replication.wire.connection import CloseReason

#: The maximum number of state changes of one connection that are logged within
#: REPEAT_AFTER: enough for every change of a connection that does not flap constantly.
CHANGES_OF_STATE = 60
#: The maximum number of state changes of all connections together that are logged
#: within REPEAT_AFTER: a network failure changes the state of every connection of a
#: listener twice. For a connection whose name was first logged less than REPEAT_AFTER
#: ago, the limit is MAX_OF_GROUP instead, because a peer can invent names.
MAX_CHANGES_OF_STATE = 2000


#: Reasons for a discard that :meth:`LoggingObserver.discarded` logs. For IMPLAUSIBLE,
#: ``position_refuted`` writes the line. The other reasons are normal operation.
_ALARMING = frozenset(
    {
        DiscardReason.UNKNOWN_STREAM,
        DiscardReason.UNDECLARED_WRITER,
        DiscardReason.UNDECODABLE,
        DiscardReason.SKIPPED,
        DiscardReason.LOST,
        DiscardReason.CATCHING_UP,
        DiscardReason.HANDLER_FAILED,
    }
)
_WHY_DROPPED = {
    CommandDropReason.QUEUE_FULL: "too many were waiting for a link; check why no link "
    "is up",
    CommandDropReason.STOPPED: "the process stopped while it had no link",
    CommandDropReason.FAILED: "sending failed; see the log",
}
#: The statuses for a wrong epoch and for rows that are not in the backlog. Both are
#: normal: the reader then uses another source, or retries with the new epoch.
_BACKLOG_ANSWERS = frozenset({409, 410})
_ORDERLY = frozenset({CloseReason.CLEAN, CloseReason.SHUTDOWN})


class LoggingObserver(ReplicationObserver):
    """Writes the events that matter to an operator to a log.

    :param logger: the logger to write to.
    :param monotonic: returns a monotonic time in s.
    """

    def __init__(
        self, logger: Logger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._limit = RateLimit(REPEAT_AFTER, monotonic)
        self._monotonic = monotonic
        #: When each connection was first logged.
        self._known_since: RecentDict[str, float] = RecentDict(MAX_KEYS)

    def _log_limited(
        self,
        write: Callable[..., None],
        kind: tuple[Any, ...],
        text: str,
        *,
        burst: int = 1,
        most: int = MAX_OF_GROUP,
        **fields: Any,
    ) -> None:
        suppressed = self._limit.admit(*kind, burst=burst, most=most)
        if suppressed is None:
            return
        if suppressed:
            lines = "line" if suppressed == 1 else "lines"
            text += f" (and {{left_out}} similar {lines} since the last one)"
        write(text, left_out=suppressed, **fields)

    def _log_state_change(
        self, write: Callable[..., None], connection: str, text: str, **fields: Any
    ) -> None:
        now = self._monotonic()
        is_new = now - self._known_since.get(connection, now) < REPEAT_AFTER
        if connection not in self._known_since:
            self._known_since[connection] = now
        # Allow a burst, so that the last logged line states the current state.
        self._log_limited(
            write,
            ("state", connection),
            text,
            burst=CHANGES_OF_STATE,
            most=MAX_OF_GROUP if is_new else MAX_CHANGES_OF_STATE,
            connection=connection,
            **fields,
        )

    # -- lines and rows -------------------------------------------------------------

    @handles(LineRefused)
    def _line_refused(self, event: LineRefused) -> None:
        self._log_limited(
            self._logger.warn,
            ("line_refused", event.connection, type(event.error)),
            "Rejected input from {connection}: {error}",
            connection=event.connection,
            error=event.error,
        )

    @handles(RequestRefused)
    def _request_refused(self, event: RequestRefused) -> None:
        if event.status in _BACKLOG_ANSWERS:
            return
        self._log_limited(
            self._logger.warn,
            ("request_refused", event.status),
            "Refused an HTTP request with {status}: {why}",
            status=event.status,
            why=event.why,
        )

    @handles(Discarded)
    def _discarded(self, event: Discarded) -> None:
        if event.reason not in _ALARMING:
            return
        known = event.reason is not DiscardReason.UNKNOWN_STREAM
        advice = (
            "; if this writer is to write the stream, declare it in this instance's "
            "configuration, too, and restart this instance"
            if event.reason is DiscardReason.UNDECLARED_WRITER
            else ""
        )
        self._log_limited(
            self._logger.warn,
            ("discarded", event.stream_name if known else None, event.reason),
            "Discarded {count} rows or positions of stream {stream} of {writer}: "
            "{reason}{advice}",
            advice=advice,
            stream=excerpt(event.stream_name),
            writer=excerpt(event.instance_name),
            reason=event.reason.value,
            count=event.count,
        )

    @handles(ExtraFields)
    def _extra_fields(self, event: ExtraFields) -> None:
        self._log_limited(
            self._logger.info,
            ("extra_fields", event.stream_name),
            "Ignored unknown fields in rows of stream {stream}; a newer peer sends "
            "them",
            stream=event.stream_name,
        )

    # -- streams and catch-up -------------------------------------------------------

    @handles(StreamConnected)
    def _stream_connected(self, event: StreamConnected) -> None:
        self._logger.debug(
            "Stream {stream} of {writer} is live on {connection}",
            stream=event.stream_name,
            writer=event.instance_name,
            connection=event.connection,
        )

    @handles(StreamReset)
    def _stream_reset(self, event: StreamReset) -> None:
        self._logger.info(
            "Stream {stream} of {writer} moved back from {from_token} to {to_token}: "
            "its writer has (or may have) restarted, or was announced at a position "
            "that it has not reached",
            stream=event.stream_name,
            writer=event.instance_name,
            from_token=event.from_token,
            to_token=event.to_token,
        )

    @handles(RemovedWriterFound)
    def _removed_writer_found(self, event: RemovedWriterFound) -> None:
        self._logger.info(
            "Draining removed writer {writer} of {stream}: rows in ({from_token}, "
            "{upto_token}]",
            stream=event.stream_name,
            writer=excerpt(event.instance_name),
            from_token=event.from_token,
            upto_token=event.upto_token,
        )

    @handles(RemovedWriterDrained)
    def _removed_writer_drained(self, event: RemovedWriterDrained) -> None:
        self._logger.info(
            "Removed writer {writer} of {stream} is drained up to {token}",
            stream=event.stream_name,
            writer=excerpt(event.instance_name),
            token=event.token,
        )

    @handles(DatabaseSetBack)
    def _database_set_back(self, event: DatabaseSetBack) -> None:
        self._log_limited(
            self._logger.error,
            ("database_set_back", event.stream_name, event.instance_name),
            "The database was set back: {writer} of {stream} is stored at {stored}, "
            "but rows up to {position} were delivered here; those after {stored} may "
            "not exist any more",
            stream=event.stream_name,
            writer=excerpt(event.instance_name),
            stored=event.stored,
            position=event.position,
        )

    @handles(PositionRefuted)
    def _position_refuted(self, event: PositionRefuted) -> None:
        self._log_limited(
            self._logger.warn,
            ("position_refuted", event.stream_name),
            "{writer} was announced at {token} of stream {stream}, but cannot be "
            "beyond {last_token}; the announcement is ignored. Does an instance of "
            "another deployment publish here?",
            stream=event.stream_name,
            writer=excerpt(event.instance_name),
            token=event.token,
            last_token=event.last_token,
        )

    @handles(CatchUpPage)
    def _catch_up_page(self, event: CatchUpPage) -> None:
        self._logger.debug(
            "Fetched {rows} rows of {stream} of {writer}, "
            "up to {token} of {upto_token}",
            stream=event.catch_up.stream_name,
            writer=event.catch_up.instance_name,
            rows=event.rows,
            token=event.upto_token,
            upto_token=event.catch_up.upto_token,
        )

    @handles(CatchUpFailed)
    def _catch_up_failed(self, event: CatchUpFailed) -> None:
        self._log_limited(
            self._logger.warn,
            (
                "catch_up_failed",
                event.catch_up.stream_name,
                event.catch_up.instance_name,
                type(event.error),
            ),
            "Cannot fetch or deliver rows of {stream} of {writer} in ({from_token}, "
            "{upto_token}], attempt {attempt}: {error}; retrying in {retry_in:.1f} s",
            stream=event.catch_up.stream_name,
            writer=event.catch_up.instance_name,
            from_token=event.catch_up.from_token,
            upto_token=event.catch_up.upto_token,
            error=event.error,
            attempt=event.attempt,
            retry_in=event.retry_in,
        )

    @handles(BacklogRequested)
    def _backlog_requested(self, event: BacklogRequested) -> None:
        if event.error is not None:
            self._log_limited(
                self._logger.info,
                (
                    "backlog_requested",
                    event.instance_name,
                    getattr(event.error, "status", None),
                ),
                "{writer} did not return rows of {stream} from its backlog, so they "
                "are fetched from the stream's source: {error}",
                writer=event.instance_name,
                stream=event.stream_name,
                error=event.error,
            )

    # -- the extension ----------------------------------------------------------------

    @handles(GapFound)
    def _gap_found(self, event: GapFound) -> None:
        self._log_limited(
            self._logger.warn,
            ("gap_found", event.stream_name, event.instance_name),
            "Rows of {stream} of {writer} in ({from_token}, {upto_token}] were sent "
            "but did not arrive; fetching them",
            stream=event.stream_name,
            writer=event.instance_name,
            from_token=event.from_token,
            upto_token=event.upto_token,
        )

    @handles(UnannouncedFound)
    def _unannounced_found(self, event: UnannouncedFound) -> None:
        self._log_limited(
            self._logger.warn,
            ("unannounced_found", event.stream_name, event.instance_name),
            "{writer} has stored position {upto_token} of {stream}, but announced only "
            "{from_token}; fetching the rows in between",
            stream=event.stream_name,
            writer=event.instance_name,
            from_token=event.from_token,
            upto_token=event.upto_token,
        )

    @handles(RowsUnannounced)
    def _rows_unannounced(self, event: RowsUnannounced) -> None:
        self._log_limited(
            self._logger.warn,
            ("rows_unannounced", event.stream_name, event.instance_name),
            "{writer} committed {count} tokens of {stream} and did not announce them, "
            "the first of them {token}",
            stream=event.stream_name,
            writer=event.instance_name,
            count=len(event.tokens),
            token=event.tokens[0],
        )

    @handles(LateRows)
    def _late_rows_delivered(self, event: LateRows) -> None:
        self._log_limited(
            self._logger.warn,
            ("late_rows", event.stream_name, event.instance_name),
            "Delivered {count} tokens of {stream} of {writer} late, after greater "
            "ones; the first of them is {token}",
            stream=event.stream_name,
            writer=event.instance_name,
            count=len(event.tokens),
            token=event.tokens[0],
        )

    @handles(EpochChanged)
    def _epoch_changed(self, event: EpochChanged) -> None:
        self._log_limited(
            self._logger.info,
            ("epoch_changed", event.instance_name),
            "{instance} has a new current epoch, usually because it restarted",
            instance=excerpt(event.instance_name),
        )

    @handles(DuplicateInstance)
    def _duplicate_instance(self, event: DuplicateInstance) -> None:
        self._log_limited(
            self._logger.critical,
            ("duplicate_instance", event.instance_name),
            "Two processes are called {instance} ({places}): peers cannot distinguish "
            "their rows, and rows will be lost; stop one, or give it another name",
            instance=excerpt(event.instance_name),
            places=excerpt(event.places) or "locations unknown",
        )

    @handles(UnknownFields)
    def _unknown_fields(self, event: UnknownFields) -> None:
        self._log_limited(
            self._logger.info,
            ("unknown_fields", event.connection),
            "Ignored unknown fields in messages of the extension; a newer peer sends "
            "them",
        )

    # -- connections ----------------------------------------------------------------

    @handles(LinkUp)
    def _connection_made(self, event: LinkUp) -> None:
        self._log_state_change(
            self._logger.info, event.connection, "Connected: {connection}"
        )

    @handles(LinkDown)
    def _connection_lost(self, event: LinkDown) -> None:
        write = self._logger.info if event.reason in _ORDERLY else self._logger.warn
        self._log_state_change(
            write,
            event.connection,
            "Disconnected: {connection}, {reason}: {why}",
            reason=event.reason.value,
            why=event.why,
        )

    @handles(ConnectFailed)
    def _connection_failed(self, event: ConnectFailed) -> None:
        if not event.why:
            return
        self._log_limited(
            self._logger.warn,
            ("connection_failed", event.connection, event.why),
            "Cannot connect: {connection}: {why}; retrying in {retry_in:.1f} s",
            connection=event.connection,
            why=event.why,
            retry_in=event.retry_in,
        )

    @handles(FeatureUnavailable)
    def _feature_unavailable(self, event: FeatureUnavailable) -> None:
        self._log_limited(
            self._logger.warn,
            ("feature_unavailable", event.feature),
            "Continuing without {feature}: {why}",
            feature=event.feature,
            why=event.why,
        )

    # -- failures ---------------------------------------------------------------------

    @handles(SendingFailed)
    def _sending_failed(self, event: SendingFailed) -> None:
        self._log_limited(
            self._logger.error,
            ("sending_failed", event.stream_name, type(event.error)),
            "Cannot send rows of {stream}: {error}; they are sent later, or fetched by "
            "the readers",
            stream=event.stream_name,
            error=one_line(event.error),
            log_failure=Failure(event.error),  # type: ignore[no-untyped-call]
        )

    @handles(CommandsDropped)
    def _commands_dropped(self, event: CommandsDropped) -> None:
        self._log_limited(
            self._logger.warn,
            ("commands_dropped", event.command, event.reason),
            "{commands} dropped, and will not be sent: {why}",
            commands=counted(event.count, f"{event.command} command"),
            count=event.count,
            command=event.command,
            why=_WHY_DROPPED[event.reason],
        )

    @handles(OperationFailed)
    def _failure(self, event: OperationFailed) -> None:
        self._log_limited(
            self._logger.critical,
            ("failure", event.what, type(event.error)),
            "{what} failed: {error}",
            what=event.what,
            error=one_line(event.error),
            log_failure=Failure(event.error),  # type: ignore[no-untyped-call]
        )
