"""Fencing: makes Redis close a lost connection before the next one is used.

Theory of operation: after a connection is lost at this end, Redis may still have it
open, with publishes that it has not read yet. It would deliver them after the new
announcement of positions: a batch without its end, or an outdated position. So the
first command on a new connection, before it is reported as established, makes Redis
kill the previous one, if anything was published on that.

A connection's id and address are requested from Redis only after the first publish, so
that a server that supports only PUBLISH is usable, even if it disconnects clients that
send unknown commands. Over a Unix socket nothing is requested: all clients have the
same address there, so after a restart of Redis, id and address might identify another
client. A transport without a socket has no kernel buffer that could contain publishes.
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

#: Fencing is disabled if a server has never answered its commands, and has closed this
#: many connections on which they were sent: the commands may be the reason.
MAX_HANG_UPS = 3

#: The id and address in Redis's answer to CLIENT INFO. A Unix socket, which has port 0,
#: does not match.
_CLIENT = re.compile(r"id=(\d+) addr=(\S+:[1-9]\d*) ")

_FEATURE = (
    "fencing of lost connections to Redis (CLIENT INFO and CLIENT KILL, since Redis "
    "6.2; permit client|info and client|kill in the user's ACL)"
)


class FencingState:
    """State of fencing that outlives single connections.

    :ivar earlier: the id that Redis assigned to the newest connection, and the
        connection's address as seen by Redis, which may differ due to address
        translation. Both are needed, because another Redis, or the same one after a
        restart, assigns the same ids.
    :ivar is_unavailable: Redis rejects or does not support the commands.
    :ivar has_answered: the server has answered a command of fencing at least once.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        self._observer = observer
        self._hang_ups = 0
        self.earlier: tuple[str, str] | None = None
        self.is_unavailable = False
        self.has_answered = False

    def hung_up(self) -> None:
        """Record that the server closed a connection instead of answering."""
        self._hang_ups += 1
        if self._hang_ups >= MAX_HANG_UPS:
            self.refused("the server closes the connection on CLIENT INFO")

    def refused(self, why: str) -> None:
        """Disable fencing, and report that."""
        self.is_unavailable = True
        self._observer.feature_unavailable(_FEATURE, why)

    def failed(self, why: str) -> None:
        """Report that fencing failed on this connection."""
        self._observer.feature_unavailable(_FEATURE, why)


class ConnectionFence:
    """The fencing commands of one connection.

    :param execute: sends a command to Redis.
    :param is_possible: publishes may remain unread on a connection of this kind.
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
        """Make Redis close the previous connection."""
        if self._may_ask() and self._state.earlier is not None:
            number, address = self._state.earlier
            self._ask("KILL", "ID", number, "ADDR", address)

    def ask_name(self) -> None:
        """Request this connection's id and address, after its first publish."""
        self.was_named = True
        if self._may_ask():
            self._ask("INFO").addCallback(self._remember_name)

    def end(self, *, is_explained: bool) -> None:
        """Record that the connection was lost.

        :param is_explained: the loss has another known reason.
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
        # If the connection was lost, the next one sends the command again. Without
        # authentication (NOAUTH), all commands fail, so this is no sign of support.
        if (
            not isinstance(error, txredisapi.ResponseError)
            or str(error).startswith("NOAUTH")
            or self._state.is_unavailable
        ):
            return
        self._answered(None)
        # Other errors may not recur on the next connection.
        if str(error).startswith("NOPERM") or "unknown" in str(error).lower():
            self._state.refused(str(error))
        else:
            self._state.failed(str(error))
