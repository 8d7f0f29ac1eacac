"""An observer that forwards events to several observers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from synapse_replication.handlers.events import Event, Work
from synapse_replication.handlers.observer import ReplicationObserver

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
    def observe(self, event: Event) -> None:
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
    methods: Sequence[Callable[[Work], AbstractContextManager[object]]],
) -> Callable[[Work], AbstractContextManager[object]]:
    @contextlib.contextmanager
    def span(work: Work) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for method in methods:
                stack.enter_context(method(work))
            yield

    return span
