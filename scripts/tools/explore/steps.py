"""The steps of a world, with what its driver has to know about each.

A world is run first, so that a driver knows what will arrive: an item may be in its
queue before the message is handled in the world.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import attrs
from typing_extensions import Self, override

from scripts.tools.explore.reader_values import (
    Frozen,
    can_act_during_fetch,
    freeze,
    without_position,
)
from scripts.tools.explore.world import Bounds, Event, Kind, World, WorldLink
from synapse_replication.handlers.receiving.items import (
    LostRow,
    OfWriter,
    ReportedEpoch,
    ReportedPosition,
)
from synapse_replication.streams.reader import Reader
from synapse_replication.streams.reader_decisions import Action, Ask, Connected, Refuted
from synapse_replication.streams.stream import RemovedWriter, StreamUpdateResult
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import RdataGroup

#: The text of a row that cannot be decoded.
UNREADABLE: Final = b"?"
#: What a world is doing before its driver continues, as after a page.
RESUME: Final = ("resume",)

#: The events after which the timer may have ended.
_PASSING = frozenset({"time", "moment"})
#: The events by which an item arrives.
_ARRIVALS = frozenset(
    {
        "message",
        "unreadable row",
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


class ReportingWorld(World):
    """A world that records what it delivers and reports.

    :ivar resumptions: how often the driver found more to fetch when it resumed, so that
        it gave up what was parked.
    """

    __slots__ = ("deliveries", "reports", "resumptions")

    deliveries: list[int]
    reports: list[tuple[Any, ...]]
    resumptions: int

    @override
    @classmethod
    def begin(cls, kind: Kind, bounds: Bounds) -> Self:
        self = super().begin(kind, bounds)
        self.deliveries, self.reports, self.resumptions = [], [], 0
        return self

    @override
    def _resume(self) -> None:
        self.resumptions += self.reader.has_more_to_fetch
        super()._resume()

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


class ArrivalMode(enum.Enum):
    """What the world does with an item that arrives."""

    HANDLED = "handled"
    FULL = "given up, because the queue is full"
    FETCHING = "given up, because a page is being fetched"
    RESUMING = "given up, when a page was handled"


@attrs.frozen
class WorldStep:
    """An event of a world, and what the driver has to know about it.

    :ivar argument: the item that arrives, or what else the driver is to be called with.
    :ivar mode: of an item that arrives.
    :ivar was_busy: what the world was doing before.
    :ivar busy: what it is doing now.
    :ivar is_fetching: whether it is fetching a page now.
    :ivar can_act: whether its reader has an action that it can take during a fetch.
    :ivar known: the source's last token, as far as the reader's process knows it.
    :ivar ends_timer: whether its timer ended.
    :ivar resumptions: see :class:`ReportingWorld`.
    :ivar state: what the driver must agree with.
    """

    event: Event
    argument: Any
    mode: ArrivalMode | None
    was_busy: Any
    busy: Any
    is_fetching: bool
    can_act: bool
    known: int
    ends_timer: bool
    resumptions: int
    state: tuple[Any, ...]

    def row_on(self, number: int) -> bool:
        """Return whether a row arrives on a link."""
        return isinstance(self.argument, RdataGroup) and self.event[1] == number


def take_step(world: ReportingWorld, event: Event) -> WorldStep:
    """Apply an event to a world."""
    name = event[0]
    was_busy, was_running = world.busy, world.timer != 0
    mode = _mode(world) if name in _ARRIVALS else None
    argument = _argument_before(world, event)
    world.apply(event)
    if name in ("search", "remove"):
        argument = _found_removed(world)
    elif name == "stored":
        argument = min(world.own_last(), world.announceable())
    of_reader, of_links = state_of(world.reader, world)
    return WorldStep(
        event,
        argument,
        mode,
        was_busy,
        world.busy,
        world.fetch is not None,
        can_act_during_fetch(world.reader),
        world.known,
        # An earlier end may still be in the queue.
        name in _PASSING and was_running and world.timer == 0,
        world.resumptions,
        (
            of_reader,
            of_links,
            world.position,
            tuple(world.deliveries),
            tuple(world.reports),
            world.timer != 0,
            world.busy is not None,
        ),
    )


def state_of(reader: Reader, world: World) -> tuple[Frozen, Mapping[Any, Frozen]]:
    """Return the state of a reader and of its links, without its position.

    It is read from the host again before it matters. This does so, too: rows may have
    been delivered since the last event.
    """
    _ = reader.claimed_upto
    frozen, links = freeze(reader, with_epochs=world.states_epochs, with_bursts=True)
    return without_position(frozen), links


def _mode(world: World) -> ArrivalMode:
    if world.given_up:
        return ArrivalMode.FULL
    if world.busy is not None:
        return ArrivalMode.RESUMING
    return ArrivalMode.HANDLED if world.fetch is None else ArrivalMode.FETCHING


def _argument_before(world: World, event: Event) -> Any:
    """Return what the driver is called with, as far as it is known before an event."""
    name, *arguments = event
    if name in _ARRIVALS:
        return _item(world, world.links[arguments[0]], event)
    if name == "page":
        assert world.answer is not None
        rows, upto, last, life, _ = world.answer
        epoch = str(life) if world.kind is Kind.MEMORY else None
        updates: list[tuple[int, Any]] = [(token, None) for token in rows]
        return StreamUpdateResult(updates, upto, False, last, epoch)
    return world.reader.epoch if name == "reader crash" else None


def _item(world: World, link: WorldLink, event: Event) -> OfWriter | None:
    """Return the item that arrives by an event, unless it changes nothing."""
    name, number, *arguments = event
    if name == "garble":
        return LostRow("writer")
    prev = token = link.token
    life = link.life
    is_hello = name in ("first hello", "hello")
    if name in ("message", "unreadable row"):
        prev, token, is_row = world.log[link.at]
        if is_row:
            text = UNREADABLE if name == "unreadable row" else b""
            ends = token if world.is_whole(link) else None
            return RdataGroup("stream", "writer", [ends], [text])
        if prev < token or not world.states_epochs:
            return PositionCommand("stream", "writer", prev, token)
        is_hello, life = True, life + 1
    if is_hello or name == "epoch":
        if world.reader.follows_epoch(number, str(life)):
            return None
        return ReportedEpoch("writer", token, str(life), is_hello)
    if name == "range":
        prev = max(world.rows(0, token), default=0)
    elif name == "lie":
        prev, token = arguments
    elif name == "false report":
        prev = token = arguments[0]
    if world.reader.follows(number, token):
        return None
    if "report" in name or "reported" in arguments:
        return ReportedPosition("writer", prev, token, False)
    return PositionCommand("stream", "writer", prev, token)


def _found_removed(world: World) -> RemovedWriter | None:
    """Return the removed writer, if a search finds it."""
    upto, is_deleted = world.own_last(), world.removed == 2
    if upto <= world.position:
        if not is_deleted:
            return None
        upto = world.position
    return RemovedWriter(upto, is_deleted)
