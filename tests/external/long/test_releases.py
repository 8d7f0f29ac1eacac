"""Tests that this tree's processes continue what each release has left behind."""

from __future__ import annotations

import time

from synapse_replication.demo.course import Tail
from synapse_replication.demo.deployment import WRITERS, wait_until_ready
from synapse_replication.demo.script import STREAMS
from tests.compatibility.record import ROWS
from tests.compatibility.test_releases import (
    RELEASES,
    ContinuedDeployment,
    ReleaseCase,
)
from tests.external import skip_reason

skip = skip_reason("long")

#: The time within which the readers must have all rows, in s.
PATIENCE = 60.0


class ProcessesTests(ReleaseCase):
    """Tests with processes."""

    def test_continued(self) -> None:
        """
        Configuration, journals, stored positions and archive of each release are
        continued: each row of the release and of this tree arrives once, in order.
        """
        for release in RELEASES:
            with self.subTest(release.name), self.continued(release) as deployment:
                self._continue(deployment)

    def _continue(self, deployment: ContinuedDeployment) -> None:
        before = {
            (stream.name, writer): len(deployment.written_rows(stream, writer))
            for stream in STREAMS.values()
            if not stream.in_memory
            for writer in set(stream.writers.values())
        }
        self.assertGreater(sum(before.values()), ROWS // 2)
        self._run_processes(deployment)
        for tally in deployment.tallies():
            self.assertGreater(
                tally.written, before.get((tally.stream_name, tally.instance_name), 0)
            )
        self.check_archive(deployment)

    def _run_processes(self, deployment: ContinuedDeployment) -> None:
        deployment.start_processes()
        wait_until_ready(deployment.processes.values())
        deployment.let_writers_begin()
        logs = [Tail(deployment.log_of(name)) for name in WRITERS]
        deadline = time.monotonic() + PATIENCE
        while not (
            all(log.finished for log in logs)
            and all(tally.is_good for tally in deployment.tallies())
        ):
            for process in deployment.processes.values():
                process.check()
            if time.monotonic() > deadline:
                bad = [tally for tally in deployment.tallies() if not tally.is_good]
                self.fail(f"rows are missing, or came twice: {bad}")
            time.sleep(0.2)
            for log in logs:
                log.read_new_lines()
        stopped = deployment.stop_processes()
        self.assertEqual(set(stopped.values()), {0}, stopped)
