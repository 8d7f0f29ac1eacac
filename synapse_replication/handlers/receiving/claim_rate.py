"""Limits how often claims about a writer's position start a catch-up.

Each POSITION after a gap, heartbeat or implausible row costs a query to the database or
a request to the writer. A flood of thousands of them must not keep a reader busy after
the flood has ended: beyond a small burst they are delayed, and one query answers all
that have arrived meanwhile.
"""

from __future__ import annotations

from synapse_replication.recent import RecentDict

__all__ = ["MAX_AT_ONCE", "SECONDS_BETWEEN", "ClaimRate"]

#: The most catch-ups with one writer that begin without delay.
MAX_AT_ONCE = 20

#: The interval in s between the catch-ups that follow.
SECONDS_BETWEEN = 0.1

#: The most writers that are tracked; beyond it, the least recent one is evicted.
MAX_WRITERS = 1000


class ClaimRate:
    """Rate limit of the catch-ups of one stream, separate for each writer."""

    def __init__(self) -> None:
        #: For each writer, the time in s at which its last catch-up would have begun if
        #: all were evenly spaced.
        self._last: RecentDict[str, float] = RecentDict(MAX_WRITERS)

    def wait_before(self, instance_name: str, now: float) -> float:
        """Return the delay in s before a catch-up may begin, and count the catch-up.

        :param now: monotonic time in s.
        """
        last = self._last.pop(instance_name, now)
        last = self._last[instance_name] = max(last, now) + SECONDS_BETWEEN
        return max(0.0, last - now - MAX_AT_ONCE * SECONDS_BETWEEN)
