"""Ending a lost connection at Redis, before anything is said on the next.

Theory of operation: a connection that we lost may live on at Redis, with publishes that
it has not read yet. They would come out behind the announcement: a batch without its
end, an old position. So the first thing on a connection, before it counts as up, is to
have Redis end the one before it, if something was published on that one. How to name it
to Redis is asked for when the first publish was written, and not before: a server that
only knows how to publish is usable, even if it hangs up on a command that it does not
know. By a Unix socket nothing is asked: all clients have the same address there, and
number and address together might be another client's after a restart of Redis. A
transport without a socket has no kernel buffer in which anything could be left.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import txredisapi
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.handlers.observer import ReplicationObserver

__all__ = ["MAX_HANG_UPS", "ConnectionFence", "FencingState"]

#: A server that never answered what only fencing asks, and ended so many connections
#: on which that was asked, is not asked any more: it may be why they ended.
MAX_HANG_UPS = 3

#: How Redis tells a client's number and address, but for a Unix socket, with port 0.
_CLIENT = re.compile(r"id=(\d+) addr=(\S+:[1-9]\d*) ")

_FEATURE = (
    "ending a lost connection at Redis (CLIENT INFO and CLIENT KILL, since Redis 6.2; "
    "allow its user client|info and client|kill)"
)


class FencingState:
    """What is known of a Redis over all connections to it.

    :ivar earlier: the number that Redis gave to the newest connection, and the address
        from which it sees it, behind address translation, too. Both, since another
        Redis, or one that started again, gives the same numbers.
    :ivar is_unavailable: Redis will not do it, or cannot.
    :ivar has_answered: the server answered what fencing asks, if only once.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        self._observer = observer
        self._hang_ups = 0
        self.earlier: tuple[str, str] | None = None
        self.is_unavailable = False
        self.has_answered = False

    def hung_up(self) -> None:
        """Record that the server ended a connection instead of an answer."""
        self._hang_ups += 1
        if self._hang_ups >= MAX_HANG_UPS:
            self.refused("the server hangs up on CLIENT INFO")

    def refused(self, why: str) -> None:
        """Fence no more, and report it."""
        self.is_unavailable = True
        self._observer.feature_unavailable(_FEATURE, why)

    def failed(self, why: str) -> None:
        """Report that it failed on this connection."""
        self._observer.feature_unavailable(_FEATURE, why)


class ConnectionFence:
    """What one connection asks of Redis about itself and the one before it.

    :param execute: sends a command to Redis.
    :param is_possible: something may be left of a connection of this kind.
    """

    def __init__(
        self,
        state: FencingState,
        execute: Callable[..., Deferred[Any]],
        *,
        is_possible: bool,
    ) -> None:
        self._state = state
        self._execute = execute
        self._is_possible = is_possible
        self._unanswered = 0
        self.was_named = False

    def end_earlier(self) -> None:
        """Have Redis end the connection before this one."""
        if self._may_ask() and self._state.earlier is not None:
            number, address = self._state.earlier
            self._ask("KILL", "ID", number, "ADDR", address)

    def ask_name(self) -> None:
        """Ask how the connection is named, now that there is something to fence."""
        self.was_named = True
        if self._may_ask():
            self._ask("INFO").addCallback(self._remember_name)

    def end(self, *, is_explained: bool) -> None:
        """End with the connection.

        :param is_explained: something else is known to be why it ended.
        """
        if self._unanswered and not (is_explained or self._state.has_answered):
            self._state.hung_up()

    def _may_ask(self) -> bool:
        return self._is_possible and not self._state.is_unavailable

    def _ask(self, *args: str) -> Deferred[Any]:
        self._unanswered += 1
        return self._execute("CLIENT", *args).addCallbacks(self._answered, self._failed)

    def _answered(self, answer: Any) -> Any:
        self._unanswered -= 1
        self._state.has_answered = True
        return answer

    def _remember_name(self, info: Any) -> None:
        text = info.decode("utf-8", "replace") if isinstance(info, bytes) else info
        if isinstance(text, str) and (found := _CLIENT.match(text)) is not None:
            self._state.earlier = found[1], found[2]

    def _failed(self, failure: Failure) -> None:
        error = failure.value
        # If the connection is gone, the next one asks; without a password nothing goes.
        if (
            not isinstance(error, txredisapi.ResponseError)
            or str(error).startswith("NOAUTH")
            or self._state.is_unavailable
        ):
            return
        self._answered(None)
        # Anything else may be otherwise on the next connection.
        if str(error).startswith("NOPERM") or "unknown" in str(error).lower():
            self._state.refused(str(error))
        else:
            self._state.failed(str(error))
