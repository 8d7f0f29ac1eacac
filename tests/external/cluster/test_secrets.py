"""Tests that no password is in plans, logs, pages, event logs or checkpoints."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.testing.servers import PrivatePostgres
from tests.external import skip_reason
from tests.support.big_database import fill_database

skip = skip_reason("cluster")

# Runs as a process, since Java logs to the streams of the process that starts it.
_SCRIPT = """
import sys, urllib.request
from synapse_replication.pipeline.source.source import read_rows
from synapse_replication.pipeline.archive.snapshot import read_archive
from synapse_replication.pipeline.archive.job import ArchiveProgress
from synapse_replication.pipeline.archive.job import ArchiveSettings, run_archive
from synapse_replication.pipeline.spark.session import make_session
from synapse_replication.pipeline.schemas import RowForm
from synapse_replication.pipeline.settings import PipelineSettings

dsn, folder = sys.argv[1:]
session = make_session("secrets", master="local[2]", settings={
    "spark.ui.enabled": "true", "spark.ui.port": "0",
    "spark.eventLog.enabled": "true", "spark.eventLog.dir": folder + "/events",
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions":
        f"-Xss8m -Dlog4j2.configurationFile={folder}/log4j2.properties",
})
context = session.sparkContext
context.setLogLevel("DEBUG")
read = session.read.format("synapse_replication").option("dsn", dsn).load()
read.explain(True)
print("rows", read.count())
settings = PipelineSettings.of_dsn(dsn)
typed = read_rows(session, settings, RowForm.TYPED, streams="receipts")
typed.explain(True)
print("typed", typed.count())
archived = run_archive(
    ArchiveSettings(folder + "/archive", settings, once=True),
    ArchiveProgress(sys.stderr),
)
print("archived", archived)
read_archive(session, folder + "/archive").rows().explain(True)
query = (
    session.readStream.format("synapse_replication").option("dsn", dsn).load()
    .writeStream.option("checkpointLocation", folder + "/checkpoint")
    .trigger(availableNow=True).format("noop").start()
)
query.awaitTermination()
query.explain(True)
print(query.lastProgress)
try:
    wrong = session.read.format("synapse_replication").option("dsn", dsn + "x").load()
    wrong.count()
except Exception as error:
    print(error)
api = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"
for url in (
    f"{context.uiWebUrl}/environment/", f"{context.uiWebUrl}/SQL/",
    f"{api}/sql?details=true", f"{api}/environment", f"{api}/jobs",
):
    with urllib.request.urlopen(url) as answer:
        print(url, answer.read().decode())
session.stop()
"""


class SecretsTests(SynchronousTestCase):
    """Tests for what other users may see of a run."""

    def test_password(self) -> None:
        """A password is in nothing that Spark prints, shows or stores."""
        postgres = PrivatePostgres(tcp=True)
        postgres.start()
        self.addCleanup(postgres.stop)
        postgres.new_database("big")
        dsn = postgres.dsn("big", tcp=True)
        fill_database(dsn, 2000)
        folder = Path(self.mktemp()).absolute()
        (folder / "events").mkdir(parents=True)
        # Our own configuration omits everything but the first line of a message.
        ours = files("synapse_replication.pipeline.spark") / "log4j2.properties"
        whole, changed = re.subn(
            "(?m)(layout.pattern =).*", r"\1 %p %c: %m%n%ex", ours.read_text()
        )
        self.assertEqual(changed, 1)
        (folder / "log4j2.properties").write_text(whole)
        script = folder / "script.py"
        script.write_text(_SCRIPT)
        output = folder / "output"
        with output.open("wb") as file:
            done = subprocess.run(
                [sys.executable, str(script), dsn, str(folder)],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=600,
                check=False,
            )
        printed = output.read_text(errors="replace")
        self.assertEqual(done.returncode, 0, printed[-3000:])
        self.assertIn("/environment", printed)
        self.assertIn("rows ", printed)
        kept = [path for path in folder.rglob("*") if path.is_file()]
        self.assertTrue(any("events" in path.parts for path in kept))
        shown = [
            str(path)
            for path in kept
            if postgres.password.encode() in path.read_bytes()
        ]
        self.assertEqual(shown, [])
