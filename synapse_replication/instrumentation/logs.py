"""Log lines for operators.

Similar lines about failures are logged at most once a minute, with the number of lines
that were suppressed, so that a peer that sends garbage or a server that is down cannot
fill a disk. Changes of a connection's state have a higher limit. Lines about resets,
connected or removed writers, and the progress of catch-ups have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from twisted.logger import Logger
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.errors import ProtocolError, ReplicationError, excerpt
from synapse_replication.handlers.observer import (
    CatchUpEvent,
    CommandDropReason,
    DiscardReason,
    ReplicationObserver,
)
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

    @override
    def line_refused(self, connection: str, error: ProtocolError) -> None:
        self._log_limited(
            self._logger.warn,
            ("line_refused", connection, type(error)),
            "Rejected input from {connection}: {error}",
            connection=connection,
            error=error,
        )

    @override
    def request_refused(self, status: int, why: str) -> None:
        if status in _BACKLOG_ANSWERS:
            return
        self._log_limited(
            self._logger.warn,
            ("request_refused", status),
            "Refused an HTTP request with {status}: {why}",
            status=status,
            why=why,
        )

    @override
    def discarded(
        self, stream_name: str, instance_name: str, reason: DiscardReason, count: int
    ) -> None:
        if reason not in _ALARMING:
            return
        known = reason is not DiscardReason.UNKNOWN_STREAM
        advice = (
            "; if this writer is to write the stream, declare it in this instance's "
            "configuration, too, and restart this instance"
            if reason is DiscardReason.UNDECLARED_WRITER
            else ""
        )
        self._log_limited(
            self._logger.warn,
            ("discarded", stream_name if known else None, reason),
            "Discarded {count} rows or positions of stream {stream} of {writer}: "
            "{reason}{advice}",
            advice=advice,
            stream=excerpt(stream_name),
            writer=excerpt(instance_name),
            reason=reason.value,
            count=count,
        )

    @override
    def extra_fields(self, stream_name: str, count: int) -> None:
        self._log_limited(
            self._logger.info,
            ("extra_fields", stream_name),
            "Ignored unknown fields in rows of stream {stream}; a newer peer sends "
            "them",
            stream=stream_name,
        )

    # -- streams and catch-up -------------------------------------------------------

    @override
    def stream_connected(
        self, connection: str, stream_name: str, instance_name: str
    ) -> None:
        self._logger.debug(
            "Stream {stream} of {writer} is live on {connection}",
            stream=stream_name,
            writer=instance_name,
            connection=connection,
        )

    @override
    def stream_reset(
        self, stream_name: str, instance_name: str, from_token: int, to_token: int
    ) -> None:
        self._logger.info(
            "Stream {stream} of {writer} moved back from {from_token} to {to_token}: "
            "its writer has (or may have) restarted, or was announced at a position "
            "that it has not reached",
            stream=stream_name,
            writer=instance_name,
            from_token=from_token,
            to_token=to_token,
        )

    @override
    def removed_writer_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        self._logger.info(
            "Draining removed writer {writer} of {stream}: rows in ({from_token}, "
            "{upto_token}]",
            stream=stream_name,
            writer=excerpt(instance_name),
            from_token=from_token,
            upto_token=upto_token,
        )

    @override
    def removed_writer_drained(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        self._logger.info(
            "Removed writer {writer} of {stream} is drained up to {token}",
            stream=stream_name,
            writer=excerpt(instance_name),
            token=token,
        )

    @override
    def position_refuted(
        self, stream_name: str, instance_name: str, token: int, last_token: int
    ) -> None:
        self._log_limited(
            self._logger.warn,
            ("position_refuted", stream_name),
            "{writer} was announced at {token} of stream {stream}, but cannot be "
            "beyond {last_token}; the announcement is ignored. Does an instance of "
            "another deployment publish here?",
            stream=stream_name,
            writer=excerpt(instance_name),
            token=token,
            last_token=last_token,
        )

    @override
    def catch_up_page(self, event: CatchUpEvent, rows: int, upto_token: int) -> None:
        self._logger.debug(
            "Fetched {rows} rows of {stream} of {writer}, "
            "up to {token} of {upto_token}",
            stream=event.stream_name,
            writer=event.instance_name,
            rows=rows,
            token=upto_token,
            upto_token=event.upto_token,
        )

    @override
    def catch_up_failed(
        self, event: CatchUpEvent, error: BaseException, attempt: int, retry_in: float
    ) -> None:
        self._log_limited(
            self._logger.warn,
            ("catch_up_failed", event.stream_name, event.instance_name, type(error)),
            "Cannot fetch or deliver rows of {stream} of {writer} in ({from_token}, "
            "{upto_token}], attempt {attempt}: {error}; retrying in {retry_in:.1f} s",
            stream=event.stream_name,
            writer=event.instance_name,
            from_token=event.from_token,
            upto_token=event.upto_token,
            error=error,
            attempt=attempt,
            retry_in=retry_in,
        )

    @override
    def backlog_requested(
        self, stream_name: str, instance_name: str, error: ReplicationError | None
    ) -> None:
        if error is not None:
            self._log_limited(
                self._logger.info,
                ("backlog_requested", instance_name, getattr(error, "status", None)),
                "{writer} did not return rows of {stream} from its backlog, so they "
                "are fetched from the stream's source: {error}",
                writer=instance_name,
                stream=stream_name,
                error=error,
            )

    # -- the extension ----------------------------------------------------------------

    @override
    def gap_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        self._log_limited(
            self._logger.warn,
            ("gap_found", stream_name, instance_name),
            "Rows of {stream} of {writer} in ({from_token}, {upto_token}] were sent "
            "but did not arrive; fetching them",
            stream=stream_name,
            writer=instance_name,
            from_token=from_token,
            upto_token=upto_token,
        )

    @override
    def unannounced_found(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> None:
        self._log_limited(
            self._logger.warn,
            ("unannounced_found", stream_name, instance_name),
            "{writer} has stored position {upto_token} of {stream}, but announced only "
            "{from_token}; fetching the rows in between",
            stream=stream_name,
            writer=instance_name,
            from_token=from_token,
            upto_token=upto_token,
        )

    @override
    def rows_unannounced(
        self, stream_name: str, instance_name: str, tokens: Sequence[int]
    ) -> None:
        self._log_limited(
            self._logger.warn,
            ("rows_unannounced", stream_name, instance_name),
            "{writer} committed {count} tokens of {stream} and did not announce them, "
            "the first of them {token}",
            stream=stream_name,
            writer=instance_name,
            count=len(tokens),
            token=tokens[0],
        )

    @override
    def late_rows_delivered(
        self, stream_name: str, instance_name: str, tokens: Sequence[int]
    ) -> None:
        self._log_limited(
            self._logger.warn,
            ("late_rows", stream_name, instance_name),
            "Delivered {count} tokens of {stream} of {writer} late, after greater "
            "ones; the first of them is {token}",
            stream=stream_name,
            writer=instance_name,
            count=len(tokens),
            token=tokens[0],
        )

    @override
    def epoch_changed(self, instance_name: str) -> None:
        self._log_limited(
            self._logger.info,
            ("epoch_changed", instance_name),
            "{instance} has a new current epoch, usually because it restarted",
            instance=excerpt(instance_name),
        )

    @override
    def duplicate_instance(self, instance_name: str, places: str) -> None:
        self._log_limited(
            self._logger.critical,
            ("duplicate_instance", instance_name),
            "Two processes are called {instance} ({places}): peers cannot distinguish "
            "their rows, and rows will be lost; stop one, or give it another "
            "worker_name",
            instance=excerpt(instance_name),
            places=excerpt(places) or "locations unknown",
        )

    @override
    def unknown_fields(self, connection: str, count: int) -> None:
        self._log_limited(
            self._logger.info,
            ("unknown_fields", connection),
            "Ignored unknown fields in messages of the extension; a newer peer sends "
            "them",
        )

    # -- connections ----------------------------------------------------------------

    @override
    def connection_made(self, connection: str) -> None:
        self._log_state_change(self._logger.info, connection, "Connected: {connection}")

    @override
    def connection_lost(self, connection: str, reason: CloseReason, why: str) -> None:
        write = self._logger.info if reason in _ORDERLY else self._logger.warn
        self._log_state_change(
            write,
            connection,
            "Disconnected: {connection}, {reason}: {why}",
            reason=reason.value,
            why=why,
        )

    @override
    def connection_failed(self, connection: str, why: str, retry_in: float) -> None:
        if not why:
            return
        self._log_limited(
            self._logger.warn,
            ("connection_failed", connection, why),
            "Cannot connect: {connection}: {why}; retrying in {retry_in:.1f} s",
            connection=connection,
            why=why,
            retry_in=retry_in,
        )

    @override
    def feature_unavailable(self, feature: str, why: str) -> None:
        self._log_limited(
            self._logger.warn,
            ("feature_unavailable", feature),
            "Continuing without {feature}: {why}",
            feature=feature,
            why=why,
        )

    # -- failures ---------------------------------------------------------------------

    @override
    def sending_failed(self, stream_name: str, error: BaseException) -> None:
        self._log_limited(
            self._logger.error,
            ("sending_failed", stream_name, type(error)),
            "Cannot send rows of {stream}: {error}; they are sent later, or fetched by "
            "the readers",
            stream=stream_name,
            error=one_line(error),
            log_failure=Failure(error),  # type: ignore[no-untyped-call]
        )

    @override
    def commands_dropped(
        self, command: str, reason: CommandDropReason, count: int
    ) -> None:
        self._log_limited(
            self._logger.warn,
            ("commands_dropped", command, reason),
            "{commands} dropped, and will not be sent: {why}",
            commands=counted(count, f"{command} command"),
            count=count,
            command=command,
            why=_WHY_DROPPED[reason],
        )

    @override
    def failure(self, what: str, error: BaseException) -> None:
        self._log_limited(
            self._logger.critical,
            ("failure", what, type(error)),
            "{what} failed: {error}",
            what=what,
            error=one_line(error),
            log_failure=Failure(error),  # type: ignore[no-untyped-call]
        )
