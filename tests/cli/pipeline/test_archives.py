"""Tests for the command ``pipeline archive``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.archives import archive_command
from tests.pipeline.shared_session import shared_session


class CommandTests(SynchronousTestCase):
    """Tests for the command line."""

    def test_nothing_to_archive(self) -> None:
        """
        Without a database and a recording, the error says that there is nothing to
        archive.
        """
        result = CliRunner().invoke(
            archive_command, ["--archive", self.mktemp()], env={}
        )
        self.assertEqual(result.exit_code, 2)
        self.assertIn("nothing to archive", result.output)

    def test_recording(self) -> None:
        """The result is printed as one line, or as JSON."""
        shared_session()
        recording = Path(self.mktemp()).with_suffix(".jsonl").absolute()
        recording.parent.mkdir(parents=True, exist_ok=True)
        recording.write_text('{"t": 1, "channel": "x", "line": "PING 1"}\n')
        folder = self.mktemp()
        arguments = ["--archive", folder, "--recording", str(recording), "--once"]
        result = CliRunner().invoke(archive_command, [*arguments, "--json"])
        self.assertEqual(result.exit_code, 0, result.output)
        numbers = json.loads(result.stdout)
        self.assertEqual((numbers["commands"], numbers["recordings"]), (1, 1))
        self.assertEqual((numbers["rows"], numbers["compacted_files"]), (0, 0))
        result = CliRunner().invoke(archive_command, [*arguments, "--metrics-port=0"])
        self.assertIn("0 commands of 0 recordings", result.stdout)
