"""Counts the messages of many instances of the extension on a simulated bus."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

from tests.handlers.extended import Bus, ExtensionProcess, Published

#: The simulated time between two starts, in s.
BETWEEN_STARTS = 0.25
#: The ends of the periods in which messages are counted, in s after the last start.
PERIODS = (1, 45, 165, 400, 600)


def count_messages(
    count: int,
) -> tuple[Counter[str], dict[tuple[int, int], dict[str, float]]]:
    """Start instances one after another, a fifth of which write; then let them idle.

    :return: the messages that the last start causes, by kind, and those that each
        instance receives in 1 s, by period and kind.
    """
    bus = Bus()
    for number in range(count):
        bus.advance(BETWEEN_STARTS)
        bus.seen.clear()
        writes = ["events"] if number % 5 == 0 else []
        ExtensionProcess(bus, f"instance{number}", writes=writes)
    last = bus.processes[-1].name
    bus.advance(1)
    started = Counter(
        _kind(each) for each in bus.seen if last in (each.sender, each.to)
    )
    periods = list(pairwise(PERIODS))
    return started, {period: _received(bus, period) for period in periods}


def _received(bus: Bus, period: tuple[int, int]) -> dict[str, float]:
    """Return how many messages of each kind an instance receives in 1 s."""
    since, until = period
    count = len(bus.processes)
    bus.seen.clear()
    bus.advance(until - since)
    received: Counter[str] = Counter()
    for each in bus.seen:
        received[_kind(each)] += 1 if each.to else count - 1
    return {
        kind: number / count / (until - since)
        for kind, number in received.most_common()
    }


def _kind(message: Published) -> str:
    if not message.is_extension:
        return message.payload.split()[0].decode()
    kind: str = json.loads(message.payload)["type"]
    return f"{kind} (to one)" if message.to else kind
