"""The observer interface, from whose events metrics, logs and traces are produced.

Handlers and connections do not use loggers, metrics or tracers; they notify a
:class:`ReplicationObserver`. The events are values (``events.py``), except those that
occur for each chunk of rows or commands: they are methods, because creating a value
would cost the hot path too much. The observers in ``instrumentation/`` handle the
events that they need, and :class:`CompositeObserver` notifies several of them.

No method may raise, block, or call the object that notifies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, TypeVar

from typing_extensions import override

from synapse_replication.handlers import events

_E = TypeVar("_E", bound=events.Event)

#: A context that does nothing; shared, because the handling of rows often needs one.
_NOTHING: Final = contextlib.nullcontext()


def handles(
    *kinds: type[_E],
) -> Callable[[Callable[[Any, _E], None]], Callable[[Any, _E], None]]:
    """Return a decorator for the method that handles the events of some classes."""

    def mark(method: Callable[[Any, _E], None]) -> Callable[[Any, _E], None]:
        method.handled_events = kinds  # type: ignore[attr-defined]
        return method

    return mark


class ReplicationObserver:
    """Base class of observers, which ignores all events.

    A subclass decorates a method with ``@handles(kind)`` for each class of events that
    it needs, and overrides the other methods.
    """

    _handlers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found = {
            kind: method
            for method in vars(cls).values()
            for kind in getattr(method, "handled_events", ())
        }
        cls._handlers = {**cls._handlers, **found}

    def observe(self, event: events.Event) -> None:
        """Pass an event to the method that handles its class, if there is one."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(self, event)

    def span(self, work: events.Work) -> AbstractContextManager[object]:
        """Return a context that lasts as long as the work."""
        return _NOTHING

    def failure(self, what: str, error: BaseException) -> None:
        """Report an error that cannot be raised to any caller; see the event."""
        self.observe(events.OperationFailed(what, error))

    # -- for each chunk of rows or commands ----------------------------------------

    def commands_received(self, connection: str, command: str, count: int) -> None:
        """Record ``count`` received commands of one name."""

    def commands_sent(self, connection: str, command: str, count: int) -> None:
        """Record ``count`` sent commands of one name."""

    def rows_received(self, stream_name: str, count: int) -> None:
        """Record ``count`` received rows that were added to their stream's queue."""

    def queue_changed(self, stream_name: str, length: int) -> None:
        """Record that a stream's queue has ``length`` rows and other items."""

    def position_announced(
        self,
        stream_name: str,
        instance_name: str,
        token: int,
        connection: str,
        by: events.AnnouncedBy,
    ) -> None:
        """Record that ``token`` arrived in a writer's rows or POSITION.

        For rows that arrived together, only the last token of each writer is reported.
        The rows up to the token may still be queued, or may be discarded.

        :param connection: the name of the link on which it arrived.
        """

    def position_changed(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record that a writer's rows were delivered up to ``token``."""


#: The methods that observers may override, in addition to ``observe``.
_METHODS = [
    name
    for name in vars(ReplicationObserver)
    if not name.startswith("_") and name not in ("observe", "failure")
]


class CompositeObserver(ReplicationObserver):
    """Forwards each event to several observers.

    A method that an observer does not override costs nothing: the targets of each are
    determined once, in the constructor.

    :param observers: called in this order; contexts end in the reverse order.
    """

    def __init__(self, observers: Iterable[ReplicationObserver]) -> None:
        self._observers = tuple(observers)
        for name in _METHODS:
            wanted = [
                getattr(each, name)
                for each in self._observers
                if _overrides(each, name)
            ]
            if len(wanted) == 1:
                setattr(self, name, wanted[0])
            elif wanted:
                setattr(self, name, (_span if name == "span" else _all)(wanted))

    @override
    def observe(self, event: events.Event) -> None:
        for observer in self._observers:
            observer.observe(event)


def _overrides(observer: ReplicationObserver, name: str) -> bool:
    base = getattr(ReplicationObserver, name)
    return getattr(getattr(observer, name), "__func__", None) is not base


def _all(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        for method in methods:
            method(*args, **kwargs)

    return call


def _span(
    methods: Sequence[Callable[[events.Work], AbstractContextManager[object]]],
) -> Callable[[events.Work], AbstractContextManager[object]]:
    @contextlib.contextmanager
    def span(work: events.Work) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for method in methods:
                stack.enter_context(method(work))
            yield

    return span
