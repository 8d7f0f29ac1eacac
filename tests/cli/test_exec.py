"""Tests for ``synapse-replication exec`` that do not need Synapse."""

from __future__ import annotations

import importlib.metadata

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.common import EXIT_USAGE
from synapse_replication.cli.exec import exec_command, interpreter_options
from synapse_replication.dropin.substitution import DISTRIBUTION, TESTED_VERSIONS


class ExecTests(SynchronousTestCase):
    """Tests for the command."""

    def test_list(self) -> None:
        """
        ``--list`` prints the substitutions and the versions for which they are
        verified.
        """
        result = CliRunner().invoke(exec_command, ["--list", "--only", "redis"])
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertIn("synapse.replication.tcp.redis.lazyConnection", result.output)
        self.assertNotIn("MultiWriterIdGenerator", result.output)
        for version in TESTED_VERSIONS:
            self.assertIn(version, result.output)

    def test_nothing_to_run(self) -> None:
        """Without a module, the error says how to specify one."""
        result = CliRunner().invoke(exec_command, [])
        self.assertEqual(result.exit_code, 2)
        self.assertIn("-m MODULE", result.output)

    def test_unknown_part(self) -> None:
        """An unknown part is an error, and nothing is started."""
        result = CliRunner().invoke(exec_command, ["--only", "x", "-m", "this"])
        self.assertEqual(result.exit_code, EXIT_USAGE)
        self.assertIn("nothing was started", result.output)

    def test_bounds_of_the_backlog(self) -> None:
        """The bounds of the backlog must not be negative."""
        for option in ("--backlog-rows", "--backlog-bytes"):
            result = CliRunner().invoke(exec_command, [option, "-1", "-m", "this"])
            self.assertEqual(result.exit_code, 2)
            self.assertIn(f"'{option}': -1 is not in the range", result.output)

    def test_plausible_distance(self) -> None:
        """The plausible distance must be at least 1,000."""
        result = CliRunner().invoke(
            exec_command, ["--plausible-distance", "10", "-m", "this"]
        )
        self.assertEqual(result.exit_code, 2)
        self.assertIn("10 is not in the range 1000<=x<=", result.output)

    def test_no_host(self) -> None:
        """If Synapse is not installed, the error says so."""
        try:
            importlib.metadata.version(DISTRIBUTION)
        except importlib.metadata.PackageNotFoundError:
            result = CliRunner().invoke(exec_command, ["-m", "this"])
            self.assertEqual(result.exit_code, EXIT_USAGE)
            self.assertIn("matrix-synapse is not installed", result.output)


class InterpreterOptionsTests(SynchronousTestCase):
    """Tests for interpreter_options."""

    def check(self, command_line: str, options: str) -> None:
        words = [*command_line.split(), "exec", "-m", "x"]
        self.assertEqual(interpreter_options(words, 3), options.split())

    def test_module(self) -> None:
        """The options of Python precede ``-m`` and the module's name."""
        self.check("python -m synapse_replication", "")
        self.check("python -X dev -m synapse_replication", "-X dev")
        self.check("python -Wd -Im synapse_replication", "-Wd -I")
        self.check("python -O -msynapse_replication", "-O")

    def test_script(self) -> None:
        """The options of Python precede the path of a script."""
        self.check("python /usr/bin/synapse-replication", "")
        self.check("python -I /usr/bin/synapse-replication", "-I")
