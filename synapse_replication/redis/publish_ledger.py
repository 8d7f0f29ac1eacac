"""Accounting of publishes that are unacknowledged, lost, or to be published again.

Theory of operation: a later row hides the loss of an earlier row, because a reader that
receives row 7 advances past row 6 even if row 6 was lost. Losses are therefore counted,
and this instance's positions are announced after a loss, so that readers fetch the lost
rows. Rows and positions are not retained while there is no connection: the announcement
replaces them. Other commands are retained up to a bound, because nothing would replace
them, and those that Redis has not acknowledged are published again, in order. That is
safe: each command states the current state of an object, so a repetition is harmless,
and all commands about one object come from one process. A command that Redis rejected
(because an ACL does not allow its channel) is not repeated: it would always be
rejected, and each rejection costs a connection.

Publishing unacknowledged rows again was considered and rejected: if they had arrived
already, the repeated rows would follow later rows of other instances, out of order.

:class:`PublishLedger` does no I/O: the sender reports publishes and losses to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs

from synapse_replication.wire.extension import COUNTED_AS

#: Commands that are not retained, because an announcement of positions replaces them.
_RECOVERABLE = frozenset({"RDATA", "POSITION"})
#: Messages of the extension are not retained either, because a new hello is sent after
#: reconnecting.
NOT_RETAINED = _RECOVERABLE | {COUNTED_AS}
#: The largest number of lines that are retained for the next connection, and of
#: unacknowledged publishes that are retained in case the connection is lost.
MAX_RETAINED = 10_000


# Not frozen: creating one for each publish would take 0.36 instead of 0.14 µs.
@attrs.define
class Publish:
    """Lines of one command to publish, each as one message."""

    command_name: str
    channel: bytes
    lines: Sequence[bytes]


class PublishLedger:
    """The accounts of one sender, over all of its connections.

    :ivar lost: the number of publishes lost since positions were last announced.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._retained: deque[Publish] = deque()
        # The number of lines written on all connections.
        self._written = 0
        # The written publishes that would be published again if the connection were
        # lost, each with the value of _written after its last line.
        self._unanswered: deque[tuple[int, Publish]] = deque()
        # The value of _written after the last publish that was evicted from
        # _unanswered.
        self._evicted_upto = 0

    def retain(self, publish: Publish) -> int:
        """Retain lines to be published on the next connection.

        Lines that are not retained are counted as lost, except those of the extension.

        :return: the number of lines that were not retained because of the bound.
        """
        if publish.command_name in _RECOVERABLE:
            self.lost += len(publish.lines)
            return 0
        if publish.command_name == COUNTED_AS:
            return 0
        room = MAX_RETAINED - len(self._retained)
        self._retained.extend(
            attrs.evolve(publish, lines=[line]) for line in publish.lines[:room]
        )
        too_many = max(0, len(publish.lines) - room)
        self.lost += too_many
        return too_many

    def take_retained(self) -> Iterable[Publish]:
        """Remove and return the retained lines, one line per item."""
        retained, self._retained = self._retained, deque()
        return retained

    def retain_until_acknowledged(self, publish: Publish, end: int) -> None:
        """Retain a publish of the next write until Redis has acknowledged it.

        :param end: the number of lines in that write up to the end of this publish.
        """
        self._unanswered.append((self._written + end, publish))

    def record_write(self, count: int, unacknowledged: int) -> None:
        """Record that ``count`` lines are about to be written to the connection.

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

        :param unacknowledged: the number of lines without a reply.
        :param is_refused: whether Redis rejected the first of these lines.
        :return: the publishes that the caller must retain, and whether some of those
            that should be retained were evicted.
        """
        self.lost += unacknowledged
        done = self._written - unacknowledged + is_refused
        has_evicted = self._evicted_upto > done
        unanswered, self._unanswered = self._unanswered, deque()
        again = [
            attrs.evolve(publish, lines=publish.lines[-(end - done) :])
            for end, publish in unanswered
            if end > done
        ]
        return again, has_evicted
