"""The module with which a writing process of ``scripts/scale`` writes rows."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import maybeDeferred
from typing_extensions import override

#: The interval at which the service looks whether it must write, in s.
POLL = 0.25


class RowWriter(Service):
    """Writes rows of one token to each of its streams in turn, while a file exists.

    :param every: the interval of its writes, in s.
    :param batch: the rows of one write.
    """

    def __init__(
        self, host: Any, streams: list[str], every: float, batch: int, go: Path
    ) -> None:
        self._host = host
        self._streams = streams
        self._every = every
        self._batch = batch
        self._go = go
        self._writing: Awaitable[Any] | None = None

    @override
    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._writing = self._host.run_as_background_process("rows", self._write)

    @override
    def stopService(self) -> Awaitable[Any] | None:
        super().stopService()  # type: ignore[no-untyped-call]
        return self._writing

    async def _write(self) -> None:
        clock, streams = self._host.clock, self._host.streams.get_streams()
        for number in count():
            while self.running and not self._go.exists():
                await clock.sleep(POLL)
            if not self.running:
                return
            began = clock.seconds()
            name = self._streams[number % len(self._streams)]
            stream = streams[name]
            row: list[Any] = [f"row {number}"]
            if name == "typing":
                row = [f"!room{number % 100}:example", [f"@user{number}:example"]]
            rows = [stream.description.codec.from_json(row)] * self._batch
            try:
                await maybeDeferred(stream.write, rows)
            except Exception as error:  # noqa: BLE001 -- a server that is restarted
                self._host.observer.failure("writing a row", error)
            await clock.sleep(max(0.0, began + self._every - clock.seconds()))


def make_writer(host: Any, config: Mapping[str, Any]) -> RowWriter:
    """Return the service; called by the process that the configuration describes."""
    return RowWriter(
        host, config["streams"], config["every"], config["batch"], Path(config["go"])
    )
