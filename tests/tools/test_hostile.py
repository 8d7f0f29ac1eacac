"""Tests for :mod:`scripts.tools.hostile`."""

from __future__ import annotations

from itertools import islice

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools import hostile
from synapse_replication.wire.commands import PositionCommand, RemoteServerUpCommand
from synapse_replication.wire.extension import parse_message
from synapse_replication.wire.rdata import RefusedLine, read_lines


class HostileTests(SynchronousTestCase):
    def test_well_formed_lines(self) -> None:
        """Lines meant to be accepted parse, and lines meant to be rejected do not."""
        for lines, kind in (
            (hostile.server_up_lines(), RemoteServerUpCommand),
            (hostile.made_up_writers(), PositionCommand),
            (hostile.gap_positions(7), PositionCommand),
            (hostile.long_names(16_000), RefusedLine),
        ):
            for item in read_lines(list(islice(lines, 3))):
                self.assertIsInstance(item, kind)

    def test_forged_epochs(self) -> None:
        """Each message is well formed and has a different epoch."""
        messages = [parse_message(each) for each in islice(hostile.forged_epochs(), 3)]
        self.assertEqual(len({message.epoch for message in messages}), 3)
