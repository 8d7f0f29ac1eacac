"""The package's own driver of a reader, in step with a world.

Theory of operation: a :class:`~scripts.tools.explore.world.World` models what drives a
reader, so that its states can be stored. :class:`Driven` is the real thing: the
:class:`~synapse_replication.handlers.receiving.writer_receiver.WriterReceiver` of the
package, with its queue and its sources of pages. Its clock, its source and its sink are
arguments, and respond when the world says so. After each event, both must agree: about
the state of their readers, the position, the delivered rows, the reports, the timer,
and whether something is in progress. :func:`compare` runs sequences through both.

What arrives while a page is fetched is given up at once, as in the world; and where the
world waits before it resumes, so that more may be given up, the driver does, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import attrs
from twisted.internet.defer import Deferred
from typing_extensions import override

from scripts.tools.explore.world import MOMENT, Bounds, Event, Kind, World, policy_of
from synapse_replication.errors import DatabaseBehindError
from synapse_replication.handlers import events
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.handlers.receiving.context import (
    ReactorYielder,
    ReceiverOptions,
    StreamContext,
)
from synapse_replication.handlers.receiving.items import (
    LostRow,
    OfWriter,
    ReportedEpoch,
    ReportedPosition,
)
from synapse_replication.handlers.receiving.queue import DrainedQueue
from synapse_replication.handlers.receiving.received_stream import (
    PageSource,
    ReceivedStream,
)
from synapse_replication.handlers.receiving.writer_receiver import WriterReceiver
from synapse_replication.handlers.timer import Backoff
from synapse_replication.streams.pages import Page
from synapse_replication.streams.reader_decisions import (
    Action,
    Ask,
    BeginEpoch,
    Connected,
    Refuted,
)
from synapse_replication.streams.stream import (
    RemovedWriter,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import RdataGroup

#: The text of a row that cannot be decoded.
UNREADABLE = b"?"


class DisagreementError(Exception):
    """The driver and the world are in different states."""


class ReportingWorld(World):
    """A world that records what it delivers and reports."""

    __slots__ = ("deliveries", "reports")

    deliveries: list[int]
    reports: list[tuple[Any, ...]]

    @override
    def _deliver(self, token: int, life: int) -> None:
        self.deliveries.append(token)
        super()._deliver(token, life)

    @override
    def _execute(self, action: Action) -> None:
        if isinstance(action, Connected):
            self.reports.append(("connected", str(action.link)))
        elif isinstance(action, Ask):
            self.reports.append(("ask", str(action.link)))
        elif isinstance(action, Refuted):
            self.reports.append(("refuted", action.token, action.last_token))
        super()._execute(action)


@attrs.frozen
class _Connection:
    name: str


@attrs.frozen(eq=False)
class _Link:
    connection: _Connection


@attrs.define(eq=False)
class _Call:
    """A scheduled call of the clock."""

    func: Callable[[], object]
    is_active: bool = True

    def active(self) -> bool:
        return self.is_active

    def cancel(self) -> None:
        self.is_active = False


class _Observer(ReplicationObserver):
    def __init__(self) -> None:
        self.reports: list[tuple[Any, ...]] = []

    @override
    def failure(self, what: str, error: BaseException) -> None:
        raise error

    @handles(events.StreamConnected)
    def _stream_connected(self, event: events.StreamConnected) -> None:
        self.reports.append(("connected", event.connection))

    @handles(events.PositionRefuted)
    def _position_refuted(self, event: events.PositionRefuted) -> None:
        self.reports.append(("refuted", event.token, event.last_token))


class _SteppedReceiver(WriterReceiver):
    """The driver, which waits where the world waits."""

    driven: Driven
    is_beginning = False

    @override
    async def resume(self) -> None:
        if self.driven.is_before_resumption:
            await self.driven.wait()
        await super().resume()

    @override
    def _execute(self, action: Action) -> Awaitable[None] | None:
        self.is_beginning = isinstance(action, BeginEpoch)
        return super()._execute(action)


class Driven:
    """A world, and the real driver in the same world.

    :ivar position: of the driver's host.
    :ivar deliveries: the tokens of the rows that the driver delivered.
    """

    def __init__(self, kind: Kind, bounds: Bounds) -> None:
        self.world = ReportingWorld.begin(kind, bounds)
        self.world.deliveries, self.world.reports = [], []
        self.position = 0
        self.deliveries: list[int] = []
        self._kind = kind
        self._policy = policy_of(kind)
        self._observer = _Observer()
        self._links: dict[int, _Link] = {}
        self._start(None)

    def _start(self, epoch: str | None) -> None:
        """Start a process."""
        self._links = {}
        self._calls: list[_Call] = []
        self._due: Callable[[], object] | None = None
        # What the sink or the world is waiting for, and the effect of the sink.
        self._waiting: Deferred[None] | None = None
        self._effect: Callable[[], None] = lambda: None
        # The requested pages, and whether each was requested from the backlog.
        self._asked: list[tuple[Deferred[StreamUpdateResult | None], bool]] = []
        self._answer: StreamUpdateResult | Exception | None = None
        self._falls_through = self._has_given_up = False
        self._is_from_backlog = False
        self._is_unreadable = self._has_failed_to_decode = False
        description = StreamDescription(
            "stream",
            self,  # type: ignore[arg-type]
            idempotent=self._policy.idempotent,
            resettable=self._policy.resettable,
            held_in_memory=self._policy.held_in_memory,
        )
        options = ReceiverOptions(backoff=Backoff(jitter=lambda: 0.0))
        stream = _Stream(description, self)
        context = StreamContext(
            stream,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self._observer,
            options,
            ReactorYielder(self, 10**9, 1e9),  # type: ignore[arg-type]
            _Backlog(self),  # type: ignore[arg-type]
        )
        self._queue = DrainedQueue(context)
        shared = ReceivedStream(
            context,
            self._policy,
            self._queue,
            self,  # type: ignore[arg-type]
            PageSource(context),
            self,  # type: ignore[arg-type]
            lambda link: self._observer.reports.append(("ask", link.connection.name)),
        )
        self._writer = _SteppedReceiver("writer", shared, epoch, ())
        self._writer.driven = self

    # -- the host: clock, background processes, search, decoder -----------------------

    @property
    def rows(self) -> Driven:
        """The sink."""
        return self

    @property
    def clock(self) -> Driven:
        """The clock, which stands still."""
        return self

    def seconds(self) -> float:
        return 0.0

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> _Call:
        self._calls.append(_Call(partial(func, *args)))
        return self._calls[-1]

    def run_as_background_process(
        self, description: str, func: Callable[[], Any]
    ) -> Deferred[Any]:
        return Deferred.fromCoroutine(func())

    def request(self) -> None:
        """Search for removed writers: that is an event of the world."""

    def decode(self, texts: Sequence[bytes]) -> Sequence[bytes] | None:
        return None if UNREADABLE in texts else texts

    def decode_page(
        self, instance_name: str, page: Page, *, skips_invalid: bool
    ) -> Iterator[tuple[int, list[bytes] | None]]:
        for token in page.tokens:
            is_unreadable, self._is_unreadable = self._is_unreadable, False
            self._has_failed_to_decode = is_unreadable
            yield token, None if is_unreadable else [b""]

    # -- the sink ---------------------------------------------------------------------

    def _handle(
        self, kinds: Iterable[str], effect: Callable[[], None]
    ) -> Deferred[None] | None:
        """Wait if the world does, and take effect then."""
        busy = self.world.busy
        if busy is None or busy[0] not in kinds:
            effect()
            return None
        self._effect = effect
        return self.wait()

    @property
    def is_before_resumption(self) -> bool:
        """Whether the world waits before it resumes, so that more may be given up."""
        return self._has_failed_to_decode or self.world.busy == ("resume",)

    def wait(self) -> Deferred[None]:
        """Wait until the world continues."""
        if self._waiting is not None:
            raise DisagreementError("two things are in progress")
        self._waiting = Deferred()
        return self._waiting

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: Sequence[Any]
    ) -> Deferred[None] | None:
        def deliver() -> None:
            self.deliveries.append(token)
            self.position = max(self.position, token)

        return self._handle(("row", "page"), deliver)

    def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> Deferred[None] | None:
        def move() -> None:
            self.position = token

        kinds = () if self._writer.is_beginning else ("rewind", "advance")
        return self._handle(kinds, move)

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Deferred[None] | None:
        return self._handle(("begin",), lambda: None)

    def saved_epochs(self) -> dict[tuple[str, str], str]:
        return {}

    # -- the source -------------------------------------------------------------------

    def ask_backlog(self) -> Deferred[StreamUpdateResult | None]:
        """Request a page from the backlog of the writer."""
        return self._ask(is_backlog=True)

    def ask_source(self) -> Deferred[StreamUpdateResult | None]:
        """Request a page from the source of the stream."""
        if not self._falls_through:
            return self._ask(is_backlog=False)
        self._falls_through = False
        answered: Deferred[StreamUpdateResult | None] = Deferred()
        self._fire(answered)
        return answered

    def _ask(self, *, is_backlog: bool) -> Deferred[StreamUpdateResult | None]:
        asked: Deferred[StreamUpdateResult | None] = Deferred()
        self._asked.append((asked, is_backlog))
        return asked

    def _fire(self, asked: Deferred[StreamUpdateResult | None]) -> None:
        if isinstance(self._answer, Exception):
            asked.errback(self._answer)
        else:
            asked.callback(self._answer)

    def _respond(self, answer: StreamUpdateResult | Exception) -> None:
        """Answer the last request. The others are not wanted any more."""
        self._answer = answer
        asked, is_backlog = self._asked.pop()
        # The backlog does not have the page, so the source is asked, too.
        self._falls_through = is_backlog and not self._is_from_backlog
        self._is_from_backlog = False
        if self._falls_through:
            asked.callback(None)
        else:
            self._fire(asked)

    # -- events -----------------------------------------------------------------------

    def run(self, sequence: Sequence[Event]) -> bool:
        """Apply events to the world and to the driver.

        The driver finds that a row of a page cannot be decoded as soon as it comes to
        that row, without waiting. So this must follow at once in the sequence.

        :return: whether the sequence can be run.
        :raises DisagreementError: if their states differ after an event.
        """
        for event, following in zip_longest(sequence, sequence[1:], fillvalue=()):
            self._is_unreadable = following == ("unreadable",)
            self._apply(event)
            if self._is_unreadable:
                return False
            if following != ("unreadable",):
                self._compare(event)
        return True

    def _apply(self, event: Event) -> None:
        """Apply an event to the world, and then to the driver."""
        world = self.world
        name, *arguments = event
        was_idle, was_busy, was_running = world.is_idle, world.busy, world.timer != 0
        answer, epoch = world.answer, world.reader.epoch
        was_waiting = self._waiting
        item: OfWriter | None = None
        prev: int | None = None
        if name in ("message", "unreadable row"):
            link = world.links[arguments[0]]
            prev, new, is_row = world.log[link.at]
            if is_row:
                token = new if world.is_whole(link) else None
                text = UNREADABLE if name == "unreadable row" else b""
                item = RdataGroup("stream", "writer", [token], [text])
        world.apply(event)
        if item is None and name in _ANNOUNCEMENTS:
            item = self._announcement(event, prev)
        if item is not None:
            self._arrive(arguments[0], item, was_idle)
        elif name in self._acts:
            self._acts[name](self, *arguments, was_busy, answer, epoch)
        # An earlier end may still be in the queue.
        if name in _PASSING and was_running and world.timer == 0:
            self._pass_timer()
        if (
            self._waiting is not None
            and was_waiting is self._waiting
            and name != "unreadable"
            and world.busy != was_busy
        ):
            # No fault can interrupt it any more.
            self._done()

    def _announcement(self, event: Event, prev: int | None) -> OfWriter | None:
        """Return what an event announces, unless that changes nothing.

        :param prev: of a message, its token before.
        """
        name, *arguments = event
        world, number, reader = self.world, arguments[0], self._writer.reader
        if name == "garble":
            return LostRow("writer")
        link, token = world.links[number], world.links[number].token
        is_hello = name in ("first hello", "hello")
        if name == "message":
            assert prev is not None
            is_hello = prev == token and world.states_epochs
            if not is_hello:
                return PositionCommand("stream", "writer", prev, token)
        if is_hello or name == "epoch":
            epoch = str(link.life)
            if reader.follows_epoch(self._links[number], epoch):
                return None
            return ReportedEpoch("writer", token, epoch, is_hello)
        is_report = name in ("report", "false report")
        prev = token
        if name == "range":
            prev = max(world.rows(0, token), default=0)
            is_report = arguments[1] == "reported"
        elif name == "lie":
            prev, token = arguments[1:]
        elif name == "false report":
            prev = token = arguments[1]
        if reader.follows(self._links[number], token):
            return None
        if is_report:
            return ReportedPosition("writer", prev, token, False)
        return PositionCommand("stream", "writer", prev, token)

    def _arrive(self, number: int, item: OfWriter, is_idle: bool) -> None:
        link: Any = self._links[number]
        if is_idle:
            self._queue.call(partial(self._writer.handle, link, item))
        else:
            if not self._has_given_up:
                self._queue.overflow_count += 1
            self._has_given_up = True
            self._writer.give_up(link, item)

    def _up(self, number: int, *_: Any) -> None:
        link: Any = _Link(_Connection(str(number)))
        self._links[number] = link
        self._writer.link_up(link)

    def _break(self, number: int, *_: Any) -> None:
        link: Any = self._links.pop(number)
        self._writer.link_lost(link)

    def _remove(self, *arguments: Any) -> None:
        self._search()

    def _search(self, *_: Any) -> None:
        world = self.world
        upto = world.own_last()
        is_deleted = world.removed == 2
        if upto <= self.position:
            if not is_deleted:
                return
            upto = self.position
        removed = RemovedWriter(upto, is_deleted)
        self._queue.call(partial(self._writer.found_removed, removed))

    def _stored(self, *_: Any) -> None:
        token = min(self.world.own_last(), self.world.announceable())
        self._queue.call(partial(self._writer.found_stored, token))

    def _backlog(self, *_: Any) -> None:
        self._is_from_backlog = True

    def _page(self, _busy: Any, answer: Any, _epoch: Any) -> None:
        rows, upto, last, life, _ = answer
        epoch = str(life) if self._kind is Kind.MEMORY else None
        updates: list[tuple[int, Any]] = [(token, None) for token in rows]
        self._respond(StreamUpdateResult(updates, upto, False, last, epoch))

    def _no_answer(self, *_: Any) -> None:
        self._respond(RuntimeError("no answer"))

    def _behind(self, *_: Any) -> None:
        self._respond(DatabaseBehindError("the standby lacks the row"))

    def _done(self, *_: Any) -> None:
        waiting, self._waiting = self._waiting, None
        effect, self._effect = self._effect, lambda: None
        if waiting is None:
            raise DisagreementError("the driver is not doing anything")
        effect()
        waiting.callback(None)

    def _fail(self, *_: Any) -> None:
        waiting, self._waiting = self._waiting, None
        self._effect = lambda: None
        if waiting is None:
            raise DisagreementError("the driver is not doing anything")
        waiting.errback(RuntimeError("the sink failed"))

    def _unreadable(self, *_: Any) -> None:
        self._has_failed_to_decode = False
        if self.world.busy is None:
            self._done()

    def _overflow(self, *_: Any) -> None:
        self._has_given_up = False

    def _drained(self, busy: Any, *_: Any) -> None:
        if busy is None or self._has_given_up:
            self._queue.put(self._writer.resumption)

    def _pass_timer(self) -> None:
        """Let the time of the timer pass; what it calls is still in the queue."""
        active = [call for call in self._calls if call.is_active]
        if len(active) != 1:
            raise DisagreementError(f"{len(active)} timers are running")
        active[0].cancel()
        self._due = active[0].func

    def _timer(self, *_: Any) -> None:
        due, self._due = self._due, None
        if due is None:
            raise DisagreementError("no timer is due")
        due()

    def _second(self, *_: Any) -> None:
        self._writer.reader.end_check_interval()

    def _moment(self, *_: Any) -> None:
        self._writer.reader.elapse(MOMENT)

    def _reader_crash(self, _busy: Any, _answer: Any, epoch: str | None) -> None:
        self._start(epoch)

    #: The method that applies an event to the driver, by the event's name.
    _acts: ClassVar[Mapping[str, Callable[..., None]]] = {
        "up": _up,
        "break": _break,
        "remove": _remove,
        "search": _search,
        "stored": _stored,
        "backlog": _backlog,
        "page": _page,
        "no answer": _no_answer,
        "behind": _behind,
        "done": _done,
        "fail": _fail,
        "unreadable": _unreadable,
        "overflow": _overflow,
        "drained": _drained,
        "timer": _timer,
        "second": _second,
        "moment": _moment,
        "reader crash": _reader_crash,
    }

    # -- comparison -------------------------------------------------------------------

    def _state(self) -> tuple[Any, ...]:
        frozen, links = self._writer.reader.freeze(with_epochs=self.world.states_epochs)
        numbers: dict[Any, int] = {link: n for n, link in self._links.items()}
        is_running = any(call.is_active for call in self._calls)
        return (
            frozen[1:],
            {numbers[link]: state for link, state in links.items()},
            self.position,
            self.deliveries,
            self._observer.reports,
            is_running,
            self._waiting is not None,
        )

    def _compare(self, event: Event) -> None:
        world = self.world
        frozen, links = world.reader.freeze(with_epochs=world.states_epochs)
        # The position of a reader is read again before it matters.
        expected = (
            frozen[1:],
            links,
            world.position,
            world.deliveries,
            world.reports,
            world.timer != 0,
            world.busy is not None,
        )
        for name, of_world, of_driver in zip(
            _COMPARED, expected, self._state(), strict=True
        ):
            if of_world != of_driver:
                raise DisagreementError(
                    f"after {event}: {name}: the world has {of_world}, the driver "
                    f"{of_driver}"
                )


_COMPARED = (
    "reader",
    "links",
    "position",
    "deliveries",
    "reports",
    "is the timer running",
    "is something in progress",
)
#: The events after which the timer may have ended.
_PASSING = frozenset({"time", "moment"})
_ANNOUNCEMENTS = frozenset(
    {
        "message",
        "garble",
        "position",
        "report",
        "range",
        "epoch",
        "first hello",
        "hello",
        "lie",
        "false report",
    }
)


@attrs.frozen
class _Stream:
    """The stream of a world, as the driver sees it."""

    description: StreamDescription
    driven: Driven

    def current_token(self, instance_name: str) -> int:
        return self.driven.position

    def is_plausible(self, instance_name: str, token: int) -> bool:
        return self.driven.world.is_plausible_at(self.driven.position, token)

    def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> Awaitable[Any]:
        return self.driven.ask_source()


@attrs.frozen
class _Backlog:
    """The backlog of the writer, as the driver sees it."""

    driven: Driven

    def get_updates_since(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> Awaitable[Any]:
        return self.driven.ask_backlog()


@attrs.frozen
class Comparison:
    """The result of a comparison.

    :ivar sequences: the number of sequences that were run.
    :ivar depth: the length of the longest one.
    :ivar reason: how the driver and the world differ; ``None`` if they agree.
    :ivar events: the sequence that leads to the difference.
    """

    sequences: int
    depth: int
    reason: str | None = None
    events: Sequence[Event] = ()


def compare(kind: Kind, bounds: Bounds, states: int) -> Comparison:
    """Run each event of each of the first ``states`` states of a world through both.

    States are found breadth first; a state is reached by the sequence that found it.
    """
    found: dict[Any, tuple[Event, ...]] = {_key(World.begin(kind, bounds)): ()}
    waiting = deque(found.values())
    sequences = depth = 0
    while waiting:
        path = waiting.popleft()
        world = _replay(kind, bounds, path)
        for event in list(world.events()):
            events = (*path, event)
            try:
                driven = Driven(kind, bounds)
                if not driven.run(events):
                    continue
            except Exception as error:  # noqa: BLE001 -- any of them is a finding
                reason = f"{type(error).__name__}: {error}"
                return Comparison(sequences, len(events), reason, events)
            sequences, depth = sequences + 1, len(events)
            key = _key(driven.world)
            if key not in found and len(found) < states:
                found[key] = events
                waiting.append(events)
    return Comparison(sequences, depth)


def _key(world: World) -> Any:
    frozen, left, _ = world.freeze()
    return frozen, left


def _replay(kind: Kind, bounds: Bounds, events: Iterable[Event]) -> World:
    world = World.begin(kind, bounds)
    for event in events:
        world.apply(event)
    return world
