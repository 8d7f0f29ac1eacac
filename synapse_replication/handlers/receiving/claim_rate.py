"""How often the source of a stream is asked because of what a writer is said to be at.

Each POSITION with a gap before it, heartbeat or implausible row costs a question to the
database, or to the writer. Whoever publishes thousands of them must not keep a reader
busy after it has stopped: beyond a few at once they wait, and are answered together.
"""

from __future__ import annotations

from synapse_replication.recent import RecentDict

__all__ = ["MAX_AT_ONCE", "SECONDS_BETWEEN", "ClaimRate"]

#: Catch-ups with one writer that begin without a wait.
MAX_AT_ONCE = 20

#: After these, one begins in so many s.
SECONDS_BETWEEN = 0.1

#: Writers that are remembered; beyond, the one heard longest ago is forgotten.
MAX_WRITERS = 1000


class ClaimRate:
    """Spaces out the catch-ups of one stream, for each of its writers."""

    def __init__(self) -> None:
        #: When the last of those that have begun would have, evenly spaced, in s.
        self._last: RecentDict[str, float] = RecentDict(MAX_WRITERS)

    def wait_before(self, instance_name: str, now: float) -> float:
        """Return how many s a catch-up has to wait, and count it.

        :param now: monotonic, in s.
        """
        last = self._last.pop(instance_name, now)
        last = self._last[instance_name] = max(last, now) + SECONDS_BETWEEN
        return max(0.0, last - now - MAX_AT_ONCE * SECONDS_BETWEEN)
