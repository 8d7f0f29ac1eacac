"""The package's own driver of a reader, in step with a world.

Theory of operation: a :class:`~scripts.tools.explore.world.World` models what drives a
reader, so that its states can be stored. :class:`Driven` is the real thing: the
:class:`~synapse_replication.handlers.receiving.writer_receiver.WriterReceiver` of the
package, with its queue and its sources of pages. Its clock, its source and its sink are
arguments, and respond when the world says so. After each event, both must agree: about
the state of their readers, the position, the delivered rows, the reports, the timer,
and whether something is in progress. ``comparison.py`` runs sequences through both.

What arrives is put into the driver's queue, which has room for one item only, and is
given up, parked or handled there. A world has no queue: what waits is still on its way.
So an item may be in the driver's queue before its message is handled in the world:

- What the world gives up when a page was handled was parked while it was fetched.
- If another writer's rows are in progress, the queue gives up what arrives.
- What the world gives up during a fetch does not fit into what is parked; or it is
  given up by the queue, if the driver would continue at once and the world does not.
- If items are *delayed*, what the world handles after a fetch was parked, too; and rows
  of a link that the world handles one after the other arrived together, and are handled
  in slices of one row. If the queue overflows between two of them, the rest of them is
  given up.

A sequence whose items could not have arrived in this way is skipped. Late rows, and
rows of several writers in one item, are not compared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import attrs
from twisted.internet.defer import Deferred
from typing_extensions import override

from scripts.tools.explore.reader_values import elapse, end_check_interval
from scripts.tools.explore.steps import (
    RESUME,
    UNREADABLE,
    ArrivalMode,
    ReportingWorld,
    WorldStep,
    state_of,
    take_step,
)
from scripts.tools.explore.world import (
    DISTANCE,
    MOMENT,
    Bounds,
    Event,
    Kind,
    policy_of,
)
from synapse_replication.errors import DatabaseBehindError
from synapse_replication.handlers import events
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.handlers.receiving.context import (
    ReactorYielder,
    ReceiverOptions,
    StreamContext,
)
from synapse_replication.handlers.receiving.items import (
    OfWriter,
    size_of,
)
from synapse_replication.handlers.receiving.queue import Call, DrainedQueue, QueueItem
from synapse_replication.handlers.receiving.stream_parts import (
    PageSource,
    StreamParts,
)
from synapse_replication.handlers.receiving.writer_receiver import WriterReceiver
from synapse_replication.handlers.timer import Backoff
from synapse_replication.streams.pages import Page
from synapse_replication.streams.stream import (
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.wire.rdata import RdataGroup

#: The options of a driver whose queue is full, or is not.
_FULL: Final = ReceiverOptions(max_queue_size=0, backoff=Backoff(jitter=lambda: 0.0))
_ROOMY: Final = attrs.evolve(_FULL, max_queue_size=1_000)


class DisagreementError(Exception):
    """The driver and the world are in different states."""


@attrs.frozen(eq=False)
class _Arrival:
    """An item that arrives on a link, as an item of the driver's queue."""

    writer: WriterReceiver
    link: Any
    item: OfWriter

    @property
    def length(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return size_of(self.item)

    def run(self) -> Awaitable[None] | None:
        return self.writer.handle(self.link, self.item)

    def give_up(self) -> Iterable[QueueItem]:
        self.writer.give_up(self.link, self.item)
        return (self.writer.resumption,)


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


class Driven:
    """The real driver in a world.

    :param delays_from: from which event on items are delayed, by its index; ``None`` if
        none is. See the module's docstring.
    :ivar position: of the driver's host.
    :ivar deliveries: the tokens of the rows that the driver delivered.
    """

    def __init__(
        self, kind: Kind, bounds: Bounds, delays_from: int | None = None
    ) -> None:
        self.world = ReportingWorld.begin(kind, bounds)
        self.position = 0
        self.deliveries: list[int] = []
        self._delays_from = delays_from
        self._policy = policy_of(kind)
        self._observer = _Observer()
        self._steps: list[WorldStep] = []
        # The last step of the world that the driver has to take into account.
        self._now: WorldStep | None = None
        # The steps whose items are in the driver already.
        self._ahead: set[int] = set()
        # The steps before which the queue overflows.
        self._overflows: set[int] = set()
        self._start(None)

    def _start(self, epoch: str | None) -> None:
        """Start a process."""
        self._links: dict[int, _Link] = {}
        self._calls: list[_Call] = []
        self._due: Callable[[], object] | None = None
        # What the sink is waiting for, and its effect.
        self._waiting: Deferred[None] | None = None
        self._effect: Callable[[], None] = lambda: None
        # The rows of another writer that are in progress.
        self._other: Deferred[None] | None = None
        # The requested pages, and whether each was requested from the backlog.
        self._asked: list[tuple[Deferred[StreamUpdateResult | None], bool]] = []
        self._answer: StreamUpdateResult | Exception | None = None
        self._falls_through = self._is_from_backlog = False
        self._is_unreadable = self._begins_epoch = False
        # The rows that arrive together with the next one.
        self._rows = RdataGroup("stream", "writer", [], [])
        description = StreamDescription(
            "stream",
            self,  # type: ignore[arg-type]
            idempotent=self._policy.idempotent,
            resettable=self._policy.resettable,
            held_in_memory=self._policy.held_in_memory,
        )
        self._context = context = StreamContext(
            _Stream(description, self),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self._observer,
            _FULL,
            ReactorYielder(self, 10**9, 1e9),  # type: ignore[arg-type]
            _Backlog(self),  # type: ignore[arg-type]
        )
        self._queue = DrainedQueue(context)
        context.options = _ROOMY
        shared = StreamParts(
            context,
            self._policy,
            self._queue,
            self,  # type: ignore[arg-type]
            PageSource(context),
            self,  # type: ignore[arg-type]
            lambda link: self._observer.reports.append(("ask", link.connection.name)),
        )
        self._writer = WriterReceiver("writer", shared, epoch, ())

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

    decode_valid = decode

    def decode_page(
        self, instance_name: str, page: Page, *, skips_invalid: bool
    ) -> Iterator[tuple[int, list[bytes] | None]]:
        for token in page.tokens:
            is_unreadable, self._is_unreadable = self._is_unreadable, False
            yield token, None if is_unreadable else [b""]

    # -- the sink ---------------------------------------------------------------------

    def _handle(
        self, kinds: Iterable[str], effect: Callable[[], None]
    ) -> Deferred[None] | None:
        """Wait if the world does, and take effect then."""
        assert self._now is not None
        busy = self._now.busy
        if busy is None or busy[0] not in kinds:
            effect()
            return None
        if self._waiting is not None:
            raise DisagreementError("two things are in progress")
        self._effect = effect
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

        # With an epoch that begins, the position is saved once more.
        kinds = () if self._begins_epoch else ("rewind", "advance")
        self._begins_epoch = False
        return self._handle(kinds, move)

    def on_epoch(
        self, stream_name: str, instance_name: str, epoch: str
    ) -> Deferred[None] | None:
        waiting = self._handle(("begin",), lambda: None)
        self._begins_epoch = waiting is not None and self.position > 0
        return waiting

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

    def is_plausible(self, token: int) -> bool:
        """Return whether the reader's process regards a token as plausible."""
        assert self._now is not None
        known = self.position if self.world.in_memory else self._now.known
        return token <= known + DISTANCE

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
        """Apply events to the world, and then to the driver.

        :return: whether the sequence can be run.
        :raises DisagreementError: if their states differ after an event.
        """
        self._steps = [take_step(self.world, event) for event in sequence]
        index = 0
        while index < len(self._steps):
            after = self._following(index)
            if after is None:
                return False
            if not after:
                # The driver does not stop where the sequence ends.
                return True
            step, self._now = self._steps[index], self._steps[after - 1]
            if not self._take(index, step) or self._is_unreadable:
                return False
            # While the world resumes, the driver's queue waits.
            if self._now.busy != RESUME:
                self._compare(self._now)
            index = after
        return True

    def _following(self, index: int) -> int | None:
        """Return the end of the steps that the driver takes in one go, from ``index``.

        :return: ``None`` if it cannot take them; 0 if it takes more than there are.
        """
        steps, step = self._steps, self._steps[index]
        name = step.event[0]
        if name in _ENDING_FETCHES and self._other is not None:
            if steps[index - 1].can_act:
                # The driver would have acted before.
                return None
            self._release()
        self._let_arrive(index)
        after = index + 1
        if index in self._overflows:
            after += 3
        # The driver finds that a row cannot be decoded as soon as it comes to that row.
        self._is_unreadable = after < len(steps) and steps[after].event == _UNREADABLE
        after += self._is_unreadable
        if self._other is not None and not _is_releasing(step):
            return after
        while True:
            last = steps[after - 1]
            if last.busy == RESUME:
                if after == len(steps):
                    return 0
                if steps[after].event != DONE and after not in self._ahead:
                    return None
            elif (
                last.busy is not None
                or not any(each >= after for each in self._ahead)
                or last.is_fetching
                or last.mode is ArrivalMode.FULL
                or after == len(steps)
            ):
                return after
            after += 1

    def _let_arrive(self, index: int) -> None:
        """Put the items that arrive later in the world into the driver."""
        step = self._steps[index]
        if step.event[0] in _PARKING:
            for later in self._parked_at(index):
                self._ahead.add(later)
                arrival = self._steps[later]
                if arrival.argument is not None:
                    self._put(arrival.event[1], arrival.argument)
        elif (
            self._delays(index)
            and step.mode is ArrivalMode.HANDLED
            and index not in self._ahead
            and step.row_on(step.event[1])
        ):
            self._rows = self._with_next_row(index)

    def _delays(self, index: int) -> bool:
        return self._delays_from is not None and index >= self._delays_from

    def _parked_at(self, index: int) -> Iterator[int]:
        """Iterate over the items that can be parked while a page is fetched."""
        for later in self._arrivals_after(index):
            is_handled = self._steps[later].mode is ArrivalMode.HANDLED
            if is_handled and not self._delays(index):
                return
            yield later

    def _arrivals_after(self, index: int) -> Iterator[int]:
        """Iterate over the items that the driver handles after those that it has.

        If it gives up what is parked when it resumes, it gives up all of it.
        """
        is_given_up = False
        for later in range(index + 1, len(self._steps)):
            step = self._steps[later]
            if step.event[0] in _QUIET:
                continue
            before = self._steps[later - 1].resumptions
            if (
                step.mode not in (ArrivalMode.HANDLED, ArrivalMode.RESUMING)
                or before != self._steps[index].resumptions
                or (is_given_up and step.mode is ArrivalMode.HANDLED)
            ):
                return
            is_given_up = step.mode is ArrivalMode.RESUMING
            if later not in self._ahead:
                yield later

    def _with_next_row(self, index: int) -> RdataGroup:
        """Return the row of a step, with the next ones that arrive together with it.

        That is the next row on the link, and one that is given up after them.
        """
        steps, number = self._steps, self._steps[index].event[1]
        joined = [index]
        following = next(self._arrivals_after(index), None)
        if following is not None and steps[following].row_on(number):
            self._ahead.add(following)
            joined.append(following)
        rest = joined[-1] + 3
        if self._is_rest(rest, number):
            self._overflows.add(rest - 2)
            joined.append(rest)
        groups: list[RdataGroup] = [steps[each].argument for each in joined]
        return RdataGroup(
            "stream",
            "writer",
            [token for group in groups for token in group.tokens],
            [row for group in groups for row in group.rows],
        )

    def _is_rest(self, index: int, number: int) -> bool:
        """Return whether a row is given up, because the queue overflowed before it.

        That is so if the row before it was being handled.
        """
        steps = self._steps
        return (
            index + 1 < len(steps)
            and steps[index].row_on(number)
            and steps[index + 1].event == ("drained",)
            and steps[index - 1].event == ("overflow",)
            and steps[index - 2].event == DONE
            and steps[index - 2].was_busy[0] == "row"
            and steps[index - 2].busy is None
            and not steps[index - 2].is_fetching
        )

    def _take(self, index: int, step: WorldStep) -> bool:
        """Let the driver take a step; return whether it can."""
        name, *arguments = step.event
        if self._other is not None and name in _QUEUED:
            # The driver would have continued before.
            return False
        was_waiting = self._waiting
        if step.mode is not None:
            if index not in self._ahead and not self._arrive(index, step):
                return False
        elif name in self._acts:
            if index in self._overflows:
                self._queue.put(self._writer.resumption)
                self._queue.put(self._writer.resumption)
            self._acts[name](self, *arguments, step)
        if self._other is not None and _is_releasing(step):
            self._release()
        if step.ends_timer:
            self._pass_timer()
        if (
            self._waiting is not None
            and was_waiting is self._waiting
            and step.busy != step.was_busy
        ):
            # No fault can interrupt it any more.
            self._done()
        return True

    def _arrive(self, index: int, step: WorldStep) -> bool:
        """Let an item arrive; return whether it can."""
        item, number = step.argument, step.event[1]
        if item is None:
            return True
        if step.mode is ArrivalMode.HANDLED:
            if self._other is not None:
                # The driver would have begun another fetch before.
                return False
            if self._delays(index) and isinstance(item, RdataGroup):
                item = self._rows
        elif step.mode is ArrivalMode.FETCHING:
            if self._other is None and step.is_fetching and not step.can_act:
                self._context.options = _FULL
                self._put(number, item)
                self._context.options = _ROOMY
                return True
            self._occupy()
        self._put(number, item)
        return True

    def _put(self, number: int, item: OfWriter) -> None:
        self._queue.put(_Arrival(self._writer, self._links[number], item))

    def _occupy(self) -> None:
        """Fill the queue, behind rows of another writer unless this one is busy."""
        if self._queue.is_idle:
            other: Deferred[None] = Deferred()
            self._other = other
            self._queue.put(Call(lambda: other))
        self._queue.put(self._writer.resumption)

    def _release(self) -> None:
        """End the handling of another writer's rows."""
        other, self._other = self._other, None
        assert other is not None
        other.callback(None)

    def _up(self, number: int, *_: Any) -> None:
        link: Any = _Link(_Connection(str(number)))
        self._links[number] = link
        self._writer.link_up(link)

    def _break(self, number: int, *_: Any) -> None:
        link: Any = self._links.pop(number)
        self._writer.link_lost(link)

    def _search(self, *arguments: Any) -> None:
        step: WorldStep = arguments[-1]
        if step.argument is not None:
            self._queue.call(partial(self._writer.found_removed, step.argument))

    def _stored(self, step: WorldStep) -> None:
        self._queue.call(partial(self._writer.found_stored, step.argument))

    def _backlog(self, *_: Any) -> None:
        self._is_from_backlog = True

    def _page(self, step: WorldStep) -> None:
        self._respond(step.argument)

    def _no_answer(self, *_: Any) -> None:
        self._respond(RuntimeError("no answer"))

    def _behind(self, *_: Any) -> None:
        self._respond(DatabaseBehindError("the standby lacks the row"))

    def _done(self, step: WorldStep | None = None) -> None:
        if step is not None and step.was_busy == RESUME:
            # The queue was released.
            return
        waiting, self._waiting = self._waiting, None
        effect, self._effect = self._effect, lambda: None
        if waiting is None:
            raise DisagreementError("the driver is not doing anything")
        effect()
        waiting.callback(None)

    def _fail(self, *_: Any) -> None:
        waiting, self._waiting = self._waiting, None
        self._effect = lambda: None
        self._begins_epoch = False
        if waiting is None:
            raise DisagreementError("the driver is not doing anything")
        waiting.errback(RuntimeError("the sink failed"))

    def _overflow(self, *_: Any) -> None:
        self._occupy()

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
        end_check_interval(self._writer.reader)

    def _moment(self, *_: Any) -> None:
        elapse(self._writer.reader, MOMENT)

    def _reader_crash(self, step: WorldStep) -> None:
        self._start(step.argument)

    #: The method that applies an event to the driver, by the event's name.
    _acts: ClassVar[Mapping[str, Callable[..., None]]] = {
        "up": _up,
        "break": _break,
        "remove": _search,
        "search": _search,
        "stored": _stored,
        "backlog": _backlog,
        "page": _page,
        "no answer": _no_answer,
        "behind": _behind,
        "done": _done,
        "fail": _fail,
        "overflow": _overflow,
        "timer": _timer,
        "second": _second,
        "moment": _moment,
        "reader crash": _reader_crash,
    }

    # -- comparison -------------------------------------------------------------------

    def _state(self) -> tuple[Any, ...]:
        of_reader, of_links = state_of(self._writer.reader, self.world)
        numbers: dict[Any, int] = {link: n for n, link in self._links.items()}
        is_running = any(call.is_active for call in self._calls)
        return (
            of_reader,
            {numbers[link]: state for link, state in of_links.items()},
            self.position,
            tuple(self.deliveries),
            tuple(self._observer.reports),
            is_running,
            self._waiting is not None,
        )

    def _compare(self, step: WorldStep) -> None:
        for name, of_world, of_driver in zip(
            _COMPARED, step.state, self._state(), strict=True
        ):
            if of_world != of_driver:
                raise DisagreementError(
                    f"after {step.event}: {name}: the world has {of_world}, the driver "
                    f"{of_driver}"
                )


#: The event that completes what a world is doing.
DONE: Final = ("done",)
_UNREADABLE: Final = ("unreadable",)

_COMPARED = (
    "reader",
    "links",
    "position",
    "deliveries",
    "reports",
    "is the timer running",
    "is something in progress",
)
#: The events that end a fetch.
_ENDING_FETCHES = frozenset({"page", "behind", "no answer"})
#: Those of them before which items are parked.
_PARKING = frozenset({"page", "behind"})
#: The events between a fetch and the handling of what was parked.
_QUIET = frozenset(
    {
        "allocate",
        "answer",
        "backlog",
        "behind",
        "commit",
        "done",
        "fail",
        "lose",
        "page",
        "roll back",
        "send",
        "unreadable",
        "write",
        "writer crash",
    }
)
#: The events that the driver handles in its queue, after what is there.
_QUEUED = frozenset({"remove", "search", "stored"})
#: The events after which the driver's queue is empty.
_RELEASING = frozenset(
    {
        "done",
        "drained",
        "timer",
        "up",
    }
)


def _is_releasing(step: WorldStep) -> bool:
    """Return whether the driver's queue is empty after a step."""
    if step.busy == RESUME:
        return False
    return step.event[0] in _RELEASING or bool(step.was_busy == RESUME)


@attrs.frozen
class _Stream:
    """The stream of a world, as the driver sees it."""

    description: StreamDescription
    driven: Driven

    def current_token(self, instance_name: str) -> int:
        return self.driven.position

    def is_plausible(self, instance_name: str, token: int) -> bool:
        return self.driven.is_plausible(token)

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
