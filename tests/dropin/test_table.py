"""Tests for the table of what is replaced."""

from __future__ import annotations

import inspect

from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource

from synapse_replication.dropin.substitution import shape
from synapse_replication.dropin.table import PARTS, SUBSTITUTIONS


class Extended(Resource):
    """Stands for a class of the host that ours extends."""

    def __init__(self, hs: object) -> None: ...


class TableTests(SynchronousTestCase):
    """Ours must be called as the host's are: these guard that."""

    def test_calls(self) -> None:
        """
        Ours are called as the newest host's are.
        """
        for known in SUBSTITUTIONS:
            if known.shapes:
                with self.subTest(str(known)):
                    found = shape(known.load_replacement(Extended))
                    self.assertEqual(found, known.shapes[0])

    def test_methods(self) -> None:
        """
        Ours have every method that the host calls, with as many parameters.
        """
        for known in SUBSTITUTIONS:
            replacement = known.load_replacement(Extended)
            for name, expected in known.methods.items():
                with self.subTest(f"{known}.{name}"):
                    method = inspect.getattr_static(replacement, name)
                    found = shape(method, is_method=True)
                    self.assertEqual(found.count(","), expected.count(","))
                    self.assertEqual(found == "()", expected == "()")

    def test_parts(self) -> None:
        """
        Every part has something in it, and nothing is in no part.
        """
        self.assertEqual({known.part for known in SUBSTITUTIONS}, set(PARTS))

    def test_nothing_twice(self) -> None:
        """
        No name is replaced twice.
        """
        names = [str(known) for known in SUBSTITUTIONS]
        self.assertEqual(sorted(set(names)), sorted(names))
