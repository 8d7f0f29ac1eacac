"""Log lines for operators, and the limit on similar ones.

Similar lines about failures are logged at most once a minute, with the number of lines
that were suppressed, so that a peer that sends garbage or a server that is down cannot
fill a disk (:class:`RateLimit`). Changes of a connection's state have a higher limit.
Lines about resets, connected or removed writers, and the progress of catch-ups have
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure
from typing_extensions import override

from synapse_replication.data_files import read_table
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


class _Line(Struct, frozen=True):
    """The log line of an event.

    :ivar level: a constant of ``LogLevel``.
    :ivar text: a format for the fields of :func:`_fields`.
    :ivar per: the fields of which each combination has its own limit; none for a line
        without a limit. For an exception, its class counts.
    :ivar has_traceback: whether the field ``error`` is logged with its traceback.
    """

    level: Any
    text: str
    per: tuple[str, ...]
    has_traceback: bool


#: The lines of the events that have one, from ``logs.csv``.
_LINES = {
    getattr(events, row["Event"]): _Line(
        LogLevel.levelWithName(row["Level"]),
        row["Line"],
        tuple(row["Limited by"].split()),
        row["Traceback"] == "yes",
    )
    for row in read_table(Path(__file__).with_suffix(".csv"))
}


def _fields(event: events.Event) -> dict[str, Any]:
    """Return the attributes of an event by the names that log lines have for them."""
    fields = asdict(event)
    if "catch_up" in fields:
        fields = asdict(fields.pop("catch_up")) | fields
    if "tokens" in fields:
        tokens = fields.pop("tokens")
        fields |= {"count": len(tokens), "token": tokens[0]}
    if "stream_name" in fields:
        fields["stream"] = excerpt(fields.pop("stream_name"))
    if "instance_name" in fields:
        name = "writer" if "stream" in fields else "instance"
        fields[name] = excerpt(fields.pop("instance_name"))
    return fields


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

    @override
    def observe(self, event: events.Event) -> None:
        """Write the line of an event; methods decide about lines with conditions."""
        if type(event) in self._handlers:
            super().observe(event)
        elif type(event) in _LINES:
            self._log(event)

    def _log(self, event: events.Event, **more: Any) -> None:
        """Write the line of an event, with its fields and ``more``."""
        line = _LINES[type(event)]
        own = _fields(event)
        if line.has_traceback:
            error = own["error"]
            failure = Failure(error)  # type: ignore[no-untyped-call]
            more = {"error": error_text(error), "log_failure": failure}
        if not line.per:
            self._logger.emit(line.level, line.text, **{**own, **more})
            return
        parts = [(more | own)[name] for name in line.per]
        kind = (
            type(part) if isinstance(part, BaseException) else part for part in parts
        )
        self._log_limited(
            line.level, (type(event).__name__, *kind), line.text, **{**own, **more}
        )

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
    def _connection_made(self, event: events.LinkUp) -> None:
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
    def _connection_lost(self, event: events.LinkDown) -> None:
        self._log_state_change(
            LogLevel.info if event.reason in _ORDERLY else LogLevel.warn,
            event.connection,
            "Disconnected: {label}, {reason}: {why}",
            label=self._label(event),
            reason=event.reason.value,
            why=event.why,
        )

    @handles(events.RequestRefused)
    def _request_refused(self, event: events.RequestRefused) -> None:
        if event.status not in _BACKLOG_ANSWERS:
            self._log(event)

    @handles(events.Discarded)
    def _discarded(self, event: events.Discarded) -> None:
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
            advice=advice,
            known=event.stream_name if known else None,
            reason=event.reason.value,
        )

    @handles(events.CatchUpPage)
    def _catch_up_page(self, event: events.CatchUpPage) -> None:
        upto_token = event.catch_up.upto_token
        self._log(event, token=event.upto_token, upto_token=upto_token)

    @handles(events.BacklogRequested)
    def _backlog_requested(self, event: events.BacklogRequested) -> None:
        if event.error is not None:
            self._log(event, status=getattr(event.error, "status", None))

    @handles(events.DuplicateInstance)
    def _duplicate_instance(self, event: events.DuplicateInstance) -> None:
        self._log(event, places=excerpt(event.places) or "locations unknown")

    @handles(events.ConnectFailed)
    def _connection_failed(self, event: events.ConnectFailed) -> None:
        if event.why:
            self._log(event)

    @handles(events.CommandsDropped)
    def _commands_dropped(self, event: events.CommandsDropped) -> None:
        commands = counted(event.count, f"{event.command} command")
        self._log(event, commands=commands, why=_WHY_DROPPED[event.reason])
