"""Tests that an event which a reader missed is still shown to its users.

Of two persisters, the one that did not write the event announces it as well, and its
POSITION may arrive first.

The environment variable SYNAPSE_REPLICATION_ROUNDS sets how often each deployment is
tried; SYNAPSE_REPLICATION_STOCK=1 adds an entirely stock one, which loses events.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from unittest import skipUnless

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivateRedis
from tests.external import skip_reason
from tests.external.synapse.real import Chat, eventually, new_deployment
from tests.support.client_api import timeline_messages
from tests.support.link_proxy import Cut, LinkProxy
from tests.support.synapse_process import Launcher, WorkerSpec, ours

skip = skip_reason("synapse")

ROUNDS = int(os.environ.get("SYNAPSE_REPLICATION_ROUNDS", "4"))
WITH_STOCK = os.environ.get("SYNAPSE_REPLICATION_STOCK") == "1"

PROCESSES = ("master", "persister1", "persister2", "sync1")
#: Time in s for the processes to announce a row to one another.
SETTLE = 0.3
#: Timeout in s for an event to be shown after its reader resumes.
PATIENCE = 10.0


class MissedRowTests(SynchronousTestCase):
    """Four processes; the last one subscribes through a proxy."""

    def start(self, launchers: Mapping[str, Launcher]) -> None:
        """Start the deployment."""
        redis = PrivateRedis().start()
        self.addCleanup(redis.stop)
        self.proxy = LinkProxy((redis.host, redis.port))
        self.addCleanup(self.proxy.close)
        through_proxy = {
            "redis": {"enabled": True, "host": "127.0.0.1", "port": self.proxy.port}
        }
        self.deployment = new_deployment(
            redis,
            [
                WorkerSpec("persister1", ("client",)),
                WorkerSpec("persister2", ("client",)),
                WorkerSpec("sync1", ("client",), through_proxy),
            ],
            {"events": ["persister1", "persister2"]},
            launchers,
        )
        self.addCleanup(self.deployment.stop)
        self.deployment.start()
        self.chats = [Chat.begin(self.deployment, number) for number in range(4)]

    def count_lost(self) -> int:
        """Return how many of the events that the reader missed are never shown."""
        return sum(
            not self._is_shown_after_miss(self.chats[number % len(self.chats)])
            for number in range(ROUNDS)
        )

    def _is_shown_after_miss(self, chat: Chat) -> bool:
        bob = chat.bob.at(self.deployment.processes["sync1"].api)
        since = self._wait_until_caught_up(chat)
        self.proxy.cut(Cut.SUBSCRIPTION)
        pid = self.deployment.processes["sync1"].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            chat.send_messages(1)
            time.sleep(SETTLE)
            self.proxy.heal()
        finally:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = bob.sync(since, timeout_ms=500)
            since = answer["next_batch"]
            if chat.sent[-1] in timeline_messages(answer, chat.room_id):
                return True
        return False

    def _wait_until_caught_up(self, chat: Chat) -> str:
        """
        Wait until new events are shown again; return the token of the next ``/sync``.
        """
        bob = chat.bob.at(self.deployment.processes["sync1"].api)
        # Identical requests are answered from a cache for two minutes.
        since: str = bob.sync(limit=1_000 + len(chat.sent))["next_batch"]
        chat.send_messages(1)

        def is_missing() -> bool:
            nonlocal since
            answer = bob.sync(since, timeout_ms=500)
            since = answer["next_batch"]
            return chat.sent[-1] not in timeline_messages(answer, chat.room_id)

        eventually("a new event is shown", is_missing)
        time.sleep(SETTLE)
        return since

    def test_all_on_ours(self) -> None:
        """With all processes on ours, no event is lost."""
        self.start({name: ours() for name in PROCESSES})
        self.assertEqual(self.count_lost(), 0, f"of {ROUNDS}")

    def test_without_the_extension(self) -> None:
        """With all processes on ours and the extension off, no event is lost."""
        self.start({name: ours("--no-extension") for name in PROCESSES})
        self.assertEqual(self.count_lost(), 0, f"of {ROUNDS}")

    def test_reading_stock(self) -> None:
        """With only the reader on ours, no event is lost."""
        self.start({"sync1": ours()})
        self.assertEqual(self.count_lost(), 0, f"of {ROUNDS}")

    @skipUnless(WITH_STOCK, "a measurement: set SYNAPSE_REPLICATION_STOCK=1")
    def test_stock(self) -> None:
        """
        With all processes stock, some events are lost; otherwise, these tests prove
        nothing.
        """
        self.start({})
        lost = self.count_lost()
        sys.stdout.write(f"stock: {lost} of {ROUNDS} lost\n")
        self.assertGreater(lost, 0)
