"""Judges the stalls that processes have logged during a fault.

A stall is true if it began while the fault lasted, if its reason is one that the fault
can have, and if it is about a writer that the fault concerns. Any other stall is a
false alarm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from datetime import datetime
from types import MappingProxyType
from typing import Final

import attrs

from synapse_replication.streams.standard.registry import MAIN_INSTANCE

#: By how much a stall may seem to begin before the fault, in s: a silent writer is
#: stalled since its last heartbeat. And after it: what was stopped takes some time to
#: start, and to connect.
BEFORE, AFTER = 7.0, 6.0

_LINE: Final = re.compile(
    r"^(\S+) .*? (\S+(?:, \S+)*(?: and \d+ more)?) stalled for (\d+) s: (.*) "
    r"\(See the runbook: ReplicationStalled, (\w+)\)",
    re.MULTILINE,
)

_GONE = frozenset({"writer_gone", "no_link", "no_position"})
_SOURCE = frozenset({"catch_up_fails", "source_silent"})
#: The reasons that a fault can have, by a part of the scenario's name. The first part
#: that occurs in the name counts; without any, no stall is true.
_REASONS: Final = MappingProxyType(
    {
        "soak": _GONE | _SOURCE | {"undeclared_writer"},
        "redis": frozenset({"no_link"}),
        "postgres": _SOURCE,
        "disk-full": _SOURCE,
        "subscription-cut": frozenset({"no_link"}),
        "pings-cut": frozenset({"no_link", "writer_gone"}),
        "rows-cut": _GONE,
        "publishes-cut": _GONE,
        "replies-cut": _GONE,
        "undeclared-writer": frozenset({"undeclared_writer"}),
        "killed": _GONE,
        "frozen": _GONE,
        "moved": _GONE,
        "added": _GONE,
        "removed": _GONE,
    }
)
#: The writers that a fault concerns, by a part of the scenario's name; without any,
#: all.
_WRITERS: Final = MappingProxyType(
    {
        "main-killed": {MAIN_INSTANCE},
        "writer-killed": {"event_writer1", MAIN_INSTANCE},
        "writer-frozen": {"event_writer1"},
        "writer-moved": {"event_writer1", MAIN_INSTANCE},
        "writer-added": {"event_writer1", MAIN_INSTANCE},
        "writer-removed": {"event_writer1", "event_writer2"},
        "publishes-cut": {"event_writer1"},
        "replies-cut": {"event_writer1"},
        "reader-": set(),
    }
)


@attrs.frozen
class LoggedStall:
    """A line of a log.

    :ivar since: when the stall began, in s since the Unix epoch.
    """

    process: str
    writers: str
    since: float
    detail: str
    reason: str

    def __str__(self) -> str:
        return f"{self.process}: {self.writers}: {self.reason}: {self.detail}"

    @property
    def names(self) -> set[str]:
        """The instance names of the writers that the line lists."""
        listed = self.writers.partition(" and ")[0].split(", ")
        return {each.rpartition("/")[2] for each in listed}


def read_stalls(process: str, log: str) -> Iterator[LoggedStall]:
    """Yield the stalls in the log of a process."""
    for at, writers, seconds, detail, reason in _LINE.findall(log):
        moment = datetime.strptime(at, "%Y-%m-%dT%H:%M:%S%z").timestamp()
        yield LoggedStall(process, writers, moment - int(seconds), detail, reason)


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
