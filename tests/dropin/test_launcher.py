"""Tests for :mod:`synapse_replication.dropin.launcher`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.launcher import (
    choose,
    interpreter_options,
    version_problem,
)
from synapse_replication.dropin.replaced_names import (
    PARTS,
    SUBSTITUTIONS,
    TESTED_VERSIONS,
)
from synapse_replication.dropin.substitution import SubstitutionError


class ChooseTests(SynchronousTestCase):
    """Tests for choose."""

    def test_all(self) -> None:
        """By default, all parts are replaced."""
        self.assertEqual(choose((), ()), SUBSTITUTIONS)

    def test_only_and_except(self) -> None:
        """Parts can be selected or excluded."""
        only = {known.part for known in choose(("redis", "ids"), ())}
        self.assertEqual(only, {"redis", "ids"})
        others = {known.part for known in choose((), ("ids",))}
        self.assertEqual(others, set(PARTS) - {"ids"})

    def test_unknown_or_no_part(self) -> None:
        """
        An unknown part is an error that lists the known ones; selecting no part is an
        error.
        """
        error = self.assertRaises(SubstitutionError, choose, ("redes",), ())
        self.assertIn("redes", str(error))
        self.assertIn("redis", str(error))
        self.assertRaises(SubstitutionError, choose, ("ids",), ("ids",))


class VersionProblemTests(SynchronousTestCase):
    """Tests for version_problem."""

    def test_tested(self) -> None:
        """A tested version has no problem."""
        self.assertIs(version_problem(TESTED_VERSIONS[0]), None)

    def test_other(self) -> None:
        """The problem of another version names this version and the tested ones."""
        problem = version_problem("0.1") or ""
        self.assertIn("0.1", problem)
        self.assertIn(TESTED_VERSIONS[-1], problem)
        self.assertIn("not installed", version_problem(None) or "")


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
