"""Breadth-first search of the states of a writer's world, and of the way to rest.

Theory of operation: of each state, only a digest, its predecessor and the event between
them are stored, so that a shortest sequence of events can be printed as a test. When
all states were expanded, each must reach rest by events that are not faults.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from hashlib import blake2b

import attrs

from scripts.tools.explore.writer_world import FAULT_EVENTS, Bounds, Event, World

_NONE = 0xFFFFFFFF


@attrs.define
class Result:
    """The result of a search.

    :ivar is_complete: whether all states were expanded.
    :ivar broken: the promise that was broken; empty if none was.
    :ivar events: the shortest sequence of events that breaks it.
    """

    bounds: Bounds
    states: int = 0
    transitions: int = 0
    depth: int = 0
    rest: int = 0
    seconds: float = 0.0
    is_complete: bool = False
    broken: str = ""
    events: list[Event] = attrs.field(factory=list)

    def explain(self) -> str:
        """Return the shortest sequence as a test."""
        changed = ", ".join(
            f"{field.name}={getattr(self.bounds, field.name)}"
            for field in attrs.fields(Bounds)
            if getattr(self.bounds, field.name) != field.default
        )
        lines = [
            f"# {self.broken}",
            "def test_explored(self) -> None:",
            f"    world = World(Bounds({changed}))",
        ]
        lines += [f"    world.apply({event!r})" for event in self.events]
        return "\n".join(lines)


def search(bounds: Bounds, seconds: float = 3600.0) -> Result:
    """Search until a promise is broken, all states were expanded, or time is up.

    :param seconds: the limit, of processor time.
    """
    result = Result(bounds)
    started = time.process_time()
    first = World(bounds)
    numbers = {_digest(first): 0}
    waiting = deque([first])
    parents, depths = array("I", [_NONE]), array("H", [0])
    by: list[Event] = [()]
    at_rest = bytearray()
    backwards: list[tuple[int, int]] = []
    number = 0
    while waiting:
        if number % 256 == 0 and time.process_time() - started > seconds:
            break
        world = waiting.popleft()
        at_rest.append(world.is_at_rest())
        event: Event = ()
        events = world.events()
        while True:
            after = world.copy()
            try:
                event = next(events, ())
                if not event:
                    break
                result.transitions += 1
                after.apply(event)
            except Exception as error:  # noqa: BLE001 -- any of them is a finding
                result.broken = f"{type(error).__name__}: {error}"
                result.events = [*_sequence(number, parents, by), event]
                result.seconds = time.process_time() - started
                result.states = len(parents)
                return result
            digest = _digest(after)
            found = numbers.get(digest)
            if found is None:
                found = numbers[digest] = len(parents)
                parents.append(number)
                depths.append(depths[number] + 1)
                by.append(event)
                waiting.append(after)
            if event[0] not in FAULT_EVENTS and found != number:
                backwards.append((found, number))
        number += 1
    result.states, result.depth = len(parents), max(depths)
    result.is_complete = not waiting
    if result.is_complete:
        _check_rest(result, at_rest, backwards, parents, by)
    result.seconds = time.process_time() - started
    return result


def _check_rest(
    result: Result,
    at_rest: bytearray,
    backwards: list[tuple[int, int]],
    parents: array[int],
    by: list[Event],
) -> None:
    """Find a state from which rest cannot be reached without a fault."""
    backwards.sort()
    starts = array("I", [0]) * (len(parents) + 1)
    for after, _ in backwards:
        starts[after + 1] += 1
    for index in range(len(parents)):
        starts[index + 1] += starts[index]
    reached = bytearray(at_rest)
    stack = [number for number, rests in enumerate(at_rest) if rests]
    result.rest = len(stack)
    while stack:
        number = stack.pop()
        for _, before in backwards[starts[number] : starts[number + 1]]:
            if not reached[before]:
                reached[before] = 1
                stack.append(before)
    stuck = reached.find(0)
    if stuck >= 0:
        result.broken = "never at rest"
        result.events = _sequence(stuck, parents, by)


def _digest(world: World) -> bytes:
    return blake2b(repr(world.key()).encode(), digest_size=12).digest()


def _sequence(number: int, parents: array[int], by: list[Event]) -> list[Event]:
    events = []
    while parents[number] != _NONE:
        events.append(by[number])
        number = parents[number]
    return events[::-1]
