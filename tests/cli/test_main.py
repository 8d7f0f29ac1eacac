"""Tests for :mod:`synapse_replication.cli.main`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from synapse_replication import __version__
from synapse_replication.cli.main import cli
from tests.config.process_case import HOMESERVER, WORKER
from tests.support.config_files import FilesMixin

ROOT = Path(__file__).parents[2]


class CheckConfigTests(FilesMixin):
    def run_cli(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, list(arguments))

    def check(self, *texts: str) -> Result:
        arguments = ["check-config"]
        for index, text in enumerate(texts):
            arguments += ["-c", self.write(f"{index}.yaml", text)]
        return self.run_cli(*arguments)

    def test_good(self) -> None:
        """The output for a valid configuration is a summary, without secrets."""
        result = self.check(HOMESERVER, WORKER)
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertIn(
            "x.test, worker writer1: the configuration is valid.", result.output
        )
        self.assertIn("link:     Redis at redis.test:6379", result.output)
        self.assertIn("writes:   typing, caches\n", result.output)
        self.assertIn(
            "listens:  HTTP on 0.0.0.0:9096 health, replication", result.output
        )
        for secret in ("hunter2", "hush", "knock"):
            self.assertNotIn(secret, result.output)

    def test_good_direct_tcp(self) -> None:
        """The summary of a worker contains its direct TCP endpoints."""
        result = self.check(
            HOMESERVER,
            WORKER,
            "redis:\nsynapse_replication: {direct_tcp: {connect: 'tcp:h:1'}}\n",
        )
        self.assertIn("link:     direct TCP to tcp:h:1", result.output)

    def test_all_problems(self) -> None:
        """All problems are printed together, with location, key, problem and hint."""
        result = self.check(
            HOMESERVER, "redis:\n  port: x\nstream_writers: {recepits: writer1}\n"
        )
        self.assertEqual(result.exit_code, 2)
        file = f"{self.folder}/1.yaml"
        self.assertEqual(
            result.output,
            f"""\
2 problems in the configuration:

  {file}:2: redis.port
    expected `int`, got `str`
    -> write a port number from 1 to 65535

  {file}:3: stream_writers.recepits
    there is no such stream
    -> did you mean 'receipts'?
""",
        )

    def test_unresolvable_references(self) -> None:
        """A module that cannot be imported and an invalid endpoint are reported."""
        path = self.write(
            "h.yaml",
            "server_name: x\nredis: {enabled: false}\nsynapse_replication:\n"
            "  streams: [typing]\n  row_sink: {module: no.such.thing}\n"
            "  direct_tcp: {connect: ['tpc:1'], listen: ['tpc:2']}\n",
        )
        result = self.run_cli("check-config", "-c", path)
        self.assertEqual(result.exit_code, 2, result.output)
        self.assertIn("3 problems", result.output)
        for key in ("row_sink.module", "direct_tcp.connect", "direct_tcp.listen"):
            self.assertIn(f"synapse_replication.{key}\n", result.output)

    def test_invalid_configuration_prevents_start(self) -> None:
        """No command starts if the configuration is invalid."""
        path = self.write("h.yaml", "redis: 7\n")
        for command in ("main", "worker", "follow"):
            result = self.run_cli(command, "-c", path)
            self.assertEqual(result.exit_code, 2, command)
            self.assertIn("server_name\n    is missing", result.output)

    def test_no_configuration(self) -> None:
        """Without a configuration, the error names the missing option."""
        result = self.run_cli("main")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("-c", result.output)

    def test_following_no_such_command(self) -> None:
        """An unknown command name in a filter is an error."""
        path = self.write("h.yaml", "server_name: x\nredis: {enabled: true}\n")
        result = self.run_cli("follow", "-c", path, "--command", "RDATE")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("'RDATE' is not one of", result.output)

    def test_version(self) -> None:
        """``--version`` prints the version."""
        self.assertIn(__version__, self.run_cli("--version").output)

    def test_listed_commands_can_be_imported(self) -> None:
        """Each listed command can be imported and has a help text."""
        result = self.run_cli("--help")
        self.assertEqual(result.exit_code, 0, result.output)
        for name in ("check-config", "follow", "main", "positions", "replay", "worker"):
            self.assertIn(f"  {name} ", result.output)
            self.assertEqual(self.run_cli(name, "--help").exit_code, 0, name)

    def test_without_database_driver(self) -> None:
        """
        Without psycopg2, ``--help`` works, and a command that needs it says what to do.
        """
        code = (
            "import sys; sys.modules['psycopg2'] = None\n"
            "from synapse_replication.cli.main import main; main()"
        )

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", code, *arguments],
                capture_output=True,
                text=True,
                check=False,
            )

        listed = run("--help")
        self.assertEqual(listed.returncode, 0, listed.stderr)
        self.assertIn("Not available: psycopg2 is not installed.", listed.stdout)
        refused = run("init-db", "-c", "homeserver.yaml")
        self.assertEqual(refused.returncode, 2)
        self.assertIn(
            "pip install 'synapse_replication[postgres-binary]'", refused.stderr
        )


class FollowCommandTests(FilesMixin):
    def test_unknown_stream(self) -> None:
        """An unknown stream is an error, which suggests the most similar stream."""
        path = self.write("hs.yaml", HOMESERVER)
        arguments = ["follow", "-c", path, "--stream", "recepits"]
        result = CliRunner().invoke(cli, arguments)
        self.assertEqual(result.exit_code, 2, result.output)
        self.assertIn("there is no stream 'recepits'", result.output)
        self.assertIn("did you mean 'receipts'?", result.output)

    def test_help_lists_commands(self) -> None:
        """The help lists the command names that --command accepts."""
        result = CliRunner().invoke(cli, ["follow", "--help"])
        for name in ("RDATA", "POSITION", "USER_SYNC"):
            self.assertIn(name.lower(), result.output.lower())


class LogJsonTests(FilesMixin):
    def test_log_lines(self) -> None:
        """With ``--log-json``, every log line is JSON."""
        path = self.write(
            "h.yaml",
            "server_name: x.test\nredis: {enabled: false}\n"
            "synapse_replication: {streams: [typing]}\n",
        )
        arguments = [sys.executable, "-m", "synapse_replication", "main"]
        process = subprocess.Popen(
            [*arguments, "--log-json", "-c", path],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.addCleanup(process.kill)
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(json.loads(line))
            if seen[-1]["message"] == "master of x.test is up":
                process.terminate()
        self.assertEqual(process.wait(), 0)
        process.stderr.close()
        (up,) = [event for event in seen if "server_name" in event]
        self.assertEqual((up["instance_name"], up["level"]), ("master", "info"))
