"""Breadth-first search of a world's states, and of the way to rest from each of them.

Theory of operation: states are numbered as they are found. Of each one, only a digest,
its predecessor and the event between them are stored, so that a shortest sequence of
events can be printed. States that have not been expanded are stored as bytes.

One of a state's successors is its next step towards rest, where no fault occurs. When
all states were expanded, each must reach rest by such steps.
"""

from __future__ import annotations

import contextlib
import marshal
import time
from array import array
from collections import deque
from collections.abc import Container, Iterator
from hashlib import blake2b
from typing import Any, TypeAlias

import attrs
from msgspec.structs import replace

from scripts.tools.explore.world import (
    Bounds,
    Event,
    Frozen,
    Kind,
    ViolationError,
    World,
)
from synapse_replication.streams import reader as machine

_NONE = 0xFFFFFFFF

#: An event of the machine, and the states before and after it.
Call: TypeAlias = tuple[machine.Event, machine.State, machine.State]


@attrs.frozen
class Broken:
    """A promise that was broken.

    :ivar events: the shortest sequence of events that leads to it.
    """

    kind: Kind
    bounds: Bounds
    reason: str
    events: list[Event]


@attrs.define
class Result:
    """The result of a search.

    :ivar is_complete: whether all states were expanded.
    :ivar depth: the length of the longest of the shortest sequences.
    :ivar rest: the number of states at rest.
    :ivar steps: the greatest number of steps from a state to rest.
    :ivar calls: each event of the machine that happened, with the states before and
        after it.
    """

    kind: Kind
    bounds: Bounds
    states: int = 0
    transitions: int = 0
    depth: int = 0
    rest: int = 0
    steps: int = 0
    seconds: float = 0.0
    is_complete: bool = False
    broken: Broken | None = None
    calls: set[Call] = attrs.field(factory=set)


class Search:
    """A search of one world."""

    def __init__(self, kind: Kind, bounds: Bounds) -> None:
        self._kind, self._bounds = kind, bounds
        self._numbers: dict[bytes, int] = {}
        self._waiting: deque[bytes] = deque()
        self._parents = array("L")
        self._by = array("L")
        self._events: dict[Event, int] = {}
        self._next = array("L")

    def run(self, seconds: float, max_states: int = 50_000_000) -> Result:
        """Search until a promise is broken, all states were expanded, or time is up."""
        result = Result(self._kind, self._bounds)
        started = time.monotonic()
        with replaced(self._bounds, result.calls):
            self._search(result, started + seconds, max_states)
        result.seconds = time.monotonic() - started
        return result

    def _search(self, result: Result, until: float, max_states: int) -> None:
        self._number(_key(World.begin(self._kind, self._bounds)), _NONE, _NONE)
        number = 0
        level_end, depth = 1, 0
        while self._waiting:
            if number == level_end:
                level_end, depth = len(self._parents), depth + 1
            if number % 512 == 0 and (
                time.monotonic() > until or len(self._parents) > max_states
            ):
                break
            try:
                event: Event = ()
                key = self._waiting.popleft()
                frozen: Frozen = marshal.loads(key)
                world = World.thaw(self._kind, self._bounds, frozen)
                towards = world.towards_rest()
                if not towards and (missing := world.missing()):
                    raise ViolationError(f"never at rest: {missing}")
                found: dict[Event, int] = {}
                for event in world.events():
                    world = World.thaw(self._kind, self._bounds, frozen)
                    world.apply(event)
                    found[event] = self._number(_key(world), number, event)
                    result.transitions += 1
            except Exception as error:  # noqa: BLE001 -- any of them is a finding
                reason = str(error) or type(error).__name__
                if not isinstance(error, ViolationError):
                    reason = f"{type(error).__name__}: {reason}"
                result.broken = self._broken(reason, number, event)
                break
            self._next[number] = self._step(number, towards, found)
            number += 1
        result.states, result.depth = len(self._parents), depth
        result.is_complete = not self._waiting and result.broken is None
        if result.broken is None:
            self._check_rest(result, number)

    def _step(self, number: int, towards: list[Event], found: dict[Event, int]) -> int:
        if not towards:
            return _NONE
        for event in towards:
            if found[event] != number:
                return found[event]
        return number

    def _number(self, key: bytes, parent: int, event: Event | int) -> int:
        digest = blake2b(key, digest_size=12).digest()
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._parents)
            self._waiting.append(key)
            self._parents.append(parent)
            self._next.append(_NONE)
            self._by.append(
                _NONE
                if isinstance(event, int)
                else self._events.setdefault(event, len(self._events))
            )
        return number

    def _check_rest(self, result: Result, expanded: int) -> None:
        """Follow the steps from each expanded state."""
        unknown, steps = -1, array("l", [0]) * expanded
        for start in range(expanded):
            path = []
            number = start
            while number < expanded and steps[number] == 0:
                steps[number] = -2
                path.append(number)
                if self._next[number] == _NONE:
                    break
                number = self._next[number]
            if number >= expanded:
                count = unknown
            elif self._next[number] == _NONE:
                count = steps[number] if steps[number] > 0 else 0
                result.rest += steps[number] == -2
            elif steps[number] == -2:
                missing = rest(self._replay(self._sequence(start)))
                result.broken = self._broken(f"never at rest: {missing}", start, None)
                return
            else:
                count = steps[number]
            for each in reversed(path):
                if count != unknown:
                    count += 1
                    result.steps = max(result.steps, count)
                steps[each] = count

    def _sequence(self, number: int) -> list[Event]:
        events = list(self._events)
        sequence: list[Event] = []
        while self._parents[number] != _NONE:
            sequence.append(events[self._by[number]])
            number = self._parents[number]
        return sequence[::-1]

    def _replay(self, events: list[Event]) -> World:
        world = World.begin(self._kind, self._bounds)
        for event in events:
            world.apply(event)
            world = World.thaw(self._kind, self._bounds, world.freeze()[0])
        return world

    def _broken(self, reason: str, number: int, event: Event | None) -> Broken:
        sequence = self._sequence(number) + ([event] if event else [])
        return Broken(
            self._kind, self._bounds, reason, self._with_stable_links(sequence)
        )

    def _with_stable_links(self, events: list[Event]) -> list[Event]:
        """Return the events with the numbers that links had from the start."""
        names = list(range(self._bounds.links))
        world = World.begin(self._kind, self._bounds)
        stable: list[Event] = []
        for event in events:
            if event[0] in LINK_EVENTS:
                stable.append((event[0], names[event[1]], *event[2:]))
            else:
                stable.append(event)
            try:
                world.apply(event)
            except Exception:  # noqa: BLE001 -- it is the last event
                break
            frozen, order = world.freeze()
            names = [names[number] for number in order]
            world = World.thaw(self._kind, self._bounds, frozen)
        return stable


#: The events whose first argument is the number of a link.
LINK_EVENTS = frozenset(
    {
        "up",
        "break",
        "message",
        "lose",
        "garble",
        "unreadable row",
        "position",
        "report",
        "epoch",
        "first hello",
        "hello",
        "lie",
        "false report",
    }
)


def rest(world: World, limit: int = 100) -> str | None:
    """Let a world come to rest, without a fault; return what is missing there."""
    for _ in range(limit):
        before = _key(world)
        for event in world.towards_rest():
            world.apply(event)
            if _key(world) != before:
                world._note(f"[{event}]")
                break
        else:
            break
    return world.missing()


def _key(world: World) -> bytes:
    return marshal.dumps(world.freeze()[0], 2)


def entries() -> set[Call]:
    """Return what the machine's table allows."""
    return {
        (event, before, after)
        for event, row in machine.TABLE.items()
        for before, entry in row.items()
        for after in machine.State
        if after in entry.next_states
    }


@contextlib.contextmanager
def replaced(bounds: Bounds, calls: set[Call]) -> Iterator[None]:
    """Limit the machine's bursts, and add its calls to ``calls``."""
    module: Any = machine
    before = module.BURST, module.TABLE
    module.BURST = bounds.burst or module.BURST
    module.TABLE = {
        event: {
            state: replace(
                entry, next_states=_Recorder(event, state, entry.next_states, calls)
            )
            for state, entry in row.items()
        }
        for event, row in machine.TABLE.items()
    }
    try:
        yield
    finally:
        module.BURST, module.TABLE = before


@attrs.frozen
class _Recorder:
    """The states that may follow, which records those that do."""

    event: machine.Event
    before: machine.State
    expected: Container[machine.State]
    calls: set[Call]

    def __contains__(self, after: object) -> bool:
        assert isinstance(after, machine.State)
        self.calls.add((self.event, self.before, after))
        return after in self.expected


def explain(broken: Broken) -> str:
    """Return a broken promise as a test, with the calls of the machine as comments."""
    lines = [
        f"# {broken.reason}",
        "def test_explored(self) -> None:",
        f"    world = World.begin({broken.kind}, {_bounds(broken.bounds)})",
    ]
    world = World.begin(broken.kind, broken.bounds)
    with replaced(broken.bounds, set()):
        for event in broken.events:
            world.trace = []
            lines.append(f"    world.apply({event!r})")
            try:
                world.apply(event)
            except Exception as error:  # noqa: BLE001 -- it is printed
                world.trace.append(f"{type(error).__name__}: {error}")
            lines += [f"        # {text}" for text in world.trace]
    if broken.reason.startswith("never"):
        lines.append("    self.assertIsNone(rest(world))")
        world.trace = []
        rest(world)
        lines += [f"        # {text}" for text in world.trace]
    return "\n".join(lines)


def _bounds(bounds: Bounds) -> str:
    changed = [
        f"{field.name}={getattr(bounds, field.name)}"
        for field in attrs.fields(Bounds)
        if getattr(bounds, field.name) != field.default
    ]
    return f"Bounds({', '.join(changed)})"
