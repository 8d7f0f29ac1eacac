"""Judges the stalls and resets that processes have logged during a fault, or show.

A stall is true if it began while the fault lasted, if its reason is one that the fault
can have, and if it is about a writer that the fault concerns. A reset of a stream is
true if its writer, which holds the rows in memory, was restarted; only the soak
restarts it. Anything else is a false alarm. After the fault, when all rows have
arrived, a stall may be shown only if its cause is still there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

import attrs

from synapse_replication.streams.standard.registry import MAIN_INSTANCE

#: By how much a stall may seem to begin before the fault, in s: a silent writer is
#: stalled since its last heartbeat. And after it: what was stopped takes some time to
#: start, and to connect.
BEFORE, AFTER = 7.0, 6.0

#: The time of a line in the logs of this package and of Synapse.
_TIME: Final = r"^(\d{4}-\S+?)[T ]([\d:]+)(?:,\d+)?([+-]\d{4})?\b"
_STALL: Final = re.compile(
    _TIME + r".*? (\S+/\S+(?:, \S+)*(?: and \d+ more)?) stalled for (\d+) s: (.*) "
    r"\(See the runbook: ReplicationStalled, (\w+)\)",
    re.MULTILINE,
)
_RESET: Final = re.compile(
    _TIME + r".* Stream (\S+) of (\S+) (moved back from .*)", re.MULTILINE
)
#: The reason of a reset, which is logged like a stall.
RESET: Final = "reset"
#: The reason of a stuck id, which is shown like a stall.
STUCK: Final = "stuck_id"

GONE = frozenset({"writer_gone", "no_link", "no_position"})
SOURCE = frozenset({"catch_up_fails", "source_silent"})
#: The reasons that no recovery ends.
LASTING: Final = frozenset({"undeclared_writer", STUCK})
#: The reasons that a fault can have, by a part of the scenario's name. The first part
#: that occurs in the name counts; without any, no stall is true.
_REASONS: Final = MappingProxyType(
    {
        "soak": GONE | SOURCE | {"undeclared_writer", RESET},
        "redis": frozenset({"no_link"}),
        "postgres": SOURCE,
        "disk-full": SOURCE,
        "subscription-cut": frozenset({"no_link"}),
        "pings-cut": frozenset({"no_link", "writer_gone"}),
        "rows-cut": GONE,
        "publishes-cut": GONE,
        "replies-cut": GONE,
        "undeclared-writer": frozenset({"undeclared_writer"}),
        "standby-lags": SOURCE | {"database_behind"},
        "promoted": SOURCE | {"database_behind"},
        # A reader runs with its old configuration, and waits for the killed writer.
        "killed-then-moved": GONE | {STUCK},
        "replaced": GONE,
        "sessions-ended": GONE,
        "killed": GONE,
        "frozen": GONE,
        "moved": GONE,
        "added": GONE,
        "removed": GONE,
    }
)
#: The processes that are stopped when a table is moved.
_MOVE: Final = frozenset({"event_writer1", "event_writer2", MAIN_INSTANCE})
#: The writers that a fault concerns, by a part of the scenario's name; without any,
#: all.
_WRITERS: Final = MappingProxyType(
    {
        "main-killed": {MAIN_INSTANCE},
        "killed-then-moved": _MOVE,
        "writer-killed": {"event_writer1", MAIN_INSTANCE},
        "writer-frozen": {"event_writer1"},
        "writer-replaced": {"event_writer1"},
        "writer-sessions-ended": {"event_writer1"},
        "writer-moved": _MOVE,
        "writer-added": _MOVE,
        "writer-removed": {"event_writer1", "event_writer2"},
        "publishes-cut": {"event_writer1"},
        "replies-cut": {"event_writer1"},
        "reader-": set(),
    }
)


@attrs.frozen
class LoggedStall:
    """A stall, or a reset, that a process has logged or shows.

    :ivar at: when it was logged or shown, in s since the Unix epoch.
    :ivar seconds: for how long the stall had lasted then; 0 for a reset.
    """

    process: str
    writers: str
    at: float
    seconds: int
    detail: str
    reason: str

    def __str__(self) -> str:
        return f"{self.process}: {self.writers}: {self.reason}: {self.detail}"

    @property
    def since(self) -> float:
        """When the stall began, or the reset, in s since the Unix epoch."""
        return self.at - self.seconds

    @property
    def names(self) -> set[str]:
        """The instance names of the writers that the line lists."""
        listed = self.writers.partition(" and ")[0].split(", ")
        return {each.rpartition("/")[2] for each in listed}


def read_stalls(process: str, log: str) -> Iterator[LoggedStall]:
    """Yield the stalls, and the resets, in the log of a process."""
    for *at, writers, seconds, detail, reason in _STALL.findall(log):
        yield LoggedStall(process, writers, _seconds(*at), int(seconds), detail, reason)
    for *at, stream, writer, detail in _RESET.findall(log):
        yield LoggedStall(
            process, f"{stream}/{writer}", _seconds(*at), 0, detail, RESET
        )


def shown_stalls(process: str, status: Mapping[str, Any]) -> Iterator[LoggedStall]:
    """Yield the stalls, and the stuck ids, that the status of a process shows.

    :param status: the status, as decoded JSON.
    """
    for writer in status["writers"]:
        if writer["condition"] == "stalled":
            yield LoggedStall(
                process,
                f"{writer['stream_name']}/{writer['instance_name']}",
                time.time(),
                int(writer["stalled_for"]),
                writer["detail"],
                writer["reason"],
            )
    for stuck in status["stuck_ids"]:
        yield LoggedStall(
            process,
            f"{stuck['stream_name']}/{stuck['instance_name']}",
            time.time(),
            int(stuck["age"]),
            stuck["session"],
            STUCK,
        )


def _seconds(date: str, clock: str, zone: str) -> float:
    # Synapse logs the local time, without a zone.
    form = "%Y-%m-%d %H:%M:%S" + ("%z" if zone else "")
    return datetime.strptime(f"{date} {clock}{zone}", form).timestamp()


def is_true(stall: LoggedStall, scenario: str, start: float, end: float) -> bool:
    """Return whether a stall is what a fault must cause.

    :param scenario: the name of the scenario.
    :param start: when the fault began, in s since the Unix epoch.
    :param end: when it ended.
    """
    reasons: Collection[str] = next(
        (found for part, found in _REASONS.items() if part in scenario), ()
    )
    concerned = next(
        (found for part, found in _WRITERS.items() if part in scenario), None
    )
    return (
        stall.reason in reasons
        and start - BEFORE <= stall.since <= end + AFTER
        and (concerned is None or stall.names <= concerned)
    )
