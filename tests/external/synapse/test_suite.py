"""Tests that run a part of the homeserver's own tests on stock and on ours."""

from __future__ import annotations

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.synapse_suite.__main__ import suite
from tests.external import skip_reason

skip = skip_reason("synapse")


class SuiteTests(SynchronousTestCase):
    """The short part of ``tox -e synapse-suite``."""

    def test_short(self) -> None:
        """Each of these tests that passes on stock passes on ours."""
        result = CliRunner().invoke(suite, ["--short", "--jobs", "2"])
        self.assertEqual(result.exit_code, 0, result.output)
