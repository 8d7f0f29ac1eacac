"""Tests for settings from the environment."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.host_streams import HostStream
from synapse_replication.dropin.settings import DropInSettings, variable
from synapse_replication.errors import StreamConfigurationError
from tests.dropin.host import FakeStream


class DropInSettingsTests(SynchronousTestCase):
    """Tests for DropInSettings."""

    def test_default(self) -> None:
        """Without variables, the defaults are used."""
        self.assertEqual(DropInSettings.from_environ({}), DropInSettings())

    def test_round_trip(self) -> None:
        """A process reads the settings that its launcher wrote."""
        for settings in (
            DropInSettings(),
            DropInSettings(False, 1, 2, 3, 4, False, "a.b, c.d", "http://c"),
        ):
            environ = settings.to_environ()
            self.assertEqual(DropInSettings.from_environ(environ), settings)

    def test_not_a_number(self) -> None:
        """The error names the variable and its value."""
        for name in ("plausible_distance", "backlog_rows", "backlog_bytes"):
            environ = {variable(name): "far"}
            error = self.assertRaises(
                StreamConfigurationError, DropInSettings.from_environ, environ
            )
            self.assertIn(f"{variable(name)} is 'far'", str(error))

    def test_of_a_stream(self) -> None:
        """A stream in memory accepts positions up to the plausible distance."""
        stream = HostStream(FakeStream("typing"), "me", plausible_distance=10)
        self.assertTrue(stream.is_plausible("w", 10))
        self.assertFalse(stream.is_plausible("w", 11))
