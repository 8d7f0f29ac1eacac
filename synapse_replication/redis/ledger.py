"""What was published and not acknowledged, and what of it is lost.

Theory of operation: rows hide a loss: a reader that gets row 7 takes itself to be past
row 6, lost or not. So losses are counted, and an announcement of our positions makes
them good. Rows and positions are not kept while there is no connection; that
announcement covers them. Other commands, which nothing else brings, are kept up to a
bound, and those that were not acknowledged are published again, in order: each says how
something is now, so that twice does no harm, and all about one thing come from one
process. One that Redis refused (an ACL without its channel) is not: it would be refused
for ever, and cost a connection each time.

Rejected: publishing rows again that were not acknowledged. They may have arrived, and
would be out of order behind what other processes sent since.

:class:`PublishLedger` has no effects: it is told what was published and answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["EXTENSION", "MAX_KEPT", "NOT_KEPT", "Publish", "PublishLedger"]

#: What the announcement of our positions makes good, and so need not be kept.
_RECOVERABLE = frozenset({"RDATA", "POSITION"})
#: The name under which messages of the extension are counted. What there is to say
#: when the connection is back is said then, so they are not kept either.
EXTENSION = "EXTENSION"
NOT_KEPT = _RECOVERABLE | {EXTENSION}
#: How many commands other than rows and positions wait for a connection.
MAX_KEPT = 10_000


class Publish(NamedTuple):
    """Lines of one command, one message each."""

    command_name: str
    channel: bytes
    lines: Sequence[bytes]


class PublishLedger:
    """The accounts of one sender, over all its connections.

    :ivar lost: how many publishes were lost since the last announcement.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._retained: deque[Publish] = deque()
        # How many publishes were written on this connection; and those of them that
        # would be published again, with how many there were after each.
        self._written = 0
        self._unanswered: deque[tuple[int, Publish]] = deque()
        # The last of those that found no room there, as such a count.
        self._forgotten_upto = 0

    def retain(self, publish: Publish) -> int:
        """Set aside what can be published later; count the rest as lost.

        :return: how many lines found no room.
        """
        if publish.command_name in _RECOVERABLE:
            self.lost += len(publish.lines)
            return 0
        if publish.command_name == EXTENSION:
            return 0
        room = MAX_KEPT - len(self._retained)
        self._retained.extend(
            publish._replace(lines=[line]) for line in publish.lines[:room]
        )
        too_many = max(0, len(publish.lines) - room)
        self.lost += too_many
        return too_many

    def take_retained(self) -> Iterable[Publish]:
        """Take out what was set aside, a line each."""
        retained, self._retained = self._retained, deque()
        return retained

    def keep_until_answered(self, publish: Publish, end: int) -> None:
        """Keep what nothing else brings, to publish it again if it is not answered.

        :param end: how many lines the next write has up to the end of this one.
        """
        self._unanswered.append((self._written + end, publish))

    def record_write(self, count: int, unacknowledged: int) -> None:
        """Record that so many lines are written on the connection.

        :param unacknowledged: how many before them were not answered yet.
        """
        unanswered = self._unanswered
        acknowledged = self._written - unacknowledged
        while unanswered and unanswered[0][0] <= acknowledged:
            unanswered.popleft()
        while len(unanswered) > MAX_KEPT:
            self._forgotten_upto, _ = unanswered.popleft()
        self._written += count

    def end_connection(
        self, unacknowledged: int, *, is_refused: bool = False
    ) -> tuple[list[Publish], bool]:
        """Count as lost what the connection left unanswered.

        :param is_refused: Redis refused the first of these publishes.
        :return: what is to be retained of them, and whether more should have been that
            found no room.
        """
        self.lost += unacknowledged
        done, self._written = self._written - unacknowledged + is_refused, 0
        has_forgotten, self._forgotten_upto = self._forgotten_upto > done, 0
        unanswered, self._unanswered = self._unanswered, deque()
        again = [
            publish._replace(lines=publish.lines[-(end - done) :])
            for end, publish in unanswered
            if end > done
        ]
        return again, has_forgotten
