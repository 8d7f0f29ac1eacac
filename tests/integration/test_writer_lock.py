"""Tests for two processes with one name, with real processes."""

from __future__ import annotations

import copy
import signal

from tests.integration.deployment import PATIENCE, DeploymentTestCase


class WriterLockTests(DeploymentTestCase):
    """Main is started twice."""

    def second_main(self) -> dict[str, object]:
        """Return the configuration of another main process."""
        main = copy.deepcopy(self.main)
        main["listeners"][0]["path"] = str(self.folder / "main2.sock")
        return main

    def test_second_process(self) -> None:
        """
        A second process refuses to start while the first runs, and names its session;
        after the first was killed, another starts, and no row is lost.
        """
        first = self.start("main", self.main)
        self.start("worker", self.worker)
        for name in ("main", "worker"):
            self.wait_until_up(name)
        self.write_upto(3)
        second = self.start("main", self.second_main(), name="main2")
        self.assertEqual(second.wait(PATIENCE), 1)
        self.assertIn("another process writes as master", self.log_of("main2"))
        self.assertIn("pg_terminate_backend", self.log_of("main2"))
        self.write_upto(6)
        self.wait_for_rows(6)
        first.send_signal(signal.SIGKILL)
        first.wait()
        module = self.main["synapse_replication"]["modules"][0]
        module["config"]["after"] = 6
        self.start("main", self.main)
        self.wait_until_up("main", 2)
        self.write_upto(9)
        self.wait_until(
            "the rows after the restart",
            lambda: len(self.journal("notes")) >= 9,
        )
        tokens = [entry["token"] for entry in self.journal("notes")]
        self.assertEqual(tokens, sorted(set(tokens)))

    def test_without_the_lock(self) -> None:
        """With the option, a second process starts nevertheless."""
        self.start("main", self.main)
        self.wait_until_up("main")
        main = self.second_main()
        main["synapse_replication"] = {"writer_lock": False}
        self.start("main", main, name="main2")
        self.wait_until_up("main2")
