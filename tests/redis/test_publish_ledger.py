"""Tests of counting lost publishes, and of retaining those to be sent again."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis import publish_ledger
from synapse_replication.redis.publish_ledger import Publish, PublishLedger
from synapse_replication.wire.extension import COUNTED_AS

_ROWS = Publish("RDATA", b"hs", [b"1", b"2"])
_POSITION = Publish("POSITION", b"hs", [b"p"])
_EXTENSION = Publish(COUNTED_AS, b"hs/x", [b"e"])


def others(*lines: bytes) -> Publish:
    """Make a publish of commands that must be retained."""
    return Publish("USER_SYNC", b"hs", lines)


def write(
    sender_ledger: PublishLedger, unacknowledged: int, *publishes: Publish
) -> None:
    """Record publishes as written, as the sender does."""
    count = 0
    for publish in publishes:
        count += len(publish.lines)
        if publish.command_name not in publish_ledger.NOT_RETAINED:
            sender_ledger.retain_until_acknowledged(publish, count)
    sender_ledger.record_write(count, unacknowledged)


class RetainTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.ledger = PublishLedger()

    def test_retained(self) -> None:
        """
        Rows and positions count as lost; other commands are retained, except extension
        messages.
        """
        for publish, lost in ((_ROWS, 2), (_POSITION, 3), (_EXTENSION, 3)):
            self.assertEqual(self.ledger.retain(publish), 0)
            self.assertEqual(self.ledger.lost, lost, publish)
        self.assertEqual(self.ledger.retain(others(b"a", b"b")), 0)
        self.assertEqual(self.ledger.lost, 3)
        retained = [attrs.evolve(others(b"a"), lines=[b"a"])]
        retained.append(attrs.evolve(retained[0], lines=[b"b"]))
        self.assertEqual(list(self.ledger.take_retained()), retained)
        self.assertEqual(list(self.ledger.take_retained()), [])

    def test_bounded(self) -> None:
        """Commands beyond the limit are lost."""
        self.patch(publish_ledger, "MAX_RETAINED", 3)
        self.assertEqual(self.ledger.retain(others(b"a", b"b")), 0)
        self.assertEqual(self.ledger.retain(others(b"c", b"d", b"e")), 2)
        self.assertEqual(self.ledger.retain(others(b"f")), 1)
        self.assertEqual(self.ledger.lost, 3)
        retained = [publish.lines for publish in self.ledger.take_retained()]
        self.assertEqual(retained, [[b"a"], [b"b"], [b"c"]])


class ConnectionTests(SynchronousTestCase):
    """The end of a connection: lines that are lost, and those published again."""

    def end(
        self, unacknowledged: int, *publishes: Publish, is_refused: bool = False
    ) -> tuple[list[bytes], bool, int]:
        """
        Return the lines to publish again, whether any were evicted, and the loss count.
        """
        self.ledger = PublishLedger()
        write(self.ledger, 0, *publishes)
        again, has_evicted = self.ledger.end_connection(
            unacknowledged, is_refused=is_refused
        )
        lines = [line for publish in again for line in publish.lines]
        return lines, has_evicted, self.ledger.lost

    def test_unanswered(self) -> None:
        """
        Unanswered lines count as lost; the retained commands among them are published
        again.
        """
        written = (_ROWS, others(b"a", b"b"), _POSITION, _EXTENSION, others(b"c"))
        for unacknowledged, lines in (
            (0, []),
            (1, [b"c"]),
            (3, [b"c"]),
            (4, [b"b", b"c"]),
            (5, [b"a", b"b", b"c"]),
            (7, [b"a", b"b", b"c"]),
        ):
            self.assertEqual(
                self.end(unacknowledged, *written),
                (lines, False, unacknowledged),
                unacknowledged,
            )

    def test_refused(self) -> None:
        """The line that Redis refused is lost and not published again."""
        self.assertEqual(
            self.end(2, others(b"a", b"b"), is_refused=True), ([b"b"], False, 2)
        )

    def test_the_next_connection(self) -> None:
        """Lines of an earlier connection are not counted for the next one."""
        self.end(1, others(b"a"))
        write(self.ledger, 0, others(b"b"))
        again, _ = self.ledger.end_connection(1)
        self.assertEqual([publish.lines for publish in again], [(b"b",)])
        self.assertEqual(self.ledger.lost, 2)

    def test_bounded(self) -> None:
        """
        Beyond the limit, the oldest commands are evicted, which is reported only if
        they are lost.
        """
        self.patch(publish_ledger, "MAX_RETAINED", 2)
        written = (others(b"a"), others(b"b"), others(b"c"))
        self.assertEqual(self.end(3, *written), ([b"b", b"c"], True, 3))
        self.assertEqual(self.end(2, *written), ([b"b", b"c"], False, 2))

    def test_answered_commands_make_room(self) -> None:
        """Answered commands make room for later ones."""
        self.patch(publish_ledger, "MAX_RETAINED", 2)
        sender_ledger = PublishLedger()
        write(sender_ledger, 0, others(b"a"), others(b"b"))
        write(sender_ledger, 1, others(b"c"))
        again, has_evicted = sender_ledger.end_connection(3)
        self.assertEqual([publish.lines for publish in again], [(b"b",), (b"c",)])
        self.assertFalse(has_evicted)
