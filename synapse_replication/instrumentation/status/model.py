"""What a process knows of its replication, as values.

Page, JSON, terminal and metrics are made of one :class:`ProcessStatus`. Ages and
durations are in s; a lag is in ids and in s. As JSON, the fields have their names here
and conditions and reasons their values.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Sized
from types import MappingProxyType

import attrs
import msgspec

from synapse_replication.errors import StatusError
from synapse_replication.text import printable

__all__ = [
    "HINTS",
    "WORST_FIRST",
    "Assessment",
    "Condition",
    "DuplicateStatus",
    "LinkStatus",
    "PeerStatus",
    "ProcessStatus",
    "StallGroup",
    "StallReason",
    "Standing",
    "WriterStatus",
    "assess",
    "decode_status",
    "describe_lag",
    "describe_process",
    "describe_progress",
    "describe_writer",
    "encode_status",
    "group_stalls",
    "name_writers",
]


class Condition(enum.Enum):
    """How a writer's rows arrive."""

    LIVE = "live"
    CATCHING_UP = "catching up"
    DRAINING = "draining a removed writer"
    WAITING = "waiting for POSITION"
    STALLED = "stalled"
    WRITTEN_HERE = "written here"


#: What is to be seen first, wherever it is shown.
WORST_FIRST = (
    Condition.STALLED,
    Condition.WAITING,
    Condition.CATCHING_UP,
    Condition.DRAINING,
    Condition.LIVE,
    Condition.WRITTEN_HERE,
)


class StallReason(enum.Enum):
    """Why a writer's rows do not arrive."""

    NO_LINK = "no_link"
    WRITER_GONE = "writer_gone"  #: it said goodbye, or its heartbeats ceased
    NO_POSITION = "no_position"  #: it did not announce itself on a link that is up
    AHEAD_OF_WRITER = "ahead_of_writer"  #: its next rows would count as old
    CATCH_UP_FAILS = "catch_up_fails"
    NO_PROGRESS = "no_progress"  #: rows are there, and are not handled


#: Names of one group that are shown.
_MAX_NAMES_SHOWN = 4

#: Those whose writer may be further than is known.
_NOT_HEARD = frozenset(
    {StallReason.NO_LINK, StallReason.WRITER_GONE, StallReason.NO_POSITION}
)

#: What an operator does about each.
HINTS: Mapping[StallReason, str] = MappingProxyType(
    {
        StallReason.NO_LINK: "Look whether Redis, or the process to connect to, runs "
        "and can be reached from here.",
        StallReason.WRITER_GONE: "Start the writer, or look at its log for what holds "
        "it up. Its rows are fetched when it is back.",
        StallReason.NO_POSITION: "Start the writer. If it runs: is it connected to the "
        "same Redis, under the same server_name?",
        StallReason.AHEAD_OF_WRITER: "Run 'synapse-replication positions repair --seen "
        "STREAM=POSITION' with the position of this process: it moves the sequence "
        "beyond it. Then have this process fetch what it discarded (runbook).",
        StallReason.CATCH_UP_FAILS: "Repair what the failure names: the database, or "
        "the HTTP listener of the writer in instance_map. It is tried again by itself.",
        StallReason.NO_PROGRESS: "The sink of this process waits for something: look "
        "at its log and at what it writes to.",
    }
)


@attrs.frozen
class WriterStatus:
    """One writer of one stream.

    :ivar position: how far its rows were handled here; ``None`` if not known.
    :ivar announced: how far it is, as far as was heard.
    :ivar lag: positions between the two.
    :ivar lag_seconds: age of the oldest write that is not handled here, s; 0 if none.
    :ivar started_from: where the catch-up that runs began; ``None`` if none runs.
    :ivar reason: set if stalled, and so are the next two.
    :ivar stalled_for: s.
    :ivar detail: the reason, for people.
    :ivar history: the lag of the last minutes, oldest first.
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


@attrs.frozen
class LinkStatus:
    """All links of one name.

    :ivar up: how many are up.
    :ivar since: s since it came up, or went down.
    :ivar detail: why it is down.
    :ivar commands_queued: commands that wait because the transport is paused.
    :ivar bytes_queued: bytes that the peer has not acknowledged.
    """

    name: str
    up: int
    since: float
    detail: str = ""
    commands_queued: int = 0
    bytes_queued: int = 0


@attrs.frozen
class PeerStatus:
    """Another process of the deployment, known by its heartbeats.

    :ivar version: of its software; empty if it does not say.
    :ivar where: for people: its machine and process.
    :ivar last_heard: s ago.
    :ivar is_gone: it said goodbye, or was silent for too long.
    """

    instance_name: str
    epoch: str
    version: str
    where: str
    last_heard: float
    is_gone: bool


@attrs.frozen
class DuplicateStatus:
    """A name under which two processes run.

    :ivar places: where, for people.
    :ivar last_heard: s since the last sign of it.
    """

    instance_name: str
    places: str
    last_heard: float


@attrs.frozen
class ProcessStatus:
    """All that is known in one process.

    :ivar up_for: s since it was started.
    :ivar not_ready: what is to be done before it is ready; empty if it is.
    """

    server_name: str
    instance_name: str
    version: str
    up_for: float
    not_ready: tuple[str, ...]
    writers: tuple[WriterStatus, ...]
    links: tuple[LinkStatus, ...]
    members: tuple[PeerStatus, ...]
    duplicates: tuple[DuplicateStatus, ...]

    @property
    def stalled(self) -> tuple[WriterStatus, ...]:
        """The writers whose rows do not arrive."""
        return tuple(w for w in self.writers if w.condition is Condition.STALLED)

    @property
    def is_cut_off(self) -> bool:
        """Return whether it has had no link for a while, whomever it follows."""
        return bool(self.links) and all(
            not link.up and link.since >= CUT_OFF_AFTER for link in self.links
        )


@attrs.frozen
class StallGroup:
    """Writers that are stalled for one reason.

    :ivar writers: all of them.
    :ivar names: of the first of them, for people.
    :ivar stalled_for: s, of the longest.
    :ivar reason: under which the runbook has it.
    """

    writers: tuple[WriterStatus, ...]
    names: str
    reason: str
    stalled_for: float
    detail: str
    remedy: str


#: s without any link, after which a process is cut off: a short blip is none.
CUT_OFF_AFTER = 10.0


def _name(writer: WriterStatus) -> str:
    return printable(f"{writer.stream_name}/{writer.instance_name}")


def describe_progress(writer: WriterStatus) -> str:
    """Say how much of a catch-up is done, in ids."""
    start = writer.started_from or 0
    done = max((writer.position or 0) - start, 0)
    total = max((writer.announced or 0) - start, done)
    return f"{done:,} of {total:,}"


def describe_lag(writer: WriterStatus) -> str:
    """Return how many ids a writer is ahead, as text.

    ``?`` if it is not heard, ``+`` behind it if there may be more.
    """
    if writer.condition is Condition.WAITING or writer.reason in _NOT_HEARD:
        return f"{writer.lag:,}+" if writer.lag else "?"
    return f"{writer.lag:,}"


def describe_writer(writer: WriterStatus) -> str:
    """Say in one line what a writer's rows do."""
    name = _name(writer)
    if writer.condition is Condition.STALLED:
        return f"{name} stalled for {writer.stalled_for:.0f} s: {writer.detail}"
    if writer.condition is Condition.DRAINING:
        return f"{name} {writer.condition.value}, {writer.lag:,} behind"
    if writer.condition is Condition.CATCHING_UP:
        if writer.started_from is None:
            return f"{name} catching up, {writer.lag:,} behind"
        return f"{name} catching up, {describe_progress(writer)}"
    return f"{name} {writer.condition.value}"


class Standing(enum.Enum):
    """How a process's replication stands, the worst first."""

    DUPLICATE_NAME = enum.auto()
    STALLED = enum.auto()
    CUT_OFF = enum.auto()
    WAITING = enum.auto()
    CATCHING_UP = enum.auto()
    DRAINING = enum.auto()
    NOT_READY = enum.auto()
    LIVE = enum.auto()


@attrs.frozen
class Assessment:
    """The worst that there is to report of a process.

    :ivar concerned: the writers of which that is so.
    :ivar followed: all writers whose rows the process receives.
    """

    standing: Standing
    concerned: Sequence[WriterStatus]
    followed: Sequence[WriterStatus]


def assess(status: ProcessStatus) -> Assessment:
    """Return the worst that there is to report; page and log lines put it in words."""
    followed = [w for w in status.writers if w.condition is not Condition.WRITTEN_HERE]
    of_condition = {
        Standing.STALLED: status.stalled,
        **{
            standing: [w for w in followed if w.condition is condition]
            for standing, condition in (
                (Standing.WAITING, Condition.WAITING),
                (Standing.CATCHING_UP, Condition.CATCHING_UP),
                (Standing.DRAINING, Condition.DRAINING),
            )
        },
    }
    applies = {
        Standing.DUPLICATE_NAME: bool(status.duplicates),
        Standing.CUT_OFF: status.is_cut_off,
        Standing.NOT_READY: bool(status.not_ready),
        Standing.LIVE: True,
        **{standing: bool(writers) for standing, writers in of_condition.items()},
    }
    worst = next(standing for standing in Standing if applies[standing])
    return Assessment(worst, of_condition.get(worst, ()), followed)


def describe_process(status: ProcessStatus) -> str:
    """Return in one line how a process's replication stands, the worst first.

    It has no times, so that it changes only if something does.
    """
    found = assess(status)
    standing, concerned = found.standing, found.concerned
    if standing is Standing.DUPLICATE_NAME:
        return f"two processes are called {status.duplicates[0].instance_name}"
    if standing is Standing.CUT_OFF:
        return "no link is up"
    if standing is Standing.NOT_READY:
        return f"not ready: {status.not_ready[0]}"
    if standing is Standing.LIVE:
        return _describe_live(found.followed)
    more = _and_more(concerned)
    if standing is Standing.STALLED:
        worst = max(concerned, key=lambda writer: writer.stalled_for)
        return f"stalled: {_name(worst)}: {worst.detail}{more}"
    if standing is Standing.WAITING:
        return f"waiting for {_name(concerned[0])}{more}"
    if standing is Standing.DRAINING:
        first = concerned[0]
        return f"draining removed writer {_name(first)}, {first.lag:,} behind{more}"
    last = max(concerned, key=lambda writer: writer.lag)
    if last.started_from is None:
        return f"catching up {_name(last)}, {last.lag:,} behind{more}"
    return f"catching up {_name(last)} {describe_progress(last)}{more}"


def _describe_live(followed: Sequence[WriterStatus]) -> str:
    if not followed:
        return "live: follows no other process"
    writers = {writer.instance_name for writer in followed}
    streams = {writer.stream_name for writer in followed}
    text = f"live: {_count(streams, 'stream')} of {_count(writers, 'writer')}"
    last = max(followed, key=lambda writer: writer.lag)
    if last.lag:
        text += f", {_name(last)} {last.lag:,} behind"
    return text


def _and_more(writers: Sequence[WriterStatus]) -> str:
    return f", and {len(writers) - 1} more" if len(writers) > 1 else ""


def _count(things: Sized, word: str) -> str:
    return f"{len(things)} {word}{'s' * (len(things) != 1)}"


def group_stalls(writers: Sequence[WriterStatus]) -> list[StallGroup]:
    """Put together what has one reason: one Redis that is down is one trouble."""
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
    """Name the first of some writers, and count the others."""
    text = ", ".join(_name(writer) for writer in group[:_MAX_NAMES_SHOWN])
    more = len(group) - _MAX_NAMES_SHOWN
    return f"{text} and {more} more" if more > 0 else text


def encode_status(status: ProcessStatus) -> bytes:
    """Write a status as JSON."""
    return msgspec.json.encode(status)


def decode_status(text: bytes) -> ProcessStatus:
    """Read a status.

    :raises StatusError: if it is none.
    """
    try:
        return msgspec.json.decode(text, type=ProcessStatus)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StatusError(f"the answer is not a status: {error}") from error
