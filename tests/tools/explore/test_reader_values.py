"""Tests of the state of a reader as a value."""

from __future__ import annotations

import marshal
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.explore.reader_values import freeze, thaw, without_position
from synapse_replication.streams.pages import Page
from synapse_replication.streams.reader import Reader, ReaderPolicy
from synapse_replication.streams.reader_decisions import Fetch
from synapse_replication.streams.reader_state import (
    CatchUpPace,
    CatchUpState,
    EmptyRange,
    LinkPhase,
    LinkState,
)

#: A value other than the default for each field that is part of a state.
_STATE = {
    "_epoch": "e",
    "_position": 4,
    "_links": {"a": LinkState(5, LinkPhase.COMPLETE, [b""], True, True, "e", 3, True)},
    "_empty": EmptyRange(1, 4, 1, 0.0, 2.0),
    "_catch_up": CatchUpState(1, 9, 2, 8, True, 3, "f", 7, 6, 1, 1, CatchUpPace.PAUSED),
    "_request": Fetch(2, 9, True),
    "_page": Page([2], [None], 2),
    "_page_cursor": 2,
    "_expected": [3],
    "_due": 0.5,
    "_start": 0.25,
}


def _reader(position: int) -> Reader:
    return Reader(ReaderPolicy(), lambda token: True, lambda: position)


def _plain(value: Any) -> Any:
    """Return a value that can be compared."""
    if attrs.has(type(value)):
        return attrs.astuple(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


class ValueTests(SynchronousTestCase):
    """The state of a reader as a value."""

    def setUp(self) -> None:
        """Set each field of a reader."""
        self.reader = _reader(4)
        for name, value in _STATE.items():
            setattr(self.reader, name, value)

    def test_fields(self) -> None:
        """Each field of a reader is part of its state, except those that are named."""
        others = {"_policy", "_is_plausible", "_host_position", "_report", "_reports"}
        names = {field.name for field in attrs.fields(Reader)}
        self.assertEqual(names - others, set(_STATE))

    def test_round_trip(self) -> None:
        """A reader whose state is set to a value is in the state of this value."""
        value = freeze(self.reader, with_epochs=True, with_bursts=True)
        frozen, links = marshal.loads(marshal.dumps(value))
        other = _reader(0)
        thaw(other, frozen, links)
        for name, expected in _STATE.items():
            self.assertEqual(_plain(getattr(other, name)), _plain(expected), name)

    def test_position(self) -> None:
        """A state can be compared without the position."""
        first, _ = freeze(self.reader, with_epochs=True, with_bursts=True)
        self.reader._position = 3
        second, _ = freeze(self.reader, with_epochs=True, with_bursts=True)
        self.assertNotEqual(first, second)
        self.assertEqual(without_position(first), without_position(second))
