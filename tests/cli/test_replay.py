"""Tests for :mod:`synapse_replication.cli.replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.replay import describe, replay_command
from tests.support.recordings import make_report


class ReplayCommandTests(SynchronousTestCase):
    """Tests for ``synapse-replication replay``."""

    def run_on(self, *lines: str, as_json: bool) -> tuple[int, str]:
        path = Path(self.mktemp())
        path.write_text("".join(json.dumps({"line": line}) + "\n" for line in lines))
        result = CliRunner().invoke(
            replay_command, [str(path), *(["--json"] if as_json else [])]
        )
        return result.exit_code, result.output

    def test_json(self) -> None:
        """With ``--json``, one JSON object is printed."""
        status, output = self.run_on("POSITION typing w 1 1", as_json=True)

        value: dict[str, Any] = json.loads(output)
        self.assertEqual(status, 0)
        self.assertEqual(value["last_position"], {"typing w": 1})

    def test_text(self) -> None:
        """
        Without ``--json``, text is printed; an invalid line makes the exit status 1.
        """
        status, output = self.run_on("POSITION typing w", as_json=False)

        self.assertEqual(status, 1)
        self.assertIn("line 1: cannot parse POSITION line", output)

    def test_many_names(self) -> None:
        """Names from a recording are summarised, and printed without control."""
        lines = [f"RDATA s{number} w {number} []" for number in range(3000)]
        lines += ["RDATA a\u202eb w 1 []"] * 5 + ["x\x1b[2J 1"] * 5
        status, output = self.run_on(*lines, as_json=False)
        self.assertEqual(status, 1)
        self.assertLess(len(output.splitlines()), 200)
        self.assertRegex(output, r"\n  and \d+ more\n")
        self.assertFalse(any(char in output for char in "\x1b\u202e"), output)
        _, text = self.run_on(*lines, as_json=True)
        value = json.loads(text)
        self.assertEqual(sum(map(len, value["discarded"].values())), 1001)
        self.assertEqual(sum(value["rdata_rows"].values()), 3000)
        self.assertLess(len(text), 200_000)

    def test_no_such_file(self) -> None:
        """A missing file is a usage error."""
        result = CliRunner().invoke(replay_command, [self.mktemp()])

        self.assertEqual(result.exit_code, 2)
        self.assertIn("does not exist", result.output)


class DescribeTests(SynchronousTestCase):
    """Tests for describe."""

    def test_for_people(self) -> None:
        """The text contains everything, and marks unexplained discards."""
        text = "\n".join(describe(make_report()))

        self.assertIn("7 lines", text)
        self.assertRegex(text, r"undecodable typing +2  NOT EXPLAINED")
        self.assertRegex(text, r"old_token events +1  sent again")
        self.assertRegex(text, r"typing w +3")
        self.assertIn("line 4: cannot parse", text)
        self.assertIn("Failures: none", text)
