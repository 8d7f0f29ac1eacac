"""Tests for settings from the environment."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config.shared_options import TracingOptions
from synapse_replication.dropin.host_streams import HostStream
from synapse_replication.dropin.settings import (
    DropInSettings,
    from_environ,
    setting_leaves,
    to_environ,
    variable,
)
from synapse_replication.errors import StreamConfigurationError
from synapse_replication.handlers.receiving.context import ReceiverOptions
from synapse_replication.streams.backlog import BacklogOptions
from tests.dropin.host import FakeStream


class DropInSettingsTests(SynchronousTestCase):
    """Tests for DropInSettings."""

    def test_default(self) -> None:
        """Without variables, the defaults are used."""
        self.assertEqual(from_environ({}), DropInSettings())

    def test_defaults_in_variables(self) -> None:
        """A process reads the defaults that its launcher wrote."""
        defaults = {
            leaf.variable: "" if leaf.default is attrs.NOTHING else leaf.default
            for leaf in setting_leaves()
        }
        self.assertEqual(from_environ(to_environ(defaults)), DropInSettings())

    def test_variables(self) -> None:
        """Each published variable sets its option."""
        values = {
            variable(name): value
            for name, value in {
                "extension": True,
                "backlog_rows": 1,
                "backlog_bytes": 2,
                "plausible_distance": 3000,
                "position_check_seconds": 4,
                "writer_lock": False,
                "hooks": "a.b, c.d",
                "tracing_endpoint": "http://c",
            }.items()
        }
        self.assertEqual(
            from_environ(to_environ(values)),
            DropInSettings(
                writer_lock=False,
                receiving=ReceiverOptions(
                    plausible_distance=3000, position_check_seconds=4
                ),
                tracing=TracingOptions(endpoint="http://c"),
                backlog=BacklogOptions(1, 2),
                hooks="a.b, c.d",
            ),
        )
        off = from_environ({variable("extension"): "false"})
        self.assertIsNone(off.backlog)

    def test_invalid(self) -> None:
        """The error names the variable and its value."""
        for name, value in (
            ("plausible_distance", "far"),
            ("plausible_distance", "10"),
            ("backlog_rows", "x"),
            ("backlog_bytes", "-1"),
            ("position_check_seconds", "x"),
            ("extension", "x"),
            ("tracing_endpoint", "x"),
        ):
            environ = {variable(name): value}
            error = self.assertRaises(StreamConfigurationError, from_environ, environ)
            self.assertIn(f"{variable(name)} is {value!r}", str(error))

    def test_hint(self) -> None:
        """The error states the bound that the value exceeds, as a whole number."""
        for name, value, expected in (
            ("plausible_distance", 2 * 10**12, "expected `int` <= 1099511627776"),
            ("max_queue_bytes", 5, "expected `int` >= 1048576"),
            ("backlog_rows", "x", "write a whole number"),
        ):
            environ = to_environ({variable(name): value})
            error = self.assertRaises(StreamConfigurationError, from_environ, environ)
            self.assertIn(expected, str(error))
            self.assertIn("or unset it to use the default", str(error))

    def test_of_a_stream(self) -> None:
        """A stream in memory accepts positions up to the plausible distance."""
        stream = HostStream(FakeStream("typing"), "me", plausible_distance=10)
        self.assertTrue(stream.is_plausible("w", 10))
        self.assertFalse(stream.is_plausible("w", 11))
