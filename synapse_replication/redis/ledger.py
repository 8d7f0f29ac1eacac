"""Accounting of publishes: unacknowledged, lost, and to be published again.

Theory of operation: a later row hides the loss of an earlier one, because a reader that
receives row 7 advances past row 6, lost or not. So losses are counted, and announcing
this instance's positions recovers from them. Rows and positions are not retained while
there is no connection: the announcement covers them. Other commands are retained up to
a bound, because nothing else would deliver them, and unacknowledged ones are published
again, in order. That is safe: each command states the current state of an object, so a
repetition is harmless, and all commands about one object come from one process. A
command that Redis rejected (by an ACL without its channel) is not repeated: it would be
rejected for ever, and cost a connection each time.

Publishing unacknowledged rows again was considered and rejected: they may have arrived,
and would then follow later rows of other instances out of order.

:class:`PublishLedger` is pure: its methods record what was published and acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["EXTENSION", "MAX_RETAINED", "NOT_RETAINED", "Publish", "PublishLedger"]

#: Commands that an announcement of positions replaces, so that they are not retained.
_RECOVERABLE = frozenset({"RDATA", "POSITION"})
#: The name under which extension messages are counted. They are not retained either: a
#: new hello is sent after reconnecting.
EXTENSION = "EXTENSION"
NOT_RETAINED = _RECOVERABLE | {EXTENSION}
#: The most other commands that are retained for the next connection.
MAX_RETAINED = 10_000


class Publish(NamedTuple):
    """Lines of one command, one message each."""

    command_name: str
    channel: bytes
    lines: Sequence[bytes]


class PublishLedger:
    """The accounts of one sender, across its connections.

    :ivar lost: the number of publishes lost since the last announcement.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._retained: deque[Publish] = deque()
        # The number of publishes written on this connection.
        self._written = 0
        # The unacknowledged publishes that would be published again, each with the
        # value of _written after it.
        self._unanswered: deque[tuple[int, Publish]] = deque()
        # The value of _written after the last publish evicted from _unanswered.
        self._evicted_upto = 0

    def retain(self, publish: Publish) -> int:
        """Retain lines that can be published later; count the others as lost.

        :return: the number of lines that exceeded the bound.
        """
        if publish.command_name in _RECOVERABLE:
            self.lost += len(publish.lines)
            return 0
        if publish.command_name == EXTENSION:
            return 0
        room = MAX_RETAINED - len(self._retained)
        self._retained.extend(
            publish._replace(lines=[line]) for line in publish.lines[:room]
        )
        too_many = max(0, len(publish.lines) - room)
        self.lost += too_many
        return too_many

    def take_retained(self) -> Iterable[Publish]:
        """Remove and return the retained lines, one per item."""
        retained, self._retained = self._retained, deque()
        return retained

    def retain_until_acknowledged(self, publish: Publish, end: int) -> None:
        """Retain a publish of the next write, to be repeated unless acknowledged.

        :param end: the number of lines of that write up to the end of this publish.
        """
        self._unanswered.append((self._written + end, publish))

    def record_write(self, count: int, unacknowledged: int) -> None:
        """Record that ``count`` lines are written to the connection.

        :param unacknowledged: the number of earlier lines without a reply.
        """
        unanswered = self._unanswered
        acknowledged = self._written - unacknowledged
        while unanswered and unanswered[0][0] <= acknowledged:
            unanswered.popleft()
        while len(unanswered) > MAX_RETAINED:
            self._evicted_upto, _ = unanswered.popleft()
        self._written += count

    def end_connection(
        self, unacknowledged: int, *, is_refused: bool = False
    ) -> tuple[list[Publish], bool]:
        """Count the unacknowledged publishes of a lost connection as lost.

        :param is_refused: Redis rejected the first of them.
        :return: those that must be retained, and whether others should have been, but
            were evicted.
        """
        self.lost += unacknowledged
        done, self._written = self._written - unacknowledged + is_refused, 0
        has_evicted, self._evicted_upto = self._evicted_upto > done, 0
        unanswered, self._unanswered = self._unanswered, deque()
        again = [
            publish._replace(lines=publish.lines[-(end - done) :])
            for end, publish in unanswered
            if end > done
        ]
        return again, has_evicted
