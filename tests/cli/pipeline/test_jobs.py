"""Tests for running several jobs through the command line, one after the other."""

from __future__ import annotations

import html
import os
import re
import threading
from pathlib import Path

from click.testing import CliRunner, Result
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline import pipeline_command
from tests.pipeline.audits import (
    artificial_database,
    healthy_lines,
    write_recording,
)
from tests.pipeline.shared_session import shared_session
from tests.support.object_store import use_server

#: Secrets, which no job may show.
PASSWORD = "hush-password"
ACCESS_KEY = "hush-access-key"
SECRET_KEY = "hush-secret-key"


class JobsTests(SynchronousTestCase):
    """Tests that archive, audit and report one small deployment."""

    def setUp(self) -> None:
        # The commands use the session that is running.
        shared_session()
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.recording = self.folder / "wire.jsonl"
        # The last line causes a warning, whose count is the number of times that the
        # recording is read.
        self.lines = [*healthy_lines(), "RDATA push_rules master 3 []"]
        write_recording(self.recording, self.lines)
        self.dsn = f"{artificial_database()} password={PASSWORD}"

    def run_job(self, *arguments: str | Path, dsn: str | None = None) -> Result:
        """Run a job, with the database in the environment, as documented."""
        return CliRunner().invoke(
            pipeline_command,
            list(map(str, arguments)),
            env={"SYNAPSE_REPLICATION_DSN": self.dsn if dsn is None else dsn},
        )

    def page(self, name: str, *arguments: str | Path) -> str:
        """Run ``report``, and return the text of the page without markup."""
        out = self.folder / name
        result = self.run_job("report", "--out", out, *arguments)
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertEqual(result.stdout, f"written: {out}/report.html\n")
        self.assertTrue(list(out.glob("*.png")))
        page = (out / "report.html").read_text()
        return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())

    def test_recording_in_the_archive_and_given(self) -> None:
        """
        A recording that is archived and also passed as an option is counted once, in a
        report and in its audit, which is that of the command ``audit``.
        """
        archive = self.folder / "archive"
        archived = self.run_job(
            *("archive", "--archive", archive, "--once", "--stream", "push_rules"),
            *("--recording", self.recording),
        )
        self.assertEqual(archived.exit_code, 0, archived.output)
        given = ("--archive", archive, "--recording", self.recording)

        report = self.page("report", *given)

        rdata = sum(line.startswith("RDATA") for line in self.lines)
        self.assertIn(f" RDATA {rdata} ", report)
        self.assertIn(f" POSITION {len(self.lines) - rdata} ", report)
        self.assertIn("The audit found 1 warning", report)
        self.assertIn("row twice on wire push_rules master 3 1 ", report)

    def test_secrets(self) -> None:
        """Passwords and keys are not in any output, file, error or command line."""
        url = use_server(self, ACCESS_KEY, SECRET_KEY)
        archive = "s3://bucket/archive"
        seen = _CommandLines()
        with seen:
            results = [
                self.run_job(
                    *("archive", "--archive", archive, "--once", "--json"),
                    *("--stream", "receipts", "--recording", self.recording),
                ),
                self.run_job("audit", "--archive", archive),
                self.run_job(
                    *("report", "--archive", archive, "--out", self.folder / "report"),
                    "--no-audit",
                ),
                self.run_job(
                    *("export", "--archive", archive, "--out", self.folder / "export")
                ),
                self.run_job("purge", "--archive", archive, "--before", "2026-01-01"),
            ]
        self.assertEqual([result.exit_code for result in results], [0] * 5, results)
        failed = [
            self.run_job("audit", "--archive", archive, dsn=f"{self.dsn} port=1"),
            self.run_job(
                *("report", "--archive", "s3://missing/a", "--out", self.folder / "b")
            ),
        ]
        self.patch(os, "environ", {**os.environ, "AWS_ENDPOINT_URL": f"{url}0"})
        failed.append(self.run_job("audit", "--archive", archive))
        self.assertNotIn(0, [result.exit_code for result in failed])

        shown = [
            *(
                f"{result.output} {result.exception!r} {result.exception}"
                for result in (*results, *failed)
            ),
            *seen.found,
        ]
        self.assertTrue(any("java" in line for line in seen.found))
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        self.assertIn("report.html", [path.name for path in files])
        for secret in (PASSWORD, ACCESS_KEY, SECRET_KEY):
            self.assertEqual([text for text in shown if secret in text], [])
            self.assertEqual(
                [path for path in files if secret.encode() in path.read_bytes()], []
            )


class _CommandLines:
    """Collects the command lines of all processes while its context is active.

    :ivar found: the command lines, as ``ps`` shows them.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _CommandLines:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.found.add(path.read_bytes().replace(b"\0", b" ").decode())
                except (OSError, UnicodeDecodeError):
                    # The process has ended, or belongs to another user.
                    continue
