"""An observer that forwards events to several observers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from synapse_replication.handlers.events import Event, Work
from synapse_replication.handlers.observer import ReplicationObserver

#: The methods for events of the hot path.
_DIRECT = (
    "commands_received",
    "commands_sent",
    "position_announced",
    "position_changed",
    "queue_changed",
    "rows_received",
)


class CompositeObserver(ReplicationObserver):
    """Forwards each event to several observers.

    A direct method that an observer does not override costs nothing: the targets of
    each are determined once, in the constructor.

    :param observers: called in this order; contexts end in the reverse order.
    """

    def __init__(self, observers: Iterable[ReplicationObserver]) -> None:
        self._observers = tuple(observers)
        self._spanning = [each for each in self._observers if _overrides(each, "span")]
        for name in _DIRECT:
            wanted = [
                getattr(each, name)
                for each in self._observers
                if _overrides(each, name)
            ]
            if wanted:
                setattr(self, name, wanted[0] if len(wanted) == 1 else _all(wanted))

    @override
    def observe(self, event: Event) -> None:
        for observer in self._observers:
            observer.observe(event)

    @override
    def span(self, work: Work) -> AbstractContextManager[object]:
        if len(self._spanning) == 1:
            return self._spanning[0].span(work)
        return self._span(work) if self._spanning else super().span(work)

    @contextlib.contextmanager
    def _span(self, work: Work) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._spanning:
                stack.enter_context(observer.span(work))
            yield


def _overrides(observer: ReplicationObserver, name: str) -> bool:
    base = getattr(ReplicationObserver, name)
    return getattr(getattr(observer, name), "__func__", None) is not base


def _all(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        for method in methods:
            method(*args, **kwargs)

    return call
