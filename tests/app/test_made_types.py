"""Tests for synapse_replication.app.made_types."""

from __future__ import annotations

import functools
import textwrap
from types import NoneType
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.app.made_types import find_made_types


class Sink:
    pass


def returns_global() -> Any:
    return Sink()


def returns_attribute() -> Any:
    return textwrap.TextWrapper()


def returns_variable() -> Any:
    sink = Sink()
    sink.rows = 1  # type: ignore[attr-defined]
    return sink


def returns_one_of_two(flag: bool) -> Any:
    if flag:
        return {}
    return None


def assigns_twice() -> Any:
    sink: Any = Sink()
    if sink.other:
        sink = sink.other
    return sink


def calls_a_function() -> Any:
    return len([1])


def returns_itself() -> Any:
    sink: Any
    sink = sink  # noqa: F821
    return sink


def returns_argument(sink: Any) -> Any:
    return sink


def yields() -> Any:
    yield 1


def calls_next() -> Any:
    return next(yields())


calls_next = functools.wraps(yields)(calls_next)


def has_inner_function() -> None:
    def inner() -> Any:
        return Sink()

    inner()


class FindMadeTypesTests(SynchronousTestCase):
    def test_known(self) -> None:
        """Classes, literals and variables that are set once are found."""
        for function, made in (
            (Sink, [Sink]),
            (returns_global, [Sink]),
            (returns_attribute, [textwrap.TextWrapper]),
            (returns_variable, [Sink]),
            (returns_one_of_two, [dict, NoneType]),
            (has_inner_function, [NoneType]),
        ):
            self.assertEqual(find_made_types(function), made, function)

    def test_unknown(self) -> None:
        """No class is returned if only a call could show it."""
        for function in (
            assigns_twice,
            calls_a_function,
            returns_itself,
            returns_argument,
            yields,
            calls_next,
            len,
        ):
            self.assertEqual(find_made_types(function), [], function)
