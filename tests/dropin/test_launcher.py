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
        """
        Without a choice, everything is replaced.
        """
        self.assertEqual(choose((), ()), SUBSTITUTIONS)

    def test_only_and_except(self) -> None:
        """
        Parts can be named, or left out.
        """
        only = {known.part for known in choose(("redis", "ids"), ())}
        self.assertEqual(only, {"redis", "ids"})
        rest = {known.part for known in choose((), ("ids",))}
        self.assertEqual(rest, set(PARTS) - {"ids"})

    def test_mistakes(self) -> None:
        """
        A part that does not exist is named, with those that do; no part is refused.
        """
        error = self.assertRaises(SubstitutionError, choose, ("redes",), ())
        self.assertIn("redes", str(error))
        self.assertIn("redis", str(error))
        self.assertRaises(SubstitutionError, choose, ("ids",), ("ids",))


class VersionProblemTests(SynchronousTestCase):
    """Tests for version_problem."""

    def test_proven(self) -> None:
        """
        There is nothing to say of a version that was proven.
        """
        self.assertIs(version_problem(PROVEN_VERSIONS[0]), None)

    def test_other(self) -> None:
        """
        Another version is named, with those that were proven.
        """
        problem = version_problem("0.1") or ""
        self.assertIn("0.1", problem)
        self.assertIn(PROVEN_VERSIONS[-1], problem)
        self.assertIn("not installed", version_problem(None) or "")
