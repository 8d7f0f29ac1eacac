"""The reactor of a process, as one type: :class:`IReactor`."""

from __future__ import annotations

from typing import cast

from twisted.internet.interfaces import (
    IReactorCore,
    IReactorPluggableNameResolver,
    IReactorSSL,
    IReactorTCP,
    IReactorThreads,
    IReactorTime,
    IReactorUNIX,
)


class IReactor(
    IReactorCore,
    IReactorPluggableNameResolver,
    IReactorSSL,
    IReactorTCP,
    IReactorThreads,
    IReactorTime,
    IReactorUNIX,
):
    """The interfaces of a process's reactor that this package uses.

    Code that needs only one of them states that one.
    """


def as_reactor(reactor: IReactorCore) -> IReactor:
    """Return a reactor with its other interfaces, which its type need not state.

    Twisted declares for ``twisted.internet.reactor`` only those of all platforms.
    """
    return cast(IReactor, reactor)
