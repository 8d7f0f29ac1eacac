"""Counts the messages of many instances of the extension on a simulated bus."""

from __future__ import annotations

import json
from collections import Counter

from tests.handlers.extended import Bus, ExtensionProcess, Published

#: The simulated time between two starts, and that after which messages are counted, in
#: s.
BETWEEN_STARTS = 0.25
SETTLING = 400
#: For how long messages are counted, in s.
COUNTED = 600


def count_messages(count: int) -> tuple[Counter[str], Counter[str]]:
    """Start instances one after another, a fifth of which write; then let them idle.

    :return: the messages that the last start causes, by kind, and those that each
        instance receives in 1 s afterwards.
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
    bus.advance(SETTLING)
    bus.seen.clear()
    bus.advance(COUNTED)
    received: Counter[str] = Counter()
    for each in bus.seen:
        received[_kind(each)] += 1 if each.to else count - 1
    for kind in received:
        received[kind] /= count * COUNTED  # type: ignore[assignment]
    return started, received


def _kind(message: Published) -> str:
    if not message.is_extension:
        return message.payload.split()[0].decode()
    kind: str = json.loads(message.payload)["type"]
    return f"{kind} (to one)" if message.to else kind
