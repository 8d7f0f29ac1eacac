"""The replication status of a process, as values.

The page, the JSON, the terminal, and the metrics of lag and of stalls are all derived
from one :class:`ProcessStatus`. Ages and durations are in s; a lag is given in ids and,
as the age of the oldest undelivered write, in s. The JSON uses the attribute names, and
the values of the enums.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from synapse_replication.errors import StatusError
from synapse_replication.streams.stuck_ids import StuckId
from synapse_replication.text import printable


class Condition(enum.Enum):
    """The state of a writer's rows in this process, the worst first."""

    STALLED = "stalled"
    WAITING = "waiting for POSITION"
    CATCHING_UP = "catching up"
    DRAINING = "draining a removed writer"
    LIVE = "live"
    WRITTEN_HERE = "written here"


#: The order in which the page and the terminal list the writers' conditions.
WORST_FIRST = tuple(Condition)


class StallReason(enum.Enum):
    """Why a writer is stalled."""

    NO_LINK = "no_link"
    WRITER_GONE = "writer_gone"  #: sent a goodbye, or its heartbeats stopped
    NO_POSITION = "no_position"  #: a link is up, and the writer sent no POSITION on it
    AHEAD_OF_WRITER = "ahead_of_writer"  #: its next rows would be discarded as old
    DATABASE_SET_BACK = "database_set_back"  #: rows may not exist any more
    UNDECLARED_WRITER = "undeclared_writer"  #: its rows are discarded
    ROWS_LOST = "rows_lost"  #: the writer does not have them in its memory any more
    ROWS_SKIPPED = "rows_skipped"  #: rows of the source cannot be decoded
    DATABASE_BEHIND = "database_behind"  #: it is a standby that lacks the rows
    CATCH_UP_FAILS = "catch_up_fails"
    SOURCE_SILENT = "source_silent"  #: missing rows were requested
    NO_PROGRESS = "no_progress"  #: rows are available and are not delivered


#: The maximum number of names of a group that are listed.
_MAX_NAMES_SHOWN = 4

#: With these reasons, the writer may be ahead of its last known position.
LAG_UNKNOWN = frozenset(
    {StallReason.NO_LINK, StallReason.WRITER_GONE, StallReason.NO_POSITION}
)
#: The reasons for which a writer counts as absent. An absent writer does not delay
#: readiness, because it sends no rows.
ABSENT = frozenset(
    {
        StallReason.WRITER_GONE,
        StallReason.NO_POSITION,
        StallReason.DATABASE_SET_BACK,
        StallReason.UNDECLARED_WRITER,
        StallReason.ROWS_LOST,
        StallReason.ROWS_SKIPPED,
    }
)
#: The problems with which a writer is shown that the configuration does not name.
ALWAYS_SHOWN = frozenset(
    {StallReason.UNDECLARED_WRITER, StallReason.ROWS_LOST, StallReason.ROWS_SKIPPED}
)
#: The advice to the operator for each reason.
HINTS: Mapping[StallReason, str] = {
    StallReason.NO_LINK: (
        "Check that Redis, or the process to connect to, runs and can be reached "
        "from here."
    ),
    StallReason.WRITER_GONE: (
        "Start the writer, or check its log for why it does not respond. Its rows "
        "are fetched when it is back."
    ),
    StallReason.NO_POSITION: (
        "Start the writer. If it runs, check that it has the same server_name, and "
        "a link to this process (the same Redis, or direct TCP)."
    ),
    StallReason.AHEAD_OF_WRITER: (
        "If a sequence of the database allocates the ids, run 'synapse-replication "
        "positions repair --seen STREAM=POSITION' with the position of this process: "
        "it advances the sequence to that position, so that new rows are beyond it. "
        "Otherwise, restart the writer, which must go on from its last token. Then "
        "make this process fetch the rows that it discarded (see the runbook)."
    ),
    StallReason.DATABASE_SET_BACK: (
        "Rebuild what was derived from these rows, and restart this process (see "
        "the runbook)."
    ),
    StallReason.UNDECLARED_WRITER: (
        "If it is to write the stream, name it among the stream's writers in the "
        "configuration of this process, too, and restart this process: it then "
        "fetches the rows. Otherwise, stop whatever uses its name."
    ),
    StallReason.ROWS_LOST: (
        "Rebuild what was derived from this stream, and restart this process. Give "
        "the writer more memory for the stream (max_rows, max_bytes), or find out "
        "why this process was so far behind."
    ),
    StallReason.ROWS_SKIPPED: (
        "Correct the rows that the log names or, if their writer has another "
        "declaration of the stream, this process's declaration. Then make the "
        "readers fetch them again (see the runbook)."
    ),
    StallReason.DATABASE_BEHIND: (
        "Check why the standby lags: its replay may be paused, or its connection to"
        " the primary broken. The rows are delivered as soon as it has them."
    ),
    StallReason.CATCH_UP_FAILS: (
        "Repair what the failure names: the database, the writer's HTTP listener "
        "for replication, or the sink of this process. The catch-up is retried "
        "automatically."
    ),
    StallReason.SOURCE_SILENT: (
        "Check the database (locks, load), and the writer if the stream is held in "
        "its memory."
    ),
    StallReason.NO_PROGRESS: (
        "The sink of this process seems to be blocked: check the log of this "
        "process and the system that the sink writes to."
    ),
}


class WriterStatus(Struct, frozen=True):
    """The status of one writer of one stream.

    :ivar position: the position up to which the writer's rows were delivered here;
        ``None`` if it is not known.
    :ivar announced: the greatest position that the writer is known to have reached;
        ``None`` if no position of the writer is known.
    :ivar lag: by how many ids ``position`` is below ``announced``; 0 if either is not
        known.
    :ivar lag_seconds: the age in s of the oldest write that was not delivered here; 0
        if no such write is known.
    :ivar started_from: the position at which the current catch-up began; ``None`` if
        no catch-up runs.
    :ivar reason: why the writer is stalled; ``None`` if the writer is not stalled.
    :ivar stalled_for: how long the writer has been stalled, in s.
    :ivar detail: an explanation of the reason, for display.
    :ivar history: samples of the lag over the last minutes, oldest first.
    :ivar link: the name of the link on which the writer was last heard.
    :ivar heard_by: what was heard: ``POSITION``, ``row``, ``heartbeat`` or
        ``database``; empty if nothing was.
    :ivar last_heard: the time in s since then.
    :ivar was_resynced: whether, within the last minute, a catch-up ended that fetched
        rows only from the writer's backlog or memory: a partial resync.
    """

    stream_name: str
    instance_name: str
    condition: Condition
    position: int | None
    announced: int | None
    lag: int = 0
    lag_seconds: float = 0.0
    started_from: int | None = None
    reason: StallReason | None = None
    stalled_for: float = 0.0
    detail: str = ""
    history: tuple[int, ...] = ()
    link: str = ""
    heard_by: str = ""
    last_heard: float = 0.0
    was_resynced: bool = False


class LinkStatus(Struct, frozen=True):
    """The status of all links with one name.

    :ivar up: the number of links that are up.
    :ivar since: the time in s since ``up`` last changed from or to 0; before the first
        such change, the time since the link's name was first seen.
    :ivar detail: why no link is up; empty if one is.
    :ivar commands_queued: the number of commands that have not been passed to a
        transport yet.
    :ivar bytes_queued: the number of bytes that the peers have not acknowledged,
        including bytes that have not been sent.
    """

    name: str
    up: int
    since: float
    detail: str = ""
    commands_queued: int = 0
    bytes_queued: int = 0


class PeerStatus(Struct, frozen=True):
    """Another instance of the deployment, known by its heartbeats.

    :ivar version: the version of its software; empty if the instance sends none.
    :ivar where: its machine and process id, for display.
    :ivar last_seen: the time in s since its last heartbeat.
    :ivar is_gone: whether the instance sent a goodbye, or its heartbeats stopped.
    """

    instance_name: str
    epoch: str
    version: str
    where: str
    last_seen: float
    is_gone: bool


class DuplicateStatus(Struct, frozen=True):
    """An instance name that two processes use.

    :ivar places: the locations of the two processes, for display.
    :ivar last_seen: the time in s since the duplicate was last detected.
    """

    instance_name: str
    places: str
    last_seen: float


class InstanceStatus(Struct, frozen=True):
    """An instance of the deployment, as a monitor sees it.

    :ivar state: ``ours`` or ``stock`` if it answers, otherwise ``failed``, or
        ``misdirected`` if another instance answers at its address.
    :ivar problem: what is wrong; empty if nothing is.
    :ivar since: how long it has been in this state, in s.
    """

    instance_name: str
    state: str
    problem: str
    since: float

    @property
    def is_up(self) -> bool:
        """Whether the instance itself answers."""
        return self.state in ("ours", "stock")


class ProcessStatus(Struct, frozen=True):
    """The replication status of one process.

    :ivar up_for: the time in s since the process started.
    :ivar not_ready: descriptions of what the process waits for before it is ready;
        empty if it is ready.
    :ivar cut_off_for: the time in s for which the process has received nothing, because
        it has no link; 0 if it has one.
    :ivar stuck_ids: the ids that delay the persisted-up-to positions of streams.
    :ivar damage: which rows that the sink stored are damaged; empty if none are.
    :ivar instances: all instances of the deployment; only a monitor asks them.
    :ivar unannounced: how many committed rows were found not to be announced in the
        last 15 minutes; only a monitor compares them.
    """

    server_name: str
    instance_name: str
    version: str
    up_for: float
    not_ready: tuple[str, ...]
    writers: tuple[WriterStatus, ...]
    links: tuple[LinkStatus, ...]
    peers: tuple[PeerStatus, ...]
    duplicates: tuple[DuplicateStatus, ...]
    cut_off_for: float = 0.0
    stuck_ids: tuple[StuckId, ...] = ()
    damage: str = ""
    instances: tuple[InstanceStatus, ...] = ()
    unannounced: int = 0

    @property
    def troubled(self) -> tuple[InstanceStatus, ...]:
        """The instances with a problem."""
        return tuple(each for each in self.instances if each.problem)

    @property
    def stalled(self) -> tuple[WriterStatus, ...]:
        """The stalled writers."""
        return tuple(w for w in self.writers if w.condition is Condition.STALLED)

    @property
    def is_cut_off(self) -> bool:
        """Whether the process has heard nothing for :data:`CUT_OFF_AFTER` s.

        False if :attr:`links` is empty, for instance in a process without links.
        """
        return bool(self.links) and self.cut_off_for >= CUT_OFF_AFTER


class StallGroup(Struct, frozen=True):
    """Writers that are stalled for the same reason, with the same detail.

    :ivar writers: the writers.
    :ivar names: the names of the first few writers, for display.
    :ivar reason: the value of the :class:`StallReason`, which is also the name of its
        entry in the runbook.
    :ivar stalled_for: how long the writer that stalled first has been stalled, in s.
    :ivar detail: an explanation of the reason, for display.
    :ivar hint: the advice to the operator; see :data:`HINTS`.
    """

    writers: tuple[WriterStatus, ...]
    names: str
    reason: str
    stalled_for: float
    detail: str
    hint: str


#: The time in s without any link after which a process counts as cut off.
CUT_OFF_AFTER = 10.0


def name_writer(writer: WriterStatus) -> str:
    """Return the names of a writer and its stream, for display."""
    return printable(f"{writer.stream_name}/{writer.instance_name}")


def describe_progress(writer: WriterStatus) -> str:
    """Return how much of a catch-up is done, in ids, as text."""
    start = writer.started_from or 0
    done = max((writer.position or 0) - start, 0)
    total = max((writer.announced or 0) - start, done)
    return f"{done:,} of {total:,}"


def describe_lag(writer: WriterStatus) -> str:
    """Return a writer's lag in ids, as text.

    If the writer may be ahead of its last known position, the text is the lag with a
    ``+``, or ``?`` if the lag is 0.
    """
    if writer.condition is Condition.WAITING or writer.reason in LAG_UNKNOWN:
        return f"{writer.lag:,}+" if writer.lag else "?"
    return f"{writer.lag:,}"


def describe_writer(writer: WriterStatus) -> str:
    """Return the state of a writer's rows in one line."""
    name = name_writer(writer)
    if writer.condition is Condition.STALLED:
        return f"{name} stalled for {writer.stalled_for:.0f} s: {writer.detail}"
    if writer.condition is Condition.DRAINING:
        return f"{name} {writer.condition.value}, {writer.lag:,} behind"
    if writer.condition is Condition.CATCHING_UP:
        if writer.started_from is None:
            return f"{name} catching up, {writer.lag:,} behind"
        return f"{name} catching up, {describe_progress(writer)}"
    return f"{name} {writer.condition.value}"


def describe_stuck_id(stuck: StuckId) -> str:
    """Return which id is stuck, without its age, in one line."""
    return printable(
        f"id {stuck.id} of {stuck.stream_name}, written by {stuck.instance_name}, is "
        "not finished"
    )


def group_stalls(writers: Sequence[WriterStatus]) -> list[StallGroup]:
    """Group stalled writers by reason and detail, so that a cause is reported once."""
    groups: dict[tuple[StallReason, str], list[WriterStatus]] = {}
    for writer in writers:
        if writer.reason is not None:
            groups.setdefault((writer.reason, writer.detail), []).append(writer)
    return [
        StallGroup(
            tuple(group),
            name_writers(group),
            reason.value,
            max(writer.stalled_for for writer in group),
            detail,
            HINTS[reason],
        )
        for (reason, detail), group in groups.items()
    ]


def name_writers(group: Sequence[WriterStatus]) -> str:
    """Return the names of the first few writers, and the number of the others."""
    text = ", ".join(name_writer(writer) for writer in group[:_MAX_NAMES_SHOWN])
    more = len(group) - _MAX_NAMES_SHOWN
    return f"{text} and {more} more" if more > 0 else text


def encode_status(status: ProcessStatus) -> bytes:
    """Return a status as JSON."""
    return msgspec.json.encode(status)


def decode_status(text: bytes) -> ProcessStatus:
    """Return the status that a JSON text describes.

    :raises StatusError: if the text is not a valid status.
    """
    try:
        return msgspec.json.decode(text, type=ProcessStatus)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StatusError(f"the answer is not a status: {error}") from error
