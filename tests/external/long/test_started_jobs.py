"""Tests of jobs that start Java: the archive of its classes, and many rows."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from tests.external import skip_reason
from tests.pipeline.started_jobs import StartedJobCase

skip = skip_reason("long")


class ClassArchiveTests(StartedJobCase):
    """Tests with a real Java, which writes and uses an archive."""

    makes_archive = True

    def test_class_archive(self) -> None:
        """
        At the end of the first job, an archive of classes is made, which the second one
        uses. Both are killed, and nothing leaves a file.
        """
        folder = Path(self.mktemp()).absolute()
        (folder / "tmp").mkdir(parents=True)
        environ = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": f"{folder}/tmp"}
        self.patch(os, "environ", {**os.environ, **environ})
        first = self.run_job("")
        # Queries of few rows are planned once, and have no shuffle.
        self.assertEqual(first["sql.shuffle.partitions"], "1")
        self.assertEqual(first["few"], "1")
        self.assertEqual(first["sql.adaptive.enabled"], "false")
        (attempts,) = (folder / "cache" / "synapse-replication").glob("*.attempts")
        with attempts.open() as lock:
            # The maker holds the lock until its end.
            fcntl.flock(lock, fcntl.LOCK_SH)
        (archive,) = (folder / "cache" / "synapse-replication").iterdir()
        second = self.run_job("")
        self.assertEqual(first["status"], -signal.SIGKILL)
        self.assertEqual(second["status"], -signal.SIGKILL)
        self.assertNotIn("-XX:SharedArchiveFile=", str(first["options"]))
        self.assertIn(f"-XX:SharedArchiveFile={archive}", str(second["options"]))
        self.assertEqual(list((folder / "tmp").iterdir()), [])


class ManyRowsTests(StartedJobCase):
    """Tests with a job that announces many rows."""

    def test_many_rows(self) -> None:
        """The rows are divided into tasks that sort them in memory."""
        found = self.run_job("", 14_000_000)
        self.assertEqual(found["sql.shuffle.partitions"], "56")
        self.assertEqual(found["few"], "1")
        self.assertEqual(found["sql.adaptive.enabled"], "true")
