"""Tests for comparing the host with replacements, and for replacing its names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.replaced_names import (
    MODULES,
    SUBSTITUTIONS,
    substitutions_of,
)
from synapse_replication.dropin.substitution import (
    PARTS,
    TESTED_VERSIONS,
    Difference,
    Substitution,
    SubstitutionError,
    choose,
    find_problems,
    substitute,
    version_problem,
)


class Theirs:
    """A double of a class of the host."""

    constant = 7

    def __init__(self, hs: Any, *, port: int = 0) -> None:
        self.hs = hs

    def send(self, command: str) -> None: ...

    async def wait(self) -> None: ...

    @classmethod
    def parse(cls, line: str) -> None: ...


class Ours:
    """A double of a replacement."""

    constant = 8

    def __init__(self, hs: Any, *, port: int = 0, more: int = 0) -> None:
        self.hs = hs

    def send(self, command: str) -> None: ...

    async def wait(self) -> None: ...

    @classmethod
    def parse(cls, line: str) -> None: ...


def extend(original: type) -> type:
    """Return a replacement that extends a class of the host."""
    return type("Extended", (original,), {})


class _HostCase(SynchronousTestCase):
    """Provides a host of two modules."""

    def setUp(self) -> None:
        self.defining = self.add_module("fakehost.defining", Theirs=Theirs)
        self.importing = self.add_module("fakehost.importing", Theirs=Theirs, other=1)
        self.foreign = self.add_module("elsewhere", Theirs=Theirs)

    def add_module(self, name: str, **content: Any) -> ModuleType:
        """Add a module to those that are imported."""
        module = sys.modules[name] = ModuleType(name)
        self.addCleanup(sys.modules.pop, name)
        vars(module).update(content)
        return module

    def known(self, **changes: Any) -> Substitution:
        """Return a substitution of the class of the host."""
        known: dict[str, Any] = {
            "part": "handler",
            "module": "fakehost.defining",
            "name": "Theirs",
            "replacement": Ours,
        }
        return Substitution(**known | changes)


class CheckTests(_HostCase):
    """Tests for check."""

    def check_one(self, ours: Any, **changes: Any) -> list[str]:
        """Compare the class of the host with a replacement."""
        return find_problems([self.known(replacement=ours, **changes)], {})

    def test_same(self) -> None:
        """A replacement with all public names of the host has no problem."""
        self.assertEqual(self.check_one(Ours), [])

    def test_not_found(self) -> None:
        """A module or a name that the host lacks is a problem."""
        for changes, expected in (
            ({"module": "fakehost.gone"}, "fakehost.gone.Theirs cannot be replaced"),
            ({"name": "Gone"}, "fakehost.defining.Gone is missing"),
        ):
            (problem,) = find_problems([self.known(**changes)], {})
            self.assertIn(expected, problem)

    def test_every_name(self) -> None:
        """Each public name of the host that the replacement lacks is a problem.

        It may be a method, a class attribute, or an attribute of the instance.
        """

        class Poor:
            def __init__(self, hs: Any, *, port: int = 0) -> None: ...

            def send(self, command: str) -> None: ...

        problems = self.check_one(Poor)
        names = [each.partition(" is missing")[0] for each in problems]
        self.assertEqual(
            names,
            [
                f"fakehost.defining.Theirs.{name}"
                for name in ("constant", "hs", "parse", "wait")
            ],
        )
        self.assertIn("Poor", problems[0])

    def test_signatures(self) -> None:
        """A constructor or method that is called in another way is a problem."""

        class Constructor(Ours):
            def __init__(self, hs: Any) -> None:
                self.hs = hs

        class Method(Ours):
            def send(self, cmd: str) -> None: ...

        class Synchronous(Ours):
            def wait(self) -> None: ...  # type: ignore[override]

        class Attribute(Ours):
            send = 1  # type: ignore[assignment]

        class Function(Ours):
            def constant(self) -> None: ...  # type: ignore[override]

        for ours, expected in (
            (Constructor, "Theirs has the signature (hs, *, port=), not (hs)"),
            (Method, "Theirs.send has the signature (command), not (cmd)"),
            (Synchronous, "Theirs.wait is a coroutine function only in one of both"),
            (Attribute, "Theirs.send is a method, and is not one"),
            (Function, "Theirs.constant is not a method, and is one"),
        ):
            (problem,) = self.check_one(ours)
            self.assertIn(expected, problem)

    def test_accepted_differences(self) -> None:
        """A name that a difference lists may be missing; a reason is required."""

        class Poor(Ours):
            wait: Any = property()

        difference = Difference("wait", "nobody waits")
        self.assertEqual(self.check_one(Poor, differences=(difference,)), [])
        self.assertEqual(len(self.check_one(Poor)), 1)
        self.assertRaises(ValueError, Difference, "wait", "")

    def test_modules(self) -> None:
        """A name of a replaced module that is not known is a problem."""
        folder = Path(self.mktemp())
        folder.mkdir()
        folder.joinpath("newhost.py").write_text(
            "class Replaced: ...\nclass New: ...\nlogger = 1\n"
        )
        sys.path.insert(0, str(folder))
        self.addCleanup(sys.path.remove, str(folder))
        self.addCleanup(sys.modules.pop, "newhost")

        class Replaced: ...

        known = self.known(module="newhost", name="Replaced", replacement=Replaced)
        unreplaced = Difference("logger", "a logger")
        (problem,) = find_problems(
            [known], {"newhost": (unreplaced,), "not.replaced": ()}
        )
        self.assertIn("newhost.New is not known", problem)


class SubstituteTests(_HostCase):
    """Tests for substitute."""

    def test_everywhere(self) -> None:
        """
        A class is replaced in its module, and in the host's modules that imported it.
        """
        originals = substitute([self.known()], {})
        self.assertIs(self.defining.Theirs, Ours)
        self.assertIs(self.importing.Theirs, Ours)
        self.assertEqual(self.importing.other, 1)
        self.assertIs(self.foreign.Theirs, Theirs)
        self.assertEqual(originals, {"fakehost.defining.Theirs": Theirs})

    def test_extends(self) -> None:
        """A replacement may extend the host's class."""
        originals = substitute([self.known(replacement=extend, extends=True)], {})
        self.assertEqual(self.defining.Theirs.__bases__, (Theirs,))
        self.assertIs(self.importing.Theirs, self.defining.Theirs)
        self.assertEqual(originals, {"fakehost.defining.Theirs": Theirs})

    def test_all_or_nothing(self) -> None:
        """If one difference is found, nothing is replaced."""
        error = self.assertRaises(
            SubstitutionError,
            substitute,
            [self.known(), self.known(name="Gone")],
            {},
        )
        self.assertEqual(error.problems, ("fakehost.defining.Gone is missing",))
        self.assertIs(self.defining.Theirs, Theirs)
        self.assertIs(self.importing.Theirs, Theirs)


class ChooseTests(SynchronousTestCase):
    """Tests for choose."""

    def test_all(self) -> None:
        """By default, all parts are replaced."""
        self.assertEqual(choose((), ()), PARTS)

    def test_only_and_except(self) -> None:
        """Parts can be selected or excluded."""
        self.assertEqual(choose(("ids", "redis"), ()), ("redis", "ids"))
        self.assertEqual(set(choose((), ("ids",))), set(PARTS) - {"ids"})

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


class TableTests(SynchronousTestCase):
    """Tests for the substitutions of Synapse's names."""

    def test_parts(self) -> None:
        """Every part has substitutions, which are in the order of the parts."""
        found = dict.fromkeys(known.part for known in SUBSTITUTIONS)
        self.assertEqual(tuple(found), PARTS)
        only = substitutions_of(("ids",))
        self.assertEqual([known.name for known in only], ["MultiWriterIdGenerator"])

    def test_nothing_twice(self) -> None:
        """No name is replaced twice."""
        names = [str(known) for known in SUBSTITUTIONS]
        self.assertEqual(sorted(set(names)), sorted(names))

    def test_modules(self) -> None:
        """Every module whose names are all known has substitutions."""
        replaced = {known.module for known in SUBSTITUTIONS}
        self.assertLessEqual(set(MODULES), replaced)
