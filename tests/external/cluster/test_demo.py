"""Archives the demo deployment while it runs."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.demo.course import run_demo
from synapse_replication.demo.deployment import DemoPlan, Deployment
from synapse_replication.demo.display import TextScreen
from synapse_replication.demo.script import STREAMS, read_script
from synapse_replication.pipeline.archive.job import (
    ArchiveProgress,
    ArchiveSettings,
    run_archive,
)
from synapse_replication.pipeline.archive.snapshot import read_archive
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.pipeline.spark.session import make_session
from synapse_replication.recordings.reader import shipped_recording
from synapse_replication.streams.standard.registry import MAIN_INSTANCE
from tests.external import skip_reason

skip = skip_reason("cluster")

#: The number of rows; a variable of the environment can increase it.
_ROWS = int(os.environ.get("SYNAPSE_REPLICATION_DEMO_ROWS", "600"))


class _Screen(TextScreen):
    """
    A screen without output, which starts the recorder once the instances are running.
    """

    def __init__(self, deployment: Deployment, recordings: Path) -> None:
        super().__init__(Console(quiet=True))
        self._deployment = deployment
        self._recordings = recordings
        self.recorder: subprocess.Popen[bytes] | None = None

    def print_line(self, text: str) -> None:
        if text.startswith("Status page of") and self.recorder is None:
            self.recorder = self._record()

    def progress(self, rows: dict[str, int], total: int) -> None:
        """Show nothing."""

    def _record(self) -> subprocess.Popen[bytes]:
        config = self._deployment.directory / "homeserver.yaml"
        recorder = subprocess.Popen(
            [
                *(sys.executable, "-m", "synapse_replication", "record"),
                *("-c", str(config), "--out", str(self._recordings), "--gzip"),
            ],
            stderr=subprocess.DEVNULL,
        )
        redis = self._deployment.redis
        assert redis is not None
        until = time.monotonic() + 30
        processes = len(self._deployment.processes)
        while len(redis.clients("pubsub")) <= processes:
            assert time.monotonic() < until
            time.sleep(0.05)
        return recorder


class DemoTests(SynchronousTestCase):
    """Compares the rows that a deployment wrote with those in the archive."""

    def test_all_rows(self) -> None:
        """
        The archive contains all rows of each writer: rows of tables from the database,
        and rows of typing from the recording.
        """
        session = make_session(
            "demo",
            master="local[2]",
            settings={
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
            },
        )
        # Other tests start a session on a cluster.
        self.addCleanup(session.stop)
        recording = shipped_recording()
        deployment = Deployment(DemoPlan(recording, _ROWS, 1000.0, use_redis=True))
        self.addCleanup(deployment.close)
        folder = Path(self.mktemp()).absolute()
        recordings = Path(self.mktemp()).absolute()
        screen = _Screen(deployment, recordings)
        total = sum(len(write.rows) for write in read_script(recording, _ROWS))
        tallies = run_demo(deployment, screen, total, with_faults=False)
        self.assertTrue(all(tally.is_good for tally in tallies))
        assert screen.recorder is not None
        screen.recorder.send_signal(signal.SIGTERM)
        self.assertEqual(screen.recorder.wait(30), 0)

        config = [
            str(deployment.directory / name)
            for name in ("homeserver.yaml", f"{MAIN_INSTANCE}.yaml")
        ]
        run_archive(
            ArchiveSettings(
                str(folder),
                PipelineSettings.of_config(config),
                [str(recordings)],
                once=True,
            ),
            ArchiveProgress(io.StringIO()),
        )
        written: Counter[tuple[str, str, int]] = Counter()
        typed: Counter[tuple[str, str]] = Counter()
        for stream in STREAMS.values():
            for writer in set(stream.writers.values()):
                rows = deployment.written_rows(stream, writer)
                if stream.in_memory:
                    typed[stream.name, writer] += len(rows)
                else:
                    written.update((stream.name, writer, token) for token, _ in rows)
        tables = read_archive(session, folder)
        archived = tables.keys().select("stream", "instance_name", "stream_id")
        self.assertEqual(Counter(map(tuple, archived.collect())), written)
        self.assertEqual(written.total() + typed.total(), total)
        commands = tables.wire.where("command = 'RDATA'")
        recorded = Counter(
            (row["stream"], row["instance_name"])
            for row in commands.select("stream", "instance_name").collect()
        )
        for key, count in typed.items():
            self.assertEqual(recorded[key], count, key)
