"""The token up to which one process has the rows of every writer of a stream.

Theory of operation: all writers take their ids from one sequence, so that each id is a
row of one writer, or of none. A writer's *position* says that this process has all its
rows up to there; the rows of all writers are complete up to the lowest position. If
that writer is down, the lowest position does not advance. But an id above it is
*settled* if its row was delivered here, or if this process allocated it and has
finished it. So the combined position advances over settled ids that follow one another
without a gap.

A position of a writer that is the id of a row of another writer settles nothing: that
row may not have been delivered yet.
"""

from __future__ import annotations

from collections import deque

from synapse_replication.streams.writer_positions import FinishedIds

#: A number of ids, and of ranges of settled ids, that take little memory.
_FEW = 100


class CombinedPosition:
    """The position of all writers of one stream together.

    Tokens are positive. Use it in the reactor's thread, except :meth:`allocated`.
    """

    def __init__(self) -> None:
        self._settled = FinishedIds()
        #: The tokens of this process that may not be finished yet.
        self._own: deque[int] = deque()
        self._upto = 0
        self._large = _FEW

    @property
    def is_large(self) -> bool:
        """Whether settled ids should be removed by :meth:`upto`."""
        return self.size > self._large

    @property
    def size(self) -> int:
        """The number of ids and ranges of ids that are held."""
        return len(self._settled) + len(self._own)

    def allocated(self, token: int) -> None:
        """Record that this process has allocated a token. Thread-safe."""
        self._own.append(token)

    def delivered(self, token: int) -> None:
        """Record that the rows of a token were delivered."""
        if token > self._upto:
            self._settled.add(token)

    def rewound(self, token: int) -> None:
        """Record that the rows of a writer after ``token`` will be delivered again."""
        self._upto = min(self._upto, token)
        self._settled = FinishedIds()

    def upto(self, lowest: int, own: int) -> int:
        """Return the token up to which the rows of all writers are complete.

        :param lowest: the lowest position of all writers.
        :param own: the position of this process, up to which its tokens are finished.
        """
        for _ in range(len(self._own)):
            token = self._own.popleft()
            if token <= own:
                self.delivered(token)
            else:
                self._own.append(token)
        self._upto = self._settled.end_of_gapless_range(max(lowest, self._upto))
        self._settled.forget_upto(self._upto)
        self._large = 2 * self.size + _FEW
        return self._upto
