"""Tests for settings from the environment."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.settings import DISTANCE, plausible_distance
from synapse_replication.dropin.streams import HostStream
from synapse_replication.errors import StreamConfigurationError
from synapse_replication.streams.positions import PLAUSIBLE_DISTANCE
from tests.dropin.host import FakeStream


class PlausibleDistanceTests(SynchronousTestCase):
    """Tests for plausible_distance."""

    def test_default(self) -> None:
        """Without a setting, the default is used."""
        self.assertEqual(plausible_distance(), PLAUSIBLE_DISTANCE)

    def test_set(self) -> None:
        """A number is accepted; any other value is an error."""
        self.patch(__import__("os"), "environ", {DISTANCE: "5000"})
        self.assertEqual(plausible_distance(), 5000)
        self.patch(__import__("os"), "environ", {DISTANCE: "far"})
        error = self.assertRaises(StreamConfigurationError, plausible_distance)
        self.assertIn(f"{DISTANCE} is 'far'", str(error))

    def test_of_a_stream(self) -> None:
        """A stream in memory accepts positions up to the plausible distance."""
        stream = HostStream(FakeStream("typing"), "me", plausible_distance=10)
        self.assertTrue(stream.is_plausible("w", 10))
        self.assertFalse(stream.is_plausible("w", 11))
