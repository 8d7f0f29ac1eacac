"""The comparison of the package's driver of a reader with a world."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from scripts.tools.explore.driven import DONE, Driven
from scripts.tools.explore.search import way_to_rest
from scripts.tools.explore.world import Bounds, Event, Kind, World
from synapse_replication.handlers.receiving import writer_receiver


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
    return _compare(kind, bounds, states, (), None)


def compare_delayed(kind: Kind, bounds: Bounds, states: int) -> Comparison:
    """Do the same from the state in which a link is live, and delay items.

    The rows of all ids have been sent on the link, and did not arrive.
    """
    start = _begin_live(kind, bounds)
    return _compare(kind, bounds, states, start, len(start))


def _begin_live(kind: Kind, bounds: Bounds) -> tuple[Event, ...]:
    """Return events after which a link is live, and rows are on their way.

    The first row was fetched, so that the source's last token is known.
    """
    world = World.begin(kind, bounds)
    ids = range(1, bounds.ids + 1)
    writes: list[Event]
    if world.in_memory:
        writes = [("write",) for _ in ids]
    else:
        writes = [("allocate",) for _ in ids]
        writes += [("commit", token) for token in ids]
    sends = [("send",) for _ in ids]
    opening = [("up", 0), ("position", 0), ("answer", False), ("page",)]
    applied: list[Event] = []
    for event in (*writes, sends[0], *opening, *sends[1:]):
        applied.append(event)
        world.apply(event)
        while world.busy is not None:
            applied.append(DONE)
            world.apply(DONE)
    return tuple(applied)


def _compare(
    kind: Kind,
    bounds: Bounds,
    states: int,
    start: tuple[Event, ...],
    delays_from: int | None,
) -> Comparison:
    found: dict[Any, tuple[Event, ...]] = {_key(_replay(kind, bounds, start)): start}
    waiting = deque(found.values())
    sequences = depth = 0
    with _small_slices():
        while waiting:
            path = waiting.popleft()
            for event in list(_replay(kind, bounds, path).events()):
                sequence = whole = (*path, event)
                world = _replay(kind, bounds, sequence)
                key = _key(world)
                if delays_from is not None:
                    # What was parked is handled on the way.
                    whole += tuple(way_to_rest(world))
                try:
                    if not Driven(kind, bounds, delays_from).run(whole):
                        continue
                except Exception as error:  # noqa: BLE001 -- any of them is a finding
                    reason = f"{type(error).__name__}: {error}"
                    return Comparison(sequences, len(whole), reason, whole)
                sequences, depth = sequences + 1, max(depth, len(whole))
                if key not in found and len(found) < states:
                    found[key] = sequence
                    waiting.append(sequence)
    return Comparison(sequences, depth)


@contextlib.contextmanager
def _small_slices() -> Iterator[None]:
    """Handle rows in slices of one row."""
    module: Any = writer_receiver
    before, module.SLICE = module.SLICE, 1
    try:
        yield
    finally:
        module.SLICE = before


def _key(world: World) -> Any:
    frozen, left, _ = world.freeze()
    return frozen, left


def _replay(kind: Kind, bounds: Bounds, events: Iterable[Event]) -> World:
    world = World.begin(kind, bounds)
    for event in events:
        world.apply(event)
    return world
