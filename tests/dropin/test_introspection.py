"""Tests for names and signatures that are found at run time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.dropin.introspection import (
    admits,
    defined_names,
    instance_attributes,
    public_names,
    signature_of,
)


class Base:
    """A double of a class of the host."""

    constant = 1

    def __init__(self, first: int) -> None:
        self.first = first
        self._private = first
        self.pair: Any
        self.pair = first, first

        def later() -> None:
            self.in_a_closure = 1

        self.later = later

    @property
    def value(self) -> int:
        """Store another attribute."""
        self.in_a_property = 1
        return 1

    @staticmethod
    def static(other: Any) -> None:
        """Store an attribute of the first parameter, whatever it is."""

    def stores_elsewhere(self, other: Any) -> None:
        """Store an attribute of another object."""
        other.not_here = self.first


class Derived(Base):
    """A double of a class that inherits."""

    def more(self, value: int) -> None:
        """Store an attribute."""
        self.of_derived = value


class NamesTests(SynchronousTestCase):
    """Tests for public_names, instance_attributes and defined_names."""

    def test_instance_attributes(self) -> None:
        """Attributes that a method stores in its object are found, inherited ones too.

        They are also found in closures and properties.
        """
        self.assertEqual(
            instance_attributes(Derived),
            {
                *("first", "_private", "pair", "later"),
                *("in_a_closure", "in_a_property", "of_derived"),
            },
        )

    def test_public_names(self) -> None:
        """Methods, properties and attributes of all kinds are names, unless private."""
        names = public_names(Derived)
        self.assertLessEqual(
            {"constant", "static", "value", "more", "stores_elsewhere", "first"}, names
        )
        self.assertNotIn("_private", names)
        self.assertNotIn("not_here", names)

    def test_defined_names(self) -> None:
        """The names that a module defines are found without those that it imports."""
        folder = Path(self.mktemp())
        folder.mkdir()
        folder.joinpath("definesnames.py").write_text(
            "import os\nfrom sys import path, argv as words\n"
            "class A: inner = 1\ndef b(): local = 1\nc = d = path\n_e = 1\n"
        )
        sys.path.insert(0, str(folder))
        self.addCleanup(sys.path.remove, str(folder))
        self.assertEqual(defined_names("definesnames"), {"A", "b", "c", "d"})

    def test_module_without_code(self) -> None:
        """A module that is not written in Python has no names."""
        self.assertEqual(defined_names("sys"), set())


class SignatureTests(SynchronousTestCase):
    """Tests for signature_of and admits."""

    def test_kinds(self) -> None:
        """The text distinguishes all kinds of parameters."""

        def function(a: int, b: int = 1, *, c: int, **d: int) -> None: ...

        self.assertEqual(str(signature_of(function)), "(a, b=, *, c, **d)")
        self.assertEqual(str(signature_of(Base)), "(first)")

    def test_methods(self) -> None:
        """The object to which a method is bound is omitted."""
        self.assertEqual(str(signature_of(Derived.more, is_method=True)), "(value)")
        self.assertEqual(
            str(signature_of(vars(Base)["static"], is_method=True)), "(other)"
        )

    def test_not_callable(self) -> None:
        """An object that is not called has no signature."""
        self.assertRaises(TypeError, signature_of, 7)

    def test_admits(self) -> None:
        """Whatever may be passed to the host's function may be passed to ours."""

        def host(a: int, b: int, c: int = 1, *, d: int = 1) -> None: ...
        def same(a: int, b: int, c: int = 1, *, d: int = 1) -> None: ...
        def more(a: int, b: int, x: int = 1, c: int = 1, d: int = 1) -> None: ...
        def any_names(a: int, b: int, **options: int) -> None: ...

        for ours in (same, more, any_names):
            self.assertTrue(admits(signature_of(ours), signature_of(host)), ours)

        def swapped(b: int, a: int, c: int = 1, d: int = 1) -> None: ...
        def fewer(a: int, b: int, c: int = 1) -> None: ...
        def needs_more(a: int, b: int, c: int, d: int = 1) -> None: ...
        def renamed(a: int, e: int, c: int = 1, d: int = 1) -> None: ...
        def by_name(a: int, *, b: int, c: int = 1, d: int = 1) -> None: ...

        for other in (swapped, fewer, needs_more, renamed, by_name):
            self.assertFalse(admits(signature_of(other), signature_of(host)), other)

    def test_variadic(self) -> None:
        """A function that accepts any arguments is replaced only by such a function."""

        def host(*args: int, **options: int) -> None: ...
        def ours(a: int = 1) -> None: ...

        self.assertTrue(admits(signature_of(host), signature_of(host)))
        self.assertFalse(admits(signature_of(ours), signature_of(host)))
