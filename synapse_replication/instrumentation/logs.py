"""Log lines for operators, and the limit on similar ones.

Similar lines about failures are logged at most once a minute, with the number of lines
that were suppressed, so that a peer that sends garbage or a server that is down cannot
fill a disk (:class:`RateLimit`). Changes of a connection's state have a higher limit.
Lines about resets, connected or removed writers, and the progress of catch-ups have
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

from synapse_replication.errors import excerpt
from synapse_replication.handlers import events
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.recent import RecentDict
from synapse_replication.text import counted, incoming_label, named_label
from synapse_replication.transport.error_text import error_text
from synapse_replication.wire.close_reason import CloseReason

#: The period, in s, in which lines of one kind are suppressed after the first one or,
#: if a burst is allowed, after the burst.
REPEAT_AFTER = 60.0
#: The maximum number of kinds of lines that are counted.
MAX_KEYS = 1000
#: The default maximum number of lines of one group that are written within
#: REPEAT_AFTER, whatever names they contain.
MAX_OF_GROUP = 100
#: The maximum number of state changes of one connection that are logged within
#: REPEAT_AFTER: enough for every change of a connection that does not flap constantly.
CHANGES_OF_STATE = 60
#: The maximum number of state changes of all connections together that are logged
#: within REPEAT_AFTER: a network failure changes the state of every connection of a
#: listener twice. For a connection whose name was first logged less than REPEAT_AFTER
#: ago, the limit is MAX_OF_GROUP instead, because a peer can invent names.
MAX_CHANGES_OF_STATE = 2000


#: Reasons for a discard that are logged. For IMPLAUSIBLE, ``PositionRefuted`` is. The
#: other reasons are normal operation.
_ALARMING = frozenset(
    {
        events.DiscardReason.UNKNOWN_STREAM,
        events.DiscardReason.UNDECLARED_WRITER,
        events.DiscardReason.UNDECODABLE,
        events.DiscardReason.SKIPPED,
        events.DiscardReason.LOST,
        events.DiscardReason.CATCHING_UP,
        events.DiscardReason.HANDLER_FAILED,
    }
)
_WHY_DROPPED = {
    events.CommandDropReason.QUEUE_FULL: "too many were waiting for a link; check why "
    "no link is up",
    events.CommandDropReason.STOPPED: "the process stopped while it had no link",
    events.CommandDropReason.FAILED: "sending failed; see the log",
}
#: The statuses for a wrong epoch and for rows that are not in the backlog. Both are
#: normal: the reader then uses another source, or retries with the new epoch.
_BACKLOG_ANSWERS = frozenset({409, 410})
_ORDERLY = frozenset({CloseReason.CLEAN, CloseReason.SHUTDOWN})


def _writer(event: events.WriterEvent) -> dict[str, str]:
    """Return the fields that name the writer of an event."""
    return {
        "stream": excerpt(event.stream_name),
        "writer": excerpt(event.instance_name),
    }


def _range(event: events.RangeEvent) -> dict[str, Any]:
    """Return the fields that name the writer and the range of an event."""
    return {
        **_writer(event),
        "from_token": event.from_token,
        "upto_token": event.upto_token,
    }


def _traceback(error: BaseException) -> dict[str, Any]:
    """Return the fields of an error that is logged with its traceback."""
    failure = Failure(error)  # type: ignore[no-untyped-call]
    return {"error": error_text(error), "log_failure": failure}


class RateLimit:
    """Limits the rate of similar log lines within :data:`REPEAT_AFTER`.

    Each kind of line has a limit. Because a peer can create new kinds by inventing
    names, each group of kinds has a limit, too.

    :param monotonic: returns a monotonic time in s.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: By kind: the start of the current period, and the number of lines in it.
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        #: By group: the start of the current period, the number of lines written in it,
        #: and the number of suppressed lines that the next written line must report. A
        #: line that the limit of its kind suppresses is counted in ``_kinds`` first.
        self._groups: dict[str, tuple[float, int, int]] = {}

    def admit(
        self,
        group: str,
        *kind: Hashable,
        burst: int = 1,
        most: int = MAX_OF_GROUP,
    ) -> int | None:
        """Decide whether to write a line of this kind.

        :param group: a name from a fixed set; only ``kind`` may contain a peer's text.
        :param burst: the most lines of the kind to write in one period.
        :param most: the most lines of the group to write in one period.
        :return: the number of similar lines that were suppressed before this one;
            ``None`` if this line is to be suppressed.
        """
        of_kind = self._admit_kind((group, *kind), burst)
        if of_kind is None:
            return None
        now = self._monotonic()
        since, written, of_group = self._groups.get(group, (now, 0, 0))
        if now - since >= REPEAT_AFTER:
            since, written = now, 0
        if written >= most:
            self._groups[group] = (since, written, of_group + of_kind + 1)
            return None
        self._groups[group] = (since, written + 1, 0)
        return of_kind + of_group

    def _admit_kind(self, kind: Hashable, burst: int) -> int | None:
        now = self._monotonic()
        began, count = self._kinds.get(kind, (None, 0))
        if began is not None and now - began < REPEAT_AFTER:
            self._kinds[kind] = (began, count + 1)
            return 0 if count < burst else None
        self._kinds.pop(kind, None)
        if len(self._kinds) >= MAX_KEYS:
            # The dict is in the order in which the periods began: evict the oldest.
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = (now, 1)
        return max(0, count - burst)


class LoggingObserver(ReplicationObserver):
    """Writes the events that matter to an operator to a log.

    :param logger: the logger to write to.
    :param monotonic: returns a monotonic time in s.
    """

    def __init__(
        self, logger: Logger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._limit = RateLimit(monotonic)
        self._monotonic = monotonic
        #: When each connection was first logged.
        self._known_since: RecentDict[str, float] = RecentDict(MAX_KEYS)
        #: The instance at the other end of each direct link.
        self._peers: RecentDict[str, str] = RecentDict(MAX_KEYS)

    def _log(
        self,
        event: events.Event,
        level: Any,
        text: str,
        *,
        per: Sequence[object] = (),
        **fields: Any,
    ) -> None:
        """Write the line of an event.

        :param level: a constant of ``LogLevel``.
        :param text: a format for ``fields``.
        :param per: the values of which each combination has its own limit; none for a
            line without a limit. For an exception, its class counts.
        """
        if not per:
            self._logger.emit(level, text, **fields)
            return
        kind = (type(part) if isinstance(part, BaseException) else part for part in per)
        self._log_limited(level, (type(event).__name__, *kind), text, **fields)

    def _log_limited(
        self,
        level: Any,
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
        self._logger.emit(level, text, left_out=suppressed, **fields)

    def _log_state_change(
        self, level: Any, connection: str, text: str, **fields: Any
    ) -> None:
        now = self._monotonic()
        is_new = now - self._known_since.get(connection, now) < REPEAT_AFTER
        if connection not in self._known_since:
            self._known_since[connection] = now
        # Allow a burst, so that the last logged line states the current state.
        self._log_limited(
            level,
            ("state", connection),
            text,
            burst=CHANGES_OF_STATE,
            most=MAX_OF_GROUP if is_new else MAX_CHANGES_OF_STATE,
            connection=connection,
            **fields,
        )

    @handles(events.LinkUp)
    def _link_up(self, event: events.LinkUp) -> None:
        self._peers.pop(event.connection, None)
        self._log_state_change(
            LogLevel.info,
            event.connection,
            "Connected: {label}",
            label=self._label(event),
        )

    @handles(events.PeerNamed)
    def _peer_named(self, event: events.PeerNamed) -> None:
        self._peers[event.connection] = peer = excerpt(event.instance_name)
        if named_label(event.connection, peer) != event.connection:
            self._log_state_change(
                LogLevel.info,
                event.connection,
                "The server of the link {connection} is {peer}",
                peer=peer,
            )

    def _label(self, event: events.LinkUp | events.LinkDown) -> str:
        name = named_label(event.connection, self._peers.get(event.connection, ""))
        return incoming_label(name, event.address)

    @handles(events.LinkDown)
    def _link_down(self, event: events.LinkDown) -> None:
        self._log_state_change(
            LogLevel.info if event.reason in _ORDERLY else LogLevel.warn,
            event.connection,
            "Disconnected: {label}, {reason}: {why}",
            label=self._label(event),
            reason=event.reason.value,
            why=event.why,
        )

    # -- lines and rows ---------------------------------------------------------------

    @handles(events.LineRefused)
    def _line_refused(self, event: events.LineRefused) -> None:
        self._log(
            event,
            LogLevel.warn,
            "Rejected input from {connection}: {error}",
            per=(event.connection, event.error),
            connection=event.connection,
            error=event.error,
        )

    @handles(events.RequestRefused)
    def _request_refused(self, event: events.RequestRefused) -> None:
        if event.status not in _BACKLOG_ANSWERS:
            self._log(
                event,
                LogLevel.warn,
                "Refused an HTTP request with {status}: {why}",
                per=(event.status,),
                status=event.status,
                why=event.why,
            )

    @handles(events.Discarded)
    def _discarded(self, event: events.Discarded) -> None:
        if event.lost_by:
            self._log(
                event,
                LogLevel.warn,
                "Discarded {command} of {peer}: this instance neither stores nor "
                "relays client IPs; connect {peer} to the instance that stores them, "
                "or use Redis",
                per=(event.lost_by, event.reason.value),
                command=event.stream_name,
                peer=excerpt(event.lost_by),
            )
        if event.reason not in _ALARMING:
            return
        known = event.reason is not events.DiscardReason.UNKNOWN_STREAM
        advice = (
            "; if this writer is to write the stream, declare it in this instance's "
            "configuration, too, and restart this instance"
            if event.reason is events.DiscardReason.UNDECLARED_WRITER
            else ""
        )
        self._log(
            event,
            LogLevel.warn,
            "Discarded {count} rows or positions of stream {stream} of {writer}: "
            "{reason}{advice}",
            per=(event.stream_name if known else None, event.reason.value),
            **_writer(event),
            count=event.count,
            reason=event.reason.value,
            advice=advice,
        )

    @handles(events.ExtraFields)
    def _extra_fields(self, event: events.ExtraFields) -> None:
        stream = excerpt(event.stream_name)
        self._log(
            event,
            LogLevel.info,
            "Ignored unknown fields in rows of stream {stream}; a newer peer sends "
            "them",
            per=(stream,),
            stream=stream,
            count=event.count,
        )

    # -- positions and catch-ups ------------------------------------------------------

    @handles(events.StreamConnected)
    def _stream_connected(self, event: events.StreamConnected) -> None:
        self._log(
            event,
            LogLevel.debug,
            "Stream {stream} of {writer} is live on {connection}",
            stream=excerpt(event.stream_name),
            writer=excerpt(event.instance_name),
            connection=event.connection,
        )

    @handles(events.StreamReset)
    def _stream_reset(self, event: events.StreamReset) -> None:
        self._log(
            event,
            LogLevel.info,
            "Stream {stream} of {writer} moved back from {from_token} to {to_token}: "
            "its writer has (or may have) restarted",
            **_writer(event),
            from_token=event.from_token,
            to_token=event.to_token,
        )

    @handles(events.PositionLowered)
    def _position_lowered(self, event: events.PositionLowered) -> None:
        self._log(
            event,
            LogLevel.info,
            "Stream {stream} of {writer} is at {to_token}, not at {from_token} as was "
            "announced; no row was delivered in between",
            **_writer(event),
            from_token=event.from_token,
            to_token=event.to_token,
        )

    @handles(events.PositionRefuted)
    def _position_refuted(self, event: events.PositionRefuted) -> None:
        fields = _writer(event)
        self._log(
            event,
            LogLevel.warn,
            "{writer} was announced at {token} of stream {stream}, but cannot be "
            "beyond {last_token}; the announcement is ignored. Does an instance of "
            "another deployment publish here?",
            per=(fields["stream"],),
            **fields,
            token=event.token,
            last_token=event.last_token,
        )

    @handles(events.DatabaseSetBack)
    def _database_set_back(self, event: events.DatabaseSetBack) -> None:
        fields = _writer(event)
        self._log(
            event,
            LogLevel.error,
            "The database was set back: {writer} of {stream} is stored at {stored}, "
            "but rows up to {position} were delivered here; those after {stored} may "
            "not exist any more",
            per=tuple(fields.values()),
            **fields,
            stored=event.stored,
            position=event.position,
        )

    @handles(events.CatchUpPage)
    def _catch_up_page(self, event: events.CatchUpPage) -> None:
        self._log(
            event,
            LogLevel.debug,
            "Fetched {rows} rows of {stream} of {writer}, up to {token} of "
            "{upto_token}",
            **_range(event.catch_up),
            rows=event.rows,
            token=event.upto_token,
        )

    @handles(events.CatchUpFailed)
    def _catch_up_failed(self, event: events.CatchUpFailed) -> None:
        fields = _range(event.catch_up)
        self._log(
            event,
            LogLevel.warn,
            "Cannot fetch or deliver rows of {stream} of {writer} in ({from_token}, "
            "{upto_token}], attempt {attempt}: {error}; retrying in {retry_in:.1f} s",
            per=(fields["stream"], fields["writer"], event.error),
            **fields,
            attempt=event.attempt,
            error=event.error,
            retry_in=event.retry_in,
        )

    @handles(events.BacklogRequested)
    def _backlog_requested(self, event: events.BacklogRequested) -> None:
        if event.error is None:
            return
        fields = _writer(event)
        status = getattr(event.error, "status", None)
        if status in _BACKLOG_ANSWERS:
            # Not a failure: the backlog of a writer that was restarted is empty.
            self._log(
                event,
                LogLevel.info,
                "{writer} has the missing rows of {stream} in its backlog no more, as "
                "after a restart; they are fetched from the stream's source",
                per=(fields["writer"], status),
                **fields,
            )
            return
        self._log(
            event,
            LogLevel.info,
            "{writer} did not return rows of {stream} from its backlog, so they are "
            "fetched from the stream's source: {error}",
            per=(fields["writer"], status),
            **fields,
            error=event.error,
        )

    @handles(events.StreamAbsent)
    def _stream_absent(self, event: events.StreamAbsent) -> None:
        self._log(
            event,
            LogLevel.info,
            "Not replicating {stream}: the database has no table of it, as those of "
            "older versions of Synapse",
            stream=event.stream_name,
        )

    @handles(events.RemovedWriterFound)
    def _removed_writer_found(self, event: events.RemovedWriterFound) -> None:
        self._log(
            event,
            LogLevel.info,
            "Draining removed writer {writer} of {stream}: rows in ({from_token}, "
            "{upto_token}]",
            **_range(event),
        )

    @handles(events.RemovedWriterDrained)
    def _removed_writer_drained(self, event: events.RemovedWriterDrained) -> None:
        self._log(
            event,
            LogLevel.info,
            "Removed writer {writer} of {stream} is drained up to {token}",
            **_writer(event),
            token=event.token,
        )

    # -- what a writer did not announce, or announced in vain -------------------------

    @handles(events.GapFound)
    def _gap_found(self, event: events.GapFound) -> None:
        fields = _range(event)
        self._log(
            event,
            LogLevel.warn,
            "Rows of {stream} of {writer} in ({from_token}, {upto_token}] were sent "
            "but did not arrive; fetching them",
            per=(fields["stream"], fields["writer"]),
            **fields,
        )

    @handles(events.UnannouncedFound)
    def _unannounced_found(self, event: events.UnannouncedFound) -> None:
        fields = _range(event)
        self._log(
            event,
            LogLevel.warn,
            "{writer} has stored position {upto_token} of {stream}, but announced only "
            "{from_token}; fetching the rows in between",
            per=(fields["stream"], fields["writer"]),
            **fields,
        )

    @handles(events.RowsUnannounced)
    def _rows_unannounced(self, event: events.RowsUnannounced) -> None:
        fields = _writer(event)
        self._log(
            event,
            LogLevel.warn,
            "{writer} did not announce {tokens} of {stream} that it committed; the "
            "first is {token}",
            per=tuple(fields.values()),
            **fields,
            tokens=counted(len(event.tokens), "token"),
            token=event.tokens[0],
        )

    @handles(events.LateRows)
    def _late_rows(self, event: events.LateRows) -> None:
        fields = _writer(event)
        self._log(
            event,
            LogLevel.warn,
            "Delivered {tokens} of {stream} of {writer} late, after greater ones; the "
            "first is {token}",
            per=tuple(fields.values()),
            **fields,
            tokens=counted(len(event.tokens), "token"),
            token=event.tokens[0],
        )

    # -- instances --------------------------------------------------------------------

    @handles(events.EpochChanged)
    def _epoch_changed(self, event: events.EpochChanged) -> None:
        instance = excerpt(event.instance_name)
        self._log(
            event,
            LogLevel.info,
            "{instance} has a new current epoch, usually because it restarted",
            per=(instance,),
            instance=instance,
        )

    @handles(events.DuplicateInstance)
    def _duplicate_instance(self, event: events.DuplicateInstance) -> None:
        instance = excerpt(event.instance_name)
        self._log(
            event,
            LogLevel.critical,
            "Two processes are called {instance} ({places}): peers cannot distinguish "
            "their rows, and rows will be lost; stop one, or give it another name",
            per=(instance,),
            instance=instance,
            places=excerpt(event.places) or "locations unknown",
        )

    @handles(events.UnknownFields)
    def _unknown_fields(self, event: events.UnknownFields) -> None:
        self._log(
            event,
            LogLevel.info,
            "Ignored unknown fields in messages of the extension; a newer peer sends "
            "them",
            per=(event.connection,),
            connection=event.connection,
            count=event.count,
        )

    # -- failures ---------------------------------------------------------------------

    @handles(events.ConnectFailed)
    def _connect_failed(self, event: events.ConnectFailed) -> None:
        if event.why:
            self._log(
                event,
                LogLevel.warn,
                "Cannot connect: {connection}: {why}; retrying in {retry_in:.1f} s",
                per=(event.connection, event.why),
                connection=event.connection,
                why=event.why,
                retry_in=event.retry_in,
            )

    @handles(events.FeatureUnavailable)
    def _feature_unavailable(self, event: events.FeatureUnavailable) -> None:
        self._log(
            event,
            LogLevel.warn,
            "Continuing without {feature}: {why}",
            per=(event.feature,),
            feature=event.feature,
            why=event.why,
        )

    @handles(events.SendingFailed)
    def _sending_failed(self, event: events.SendingFailed) -> None:
        stream = excerpt(event.stream_name)
        self._log(
            event,
            LogLevel.error,
            "Cannot send rows of {stream}: {error}; they are sent later, or fetched by "
            "the readers",
            per=(stream, event.error),
            stream=stream,
            **_traceback(event.error),
        )

    @handles(events.CommandsDropped)
    def _commands_dropped(self, event: events.CommandsDropped) -> None:
        self._log(
            event,
            LogLevel.warn,
            "{commands} dropped, and will not be sent: {why}",
            per=(event.command, event.reason),
            commands=counted(event.count, f"{event.command} command"),
            why=_WHY_DROPPED[event.reason],
        )

    @handles(events.OperationFailed)
    def _operation_failed(self, event: events.OperationFailed) -> None:
        self._log(
            event,
            LogLevel.critical,
            "{what} failed: {error}",
            per=(event.what, event.error),
            what=event.what,
            **_traceback(event.error),
        )
