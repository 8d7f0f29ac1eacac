"""Tests for the table of substitutions."""

from __future__ import annotations

import inspect
from typing import Any

from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource

from synapse_replication.dropin.protocol import (
    DropInClientProtocol,
    DropInServerProtocol,
)
from synapse_replication.dropin.replaced_names import PARTS, SUBSTITUTIONS
from synapse_replication.dropin.substitution import Substitution, shape
from synapse_replication.dropin.tcp_ends import make_client_end, make_server_end
from tests.dropin.host import HostNotifier


class Extended(Resource):
    """A double of a class of the host that a replacement extends."""

    def __init__(self, hs: object) -> None: ...


#: The classes of the objects that some replacements, which are functions, return.
RETURNED = {
    make_client_end: DropInClientProtocol,
    make_server_end: DropInServerProtocol,
}


def _load(known: Substitution) -> Any:
    original = HostNotifier if known.part == "notifier" else Extended
    return known.load_replacement(original)


class TableTests(SynchronousTestCase):
    """Tests that the replacements have the signatures of the host's classes."""

    def test_calls(self) -> None:
        """The replacements have the same signatures as in the newest host."""
        for known in SUBSTITUTIONS:
            if known.shapes:
                with self.subTest(str(known)):
                    found = shape(_load(known))
                    self.assertEqual(found, known.shapes[0])

    def test_methods(self) -> None:
        """
        The replacements have every method that the host calls, with as many parameters.
        """
        for known in SUBSTITUTIONS:
            replacement = _load(known)
            replacement = RETURNED.get(replacement, replacement)
            for name, expected in known.methods.items():
                with self.subTest(f"{known}.{name}"):
                    method = inspect.getattr_static(replacement, name)
                    found = shape(method, is_method=True)
                    self.assertEqual(found.count(","), expected.count(","))
                    self.assertEqual(found == "()", expected == "()")

    def test_parts(self) -> None:
        """Every part has substitutions, and every substitution belongs to a part."""
        self.assertEqual({known.part for known in SUBSTITUTIONS}, set(PARTS))

    def test_nothing_twice(self) -> None:
        """
        No name is replaced twice.
        """
        names = [str(known) for known in SUBSTITUTIONS]
        self.assertEqual(sorted(set(names)), sorted(names))
