"""Which peers watch this instance, and which peers it watches.

Theory of operation: if every instance sent heartbeats to all others every few seconds,
the cost of each would grow with their number. Among many, an instance therefore sends
heartbeats to all rarely, and asks a few peers to *watch* it: it sends a message to each
of them every few seconds, and a watcher that misses three of them reports it to all
peers once. It is the principle of SWIM (Das, Gupta, Motivala: SWIM, DSN 2002), with
watchers that are chosen once instead of random probes.

An instance that cannot hear must not accuse others: a watcher speaks only if something
else arrived while the watched instance was silent. An accused instance that lives
contradicts by a heartbeat to all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from synapse_replication.recent import RecentDict

#: Among more peers than this, heartbeats to all are rare, and a few peers watch.
FEW_PEERS: Final = 10
#: The number of watchers of an instance. Only if all of them are killed together with
#: the instance, its end is noticed by its missing heartbeats alone.
WATCHERS: Final = 3
#: The interval of messages to watchers, in s.
WATCH_INTERVAL: Final = 5
#: How long a watched instance may be silent, in s.
WATCHED_SILENT_AFTER: Final = 3.0 * WATCH_INTERVAL
#: A watcher that has heard nothing at all for this time, in s, may be unable to hear.
#: It is short enough that an instance was due twice when the watcher could hear.
HEARS_WITHIN: Final = 9.0
#: The largest number of instances that one instance watches.
MAX_WATCHED: Final = 1000


class Watches:
    """The watchers of one instance, and the instances that it watches.

    :param seed: decides which peers are asked to watch.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._watchers: list[str] = []
        #: The epoch of each watched instance, and when it was last heard, in s.
        self._watched: RecentDict[str, tuple[str, float]] = RecentDict(MAX_WATCHED)
        #: Since when this instance has been able to hear, and when the last message of
        #: any instance arrived, in s.
        self._listening_since = self._last_heard = -math.inf

    @property
    def has_watchers(self) -> bool:
        """Whether any peer watches this instance."""
        return bool(self._watchers)

    def watchers(self, living: Sequence[str], *, is_wanted: bool) -> Sequence[str]:
        """Return the peers to which a message must be sent now.

        A watcher remains one as long as it lives: it would regard silence as death.

        :param living: the peers that live, and know how to watch.
        :param is_wanted: whether to ask further peers if there are too few.
        """
        alive = set(living)
        self._watchers = [name for name in self._watchers if name in alive]
        missing = WATCHERS - len(self._watchers)
        if is_wanted and missing > 0:
            others = sorted(alive.difference(self._watchers))
            self._watchers += self._random.sample(others, min(missing, len(others)))
        return self._watchers

    def watch(self, name: str, epoch: str, now: float) -> None:
        """Begin to watch an instance, which asks for it."""
        self._watched[name] = epoch, now

    def hearing_interrupted(self, now: float) -> None:
        """Record that messages may have been missed: a link came up or went down."""
        self._listening_since = now

    def heard(self, name: str, epoch: str, now: float) -> None:
        """Record that an instance lives; a new epoch must ask again."""
        if now - self._last_heard > HEARS_WITHIN:
            # This instance may have been unable to hear.
            self._listening_since = now
        self._last_heard = now
        watched = self._watched.get(name)
        if watched is not None:
            if watched[0] == epoch:
                self._watched[name] = epoch, now
            else:
                del self._watched[name]

    def forget(self, name: str, epoch: str) -> None:
        """Stop watching an instance, unless it has restarted since."""
        if self._watched.get(name, ("", 0.0))[0] == epoch:
            del self._watched[name]

    def next_check(self) -> float | None:
        """Return when an instance may have been silent for too long at the earliest."""
        heard = [last for _, last in self._watched.values()]
        return min(heard) + WATCHED_SILENT_AFTER if heard else None

    def silent(self, now: float) -> list[tuple[str, str, float]]:
        """Return the instances that are silent.

        :return: the name, the epoch and for how long it has been silent, in s.
        """
        if now - self._last_heard > HEARS_WITHIN:
            return []
        return [
            (name, epoch, now - last)
            for name, (epoch, last) in self._watched.items()
            if now - max(last, self._listening_since) >= WATCHED_SILENT_AFTER
        ]
