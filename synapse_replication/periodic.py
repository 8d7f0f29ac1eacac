"""The moments of periodic work."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import Clock


#: How long after a multiple of its interval periodic work takes place, in s. Heartbeats
#: are sent at the multiples: a look at the peers just before their heartbeats arrive
#: would find them silent for the longest time.
AFTER_HEARTBEATS = 1.0


def until_next(clock: Clock, every: float) -> float:
    """Return the time until about ``every`` s from now, in s.

    It is the time until :data:`AFTER_HEARTBEATS` after a multiple of ``every`` in the
    clock's time, so that periodic work with the same interval takes place in one turn
    of the reactor.

    :return: more than a tenth of ``every``, at most 1.1 times ``every``: a timer may
        fire slightly too early.
    """
    left = every - (clock.seconds() - AFTER_HEARTBEATS) % every
    return left if left > every / 10 else left + every
