"""Tests for :mod:`synapse_replication.instrumentation.composite`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.observer import CatchUpEvent, ReplicationObserver
from synapse_replication.instrumentation.composite import (
    SPANNING_METHODS,
    CompositeObserver,
)


class Recorder(ReplicationObserver):
    """Records its calls in a list that several recorders may share."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def rows_received(self, stream_name: str, count: int) -> None:
        self.calls.append(f"{self.name} {stream_name} {count}")

    def catch_up(self, event: CatchUpEvent) -> AbstractContextManager[object]:
        return self._span()

    @contextlib.contextmanager
    def _span(self) -> Iterator[None]:
        self.calls.append(f"{self.name} begins")
        try:
            yield
        finally:
            self.calls.append(f"{self.name} ends")


class CompositeObserverTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.calls: list[str] = []

    def test_observers_are_called_in_order(self) -> None:
        """An event is passed to each observer in order."""
        composite = CompositeObserver(
            [Recorder("a", self.calls), Recorder("b", self.calls)]
        )
        composite.rows_received("events", 3)
        self.assertEqual(self.calls, ["a events 3", "b events 3"])

    def test_contexts_end_in_reverse_order(self) -> None:
        """Contexts begin in order and end in reverse order, even after an exception."""
        composite = CompositeObserver(
            [Recorder("a", self.calls), Recorder("b", self.calls)]
        )

        def fail() -> None:
            with composite.catch_up(CatchUpEvent("s", "w", 1, 2)):
                self.calls.append("work")
                raise ValueError

        self.assertRaises(ValueError, fail)
        self.assertEqual(
            self.calls, ["a begins", "b begins", "work", "b ends", "a ends"]
        )

    def test_method_without_observers(self) -> None:
        """A method that no observer overrides is a no-op and creates no dispatcher."""
        composite = CompositeObserver([Recorder("a", self.calls)])
        composite.connections_changed(3)
        with composite.background_process("work"):
            pass
        self.assertEqual(self.calls, [])
        self.assertNotIn("connections_changed", vars(composite))

    def test_composites_nest(self) -> None:
        """Nested composites pass an event to each observer once."""
        inner = CompositeObserver([Recorder("a", self.calls)])
        CompositeObserver([inner, ReplicationObserver()]).rows_received("events", 1)
        self.assertEqual(self.calls, ["a events 1"])

    def test_spanning_methods_are_known(self) -> None:
        """SPANNING_METHODS are the observer methods that return a context manager."""
        spanning = {
            name
            for name, method in vars(ReplicationObserver).items()
            if not name.startswith("_")
            and "AbstractContextManager"
            in str(inspect.signature(method).return_annotation)
        }
        self.assertEqual(spanning, SPANNING_METHODS)
