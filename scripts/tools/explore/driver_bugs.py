"""Deliberate bugs of the driver: of each action of a reader, and of its queue.

The comparison with the worlds (:mod:`scripts.tools.explore.comparison`) must find each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from scripts.tools.explore.comparison import Comparison, compare, compare_delayed
from scripts.tools.explore.world import Bounds, Kind
from synapse_replication.errors import DatabaseBehindError
from synapse_replication.handlers.receiving.queue import DrainedQueue
from synapse_replication.handlers.receiving.writer_receiver import WriterReceiver
from synapse_replication.streams.reader_decisions import Fetch, Rewind
from synapse_replication.wire.commands import PositionCommand


@attrs.frozen
class DriverBug:
    """A bug, and a world in which it has an effect.

    :ivar name: the method that has it.
    :ivar make: returns the method with the bug, from the original one.
    :ivar delays: whether only items that are delayed can show it.
    :ivar owner: the class that has it.
    """

    name: str
    make: Callable[[Any], Callable[..., Any]]
    kind: Kind
    bounds: Bounds
    delays: bool = attrs.field(default=False, kw_only=True)
    owner: type = attrs.field(default=WriterReceiver, kw_only=True)


def _nothing(original: Any) -> Callable[..., None]:
    """Return a method that does nothing."""
    return lambda self, *_: None


def _copies_fetches(original: Any) -> Callable[..., None]:
    def begin_fetch(self: WriterReceiver, fetch: Fetch) -> None:
        # The reader identifies its request.
        original(self, Fetch(fetch.from_token, fetch.upto_token, fetch.from_source))

    return begin_fetch


def _keeps_the_position(original: Any) -> Callable[..., Any]:
    async def save_position(self: WriterReceiver, token: int) -> None:
        return

    return save_position


def _keeps_the_higher_position(original: Any) -> Callable[..., Any]:
    async def rewind(self: WriterReceiver, action: Rewind) -> None:
        self.reader.rewound(action.epoch)

    return rewind


def _saves_no_epoch(original: Any) -> Callable[..., Any]:
    async def save_epoch(self: WriterReceiver, epoch: str) -> None:
        return

    return save_epoch


def _ignores_failures(original: Any) -> Callable[..., None]:
    def fail(self: WriterReceiver, error: Exception) -> None:
        self.reader.failed()

    return fail


def _takes_a_standby_for_broken(original: Any) -> Callable[..., Any]:
    def accept_page(self: WriterReceiver, fetch: Fetch, result: Any) -> Any:
        if isinstance(result, DatabaseBehindError):
            result = RuntimeError("no answer")
        return original(self, fetch, result)

    return accept_page


def _cuts_pages(original: Any) -> Callable[..., Any]:
    async def deliver_page(
        self: WriterReceiver, page: Any, event: Any, is_partial: bool
    ) -> None:
        await original(self, page.cut(page.tokens[0]), event, is_partial)

    return deliver_page


def _proceeds_once(original: Any) -> Callable[..., Any]:
    async def proceed(self: WriterReceiver) -> None:
        action = self.reader.next(0.0)
        if action is not None and (waiting := self._execute(action)) is not None:
            await waiting

    return proceed


def _ignores_lost_rows(original: Any) -> Callable[..., None]:
    def give_up(self: WriterReceiver, link: Any, item: Any) -> None:
        return

    return give_up


def _ignores_positions(original: Any) -> Callable[..., None]:
    def announce(self: WriterReceiver, link: Any, item: Any) -> None:
        if not isinstance(item, PositionCommand):
            original(self, link, item)

    return announce


def _parks_without_bound(original: Any) -> Callable[..., None]:
    def park(self: WriterReceiver, link: Any, item: Any) -> None:
        self._parked.append((link, item))

    return park


def _handles_in_reverse(original: Any) -> Callable[..., Any]:
    async def resume(self: WriterReceiver) -> None:
        self._parked.reverse()
        await original(self)

    return resume


def _handles_one(original: Any) -> Callable[..., Any]:
    async def resume(self: WriterReceiver) -> None:
        parked = self._parked
        while len(parked) > 1:
            parked.pop()
        await original(self)

    return resume


def _delivers_the_rest(original: Any) -> Callable[..., Any]:
    async def give_up_rest(self: WriterReceiver, link: Any) -> None:
        waiting = self.handle(*self._parked.popleft())
        if waiting is not None:
            await waiting

    return give_up_rest


def _forgets_the_rest(original: Any) -> Callable[..., Any]:
    def give_up_rest(self: WriterReceiver, link: Any) -> Any:
        self._parked.popleft()
        return original(self, link)

    return give_up_rest


def _handles_one_slice(original: Any) -> Callable[..., Any]:
    async def handle_slices(self: WriterReceiver, link: Any, group: Any) -> None:
        waiting = self._handle_slice(link, group.tokens[:1], group.rows[:1])
        if waiting is not None:
            await waiting

    return handle_slices


def _empties_the_queue(original: Any) -> Callable[..., None]:
    def give_up(self: DrainedQueue) -> None:
        self._items.clear()
        original(self)

    return give_up


_ONE_FAILURE = Bounds(ids=2, failures=1)
_RESTART = Bounds(ids=1, writer_crashes=1)
_OVERFLOW = Bounds(ids=4, overflows=1)
_TWO_LINKS = Bounds(ids=1, links=2, writer_crashes=1, breaks=1)

BUGS: Mapping[str, DriverBug] = {
    "Fetch: nothing is fetched": DriverBug(
        "_begin_fetch", _nothing, Kind.DATABASE, _ONE_FAILURE
    ),
    "Fetch: its page is not accepted": DriverBug(
        "_begin_fetch", _copies_fetches, Kind.DATABASE, _ONE_FAILURE
    ),
    "Rewind: the position is not saved": DriverBug(
        "_rewind", _keeps_the_higher_position, Kind.MEMORY, _RESTART
    ),
    "BeginEpoch: the epoch is not saved": DriverBug(
        "_save_epoch", _saves_no_epoch, Kind.MEMORY, Bounds(ids=1, failures=1)
    ),
    "Advance: the position is not saved": DriverBug(
        "_save_position", _keeps_the_position, Kind.DATABASE, Bounds(ids=1)
    ),
    "Pause: no timer runs": DriverBug("_pause", _nothing, Kind.DATABASE, _ONE_FAILURE),
    "Connected: it is not reported": DriverBug(
        "_report_connected", _nothing, Kind.DATABASE, Bounds(ids=1)
    ),
    "Ask: nobody is asked": DriverBug("_ask", _nothing, Kind.STOCK_MEMORY, _TWO_LINKS),
    "Refuted: it is not reported": DriverBug(
        "_report_refuted", _nothing, Kind.DATABASE, Bounds(ids=1, lies=1)
    ),
    "Finished: the timer still runs": DriverBug(
        "_report_finished", _nothing, Kind.DATABASE, _ONE_FAILURE
    ),
    "a failed row is not fetched": DriverBug(
        "delivery_failed", _nothing, Kind.DATABASE, _ONE_FAILURE
    ),
    "a failed fetch is not repeated": DriverBug(
        "_fail", _ignores_failures, Kind.DATABASE, _ONE_FAILURE
    ),
    "a standby that lags is no evidence": DriverBug(
        "_accept_page",
        _takes_a_standby_for_broken,
        Kind.STANDBY,
        Bounds(ids=1, lies=1),
    ),
    "the end of a page is not delivered": DriverBug(
        "_deliver_page", _cuts_pages, Kind.DATABASE, Bounds(ids=2)
    ),
    "only one action is taken": DriverBug(
        "proceed", _proceeds_once, Kind.DATABASE, Bounds(ids=1)
    ),
    "what is given up is forgotten": DriverBug(
        "give_up", _ignores_lost_rows, Kind.DATABASE, Bounds(ids=1, overflows=1)
    ),
    "positions are ignored": DriverBug(
        "_announce", _ignores_positions, Kind.DATABASE, Bounds(ids=1)
    ),
    "what is parked is forgotten": DriverBug(
        "_park", _nothing, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "there is no bound of what is parked": DriverBug(
        "_park", _parks_without_bound, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "what is parked is never given up": DriverBug(
        "_give_up_parked", _nothing, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "what is parked is handled in reverse": DriverBug(
        "resume", _handles_in_reverse, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "only one of what is parked is handled": DriverBug(
        "resume", _handles_one, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "only one slice is handled": DriverBug(
        "_handle_slices", _handles_one_slice, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "the rest of rows that were given up is delivered": DriverBug(
        "_give_up_rest", _delivers_the_rest, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "the rest of rows that were given up is forgotten": DriverBug(
        "_give_up_rest", _forgets_the_rest, Kind.DATABASE, _OVERFLOW, delays=True
    ),
    "the queue forgets what it gives up": DriverBug(
        "_give_up",
        _empties_the_queue,
        Kind.DATABASE,
        Bounds(ids=1, overflows=1),
        owner=DrainedQueue,
    ),
}


def find(bug: DriverBug, states: int = 600) -> Comparison:
    """Compare the driver that has a bug with the world of the bug."""
    original = getattr(bug.owner, bug.name)
    setattr(bug.owner, bug.name, bug.make(original))
    try:
        run = compare_delayed if bug.delays else compare
        return run(bug.kind, bug.bounds, states)
    finally:
        setattr(bug.owner, bug.name, original)
