"""Publishing: pipelined, in order, and knowing what was not acknowledged.

Theory of operation. :class:`RedisSender` outlives its connections. What is published
after a moment of silence is written at once; what follows soon is gathered until the
end of the turn of the reactor, and written together: it leaves no later than if the
socket had been given it at once. Without a socket there is nothing to gain by that, and
it is written at once. A PUBLISH has no Deferred: Redis answers in order, so that
counting the answers tells how many are outstanding.

Rows hide a loss: a reader that gets row 7 takes itself to be past row 6, lost or
not. So the rule is that after publishes were lost (not acknowledged when the
connection ended, or not accepted since), the *first* thing on the next
connection is what ``on_lost`` sends: our positions, from which readers see what
they miss and fetch it. Therefore rows and positions are not kept while there is
no connection; that announcement covers them. Other commands, which nothing else
brings, are kept up to a bound, and those that were not acknowledged are published
again, in order: each says how something is now, so that twice does no harm, and all
about one thing come from one process. One that Redis refused (an ACL without its
channel) is not: it would be refused for ever, and cost a connection each time.

Rows may come faster than Redis takes them, and what waits there delays all that is
published after it. So the sender is *behind* from :data:`HIGH_WATERMARK` publishes that
were not answered, or when the transport is full, until few are left: then it says so,
while Redis still has work to do. It is behind sooner while there is something that
would be delayed.

A connection that we lost may live on at Redis, with publishes that it has not read yet.
They would come out behind the announcement: a batch without its end, an old position.
So the first thing on a connection, before it counts as up, is to have Redis end the one
before it, if something was published on that one. How to name it to Redis is asked for
when the first publish was written, and not before: a server that only knows how to
publish is usable, even if it hangs up on a command that it does not know. By a Unix
socket nothing is asked: all clients have the same address there, and number and address
together might be another client's after a restart of Redis. A transport without a
socket has no kernel buffer in which anything could be left.

Rejected: publishing rows again that were not acknowledged. They may have arrived, and
would be out of order behind what other processes sent since.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import txredisapi
from twisted.internet.address import UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import (
    IDelayedCall,
    IPushProducer,
    IReactorTime,
    ISystemHandle,
    IWriteDescriptor,
)
from twisted.python.failure import Failure
from typing_extensions import override
from zope.interface import implementer

from synapse_replication.errors import excerpt
from synapse_replication.handlers.observer import (
    CommandDropReason,
    ReplicationObserver,
)
from synapse_replication.redis.factory import RedisProtocol, SynapseRedisFactory
from synapse_replication.redis.resp import encode_publishes

__all__ = [
    "COALESCE_WINDOW",
    "EXTENSION",
    "HIGH_WATERMARK",
    "LOW_WATERMARK",
    "SHARED_HIGH_WATERMARK",
    "SHARED_LOW_WATERMARK",
    "SHARED_WINDOW",
    "RedisSender",
    "RedisSenderProtocol",
    "SenderFactory",
]

#: What the announcement of our positions makes good, and so need not be kept.
_RECOVERABLE = frozenset({"RDATA", "POSITION"})
#: The name under which messages of the extension are counted. What there is to say
#: when the connection is back is said then, so they are not kept either.
EXTENSION = "EXTENSION"
_NOT_KEPT = _RECOVERABLE | {EXTENSION}
#: How much may wait for Redis to read, in bytes of lines, before it is given up.
MAX_PENDING_BYTES = 32 * 1024 * 1024
#: So many publishes without an answer are much, and so many are few: 3 ms of Redis's
#: work, more when processors are short. Fewer cost a fifth of the rows a second there.
HIGH_WATERMARK, LOW_WATERMARK = 1_000, 500
#: The same while other things are published between the long pages: those are to wait
#: for less than 1 ms.
SHARED_HIGH_WATERMARK, SHARED_LOW_WATERMARK = 250, 100
#: Fewer lines at once are no part of a long page; then there is company for so long, s.
SHORT_LINES = 10
SHARED_WINDOW = 0.5
#: What is published within so many s after a write is gathered until the turn's end.
COALESCE_WINDOW = 0.0005
#: A server that never answered what only fencing asks, and ended so many connections
#: on which that was asked, is not asked any more: it may be why they ended.
MAX_HANG_UPS = 3
#: How many commands other than rows and positions wait for a connection.
MAX_KEPT = 10_000

#: How Redis tells a client's number and address, but for a Unix socket, with port 0.
_CLIENT = re.compile(r"id=(\d+) addr=(\S+:[1-9]\d*) ")

_FENCING = (
    "ending a lost connection at Redis (CLIENT INFO and CLIENT KILL, since Redis 6.2; "
    "allow its user client|info and client|kill)"
)

_Pending = tuple[str, bytes, Sequence[bytes]]


class RedisSender:
    """Publishes lines on channels, over whatever connection there is.

    :param clock: the reactor.
    :param name: for the observer.
    :param on_lost: called with how many publishes were or may have been lost, on
        the next connection, before anything else is published. It publishes our
        positions, before it returns.
    :param on_connected: called on each connection, before anything is published.
    :param max_pending_bytes: see :data:`MAX_PENDING_BYTES`; past it the
        connection is cut, since Redis does not read.
    :ivar connected: whether there is a connection to publish on.
    :ivar receivers: how many processes got the newest message that was
        acknowledged, this one included; 1 may mean a wrong server name or Redis.
    """

    def __init__(
        self,
        clock: IReactorTime,
        observer: ReplicationObserver,
        name: str,
        on_lost: Callable[[int], None],
        max_pending_bytes: int = MAX_PENDING_BYTES,
        on_connected: Callable[[], object] | None = None,
    ) -> None:
        self._clock = clock
        self._observer = observer
        self._name = name
        self._on_lost = on_lost
        self._max_pending_bytes = max_pending_bytes
        self._on_connected = on_connected
        self._protocol: RedisSenderProtocol | None = None
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._flush_call: IDelayedCall | None = None
        self._last_flush = -math.inf
        self._paused = False
        # It was behind, and who waits is still to be told that it is so no more.
        self._was_behind = False
        self._company_until = -math.inf
        self._when_ready: list[Callable[[], object]] = []
        self._retained: deque[tuple[str, bytes, bytes]] = deque()
        self._lost = 0
        # How many publishes were written on this connection; and those of them that
        # would be published again, with how many there were after each.
        self._written = 0
        self._unanswered: deque[tuple[int, _Pending]] = deque()
        # The last of those that found no room there, as such a count.
        self._forgotten_upto = 0
        self._waiters: list[Deferred[None]] = []
        self.receivers: int | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection to publish on."""
        return self._protocol is not None

    @property
    def unacknowledged(self) -> int:
        """How many publishes were written and not answered yet."""
        return 0 if self._protocol is None else self._protocol.unacknowledged

    @property
    def waiting(self) -> tuple[int, int]:
        """How many lines wait for the transport, and their bytes."""
        return sum(len(lines) for _, _, lines in self._pending), self._pending_bytes

    @property
    def lost(self) -> int:
        """How many publishes were lost since the last announcement."""
        return self._lost

    @property
    def is_behind(self) -> bool:
        """Whether much was published and not answered, so that more only waits."""
        much = SHARED_HIGH_WATERMARK if self._has_other_traffic() else HIGH_WATERMARK
        return self._paused or self.unacknowledged >= much

    def _has_other_traffic(self) -> bool:
        return self._clock.seconds() < self._company_until

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called each time that it was behind and is so no more.

        Also when the connection was lost: nothing is to be waited for then.
        """
        self._when_ready.append(callback)

    def _notify_if_writable(self) -> None:
        few = SHARED_LOW_WATERMARK if self._has_other_traffic() else LOW_WATERMARK
        if self._was_behind and not self._paused and self.unacknowledged <= few:
            self._was_behind = False
            for callback in self._when_ready:
                callback()

    def publish(self, command_name: str, channel: str, lines: Sequence[bytes]) -> None:
        """Publish lines of one command, in order, one message each.

        They are written at once; but if something was just before, with all that
        follows in this turn of the reactor. Never raises.
        """
        if not lines:
            return
        if self._protocol is None:
            self._retain_for_reconnect(command_name, channel.encode(), lines)
            return
        # The extension goes with each page.
        if len(lines) < SHORT_LINES and command_name != EXTENSION:
            self._company_until = self._clock.seconds() + SHARED_WINDOW
            # Who looks now may find it behind where it was not.
            self._was_behind = self._was_behind or self.is_behind
        self._pending.append((command_name, channel.encode(), lines))
        self._pending_bytes += sum(map(len, lines))
        if self._pending_bytes > self._max_pending_bytes:
            self._protocol.cut(
                f"Redis does not read: {self._pending_bytes} bytes wait for it"
            )
            self._drop_protocol(self._protocol.unacknowledged)
        # A message of the extension is the first of several.
        elif not self._protocol.has_socket or (
            self._is_quiet() and command_name != EXTENSION
        ):
            self.flush()
        elif self._flush_call is None and not self._paused:
            self._flush_call = self._clock.callLater(0, self._flush_later)

    def _is_quiet(self) -> bool:
        return self._clock.seconds() - self._last_flush > COALESCE_WINDOW

    def flush(self) -> None:
        """Write what waits, unless the transport asked for a pause."""
        protocol = self._protocol
        if protocol is None or self._paused or not self._pending:
            return
        if self._flush_call is not None:
            self._flush_call.cancel()
            self._flush_call = None
        self._last_flush = self._clock.seconds()
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        data: list[bytes] = []
        counts: dict[str, int] = {}
        for command_name, channel, lines in pending:
            data += encode_publishes(channel, lines)
            if command_name not in _NOT_KEPT:
                self._unanswered.append(
                    (self._written + len(data), (command_name, channel, lines))
                )
            counts[command_name] = counts.get(command_name, 0) + len(lines)
        acknowledged = self._written - protocol.unacknowledged
        waiting = self._unanswered
        while waiting and waiting[0][0] <= acknowledged:
            waiting.popleft()
        while len(waiting) > MAX_KEPT:
            self._forgotten_upto, _ = waiting.popleft()
        self._written += len(data)
        protocol.write_publishes(data)
        self._was_behind = self._was_behind or self.is_behind
        for command_name, count in counts.items():
            self._observer.commands_sent(self._name, command_name, count)

    def _flush_later(self) -> None:
        self._flush_call = None
        self.flush()

    def _retain_for_reconnect(
        self, command_name: str, channel: bytes, lines: Sequence[bytes]
    ) -> None:
        """Set aside what can be sent later; count the rest as lost."""
        if command_name in _RECOVERABLE:
            self._lost += len(lines)
            return
        if command_name == EXTENSION:
            return
        room = MAX_KEPT - len(self._retained)
        self._retained.extend((command_name, channel, line) for line in lines[:room])
        if len(lines) > room:
            self._lost += len(lines) - room
            self._observer.commands_dropped(
                command_name, CommandDropReason.QUEUE_FULL, len(lines) - room
            )

    def drained(self) -> Deferred[None]:
        """Fire when all that was published was acknowledged, or is lost."""
        waiter: Deferred[None] = Deferred()
        self._waiters.append(waiter)
        self.flush()
        self._wake_drained()
        return waiter

    def acknowledged(self) -> None:
        """Look what may go on, now that there are fewer unanswered publishes."""
        self._notify_if_writable()
        self._wake_drained()

    def _wake_drained(self) -> None:
        if self._waiters and not self._pending and not self.unacknowledged:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.callback(None)

    # -- what the connection tells --------------------------------------------------

    def connection_up(self, protocol: RedisSenderProtocol) -> None:
        """Publish on this connection from now on."""
        self._protocol = protocol
        self._paused = False
        # What is said first is gathered, too.
        self._last_flush = self._clock.seconds()
        if self._on_connected is not None:
            self._on_connected()
        if self._lost:
            try:
                self._on_lost(self._lost)
            except Exception as error:  # noqa: BLE001 -- told, and tried again
                self._observer.failure("announcing positions again", error)
                protocol.cut("our positions could not be announced")
                self._drop_protocol(0)
                return
            self._lost = 0
        kept, self._retained = self._retained, deque()
        for command_name, channel, line in kept:
            self.publish(command_name, channel.decode(), [line])

    def connection_down(
        self, protocol: RedisSenderProtocol, count: int, *, is_refused: bool = False
    ) -> None:
        """Record that a connection ended with ``count`` unanswered publishes.

        :param is_refused: the first of them was refused.
        """
        if protocol is self._protocol:
            self._drop_protocol(count, is_refused=is_refused)

    def _drop_protocol(self, unacknowledged: int, *, is_refused: bool = False) -> None:
        self._protocol = None
        # Nothing waits for a transport that is gone.
        self._paused = False
        if self._flush_call is not None:
            self._flush_call.cancel()
            self._flush_call = None
        self._lost += unacknowledged
        done, self._written = self._written - unacknowledged + is_refused, 0
        if self._forgotten_upto > done:
            self._observer.failure(
                "keeping commands until Redis answers",
                BufferError(f"{MAX_KEPT} wait already; earlier ones may be lost"),
            )
        self._forgotten_upto = 0
        unanswered, self._unanswered = self._unanswered, deque()
        for end, (command_name, channel, lines) in unanswered:
            if end > done:
                self._retain_for_reconnect(
                    command_name, channel, lines[-(end - done) :]
                )
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for command_name, channel, lines in pending:
            self._retain_for_reconnect(command_name, channel, lines)
        self.acknowledged()

    def pause(self) -> None:
        """Write no more for now: the transport's buffer is full."""
        self._paused = self._was_behind = True

    def resume(self) -> None:
        """Write on."""
        self._paused = False
        self.flush()
        self._notify_if_writable()


@implementer(IPushProducer)
class _SenderProducer:
    """What the transport pauses. The protocol's own methods pause its reading."""

    def __init__(self, sender: RedisSender) -> None:
        self._sender = sender

    def pauseProducing(self) -> None:
        self._sender.pause()

    def resumeProducing(self) -> None:
        self._sender.resume()

    def stopProducing(self) -> None:
        """Do nothing; ``connectionLost`` follows."""


class RedisSenderProtocol(RedisProtocol):
    """One connection for publishing, and for txredisapi's commands beside.

    :ivar unacknowledged: publishes that were written and not answered yet.
    :ivar has_socket: the transport writes to one.
    """

    factory: SenderFactory

    @override
    def connectionMade(self) -> Any:
        #: What the next replies answer, in order: a run of so many publishes, or,
        #: for 0, one of txredisapi's commands.
        self._awaited: deque[int] = deque()
        self.unacknowledged = 0
        self._proved = False
        self._is_refused = False
        # Not behind TLS.
        self._writes_itself = IWriteDescriptor.providedBy(self.transport)
        # Behind TLS, too. Doubles of tests call themselves TCP.
        self.has_socket = ISystemHandle.providedBy(self.transport)
        self._may_fence = self.has_socket and not isinstance(
            self.transport.getPeer(), UNIXAddress
        )
        self._was_named = False
        self._unanswered_questions = 0
        return super().connectionMade()

    @override
    def connectionLost(self, why: Failure) -> None:
        self._awaited.clear()
        count, self.unacknowledged = self.unacknowledged, 0
        if self._unanswered_questions and not (
            self._why or self.factory.answers_questions
        ):
            self._hung_up_on_question()
        self.factory.sender.connection_down(self, count, is_refused=self._is_refused)
        super().connectionLost(why)

    def authenticated(self) -> None:
        """End the connection before this one at Redis, too, then go on.

        What Redis has not read of that one yet would be published behind what is said
        on this one: positions that are over, and half of a batch.
        """
        earlier = self.factory.earlier
        if (
            self._may_fence
            and earlier is not None
            and not self.factory.fencing_unavailable
        ):
            number, address = earlier
            self._ask_about_clients("KILL", "ID", number, "ADDR", address)
        super().authenticated()

    def _ask_name(self) -> None:
        """Ask how the connection is named, now that there is something to fence."""
        self._was_named = True
        if self._may_fence and not self.factory.fencing_unavailable:
            self._ask_about_clients("INFO").addCallback(self._is_client)

    def _ask_about_clients(self, *args: str) -> Deferred[Any]:
        self._unanswered_questions += 1
        answered: Deferred[Any] = self.execute_command("CLIENT", *args)
        return answered.addCallbacks(self._question_answered, self._cannot_fence)

    def _question_answered(self, answer: Any) -> Any:
        self._unanswered_questions -= 1
        self.factory.answers_questions = True
        return answer

    def _hung_up_on_question(self) -> None:
        factory = self.factory
        factory.hang_ups += 1
        if factory.hang_ups >= MAX_HANG_UPS:
            factory.fencing_refused("the server hangs up on CLIENT INFO")

    def _is_client(self, info: Any) -> None:
        text = info.decode("utf-8", "replace") if isinstance(info, bytes) else info
        if isinstance(text, str) and (found := _CLIENT.match(text)) is not None:
            self.factory.earlier = found[1], found[2]

    def _cannot_fence(self, failure: Failure) -> None:
        error = failure.value
        # If the connection is gone, the next one asks; without a password nothing goes.
        if (
            not isinstance(error, txredisapi.ResponseError)
            or str(error).startswith("NOAUTH")
            or self.factory.fencing_unavailable
        ):
            return
        self._question_answered(None)
        # Anything else may be otherwise on the next connection.
        if str(error).startswith("NOPERM") or "unknown" in str(error).lower():
            self.factory.fencing_refused(str(error))
        else:
            self.factory.observer.feature_unavailable(_FENCING, str(error))

    @override
    def link_established(self) -> None:
        super().link_established()
        self.transport.registerProducer(_SenderProducer(self.factory.sender), True)
        self.factory.sender.connection_up(self)

    @override
    def close(self) -> None:
        # A TLS transport with a producer waits for it before it closes.
        self.transport.unregisterProducer()
        super().close()

    def write_publishes(self, data: list[bytes]) -> None:
        """Write PUBLISH commands that were encoded already, at once."""
        self.unacknowledged += len(data)
        if self._awaited and self._awaited[-1]:
            self._awaited[-1] += len(data)
        else:
            self._awaited.append(len(data))
        self.transport.write(b"".join(data))
        if not self._was_named:
            self._ask_name()
        # The reactor would do so on its next round, and learns of errors there.
        if self._writes_itself and not self.transport.disconnecting:
            self.transport.doWrite()

    @override
    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        self._awaited.append(0)
        try:
            return super().execute_command(*args, **kwargs)
        except BaseException:
            # Nothing was written, so nothing will be answered.
            self._awaited.pop()
            raise

    @override
    def read_replies(self) -> bool:
        gets = self._reader.gets
        awaited = self._awaited
        reply = gets()
        if reply is False:
            return False
        acknowledged = 0
        refusal = None
        while reply is not False:
            if awaited and awaited[0]:
                if not isinstance(reply, int):
                    refusal = reply
                    break
                acknowledged += 1
                self.factory.sender.receivers = reply
                if awaited[0] == 1:
                    awaited.popleft()
                else:
                    awaited[0] -= 1
            else:
                if awaited:
                    awaited.popleft()
                self.replyReceived(self.tryConvertData(reply))
            reply = gets()
        self.unacknowledged -= acknowledged
        if refusal is not None:
            # Counted as lost with all behind it; our positions go out again.
            self._is_refused = True
            self.cut(f"Redis refuses to publish: {excerpt(str(refusal))}")
        elif acknowledged and not self._proved:
            self._proved = True
            self.link_proved()
        self.factory.sender.acknowledged()
        return True


class SenderFactory(SynapseRedisFactory):
    """Keeps the connection of one :class:`RedisSender`.

    :ivar earlier: the number that Redis gave to the newest connection, and the address
        from which it sees it, behind address translation, too. Both, since another
        Redis, or one that started again, gives the same numbers.
    :ivar fencing_unavailable: Redis will not do it, or cannot.
    :ivar answers_questions: the server answered what fencing asks, if only once.
    :ivar hang_ups: so many connections the server ended instead of an answer.
    """

    protocol = RedisSenderProtocol

    def __init__(self, *args: Any, sender: RedisSender, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sender = sender
        self.earlier: tuple[str, str] | None = None
        self.fencing_unavailable = False
        self.answers_questions = False
        self.hang_ups = 0

    def fencing_refused(self, why: str) -> None:
        """Fence no more, and report it."""
        self.fencing_unavailable = True
        self.observer.feature_unavailable(_FENCING, why)
