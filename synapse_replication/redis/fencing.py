"""Fencing: makes Redis close other connections before a new connection is used.

Theory of operation: after a connection is lost at this end, it may still be open in
Redis, with publishes that Redis has not read yet. Redis would deliver them after the
new announcement of positions: a batch without its end, or an outdated position.
Therefore the first command after authentication on a new connection makes Redis kill
the latest connection whose id and address are known. The new connection is reported as
established only afterwards.

A connection's id and address are requested from Redis after the first publish on it; a
connection without publishes needs no fencing. If a server disconnects clients that send
unknown commands, fencing is disabled after :data:`MAX_HANG_UPS` such disconnections.
Over a Unix socket there is no fencing: all clients have the same address, so after a
restart of Redis the id and the address might identify another client. A transport
without a socket needs no fencing, because it has no kernel buffer that could contain
publishes.

A process that has acquired its name in the database also makes Redis close the
connections of its predecessors, which may be suspended and resume at any instruction.
Before anything is published on a new connection, the process names it after itself
(CLIENT SETNAME), then lets the database confirm that it still has its name, then kills
all other connections with that name. So a process that acquires a name afterwards
either finds the connections of its predecessor by their name, and ends them together
with the publishes that Redis has not read; or the predecessor cannot publish on them,
because the database does not confirm its name any more. No clock is involved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import attrs
import txredisapi
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.handlers.events import FeatureUnavailable
from synapse_replication.handlers.observer import ReplicationObserver

#: Fencing is disabled after this many connections were lost while a fencing command was
#: unanswered: the command may be the reason. A loss is not counted if another reason is
#: known, or if the server has ever answered a fencing command.
MAX_HANG_UPS = 3

#: The id and address in Redis's answer to CLIENT INFO. The address of a Unix socket has
#: port 0 and does not match.
_CLIENT = re.compile(r"id=(\d+) addr=(\S+:[1-9]\d*) ")

#: The id in a line of Redis's answer to CLIENT LIST.
_NUMBER = re.compile(r"id=(\d+) ")

_LOST = (
    "fencing of lost connections to Redis (CLIENT INFO and CLIENT KILL, since Redis "
    "6.2; permit client|info and client|kill in the user's ACL)"
)

_PREDECESSORS = (
    "fencing of connections to Redis of a process that was replaced (CLIENT SETNAME, "
    "CLIENT LIST and CLIENT KILL; permit client|setname, client|list and client|kill "
    "in the user's ACL)"
)


class FencingState:
    """What is known about fencing commands; it outlives the individual connections.

    :ivar is_unavailable: whether fencing is disabled, because Redis rejects the
        commands, does not support them, or closes the connection on them.
    :ivar has_answered: whether the server has answered a fencing command at least once.
    """

    def __init__(self, observer: ReplicationObserver, feature: str) -> None:
        self._observer = observer
        self._feature = feature
        self._hang_ups = 0
        self.is_unavailable = False
        self.has_answered = False

    def hung_up(self) -> None:
        """Record that the server closed a connection instead of answering."""
        self._hang_ups += 1
        if self._hang_ups >= MAX_HANG_UPS:
            self.refused("the server closes the connection on CLIENT commands")

    def refused(self, why: str) -> None:
        """Disable fencing, and report the reason."""
        self.is_unavailable = True
        self.failed(why)

    def failed(self, why: str) -> None:
        """Report that fencing failed on one connection."""
        self._observer.observe(FeatureUnavailable(self._feature, why))


class LostConnections(FencingState):
    """State of the fencing of lost connections.

    :ivar previous: the id that Redis assigned to the newest connection whose identity
        is known, and the connection's address as seen by Redis, which may differ from
        the local address due to address translation. Both are needed, because Redis
        assigns the same ids again after a restart, and so may another Redis server.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        super().__init__(observer, _LOST)
        self.previous: tuple[str, str] | None = None


class PublisherName(FencingState):
    """The name under which a process publishes, and the fencing of its predecessors.

    :param find_check: returns a function that checks in the database that this process
        has its name: its Deferred fails if another process has acquired the name, or if
        that cannot be checked. ``None`` if this process has not acquired its name.
    :ivar text: the name of its connections in Redis.
    """

    def __init__(
        self,
        observer: ReplicationObserver,
        server_name: str,
        instance_name: str,
        find_check: Callable[[], Callable[[], Deferred[Any]] | None],
    ) -> None:
        super().__init__(observer, _PREDECESSORS)
        self.find_check = find_check
        # Redis accepts no space and no character beyond ASCII.
        self.text = f"synapse_replication/{quote(server_name)}/{quote(instance_name)}"


_State = TypeVar("_State", bound=FencingState)


@attrs.define(eq=False, repr=False)
class _Fence(Generic[_State]):
    """The fencing commands of one connection.

    :param execute: sends a command to Redis.
    """

    _state: _State
    _execute: Callable[..., Deferred[Any]]
    _unanswered: int = attrs.field(default=0, init=False)

    def connection_lost(self, *, is_explained: bool) -> None:
        """Record that the connection was lost.

        :param is_explained: whether the loss has a known reason other than fencing.
        """
        if self._unanswered and not (is_explained or self._state.has_answered):
            self._state.hung_up()

    def _send(self, *args: str) -> Deferred[Any]:
        """Send a command.

        :return: fires with the answer; with ``None`` if Redis rejects the command, or
            the connection is lost.
        """
        self._unanswered += 1
        return self._execute("CLIENT", *args).addCallbacks(self._answered, self._failed)

    def _answered(self, answer: Any) -> Any:
        self._unanswered -= 1
        self._state.has_answered = True
        return answer

    def _failed(self, failure: Failure) -> None:
        error = failure.value
        # If the connection was lost, the next connection sends fencing commands anyway.
        # Without authentication, all commands fail with NOAUTH, so that error does not
        # show whether the server supports fencing.
        if (
            not isinstance(error, txredisapi.ResponseError)
            or str(error).startswith("NOAUTH")
            or self._state.is_unavailable
        ):
            return
        self._answered(None)
        # Only these errors would recur on the next connection.
        if str(error).startswith("NOPERM") or "unknown" in str(error).lower():
            self._state.refused(str(error))
        else:
            self._state.failed(str(error))


@attrs.define(eq=False, repr=False)
class ConnectionFence(_Fence[LostConnections]):
    """The fencing of the lost connections of this process.

    :param is_possible: whether a connection of this kind can be fenced.
    :ivar identity_requested: whether :meth:`request_identity` was called.
    """

    _is_possible: bool = attrs.field(kw_only=True)
    identity_requested: bool = attrs.field(default=False, init=False)

    def kill_previous(self) -> None:
        """Make Redis close the latest connection whose identity is known, if any."""
        if self._is_available() and self._state.previous is not None:
            number, address = self._state.previous
            self._send("KILL", "ID", number, "ADDR", address)

    def request_identity(self) -> None:
        """Request this connection's id and address. Call it after the first publish."""
        self.identity_requested = True
        if self._is_available():
            self._send("INFO").addCallback(self._record_identity)

    def _is_available(self) -> bool:
        return self._is_possible and not self._state.is_unavailable

    def _record_identity(self, info: Any) -> None:
        if (found := _CLIENT.match(_to_text(info))) is not None:
            self._state.previous = found[1], found[2]


@attrs.define(eq=False, repr=False)
class NameFence(_Fence[PublisherName]):
    """The fencing of the predecessors of this process."""

    def enter(self) -> Deferred[None] | None:
        """Make sure that no other process publishes under the name of this one.

        :return: ``None`` if this process has not acquired its name. Otherwise, a
            Deferred that fires when it may publish; it fails if another process has
            acquired the name, or if this could not be checked.
        """
        confirm = self._state.find_check()
        return None if confirm is None else Deferred.fromCoroutine(self._enter(confirm))

    async def _enter(self, confirm: Callable[[], Deferred[Any]]) -> None:
        name = self._state.text
        if not self._state.is_unavailable:
            await self._send("SETNAME", name)
        await confirm()
        if not self._state.is_unavailable:
            # Redis does not kill the connection that sends the command.
            for line in _to_text(await self._send("LIST")).splitlines():
                if f" name={name} " in line and (found := _NUMBER.match(line)):
                    self._send("KILL", "ID", found[1])


def _to_text(answer: Any) -> str:
    """Return an answer as text; an empty text if it is neither bytes nor text."""
    if isinstance(answer, bytes):
        return answer.decode("utf-8", "replace")
    return answer if isinstance(answer, str) else ""
