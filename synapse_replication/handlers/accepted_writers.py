"""The writers that are accepted: a bound of the state that invented names can create.

Theory of operation: all instances that the configuration declares are always accepted,
because one of them may have become a writer since this process read its configuration.
If the writers of a stream are declared, no state is created for other instances: their
rows and positions are discarded, counted and logged. For all streams without declared
writers together, up to :data:`MAX_UNDECLARED` (stream, instance) pairs are accepted at
a time. To make room, the pair that was seen least recently is evicted, if it has been
silent for :data:`PAIR_EXPIRES_AFTER`; otherwise the new pair is not accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

#: The largest number of undeclared (stream, writer) pairs that are accepted at a time.
MAX_UNDECLARED: Final = 1000
#: The time for which a pair must have been silent before it may be evicted, in s.
PAIR_EXPIRES_AFTER: Final = 600.0


class DeclaredWriters:
    """The writers and instances that the configuration declares.

    :param writers: the writers of each stream, by the stream's name; an empty
        collection if every instance may write the stream.
    :param instances: the names of further instances of the deployment.
    :ivar streams: the streams whose writers are declared.
    :ivar instances: all declared instances.
    """

    def __init__(
        self, writers: Mapping[str, Collection[str]], instances: Iterable[str] = ()
    ) -> None:
        self.streams = frozenset(stream for stream, names in writers.items() if names)
        self.instances = frozenset(instances).union(*writers.values())


class AcceptedWriters:
    """The (stream, writer) pairs that are accepted.

    :param declared: the declared writers and instances; ``None`` if none are declared,
        so that every pair counts as undeclared.
    """

    def __init__(self, declared: DeclaredWriters | None = None) -> None:
        declared = declared or DeclaredWriters({})
        self._with_writers = declared.streams
        self._instances = declared.instances
        #: When each undeclared pair was last seen, in s; oldest first.
        self._last_seen: OrderedDict[tuple[str, str], float] = OrderedDict()

    def accept(
        self, stream_name: str, instance_name: str, now: float
    ) -> tuple[bool, tuple[str, str] | None]:
        """Accept a pair if possible; evict another pair to make room if necessary.

        :param now: the time of the host's clock, in s.
        :return: whether the pair is accepted, and the evicted pair, if any.
        """
        if instance_name in self._instances:
            return True, None
        if stream_name in self._with_writers:
            return False, None
        key = stream_name, instance_name
        evicted = None
        if key not in self._last_seen and len(self._last_seen) >= MAX_UNDECLARED:
            oldest, last_seen = next(iter(self._last_seen.items()))
            if now - last_seen < PAIR_EXPIRES_AFTER:
                return False, None
            del self._last_seen[oldest]
            evicted = oldest
        self._last_seen[key] = now
        self._last_seen.move_to_end(key)
        return True, evicted
