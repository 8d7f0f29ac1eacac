"""Tests for :mod:`synapse_replication.cli.record`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.trial.unittest import TestCase

from synapse_replication.cli.record import make_recorder
from synapse_replication.config.process import load_config
from synapse_replication.recordings.writer import RecordingFiles, RecordingWriteError
from synapse_replication.testing.servers import shared_redis
from synapse_replication.transport.reactor import as_reactor
from tests.support.config_files import FilesMixin


class MakeRecorderTests(FilesMixin):
    """Tests for the recorder with direct TCP."""

    def setUp(self) -> None:
        super().setUp()
        config = load_config(
            [
                self.write(
                    "hs.yaml",
                    "server_name: x.test\nworker_replication_port: 9092\n",
                )
            ],
            "follow",
        )
        self.recordings = Path(self.mktemp())
        self.reactor = MemoryReactorClock()
        self.files = RecordingFiles(
            self.recordings,
            roll_bytes=10_000,
            roll_seconds=60,
            compressed=False,
            now=self.reactor.seconds,
            wall=self.reactor.seconds,
        )
        self.recorder = make_recorder(config, as_reactor(self.reactor), self.files)
        self.recorder.startService()
        self.protocol = self.reactor.tcpClients[0][2].buildProtocol(None)
        assert self.protocol is not None
        self.transport = StringTransport()
        self.protocol.makeConnection(self.transport)

    def closed(self) -> list[list[str]]:
        return [
            [json.loads(line)["line"] for line in path.read_text().splitlines()]
            for path in sorted(self.recordings.glob("*.jsonl"))
        ]

    def test_file_of_a_connection(self) -> None:
        """A file is closed when its connection is lost, and when the recorder stops."""
        from twisted.internet.error import ConnectionLost
        from twisted.python.failure import Failure

        assert self.protocol is not None
        self.protocol.dataReceived(b"SERVER x.test\nPOSITION events w 1 2\n")
        self.assertEqual(self.closed(), [])
        self.protocol.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(self.closed(), [["SERVER x.test", "POSITION events w 1 2"]])
        self.files.write("x", b"PING 1")
        self.recorder.stopService()
        self.assertEqual(self.closed()[1:], [["PING 1"]])
        self.assertNotIn(b"REPLICATE", self.transport.value())

    def test_full_disk_ends_it(self) -> None:
        """If the disk is full, the recorder fails once, with the reason."""
        assert self.protocol is not None
        self.protocol.dataReceived(b"SERVER x.test\n")
        current = self.files._current
        assert current is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, current.raw.fileno())
        os.close(full)
        self.reactor.advance(1)
        error = self.failureResultOf(self.recorder.started, RecordingWriteError)
        self.assertIn("No space left on device", str(error.value))
        self.protocol.dataReceived(b"PING 1\n")
        self.reactor.advance(1)
        self.recorder.stopService()
        current.raw.raw.close()  # type: ignore[attr-defined]


class RecordCommandTests(FilesMixin, TestCase):
    """Tests for the command with a real Redis."""

    def test_until_sigterm(self) -> None:
        """
        The command records published messages, publishes nothing, and closes its file
        on SIGTERM.
        """
        redis = shared_redis()
        config = self.write(
            "hs.yaml",
            "server_name: record.test\n"
            f"redis: {{enabled: true, host: {redis.host}, port: {redis.port}}}\n",
        )
        folder = Path(self.mktemp())
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "synapse_replication", "record", "-c", config),
                *("--out", str(folder), "--roll-mib", "0.0001"),
            ],
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.stderr.close)  # type: ignore[union-attr]
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        until = time.monotonic() + 20
        while "record.test" not in str(redis.command("PUBSUB", "CHANNELS", "record.*")):
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        for number in range(1, 6):
            redis.command("PUBLISH", "record.test", f"POSITION events w 0 {number}")
            redis.command(
                "PUBLISH",
                "record.test/USER_IP",
                'USER_IP @u:s ["syt_secret","1.2.3.4","agent","DEV",17]',
            )
        # Each line has a file of its own.
        while len(list(folder.glob("2*"))) < 5:
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(20), 0)
        paths = sorted(folder.glob("2*"))
        self.assertTrue(all(path.name.endswith(".jsonl") for path in paths), paths)
        content = "".join(path.read_text() for path in paths)
        self.assertEqual(
            [json.loads(line)["line"] for line in content.splitlines()],
            [f"POSITION events w 0 {number}" for number in range(1, 6)],
        )
        self.assertNotIn("1.2.3.4", content)
