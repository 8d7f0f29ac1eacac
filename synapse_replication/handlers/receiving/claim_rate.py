"""Rate limit of catch-ups that are caused by claims about a writer's position.

Each heartbeat, implausible row, or POSITION after a gap may cost a query to the
database or a request to the writer. Thousands of them must not occupy a reader for
long: beyond a small burst, catch-ups are delayed, and one catch-up then covers all
claims that have arrived in the meantime.
"""

from __future__ import annotations

from synapse_replication.recent import RecentDict

__all__ = ["INTERVAL", "MAX_BURST", "ClaimRate"]

#: The largest number of catch-ups with one writer that begin without delay in a burst.
MAX_BURST = 20

#: The interval between the catch-ups after a burst, in s.
INTERVAL = 0.1

#: The largest number of tracked writers; beyond it, the least recent one is evicted.
MAX_WRITERS = 1000


class ClaimRate:
    """Rate limit of the catch-ups of one stream, separate for each writer."""

    def __init__(self) -> None:
        #: For each writer, the time in s at which its next catch-up would begin if all
        #: of them were evenly spaced.
        self._due: RecentDict[str, float] = RecentDict(MAX_WRITERS)

    def wait_before(self, instance_name: str, now: float) -> float:
        """Return the delay in s before a catch-up may begin, and count the catch-up.

        :param now: the time of the host's clock, in s.
        """
        due = self._due.pop(instance_name, now)
        due = self._due[instance_name] = max(due, now) + INTERVAL
        return max(0.0, due - now - MAX_BURST * INTERVAL)
