"""Tests for the comparison of stored positions inside a host."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app import position_check
from synapse_replication.dropin.settings import variable
from tests.dropin.host import FakeStream, HostWithHandler, fake_modules


class PositionCheckTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "environ", {})
        fake_modules(
            self,
            {
                name: lambda hs, name=name: FakeStream(name)  # type: ignore[misc]
                for name in ("events", "presence", "typing", "caches")
            },
        )
        self.hs = HostWithHandler("w1")
        self.hs.config.worker.writers.events = ["w1", "w2"]
        self.hs.config.worker.instance_map = {
            name: SimpleNamespace(host="h", port=1, tls=False)
            for name in ("main", "w1", "w2")
        }
        self.made: list[Any] = []
        self.patch(position_check, "StoredPositionCheck", self.make)

    def make(self, *arguments: Any, **options: Any) -> Any:
        self.made.append((arguments[1], arguments[2], options))
        return SimpleNamespace(start=lambda: None, stop=lambda: None)

    def start(self) -> None:
        from synapse.storage.engines import PostgresEngine

        self.hs.engine = self.hs.engine or PostgresEngine()
        handler = self.hs.get_replication_command_handler()
        streamer = self.hs.get_replication_streamer()
        handler._wiring.start_sending(streamer, handler._stored_streams())

    def test_writers(self) -> None:
        """The declared writers of streams in the database are compared."""
        self.start()
        ((streams, instances, options),) = self.made
        self.assertEqual(
            {name: (each.stream_name, each.writers) for name, each in streams.items()},
            {
                "events": ("events", ("w1", "w2")),
                "presence": ("presence_stream", ("master",)),
                "caches": ("caches", ()),
            },
        )
        self.assertEqual(instances, ["master", "w1", "w2"])
        self.assertEqual(options["me"], "w1")
        self.assertEqual(options["interval"], 5)

    def test_disabled(self) -> None:
        """An interval of 0 disables it."""
        os.environ[variable("position_check_seconds")] = "0"
        self.start()
        self.assertEqual(self.made, [])

    def test_sqlite(self) -> None:
        """Without PostgreSQL there is one process, and nothing to compare."""
        self.hs.engine = object()
        self.start()
        self.assertEqual(self.made, [])
