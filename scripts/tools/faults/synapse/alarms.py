"""Judges the stalls and resets that processes of a real Synapse reported.

A report is true if a fault caused it: see :mod:`scripts.tools.faults.stalls`. A fault
of one process concerns that process as a writer, at the others; at the process itself,
it may interrupt the link.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import attrs

from scripts.tools.faults.stalls import (
    AFTER,
    BEFORE,
    GONE,
    RESET,
    SOURCE,
    LoggedStall,
)
from scripts.tools.faults.synapse.deployments import TYPING, WRITER

#: Within which time after its writer was started a stream is reset, in s.
RESET_WITHIN = 60.0


@attrs.frozen
class Fault:
    """One fault, or several that overlapped.

    :ivar names: the names of the faults.
    :ivar victims: the processes that were killed, frozen or disconnected.
    :ivar start: when it began, in s since the Unix epoch.
    :ivar end: when it ended.
    """

    names: tuple[str, ...]
    victims: Set[str]
    start: float
    end: float

    def explains(self, stall: LoggedStall) -> bool:
        """Return whether the fault caused a stall."""
        if not self.start - BEFORE <= stall.since <= self.end + AFTER:
            return False
        if stall.names <= self.victims and stall.reason in GONE:
            return True
        affects_links = stall.process in self.victims or any(
            name.startswith(("redis", "client")) for name in self.names
        )
        if affects_links and stall.reason == "no_link":
            return True
        affects_source = stall.names <= self.victims or any(
            name in ("postgres-restart", "failed-read") for name in self.names
        )
        return affects_source and stall.reason in SOURCE


def is_true(
    stall: LoggedStall, faults: Sequence[Fault], starts_of_writer: Sequence[float]
) -> bool:
    """Return whether a report is what a fault must cause.

    :param starts_of_writer: when the writer of typing was restarted, in s since the
        Unix epoch.
    """
    if stall.reason == RESET:
        return stall.writers == f"{TYPING}/{WRITER}" and any(
            at <= stall.since <= at + RESET_WITHIN for at in starts_of_writer
        )
    return any(fault.explains(stall) for fault in faults)
