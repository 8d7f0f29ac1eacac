"""Tests for the names of the host that are replaced, and for their replacement."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource

from synapse_replication.dropin.substitution import (
    PARTS,
    SUBSTITUTIONS,
    TESTED_VERSIONS,
    Substitution,
    SubstitutionError,
    check,
    choose,
    shape,
    substitute,
    version_problem,
)
from synapse_replication.dropin.tcp_ends import (
    make_client_end,
    make_server_end,
    reusable,
)
from synapse_replication.tcp.protocol import (
    ClientReplicationStreamProtocol,
    ServerReplicationStreamProtocol,
)
from tests.dropin.host import HostNotifier


class Ours:
    """A double of a replacement."""


def extend(original: type) -> type:
    """Return a replacement that extends a class of the host."""
    return type("Extended", (original,), {})


class Theirs:
    """A double of a class of the host."""

    def __init__(self, hs: Any, *names: str, port: int = 0) -> None: ...

    def send(self, command: str) -> None: ...

    @classmethod
    def parse(cls, line: str) -> None: ...

    not_a_method = 7


_REPLACEMENT = f"{__name__}:Ours"
_SIGNATURES = ("(hs, *names, port=)",)


class ShapeTests(SynchronousTestCase):
    """Tests for shape."""

    def test_kinds(self) -> None:
        """The text distinguishes all kinds of parameters."""

        def function(a: int, b: int = 1, *, c: int, **d: int) -> None: ...

        self.assertEqual(shape(function), "(a, b=, *, c, **d)")
        self.assertEqual(shape(Theirs), "(hs, *names, port=)")

    def test_methods(self) -> None:
        """The object or class to which a method is bound is omitted."""
        self.assertEqual(shape(Theirs.send, is_method=True), "(command)")
        self.assertEqual(shape(vars(Theirs)["parse"]), "(line)")


class SubstituteTests(SynchronousTestCase):
    """Tests for check and substitute, on a host of two modules."""

    def setUp(self) -> None:
        self.defining = self._module("fakehost.defining", Theirs=Theirs)
        self.importing = self._module("fakehost.importing", Theirs=Theirs, other=1)
        self.foreign = self._module("elsewhere", Theirs=Theirs)

    def _module(self, name: str, **content: Any) -> ModuleType:
        module = sys.modules[name] = ModuleType(name)
        self.addCleanup(sys.modules.pop, name)
        vars(module).update(content)
        return module

    def _known(self, **changes: Any) -> Substitution:
        known: dict[str, Any] = {
            "part": "part",
            "module": "fakehost.defining",
            "name": "Theirs",
            "replacement": _REPLACEMENT,
            "shapes": _SIGNATURES,
            "methods": {"send": "(command)", "parse": "(line)"},
        }
        return Substitution(**known | changes)

    def test_everywhere(self) -> None:
        """
        A class is replaced in its module, and in the host's modules that imported it.
        """
        originals = substitute([self._known()])
        self.assertIs(self.defining.Theirs, Ours)
        self.assertIs(self.importing.Theirs, Ours)
        self.assertEqual(self.importing.other, 1)
        self.assertIs(self.foreign.Theirs, Theirs)
        self.assertEqual(originals, {"fakehost.defining.Theirs": Theirs})

    def test_extends(self) -> None:
        """
        A replacement may extend the host's class.
        """
        known = self._known(replacement=f"{__name__}:extend", extends=True)
        originals = substitute([known])
        self.assertEqual(self.defining.Theirs.__bases__, (Theirs,))
        self.assertIs(self.importing.Theirs, self.defining.Theirs)
        self.assertEqual(originals, {"fakehost.defining.Theirs": Theirs})

    def test_differences_are_named(self) -> None:
        """Anything that is missing or has another signature is named."""
        for changes, expected in (
            ({"module": "fakehost.gone"}, "fakehost.gone.Theirs cannot be replaced"),
            ({"name": "Gone"}, "fakehost.defining.Gone is missing"),
            ({"shapes": ("()",)}, "has the signature (hs, *names, port=), not ()"),
            ({"methods": {"gone": "()"}}, "Theirs.gone is missing"),
            (
                {"methods": {"send": "()"}},
                "Theirs.send has the signature (command), not ()",
            ),
            ({"methods": {"not_a_method": "()"}}, "not_a_method is not a method"),
        ):
            (problem,) = check([self._known(**changes)])
            self.assertIn(expected, problem)

    def test_all_or_nothing(self) -> None:
        """If one difference is found, nothing is replaced."""
        error = self.assertRaises(
            SubstitutionError, substitute, [self._known(), self._known(name="Gone")]
        )
        self.assertEqual(error.problems, ("fakehost.defining.Gone is missing",))
        self.assertIs(self.defining.Theirs, Theirs)
        self.assertIs(self.importing.Theirs, Theirs)

    def test_replacement_cannot_be_imported(self) -> None:
        """If one replacement cannot be imported, nothing is replaced."""
        broken = self._known(replacement="synapse_replication:gone")
        self.assertRaises(AttributeError, substitute, [self._known(), broken])
        self.assertIs(self.defining.Theirs, Theirs)


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


class Extended(Resource):
    """A double of a class of the host that a replacement extends."""

    def __init__(self, hs: object) -> None: ...


#: The classes of the objects that some replacements, which are functions, return.
RETURNED = {
    make_client_end: reusable(ClientReplicationStreamProtocol),
    make_server_end: reusable(ServerReplicationStreamProtocol),
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
        """Every substitution belongs to one of the parts that the manual describes."""
        self.assertEqual(
            PARTS,
            (
                "commands",
                "protocol",
                "handler",
                "notifier",
                "redis",
                "backlog",
                "external_cache",
                "ids",
            ),
        )

    def test_nothing_twice(self) -> None:
        """
        No name is replaced twice.
        """
        names = [str(known) for known in SUBSTITUTIONS]
        self.assertEqual(sorted(set(names)), sorted(names))
