"""Whose rows and positions are accepted, so that made-up names cost nothing.

Theory of operation: the instances that the configuration names anywhere are always
accepted: one of them may have been made a writer since this process read its own. Where
the writers of a stream are declared, no state is created for anybody else: what a
stranger says of the stream is discarded, counted and logged. Of a stream that everybody
writes, :data:`MAX_UNDECLARED` strangers are accepted at a time, and one that has been
silent for :data:`EXPIRES_AFTER` is forgotten to make room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

__all__ = ["EXPIRES_AFTER", "MAX_UNDECLARED", "DeclaredWriters", "WriterAdmission"]

#: How many undeclared (stream, writer) pairs are accepted at a time.
MAX_UNDECLARED: Final = 1000
#: After how many s of silence one of them is forgotten.
EXPIRES_AFTER: Final = 600.0


class DeclaredWriters:
    """What the configuration says of who writes.

    :param writers: of each stream, by its name; empty for one that everybody writes.
    :param instances: further instances of the deployment, by name.
    :ivar streams: those whose writers are declared.
    :ivar instances: all that are known.
    """

    def __init__(
        self, writers: Mapping[str, Collection[str]], instances: Iterable[str] = ()
    ) -> None:
        self.streams = frozenset(stream for stream, names in writers.items() if names)
        self.instances = frozenset(instances).union(*writers.values())


class WriterAdmission:
    """Decides which (stream, writer) pairs are accepted.

    :param declared: ``None`` if nothing is declared, so that every pair counts as
        undeclared.
    """

    def __init__(self, declared: DeclaredWriters | None = None) -> None:
        declared = declared or DeclaredWriters({})
        self._with_writers = declared.streams
        self._instances = declared.instances
        #: When each undeclared pair was heard last, the one longest ago first.
        self._heard: OrderedDict[tuple[str, str], float] = OrderedDict()

    def is_admitted(
        self, stream_name: str, instance_name: str, now: float
    ) -> tuple[bool, tuple[str, str] | None]:
        """Return whether a pair is accepted, and the pair that was forgotten for it.

        :param now: monotonic, s.
        """
        if instance_name in self._instances:
            return True, None
        if stream_name in self._with_writers:
            return False, None
        key = stream_name, instance_name
        forgotten = None
        if key not in self._heard and len(self._heard) >= MAX_UNDECLARED:
            oldest, heard = next(iter(self._heard.items()))
            if now - heard < EXPIRES_AFTER:
                return False, None
            del self._heard[oldest]
            forgotten = oldest
        self._heard[key] = now
        self._heard.move_to_end(key)
        return True, forgotten
