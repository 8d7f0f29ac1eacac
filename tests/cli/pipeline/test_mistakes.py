"""Typical mistakes of users: each ends with one line and its exit status.

Other modules test mistakes that need Spark or another machine: a missing, an old and a
wrong Java in ``tests.pipeline.spark.test_java``; the memory of Java there, too;
credentials, rights, regions and a full disk in ``test_object_store``; types of columns
in ``test_delta_table``; Ctrl-C in ``test_job``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import attrs
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.main import main
from synapse_replication.cli.pipeline import pipeline_command
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.shared_session import shared_session
from tests.support.archive_database import add_rows, make_tables
from tests.support.object_store import use_server

#: Text that no mistake may print.
_NOISE = re.compile(r"Traceback|\b(?:WARN|ERROR|INFO)\b|\bat org\.apache|\x1b|hush")


@attrs.frozen
class Mistake:
    """A command line, and what it prints.

    :ivar line: the arguments after ``pipeline``; ``{name}`` stands for a place of the
        test.
    :ivar parts: texts of the message: the input, the cause, and the remedy.
    :ivar environ: variables of the environment.
    """

    line: str
    parts: tuple[str, ...]
    status: int = 1
    environ: Mapping[str, str] = attrs.Factory(dict)


_MISTAKES = {
    "a bucket that does not exist": Mistake(
        "archive --once --archive s3://absent/archive",
        ("s3://absent/archive", "bucket does not exist", "correct --archive"),
    ),
    "a store that does not answer": Mistake(
        "export --out {new} --archive s3://bucket/archive",
        ("s3://bucket/archive", "check AWS_ENDPOINT_URL"),
        environ={"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
    ),
    "a scheme that does not exist": Mistake(
        "export --out {new} --archive s4://bucket/archive",
        ("s4://bucket/archive", "give a folder or s3://BUCKET/PATH"),
    ),
    "a file in the place of the archive": Mistake(
        "archive --once --archive {file}", ("{file} is a file", "give a folder")
    ),
    "a folder that cannot be written": Mistake(
        "archive --once --archive /proc/archive",
        ("/proc/archive", "cannot be written", "choose another location"),
    ),
    "a folder that is no archive": Mistake(
        "audit --archive {folder}",
        ("{folder} is not an archive", "pipeline archive"),
        2,
    ),
    "a database that does not run": Mistake(
        "audit --dsn", ("port=1", "cannot be reached", "is it running"), 2
    ),
    "a database that does not exist": Mistake(
        "archive --once --archive {new} --dsn {dsn}x", ("does not exist",)
    ),
    "a database of another program": Mistake(
        "archive --once --archive {new} --dsn {empty}",
        ("has no table of any stream", "is it the homeserver's database?"),
    ),
    "a dsn that is none": Mistake(
        "audit --dsn hush", ("the dsn cannot be read", "write it as 'host="), 2
    ),
    "a configuration that does not exist": Mistake(
        "audit -c {new}.yaml", ("{new}.yaml", "No such file"), 2
    ),
    "a misspelt stream": Mistake(
        "archive --once --archive {new} --stream recepits",
        ("recepits", "is unknown", "receipts"),
    ),
    "a stream in memory": Mistake(
        "archive --once --archive {new} --stream typing",
        ("typing is held in memory", "synapse-replication record"),
    ),
    "a stream that is not archived": Mistake(
        "export --out {new} --archive {archive} --stream events",
        ("--stream events", "it has rows of caches, receipts"),
    ),
    "a recording that does not exist": Mistake(
        "audit --recording {new}", ("{new}", "does not exist"), 2
    ),
    "a folder that exists": Mistake(
        "export --out {folder} --archive {archive}",
        ("{folder} exists", "give the name of a new folder"),
    ),
    "a folder without its parent": Mistake(
        "report --archive {archive} --out {new}/report",
        ("{new} is not a folder", "create it first"),
    ),
    "a misspelt column": Mistake(
        "export --out {new} --archive {archive} --where strem=1",
        ("--where strem=1", "the columns are stream, "),
    ),
    "a date that is none": Mistake(
        "purge --archive {archive} --before yesterday", ("'yesterday'", "%Y-%m-%d"), 2
    ),
    "windows that are too short": Mistake(
        "report --archive {archive} --out {new} --no-audit --window 1",
        ("--window 1", "choose a longer window"),
    ),
    "findings that do not exist": Mistake(
        "report --archive {archive} --out {new} --findings {folder}",
        ("--findings {folder}", "'pipeline audit --out' writes"),
    ),
}


class MistakesTests(SynchronousTestCase):
    """Tests that run the command line."""

    def setUp(self) -> None:
        root = Path(self.mktemp()).absolute()
        (root / "folder").mkdir(parents=True)
        (root / "file").write_text("")
        servers = shared_postgres()
        dsn = servers.new_database()
        make_tables(dsn)
        add_rows(dsn, 30)
        self.places = {
            **{name: str(root / name) for name in ("new", "folder", "file", "archive")},
            "dsn": dsn,
            "empty": servers.new_database(),
        }
        use_server(self)
        os.environ["SYNAPSE_REPLICATION_DSN"] = dsn
        # The commands use the session that is running.
        shared_session()
        made = CliRunner().invoke(
            pipeline_command,
            self.words(Mistake("archive --once --archive {archive}", ())),
        )
        self.assertEqual(made.exit_code, 0, made.output)

    def words(self, mistake: Mistake) -> list[str]:
        """Return the arguments of a command line."""
        words = [
            # These have spaces.
            self.places[word[1:-1]] if word in ("{dsn}", "{empty}") else word
            for word in mistake.line.split()
        ]
        if mistake.line.endswith("--dsn"):
            words.append("host=127.0.0.1 port=1 dbname=synapse")
        return [word.format(**self.places) for word in words]

    def check(self, mistake: Mistake, status: object, output: str, errors: str) -> None:
        """Check the exit status, and what was printed."""
        last = errors.splitlines()[-1]
        for part in mistake.parts:
            self.assertIn(part.format(**self.places), last, mistake)
        self.assertEqual(status, mistake.status, mistake)
        self.assertNotRegex(output + errors, _NOISE, mistake)

    def test_each(self) -> None:
        """
        The last line names the input, the cause and the remedy; there is no traceback.
        """
        for mistake in _MISTAKES.values():
            words = ["synapse-replication", "pipeline", *self.words(mistake)]
            streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
            with (
                mock.patch.object(sys, "argv", words),
                mock.patch.dict(os.environ, mistake.environ),
                contextlib.redirect_stdout(streams[0]),
                contextlib.redirect_stderr(streams[1]),
            ):
                ended = self.assertRaises(SystemExit, main)
            output, errors = (stream.detach().getvalue().decode() for stream in streams)
            self.check(mistake, ended.code, output, errors)

    def test_process(self) -> None:
        """Java and native libraries print nothing, either."""
        mistake = _MISTAKES["a misspelt column"]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "synapse_replication", "pipeline"),
                *self.words(mistake),
            ],
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.check(mistake, done.returncode, done.stdout, done.stderr)
