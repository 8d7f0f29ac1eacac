"""Tests for :mod:`synapse_replication.handlers.observer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import (
    BackgroundTask,
    CatchUpEvent,
    Event,
    LinksChanged,
    LinkUp,
    OperationFailed,
    PositionWrite,
    RowsRequest,
    RowsServed,
    Work,
)
from synapse_replication.handlers.observer import (
    CompositeObserver,
    ReplicationObserver,
    handles,
)


class ReplicationObserverTests(SynchronousTestCase):
    """The base of all observers."""

    def test_contexts(self) -> None:
        """Contexts of any work may be nested, and let an exception pass."""
        observer = ReplicationObserver()
        with (
            self.assertRaises(ZeroDivisionError),
            observer.span(BackgroundTask("work")),
            observer.span(CatchUpEvent("s", "w", 1, 2)),
            observer.span(RowsRequest("s", "w", {})),
            observer.span(RowsServed("s", {})),
            observer.span(PositionWrite("s", "w", 2)),
        ):
            raise ZeroDivisionError

    def test_handlers(self) -> None:
        """An event is passed to the method for its class, which may be inherited."""
        calls: list[str] = []
        observer = LoudRecorder("a", calls)
        observer.observe(LinkUp("redis"))
        observer.observe(LinksChanged(3))
        self.assertEqual(calls, ["a redis", "a has 3 links"])
        Recorder("b", calls).observe(LinksChanged(3))
        self.assertEqual(len(calls), 2)

    def test_failure(self) -> None:
        """A failure that cannot be raised is an event."""
        found: list[Event] = []

        class Observer(ReplicationObserver):
            observe = found.append  # type: ignore[assignment]

        error = ValueError()
        Observer().failure("working", error)
        self.assertEqual(found, [OperationFailed("working", error)])


class Recorder(ReplicationObserver):
    """Records its calls in a list that several recorders may share."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def rows_received(self, stream_name: str, count: int) -> None:
        self.calls.append(f"{self.name} {stream_name} {count}")

    @handles(LinkUp)
    def _link_up(self, event: LinkUp) -> None:
        self.calls.append(f"{self.name} {event.connection}")

    def span(self, work: Work) -> AbstractContextManager[object]:
        return self._span()

    @contextlib.contextmanager
    def _span(self) -> Iterator[None]:
        self.calls.append(f"{self.name} begins")
        try:
            yield
        finally:
            self.calls.append(f"{self.name} ends")


class LoudRecorder(Recorder):
    """Records one more kind of event."""

    @handles(LinksChanged)
    def _links_changed(self, event: LinksChanged) -> None:
        self.calls.append(f"{self.name} has {event.count} links")


class CompositeObserverTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.calls: list[str] = []

    def test_observers_are_called_in_order(self) -> None:
        """An event is passed to each observer in order."""
        composite = CompositeObserver(
            [Recorder("a", self.calls), Recorder("b", self.calls)]
        )
        composite.rows_received("events", 3)
        composite.observe(LinkUp("redis"))
        self.assertEqual(self.calls, ["a events 3", "b events 3", "a redis", "b redis"])

    def test_contexts_end_in_reverse_order(self) -> None:
        """Contexts begin in order and end in reverse order, even after an exception."""
        composite = CompositeObserver(
            [Recorder("a", self.calls), Recorder("b", self.calls)]
        )

        def fail() -> None:
            with composite.span(CatchUpEvent("s", "w", 1, 2)):
                self.calls.append("work")
                raise ValueError

        self.assertRaises(ValueError, fail)
        self.assertEqual(
            self.calls, ["a begins", "b begins", "work", "b ends", "a ends"]
        )

    def test_without_observers(self) -> None:
        """Events that no observer handles are ignored."""
        composite = CompositeObserver([ReplicationObserver()])
        composite.queue_changed("events", 1)
        composite.observe(LinksChanged(3))
        with composite.span(BackgroundTask("work")):
            pass
        self.assertEqual(self.calls, [])
        self.assertNotIn("queue_changed", vars(composite))

    def test_composites_nest(self) -> None:
        """Nested composites pass an event to each observer once."""
        inner = CompositeObserver([Recorder("a", self.calls)])
        CompositeObserver([inner, ReplicationObserver()]).rows_received("events", 1)
        self.assertEqual(self.calls, ["a events 1"])
