"""What hostile peers and browsers do to a deployment of real processes."""

from __future__ import annotations

import time

from synapse_replication.demo.deployment import WRITERS
from tests.integration.hostile import HostileTestCase

LINE = b"REMOTE_SERVER_UP matrix.example.org\n"


class RelayTests(HostileTestCase):
    """Four writers that are all connected to one another over direct TCP."""

    def test_one_line_is_received_once(self) -> None:
        """A line to one of them is received once by each."""
        deployment = self.deploy(use_redis=False)
        self.wait_for_links(deployment)
        with self.peer(deployment, WRITERS[0], b"NAME stranger\n" + LINE):

            def counts() -> list[int]:
                return [
                    self.received(deployment, name, "REMOTE_SERVER_UP")
                    for name in WRITERS
                ]

            self.wait_until("all received it", lambda: min(counts()) > 0)
            time.sleep(1.0)
            self.assertEqual(counts(), [1, 1, 1, 1])
