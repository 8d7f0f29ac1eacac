"""The base class of the extension's tests."""

from __future__ import annotations

import json
from collections.abc import Callable

from twisted.trial.unittest import SynchronousTestCase

from tests.handlers.extended import Bus, ExtensionProcess, Published


def rows_of(*tokens: int) -> Callable[[Published], bool]:
    """Return a ``Bus.drop`` that loses the RDATA with these tokens."""
    heads = tuple(f"RDATA events w {token} ".encode() for token in tokens)
    return lambda message: message.payload.startswith(heads)


def row(token: int, writer: str = "w") -> tuple[str, int, list[str]]:
    return (writer, token, [f"row {token}"])


class ExtensionTests(SynchronousTestCase):
    """A writer ``w`` and a reader ``r`` on one bus; tests may add more."""

    def setUp(self) -> None:
        self.bus = Bus()
        self.reader = ExtensionProcess(self.bus, "r")
        self.writer = ExtensionProcess(self.bus, "w", writes=["events", "typing"])
        # A writer answers requests for positions at most twice a second.
        self.bus.advance(1)

    def write(self, *tokens: int) -> None:
        for token in tokens:
            self.writer.write(token, f"row {token}")
            self.bus.deliver()

    def messages(self, kind: str) -> list[Published]:
        """Return the messages of one type."""
        return [
            message
            for message in self.bus.seen
            if message.is_extension and json.loads(message.payload)["type"] == kind
        ]

    def inject(self, **fields: object) -> None:
        """Deliver a message of the extension in the name of ``w``."""
        message: dict[str, object] = {
            "v": 1,
            "type": "heartbeat",
            "instance": "w",
            "epoch": "w-epoch",
            "time": 0,
            "positions": {},
        }
        message.update(fields)
        self.bus.publish(Published("w", True, json.dumps(message).encode()))
        self.bus.deliver()
