"""An observer that forwards events to several observers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from synapse_replication.handlers.observer import ReplicationObserver

_METHODS = tuple(name for name in vars(ReplicationObserver) if not name.startswith("_"))

#: Methods that return a context manager, because their event has a duration.
SPANNING_METHODS = frozenset(
    {
        "requesting_rows",
        "background_process",
        "catch_up",
        "position_write",
        "serving_rows",
    }
)


class CompositeObserver(ReplicationObserver):
    """Forwards each event to the observers that override the event's method.

    A method that an observer does not override costs nothing: the targets of each
    method are determined once, in the constructor.

    :param observers: called in this order; contexts, such as that of
        :meth:`catch_up`, end in the reverse order.
    """

    def __init__(self, observers: Iterable[ReplicationObserver]) -> None:
        listeners = tuple(observers)
        for name in _METHODS:
            base = getattr(ReplicationObserver, name)
            wanted = [
                getattr(listener, name)
                for listener in listeners
                if getattr(getattr(listener, name), "__func__", None) is not base
            ]
            if len(wanted) == 1:
                setattr(self, name, wanted[0])
            elif wanted:
                fan_out = _enter_all if name in SPANNING_METHODS else _call_all
                setattr(self, name, fan_out(wanted))


def _call_all(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        for method in methods:
            method(*args, **kwargs)

    return call


def _enter_all(
    methods: Sequence[Callable[..., AbstractContextManager[object]]],
) -> Callable[..., AbstractContextManager[object]]:
    @contextlib.contextmanager
    def span(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for method in methods:
                stack.enter_context(method(*args, **kwargs))
            yield

    return span
