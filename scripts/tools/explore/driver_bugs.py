"""Deliberate bugs of the driver, one or more for each action of a reader.

The comparison with the worlds (:mod:`scripts.tools.explore.driven`) must find each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from scripts.tools.explore.driven import Comparison, compare
from scripts.tools.explore.world import Bounds, Kind
from synapse_replication.errors import DatabaseBehindError
from synapse_replication.handlers.receiving.writer_receiver import WriterReceiver
from synapse_replication.streams.reader_decisions import Fetch, Rewind
from synapse_replication.wire.commands import PositionCommand


@attrs.frozen
class DriverBug:
    """A bug, and a world in which it has an effect.

    :ivar name: the method that has it.
    :ivar make: returns the method with the bug, from the original one.
    """

    name: str
    make: Callable[[Any], Callable[..., Any]]
    kind: Kind
    bounds: Bounds


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


_ONE_FAILURE = Bounds(ids=2, failures=1)
_RESTART = Bounds(ids=1, writer_crashes=1)
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
}


def find(bug: DriverBug, states: int = 600) -> Comparison:
    """Compare the driver that has a bug with the world of the bug."""
    original = getattr(WriterReceiver, bug.name)
    setattr(WriterReceiver, bug.name, bug.make(original))
    try:
        return compare(bug.kind, bug.bounds, states)
    finally:
        setattr(WriterReceiver, bug.name, original)
