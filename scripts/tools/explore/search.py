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
import sys
import time
from array import array
from collections import deque
from collections.abc import Container, Iterator, Set
from hashlib import blake2b
from typing import Any, TypeAlias

import attrs

from scripts.tools.explore.reader_values import Frozen
from scripts.tools.explore.world import (
    Bounds,
    Event,
    Kind,
    ViolationError,
    World,
)
from synapse_replication.streams import reader as machine
from synapse_replication.streams.reader_table import TABLE, ReaderEvent, State

_NONE = 0xFFFFFFFF

#: An event of the machine, and the states before and after it.
Call: TypeAlias = tuple[ReaderEvent, State, State]

_FrozenWorld: TypeAlias = tuple[Frozen, int, list[int]]
_OTHER = object()


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
    """A search of one world.

    :param is_reduced: whether to skip dominated states, and to store what the reader
        does; ``False`` to check that this makes no difference.
    """

    def __init__(self, kind: Kind, bounds: Bounds, *, is_reduced: bool = True) -> None:
        if max(bounds.budgets) > 1:
            raise ValueError(f"a fault may occur once at most: {bounds}")
        self._kind, self._bounds, self._is_reduced = kind, bounds, is_reduced
        # The last number of each state, without the faults left, by its digest.
        self._numbers: dict[bytes, int] = {}
        # By number: the faults left, as bits, and another number that differs only in
        # them.
        self._left = array("H")
        self._others = array("I")
        self._waiting: deque[bytes] = deque()
        self._parents = array("I")
        self._by = array("H")
        self._events: dict[Event, int] = {}
        self._next = array("I")
        self._known: dict[bytes, dict[Event, Any]] = {}

    @property
    def digests(self) -> Set[bytes]:
        """The states, without the faults left, as digests."""
        return self._numbers.keys()

    def run(
        self, seconds: float, max_states: int = 50_000_000, every: float | None = None
    ) -> Result:
        """Search until a promise is broken, all states were expanded, or time is up.

        :param seconds: the limit, of processor time.
        :param every: the processor time between lines of progress; ``None`` for none.
        """
        result = Result(self._kind, self._bounds)
        started = time.process_time()
        with replaced(self._bounds, result.calls):
            self._search(result, started, seconds, max_states, every or seconds)
        result.seconds = time.process_time() - started
        return result

    def _search(
        self,
        result: Result,
        started: float,
        seconds: float,
        max_states: int,
        every: float,
    ) -> None:
        self._number(World.begin(self._kind, self._bounds).freeze(), _NONE, ())
        number = 0
        level_end, depth = 1, 0
        next_line = every
        while self._waiting:
            if number == level_end:
                level_end, depth = len(self._parents), depth + 1
            if number % 512 == 0:
                passed = time.process_time() - started
                if passed > seconds or len(self._parents) > max_states:
                    break
                if passed > next_line:
                    next_line += every
                    self._print_progress(number, depth, passed)
            event: Event = ()
            try:
                frozen: Frozen = marshal.loads(self._waiting.popleft())
                left = self._left[number]
                world = World.thaw(self._kind, self._bounds, frozen, left)
                towards = world.towards_rest()
                if not towards and (missing := world.missing()):
                    raise ViolationError(f"never at rest: {missing}")
                found: dict[Event, int] = {}
                known = self._known_of(world, frozen)
                for event in world.events():
                    after = self._apply(event, frozen, left, known)
                    if after is not None:
                        found[event] = self._number(after, number, event)
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

    def _print_progress(self, number: int, depth: int, seconds: float) -> None:
        print(  # noqa: T201 -- the result
            f"  {seconds:.0f} s: {len(self._parents)} states, depth {depth}, "
            f"{number / seconds:.0f} states/s, {len(self._waiting)} in the queue",
            file=sys.stderr,
            flush=True,
        )

    def _step(self, number: int, towards: list[Event], found: dict[Event, int]) -> int:
        if not towards:
            return _NONE
        for event in towards:
            if found.get(event, number) != number:
                return found[event]
        return number

    def _known_of(self, world: World, frozen: Frozen) -> dict[Event, Any] | None:
        """Return what is stored about the reader of a world, by events.

        It is what events change that concern only the reader and its driver: ``None``
        for nothing, or the new values, or ``_OTHER`` if they change more.
        """
        if not self._is_reduced:
            return None
        if len(self._known) > 1_000_000:
            self._known.clear()
        known, _, links = frozen
        rest = [link[0] for link in links], world.may_be_interrupted(), world.lie > 0
        key = marshal.dumps((known, *rest), 2)
        return self._known.setdefault(key, {})

    def _apply(
        self, event: Event, frozen: Frozen, left: int, known: dict[Event, Any] | None
    ) -> _FrozenWorld | None:
        """Return what follows from an event; ``None`` if it changes nothing."""
        _, unknown, links = frozen
        if known is not None and event in known:
            after = known[event]
            if after is None:
                return None
            if after is not _OTHER:
                known_after, heard = after
                pairs = sorted(zip(heard, [link[1] for link in links], strict=True))
                return (known_after, unknown, tuple(pairs)), left, []
        world = World.thaw(self._kind, self._bounds, frozen, left)
        concerns_reader = known is not None and world.concerns_reader(event)
        before = world.position, world.reader.floor
        world.apply(event)
        frozen_after, left_after, order = world.freeze()
        if known is not None and concerns_reader:
            if frozen_after == frozen:
                known[event] = None
                return None
            if before != (world.position, world.reader.floor):
                known[event] = _OTHER
            else:
                by_number = dict(zip(order, frozen_after[2], strict=True))
                heard = [by_number[number][0] for number in range(len(order))]
                known[event] = frozen_after[0], heard
        return frozen_after, left_after, order

    def _number(self, after: _FrozenWorld, parent: int, event: Event) -> int:
        """Return the number of a state, or of one that dominates it.

        That is the same state with at least the same faults left: what can follow the
        one can follow the other, and is excused by no other fault.
        """
        frozen, left, _ = after
        key = marshal.dumps(frozen, 2)
        digest = blake2b(key, digest_size=12).digest()
        first = other = self._numbers.get(digest, _NONE)
        while other != _NONE:
            if left == self._left[other] or (
                self._is_reduced and self._is_dominated(left, self._left[other])
            ):
                return other
            other = self._others[other]
        number = self._numbers[digest] = len(self._parents)
        self._waiting.append(key)
        self._left.append(left)
        self._others.append(first)
        self._parents.append(parent)
        self._next.append(_NONE)
        self._by.append(self._events.setdefault(event, len(self._events)))
        return number

    def _is_dominated(self, left: int, other: int) -> bool:
        faults, spent = self._bounds.faults, self._bounds.spent
        if spent(other) > spent(left):
            return False
        return spent(left) == faults or not left & ~other

    def _check_rest(self, result: Result, expanded: int) -> None:
        """Follow the steps from each expanded state."""
        unknown, steps = -1, array("i", [0]) * expanded
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
            frozen, left, _ = world.freeze()
            world = World.thaw(self._kind, self._bounds, frozen, left)
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
            frozen, left, order = world.freeze()
            names = [names[number] for number in order]
            world = World.thaw(self._kind, self._bounds, frozen, left)
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


def agrees_unreduced(kind: Kind, bounds: Bounds, seconds: float) -> bool:
    """Return whether a search without reductions finds the same states.

    The faults left of a state do not count.

    :param seconds: the limit of each search, of processor time.
    """
    reduced, full = (Search(kind, bounds, is_reduced=each) for each in (True, False))
    complete = all(each.run(seconds).is_complete for each in (reduced, full))
    return complete and reduced.digests == full.digests


def rest(world: World) -> str | None:
    """Let a world come to rest, without a fault; return what is missing there."""
    for event in way_to_rest(world):
        world.note(f"[{event}]")
    return world.missing()


def way_to_rest(world: World, limit: int = 100) -> Iterator[Event]:
    """Let a world come to rest, without a fault, and iterate over the events."""
    for _ in range(limit):
        before = _key(world)
        for event in world.towards_rest():
            world.apply(event)
            if _key(world) != before:
                yield event
                break
        else:
            return


def _key(world: World) -> bytes:
    return marshal.dumps(world.freeze()[:2], 2)


def entries() -> set[Call]:
    """Return what the machine's table allows."""
    return {
        (event, before, after)
        for event, row in TABLE.items()
        for before, entry in row.items()
        for after in State
        if after in entry.next_states
    }


_UNIT_TESTS = "tests.streams.test_reader."
_NEW_LINK = f"{_UNIT_TESTS}ReportTests.test_restart_shown_by_a_new_link"
_UNDECODABLE = f"{_UNIT_TESTS}RowTests.test_undecodable_row_after_another_failure"
#: The entries that larger worlds would take, and the unit tests that take them.
UNIT_TESTED = {
    "BATCH DELIVERING DUE": f"{_UNIT_TESTS}PageTests."
    "test_row_that_the_delivered_page_lacks",
    "BATCH FETCHING DUE": f"{_UNIT_TESTS}RowTests.test_row_that_earlier_pages_lack",
    "DELIVERY_FAILED PAUSED PAUSED": _UNDECODABLE,
    "NEXT DUE PAUSED": f"{_UNIT_TESTS}PauseTests.test_many_claims",
    "OVERFLOW DELIVERING DUE": f"{_UNIT_TESTS}RowTests.test_overflow_during_a_page",
    "REPORT DELIVERING DUE": _NEW_LINK,
    "REPORT PAUSED DUE": _NEW_LINK,
    "UNREADABLE DUE DUE": _UNDECODABLE,
    "UNREADABLE PAUSED PAUSED": _UNDECODABLE,
}


def names(calls: Set[Call]) -> set[str]:
    """Return the names of entries: an event, and the states before and after it."""
    return {" ".join(each.name for each in call) for call in calls}


@contextlib.contextmanager
def replaced(bounds: Bounds, calls: set[Call]) -> Iterator[None]:
    """Limit the machine's bursts, and add its calls to ``calls``."""
    module: Any = machine
    before = module.BURST, module.TABLE
    module.BURST = bounds.burst or module.BURST
    module.TABLE = {
        event: {
            state: attrs.evolve(
                entry, next_states=_Recorder(event, state, entry.next_states, calls)
            )
            for state, entry in row.items()
        }
        for event, row in TABLE.items()
    }
    try:
        yield
    finally:
        module.BURST, module.TABLE = before


@attrs.frozen
class _Recorder:
    """The states that may follow, which records those that do."""

    event: ReaderEvent
    before: State
    expected: Container[State]
    calls: set[Call]

    def __contains__(self, after: object) -> bool:
        assert isinstance(after, State)
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
        if field.init and getattr(bounds, field.name) != field.default
    ]
    return f"Bounds({', '.join(changed)})"
