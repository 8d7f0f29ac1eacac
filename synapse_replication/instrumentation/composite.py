"""One observer that tells many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from synapse_replication.handlers.observer import ReplicationObserver

__all__ = ["CompositeObserver"]

_METHODS = tuple(name for name in vars(ReplicationObserver) if not name.startswith("_"))

#: Those that give a context manager: they are told of something that lasts.
SPANNING_METHODS = frozenset(
    {
        "asking_for_rows",
        "background_process",
        "catch_up",
        "position_write",
        "serving_rows",
    }
)


class CompositeObserver(ReplicationObserver):
    """Tell each observer in turn, but only of what it wants to hear.

    What an observer does not override costs nothing: the methods of this object
    are chosen once, when it is made.

    :param observers: in the order in which they are told; contexts, such as that of
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
                fan_out = _span_all if name in SPANNING_METHODS else _tell_all
                setattr(self, name, fan_out(wanted))


def _tell_all(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: Any, **kwargs: Any) -> None:
        for method in methods:
            method(*args, **kwargs)

    return tell


def _span_all(
    methods: Sequence[Callable[..., AbstractContextManager[object]]],
) -> Callable[..., AbstractContextManager[object]]:
    @contextlib.contextmanager
    def span(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for method in methods:
                stack.enter_context(method(*args, **kwargs))
            yield

    return span
