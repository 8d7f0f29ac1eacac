"""Tests for :mod:`scripts.tools.faults.costs`."""

from __future__ import annotations

from itertools import islice

import attrs
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.costs import (
    ATTACKS,
    COMMANDS,
    MESSAGE_TYPES,
    Cost,
    command_lines,
    extension_messages,
)
from synapse_replication.wire import commands
from synapse_replication.wire.extension import MessageType, parse_message
from synapse_replication.wire.rdata import RefusedLine, read_lines

GOOD = Cost(10_000, 0.5, (0.1, 0.4), 0.2, (80.0, 90.0, 84.0))


class CostsTests(SynchronousTestCase):
    def test_everything_is_covered(self) -> None:
        """Each command and type of message is sent; attacks have unique names."""
        self.assertEqual(COMMANDS.keys(), commands.COMMANDS.keys())
        self.assertEqual(set(MESSAGE_TYPES), {kind.value for kind in MessageType})
        self.assertEqual(len({attack.what for attack in ATTACKS}), len(ATTACKS))

    def test_small_lines_are_valid(self) -> None:
        """Small lines of each command, and all messages, are accepted."""
        for name in COMMANDS:
            for item in read_lines(list(islice(command_lines(name), 2))):
                self.assertNotIsInstance(item, RefusedLine)
        for kind in MESSAGE_TYPES:
            for large in (False, True):
                (message,) = islice(extension_messages(kind, large=large), 1)
                self.assertEqual(parse_message(message).type.value, kind)

    def test_large_lines(self) -> None:
        """Large lines have the wanted size."""
        for name in COMMANDS:
            (line,) = islice(command_lines(name, 5000), 1)
            self.assertEqual(len(line), 5000, name)

    def test_limits(self) -> None:
        """Each of the limits can be exceeded, but a turn's duration has none."""
        self.assertTrue(GOOD.is_bounded)
        for other in (
            attrs.evolve(GOOD, turn=(0.3, 0.4)),
            attrs.evolve(GOOD, next_row=6.0),
            attrs.evolve(GOOD, memory=(80.0, 90.0, 89.0)),
        ):
            self.assertFalse(other.is_bounded)

    def test_first_growth(self) -> None:
        """An attack that leaves a little more memory at first is repeated."""
        self.assertFalse(GOOD.must_be_repeated)
        grown = attrs.evolve(GOOD, memory=(80.0, 100.0, 99.0))
        self.assertTrue(grown.must_be_repeated)
        for other in (
            attrs.evolve(grown, memory=(80.0, 102.0, 101.0)),
            attrs.evolve(grown, next_row=6.0),
        ):
            self.assertFalse(other.must_be_repeated or other.is_bounded)
