"""Tests for :mod:`synapse_replication.dropin.launcher`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.launcher import (
    choose,
    version_problem,
)
from synapse_replication.dropin.substitution import SubstitutionError
from synapse_replication.dropin.table import PARTS, PROVEN_VERSIONS, SUBSTITUTIONS


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
        self.assertIs(version_problem(PROVEN_VERSIONS[0]), None)

    def test_other(self) -> None:
        """The problem of another version names this version and the tested ones."""
        problem = version_problem("0.1") or ""
        self.assertIn("0.1", problem)
        self.assertIn(PROVEN_VERSIONS[-1], problem)
        self.assertIn("not installed", version_problem(None) or "")
