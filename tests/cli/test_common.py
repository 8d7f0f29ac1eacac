"""Tests for :mod:`synapse_replication.cli.common`: what names cannot do."""

from __future__ import annotations

import contextlib
import io

from rich.console import Console
from rich.table import Table
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli import common
from synapse_replication.errors import ConfigError, ConfigProblem

#: A name that ends a C string, moves the cursor, and reverses the rest of a line.
HOSTILE = "a\0b\x1b[2J\u202ec"
ESCAPED = r"a\x00b\x1b[2J\u202ec"


class HostileNamesTests(SynchronousTestCase):
    def printed(self, act: object) -> str:
        """Return what a function writes to standard error before it exits."""
        assert callable(act)
        out = io.StringIO()
        with contextlib.redirect_stderr(out):
            self.assertRaises(SystemExit, act)
        return out.getvalue()

    def test_failure(self) -> None:
        """The message of a failure stays on its lines, which can be read."""
        found = self.printed(lambda: common.fail(f"no stream {HOSTILE}\nsee x"))
        self.assertEqual(found, f"no stream {ESCAPED}\nsee x\n")

    def test_problems(self) -> None:
        """Each part of a problem in the configuration is escaped."""
        problem = ConfigProblem(HOSTILE, f"k.{HOSTILE}", f"p {HOSTILE}", f"h {HOSTILE}")
        found = self.printed(lambda: common.exit_with_problems(ConfigError([problem])))
        self.assertEqual(found.count(ESCAPED), 4, found)
        self.assertNotIn("\0", found)
        self.assertNotIn("\u202e", found)

    def test_cell(self) -> None:
        """A name in a table is escaped, and is no markup."""
        table = Table("name", box=None)
        table.add_row(common.cell(f"{HOSTILE}[red]x[/]"))
        console = Console(file=io.StringIO(), width=80)
        console.print(table)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        self.assertIn(f"{ESCAPED}[red]x[/]", shown)
